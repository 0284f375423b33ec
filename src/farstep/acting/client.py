"""A worker's side of served inference: asks the acting server for actions, one group of environments at a time."""

from __future__ import annotations

import contextlib
import hmac
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from farstep.acting import messages as am
from farstep.acting.connections import Exchange, ServerAddress
from farstep.acting.mailbox import (
    ANSWER,
    CONTINUES,
    COUNTS_AS,
    DIVERGENCE,
    EPISODES,
    FAILED,
    HELD,
    IS_FIRST,
    MIN_VERSION,
    NEWEST,
    PULLED_BYTES,
    PULLS,
    REQUEST,
    ROOTS,
    STARTS,
    TICKET,
    USED,
    VERSION,
    WAITS,
    MailboxLayout,
    divergence_of_bits,
)
from farstep.batch import PRIORITY
from farstep.config.inference import ServedInference
from farstep.core import Array, Link, Received
from farstep.errors import WireError
from farstep.rollout.progress import REQUESTS, WAITED_US, Phase
from farstep.rollout.rows import Rows, Slots
from farstep.schema import Schema, Structure, leaf_names
from farstep.wire.channels.doorbell import Fence
from farstep.wire.codec import pack, unpack
from farstep.wire.messages import Ticket
from farstep.worker.acting import prioritized_rows
from farstep.worker.weights.weight_sync import PullTotals

_WAIT_S = 0.1
"""Seconds between two calls of `idle` while the worker waits for the server."""
_RETRY_S = 0.02
"""Seconds between two attempts to connect while the server is being restarted."""


class ServerLost(Exception):
    """The acting server ended. Its replacement knows nothing of the episodes in progress."""

    def __init__(self) -> None:
        super().__init__("the acting server of this worker ended; its replacement has lost recurrent states")


