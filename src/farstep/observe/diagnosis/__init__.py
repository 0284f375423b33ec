"""What limits a run: the causes, the rules that recognize them, and the counters that the rules read."""

from __future__ import annotations

from farstep.observe.diagnosis.causes import MIN_NODES_OPTIONS, MIN_NODES_REMEDY
from farstep.observe.diagnosis.diagnosis import Diagnosis, all_diagnoses, diagnose, with_options
from farstep.observe.diagnosis.run_monitor import RunMonitor
from farstep.observe.diagnosis.run_window import Snapshot, Window

__all__ = [
    "MIN_NODES_OPTIONS",
    "MIN_NODES_REMEDY",
    "Diagnosis",
    "RunMonitor",
    "Snapshot",
    "Window",
    "all_diagnoses",
    "diagnose",
    "with_options",
]
