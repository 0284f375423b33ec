"""LoRA adapters: only they are trained, published and saved; workers get the base once and need no peft."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import farstep
from farstep.agents.base_weights import base_hash, base_weights, unpickle_agent
from farstep.agents.lora import LoraLinear
from farstep.agents.parameters import ParameterSchema, leaves_of
from farstep.agents.policy import FAST, ship
from farstep.checkpoint import folder as checkpoint
from farstep.learners import (
    DQN,
    PPO,
    SAC,
    ApexConfig,
    Aride,
    ArideConfig,
    AsyncPPO,
    AsyncPPOConfig,
    DQNConfig,
    Impala,
    ImpalaConfig,
    Limits,
    NetConfig,
    PPOConfig,
    SACConfig,
    Training,
)
from farstep.learners.networks.q_network import QNetConfig
from farstep.learners.networks.soft_actor import SACNetConfig
from farstep.learners.replay.config import EpisodeReplayConfig
from tests.agents.lora_agents import AdaptedQAgent, AdaptedSoftActor, Echo, OwnAgent, Policy, Spelling, tokens
from tests.cluster.checks import cluster, eventually, in_process, within, worker_pids
from tests.cluster.nodes import shell_in
from tests.docs.test_examples import run_here

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_in_workers")]  # real processes, or learning

if importlib.util.find_spec("peft") is None:  # importing it takes 6 s, in every process that collects tests
    pytest.skip("adapters need peft: pip install 'farstep[lora]'", allow_module_level=True)

TARGETS = ("q", "k", "v", "o")
ENVS = 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_policy(seed: int = 1, adapters: bool = True, task: type[Spelling] = Spelling, **options: Any) -> Policy:
    torch.manual_seed(seed)
    config = NetConfig(hidden=(), normalize_obs=False, normalize_reward=False)
    policy = Policy(task.observation_space, task.action_space, config)
    policy.heads["action"].logits.weight.data *= 100  # type: ignore[union-attr, operator]
    if adapters:
        policy.add_adapters(**{"r": 4, "alpha": 8, "targets": TARGETS, "also_train": ("critic",), **options})
    return policy


def change(policy: Policy, seed: int = 0) -> None:
    """Change all adapters and the critic, as an update does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)


def prompts() -> torch.Tensor:
    return torch.from_numpy(np.stack([tokens(text) for text in ("hot:", "up:d", "left:righ", "yes:")]))


def logits(policy: Any, obs: Any) -> np.ndarray:
    with torch.inference_mode():
        found: np.ndarray = policy.distribution(torch.as_tensor(obs))["logits"].numpy()
    return found


def nbytes(parameters: Any) -> int:
    return ParameterSchema.of(leaves_of(parameters)).nbytes


# ---- the agent ----


def test_new_adapters_do_not_change_the_policy() -> None:
    np.testing.assert_array_equal(logits(make_policy(), prompts()), logits(make_policy(adapters=False), prompts()))


def test_only_adapters_and_chosen_modules_are_trained_and_published() -> None:
    policy = make_policy()
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert trained == set(policy.get_parameters()) and len(trained) == 2 * 4 * 2 + 2  # layers, targets, A and B; critic
    assert all("lora_" in name or name.startswith("critic.") for name in trained)
    assert policy.base_parameters().keys() == {
        name for name, _ in make_policy(adapters=False).named_parameters() if not name.startswith("critic.")
    }
    assert nbytes(policy.get_parameters()) < nbytes(make_policy(adapters=False).get_parameters()) / 5


def test_merged_and_unmerged_inference_agree() -> None:
    policy = make_policy()
    before = logits(policy, prompts())
    change(policy)
    merged, expected = policy.merged(), logits(policy, prompts())
    assert np.abs(expected - before).max() > 0.01
    np.testing.assert_allclose(logits(merged, prompts()), expected, rtol=1e-4, atol=1e-5)
    plain = make_policy(adapters=False)
    assert merged.get_parameters().keys() == plain.state_dict().keys() and not merged.base_parameters()
    plain.load_state_dict(merged.state_dict())  # fits the model without adapters
    np.testing.assert_array_equal(logits(plain, prompts()), logits(merged, prompts()))
    assert base_hash(policy) == base_hash(make_policy())  # merging changed only the copy


