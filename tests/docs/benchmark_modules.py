"""Imports modules of benchmarks/, which are scripts' neighbors and not a package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def benchmark_modules(*names: str) -> list[ModuleType]:
    """Import modules by name; other tests keep modules of theirs with the same names, such as `tables`."""
    theirs = {path.stem for path in BENCHMARKS.glob("*.py")}
    others = {name: sys.modules.pop(name) for name in theirs if name in sys.modules}
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in theirs:
            sys.modules.pop(name, None)
        sys.modules.update(others)
