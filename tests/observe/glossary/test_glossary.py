"""Every number that a run logs or counts is in the glossary, and every entry of the glossary occurs in a real run."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import time
import types
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from rich.console import Console

import farstep
from farstep.head.tickets.records import DropCause
from farstep.launch.daemon.process import ProcessStarter
from farstep.learners.aride import ArideConfig
from farstep.learners.async_ppo import AsyncPPOConfig
from farstep.learners.dqn import DQNConfig
from farstep.learners.impala import ImpalaConfig
from farstep.learners.loop.evaluation import Evaluator
from farstep.learners.loop.timing import WORKER_METRICS
from farstep.learners.networks.nets import NetConfig
from farstep.learners.ppo import PPOConfig
from farstep.learners.replay.config import EpisodeReplayConfig, ReplayConfig
from farstep.learners.sac import SACConfig
from farstep.observe.files import read_rows
from farstep.observe.glossary import METRICS, NAMESPACES, STATS, STATS_GROUPS
from farstep.observe.loggers import JsonlLogger, Loggers, TensorBoardLogger, WandbLogger
from farstep.observe.run_status import RunStatus, line
from farstep.observe.terminal.console import PlainLines
from farstep.observe.terminal.panel import panel
from farstep.testing import FaultyEnv, TableAgent
from farstep.workflow.triggers import DataKeyTrigger, TimeTrigger
from tests.cluster.checks import cluster, in_process, within
from tests.cluster.flows import full
from tests.cluster.sharing import serving, shared
from tests.cluster.tables import ENDLESS
from tests.cluster.test_workflow_members import on_nodes
from tests.learning.tasks import Config, make_env, make_training

SOURCE = Path(farstep.__file__).parent


class Seen:
    """Names of the metrics and entries of `stats()` that runs have had."""

    def __init__(self) -> None:
        self.metrics: set[str] = set()
        self.stats: set[str] = set()
        self.last: dict[str, float] = {}
        """The latest value of each metric."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics |= {"step", *metrics}
        self.last |= metrics

    def close(self) -> None: ...


