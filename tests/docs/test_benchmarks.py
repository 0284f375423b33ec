"""Benchmarks without peers run, write their results, and end their processes."""

from __future__ import annotations

import heapq
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from farstep.rollout.blocks import Layout
from farstep.schema import ArraySpec
from farstep.wire import messages as m
from tests.docs.benchmark_modules import BENCHMARKS, benchmark_modules

TAG = "FARSTEP_BENCHMARK_TAG"
STEPS = 8


@pytest.mark.parametrize(
    "command",
    [
        "scale.py --workers 4 --seconds 0.5 --steps 8",
        "scale.py --relay --nodes 2 --workers 4 --seconds 0.5 --steps 8",
        "bulk.py --rounds 1 --seconds 0.2",
        "uneven.py --workers 1 --simulated 2 --seconds 0.5",
        "frames.py --rounds 1 --rows 256",
    ],
)
def test_a_benchmark_runs(command: str, tmp_path: Path) -> None:
    script, *words = command.split()
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *words, "--out", str(tmp_path / "found.json")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["command"].startswith(f"python benchmarks/{command}")
    assert found.get("runs") or found.get("rows") or found["megabytes_per_second"]["farstep, encrypted"]


class Crowd:
    """Simulated workers without a head, in simulated time."""

    def __init__(self, crowd: Any, workers: int, range_s: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.durations_s = 0.0, 0.0
        monkeypatch.setattr(crowd, "time", SimpleNamespace(monotonic=lambda: self.now))
        self._due: list[Any] = []
        self.figures = []
        layout = Layout(1, STEPS, 1, {"reward": ArraySpec((), "<f8"), "valid": ArraySpec((), "|b1")}, {})
        for worker in range(workers):
            bootstrap = {"worker": worker, "incarnation": 0, "run": "run", "envs": 1}
            self.figures.append(crowd.Figure(bootstrap, self._answered, range_s, self._due))
            self.figures[-1].handle([m.encode(m.Welcome(worker, [1], [0], [], []))])
            self.figures[-1].handle([m.encode(layout.message())])

    def request(self, figure: Any) -> None:
        """Let a worker roll one episode."""
        figure.handle([m.encode(m.Ticket(1, 0, STEPS))])

    def wait(self) -> Any:
        """Go to the end of the next episode; return its worker, None if there is no episode in progress."""
        if not self._due:
            return None
        self.now, _, figure = heapq.heappop(self._due)
        figure.answer_next()
        return figure

    def _answered(self, frames: list[Any]) -> None:
        message = m.decode_from_worker(frames)
        if isinstance(message, m.Chunk):
            self.durations_s += np.frombuffer(frames[2 + message.keys.index("reward")]).sum()


@pytest.mark.parametrize("workers", [8, 32])
def test_simulated_workers_agree_with_the_closed_forms(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes per second with a barrier and without one; the tolerance is above three standard errors."""
    uneven, crowd = benchmark_modules("uneven", "crowd")
    rounds = 16_000 // workers
    simulated = Crowd(crowd, workers, (uneven.LOW_S, uneven.HIGH_S), monkeypatch)
    for _ in range(rounds):
        for figure in simulated.figures:
            simulated.request(figure)
        while simulated.wait():
            pass
    barrier = rounds * workers / simulated.now
    assert barrier == pytest.approx(workers / uneven.mean_longest_s(workers), rel=0.04)
    began, before_s = simulated.now, simulated.durations_s
    for figure in simulated.figures:
        simulated.request(figure)
    for _ in range(rounds * workers):
        simulated.request(simulated.wait())
    spent = simulated.now - began
    assert rounds * workers / spent == pytest.approx(workers / uneven.mean_s(), rel=0.04)
    assert simulated.durations_s - before_s == pytest.approx(workers * spent, rel=0.01), "no worker waits"


@pytest.mark.long
def test_large_policies_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each case is a process of its own."""
    (large_policy,) = benchmark_modules("large_policy")
    words = "--sizes ViT-tiny --only served-cpu --workers 1 --envs 4 --steps 4 --seconds 0.2 --rounds 2"
    words += " --timeout 200"
    monkeypatch.setattr(sys, "argv", ["large_policy.py", *words.split(), "--out", str(tmp_path / "found.json")])
    assert large_policy.main() == 0
    assert capsys.readouterr().out.count("steps/s") == 6
    document = json.loads((tmp_path / "found.json").read_text())
    assert [run["contender"] for run in document["runs"]] == 2 * ["environments", "policy-cpu", "served-cpu"]
    assert document["runs"][2]["inference"].startswith("served on cpu")
    assert {run["env"] for run in document["runs"]} == {"NoiseEnv"}
    monkeypatch.setattr(large_policy, "run_case", None)
    assert large_policy.main() == 0  # measures nothing again


def test_large_policies_are_measured_again_only_after_a_failure_for_further_rounds_or_with_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (large_policy,) = benchmark_modules("large_policy")
    found: list[float | None] = []

    def run_case(options: Any, size: str, name: str) -> dict[str, Any]:
        case = {"size": size, "contender": name, **large_policy.recorded_settings(options, size, name)}
        return {**case, "steps_per_second": found.pop(0), "reason": "took more than 60 s"}

    def measured(*words: str) -> list[tuple[int, float | None]]:
        command = ["large_policy.py", "--sizes", "10k", "--only", "served-cpu", "--rounds", "1", *words]
        monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path / "f")])
        assert large_policy.main() == 0 and not found
        runs = json.loads((tmp_path / "f").read_text())["runs"]
        return [(run["workers"], run["steps_per_second"]) for run in runs]

    monkeypatch.setattr(large_policy, "run_case", run_case)
    monkeypatch.setattr(large_policy.torch.cuda, "is_available", lambda: False)
    found[:] = [200.0, 100.0, None]  # environments, policy, served
    assert measured("--workers", "2") == [(2, 200.0), (2, 100.0), (2, None)]
    found[:] = [50.0]
    assert measured("--workers", "2") == [(2, 200.0), (2, 100.0), (2, 50.0)]
    capsys.readouterr()
    found[:] = [2.0, 4.0, 1.0]
    assert len(measured("--workers", "14")) == 6
    assert "1 steps/s, 0.50 of the limit" in capsys.readouterr().out, "the limit with the same settings"
    found[:] = [6.0, 4.0, 2.0, 6.0, 8.0, 2.0]
    assert measured("--workers", "14", "--rounds", "3")[-2:] == [(14, 8.0), (14, 2.0)]
    assert "2 steps/s, 0.50 of the limit" in capsys.readouterr().out.splitlines()[-2], "the limit of medians"


