"""The status page as a whole in a real browser: a simulated run and a finished one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from farstep.cli import main
from farstep.event import Event
from farstep.observe.event_files import EventFile
from farstep.observe.loggers import JsonlLogger
from farstep.observe.run_folder import RunFolder
from farstep.observe.status import FolderSource, PageServer
from tests.observe.status.browser import PHONE, QUIET, WIDE, Browser, programs
from tests.observe.status.in_browser.conftest import Show
from tests.observe.status.simulated_run import SimulatedRun

pytestmark = pytest.mark.slow  # real processes, or learning


@pytest.mark.parametrize(
    ("workers", "size", "dark"),
    [(1, WIDE, True), (3, WIDE, False), (3, PHONE, True), (1_000, WIDE, True), (1_000, PHONE, False)],
)
def test_page_has_no_errors_and_is_accessible(
    window: Browser, show: Show, workers: int, size: tuple[int, int], dark: bool
) -> None:
    show(SimulatedRun(workers, hosts=min(workers, 20)), size, dark=dark)
    assert window.script("return document.querySelectorAll('#cluster .cell').length") == workers
    assert window.script("return document.documentElement.scrollWidth") <= size[0]  # a phone widens innerWidth
    tops = "return [...document.querySelectorAll('main > section')].map((each) => each.getBoundingClientRect().top)"
    assert window.script(tops) == sorted(window.script(tops))  # the diagnosis is on top
    assert "recent steps per second" in window.text("#numbers")
    assert f" of {workers:,}" in window.text("#numbers")
    assert "2 held, 1 released between rollouts, 3 parked" in window.text("#slots")
    assert "Coordinator default has granted 3 of 6 slots." in window.text("#slots")
    assert window.violations() == []
    window.script("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert window.violations() == []
    assert window.errors() == []


def test_every_part_of_the_page_is_filled(window: Browser, show: Show) -> None:
    shown = {
        "#progress-text": ["5,000 of 10,000 steps, about 1 min 1 s left"],
        "#diagnosis": [
            "Problem: Worker 3 is slow.",
            "Look at it, or use fewer workers (--workers, on a cluster --workers-per-node).",
            "a 0.5",
        ],
        "#times": ["workers", "environments", "90 %", "waiting for the learner", "10 %", "learner", "updates", "100 %"],
        "#lags": ["0 (newest weights)", "50 %", "1", "40 %", "16 to 31", "10 %"],
        "#weights": [
            "Workers pull new weights when their KL divergence from the learner exceeds 0.05.",
            "3 pulls of 7 possible ones; 3.0 kB sent",
            "4.0 kB not sent, because workers skipped versions",
        ],
        "#buffer": ["filled", "10 %", "10 of 100 rows, 4.0 kB", "2 rows sampled per row inserted"],
    }
    show(SimulatedRun(3, hosts=1))
    assert {part: [line for line in window.text(part).split("\n") if line] for part in shown} == shown
    curves = "return document.querySelectorAll(`${arguments[0]} polyline`).length"
    assert [window.script(curves, chart) for chart in ("#returns", "#rates")] == [2, 1]
    texts = "return [...document.querySelectorAll(`${arguments[0]} text`)].map((each) => each.textContent)"
    assert window.script(texts, "#returns") == ["1", "2", "3", "0 steps", "1 steps"]
    assert window.script(texts, "#rates") == ["0", "1", "2", "0 s", "1 s"]
    window.driver.find_element("css selector", "main > section:last-child summary").click()
    assert window.text("#metrics").split() == ["env/return_mean", "2"]


def test_page_shows_the_run_before_its_server_sends_anything(window: Browser) -> None:
    """As a screenshot of a browser without a window does."""
    server = PageServer(SimulatedRun(3, hosts=1))
    window.driver.execute_cdp_cmd("Network.enable", {})
    window.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/events*"]})
    try:
        window.driver.get(server.url)
        assert window.text("#title") == "ppo on Far-v0" and "5,000 of 10,000 steps" in window.text("#progress-text")
        assert "Worker 3 is slow." in window.text("#diagnosis") and "worker 3" in window.text("#events")
    finally:
        window.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
        server.close()


def test_page_that_is_not_live_can_be_photographed(tmp_path: Path) -> None:
    """With a budget of virtual time, Chromium waits for all connections to end."""
    file = tmp_path / "page.png"
    _, chromium = programs()
    server = PageServer(SimulatedRun(8, 2))
    command = [chromium, *QUIET, "--virtual-time-budget=2000", f"--screenshot={file}", f"{server.url}&live=0"]
    environment = os.environ | {"HOME": str(tmp_path)}
    try:
        subprocess.run(command, env=environment, capture_output=True, timeout=120, check=True)
    finally:
        server.close()
    assert file.read_bytes().startswith(b"\x89PNG")


def test_run_that_reached_its_target_shows_a_full_bar(window: Browser, show: Show) -> None:
    run = SimulatedRun(3, hosts=1)
    run.data["progress"] |= {"target_return": 475.5}
    show(run)
    assert window.text("#progress-text") == "target return 475.5 reached after 5,000 of 10,000 steps"
    assert window.script("return document.getElementById('bar').value") == 1


def test_events_and_colors_are_reached_by_keyboard(window: Browser, show: Show) -> None:
    show(SimulatedRun(30, hosts=1))
    events = window.driver.find_element("css selector", "[role=region][aria-label='Latest events']")
    events.send_keys(Keys.END)
    window.wait(lambda: window.script("return arguments[0].scrollTop", events) > 0)
    assert outline_of(window, events) == "3px"
    color = window.driver.find_element("css selector", "#color")
    color.send_keys(Keys.ARROW_DOWN)
    window.wait(lambda: "version lag" in window.text("#color-text"))
    assert outline_of(window, color) == "3px"


def outline_of(window: Browser, element: Any) -> str:
    return str(window.script("return getComputedStyle(arguments[0]).outlineWidth", element))


def test_finished_run_is_shown_from_its_folder(window: Browser, show: Show, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run", {"algorithm": "ppo", "run": {"env": "Far-v0", "total_steps": 30}})
    logger = JsonlLogger(folder.metrics_file, None)
    for step in (10, 20, 30):
        logger.log(
            step, {"env/return_mean": step / 10, "seconds": step, "rate/steps_per_second": 1.0, "time/collect": 2.0}
        )
    logger.close()
    events = EventFile(folder.events_file)
    events.write(Event(time=1.0, kind="lost", text="worker 0 was lost", worker=0))
    events.write(Event(time=2.0, kind="evaluated", text="evaluated version 5"))
    events.close()
    show(FolderSource(folder))
    assert window.text("#title") == "ppo on Far-v0" and window.text("#state") == "from the files of the run folder"
    assert "worker 0 was lost" in window.text("#events")
    assert "version 5" in window.text("#events") and window.text("#events").count("evaluated") == 1
    assert "30 of 30 steps" in window.text("#progress-text")
    assert "mean steps per second" in window.text("#numbers") and "recent" not in window.text("#numbers")
    assert [line for line in window.text("#times").split("\n") if line] == ["learner", "waiting for rows", "100 %"]
    assert window.script("return document.querySelectorAll('#returns polyline').length") == 1
    assert window.violations() == [] and window.errors() == []
    file = tmp_path / "page.html"
    assert main(["status", str(folder.path), "--html", str(file)]) == 0
    window.open(file.as_uri())
    assert window.text("#title") == "ppo on Far-v0" and "worker 0 was lost" in window.text("#events")
    assert window.violations() == [] and window.errors() == []


def test_options_in_a_remedy_are_not_broken_into_lines(window: Browser, show: Show) -> None:
    show(SimulatedRun(3, hosts=1), PHONE)
    options = "[...document.querySelectorAll('#diagnosis code')]"
    lines = window.script(f"return {options}.map((each) => [each.textContent, each.getClientRects().length])")
    assert lines == [["--workers", 1], ["--workers-per-node", 1]]


def test_open_traceback_stays_open_when_an_event_follows(window: Browser, show: Show) -> None:
    run = SimulatedRun(3, hosts=1)
    show(run)
    window.driver.find_element("css selector", "#events summary").click()
    run.data["events"] = [run.data["events"][0] | {"time": 61.0, "text": "later", "traceback": ""}, *run.data["events"]]
    window.wait(lambda: "later" in window.text("#events"))
    assert window.script("return document.querySelectorAll('#events details[open]').length") == 1
