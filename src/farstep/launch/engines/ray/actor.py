"""The Ray actor that runs a node daemon."""

from __future__ import annotations

import json
import logging
import socket
from collections import deque
from typing import Any

from farstep.launch.daemon.node_daemon import NodeDaemon, Unreachable

_TAIL_LINES = 50


class DaemonActor:
    """Runs a node daemon. As with every daemon, its workers end with the process."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES)
        handler = _LineHandler(self._lines)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logging.getLogger("farstep").addHandler(handler)
        logging.getLogger("farstep").setLevel(logging.INFO)

    def host(self) -> str:
        return socket.gethostname()

    def run(self, bootstrap: str) -> str:
        """Run the daemon until it ends. Return the reason.

        The keys are arguments of this call, because Ray sends them directly to the actor's process. Ray would store
        arguments of the constructor.
        """
        import ray

        contents: dict[str, Any] = json.loads(bootstrap)
        try:
            NodeDaemon(contents, f"Ray node {ray.get_runtime_context().get_node_id()[:12]}").run()
        except Unreachable as error:
            return str(error)
        return self._lines[-1] if self._lines else ""

    def tail(self) -> str:
        """The last lines of the daemon's log."""
        return "\n".join(self._lines)


class _LineHandler(logging.Handler):
    def __init__(self, lines: deque[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))
