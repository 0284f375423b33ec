"""When a worker pulls weights.

A rule is asked before each chunk. Adaptive synchronization (AAPS: probes, running KL) will be one more rule here.
"""

from farstep.sync.rules import Always, EveryK

__all__ = ["Always", "EveryK"]
