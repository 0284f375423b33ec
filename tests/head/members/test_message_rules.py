"""Every kind of message has its states and its channel; in any other state or channel it is refused."""

from __future__ import annotations

import typing
from collections.abc import Sequence

import pytest

from farstep.core import Received
from farstep.errors import WireError
from farstep.head.members.membership import State
from farstep.head.members.message_rules import RULES, check_message, is_late
from farstep.rollout.progress import EPISODES, PHASE, Phase, check_words
from farstep.wire import messages as m

S, C, A = State.STARTING, State.CONSTRUCTING, State.ALIVE
VALID: list[tuple[m.FromWorker, Sequence[State], Sequence[int], Sequence[int]]] = [
    # message, states, numbers of frames after the header with and without shared memory
    (m.Hello(0, 0, "run", "host", 1, {}), [S], [0], [0]),
    (m.Ready(b"", b""), [C], [0], [0]),
    (m.Failure("message", "traceback", "step"), [C, A], [0], [0]),
    (m.ClientAdmitted(0, 0), [A], [0], [0]),
    (m.RejectClient(0, "why"), [A], [0], [0]),
    (m.AgentReady(1, {}, b""), [A], [0], [0]),
    (m.Reply(1), [A], [1], [1]),
    (m.Idle(), [A], [0], [0]),
    (m.Chunk(1, 0, b""), [A], [1, 2], [1, 2, 3, 20]),
    (m.Part(1, 1, -1, 0, []), [A], [], [1, 2, 3, 20]),
    (m.StepInfos(), [A], [1], []),
    (m.RequestSend(1, 1), [A], [], [0]),
    (m.WeightRequest(1), [A], [], [0]),
    (m.Progress([0] * 9), [S, C, A], [], [0]),
]


def test_every_kind_of_message_has_a_rule() -> None:
    assert set(RULES) == set(typing.get_args(m.FromWorker)) == {type(message) for message, *_ in VALID}


@pytest.mark.parametrize(("message", "states", "shared", "remote"), VALID, ids=lambda value: type(value).__name__)
def test_a_message_is_accepted_in_its_states_and_on_its_channel_only(
    message: m.FromWorker, states: Sequence[State], shared: Sequence[int], remote: Sequence[int]
) -> None:
    for state in (S, C, A):
        for shares_memory, counts in ((True, shared), (False, remote)):
            for heartbeat in (False, True):
                for count in (0, 1, 2, 3, 20):
                    received = Received([b""] * (1 + count), heartbeat=heartbeat)
                    fits = state in states and count in counts and heartbeat is isinstance(message, m.Progress)
                    try:
                        check_message(message, received, state, shares_memory)
                        accepted = True
                    except WireError:
                        accepted = False
                    assert accepted == fits, (state, shares_memory, heartbeat, count)


def test_only_the_failure_of_a_worker_that_was_given_up_is_not_ignored() -> None:
    late = {type(message).__name__ for message, *_ in VALID if is_late(message, State.DYING)}
    assert late == {type(message).__name__ for message, *_ in VALID} - {"Failure"}
    assert not any(is_late(message, state) for message, *_ in VALID for state in (S, C, A))


@pytest.mark.parametrize("phase", [Phase.QUEUED, 99, -1])
def test_a_worker_cannot_claim_a_phase_without_a_time_limit(phase: int) -> None:
    words = [0] * (EPISODES + 2)
    check_words(words, len(words))
    words[PHASE] = phase
    with pytest.raises(WireError, match=f"the phase {int(phase)}; expected 0 to 7"):
        check_words(words)


@pytest.mark.parametrize("count", [0, 9, 11])
def test_a_worker_has_as_many_progress_words_as_environments_need(count: int) -> None:
    with pytest.raises(WireError, match=f"{count} progress words; expected 10"):
        check_words([0] * count, 10)
