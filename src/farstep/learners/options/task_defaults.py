"""Defaults of PPO and asynchronous PPO that depend on the task, and the default length of IMPALA's chunks.

In measurements on LunarLander-v3 and CartPole-v1 with 16 to 128 environments, learning depended on the rows per update
and per optimizer step, not on the number of steps or minibatches. The defaults therefore fix these rows; the numbers of
steps and minibatches follow from the number of environments.

The defaults for images come from runs on ALE/Pong-v5 with one seed each: docs/ppo.md has their returns. With the
defaults for vectors, an update changed the policy by a KL divergence of 0.2, and took four times as long per row.
"""

from __future__ import annotations

from dataclasses import dataclass

_SHORTEST = 16
_CHUNK_ROWS, _SHORTEST_CHUNK = 512, 8
_LONGEST_SEQUENCE = 128
_SEQUENCE_MINIBATCHES = 8


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Defaults for one kind of observations, or the values that a learner uses in their place."""

    learning_rate: float
    update_epochs: int
    rollout_rows: int
    """Rows per rollout, over all environments."""
    minibatch_rows: int
    """Rows per optimizer step, unless the agent is recurrent."""

    def __str__(self) -> str:
        return (
            f"learning rate {self.learning_rate:g}, {self.update_epochs} epochs, {self.rollout_rows:,} rows per "
            f"rollout, {self.minibatch_rows:,} per minibatch"
        )

    def minibatch_size(self, given: int | None, rows: int, recurrent: bool) -> int:
        """Return the number of rows per optimizer step.

        Args:
            given: The user's choice; None: the default, or an eighth of `rows` for a recurrent agent.
            rows: Number of rows of an update.
            recurrent: Whether the agent learns from whole sequences.

        Returns:
            The number of rows.
        """
        if given is not None:
            return given
        return -(-rows // _SEQUENCE_MINIBATCHES) if recurrent else self.minibatch_rows


VECTORS = Defaults(learning_rate=5e-4, update_epochs=8, rollout_rows=4096, minibatch_rows=128)
IMAGES = Defaults(learning_rate=2.5e-4, update_epochs=4, rollout_rows=2048, minibatch_rows=256)


def defaults_for(sees_images: bool) -> Defaults:
    """Return the defaults for an agent that sees images, or for one that does not."""
    return IMAGES if sees_images else VECTORS


def rollout_steps(given: int | None, num_envs: int, recurrent: bool, defaults: Defaults) -> int:
    """Return the number of steps of each environment per rollout.

    Args:
        given: The user's choice; None: the default rows divided by `num_envs`, at least 16, and at most 128 for a
            recurrent agent, which backpropagates through all of them.
        num_envs: Number of environments of the run.
        recurrent: Whether the agent learns from whole sequences.
        defaults: Defaults for the agent's observations.

    Returns:
        The number of steps.
    """
    if given is not None:
        return given
    steps = max(_SHORTEST, defaults.rollout_rows // num_envs)
    return min(steps, _LONGEST_SEQUENCE) if recurrent else steps


def chunk_steps(given: int | None, num_envs: int) -> int:
    """Return the number of steps of each environment per chunk, for a learner that uses every row once.

    Args:
        given: The user's choice; None: 512 divided by `num_envs`, at least 8.
        num_envs: Number of environments of the run.

    Returns:
        The number of steps.
    """
    return given if given is not None else max(_SHORTEST_CHUNK, _CHUNK_ROWS // num_envs)
