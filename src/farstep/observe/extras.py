"""Packages that only some runs need: imported where they are used, and named with their pip command where missing."""

from __future__ import annotations

import importlib
from typing import Any

from farstep.errors import ConfigError, install_extra


def require(module: str, package: str, purpose: str, needed: str) -> Any:
    """The module, if it is installed and has the name `needed`; else an error that says how to install it."""
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        reason = str(error)
    else:
        if hasattr(found, needed):
            return found
        # A plain folder called `wandb`, such as Weights & Biases makes, can be imported, but holds nothing.
        reason = f"what is imported as {module} has no {needed}: {getattr(found, '__path__', found)}"
    extra = f", or with farstep's extra: {command}" if (command := install_extra(module)) else ""
    raise ConfigError(f"{purpose} needs the package {package} ({reason}). Install it: pip install {package}{extra}")
