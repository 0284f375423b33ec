"""`DataKeyTrigger(n="all")` over histories of actors that join and leave; the incremental trigger fires exactly when a
naive one that checks every actor does."""

from __future__ import annotations

import random
from typing import Any

import pytest

from farstep.errors import ConfigError
from farstep.workflow.triggers import DataKeyTrigger, Dispatcher, Ledger, Message
from tests.workflow.triggers.naive_trigger import NaiveDataKeyTrigger
from tests.workflow.triggers.trigger_world import KEYS, short


def world(trigger: DataKeyTrigger, present: str, quorum: int = 1) -> tuple[Ledger, Any]:
    state, dispatcher = Ledger(KEYS), Dispatcher()
    state.members(present, quorum)
    dispatcher.add(trigger, lambda message: None)
    return state, lambda: short(dispatcher.check(state))


def leave(state: Ledger, trigger: DataKeyTrigger, actor: str) -> None:
    assert state.present is not None
    state.withdrew(actor)
    trigger.withdrew(state, actor)
    trigger.left(state, actor)
    state.members(state.present - {actor}, state.quorum)


def test_trigger_waits_for_all_present_actors() -> None:
    state, fired = world(DataKeyTrigger("all", 4), "ab")
    state.wrote("a", 8, 0)
    assert fired() == []
    state.wrote("b", 4, 0)
    assert fired() == ["a@0 b@0"]
    state.members("abc")
    state.wrote("b", 4, 0)
    assert fired() == [], "c has joined"
    state.wrote("c", 4, 0)
    assert fired() == ["a@4 b@4 c@0"]


def test_trigger_stops_waiting_for_an_actor_that_leaves() -> None:
    trigger = DataKeyTrigger("all", 4)
    state, fired = world(trigger, "abc")
    for actor in "ab":
        state.wrote(actor, 4, 0)
    state.wrote("c", 2, 0)
    assert fired() == []
    leave(state, trigger, "c")
    assert fired() == ["a@0 b@0"]


def test_completed_windows_of_a_leaving_actor_are_taken_and_the_rest_dropped() -> None:
    trigger = DataKeyTrigger("all", 4)
    state, fired = world(trigger, "ab")
    state.wrote("b", 6, 1)
    leave(state, trigger, "b")
    state.wrote("a", 4, 1)
    assert fired() == ["b@0 a@0"]
    assert trigger.next_of("b") == 6, "two steps of the next window were dropped"
    state.members("ab")
    state.wrote("a", 4, 2)
    state.wrote("b", 2, 2)
    assert fired() == []
    state.wrote("b", 2, 2)
    assert fired() == ["a@4 b@6"]


def test_actor_leaving_between_two_windows_drops_nothing() -> None:
    trigger = DataKeyTrigger("all", 4)
    state, fired = world(trigger, "ab")
    for actor in "ab":
        state.wrote(actor, 4, 1)
    assert fired() == ["a@0 b@0"]
    leave(state, trigger, "b")
    assert trigger.next_of("b") == 4


def test_trigger_does_not_fire_below_the_quorum_or_without_actors() -> None:
    trigger = DataKeyTrigger("all", 4)
    state, fired = world(trigger, "ab", quorum=2)
    state.wrote("a", 4, 0)
    leave(state, trigger, "b")
    assert fired() == []
    state.members("", 0)
    state.wrote("a", 4, 0)
    assert fired() == ["a@0", "a@4"], "what was completed is taken"
    assert fired() == []
    with pytest.raises(ConfigError, match="the ledger does not know which are present"):
        DataKeyTrigger("all", 4).ready(Ledger())
    with pytest.raises(ConfigError, match=r"n is 'al'; expected a number of actors.*\"all\""):
        DataKeyTrigger("al", 4)  # type: ignore[arg-type]


def test_replay_is_warm_when_all_present_actors_have_enough() -> None:
    trigger = DataKeyTrigger("all", 4, consume=False, min_new=2)
    state, fired = world(trigger, "abc")
    for actor in "ab":
        state.wrote(actor, 4, 0)
    assert fired() == []
    leave(state, trigger, "c")
    assert fired() == ["a@0 b@0"]
    state.members("abc")
    state.wrote("a", 2, 0)
    assert fired() == ["a@2 b@0"], "one that joins later is not waited for"


def test_stages_are_repeated_without_an_actor_that_left() -> None:
    trigger = DataKeyTrigger("all", 2, keys=(("reward",), ("obs",)))
    state, dispatcher = Ledger(KEYS), Dispatcher()
    state.members("ab")
    dispatcher.add(trigger, lambda message: None)

    def fired() -> list[tuple[Any, ...]]:
        return [(m["fragment"], m["stage"], m["actor_ids"]) for m in dispatcher.check(state)]

    for actor in "ab":
        state.wrote(actor, 2, 0, ["reward"])
    assert fired() == [(0, 0, ("a", "b"))]
    state.wrote("a", 2, 0, ["obs"])
    assert fired() == []
    leave(state, trigger, "b")
    assert fired() == [(0, 0, ("a",)), (0, 1, ("a",))]
    state.members("ab")
    for actor in "ab":
        state.wrote(actor, 2, 1)
    assert fired() == [(1, 0, ("a", "b")), (1, 1, ("a", "b"))]
    assert [trigger.next_of(actor) for actor in "ab"] == [4, 2]


