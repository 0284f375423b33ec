"""Takes the pictures of the status page in docs: `python -m tests.observe.status.screenshots docs/images`.

A real PPO run is shown while it trains, while a killed worker is replaced, and from its folder when it has ended.
1,000 workers are simulated. Takes about two minutes. On a busy machine it may fail, because the
replacement of the killed worker must be stopped before it has joined.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image

from farstep.cli import main
from farstep.observe.run_folder import RunFolder
from farstep.observe.status import FolderSource, PageServer
from farstep.observe.status.page_server import Source
from tests.cluster.checks import worker_pids
from tests.observe.status.browser import DEADLINE_S, WIDE, Browser, browser
from tests.observe.status.simulated_run import SimulatedRun

TRAIN = (
    "train ppo --env CartPole-v1 --num-envs 16 --workers 4 --seed 1 --kl-threshold 0.05 --total-steps 60000 "
    "--eval-every 4096 --checkpoint-every 8192 --name run"
)
TALL = (390, 2000)
"""Size of the picture of a phone, which is cut below the first chart."""
NARROW = (1160, 1600)
"""Size of the README's picture, which is cut below the first charts."""
FIRST_CHART = "section:has(#returns)"
MARGIN = 12
"""Pixels below the last element of a picture."""
SLOW_WORKERS = {123: 4.0, 456: 35.0, 780: 55.0}
"""Steps per second of simulated workers; the others have 100."""
STATES = dict.fromkeys(range(850, 900), "starting") | dict.fromkeys(range(900, 950), "parked") | {321: "lost"}
"""States of simulated workers; the others roll."""


def take(
    window: Browser,
    url: str,
    file: Path,
    size: tuple[int, int] = WIDE,
    *,
    dark: bool = False,
    shown: str = "main",
    last: str = "main",
) -> None:
    """Save a picture of the page from its top to the element `last`, after the element `shown` has text."""
    window.driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    window.open(url, size, dark=dark)
    window.wait(lambda: window.text(shown))
    bottom = window.script("return document.querySelector(arguments[0]).getBoundingClientRect().bottom", last)
    with Image.open(io.BytesIO(window.driver.get_screenshot_as_png())) as taken:
        cut = taken.convert("RGB").crop((0, 0, taken.width, min(taken.height, round(bottom) + MARGIN)))
        cut.quantize(method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(file, optimize=True)
    assert window.violations() == [] and window.errors() == [], file


def take_of(window: Browser, source: Source, file: Path, last: str = "main") -> None:
    """Take one picture of a page that only shows these data."""
    server = PageServer(source)
    try:
        take(window, server.url, file, last=last)
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
    take(window, url, images / "status-phone.png", TALL, last=FIRST_CHART)
    take(window, url, images / "status-top.png", NARROW, last=FIRST_CHART)
    take_of_death(window, url, images / "status-death.png")


def take_of_death(window: Browser, url: str, file: Path) -> None:
    """Kill a worker and take a picture while its replacement starts, which is paused meanwhile."""
    before, deadline = worker_pids(), time.monotonic() + DEADLINE_S
    os.kill(before[1], signal.SIGKILL)
    while not (new := set(worker_pids()) - set(before)):
        assert time.monotonic() < deadline, "the worker was not replaced"
        time.sleep(0.001)
    (replacement,) = new
    os.kill(replacement, signal.SIGSTOP)
    try:
        take(window, url, file, shown="#cluster .starting")
    finally:
        os.kill(replacement, signal.SIGCONT)


def many_workers() -> SimulatedRun:
    """A run with 1,000 workers, most of which roll, and two acting servers."""
    run = SimulatedRun(1_000, hosts=20)
    run.data["hosts"].remove("second-gpu")
    workers = run.data["workers"]
    workers["state"] = [STATES.get(worker, "alive") for worker in range(1_000)]
    workers["rate"] = [SLOW_WORKERS.get(worker, 0.0 if worker in STATES else 100.0) for worker in range(1_000)]
    run.data |= {"rate": sum(workers["rate"]), "diagnoses": []}
    for server in run.data["acting"]:
        server |= {"rate": run.data["rate"] / 2, "batch_size": 64.0}
    return run


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
        take_of(window, many_workers(), images / "status-1000.png", "#cluster-section")


if __name__ == "__main__":
    take_all(Path(sys.argv[1]).resolve())
