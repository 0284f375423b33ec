"""How long it takes from something that happened to the consumer it concerns: in the same thread, in another, in
another process.

    python benchmarks/triggers.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from children import run_script
from document import header, write_document
from tables import table

from farstep.buffer.passers import Direct, LocalQueue, ZmqPasser
from farstep.buffer.triggers import DataKeyTrigger, Dispatcher, Ledger, ObjectKeyTrigger, TimeTrigger
from farstep.errors import ClosedError

RECEIVER = """
import json, sys
from farstep.buffer.passers import ZmqReceiver
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
    """Microseconds from a change to its consumer."""

    firings: int = 2000
    out: Path = Path(__file__).parent / "results" / "triggers.json"


def fire(dispatcher: Dispatcher, passer: Any, actors: int, others: int, firings: int) -> list[float]:
    """Chunks of every actor in turn; microseconds of each that makes the first trigger fire."""
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
            for name in passer.finished(10.0):
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
    dispatcher, passer = Dispatcher(), ZmqPasser()
    with subprocess.Popen([sys.executable, "-c", RECEIVER], stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(passer.invitation) + "\n")
        process.stdin.flush()
        dispatcher.add(DataKeyTrigger(n=1, size=16), passer, trigger_id="measured")
        found = fire(dispatcher, passer, 4, 1, firings)
        passer.close()
    return found


def main(args: Args) -> None:
    cases = {
        f"call, {actors} actors, {1 + 2 * o} triggers": (actors, o) for actors in (4, 64, 256, 1024) for o in (0, 1, 5)
    }
    rows = {name: direct(actors, others, args.firings) for name, (actors, others) in cases.items()}
    rows["thread and back, 4 actors, 3 triggers"] = through_thread(args.firings)
    rows["process and back, 4 actors, 3 triggers"] = through_process(args.firings)
    document = header("triggers.py") | {"microseconds": {}}
    for name, found in rows.items():
        median, high = float(np.median(found)), float(np.percentile(found, 95))
        document["microseconds"][name] = {"median": median, "p95": high}  # type: ignore[index]
    write_document(args.out, document)
    print(summary(document))


def summary(document: dict[str, Any]) -> str:
    """In Markdown."""
    found = document["microseconds"]
    rows = [[name, f"{cell['median']:.0f}", f"{cell['p95']:.0f}"] for name, cell in found.items()]
    return table(["", "median, µs", "95th percentile, µs"], rows)


if __name__ == "__main__":
    run_script(lambda: main(tyro.cli(Args)))