def test_workers_copy_has_no_peft_layers_and_acts_equally() -> None:
    policy = make_policy()
    change(policy)
    base = base_weights(policy)
    assert base is not None
    copy = unpickle_agent(ship(policy, base), base.payload)
    assert {type(module).__module__.partition(".")[0] for module in policy.modules()} >= {"peft"}
    assert not any(type(module).__module__.startswith("peft") for module in copy.modules())
    assert sum(isinstance(module, LoraLinear) for module in copy.modules()) == 2 * 4
    np.testing.assert_array_equal(logits(copy, prompts()), logits(policy, prompts()))
    np.testing.assert_allclose(logits(copy.merged(), prompts()), logits(policy, prompts()), rtol=1e-4, atol=1e-5)
    assert list(copy.get_parameters()) == list(policy.get_parameters()) and base_hash(copy) == base_hash(policy)


def test_hash_of_the_base_does_not_depend_on_its_adapters() -> None:
    policies = make_policy(), make_policy(r=2), make_policy(targets=("q", "v"))
    assert len({base_hash(policy) for policy in policies}) == 1
    assert base_hash(policies[0]) != base_hash(make_policy(seed=2))


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(farstep.ConfigError, match=r"target 'query'; Policy has the linear layers encoders"):
        make_policy(targets=("query",))
    with pytest.raises(farstep.AgentError, match=r"encoders\.embedding is a Embedding"):
        make_policy(targets=("embedding",))
    with pytest.raises(farstep.ConfigError, match=r"also_train has 'value'; .* such as .*critic"):
        make_policy(also_train=("value",))
    with pytest.raises(farstep.ConfigError, match=r"rank r=0"):
        make_policy(r=0)
    with pytest.raises(farstep.AgentError, match="already has adapters"):
        make_policy().add_adapters()


def test_missing_peft_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(farstep.ConfigError, match=r"pip install 'farstep\[lora\]'"):
        make_policy()


# ---- on workers ----


def check_batch(env: farstep.ClusterEnv, policy: Policy, exactly: bool = True) -> Any:
    """Collect a batch; every worker acted with the newest adapters on the learner's base, without peft."""
    batch = within(lambda: env.collect(policy, steps=3))
    assert (batch["version"] == env.version).all() and not batch["peft"].any()
    width = batch.shape[1] // env.num_workers if env.num_workers > 1 else batch.shape[1]
    for row, obs in zip(batch["logits"], batch["obs"], strict=True):
        for first in range(0, batch.shape[1], width):
            mine, theirs = logits(policy, obs[first : first + width]), row[first : first + width]
            np.testing.assert_allclose(theirs, mine, rtol=0 if exactly else 1e-2, atol=0 if exactly else 1e-2)
    return batch


def test_workers_get_the_base_once_and_then_only_adapters() -> None:
    policy = make_policy()
    adapters, base = nbytes(policy.get_parameters()), nbytes(policy.base_parameters())
    with cluster(Spelling, envs=ENVS, workers=2, inference="eager") as env:
        for publishes in range(3):
            change(policy, publishes)
            check_batch(env, policy)
        sent = env.stats()["bytes"]
        assert sent["weights_sent"] == 3 * 2 * adapters < 3 * 2 * base / 5
        assert base <= sent["base_sent"] < base + 400  # in memory that workers share, and a header for each worker
        assert len(set.intersection(*map(shared_memories, worker_pids()))) == 1  # one base for both workers
        os.kill(worker_pids()[1], signal.SIGKILL)
        eventually(lambda: env.stats()["workers"]["restarts"] == 1 and env.stats()["workers"]["alive"] == 2)
        check_batch(env, policy)  # base, then the newest adapters, for the new worker
        assert sent["base_sent"] < env.stats()["bytes"]["base_sent"] < sent["base_sent"] + 200
        sent = env.stats()["bytes"]
        other = make_policy()
        change(other, seed=7)
        check_batch(env, other)  # another agent on the same base
        assert env.stats()["bytes"]["base_sent"] == sent["base_sent"]


