"""The page of Kubernetes: its commands, code and YAML are valid."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import farstep
from farstep.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", PAGE, re.S | re.M)
    return [re.sub(rf"^{indent}", "", text, flags=re.M) for indent, text in found]


def test_the_command_prints_manifests_that_kubernetes_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = blocks("bash")
    assert main(shlex.split(command)[1:]) == 0
    secret, *jobs = yaml.safe_load_all(capsys.readouterr().out)
    assert [job["metadata"]["namespace"] for job in jobs] == ["rl", "rl"]
    for manifest in (secret, *jobs):
        kubernetes_validate.validate(manifest, "1.34", strict=True)


def test_the_code_runs() -> None:
    for code in blocks("python"):
        names: dict[str, Any] = {"farstep": farstep}
        exec(code, names)
        assert isinstance(names["config"], farstep.KubernetesConfig)


def test_rights_fit_the_schemas_of_kubernetes_and_cannot_read_secrets() -> None:
    (text,) = blocks("yaml")
    account, role, binding = yaml.safe_load_all(text)
    for manifest in (account, role, binding):
        kubernetes_validate.validate(manifest, "1.34", strict=True)
    assert not any("secrets" in rule["resources"] and {"get", "list"} & set(rule["verbs"]) for rule in role["rules"])
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


def test_every_option_is_there() -> None:
    assert not {field.name for field in fields(farstep.KubernetesConfig) if f"`{field.name}`" not in PAGE}
