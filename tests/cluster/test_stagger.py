"""Staggered resets in a running cluster: the invariants of spec 2.2, and episodes and chunks that end early."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import farstep
from farstep.cluster_env import collector_for
from farstep.head.tickets.records import FeedPlan
from farstep.rollout.seeds import episode_seed
from farstep.testing import CountingEnv, TableAgent
from tests.cluster.checks import (
    BOTH,
    arrays_of,
    assert_balanced,
    assert_same,
    assert_sound,
    cluster,
    eventually,
    in_process,
)
from tests.cluster.faulty import MortalEnv, PoisonEnv
from tests.cluster.toys import NestedAgent, NestedEnv

H, K, N = 20, 5, 8
ENDLESS = {"length": None}


class DrawingAgent(TableAgent):
    """Draws its actions from the generator of each slot."""

    def act(self, obs: Any, rng: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"action": np.array([g.integers(3) for g in rng]), "value": np.array([g.random() for g in rng])}


class CyclingAgent:
    """Recurrent: its state counts the steps of an episode, and so do its actions, modulo 3."""

    scale = np.ones(1)

    def initial_state(self, n: int) -> Any:
        return np.zeros(n, np.int64)

    def act(self, obs: Any, state: Any, episode_start: Any) -> dict[str, Any]:
        state = np.where(episode_start, 0, state)
        return {"action": state % 3, "seen": state, "state": state + 1}

    def get_parameters(self) -> dict[str, Any]:
        return {"scale": self.scale}


def staggered(*, envs: int = N, config: Any = None, env: Any = CountingEnv, length: Any = None, **stagger: Any) -> Any:
    options = {"horizon": H, "groups": 4, **stagger}
    return cluster(env, envs=envs, config=config or in_process(2), env_kwargs={"length": length}, stagger=options)


def rolled(env: farstep.ClusterEnv, batches: int, steps: int = K, agent: Any = None) -> dict[str, np.ndarray]:
    """Batches one after the other, as one; `final` is by row and slot."""
    with env:
        return collected(env, batches, steps, agent)


def collected(env: farstep.ClusterEnv, batches: int, steps: int = K, agent: Any = None) -> dict[str, np.ndarray]:
    agent = agent or TableAgent()
    parts = [arrays_of(env.collect(agent, steps=steps)) for _ in range(batches)]
    for k, part in enumerate(parts):
        part["final row"] = part["final row"] + k * steps
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def phases(found: dict[str, np.ndarray]) -> np.ndarray:
    return found["obs"][:, :, 1].astype(int)


# ---- the invariants ----


@BOTH
@pytest.mark.parametrize("init", ["advance", "policy"])
def test_a_batch_has_rows_of_every_part_of_an_episode(config: Any, init: str) -> None:
    env = staggered(config=config, init=init)
    found = rolled(env, 12)
    elapsed, offsets = phases(found), np.arange(N) % 4 * (H // 4)
    s = np.arange(len(elapsed))[:, None]
    np.testing.assert_array_equal(elapsed, (s + offsets) % H)  # (b): windows [o_g + s, o_g + s + K)
    for row in elapsed[::K]:  # (a): at every update
        assert sorted(row) == sorted(offsets)
    assert (found["episode_start"][0]).all()  # for learner and recurrent agent alike, nothing came before
    np.testing.assert_array_equal(found["episode_start"][1:], elapsed[1:] == 0)
    np.testing.assert_array_equal(found["truncated"], elapsed == H - 1)  # a time limit's end
    assert not found["terminated"].any() and found["valid"].all()
    assert found["truncated"].sum(axis=1).max() == N // 4  # (c)
    # Where one ended, the last observation is there; the next episode has its own seed.
    ends = found["truncated"][found["final row"], found["final slot"]]
    assert ends.all() and len(ends) == found["truncated"].sum()
    np.testing.assert_array_equal(found["final obs"][:, 1], [H] * len(ends))
    for slot in range(N):
        starts = np.flatnonzero(elapsed[:, slot] == 0)
        firsts = found["obs"][starts, slot, 0]
        began = int(offsets[slot] > 0)
        for k, first in enumerate(firsts):
            assert first == CountingEnv().reset(seed=episode_seed(5, slot, began + k))[0][0]
    assert set(found["episodes length"]) == {H}
    assert set(found["episodes return"]) == {H * (H + 1) / 2}  # including the steps that were not delivered


def test_undelivered_steps_are_counted() -> None:
    """Invariant (e): all environments have done as many steps, those before the first rollout included."""
    with staggered() as env:
        collected(env, 4)
        stats = env.stats()
        assert (stats["steps"], stats["stagger_steps"]) == (4 * K * N, 2 * (0 + 5 + 10 + 15))
        env.reset()
        assert env.stats()["stagger_steps"] == 60  # a reset only resets; the next rollout brings them to their places
        collected(env, 1)
        assert env.stats()["stagger_steps"] == 120
    for options in ({"groups": 1}, {"init": "clock"}):
        with staggered(**options) as env:
            collected(env, 2)
            assert env.stats()["stagger_steps"] == 0


@pytest.mark.parametrize("config", [in_process(1), in_process(4), farstep.LocalConfig(workers_per_node=2)])
@pytest.mark.parametrize("agent", [TableAgent(), DrawingAgent(), CyclingAgent()])
def test_disabled_stagger_changes_nothing(config: Any, agent: Any) -> None:
    runs = []
    for options in ({}, {"stagger": None}, {"stagger": {"horizon": 9, "groups": 1}}):
        with cluster(envs=5, config=config, **options) as env:  # episodes of 1 to 9 steps: none is cut
            found = [env.collect(agent, steps=steps) for steps in (7,)]
            runs.append([arrays_of(batch) for batch in found] + [collected(env, 3, agent=agent)])
            assert_sound(env.collect(agent, steps=3))
    for mine, theirs in ((runs[1], runs[0]), (runs[2], runs[0])):  # (d)
        for one, other in zip(mine, theirs, strict=True):
            assert_same(one, other)
            assert all(one[name].tobytes() == other[name].tobytes() for name in one)


def test_one_group_is_the_naive_schedule_with_a_time_limit() -> None:
    """Invariant (d), where episodes are cut: as Gymnasium's TimeLimit does it."""
    limit = (gymnasium.wrappers.TimeLimit, {"max_episode_steps": 7})
    kwargs = {"length": None}
    with cluster(envs=5, config=in_process(2), env_kwargs=kwargs, wrappers=[limit]) as env:
        naive = collected(env, 5, agent=DrawingAgent())
    for init in ("advance", "clock", "policy"):
        for early in ("partial", "gate"):
            options = {"horizon": 7, "groups": 1, "init": init, "early": early}
            assert_same(rolled(staggered(envs=5, **options), 5, agent=DrawingAgent()), naive)


