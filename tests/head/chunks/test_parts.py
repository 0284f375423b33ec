"""Chunks that are sent in parts: what a worker sends, and what the head accepts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from farstep.batch import ENDS
from farstep.config.env import EnvConfig
from farstep.config.transfer import TransferTrigger
from farstep.core import Received
from farstep.errors import ConfigError, WireError
from farstep.head.chunks.rollouts import ChunkInfo, Rollouts, base_rows
from farstep.head.members.worker_records import split
from farstep.head.tickets.records import AcceptedChunk, IssuedTicket
from farstep.rollout.blocks import Layout
from farstep.rollout.rows import Rows
from farstep.schema import ArraySpec
from farstep.wire import messages as m
from farstep.wire.compression import Compressor
from farstep.worker.chunk_sender import ChunkSender
from farstep.workflow.triggers import TimeTrigger

STEPS, LANES = 7, 2
OBS = {
    "obs.camera": ArraySpec((2, 2), "|u1"),
    "obs.nothing": ArraySpec((0,), "<f4"),
    "obs.pose": ArraySpec((3,), "<f8"),
}
ROWS = {**base_rows(OBS), "action": ArraySpec((), "<i8"), "value": ArraySpec((), "<f4")}
STATE = {"state": ArraySpec((4,), "<f4")}
TRANSFERS = {
    "whole": TransferTrigger(),
    "rows": TransferTrigger(size=2),
    "dual": TransferTrigger.dual(),
    "dual-rows": TransferTrigger.dual(size=3),
    "rows-of-ended": TransferTrigger(size=2) & TransferTrigger(episode_end=True),
    "three": TransferTrigger(keys=(("reward", "obs.pose"), ("obs", "last_obs"), ("action",)), size=1),
}
Message = tuple[m.Part | m.Chunk, list[Any]]


WORLDS: list[World] = []


@pytest.fixture(autouse=True)
def ended_worlds() -> Iterator[None]:
    yield
    for world in WORLDS:
        world.rollouts.close()
    WORLDS.clear()


class World:
    """Worker 1 of two, with two environments of five, and a head that shares no memory with it."""

    def __init__(self, transfer: TransferTrigger, remote: bool = True, ends: int = 3, answers: bool = True) -> None:
        self.records = split(1, 5, 2, 0)
        self.record = self.records[1]
        WORLDS.append(self)
        self.rollouts = Rollouts(self.records, {name[4:]: name for name in OBS}, OBS, remote, transfer)
        self.rollouts.adopt({"action": "action", "value": "value"}, "state")
        self.rollouts.fit(LANES, STEPS, ROWS, STATE)
        self.ticket = IssuedTicket(seq=4, worker=1, round=0, lane=1, min_version=0)
        layout = Layout(1, STEPS, 2, ROWS, STATE)
        rng = np.random.default_rng(3)
        memory = bytearray(rng.integers(0, 2, layout.nbytes, np.uint8).tobytes())
        self.rows = Rows(layout, layout.views(memory), 0, 0, 2)
        places = [(row, self.record.first + row % 2, 1, 0.0, 0.0) for row in range(ends)]
        self.ends = np.array(places, ENDS)
        self.messages = self._rolled(transfer, answers)

    def _rolled(self, transfer: TransferTrigger, answers: bool) -> list[Message]:
        sent: list[Message] = []
        plain = Compressor("none", (), lambda: math.inf)
        sender = ChunkSender(
            transfer, lambda message, *frames: sent.append((message, [*map(bytes, frames)])), lambda: None, plain
        )
        due = sender.begin(m.Ticket(4, 1, STEPS), 6, self.rows)
        for t in range(STEPS):
            if t == due:
                due = sender.send_rows(t)
                if answers:
                    sender.acknowledged(m.Taken(6))
        frames, keys, codecs, first = sender.finish(self.ends.tobytes(), passed=0)
        resume = np.zeros(2, np.int64).tobytes()
        chunk = m.Chunk(4, 0, resume, index=6, passed=0, keys=keys, codecs=codecs, first=first)
        return [*sent, (chunk, [*map(bytes, frames)])]

    def give(self, message: m.Part | m.Chunk, frames: list[Any]) -> Any:
        received = Received([b"header", *frames])
        if isinstance(message, m.Part):
            return self.rollouts.take_part(self.record, self.ticket, STEPS, message, received)
        return self.rollouts.take(self.record, self.ticket, STEPS, message, received, 0)

    def give_all(self) -> ChunkInfo:
        *parts, chunk = self.messages
        for part in parts:
            self.give(*part)
        piece: ChunkInfo = self.give(*chunk)
        return piece

    def assert_all_there(self, piece: ChunkInfo) -> None:
        there = self.rollouts.rows(self.record, self.ticket.lane).tables(STEPS)
        for name, table in self.rows.tables(STEPS).items():
            used = -(-len(self.ends) // 2) if name.startswith("final_") else len(table)
            np.testing.assert_array_equal(there[name][:used], table[:used], err_msg=name)
        np.testing.assert_array_equal(piece.ends, self.ends)
        for name, block in self.rollouts.blocks.items():
            others = block.copy()
            if name in ROWS:
                others[1, :, self.record.columns] = 0
            else:
                others[1, self.record.columns] = 0
            assert not others.any(), f"{name} was written outside of the worker's columns"


@pytest.mark.parametrize("transfer", TRANSFERS.values(), ids=TRANSFERS)
@pytest.mark.parametrize("answers", [True, False], ids=["quick", "slow"])
@pytest.mark.parametrize("ends", [0, 1, 5])
def test_chunks_arrive_unchanged(transfer: TransferTrigger, answers: bool, ends: int) -> None:
    world = World(transfer, ends=ends, answers=answers)
    piece = world.give_all()
    world.assert_all_there(piece)
    stages = max(1, len(transfer.keys))
    assert piece.stage == stages - 1
    assert piece.nbytes == sum(len(frame) for _, frames in world.messages for frame in frames) - ends * ENDS.itemsize
    fragments = [part.first for part, _ in world.messages if isinstance(part, m.Part) and part.stage < 0]
    every = list(range(0, STEPS - (transfer.size or STEPS), transfer.size or STEPS))
    assert fragments == (every if answers else every[:1])
    assert len(world.messages) == len(fragments) + stages


def test_first_stage_of_dual_has_the_arrays_for_advantages() -> None:
    first, second = TransferTrigger.dual().split(Layout(1, STEPS, 2, ROWS, STATE).names())
    assert second == [*OBS, "action"]
    assert {"reward", "terminated", "truncated", "valid", "episode_start", "version", "value", "state"} < set(first)
    assert {kind + name for kind in ("last_", "final_") for name in OBS} < set(first)


def test_most_specific_name_wins_and_other_arrays_are_sent_last() -> None:
    world = World(TRANSFERS["three"])
    first, second, third = (message.keys for message, _ in world.messages[-3:])
    assert first == ["obs.pose", "reward"]
    assert second == ["obs.camera", "obs.nothing", "last_obs.camera", "last_obs.nothing", "last_obs.pose"]
    assert {"action", "value", "state", "final_obs.pose"} < set(third)


def test_a_part_has_only_the_columns_of_its_stage() -> None:
    world = World(TransferTrigger.dual())
    (first, *_), _ = world.messages
    ends = world.give(first, world.messages[0][1])
    part = world.rollouts.part(world.ticket, STEPS, 0, 1, ends, np.zeros(2, bool))
    assert (part.worker, part.stage, part.complete, part.slots.tolist()) == (1, 0, False, [3, 4])
    assert "obs" not in part.batch.structures and "action" not in part.batch
    np.testing.assert_array_equal(part.batch["reward"], world.rows.row["reward"][:STEPS])
    np.testing.assert_array_equal(part.batch.last_obs["pose"], world.rows.row["obs.pose"][STEPS])
    np.testing.assert_array_equal(part.batch.final_obs.slot, [0, 1, 0])
    np.testing.assert_array_equal(part.batch.final_obs.obs["camera"][2], world.rows.row["final_obs.camera"][1, 0])
    np.testing.assert_array_equal(part.batch.initial_state, world.rows.chunk["state"])
    assert part.batch.shape == part.so_far.shape == (STEPS, 2)
    with pytest.raises(KeyError, match="unknown array"):
        part.batch["obs"]
    piece = world.give(*world.messages[1])
    part = world.rollouts.part(world.ticket, STEPS, piece.stage, None, ends, np.zeros(2, bool))
    assert (part.stage, part.complete, set(part.batch)) == (1, True, {*OBS, "action"})
    assert part.batch.shape == (STEPS, 2)
    assert part.batch.last_obs is None and part.batch.final_obs.obs is None and part.batch.initial_state is None
    np.testing.assert_array_equal(part.batch["obs"]["camera"], world.rows.row["obs.camera"][:STEPS])
    lane = world.rollouts.batch([AcceptedChunk(world.ticket, 0, piece)], STEPS, np.zeros(5, bool))
    assert set(part.so_far) == set(lane) and part.so_far.last_obs is not None
    assert np.shares_memory(part.so_far["obs.pose"], lane["obs.pose"])


# ---- what is not believed ----


def changed(**fields: Any) -> Callable[[Message], Message]:
    def change(message: Message) -> Message:
        new = type(message[0])(**{name: getattr(message[0], name) for name in message[0].__struct_fields__} | fields)
        return new, message[1]

    return change


def keys(change: Callable[[list[str]], list[str]]) -> Callable[[Message], Message]:
    return lambda message: changed(keys=change(list(message[0].keys)))(message)


def frame(name: str, change: Callable[[bytes], bytes]) -> Callable[[Message], Message]:
    def edit(message: Message) -> Message:
        i = message[0].keys.index(name) + 1
        return message[0], [change(f) if k == i else f for k, f in enumerate(message[1])]

    return edit


def ends(change: Callable[[bytes], bytes]) -> Callable[[Message], Message]:
    return lambda message: (message[0], [change(message[1][0]), *message[1][1:]])


def without(name: str) -> Callable[[Message], Message]:
    def leave_out(message: Message) -> Message:
        kept = [key != name for key in message[0].keys]
        frames = [f for f, keep in zip(message[1], [True, *kept], strict=True) if keep]
        return keys(lambda names: [n for n in names if n != name])((message[0], frames))

    return leave_out


AN_END = np.array([(0, 3, 1, 0.0, 0.0)], ENDS).tobytes()
# Messages of "dual-rows": 0, 1 rows; 2 the first stage; 3 the chunk.
MALFORMED: dict[str, tuple[int, Callable[[Message], Message]]] = {
    "unknown-array": (0, keys(lambda names: ["secret", *names[1:]])),
    "an-array-of-the-head": (0, keys(lambda names: ["", *names[1:]])),
    "last-of-what-is-no-observation": (2, keys(lambda names: ["last_reward", *names[1:]])),
    "an-array-twice": (0, keys(lambda names: [names[1], *names[1:]])),
    "a-frame-missing": (0, lambda message: (message[0], message[1][:-1])),
    "a-frame-too-many": (0, lambda message: (message[0], [*message[1], b""])),
    "no-frames": (0, lambda message: (message[0], [])),
    "half-a-row": (0, frame("obs.pose", lambda f: f[:-1])),
    "more-rows-than-the-chunk-has": (0, frame("obs.pose", lambda f: f * 3)),
    "bytes-for-an-array-of-nothing": (0, frame("obs.nothing", lambda f: b"x")),
    "rows-before-the-first": (0, changed(first=-1)),
    "a-gap": (1, changed(first=4)),
    "rows-that-came-before": (1, changed(first=0)),
    "more-final-observations-than-steps": (2, frame("final_obs.pose", lambda f: f * 4)),
    "two-last-observations": (2, frame("last_obs.pose", lambda f: f * 2)),
    "two-states": (2, frame("state", lambda f: f * 2)),
    "a-stage-without-its-last-rows": (2, frame("reward", lambda f: b"")),
    "a-stage-without-an-array": (2, without("reward")),
    "a-stage-without-final-observations": (2, frame("final_obs.pose", lambda f: b"")),
    "a-stage-before-its-turn": (2, changed(stage=1)),
    "a-missing-stage": (2, changed(stage=7)),
    "rows-of-a-negative-stage": (0, changed(stage=-2)),
    "ends-with-rows": (0, ends(lambda f: AN_END)),
    "half-an-end": (2, ends(lambda f: f[:-1])),
    "ends-of-another-worker": (2, ends(lambda f: f.replace(AN_END[:8], bytes(8)))),
    "more-ends-than-steps": (2, ends(lambda f: f * 9)),
    "ends-again-with-the-chunk": (3, ends(lambda f: AN_END)),
    "a-chunk-without-its-last-rows": (3, frame("obs.pose", lambda f: b"")),
    "a-chunk-without-arrays": (3, lambda message: (changed(keys=[])(message)[0], message[1][:1])),
    "a-negative-order": (0, changed(index=-1)),
    "an-order-beyond-counting": (0, changed(index=1 << 40)),
    "a-chunk-of-another-attempt": (3, changed(index=9)),
    "a-version-of-the-future": (3, changed(version=3, passed=3)),
}


@pytest.mark.parametrize("case", MALFORMED.values(), ids=MALFORMED)
def test_messages_that_do_not_fit_are_refused(case: tuple[int, Callable[[Message], Message]]) -> None:
    at, change = case
    world = World(TRANSFERS["dual-rows"])
    assert [getattr(message, "stage", None) for message, _ in world.messages] == [-1, -1, 0, None]
    for message in world.messages[:at]:
        world.give(*message)
    with pytest.raises(WireError):
        world.give(*change(world.messages[at]))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_part_that_comes_twice_is_refused(at: int) -> None:
    world = World(TRANSFERS["dual-rows"])
    for message in world.messages[: at + 1]:
        world.give(*message)
    with pytest.raises(WireError):
        world.give(*world.messages[at])


@pytest.mark.parametrize("without", [0, 1, 2])
def test_a_chunk_without_one_of_its_parts_is_refused(without: int) -> None:
    world = World(TRANSFERS["dual-rows"])
    with pytest.raises(WireError):
        for message in world.messages[:without] + world.messages[without + 1 :]:
            world.give(*message)


@pytest.mark.parametrize("until", [1, 2, 3])
def test_parts_of_a_repeated_ticket_replace_earlier_ones(until: int) -> None:
    world = World(TRANSFERS["dual-rows"])
    for message in world.messages[:until]:
        world.give(*message)
    world.messages = [changed(index=8)(message) for message in world.messages]
    world.assert_all_there(world.give_all())


def test_parts_of_a_lost_chunk_count_for_no_other_ticket() -> None:
    world = World(TRANSFERS["dual-rows"])
    for message in world.messages[:3]:
        world.give(*message)
    world.ticket = replace(world.ticket, seq=5)
    with pytest.raises(WireError):
        world.give(*changed(ticket=5)(world.messages[3]))


def test_shared_memory_sends_no_parts_ahead_of_their_chunk() -> None:
    world = World(TRANSFERS["dual-rows"], remote=False)
    with pytest.raises(WireError):
        world.give(*world.messages[0])
    with pytest.raises(WireError):
        world.give(*world.messages[2])


def test_header_with_additional_fields_is_refused() -> None:
    part, _ = World(TRANSFERS["rows"]).messages[0]
    assert isinstance(part, m.Part)
    assert m.decode_from_worker([m.encode(part)]) == part
    with pytest.raises(WireError):
        m.decode_from_worker([m.encode(changed(first="0")((part, []))[0])])


# ---- the option ----


def test_an_environment_configuration_takes_a_mapping() -> None:
    transfer: Any = {"keys": [["reward"], ["obs"]], "size": np.int64(4)}
    config = EnvConfig(env_name="CartPole-v1", transfer=transfer)
    assert config.transfer == TransferTrigger(keys=(("reward",), ("obs",)), size=4)
    assert EnvConfig(env_name="CartPole-v1").transfer.split(["obs", "reward"]) == [["obs", "reward"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "at least 1"),
        ({"size": 2.5}, "an integer"),
        ({"keys": "obs"}, "groups of array names"),
        ({"keys": ["reward", "obs"]}, "groups of array names"),
        ({"keys": [["reward", 1]]}, "groups of array names"),
        ({"keys": [["reward"], ["reward", "obs"]]}, "reward twice"),
        ({"key": []}, "keys"),
    ],
    ids=lambda value: str(value),
)
def test_invalid_transfer_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransferTrigger.of(options)


def test_unknown_array_name_is_refused_with_the_nearest() -> None:
    names = Layout(1, STEPS, 2, ROWS, STATE).names()
    TransferTrigger(keys=(("reward", "obs", "last_obs", "final_obs.pose", "*"), ("obs.camera",))).check(names)
    with pytest.raises(ConfigError, match=r"valu.*value"):
        TransferTrigger(keys=(("valu",),)).check(names)
    with pytest.raises(ConfigError, match=r"obs\.cam"):
        TransferTrigger(keys=(("obs.cam",),)).check(names)


def test_transfer_triggers_are_joined() -> None:
    either = TransferTrigger(size=8) | TransferTrigger(seconds=2.0, episode_end=True) | TransferTrigger(size=5)
    assert either == TransferTrigger(size=5, seconds=2.0, episode_end=True)
    both = TransferTrigger.dual(size=4) & TransferTrigger(episode_end=True)
    assert both.keys == TransferTrigger.dual().keys and both.watches_ends and both.sends_early
    states = [(rows, ended) for rows in (3, 4) for ended in (False, True)]
    assert [both.due(rows, 0, 0.0, ended) for rows, ended in states] == [False, False, False, True]
    assert [either.due(rows, 0, 0.0, ended) for rows, ended in states] == [False, True, False, True]
    with pytest.raises(ConfigError, match="different keys"):
        TransferTrigger(keys=(("obs",),)) | TransferTrigger(keys=(("reward",),))
    with pytest.raises(ConfigError, match="cannot be joined again"):
        both | either
    with pytest.raises(ConfigError, match="does not call a consumer"):
        either & TimeTrigger(1.0)
    with pytest.raises(ConfigError, match="also is 3"):
        TransferTrigger.of({"also": 3})
