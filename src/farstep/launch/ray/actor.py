"""What Ray runs on a node: the agent, in a process of Ray's own."""

from __future__ import annotations

import json
import logging
import socket
from collections import deque
from typing import Any

from farstep.launch.daemon.node_daemon import NodeDaemon, Unreachable

_TAIL_LINES = 50


class Agent:
    """The actor. Workers end with its process, as they do with any agent's, through a pipe."""

    def __init__(self) -> None:
        self._said: deque[str] = deque(maxlen=_TAIL_LINES)
        said = _Lines(self._said)
        said.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logging.getLogger("farstep").addHandler(said)
        logging.getLogger("farstep").setLevel(logging.INFO)

    def where(self) -> str:
        return socket.gethostname()

    def run(self, bootstrap: str) -> str:
        """Until the head says so, or is gone; why it ended. Keys come with this call, which goes from process to
        process: arguments of the constructor would be kept by Ray."""
        import ray

        contents: dict[str, Any] = json.loads(bootstrap)
        try:
            NodeDaemon(contents, f"Ray node {ray.get_runtime_context().get_node_id()[:12]}").run()
        except Unreachable as error:
            return str(error)
        return self._said[-1] if self._said else ""

    def tail(self) -> str:
        """The end of what the agent said."""
        return "\n".join(self._said)


class _Lines(logging.Handler):
    def __init__(self, lines: deque[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))
