"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import farstep

ERRORS = {
    "AgentError",
    "BufferTimeout",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "FarstepError",
    "LaunchError",
    "PublishTimeout",
    "RemoteEnvError",
    "ResourceError",
    "WorkerDied",
    "WorkerError",
    "WorkerStuck",
}
"""Errors that user programs catch."""


def test_errors_that_programs_catch_are_public() -> None:
    assert set(farstep.__all__) >= ERRORS
    assert all(issubclass(getattr(farstep, name), farstep.FarstepError) for name in ERRORS)


def test_there_are_few_public_names() -> None:
    others = [name for name in farstep.__all__ if name not in ERRORS]
    assert 0 < len(others) <= 20
    assert len(set(farstep.__all__)) == len(farstep.__all__)
    assert set(farstep.__all__) <= set(dir(farstep))


@pytest.mark.parametrize("name", farstep.__all__)
def test_each_name_is_there_and_says_what_it_is(name: str) -> None:
    thing = getattr(farstep, name)
    assert thing.__name__ == name
    assert (thing.__doc__ or "").strip()


@pytest.mark.parametrize("folder", ["buffer", "learners", "sync", "testing"])
def test_folders_with_more_names_need_no_import_of_their_own(folder: str) -> None:
    code = f"import farstep, sys\nassert 'farstep.{folder}' not in sys.modules\nprint(farstep.{folder}.__all__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout and folder in dir(farstep)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="ClusterEnvv"):
        farstep.ClusterEnvv
    with pytest.raises(AttributeError, match="PPOConfigg"):
        farstep.learners.PPOConfigg


@pytest.mark.parametrize("name", farstep.learners.__all__)
def test_each_learner_name_is_exported_and_documented(name: str) -> None:
    thing = getattr(farstep.learners, name)
    assert thing.__name__.removeprefix("farstep.learners.") == name
    assert (thing.__doc__ or "").strip()
    assert name in dir(farstep.learners)


def test_learner_names_are_those_of_their_modules() -> None:
    from farstep.learners import PPO, Training, losses, make_agent
    from farstep.learners.loop import training
    from farstep.learners.networks import nets
    from farstep.learners.ppo import PPO as direct

    assert PPO is direct and Training is training.Training and make_agent is nets.make_agent
    assert losses is farstep.learners.losses


def loaded_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after the statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_importing_farstep_starts_nothing() -> None:
    """Threads must be set before NumPy or torch is imported, so the package itself imports neither."""
    assert not loaded_after("import farstep") & {"numpy", "torch", "jax", "gymnasium", "zmq"}


def test_torch_is_imported_with_the_first_learner_and_not_before() -> None:
    assert "torch" not in loaded_after("import farstep.learners\nfarstep.learners.returns.gae")
    assert "torch" in loaded_after("import farstep\nfarstep.learners.PPOConfig")


def test_no_public_name_needs_torch_or_jax() -> None:
    assert not loaded_after("import farstep\nfor name in farstep.__all__: getattr(farstep, name)") & {"torch", "jax"}
