"""The acting server's copy of the agent: acts on rows of several workers at once."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from farstep.acting.mailbox import EPISODES, IS_FIRST, ROOTS, STARTS, USED, Mailbox
from farstep.acting.serving.arena import Requests
from farstep.acting.serving.thread_choice import ThreadChoice
from farstep.agents.base_weights import BaseBytes
from farstep.agents.gpu.graph_policy import with_graphs
from farstep.agents.parameters import as_array, leaves_of
from farstep.agents.policy import MAX_IN_FLIGHT, Launched, Policy
from farstep.agents.precision import USE_FLOAT32, ReducedPolicy, reduce_layers
from farstep.agents.sized_policy import SizedPolicy
from farstep.config.env import ALL_WEIGHTS, WeightsConfig
from farstep.config.inference import ServedDtype
from farstep.core import Array, Nested
from farstep.errors import AgentError, FarstepError, described
from farstep.rollout.rows import Slots
from farstep.rollout.seeds import episode_generator
from farstep.schema import Schema, Structure, leaf_names, map_leaves
from farstep.worker.acting import Actor


@dataclass
class Group:
    """Environments of one worker that step together."""

    mailbox: Mailbox
    index: int
    slots: Array
    """Slot numbers."""
    state: Nested
    previous: Nested
    """Recurrent state after and before the last call of `act`."""
    generators: list[np.random.Generator]
    """One per slot, if the agent takes `rng`; otherwise empty."""
    acted: int = 0
    """Number of the last request that was acted on; stays 0 unless the policy is recurrent or takes `rng`."""
    words: memoryview = field(init=False)
    range: slice = field(init=False)
    num_envs: int = field(init=False)
    arrays: dict[str, Array] = field(init=False)
    """The rows of this group in each array of the mailbox."""

    def __post_init__(self) -> None:
        self.words, self.range = self.mailbox.group_words[self.index], self.mailbox.ranges[self.index]
        self.num_envs = len(self.slots)
        self.arrays = {name: array[self.range] for name, array in self.mailbox.arrays.items()}
        self._previous_generators: list[tuple[np.random.Generator, Mapping[str, Any]]] = []
        """The generators before the last call of `act`, with their states."""

    def roll_back(self) -> None:
        """Undo the last call of `act` if the worker has not used its answer."""
        if self.acted == self.words[USED]:
            return
        self.acted, self.state = self.words[USED], self.previous
        for i, (generator, state) in enumerate(self._previous_generators):
            generator.bit_generator.state = state
            self.generators[i] = generator

    def begin_act(self) -> None:
        """Undo an unused call of `act`, and keep what `roll_back` restores after the next one."""
        self.roll_back()
        self.previous = self.state
        self._previous_generators = [(generator, generator.bit_generator.state) for generator in self.generators]

    def current_generators(self) -> list[np.random.Generator]:
        """The generators, new ones for slots that begin an episode."""
        for i in np.flatnonzero(self.arrays[STARTS]).tolist():
            self.generators[i] = self.new_generator(i)
        return self.generators

    def new_generator(self, i: int) -> np.random.Generator:
        """The generator of the current episode of slot `i` of this group."""
        roots, episodes = self.arrays[ROOTS], self.arrays[EPISODES]
        return episode_generator(int(roots[i]), int(self.slots[i]), int(episodes[i]))


@dataclass
class Batch:
    """Requests on which the policy acts at once."""

    requests: Sequence[Requests]
    parts: Sequence[slice]
    """The rows of the requests of each arena."""
    rows: dict[str, Array]
    """Observations and, after `BatchActor.finish`, outputs: `[1, rows, ...]`."""
    slots: Array
    """Slot number of each row."""
    state: Nested
    """Recurrent state before the call of `act`; None if the agent is not recurrent."""
    launched: Launched
    """The call of `act`."""

    def answer(self, names: Iterable[str]) -> None:
        """Write the named outputs into the mailboxes."""
        for name in names:
            row = self.rows[name][0]
            for requests, part in zip(self.requests, self.parts, strict=True):
                requests.arena.arrays[name][requests.rows] = row[part]


class _RowBuffers:
    """The arrays of one batch, which later batches use again.

    Args:
        specs: The arrays of a row beside `episode_start`.
    """

    def __init__(self, specs: Schema) -> None:
        self._specs = specs
        self._arrays: dict[str, Array] = {}
        self._sizes: dict[int, dict[str, Array]] = {}
        """The first rows of the arrays, by their number."""

    def sized(self, count: int) -> dict[str, Array]:
        """Arrays `[1, count, ...]`."""
        if not self._arrays or self._arrays["episode_start"].shape[1] < count:
            room = 1 << (count - 1).bit_length()
            self._arrays = {n: np.zeros((1, room, *s.shape), np.dtype(s.dtype)) for n, s in self._specs.items()}
            self._arrays["episode_start"] = np.zeros((1, room), bool)
            self._sizes = {}
        if count not in self._sizes:
            self._sizes[count] = {name: array[:, :count] for name, array in self._arrays.items()}
        return self._sizes[count]


class BatchActor(Actor):
    """An `Actor` whose rows come from the mailboxes of several workers, and that may act in lower precision.

    At most two batches may be in flight: after `start`, until their answers are written. They finish in the order in
    which they started.

    Args:
        payload: The pickled agent.
        obs: The structure of observations.
        slots: The slots of the worker on whose observations `dry_run` tries the agent.
        weights: Which weights are loaded.
        has_gpu: Whether to act on the GPU.
        base: The base of the agent; None if it has none.
        dtype: Precision of the layers.
        max_batch: Largest number of rows for which CUDA graphs are captured.
    """

    def __init__(
        self,
        payload: bytes,
        obs: Structure,
        slots: Slots,
        weights: WeightsConfig = ALL_WEIGHTS,
        has_gpu: bool = False,
        base: BaseBytes | None = None,
        dtype: ServedDtype = "float32",
        max_batch: int = 4096,
    ) -> None:
        super().__init__(payload, "eager", obs, slots, weights, has_gpu and dtype == "float32", base)
        self._reduced: ReducedPolicy | None = None
        """The policy that acts, if its precision is lower than that of the weights that are loaded."""
        self._last: tuple[dict[str, Array], Nested] | None = None
        """The rows of the last batch that has finished, and its recurrent state before the call of `act`."""
        self._dtype = dtype
        if dtype != "float32":
            assert self._trial is not None
            self._trial = Policy(reduce_layers(self._trial.agent, dtype), "eager", has_gpu, self._trial.slots)
            self._reduced = ReducedPolicy(self.policy, dtype, has_gpu)
            self.policy = self._reduced.policy
        elif self.policy.device is None:
            self.policy = SizedPolicy(self.policy.agent, self.policy.slots)
        self.policy = with_graphs(self.policy, max_batch)
        self._numbers = np.zeros(0, np.int64)
        self._threads: ThreadChoice | None = None
        self._batch_rng: list[np.random.Generator] | None = None

    def dry_run(self, current: dict[str, Array], action_schema: Schema) -> tuple[Schema, Schema, Structure]:
        if self._reduced is None:
            return super().dry_run(current, action_schema)
        try:
            outputs, state, state_structure = super().dry_run(current, action_schema)
        except FarstepError:
            raise
        except Exception as error:
            raise AgentError(
                f"act raised {described(error)} with dtype={self._dtype!r}. Layers such as torch.nn.Linear then have "
                f"{self._dtype} weights, and take and return float32: use their weights only by calling the layers, or "
                f"{USE_FLOAT32}."
            ) from error
        self._reduced.start(self._obs, self.structure["action"], state_structure, outputs, self.example)
        return outputs, state, state_structure

    def loaded(self, version: int) -> None:
        if self._reduced is not None:
            self._reduced.load()
            self._reduced.check(self._last_rows())
        super().loaded(version)

    def _last_rows(self) -> dict[str, Array]:
        """The rows of the last call of `act`, with the recurrent state."""
        if self._last is None:
            return self.example
        rows, before = self._last
        state = leaves_of(before, "state") if self.policy.recurrent else ()
        return {name: array[0] for name, array in rows.items()} | {name: as_array(leaf) for name, leaf in state}

    def prepare(self, obs: Schema, outputs: Schema) -> None:
        """Set the arrays of a batch; called once, after `dry_run`."""
        buffers = [_RowBuffers({**obs, **outputs}) for _ in range(MAX_IN_FLIGHT)]
        self._buffers = itertools.cycle(buffers)
        self._write_to(buffers[0].sized(1))
        self._obs_names = list(obs)
        self.output_names = leaf_names(self.structure)

    def new_group(self, mailbox: Mailbox, index: int, first_slot: int) -> Group:
        """Start to act for a group."""
        count = mailbox.layout.groups[index]
        state = self.policy.initial_state(count)
        slots = first_slot + mailbox.ranges[index].start + np.arange(count)
        group = Group(mailbox, index, slots, state, state, [])
        if self.policy.wants_rng:
            group.generators = [group.new_generator(i) for i in range(count)]
        return group

    def start(self, requests: Sequence[Requests]) -> Batch:
        """Start to act on these requests. On the GPU, this does not wait for the outputs."""
        count = sum(len(each.rows) for each in requests)
        self._rows = rows = next(self._buffers).sized(count)
        parts, stop = [], 0
        for each in requests:
            part = slice(stop, stop := stop + len(each.rows))
            parts.append(part)
            for name in self._obs_names:
                _gather(each.arena.arrays[name], each.rows, rows[name][0, part])
            _gather(each.arena.arrays[STARTS], each.rows, rows["episode_start"][0, part])
        self._numbers = self.policy.slots = np.concatenate([each.arena.slots[each.rows] for each in requests])
        if self._keeps_state:
            groups = [client.groups[i] for each in requests for client, i in each.clients()]
            self._begin_act(groups)
        return Batch(requests, parts, rows, self._numbers, self._state, self._launched(rows, count))

    @property
    def _keeps_state(self) -> bool:
        """Whether the server keeps anything of an environment between two calls of `act`."""
        return self.policy.recurrent or self.policy.wants_rng

    def _begin_act(self, groups: Sequence[Group]) -> None:
        for group in groups:
            group.begin_act()
        if self.policy.wants_rng:
            self._batch_rng = [each for group in groups for each in group.current_generators()]
        if self.policy.recurrent:
            self._gather_state(groups)

    def finish(self, batch: Batch) -> None:
        """Wait until the policy has acted, and copy the outputs and the recurrent state."""
        self._rows, self._numbers = batch.rows, batch.slots  # another batch may have started
        self._last = (batch.rows, batch.state)
        try:
            out = batch.launched.wait()
        except Exception as error:
            self._explain(error, self._arrays_observed(0))
            raise
        self._record(0, out)
        if self._keeps_state:
            self._end_act(batch.requests)

    def _end_act(self, requests: Sequence[Requests]) -> None:
        """Keep the new recurrent state of each group."""
        stop = 0
        for each in requests:
            for (client, i), number in zip(each.clients(), each.numbers.tolist(), strict=True):
                group = client.groups[i]
                group.acted = number
                part = slice(stop, stop := stop + group.num_envs)
                if self.policy.recurrent:
                    group.state = _part(self._state, part)

    def use_threads(self, max_threads: int) -> None:
        """Let torch compute each batch with one thread or with `max_threads`, whichever is faster."""
        self._threads = ThreadChoice(max_threads)

    def _launched(self, rows: dict[str, Array], count: int) -> Launched:
        """Call the policy on these rows, on the CPU with the number of threads that is faster."""
        if self._threads is None:
            return self._launch(rows)
        torch, threads = sys.modules["torch"], self._threads.threads_for(count)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        began = time.perf_counter()
        launched = self._launch(rows)
        self._threads.note(count, threads, time.perf_counter() - began)
        return launched

    def _launch(self, rows: dict[str, Array]) -> Launched:
        try:
            return self.policy.launch(self._observed(0), self._state, rows["episode_start"][0], self._batch_rng)
        except Exception as error:
            self._explain(error, self._arrays_observed(0))
            raise

    def _gather_state(self, groups: Sequence[Group]) -> None:
        states = []
        for group in groups:
            if group.words[IS_FIRST]:
                for name, leaf in leaves_of(group.state, "state"):
                    group.arrays[name][...] = as_array(leaf)
            states.append(group.state)
        self._state = _joined(states)

    def _slot_of(self, i: int) -> int:
        return int(self._numbers[i]) if len(self._numbers) else super()._slot_of(i)

    def save_groups(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Recurrent state and generators of one worker's groups, as `Actor.save` returns them."""
        for group in groups:
            group.roll_back()
        state = []
        if self.policy.recurrent:
            state = [as_array(leaf) for _, leaf in leaves_of(_joined([g.state for g in groups]), "state")]
        return {"state": state, "generators": [r.bit_generator.state for g in groups for r in g.generators]}

    def restore_groups(self, groups: Sequence[Group], saved: Mapping[str, Any]) -> None:
        """Restore what `save_groups` returned."""
        generators = iter(saved["generators"])
        for group in groups:
            group.acted = group.words[USED]
            if self.policy.recurrent and saved["state"]:
                group.state = group.previous = _filled(group.state, [array[group.range] for array in saved["state"]])
            for generator in group.generators:
                if (state := next(generators, None)) is not None:
                    generator.bit_generator.state = state


def _gather(array: Array, rows: Array, out: Array) -> None:
    """Copy some rows of an array."""
    array.take(rows, 0, out, "clip")  # with the mode "raise", NumPy would copy twice


def _joined(states: Sequence[Nested]) -> Nested:
    """Concatenate recurrent states."""
    if len(states) == 1:
        return states[0]
    columns = [[as_array(leaf) for _, leaf in leaves_of(state, "state")] for state in states]
    return _filled(states[0], [np.concatenate(column) for column in zip(*columns, strict=True)])


def _filled(like: Nested, arrays: Sequence[Array]) -> Nested:
    """Copies of the arrays, nested like another recurrent state."""
    following = iter(arrays)
    return map_leaves(lambda _: np.array(next(following)), like)


def _part(state: Nested, part: slice) -> Nested:
    """Copy some rows of a recurrent state."""
    return map_leaves(lambda leaf: np.array(as_array(leaf)[part]), state)
