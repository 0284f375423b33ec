"""The rules by which causes are recognized, each a function of a window; `causes.py` has the table of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from farstep.errors import counted
from farstep.observe.diagnosis.run_window import MIN_WINDOW_S, Window
from farstep.observe.run_status import data_size, percent

_LIMITS = 0.8
"""Share of time from which something limits a run: without it the run would be up to five times as fast."""
_LIMITS_MUCH = 0.95
"""Waiting for rollouts is a problem from this share of the learner's time on: workers are 20 times as slow."""
_WASTE = 0.3
"""Share of time from which waiting that another setting avoids is worth reporting."""
UPDATES, _FIRST_UPDATES = 20, 5
"""Latest updates, versions and chunks over which learning is judged; updates that are enough for the mean of a metric:
a run of 60,000 steps with PPO's default of 4,096 rows has only 15 updates."""
_MEMORY_LEFT, _MEMORY_S, _MIN_GROWTH_BYTES = 0.05, 600.0, 256 * 2**20
"""Share of memory that must be left; seconds for which it must last; smallest growth in a window that counts."""
_RESTARTS = 3
"""Restarts of one worker within ten minutes; `restart_budget`, by default 10, ends the run."""
_FIRED, _REPLACED = 100, 10
"""A trigger should have fired before others fired this often, or the buffer's rows were replaced this often."""
_SERIAL = 0.2
"""Share of time for which each side of a buffer waits while they alternate; 0.5 if they never work at the same time."""
_OVERCOMMITTED = 2.0
"""Runnable threads per core: threads wait for a core half of the time in which they could run."""
_SKIPPED, _ESS, _DIVERGED = 0.5, 0.3, 0.5
"""Skipped optimizer steps, effective sample size (both shares); divergence in nats."""
_CLIPPED, _CLIPPED_FRESH = 0.5, 0.25
"""Share of rows that clipping excludes; the most that fresh rows lose in a run that learns."""
_ALWAYS = 0.95
"""Share of the opportunities to pull that a threshold should leave out at least sometimes."""
_STALE = 0.1
"""Share of chunks dropped as stale."""
_SLOW_PARTS = {
    "prepare": "Collect fewer or smaller observations, or longer rollouts.",
    "publish": "Publish less often; in a workflow, publish waits until no consumer updates, so make updates shorter.",
}
"""Remedies for a learner that spends most of its time in such a part."""
_SLOWER = 2.0
"""How much longer a straggler takes than the median of the other workers."""


@dataclass(frozen=True)
class Finding:
    """What a rule has found."""

    text: str
    numbers: Mapping[str, float]
    remedy: str = ""
    """Instead of the rule's remedy, if this case has one of its own."""
    options_remedy: str = ""
    """The same for a run of `farstep train`; empty: `remedy` fits."""
    is_problem: bool = True
    """See `Diagnosis.is_problem`."""


# ---- failures ----


def memory(window: Window) -> Finding | None:
    """Little memory is left, or the run's processes will have used it up soon."""
    machine = window.after.machine
    if machine is None or not math.isfinite(machine.memory_bytes):
        return None
    left, total, growth = machine.memory_left_bytes, machine.memory_bytes, window.memory_growth
    grown = sum(growth.values()) - _buffer_growth(window)
    rate = grown / window.seconds if window.seconds >= MIN_WINDOW_S and window.before.stats.get("steps") else 0.0
    numbers = {"left_bytes": left, "total_bytes": total, "bytes_per_second": rate}
    if left < _MEMORY_LEFT * total:
        return Finding(f"Memory runs out: {data_size(left)} of {data_size(total)} is left.", numbers)
    if grown < _MIN_GROWTH_BYTES or rate * _MEMORY_S < left:
        return None
    fastest = max(growth, key=lambda name: growth[name])
    return Finding(
        f"Memory runs out in {_duration(left / rate)}: {data_size(left)} is left, and the run takes "
        f"{data_size(rate)} more per second, most of it in {fastest}.",
        numbers | {"seconds_left": left / rate},
    )


def _buffer_growth(window: Window) -> float:
    """Bytes by which the rows of a replay buffer have grown; they stop at its capacity."""
    buffer = window.after.stats.get("buffer")
    return buffer["bytes"] * max(0.0, window.grown("buffer", "fill")) / buffer["capacity"] if buffer else 0.0


