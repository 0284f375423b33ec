"""Triggers: when they fire and on which rows, by the tables of ARTOS, combined, and over long random histories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from farstep.errors import ConfigError
from farstep.workflow.triggers import (
    DataKeyTrigger,
    Dispatcher,
    Ledger,
    Message,
    ObjectKeyTrigger,
    TimeTrigger,
    TransferTrigger,
    Trigger,
)
from tests.workflow.triggers.trigger_world import KEYS, later, short


class Always(Trigger):
    """A user's trigger: only `ready`."""

    def ready(self, state: Ledger) -> Message | None:
        return {"steps": state.env_steps}


@dataclass(frozen=True)
class AtLeast(Trigger):
    """A user's trigger, as a frozen dataclass."""

    learner_steps: int

    def ready(self, state: Ledger) -> Message | None:
        return {} if state.learner_steps >= self.learner_steps else None


def fire(trigger: Trigger, *changes: Callable[[Ledger], object], keys: tuple[str, ...] = KEYS) -> list[Message]:
    """All that a trigger fires, looked at after every change."""
    state, dispatcher = Ledger(keys), Dispatcher()
    dispatcher.add(trigger, lambda message: None, trigger_id="it")
    return [message for change in changes for message in (change(state), dispatcher.check(state))[1]]


def wrote(actor: str, steps: int, version: Any = 0, keys: Any = None) -> Callable[[Ledger], None]:
    return lambda state: state.wrote(actor, steps, version, keys)


# ARTOS, tables 1 and 3


@pytest.mark.parametrize(
    ("trigger", "changes", "fired"),
    [
        pytest.param(DataKeyTrigger(n=2, size=4), [wrote("a", 4), wrote("b", 4)], ["a@0 b@0"], id="full batch"),
        pytest.param(DataKeyTrigger(n=2, size=4), [wrote("a", 12), wrote("b", 3)], [], id="one actor is not two"),
        pytest.param(
            DataKeyTrigger(n=2, size=4), [wrote("a", 8), wrote("b", 8)], ["a@0 b@0", "a@4 b@4"], id="two batches"
        ),
        pytest.param(
            DataKeyTrigger(n=1, size=4),
            [wrote("b", 3), wrote("a", 5), wrote("b", 6), wrote("a", 3)],
            ["a@0", "b@0", "b@4", "a@4"],
            id="FIFO",
        ),
        pytest.param(
            DataKeyTrigger(n=2, size=4, of="windows"),
            [wrote("a", 4), wrote("b", 3), wrote("a", 4), wrote("b", 1), wrote("a", 4)],
            ["a@0 a@4", "b@0 a@8"],
            id="windows in order of arrival",
        ),
        pytest.param(
            DataKeyTrigger(n=3, size=2, keys=["obs"], of="windows"),
            [wrote("a", 5, keys=["reward"]), wrote("b", 7, keys=["obs"]), wrote("a", 2, keys=["obs"])],
            ["b@0 b@2 b@4"],
            id="several windows in one write",
        ),
        pytest.param(
            DataKeyTrigger(n=1, size=4, keys=["obs"]),
            [wrote("a", 4, keys=["reward"]), wrote("b", 4, keys=["obs"])],
            ["b@0"],
            id="only listed keys",
        ),
        pytest.param(
            DataKeyTrigger(n=1, size=4),
            [wrote("a", 4, keys=["reward"]), wrote("b", 4), wrote("a", 4, keys=["obs"])],
            ["b@0", "a@0"],
            id="all keys",
        ),
    ],
)
def test_consuming_trigger_takes_each_step_once(trigger: Trigger, changes: Any, fired: list[str]) -> None:
    assert short(fire(trigger, *changes)) == fired


def test_message_of_a_data_trigger_names_its_rows() -> None:
    trigger = DataKeyTrigger(n=2, size=4)
    changes = [wrote("a", 1, 3), wrote("a", 2, 5), wrote("b", 4, (6, 8)), wrote("a", 2, 7), wrote("a", 3, 9)]
    assert fire(trigger, *changes, wrote("b", 4, 1))[0] == {
        "trigger_id": "it",
        "actor_ids": ("b", "a"),
        "start": (0, 0),
        "size": 4,
        "keys": KEYS,
        "versions": ((6, 8), (3, 7)),
    }


