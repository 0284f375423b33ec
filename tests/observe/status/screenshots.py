"""Takes the pictures of the status page in docs: `python -m tests.observe.status.screenshots docs/images`.

A real PPO run is shown while it trains, after one of its workers was killed, and from its folder when it has ended.
1,000 workers are simulated. Takes about two minutes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from farstep.cli import main
from farstep.observe.run_folder import RunFolder
from farstep.observe.status import FolderSource, PageServer
from farstep.observe.status.page_server import Source
from tests.cluster.checks import worker_pids
from tests.observe.status.browser import DEADLINE_S, PHONE, WIDE, Browser, browser
from tests.observe.status.simulated_run import SimulatedRun

TRAIN = (
    "train ppo --env CartPole-v1 --num-envs 16 --workers 4 --seed 1 --kl-threshold 0.01 --total-steps 60000 "
    "--eval-every 4096 --checkpoint-every 8192 --name run"
)
TOP = (1160, 1005)
"""Size of the README's picture, which ends below the first charts."""
SLOW_WORKERS = {123: 4.0, 456: 35.0, 780: 55.0}
"""Steps per second of simulated workers; the others have 100."""


def take(
    window: Browser, url: str, file: Path, size: tuple[int, int] = WIDE, *, dark: bool = False, event: str = ""
) -> None:
    """Take one picture, once the latest event that is shown as bad has this text."""
    window.open(url, size, dark=dark)
    window.wait(lambda: event in window.text("#events .bad"))
    assert window.driver.save_screenshot(str(file)), file
    assert window.violations() == [] and window.errors() == [], file


def take_of(window: Browser, source: Source, file: Path) -> None:
    """Take one picture of a page that only shows these data."""
    server = PageServer(source)
    try:
        take(window, server.url, file)
    finally:
        server.close()


def take_of_running_run(window: Browser, images: Path) -> None:
    """Take pictures of the run when 40 % of it is done; then kill a worker and take another."""
    file, deadline = Path("runs/run/status"), time.monotonic() + DEADLINE_S
    while not file.exists():
        assert time.monotonic() < deadline, "the run has no page"
        time.sleep(0.1)
    url = file.read_text()
    window.open(url)
    for tenths in range(1, 5):  # each has a deadline of its own
        window.wait(lambda: window.script("return 10 * document.getElementById('bar').value") >= tenths)
    take(window, url, images / "status.png")
    take(window, url, images / "status-dark.png", dark=True)
    take(window, url, images / "status-phone.png", PHONE)
    take(window, url, images / "status-top.png", TOP)
    os.kill(worker_pids()[1], signal.SIGKILL)
    take(window, url, images / "status-death.png", event="lost")


def take_all(images: Path) -> None:
    """Take all pictures."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        browser() as window,
        ThreadPoolExecutor(1) as pool,
    ):
        taking = pool.submit(take_of_running_run, window, images)
        assert main(TRAIN.split()) == 0
        taking.result(DEADLINE_S)
        take_of(window, FolderSource(RunFolder.open("runs/run")), images / "status-finished.png")
        many = SimulatedRun(1_000, nodes=20)
        for worker, rate in SLOW_WORKERS.items():
            many.data["workers"]["rate"][worker] = rate
        take_of(window, many, images / "status-1000.png")


if __name__ == "__main__":
    take_all(Path(sys.argv[1]).resolve())
