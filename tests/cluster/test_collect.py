"""The contract of batches, streams, `step` and counters."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

import farstep
from farstep.config.launch import LaunchConfig
from farstep.sync import EveryK
from farstep.testing import FaultyEnv, TableAgent
from tests.cluster.checks import BOTH, assert_balanced, assert_sound, cluster, in_process, within
from tests.cluster.toys import NestedAgent, NestedEnv, RememberingAgent


def test_a_batch_keeps_its_contract() -> None:
    with cluster(envs=3, workers=2) as env:
        agent = TableAgent()
        observation_space, action_space = env.launch()
        assert (observation_space.shape, action_space) == ((3,), gymnasium.spaces.Discrete(3))
        assert env.launch() == (observation_space, action_space)
        batch = env.collect(agent, steps=20)
        assert_sound(batch)
        kinds = {name: array.dtype.name for name, array in batch.items()}
        flags = dict.fromkeys(("terminated", "truncated", "valid", "episode_start"), "bool")
        agents = {"action": "int64", "value": "float32"}
        assert kinds == {"obs": "float32", "reward": "float32", "version": "int64", **flags, **agents}
        assert batch["obs"].shape == (20, 3, 3)
        assert all(array.shape[:2] == batch.shape == (20, 3) for array in batch.values())
        assert batch.last_obs.shape == (3, 3)
        np.testing.assert_array_equal(batch["value"], batch["obs"][..., 0] * 2)
        np.testing.assert_array_equal(batch.slots, [0, 1, 2])
        assert (batch["version"] == 0).all()
        assert batch.initial_state is None
        # An episode's record: its rewards are 1, 2, ..., its length.
        length = batch.episodes["length"]
        assert len(length) == len(batch.final_obs) > 3
        np.testing.assert_array_equal(batch.episodes["return"], length * (length + 1) / 2)
        np.testing.assert_array_equal(batch.episodes["slot"], batch.final_obs.slot)
        np.testing.assert_array_equal(batch.final_obs.obs[:, 1], length)
        assert (batch.episodes["time"] > 0).all()


def test_a_batch_is_a_view_until_the_next_call() -> None:
    with cluster(envs=3, workers=2) as env:
        agent = TableAgent()
        batch = env.collect(agent, steps=5)
        before = {name: array.copy() for name, array in batch.items()}
        kept = batch.copy()
        agent.table[:] = 0
        env.publish(agent)
        env.stats()
        for name, array in batch.items():
            np.testing.assert_array_equal(array, before[name])
        after = env.collect(agent, steps=5)
        assert np.shares_memory(after["obs"], batch["obs"])  # not a copy
        assert (after["action"] == 0).all()
        assert (after["version"] == 1).all()
        for name, array in kept.items():
            np.testing.assert_array_equal(array, before[name])
        assert_sound(kept)


@BOTH
def test_nested_spaces_are_arrays_by_name(config: LaunchConfig) -> None:
    with cluster(NestedEnv, config=config) as env:
        batch = env.collect(NestedAgent(), steps=7)
        count = np.tile(np.arange(7)[:, None] % 3, 2)
        np.testing.assert_array_equal(batch["obs.camera"][..., 1, 1], 10 * count)
        assert batch["obs.camera"].dtype == np.uint8
        np.testing.assert_array_equal(batch["obs"]["pair"][0], count)
        np.testing.assert_array_equal(batch["obs.pair.1"], np.stack([np.ones_like(count), count % 2], axis=2))
        np.testing.assert_array_equal(batch["action"][1], count - 1)
        np.testing.assert_array_equal(batch["action.0"], np.stack([count, count], axis=2))
        np.testing.assert_array_equal(batch["extra.double"], count * 2)
        # What the environment got is what the agent did.
        same_episode = np.arange(1, 7)[np.arange(1, 7) % 3 != 0]
        np.testing.assert_array_equal(batch["obs.echo.gear"][same_episode], batch["action.1"][same_episode - 1])
        np.testing.assert_array_equal(batch["obs.echo.move"][same_episode], batch["action.0"][same_episode - 1])
        np.testing.assert_array_equal(batch.final_obs.obs["pair"][0], [3] * 4)
        np.testing.assert_array_equal(batch.last_obs["camera"][:, 0, 0], [10, 10])
        obs, *_ = env.step(NestedAgent())
        np.testing.assert_array_equal(obs["pair"][0], [2, 2])
        obs, *_, info = env.step(NestedAgent())
        np.testing.assert_array_equal(obs["pair"][0], [0, 0])
        assert info["final_obs"][0]["pair"][0] == 3


@BOTH
def test_a_recurrent_agent_starts_each_chunk_from_its_recorded_state(config: LaunchConfig) -> None:
    with cluster(envs=3, config=config) as env:
        agent: Any = RememberingAgent()
        state = np.zeros((3, 1))
        for steps in (4, 9, 1, 6):
            batch = env.collect(agent, steps=steps)
            assert_sound(batch)
            np.testing.assert_array_equal(batch.initial_state["age"], state)
            np.testing.assert_array_equal(batch["age"], batch["obs"][..., 1] + 1)
            state = batch["age"][-1][:, None].copy()


def test_options_of_a_reset_are_a_mapping() -> None:
    with cluster(config=in_process()) as env, pytest.raises(farstep.ConfigError, match="options=3; expected a mapping"):
        env.reset(options=3)  # type: ignore[arg-type]


def test_an_unknown_array_lists_the_known_ones() -> None:
    with cluster(config=in_process()) as env:
        batch = env.collect(TableAgent(), steps=1)
        with pytest.raises(KeyError, match=r"'rewrad'. Did you mean 'reward'.*Known: action, episode_start, obs"):
            batch["rewrad"]
        assert "rewrad" not in batch
        assert batch.get("rewrad") is None


# ---- agents ----


def test_refused_agent_does_not_replace_the_current_one() -> None:
    class Broken(TableAgent):
        def get_parameters(self) -> Any:
            return {"table": np.array([np.nan])}

    with cluster(config=in_process(2)) as env:
        agent = TableAgent()
        env.collect(agent, steps=4)
        with pytest.raises(farstep.FarstepError, match="NaN"):
            env.collect(Broken(), steps=4)
        agent.table[:] = 1
        assert (env.collect(agent, steps=4)["action"] == 1).all()


class NormalizingAgent(TableAgent):
    """Changes its observations in place, before and after it acts on them."""

    def act(self, obs: Any) -> dict[str, Any]:
        obs *= 2
        out = super().act(obs / 2)
        obs -= 1000
        return out


@BOTH
def test_an_agent_that_normalizes_in_place_changes_nothing_that_is_recorded(config: LaunchConfig) -> None:
    with cluster(envs=3, config=config) as env:
        env.collect(TableAgent(), steps=2)  # so that it comes in the middle of episodes
        for steps in (7, 1, 5):
            batch = env.collect(NormalizingAgent(), steps=steps)
            assert_sound(batch)
            np.testing.assert_array_equal(batch["value"], batch["obs"][..., 0] * 2)


def test_a_sync_rule_decides_which_version_acts() -> None:
    with cluster(sync=EveryK(3), config=in_process(2)) as env:
        agent, versions = TableAgent(), []
        for k in range(8):
            agent.table[:] = k % 3
            versions.append(set(env.collect(agent, steps=2)["version"].flat))
        assert versions == [{0}, {0}, {0}, {3}, {3}, {3}, {6}, {6}]
        assert env.stats()["pulls"] == {"total": 6, "per_worker": [3, 3]}


# ---- streams ----


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@BOTH
def test_a_learner_that_publishes_every_batch_never_meets_an_older_row(
    config: LaunchConfig, max_staleness: int
) -> None:
    with cluster(envs=3, config=config) as env:
        agent, version, seen = TableAgent(), 0, []
        for k, batch in enumerate(env.stream(agent, steps=8, max_staleness=max_staleness)):
            assert_sound(batch)
            lag = version - batch["version"]
            assert (lag >= 0).all()
            assert lag.max() <= max_staleness
            seen.append(int(lag.max()))
            if k == 12:
                break
            agent.table[:] = (agent.table + 1) % 3
            version = env.publish(agent)
            assert version == k + 1
        stats = env.stats()
        assert stats["versions"]["lag_max"] == max(seen)
        assert not stats["dropped"].get("stale")  # pacing, not dropping
        assert_balanced(stats)


@pytest.mark.parametrize("how", ["collect", "stream"])
@BOTH
def test_batch_of_several_rollouts_equals_as_many_single_batches(config: LaunchConfig, how: str) -> None:
    """In every array; the columns of each slot are in order of collection."""
    found = []
    for rollout_epochs in (1, 3):
        with cluster(envs=3, config=config) as env:
            agent, batches = TableAgent(), []
            stream = env.stream(agent, 7, max_staleness=0, rollout_epochs=rollout_epochs)
            for _ in range(6 // rollout_epochs):
                batch = next(stream) if how == "stream" else env.collect(agent, 7, rollout_epochs)
                assert_sound(batch)
                batches.append(batch.copy())
            stream.close()
            found.append(batches)
    one, three = found
    for k, batch in enumerate(three):
        expected = one[3 * k : 3 * k + 3]
        assert batch.shape == (7, 9) and sorted(batch.slots) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        order = np.argsort(batch.slots, kind="stable").reshape(3, 3).T  # by rollout, then by slot
        for name in batch:
            for columns, single in zip(order, expected, strict=True):
                np.testing.assert_array_equal(batch.arrays[name][:, columns], single.arrays[name], err_msg=name)
        for columns, single in zip(order, expected, strict=True):
            np.testing.assert_array_equal(batch.last_obs[columns], single.last_obs)
            np.testing.assert_array_equal(batch.continues[columns], single.continues)
        assert len(batch.final_obs) == sum(len(single.final_obs) for single in expected)
        ends = batch["terminated"] | batch["truncated"]
        assert ends[batch.final_obs.row, batch.final_obs.slot].all()


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@BOTH
def test_staleness_is_counted_in_batches_of_several_rollouts(config: LaunchConfig, max_staleness: int) -> None:
    with cluster(envs=3, config=config) as env:
        agent, version = TableAgent(), 0
        for k, batch in enumerate(env.stream(agent, 4, max_staleness, rollout_epochs=2)):
            assert_sound(batch)
            assert sorted(batch.slots) == [0, 0, 1, 1, 2, 2]
            assert (version - batch["version"]).min() >= 0 and (version - batch["version"]).max() <= max_staleness
            if k == 8:
                break
            agent.table[:] = (agent.table + 1) % 3
            version = env.publish(agent)
        stats = env.stats()
        assert not stats["dropped"].get("stale")
        assert_balanced(stats)


@pytest.mark.parametrize("wrong", [0, 1.5, 10**6])
def test_rollout_epochs_out_of_range_is_refused(wrong: Any) -> None:
    with cluster(envs=1, config=in_process(1)) as env:
        for call in (env.collect, env.stream):
            with pytest.raises(farstep.ConfigError, match="rollout_epochs"):
                call(TableAgent(), 4, rollout_epochs=wrong)


def test_rows_that_became_too_old_are_dropped_and_counted() -> None:
    with cluster(envs=2, workers=2) as env:
        agent, version = TableAgent(), 0
        for k, batch in enumerate(env.stream(agent, steps=4, max_staleness=1)):
            assert_sound(batch)
            assert (version - batch["version"]).max() <= 1
            if k == 10:
                break
            for _ in range(3):
                version = env.publish(agent)
        stats = env.stats()
        assert stats["dropped"]["stale"] > 0
        assert_balanced(stats)


def test_a_learner_that_never_publishes_is_never_starved() -> None:
    with cluster(envs=2, workers=2) as env:
        for k, batch in enumerate(env.stream(TableAgent(), steps=4, max_staleness=0)):
            assert (batch["version"] == 0).all()
            if k == 20:
                break
        assert env.stats()["delivered"] == 42


@pytest.mark.parametrize("num_chunks", [1, 3, 5])
def test_the_first_chunks_to_arrive_come_as_copies(num_chunks: int) -> None:
    with cluster(envs=5, workers=3) as env:  # columns 0-1, 2-3 and 4
        kept, ranges = [], ([0, 1], [2, 3], [4])
        for k, batch in enumerate(env.stream(TableAgent(), steps=6, num_chunks=num_chunks)):
            assert_sound(batch)
            rest = batch.slots.tolist()
            for _ in range(num_chunks):
                part = next(r for r in ranges if rest[: len(r)] == r)
                rest = rest[len(part) :]
            assert rest == []
            kept.append((batch, batch["obs"].copy()))
            if k == 8:
                break
        for batch, obs in kept:
            np.testing.assert_array_equal(batch["obs"], obs)  # a copy stays as it was
        assert_balanced(env.stats())


@pytest.mark.parametrize("transport", ["shm", "tcp"])  # over tcp, a chunk under way is finished and comes too late
def test_leaving_the_loop_cancels_open_tickets(transport: str) -> None:
    with cluster(envs=3, workers=3, transport=transport) as env:
        agent = TableAgent()
        for _ in range(3):
            for _ in env.stream(agent, steps=200, max_staleness=2):
                break
            stats = env.stats()
            assert (stats["in_flight"], stats["buffered"]) == (0, 0)
            assert_balanced(stats)
            assert_sound(within(lambda: env.collect(agent, steps=3)))  # leftovers of the stream do not get in
        assert env.stats()["dropped"]["cancelled"] > 0
        stream = env.stream(agent, steps=5)
        next(stream)
        env.collect(agent, steps=2)
        with pytest.raises(farstep.ClosedError, match="another call"):
            next(stream)


# ---- lock-step, and counters ----


@BOTH
def test_step_returns_gymnasiums_five_values(config: LaunchConfig) -> None:
    with cluster(envs=3, config=config, env_kwargs={"length": 3, "truncate": True}) as env:
        agent = TableAgent()
        obs, info = env.reset(seed=2)
        np.testing.assert_array_equal(info["episode_id"], obs[:, 0])
        for count in (1, 2, 3):
            before = obs.copy()
            action = agent.act(before)["action"]
            obs, reward, terminated, truncated, info = env.step(agent)
            assert reward.tolist() == [count] * 3
            assert not terminated.any()
            assert truncated.tolist() == [count == 3] * 3
            if count < 3:
                np.testing.assert_array_equal(obs, np.stack([before[:, 0], [count] * 3, action], axis=1))
                assert info["count"].tolist() == [count] * 3
        np.testing.assert_array_equal(obs[:, 1:], [[0, -1]] * 3)  # SAME_STEP: the next episode has begun
        np.testing.assert_array_equal(info["episode_id"], obs[:, 0])
        final = np.stack(list(info["final_obs"]))
        np.testing.assert_array_equal(final, np.stack([before[:, 0], [3] * 3, action], axis=1))
        assert info["_final_obs"].all()
        assert info["final_info"]["count"].tolist() == [3] * 3
        assert info["episode"]["r"].tolist() == [6] * 3
        assert info["episode"]["l"].tolist() == [3] * 3


def test_repr_of_a_cluster_is_one_line() -> None:
    env = cluster(envs=4, config=in_process(2))
    assert repr(env) == "<ClusterEnv CountingEnv: num_envs=4 on 2 workers, not launched>"
    with env:
        assert repr(env) == "<ClusterEnv CountingEnv: num_envs=4 on 2 workers, running>"
    assert repr(env) == "<ClusterEnv CountingEnv: num_envs=4 on 2 workers, closed>"
    named = farstep.ClusterEnv({"env_name": "CartPole-v1"}, in_process(1))
    assert repr(named) == "<ClusterEnv CartPole-v1: num_envs=1 on 1 worker, not launched>"
    kwargs = {"fault": "raise", "phase": "step"}
    failed = cluster(FaultyEnv, envs=1, env_kwargs=kwargs, config=in_process(restart_budget=0))
    with failed, pytest.raises(farstep.RemoteEnvError):
        failed.collect(TableAgent(), steps=8)
    assert repr(failed) == "<ClusterEnv FaultyEnv: num_envs=1 on 1 worker, failed>"


def test_stats_has_every_counter_of_the_design() -> None:
    with cluster(envs=3, workers=2) as env:
        agent = TableAgent()
        episodes = sum(len(env.collect(agent, steps=10).episodes["return"]) for _ in range(3))
        stats = env.stats()
        assert (stats["steps"], stats["chunks"], stats["episodes"]["count"]) == (90, 6, episodes)
        assert stats["steps_per_second"] > 0
        workers = {"alive": 2, "starting": 0, "parked": 0, "lost": 0, "restarts": 0}
        assert workers.items() <= stats["workers"].items()
        assert stats["pulls"] == {"total": 2, "per_worker": [1, 1]}
        assert stats["bytes"].keys() == {"weights_sent", "base_sent", "probes_sent", "rollouts_received"}
        assert stats["bytes"]["rollouts_received"] > 90 * 3 * 4
        assert stats["versions"] == {
            "current": 0,
            "oldest_consumed": 0,
            "lag_mean": 0.0,
            "lag_max": 0,
            "lag_histogram": [{0: 3}, {0: 3}],
        }
        assert stats["time"].keys() == {"workers", "per_worker", "learner", "head"}
        assert len(stats["time"]["per_worker"]) == len(stats["workers"]["steps_per_second"]) == 2
        assert stats["divergence"] == {}
        assert stats["dropped"] == {}
        assert stats["episodes"]["length_mean"] > 1
        assert_balanced(stats)
