"""Configurations: which values are refused, and with which message."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farstep
from farstep.config import launch as launch_config
from farstep.config.env import EnvConfig, check_count, check_seed
from farstep.config.launch import InProcessConfig, LocalConfig, SSHConfig, Timeouts
from farstep.errors import ConfigError
from farstep.sync import Always
from farstep.testing import CountingEnv

ALL = [EnvConfig, LocalConfig, InProcessConfig, Timeouts]


@pytest.mark.parametrize(
    ("kind", "key", "nearest"),
    [
        (EnvConfig, "env_nam", "env_name"),
        (EnvConfig, "envs_per_nodes", "envs_per_node"),
        (LocalConfig, "worker_per_node", "workers_per_node"),
        (Timeouts, "steps_s", "step_s"),
    ],
)
def test_an_unknown_key_names_the_nearest_and_lists_all(kind: Any, key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean '{nearest}'") as caught:
        kind.of({key: 1})
    assert all(field.name in str(caught.value) for field in dataclasses.fields(kind))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EnvConfig(), "env_name is missing"),
        (lambda: EnvConfig(env_name="CartPole-v1", type="gymnasum"), "Did you mean 'gymnasium'"),  # type: ignore[arg-type]
        (lambda: EnvConfig(env_name="CartPole-v1", inference="eagre"), "Did you mean 'eager'"),  # type: ignore[arg-type]
        (lambda: EnvConfig(env_name=lambda: None), "type='factory'"),
        (lambda: EnvConfig(type="factory", env_name=CountingEnv()), "is an environment, .* pass the class"),  # type: ignore[arg-type]
        (lambda: EnvConfig(env_name="CartPole-v1", envs_per_node=0), "at least 1"),
        (lambda: EnvConfig(env_name="CartPole-v1", envs_per_node=2.5), "integer"),  # type: ignore[arg-type]
        (lambda: EnvConfig(env_name="CartPole-v1", seed=-1), "non-negative"),
        (lambda: EnvConfig(env_name="CartPole-v1", seed=1.0), "non-negative int"),  # type: ignore[arg-type]
        (lambda: EnvConfig(env_name="CartPole-v1", seed=True), "non-negative int"),
        (lambda: EnvConfig(env_name="CartPole-v1", seed=2**63), r"below 2\*\*63"),
        (lambda: EnvConfig(env_name="CartPole-v1", type="envpool", wrappers=[str]), "env_kwargs"),
        (lambda: EnvConfig(env_name="CartPole-v1", type="envpool").check_reset(3, masked=True), "reset_mask"),
        (lambda: EnvConfig(env_name="CartPole-v1").check_reset(2**64, masked=False), r"below 2\*\*63"),
        (lambda: EnvConfig(env_name="CartPole-v1", sync=Always), r"Always\(\)"),  # type: ignore[arg-type]
        (lambda: EnvConfig(env_name="CartPole-v1", seed_episodes="no"), "True or False"),  # type: ignore[arg-type]
        (lambda: EnvConfig(env_name="CartPole-v1", sync="always"), "EveryK"),  # type: ignore[arg-type]
        (lambda: EnvConfig(env_name=3), "env_name is 3; expected a name"),  # type: ignore[arg-type]
        (lambda: EnvConfig(env_name="CartPole-v1", wrappers="foo"), "expected a list"),
        (lambda: EnvConfig(env_name="CartPole-v1", wrappers=[3]), "wrappers has 3; expected a callable"),
        (lambda: EnvConfig(env_name="CartPole-v1", wrappers=["foo"]), "a dotted path"),
        (lambda: EnvConfig(env_name="CartPole-v1", wrappers=[(str, 5)]), "a pair of one of these"),
        (lambda: EnvConfig(env_name="CartPole-v1", type="factory"), "'CartPole-v1' with type='factory'"),
        (lambda: EnvConfig(env_name="module:Mine-v0", type="factory"), "package.module:function"),
        (lambda: check_count("num_envs", "4"), "num_envs is '4'; it must be an integer"),
        (lambda: check_count("steps", True), "integer"),
        (lambda: check_count("max_staleness", -1, minimum=0), "at least 0"),
        (lambda: EnvConfig(env_name="A", weights={"only": ""}), "only is ''; expected a pattern"),
        (lambda: EnvConfig(env_name="A", weights={"only": ["a.*", ""]}), "expected a pattern"),
        (lambda: LocalConfig(transport="udp"), "Known: ipc, shm, tcp"),  # type: ignore[arg-type]
        (lambda: LocalConfig(nodes=0), "at least 1"),
        (lambda: LocalConfig(nodes=True), "integer"),
        (lambda: LocalConfig(nodes=1.5), "integer"),  # type: ignore[arg-type]
        (lambda: LocalConfig(workers_per_node=0), "at least 1"),
        (lambda: LocalConfig(cpus_per_worker=0), "at least 1"),
        (lambda: LocalConfig(gpus_per_node=-1), "at least 0"),
        (lambda: InProcessConfig(gpus_per_node=1), "InProcessConfig.gpus_per_node is 1"),
        (lambda: SSHConfig(hosts="a", max_nodes=2), r"requests 2 nodes and has 1 host\."),
        (lambda: SSHConfig(hosts="a", park_method="criu"), "connections of their own; also set relay=True"),
        (
            lambda: SSHConfig(hosts="a", park_method="criu", relay=True, gpus_per_node=1),
            "GPU memory; leave gpus_per_node 0",
        ),
        (lambda: SSHConfig(hosts="a", park_method="disk"), "unknown park_method of SSHConfig 'disk'"),  # type: ignore[arg-type]
        (lambda: LocalConfig(restart_budget=-1), "at least 0"),
        (lambda: LocalConfig(timeouts={"step_s": 0.0}), "at least 0.01"),  # type: ignore[arg-type]
        (lambda: LocalConfig(timeouts={"stop_s": 1.0}), "option of Timeouts 'stop_s'"),  # type: ignore[arg-type]
        (lambda: Timeouts(step_s=float("nan")), "at least"),
        (lambda: Timeouts(step_s="60"), "a number"),  # type: ignore[arg-type]
        (lambda: LocalConfig.of("CartPole-v1"), "expected a LocalConfig or a mapping"),  # type: ignore[arg-type]
    ],
)
def test_invalid_options_are_refused_at_construction(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_mapping_and_a_configuration_are_the_same() -> None:
    made = LocalConfig.of({"nodes": 2, "timeouts": {"step_s": 3.0}, "transport": "tcp"})
    assert made == LocalConfig(nodes=2, timeouts=Timeouts(step_s=3.0), transport="tcp")
    assert LocalConfig.of(made) is made
    assert LocalConfig.of(None) == LocalConfig()


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_configurations_are_frozen_keyword_only_and_documented(kind: Any) -> None:
    with pytest.raises(TypeError):
        kind("CartPole-v1")
    made: Any = kind(env_name="CartPole-v1") if kind is EnvConfig else kind()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.nodes = 3
    source = Path(inspect.getfile(kind)).read_text()
    for field in dataclasses.fields(kind):
        after = source.split(f"\n    {field.name}: ", 1)[1].splitlines()[1]
        assert after.lstrip().startswith('"""'), f"{field.name} has no docstring"


