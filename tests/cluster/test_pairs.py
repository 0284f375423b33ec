"""Every pair of features in one run: no row is lost, duplicated, misnumbered or rolled with mixed weights."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farstep
from farstep import DataKeyTrigger, TimeTrigger, TransferTrigger
from farstep.buffer import Sequence, Uniform
from farstep.config.launch import LaunchConfig
from farstep.testing import CountingEnv
from tests.cluster.checks import assert_balanced, cluster, within
from tests.cluster.nodes import shell_in

FEATURES = ("aaps", "staleness", "stagger", "recurrent", "thread", "nodes", "transfer", "replay")
ENVS, STEPS, HORIZON, DELTA = 4, 6, 12, 0.02


class WitnessAgent:
    """Reports with every row which weights rolled it: all of its arrays hold the same number."""

    def __init__(self) -> None:
        self.arrays = {f"layer{i}.weight": np.zeros(50) for i in range(8)}

    def learn(self) -> None:
        """One update, layer by layer, with time for other threads in between."""
        for array in self.arrays.values():
            array += 0.1
            time.sleep(1e-4)

    def act(self, obs: Any) -> dict[str, Any]:
        lowest, highest = (f(a.flat[0] for a in self.arrays.values()) for f in (min, max))
        marks = np.full(len(obs), lowest if lowest == highest else -1.0)
        return {"action": obs[:, 1].astype(np.int64) % 3, "mark": marks}

    def distribution(self, obs: Any) -> Any:
        return {"bernoulli": np.full((len(obs), 1), self.arrays["layer0.weight"][0])}

    def get_parameters(self) -> dict[str, Any]:
        return self.arrays


class RecurrentWitness(WitnessAgent):
    """Its state counts the steps of the episode."""

    def initial_state(self, n: int) -> Any:
        return np.zeros(n, np.int64)

    def act(self, obs: Any, state: Any, episode_start: Any) -> dict[str, Any]:  # type: ignore[override]
        age = np.where(episode_start, 0, state)
        return {**super().act(obs), "age": age, "state": age + 1}

    def distribution(self, obs: Any, state: Any, episode_start: Any) -> Any:  # type: ignore[override]
        return super().distribution(obs)


class Witness:
    """Checks every row of a learner against the published versions and the row before in its slot."""

    def __init__(self, env: farstep.ClusterEnv, agent: WitnessAgent, chosen: set[str]) -> None:
        self.env, self.agent, self.chosen = env, agent, chosen
        self.published: dict[int, float] = {}
        self.last: dict[int, Any] = {}
        self.checks = 0
        self.widths: set[int] = set()
        self.phases: set[int] = set()
        self.versions: set[int] = set()

    def batch(self, batch: farstep.Batch) -> None:
        obs, final = batch["obs"], batch.final_obs
        after = np.concatenate([obs[1:], batch.last_obs[None]])
        after[final.row, final.slot] = final.obs
        np.testing.assert_array_equal(after, np.stack([obs[..., 0], obs[..., 1] + 1, batch["action"]], axis=-1))
        for column, slot in enumerate(batch.slots):
            if batch.continues[column]:
                np.testing.assert_array_equal(obs[0, column], self.last[slot])
            self.last[slot] = batch.last_obs[column].copy()
        self.marks(batch["mark"], batch["version"])
        if "recurrent" in self.chosen:  # a staggered slot's first episode is joined in the middle, with a fresh state
            before = np.concatenate([batch.initial_state[None], batch["age"][:-1] + 1])
            np.testing.assert_array_equal(batch["age"], np.where(batch["episode_start"], 0, before))
        self.widths.add(len(batch.slots))
        self.phases |= set(obs[0, :, 1].astype(int).tolist())
        self.checks += 1

    def samples(self, rows: Any) -> None:
        """Transitions `[k]`, or sequences `[k, length]` of which the padding does not count."""
        valid = rows["valid"].astype(bool)
        self.marks(rows["mark"][valid], rows["version"][valid])
        if "recurrent" in self.chosen:
            np.testing.assert_array_equal(rows["age"][valid], rows["obs"][..., 1][valid])
        if "next_obs" in rows:
            np.testing.assert_array_equal(rows["next_obs"][..., 1][valid], rows["obs"][..., 1][valid] + 1)
            np.testing.assert_array_equal(rows["next_obs"][..., 2][valid], rows["action"][valid])
        self.checks += 1

    def marks(self, marks: Any, versions: Any) -> None:
        """Rows of one version were rolled with one and the same, whole, set of weights."""
        assert (marks >= 0).all(), "rows were rolled with half-updated weights"
        for version in np.unique(versions):
            seen = np.unique(marks[versions == version])
            assert len(seen) == 1 and self.published.setdefault(int(version), float(seen[0])) == seen[0]
        self.versions |= set(np.unique(versions).tolist())


def make(chosen: set[str], folder: Path) -> farstep.ClusterEnv:
    options: dict[str, Any] = {"env_kwargs": {"length": 0}}
    if "aaps" in chosen:
        options["kl_threshold"] = DELTA
    if "stagger" in chosen:
        options |= {"env_kwargs": {"length": None}, "stagger": {"horizon": HORIZON, "groups": 2, "init": "policy"}}
    if "transfer" in chosen:
        options["transfer"] = TransferTrigger.dual(size=2)
    config: LaunchConfig = farstep.LocalConfig(workers_per_node=2, transport="tcp" if "transfer" in chosen else "shm")
    if "nodes" in chosen:
        hosts = ["host0", "host1"]
        config = farstep.SSHConfig(hosts=hosts, ssh=(shell_in(folder),), nodes=2, min_nodes=1, workers_per_node=1)
        options["envs_per_node"] = ENVS // 2
    return cluster(CountingEnv, envs=options.pop("envs_per_node", ENVS), config=config, **options)


class Nodes:
    """Kills a node daemon once; done when its replacement is there and some more was checked."""

    def __init__(self, witness: Witness, wanted: bool) -> None:
        self._witness, self._killed, self._since = witness, -1, None if wanted else 0

    def done(self) -> bool:
        witness = self._witness
        if self._since is None:
            time.sleep(0.01)  # processes start meanwhile, and need the CPU time
            stats = witness.env.stats()
            pids = [node["pid"] for node in stats["nodes"]]
            whole = len(pids) == 2 and stats["workers"]["alive"] == 2
            if self._killed < 0 and whole and witness.checks >= 4:
                self._killed = pids[1]
                os.kill(self._killed, signal.SIGKILL)
            elif self._killed >= 0 and whole and self._killed not in pids:
                self._since = witness.checks
        return self._since is not None and witness.checks >= self._since + 8


def by_stream(env: farstep.ClusterEnv, agent: WitnessAgent, witness: Witness, nodes: Nodes, chosen: set[str]) -> None:
    bound = 1 if "staleness" in chosen else 3
    for batch in env.stream(agent, steps=STEPS, max_staleness=bound):
        if "aaps" not in chosen:  # there a row counts as the version that its weights were compared with
            assert (env.version - batch["version"] <= bound).all()
        witness.batch(batch)
        agent.learn()
        env.publish(agent)
        if nodes.done() and witness.checks >= 12:
            return


def by_workflow(env: farstep.ClusterEnv, agent: WitnessAgent, witness: Witness, nodes: Nodes, chosen: set[str]) -> None:
    """A learner in a thread publishes by time, from the loop's thread, except where staleness is bounded."""
    threaded, bounded = "thread" in chosen, "staleness" in chosen
    sampler: Any = farstep.FullBatch()
    if "replay" in chosen:
        sampler = Sequence(4) if "recurrent" in chosen else Uniform()
    buffer = farstep.Buffer(ENVS * 64, sampler, seed=1)
    flow = farstep.Workflow(env, agent, buffer, steps=STEPS, max_staleness=1 if bounded else None)

    def update(message: Any) -> None:
        if "replay" in chosen:
            rows, _ = buffer.sample(4)
            witness.samples(rows)
        else:
            batch = flow.batch(message)
            if bounded:
                assert (env.version - batch["version"] <= 1).all()
            witness.batch(batch)
        agent.learn()
        if bounded:
            flow.publish()

    replay: dict[str, Any] = {"consume": False, "min_new": STEPS} if "replay" in chosen else {}
    flow.on(DataKeyTrigger(n=1, size=STEPS, **replay), update, thread=threaded)
    if not bounded:
        flow.on(TimeTrigger(2 * STEPS, unit="env_steps"), flow.publish)
    flow.run(until=lambda: nodes.done() and witness.checks >= 12 and env.version > 8)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("pair", list(itertools.combinations(FEATURES, 2)), ids="-".join)
def test_features_combine(pair: tuple[str, str], tmp_path: Path) -> None:
    chosen = set(pair)
    agent = RecurrentWitness() if "recurrent" in chosen else WitnessAgent()
    with make(chosen, tmp_path) as env:
        witness = Witness(env, agent, chosen)
        nodes = Nodes(witness, "nodes" in chosen)
        run = by_workflow if chosen & {"thread", "replay"} else by_stream
        within(lambda: run(env, agent, witness, nodes, chosen), 200)
        stats = env.stats()
    assert_balanced(stats)
    if "aaps" in chosen:
        assert 2 < stats["pulls"]["total"] < 2 * stats["versions"]["current"], "some versions, not all"
    if "stagger" in chosen and "replay" not in chosen:
        assert len(witness.phases) > 1
    if "nodes" in chosen and not chosen & {"thread", "replay"}:
        assert witness.widths == {ENVS // 2, ENVS}