def test_large_policies_on_the_gpu_are_measured_in_longer_rollouts_than_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (large_policy,) = benchmark_modules("large_policy")
    measured: list[tuple[str, str, int]] = []

    def run_case(options: Any, size: str, name: str) -> dict[str, Any]:
        case = {"size": size, "contender": name, **large_policy.recorded_settings(options, size, name)}
        measured.append((size, name, case["steps"]))
        return {**case, "steps_per_second": 1.0}

    path = tmp_path / "f"
    words = ["--sizes", "4M", "67M", "ViT-S", "--only", "served-cpu", "served-cuda", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["large_policy.py", *words, "--out", str(path)])
    monkeypatch.setattr(large_policy, "run_case", run_case)
    monkeypatch.setattr(large_policy.torch.cuda, "is_available", lambda: True)
    assert large_policy.main() == 0
    steps = {(size, name): count for size, name, count in measured}
    short = [(size, name) for size in ("67M", "ViT-S") for name in ("policy-cpu", "served-cpu")]
    assert steps == {case: 8 if case in short else 32 for case in steps} and {*short, ("67M", "served-cuda")} < {*steps}
    assert {("10k", "environments"), ("ViT-S", "environments")} < {*steps}
    document = json.loads(path.read_text())
    for run in document["runs"]:
        run["steps"] = 8
    path.write_text(json.dumps(document))
    expected = [case for case in measured if case[2] == 32]
    measured.clear()
    assert large_policy.main() == 0
    assert measured == expected, "results of shorter rollouts are other cases"


def test_rounds_over_a_link_are_added_until_there_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    large_policy, tables = benchmark_modules("large_policy", "large_policy_tables")
    rates = [{"environments": 500.0, "link": 100.0, "local": 90.0, "served": served} for served in (70.0, 90.0, 80.0)]
    monkeypatch.setattr(large_policy, "over_a_link", lambda options: rates.pop(0))
    for rounds in ("2", "3", "3"):
        command = ["large_policy.py", "--where", "head", "--rounds", rounds, "--out", str(tmp_path / "found.json")]
        monkeypatch.setattr(sys, "argv", command)
        assert large_policy.main() == 0
    assert not rates and "served 0.80 of the limit" in capsys.readouterr().out
    document = json.loads((tmp_path / "found.json").read_text())
    assert [run["round"] for run in document["runs"]] == [1, 2, 3]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables.link_page(document).splitlines()]
    assert ["served inference at the head", "80 (70 to 90)", "0.80 (0.70 to 0.90)"] in rows