def test_numbers_of_numpy_are_numbers() -> None:
    made = EnvConfig(env_name="CartPole-v1", envs_per_node=np.int64(4), seed=np.int32(7))  # type: ignore[arg-type]
    assert (type(made.envs_per_node), made.envs_per_node) == (int, 4)
    assert (type(made.seed), made.seed) == (int, 7)


def test_seeds_of_63_bits_and_of_numpy_are_accepted() -> None:
    config = EnvConfig(env_name="CartPole-v1", seed=2**63 - 1)
    assert config.check_reset(config.seed, masked=True) == config.seed
    assert config.check_reset(None, masked=True) is None
    assert check_seed(np.uint64(7)) == 7


def test_never_more_workers_than_environments() -> None:
    assert LocalConfig(nodes=2, workers_per_node=8).num_workers(envs_per_node=3) == 6
    assert LocalConfig(workers_per_node=2).num_workers(envs_per_node=64) == 2


def test_workers_share_the_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_config, "usable_cpus", lambda: 8)
    assert LocalConfig().num_workers(64) == 8
    assert LocalConfig(cpus_per_worker=3).num_workers(64) == 2
    assert LocalConfig(cpus_per_worker=16).num_workers(64) == 1
    # All nodes are this machine, and each has a worker of its own.
    assert LocalConfig(nodes=4).num_workers(64) == InProcessConfig(nodes=4).num_workers(64) == 8
    assert LocalConfig(nodes=3).num_workers(64) == 6
    assert LocalConfig(nodes=16).num_workers(64) == 16
    assert LocalConfig(nodes=2, cpus_per_worker=2).num_workers(64) == 4


@pytest.mark.parametrize("ssh", ["ssh -i 'my key'", ["ssh -i 'my key'"], ["ssh", "-i", "my key"]], ids=repr)
def test_the_command_of_ssh_may_be_one_line(ssh: Any) -> None:
    assert SSHConfig(hosts="a", ssh=ssh).ssh == ("ssh", "-i", "my key")


@pytest.mark.parametrize("ssh", ["", [], [""], [3]], ids=repr)
def test_invalid_ssh_commands_are_refused(ssh: Any) -> None:
    with pytest.raises(ConfigError, match=r"SSHConfig\.ssh is"):
        SSHConfig(hosts="a", ssh=ssh)


def test_listing_of_the_paper_is_accepted() -> None:
    config = farstep.SlurmConfig(
        job_name="clusterenv", nodes=4, gpus_per_node=2, partition="gpu", time_limit="24:00:00"
    )
    env = farstep.ClusterEnv(
        {"type": "gymnasium", "env_name": "LunarLander-v3", "envs_per_node": 64, "kl_threshold": 0.05}, config
    )
    assert env.num_envs == 256
