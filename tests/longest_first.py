"""A pytest plugin: if several processes share the test files, the longest files run first.

If a long file started last, the other processes would be idle until it ends. `tests/durations.json` has the seconds of
each file; `pytest --record-durations` measures them again. Files without an entry run first.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
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
    """Sums the durations of the tests of each file, including fixtures."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

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
