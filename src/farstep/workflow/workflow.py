"""Workflows: an algorithm as a set of triggers on one buffer (ARTOS).

    workers ─ chunks ─► buffer ─ triggers ─► consumers (yours) ─ publish ─► workers

`Workflow` declares the triggers and their consumers; `run_loop.py` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from farstep.batch import Batch
from farstep.buffer.replay import Buffer
from farstep.cluster_env import ClusterEnv
from farstep.config.env import check_count, is_number
from farstep.core import Agent, Nested
from farstep.elastic.scaling import Rule
from farstep.errors import ConfigError
from farstep.workflow.consumers import Consumer, PublishDelivery
from farstep.workflow.objects import ModelBlock
from farstep.workflow.run_loop import RunLoop
from farstep.workflow.triggers.dispatch import Delivery
from farstep.workflow.triggers.ledger import Ledger
from farstep.workflow.triggers.messages import Message
from farstep.workflow.triggers.trigger import Trigger


class Workflow:
    """Connects environments, an agent and a buffer, and calls consumers when their triggers fire.

    Args:
        env: The environments.
        agent: The agent. Workers act with it, and `publish` publishes its parameters.
        buffer: Receives all rows.
        steps: Steps of each environment per chunk. None: the smallest `size` of the triggers that take rows, or 32.
        max_staleness: Maximum age in versions of rows that a consuming trigger delivers. None: any age; workers roll
            while the buffer has room.
        end_s: Maximum time in seconds that `publish` and the end of a run wait for consumers to return; default 300.
        scaling: Rule that chooses the number of workers after each update (`ledger.learner_steps`): one of
            `farstep.elastic`, or a function of its `Signals`. It reads the noise scale from the object `noise_scale`,
            which a consumer publishes with `put`. None: the number of workers does not change.

    Raises:
        ConfigError: An argument is invalid.

    Attributes:
        env: As above.
        agent: As above.
        buffer: As above.
        objects: The newest versions of the objects that `put` published.
        ledger: Counters, to read: `env_steps`, `learner_steps`, `versions`, and more for triggers.

    Example:
        def update(message):
            learn(agent, flow.batch(message))
            flow.publish()

        flow = farstep.Workflow(env, agent, farstep.Buffer(64 * 128, farstep.FullBatch()))
        flow.on(farstep.DataKeyTrigger(n="all", size=128), update)
        flow.on(farstep.ObjectKeyTrigger("parameters"), flow.next_rollout)
        flow.run(total_steps=1_000_000)
    """

    def __init__(
        self,
        env: ClusterEnv,
        agent: Agent,
        buffer: Buffer,
        *,
        steps: int | None = None,
        max_staleness: int | None = None,
        end_s: float = 300.0,
        scaling: Rule | None = None,
    ) -> None:
        if not isinstance(env, ClusterEnv):
            raise ConfigError(
                f"Workflow's env is {env!r}; expected a farstep.ClusterEnv. make_vec is for "
                "loops that choose the actions themselves."
            )
        if not isinstance(buffer, Buffer):
            raise ConfigError(f"Workflow's buffer is {buffer!r}; expected a farstep.Buffer(capacity, sampler).")
        if not is_number(end_s) or end_s < 0:
            raise ConfigError(f"end_s is {end_s!r}; expected a number of seconds.")
        self.env, self.agent, self.buffer = env, agent, buffer
        self.objects = ModelBlock()
        self._loop = RunLoop(
            env,
            agent,
            buffer,
            self.objects,
            steps=None if steps is None else check_count("steps", steps),
            max_staleness=None if max_staleness is None else check_count("max_staleness", max_staleness, minimum=0),
            end_s=end_s,
            scaling=scaling,
        )
        self._state = self._loop.state
        self.ledger: Ledger = self._state.ledger

    @property
    def stopped(self) -> bool:
        """Whether the run has ended or is ending, so that no trigger fires."""
        return self._state.stopped

    @property
    def on_chunk(self) -> Callable[[Batch], None] | None:
        """Called with each chunk after its rows were inserted, in the thread of `run`, e.g. for statistics. The batch
        is valid only during the call. Unlike a trigger that takes rows, it works with every buffer."""
        return self._loop.on_chunk

    @on_chunk.setter
    def on_chunk(self, function: Callable[[Batch], None] | None) -> None:
        self._loop.on_chunk = function

    # ---- registering consumers ----

    def on(
        self,
        trigger: Trigger,
        consumer: Consumer | Delivery,
        *,
        thread: bool = False,
        max_outstanding: int = 1,
        samples: int | None = None,
        updates: bool = True,
        name: str | None = None,
    ) -> str:
        """Call `consumer(message)` whenever the trigger fires.

        Args:
            trigger: When to call the consumer.
            consumer: A function of the message, or a `Delivery` (`farstep.workflow.delivery`), e.g. to another process.
            thread: Call the consumer in its own thread instead of the thread of `run`; default False.
            max_outstanding: Maximum number of unfinished messages; until one is done, the trigger does not fire.
                Default 1.
            samples: Number of rows that the consumer samples at once. The consumer is called only when the buffer's
                limiter allows this many. None: 1 if the trigger is for replay, otherwise 0.
            updates: Whether the consumer may change the agent. If so, publishing waits until the consumer has returned.
                Default True. Use False for a consumer that only evaluates or logs.
            name: The trigger's name in errors and messages. None: its class and a number, e.g. `TimeTrigger-1`.

        Returns:
            The trigger's name.

        Raises:
            ConfigError: The workflow is running, or an option does not fit the consumer.
        """
        if self._state.feed is not None:
            raise ConfigError("this workflow is running; register triggers before run().")
        if not callable(consumer):
            raise ConfigError(f"consumer is {consumer!r}; expected a function of the message, or a Delivery.")
        if thread and hasattr(consumer, "finished"):
            raise ConfigError(f"{consumer!r} already delivers messages elsewhere; leave out thread=True.")
        publishes = consumer == self.publish and not thread
        found = self._loop.registry.add(
            self._state,
            trigger,
            consumer,
            PublishDelivery(self.publish, self.agent, self._state.wake) if publishes else None,
            thread=thread,
            max_outstanding=max_outstanding,
            samples=None if samples is None else check_count("samples", samples),
            updates=updates,
            name=name,
        )
        if consumer == self.next_rollout:
            self._loop.requests.on_demand = True
        return found

    # ---- for consumers ----

    def batch(self, message: Message) -> Batch:
        """Return the rows that a `DataKeyTrigger`'s message names. The arrays are valid until the consumer returns.

        Args:
            message: The message that the consumer received.

        Returns:
            A batch of shape `[size, slots]`.

        Raises:
            ConfigError: `message` does not name one window of rows.
            FarstepError: The consumer has returned, or its trigger does not consume rows.
        """
        if not isinstance(message, Mapping):
            raise ConfigError(f"batch got {message!r}; expected the message that a DataKeyTrigger's consumer is given.")
        return self._state.retention.batch(message)

    def backlog(self) -> dict[str, int]:
        """Return how many rows each consumer still has to process.

        Returns:
            For each trigger, by name: the largest number of unprocessed rows of any environment slot.
        """
        return dict(zip(self._loop.registry.reading, self._state.retention.backlog(), strict=False))

    @property
    def max_unread_chunks(self) -> int:
        """Number of unread chunks after which all workers wait; parked workers do not count; 0 between runs."""
        feed = self._state.feed
        return 0 if feed is None else feed.max_unread_chunks

    @property
    def num_unread_chunks(self) -> int:
        """Number of chunks that have arrived and wait to be inserted into the buffer; 0 between runs."""
        feed = self._state.feed
        return 0 if feed is None else feed.num_unread_chunks

    def publish(self, message: Message | None = None) -> int:
        """Publish the agent's parameters, which fires `ObjectKeyTrigger("parameters")`. May be used as a consumer.

        The published parameters are consistent: the call waits until all other consumers that update the agent have
        returned (see `updates` of `on`). If a consumer calls it in the middle of its own update, the current parameters
        are published.

        Args:
            message: Ignored; it allows registering this method as a consumer.

        Returns:
            The new version.

        Raises:
            PublishTimeout: A consumer did not return within `end_s` seconds.
            ClosedError: The cluster was closed, or a consumer raised in the middle of an update and ended the run.
        """
        version = self.env.publish(self.agent)
        self._loop.execute(lambda: self.ledger.published("parameters", version))
        return version

    def next_rollout(self, message: Message | None = None) -> None:
        """Let every present worker roll one window (the largest of all consuming triggers), or one chunk without such
        triggers.

        If this method is a consumer, workers roll only when it is called. If a worker is absent during the call, it
        rolls when it joins. With `DataKeyTrigger(n="all")`, it waits for the next call instead, unless too few
        requested workers remain for `min_nodes`.

        Args:
            message: Ignored; it allows registering this method as a consumer.

        Raises:
            ConfigError: The workflow is not running, or this method is not one of its consumers.
        """
        if self._state.feed is None or not self._loop.requests.on_demand:
            raise ConfigError(
                "next_rollout works only while the workflow runs, and if it is a consumer: "
                'flow.on(farstep.ObjectKeyTrigger("parameters"), flow.next_rollout).'
            )
        self._loop.request_rollout()

    def put(self, name: str, value: Nested) -> int:
        """Publish another object, such as a noise scale or a target network. This fires `ObjectKeyTrigger(name)`.

        `flow.objects.read(name)` returns the object; another process can map it by `flow.objects.path(name)`.

        Args:
            name: Name of the object; not `parameters`.
            value: A number, an array, a tensor, or a nesting of these.

        Returns:
            The new version of the object.

        Raises:
            ConfigError: The name is invalid.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"put got the name {name!r}; expected a string, like the key of an ObjectKeyTrigger.")
        if name == "parameters":
            raise ConfigError("the agent's parameters are published with publish(); choose another name.")
        version = self.objects.publish(name, value)
        self._loop.execute(lambda: self.ledger.published(name, version))
        return version

    def learned(self, steps: int = 1) -> None:
        """Count further updates of the learner for `TimeTrigger(unit="learner_steps")`.

        Each handled message of a `DataKeyTrigger` counts as one update automatically.

        Args:
            steps: Number of updates; default 1.

        Raises:
            ConfigError: `steps` is not a positive integer.
        """
        steps = check_count("steps", steps)
        self._loop.execute(lambda: self.ledger.learned(steps))

    def stop(self) -> None:
        """End the current `run`; no trigger fires any more. Any thread may call this."""
        self._state.stopped = True
        self._state.wake()

    # ---- running ----

    def bind(self) -> None:
        """Launch the workers and allocate the buffer's arrays, if this was not done yet. `run` calls it, too.

        Raises:
            ConfigError: An option does not fit the environments or the buffer.
        """
        self._loop.bind(self.agent)

    def run(self, total_steps: int | None = None, until: Callable[[], bool] | None = None) -> None:
        """Collect rows and call consumers until a condition holds, `stop` is called, or a consumer raises.

        At the end, consumer threads finish their messages. Rows that no trigger has taken, and chunks in progress, are
        dropped; `stats` counts them as cancelled.

        Args:
            total_steps: Stop after this many environment steps, summed over all runs of this workflow. None: no limit.
            until: Function without arguments; stop when it returns True. None: no such condition.

        Raises:
            ConfigError: An option does not fit the environments or the buffer.
            ClosedError: This workflow is already running.
            Exception: Any exception that a consumer raised.
        """
        if total_steps is not None:
            check_count("total_steps", total_steps)
        if until is not None and not callable(until):
            raise ConfigError(f"until is {until!r}; expected a function without arguments that returns a bool.")
        self._loop.run(self.agent, total_steps, until)
