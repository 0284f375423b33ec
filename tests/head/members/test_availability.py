"""Which workers can get a ticket."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from farstep.head.members.availability import Availability
from farstep.head.members.membership import State


@pytest.mark.parametrize(
    ("state", "unread", "is_inside", "can"),
    [
        (State.ALIVE, 2, False, True),
        (State.RELEASED, 0, False, True),
        (State.RELEASED, 2, False, False),  # it would be resumed for each of its chunks
        (State.RELEASED, 2, True, True),  # otherwise the first chunk of its window would become stale
    ],
)
def test_released_worker_waits_for_its_chunks_except_inside_a_window(
    state: State, unread: int, is_inside: bool, can: bool
) -> None:
    record = SimpleNamespace(worker=0, ready=True, returning=False, handle=SimpleNamespace(leaving=False))
    tickets = SimpleNamespace(
        presence=SimpleNamespace(retiring=set(), parked=set()),
        unread=SimpleNamespace(num_of=Counter({0: unread})),
        must_finish=lambda worker: is_inside,
    )
    members = SimpleNamespace(members=[SimpleNamespace(state=state)])
    available = Availability(cast(Any, [record]), [], cast(Any, tickets), cast(Any, members))
    assert (0 in available) is can