@pytest.mark.long
def test_served_inference_is_measured_in_windows(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    for missing in (1, 0):
        command = [sys.executable, str(BENCHMARKS / "served_limit.py"), "--quick", "--out", str(path)]
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout
        assert output.count("of the limit") == missing
    runs = json.loads(path.read_text())["runs"]
    assert [run["round"] for run in runs] == [1, 2]
    assert all(run[name] > 0 for run in runs for name in ("environments", "policy", "served", "batch_size"))


def test_fractions_of_served_inference_divide_speeds_of_the_same_round() -> None:
    (tables,) = benchmark_modules("large_policy_tables")
    case = {"size": "4M", "envs": 8, "workers": 2, "window": 0.5, "device": "cuda", "dtype": "float32"}
    case |= {"batch_size": 3.6}
    rounds = [(100, 400, 80), (200, 50, 30), (200, 800, 180)]  # environments, policy, served
    runs = [
        {**case, "round": number + 1, "environments": envs, "policy": policy, "served": served}
        for number, (envs, policy, served) in enumerate(rounds)
    ]
    other = {**runs[0], "workers": 4, "served": 1}
    page = tables.served_page({"machine": {"cores": 2, "cpu": "X"}, "runs": [other, *runs]})
    cells = [cell.strip() for cell in page.splitlines()[-1].split("|")[1:-1]]
    assert cells == ["4M, float32", "8", "200", "400", "80", "0.80 (0.60 to 0.90)", "4"]
    assert "medians of 3 rounds" in page


@pytest.mark.long
def test_ablation_of_aride_runs_and_repeats_nothing(tmp_path: Path) -> None:
    words = "--seeds 1 --variants full sync --warmups recorded --total-steps 300 --workers 1 --step-ms 0.1 0.2"
    words += " --eval-every 200 --eval-episodes 8 --final-episodes 16"
    paths = ["--out", str(tmp_path / "found.json"), "--images", str(tmp_path)]
    for missing in (2, 0):
        command = [sys.executable, str(BENCHMARKS / "aride.py"), *words.split(), *paths]
        done = subprocess.run(command, capture_output=True, text=True, timeout=170)
        assert done.returncode == 0, done.stderr
        assert f"{missing} runs, 1 at a time" in done.stdout and "all runs are complete" in done.stdout
    runs = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert [(run["variant"], run["warmup"], run["episodes"]) for run in runs] == [
        ("full", "recorded", 16),
        ("sync", "recorded", 16),
    ]
    assert all(run["evaluations"] and run["updates"] > 0 and 0 <= run["success"] <= 1 for run in runs)
    assert "With 128 recorded episodes" in done.stdout and (tmp_path / "aride-success.png").exists()


@pytest.mark.long
def test_elastic_benchmark_finds_released_slots_and_repeats_nothing(tmp_path: Path) -> None:
    words = [str(BENCHMARKS / "elastic.py"), "--quick", "--parts", "held", "--only", "farstep, *", "released *"]
    for missing in (3, 0):
        command = [sys.executable, *words, "--out", str(tmp_path / "found.json"), "--images", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=170)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"held: {missing} of 3 runs are missing" in done.stdout
    released, held, in_turn = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert len(in_turn["released_s"]) == len(in_turn["held_s"]) == 10
    of_all = [run["slot_seconds"] / (run["seconds"] * run["workload"]["workers"]) for run in (released, held)]
    assert of_all[0] < 0.99 < of_all[1] and len(released["update_s"]) == len(held["update_s"]) == 5
    assert {slots for _, slots in released["trace"]} >= {0, released["workload"]["workers"]}
    assert {slots for _, slots in held["trace"]} == {held["workload"]["workers"]}
    assert (tmp_path / "elastic-slots.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["alone", "doorbells"])
def test_environments_are_stepped_by_the_given_number_of_workers(mode: str) -> None:
    words = f"--mode {mode} --num-envs 6 --steps 4 --seconds 0.1 --workers 3"
    script = [sys.executable, str(BENCHMARKS / "contenders" / "steps_only.py"), *words.split()]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["contender"] == f"steps-{mode}" and report["steps_per_second"] > 0


def test_environments_that_workers_cannot_share_equally_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (workload,) = benchmark_modules("workload")
    monkeypatch.setattr(sys, "argv", ["steps_only.py", "--mode", "alone", "--num-envs", "6", "--workers", "4"])
    with pytest.raises(SystemExit):
        workload.parse_arguments(modes=("alone",))
    assert "expected a multiple of 4" in capsys.readouterr().err


def test_contenders_run_only_in_environments_that_they_support() -> None:
    throughput, roster, tables = benchmark_modules("throughput", "roster", "tables")
    cases = [tables.Case(env, 16, "eager") for env in ("CartPole-v1", "ALE/Pong-v5")]
    chosen = [found for found in roster.choose(roster.CONTENDERS, [], []) if found.name in ("rllib", "ale-vector")]
    sizes = {"rounds": 2, "steps": 8, "seconds": 1.0, "workers": 2, "timeout_s": 60.0}
    plan = throughput.Plan(cases=cases, contenders=chosen, **sizes)
    runs = [(case.env, contender.name) for case, _, contender in plan]
    assert len(runs) == plan.num_runs == 6
    assert set(runs) == {("CartPole-v1", "rllib"), ("ALE/Pong-v5", "rllib"), ("ALE/Pong-v5", "ale-vector")}


def test_continued_throughput_measures_only_missing_rounds(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = "--only limit-eager --env CartPole-v1 --num-envs 2 --seconds 0.05 --steps 4 --workers 1 --continue --out"
    command = [sys.executable, str(BENCHMARKS / "throughput.py"), *words.split(), str(out)]
    found = []
    for rounds in ("1", "2"):
        subprocess.run([*command, "--rounds", rounds], check=True, capture_output=True, timeout=120)
        found.append(json.loads(out.read_text())["runs"])
    assert [run["round"] for run in found[1]] == [1, 2] and found[1][:1] == found[0]
    refused = subprocess.run([*command, "--steps", "8"], capture_output=True, text=True, timeout=120)
    assert "was measured with --steps 4" in refused.stderr and json.loads(out.read_text())["runs"] == found[1]


def test_stepping_on_many_workers_is_compared_with_the_limit_and_async() -> None:
    (pages,) = benchmark_modules("pages")
    found = {"steps-alone": 100.0, "steps-farstep": 60.0, "steps-async": 20.0}
    found |= {"limit-eager": 50.0, "farstep-make_vec": 40.0, "gymnasium-async": 10.0}
    case = {"env": "CartPole-v1", "num_envs": 112, "sampler": "eager", "status": "ok"}
    runs = [{**case, "contender": name, "report": {"steps_per_second": rate}} for name, rate in found.items()]
    document = {"machine": {"cores": 16, "cpu": "a CPU"}, "workers": 14, "rounds": 1, "seconds": 4.0, "runs": runs}
    lines = pages.many_workers_summary(document).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines]
    assert ["steps-farstep", "60 (60)", "0.60 (0.60)", "3.00 (3.00)"] in rows
    assert ["farstep-make_vec", "40 (40)", "0.80 (0.80)", "4.00 (4.00)"] in rows


def test_tables_of_the_elastic_benchmark() -> None:
    (tables,) = benchmark_modules("elastic_tables")
    work = {"workload": {"workers": 2, "step_ms": 1.0}, "wall_s": 1.0, "others_cpu_s": 0.0}

    def ppo(name: str, slot_seconds: float, update_s: float) -> dict[str, object]:
        times = {"update_s": [update_s] * 4, "updates": 4, "collect_s": 0.5, "learn_s": 0.5, "cpu_seconds": 1.0}
        return {"part": "held", "name": name, "slot_seconds": slot_seconds, "rows_per_update": 8, **times, **work}

    def shared(name: str, *update_s: float) -> dict[str, object]:
        workloads = [{"update_s": [seconds], "rows": [8]} for seconds in update_s]
        return {"part": "shared", "name": name, "workloads": workloads, "cores": 3, **work}

    runs = [ppo(tables.RELEASED, 4.4, 1.1), ppo(tables.HELD, 8.0, 1.0), ppo(tables.RAY, 8.8, 1.2)]
    runs.append({"part": "held", "name": tables.IN_TURN, "updates": 3, "released_s": [1.0, 1.2, 9.0], **work})
    runs[-1]["held_s"] = [1.0, 1.1, 0.9]
    runs += [shared("alone", 1.0), shared("two, slots for one", 1.2, 1.4)]
    waits = [0.01, 0.04, 0.2, 0.03]
    runs.append({"part": "backends", "name": "released, shm, 0.5 s", "waits_s": waits, "workers": 2, **work})
    document = {"machine": {"cores": 2, "cpu": "a CPU"}, "runs": runs}
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables.claims(document).splitlines()[4:]]
    assert [row[2] for row in cells] == ["0.50", "0.55", "1.20", "75%", "1.30"]
    sac = {"part": "held", "slot_seconds": 1.0, "updates": 4, "seconds": 2.0, **work}
    sac_runs = [{**sac, "name": tables.SAC_RELEASED}, {**sac, "name": tables.SAC_RAY, "slot_seconds": 5.0}]
    assert "SAC: slot-seconds released / Ray actors held" not in tables.claims(document)
    both = {**document, "runs": [*runs, *sac_runs]}
    lines = [line.split("|") for line in tables.claims(both).splitlines()]
    assert ["SAC: slot-seconds released / Ray actors held", "0.54", "0.20"] in [
        [cell.strip() for cell in line[1:-1]] for line in lines
    ]
    found = [[cell.strip() for cell in line.split("|")[1:5]] for line in tables.page(document, "held").splitlines()]
    assert ["farstep, released", "1.10", "0.50", "1100"] in found
    assert "1300 (1300 - 1300)" in tables.page(document, "shared")
    assert tables.page(document, "batch").startswith("Not measured yet.")
    trained = {"part": "batch", "task": "CartPole-v1", "target": 475.0, "seconds_limit": 45.0, "reached": True, **work}
    trained |= {"seconds": 10.5, "steps": 80, "updates": 2, "slot_seconds": 30.0, "workers": 3, "return": 20.0}
    curve = [[0.0, 0, 0, 0.0, 1, 0.0], [10.0, 70, 1, 25.0, 2, 20.0], [10.5, 80, 2, 30.0, 3, 20.0]]
    text = tables.page({**document, "runs": [{**trained, "name": "schedule", "curve": curve}]}, "batch")
    (line,) = [line for line in text.splitlines() if line.startswith("| schedule")]
    assert [cell.strip() for cell in line.split("|")[7:-1]] == ["10 (10 - 10)", "20 (20 - 20)", "3 (3 - 3)"]
    gpu = {"part": "gpu", "seconds": 8.0, "updates": 4, "parameters": 10_000, "device": "a GPU", **work}
    released = {**gpu, "name": f"{tables.RELEASED}, 64", "gpu_seconds": 2.0, "move_s": 0.1, "memory_mib": 0.0}
    held = {**gpu, "name": f"{tables.HELD}, 64", "gpu_seconds": 8.0, "move_s": 0.0, "memory_mib": 64.0}
    rows = tables.page({**document, "runs": [released, held]}, "gpu").splitlines()[4:6]
    assert [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows] == [
        ["released", "0.01 M", "0.25", "0.25", "2000", "25.0", "0"],
        ["held", "0.01 M", "1.00", "1.00", "2000", "0.0", "64"],
    ]


def test_tables_of_starts_in_advance_and_of_parked_workers() -> None:
    tables, parked = benchmark_modules("elastic_tables", "parked")
    run = {"part": "prewarm", "workers": 4, "update_s": 6.0, "wall_s": 9.0, "others_cpu_s": 0.0}
    runs = [{**run, "name": "cold", "waits_s": [2.0, 2.0, 3.0]}, {**run, "name": "cold, prewarmed", "waits_s": [0.0]}]
    document = {"machine": {"cores": 2, "cpu": "a CPU"}, "runs": runs}
    lines = [line for line in tables.page(document, "prewarm").splitlines() if line.startswith("| cold")]
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines] == [
        ["cold", "6", "2000", "3000", "", "3"],
        ["cold, prewarmed", "6", "0", "0", "25%", "1"],
    ]
    found = {"method": "suspend", "waits_s": [0.01, 0.02, 0.04], "disk_bytes": 0}
    found |= {"running_bytes": [2 << 20], "parked_bytes": [1 << 20]}
    text = parked.summary({**document, "runs": [found]})
    cells = [cell.strip() for cell in text.splitlines()[-1].split("|")[1:-1]]
    assert cells == ['parked, `"suspend"`', "20", "40", "2", "1", "0", "3"] and "criu was not measured" in text


