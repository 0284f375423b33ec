"""What a run is waiting for, in one sentence, with the numbers behind it and the remedy.

`diagnose` is a pure function of the counters of a run at two moments. It looks for the causes of `causes.py`, in their
order. Failures and causes of slow learning are independent of each other. Of the causes that slow a run down only the
first counts, since causes come before their consequences: if cores are too few, environments are slow, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from farstep.observe.diagnosis.causes import RULES
from farstep.observe.diagnosis.run_window import MIN_WINDOW_S, Window
from farstep.observe.run_status import percent


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What limits a run, with the numbers that show it.

    Attributes:
        cause: Name of the cause, such as `"slow environment"` or `"straggler"`; `"healthy"` if nothing stands out,
            `"unknown"` if there is too little data. docs/waiting.md lists them.
        text: The cause in one sentence.
        numbers: The numbers behind it, by name; shares are from 0 to 1.
        remedy: What to do; empty if nothing stands out.
        options_remedy: The remedy for a run of `farstep train`, which names its options; empty: `remedy` fits.
        is_problem: Whether to warn about it. False for `slow learner`, `replay ratio`, `lost node` and
            `replaced worker`, and for `slow policy` and `slow environment` while the learner waits for less than 95 %
            of the time. True for every other cause in docs/waiting.md.
    """

    cause: str
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    remedy: str = ""
    options_remedy: str = ""
    is_problem: bool = False

    def __str__(self) -> str:
        return f"{self.text} {self.remedy}".rstrip()


def diagnose(window: Window) -> Diagnosis:
    """Name what limits a run.

    Args:
        window: The counters at two moments.

    Returns:
        The most important cause, or that the run is healthy, or that there is too little data.
    """
    return all_diagnoses(window)[0]


def all_diagnoses(window: Window) -> list[Diagnosis]:
    """Return what `diagnose` does, then further causes that are independent of it."""
    return list(_causes(window)) or [_nothing_found(window)]


def with_options(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis with a remedy that names options of `farstep train` instead of arguments in Python."""
    return replace(diagnosis, remedy=diagnosis.options_remedy or diagnosis.remedy)


def _causes(window: Window) -> Iterator[Diagnosis]:
    for rule in RULES:
        slows = rule.group in ("limit", "time")
        if (slows and window.seconds < MIN_WINDOW_S) or (rule.group == "time" and not _knows_times(window)):
            return
        if (found := rule.find(window)) is not None:
            yield Diagnosis(
                cause=rule.cause,
                text=found.text,
                numbers=found.numbers,
                remedy=found.remedy or rule.remedy,
                options_remedy=found.options_remedy if found.remedy else rule.options_remedy,
                is_problem=found.is_problem,
            )
            if slows:
                return


def _knows_times(window: Window) -> bool:
    """Whether workers have reported at least half of the window; they report when a chunk is complete. A worker that is
    released between rollouts has nothing to report meanwhile."""
    reported = sum(sum(worker.values()) for worker in window.per_worker)
    held = window.seconds * window.alive
    if "slots" in window.after.stats:
        held = min(held, window.grown("slots", "held_seconds"))
    return reported > 0 and reported >= held / 2


def _nothing_found(window: Window) -> Diagnosis:
    if window.seconds < MIN_WINDOW_S:
        return Diagnosis(
            cause="unknown",
            text=f"Too little data: a diagnosis needs at least {MIN_WINDOW_S:.0f} s of the run.",
            numbers={"seconds": window.seconds},
        )
    if not _knows_times(window):
        text = f"Too little data: workers have completed few or no chunks in the last {window.seconds:.0f} s"
        if (chunk := window.after.slowest_chunk) is None:
            return Diagnosis(cause="unknown", text=f"{text}.", numbers={"seconds": window.seconds})
        return Diagnosis(
            cause="unknown",
            text=f"{text}; {chunk}.",
            numbers={"seconds": window.seconds, "steps_done": chunk.step, "steps_of_chunk": chunk.steps},
            remedy="If this is too slow: roll shorter chunks (steps), add workers or nodes, or make the environment "
            "faster.",
            options_remedy="If this is too slow: roll shorter chunks (--num-steps), add workers (--workers, on a "
            "cluster --workers-per-node or --nodes), or make the environment faster.",
        )
    return Diagnosis(
        cause="healthy",
        text=(
            f"Nothing stands out: the learner waits {percent(window.learner['wait'])} of its time for rollouts, and "
            f"workers spend {percent(window.workers['env'])} of theirs in environments, "
            f"{percent(window.workers['inference'])} in the policy and {percent(window.workers['tickets'])} waiting "
            "for the learner."
        ),
        numbers=_times(window),
    )


def _times(window: Window) -> dict[str, float]:
    learner = {f"time/learner/{part}": share for part, share in window.learner.items()}
    workers = {f"time/workers/{part}": share for part, share in window.workers.items()}
    return learner | workers | {"moving": window.on_the_way, "cores_wanted": sum(window.cores_wanted.values())}
