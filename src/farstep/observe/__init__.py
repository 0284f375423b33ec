"""Metrics of a run, its live display, plots and videos, and the folder that stores all of these.

This package does not depend on learners. For it, an update is a step and flat metrics, such as {"env/return_mean":
21.5}.
"""

from __future__ import annotations

from farstep.observe.loggers import JsonlLogger, Logger, Loggers, TensorBoardLogger, WandbLogger
from farstep.observe.plots import plot
from farstep.observe.run_folder import RunFolder, run_name
from farstep.observe.terminal.console import console_logger
from farstep.observe.video import write_video

__all__ = [
    "JsonlLogger",
    "Logger",
    "Loggers",
    "RunFolder",
    "TensorBoardLogger",
    "WandbLogger",
    "console_logger",
    "plot",
    "run_name",
    "write_video",
]
