"""Sizes that learners choose by themselves: how long a rollout is, and how many rows an optimizer step takes.

Measured on LunarLander-v3 and CartPole-v1 with 16 to 128 environments: what counts is the number of rows per update
and per optimizer step, not the number of steps or of minibatches, so both follow the number of environments.
"""

from __future__ import annotations

_ROLLOUT_ROWS, _SHORTEST = 4096, 16
_CHUNK_ROWS, _SHORTEST_CHUNK = 512, 8
_LONGEST_SEQUENCE = 128
_MINIBATCH_ROWS = 128
_SEQUENCE_MINIBATCHES = 8


def rollout_steps(given: int | None, num_envs: int, recurrent: bool) -> int:
    """Steps of each environment per rollout.

    Args:
        given: The user's choice; None: as many as make about 4,096 rows of all environments, at least 16, and at most
            128 for a recurrent agent, which is differentiated through all of them.
        num_envs: Environments of the run.
        recurrent: Whether the agent learns from whole sequences.
    """
    if given is not None:
        return given
    steps = max(_SHORTEST, _ROLLOUT_ROWS // num_envs)
    return min(steps, _LONGEST_SEQUENCE) if recurrent else steps


def chunk_steps(given: int | None, num_envs: int) -> int:
    """Steps of each environment per chunk of a learner that learns from every row once: as given, else as many as make
    about 512 rows of all environments, at least 8."""
    return given if given is not None else max(_SHORTEST_CHUNK, _CHUNK_ROWS // num_envs)


def minibatch_rows(given: int | None, rows: int, recurrent: bool) -> int:
    """Rows per optimizer step: as given, else 128, or an eighth of the rollout's `rows` for a recurrent agent."""
    if given is not None:
        return given
    return -(-rows // _SEQUENCE_MINIBATCHES) if recurrent else _MINIBATCH_ROWS
