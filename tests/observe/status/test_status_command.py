"""`farstep status`, and the page of a run that is opened and closed by several threads."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import farstep
from farstep.cli import main
from farstep.cluster_env import status_page_of
from farstep.errors import ClosedError, RunError
from farstep.event import Event, EventKind
from farstep.observe.event_files import EventFile
from farstep.observe.loggers import JsonlLogger
from farstep.observe.run_folder import RunFolder
from farstep.observe.status import FolderSource, PageServer
from farstep.testing import CountingEnv
from tests.observe.status.test_page_server import DEADLINE_S, CountingSource

pytestmark = pytest.mark.slow  # real processes

DESCRIBED = {"type": "factory", "env_name": CountingEnv, "envs_per_node": 2}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with one update, one of whose metrics was not finite."""
    found = RunFolder.create(tmp_path, "run", {"algorithm": "ppo", "run": {"env": "Far-v0", "total_steps": 30}})
    logger = JsonlLogger(found.metrics_file, None)
    logger.log(10, {"env/return_mean": float("nan"), "seconds": 1.0, "time/collect": float("inf")})
    logger.close()
    return found


def test_page_of_a_running_run_is_found_without_a_proxy(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server = PageServer(CountingSource())
    try:
        folder.status_file.write_text(server.url)
        assert main(["status", str(folder.path)]) == 0
        assert server.url in capsys.readouterr().out
    finally:
        server.close()


@pytest.mark.parametrize("stale", ["http://127.0.0.1:9/?token=x", "http://evil.example/", "x"])
def test_folder_is_served_until_a_signal(folder: RunFolder, stale: str) -> None:
    folder.status_file.write_text(stale)
    command = [
        sys.executable,
        "-c",
        "import sys; from farstep.cli import main; sys.exit(main())",
        "status",
        str(folder.path),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert re.match(r"http://127.0.0.1:\d+/\?token=", process.stdout.readline())
            assert "files of the folder" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


def test_page_is_written_to_a_file(folder: RunFolder, tmp_path: Path) -> None:
    assert main(["status", str(folder.path), "--html", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert '"title":"ppo on Far-v0"' in text and "NaN" not in text


def test_page_says_that_a_run_reached_its_target(tmp_path: Path) -> None:
    run = {"env": "Far-v0", "total_steps": 1000, "target_return": 5.0}
    folder = RunFolder.create(tmp_path, "run", {"algorithm": "ppo", "run": run})
    logger = JsonlLogger(folder.metrics_file, None)
    for step, mean in ((60, 4.0), (70, 5.5)):
        logger.log(step, {"env/return_mean": mean, "env/episodes": 100 + step})
        progress = {"steps": step, "total_steps": 1000, "target_return": 5.0 if mean > 5 else None}
        assert FolderSource(folder).read()["progress"] == progress
    logger.close()
    with farstep.ClusterEnv(DESCRIBED, farstep.InProcessConfig()) as env:
        source = status_page_of(env).source
        source.describe("ppo", run, total_steps=1000)
        source.log(70, {"env/return_mean": 5.5, "env/episodes": 170})
        assert source.read()["progress"]["target_return"] == 5.0


def test_evaluations_are_shown_where_they_started(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run", {"run": {"total_steps": 100}})
    logger, metrics = JsonlLogger(folder.metrics_file), {"eval/return_mean": 7.0, "eval/step": 40}
    logger.log(60, metrics)
    logger.close()
    with farstep.ClusterEnv(DESCRIBED, farstep.InProcessConfig()) as env:
        source = status_page_of(env).source
        source.log(60, metrics)
        assert source.read()["series"]["evaluation"] == [[40, 7.0]]
    assert FolderSource(folder).read()["series"]["evaluation"] == [[40, 7.0]]


@pytest.mark.parametrize(
    ("texts", "ended"),
    [
        ([], "killed"),
        (["SIGINT: stopping after this update, with a checkpoint"], "stopped by SIGINT"),
        (["the run failed: no memory", "SIGTERM: stopping after this update"], "stopped by SIGTERM"),
        (["SIGINT: stopping after this update", "the run failed: no memory"], "failed"),
        (["the run failed: no memory", "resumed from checkpoint 000001 at step 10"], "killed"),
    ],
)
def test_page_from_files_says_how_the_run_ended_and_how_to_continue(
    folder: RunFolder, texts: list[str], ended: str
) -> None:
    assert FolderSource(folder).read()["state"] == "from the files of the run folder"
    with folder.lock():
        assert FolderSource(folder).read()["state"] == "running; from the files of the run folder"
    events = EventFile(folder.events_file)
    for number, text in enumerate(texts, 1):
        kind: EventKind = "loaded" if text.startswith("resumed") else "warned"
        events.write(Event(time=number, kind=kind, text=text))
    events.close()
    assert FolderSource(folder).read()["state"] == f"{ended}, without a checkpoint"
    assert [each["text"] for each in FolderSource(folder).read()["diagnoses"]] == texts[1:] * (ended == "failed")
    (folder.checkpoints / "000001").mkdir()
    assert FolderSource(folder).read()["state"] == f"{ended}; continue with: farstep train ppo --resume {folder.path}"
    logger = JsonlLogger(folder.metrics_file, 10)
    logger.log(30, {"seconds": 2.0})
    logger.close()
    assert FolderSource(folder).read()["state"] == "ended"


def test_closed_run_starts_no_page() -> None:
    env = farstep.ClusterEnv(DESCRIBED, farstep.InProcessConfig())
    env.launch()
    env.close()
    with pytest.raises(ClosedError):
        _ = env.status_url


def test_run_without_a_free_port_has_no_page_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leak check fails if the thread that reads the counters stays."""

    def refuse(self: PageServer, source: object) -> None:
        raise RunError("no port")

    monkeypatch.setattr(PageServer, "__init__", refuse)
    with farstep.ClusterEnv(DESCRIBED, farstep.InProcessConfig()) as env, pytest.raises(RunError):
        _ = env.status_url


def test_page_that_is_opened_while_the_run_closes_does_not_stay() -> None:
    """The leak check fails if its threads or its socket stay."""
    for _ in range(5):
        env = farstep.ClusterEnv(DESCRIBED, farstep.InProcessConfig())
        env.launch()

        def open_page(env: farstep.ClusterEnv = env) -> None:
            try:
                _ = env.status_url
            except ClosedError:
                pass

        opening = threading.Thread(target=open_page)
        opening.start()
        env.close()
        opening.join(DEADLINE_S)


def test_interrupt_while_the_page_closes_still_ends_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    env = farstep.ClusterEnv(DESCRIBED, farstep.LocalConfig(workers_per_node=1))
    env.launch()
    _ = env.status_url
    close = PageServer.close

    def interrupted(self: PageServer) -> None:
        close(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        env.close()
    assert repr(env).endswith("closed>")


@pytest.mark.parametrize("port", ["99999", "-1"])
def test_impossible_port_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "runs/NAME", "--port", port]) != 0
    assert f"--port is {port}; expected 1 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["runs/NAME"], ["--html", "page.html"], ["--port", "8000"]])
def test_dashboard_takes_no_run(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--grafana", str(tmp_path / "dashboard.json"), *more]) != 0
    assert "--grafana is for all runs" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
