"""The glossary of metrics: name, kind, unit, source and meaning of every number that farstep logs.

`NAMESPACES` and `METRICS` have the metrics of `farstep train`, `STATS_GROUPS` and `STATS` the entries of
`ClusterEnv.stats`, `EXPOSED_GROUPS` and `EXPOSED` what only Prometheus gets. docs/metrics.md is generated from them.
The terminal, plots and the Grafana dashboard take labels and units from them. Metrics of a user's own learner need no
entry.
"""

from __future__ import annotations

from farstep.observe.glossary.exposed import EXPOSED, EXPOSED_GROUPS
from farstep.observe.glossary.metric import Metric, Namespace
from farstep.observe.glossary.stats import STATS, STATS_GROUPS
from farstep.observe.glossary.training import METRICS, NAMESPACES

__all__ = ["EXPOSED", "EXPOSED_GROUPS", "METRICS", "NAMESPACES", "STATS", "STATS_GROUPS", "Metric", "Namespace"]