def test_phone_pays_only_for_the_instructed_entry_and_marks_actions_without_effect() -> None:
    (phone,) = benchmark_modules("phone")
    env, seen = phone.Phone(), set()
    for seed in range(60):
        obs, _ = env.reset(seed=seed)
        *_, info = env.step(phone.SUBMIT)  # nothing is selected
        assert info["invalid_action"]
        ended, actions = False, []
        while not ended:
            actions.append(phone.right_action(obs.tolist()))
            obs, reward, ended, _, info = env.step(actions[-1])
            assert env.observation_space.contains(obs) and not info["invalid_action"]
        assert reward == 1.0 and actions[-1] == phone.SUBMIT
        seen.add(tuple(actions))
        other = next(action for action in range(phone.APPS) if action != actions[0])
        env.reset(seed=seed)
        rewards = [env.step(action)[1] for action in (other, 0, phone.SUBMIT)]
        assert rewards == [0.0, 0.0, 0.0]
    assert len(seen) > 6


def test_demonstrator_records_the_probabilities_of_its_actions() -> None:
    (phone,) = benchmark_modules("phone")
    obs = np.stack([phone.Phone().reset(seed=1)[0]] * 4_000)
    acted = phone.Demonstrator(0.5, seed=1).act(obs)
    for action in range(phone.NUM_ACTIONS):
        chosen = acted["action"] == action
        assert np.exp(acted["logprob"][chosen]).mean() == pytest.approx(chosen.mean(), abs=0.03)