def restarts(window: Window) -> Finding | None:
    """One worker was restarted several times."""
    restarts = window.after.restarts or {}
    worker = max(restarts, key=lambda worker: restarts[worker], default=None)
    if worker is None or restarts[worker] < _RESTARTS:
        return None
    text = f"Worker {worker} was restarted {restarts[worker]} times within ten minutes."
    return Finding(text, {"worker": worker, "restarts": restarts[worker]})


def silent_trigger(window: Window) -> Finding | None:
    """A trigger has never fired, although others have, or the buffer's rows were replaced."""
    triggers = window.after.stats.get("workflow", {})
    capacity = window.after.stats.get("buffer", {}).get("capacity", math.inf)
    replaced = window.after.stats.get("steps", 0) / capacity
    most = max((counts["fired"] for counts in triggers.values()), default=0)
    for name, counts in triggers.items():
        if counts["fired"] or counts["waits_for"] is None or (most < _FIRED and replaced < _REPLACED):
            continue
        others = f"others fired up to {most:,} times" if most else f"the buffer was filled {replaced:.0f} times"
        text = f"Trigger {name!r}, {counts['waits_for']}, has never fired, while {others}."
        return Finding(text, {"fired": 0, "others_fired": most})
    return None


def not_finite(window: Window) -> Finding | None:
    """Most optimizer steps were skipped, because their gradients were not finite."""
    for name in ("train/actor/skipped_steps", "train/critic/skipped_steps"):
        share = _judged(window, name)
        if share is not None and share > _SKIPPED:
            text = f"{percent(share)} of the optimizer steps were skipped, because their gradients were not finite."
            return Finding(text, {name: share})
    return None


# ---- learning ----


def _judged(window: Window, name: str) -> float | None:
    """The mean of a metric, if there are enough updates."""
    return window.mean(name) if len(window.after.metrics) >= _FIRST_UPDATES else None


def clip_range(window: Window) -> Finding | None:
    """Clipping excludes most rows; a quarter is enough if the loss clips around weights that workers hardly replace."""
    share = _judged(window, "train/actor/clip_fraction")
    if share is None:
        return None
    lag = window.mean("lag/versions_mean") or 0.0
    numbers = {"train/actor/clip_fraction": share, "lag/versions_mean": lag}
    excluded = f"Clipping excludes {percent(share)} of the rows from the gradient (train/actor/clip_fraction)"
    clips_around_old = lag >= 1 and not window.mean("train/actor/behave_k3")
    pulls, versions, _ = _pulls(window, _FIRST_UPDATES)
    if clips_around_old and share > (_CLIPPED_FRESH if pulls <= (1 - _ALWAYS) * versions else _CLIPPED):
        return Finding(
            f"{excluded}: workers act with weights that are {lag:.1f} versions old, and the loss clips around those, "
            "so the learner stalls at its clip range.",
            numbers,
            "Use the decoupled loss (--decoupled), or a smaller --kl-threshold, with which workers pull more often.",
        )
    if share > _CLIPPED:
        return Finding(f"{excluded}, so the learner stalls at its clip range.", numbers)
    return None


def off_policy(window: Window) -> Finding | None:
    """The policy that acted is far from the learner's."""
    ess, divergence = _judged(window, "train/actor/ess"), _judged(window, "train/actor/behave_k3")
    if ess is not None and ess < _ESS:
        text = (
            f"The effective sample size is {percent(ess)} of the rows (train/actor/ess), because the policy that "
            "acted differs from the learner's."
        )
        return Finding(text, {"train/actor/ess": ess})
    if divergence is not None and divergence > _DIVERGED:
        text = (
            f"The KL divergence between the learner's policy and the policy that acted is {divergence:.2g} nats "
            "(train/actor/behave_k3)."
        )
        return Finding(text, {"train/actor/behave_k3": divergence})
    return None


