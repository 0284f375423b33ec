"""The acting server's copy of the agent: acts on rows of several workers at once."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from farstep.acting.mailbox import ANSWER, EPISODES, IS_FIRST, REQUEST, ROOTS, STARTS, USED, Mailbox
from farstep.acting.thread_choice import ThreadChoice
from farstep.agents.parameters import as_array, leaves_of
from farstep.core import Array, Nested
from farstep.rollout.seeds import episode_generator
from farstep.schema import Schema, leaf_names, map_leaves
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
    arrived: float = 0.0
    """When the server first saw the current request, in seconds; 0: no request."""
    acted: int = 0
    """Number of the last request that was acted on."""
    words: memoryview = field(init=False)
    range: slice = field(init=False)

    def __post_init__(self) -> None:
        self.words, self.range = self.mailbox.group_words[self.index], self.mailbox.ranges[self.index]
        self._starts = self.mailbox.arrays[STARTS][self.range]
        self._previous_generators: list[tuple[np.random.Generator, Mapping[str, Any]]] = []
        """The generators before the last call of `act`, with their states."""

    @property
    def num_envs(self) -> int:
        return len(self.slots)

    @property
    def is_pending(self) -> bool:
        """Whether the worker waits for actions."""
        return self.words[REQUEST] != self.words[ANSWER]

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
        for i in np.flatnonzero(self._starts).tolist():
            self.generators[i] = self.new_generator(i)
        return self.generators

    def new_generator(self, i: int) -> np.random.Generator:
        """The generator of the current episode of slot `i` of this group."""
        roots, episodes = (self.mailbox.arrays[name][self.range] for name in (ROOTS, EPISODES))
        return episode_generator(int(roots[i]), int(self.slots[i]), int(episodes[i]))


class BatchActor(Actor):
    """An `Actor` whose rows come from the mailboxes of several workers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._numbers = np.zeros(0, np.int64)
        self._threads: ThreadChoice | None = None
        self._batch_rng: list[np.random.Generator] | None = None
        self._buffers: dict[str, Array] = {}

    def prepare(self, obs: Schema, outputs: Schema) -> None:
        """Set the arrays of a batch; called once, after `dry_run`."""
        self._specs = {**obs, **outputs}
        self._obs_names = list(obs)
        self._output_names = leaf_names(self.structure)

    def new_group(self, mailbox: Mailbox, index: int, first_slot: int) -> Group:
        """Start to act for a group."""
        count = mailbox.layout.groups[index]
        state = self.policy.initial_state(count)
        slots = first_slot + mailbox.ranges[index].start + np.arange(count)
        group = Group(mailbox, index, slots, state, state, [])
        if self.policy.wants_rng:
            group.generators = [group.new_generator(i) for i in range(count)]
        return group

    def act_on(self, groups: Sequence[Group], requests: Sequence[int]) -> None:
        """Act on the requests of these groups, and write the outputs into their mailboxes."""
        edges = np.cumsum([0, *(group.num_envs for group in groups)]).tolist()
        parts = [slice(first, stop) for first, stop in itertools.pairwise(edges)]
        rows = self._sized(edges[-1])
        for group, part in zip(groups, parts, strict=True):
            group.begin_act()
            arrays = group.mailbox.arrays
            for name in self._obs_names:
                rows[name][0, part] = arrays[name][group.range]
            rows["episode_start"][0, part] = arrays[STARTS][group.range]
        self._numbers = self.policy.slots = np.concatenate([group.slots for group in groups])
        if self.policy.wants_rng:
            self._batch_rng = [each for group in groups for each in group.current_generators()]
        if self.policy.recurrent:
            self._gather_state(groups)
        self._write_to(rows)
        self._act_timed(edges[-1])
        for group, part, request in zip(groups, parts, requests, strict=True):
            arrays, group.acted = group.mailbox.arrays, request
            for name in self._output_names:
                arrays[name][group.range] = rows[name][0, part]
            if self.policy.recurrent:
                group.state = _part(self._state, part)

    def use_threads(self, max_threads: int) -> None:
        """Let torch compute each batch with one thread or with `max_threads`, whichever is faster."""
        self._threads = ThreadChoice(max_threads)

    def _act_timed(self, count: int) -> None:
        """Act on `count` rows, with the number of threads that is faster."""
        if self._threads is None:
            self.act(0)
            return
        torch, threads = sys.modules["torch"], self._threads.threads_for(count)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        began = time.perf_counter()
        self.act(0)
        self._threads.note(count, threads, time.perf_counter() - began)

    def _sized(self, count: int) -> dict[str, Array]:
        """Arrays `[1, count, ...]` for a batch."""
        if not self._buffers or self._buffers["episode_start"].shape[1] < count:
            room = 1 << (count - 1).bit_length()
            self._buffers = {n: np.zeros((1, room, *s.shape), np.dtype(s.dtype)) for n, s in self._specs.items()}
            self._buffers["episode_start"] = np.zeros((1, room), bool)
        return {name: array[:, :count] for name, array in self._buffers.items()}

    def _gather_state(self, groups: Sequence[Group]) -> None:
        states = []
        for group in groups:
            if group.words[IS_FIRST]:
                for name, leaf in leaves_of(group.state, "state"):
                    group.mailbox.arrays[name][group.range] = as_array(leaf)
            states.append(group.state)
        self._state = _joined(states)

    def _slot_of(self, i: int) -> int:
        return int(self._numbers[i]) if len(self._numbers) else super()._slot_of(i)

    def _generators(self, t: int) -> list[np.random.Generator] | None:
        return self._batch_rng

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