def shared_memories(pid: int) -> set[str]:
    """Inodes of the messages in shared memory that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:farstep-message" in line}


def test_a_node_that_joins_late_gets_base_and_newest_adapters(tmp_path: Path) -> None:
    """Nodes are processes of this machine, started by a shell in place of ssh; they connect over TCP."""
    hosts = {"hosts": ["a", "b"], "ssh": (shell_in(tmp_path),), "nodes": 1, "max_nodes": 2, "min_nodes": 1}
    config = farstep.SSHConfig(**hosts, workers_per_node=1)  # type: ignore[arg-type]
    policy = make_policy()
    with cluster(Spelling, envs=2, config=config, inference="eager") as env:
        change(policy)
        within(lambda: env.collect(policy, steps=2))
        sent = env.stats()["bytes"]["base_sent"]
        change(policy)
        env.scale(nodes=2)
        eventually(lambda: env.stats()["workers"]["alive"] == 2, 120)
        assert check_batch(env, policy).shape == (3, 4)
        assert env.stats()["bytes"]["base_sent"] == 2 * sent > 2 * nbytes(policy.base_parameters())
        assert env.stats()["bytes"]["weights_sent"] == 3 * nbytes(policy.get_parameters())


def test_half_precision_and_the_fast_path() -> None:
    policy = make_policy()
    with cluster(Spelling, envs=ENVS, config=in_process(1), weights={"half": True}) as env:
        change(policy)
        within(lambda: env.collect(policy, steps=2))
        schema = ParameterSchema.of(leaves_of(policy.get_parameters()), half=True)
        assert env.stats()["bytes"]["weights_sent"] == schema.nbytes
        batch = env.collect(policy, steps=2)
        np.testing.assert_allclose(batch["logits"][0], logits(policy, batch["obs"][0]), atol=0.02)
        assert env.inference == FAST


def test_aaps_compares_adapters() -> None:
    policy = make_policy()
    with cluster(Spelling, envs=ENVS, config=in_process(2), kl_threshold=0.01) as env:
        env.collect(policy, steps=4)
        critic = policy.critic[-1]
        assert isinstance(critic, nn.Linear)
        for _ in range(3):  # the critic changes, the policy does not
            critic.bias.data += 1
            env.collect(policy, steps=4)
        assert env.stats()["pulls"]["per_worker"] == [1, 1] and max(env.stats()["divergence"].values()) < 1e-5
        change(policy)
        env.collect(policy, steps=4)
        assert env.stats()["pulls"]["per_worker"] == [2, 2] and env.stats()["bytes"]["probes_sent"] > 0


# ---- learners and checkpoints ----


def training(policy: Policy, env: farstep.ClusterEnv, folder: Path, steps: int) -> Training:
    config = PPOConfig(num_steps=8, minibatch_size=16, update_epochs=2, learning_rate=1e-2)
    return Training(PPO(policy, config, seed=1), env, Limits(total_steps=steps), checkpoints=folder)


def run(policy: Policy, folder: Path, steps: int, resume: bool = False) -> dict[str, np.ndarray]:
    """Train for some steps; return the published parameters."""
    with cluster(Spelling, envs=ENVS, config=in_process(1)) as env:
        trained = training(policy, env, folder, steps)
        if resume:
            trained.resume()
        trained.run()
    return {name: tensor.numpy(force=True).copy() for name, tensor in policy.get_parameters().items()}


def test_checkpoint_has_adapters_and_the_hash_of_the_base(tmp_path: Path) -> None:
    policy = make_policy()
    first = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    parameters = run(policy, tmp_path / "a", 64)
    changed = {name for name, tensor in policy.state_dict().items() if not torch.equal(tensor, first[name])}
    assert changed == set(parameters)  # the optimizer changed adapters and critic, and nothing else
    saved = checkpoint.load(tmp_path / "a")
    agent = {name.removeprefix("agent.") for name in saved.arrays if name.startswith("agent.")}
    assert agent == set(parameters)
    assert sum(array.nbytes for name, array in saved.arrays.items() if name.startswith(("agent.", "learner."))) < (
        4 * nbytes(policy.get_parameters())
    )
    assert base_hash(policy) in str(saved.meta)

    resumed = run(make_policy(), tmp_path / "a", 128, resume=True)
    for name, array in run(make_policy(), tmp_path / "b", 128).items():
        np.testing.assert_array_equal(resumed[name], array)


def test_checkpoint_of_another_base_is_refused(tmp_path: Path) -> None:
    run(make_policy(), tmp_path, 32)
    other = make_policy(seed=2)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(farstep.CheckpointError, match=rf"base sha256:{base_hash(make_policy())}.*{base_hash(other)}"):
        run(other, tmp_path, 64, resume=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    with pytest.raises(farstep.CheckpointError, match="this agent has no adapters"):
        run(make_policy(adapters=False), tmp_path, 64, resume=True)


@pytest.mark.parametrize("kind", ["impala", "async-ppo"])
def test_other_on_policy_learners_train_adapters(kind: str) -> None:
    policy = make_policy()
    first = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    learner = (
        Impala(policy, ImpalaConfig(num_steps=4), seed=1)
        if kind == "impala"
        else AsyncPPO(policy, AsyncPPOConfig(num_steps=8), seed=1)
    )
    with cluster(Spelling, envs=ENVS, config=in_process(2)) as env:
        Training(learner, env, Limits(total_steps=64)).run()
    changed = {name for name, tensor in policy.state_dict().items() if not torch.equal(tensor, first[name])}
    assert changed == set(policy.get_parameters())


def test_aride_learns_and_resumes_with_adapters_only(tmp_path: Path) -> None:
    """DistRL's case: the base stays bit for bit the same, on the learner and on workers, and only adapters are sent."""
    config = ArideConfig(
        learning_rate=1e-2,
        refresh_every=20,
        replay=EpisodeReplayConfig(batch_size=32, learning_starts=64, buffer_size=2000),
    )

    def training(policy: Policy, steps: int) -> Training:
        return Training(Aride(policy, config, seed=1), env, Limits(total_steps=steps), checkpoints=tmp_path)

    policy = make_policy(task=Echo)
    first = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    adapters, base = nbytes(policy.get_parameters()), nbytes(policy.base_parameters())
    with cluster(Echo, envs=8, workers=2) as env:
        before = within(lambda: env.collect(policy, steps=32)).episodes["return"].mean()
        within(training(policy, 512).run, 240)
        after = within(lambda: env.collect(policy, steps=32)).episodes["return"].mean()
        assert before < 0.4 and after > 0.8
        changed = {name for name, tensor in policy.state_dict().items() if not torch.equal(tensor, first[name])}
        assert changed == set(policy.get_parameters())
        stats = env.stats()
        assert base <= stats["bytes"]["base_sent"] < base + 400  # and a header for each worker
        assert stats["bytes"]["weights_sent"] == stats["pulls"]["total"] * adapters

        saved = checkpoint.load(tmp_path).arrays
        assert {name.removeprefix("agent.") for name in saved if name.startswith("agent.")} == changed
        assert sum(array.nbytes for name, array in saved.items() if name.startswith("learner.")) < 3 * adapters

        resumed = make_policy(task=Echo)
        second = training(resumed, 576)
        second.resume()
        for name, tensor in policy.state_dict().items():
            assert torch.equal(resumed.state_dict()[name], tensor)
        assert within(second.run, 240).steps >= 576
        assert env.stats()["bytes"]["base_sent"] == stats["bytes"]["base_sent"]  # workers have it already
        assert base_hash(resumed) == base_hash(make_policy(task=Echo))


