"""Pipelined transfer: batches are the same, parts arrive before them, and all parts of a lost chunk are discarded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farstep
from farstep import TransferTrigger
from farstep.batch import Part
from farstep.cluster_env import collector_for
from farstep.core import Received
from farstep.errors import ClosedError, ConfigError
from farstep.head.chunks.incoming_chunks import EarlyPart
from farstep.head.chunks.rollouts import Rollouts
from farstep.head.tickets.records import FeedPlan
from farstep.schema import flat
from farstep.testing import FaultyEnv, TableAgent
from farstep.wire import messages as m
from farstep.workflow.pipeline import minibatches
from tests.cluster.checks import assert_balanced, assert_sound, cluster, in_process, within
from tests.cluster.faulty import CutOffEnv, StageCutOffEnv
from tests.cluster.toys import NestedAgent, NestedEnv, RememberingAgent, counting_vector

SMALL = ("reward", "terminated", "truncated", "valid", "episode_start", "version", "last_obs", "final_obs")
TRANSFERS = {
    "rows": TransferTrigger(size=3),
    "dual": TransferTrigger.dual(),
    "dual-rows": TransferTrigger.dual(size=2),
    "episode-end": TransferTrigger(keys=(("*",), ("obs",)), episode_end=True),
    "bytes-or-seconds": TransferTrigger(max_bytes=200, seconds=1e-3),
    "in-turn": TransferTrigger.dual(size=2, max_senders=1),
    "three": TransferTrigger(keys=(SMALL, ("obs",), ("action",)), size=1),
}
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "ends-within": ({}, TableAgent),
    "nested": ({"env": NestedEnv}, NestedAgent),
    "recurrent": ({}, RememberingAgent),
    "filler-rows": ({"env": counting_vector, "type": "vector", "env_kwargs": {"mode": "NEXT_STEP"}}, TableAgent),
}


def everything(batch: farstep.Batch) -> dict[str, np.ndarray]:
    """All contents of a batch except the seconds of episodes."""
    found = {name: array.copy() for name, array in batch.items()}
    nested = {"last": batch.last_obs, "final": batch.final_obs.obs, "state": batch.initial_state or ()}
    found |= {f"{name} {i}": array.copy() for name, value in nested.items() for i, array in enumerate(flat(value))}
    found |= {f"episodes {key}": batch.episodes[key] for key in ("return", "length", "slot")}
    return found | {
        "final row": batch.final_obs.row,
        "final slot": batch.final_obs.slot,
        "slots": batch.slots,
        "continues": batch.continues,
    }


def assert_equal(one: farstep.Batch, other: dict[str, np.ndarray]) -> None:
    mine = everything(one)
    assert mine.keys() == other.keys()
    for name, array in mine.items():
        assert (array.dtype, array.tobytes()) == (other[name].dtype, other[name].tobytes()), name


def rolled(case: str, **options: Any) -> Iterator[farstep.Batch]:
    """Rollouts of several lengths, a reset and a step between them."""
    described, agent_type = CASES[case]
    agent = agent_type()
    with cluster(envs=3, **described, **options) as env:
        for steps in (7, 1, 12):
            yield env.collect(agent, steps=steps)
        env.step(agent)
        env.reset(seed=3)
        yield env.collect(agent, steps=7)


def check_equal(case: str, **options: Any) -> None:
    plain = [everything(batch) for batch in rolled(case, config=in_process(2))]
    assert any(len(batch["final row"]) for batch in plain)
    for batch, expected in zip(rolled(case, workers=2, **options), plain, strict=True):
        assert_equal(batch, expected)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("transfer", TRANSFERS.values(), ids=TRANSFERS)
def test_batches_are_the_same_byte_for_byte(case: str, transfer: TransferTrigger) -> None:
    check_equal(case, transfer=transfer, transport="tcp")


@pytest.mark.parametrize("transport", ["ipc", "shm"])
def test_batches_are_the_same_over_other_transports(transport: str) -> None:
    check_equal("nested", transfer=TRANSFERS["dual-rows"], transport=transport)


def test_streams_are_the_same_byte_for_byte() -> None:
    agent = TableAgent()

    def streamed(**options: Any) -> Iterator[farstep.Batch]:
        with cluster(envs=3, **options) as env:
            for k, batch in enumerate(env.stream(agent, steps=9, max_staleness=1)):
                yield batch
                if k == 4:
                    break

    plain = [everything(batch) for batch in streamed(config=in_process(2))]
    for batch, expected in zip(
        streamed(workers=2, transport="tcp", transfer=TRANSFERS["dual-rows"]), plain, strict=True
    ):
        assert_equal(batch, expected)


def test_a_stream_of_the_first_chunks_to_arrive_is_sound() -> None:
    with cluster(envs=3, workers=2, transport="tcp", transfer=TRANSFERS["three"]) as env:
        for k, batch in enumerate(env.stream(TableAgent(), steps=9, max_staleness=2, num_chunks=1)):
            assert_sound(batch)
            if k == 8:
                break
        assert_sound(env.collect(TableAgent(), steps=5))  # of what was under way, nothing counts
        assert_balanced(env.stats())


def test_bytes_are_counted_as_without_it() -> None:
    def received(**options: Any) -> int:
        with cluster(envs=3, workers=2, transport="ipc", **options) as env:
            env.collect(TableAgent(), steps=16)
            return int(env.stats()["bytes"]["rollouts_received"])

    assert received(transfer=TRANSFERS["dual-rows"]) == received() > 0


# ---- parts ----


@pytest.mark.parametrize("case", ["ends-within", "nested", "recurrent"])
def test_batch_consists_of_its_parts(case: str) -> None:
    described, agent_type = CASES[case]
    agent = agent_type()
    plain = next(rolled(case, config=in_process(2)))
    with cluster(envs=3, workers=2, transport="tcp", transfer=TRANSFERS["dual-rows"], **described) as env:
        parts = env.parts(agent, steps=7)
        found: list[Part] = list(parts)
        assert sorted((part.worker, part.stage, part.complete) for part in found) == [
            (0, 0, False), (0, 1, True), (1, 0, False), (1, 1, True)
        ]  # fmt: skip
        assert [part.stage for part in found if part.worker == 0] == [0, 1]
        batch = parts.batch
        assert_equal(batch, everything(plain))
        for part in found:
            late = {name for name in batch if name.split(".")[0] in ("obs", "action")}
            assert set(part.batch) == (late if part.stage else set(batch) - late)
            assert set(part.so_far) == (set(batch) if part.complete else set(batch) - late)
            for name, array in part.so_far.items():
                assert array.tobytes() == batch[name][:, part.slots].tobytes()
                assert np.shares_memory(array, batch[name])
            for mine, whole in zip(flat(part.so_far.last_obs), flat(batch.last_obs), strict=True):
                np.testing.assert_array_equal(mine, whole[part.slots])
            chosen = np.isin(batch.final_obs.slot, part.slots)
            np.testing.assert_array_equal(part.so_far.final_obs.row, batch.final_obs.row[chosen])
            np.testing.assert_array_equal(part.slots[part.so_far.final_obs.slot], batch.final_obs.slot[chosen])
            np.testing.assert_array_equal(part.so_far.continues, batch.continues[part.slots])
            for mine, whole in zip(flat(part.so_far.final_obs.obs), flat(batch.final_obs.obs), strict=True):
                np.testing.assert_array_equal(mine, whole[chosen])
        assert parts.batch is batch
        assert_balanced(env.stats())
        assert env.stats()["delivered"] == 2


TOGETHER: dict[str, dict[str, Any]] = {
    "shm": {"transport": "shm"},
    "shm-dual": {"transport": "shm", "transfer": TransferTrigger.dual(size=2)},
    "ipc": {"transport": "ipc"},
    "in_process-dual": {"config": in_process(2), "transfer": TransferTrigger.dual()},
}


@pytest.mark.parametrize("options", TOGETHER.values(), ids=TOGETHER)
def test_stages_that_arrive_together_are_one_part(options: dict[str, Any]) -> None:
    with cluster(envs=3, workers=2, **options) as env:
        parts = env.parts(TableAgent(), steps=6)
        for part in parts:
            assert part.complete and part.stage == ("transfer" in options)
            assert set(part.batch) == set(part.so_far)
            assert_sound(part.batch)
        assert_sound(parts.batch)
        assert set(parts.batch) == set(part.batch)


def test_a_pipeline_of_minibatches_over_real_parts() -> None:
    with cluster(envs=5, workers=2, transport="tcp", transfer=TransferTrigger.dual(size=4)) as env:
        for _ in range(3):
            parts = env.parts(TableAgent(), steps=8)
            early: list[int] = []
            found = list(minibatches(parts, env.num_envs, prepare=lambda part: early.append(part.stage)))
            assert sum(one.weight for one in found) == pytest.approx(1)
            assert [one.step for one in found] == [False, True]
            assert sorted(early) == [0, 0, 1, 1]
            mean = sum(one.weight * one.batch["reward"].mean() for one in found)
            assert mean == pytest.approx(parts.batch["reward"].mean())


def test_leaving_parts_early_cancels_the_rest() -> None:
    agent = TableAgent()
    with cluster(envs=4, workers=2, transport="tcp", transfer=TransferTrigger.dual()) as env:
        parts = env.parts(agent, steps=5)
        next(parts)
        parts.close()
        with pytest.raises(ClosedError, match="before the rollout was complete"):
            _ = parts.batch
        assert_sound(env.collect(agent, steps=5))
        left = env.parts(agent, steps=5)
        next(left)
        batch = env.collect(agent, steps=5)  # another call ends it, as it would a stream
        assert_sound(batch)
        with pytest.raises(ClosedError):
            list(left)
        assert_sound(env.parts(agent, steps=5).batch)
        stats = env.stats()
        assert_balanced(stats)
        assert stats["dropped"].keys() == {"cancelled"}


def test_a_stage_with_an_unknown_name_is_refused_and_the_cluster_stays() -> None:
    class Telling(TableAgent):
        def act(self, obs: Any) -> Any:
            return {**super().act(obs), "logprob": obs[:, 0]}

    transfer = {"keys": [["reward", "logprob"], ["obs"]]}
    with cluster(transport="tcp", transfer=transfer) as env:
        env.reset(seed=1)  # without an agent, its outputs are unknown
        with pytest.raises(ConfigError, match="logprob"):
            env.collect(TableAgent(), steps=4)
        assert_sound(env.collect(Telling(), steps=4))


# ---- what is not believed, and what is lost ----


def test_parts_count_for_an_open_ticket_of_their_worker_only() -> None:
    agent, parts = TableAgent(), list[EarlyPart]()
    with cluster(envs=4, workers=2, transport="tcp", transfer={"keys": [["reward"], ["obs"]]}) as env:
        collector = collector_for(env, agent)
        server = collector.server
        frames = [b"header", b"", np.full((4, 2), 77, np.float32).tobytes()]
        with server.locked():
            request = collector.open_feed(4, FeedPlan(windows=None), parts.append)
            ticket = server.tickets.grant([0, 1], 0)[0]  # sent to no worker: every part for it is forged
            message = m.Part(ticket.seq, 9, 0, 0, ["reward"])
            collector.on_message(server.records[1 - ticket.worker], message, Received(frames))
            assert not parts, "of another worker's ticket"
            collector.on_message(server.records[ticket.worker], message, Received(frames))
            assert [early.ticket for early in parts] == [ticket]
            assert (parts[0].part.batch["reward"] == 77).all()
            collector.end_feed(request)
            collector.on_message(server.records[ticket.worker], message, Received(frames))
            assert len(parts) == 1, "of a ticket that was cancelled"
        assert_sound(env.collect(agent, steps=4))
        assert env.stats()["workers"]["restarts"] == 0


def test_chunk_restarts_if_an_environment_fails_after_rows_were_sent(tmp_path: Path) -> None:
    kwargs = {"fault": "raise", "phase": "step", "at": 9, "marker": str(tmp_path / "once")}
    options: Any = {"transport": "tcp", "transfer": TransferTrigger.dual(size=1)}
    with cluster(FaultyEnv, envs=2, env_kwargs=kwargs, **options) as env:
        for steps in (5, 12, 3):
            assert_sound(env.collect(TableAgent(), steps=steps))
        stats = env.stats()
        assert_balanced(stats)
        assert stats["dropped"] == {"environment_failed": 1}


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A named pipe for a worker to wait on, and the descriptor to write to."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR)  # read and write, so that opening does not block
    yield str(path), fd
    os.close(fd)


def test_rows_of_a_worker_killed_while_it_sends_its_chunk_are_discarded(
    tmp_path: Path, fifo: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fd = fifo
    taken: list[Any] = []

    def take_part(rollouts: Any, record: Any, order: Any, steps: int, part: m.Part, received: Received) -> Any:
        answer = original(rollouts, record, order, steps, part, received)
        taken.append((part.ticket, part.stage, part.first))
        if len(taken) == 2:  # one of the first rollout, one of the second
            os.write(fd, b"!")
        return answer

    original = Rollouts.take_part
    monkeypatch.setattr(Rollouts, "take_part", take_part)
    kwargs = {"marker": str(tmp_path / "once"), "fifo": path, "at": 10}
    options: Any = {"transport": "tcp", "transfer": TransferTrigger(size=2)}
    with cluster(CutOffEnv, envs=2, env_kwargs=kwargs, **options) as env:
        first = within(lambda: env.collect(TableAgent(), steps=3)).copy()
        second = within(lambda: env.collect(TableAgent(), steps=9)).copy()
        assert_sound(first)
        assert_sound(second)
        # After three of four steps no episode is over; yet the second rollout starts with the next ones.
        assert second["episode_start"][0].all() and not second.continues.any()
        assert not np.isin(second["obs"][..., 0], first["obs"][..., 0]).any()
        stats = env.stats()
        assert_balanced(stats)
        assert stats["dropped"] == {"worker_lost": 1} and stats["workers"]["restarts"] == 1
    tickets = {ticket for ticket, _, _ in taken}
    assert len(tickets) == 3 and all(stage == -1 for _, stage, _ in taken)


def test_stage_of_a_lost_worker_is_repeated(tmp_path: Path, fifo: tuple[str, int]) -> None:
    path, fd = fifo
    kwargs = {"marker": str(tmp_path / "once"), "fifo": path}
    options: Any = {"transport": "tcp", "transfer": TransferTrigger.dual()}

    def rollout(env: farstep.ClusterEnv) -> tuple[list[Part], list[farstep.Batch], farstep.Batch]:
        parts = env.parts(TableAgent(), steps=6)
        found, copies = [], []
        for part in parts:
            found.append(part)
            copies.append(part.so_far.copy())
            if len(found) == 1:
                os.write(fd, b"!")  # its worker waits for this before it would send the rest
        return found, copies, parts.batch

    with cluster(StageCutOffEnv, envs=2, env_kwargs=kwargs, **options) as env:
        first = within(lambda: env.collect(TableAgent(), steps=3)).copy()
        found, copies, batch = within(lambda: rollout(env))
        assert [(part.stage, part.complete) for part in found] == [(0, False), (0, False), (1, True)]
        assert not copies[0]["episode_start"][0].any() and copies[1]["episode_start"][0].all()
        assert_sound(batch)
        assert not batch.continues.any()
        assert not np.isin(batch["obs"][..., 0], first["obs"][..., 0]).any()
        np.testing.assert_array_equal(copies[1]["reward"], batch["reward"])
        assert (copies[0]["reward"] != batch["reward"]).any()
        stats = env.stats()
        assert_balanced(stats)
        assert stats["dropped"] == {"worker_lost": 1}
