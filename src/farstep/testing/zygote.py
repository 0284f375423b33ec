"""A zygote that all runs of a process share, so that each run starts in milliseconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from farstep.launch.daemon.process import ProcessStarter

_IMPORT_S = 60.0


@contextlib.contextmanager
def shared_zygote(modules: Sequence[str] = ()) -> Iterator[None]:
    """Context manager: the zygotes of all runs of this process are forks of one zygote.

    Environment variables that libraries read when they are imported take effect only if they were set
    before the context was entered.

    Args:
        modules: Modules to import.
    """
    before = ProcessStarter.shared
    with contextlib.ExitStack() as opened:
        starter = ProcessStarter(1, modules=modules)
        opened.callback(starter.close)
        zygote = starter.start_zygote()
        opened.callback(zygote.close)
        deadline = time.monotonic() + _IMPORT_S
        while not zygote.is_ready and time.monotonic() < deadline:
            time.sleep(0.02)
        ProcessStarter.shared = zygote
        try:
            yield
        finally:
            ProcessStarter.shared = before