def test_actors_that_were_ready_first_are_taken_between_checks() -> None:
    state, dispatcher, trigger = Ledger(), Dispatcher(), DataKeyTrigger(n=1, size=2)
    for actor in "abab":
        state.wrote(actor, 2, 0)
    name = dispatcher.add(trigger, later)
    fired: list[Message] = []
    for _ in range(4):
        fired += dispatcher.check(state)
        dispatcher.done(name)
    assert short(fired) == ["a@0", "b@0", "a@2", "b@2"]


def test_an_actor_is_ready_when_its_last_key_has_arrived() -> None:
    state = Ledger(KEYS)
    for actor, keys in [("a", ["obs"]), ("b", ["reward"]), ("c", None), ("b", ["obs"]), ("a", ["reward"])]:
        state.wrote(actor, 1, 0, keys)
    assert short([DataKeyTrigger(n=3, size=1).ready(state) or {}]) == ["c@0 b@0 a@0"]


def test_steps_may_arrive_in_parts_after_complete_ones() -> None:
    state = Ledger(KEYS)
    state.wrote("a", 3, 1)
    state.wrote("a", 2, 2, ["obs"])
    state.wrote("a", 1, 3)
    assert [state.written("a", keys) for keys in (None, ["obs"], ["reward"])] == [4, 6, 4]
    assert (state.span("a", 2, 4, ["obs"]), state.span("a", 2, 4, ["reward"])) == ((1, 2), (1, 3))
    assert (state.reached("a", 3), state.reached("a", 4), state.reached("a", 5)) == (1, 3, None)


def test_replay_fires_when_warm_and_then_for_every_k_new_steps() -> None:
    trigger = DataKeyTrigger(n=2, size=10, consume=False, min_new=4)
    counts = []
    state, dispatcher = Ledger(), Dispatcher()
    dispatcher.add(trigger, lambda message: None)
    for actor, steps in [("a", 50), ("b", 9), ("b", 1), ("a", 3), ("b", 1), ("a", 6), ("b", 6), ("c", 1), ("c", 2)]:
        state.wrote(actor, steps, version=1)
        counts.append(len(fired := dispatcher.check(state)))
    assert counts == [0, 0, 1, 0, 1, 1, 2, 0, 0]
    state.wrote("a", 1, version=2)
    (fired,) = [dispatcher.check(state)]
    assert short(fired) == ["a@50 b@7"]
    assert fired[0]["versions"] == ((1, 2), (1, 1))


def test_stages_fire_in_order_for_each_fragment() -> None:
    trigger = DataKeyTrigger(n=1, size=2, keys=(("reward",), ("obs",)))
    fired = fire(
        trigger,
        wrote("a", 2, 1, ["obs"]),  # too early: it waits for the first stage
        wrote("a", 4, 1, ["reward"]),
        wrote("b", 2, 1, ["reward"]),
        wrote("b", 2, 1, ["obs"]),
        wrote("a", 2, 1, ["obs"]),
    )
    assert [(*m["actor_ids"], *m["start"], m["stage"], *m["keys"], m["fragment"]) for m in fired] == [
        ("a", 0, 0, "reward", 0),
        ("a", 0, 1, "obs", 0),
        ("a", 2, 0, "reward", 1),
        ("b", 0, 0, "reward", 2),
        ("b", 0, 1, "obs", 2),
        ("a", 2, 1, "obs", 1),
    ]


def test_stages_of_lost_steps_are_repeated() -> None:
    state, dispatcher = Ledger(KEYS), Dispatcher()
    trigger = DataKeyTrigger(n=2, size=2, keys=(("reward",), ("obs",)))
    dispatcher.add(trigger, lambda message: None)

    def fired() -> list[Any]:
        return [(m["fragment"], m["stage"], m["start"], m["versions"]) for m in dispatcher.check(state)]

    for actor in "ab":
        state.wrote(actor, 2, 1, ["reward"])
    assert fired() == [(0, 0, (0, 0), ((1, 1), (1, 1)))]
    state.withdrew("a")
    trigger.withdrew(state, "a")
    assert (state.written("a", ["reward"]), state.written("b", ["reward"])) == (0, 2)
    state.wrote("b", 2, 1, ["obs"])
    assert not fired()
    state.wrote("a", 2, 5, ["reward"])
    assert fired() == [(0, 0, (0, 0), ((5, 5), (1, 1)))]
    state.wrote("a", 2, 5, ["obs"])
    assert fired() == [(0, 1, (0, 0), ((5, 5), (1, 1)))]
    assert state.env_steps == 4