def threshold_without_effect(window: Window) -> Finding | None:
    """Workers with a threshold pull no version, or every version."""
    threshold = window.after.kl_threshold
    if not threshold or window.mean("train/critic/warmup") is not None:
        return None
    pulls, versions, chunks = _pulls(window, UPDATES)
    chances = min(versions, chunks)
    numbers = {"pulls_per_worker": pulls, "versions": versions, "kl_threshold": threshold}
    if chances < UPDATES - 1:  # N updates have N - 1 versions between them
        return None
    if not pulls:
        if clip_range(window) is not None:  # the policy cannot change
            return None
        return Finding(
            f"No worker has pulled weights for {versions:.0f} versions: the policy hardly changes, or kl_threshold="
            f"{threshold:g} is too large.",
            numbers,
            "Lower kl_threshold; if the return does not change either, raise the learning rate.",
            "Lower --kl-threshold; if the return does not change either, raise --learning-rate.",
        )
    if pulls >= _ALWAYS * chances:
        return Finding(
            f"Workers pull weights at {percent(pulls / chances)} of their opportunities: kl_threshold={threshold:g} "
            "saves almost nothing, and probes are sent in addition.",
            numbers,
            "Raise kl_threshold above the divergence of one update (sync/divergence_mean), or do not set it.",
            "Raise --kl-threshold above the divergence of one update (sync/divergence_mean), or do not set it.",
        )
    return None


def _pulls(window: Window, updates: int) -> tuple[float, float, float]:
    """Pulls per worker, versions, and chunks per worker: between the updates if the metrics of enough are known."""
    metrics = window.after.metrics
    if len(metrics) >= updates and "sync/pulls_per_worker" in metrics[0]:
        pulls = metrics[-1]["sync/pulls_per_worker"] - metrics[0]["sync/pulls_per_worker"]
        return pulls, len(metrics) - 1, len(metrics) - 1
    pulls, chunks = (window.grown(*path) / window.alive for path in (("pulls", "total"), ("chunks",)))
    return pulls, window.grown("versions", "current"), chunks


# ---- what slows a run down ----


def too_many_threads(window: Window) -> Finding | None:
    """Threads compete for cores, and would not if each process ran one at a time."""
    wanted, cores = window.cores_wanted, _cores(window)
    if sum(wanted.values()) <= _OVERCOMMITTED * cores or sum(_one_thread_each(window)) > _OVERCOMMITTED * cores:
        return None
    most = max(wanted, key=lambda name: wanted[name])
    return Finding(
        f"{sum(wanted.values()):.1f} threads compete for {cores} cores, since processes run several threads each; "
        f"{most} runs {wanted[most]:.1f}.",
        {"threads": sum(wanted.values()), "cores": cores, "most_threads": wanted[most]},
    )


def too_few_cores(window: Window) -> Finding | None:
    """Processes compete for cores, even if each ran one thread at a time."""
    wanted, cores = _one_thread_each(window), _cores(window)
    if sum(wanted) <= _OVERCOMMITTED * cores:
        return None
    return Finding(
        f"{len(wanted)} processes of this run compete for {cores} core{'s' * (cores > 1)}: on average "
        f"{sum(wanted):.1f} of them want to run.",
        {"processes": len(wanted), "wanted": sum(wanted), "cores": cores},
    )


def _one_thread_each(window: Window) -> list[float]:
    """How many cores the local processes would want if each ran one thread at a time."""
    return [min(1.0, wanted) for wanted in window.cores_wanted.values()]


def _cores(window: Window) -> int:
    return window.after.machine.cores if window.after.machine is not None else 1


def replay_ratio(window: Window) -> Finding | None:
    """One side waits so that a replay learner of farstep keeps its ratio of updates to steps."""
    numbers = _blocked(window)
    insert, sample = numbers["blocked_insert"], numbers["blocked_sample"]
    if window.mean("replay/rows") is None or max(insert, sample) < _LIMITS:
        return None
    if insert >= sample:
        text = f"The learner is the bottleneck: workers wait {percent(insert)} of the time for its updates"
    else:
        text = f"Workers are the bottleneck: the learner waits {percent(sample)} of the time for their rows"
    return Finding(f"{text}, to keep the ratio of updates to steps.", numbers, is_problem=False)


