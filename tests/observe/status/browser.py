"""A real browser for tests of the status page: Debian's Chromium, driven by Selenium."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from tests.engines.guarded import EngineMissing

DEADLINE_S = 60.0
QUIET = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
WIDE, PHONE = (1280, 1600), (390, 1200)


class Browser:
    """One window."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str, size: tuple[int, int] = WIDE, *, dark: bool = False) -> None:
        """Open a page in a window of this size and wait until it shows data."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get_log("browser")
        self.driver.get(url)
        self.wait(lambda: self.text("#state") not in ("", "connecting …"))

    def text(self, selector: str) -> str:
        """The visible text of an element."""
        return str(self.script("return document.querySelector(arguments[0])?.innerText || ''", selector))

    def script(self, source: str, *arguments: object) -> Any:
        return self.driver.execute_script(source, *arguments)

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds; fail with the page's text after a minute."""
        try:
            WebDriverWait(self.driver, DEADLINE_S, 0.1).until(lambda _: condition())
        except Exception as error:
            raise AssertionError(f"the page shows: {self.text('body')[:2000]}") from error

    def errors(self) -> list[str]:
        """Errors of the page's script, and requests that were refused."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def violations(self) -> list[str]:
        """Violations of accessibility rules that axe finds, with the elements."""
        self.script((resources.files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8"))
        found = self.driver.execute_async_script("axe.run().then(arguments[0])")
        return [f"{each['id']}: {[node['html'][:200] for node in each['nodes']]}" for each in found["violations"]]


def programs() -> tuple[str, str]:
    """The paths of chromedriver and Chromium; raise `EngineMissing` if they are not installed."""
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or chromium is None or importlib.util.find_spec("selenium") is None:
        raise EngineMissing("chromium, chromium-driver")
    return driver, chromium


@contextmanager
def browser() -> Iterator[Browser]:
    """Context manager: start a browser."""
    driver, chromium = programs()
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    with tempfile.TemporaryDirectory() as profile:
        for argument in (*QUIET, f"--user-data-dir={profile}"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        found = webdriver.Chrome(options=options, service=Service(driver))
        try:
            found.set_page_load_timeout(DEADLINE_S)
            found.set_script_timeout(DEADLINE_S)
            yield Browser(found)
        finally:
            found.quit()