def test_a_trigger_on_some_keys_takes_other_steps_for_those_that_are_lost() -> None:
    state, dispatcher = Ledger(KEYS), Dispatcher()
    trigger = DataKeyTrigger(n=1, size=2, keys=["reward"])
    dispatcher.add(trigger, lambda message: None)
    state.wrote("a", 2, 1)
    state.wrote("a", 2, 1, ["reward"])
    assert short(dispatcher.check(state)) == ["a@0", "a@2"]
    state.withdrew("a")
    trigger.withdrew(state, "a")
    assert trigger.next_of("a") == 2 and not dispatcher.check(state)
    state.wrote("a", 2, 1, ["reward"])
    assert short(dispatcher.check(state)) == ["a@2"]


def test_an_object_fires_once_per_increase() -> None:
    trigger = ObjectKeyTrigger("parameters")
    state, dispatcher = Ledger(), Dispatcher()
    state.published("parameters", 0)
    dispatcher.add(trigger, lambda message: None)  # late, so at once

    def versions() -> list[int]:
        return [message["version"] for message in dispatcher.check(state)]

    assert versions() == [0]
    assert versions() == []
    for version in (1, 2, 2, 5, 4):
        state.published("parameters", version)
    state.published("noise_scale", 9)
    assert versions() == [5], "those in between coalesce"
    state.published("parameters", 5)
    assert versions() == []


def test_seconds_are_measured_from_the_last_firing() -> None:
    state, dispatcher = Ledger(now=100.0), Dispatcher()
    dispatcher.add(TimeTrigger(10), lambda message: None)
    fired = []
    for now in (105.0, 110.0, 119.0, 145.0, 154.0, 155.0):
        state.tick(now)
        fired += [message["at"] for message in dispatcher.check(state)]
    assert fired == [110.0, 145.0, 155.0]
    assert dispatcher.deadline(state) == 165.0


@pytest.mark.parametrize("unit", ["env_steps", "learner_steps"])
def test_steps_as_time(unit: Any) -> None:
    def moved(steps: int) -> Callable[[Ledger], object]:
        return wrote("a", steps) if unit == "env_steps" else lambda state: state.learned(steps)

    trigger = TimeTrigger(10, unit=unit)
    fired = fire(trigger, moved(9), moved(1), moved(35), moved(9), moved(1))
    assert [(message["at"], message["elapsed"]) for message in fired] == [(10, 10), (45, 35), (55, 10)]
    assert trigger.deadline(Ledger()) is None


def test_repeated_times_and_versions_do_not_count_as_changes() -> None:
    state = Ledger(now=5.0)
    state.tick(4.0)
    state.tick(5.0)
    state.published("x", 1)
    state.published("x", 1)
    assert (state.now, state.changes, state.env_steps) == (5.0, 1, 0)


def test_environment_steps_count_once_they_are_whole() -> None:
    state = Ledger(KEYS)
    state.wrote("a", 3, 0, ["obs"], envs=8)
    assert state.env_steps == 0
    state.wrote("a", 2, 0, ["reward"], envs=8)
    assert (state.env_steps, state.written("a"), state.written("a", ["obs"])) == (16, 2, 3)


# Joined, and a user's own


def test_and_takes_from_both_or_from_none() -> None:
    joined = DataKeyTrigger(n=1, size=2) & ObjectKeyTrigger("parameters") & DataKeyTrigger(n=2, size=1)
    fired = fire(
        joined,
        wrote("a", 4),
        lambda state: state.published("parameters", 1),
        wrote("b", 1),
        lambda state: state.published("parameters", 2),
        wrote("b", 1),
    )
    starts = [[part.get("start", part.get("version")) for part in message["all"]] for message in fired]
    assert starts == [[(0,), 1, (0, 0)], [(2,), 2, (1, 1)]]


