"""Default sizes of learners: the length of a rollout, and the rows per optimizer step.

In measurements on LunarLander-v3 and CartPole-v1 with 16 to 128 environments, learning depended on the rows per update
and per optimizer step, not on the number of steps or minibatches. The defaults therefore fix these rows; the numbers of
steps and minibatches follow from the number of environments.
"""

from __future__ import annotations

_ROLLOUT_ROWS, _SHORTEST = 4096, 16
_CHUNK_ROWS, _SHORTEST_CHUNK = 512, 8
_LONGEST_SEQUENCE = 128
_MINIBATCH_ROWS = 128
_SEQUENCE_MINIBATCHES = 8


def rollout_steps(given: int | None, num_envs: int, recurrent: bool) -> int:
    """Return the number of steps of each environment per rollout.

    Args:
        given: The user's choice; None: 4,096 divided by `num_envs`, at least 16, and at most 128 for a recurrent agent,
            which backpropagates through all of them.
        num_envs: Number of environments of the run.
        recurrent: Whether the agent learns from whole sequences.

    Returns:
        The number of steps.
    """
    if given is not None:
        return given
    steps = max(_SHORTEST, _ROLLOUT_ROWS // num_envs)
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


def minibatch_rows(given: int | None, rows: int, recurrent: bool) -> int:
    """Return the number of rows per optimizer step.

    Args:
        given: The user's choice; None: 128, or an eighth of `rows` for a recurrent agent.
        rows: Number of rows of an update.
        recurrent: Whether the agent learns from whole sequences.

    Returns:
        The number of rows.
    """
    if given is not None:
        return given
    return -(-rows // _SEQUENCE_MINIBATCHES) if recurrent else _MINIBATCH_ROWS
