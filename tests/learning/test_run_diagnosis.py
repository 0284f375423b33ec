"""A run of `farstep train` reports each cause of its diagnosis once, in its events and on the terminal."""

from __future__ import annotations

import io
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from farstep.cli import main
from farstep.cli.options.algorithms import ALGORITHMS
from farstep.cli.options.launchers import ENGINES, SharingOptions
from farstep.cli.options.parsing import option_names
from farstep.cli.options.train_options import Options
from farstep.event import Event
from farstep.learners.loop import diagnosing
from farstep.learners.loop.diagnosing import RunDiagnosis
from farstep.observe.diagnosis import Diagnosis
from farstep.observe.diagnosis.causes import RULES
from farstep.observe.event_files import read_events
from farstep.observe.status import LiveSource
from farstep.observe.terminal.console import LiveDisplay
from farstep.testing import FakeClock
from tests.learning.tasks import make_env

PPO = ["train", "ppo", "--env", "CartPole-v1", "--launcher", "in-process", "--name", "run"]


def warned(folder: Path) -> list[Event]:
    return [event for event in read_events(folder / "run" / "events.jsonl") if event.kind == "warned"]


def test_the_paper_case_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """AAPS with the loss of the paper: clipping around old weights stalls the learner, so that no worker ever pulls.

    With default options an update has 4,096 rows, so that even 60,000 steps are only 15 updates.
    """
    monkeypatch.setattr(diagnosing, "EVERY_S", 0.0)
    options = ["--num-envs", "16", "--total-steps", "28000", "--folder", str(tmp_path)]  # 7 updates
    assert main([*PPO, "--kl-threshold", "0.05", "--no-decoupled", *options]) == 0
    (found,) = [event.text for event in warned(tmp_path) if "stalls at its clip range" in event.text]
    assert "the loss clips around those" in found and "Use the decoupled loss" in found
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("steps ")]
    assert lines[-1].endswith("so the learner stalls at its clip range.")


def test_a_run_of_the_command_line_is_advised_to_change_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rule,) = [rule for rule in RULES if rule.cause == "slow environment"]
    found = Diagnosis(
        cause=rule.cause, text="Slow.", remedy=rule.remedy, options_remedy=rule.options_remedy, is_problem=True
    )
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(diagnosing, "EVERY_S", 0.0)
    monkeypatch.setattr("farstep.run.launched_run.LaunchedRun.diagnoses", lambda *_: [found])
    monkeypatch.setattr("farstep.run.launch_monitor.LaunchMonitor.diagnoses", lambda *_: [found])
    monkeypatch.setattr(LiveSource, "close", lambda page: shown.append(page.read()))
    options = ["--folder", str(tmp_path), "--num-envs", "4", "--num-steps", "16", "--total-steps", "192"]
    assert main([*PPO, *options]) == 0
    (event,) = warned(tmp_path)
    assert event.text.startswith("Slow. Add workers (--workers, on a cluster")
    assert {each["remedy"] for page in shown for each in page["diagnoses"]} == {rule.options_remedy}
    with make_env("CartPole-v1", 1, launcher="in-process") as env:
        assert env.diagnose().remedy == rule.remedy


def test_remedies_name_options_that_exist() -> None:
    known = {
        name
        for algorithm in ALGORITHMS.values()
        for nodes in (SharingOptions, *ENGINES.values())
        for name in option_names(Options[algorithm.config, nodes])  # type: ignore[name-defined, valid-type]
    }
    for rule in RULES:
        if rule.cause in ("trigger never fires", "limiter blocks", "small buffer"):
            continue  # only of users' own workflows
        remedy = rule.options_remedy or rule.remedy
        assert set(re.findall(r"--[\w-]+", remedy)) <= known, rule.cause
        if rule.cause != "kl_threshold without effect":  # each of its cases has a remedy of its own
            assert not re.search(r"env\.\w|(?<![/\w])[a-z]+_[a-z_]+", remedy), remedy


class ScriptedDiagnoses:
    """Replaces `diagnoses_of`: returns prepared diagnoses, in turn."""

    def __init__(self, *rounds: tuple[str, ...]) -> None:
        self.rounds = list(rounds)

    def __call__(self, env: Any, metrics: Any) -> list[Diagnosis]:
        causes = self.rounds.pop(0)
        return [Diagnosis(cause=each, text=f"{each}.", remedy="Do.", is_problem=each != "healthy") for each in causes]


def test_a_run_warns_once_about_each_cause_that_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [("memory",), ("healthy",), ("memory",), ("memory", "straggler"), ("memory", "straggler"), ("straggler",)]
    scripted = ScriptedDiagnoses(*rounds)
    monkeypatch.setattr(diagnosing, "diagnoses_of", scripted)
    clock, env, shown = FakeClock(), make_env("CartPole-v1", 1, launcher="in-process"), []
    diagnosis = RunDiagnosis(env, clock)
    diagnosis.on_diagnosis = lambda found: shown.append(found.cause)
    after = []
    for _ in rounds:
        diagnosis.observe({"update": 1.0})  # too early
        clock.advance(diagnosing.EVERY_S)
        diagnosis.observe({"update": 2.0})
        after.append([event.text for event in env.events("warned")])
    env.close()
    memory, straggler = "memory. Do.", "straggler. Do."
    assert after == [[], [], [], [memory], [memory, straggler], [memory, straggler]]
    assert shown == ["memory", "healthy", "memory", "memory", "memory", "straggler"]


def test_the_live_display_shows_diagnosis_and_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=40)
    monkeypatch.setattr("farstep.cli.train.console_logger", partial(LiveDisplay, console=console))
    monkeypatch.setattr(diagnosing, "EVERY_S", 0.0)
    monkeypatch.setattr(diagnosing, "diagnoses_of", lambda *_: [Diagnosis(cause="memory", text="Memory runs out.")])
    options = ["--folder", str(tmp_path), "--num-envs", "4", "--num-steps", "16", "--total-steps", "128"]
    assert main([*PPO, *options]) == 0
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "Memory runs out." in text and "joined" in text
