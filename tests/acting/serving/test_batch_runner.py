"""The order in which an acting server acts on batches, answers them and pulls weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from farstep.acting.mailbox import CONTINUES, HELD, WAITS
from farstep.acting.serving import batch_runner
from farstep.acting.serving.answers import Answers
from farstep.acting.serving.batch_runner import MemoryExhausted
from farstep.agents.policy import Launched
from farstep.config.inference import ServedInference
from farstep.rollout.progress import COUNT, PHASE, Phase
from farstep.wire.channels.doorbell import Fence
from tests.acting.serving.simulated_runner import Served


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    made = Served(*getattr(request, "param", ()))
    yield made
    for client in made.clients:
        client.close()


def during_the_first_batch(served: Served, action: Callable[[], None]) -> None:
    """Run `action` once, while the policy acts on the first batch."""
    policy: Any = served.actor.policy
    launch = policy.launch

    def launch_once(*arguments: Any) -> Any:
        policy.launch = launch
        wait = launch(*arguments)
        action()
        return wait

    policy.launch = launch_once


def test_the_next_batch_starts_before_the_last_one_is_answered(served: Served) -> None:
    served.request(0, 0, 1, seen=3)
    during_the_first_batch(served, lambda: served.request(1, 0, 1, seen=5))
    served.run()
    assert served.log == ["start", "finish", "start", "answer", "finish", "answer"]
    assert served.answer(0, 0) == (1, 1, {3})
    assert served.answer(1, 0) == (1, 1, {5})


def test_without_a_next_batch_answers_do_not_wait(served: Served) -> None:
    served.request(0, 0, 1, seen=3)
    assert served.run() == 0.0
    assert served.log == ["start", "finish", "answer"]


def test_messages_are_handled_in_time_although_requests_keep_coming(served: Served) -> None:
    served.request(0, 0, 1, seen=3)
    during_the_first_batch(served, lambda: served.request(1, 0, 1, seen=5))
    served.run(until=0.0)
    assert served.log == ["start", "finish", "answer"]


def test_answers_do_not_wait_for_a_pull(served: Served) -> None:
    served.request(0, 0, 1, seen=3)

    def publish() -> None:
        served.sync.newest = 2
        served.request(1, 0, 1, seen=5)

    during_the_first_batch(served, publish)
    served.run()
    served.run()
    assert served.log == ["start", "finish", "answer", "pull", "start", "finish", "answer"]
    assert (served.answer(0, 0)[1], served.answer(1, 0)[1]) == (1, 2)


def test_a_chunk_of_one_version_keeps_it_in_overlapping_batches(served: Served) -> None:
    mailbox = served.clients[0].mailbox
    assert mailbox is not None
    mailbox.words[HELD] = 1
    served.request(0, 0, 1, seen=3)

    def publish() -> None:
        served.sync.newest = 2
        served.request(0, 1, 1, seen=5)

    during_the_first_batch(served, publish)
    served.run()
    assert "pull" not in served.log
    assert (served.answer(0, 0)[1], served.answer(0, 1)[1]) == (1, 1)


def test_a_request_that_replaces_another_one_is_acted_on(served: Served) -> None:
    served.request(0, 0, 1, seen=3)
    during_the_first_batch(served, lambda: served.request(0, 0, 2, seen=5, ticket=2))
    served.run()
    assert served.answer(0, 0) == (2, 1, {5})


def test_an_error_in_the_next_batch_does_not_affect_the_last_one(served: Served) -> None:
    served.request(0, 0, 1, seen=3)
    policy: Any = served.actor.policy
    launch = policy.launch

    def fail(*arguments: Any) -> Any:
        raise ValueError("no actions")

    def launch_once(*arguments: Any) -> Any:
        policy.launch = fail
        served.request(1, 0, 1, seen=5)
        return launch(*arguments)

    policy.launch = launch_once
    served.run()
    assert served.answer(0, 0) == (1, 1, {3})
    assert served.clients[0].failure is None
    failure = served.clients[1].failure
    assert failure is not None and "no actions" in failure.message


def nothing() -> None:
    """Let a batch run until the next poll."""


@pytest.mark.parametrize(
    ("running", "waiting", "stepping", "starts_early"),
    [
        pytest.param([(0, 0), (0, 1)], [(1, 0)], [], True, id="no other group is inside a chunk"),
        pytest.param([(0, 0), (0, 1)], [(1, 0)], [(1, 1)], False, id="another group may come in time"),
        pytest.param([(0, 0)], [], [], False, id="nothing waits"),
        pytest.param([(0, 0), (0, 1)], [(1, 0)], [(3, 0)], False, id="a group of another arena may come in time"),
        pytest.param([(0, 0), (2, 1)], [(1, 0)], [], True, id="a batch of two arenas"),
    ],
)
def test_a_batch_starts_while_another_runs_if_it_would_not_grow(
    served: Served,
    running: list[tuple[int, int]],
    waiting: list[tuple[int, int]],
    stepping: list[tuple[int, int]],
    starts_early: bool,
) -> None:
    served.clients += [served.make_client(worker) for worker in (2, 3)]
    served.clients.reverse()  # the last worker, alone in its arena, becomes worker 0
    for worker, index in running:
        served.request(worker, index, 1, seen=worker, continues=True)
    for worker, index in stepping:
        served.clients[worker].groups[index].words[CONTINUES] = 1

    def arrive() -> None:
        for worker, index in waiting:
            served.request(worker, index, 1, seen=10 + worker, continues=True)

    served.policy.while_running += [nothing, arrive, nothing, nothing]
    served.run()
    first, second = len(running) * ["answer"], len(waiting) * ["answer"]
    if starts_early:
        assert served.log == ["start", "start", "finish", *first, "finish", *second]
    elif waiting:
        assert served.log == ["start", "finish", "start", *first, "finish", *second]
    assert [served.answer(*group) for group in running] == [(1, 1, {worker}) for worker, _ in running]
    assert [served.answer(*group) for group in waiting] == [(1, 1, {10 + worker}) for worker, _ in waiting]


def test_a_batch_starts_just_before_the_running_one_ends(served: Served) -> None:
    """To start a batch takes 0.1 ms, and to run it 0.5 ms. Another group, which is inside a chunk, sends nothing."""
    now, starts = [0.0], []
    served.runner = served.make_runner(is_local=True, clock=lambda: now[0] / 1000)
    served.clients[1].groups[1].words[CONTINUES] = 1

    def after(ms: float, action: Callable[[], object] = nothing) -> Callable[[], None]:
        def poll() -> None:
            now[0] += ms
            action()

        return poll

    first = [after(0.5, lambda: served.request(1, 0, 1, seen=5))]  # too late for an early start
    third = [after(0.375, lambda: served.request(1, 0, 2, seen=7)), after(0.02), after(0.01), after(0.1)]
    polls = iter([first, [after(0.5)], third, []])
    launch = served.policy.launch

    def slow_launch(*arguments: Any) -> Launched:
        starts.append(now[0])
        now[0] += 0.1
        served.policy.while_running.extend(next(polls))
        launched: Launched = launch(*arguments)
        return launched

    served.policy.launch = slow_launch
    served.request(0, 0, 1, seen=3)
    served.run()
    assert starts == [0, 0.6] and now == [pytest.approx(1.2)]
    served.request(0, 0, 2, seen=6)
    served.run()
    assert starts[2:] == [pytest.approx(1.2), pytest.approx(1.3 + 0.405)]
    assert served.log[-6:] == ["start", "start", "finish", "answer", "finish", "answer"]


@pytest.mark.parametrize("served", [(8,)], indirect=True)
def test_a_batch_with_half_of_the_rows_is_full_and_starts_at_once(served: Served) -> None:
    """The other groups are inside a chunk, so a larger batch would be possible later."""
    first, *others = [(worker, index) for worker in range(2) for index in range(2)]

    def arrive() -> None:
        for group in others:
            served.request(*group, 1, seen=5, continues=True)

    served.request(*first, 1, seen=3, continues=True)
    served.policy.while_running += [nothing, arrive]
    served.run()
    second, third = ["finish", "start", "answer", "answer"], ["finish", "answer"]
    assert served.log == ["start", "start", "finish", "answer", *second, *third]
    assert [served.answer(*group)[2] for group in others] == 3 * [{5}]


@pytest.mark.parametrize("served", [(8,)], indirect=True)
@pytest.mark.parametrize("case", ["gpu", "cpu", "network"])
def test_only_batches_that_may_overlap_are_divided(served: Served, case: str) -> None:
    served.policy.overlaps = case != "cpu"
    served.runner = served.make_runner(is_local=case != "network")
    for worker in range(2):
        for index in range(2):
            served.request(worker, index, 1, seen=worker)
    served.run(until=0.0)
    assert served.log == ["start", "finish", *["answer"] * (2 if case == "gpu" else 4)]


def test_at_most_two_batches_are_in_flight(served: Served) -> None:
    served.request(0, 0, 1, seen=3)
    arrivals = [(0, 1), (1, 0), (1, 1)]
    for seen, (worker, index) in enumerate(arrivals, 4):
        served.policy.while_running.append(partial(served.request, worker, index, 1, seen))
    served.run()
    assert served.log == ["start", *["start", "finish", "answer"] * 3, "finish", "answer"]
    assert [served.answer(*group)[2] for group in [(0, 0), *arrivals]] == [{3}, {4}, {5}, {6}]


def test_no_batch_starts_while_another_runs_if_messages_are_due(served: Served) -> None:
    served.request(0, 0, 1, seen=3)
    served.policy.while_running.append(lambda: served.request(1, 0, 1, seen=5))
    served.run(until=0.0)
    assert served.log == ["start", "finish", "answer"]


@pytest.mark.parametrize("case", ["cpu", "network"])
def test_batches_overlap_only_on_the_gpu_and_with_shared_memory(served: Served, case: str) -> None:
    served.policy.overlaps = case != "cpu"
    served.runner = served.make_runner(is_local=case != "network")
    served.request(0, 0, 1, seen=3)
    served.policy.while_running.append(lambda: pytest.fail("polled"))
    during_the_first_batch(served, lambda: served.request(1, 0, 1, seen=5))
    served.run()
    assert served.log == ["start", "finish", "answer"]


def test_weights_do_not_change_while_a_batch_is_in_flight(served: Served) -> None:
    served.request(0, 0, 1, seen=3)

    def publish() -> None:
        served.sync.newest = 2
        served.request(1, 1, 1, seen=7)

    served.policy.while_running += [lambda: served.request(1, 0, 1, seen=5), publish, nothing]
    served.run()
    served.run()
    assert served.log == ["start", "start", *["finish", "answer"] * 2, "pull", "start", "finish", "answer"]
    assert [served.answer(*group)[1] for group in ((0, 0), (1, 0), (1, 1))] == [1, 1, 2]


@pytest.mark.parametrize("failing", ["first", "second", "poll"])
def test_an_error_of_one_batch_in_flight_does_not_affect_the_other(served: Served, failing: str) -> None:
    served.request(0, 0, 1, seen=3)
    policy = served.policy

    def fail_next_wait() -> None:
        policy.wait_error = ValueError("no actions")

    def fail_poll() -> None:
        policy.wait_error = ValueError("no actions")
        raise ValueError("no actions")

    policy.while_running.append(lambda: served.request(1, 0, 1, seen=5))
    if failing == "first":
        fail_next_wait()
    else:
        policy.while_running.append(fail_next_wait if failing == "second" else fail_poll)
    served.run()
    assert served.log == ["start", "start", "finish", "answer", "finish", "answer"]
    failed, other = (0, 1) if failing == "first" else (1, 0)
    assert served.clients[other].failure is None
    assert served.answer(other, 0) == (1, 1, {5 if other else 3})
    failure = served.clients[failed].failure
    assert failure is not None and "no actions" in failure.message and failure.phase == "act"


def test_a_batch_that_cannot_start_does_not_affect_the_one_that_runs(served: Served) -> None:
    served.request(0, 0, 1, seen=3)
    policy = served.policy

    def fail(*arguments: Any) -> Any:
        raise ValueError("no actions")

    def arrive() -> None:
        policy.launch = fail
        served.request(1, 0, 1, seen=5)

    policy.while_running.append(arrive)
    served.run()
    assert served.log == ["start", "finish", "answer", "answer"]
    assert served.answer(0, 0) == (1, 1, {3}) and served.clients[0].failure is None
    failure = served.clients[1].failure
    assert failure is not None and "no actions" in failure.message


def test_the_server_ends_if_memory_runs_out_in_the_second_batch(served: Served) -> None:
    served.request(0, 0, 1, seen=3)
    policy = served.policy

    def run_out() -> None:
        policy.wait_error = MemoryError()

    policy.while_running += [lambda: served.request(1, 0, 1, seen=5), run_out]
    with pytest.raises(MemoryExhausted):
        served.run()
    assert served.answer(0, 0) == (1, 1, {3}) and served.answer(1, 0)[0] == 0


def test_the_time_limit_of_a_batch_begins_when_the_last_one_is_done(served: Served) -> None:
    served.request(0, 0, 1, seen=3)
    policy, found = served.policy, []
    call = policy.agent.act

    def act(obs: Any) -> Any:
        found.append((served.words[PHASE], served.words[COUNT]))
        return call(obs)

    policy.agent.act = act
    policy.while_running += [lambda: served.request(1, 0, 1, seen=5)]
    served.run()
    (first, count), (second, later) = found
    assert first == second == Phase.ACT and later > count


def test_a_request_that_replaces_one_in_flight_is_answered_last(served: Served) -> None:
    served.request(0, 0, 1, seen=3)
    served.policy.while_running.append(lambda: served.request(0, 0, 2, seen=5, ticket=2))
    served.run()
    assert served.log == ["start", "start", *["finish", "answer"] * 2]
    assert served.answer(0, 0) == (2, 1, {5})


def test_a_request_that_is_refused_while_another_is_in_flight_is_answered_last(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(ticket: Any, actor: Any) -> bool:
        raise ValueError("no rule")

    served.request(0, 0, 1, seen=3)

    def replace() -> None:
        for name in ("needs_pull", "pull_if_needed"):
            monkeypatch.setattr(served.sync, name, fail)
        served.request(0, 0, 2, seen=5, ticket=2)

    served.policy.while_running.append(replace)
    for _ in range(2):
        served.run()
    failure = served.clients[0].failure
    assert served.answer(0, 0)[0] == 2 and failure is not None and "no rule" in failure.message


def test_a_window_and_the_largest_batch_also_hold_while_a_batch_runs(served: Served) -> None:
    served.request(0, 0, 1, seen=3, continues=True)

    def arrive() -> None:
        for index in range(2):
            served.request(1, index, 1, seen=5, continues=True)

    served.runner.options = ServedInference(window_ms=1e6, max_batch=4)
    served.request(0, 1, 1, seen=3, continues=True)  # as many rows as a batch may have, so no window
    served.policy.while_running += [lambda: served.request(1, 0, 1, seen=5, continues=True), nothing]
    served.run()
    assert served.log == ["start", "finish", "answer", "answer"], "it may become larger within the window"
    served.log.clear()
    served.runner.options = ServedInference(max_batch=2)
    served.clients[0].groups[1].words[CONTINUES] = 0
    served.policy.while_running += [arrive, nothing, nothing]
    served.request(0, 0, 2, seen=3, continues=True)
    served.run()
    assert served.log[:2] == ["start", "start"] and served.log.count("start") == 3


@pytest.mark.parametrize("moment", range(3))
def test_the_window_waits_for_a_last_request_that_arrives_while_the_server_reads(
    served: Served, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    *others, last = [(worker, index) for worker in range(2) for index in range(2)]
    events: list[Callable[[], object]] = [*[nothing] * moment, lambda: served.request(*last, 1, seen=3)]

    def fence() -> None:
        if events:
            events.pop(0)()

    monkeypatch.setattr(batch_runner, "Fence", lambda: fence)
    served.runner = served.make_runner(is_local=True)
    served.runner.options = ServedInference(window_ms=1e6)
    served.clients[last[0]].groups[last[1]].words[CONTINUES] = 1
    for group in others:
        served.request(*group, 1, seen=3)
    while "start" not in served.log:
        served.run()
    assert served.log == ["start", "finish", *["answer"] * 4]


@pytest.mark.parametrize("seed", range(5))
def test_every_request_gets_the_answer_to_its_own_observations(
    served: Served, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers send their next requests, and versions are published, at any time while batches run."""
    rng = np.random.default_rng(seed)
    sent = dict.fromkeys([(worker, index) for worker in range(2) for index in range(2)], 0)
    changes: list[tuple[int, int]] = []

    def load(ticket: Any, actor: Any) -> None:
        if actor.version < served.sync.newest:
            actor.version = served.sync.newest
            changes.append((served.log.count("start"), served.log.count("finish")))

    monkeypatch.setattr(served.sync, "pull_if_needed", load)

    def step() -> None:
        for (worker, index), number in sent.items():
            answered, _, seen = served.answer(worker, index)
            if answered == number and rng.random() < 0.4:
                assert not number or seen == {float(number % 100)}
                sent[worker, index] = number + 1
                served.request(worker, index, number + 1, seen=(number + 1) % 100, continues=bool(rng.random() < 0.9))
        served.sync.newest += int(rng.random() < 0.1)

    for _ in range(60):
        served.policy.while_running += [step] * int(rng.integers(1, 12))
        step()
        served.run()
    assert min(sent.values()) > 20 and len(changes) > 5
    assert all(started == finished for started, finished in changes)
    in_flight = np.cumsum([{"start": 1, "finish": -1}.get(event, 0) for event in served.log])
    assert in_flight.max() == 2 and in_flight[-1] == 0


