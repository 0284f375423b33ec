"""Which versions a contender ran with; for every virtual environment, so only the standard library."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def versions_of(*packages: str) -> dict[str, str]:
    """Versions of Python and of those of ``packages`` that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
