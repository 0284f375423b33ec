"""Imports optional packages. The error for a missing package contains the pip command."""

from __future__ import annotations

import importlib
from typing import Any

from farstep.errors import ConfigError, install_extra


def require(module: str, package: str, purpose: str, needed: str) -> Any:
    """Import an optional module.

    Args:
        module: Dotted name of the module.
        package: The package to install.
        purpose: What needs the module, for the error message.
        needed: A name that the module must define.

    Returns:
        The module.

    Raises:
        ConfigError: The module is not installed or lacks `needed`; the message contains the pip command.
    """
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        reason = str(error)
    else:
        if hasattr(found, needed):
            return found
        # Weights & Biases creates a folder called `wandb`, which can be imported as an empty module.
        reason = f"the module imported as {module} has no {needed}: {getattr(found, '__path__', found)}"
    extra = f", or with farstep's extra: {command}" if (command := install_extra(module)) else ""
    raise ConfigError(f"{purpose} needs the package {package} ({reason}). Install it: pip install {package}{extra}")
