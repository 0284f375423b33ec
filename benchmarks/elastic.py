"""What elastic workers save, and what they cost: slots released between rollouts, starts, adaptive batches, sharing.

    python benchmarks/elastic.py                                   # all parts; continues where it was stopped
    python benchmarks/elastic.py --parts held backends --minutes 9
    python benchmarks/elastic.py --parts batch --quick             # small, to try it; results go to benchmarks/runs
    python benchmarks/elastic.py --show benchmarks/results/elastic.json  # only tables and plots

held: slot-seconds, update latency and CPU time of the same PPO with released workers, with held workers, and with Ray
actors that are held for the whole run (skipped if Ray is not installed); and of the same SAC. For PPO, the cost of an
environment step is chosen on this machine so that sampling takes as long as learning. PPO whose updates use released
and held workers in turn, in one process, shows what releasing costs more precisely.
backends: seconds until the first batch by start method, and the wait for the first step after each update.
batch: PPO with up to 32 workers by a scaling rule against 4, 16 and 32 workers; return over time and slot-seconds.
shared: update times of two workloads on the same cores, with a coordinator, against one alone.
prewarm (only if named): the wait for workers that start, if they are requested at the end of an update or before it.
gpu (only if named): GPU-seconds and update times of PPO that holds the GPU for the whole run, or only during updates.

Cases take turns, in reverse order every other round. Each is a process of its own (`contenders/elastic_farstep.py` and
`contenders/elastic_ray.py`). Runs that are in the results file are not repeated.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from children import run_script
from cpu_meter import CpuMeter
from document import check_machine, continued, write_document
from elastic_tables import (
    ALONE,
    GPU,
    HELD,
    IN_TURN,
    LONGER,
    PARTS,
    PREWARM,
    PREWARMED,
    RAY,
    RELEASED,
    SAC_HELD,
    SAC_RAY,
    SAC_RELEASED,
    draw,
    page,
)
from roster import BENCHMARKS
from runner import last_line, last_report, run_command
from trainings import RUNS
from versions import versions_of

import farstep
from farstep.launch.daemon.criu import working_criu

ON_FARSTEP, ON_RAY = "elastic_farstep.py", "elastic_ray.py"
IMAGES = BENCHMARKS.parent / "docs" / "images"
TIMEOUT_S = 600.0
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One process to run in each round."""

    part: str
    name: str
    options: dict[str, Any]
    script: str = ON_FARSTEP
    rounds: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured; the defaults are for 16 cores."""

    workers: int = max(1, min(16, CORES))
    """Workers of the part held."""
    updates: int = 40
    rounds: int = 3
    """Rounds of held and backends, and seeds of batch."""
    work: dict[str, Any] = field(default_factory=dict)
    """Options of `Workload` in the parts held and shared."""
    sac_steps: int = 6_000
    start_workers: int = 4
    """Workers of the part backends."""
    repeats: int = 20
    """Updates of a round of the part backends."""
    updates_s: tuple[float, ...] = (0.05, 0.5)
    """Lengths of these updates."""
    prewarm_s: dict[str, float] = field(default_factory=lambda: {"cold": 6.0, "zygote": 0.5, "criu": 1.0})
    """Lengths of the updates of the part prewarm, by how workers start; most are longer than the start."""
    prewarm_repeats: int = 5
    """Predicted updates of a round of the part prewarm."""
    reconnect_s: float = 4.5
    """Length of updates after which workers have to reconnect over TCP."""
    fixed: tuple[int, ...] = (4, 16, 32)
    """Fixed numbers of workers of the part batch; rules use the range from the first to the last."""
    seconds: float = 45.0
    """Time limit of a run of the part batch."""
    every: int = 12
    """Updates after which the schedule adds workers."""
    shared_workers: int = max(1, min(8, CORES - 1))
    shared_seconds: float = 25.0
    shared_rounds: int = 4
    shared_steps: int = 128
    """Steps per rollout in the part shared."""
    shared_factors: tuple[int, ...] = (1, 4)
    """Factors by which its rollouts and updates are longer."""
    hidden: tuple[tuple[int, ...], ...] = ((64, 64), (2048, 2048), (5792, 5792))
    """Hidden layers of the networks of the part gpu."""


QUICK = Sizes(
    workers=min(2, CORES),
    updates=5,
    rounds=1,
    work={"num_steps": 32, "update_epochs": 4},
    sac_steps=600,
    start_workers=2,
    repeats=5,
    updates_s=(0.05,),
    prewarm_s={"cold": 1.0, "zygote": 0.2, "criu": 0.5},
    prewarm_repeats=2,
    reconnect_s=0.2,
    fixed=(1, 2, 4),
    seconds=4.0,
    every=3,
    shared_workers=1,
    shared_seconds=3.0,
    shared_steps=32,
    shared_factors=(1,),
    shared_rounds=1,
    hidden=((64, 64),),
)


def held(sizes: Sizes, step_ms: float) -> Iterator[Case]:
    work = {"workers": sizes.workers, "step_ms": step_ms, **sizes.work}
    common = {"workload": work, "updates": sizes.updates, "traced": 6}
    for name, release_idle in ((RELEASED, True), (HELD, False)):
        options = {"kind": "ppo", "release_idle": release_idle, **common}
        yield Case(part="held", name=name, options=options, rounds=sizes.rounds)
    options = {"kind": "in-turn", "workload": work, "updates": 2 * sizes.updates}
    yield Case(part="held", name=IN_TURN, options=options, rounds=sizes.rounds)
    has_ray = importlib.util.find_spec("ray") is not None
    if has_ray:
        yield Case(part="held", name=RAY, options={"kind": "ppo", **common}, script=ON_RAY, rounds=sizes.rounds)
    else:
        print("held: Ray actors are skipped, because Ray is not installed here (pip install 'farstep[ray]')")
    work = {"workers": sizes.workers, "envs_per_worker": 1, "env": "Pendulum-v1", "step_ms": 1.0}
    sac = {"kind": "sac", "workload": work, "total_steps": sizes.sac_steps, "learning_starts": 200}
    sac |= {"updates_per_step": 0.5, "seconds_limit": 60.0}
    for name, release_idle in ((SAC_RELEASED, True), (SAC_HELD, False)):
        options = {**sac, "release_idle": release_idle}
        yield Case(part="held", name=name, options=options, rounds=sizes.rounds)
    if has_ray:
        yield Case(part="held", name=SAC_RAY, options=sac, script=ON_RAY, rounds=sizes.rounds)


def backends(sizes: Sizes) -> Iterator[Case]:
    common = {"workers": sizes.start_workers}
    for method in ("cold", "zygote"):
        options = {"kind": "first-batch", "start_method": method, **common}
        yield Case(part="backends", name=f"first batch, {method}", options=options, rounds=max(1, 2 * sizes.rounds - 1))
    for method in ("cold", "zygote"):
        options = {"kind": "restarts", "start_method": method, "repeats": min(5, sizes.repeats), **common}
        yield Case(part="backends", name=f"restart, {method}", options=options, rounds=sizes.rounds)
    for update_s in sizes.updates_s:
        for transport in ("shm", "tcp"):
            for how in ("held", "released", "prewarmed", "parked"):
                options = {"kind": "invocations", "how": how, "transport": transport, "update_s": update_s}
                options |= {"repeats": sizes.repeats, **common}
                name = f"{how}, {transport}, {update_s:g} s"
                yield Case(part="backends", name=name, options=options, rounds=sizes.rounds)
    for update_s in sizes.updates_s if has_criu("backends") else ():
        options = {"kind": "invocations", "how": "parked", "transport": "criu", "update_s": update_s}
        options |= {"repeats": sizes.repeats, **common}
        yield Case(part="backends", name=f"parked, criu, {update_s:g} s", options=options, rounds=sizes.rounds)


def prewarm(sizes: Sizes) -> Iterator[Case]:
    common = {"workers": sizes.start_workers, "repeats": sizes.prewarm_repeats}
    for method, update_s in sizes.prewarm_s.items():
        if method == "criu" and not has_criu(PREWARM):
            continue
        for name, is_prewarmed in ((method, False), (f"{method}{PREWARMED}", True)):
            options = {"kind": "starts", "method": method, "prewarm": is_prewarmed, "update_s": update_s, **common}
            yield Case(part=PREWARM, name=name, options=options, rounds=sizes.rounds)
    for name, how in (("reconnect, tcp", "released"), (f"reconnect, tcp{PREWARMED}", "prewarmed")):
        options = {"kind": "invocations", "how": how, "transport": "tcp", "update_s": sizes.reconnect_s, **common}
        yield Case(part=PREWARM, name=name, options=options, rounds=sizes.rounds)


def has_criu(part: str) -> bool:
    """Whether criu works here; if not, say why."""
    try:
        working_criu().close()
    except farstep.LaunchError as error:
        print(f"{part}: criu is skipped: {error}")
        return False
    return True


def batch(sizes: Sizes, task: str) -> Iterator[Case]:
    first, last = sizes.fixed[0], sizes.fixed[-1]
    rules: dict[str, tuple[int, str | None]] = {
        f"{number} worker" + "s" * (number > 1): (number, None) for number in sizes.fixed
    }
    rules["schedule"] = last, f"schedule:{first}:{last}:{first}:{sizes.every}"
    rules["noise"] = last, "noise"
    for name, (workers, scaling) in rules.items():
        work = {"workers": workers, "envs_per_worker": 1, "env": task, "step_ms": 1.0, "cost": "sleep"}
        work |= {"minibatch_size": 128}
        options = {"kind": "adaptive", "workload": work, "scaling": scaling, "seconds_limit": sizes.seconds}
        options |= {"target": {"CartPole-v1": 475.0, "LunarLander-v3": 200.0}[task]}
        yield Case(part="batch", name=name, options=options, rounds=sizes.rounds)


def shared(sizes: Sizes, calibration: dict[str, float]) -> Iterator[Case]:
    workers = sizes.shared_workers
    work = {"workers": workers, "step_ms": calibration["step_ms"], **sizes.work}
    common = {"kind": "shared", "workload": work, "seconds": sizes.shared_seconds, "cores": workers + 1}
    settings = [("alone", 1, workers), ("two, slots for both", 2, 2 * workers), ("two, slots for one", 2, workers)]
    for factor in sizes.shared_factors:
        workload = {"workload": {**work, "num_steps": factor * sizes.shared_steps}, "factor": factor}
        for name, runs, slots in settings:
            name += LONGER * (factor > 1)
            options = {**common, **workload, "runs": runs, "slots": slots, "release_idle": True}
            yield Case(part="shared", name=name, options=options, rounds=sizes.shared_rounds)


def gpu(sizes: Sizes) -> Iterator[Case]:
    for hidden in sizes.hidden:
        work = {"workers": sizes.shared_workers, "step_ms": 1.0, "hidden": list(hidden), **sizes.work}
        for name, release_device in ((RELEASED, True), (HELD, False)):
            options = {
                "kind": "gpu",
                "release_device": release_device,
                "workload": work,
                "updates": min(20, sizes.updates),
            }
            options |= {"seconds_limit": 20.0}
            yield Case(part=GPU, name=f"{name}, {hidden[0]}", options=options, rounds=min(2, sizes.rounds))


def offset_s(case: Case, number: int, calibration: dict[str, float]) -> float:
    """When the second workload starts: rounds are spread over an update, since the phases stay as they start."""
    return 2 * case.options["factor"] * calibration["learn_s"] * (number - 0.5) / case.rounds


def main() -> int:
    options = parse()
    if options.show:
        finish(json.loads(options.show.read_text()), options)
        return 0
    sizes = QUICK if options.quick else Sizes()
    name = f"elastic-{options.parts[0]}" if len(options.parts) == 1 and options.parts[0] in ALONE else "elastic"
    out = options.out or (RUNS / f"{name}-quick.json" if options.quick else BENCHMARKS / "results" / f"{name}.json")
    document = continued(out, "elastic.py")
    check_machine(document, out)
    found = json.loads(json.dumps(asdict(sizes)))
    if not document.setdefault("sizes", found).items() <= found.items():  # older results lack sizes of later parts
        raise SystemExit(f"{out} was measured with other sizes; use another --out")
    document.setdefault("versions", versions_of("farstep", "torch", "numpy", "gymnasium", "ray"))
    complete = Sitting(document, out, options).measure(options.parts, sizes, options.task)
    finish(document, options)
    print(f"written: {out}" if complete else "some runs are missing; run the same command again to continue")
    return 0 if complete else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=(*PARTS, PREWARM, GPU), default=list(PARTS), help="parts to measure"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, for two cores; each part takes a minute")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="run only cases with these names")
    parser.add_argument("--task", choices=("CartPole-v1", "LunarLander-v3"), default="CartPole-v1", help="of batch")
    parser.add_argument("--minutes", type=float, help="start no run after this time")
    parser.add_argument(
        "--out",
        type=Path,
        help="default: elastic.json, or elastic-PART.json if only batch, gpu or prewarm is named; --quick: in runs/",
    )
    parser.add_argument("--images", type=Path, help="folder for plots (default: docs/images; with --quick: none)")
    parser.add_argument("--show", type=Path, metavar="FILE", help="only print tables and draw plots of these results")
    return parser.parse_args()


class Sitting:
    """Runs the missing cases one after the other, and stores the result of each."""

    def __init__(self, document: dict[str, Any], out: Path, options: argparse.Namespace) -> None:
        self._document, self._out, self._only = document, out, options.only
        self._end = float("inf") if options.minutes is None else time.monotonic() + 60 * options.minutes

    def measure(self, parts: list[str], sizes: Sizes, task: str) -> bool:
        """Run the missing cases of some parts; returns whether all are complete."""
        complete = [self._measure_part(part, sizes, task) for part in parts]
        return all(complete)

    def _measure_part(self, part: str, sizes: Sizes, task: str) -> bool:
        calibration: dict[str, float] | None = {}
        if part in ("held", "shared"):
            workers = sizes.workers if part == "held" else sizes.shared_workers
            calibration = self._calibrate(part, {"workers": workers, **sizes.work}, sizes.updates)
            if calibration is None:
                return False
        cases = {
            "held": lambda: held(sizes, calibration["step_ms"]),
            "backends": lambda: backends(sizes),
            PREWARM: lambda: prewarm(sizes),
            "batch": lambda: batch(sizes, task),
            "shared": lambda: shared(sizes, calibration),
            GPU: lambda: gpu(sizes),
        }
        order = list(in_turns([case for case in cases[part]() if self._is_chosen(case)]))
        done = {(run["part"], run["name"], run["round"], run.get("task")) for run in self._document["runs"]}
        named = task if part == "batch" else None
        missing = [(number, case) for number, case in order if (part, case.name, number, named) not in done]
        print(f"{part}: {len(missing)} of {len(order)} runs are missing", flush=True)
        complete = [self._run(case, number, named, calibration) for number, case in missing]
        return all(complete)

    def _is_chosen(self, case: Case) -> bool:
        return any(fnmatchcase(case.name, pattern) for pattern in self._only)

    def _calibrate(self, part: str, work: dict[str, Any], updates: int) -> dict[str, float] | None:
        """The cost of a step with which sampling takes as long as learning, measured once per results file."""
        known: dict[str, Any] = self._document.setdefault("calibrations", {})
        if part not in known:
            case = Case(part=part, name="calibration", options={}, rounds=1)
            found = self._process(case, {"kind": "calibrate", "workload": work, "updates": updates})
            if found is None:
                return None
            known[part] = {name: found[name] for name in ("step_ms", "learn_s", "collect_s")}
            write_document(self._out, self._document)
            print(f"{part}: learning takes {found['learn_s']:.3f} s, so a step costs {found['step_ms']:.3f} ms")
        return dict(known[part])

    def _run(self, case: Case, number: int, task: str | None, calibration: dict[str, float]) -> bool:
        options = dict(case.options)
        if "workload" in options:
            options["workload"] = {**options["workload"], "seed": number}
        if case.part == "shared":
            options["offset_s"] = offset_s(case, number, calibration)
        found = self._process(case, options)
        if found is None:
            return False
        run = {"part": case.part, "name": case.name, "round": number, **({"task": task} if task else {})}
        run |= {name: value for name, value in options.items() if name != "kind"} | found
        self._document["runs"].append(run)
        write_document(self._out, self._document)
        others = run["others_cpu_s"] / run["wall_s"]
        print(f"{case.part}, round {number}: {case.name}: {run['wall_s']:.1f} s; others took {others:.2f} cores")
        return True

    def _process(self, case: Case, options: dict[str, Any]) -> dict[str, Any] | None:
        """Run a case in a new process; None if the time of this sitting is over, or if the case failed."""
        if time.monotonic() > self._end:
            return None
        command = [sys.executable, str(BENCHMARKS / "contenders" / case.script), json.dumps(options)]
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, CpuMeter() as meter:
            status, output, errors = run_command(command, Path(folder), TIMEOUT_S)
        found = last_report(output)
        if status != "ok" or found is None:
            print(f"{case.part}: {case.name}: {status}: {last_line(errors)}", flush=True)
            return None
        load = {"wall_s": round(time.monotonic() - began, 2), "others_cpu_s": round(meter.others_s, 2)}
        return found | load | {"own_cpu_s": round(meter.own_s, 2)}


def in_turns(cases: list[Case]) -> Iterator[tuple[int, Case]]:
    """The cases of each round; every other round is reversed."""
    for number in range(1, max((case.rounds for case in cases), default=0) + 1):
        for case in cases if number % 2 else cases[::-1]:
            if number <= case.rounds:
                yield number, case


def finish(document: dict[str, Any], options: argparse.Namespace) -> None:
    """Print tables and draw plots."""
    print("\n\n".join(page(document, part) for part in options.parts))
    images = options.images or (None if options.quick else IMAGES)
    if images is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        print("plots are skipped, because matplotlib is not installed here; --show draws them elsewhere")
        return
    for path in draw(document, images):
        print(f"written: {path}")


if __name__ == "__main__":
    run_script(main)
