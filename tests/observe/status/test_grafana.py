"""The Grafana dashboard: a real Prometheus answers all its queries for two real runs of one process."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from farstep.cli import main
from farstep.cluster_env import status_page_of
from farstep.learners.dqn import DQNConfig
from farstep.learners.ppo import PPOConfig
from farstep.learners.replay.config import ReplayConfig
from farstep.observe.glossary import EXPOSED, METRICS, STATS
from farstep.observe.status.grafana import dashboard
from farstep.observe.status.openmetrics import sample_name
from tests.learning.tasks import Config, make_env, make_training
from tests.observe.status.test_prometheus import DEADLINE_S, prometheus, query


def queries(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel.get("targets", ())]


PANELS = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def test_queries_have_only_names_of_the_glossary() -> None:
    known = {sample_name(metric) for metric in [*METRICS.values(), *STATS.values(), *EXPOSED.values()]}
    used = {name for panel in PANELS for query in queries(panel) for name in re.findall(r"farstep_\w+", query)}
    assert len(used) > 60 and used - known == set()


def test_panels_are_described_and_do_not_overlap() -> None:
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in dashboard()["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) == 23
    assert all(panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS)
    assert not any("](" in panel["description"] for panel in PANELS)


def test_dashboard_has_the_form_that_grafana_describes(tmp_path: Path) -> None:
    """Grafana's own types read the written file and keep everything in it."""
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    assert main(["status", "--grafana", str(tmp_path / "dashboard.json")]) == 0
    written = json.loads((tmp_path / "dashboard.json").read_text())
    plugins.register_default_plugins()
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(written)))
    assert kept(written, read) == written


def kept(written: Any, read: Any) -> Any:
    """What was written, as far as it was read."""
    if isinstance(written, dict):
        return {key: kept(value, read[key]) for key, value in written.items() if key in read}
    if isinstance(written, list):
        return [kept(*pair) for pair in zip(written, read, strict=True)]
    return read


def train(env: Any, title: str, config: Config, total_steps: int) -> str:
    """Train a little, with a status page; return its address."""
    page = status_page_of(env)
    page.source.describe(title, {}, total_steps)
    training, _ = make_training(env, config, total_steps, sink=page.source)
    training.run()
    return page.url


@pytest.mark.slow
@pytest.mark.usefixtures("torch_in_workers")
def test_prometheus_has_data_for_every_panel(tmp_path: Path) -> None:
    replay = ReplayConfig(learning_starts=20, batch_size=8, report_every=20)
    with (
        make_env("CartPole-v1", 4, workers=2, kl_threshold=0.01) as first,
        make_env("CartPole-v1", 4, workers=1, inference="served") as second,
    ):
        urls = [train(first, "dqn", DQNConfig(replay=replay), 200), train(second, "ppo", PPOConfig(num_steps=16), 128)]
        with prometheus(tmp_path, *urls) as address:
            deadline = time.monotonic() + DEADLINE_S
            while len(query(address, f"count_over_time({sample_name(EXPOSED['run/title'])}[1m]) > 2")) < 2:
                assert time.monotonic() < deadline, "Prometheus has not read both runs"
                time.sleep(0.2)
            runs = chosen_runs(address)
            assert runs.keys() == {"dqn", "ppo"}
            for panel in PANELS:
                assert any(answers(address, panel, run) for run in runs.values()), panel["title"]
            workers = query(address, f'farstep_workers_states_info{{instance="{runs["dqn"]}"}}')
            assert [each["metric"]["value"] for each in workers] == ["alive", "alive"]  # type: ignore[index]


def chosen_runs(address: str) -> dict[str, str]:
    """The runs that Grafana offers: their titles and what queries get, as its variable extracts them."""
    variable = dashboard()["templating"]["list"][1]
    expression = re.fullmatch(r"query_result\((.+)\)", variable["query"].replace("$__range", "1m"))
    assert expression is not None
    pattern = re.compile(variable["regex"].removeprefix("/").removesuffix("/g").replace("(?<", "(?P<"))
    found: dict[str, str] = {}
    for result in query(address, expression[1]):
        labels = ", ".join(f'{name}="{value}"' for name, value in result["metric"].items())  # type: ignore[attr-defined]
        matches = [match.groupdict() for match in pattern.finditer(f"{{{labels}}}")]
        text, value = (next(match[key] for match in matches if match[key]) for key in ("text", "value"))
        found[text] = value
    return found


def answers(address: str, panel: dict[str, Any], run: str) -> list[Any]:
    """The series of a panel; fail if Prometheus refuses a query."""
    filled = (each.replace("$run", run).replace("$__rate_interval", "1m") for each in queries(panel))
    return [series for expression in filled for series in query(address, expression)]
