"""Versions that a contender ran with; imports only the standard library, to work in every virtual environment."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def versions_of(*packages: str) -> dict[str, str]:
    """Versions of Python and of the installed ones of ``packages``."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
