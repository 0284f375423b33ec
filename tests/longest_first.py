"""A pytest plugin: where several processes share the test files, those that take longest come first.

A long file that starts last would leave the other processes without work. How long each file takes is in
`tests/durations.json`; `pytest --record-durations` measures it again. A file that is not in there comes first.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
OPTION = "--record-durations"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, action="store_true", help="write the seconds of each test file to tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption(OPTION) and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Recorder())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        seconds = _recorded()
        items.sort(key=lambda item: -seconds.get(_file(item.nodeid), math.inf))


class Recorder:
    """Adds up how long the tests of each file take, with their fixtures."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[_file(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = _recorded() | {file: round(seconds, 1) for file, seconds in self._seconds.items()}
        there = {file: seconds for file, seconds in known.items() if (DURATIONS.parents[1] / file).exists()}
        DURATIONS.write_text(json.dumps(there, indent=0, sort_keys=True) + "\n")


def _recorded() -> dict[str, float]:
    return dict(json.loads(DURATIONS.read_text())) if DURATIONS.exists() else {}


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