def test_learners_refuse_agents_that_they_cannot_train() -> None:
    spaces = Spelling.observation_space, Spelling.action_space
    q_agent, actor = AdaptedQAgent(*spaces, QNetConfig()), AdaptedSoftActor(*spaces, SACNetConfig())
    SAC(actor, SACConfig(), seed=1)  # without adapters, it is an agent like others
    for agent in (q_agent, actor):
        agent.add_adapters(targets=("0",))
    found = "trains agents of class {} without adapters; got {} with adapters.* Train adapters with PPO, AsyncPPO, "
    with pytest.raises(farstep.AgentError, match=found.format("QAgent", "AdaptedQAgent")):
        DQN(q_agent, DQNConfig(), seed=1)
    with pytest.raises(farstep.AgentError, match=found.format("QAgent", "Policy")):
        DQN(make_policy(), ApexConfig(), seed=1)  # type: ignore[arg-type]
    with pytest.raises(farstep.AgentError, match=found.format("SoftActor", "AdaptedSoftActor")):
        SAC(actor, SACConfig(), seed=1)
    for learner, config in ((PPO, PPOConfig()), (Aride, ArideConfig())):
        with pytest.raises(farstep.AgentError, match=r"ActorCritic; got OwnAgent\. .* class Policy\(LoraAgent, Actor"):
            learner(OwnAgent(), config, seed=1)  # type: ignore[arg-type]


def test_adapters_work_in_a_custom_training_loop() -> None:
    agent = OwnAgent()
    agent.add_adapters(r=1, alpha=1, targets=("q",))
    with cluster(config=in_process(1), inference="eager") as env:
        env.collect(agent, steps=2)
        with torch.no_grad():
            agent.q.lora_B["default"].weight += 1  # type: ignore[index, union-attr]
        batch = env.collect(agent, steps=2)
        with torch.inference_mode():
            np.testing.assert_array_equal(batch["out"][0], agent.act(batch["obs"][0])["out"].numpy())
        assert (batch["version"] == 1).all()


def test_example_prints_returns_and_bytes(tmp_path: Path) -> None:
    output = run_here("lora_policy.py", "--pretraining-steps 5 --num-envs 8 --total-steps 512", tmp_path)
    assert len(re.findall(r"^return .*: +[0-9.]+", output, re.M)) == 2
    adapters, full = map(float, re.findall(r"([0-9.]+) MB", output)[1:])
    assert 0 < adapters < full / 5
