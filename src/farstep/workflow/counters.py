"""The counters of a workflow in `ClusterEnv.stats`: buffer, limiter, triggers and consumers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from farstep.buffer.replay import Buffer
from farstep.workflow.consumers import GuardedDelivery
from farstep.workflow.triggers import DataKeyTrigger, TimeTrigger
from farstep.workflow.triggers.dispatch import Dispatcher
from farstep.workflow.triggers.ledger import Actor, Ledger
from farstep.workflow.triggers.trigger import leaves_of


def buffer_counters(buffer: Buffer, full_s: float) -> dict[str, float]:
    """Rows in the buffer, rows that fit, bytes of its arrays, and seconds for which chunks waited for room.

    Args:
        buffer: The buffer.
        full_s: Seconds for which a chunk waited, because consumers had not read the rows that it would overwrite.
    """
    return {"fill": len(buffer), "capacity": buffer.capacity, "bytes": buffer.nbytes, "full_s": full_s}


def limiter_counters(buffer: Buffer, refused_s: float) -> dict[str, Any]:
    """Samples per inserted row so far, and seconds for which the limiter blocked inserting and sampling.

    Args:
        buffer: The buffer.
        refused_s: Seconds for which the limiter has refused the chunk that is waiting now.
    """
    limiter, waited_s = buffer.limiter, buffer.waited_s
    return {
        "ratio": limiter.samples / limiter.inserts if limiter.inserts else 0.0,
        "blocked": {"insert": waited_s["insert"] + refused_s, "sample": waited_s["sample"]},
    }


def trigger_counters(
    dispatcher: Dispatcher, guards: Iterable[tuple[str, GuardedDelivery]], ledger: Ledger, num_envs: Mapping[Actor, int]
) -> dict[str, dict[str, Any]]:
    """For each trigger: number of firings, unconsumed rows, unfinished messages, and the lag of its consumer.

    `waits_for` is the trigger as text; None if part of it is a `TimeTrigger`, which may be far from its next firing.

    Args:
        dispatcher: Evaluates the triggers.
        guards: The name of each trigger, and the delivery to its consumer.
        ledger: The counters that triggers read.
        num_envs: The number of environments of each actor.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, guard in guards:
        trigger = dispatcher.trigger(name)
        leaves = [leaf for leaf in leaves_of(trigger) if isinstance(leaf, DataKeyTrigger)]
        pending = [steps * num_envs[actor] for leaf in leaves for actor, steps in leaf.pending(ledger).items()]
        found[name] = {
            "fired": dispatcher.fired(name),
            "pending_rows": sum(pending) if leaves else None,
            "outstanding": dispatcher.outstanding(name),
            "lag": guard.lag(),
            "waits_for": None if any(isinstance(leaf, TimeTrigger) for leaf in leaves_of(trigger)) else repr(trigger),
        }
    return found
