"""Triggers over long random histories."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from farstep.workflow.triggers import DataKeyTrigger, Dispatcher, Ledger, Message
from tests.workflow.triggers.trigger_world import KEYS, later, short

ACTORS = "abcd"
STEP = st.one_of(
    st.tuples(
        st.just("wrote"), st.sampled_from(ACTORS), st.integers(1, 7), st.sampled_from([None, KEYS[:1], KEYS[1:]])
    ),
    st.tuples(st.just("lost"), st.sampled_from(ACTORS)),
    st.tuples(st.just("check")),
    st.tuples(st.just("done")),
)


@settings(deadline=None, max_examples=150)
@given(n=st.integers(1, 3), size=st.integers(1, 5), limit=st.integers(1, 2), staged=st.booleans(), steps=st.lists(STEP))
def test_no_step_is_lost_or_taken_twice(n: int, size: int, limit: int, staged: bool, steps: list[Any]) -> None:
    stages = (("reward",), ("obs",)) if staged else (KEYS,)
    state, dispatcher = Ledger(KEYS), Dispatcher()
    trigger = DataKeyTrigger(n, size, stages if staged else None)
    name = dispatcher.add(trigger, later, max_outstanding=limit)
    written: dict[str, dict[str, int]] = {actor: dict.fromkeys(KEYS, 0) for actor in ACTORS}
    fragments: dict[int, list[dict[str, int]]] = {}
    """For each, what its stages took so far."""
    lost = False

    def check() -> bool:
        fired = dispatcher.check(state)
        assert dispatcher.outstanding(name) <= limit
        for message in fired:
            taken = dict(zip(message["actor_ids"], message["start"], strict=True))
            assert len(taken) == n
            for (actor, start), span in zip(taken.items(), message["versions"], strict=True):
                assert all(written[actor][key] >= start + size for key in message["keys"])
                assert span == (start, start + size - 1)
            before = fragments.setdefault(message.get("fragment", len(fragments)), [])
            assert message.get("stage", 0) == len(before) and taken in (before or [taken])
            before.append(taken)
        return bool(fired)

    def settle() -> None:
        while dispatcher.outstanding(name):
            dispatcher.done(name)

    for step in steps:
        match step:
            case ("wrote", actor, count, keys):
                for key in keys or KEYS:
                    for _ in range(count):  # one by one: the version of every step is its number
                        state.wrote(actor, 1, written[actor][key], [key])
                        written[actor][key] += 1
            case ("lost", actor):
                state.withdrew(actor)
                trigger.withdrew(state, actor)
                whole = min(written[actor].values())
                written[actor] = dict.fromkeys(KEYS, whole)
                for taken in fragments.values():
                    if taken and taken[0].get(actor, -size) + size > whole:
                        taken.clear()  # comes again
                        lost = True
            case ("check",):
                check()
            case ("done",) if dispatcher.outstanding(name):
                dispatcher.done(name)
    settle()
    while check():
        settle()

    def taken_of(actor: str, stage: int) -> list[int]:
        done = [each[stage] for _, each in sorted(fragments.items()) if len(each) > stage]
        return [taken[actor] for taken in done if actor in taken]

    for actor in ACTORS:
        starts = taken_of(actor, 0)
        assert lost or starts == list(range(0, len(starts) * size, size)), "contiguous, disjoint, in order"
        assert all(len(set(taken_of(actor, stage))) == len(taken_of(actor, stage)) for stage in range(len(stages)))
    for first, *later_stages in fragments.values() if staged and not lost else ():
        is_written = all(written[actor]["obs"] >= start + size for actor, start in first.items())
        assert bool(later_stages) == is_written, "a stage that waits for an actor delays no other fragment"
    whole_of = {actor: min(written[actor][key] for key in stages[0]) // size for actor in ACTORS}
    waits = {actor for actor, total in whole_of.items() if total > len(taken_of(actor, 0))}
    assert len(waits) < n or (lost and n > 1), "it would have fired again"
    if staged and n == 1:
        for actor, total in whole_of.items():
            assert len(taken_of(actor, 1)) == min(total, written[actor]["obs"] // size)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.lists(st.tuples(st.sampled_from(ACTORS), st.integers(1, 9))))
def test_replay_fires_for_every_k_steps_after_it_was_warm(k: int, size: int, writes: list[tuple[str, int]]) -> None:
    state, dispatcher = Ledger(), Dispatcher()
    dispatcher.add(DataKeyTrigger(2, size, consume=False, min_new=k), lambda message: None)
    written, fired, warm_at = dict.fromkeys(ACTORS, 0), 0, None
    for actor, steps in writes:
        state.wrote(actor, steps, 0)
        written[actor] += steps
        fired += len(dispatcher.check(state))
        total = sum(written.values())
        if warm_at is None and sum(each >= size for each in written.values()) >= 2:
            warm_at = total
        assert fired == (0 if warm_at is None else 1 + (total - warm_at) // k)


def test_the_ledger_remembers_a_bounded_history() -> None:
    state, dispatcher = Ledger(), Dispatcher()
    for version in range(10_000):
        state.wrote("a", 1, version)
    state.wrote("b", 2000, 7)
    name = dispatcher.add(DataKeyTrigger(n=1, size=1000), later)
    fired: list[Message] = []
    for _ in range(12):
        fired += dispatcher.check(state)
        dispatcher.done(name)
    assert short(fired) == [f"a@{start}" for start in range(0, 10_000, 1000)] + ["b@0", "b@1000"]
    for message in fired[:10]:
        (start,), ((oldest, newest),) = message["start"], message["versions"]
        assert oldest <= start < start + 999 <= newest
    assert fired[9]["versions"] == ((9000, 9999),), "what is recent is exact"
    assert fired[0]["versions"][0][1] >= 10_000 - 4096, "older writes are merged into one entry"
