"""The picture of the cluster in a real browser: hosts, workers, acting servers, and a worker that dies."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

import farstep
from farstep.testing import CountingEnv, TableAgent
from tests.observe.status.browser import DEADLINE_S, Browser
from tests.observe.status.in_browser.conftest import Show
from tests.observe.status.simulated_run import SimulatedRun

pytestmark = pytest.mark.slow  # real processes, or learning


def test_head_is_drawn_above_the_hosts(window: Browser, show: Show) -> None:
    show(SimulatedRun(3, hosts=1))
    lines = ["head", "100,000 steps/s (recent)", "version 7", "learner: updates 100 %"]
    assert window.text("#head").split("\n") == lines
    place = "return document.querySelector(arguments[0]).getBoundingClientRect().toJSON()"
    head, host = (window.script(place, selector) for selector in ("#head", "#cluster .host"))
    assert head["bottom"] <= host["top"]
    assert "mean version lag 0.5" in window.text("#worker-0")
    assert window.script("return document.getElementById('colors').hidden")


def test_acting_servers_are_shown_on_their_hosts(window: Browser, show: Show) -> None:
    show(SimulatedRun(4, hosts=2))
    assert "2 acting servers on 2 hosts act for them: 2,000 rows/s (recent)." in window.text("#cluster-text")
    assert "4 workers on 2 hosts:" in window.text("#cluster-text")
    names = "return [...document.querySelectorAll('#cluster .name')].map((each) => each.textContent)"
    assert window.script(names) == ["node-0", "node-1", "gpu", "second-gpu"]
    beside, alone = (window.text(f"#server-{number}").split("\n") for number in (4, 5))
    assert beside[1:] == ["1,200 rows/s (recent)", "8 rows per call of act", "workers wait 0.25 ms per request"]
    assert alone[0] == "acting server 5" and alone[-1] == "1 restart"
    assert window.script("return document.querySelectorAll('#cluster .grid').length") == 2


def test_workers_without_a_node_are_grouped_under_the_state_of_the_launch(window: Browser, show: Show) -> None:
    run = SimulatedRun(4, hosts=2)
    unconnected_nodes = "1 of 2 nodes not connected yet: SLURM job 7 is pending (Resources)"
    run.data["workers"] |= {"host": ["a", "a", None, None], "unconnected_nodes": unconnected_nodes}
    run.data |= {"acting": [], "hosts": ["a"]}
    show(run)
    assert window.text("#cluster .host:last-child .name") == unconnected_nodes
    assert "4 workers on 1 host:" in window.text("#cluster-text") and "null" not in window.text("#cluster")


def test_queued_workers_wait_for_a_node(window: Browser, show: Show) -> None:
    run = SimulatedRun(4, hosts=1)
    run.data["workers"] |= {
        "state": ["alive", "queued", "queued", "queued"],
        "rate": [0.0] * 4,
        "divergence": [None] * 4,
    }
    run.data["series"] |= {"rate": [[0, 0.0], [1, 0.0]]}
    run.data["metrics"] |= {"workers/restarts": 5.0}  # two of them before the run was resumed
    show(run)
    assert "1 rolling, 3 waiting for a node." in window.text("#cluster-text")
    assert window.text("#worker-1") == "worker 1\nwaiting for a node"
    assert window.script("return [...document.querySelectorAll('#rates text')].map((each) => each.textContent)")[
        :3
    ] == ["0", "0.5", "1"]
    assert "restarts\n5" in window.text("#numbers")


def test_card_of_a_lost_worker_shows_the_loss(window: Browser, show: Show) -> None:
    """Also while the worker still has a recent speed. The color of the card is not enough."""
    show(SimulatedRun(10, hosts=1))
    assert window.text("#worker-9").split("\n") == ["worker 9", "lost (being replaced)"]
    assert "7 rolling, 1 starting, 1 parked, 1 lost (being replaced)." in window.text("#cluster-text")
    assert window.text("#worker-0").split("\n")[:2] == ["worker 0", "100 steps/s (recent)"]
    assert window.text("#legend") == ""


STATES = ("alive", "starting", "queued", "parked", "released", "lost", "stopped")


def test_squares_have_another_shape_in_each_state(window: Browser, show: Show) -> None:
    """Not everyone can tell their colors apart."""
    run = SimulatedRun(30, hosts=1)
    run.data["workers"]["state"][:7] = STATES
    show(run)
    shapes = [shape_of(window, worker) for worker in range(7)]
    assert len(set(shapes)) == 7


def test_square_of_a_slow_worker_has_another_shape(window: Browser, show: Show) -> None:
    run = SimulatedRun(30, hosts=1)
    run.data["workers"]["rate"][:2] = [70.0, 10.0]
    show(run)
    assert len({shape_of(window, worker) for worker in range(3)}) == 3
    assert window.text("#legend").split("\n") == ["starting", "parked", "lost (being replaced)"]


def shape_of(window: Browser, worker: int) -> str:
    """The style of a worker's square without its hue."""
    source = """
        const style = getComputedStyle(document.getElementById(arguments[0]));
        const isShown = (color) => color !== "rgba(0, 0, 0, 0)";
        return [style.borderStyle, isShown(style.borderColor), isShown(style.backgroundColor), style.borderRadius,
          style.clipPath, style.transform];
    """
    return str(window.script(source, f"worker-{worker}"))


