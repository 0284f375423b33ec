"""The glossary of metrics: name, kind, unit, source and meaning of every number that farstep logs.

`NAMESPACES` and `METRICS` have the metrics of `farstep train`, `STATS_GROUPS` and `STATS` the entries of
`ClusterEnv.stats`. docs/metrics.md is generated from them; the terminal and plots take labels and units from them.
Metrics of a user's own learner need no entry.
"""

from __future__ import annotations

from farstep.observe.glossary.metric import Metric, Namespace
from farstep.observe.glossary.stats import STATS, STATS_GROUPS
from farstep.observe.glossary.training import METRICS, NAMESPACES

__all__ = ["METRICS", "NAMESPACES", "STATS", "STATS_GROUPS", "Metric", "Namespace"]
