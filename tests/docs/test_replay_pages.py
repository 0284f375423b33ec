"""Pages of replay learners: their commands are run unchanged, and options are explained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from farstep.learners.aride import ArideConfig
from farstep.learners.dqn import ApexConfig
from farstep.learners.sac import SACConfig
from farstep.observe.glossary import METRICS
from tests.docs.test_commands import DOCS, metrics, named, run_farstep

PAGES: dict[str, Any] = {"dqn": ApexConfig(), "sac": SACConfig(), "aride": ArideConfig()}


def option_names(config: Any) -> Iterator[str]:
    for field in fields(config):
        if is_dataclass(value := getattr(config, field.name)):
            yield from option_names(value)
        else:
            yield f"--{field.name.replace('_', '-')}"


@pytest.mark.parametrize("page", PAGES)
def test_the_page_explains_every_option(page: str) -> None:
    assert set(option_names(PAGES[page])) <= named(f"{page}.md")


@pytest.mark.slow
@pytest.mark.usefixtures("torch_in_workers")
@pytest.mark.parametrize("page", PAGES)
def test_the_command_of_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / f"{page}.md").read_text()
    marker = r"<!-- executed by tests/docs/test_replay_pages.py -->\n```bash\n(.*?)^```$"
    (command,) = re.findall(marker, text, re.S | re.M)
    monkeypatch.chdir(tmp_path)
    run_farstep(command)
    (run,) = (tmp_path / "runs").iterdir()
    logged = {name for row in metrics(run) for name in row}
    ratio = "replay/samples_per_step" if page == "aride" else "replay/updates_per_step"
    assert {"env/return_mean", "eval/return_mean", ratio, "train/critic/value_loss"} <= logged
    assert logged <= METRICS.keys()