def limiter_blocks(window: Window) -> Finding | None:
    """The limiter makes inserting or sampling wait for most of the time."""
    numbers = _blocked(window)
    insert, sample = numbers["blocked_insert"], numbers["blocked_sample"]
    if insert >= max(sample, _LIMITS):
        return Finding(
            f"The buffer's limiter makes workers wait {percent(insert)} of the time: the learner samples too few rows "
            "per row that is inserted.",
            numbers,
            "Lower samples_per_insert, raise max_diff (error_buffer), or make updates faster.",
        )
    if sample >= _LIMITS:
        return Finding(
            f"The buffer's limiter makes the learner wait {percent(sample)} of the time: workers insert too few rows "
            "per row that is sampled.",
            numbers,
            "Raise samples_per_insert, lower min_size or min_diff, or add workers.",
        )
    return None


def _blocked(window: Window) -> dict[str, float]:
    """Shares of the time for which the limiter made each side wait, and its ratio."""
    insert, sample = (window.grown("limiter", "blocked", side) / window.seconds for side in ("insert", "sample"))
    ratio = window.after.stats.get("limiter", {}).get("ratio", 0.0)
    return {"blocked_insert": insert, "blocked_sample": sample, "ratio": ratio}


def waiting_for_slots(window: Window) -> Finding | None:
    """Other runs use the slots of the coordinator."""
    share = window.grown("slots", "waited_seconds") / window.seconds
    if share < _WASTE:
        return None
    return Finding(
        f"The run waits {percent(share)} of the time for slots of its coordinator, which other runs are using.",
        {"slots/waited": share},
    )


def small_buffer(window: Window) -> Finding | None:
    """Chunks wait for room in the buffer, and the learner waits for rows at other times."""
    full, waits = window.grown("buffer", "full_s") / window.seconds, window.learner["wait"]
    if min(full, waits) < _SERIAL:
        return None
    rows = window.after.stats["buffer"]["capacity"]
    return Finding(
        f"The buffer is too small: chunks wait {percent(full)} of the time for room among its {rows:,} rows, and the "
        f"learner waits {percent(waits)} of the time for rows.",
        {"full": full, "time/learner/wait": waits, "capacity": rows},
    )


def dropped_as_stale(window: Window) -> Finding | None:
    """Chunks are dropped as stale."""
    dropped, delivered = window.grown("dropped", "stale"), window.grown("chunks")
    share = dropped / (dropped + delivered) if dropped else 0.0
    if dropped < UPDATES or share < _STALE:
        return None
    return Finding(
        f"{percent(share)} of the chunks are dropped as stale: versions are published faster than chunks are rolled.",
        {"stale": dropped, "delivered": delivered},
    )


def lost_node(window: Window) -> Finding | None:
    """Batches have waited for the workers of a lost node."""
    wait, tickets = window.learner["wait"], window.workers["tickets"]
    if not window.after.lost_node or min(wait, tickets) < _WASTE:
        return None
    return Finding(
        f"Batches waited for the workers of a lost node: in the last {_duration(window.seconds)}, the learner waited "
        f"{percent(wait)} of the time, and the other workers {percent(tickets)}.",
        {"time/learner/wait": wait, "time/workers/tickets": tickets},
        is_problem=False,  # it passes; the loss of the node is an event
    )


def replaced_worker(window: Window) -> Finding | None:
    """Batches wait for a worker that was lost and is started again."""
    restarts, wait, tickets = window.grown("workers", "restarts"), window.learner["wait"], window.workers["tickets"]
    if not restarts or min(wait, tickets) < _WASTE:
        return None
    return Finding(
        f"Batches wait for workers that are restarted ({counted(int(restarts), 'restart')} in the last "
        f"{_duration(window.seconds)}): the learner waits {percent(wait)} of the time, and the other workers "
        f"{percent(tickets)}.",
        {"restarts": restarts, "time/learner/wait": wait, "time/workers/tickets": tickets},
        is_problem=False,  # it passes; the loss of the worker is an event, and repeated restarts are a failure
    )