def test_or_takes_from_the_one_that_is_ready_and_in_turn() -> None:
    either = DataKeyTrigger(n=1, size=2) | ObjectKeyTrigger("parameters")
    state, dispatcher = Ledger(), Dispatcher()
    dispatcher.add(either, lambda message: None)
    state.wrote("a", 4, 0)
    state.published("parameters", 1)
    assert [message["any"] for message in dispatcher.check(state)] == [0, 1, 0]
    state.published("parameters", 2)
    assert [message["version"] for message in dispatcher.check(state)] == [2]


def test_one_without_consume_fires_once_per_change() -> None:
    learn = lambda state: state.learned()  # noqa: E731
    assert len(fire(Always(), learn, lambda state: None, learn)) == 2
    assert len(fire(AtLeast(2), learn, learn, learn)) == 2
    assert len(fire(Always() | AtLeast(2), learn, learn)) == 3
    assert len(fire(Always() & AtLeast(2), learn, learn)) == 1


def test_trigger_does_not_fire_on_its_own_message() -> None:
    state, dispatcher = Ledger(), Dispatcher()
    dispatcher.add(Always(), lambda message: state.learned())
    assert len(dispatcher.check(state)) == 1
    assert len(dispatcher.check(state)) == 0


def test_one_without_consume_is_a_gate_for_those_with() -> None:
    fired = fire(DataKeyTrigger(n=1, size=1) & AtLeast(1), wrote("a", 3), lambda state: state.learned())
    assert [message["all"][0]["start"] for message in fired] == [(0,), (1,), (2,)]


@pytest.mark.parametrize(
    ("trigger", "deadline"),
    [
        (TimeTrigger(5), 5.0),
        (TimeTrigger(5) | TimeTrigger(3), 3.0),
        (TimeTrigger(5) & TimeTrigger(3), 5.0),
        (TimeTrigger(5) & ObjectKeyTrigger("published"), 5.0),
        (TimeTrigger(5) & ObjectKeyTrigger("never"), None),
        (TimeTrigger(5) | ObjectKeyTrigger("never"), 5.0),
        (ObjectKeyTrigger("never"), None),
    ],
)
def test_deadline_is_the_time_at_which_a_trigger_fires_without_a_change(
    trigger: Trigger, deadline: float | None
) -> None:
    state, dispatcher = Ledger(), Dispatcher()
    name = dispatcher.add(trigger, later)
    state.published("published", 1)
    assert not dispatcher.check(state)
    assert dispatcher.deadline(state) == deadline
    if deadline is not None:
        state.tick(np.nextafter(deadline, 0))
        assert not dispatcher.check(state)
        state.tick(deadline)
        assert len(dispatcher.check(state)) == dispatcher.outstanding(name) == 1
        assert dispatcher.deadline(state) is None, "until its message is done"


# The dispatcher


def test_max_outstanding_bounds_the_messages_in_flight() -> None:
    state, dispatcher = Ledger(), Dispatcher()
    slow = dispatcher.add(DataKeyTrigger(n=1, size=1), later, max_outstanding=2)
    state.wrote("a", 5, 0)
    assert short(dispatcher.check(state)) == ["a@0", "a@1"]
    assert dispatcher.check(state) == []
    dispatcher.done(slow)
    assert short(dispatcher.check(state)) == ["a@2"]


def test_one_that_is_always_ready_does_not_starve_others() -> None:
    state, dispatcher = Ledger(), Dispatcher()
    order: list[Any] = []
    dispatcher.add(DataKeyTrigger(n=1, size=1), order.append, trigger_id="busy")
    dispatcher.add(DataKeyTrigger(n=1, size=3), order.append, trigger_id="rare")
    state.wrote("a", 100, 0)
    dispatcher.check(state)
    names = [message["trigger_id"] for message in order]
    assert names[:66] == ["busy", "rare"] * 33
    assert len(names) == 133


