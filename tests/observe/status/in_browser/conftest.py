"""One browser for all tests of this folder, and a fixture that opens a page in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import TypeAlias

import pytest

from farstep.observe.status import PageServer
from farstep.observe.status.page_server import Source
from tests.observe.status.browser import WIDE, Browser, browser

Show: TypeAlias = Callable[..., None]
"""Starts a page that shows a source, and opens it in a window of this size: `show(source, size, dark=False)`."""


@pytest.fixture(autouse=True)
def leak_check() -> None:
    """No leak check: processes of the browser come and go. `test_page_server.py` has one."""


@pytest.fixture(scope="package")
def window() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture
def show(window: Browser) -> Iterator[Show]:
    """Pages are closed after the test."""
    with ExitStack() as servers:

        def open_page(source: Source, size: tuple[int, int] = WIDE, *, dark: bool = False) -> None:
            server = servers.enter_context(closing(PageServer(source)))
            window.open(server.url, size, dark=dark)

        yield open_page