def straggler(window: Window) -> Finding | None:
    """The learner and all other workers wait for one worker."""
    reported = {worker: sum(times.values()) for worker, times in enumerate(window.per_worker)}
    # Workers that joined or left during the window cannot be compared with the others.
    busy = {
        worker: 1 - window.per_worker[worker]["tickets"] / seconds
        for worker, seconds in reported.items()
        if seconds >= window.seconds / 2
    }
    if len(busy) < 2:
        return None
    slowest = max(busy, key=lambda worker: busy[worker])
    others = [worker for worker in busy if worker != slowest]
    usual = median(busy[worker] for worker in others)
    idle = _share([window.per_worker[worker] for worker in others], "tickets")
    if window.learner["wait"] < _WASTE or idle < _WASTE or busy[slowest] < _SLOWER * usual:
        return None
    longer = f"takes {busy[slowest] / usual:.1f} times as long as" if usual else "is busy all of the time, unlike"
    return Finding(
        f"The run waits for worker {slowest}: it {longer} the others, which wait {percent(idle)} of their time.",
        {"worker": slowest, "busy": busy[slowest], "others_busy": usual, "others_wait": idle},
    )


def _share(workers: list[dict[str, float]], part: str) -> float:
    total = sum(sum(worker.values()) for worker in workers)
    return sum(worker[part] for worker in workers) / total if total else 0.0


def both_wait(window: Window) -> Finding | None:
    """Workers wait for the learner, and the learner for workers, although no worker is slower than the others."""
    wait, tickets = window.learner["wait"], window.workers["tickets"]
    if wait + tickets < 1 + _WASTE or min(wait, tickets) < _WASTE:
        return None
    return Finding(
        f"Workers and learner wait for each other: workers {percent(tickets)} and the learner {percent(wait)} of the "
        "time.",
        {"time/learner/wait": wait, "time/workers/tickets": tickets},
    )


def slow_network(window: Window) -> Finding | None:
    """Sending rollouts and weights takes longer than rolling."""
    workers = window.workers
    moving, rolling = workers["send"] + workers["weights"] + window.on_the_way, workers["env"] + workers["inference"]
    if window.learner["wait"] < _WASTE or moving < max(_WASTE, rolling):
        return None
    rate = window.grown("bytes", "rollouts_received") / window.seconds
    return Finding(
        f"The network is slow: sending rollouts and weights takes {percent(moving)} of the workers' time, at "
        f"{data_size(rate)} of rollouts per second, and rolling takes {percent(rolling)}.",
        {"moving": moving, "rolling": rolling, "bytes_per_second": rate, "time/learner/wait": window.learner["wait"]},
    )


def slow_learner(window: Window) -> Finding | None:
    """Workers wait for the learner for most of the time, and the learner hardly waits."""
    wait, tickets = window.learner["wait"], window.workers["tickets"]
    if tickets < _LIMITS or wait > 1 - _LIMITS:
        return None
    part = max(("update", "prepare", "publish"), key=lambda part: window.learner.get(part, 0.0))
    does = {"update": "updates", "prepare": "prepares batches", "publish": "publishes weights"}[part]
    return Finding(
        f"The learner is the bottleneck: it {does} {percent(window.learner[part])} of the time, while workers wait for "
        f"it {percent(tickets)} of theirs.",
        {"time/learner/wait": wait, f"time/learner/{part}": window.learner[part], "time/workers/tickets": tickets},
        _SLOW_PARTS.get(part, ""),
        is_problem=False,  # with several epochs per update and cheap environments it always is
    )


def slow_policy(window: Window) -> Finding | None:
    """The learner waits for most of the time, and workers spend most of theirs in `act`."""
    return _rolling(window, "inference", "in the policy", "env")


def slow_environment(window: Window) -> Finding | None:
    """The learner waits for most of the time, and workers spend most of theirs in environments."""
    return _rolling(window, "env", "in environments", "inference")


def _rolling(window: Window, part: str, where: str, other: str) -> Finding | None:
    wait, share = window.learner["wait"], window.workers[part]
    if wait < _LIMITS or share < window.workers[other] or share < 1 - window.workers["tickets"] - _WASTE:
        return None
    return Finding(
        f"The learner waits {percent(wait)} of the time for rollouts, and workers spend {percent(share)} of theirs "
        f"{where}.",
        {"time/learner/wait": wait, f"time/workers/{part}": share, f"time/workers/{other}": window.workers[other]},
        is_problem=wait >= _LIMITS_MUCH,
    )


# ---- texts ----


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} s"
