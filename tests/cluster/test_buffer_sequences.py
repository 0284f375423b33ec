"""Transitions over several steps and sequences, against a slow reference; batches of rollouts, in any order."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from farstep import Batch, Buffer, ConfigError
from farstep.batch import FinalObs
from farstep.buffer import DPER, FIFO, MinHeap, NStep, Prioritized, Queue, Sequence, Uniform
from farstep.errors import BufferTimeout
from farstep.testing import CountingEnv, TableAgent
from tests.cluster.checks import cluster, in_process
from tests.cluster.rollout_world import Held, Row, World
from tests.cluster.toys import NestedAgent, NestedEnv, counting_vector

quick = settings(max_examples=60, deadline=None, derandomize=True)


def drained(buffer: Buffer, size: int = 1) -> Iterator[tuple[dict[str, Any], int]]:
    """Everything that can be sampled, each once: the sampler chooses by FIFO."""
    while True:
        try:
            batch, info = buffer.sample(size, timeout_s=0)
        except BufferTimeout:
            return
        for i in range(len(info.keys)):
            yield {name: value[i] for name, value in batch.items() if isinstance(value, np.ndarray)}, int(info.keys[i])


# ---- rows ----


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[Row], list[int]]:
    """Rows of one environment, and the sizes they are inserted in."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    rows: list[Row] = []
    for length in lengths:
        truncates = draw(st.booleans())
        for t in range(length):
            over, number = t == length - 1, len(rows)
            reward = float(draw(st.integers(-4, 4)))
            rows.append(Row(number, reward, over and not truncates, over and truncates, -1, t == 0, follows=t > 0))
    if draw(st.booleans()):
        rows[-1].terminated = rows[-1].truncated = False
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=30))
    return rows, sizes


def insert_stream(buffer: Buffer, rows: list[Row], sizes: list[int], arrays: list[str], **further: np.ndarray) -> None:
    every = {
        "obs": np.array([row.obs for row in rows]),
        "reward": np.array([row.reward for row in rows], np.float32),
        "terminated": np.array([row.terminated for row in rows]),
        "truncated": np.array([row.truncated for row in rows]),
        "done": np.array([row.ended for row in rows]),
        "episode_start": np.array([row.start for row in rows]),
        **further,
    }
    at, k = 0, 0
    while at < len(rows):
        size = sizes[k % len(sizes)]
        buffer.insert({name: every[name][at : at + size] for name in ["obs", "reward", *arrays, *further]})
        at, k = at + size, k + 1


