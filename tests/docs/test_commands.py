"""Commands of the pages are run unchanged, and every metric that they log is explained."""

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from farstep.cli import main
from farstep.cli.options.train_options import parse_options
from farstep.learners.async_ppo import AsyncPPOConfig
from farstep.learners.impala import ImpalaConfig
from farstep.learners.networks.nets import NetConfig
from farstep.learners.options.run_config import RunConfig
from farstep.learners.ppo import PPOConfig

pytestmark = pytest.mark.usefixtures("torch_in_workers")
DOCS = Path(__file__).parents[2] / "docs"
LEARNERS = {"ppo": PPOConfig, "async_ppo": AsyncPPOConfig, "impala": ImpalaConfig}


def commands(page: str) -> str:
    """The block of commands that a page says is run here."""
    text = (DOCS / page).read_text()
    (found,) = re.findall(r"<!-- executed by tests/docs/test_commands.py -->\n```bash\n(.*?)^```$", text, re.S | re.M)
    return found


def run_farstep(script: str) -> None:
    """Run commands of the program `farstep` in this process, which has imported torch already."""
    for line in script.splitlines():
        program, *words = shlex.split(line)
        assert program == "farstep" and main(words) == 0, line


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def named(page: str) -> set[str]:
    """All that a page has in backticks."""
    return set(re.findall(r"`([^`\n]+)`", (DOCS / page).read_text()))


@pytest.mark.parametrize("learner", LEARNERS)
def test_every_metric_that_the_command_of_a_learners_page_logs_is_explained(learner, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_farstep(commands(f"{learner}.md"))
    (run,) = (tmp_path / "runs").iterdir()
    logged = {name for row in metrics(run) for name in row}
    assert {"env/return_mean", "eval/return_mean", "train/actor/lr", "time/evaluate"} <= logged
    assert logged <= named("metrics.md")
    assert "(metrics.md#metrics-of-farstep-train)" in (DOCS / f"{learner}.md").read_text()


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_learners_page_has_every_option(learner):
    options = {f"--{field.name.replace('_', '-')}" for field in fields(LEARNERS[learner]) if field.name != "net"}
    assert options <= named(f"{learner}.md")


def test_the_configuration_file_of_the_page_is_accepted(tmp_path):
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", (DOCS / "training.md").read_text(), re.S | re.M)
    (tmp_path / "run.yaml").write_text(text)
    options = parse_options("ppo", ["--config", str(tmp_path / "run.yaml")])
    assert (options.run.env, options.run.env_kwargs) == ("LunarLander-v3", '{"continuous": true}')
    assert (options.learner.learning_rate, options.learner.net.hidden, options.nodes.nodes) == (3e-4, (128, 128), 4)


def test_the_page_of_training_has_every_option():
    page = (DOCS / "training.md").read_text()
    for field in (*fields(RunConfig), *fields(NetConfig)):
        assert f"`--{field.name.replace('_', '-')}" in page, field.name


def test_command_with_a_scaling_rule_changes_the_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_farstep(commands("scaling_rules.md"))
    logged = metrics(tmp_path / "runs" / "adaptive")
    rows = [(row["step"], row["workers/active"]) for row in logged]
    assert rows == [(128, 1), (256, 1), (512, 2), (768, 2), (1024, 2)]
    again = parse_options("ppo", ["--config", str(tmp_path / "runs" / "adaptive" / "config.yaml")])
    assert again.learner.scaling == "schedule:1:2:1:2"


def test_a_run_is_trained_resumed_evaluated_watched_plotted_and_repeated(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    run_farstep(commands("training.md"))
    assert "version 3, after 12,288 steps; 5 episodes" in capfd.readouterr().out
    assert [row["step"] for row in metrics(tmp_path / "runs" / "again")] == [4096]
    run = tmp_path / "runs" / "first"
    assert [row["step"] for row in metrics(run)] == [4096, 8192, 12288]
    assert list((run / "videos").glob("*.mp4")) and (tmp_path / "first.png").exists()
