"""The processes of workers."""

from pathlib import Path

from farstep.launch.daemon.process import ProcessStarter


def open_fds() -> set[str]:
    return {fd.name for fd in Path("/proc/self/fd").iterdir()}


def test_starter_without_an_owner_closes_its_pipe() -> None:
    before = open_fds()
    starter = ProcessStarter(1)
    assert len(open_fds()) == len(before) + 2
    del starter  # as when Ctrl-C interrupts a launch before the launcher has it
    assert open_fds() == before