@quick
@given(streams(), st.integers(1, 5), st.integers(1, 20), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_n_steps_of_rows(stream: tuple[list[Row], list[int]], n: int, capacity: int, gamma: float) -> None:
    """Without next observations a row counts once the row after its last step is there, or the episode terminated."""
    rows, sizes = stream
    held = Held(capacity, [rows[-capacity:]])
    expected = {}
    for obs, (column, i) in held.items().items():
        path = held.path(column, i, n)
        following = held.columns[0][i + len(path) :]
        if path[-1].terminated or (following and following[0].follows):
            expected[obs] = (path, following[0].obs if following and not path[-1].terminated else None)
    with Buffer(capacity, NStep(n, gamma, by=FIFO())) as buffer:
        insert_stream(buffer, rows, sizes, ["terminated", "truncated"])
        seen = [row for row, _ in drained(buffer)]
    assert [int(row["obs"]) for row in seen] == sorted(expected)
    for row in seen:
        path, after = expected[int(row["obs"])]
        assert row["reward"] == pytest.approx(sum(gamma**k * step.reward for k, step in enumerate(path)), abs=1e-5)
        assert row["steps"] == len(path)
        assert row["terminated"] == path[-1].terminated and row["truncated"] == path[-1].truncated
        assert row["discount"] == pytest.approx(0 if path[-1].terminated else gamma ** len(path))
        assert after is None or row["next_obs"] == after


@quick
@given(streams(), st.integers(1, 5), st.integers(1, 20), st.booleans())
def test_n_steps_of_rows_that_have_next_observations(
    stream: tuple[list[Row], list[int]], n: int, capacity: int, prioritized: bool
) -> None:
    rows, sizes = stream
    held = Held(capacity, [rows[-capacity:]])
    after = np.array([1000 + row.obs for row in rows])
    with Buffer(capacity, NStep(n, 0.5, by=FIFO() if not prioritized else Prioritized()), seed=1) as buffer:
        insert_stream(buffer, rows, sizes, ["done"], next_obs=after)
        if prioritized:
            batch, _ = buffer.sample(200)
            seen = [{name: value[i] for name, value in batch.items()} for i in range(200)]
        else:
            seen = [row for row, _ in drained(buffer, 1)]
            assert len(seen) == min(len(rows), capacity)
    for row in seen:
        path = held.path(*held.items()[int(row["obs"])], n)
        assert row["next_obs"] == 1000 + path[-1].obs
        assert row["discount"] == pytest.approx(0 if path[-1].ended else 0.5 ** len(path))
        assert row["reward"] == pytest.approx(sum(0.5**k * step.reward for k, step in enumerate(path)), abs=1e-5)


def test_terminal_rows_of_a_done_flag_are_sampled() -> None:
    with Buffer(10, NStep(3, by=FIFO())) as buffer:
        buffer.insert({"obs": np.arange(4), "reward": np.ones(4), "done": np.arange(4) == 3})
        assert [(int(r["obs"]), int(r["steps"]), r["discount"] == 0) for r, _ in drained(buffer)] == [
            (0, 3, False),
            (1, 3, True),
            (2, 2, True),
            (3, 1, True),
        ]


def test_rewards_of_integers_and_vectors() -> None:
    data = {"obs": np.arange(4), "terminated": np.arange(4) == 3}
    with Buffer(10, NStep(3, 0.5, by=FIFO())) as buffer:
        buffer.insert(data | {"reward": np.array([1, 1, 1, 1])})
        assert [row["reward"] for row, _ in drained(buffer)] == [1.75, 1.75, 1.5, 1.0]
    with Buffer(10, NStep(3, 0.5, by=FIFO())) as buffer:
        buffer.insert(data | {"reward": np.ones((4, 2), np.float32) * [1, 2]})
        assert [row["reward"].tolist() for row, _ in drained(buffer)] == [
            [1.75, 3.5],
            [1.75, 3.5],
            [1.5, 3.0],
            [1.0, 2.0],
        ]


@quick
@given(
    streams(),
    st.integers(1, 6),
    st.integers(1, 20),
    st.booleans(),
    st.sampled_from([["done"], ["terminated", "truncated"], ["episode_start"], ["episode_start", "truncated"]]),
)
def test_sequences_of_rows(
    stream: tuple[list[Row], list[int]], length: int, capacity: int, pad: bool, arrays: list[str]
) -> None:
    assume(pad or length <= capacity)  # else it is refused
    rows, sizes = stream
    held = Held(capacity, [rows[-capacity:]])
    paths = {obs: [row.obs for row in held.path(*place, length)] for obs, place in held.items().items()}
    if not pad:
        paths = {obs: path for obs, path in paths.items() if len(path) == length}
    with Buffer(capacity, Sequence(length, pad, by=FIFO())) as buffer:
        insert_stream(buffer, rows, sizes, arrays)
        seen = [row for row, _ in drained(buffer)]
    assert [int(row["obs"][0]) for row in seen] == sorted(paths)
    for row in seen:
        path = paths[int(row["obs"][0])]
        assert row["obs"].tolist() == path + [path[-1]] * (length - len(path))
        assert row["valid"].tolist() == [t < len(path) for t in range(length)]


# ---- batches ----


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[World, list[tuple[str, Any, int]]]:
    """Random arrivals of chunks: their batches, order, lengths and losses."""
    slots_of = draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    world = World(slots_of, draw(st.integers(0, 10**6)), filler=draw(st.booleans()), nested=draw(st.booleans()))
    workers = list(range(len(slots_of)))
    events: list[tuple[str, Any, int]] = []
    for _ in range(draw(st.integers(1, 8))):
        steps = draw(st.integers(1, 6))
        if events and draw(st.integers(0, 3)) == 0:
            events.append((draw(st.sampled_from(["lose", "elsewhere"])), draw(st.sampled_from(workers)), steps))
        else:
            chosen = draw(st.permutations(workers))[: draw(st.integers(1, len(workers)))]
            events.append(("insert", sorted(chosen) if draw(st.booleans()) else chosen, steps))
    return world, events


def play(buffer: Buffer, world: World, events: list[tuple[str, Any, int]]) -> Held:
    """Insert the arrivals, and return what the buffer must hold then."""
    held: Held | None = None
    for kind, who, steps in events:
        if kind == "lose":
            world.lose(who, steps)
            continue
        if kind == "elsewhere":  # the learner got it, this buffer did not
            _, _, slots = world.batch([who], steps)
            if held is not None:
                held.slots = [-1 if slot in slots else slot for slot in held.slots]
            continue
        batch, rows, slots = world.batch(who, steps)
        held = held or Held.of(buffer.capacity, max(slots) + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of slots that share a column
            keys = buffer.insert(batch)
        held.add(rows, slots)
        assert len(set(keys.tolist())) == batch.shape[0] * batch.shape[1]
        assert len(buffer) == len(held.items())
        assert buffer.limiter.inserts - buffer.limiter.deletes == len(buffer)
    assert held is not None
    return held


def capacity_for(world: World, draw_rows: int) -> int:
    return 30 * max(1, len(world.slots)) if draw_rows > 12 else (6 + draw_rows) * len(world.slots)


@quick
@given(arrivals(), st.integers(0, 20))
def test_every_row_of_a_batch_has_its_successor(case: tuple[World, Any], rows: int) -> None:
    world, events = case
    with Buffer(capacity_for(world, rows), Uniform(), seed=2) as buffer:
        held = play(buffer, world, events)
        items = held.items()
        if not items:
            return
        batch, info = buffer.sample(20 * len(items))
        numbers = (-batch["action"]).tolist()
        assert set(numbers) == set(items)
        found = [held.columns[c][i] for c, i in (items[number] for number in numbers)]
        world.check(batch["obs"], numbers)
        world.check(batch["next_obs"], [row.after for row in found])
        assert batch["reward"].tolist() == [row.reward for row in found]
        assert batch["terminated"].tolist() == [row.terminated for row in found]
        assert (info.versions == 3).all() and batch["valid"].all()


@quick
@given(arrivals(), st.integers(0, 20), st.integers(1, 4))
def test_n_steps_of_batches(case: tuple[World, Any], rows: int, n: int) -> None:
    """Every row counts at once: the successor of the newest one is known, too."""
    world, events = case
    with Buffer(capacity_for(world, rows), NStep(n, 0.5, by=FIFO()), seed=3) as buffer:
        held = play(buffer, world, events)
        items = held.items()
        if not items:
            return
        batch, _ = buffer.sample(len(items))
        paths = [held.path(*items[number], n) for number in (-batch["action"]).tolist()]
        assert {path[0].obs for path in paths} == set(items)
        world.check(batch["obs"], [path[0].obs for path in paths])
        world.check(batch["next_obs"], [path[-1].after for path in paths])
        assert batch["steps"].tolist() == [len(path) for path in paths]
        reward = [sum(0.5**k * row.reward for k, row in enumerate(path)) for path in paths]
        np.testing.assert_allclose(batch["reward"], reward, atol=1e-5)
        expected = [0.0 if path[-1].terminated else 0.5 ** len(path) for path in paths]
        np.testing.assert_allclose(batch["discount"], expected)


@quick
@given(arrivals(), st.integers(0, 20), st.integers(1, 7), st.booleans())
def test_sequences_of_batches(case: tuple[World, Any], rows: int, length: int, pad: bool) -> None:
    world, events = case
    assume(pad or length <= 6 + rows)  # else it is refused
    with Buffer(capacity_for(world, rows), Sequence(length, pad, by=FIFO()), seed=4) as buffer:
        held = play(buffer, world, events)
        paths = {obs: held.path(*place, length) for obs, place in held.items().items()}
        if not pad:
            paths = {obs: path for obs, path in paths.items() if len(path) == length}
        if not paths:
            with pytest.raises(BufferTimeout):
                buffer.sample(1, timeout_s=0)
            return
        batch, _ = buffer.sample(len(paths), timeout_s=0)
        firsts = (-batch["action"][:, 0]).tolist()
        assert sorted(firsts) == sorted(paths)
        padded = [paths[first] + [paths[first][-1]] * (length - len(paths[first])) for first in firsts]
        world.check(batch["obs"], [[row.obs for row in path] for path in padded])
        world.check(batch["next_obs"], [[row.after for row in path] for path in padded])
        valid = [[t < len(paths[first]) for t in range(length)] for first in firsts]
        np.testing.assert_array_equal(batch["valid"], valid)


@quick
@given(arrivals(), st.integers(0, 20))
def test_whole_episodes_of_batches(case: tuple[World, Any], rows: int) -> None:
    world, events = case
    with Buffer(capacity_for(world, rows), DPER(), seed=5) as buffer:
        held = play(buffer, world, events)
        episodes = held.episodes()
        if not episodes:
            with pytest.raises(BufferTimeout):
                buffer.sample(1, timeout_s=0)
            return
        batch, _ = buffer.sample(20 * len(episodes), timeout_s=0)
        assert set((-batch["action"][:, 0]).tolist()) == set(episodes)
        for numbers, valid in zip(-batch["action"], batch["valid"], strict=True):
            assert numbers[valid].tolist() == [row.obs for row in episodes[int(numbers[0])]]


@quick
@given(arrivals(), st.integers(0, 20))
def test_batches_with_another_remover(case: tuple[World, Any], rows: int) -> None:
    """Rows have no neighbors there, and still a next observation."""
    world, events = case
    with Buffer(capacity_for(world, rows), Uniform(), remover=MinHeap(), seed=6) as buffer:
        after: dict[Any, Any] = {}
        for kind, who, steps in events:
            if kind == "insert":
                batch, columns, _ = world.batch(who, steps)
                buffer.insert(batch)
                after |= {row.obs: row.after for column in columns for row in column if row.valid}
        if not len(buffer):
            return
        assert len(buffer) == min(len(after), buffer.capacity)
        sampled, _ = buffer.sample(50)
        numbers = (-sampled["action"]).tolist()
        world.check(sampled["obs"], numbers)
        world.check(sampled["next_obs"], [after[number] for number in numbers])


def test_filler_rows_evict_older_rows_and_are_not_sampled() -> None:
    world = World([2], seed=7, filler=True)
    for sampler in (Uniform(), Prioritized(), MinHeap(), NStep(), DPER()):
        with Buffer(16, sampler, seed=7) as buffer:
            for _ in range(12):
                batch, _, _ = world.batch([0], 5)
                keys = buffer.insert(batch)
                valid = batch["valid"].reshape(-1)
                there = [buffer.update_priorities(np.array([key]), np.ones(1)) for key in keys.tolist()]
                assert there == valid.tolist()
                assert buffer.limiter.inserts - buffer.limiter.deletes == len(buffer)
                info = buffer.sample(4)[1]
                assert (info.keys >= 0).all()
            assert buffer.limiter.inserts < 12 * 10  # there were some


def test_two_chunks_of_one_worker_in_one_batch() -> None:
    """The second follows the first, which is seen in transitions across them."""
    world = World([2], seed=10)
    for _ in range(20):
        chunks = [world.batch([0], 4) for _ in range(2)]
        one, two = (batch for batch, _, _ in chunks)
        final = FinalObs(
            np.concatenate([one.final_obs.row, two.final_obs.row]),
            np.concatenate([one.final_obs.slot, two.final_obs.slot + 2]),
            np.concatenate([one.final_obs.obs, two.final_obs.obs]),
        )
        both = Batch(
            {name: np.concatenate([one.arrays[name], two.arrays[name]], axis=1) for name in one.arrays},
            one.structures,
            np.concatenate([one.last_obs, two.last_obs]),
            final,
            one.episodes,
            np.concatenate([one.slots, two.slots]),
            np.concatenate([one.continues, two.continues]),
        )
        held = Held.of(40, 2)
        with Buffer(40, NStep(6, 1.0, by=FIFO())) as buffer:
            buffer.insert(both)
            for _, rows, slots in chunks:
                held.add(rows, slots)
            batch, _ = buffer.sample(16)
        paths = [held.path(*held.items()[number], 6) for number in batch["obs"].tolist()]
        assert batch["steps"].tolist() == [len(path) for path in paths]
        world.check(batch["next_obs"], [path[-1].after for path in paths])


def test_a_batch_that_does_not_fit_is_refused() -> None:
    world = World([2], seed=8)
    batch, _, _ = world.batch([0], 5)
    with Buffer(8, Uniform()) as buffer, pytest.raises(ConfigError, match="5 steps does not fit"):
        buffer.insert(batch)
    with Buffer(20, Uniform(), limiter=Queue(9)) as buffer, pytest.raises(ConfigError, match="can never admit a batch"):
        buffer.insert(batch)
    with Buffer(20, Uniform(), spec={"obs": 1, "mask": 1}) as buffer, pytest.raises(ConfigError, match="no 'mask'"):
        buffer.insert(batch)
    with Buffer(20, Uniform(), spec={"obs": ((3,), "f4")}) as buffer, pytest.raises(ConfigError, match="got 'obs' as"):
        buffer.insert(batch)
    with Buffer(1, Uniform()) as buffer, pytest.raises(ConfigError, match="one per environment slot"):
        buffer.insert(batch)
    with Buffer(20, Uniform()) as buffer:
        buffer.insert(batch)
        flat = {name: value[:, 0] for name, value in batch.arrays.items()}
        with pytest.raises(ConfigError, match="insert batches"):
            buffer.insert(flat)
        assert len(buffer) == 10


def test_spec_selects_arrays_of_a_batch() -> None:
    """The spec selects them; `next_obs` is made of the successor of each row."""
    world = World([2], seed=9)
    batch, (first, second), _ = world.batch([0], 5)
    with Buffer(20, FIFO(), spec={"obs": 1, "reward": np.float32(0), "next_obs": 1}) as buffer:
        with pytest.warns(UserWarning, match="shares a column"):
            buffer.insert(batch)
        sampled, _ = buffer.sample(10)
        assert sampled.keys() == {"obs", "reward", "next_obs"}
        after = {row.obs: row.after for row in first + second}
        assert dict(zip(sampled["obs"].tolist(), sampled["next_obs"].tolist(), strict=True)) == after


# ---- real environments ----


def assert_counting(batch: dict[str, Any]) -> None:
    """Rows of `CountingEnv`: each successor follows from its row."""
    obs, after = batch["obs"], batch["next_obs"]
    expected = np.stack([obs[..., 0], obs[..., 1] + 1, batch["action"]], axis=-1)
    np.testing.assert_array_equal(after, expected)
    np.testing.assert_array_equal(batch["reward"], obs[..., 1] + 1)


@pytest.mark.parametrize("truncate", [False, True])
def test_rows_of_a_cluster(truncate: bool) -> None:
    env = cluster(CountingEnv, envs=3, config=in_process(2), env_kwargs={"truncate": truncate})
    with env, Buffer(90, Uniform(), seed=1) as buffer, Buffer(90, NStep(3, 1.0), seed=1) as steps:
        agent = TableAgent()
        for length in (7, 1, 20, 13, 6, 5, 30):
            batch = env.collect(agent, steps=length)
            for each in (buffer, steps):
                each.insert(batch)
            assert_counting(buffer.sample(200)[0])
            if length < 20:
                env.collect(agent, steps=2)  # which the buffers never get
            sampled = steps.sample(200)[0]
            np.testing.assert_array_equal(sampled["next_obs"][:, 0], sampled["obs"][:, 0])
            np.testing.assert_array_equal(sampled["next_obs"][:, 1], sampled["obs"][:, 1] + sampled["steps"])
            count = sampled["obs"][:, 1]
            taken = sampled["steps"]
            np.testing.assert_array_equal(sampled["reward"], taken * count + taken * (taken + 1) / 2)
            assert (sampled["discount"] == ~sampled["terminated"]).all()


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_rows_of_a_vector_environment(mode: str) -> None:
    env = cluster(counting_vector, envs=3, config=in_process(), type="vector", env_kwargs={"mode": mode})
    with env, Buffer(60, Uniform(), seed=2) as buffer, Buffer(60, DPER(), seed=2) as episodes:
        for _ in range(6):
            batch = env.collect(TableAgent(), steps=9)
            for each in (buffer, episodes):
                each.insert(batch)
            assert_counting(buffer.sample(100)[0])
            sampled = episodes.sample(20)[0]
            assert (sampled["obs"][:, 0, 1] == 0).all()
            last = sampled["valid"].sum(axis=1) - 1
            assert sampled["terminated"][np.arange(20), last].all()
            assert_counting(sampled)


def test_rows_of_a_stream_of_chunks() -> None:
    """The first chunks to arrive, of any worker; slots that are absent at first share columns."""
    with cluster(CountingEnv, envs=4, config=in_process(2)) as env, Buffer(80, Uniform(), seed=3) as buffer:
        for k, batch in enumerate(env.stream(TableAgent(), steps=6, num_chunks=1)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                buffer.insert(batch)
            assert_counting(buffer.sample(100)[0])
            if k == 9:
                break


def test_nested_observations_of_a_cluster() -> None:
    with cluster(NestedEnv, envs=2, config=in_process()) as env, Buffer(20, Sequence(2), seed=4) as buffer:
        for _ in range(4):
            buffer.insert(env.collect(NestedAgent(), steps=7))
        batch, _ = buffer.sample(50)
        count = batch["obs"]["pair"][0]
        assert count.shape == (50, 2)
        np.testing.assert_array_equal(count[:, 1], count[:, 0] + 1)
        after = batch["next_obs"]
        np.testing.assert_array_equal(after["pair"][0], count + 1)
        np.testing.assert_array_equal(after["camera"][..., 0, 0], 10 * (count + 1))
        np.testing.assert_array_equal(after["echo"]["move"], batch["action"][0])
        assert batch["extra"]["double"].shape == (50, 2)
