"""The status page in a real browser: a running, a dying, a large and a finished run, and an attacker's page."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

import farstep
from farstep.cli import main
from farstep.event import Event
from farstep.observe.event_files import EventFile
from farstep.observe.loggers import JsonlLogger
from farstep.observe.run_folder import RunFolder
from farstep.observe.status import FolderSource, PageServer
from farstep.testing import CountingEnv, TableAgent
from tests.observe.status.browser import DEADLINE_S, PHONE, QUIET, WIDE, Browser, browser, programs
from tests.observe.status.simulated_run import SimulatedRun

pytestmark = pytest.mark.slow  # real processes, or learning


@pytest.fixture(autouse=True)
def leak_check() -> None:
    """No leak check: processes of the browser come and go. `test_page_server.py` has one."""


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.mark.parametrize(
    ("workers", "size", "dark"),
    [(1, WIDE, True), (3, WIDE, False), (3, PHONE, True), (1_000, WIDE, True), (1_000, PHONE, False)],
)
def test_page_has_no_errors_and_is_accessible(window: Browser, workers: int, size: tuple[int, int], dark: bool) -> None:
    server = PageServer(SimulatedRun(workers, hosts=min(workers, 20)))
    try:
        window.open(server.url, size, dark=dark)
        assert window.script("return document.querySelectorAll('#cluster .cell').length") == workers
        assert window.script("return document.documentElement.scrollWidth <= innerWidth")
        assert "recent steps per second" in window.text("#numbers")
        assert f" of {workers:,}" in window.text("#numbers")
        assert "2 held, 1 released between rollouts, 3 parked" in window.text("#slots")
        assert "Coordinator default has granted 3 of 6 slots." in window.text("#slots")
        assert window.violations() == []
        window.script("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert window.violations() == []
        assert window.errors() == []
    finally:
        server.close()


def test_every_part_of_the_page_is_filled(window: Browser) -> None:
    server = PageServer(SimulatedRun(3, hosts=1))
    shown = {
        "#progress-text": ["5,000 of 10,000 steps, about 1 min 1 s left"],
        "#diagnosis": ["Worker 3 is slow.", "Look.", "a 0.5"],
        "#times": ["workers", "environments", "90 %", "waiting for the learner", "10 %", "learner", "updates", "100 %"],
        "#lags": ["0 (newest weights)", "50 %", "1", "40 %", "16 to 31", "10 %"],
        "#weights": [
            "Workers pull new weights when their KL divergence from the learner exceeds 0.05.",
            "3 pulls of 7 possible ones; 3.0 kB sent",
            "4.0 kB not sent, because workers skipped versions",
        ],
        "#buffer": ["filled", "10 %", "10 of 100 rows, 4.0 kB", "2 rows sampled per row inserted"],
    }
    try:
        window.open(server.url)
        assert {part: [line for line in window.text(part).split("\n") if line] for part in shown} == shown
        curves = "return document.querySelectorAll(`${arguments[0]} polyline`).length"
        assert [window.script(curves, chart) for chart in ("#returns", "#rates")] == [2, 1]
        window.driver.find_element("css selector", "main > section:last-child summary").click()
        assert window.text("#metrics").split() == ["env/return_mean", "2"]
    finally:
        server.close()


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


def test_run_that_reached_its_target_shows_a_full_bar(window: Browser) -> None:
    run = SimulatedRun(3, hosts=1)
    run.data["progress"] |= {"target_return": 475.5}
    server = PageServer(run)
    try:
        window.open(server.url)
        assert window.text("#progress-text") == "target return 475.5 reached after 5,000 of 10,000 steps"
        assert window.script("return document.getElementById('bar').value") == 1
    finally:
        server.close()


def test_acting_servers_stand_on_their_nodes(window: Browser) -> None:
    server = PageServer(SimulatedRun(4, hosts=2))
    try:
        window.open(server.url)
        assert "2 acting servers on 2 hosts act for them: 2,000 rows/s (recent)." in window.text("#cluster-text")
        assert "4 workers on 2 hosts:" in window.text("#cluster-text")
        names = "return [...document.querySelectorAll('#cluster .name')].map((each) => each.textContent)"
        assert window.script(names) == ["node-0", "node-1", "gpu", "second-gpu"]
        beside, alone = (window.text(f"#server-{number}").split("\n") for number in (4, 5))
        assert beside[1:] == ["1,200 rows/s (recent)", "8 rows per call of act", "workers wait 0.25 ms per request"]
        assert alone[0] == "acting server 5" and alone[-1] == "1 restart"
        assert window.script("return document.querySelectorAll('#cluster .grid').length") == 2
    finally:
        server.close()


def test_head_is_drawn_above_the_hosts(window: Browser) -> None:
    server = PageServer(SimulatedRun(3, hosts=1))
    try:
        window.open(server.url)
        lines = ["head", "100,000 steps/s (recent)", "version 7", "learner: updates 100 %"]
        assert window.text("#head").split("\n") == lines
        place = "return document.querySelector(arguments[0]).getBoundingClientRect().toJSON()"
        head, host = (window.script(place, selector) for selector in ("#head", "#cluster .host"))
        assert head["bottom"] <= host["top"]
        assert "mean version lag 0.5" in window.text("#worker-0")
        assert window.script("return document.getElementById('colors').hidden")
    finally:
        server.close()


def test_slow_worker_among_many_has_another_color(window: Browser) -> None:
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
    server = PageServer(run)
    try:
        window.open(server.url)
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
    finally:
        server.close()


def color_of(window: Browser, worker: int) -> str:
    return str(window.script(f"return getComputedStyle(document.getElementById('worker-{worker}')).backgroundColor"))


def test_many_slow_workers_are_counted(window: Browser) -> None:
    run = SimulatedRun(30, hosts=1)
    run.data["workers"]["rate"][:7] = [10.0 * k for k in range(7)]
    run.data["kl_threshold"] = None
    server = PageServer(run)
    try:
        window.open(server.url)
        assert window.text("#color-text") == (
            "7 workers below 80 % of the median (100 steps/s): "
            "worker 0 (0), worker 1 (10), worker 2 (20), worker 3 (30), worker 4 (40), 2 more."
        )
        select = Select(window.driver.find_element("css selector", "#color"))
        assert [option.text for option in select.options] == ["recent steps per second", "mean version lag"]
    finally:
        server.close()


def test_workers_without_a_node_stand_below_what_is_known_about_it(window: Browser) -> None:
    run = SimulatedRun(4, hosts=2)
    unconnected_nodes = "1 of 2 nodes not connected yet: SLURM job 7 is pending (Resources)"
    run.data["workers"] |= {"host": ["a", "a", None, None], "unconnected_nodes": unconnected_nodes}
    run.data |= {"acting": [], "hosts": ["a"]}
    server = PageServer(run)
    try:
        window.open(server.url)
        assert window.text("#cluster .host:last-child .name") == unconnected_nodes
        assert "4 workers on 1 host:" in window.text("#cluster-text") and "null" not in window.text("#cluster")
    finally:
        server.close()


def test_idle_run_of_queued_workers_is_plain(window: Browser) -> None:
    run = SimulatedRun(4, hosts=1)
    run.data["workers"] |= {
        "state": ["alive", "queued", "queued", "queued"],
        "rate": [0.0] * 4,
        "divergence": [None] * 4,
    }
    run.data["series"] |= {"rate": [[0, 0.0], [1, 0.0]]}
    run.data["metrics"] |= {"workers/restarts": 5.0}  # two of them before the run was resumed
    server = PageServer(run)
    try:
        window.open(server.url)
        assert "1 rolling, 3 waiting for a node." in window.text("#cluster-text")
        assert window.text("#worker-1") == "worker 1\nwaiting for a node"
        assert window.script("return [...document.querySelectorAll('#rates text')].map((each) => each.textContent)")[
            :3
        ] == ["0", "0.5", "1"]
        assert "restarts\n5" in window.text("#numbers")
    finally:
        server.close()


def test_workers_are_reached_by_keyboard_and_tracebacks_by_one_click(window: Browser) -> None:
    server = PageServer(SimulatedRun(200, hosts=2))
    try:
        window.open(server.url)
        grid = window.driver.find_element("css selector", "#cluster .grid")
        grid.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
        assert window.text("#worker").startswith("worker 2: rolling, 100 steps/s (recent), mean version lag 0.5")
        assert "KL 0.02 of 0.05" in window.text("#worker")
        assert "Traceback" not in window.text("#events")
        window.driver.find_element("css selector", "#events summary").click()
        assert "Traceback: <b>" in window.text("#events")  # as text, not as an element
    finally:
        server.close()


def test_events_and_colors_are_reached_by_keyboard(window: Browser) -> None:
    server = PageServer(SimulatedRun(30, hosts=1))
    try:
        window.open(server.url)
        events = window.driver.find_element("css selector", "[role=region][aria-label='Latest events']")
        events.send_keys(Keys.END)
        window.wait(lambda: window.script("return arguments[0].scrollTop", events) > 0)
        assert outline_of(window, events) == "3px"
        color = window.driver.find_element("css selector", "#color")
        color.send_keys(Keys.ARROW_DOWN)
        window.wait(lambda: "version lag" in window.text("#color-text"))
        assert outline_of(window, color) == "3px"
    finally:
        server.close()


def outline_of(window: Browser, element: Any) -> str:
    return str(window.script("return getComputedStyle(arguments[0]).outlineWidth", element))


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


def cell_classes(window: Browser) -> list[list[str]]:
    """The classes of the workers' cells: `cell`, the state, and possibly a level of color."""
    cells = window.script("return [...document.querySelectorAll('#cluster .cell')].map((each) => each.className)")
    return [cell.split() for cell in cells]


