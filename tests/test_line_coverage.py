"""The lines of a package that run are counted in every process, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.checks import cluster
from tests.line_coverage import ROOT, Statement, not_run, recording, remove_leftovers, report

SOURCE = '''"""A package."""
from __future__ import annotations
import os, signal
from farstep.testing import CountingEnv
TYPE_CHECKING = False
if TYPE_CHECKING:
    import not_counted
def make():
    """Runs in a worker."""
    return CountingEnv()
def killed():
    os.kill(os.getpid(), signal.SIGKILL)
def exits():
    try:
        raise ValueError
        never_run = 1
    except ValueError as error:
        os._exit(3)
    else:
        never_run = 2
def never(size):
    if size > 1:
        return (
            1
        )
    elif size > 0:
        return 2
    ...
'''
NEVER = [Statement(16, 16), Statement(20, 20), Statement(22, 27)]
NOT_IN_IMPORTS = [Statement(10, 10), Statement(12, 12), Statement(14, 20), NEVER[-1]]


def package(folder: Path) -> Path:
    (folder / "counted").mkdir()
    (folder / "counted" / "__init__.py").write_text(SOURCE)
    return folder / "counted"


def call(folder: Path, code: str) -> int:
    """The exit status of a child that forks, so that the code runs in its child."""
    script = "import counted, os, sys\n"
    script += f"child = os.fork()\nif not child:\n    counted.{code}\n"
    script += "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256)"
    return subprocess.run([sys.executable, "-c", script], cwd=folder, timeout=60).returncode


@pytest.mark.slow
def test_lines_of_workers_and_of_forks_that_were_killed_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    records = tmp_path / "build" / "records"

    def missing() -> list[Statement]:
        return not_run(modules["__init__.py"], records.read_bytes())

    with recording(package(tmp_path), records) as modules:
        assert missing() == [Statement(3, 27)]
        assert call(tmp_path, "killed()") == -signal.SIGKILL % 256
        assert missing() == [line for line in NOT_IN_IMPORTS if line.first != 12]
        assert call(tmp_path, "exits()") == 3
        assert missing() == [Statement(10, 10), *NEVER]
        with cluster("counted:make", envs=1) as env:
            env.launch()
        assert missing() == NEVER
    assert list(report(modules, records.read_bytes()))[1:] == [
        " 68.4%  __init__.py: 16, 20, 22-27",
        " 68.4%  of all 19 statements in 1 modules",
    ]


def test_package_is_unchanged_afterwards(tmp_path: Path) -> None:
    records = tmp_path / "records"
    with recording(package(tmp_path), records):
        pass
    assert call(tmp_path, "exits()") == 3
    assert not any(records.read_bytes())


def test_code_that_cannot_be_recorded_still_runs(tmp_path: Path) -> None:
    records = tmp_path / "records"
    with recording(package(tmp_path), records):
        records.unlink()
        assert call(tmp_path, "exits()") == 3


def test_destructors_run_until_the_interpreter_has_ended(tmp_path: Path) -> None:
    (package(tmp_path) / "cycle.py").write_text("class Cycle:\n    def __del__(self):\n        self.me = None\n")
    script = "from counted.cycle import Cycle; it = Cycle(); it.me = it"
    with recording(tmp_path / "counted", tmp_path / "records"):
        ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=60, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def killed(folder: Path, *signals: signal.Signals) -> Path:
    """The records of a process that got signals while it recorded."""
    (package(folder) / "other.py").write_text("used = True\n")
    script = "import sys; from pathlib import Path; from tests import line_coverage\n"
    script += f"line_coverage.PACKAGE, line_coverage.RECORDS = Path({str(folder)!r}, 'counted'), Path('records')\n"
    script += "line_coverage.main([sys.executable, '-c', 'import time; print(flush=True); time.sleep(60)'])\n"
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=folder, env=path, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        for number in signals:
            os.killpg(process.pid, number)
        process.wait(60)
    return folder / "records"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_that_is_interrupted_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    killed(tmp_path, number, number)
    assert not list(tmp_path.rglob("*.pyc"))


def test_leftovers_of_a_killed_run_are_harmless_and_removed(tmp_path: Path) -> None:
    records = killed(tmp_path, signal.SIGKILL)
    cached = sorted(tmp_path.rglob("*.pyc"))
    assert len(cached) == 2
    cached[0].unlink()  # as when the source of the package has changed
    records.unlink()
    script = "import counted, counted.other; assert counted.other.used"
    assert subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=60).returncode == 0
    records.touch()
    remove_leftovers(tmp_path / "counted", records)
    assert not list(tmp_path.rglob("*.pyc")) and not records.exists()
    remove_leftovers(tmp_path / "counted", records)


def test_leftovers_are_kept_while_their_run_records(tmp_path: Path) -> None:
    with recording(package(tmp_path), tmp_path / "records"):
        remove_leftovers(tmp_path / "counted", tmp_path / "records")
        assert list(tmp_path.rglob("*.pyc"))
