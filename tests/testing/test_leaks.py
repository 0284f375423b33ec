"""The leak check finds processes and threads that a test leaves behind."""

from __future__ import annotations

import subprocess
import threading

from farstep.testing.leaks import snapshot


def processes() -> set[str]:
    return {thing for thing in snapshot() if thing.startswith("process ")}


def test_child_and_grandchild_are_seen_until_they_end() -> None:
    before = processes()
    script = "sleep 1000 & echo $!; read line; kill $!; wait"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(["sh", "-c", script], **pipes) as shell:  # type: ignore[call-overload]
        assert shell.stdout is not None
        grandchild = int(shell.stdout.readline())
        seen = [{thing.split()[1] for thing in processes() - before} for _ in range(3)]
        shell.communicate("\n")
    assert seen == [{str(shell.pid), str(grandchild)}] * 3
    assert not processes() - before


def test_a_second_thread_of_the_same_name_is_seen() -> None:
    end = threading.Event()
    threads = [threading.Thread(target=end.wait, name="twin", daemon=True) for _ in range(2)]
    try:
        threads[0].start()
        before = snapshot()
        threads[1].start()
        assert any("twin" in thing for thing in snapshot() - before)
    finally:
        end.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
