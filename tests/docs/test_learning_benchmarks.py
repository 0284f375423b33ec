"""Benchmarks of learning resume stopped runs, repeat none, and compare results only as far as their seeds allow."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.docs.benchmark_modules import BENCHMARKS, benchmark_modules

aaps, aaps_cartpole, async_return, defaults, learning_tables, offpolicy_tables, trainings = benchmark_modules(
    "aaps", "aaps_cartpole", "async_return", "defaults", "learning_tables", "offpolicy_tables", "trainings"
)
Metrics = dict[str, Any]
SMALL = trainings.Training(
    name="small",
    learner="ppo",
    options=("--env", "CartPole-v1", "--launcher", "in-process", "--num-envs", "4", "--num-steps", "32"),
    total_steps=256,
)


def trained(training: Any, folder: Path, minutes: float | None = None) -> tuple[bool, list[Metrics]]:
    found: list[Metrics] = []

    def finished(index: int, metrics: list[Metrics]) -> str:
        found.extend(metrics)
        return "done"

    complete = trainings.Sitting(jobs=1, minutes=minutes, folder=folder).train([training], finished)
    return complete, found


def test_training_that_ended_continues_when_asked_for_more_steps(tmp_path: Path) -> None:
    assert trained(SMALL, tmp_path, minutes=0.0) == (False, [])
    complete, first = trained(SMALL, tmp_path)
    assert complete and [line["step"] for line in first] == [128, 256]
    complete, more = trained(replace(SMALL, total_steps=384), tmp_path)
    assert complete and [line["step"] for line in more] == [128, 256, 384]
    assert more[:2] == first  # with the seconds that they took: nothing was trained again


def test_failed_training_is_reported_and_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    complete, found = trained(replace(SMALL, options=("--env", "NoSuchTask-v0")), tmp_path)
    assert (complete, found) == (False, [])
    assert "small FAILED with status 1: farstep: " in capsys.readouterr().out


def test_run_that_is_in_the_results_is_not_made_again(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    run = {"env": "CartPole-v1", "learner": "ppo", "num_envs": 16, "seed": 1, "reached": True, "steps": 8192}
    run |= {"seconds": 1.0, "curve": [[8192, 480.0, 1.0]], "evaluations": [[4096, 200.0, 3.0], [8192, 500.0, 0.0]]}
    machine = {"cpu": "any", "cores": 2}
    out.write_text(json.dumps({"command": "", "machine": machine, "sittings": [{"machine": machine}], "runs": [run]}))
    words = "--tasks CartPole-v1 --learners ppo --num-envs 16 --seeds 1 --out"
    command = [str(BENCHMARKS / "defaults.py"), *words.split(), str(out), "--images", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *command, "--runs", str(tmp_path / "runs")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "0 runs" in done.stdout and "all runs are complete" in done.stdout
    assert not (tmp_path / "runs").exists() and (tmp_path / "defaults-ppo.png").exists()


def test_stopped_run_is_stored_as_not_reached_and_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, run = tmp_path / "found.json", tmp_path / "runs" / "defaults-cartpole-v1-ppo-16-1"
    lines = [{"step": 4096, "seconds": 1.0}, {"step": 8192, "seconds": 2.0, "env/return_mean": 31.5}]
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    words = "defaults.py --tasks CartPole-v1 --learners ppo --num-envs 16 --seeds 1 --minutes 0"
    monkeypatch.setattr(sys, "argv", [*words.split(), "--out", str(out), "--runs", str(run.parent)])
    for _ in range(2):  # it is in the results, but not complete
        document = json.loads(out.read_text()) if out.exists() else {"runs": []}
        assert not defaults.measure(document, defaults.parse_options())
        assert "1 runs, 1 at a time" in capsys.readouterr().out
        (stored,) = json.loads(out.read_text())["runs"]
        assert (stored["steps"], stored["reached"], stored["stopped"]) == (8192, False, True)
    assert "0 of 1 | (8, last return 31.5) |" in " ".join(defaults.learner_summary(document, "ppo").split())
    (run / "metrics.jsonl").write_text(json.dumps(lines[1] | {"step": 12288, "env/return_mean": 480.0}) + "\n")

    def train(self: Any, _: Any, finished: Any) -> bool:
        finished(0, defaults.metrics_of(run))
        return True

    monkeypatch.setattr(defaults.Sitting, "train", train)
    assert defaults.measure(document, defaults.parse_options())
    (stored,) = json.loads(out.read_text())["runs"]
    assert (stored["steps"], stored["reached"]) == (12288, True) and "stopped" not in stored


@pytest.mark.parametrize(
    ("returns", "reached", "steps"), [([500, 110, 480, 500], True, 30), ([500, 500, 500, 470], False, 40)], ids=str
)
def test_apex_on_cartpole_is_judged_by_its_evaluations(returns: list[int], reached: bool, steps: int) -> None:
    case = {"env": "CartPole-v1", "learner": "apex", "num_envs": 16, "seed": 1}
    metrics = [
        {"step": step, "seconds": step / 10, "env/return_mean": 430.0, "eval/step": step}
        | {"eval/return_mean": float(mean), "eval/return_std": 0.0}
        for step, mean in zip((10, 20, 30, 40), returns, strict=True)
    ]
    run = defaults.outcome(case, metrics)
    assert (run["reached"], run["steps"], run["seconds"]) == (reached, steps, steps / 10)
    assert not defaults.outcome(case | {"learner": "dqn"}, metrics)["reached"], "its training returns count"
    assert "apex`: to the first evaluation from which" in defaults.summary({"runs": [run]}, "CartPole-v1")


@pytest.mark.parametrize(("learner", "has_target"), [("apex", False), ("dqn", True)])
def test_run_that_is_judged_by_evaluations_has_no_target_return(
    learner: str, has_target: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["defaults.py"])
    case = {"env": "CartPole-v1", "learner": learner, "num_envs": 16, "seed": 1}
    training = defaults.training_of(case, defaults.parse_options())
    assert ("--target-return" in training.options) is has_target
    assert (training.total_steps < 1_000_000) is not has_target


def test_default_options_run_every_learner_on_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["defaults.py"])
    cases = defaults.cases_of(defaults.parse_options())
    tasks = {learner: {case["env"] for case in cases if case["learner"] == learner} for learner in defaults.LEARNERS}
    assert tasks.pop("aride") == {"CartPole-v1"}
    assert all(found == {"CartPole-v1", "LunarLander-v3"} for found in tasks.values())
    aride = [(case["num_envs"], case["seed"]) for case in cases if case["learner"] == "aride"]
    assert aride == [(16, 1), (16, 2), (16, 3)]


def sac_run(env: str, seed: int, seconds: float, **more: Any) -> dict[str, Any]:
    run = {"env": env, "learner": "sac", "num_envs": 16, "seed": seed, "reached": True, "steps": 8000}
    return run | {"seconds": seconds, "curve": [[8000, -150.0, 1.0]], "evaluations": [[8000, -150.0, 3.0]]} | more


def test_stopped_runs_do_not_count_in_the_minutes() -> None:
    stopped = {"reached": False, "stopped": True}
    runs = [sac_run("Pendulum-v1", 1, 120.0), sac_run("Pendulum-v1", 2, 6000.0, **stopped)]
    runs.append(sac_run("HalfCheetah-v5", 1, 6000.0, **stopped))
    pendulum, cheetah = defaults.learner_summary({"runs": runs}, "sac").splitlines()[-2:]
    assert pendulum.split("|")[-2].strip() == "2.0" and cheetah.split("|")[-2].strip() == "-"
    assert "> 8k" in defaults.summary({"runs": runs}, "Pendulum-v1")  # a lower bound: one run was stopped


def test_all_tasks_of_a_replay_learner_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "save", lambda figure, path: [axis.get_title() for axis in figure.axes])
    envs = ["CartPole-v1", "LunarLander-v3", "Pendulum-v1", "HalfCheetah-v5"]
    assert defaults.draw({"runs": [sac_run(env, 1, 60.0) for env in envs]}, tmp_path) == [envs]


def test_counters_of_a_continued_run_are_added_up() -> None:
    lines = [{"pulls": pulls, "bytes": size} for pulls, size in ((2, 10), (4, 30), (4, 20), (6, 40))]
    # A new process begins with the third line: its pulls do not show it, its bytes do.
    assert trainings.summed(lines, ("pulls", "bytes")) == ([[2, 10], [4, 30], [8, 50], [10, 70]], 1)


def test_every_evaluation_counts_once() -> None:
    line = {"step": 20, "eval/step": 10, "eval/return_mean": 1.26, "eval/return_std": 0.0}
    assert trainings.evaluations([{"step": 10}, line, {**line, "step": 30}]) == [[10, 1.3, 0.0]]


def aaps_run(
    loss: str, delta: float, seed: int, final: float, steps: int = 1000, middle: float = -200.0
) -> dict[str, Any]:
    points = [[100, 0.0, 1.0, 10.0, 1.0], [steps, 0.0, 4.0, 40.0, 2.0]]
    evaluations = [[100, -200.0, 1.0], [500, middle, 1.0], [950, final, 1.0], [2000, 0.0, 1.0]]
    kept = {"steps": steps, "curve": points, "evaluations": evaluations}
    return {"loss": loss, "delta": delta, "seed": seed, "continued": 0, **kept}


def test_thresholds_are_compared_by_their_seeds() -> None:
    finals = {
        ("decoupled", 0.0): (200.0, 240.0),
        ("decoupled", 0.05): (190.0, 210.0),
        ("decoupled", 1.0): (150.0, 199.0),
        ("plain", 0.0): (220.0, 230.0),
        ("plain", 0.8): (-100.0, 20.0),
        ("plain", 0.9): (300.0,),
    }
    runs = [aaps_run(*key, seed, final) for key, found in finals.items() for seed, final in enumerate(found, 1)]
    text = aaps.verdict({"runs": runs})
    assert "δ = 0.05, the ranges of the seeds overlap" in text and "δ = 1, every seed ends below every seed" in text
    assert "δ = 0.8, every seed ends below every seed of δ = 0 and no seed ends at 200 or above" in text
    assert "0.9" not in text  # one seed shows nothing


def test_thresholds_are_compared_by_their_steps_too() -> None:
    """Runs that end alike may have learned more slowly."""
    always = [aaps_run("decoupled", 0.0, seed, 240.0, middle=220.0) for seed in (1, 2)]
    late = [aaps_run("decoupled", 0.2, seed, 240.0, middle=199.0) for seed in (1, 2)]
    document = {"runs": [*always, *late]}
    text = aaps.verdict(document)
    assert "δ = 0.2, final returns overlap with those of δ = 0, but every seed needs more steps to 200" in text
    steps = {delta: [end["solved"] for end in found] for (_, delta), found in aaps.ends_of(document).items()}
    assert steps == {0.0: [500, 500], 0.2: [950, 950]}
    assert "million steps to 200" in aaps.summary(document)


def test_bytes_are_compared_with_all_weights_in_float32() -> None:
    runs = [aaps_run("decoupled", 0.0, seed, 200.0 + seed) for seed in (1, 2)]
    runs += [aaps_run(loss, 0.05, seed, 190.0 + seed) for loss in ("half", "compact") for seed in (1, 2)]
    for run in runs[2:]:
        run["curve"][-1][3] = 1.0 if run["loss"] == "half" else 0.0
    settings = {"workers": 4, "envs_per_worker": 8, "hidden": 256}
    text = aaps.compact_page({"machine": {"cores": 2, "cpu": "a CPU"}, "settings": settings, "runs": runs})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")][2:]
    assert [row[0].split(",")[0] for row in rows] == ["all", "all", "without the critic"]
    assert [row[3] for row in rows] == ["202 (201 to 202)", "192 (191 to 192)", "192 (191 to 192)"]
    assert [row[-1] for row in rows] == ["105.0%", "7.5%", "5.0%"]  # 2 bytes of probes each


def test_weights_are_sent_with_and_without_the_critic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["aaps.py", "--deltas", "0", "--plain", "--half", "0.05", "--compact", "0.05"])
    options = aaps.parse_options()
    sent = {}
    for case in aaps.cases_of(options):
        words = aaps.training_of(case, options).options
        sent[case["loss"]] = json.loads(words[words.index("--weights") + 1]) if "--weights" in words else None
    assert sent["decoupled"] is None and sent["half"] == {"half": "bfloat16", "delta": True}
    assert sent["compact"] == {**sent["half"], "only": ["actor.*", "heads.*", "encoders.*"]}


def test_runs_of_different_lengths_are_compared_where_the_shortest_ends() -> None:
    document = {"runs": [aaps_run("decoupled", 0.0, 1, 200.0), aaps_run("decoupled", 0.05, 1, 100.0, steps=4600)]}
    (always,), (rarely,) = aaps.ends_of(document).values()
    assert always["return"] == 200.0 and always["pulls"] == 4.0
    assert rarely["return"] == 100.0 and rarely["pulls"] == pytest.approx(1.6)


def test_default_options_are_compared_with_and_without_a_threshold() -> None:
    cases = [case for case in aaps_cartpole.cases_of(1) if case["learner"] == "ppo"]
    runs = []
    for case in cases:
        command = aaps_cartpole.training_of(case).command
        assert ("--kl-threshold" in command) is (case["delta"] is not None)
        assert ("--no-decoupled" in command) is (case["loss"] == "plain")
        value = 400.0 if case["delta"] is None else 300.0
        update = {
            "step": 61440,
            "train/actor/current_version": 15,
            "env/return_mean": value,
            "sync/pulls_per_worker": 5.0,
        }
        evaluated = {"eval/step": 20480, "eval/return_mean": 450.0, "eval/return_std": 1.0}
        last = {"step": 61440, **evaluated, "eval/step": 61440, "eval/return_mean": 500.0}
        run = aaps_cartpole.outcome(case, [{"step": 24576, **evaluated}, update, last])
        runs.append(run | {"sampled_return": 490.0})
    rows = [line for line in aaps_cartpole.summary({"runs": runs}).splitlines() if "0.05" in line]
    cells = [cell.strip() for cell in rows[0].split("|")[1:-1]]
    assert cells == ["`ppo`, decoupled", "60,000", "0.05", "300", "0.75", "450", "500", "490", "5", "15"]


@pytest.mark.parametrize(("reached", "words"), [(True, "took 40% less time"), (False, "times to it are not compared")])
def test_times_are_compared_only_at_equal_return(reached: bool, words: str) -> None:
    runs = [
        {"learner": learner, "seed": 1, "reached": reached or learner == "ppo", "steps": 1000, "seconds": seconds}
        | {"staleness": 0.0, "seconds_in": dict.fromkeys((*async_return.PARTS, "other"), 1.0), "evaluations": []}
        for learner, seconds in (("ppo", 10.0), ("async-ppo", 6.0))
    ]
    settings = {"workers": 14, "num_envs": 112}
    document = {"machine": {"cores": 16, "cpu": "any"}, "settings": settings, "runs": runs}
    assert words in async_return.summary(document)


def test_table_has_the_best_number_of_environments_of_a_peer() -> None:
    report = {"reached": True, "steps": 9, "notes": "", "versions": {}, "curve": []}
    measured = {"cleanrl": 9.0, "cleanrl-16": 5.0, "farstep-ppo-16": 4.0, "farstep-ppo-128": 2.0}
    runs = [
        {"contender": name, "env": "CartPole-v1", "report": {**report, "seconds": seconds}, "wall_s": 1.0}
        | {"others_cpu_s": 0.0}
        for name, seconds in measured.items()
    ]
    text = learning_tables.summary(
        {"tasks": [{"env": "CartPole-v1", "threshold": 475.0, "max_steps": 10}], "runs": runs}
    )
    assert "| CleanRL, 16 environments " in text and "| CleanRL  " not in text
    assert "`ppo`, 16 environments" in text and "`ppo`, 128 environments" in text
    assert "0.80" in text and "0.40" in text  # of the best CleanRL's seconds


def test_peer_that_never_reaches_the_threshold_is_shown_where_its_return_is_highest() -> None:
    report = {"reached": False, "steps": 9, "notes": "", "versions": {}, "curve": []}
    measured = {"cleanrl": (8.0, 36.0), "cleanrl-16": (5.0, -39.0), "farstep-ppo-16": (2.0, 480.0)}
    measured["farstep-impala-16"] = (4.0, 100.0)
    runs = [
        {"contender": name, "env": "CartPole-v1", "wall_s": 1.0, "others_cpu_s": 0.0}
        | {"report": {**report, "seconds": seconds, "last_mean": mean, "reached": mean >= 475.0}}
        for name, (seconds, mean) in measured.items()
    ]
    tasks = [{"env": "CartPole-v1", "threshold": 475.0, "max_steps": 10}]
    text = learning_tables.summary({"tasks": tasks, "runs": runs})
    assert "| CleanRL  " in text and "| CleanRL, 16 environments" not in text
    shares = [line.split("|")[-3].strip() for line in text.splitlines() if line.startswith("| farstep")]
    assert shares == ["< 0.25", "-"]  # of at least 8 seconds


def test_stopped_peer_without_a_threshold_is_a_bound() -> None:
    report = {"reached": False, "last_mean": 10.0, "notes": "", "versions": {}, "curve": []}
    measured = {"cleanrl": {"seconds": 8.0, "steps": 4, "stopped": True}, "farstep-sac": {"seconds": 4.0, "steps": 9}}
    runs = [
        {"contender": name, "env": "HalfCheetah-v5", "seed": 1, "wall_s": 1.0, "others_cpu_s": 0.0}
        | {"report": {**report, **found}}
        for name, found in measured.items()
    ]
    tasks = [{"env": "HalfCheetah-v5", "threshold": None, "max_steps": 9}]
    text = learning_tables.summary({"tasks": tasks, "runs": runs}, offpolicy_tables.REPLAY)
    stopped = next(line for line in text.splitlines() if line.startswith("Stopped by"))
    assert stopped.startswith("Stopped by `--max-seconds`: CleanRL") and "farstep" not in stopped
    ours = next(line for line in text.splitlines() if line.startswith("| farstep"))
    assert [cell.strip() for cell in ours.split("|")[-3:-1]] == ["< 0.50", "< 2.25"]
    peers = next(line for line in text.splitlines() if line.startswith("| CleanRL"))
    assert "> 8.0" in peers and "> 10" not in peers  # seconds are a lower bound, the return is not


def replay_run(contender: str, seed: int, seconds: float, reached: bool = True, **found: Any) -> dict[str, Any]:
    report = {"reached": reached, "steps": 1000, "seconds": seconds, "last_mean": -190.0, "updates": 500, "notes": ""}
    run = {"contender": contender, "env": "Pendulum-v1", "seed": seed, "wall_s": 1.0, "others_cpu_s": 0.0}
    return {**run, "report": {**report, "versions": {}, "curve": [], **found}}


def pendulum(runs: list[dict[str, Any]], threshold: float | None = -200.0) -> dict[str, Any]:
    return {"tasks": [{"env": "Pendulum-v1", "threshold": threshold, "max_steps": 1000}], "runs": runs}


def test_replay_learners_are_compared_with_every_peer_and_with_alternating() -> None:
    runs = [
        replay_run("farstep-sac", 1, 4.0, learner_s=1.0),
        replay_run("farstep-sac-alternating", 1, 8.0, learner_s=2.0),
        replay_run("farstep-sac-alternating", 2, 80.0, learner_s=20.0),  # the other has no such seed
        replay_run("cleanrl", 1, 3.2),
        replay_run("sb3", 1, 16.0, reached=False),
        replay_run("rllib", 1, 80.0),
        replay_run("rllib-2", 1, 10.0),
    ]
    text = offpolicy_tables.summary(pendulum(runs))
    assert "one seed: to the threshold, 50 % less time than SAC that alternates" in text
    assert "needs 2.00 ms instead of 4.00 ms per update, 50 % less time" in text
    assert "25 % more time than CleanRL; at least 75 % less time than Stable-Baselines3" in text
    assert "60 % less time than RLlib." in text  # the better number of environments
    late = [{**run, "report": {**run["report"], "reached": False}} for run in runs]
    assert "less time than RLlib" not in offpolicy_tables.summary(pendulum(late))


def test_disturbed_runs_are_named() -> None:
    runs = [replay_run("farstep-sac", 1, 4.0), replay_run("cleanrl", 1, 16.0), replay_run("cleanrl", 2, 16.0)]
    assert "Disturbed runs" not in offpolicy_tables.summary(pendulum(runs))
    runs[0]["others_cpu_s"], runs[2]["others_cpu_s"] = 0.1, 0.9
    text = offpolicy_tables.summary(pendulum(runs))
    assert "Disturbed runs: CleanRL, seed 2 (0.90 cores). In all other runs they used at most 0.10 cores." in text


def test_variants_of_sac_are_compared_by_seed_after_equal_updates() -> None:
    runs = [
        replay_run("farstep-sac", 2, 6.4, learner_s=1.0),
        replay_run("farstep-sac-alternating", 2, 8.0, learner_s=2.0),
        replay_run("farstep-sac-alternating", 3, 8.0, learner_s=2.0),  # the other has no such seed
        replay_run("farstep-sac", 1, 4.0, learner_s=1.0),
        replay_run("farstep-sac-alternating", 1, 10.0, learner_s=1.0, updates=501),
    ]
    text = offpolicy_tables.equal_updates(pendulum(runs, threshold=None))
    assert "1,000 steps, 2 seeds" in text and "takes 40 % less time than SAC that alternates" in text
    first, second = text.splitlines()[-4:-2]
    assert first.replace(" ", "") == "|1|500and501|4.0|10.0|0.40|2.00|2.00|1.00|"
    assert second.replace(" ", "") == "|2|500|6.4|8.0|0.80|2.00|4.00|0.50|"


def test_task_without_threshold_shows_returns() -> None:
    runs = [replay_run("farstep-sac", 1, 4.0, reached=False), replay_run("rllib", 1, 16.0, reached=False)]
    text = offpolicy_tables.summary(pendulum(runs, threshold=None))
    assert "-190 (-190 - -190)" in text and "75 % less time than RLlib" in text and "> " not in text
    runs[1]["report"]["stopped"] = True
    assert "at least 75 % less time than RLlib, whose runs were stopped" in offpolicy_tables.summary(
        pendulum(runs, None)
    )


@pytest.mark.long
def test_benchmark_of_replay_learners_runs_and_continues(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = "--env LunarLander-v3 HalfCheetah-v5 --only farstep-dqn --seeds 1 --max-steps 2400 --images"
    command = [str(BENCHMARKS / "offpolicy.py"), *words.split(), str(tmp_path), "--out", str(out)]

    def benchmark() -> str:
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=170)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = benchmark()
    assert "1 runs of farstep-dqn" in first
    skipped = "HalfCheetah-v5 is skipped: mujoco is not installed" in first
    assert skipped == (importlib.util.find_spec("mujoco") is None)
    (run,) = json.loads(out.read_text())["runs"]
    assert run["status"] == "ok", run["reason"]
    assert run["report"]["updates"] > 0 and 0.0 < run["report"]["learner_s"] <= run["report"]["seconds"]
    assert "| farstep `dqn`" in first and (tmp_path / "offpolicy-lunarlander-v3.png").exists()
    assert "0 runs of farstep-dqn" in benchmark()