def test_a_delivery_may_change_the_state_and_ask_for_a_check() -> None:
    state, dispatcher, order = Ledger(), Dispatcher(), []

    def update(message: Message) -> None:
        order.append("update")
        state.published("parameters", len(order))
        assert dispatcher.check(state) == []

    dispatcher.add(DataKeyTrigger(n=1, size=1), update)
    dispatcher.add(ObjectKeyTrigger("parameters"), lambda message: order.append(message["version"]))
    state.wrote("a", 2, 0)
    assert len(dispatcher.check(state)) == 4
    assert order == ["update", 1, "update", 3]


def test_exception_names_its_trigger_and_leaves_the_others_usable() -> None:
    state, dispatcher = Ledger(), Dispatcher()

    def broken(message: Message) -> None:
        raise ZeroDivisionError("mine")

    dispatcher.add(DataKeyTrigger(n=1, size=1), broken, trigger_id="update")
    state.wrote("a", 1, 0)
    with pytest.raises(ZeroDivisionError) as caught:
        dispatcher.check(state)
    assert "In trigger 'update', DataKeyTrigger(n=1" in caught.value.__notes__[0]
    assert dispatcher.check(state) == []
    assert dispatcher.outstanding("update") == 0


def test_a_trigger_is_registered_once() -> None:
    dispatcher, mine, other = Dispatcher(), AtLeast(1), TimeTrigger(1)
    dispatcher.add(mine, later)
    dispatcher.add(AtLeast(1), later)  # equal, but another one
    for again in (mine, mine | other, other & other):
        with pytest.raises(ConfigError, match="already registered"):
            Dispatcher().add(again, later)
    Dispatcher().add(other, later)  # not spoiled by the attempts


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda d: d.add(later, later), "not a trigger; derive"),
        (lambda d: d.add(TimeTrigger(1), "update"), "delivery is 'update'"),
        (lambda d: d.add(TimeTrigger(1), later, max_outstanding=0), "max_outstanding is 0"),
        (lambda d: [d.add(TimeTrigger(1), later, trigger_id="x") for _ in range(2)], "already a trigger 'x'"),
        (lambda d: d.done("updat"), "unknown trigger 'updat'"),
        (lambda d: d.done(d.add(TimeTrigger(1), later)), "none of its messages is outstanding"),
    ],
)
def test_mistakes_with_a_dispatcher(act: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        act(Dispatcher())


# Mistakes in options


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DataKeyTrigger(n=0, size=1), "n is 0; expected a number of actors, an int of at least 1"),
        (lambda: DataKeyTrigger(n=1, size=0), "size is 0"),
        (lambda: DataKeyTrigger(n=True, size=1), "n is True"),
        (lambda: DataKeyTrigger(n=1, size=2.5), "size is 2.5"),  # type: ignore[arg-type]
        (lambda: DataKeyTrigger(n=1, size=1, min_new=3), "consume=False with min_new=k"),
        (lambda: DataKeyTrigger(n=1, size=1, consume=False), "consume=False with min_new=k"),
        (lambda: DataKeyTrigger(n=1, size=1, consume=False, min_new=0), "min_new is 0"),
        (lambda: DataKeyTrigger(n=1, size=1, keys=[["a"], ["b"]], consume=False, min_new=1), "one sequence"),
        (lambda: DataKeyTrigger(n=1, size=1, of="rows"), "Known: actors, windows"),  # type: ignore[arg-type]
        (lambda: DataKeyTrigger(n=0, size=1, of="windows"), "n is 0; expected a number of windows"),
        (lambda: DataKeyTrigger(n="all", size=1, of="windows"), "of='windows' needs a number n"),
        (
            lambda: DataKeyTrigger(n=1, size=1, consume=False, min_new=1, of="windows"),
            "neither stages nor consume",
        ),
        (
            lambda: DataKeyTrigger(n=1, size=1, keys=[["a"], ["b"]], of="windows"),
            "neither stages nor consume",
        ),
        (lambda: DataKeyTrigger(n=1, size=1, keys="obs"), r"write \['obs'\]"),
        (lambda: DataKeyTrigger(n=1, size=1, keys=()), "or None for all"),
        (lambda: DataKeyTrigger(n=1, size=1, keys=("a", ("b",))), "expected names of arrays"),
        (lambda: DataKeyTrigger(n=1, size=1, keys=("a", "a")), "each only once"),
        (lambda: ObjectKeyTrigger(""), "the name of an object"),
        (lambda: TimeTrigger(1, unit="steps"), "Known: env_steps, learner_steps, seconds"),  # type: ignore[arg-type]
        (lambda: TimeTrigger(0), "period is 0; expected a number of seconds above 0"),
        (lambda: TimeTrigger(float("nan")), "period is nan"),
        (lambda: TimeTrigger(1.5, unit="env_steps"), "period is 1.5"),
        (lambda: TimeTrigger(1) | 3, "3 is not a trigger"),  # type: ignore[operator]
        (lambda: TransferTrigger(max_bytes=-1), "max_bytes"),
        (lambda: TransferTrigger(seconds=0), "seconds is 0"),
        (lambda: TransferTrigger(seconds=True), "seconds is True"),
        (lambda: TransferTrigger(episode_end="yes"), "episode_end is 'yes'"),  # type: ignore[arg-type]
        (lambda: Ledger().wrote("a", 1, 0, ["obs"]), r"Ledger\(keys="),
        (lambda: Ledger(KEYS).wrote("a", 1, 0, ["ob"]), "unknown key 'ob'"),
        (lambda: Ledger().wrote("a", 0, 0), "at least 1"),
        (lambda: fire(DataKeyTrigger(n=1, size=1, keys=["ob"]), wrote("a", 1)), "unknown key 'ob'"),
    ],
)
def test_mistakes_are_named(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_transfer_stages() -> None:
    names = ["obs", "reward", "done", "action"]
    assert TransferTrigger().split(names) == TransferTrigger(keys=cast(Any, None)).split(names) == [names]
    staged = TransferTrigger(keys=[["reward", "done"], ["action"]])
    assert staged.split(names) == [["reward", "done"], ["obs", "action"]]


@pytest.mark.parametrize(
    ("options", "waiting", "due"),
    [
        ({}, (10**6, 10**9, 1e9, True), False),  # the end of the chunk sends it
        ({"size": 4}, (3, 0, 0, False), False),
        ({"size": 4}, (4, 0, 0, False), True),
        ({"episode_end": True}, (1, 0, 0, False), False),
        ({"episode_end": True}, (1, 0, 0, True), True),
        ({"max_bytes": 100}, (1, 99, 0, False), False),
        ({"max_bytes": 100}, (1, 100, 0, False), True),
        ({"seconds": 2}, (1, 0, 1.9, False), False),
        ({"seconds": 2}, (1, 0, 2.0, False), True),
        ({"seconds": 2}, (0, 0, 9.0, False), False),  # there is nothing to send
        ({"size": 4, "seconds": 2}, (1, 0, 2.0, False), True),
    ],
)
def test_transfer_is_due(options: dict[str, Any], waiting: tuple[int, int, float, bool], due: bool) -> None:
    assert TransferTrigger(**options).due(*waiting) is due


def test_seconds_between_runs_do_not_count() -> None:
    ledger, dispatcher, fired = Ledger(), Dispatcher(), list[float]()
    dispatcher.add(TimeTrigger(10), lambda message: fired.append(message["at"]))
    dispatcher.resume(ledger, 100.0)
    for now in (104.0, 109.0):
        ledger.tick(now)
        dispatcher.check(ledger)
    dispatcher.resume(ledger, 200.0)
    assert dispatcher.deadline(ledger) == 201.0
    for now in (200.5, 201.5):
        ledger.tick(now)
        dispatcher.check(ledger)
    assert fired == [201.5]


def test_merged_writes_do_not_arrive_before_they_were_written() -> None:
    """Old writes are merged to bound the memory; their last step then still has the time of its own write."""
    ledger = Ledger()
    arrivals = []
    for _ in range(10_000):
        ledger.wrote(0, 1, 0)
        arrivals.append(ledger.changes)
    for steps in (1, 100, 2048, 5000, 10_000):
        reached = ledger.reached(0, steps)
        assert reached is not None and reached >= arrivals[steps - 1]
