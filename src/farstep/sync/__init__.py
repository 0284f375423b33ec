"""When a worker pulls weights, and what it decides on.

A rule is asked before each chunk. `AAPS` looks at probes: after a publish the head evaluates the new policy on
observations that the worker has already sent (`picks.py`), and the worker compares that with its own policy on these.
"""

from farstep.sync.rules import AAPS, Always, AnyOf, EveryK, EverySeconds, MaxLag

__all__ = ["AAPS", "Always", "AnyOf", "EveryK", "EverySeconds", "MaxLag"]
