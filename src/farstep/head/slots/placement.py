"""Which workers run for the slots of a coordinator.

Runs with the same nodes agree on which node a slot belongs to: slot s is on node s % nodes. So if all slots are in use,
no node runs more than its share of workers, ceil(slots / nodes), although the runs know nothing about each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable


def workers_on(slots: Collection[int], nodes: int, per_node: int) -> list[int]:
    """Return the workers that run, in ascending order.

    On each node, the workers with the lowest numbers run, as many as there are slots on this node. If a node has fewer
    workers than slots, the first other nodes with parked workers run one more for each slot that is left over.

    Args:
        slots: Different numbers of slots, at most as many as there are workers.
        nodes: Number of nodes. Node k has the workers from k * per_node to (k + 1) * per_node - 1.
        per_node: Number of workers on each node.
    """
    slots_of = Counter(slot % nodes for slot in slots)
    running = [min(slots_of[node], per_node) for node in range(nodes)]
    left_over = len(slots) - sum(running)
    for node in range(nodes):
        more = min(left_over, per_node - running[node])
        running[node] += more
        left_over -= more
    return [node * per_node + i for node in range(nodes) for i in range(running[node])]


def workers_left(workers: Iterable[int], nodes: int, per_node: int, min_nodes: int) -> int:
    """Return how many of these workers are left, at least, if all but `min_nodes` nodes are lost; never less than 1."""
    running = Counter(worker // per_node for worker in workers)
    return max(1, sum(sorted(running[node] for node in range(nodes))[:min_nodes]))
