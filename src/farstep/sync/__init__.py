"""Sync rules. A worker's rule decides before each chunk whether the worker pulls the newest weights.

`AAPS` decides by the divergence between the worker's policy and the newest policy. Probes measure this divergence:
after a publish, the head evaluates the new policy on observations that the worker has already sent
(`rollout/probe_rows.py`), and the worker compares the result with its own policy. The other rules count versions or
seconds.
"""

from farstep.sync.rules import AAPS, Always, AnyOf, EveryK, EverySeconds, MaxLag

__all__ = ["AAPS", "Always", "AnyOf", "EveryK", "EverySeconds", "MaxLag"]