def test_slow_worker_among_many_has_another_color(window: Browser, show: Show) -> None:
    run = SimulatedRun(200, hosts=2)
    workers = run.data["workers"]
    workers["rate"][3], workers["lag"][4], workers["divergence"] = 5.0, 9.0, [0.01] * 199 + [0.06]
    workers["state"][199] = "alive"
    workers["rate"][9] = 0.0  # lost
    expected = {
        "recent steps per second": (3, "1 worker below 80 % of the median (100 steps/s): worker 3 (5)."),
        "mean version lag": (4, "1 worker with a mean version lag of 1 or more: worker 4 (9)."),
        "KL divergence": (199, "1 worker at 25 % of the KL threshold (0.05) or more: worker 199 (0.06)."),
    }
    show(run)
    select = Select(window.driver.find_element("css selector", "#color"))
    assert [option.text for option in select.options] == list(expected)
    for name, (worst, text) in expected.items():
        select.select_by_visible_text(name)
        classes = cell_classes(window)
        assert classes[worst] == ["cell", "alive", "level-4"] and classes[9] == ["cell", "lost"]
        assert classes[0] == ["cell", "alive", "level-0"] and sum("level-4" in each for each in classes) == 1
        assert color_of(window, worst) != color_of(window, 0)
        assert window.text("#color-text") == text
        assert len(window.text("#color-legend").split("\n")) == 5
        assert window.violations() == []
    assert window.errors() == []


def color_of(window: Browser, worker: int) -> str:
    return str(window.script(f"return getComputedStyle(document.getElementById('worker-{worker}')).backgroundColor"))


def test_many_slow_workers_are_counted(window: Browser, show: Show) -> None:
    run = SimulatedRun(30, hosts=1)
    run.data["workers"]["rate"][:7] = [10.0 * k for k in range(7)]
    run.data["kl_threshold"] = None
    show(run)
    assert window.text("#color-text") == (
        "7 workers below 80 % of the median (100 steps/s): "
        "worker 0 (0), worker 1 (10), worker 2 (20), worker 3 (30), worker 4 (40), 2 more."
    )
    select = Select(window.driver.find_element("css selector", "#color"))
    assert [option.text for option in select.options] == ["recent steps per second", "mean version lag"]


def test_workers_are_reached_by_keyboard_and_tracebacks_by_one_click(window: Browser, show: Show) -> None:
    show(SimulatedRun(200, hosts=2))
    grid = window.driver.find_element("css selector", "#cluster .grid")
    grid.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert window.text("#worker").startswith("worker 2: rolling, 100 steps/s (recent), mean version lag 0.5")
    assert "KL 0.02 of 0.05" in window.text("#worker")
    assert "Traceback" not in window.text("#events")
    window.driver.find_element("css selector", "#events summary").click()
    assert "Traceback: <b>" in window.text("#events")  # as text, not as an element


def cell_classes(window: Browser) -> list[list[str]]:
    """The classes of the workers' cells: `cell`, the state, and possibly a level of color."""
    cells = window.script("return [...document.querySelectorAll('#cluster .cell')].map((each) => each.className)")
    return [cell.split() for cell in cells]


def states(window: Browser) -> list[str]:
    return [state for _, state, *_ in cell_classes(window)]


class DyingEnv(CountingEnv):
    """Kills its process when a file appears, once. Its construction lasts until another file is gone."""

    def __init__(self, die: str, hold: str) -> None:
        super().__init__()
        self._die = Path(die)
        deadline = time.monotonic() + DEADLINE_S
        while Path(hold).exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    def step(self, action: Any) -> Any:
        with contextlib.suppress(FileNotFoundError):  # both workers may see it
            self._die.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def test_page_follows_a_run_whose_worker_dies(window: Browser, tmp_path: Path) -> None:
    die, hold = tmp_path / "die", tmp_path / "hold"
    kwargs = {"die": str(die), "hold": str(hold)}
    described = {"type": "factory", "env_name": DyingEnv, "env_kwargs": kwargs, "envs_per_node": 2}
    with farstep.ClusterEnv(described, {"workers_per_node": 2}) as env:
        env.collect(TableAgent(), steps=8)
        window.open(env.status_url)
        assert window.text("#cluster-text").startswith("2 workers on 1 host: ")
        assert states(window) == ["alive", "alive"] and window.violations() == []
        hold.touch()
        die.touch()
        collecting = threading.Thread(target=env.collect, args=(TableAgent(),), kwargs={"steps": 8})
        collecting.start()
        try:
            window.wait(lambda: "lost" in window.text("#events .bad"))
            window.wait(lambda: sorted(states(window)) == ["alive", "starting"])
            assert "1 starting" in window.text("#cluster-text") and window.violations() == []
            window.wait(lambda: re.fullmatch(r"worker \d\nstarting", window.text("#cluster .starting")))
        finally:
            hold.unlink()
            collecting.join(DEADLINE_S)
        assert not collecting.is_alive()
        window.wait(lambda: "restarted" in window.text("#events"))
        window.wait(lambda: states(window) == ["alive", "alive"])
        assert window.violations() == [] and window.errors() == []
    window.wait(lambda: window.text("#state") == "ended")
