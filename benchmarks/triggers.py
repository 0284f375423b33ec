"""Latency from a change to the call of its consumer (in the same thread, another thread, another process), and the CPU
time that the head spends per chunk, by number of actors.

    python benchmarks/triggers.py
    python benchmarks/triggers.py --only per-chunk    # only CPU time, which other programs hardly affect
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from children import run_script
from document import header, write_document
from tables import table

from farstep.batch import EPISODE_KEYS, Batch, FinalObs
from farstep.errors import ClosedError
from farstep.head.tickets.records import FeedPlan
from farstep.head.tickets.tickets import Tickets
from farstep.workflow.delivery import Direct, LocalQueue, ZmqSender
from farstep.workflow.rows.partial_chunks import PartialChunks
from farstep.workflow.triggers import DataKeyTrigger, Dispatcher, Ledger, ObjectKeyTrigger, TimeTrigger

ACTORS = (4, 64, 256, 1024)
RECEIVER = """
import json, sys
from farstep.workflow.delivery import ZmqReceiver
from farstep.errors import ClosedError
receiver = ZmqReceiver(json.loads(sys.stdin.readline()))
try:
    while True:
        if (message := receiver.take(60.0)) is not None:
            receiver.done(message)
except ClosedError:
    receiver.close()
"""


@dataclass(kw_only=True)
class Args:
    """Microseconds of latency from a change to its consumer, and of CPU time per chunk."""

    only: Literal["latency", "per-chunk"] | None = None
    """Measure only latency or only CPU time; None: both."""
    firings: int = 2000
    chunks: int = 1024
    """Chunks per measurement of CPU time, at least."""
    repeats: int = 5
    """Measurements of CPU time per number of actors; the result is their median."""
    out: Path = Path(__file__).parent / "results"
    """Folder for triggers.json and triggers-per-chunk.json."""


def fire(dispatcher: Dispatcher, delivery: Any, actors: int, others: int, firings: int) -> list[float]:
    """Insert chunks of all actors in turn; returns microseconds of each chunk that fires the first trigger."""
    ledger = Ledger(["obs", "action", "reward"])
    for _ in range(others):
        dispatcher.add(TimeTrigger(10**9, unit="env_steps"), Direct(print))
        dispatcher.add(ObjectKeyTrigger("never"), Direct(print))
    found = []
    for number in range(firings + 100):
        began = time.perf_counter()
        ledger.wrote(number % actors, 16, 0)
        dispatcher.check(ledger)
        while dispatcher.outstanding("measured"):
            for name in delivery.finished(10.0):
                dispatcher.done(name)
        found.append((time.perf_counter() - began) * 1e6)
    return found[100:]


def direct(actors: int, others: int, firings: int) -> list[float]:
    dispatcher, calls = Dispatcher(), [0]

    def consumer(message: Any) -> None:
        calls[0] += 1

    dispatcher.add(DataKeyTrigger(n=1, size=16), Direct(consumer), trigger_id="measured")
    found = fire(dispatcher, None, actors, others, firings)
    assert calls[0] == firings + 100
    return found


def through_thread(firings: int) -> list[float]:
    dispatcher, queue = Dispatcher(), LocalQueue()

    def work() -> None:
        try:
            while True:
                if (message := queue.take(60.0)) is not None:
                    queue.done(message)
        except ClosedError:
            pass

    thread = threading.Thread(target=work)
    thread.start()
    dispatcher.add(DataKeyTrigger(n=1, size=16), queue, trigger_id="measured")
    found = fire(dispatcher, queue, 4, 1, firings)
    queue.close()
    thread.join()
    return found


def through_process(firings: int) -> list[float]:
    dispatcher, sender = Dispatcher(), ZmqSender()
    with subprocess.Popen([sys.executable, "-c", RECEIVER], stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(sender.invitation) + "\n")
        process.stdin.flush()
        dispatcher.add(DataKeyTrigger(n=1, size=16), sender, trigger_id="measured")
        found = fire(dispatcher, sender, 4, 1, firings)
        sender.close()
    return found


def replay(actors: int) -> Callable[[], int]:
    """A replay trigger that fires for every chunk; its consumer does not read the list of steps."""
    dispatcher, ledger = Dispatcher(), Ledger(["obs", "action", "reward"])
    dispatcher.add(DataKeyTrigger(n=1, size=16, consume=False, min_new=16), Direct(lambda message: None))

    def chunks() -> int:
        for actor in range(actors):
            ledger.wrote(actor, 16, 0)
            dispatcher.check(ledger)
        return actors

    return chunks


def parts(actors: int, n: Any) -> Callable[[], int]:
    """Chunks that arrive in two parts, each of which fires a stage; all first parts arrive before the second ones."""
    ledger, dispatcher, tickets = Ledger(["reward", "obs"]), Dispatcher(), Tickets(actors)
    ledger.members(range(actors))
    trigger = DataKeyTrigger(n, size=16, keys=(("reward",), ("obs",)))
    dispatcher.add(trigger, Direct(lambda message: None))
    ahead = PartialChunks(ledger, [trigger])
    nothing = np.zeros(0, np.int64)
    episodes = dict.fromkeys(EPISODE_KEYS, nothing)
    arrays = {"reward": np.zeros((16, 1))}
    batch = Batch(arrays, {}, None, FinalObs(nothing, nothing, None), episodes, np.zeros(1), np.ones(1, bool))
    tickets.open(None, actors, feed=FeedPlan(None, actors))
    order_of = {order.worker: order for order in tickets.grant(range(actors), 0)}

    def part(actor: int) -> None:
        seq = order_of[actor].seq
        ahead.void(tickets.voided())
        ahead.add(actor, seq, seq, 0, batch)
        dispatcher.check(ledger)

    def rest(actor: int) -> None:
        seq = order_of[actor].seq
        tickets.accept(actor, seq, 0, None)
        arrived = tickets.take_one(lambda worker: True, 0)
        assert arrived is not None
        ahead.void(tickets.voided())
        ledger.wrote(actor, 16, 0, ahead.stored(actor, seq))
        dispatcher.check(ledger)
        tickets.stored(arrived)
        tickets.consumed(actor, 1)
        order_of.update({order.worker: order for order in tickets.grant(range(actors), 0)})

    def chunks() -> int:
        for actor in range(actors):
            part(actor)
        for actor in range(actors):
            rest(actor)
        return actors

    return chunks


def rounds(actors: int, max_staleness: int | None) -> Callable[[], int]:
    """Batches of one chunk of every worker; after each chunk the head checks for a complete batch and grants tickets.
    Worker 0 is `max_staleness` rounds late."""
    tickets = Tickets(actors)
    tickets.open(max_staleness)
    waiting: list[Any] = []

    def chunks() -> int:
        waiting.extend(tickets.grant(range(actors), 0))
        late = [order for order in waiting if order.worker == 0]
        orders = [order for order in waiting if order.worker] + late
        waiting.clear()
        for order in orders:
            tickets.accept(order.worker, order.seq, 0, None)
            while (batch := tickets.take(0)) is not None:
                assert len(batch) == actors
                tickets.release()
            waiting.extend(tickets.grant(range(actors), 0))
        return len(orders)

    return chunks


def cpu_us(make: Callable[[], Callable[[], int]], args: Args) -> float:
    """Microseconds of CPU time per chunk: the median of `args.repeats` measurements."""
    found = []
    for _ in range(args.repeats):
        chunks = make()
        for _ in range(2):
            chunks()
        count, began = 0, time.process_time()
        while count < args.chunks:
            count += chunks()
        found.append((time.process_time() - began) / count * 1e6)
    return float(np.median(found))


PER_CHUNK: dict[str, Callable[[int], Callable[[], int]]] = {
    "replay trigger, fires for every chunk": replay,
    "chunks in two parts, a fragment of one actor": lambda actors: parts(actors, 1),
    "chunks in two parts, a fragment of all actors": lambda actors: parts(actors, "all"),
    "synchronous rounds": lambda actors: rounds(actors, None),
    "rounds with max_staleness=2, one worker late": lambda actors: rounds(actors, 2),
}


def main(args: Args) -> None:
    if args.only != "latency":
        found = {
            name: {str(actors): cpu_us(lambda: make(actors), args) for actors in ACTORS}
            for name, make in PER_CHUNK.items()
        }
        document = header("triggers.py") | {"cpu_microseconds_per_chunk": found}
        write_document(args.out / "triggers-per-chunk.json", document)
        print(per_chunk_summary(document))
    if args.only != "per-chunk":
        document = header("triggers.py") | {"microseconds": latency(args)}
        write_document(args.out / "triggers.json", document)
        print(summary(document))


def latency(args: Args) -> dict[str, dict[str, float]]:
    """Median and 95th percentile of the microseconds from a change to the return of its consumer."""
    cases = {f"call, {actors} actors, {1 + 2 * o} triggers": (actors, o) for actors in ACTORS for o in (0, 1, 5)}
    rows = {name: direct(actors, others, args.firings) for name, (actors, others) in cases.items()}
    rows["thread and back, 4 actors, 3 triggers"] = through_thread(args.firings)
    rows["process and back, 4 actors, 3 triggers"] = through_process(args.firings)
    return {
        name: {"median": float(np.median(found)), "p95": float(np.percentile(found, 95))}
        for name, found in rows.items()
    }


def summary(document: dict[str, Any]) -> str:
    """The table of latencies, in Markdown."""
    found = document["microseconds"]
    rows = [[_singular(name), f"{cell['median']:.0f}", f"{cell['p95']:.0f}"] for name, cell in found.items()]
    return table(["", "median, µs", "95th percentile, µs"], rows)


def _singular(name: str) -> str:
    """The name of a case in which "1 triggers" is "1 trigger"."""
    return name.replace(", 1 triggers", ", 1 trigger")


def per_chunk_summary(document: dict[str, Any]) -> str:
    """The table of CPU times, in Markdown."""
    found = document["cpu_microseconds_per_chunk"]
    rows = [[name, *(f"{us:.0f}" for us in cells.values())] for name, cells in found.items()]
    return table(["CPU time per chunk, µs", *(f"{actors} actors" for actors in ACTORS)], rows)


if __name__ == "__main__":
    run_script(lambda: main(tyro.cli(Args)))
