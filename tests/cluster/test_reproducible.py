"""The same seed gives the same trajectories: for any number of workers, on any launcher, and after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import farstep
from farstep.config.launch import LaunchConfig
from farstep.rollout.seeds import episode_generator, episode_seed
from farstep.testing import CountingEnv, TableAgent
from tests.cluster.checks import arrays_of, assert_same, assert_sound, cluster, in_process
from tests.cluster.faulty import MortalEnv, PoisonEnv

SLOTS = 5  # so that workers differ in size


class DrawingAgent(TableAgent):
    """Draws its actions from the generator of each slot."""

    def act(self, obs: Any, rng: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"action": np.array([g.integers(3) for g in rng]), "value": np.array([g.random() for g in rng])}


def rolled(env: farstep.ClusterEnv) -> list[dict[str, np.ndarray]]:
    """Batches of two agents, from episode 0 each, with chunk borders at different places."""
    with env:
        found = []
        for agent in (TableAgent(), DrawingAgent()):
            env.reset(seed=3)
            for steps in (7, 1, 12):
                batch = env.collect(agent, steps=steps)
                assert_sound(batch)
                found.append(arrays_of(batch))
        return found


@pytest.fixture(scope="module")
def reference() -> list[dict[str, np.ndarray]]:
    return rolled(cluster(CountingEnv, envs=SLOTS, config=in_process(1)))


CONFIGS = {
    **{f"in_process {n}": in_process(n) for n in (2, 4)},
    **{f"local {n}": farstep.LocalConfig(workers_per_node=n) for n in (1, 2, 4)},
    "tcp 2": farstep.LocalConfig(workers_per_node=2, transport="tcp"),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_trajectories_do_not_depend_on_workers(config: LaunchConfig, reference: Any) -> None:
    for mine, theirs in zip(rolled(cluster(CountingEnv, envs=SLOTS, config=config)), reference, strict=True):
        assert_same(mine, theirs)


def test_environments_that_are_seeded_once_continue_with_their_own_generators() -> None:
    found = [rolled(cluster(envs=SLOTS, seed_episodes=False, config=in_process(n))) for n in (1, 3)]
    for mine, theirs in zip(*found, strict=True):
        assert_same(mine, theirs)
    with cluster(envs=SLOTS, seed_episodes=False, config=in_process(2)) as env:
        batch = env.collect(TableAgent(), steps=40)
    for slot in range(SLOTS):
        single, starts = CountingEnv(), np.flatnonzero(batch["episode_start"][:, slot])
        expected = [single.reset(seed=episode_seed(5, slot, 0) if k == 0 else None)[0][0] for k in range(len(starts))]
        np.testing.assert_array_equal(batch["obs"][starts, slot, 0], expected)
        assert len(starts) > 3


@pytest.mark.parametrize("workers", [1, 2])
def test_an_agent_in_the_middle_of_episodes_draws_from_their_generators(workers: int) -> None:
    with cluster(CountingEnv, envs=SLOTS, config=in_process(workers), env_kwargs={"length": 6}) as env:
        env.reset(seed=3)
        env.collect(TableAgent(), steps=8)  # into the second episodes
        drawn = env.collect(cast(Any, DrawingAgent()), steps=6)
        for slot in range(SLOTS):
            rows = drawn["action"][:, slot].tolist(), drawn["value"][:, slot].tolist()
            for episode, span in ((1, slice(0, 4)), (2, slice(4, 6))):
                rng = episode_generator(3, slot, episode)
                expected = [(rng.integers(3), rng.random()) for _ in rows[0][span]]
                assert list(zip(*(row[span] for row in rows), strict=True)) == expected


def test_the_environments_are_seeded_by_slot_and_episode(reference: Any) -> None:
    """All slots, episodes and seeds have different random streams."""
    env = cluster(CountingEnv, envs=SLOTS, config=in_process(1))
    with env:
        env.reset(seed=4)
        other = arrays_of(env.collect(TableAgent(), steps=7))
    assert not (other["obs"] == reference[0]["obs"]).all(axis=(0, 2)).any()
    firsts = reference[0]["obs"][0, :, 0]
    assert len(set(firsts)) == SLOTS


def test_largest_seed_reaches_the_environments() -> None:
    with cluster(CountingEnv, envs=2, workers=1, seed=2**63 - 1) as env:
        first, _ = env.reset()
        again, _ = env.reset(seed=2**63 - 1)
    np.testing.assert_array_equal(first, again)


def learn(agent: TableAgent, k: int) -> bool:
    """Changes the agent after every batch but the first."""
    agent.table[:] = (agent.table + (k > 0)) % 3
    return k > 0


@pytest.mark.parametrize(
    "config", [in_process(2), farstep.LocalConfig(workers_per_node=2)], ids=["in_process", "local"]
)
def test_a_stream_without_staleness_equals_collect(config: LaunchConfig) -> None:
    synchronous, streamed = [], []
    with cluster(CountingEnv, envs=SLOTS, config=config) as env:
        agent = TableAgent()
        for k in range(6):
            synchronous.append(arrays_of(env.collect(agent, steps=9)))
            learn(agent, k)
    with cluster(CountingEnv, envs=SLOTS, config=config) as env:
        agent = TableAgent()
        for k, batch in enumerate(env.stream(agent, steps=9, max_staleness=0)):
            streamed.append(arrays_of(batch))
            if k == 5:
                break
            if learn(agent, k):
                env.publish(agent)
    for k, (one, other) in enumerate(zip(synchronous, streamed, strict=True)):
        assert (one["version"] == max(0, k - 1)).all()
        assert_same(one, other)


Episode = list[tuple[Any, ...]]


def episodes(batches: list[dict[str, np.ndarray]]) -> list[list[Episode]]:
    """Per slot, its episodes in order, each a list of rows (observation, action, reward)."""
    joined = {key: np.concatenate([batch[key] for batch in batches]) for key in ("obs", "action", "reward")}
    starts = np.concatenate([batch["episode_start"] for batch in batches])
    found: list[list[Episode]] = [[] for _ in range(SLOTS)]
    for t, i in np.ndindex(starts.shape):
        if starts[t, i]:
            found[i].append([])
        found[i][-1].append((*joined["obs"][t, i], joined["action"][t, i], joined["reward"][t, i]))
    return found


def test_later_episodes_are_the_same_after_a_kill(tmp_path: Path) -> None:
    """A killed worker costs each of its slots the rest of one episode, and no other row."""
    runs = {}
    for name, env_class, kwargs in (
        ("clean", CountingEnv, {}),
        ("killed", MortalEnv, {"marker": str(tmp_path / "killed"), "at": 21}),
    ):
        with cluster(env_class, envs=SLOTS, workers=2, env_kwargs=kwargs) as env:
            agent: Any = DrawingAgent()
            batches = []
            for _ in range(6):
                batch = env.collect(agent, steps=8)
                assert_sound(batch)
                batches.append(arrays_of(batch))
            runs[name] = episodes(batches)
            assert env.stats()["workers"]["restarts"] == (name == "killed")
    cuts = []
    for clean, killed in zip(runs["clean"], runs["killed"], strict=True):
        common = min(len(clean), len(killed)) - 1  # the last one of a run may be cut by its end
        shorter = [k for k in range(common) if killed[k] != clean[k]]
        for k in shorter:
            assert killed[k] == clean[k][: len(killed[k])]
        cuts.append(len(shorter))
        assert common > 3
    assert max(cuts) == 1  # the episode of some slot was cut ...
    assert sum(cuts) in (1, 2, 3)  # ... of one worker's slots; none where the episode had ended with the chunk


@pytest.mark.parametrize("explicit", [False, True], ids=["collect", "reset"])
@pytest.mark.parametrize("phase", ["reset", "step"])
def test_an_episode_that_always_raises_is_left_out(phase: str, explicit: bool) -> None:
    """Also the first one of a run: it costs one restart, and its slot continues with the next episode."""
    poison = (1, 2, 4)  # two of them on one worker
    seeds = [episode_seed(5, slot, 0) for slot in poison]
    runs = []
    for bad in ([], seeds):
        config = in_process(2, restart_budget=len(bad))
        with cluster(PoisonEnv, envs=SLOTS, config=config, env_kwargs={"seeds": bad, "phase": phase}) as env:
            if explicit:
                env.reset(seed=5)
            agent: Any = DrawingAgent()
            runs.append(episodes([arrays_of(env.collect(agent, steps=8)) for _ in range(4)]))
            assert env.stats()["dropped"].get("environment_failed", 0) == len(bad)
    for slot, (clean, poisoned) in enumerate(zip(*runs, strict=True)):
        expected = clean[1:] if slot in poison else clean
        common = min(len(expected), len(poisoned)) - 1  # the last one of a run may be cut by its end
        assert common > 1
        assert poisoned[:common] == expected[:common]


def test_only_masked_slots_are_reset() -> None:
    mask = np.array([True, False, False, True, False])
    for config in (in_process(2), farstep.LocalConfig(workers_per_node=2)):
        with cluster(CountingEnv, envs=SLOTS, config=config, env_kwargs={"length": None}) as env:
            agent = TableAgent()
            before = env.collect(agent, steps=3).last_obs.copy()
            obs, info = env.reset(options={"reset_mask": mask})
            np.testing.assert_array_equal(obs[~mask], before[~mask])
            assert (obs[mask, 0] != before[mask, 0]).all()
            np.testing.assert_array_equal(obs[mask, 1:], [[0, -1]] * 2)
            np.testing.assert_array_equal(info["_episode_id"], mask)
            batch = env.collect(agent, steps=2)
            np.testing.assert_array_equal(batch["obs"][0], obs)
            np.testing.assert_array_equal(batch["episode_start"], [mask, [False] * SLOTS])
            # With a seed, only the named slots return to their episode 0.
            again, _ = env.reset(seed=env.seed, options={"reset_mask": mask})
            np.testing.assert_array_equal(again[~mask], batch.last_obs[~mask])
            whole, _ = env.reset(seed=env.seed)
            np.testing.assert_array_equal(again[mask], whole[mask])


def test_endless_episodes_continue_in_the_next_batch() -> None:
    with cluster(CountingEnv, envs=2, workers=2, env_kwargs={"length": None}) as env:
        agent = TableAgent()
        count = 0
        for steps in (4, 1, 16):
            batch = env.collect(agent, steps=steps)
            np.testing.assert_array_equal(batch["obs"][:, 0, 1], np.arange(count, count + steps))
            count += steps
            assert len(batch.final_obs) == len(batch.episodes["return"]) == 0
        assert env.stats()["episodes"] == {"count": 0, "return_mean": None, "length_mean": None}
