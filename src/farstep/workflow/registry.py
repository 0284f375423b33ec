"""The triggers and consumers of a workflow, as `Workflow.on` registered them."""

from __future__ import annotations

from farstep.workflow.consumers import Consumer, ConsumerThread, Flow, GuardedDelivery, PublishDelivery, name_of
from farstep.workflow.delivery import Direct, LocalQueue
from farstep.workflow.triggers import DataKeyTrigger
from farstep.workflow.triggers.dispatch import Delivery, Dispatcher
from farstep.workflow.triggers.trigger import Trigger, leaves_of


class Registry:
    """Creates the delivery from each trigger to its consumer, and lists what the loop needs of them."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher()
        self.by_data: list[DataKeyTrigger] = []
        self.consuming: list[DataKeyTrigger] = []
        """Triggers that consume rows. Rows that their messages name are not overwritten before the consumer is done."""
        self.reading: list[str] = []
        """Names of the triggers of consumers that read rows, in the order of `RowRetention.holders`."""
        self.most_samples = 0
        """Largest number of rows that a consumer samples at once."""
        self.threads: list[ConsumerThread] = []
        self.updaters: list[GuardedDelivery] = []
        """Guards of consumers that may change the agent."""
        self.publishers: list[PublishDelivery] = []
        self.guards: list[tuple[str, GuardedDelivery]] = []
        """The name of each trigger, and the delivery to its consumer."""
        self.has_deliveries = False
        """Whether a consumer is a `Delivery`, which may be to another process."""
        self._keyed_elsewhere = False
        """Whether a trigger with keys calls a consumer in another process."""

    def add(
        self,
        flow: Flow,
        trigger: Trigger,
        consumer: Consumer | Delivery,
        publisher: PublishDelivery | None,
        *,
        thread: bool,
        max_outstanding: int,
        samples: int | None,
        updates: bool,
        name: str | None,
    ) -> str:
        """Register a consumer and return the trigger's name. `publisher` replaces the consumer `Workflow.publish`; the
        other arguments are those of `Workflow.on`."""
        is_delivery = hasattr(consumer, "finished")
        delivery: Delivery = consumer if is_delivery else Direct(consumer)  # type: ignore[assignment]
        started: ConsumerThread | None = None
        if publisher is not None:
            delivery = publisher
        if thread:
            started = ConsumerThread(flow, consumer, LocalQueue(max_outstanding))
            delivery = started.queue
        by_data = [leaf for leaf in leaves_of(trigger) if isinstance(leaf, DataKeyTrigger)]
        guard = GuardedDelivery(flow, delivery, by_data, started, samples, name_of(consumer))
        found = self.dispatcher.add(trigger, guard, trigger_id=name, max_outstanding=max_outstanding)
        self.guards.append((found, guard))
        self.by_data += by_data
        if guard.consuming:
            guard.discard(flow.ledger)  # a new consumer does not get rows of earlier runs
            self.consuming += guard.consuming
            flow.retention.holders.append(guard)
            self.reading.append(found)
        self.most_samples = max(self.most_samples, guard.samples)
        self.updaters += [guard] if updates else []
        self.publishers += [publisher] if publisher is not None else []
        if started is not None:
            started.guard, started.name = guard, found
            self.threads.append(started)
        self.has_deliveries = self.has_deliveries or is_delivery
        keyed = any(leaf.stages != (None,) for leaf in by_data)
        self._keyed_elsewhere |= keyed and is_delivery and not isinstance(consumer, LocalQueue)
        return found

    def fires_early(self, steps: int) -> bool:
        """Return whether triggers may fire for keys that arrive before the rest of their chunk of `steps` steps.

        The rows of such keys are not in the buffer yet, so a window must be exactly one chunk, and consumers must run
        in this process.
        """
        keyed = [leaf for leaf in self.by_data if leaf.stages != (None,)]
        taken = all(leaf.min_new is None and leaf.size == steps for leaf in keyed)
        return bool(keyed) and taken and not self._keyed_elsewhere