class ServedError(Exception):
    """The agent raised in the acting server, or cannot be used there."""

    def __init__(self, failed: am.Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


class _GroupViews:
    """The memory of the environments of one group.

    Args:
        part: Which environments of the worker.
        words: The group's words in the mailbox.
        arrays: The group's rows in each array of the mailbox.
    """

    starts: Array
    versions: Array
    """The columns of `episode_start` and `version` in the current chunk."""
    observed: list[tuple[Array, Array]]
    """What a request copies: to the mailbox, from a row of the chunk."""
    answered: list[tuple[Array, Array]]
    """What an answer copies: to a row of the chunk, from the mailbox."""

    def __init__(self, part: slice, words: memoryview, arrays: Mapping[str, Array]) -> None:
        self.part, self.words, self.arrays = part, words, arrays

    def begin(self, row: Mapping[str, Array], obs: Iterable[str], outputs: Iterable[str]) -> None:
        """Prepare views of a chunk's rows.

        Args:
            row: The arrays of the chunk, `[steps, envs, ...]`.
            obs: Names of observations.
            outputs: Names of what the policy returns.
        """
        self.starts, self.versions = row["episode_start"][:, self.part], row["version"][:, self.part]
        self.observed = [(self.arrays[name], row[name][:, self.part]) for name in obs]
        self.observed.append((self.arrays[STARTS], self.starts))
        self.answered = [(row[name][:, self.part], self.arrays[name]) for name in outputs]


class ServedActor:
    """Acts through the acting server. It has the methods of `Actor` that workers use, and requests per group.

    Args:
        worker: The worker's number.
        address: How to reach the server.
        agent: Number of the agent that the head has sent.
        slots: The worker's slots.
        obs: How observations are nested.
        schemas: The arrays of observations and of actions, per environment.
        groups: Number of environments in each group.
        idle: Called while the worker waits; may raise `TicketCancelled`.
        words: The worker's progress words.
    """

    def __init__(
        self,
        worker: int,
        address: ServerAddress,
        agent: int,
        slots: Slots,
        obs: Structure,
        schemas: tuple[Schema, Schema],
        groups: list[int],
        idle: Callable[[], None],
        words: memoryview,
    ) -> None:
        self._progress = words
        self._worker, self.agent, self._slots, self._obs = worker, agent, slots, obs
        self._address = address
        self._obs_schema, self._action_schema = schemas
        self._num_groups, self.idle = groups, idle
        self._link: Link | None = None
        self._exchange: Exchange | None = None
        self.version = self.passed = -1
        """The oldest version that acted in the current chunk, and the oldest that its rows count as."""
        self.divergence: float | None = None
        """The running divergence of the server's weights when it first acted in the current chunk."""
        self.newest = 0
        """The newest version that the head has announced; 0 with shared memory, where the server sees it at once."""
        self._requested = [0] * len(groups)
        self._waited_ns = self._waits = 0
        self._reported_pulls = self._reported_bytes = 0
        self._fence = Fence()

    @property
    def groups(self) -> list[slice]:
        """The environments of each group."""
        assert self._exchange is not None
        return self._exchange.mailbox.ranges

    # ---- connecting ----

    def join(self, current: Mapping[str, Array]) -> am.Joined:
        """Connect to the server, wait until it has the agent, and return what the agent returns.

        Args:
            current: The current observations, on which the server tries the agent.

        Raises:
            ServedError: The agent cannot be used.
        """
        while True:
            self.close()
            try:
                self._connect()
                reply, received = self._ask(
                    am.Join(
                        self._worker,
                        self.agent,
                        self._slots.first,
                        list(self._slots.roots),
                        list(self._slots.episodes),
                        pack(self._obs),
                        self._obs_schema,
                        self._action_schema,
                        self._num_groups,
                        am.proof(self._address.secret, "worker"),
                    ),
                    pack(dict(current)),
                )
            except ServerLost:
                self.idle()
                time.sleep(_RETRY_S)
                continue
            if not isinstance(reply, am.Joined):
                raise WireError(f"the acting server answered {type(reply).__name__} to a Join.")
            if not hmac.compare_digest(reply.proof, am.proof(self._address.secret, "server")):
                raise WireError("the process at the acting server's address does not have the secret of this run.")
            self._attach(reply, received)
            return reply

    def _connect(self) -> None:
        while (link := self._address.connect()) is None:
            self.idle()
            time.sleep(_RETRY_S)
        self._link = link

    def _ask(self, message: am.FromClient, *frames: bytes) -> tuple[am.FromServer, Received]:
        """Send a request and wait for its answer.

        Raises:
            ServedError: The server answered that the agent raised.
            ServerLost: The server ended.
        """
        if self._link is None:
            raise ServerLost
        try:
            if self._exchange is not None:
                self._exchange.update()
            self._link.send([am.encode(message), *frames])
            began = time.monotonic()
            while True:
                received = self._link.receive(_WAIT_S)
                if received is None:
                    self._wait_once(self.idle, began)
                    continue
                reply = am.decode_from_server(received.frames)
                if not isinstance(reply, am.Acted):
                    break
                if self._exchange is not None:  # otherwise it answers a request of the last agent
                    self._exchange.take(reply, received)
        except (EOFError, ConnectionError) as error:
            raise self._lost() from error
        if isinstance(reply, am.Failed):
            raise ServedError(reply)
        return reply, received

    def _wait_once(self, idle: Callable[[], None], began: float) -> None:
        """Called repeatedly while the worker waits for the server, since `began`.

        Raises:
            ServedError: The server cannot be reached.
            ServerLost: Meanwhile, the head has named another server, or none.
        """
        idle()
        if not self._address.is_current():
            raise self._lost()
        if reason := self._address.connection_error(time.monotonic() - began):
            raise ServedError(am.Failed(f"LaunchError: {reason}", "", Phase.CONNECT.label, "LaunchError"))

    def _attach(self, reply: am.Joined, received: Received) -> None:
        layout = MailboxLayout(self._num_groups, self._obs_schema, reply.schema, reply.state, reply.num_mailboxes)
        self._exchange = self._address.exchange(received, layout, reply.mailbox_index)
        self._mailbox = self._exchange.mailbox
        self.structure: dict[str, Any] = unpack(reply.structure)
        self._outputs = leaf_names(self.structure)
        self._groups = [
            _GroupViews(part, words, {name: array[part] for name, array in self._mailbox.arrays.items()})
            for part, words in zip(self._mailbox.ranges, self._mailbox.group_words, strict=True)
        ]
        self._state_names = list(reply.state)
        self.has_priorities = reply.has_priorities
        self._requested = [0] * len(self._num_groups)
        self._reported_pulls = reply.pulls
        if self._mailbox.words[PULLS] < reply.pulls:  # the server has not written the word of this mailbox yet
            self._mailbox.words[PULLS] = reply.pulls
        self._reported_bytes = 0

    def close(self) -> None:
        """Disconnect."""
        if self._link is not None:
            self._address.disconnect(self._link)
            self._link = None
        self._close_exchange()

    def _close_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _lost(self) -> ServerLost:
        """Return the error to raise, and stop writing to the mailbox: another worker may have it by now."""
        self._close_exchange()
        return ServerLost()

    def take_note(self) -> str:
        """Nothing: the server reports how it calls the policy when a worker joins, and only logs later changes."""
        return ""

    # ---- a chunk ----

    def begin(self, rows: Rows) -> None:
        """Start a chunk that is written into `rows`. Raise `ServerLost` if the server has ended since the last one."""
        if self._exchange is None or not self._address.is_current():
            raise self._lost()
        self._chunk = rows.chunk
        for group in self._groups:
            group.begin(rows.row, self._obs_schema, self._outputs)
        self.version = self.passed = 2**62
        self._is_first = [True] * len(self._num_groups)
        self._ticket, self._min_version = 0, 0

    def hold(self, ticket: Ticket) -> None:
        """Set the ticket of the chunk, and whether all its rows must have one version."""
        self._ticket, self._min_version = ticket.seq, ticket.min_version
        self._mailbox.words[HELD] = ticket.seq if ticket.one_version else 0

    def release(self) -> None:
        """End the chunk: the server may change its weights."""
        if self._exchange is not None:
            self._mailbox.words[HELD] = 0
            for words in self._mailbox.group_words:
                words[CONTINUES] = 0
            self._exchange.update()

    def request(self, t: int, group: int, continues: bool = False) -> None:
        """Ask for the actions of row `t` of a group. `continues`: whether the chunk has a row after it."""
        assert self._exchange is not None
        views = self._groups[group]
        words = views.words
        for target, source in views.observed:
            target[:] = source[t]
        if b"\1" in views.starts[t].tobytes():  # for a few environments faster than any()
            views.arrays[ROOTS][:] = self._slots.roots[views.part]
            views.arrays[EPISODES][:] = self._slots.episodes[views.part]
        words[NEWEST] = self.newest
        words[CONTINUES] = True  # the server's window waits for this request until the server can see it
        if self._is_first[group]:
            words[MIN_VERSION], words[IS_FIRST] = self._min_version, True
            self._fence()  # the server may still read an earlier, cancelled request
            words[TICKET] = self._ticket
        self._requested[group] = number = self._requested[group] + 1
        self._fence()
        words[REQUEST] = number
        if not continues:
            self._fence()
            words[CONTINUES] = False
        self._exchange.post(group)

    def receive(self, t: int, group: int, idle: Callable[[], None] | None = None) -> None:
        """Wait for the actions of row `t` of a group, and write them into the row.

        Args:
            t: The row.
            group: The group.
            idle: Called while waiting, instead of the default; may raise `TicketCancelled`.

        Raises:
            ServedError: The agent raised.
            ServerLost: The server ended.
        """
        views = self._groups[group]
        words = views.words
        if words[ANSWER] != self._requested[group]:
            began = time.perf_counter_ns()
            self._wait(words, group, idle or self.idle)
            self._waited_ns += time.perf_counter_ns() - began
        self._waits += 1
        self._fence()
        if words[FAILED]:
            self._ask(am.Explain())  # raises ServedError
        words[USED] = self._requested[group]
        for target, source in views.answered:
            target[t] = source
        if self._is_first[group]:
            self._is_first[group] = words[IS_FIRST] = False
            self.divergence = divergence_of_bits(self._mailbox.words[DIVERGENCE])
            for name in self._state_names:
                self._chunk[name][views.part] = views.arrays[name]
        views.versions[t] = version = words[VERSION]
        if version < self.version:
            self.version = version
        if (counts_as := words[COUNTS_AS]) < self.passed:
            self.passed = counts_as

    def _wait(self, words: memoryview, group: int, idle: Callable[[], None]) -> None:
        assert self._exchange is not None
        requested, began = self._requested[group], time.monotonic()
        words[WAITS] = 1
        self._fence()  # the server writes its answer before it looks whether this worker waits
        while words[ANSWER] != requested:
            try:
                arrived = self._exchange.wait(_WAIT_S)
                if words[ANSWER] == requested:
                    break
                self._exchange.check()
            except (EOFError, ConnectionError) as error:
                raise self._lost() from error
            if not arrived:
                self._wait_once(idle, began)
                self._exchange.remind()
        words[WAITS] = 0

    def act(self, t: int) -> None:
        """Act on row `t` of all groups."""
        for group in range(len(self._num_groups)):
            self.request(t, group)
        for group in range(len(self._num_groups)):
            self.receive(t, group)

    timed_act = act

    def take_timed(self) -> tuple[int, int]:
        """Nanoseconds for which the worker waited for actions, and the number of waits, since the last call."""
        timed, self._waited_ns, self._waits = (self._waited_ns, self._waits), 0, 0
        self._progress[WAITED_US] += timed[0] // 1000
        self._progress[REQUESTS] += timed[1]
        return timed

    def take_totals(self) -> PullTotals:
        """The pulls of the server since the last call. One worker reports their bytes."""
        if self._exchange is None:
            return PullTotals()
        pulls, nbytes = self._mailbox.words[PULLS], self._mailbox.words[PULLED_BYTES]
        totals = PullTotals(pulls - self._reported_pulls, nbytes - self._reported_bytes)
        self._reported_pulls, self._reported_bytes = pulls, nbytes
        return totals

    # ---- rare requests ----

    def add_priorities(self, rows: Rows, steps: int) -> None:
        """As `Actor.add_priorities`; the server computes them."""
        if self.has_priorities:
            given = prioritized_rows(rows, steps, self.structure, self._obs)
            _, received = self._ask(am.Prioritize(), pack(given))
            rows.row[PRIORITY][:steps] = unpack(received.frames[1])

    def save(self) -> dict[str, Any]:
        """Recurrent state and generators of this worker's slots, as plain data. Raise `ServerLost` if it is lost."""
        return dict(unpack(self._ask(am.Save())[1].frames[1]))

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Restore what `save` returned."""
        self._ask(am.Restore(), pack(dict(saved)))

    @contextlib.contextmanager
    def restoring_state(self) -> Iterator[None]:
        """As `Actor.restoring_state`."""
        saved = self.save()
        try:
            yield
        finally:
            self.resume(saved)


def group_sizes(num_envs: int, serving: ServedInference) -> list[int]:
    """Divide a worker's environments into groups, of which one steps while the server acts for the others.

    A server on a GPU of the same host gets up to four groups of at least two environments: this hides its latency, and
    makes its batches larger. Other servers get two, because each request costs them time, or a message.
    """
    most = 4 if serving.device == "cuda" and serving.where == "node" else 2
    num_groups = min(num_envs, max(2, min(most, num_envs // 2)))
    return [len(part) for part in np.array_split(np.arange(num_envs), num_groups)]