def states(window: Browser) -> list[str]:
    return [state for _, state, *_ in cell_classes(window)]


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


def test_finished_run_is_shown_from_its_folder(window: Browser, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run", {"algorithm": "ppo", "run": {"env": "Far-v0", "total_steps": 30}})
    logger = JsonlLogger(folder.metrics_file, None)
    for step in (10, 20, 30):
        logger.log(
            step, {"env/return_mean": step / 10, "seconds": step, "rate/steps_per_second": 1.0, "time/collect": 2.0}
        )
    logger.close()
    events = EventFile(folder.events_file)
    events.write(Event(time=1.0, kind="lost", text="worker 0 was lost", worker=0))
    events.close()
    server = PageServer(FolderSource(folder))
    try:
        window.open(server.url)
        assert window.text("#title") == "ppo on Far-v0" and window.text("#state") == "from the files of the run folder"
        assert "worker 0 was lost" in window.text("#events")
        assert "30 of 30 steps" in window.text("#progress-text")
        assert "mean steps per second" in window.text("#numbers") and "recent" not in window.text("#numbers")
        assert window.script("return document.querySelectorAll('#returns polyline').length") == 1
        assert window.violations() == [] and window.errors() == []
    finally:
        server.close()
    file = tmp_path / "page.html"
    assert main(["status", str(folder.path), "--html", str(file)]) == 0
    window.open(file.as_uri())
    assert window.text("#title") == "ppo on Far-v0" and "worker 0 was lost" in window.text("#events")
    assert window.violations() == [] and window.errors() == []


ATTACK = """
<title>attack</title><body><script>
const url = %s, results = [];
const note = (name, promise) => promise.then((value) => results.push([name, value]), () => results.push([name, null]));
const element = (tag, attribute) => new Promise((done, fail) => {
  const made = document.createElement(tag);
  made.onload = () => done("loaded"); made.onerror = fail;
  made[attribute] = url.replace("/?", "/data?"); document.body.append(made);
});
const stream = new Promise((done, fail) => {
  const source = new EventSource(url.replace("/?", "/events?"));
  source.onmessage = (event) => done(event.data); source.onerror = () => { source.close(); fail(); };
});
const data = url.replace("/?", "/data?");
Promise.all([
  note("fetch", fetch(data).then((answer) => answer.text())),
  note("no-cors", fetch(data, {mode: "no-cors"}).then((answer) => answer.text())
    .then((text) => text || Promise.reject())),
  note("post", fetch(data, {method: "POST", body: "x"}).then((answer) => answer.text())),
  note("stream", stream), note("script", element("script", "src")), note("image", element("img", "src")),
]).then(() => { window.results = results; });
</script></body>
"""


def test_page_of_another_site_gets_nothing_even_with_the_address(window: Browser) -> None:
    source = SimulatedRun(3, 1)
    server = PageServer(source)

    class Attacker(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (ATTACK % json.dumps(server.url)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Attacker) as attacker:
        thread = threading.Thread(target=attacker.serve_forever)
        thread.start()
        try:
            window.driver.get(f"http://localhost:{attacker.server_address[1]}/")
            window.wait(lambda: window.script("return window.results"))
            assert dict(window.script("return window.results")) == dict.fromkeys(
                ("fetch", "no-cors", "post", "stream", "script", "image")
            )
            assert source.reads == 0
        finally:
            attacker.shutdown()
            thread.join()
            server.close()