def test_a_fragment_of_actors_that_all_left_is_forgotten() -> None:
    trigger = DataKeyTrigger("all", 2, keys=(("reward",), ("obs",)))
    state, fired = world(trigger, "ab")
    state.members("a")
    state.wrote("a", 2, 0, ["reward"])
    assert fired() == ["a@0"]
    state.members("ab")
    leave(state, trigger, "a")
    state.wrote("b", 2, 0)
    assert fired() == ["b@0", "b@0"]


@pytest.mark.parametrize("seed", range(60))
def test_histories_of_actors_that_come_and_go(seed: int) -> None:
    """The trigger fires exactly when all present actors have a window; steps are contiguous except where an actor left
    and its steps were dropped; and no window spans the time that its actor was away."""
    chance = random.Random(seed)
    actors, size, staged = range(5), chance.randint(1, 4), chance.random() < 0.3
    keys = (("reward",), ("obs",)) if staged else None
    trigger, state, dispatcher = DataKeyTrigger("all", size, keys), Ledger(KEYS), Dispatcher()
    dispatcher.add(trigger, lambda message: None)
    present = {0, 1}
    state.members(present)
    stays: dict[int, list[int]] = {actor: [0] for actor in actors}
    """How many steps each actor wrote in each of its stays."""
    taken: dict[int, list[int]] = {actor: [] for actor in actors}

    def windows(actor: int) -> list[int]:
        ends = [sum(stays[actor][: k + 1]) for k in range(len(stays[actor]))]
        return [
            start
            for steps, end in zip(stays[actor], ends, strict=True)
            for start in range(end - steps, end - size + 1, size)
        ]

    def check() -> None:
        for message in dispatcher.check(state):
            assert present <= set(message["actor_ids"]), "one that is present was not waited for"
            if message.get("stage", 0) == 0:
                for actor, start in zip(message["actor_ids"], message["start"], strict=True):
                    taken[actor].append(start)
        for actor in actors:
            assert taken[actor] == windows(actor)[: len(taken[actor])], "the windows of each stay, in order"
        ready = [actor for actor in present if len(windows(actor)) > len(taken[actor])]
        assert len(ready) < len(present) or not present, "all that are present have a window"

    for _ in range(300):
        actor, event = chance.choice(actors), chance.random()
        if event < 0.1 and actor in present:
            present.discard(actor)
            trigger.left(state, actor)
            stays[actor].append(0)
        elif event < 0.2:
            present.add(actor)
        elif actor in present:
            steps = chance.randint(1, 3)
            state.wrote(actor, steps, 0)
            stays[actor][-1] += steps
        state.members(present)
        check()
    assert any(taken.values())


@pytest.mark.parametrize("of", ["actors", "windows"])
@pytest.mark.parametrize("seed", range(60))
def test_incremental_trigger_fires_like_the_naive_one(seed: int, of: Any) -> None:
    chance = random.Random(seed)
    n = chance.choice([1, 2, 3, None if of == "actors" else 8])
    size, min_new = chance.randint(1, 5), chance.choice([None, None, 1, 3] if of == "actors" else [None])
    keys = chance.choice([None, KEYS[:1]])
    options: Any = {} if min_new is None else {"consume": False, "min_new": min_new}
    quick = DataKeyTrigger("all" if n is None else n, size, keys, of=of, **options)
    naive = NaiveDataKeyTrigger(n, size, keys, min_new, of)
    state, present = Ledger(KEYS), {0, 1, 2}
    state.members(present, 2)
    fired = 0
    for _ in range(250):
        actor, event = chance.randrange(6), chance.random()
        if event < 0.05:
            present ^= {actor}
            state.members(present, 2)
        elif event < 0.1 and min_new is None:
            state.withdrew(actor)
            quick.withdrew(state, actor)
            if naive.taken_to.get(actor, 0) > state.written(actor):
                naive.taken_to[actor] = state.written(actor)
        elif event < 0.8:
            state.wrote(actor, chance.randint(1, 4), chance.randint(0, 9), chance.choice([None, KEYS[:1], KEYS[1:]]))
        for _ in range(chance.choice([0, 1, 1, 9])):  # sometimes the trigger is not evaluated, or the consumer is slow
            expected: Message | None = naive.ready(state)
            assert quick.ready(state) == expected == quick.ready(state)
            if expected is None:
                break
            fired += 1
            quick.consume(state, expected)
            naive.consume(state, expected)
    assert fired