def test_one_batch_has_requests_of_several_arenas(served: Served) -> None:
    served.clients += [served.make_client(worker) for worker in (2, 3)]
    assert [client.mailbox_index for client in served.clients] == [0, 1, 2, 0] and len(served.arenas) == 2
    for worker in (3, 0, 2):
        served.request(worker, 1, 1, seen=worker)
    served.run()
    assert served.log == ["start", "finish", *["answer"] * 3]
    assert [served.answer(worker, 1) for worker in (0, 2, 3)] == [(1, 1, {0}), (1, 1, {2}), (1, 1, {3})]
    assert served.answer(1, 1) == (0, 0, {0})


def test_an_arena_is_removed_with_its_last_worker(served: Served) -> None:
    first, second = served.clients
    first.close()
    assert len(served.arenas) == 1
    second.close()
    assert served.arenas == []


def test_a_request_that_did_not_fit_is_older_than_the_next_ones(served: Served) -> None:
    served.runner.options = ServedInference(max_batch=2)
    for worker in range(2):
        served.request(worker, 0, 1, seen=3)
    served.run(until=0.0)
    served.request(0, 0, 2, seen=3)
    served.run(until=0.0)
    assert [served.answer(worker, 0)[0] for worker in range(2)] == [1, 1]
    served.run(until=0.0)
    assert served.answer(0, 0)[0] == 2


