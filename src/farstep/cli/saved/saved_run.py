"""Opens a stored run and restores its policy, for `farstep eval` and `farstep watch`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from farstep.checkpoint import folder as checkpoint
from farstep.checkpoint.checks import Count, converted
from farstep.cli.options.train_options import load_config
from farstep.cli.saved.trust import check_trusted
from farstep.errors import RunError
from farstep.learners.loop.checkpoints.checkpoint_schedule import DEFAULT_EVERY
from farstep.learners.loop.checkpoints.saving import check_agent, join_state
from farstep.learners.loop.training import Progress
from farstep.learners.networks.agent import NetworkAgent
from farstep.learners.options.run_config import RunConfig
from farstep.observe.run_folder import RunFolder


@dataclass(frozen=True)
class SavedPolicy:
    """The checkpoint that was loaded into an agent."""

    checkpoint: Path
    """Folder of the checkpoint."""
    steps: int
    """Number of environment steps of training before the checkpoint."""
    version: int
    """Version of the policy."""


@dataclass(frozen=True)
class SavedRun:
    """A stored run. The user trusts its code."""

    folder: RunFolder
    run: RunConfig
    learner: Any
    """The learner's configuration."""

    @classmethod
    def open(cls, path: Path, trust: bool, command: str) -> SavedRun:
        """Read the options of a run.

        Args:
            path: Folder of the run.
            trust: Whether the user passed --trust.
            command: The command as typed, for messages.

        Returns:
            The run.

        Raises:
            RunError: There is no run; or another user may have written it, and `trust` is False.
            ConfigError: The options of the run do not match this version of farstep.
        """
        folder = RunFolder.open(path)
        saved, why_not = folder.read_signed_config()
        run, learner = load_config(saved)
        check_trusted(folder, run, why_not, trust, command)
        return cls(folder, run, learner)

    def restore(self, agent: NetworkAgent, number: int | None = None) -> SavedPolicy:
        """Load the parameters of a checkpoint into an agent.

        Args:
            agent: An agent with the network of the run.
            number: Number of the checkpoint; None: the newest usable checkpoint.

        Returns:
            The loaded checkpoint.

        Raises:
            RunError: The run has no checkpoint yet.
            CheckpointError: The checkpoint does not exist, is damaged, or does not fit the agent.
        """
        path = self.folder.checkpoints
        if not checkpoint.numbered(path):
            raise RunError(
                f"{self.folder.path} has no checkpoint yet; the first is written after "
                f"{self.run.checkpoint_every or DEFAULT_EVERY} updates (--checkpoint-every), or when the run ends. "
                "Try again later."
            )
        use = partial(_restore, agent)
        return checkpoint.load_with(path, use) if number is None else checkpoint.load_number(path, number, use)


class _Version(msgspec.Struct):
    version: Count


def _restore(agent: NetworkAgent, loaded: checkpoint.Loaded) -> SavedPolicy:
    state = join_state(loaded)
    check_agent(agent, state.get("agent"))
    steps = Progress.of(state.get("progress")).steps
    version = converted("the state", {"version": state.get("version")}, _Version).version
    agent.load_state_dict(state["agent"])
    return SavedPolicy(loaded.folder, steps, version)
