"""Asking an engine again for nodes that are over: how often, how long, and when it is given up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from farstep.errors import LaunchError
from farstep.launch.engine import Standing
from farstep.launch.groups import Groups
from farstep.launch_config import SSHConfig


class Fake:
    """An engine, and all groups that it gives."""

    grace_s, tells_lost = 0.0, True

    def __init__(self) -> None:
        self.asked: list[tuple[int, bytes]] = []
        self.fails = False

    def listen_on(self) -> Sequence[str]:
        return ()

    def ask(self, nodes: int, bootstrap: bytes) -> Fake:
        self.asked.append((nodes, bootstrap))
        if self.fails:
            raise LaunchError("nobody answers.")
        return self

    def standing(self) -> Standing:
        return Standing("job is here", 2)

    def logs(self) -> str:
        return "its last words"

    def cancel(self) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def engine() -> Fake:
    return Fake()


@pytest.fixture
def groups(engine: Fake) -> Iterator[Groups]:
    config = SSHConfig(hosts=["a", "b"], min_nodes=1, restart_budget=3)
    groups = Groups(engine, config, lambda number: str(number).encode())
    groups.ask(2)
    yield groups
    groups.end()


def attempts(groups: Groups, engine: Fake, expected: int, until: int) -> list[int]:
    """The seconds at which one more node was asked for."""
    found = []
    for now in range(until):
        before = len(engine.asked)
        groups.ask_again(2, expected, float(now))
        found += [now] * (len(engine.asked) - before)
    return found


def test_who_has_all_nodes_asks_for_none(groups: Groups, engine: Fake) -> None:
    assert groups.expected() == 2
    assert attempts(groups, engine, expected=2, until=100) == []


@pytest.mark.parametrize("fails", [False, True], ids=["engine answers", "engine fails"])
def test_pauses_grow_until_the_budget_is_spent(groups: Groups, engine: Fake, fails: bool) -> None:
    groups[0].welcomed()
    engine.fails = fails
    assert attempts(groups, engine, expected=1, until=200) == [0, 1, 3]
    numbers = [1, 1, 1] if fails else [1, 2, 3]
    assert engine.asked[1:] == [(1, str(number).encode()) for number in numbers]
    groups.start_over()
    assert attempts(groups, engine, expected=1, until=200) == [0, 1, 3]


def test_too_few_nodes_and_no_budget_end_a_run(groups: Groups, engine: Fake) -> None:
    engine.fails = True
    groups[0].welcomed()
    attempts(groups, engine, expected=1, until=200)
    with pytest.raises(LaunchError, match=r"2 nodes are missing\.\nits last words"):
        groups.ask_again(2, 0, 200.0)


def test_a_group_of_which_none_ever_came_is_not_asked_for_again(groups: Groups, engine: Fake) -> None:
    with pytest.raises(LaunchError, match="2 nodes are missing"):
        groups.ask_again(2, 0, 0.0)
    assert len(engine.asked) == 1


def test_nodes_that_were_lost_are_not_expected_until_they_come_back(groups: Groups) -> None:
    groups[0].lost += 1
    assert groups.expected() == 1
    groups[0].welcomed()
    assert groups.expected() == 2