def test_only_workers_that_wait_are_woken(served: Served) -> None:
    served.request(0, 0, 1, seen=3)
    served.request(1, 0, 1, seen=5, waits=False)
    served.run()
    assert served.log == ["start", "finish", "answer"]
    assert [served.answer(worker, 0)[0] for worker in range(2)] == [1, 1]


def test_a_worker_that_begins_to_wait_while_its_answer_is_written_is_woken(served: Served) -> None:
    served.request(0, 0, 1, seen=3, waits=False)
    words = served.clients[0].groups[0].words
    calls: list[None] = []

    def fence() -> None:
        calls.append(None)
        if len(calls) == 2:
            words[WAITS] = 1

    answering: Any = fence
    requests = served.arenas[0].pending(Fence())
    assert requests is not None
    Answers([requests], version=1, counts_as=1).send([], 0, None, answering)
    assert served.log == ["answer"]


def test_a_request_is_refused_once_if_weights_cannot_be_loaded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(ticket: Any, actor: Any) -> None:
        raise ValueError("no weights")

    monkeypatch.setattr(served.sync, "pull_if_needed", fail)
    served.request(0, 0, 1, seen=3)
    for _ in range(2):
        served.run()
    assert served.log == ["answer"] and served.answer(0, 0)[0] == 1
    failure = served.clients[0].failure
    assert failure is not None and "no weights" in failure.message