def descendants_of(tag: str) -> dict[int, str]:
    """Command lines of the processes, zombies excepted, that inherited the tag in their environment."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{TAG}={tag}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it ended meanwhile
            continue
    return found


STUBBORN = "sh -c \"trap '' TERM INT; while :; do sleep 1000; done\""
MANY_CHILDREN = f"""
import concurrent.futures, multiprocessing, subprocess, threading, time
from children import run_script

def main():
    subprocess.Popen(["sh", "-c", {f"setsid {STUBBORN} & exit"!r}]).wait()  # leaves a daemon
    threading.Thread(target=lambda: subprocess.call({f"exec {STUBBORN}"!r}, shell=True), daemon=True).start()
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(time.sleep, 1000).result()

if __name__ == "__main__":
    run_script(main)
"""


def contender(folder: Path) -> list[str]:
    words = "--only limit-eager --env CartPole-v1 --num-envs 2 --seconds 600 --timeout 900 --out"
    return [str(BENCHMARKS / "throughput.py"), *words.split(), str(folder / "found.json")]


def many_children(folder: Path) -> list[str]:
    (folder / "many_children.py").write_text(MANY_CHILDREN)
    return [str(folder / "many_children.py")]


@pytest.mark.parametrize(
    ("command", "processes", "number"),
    [
        (contender, 4, signal.SIGTERM),  # itself, the contender, and the two processes that this one forks
        (
            many_children,
            7,
            signal.SIGTERM,
        ),  # itself, two shells with a `sleep` each, two of the pool
        (many_children, 7, signal.SIGINT),
    ],
)
def test_terminated_benchmark_leaves_no_process(
    command: Callable[[Path], list[str]], processes: int, number: signal.Signals, tmp_path: Path
) -> None:
    tag = uuid.uuid4().hex
    with (tmp_path / "output").open("wb") as output:
        benchmark = subprocess.Popen(
            [sys.executable, *command(tmp_path)],
            env={**os.environ, TAG: tag, "PYTHONPATH": str(BENCHMARKS)},
            stdout=output,
            stderr=output,
        )
    try:
        eventually(lambda: benchmark.poll() is not None or len(descendants_of(tag)) >= processes)
        assert benchmark.poll() is None, (tmp_path / "output").read_text()
        benchmark.send_signal(number)
        benchmark.wait(60)
        eventually(lambda: not descendants_of(tag))
    finally:
        for pid in descendants_of(tag):
            os.kill(pid, signal.SIGKILL)
        benchmark.wait(60)


def test_every_script_ends_its_children() -> None:
    """All that can be run by hand; `scale.py` runs `crowd.py`, which starts nothing."""
    scripts = {path.name: path.read_text() for path in BENCHMARKS.glob("*.py") if path.name != "crowd.py"}
    assert [name for name, text in scripts.items() if "__main__" in text and "    run_script(" not in text] == []


def eventually(what: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
