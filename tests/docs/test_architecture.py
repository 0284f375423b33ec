"""Files and folders that pages for contributors name exist; the map has all folders and layers."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "farstep"
MAP, INTERNALS, GLOSSARY = (
    (ROOT / "docs" / f"{name}.md").read_text() for name in ("architecture", "internals", "glossary")
)


def named_paths(text: str) -> set[str]:
    """Everything in backticks that is a path: it ends in `.py` or a slash."""
    return set(re.findall(r"`((?:\w+/)*(?:\w+\.py|\w+/))`", text))


def folders() -> set[str]:
    """The package's folders with modules, as the page writes them."""
    parents = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    return {f"{folder}/" for folder in parents - {"."}}


def layers() -> list[list[str]]:
    """Import-linter's layers, top first, as the page writes them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (rows,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    modules = [[name.strip().removeprefix("farstep.") for name in re.split(r"[:|]", row)] for row in rows]
    return [[f"{name}/" if (PACKAGE / name).is_dir() else f"{name}.py" for name in row] for row in modules]


def test_named_files_and_folders_exist() -> None:
    paths = named_paths(MAP + INTERNALS + GLOSSARY)
    assert len(paths) > 60
    assert sorted(path for path in paths if not (PACKAGE / path).exists()) == []


def test_files_that_the_contributing_page_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = {path for path in re.findall(r"`((?:[\w.]+/)+\w*(?:\.\w+)?)`", text) if "NAME" not in path}
    paths.discard("build/site")  # made by `make docs`
    assert len(paths) > 30
    assert (
        sorted(path for path in paths if not any((home / path).exists() for home in (ROOT, PACKAGE, ROOT / "src")))
        == []
    )


def test_every_folder_is_named() -> None:
    assert sorted(folders() - named_paths(MAP)) == []


def test_layers_are_those_that_lint_checks() -> None:
    table = MAP.partition("| layer | owns |\n|---|---|\n")[2].partition("\n\n")[0]
    assert [re.findall(r"`([\w.]+/?)`", row.split("|")[1]) for row in table.splitlines()] == layers()
