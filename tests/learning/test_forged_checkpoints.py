"""A checkpoint with valid checksums and wrong content is refused before anything uses it, whichever field is wrong."""

from __future__ import annotations

import copy
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import farstep
from farstep.checkpoint import folder as checkpoint
from farstep.errors import CheckpointError
from farstep.learners.async_ppo import AsyncPPOConfig
from farstep.learners.impala import ImpalaConfig
from farstep.learners.loop.checkpoints.saving import join_state, split_state
from farstep.learners.loop.training import Limits, Training
from farstep.learners.networks.nets import NetConfig, make_agent
from farstep.learners.ppo import PPO, PPOConfig
from tests import forging
from tests.forging import REMOVED, Way, changed, fields
from tests.learning.tasks import Config, make_env, make_training

CONFIG = PPOConfig(
    num_steps=8,
    minibatch_size=16,
    update_epochs=1,
    net=NetConfig(hidden=(4,), recurrent="gru", core=4, normalize_obs=True, normalize_reward=True),
)
ENVS = 4
assert CONFIG.num_steps is not None
ROWS = ENVS * CONFIG.num_steps
PARTS = ["agent", "learner", "progress", "torch", "version", "env", "journal"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> checkpoint.Loaded:
    """The last checkpoint of a run on two worker processes."""
    folder = tmp_path_factory.mktemp("run")
    with make_env("CartPole-v1", ENVS) as env:
        make_training(env, CONFIG, 4 * ROWS, checkpoints=folder)[0].run()
    return checkpoint.load(folder)


def forgeries(value: Any) -> dict[str, Any]:
    """Wrong values in place of a value."""
    if isinstance(value, torch.Tensor):
        forged = forging.forgeries(value.numpy())
        return {name: torch.from_numpy(new) if isinstance(new, np.ndarray) else new for name, new in forged.items()}
    return forging.forgeries(value)


def is_possible(way: Way, kind: str) -> bool:
    """Whether a run could have been saved in the state that a forgery leads to."""
    match way, kind:
        case (("agent", name), "negative") if not name.endswith((".std", ".count")):
            return True
        case (("learner", "optimizer", "adam", "exp_avg"), "negative"):
            return True
        case (
            ("learner", "optimizer", "adam", "critic_step") | ("learner", "updates") | ("progress", "restarts"),
            "removed",
        ):  # checkpoints of older versions do not have these
            return True
        case (("learner", "statistics", "returns"), "negative" | "longer"):  # slots that this run no longer has
            return True
        case (("progress", "returns", _), "negative" | "huge"):
            return True
        case (("env", "workers", _, "obs", _), "negative" | "infinite" | "nan"):  # only compared
            return True
        case (("env", "workers", _, "agent", "state", _), "negative"):
            return True
        case (("env", "workers", _, "steps", _) | ("env", "workers", _), "none"):  # not begun; being replaced
            return True
        case (("env", "workers", _, "generators"), "removed" | "none"):  # of a run in one process
            return True
        case (("env", "workers", _, "generators", "torch"), "removed" | "none"):  # of a worker without torch
            return True
        case (("env", "workers", _, "generators", "numpy", 4), "negative" | "huge"):
            return True
        case (("env", "workers", _, "generators", "random", 2), "number"):
            return True
        case (("torch",) | ("learner", "optimizer", "generator"), "huge"):  # any word may have any bits
            return True
        case (("env", "workers", _, "generators", "torch") | ("env", "workers", _, "generators", "numpy", 1), "huge"):
            return True
        case (("journal", "actions", _), "dtype"):  # whole numbers of any width are in a space of whole numbers
            return True
    return False


class Forger(forging.Folder):
    """Writes checkpoints that differ from a real one in one value, with matching checksums."""

    def __init__(self, folder: Path, saved: checkpoint.Loaded) -> None:
        self.state = join_state(saved)
        arrays, plain = split_state(self.state)
        super().__init__(folder, arrays, {"state": plain})

    def forge(self, way: Way, new: Any) -> None:
        """The newest checkpoint is one with `new` there."""
        arrays, plain = split_state(changed(self.state, way, new))
        self.write(arrays, {"state": plain})


@pytest.fixture
def forger(saved: checkpoint.Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Forger:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # none of them has to survive a power failure
    return Forger(tmp_path, saved)


def make_learner(env: farstep.ClusterEnv) -> PPO:
    return PPO(make_agent(*env.launch(), CONFIG.net, CONFIG.gamma), CONFIG, seed=1)


def content(training: Training, learner: Any) -> Any:
    """All state that a resume changes, except that of the environments."""
    arrays, plain = split_state({"agent": learner.agent.state_dict(), "learner": learner.state()})
    return {name: array.tobytes() for name, array in arrays.items()}, plain, training.progress.state()


@pytest.mark.parametrize("part", PARTS)
def test_every_wrong_field_is_refused_and_nothing_is_applied(part: str, forger: Forger) -> None:
    wrong = []
    with make_env("CartPole-v1", ENVS, launcher="in-process") as env:
        learner = make_learner(env)
        training = Training(learner, env, Limits(total_steps=8 * ROWS), checkpoints=forger.folder)
        before = content(training, learner)
        for way, value in fields({part: forger.state[part]}):
            for kind, new in forgeries(value).items():
                if is_possible(way, kind):
                    continue
                forger.forge(way, new)
                try:
                    training.resume()
                except CheckpointError as error:
                    if f"no checkpoint in {forger.folder} can be used" not in str(error):
                        wrong.append((way, kind, str(error)))
                except Exception as error:
                    wrong.append((way, kind, repr(error)))
                else:
                    wrong.append((way, kind, "accepted"))
        assert content(training, learner) == before
    assert not wrong


@pytest.mark.parametrize("part", PARTS)
def test_the_checkpoint_before_is_used_with_one_warning(
    part: str, forger: Forger, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(forger.real, forger.folder / "000001")
    with make_env("CartPole-v1", ENVS, launcher="in-process") as env:
        training, _ = make_training(env, CONFIG, 5 * ROWS, checkpoints=forger.folder)
        forger.forge((part,), REMOVED)
        caplog.clear()  # on a busy machine a slow start is logged
        training.resume()
        (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert record.getMessage().startswith(f"{forger.folder / '000002'} is not used: ")
        assert training.progress.updates == 4
        assert training.run().updates == 5


NO_STATE: list[Any] = [
    {},
    {"state": None},
    {"state": 3},
    {"state": []},
    {"state": {"items": 3}},
    {"state": {"items": [["agent"]]}},
    {"state": {"items": [[["agent"], 3]]}},
    {"state": {"items": [["agent", {"tensor": "nowhere"}]]}},
    {"state": {"items": [["agent", {"array": ["agent"]}]]}},
]


def test_metadata_that_describes_no_state_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make_env("CartPole-v1", ENVS, launcher="in-process") as env:
        training, _ = make_training(env, CONFIG, ROWS, checkpoints=tmp_path)
        training.run()
        for meta in NO_STATE:
            forged = checkpoint.save(tmp_path, checkpoint.load(tmp_path).arrays, meta)
            caplog.clear()
            training.resume()
            (record,) = caplog.records
            assert record.getMessage().startswith(f"{forged} is not used: "), meta
            shutil.rmtree(forged)


RESUMING = """
import sys
from pathlib import Path
from tests.learning.test_forged_checkpoints import CONFIG, ENVS, ROWS
from tests.learning.tasks import Config, make_env, make_training
with make_env("CartPole-v1", ENVS, launcher="in-process") as env:
    training, agent = make_training(env, CONFIG, 6 * ROWS, checkpoints=Path(sys.argv[1]))
    training.resume()
    print(training.run().updates)
"""


def test_forged_moments_do_not_crash_the_process(forger: Forger) -> None:
    shutil.copytree(forger.real, forger.folder / "000001")
    forger.forge(("learner", "optimizer", "adam", "exp_avg"), torch.zeros(1))
    command = [sys.executable, "-c", RESUMING, str(forger.folder)]
    root = Path(__file__).parents[2]  # where `tests` is found
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=170)
    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr
    assert "000002 is not used: optimizer.adam.exp_avg is float32[1]" in done.stderr


LEARNERS: dict[str, Config] = {
    "async-ppo": AsyncPPOConfig(num_steps=8, net=NetConfig(normalize_obs=True)),
    "impala": ImpalaConfig(num_steps=8),
    "ppo": PPOConfig(num_steps=8),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_every_learner_resumes_from_the_checkpoint_before(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_env("CartPole-v1", ENVS, launcher="in-process") as env:
        training, _ = make_training(env, LEARNERS[name], ROWS, checkpoints=tmp_path)
        done = training.run().updates
        newest = training.save()
    assert newest is not None
    (newest / "learner.optimizer.adam.exp_avg.npy").write_bytes(b"")
    with make_env("CartPole-v1", ENVS, launcher="in-process") as env:
        training, _ = make_training(env, LEARNERS[name], 3 * ROWS, checkpoints=tmp_path)
        training.resume()
        assert training.progress.updates == done
        assert training.run().updates > done
    (warning,) = [record.getMessage() for record in caplog.records if "is not used" in record.getMessage()]
    assert warning.startswith(f"{newest} is not used: learner.optimizer.adam.exp_avg.npy has 0 bytes")


class Stubborn(PPO):
    """A learner of a user's own, whose state does not fit."""

    def load(self, state: Any) -> None:
        raise LookupError("no target network")


def test_a_learner_that_refuses_leaves_the_agent_as_it_was(forger: Forger) -> None:
    shutil.copytree(forger.real, forger.folder / "000001")
    with make_env("CartPole-v1", ENVS, launcher="in-process") as env:
        agent = make_agent(*env.launch(), CONFIG.net, CONFIG.gamma)
        before = copy.deepcopy(agent.state_dict())
        training = Training(Stubborn(agent, CONFIG, 1), env, Limits(total_steps=ROWS), checkpoints=forger.folder)
        with pytest.raises(CheckpointError, match="the learner raised LookupError: no target network"):
            training.resume()
    assert all(torch.equal(before[name], tensor) for name, tensor in agent.state_dict().items())