def entries(found: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of everything in `stats()`, text and None included."""
    if isinstance(found, (Mapping, list)):
        for key, part in found.items() if isinstance(found, Mapping) else enumerate(found):
            yield from entries(part, f"{path}/{key}" if path else str(key))
    else:
        yield path


def entry_of(path: str) -> str:
    """The name of the only entry of the glossary that describes this path of `stats()`."""
    (name,) = [name for name, metric in STATS.items() if metric.labels(path) is not None] or [f"no entry for {path}"]
    return name


def train(seen: Seen, env: farstep.ClusterEnv, config: Config, total_steps: int, **options: Any) -> None:
    with env:
        training, _ = make_training(env, config, total_steps, sink=seen, **options)
        training.run()
        seen.stats |= set(entries(stats := env.stats()))
        counted = {name.removeprefix("farstep/"): value for name, value in farstep.scalars(stats).items()}
        same = counted.keys() & seen.last.keys()
        assert len(same) > 3 and {name: counted[name] for name in same} == {name: seen.last[name] for name in same}
        assert seen.last["train/actor/current_version"] == counted["versions/current"]
        assert seen.last["sync/pulls_per_worker"] == counted["pulls/total"] / env.num_workers
        seen.last.clear()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def seen(one_thread: None, zygote_with_torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What the runs below log and count: every learner, with every option that adds a metric."""
    seen, folder = Seen(), tmp_path_factory.mktemp("runs")
    everything = PPOConfig(
        num_steps=8,
        rollout_epochs=2,
        critic_warmup_updates=1,
        target_kl=1e-9,
        value_clip=0.1,
        anneal_lr=True,
        scaling="noise",
        net=NetConfig(recurrent="gru"),
    )
    env = make_env("CartPole-v1", 4, launcher="in-process", kl_threshold=0.01, stagger={"horizon": 16})
    evaluator = Evaluator(farstep.EnvConfig(env_name="CartPole-v1", envs_per_node=2), 2, 1, launch=in_process())
    try:
        train(seen, env, everything, 300, checkpoints=folder, evaluator=evaluator, eval_every=64)
    finally:
        evaluator.close()
    interpolated = AsyncPPOConfig(
        num_steps=8, recompute_logprobs=False, micro_batch_size=8, huber_delta=1.0, num_chunks=1
    )
    train(seen, make_env("CartPole-v1", 4, launcher="in-process"), interpolated, 100)
    impala = ImpalaConfig(num_steps=8, critic_warmup_updates=1)
    train(seen, make_env("CartPole-v1", 4, launcher="in-process"), impala, 100, releases_device=True)
    replay = ReplayConfig(learning_starts=20, batch_size=8, report_every=20)
    train(seen, make_env("CartPole-v1", 4, launcher="in-process"), DQNConfig(replay=replay), 100)
    train(seen, make_env("Pendulum-v1", 4, launcher="in-process"), SACConfig(replay=replay), 100)
    of_episodes = EpisodeReplayConfig(learning_starts=20, batch_size=2, report_every=20)
    aride = ArideConfig(replay=of_episodes, filter_quantile=0.5, refresh_every=1)
    train(seen, make_env("CartPole-v1", 4, launcher="in-process"), aride, 200)
    with cluster(envs=2, inference="served") as env:
        env.collect(TableAgent(), 4)
        seen.stats |= set(entries(env.stats()))
    with serving(folder / "coordinator", slots=1) as name, shared(name, workers=1) as env:
        seen.stats |= set(entries(env.stats()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessStarter, "shared", zygote_with_torch)
        _drop_chunks(seen, folder)
    _run_workflow(seen)
    _run_workflow_on_nodes(seen, folder)
    return seen


def _drop_chunks(seen: Seen, folder: Path) -> None:
    """Train while chunks become stale, calls are cancelled, an environment raises and a worker dies."""
    env = make_env("CartPole-v1", 4, launcher="in-process")

    class PublishesOften:
        agent: Any = None

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            seen.log(step, metrics)
            for _ in range(3):
                env.publish(self.agent)

    with env:
        training, agent = make_training(env, AsyncPPOConfig(num_steps=8), 200, sink=(sink := PublishesOften()))
        sink.agent = agent
        next(stream := env.stream(agent, steps=8))
        stream.close()
        training.run()
        seen.stats |= set(entries(env.stats()))
    for fault, launcher in (("raise", "in-process"), ("sigkill", "local")):
        kwargs = {"fault": fault, "phase": "step", "at": 12, "marker": str(folder / fault)}
        env = make_env(FaultyEnv, 2, launcher=launcher, workers=1, env_kwargs=kwargs)
        train(seen, env, PPOConfig(num_steps=8), 64)


def _run_workflow(seen: Seen) -> None:
    with cluster(envs=2, config=in_process(), env_kwargs=ENDLESS) as env:
        flow = farstep.Workflow(env, TableAgent(), full(64), steps=4)
        flow.on(DataKeyTrigger(n=1, size=8), flow.batch, name="learn")
        flow.on(TimeTrigger(8, unit="env_steps"), lambda message: None, name="look")
        within(lambda: flow.run(total_steps=32))
        seen.stats |= set(entries(env.stats()))


def _run_workflow_on_nodes(seen: Seen, folder: Path) -> None:
    """A node is killed after its worker has rolled a part of the window for which a trigger waits."""
    with on_nodes(folder, 2, 2) as env:
        rows = 65536  # too many for a worker to complete the window before its node is killed
        flow = farstep.Workflow(env, TableAgent(), full(2 * rows), steps=4)
        flow.on(DataKeyTrigger(n="all", size=rows), flow.batch)
        killed: list[int] = []

        def has_lost_rows() -> bool:
            if not killed and min(map(flow.ledger.written, (0, 1))) >= 4:
                seen.stats |= set(entries(env.stats()))
                killed.append(env.stats()["nodes"][0]["pid"])
                os.kill(killed[0], signal.SIGKILL)
            time.sleep(0.01)  # processes start and end meanwhile, and need the CPU time
            return "worker_left" in env.stats()["dropped"]

        within(lambda: flow.run(until=has_lost_rows), 120)
        seen.stats |= set(entries(env.stats()))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_runs_log_exactly_the_metrics_of_the_glossary(seen: Seen) -> None:
    assert sorted(seen.metrics - METRICS.keys()) == [], "logged and not in the glossary"
    assert sorted(METRICS.keys() - seen.metrics) == [], "in the glossary and not logged"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stats_have_exactly_the_entries_of_the_glossary(seen: Seen) -> None:
    assert sorted({entry_of(path) for path in seen.stats} ^ STATS.keys()) == []


def test_every_cause_of_a_dropped_chunk_has_an_entry() -> None:
    assert {name for name in STATS if name.startswith("dropped/")} == {
        f"dropped/{cause}" for cause in get_args(DropCause)
    }


def test_each_quantity_has_one_entry() -> None:
    for groups, entries_by_name in ((NAMESPACES, METRICS), (STATS_GROUPS, STATS)):
        listed = [metric for group in groups for metric in group.metrics]
        assert len(listed) == len(entries_by_name), "a name occurs twice"
        assert all(metric.name.startswith(group.prefix) for group in groups for metric in group.metrics)
    assert all(STATS[name] is METRICS[name] for name in METRICS.keys() & STATS.keys())
    meanings = [metric.meaning for metric in METRICS.values()]
    assert sorted({meaning for meaning in meanings if meanings.count(meaning) > 1}) == []


def test_entries_refer_to_the_metrics_that_are_computed_from_them() -> None:
    assert {metric.logged_as for metric in STATS.values()} - {""} <= METRICS.keys()
    assert {part: STATS[f"time/workers/{part}"].logged_as for part in WORKER_METRICS} == WORKER_METRICS


def test_labels_match_the_parts_in_angle_brackets() -> None:
    entry = STATS["time/per_worker/<worker>/env"]
    assert entry.labels("time/per_worker/12/env") == {"worker": "12"}
    assert entry.labels("time/per_worker/12/send") is None
    assert STATS["steps"].labels("steps") == {}


@pytest.fixture
def all_metrics() -> dict[str, float]:
    return {name: 1.0 for name in METRICS if name != "step"}


def test_each_logger_keeps_the_names_of_the_glossary(
    all_metrics: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, float]] = []
    wandb: Any = types.ModuleType("wandb")
    wandb.Settings = dict
    run = types.SimpleNamespace(log=rows.append, define_metric=lambda *names, **options: None, finish=lambda: None)
    wandb.init = lambda **options: run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Loggers(JsonlLogger(tmp_path / "m"), TensorBoardLogger(tmp_path / "tb"), WandbLogger("project")) as loggers:
        loggers.log(128, all_metrics)
    reader = events.EventAccumulator(str(tmp_path / "tb"))
    reader.Reload()
    assert set(read_rows(tmp_path / "m")[0]) == set(rows[0]) == {"step", *reader.Tags()["scalars"]} == set(METRICS)


class Asked(dict[str, float]):
    """Remembers which metrics were asked for."""

    def __init__(self, metrics: Mapping[str, float]) -> None:
        super().__init__(metrics)
        self.names: set[str] = set()

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)

    def __getitem__(self, name: str) -> float:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def test_the_terminal_shows_only_metrics_of_the_glossary(all_metrics: dict[str, float]) -> None:
    status = RunStatus(1000)
    status.update(128, all_metrics, 0.0)
    status.latest = asked = Asked(all_metrics)
    console = Console(file=io.StringIO(), width=100)
    console.print(panel(status, "title", 1.0, 1.0, 100))
    line(status, 1.0)
    assert len(asked.names) > 10 and sorted(asked.names - METRICS.keys()) == []


