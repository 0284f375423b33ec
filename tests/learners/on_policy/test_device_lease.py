"""Learners that hold their device only during updates."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gymnasium.spaces import Box, Discrete

import farstep
from farstep.cli import main
from farstep.elastic.coordinator.server import read_status
from farstep.learners.loop.timing import Timer
from farstep.learners.loop.training import Limits, Training
from farstep.learners.networks.nets import ActorCritic, make_agent
from farstep.learners.on_policy.device_lease import DeviceLease
from farstep.learners.on_policy.optimizer import Optimizer
from farstep.learners.ppo import PPO, PPOConfig
from tests.cluster.sharing import PATIENCE_S, serving

if torch.cuda.is_available():
    torch.zeros(1, device="cuda")  # CUDA keeps descriptors open, which no test has to close

pytestmark = pytest.mark.slow  # real processes, or learning
STEPS = 16
SOURCE = {"type": "gymnasium", "env_name": "CartPole-v1", "envs_per_node": 4, "seed": 3}


def trained(
    device: str, releases: bool, updates: int = 3, config: farstep.LaunchConfig | None = None
) -> tuple[PPO, dict[str, float], Training]:
    """Train a small PPO. Return it with the device's part of `stats()`."""
    options = PPOConfig(num_steps=STEPS, update_epochs=2)
    with farstep.ClusterEnv(SOURCE, config or farstep.InProcessConfig()) as env:
        torch.manual_seed(1)
        learner = PPO(make_agent(*env.launch(), options.net, options.gamma), options, seed=1, device=device)
        if releases:
            learner.release_device()
        training = Training(learner, env, Limits(total_steps=updates * STEPS * 4))
        training.run()
        return learner, env.stats()["devices"], training


def parameters(learner: PPO) -> list[torch.Tensor]:
    return [*(tensor.cpu() for tensor in learner.agent.state_dict().values())]


def optimized() -> tuple[ActorCritic, Optimizer]:
    """A small agent, always the same, and its optimizer."""
    torch.manual_seed(1)
    agent = make_agent(Box(-1, 1, (4,)), Discrete(2), PPOConfig().net, 0.99)
    return agent, Optimizer(agent, 1e-3, 0.5, seed=1)


def test_release_changes_nothing_but_the_time_held() -> None:
    released, devices, _ = trained("cpu", releases=True)
    held, none, _ = trained("cpu", releases=False)
    assert all(map(torch.equal, parameters(released), parameters(held)))
    assert devices["uses"] == 3 and devices["held_seconds"] > 0
    assert none == {"uses": 0, "held_seconds": 0.0, "waited_seconds": 0.0}


def test_moving_keeps_parameters_moments_and_gradients_in_place() -> None:
    """On the CPU a move copies nothing, but rebuilds every view; the next update must still reach the agent."""
    moved, other = optimized(), optimized()
    initial = [tensor.clone() for tensor in moved[0].parameters()]
    for number in range(2):
        for agent, optimizer in (moved, other):
            for parameter in agent.parameters():
                assert parameter.grad is not None
                parameter.grad.fill_(0.5)
            optimizer.step()
        if number == 0:
            moved[1].move(torch.device("cpu"))
    assert all(map(torch.equal, moved[0].parameters(), other[0].parameters()))
    assert not any(map(torch.equal, moved[0].parameters(), initial))


def test_learners_take_turns_on_the_device_of_their_coordinator(tmp_path: Path) -> None:
    inside, failures = threading.Semaphore(1), []
    with serving(tmp_path / "c", slots=2, devices=1) as name, contextlib.ExitStack() as stack:
        config = farstep.LocalConfig(workers_per_node=1, coordinator=name)
        envs = [stack.enter_context(farstep.ClusterEnv(SOURCE, config)) for _ in range(2)]
        options = PPOConfig(num_steps=STEPS, update_epochs=1)

        class Watched(PPO):
            def update(self, *arguments: object) -> dict[str, float]:
                if not inside.acquire(blocking=False):
                    failures.append("two learners updated at once")
                    return super().update(*arguments)  # type: ignore[arg-type]
                try:
                    return super().update(*arguments)  # type: ignore[arg-type]
                finally:
                    inside.release()

        learners = [Watched(make_agent(*env.launch(), options.net, options.gamma), options, seed=1) for env in envs]

        def learn(learner: Watched, env: farstep.ClusterEnv) -> None:
            learner.release_device()
            for batch, _ in zip(learner.batches(env), range(10), strict=False):
                training = Training(learner, env, Limits(total_steps=10**6))
                learner.iterate(batch, env, training)

        threads = [threading.Thread(target=learn, args=pair) for pair in zip(learners, envs, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not failures
        assert [env.stats()["devices"]["uses"] for env in envs] == [10, 10]
        assert [run.workload.device_uses for run in read_status(name)[1]] == [10, 10]


def test_a_move_that_runs_out_of_memory_is_undone_before_the_device_is_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a GPU: the optimizer only records where its vectors are."""
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    cpu, where_at_return = torch.device("cpu"), []

    class SmallGPU:
        where = cpu

        def move(self, device: torch.device) -> None:
            self.where = device
            if device != cpu:
                raise torch.OutOfMemoryError

    class Env:
        has_coordinator = False

        @contextlib.contextmanager
        def device_token(self) -> Iterator[int]:
            try:
                yield 0
            finally:
                where_at_return.append(optimizer.where)

    optimizer = SmallGPU()
    lease = DeviceLease(torch.nn.Linear(1, 1), optimizer, torch.device("cuda"))  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError), lease.update(Env(), Timer()):  # type: ignore[arg-type]
        pytest.fail("the learner was not moved")
    assert where_at_return == [cpu]


def test_a_move_of_the_optimizer_that_runs_out_of_memory_can_be_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, optimizer = optimized()
    initial = [tensor.clone() for tensor in agent.parameters()]

    def scarce(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("farstep.learners.on_policy.optimizer.pinned", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.move(torch.device("cuda"))
    optimizer.move(torch.device("cpu"))
    assert all(map(torch.equal, agent.parameters(), initial))


def test_replay_learners_refuse_to_release(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", "dqn", "--env", "CartPole-v1", "--release-device", "--folder", str(tmp_path)]) != 0
    assert "ppo, async-ppo, impala" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_released_gpu_holds_no_memory_and_learns_the_same() -> None:
    held, _, _ = trained("cuda", releases=False)
    expected = parameters(held)
    del held
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    released, devices, _ = trained("cuda", releases=True)
    assert torch.cuda.memory_allocated() == before
    assert {tensor.device.type for tensor in released.agent.state_dict().values()} == {"cpu"}
    assert all(map(torch.equal, parameters(released), expected))
    assert devices["uses"] == 3