VARIANTS = {
    "advance": {},
    "policy": {"init": "policy"},
    "clock": {"init": "clock"},
    "random": {"groups": "auto", "offsets": "random"},
    "gate": {"early": "gate"},
    "gate policy random": {"early": "gate", "init": "policy", "groups": "auto", "offsets": "random"},
    "gate clock": {"early": "gate", "init": "clock", "groups": "auto"},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("agent", [DrawingAgent(), CyclingAgent()], ids=["drawing", "recurrent"])
def test_trajectories_do_not_depend_on_workers(options: dict[str, Any], agent: Any) -> None:
    """Episodes of 1 to 9 steps in a horizon of 6, so that they end early, at the horizon and while being advanced."""
    configs = [in_process(n) for n in (1, 2, 4)] + [farstep.LocalConfig(workers_per_node=2, transport="tcp")]
    envs = [staggered(envs=7, length=0, config=config, **{**options, "horizon": 6}) for config in configs]
    first, *others = [rolled(env, 6, agent=agent) for env in envs]
    for other in others:
        assert_same(other, first)
    reseeded = staggered(envs=7, length=0, **{**options, "horizon": 6})
    with reseeded:
        collected(reseeded, 3, agent=agent)
        reseeded.reset(seed=5)
        assert_same(collected(reseeded, 6, agent=agent), first)  # a reset restarts the schedule


# ---- ways to their places ----


def test_random_actions_are_drawn_by_seed_and_slot() -> None:
    first, again, other = (
        cluster(envs=N, config=in_process(2), env_kwargs=ENDLESS, seed=seed, stagger={"horizon": H, "groups": 4})
        for seed in (1, 1, 2)
    )
    last = [rolled(env, 1)["obs"][0, 2:, 2] for env in (first, again, other)]  # what was done just before
    np.testing.assert_array_equal(last[0], last[1])
    assert (last[0] != last[2]).any()
    assert len(set(last[0])) > 1


def test_actions_of_the_agent_bring_environments_to_their_phases() -> None:
    agent = TableAgent()
    found = rolled(staggered(init="policy"), 2, agent=agent)
    for slot in np.flatnonzero(np.arange(N) % 4):
        episode, elapsed, action = found["obs"][0, slot]
        assert action == agent.act(np.array([[episode, elapsed - 1, 0]], np.float32))["action"][0]


def test_a_recurrent_agent_begins_where_its_first_row_does() -> None:
    with staggered(init="policy") as env:
        agent = CyclingAgent()
        batch = env.collect(agent, steps=K - 1)
        np.testing.assert_array_equal(batch["seen"][0], [0] * N)
        np.testing.assert_array_equal(batch["obs"][0, :, 2], [-1, 1, 0, 2] * 2)  # steps 4, 9 and 14 before
        # Some are reset: acting for these on the way to their places is nothing to the others.
        mask = np.arange(N) == 3
        before, seen = batch.last_obs.copy(), batch["seen"][-1].copy()
        env.reset(options={"reset_mask": mask})
        batch = env.collect(agent, steps=K)
        np.testing.assert_array_equal(batch["seen"][0, ~mask], seen[~mask] + 1)
        np.testing.assert_array_equal(batch["obs"][0, ~mask], before[~mask])
        np.testing.assert_array_equal(batch["obs"][0, :, 1], before[:, 1])  # also the one that was reset is in place
        assert batch["seen"][0, 3] == 0


@BOTH
def test_the_clock_cuts_first_episodes_short(config: Any) -> None:
    found = rolled(staggered(init="clock", config=config), 10)
    offsets = np.arange(N) % 4 * (H // 4)
    assert not phases(found)[0].any()
    s = np.arange(10 * K)[:, None]
    np.testing.assert_array_equal(found["truncated"], (s + 1 + offsets) % H == 0)
    np.testing.assert_array_equal(phases(found), np.where(s + offsets < H, s, (s + offsets) % H))
    order = np.lexsort((found["final slot"], found["final row"]))
    firsts = found["final obs"][order][:N, 1]
    np.testing.assert_array_equal(sorted(firsts), sorted(H - offsets))
    assert Counter(found["episodes length"]) == Counter({**{H - o: 2 for o in {5, 10, 15}}, H: len(order) - 6})


def test_random_offsets_are_spread() -> None:
    found = rolled(staggered(envs=40, groups="auto", offsets="random"), 5)
    first = phases(found)[0]
    assert len(set(first)) > 8
    s = np.arange(len(found["obs"]))[:, None]
    np.testing.assert_array_equal(phases(found), (s + first) % H)


def test_as_many_groups_as_the_first_rollouts_fit_into_the_horizon() -> None:
    with staggered(groups="auto") as env:
        agent = TableAgent()
        assert sorted(set(env.collect(agent, steps=10)["obs"][0, :, 1])) == [0, 10]
        assert sorted(set(env.collect(agent, steps=5)["obs"][0, :, 1])) == [0, 10]  # they are where they are
        env.reset()
        assert sorted(set(env.collect(agent, steps=5)["obs"][0, :, 1])) == [0, 5, 10, 15]
        env.reset()
        obs, *_ = env.step(agent)
        np.testing.assert_array_equal(obs[:, 1] - 1, np.arange(N) * (H // N))  # groups: no more than environments


# ---- episodes that end early ----


def test_an_environment_that_ends_early_begins_at_once() -> None:
    with staggered(length=0, horizon=6) as env:
        agent = TableAgent()
        env.collect(agent, steps=3)  # which begins in the middle of episodes
        for _ in range(6):
            assert_sound(env.collect(agent, steps=7))  # each row follows, or begins an episode


def test_an_episode_may_end_on_the_way_to_its_phase() -> None:
    """It continues with the next episode's seed."""
    found = rolled(staggered(length=4, envs=4, groups=4), 2)
    np.testing.assert_array_equal(found["obs"][0, :, 1], [0, 5 % 4, 10 % 4, 15 % 4])
    for slot, episode in enumerate((0, 1, 2, 3)):
        assert found["obs"][0, slot, 0] == CountingEnv().reset(seed=episode_seed(5, slot, episode))[0][0]
    np.testing.assert_array_equal(found["terminated"], phases(found) == 3)


@BOTH
@pytest.mark.parametrize("init", ["advance", "clock"])
def test_at_the_gate_a_group_begins_together(config: Any, init: str) -> None:
    length = 13  # of 20
    env = staggered(config=config, length=length, early="gate", init=init)
    with env:
        found = collected(env, 16)
        seen = env.stats()
    offsets = np.arange(N) % 4 * (H // 4)
    s = np.arange(16 * K)[:, None]
    place = (s + offsets) % H
    settled = np.broadcast_to(s, place.shape) + offsets >= H
    np.testing.assert_array_equal(found["episode_start"][1:][settled[1:]], (place == 0)[1:][settled[1:]])
    np.testing.assert_array_equal(found["valid"][settled], (place < length)[settled])
    np.testing.assert_array_equal(found["terminated"][settled], (place == length - 1)[settled])
    np.testing.assert_array_equal(phases(found)[settled], np.minimum(place, length)[settled])  # the last one, repeated
    assert not found["reward"][~found["valid"]].any()
    assert not found["terminated"][~found["valid"]].any() and not found["truncated"][~found["valid"]].any()
    ended = found["terminated"] | found["truncated"]
    assert len(found["final obs"]) == ended.sum()
    # What follows a filler row is another, or the first row of an episode.
    filler = ~found["valid"]
    assert (filler[1:] | found["episode_start"][1:])[filler[:-1]].all()
    begun = (found["episode_start"] & settled).sum(axis=1)
    assert set(begun[1:]) == {0, 2}  # the group, and no other slot
    # No episode is left out.
    for slot in range(N):
        starts = np.flatnonzero(found["episode_start"][:, slot] & settled[:, slot])
        began = [int(n) for n in found["obs"][starts, slot, 0]]
        seeds = [CountingEnv().reset(seed=episode_seed(5, slot, k))[0][0] for k in range(8)]
        first = seeds.index(began[0])
        assert began == seeds[first : first + len(began)]
    assert seen["steps"] == 16 * K * N


def test_a_reset_and_another_chunk_length_at_the_gate() -> None:
    with staggered(length=3, early="gate", envs=4, groups=2) as env:
        agent = TableAgent()
        batch = env.collect(agent, steps=5)
        assert (~batch["valid"]).any()
        ids = batch["obs"][0, :, 0].copy()
        obs, _ = env.reset()  # while they wait: with their next episodes, none is left out
        seeds = [[CountingEnv().reset(seed=episode_seed(5, i, k))[0][0] for k in range(6)] for i in range(4)]
        for i in range(4):
            assert seeds[i].index(obs[i, 0]) == seeds[i].index(ids[i]) + 1
        assert env.collect(agent, steps=1)["valid"][:, ::2].all()
        assert not env.collect(agent, steps=10)["valid"].all()


def test_a_replay_buffer_samples_no_filler_rows() -> None:
    with staggered(length=3, early="gate") as env, farstep.Buffer(4000, farstep.buffer.Uniform(), seed=1) as buffer:
        flow, found = farstep.Workflow(env, TableAgent(), buffer, steps=K), []

        def learn(message: Any) -> None:
            found.append(buffer.sample(64)[0])

        flow.on(farstep.TimeTrigger(K * N, unit="env_steps"), learn)
        flow.run(total_steps=10 * K * N)
    counts = np.concatenate([batch["obs"][:, 1] for batch in found])
    assert set(counts) == {0, 1, 2}  # 3 would be the last observation, of a row that waits
    assert np.concatenate([batch["reward"] for batch in found]).min() == 1


@pytest.mark.parametrize("init", ["advance", "policy"])
def test_nested_spaces_wait_too(init: str) -> None:
    stagger = {"horizon": 8, "groups": 2, "early": "gate", "init": init}
    with cluster(NestedEnv, envs=4, config=in_process(2), stagger=stagger) as env:
        env.collect(agent := NestedAgent(), steps=4)  # until the first gate
        batch = env.collect(agent, steps=8)
    counts = batch["obs.pair.0"]
    np.testing.assert_array_equal(counts[:, ::2], np.broadcast_to([[3]] * 4 + [[0], [1], [2], [3]], (8, 2)))
    np.testing.assert_array_equal(counts[:, 1::2], np.broadcast_to([[0], [1], [2], [3], [3], [3], [3], [3]], (8, 2)))
    np.testing.assert_array_equal(batch["valid"], counts < 3)
    np.testing.assert_array_equal(batch["obs.camera"][..., 0, 0], 10 * counts)


# ---- calls, and failures ----


@BOTH
def test_streams_and_steps_are_staggered_too(config: Any) -> None:
    offsets = np.arange(N) % 4 * (H // 4)
    with staggered(config=config) as env:
        agent, s = TableAgent(), 0
        for batch in env.stream(agent, steps=K, max_staleness=0):
            np.testing.assert_array_equal(batch["obs"][0, :, 1], (s + offsets) % H)
            s += K
            if s > 2 * H:
                break
    with staggered(config=config) as env:
        ended = 0
        for s in range(H):
            obs, _, _, truncated, info = env.step(agent)
            np.testing.assert_array_equal(obs[:, 1], (s + 1 + offsets) % H)
            np.testing.assert_array_equal(truncated, (s + 1 + offsets) % H == 0)
            if truncated.any():
                where = np.flatnonzero(truncated)
                assert info["final_info"]["count"][where].tolist() == [H] * 2
                assert [int(o[1]) for o in info["final_obs"][where]] == [H] * 2
                ended += len(where)
        assert ended == N


@pytest.mark.parametrize("init", ["advance", "clock", "policy"])
def test_replaced_worker_returns_to_the_phase_that_is_due(tmp_path: Path, init: str) -> None:
    """Invariant (a) after a kill: with `clock` from the first gate on, else at once."""
    kwargs = {"marker": str(tmp_path / "killed"), "at": 50, "length": None}
    stagger = {"horizon": H, "groups": 4, "init": init}
    with cluster(MortalEnv, envs=N, workers=2, env_kwargs=kwargs, stagger=stagger) as env:
        found = collected(env, 24)
        assert env.stats()["workers"]["restarts"] == 1
        assert_balanced(env.stats())
    offsets = np.arange(N) % 4 * (H // 4)
    s = np.arange(24 * K)[:, None]
    expected = (s + offsets) % H
    if init == "clock":
        assert (phases(found) == expected)[-H:].all()
        ends = (found["truncated"] | found["terminated"]).sum(axis=0)
        np.testing.assert_array_equal(ends, ((s + 1 + offsets) % H == 0).sum(axis=0))
    else:
        np.testing.assert_array_equal(phases(found), expected)


def test_environment_that_raises_returns_to_the_phase_that_is_due() -> None:
    """Also one that raises on the way there, in every attempt: its slot takes the next episode."""
    bad = [episode_seed(5, slot, 0) for slot in (3, 6)]
    for phase in ("reset", "step"):
        kwargs = {"seeds": bad, "phase": phase, "length": None}
        config = in_process(2, restart_budget=2)
        stagger = {"horizon": H, "groups": 4}
        with cluster(PoisonEnv, envs=N, config=config, env_kwargs=kwargs, stagger=stagger) as env:
            found = collected(env, 8)
            assert env.stats()["dropped"]["environment_failed"] == 2
        np.testing.assert_array_equal(phases(found), (np.arange(8 * K)[:, None] + np.arange(N) % 4 * 5) % H)
        for slot in (3, 6):
            assert found["obs"][0, slot, 0] == CountingEnv().reset(seed=episode_seed(5, slot, 1))[0][0]


class HeldEnv(CountingEnv):
    """Says at its fifth step that it is there, and waits; every other one takes its time."""

    def __init__(self, folder: str) -> None:
        super().__init__(length=None)
        self._folder = Path(folder)

    def step(self, action: Any) -> Any:
        if self.count == 4:
            (self._folder / "there").touch()
            eventually((self._folder / "go").exists)
        time.sleep(0.01)
        return super().step(action)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_ticket_may_be_reclaimed_on_the_way_and_the_next_continues_there(transport: Any, tmp_path: Path) -> None:
    config = farstep.LocalConfig(workers_per_node=1, transport=transport)
    stagger, kwargs = {"horizon": 200, "groups": 2}, {"folder": str(tmp_path)}
    with cluster(HeldEnv, envs=2, config=config, env_kwargs=kwargs, stagger=stagger) as env:
        agent = TableAgent()
        env.publish(agent)
        collector = collector_for(env, agent)
        request = collector.open_feed(4, FeedPlan(), None)
        with collector.server.locked():
            collector.server.grant()
        eventually((tmp_path / "there").exists)
        collector.end_feed(request)
        (tmp_path / "go").touch()
        batch = env.collect(agent, steps=4)
        assert batch["obs"][0, :, 1].tolist() == [0, 100]  # no row was rolled for the other ticket
        assert env.stats()["stagger_steps"] == 100  # and no step was done twice


# ---- vectors ----


def counting_vector(num_envs: int, mode: str = "NEXT_STEP", length: Any = None) -> Any:
    return gymnasium.vector.SyncVectorEnv(
        [lambda: CountingEnv(length=length)] * num_envs, autoreset_mode=gymnasium.vector.AutoresetMode[mode]
    )


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_vectors_are_staggered_by_the_clock(mode: str) -> None:
    singles = rolled(staggered(init="clock"), 10)
    options: dict[str, Any] = {
        "type": "vector",
        "env_kwargs": {"mode": mode},
        "stagger": {"horizon": H, "groups": 4, "init": "clock"},
    }
    with cluster(counting_vector, envs=N, config=in_process(2), **options) as env:
        agent = TableAgent()
        assert_same(collected(env, 10, agent=agent), singles)
        env.reset(seed=5)
        assert_same(collected(env, 10, agent=agent), singles)
        *_, truncated, info = env.step(agent)
        while not truncated.any():
            *_, truncated, info = env.step(agent)
        assert info["final_info"]["count"][truncated].tolist() == [H] * truncated.sum()


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_vectors_whose_episodes_end_early(mode: str) -> None:
    options: dict[str, Any] = {
        "type": "vector",
        "env_kwargs": {"mode": mode, "length": 0},
        "stagger": {"horizon": 6, "groups": 3, "init": "clock"},
    }
    with cluster(counting_vector, envs=6, config=in_process(2), **options) as env:
        found = collected(env, 20)
    steps = found["obs"][found["valid"]][:, 1]
    assert steps.max() == 5
    np.testing.assert_array_equal((steps == 0).sum(), found["episode_start"][found["valid"]].sum())
    assert found["truncated"].any() and found["terminated"].any()
    assert found["episodes length"].max() == 6


@pytest.fixture(scope="module")
def envpool() -> Any:
    """Imported outside of any test: it keeps exceptions of its own imports, and with them their frames."""
    return pytest.importorskip("envpool")


@pytest.mark.usefixtures("envpool")
def test_envpool_is_staggered_by_the_clock() -> None:
    config = {"type": "envpool", "env_name": "Pendulum-v1", "envs_per_node": 8, "seed": 1}
    with farstep.ClusterEnv({**config, "stagger": {"horizon": 40, "init": "clock"}}, {"workers_per_node": 2}) as env:
        agent = StillAgent()
        assert [int(env.collect(agent, steps=5)["truncated"].sum()) for _ in range(16)] == [1] * 16


class StillAgent:
    def act(self, obs: Any) -> Any:
        return np.zeros((len(obs), 1), np.float32)

    def get_parameters(self) -> dict[str, Any]:
        return {}


class TogetherVector(gymnasium.vector.VectorEnv):
    """Written as a whole: one seed, and a reset resets all."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
        self.single_observation_space = gymnasium.spaces.Box(-1, 1e9, (3,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if isinstance(seed, list):
            raise TypeError("one seed, please")
        return np.zeros((self.num_envs, 3), np.float32), {}

    def step(self, actions: Any) -> Any:
        flags = np.zeros(self.num_envs, bool)
        return np.zeros((self.num_envs, 3), np.float32), np.zeros(self.num_envs), flags, flags, {}


def test_a_vector_that_cannot_reset_some_is_refused() -> None:
    options: dict[str, Any] = {"type": "vector", "stagger": {"horizon": 6, "groups": 3, "init": "clock"}}
    config = in_process(1, restart_budget=0)
    refused = pytest.raises(farstep.FarstepError, match="stagger resets environments at different times, but")
    with cluster(TogetherVector, envs=6, config=config, **options) as env, refused:
        env.collect(TableAgent(), steps=20)


def test_make_vec_is_not_staggered() -> None:
    with pytest.raises(TypeError, match="stagger"):
        farstep.make_vec("CartPole-v1", num_envs=2, stagger={"horizon": 9})  # type: ignore[call-arg]
