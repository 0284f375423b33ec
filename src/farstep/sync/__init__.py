"""Sync rules: they decide on the worker, before each chunk, whether to pull the newest weights.

`AAPS` decides by the divergence between policies, measured with probes: after a publish the head evaluates the new
policy on observations that the worker has already sent (`rollout/probe_rows.py`), and the worker compares the result
with its own policy on the same observations. The other rules count versions or seconds.
"""

from farstep.sync.rules import AAPS, Always, AnyOf, EveryK, EverySeconds, MaxLag

__all__ = ["AAPS", "Always", "AnyOf", "EveryK", "EverySeconds", "MaxLag"]