def test_a_learner_may_log_names_of_its_own(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    with Loggers(JsonlLogger(tmp_path / "m"), PlainLines(1000, console)) as loggers:
        loggers.log(128, {"train/mine/loss": 0.5, "time/mine": 1.0})
    assert read_rows(tmp_path / "m") == [{"step": 128, "train/mine/loss": 0.5, "time/mine": 1.0}]


def test_names_in_the_sources_are_in_the_glossary() -> None:
    """Code that reads metrics (warnings, diagnosis, plots, benchmarks) uses names of the glossary."""
    prefixes = "|".join(re.escape(namespace.prefix) for namespace in NAMESPACES if namespace.prefix)
    literal = re.compile(rf"""["'`]((?:{prefixes})[a-z][a-z0-9_/]*)["'`]""")
    folders = (SOURCE, SOURCE.parents[1] / "benchmarks", SOURCE.parents[1] / "examples")
    files = [file for folder in folders for file in folder.rglob("*.py") if not {"glossary", ".venvs"} & {*file.parts}]
    found = {name for file in files for name in literal.findall(file.read_text())}
    paths = {path for name in STATS for path in (name, name.rpartition("/")[0])}
    assert len(found) > 30 and sorted(found - METRICS.keys() - paths) == []


def test_displays_take_labels_and_units_from_the_glossary(
    all_metrics: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = "rate/steps_per_second"
    monkeypatch.setitem(METRICS, speed, replace(METRICS[speed], label="pace", unit="steps/min"))
    monkeypatch.setitem(METRICS, "time/collect", replace(METRICS["time/collect"], label="waiting"))
    status = RunStatus(1000)
    status.update(128, all_metrics, 0.0)
    console = Console(file=(shown := io.StringIO()), width=100)
    console.print(panel(status, "title", 1.0, 1.0, 100))
    assert "pace" in shown.getvalue() and "1 steps/min" in shown.getvalue() and "waiting" in shown.getvalue()
    assert "1 steps/min" in line(status, 1.0) and "waiting" in line(status, 1.0)
    assert METRICS[speed].title == "Pace in steps/min"
