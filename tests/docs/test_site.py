"""The site of the documentation has every page and public name, its links are right, and it needs no other host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from selenium.webdriver.common.by import By

import farstep
import farstep.buffer
import farstep.elastic
import farstep.learners
import farstep.sync
import farstep.testing
from tests.observe.status.browser import browser

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md"))
PUBLIC = (farstep, farstep.buffer, farstep.elastic, farstep.learners, farstep.sync, farstep.testing)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The built site; a link that leads nowhere fails the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    yield folder


LOADED = re.compile(r"<(?!a\s)\w[^>]*?\s(?:src|href)=[\"']?([^\"'\s>]+)")
"""What a browser loads to show a page; links for the reader, `<a href>`, are not loaded."""


def is_external(address: str) -> bool:
    return re.match(r"(\w+:)?//", address) is not None


def made_by(target: str, venv: Path) -> str:
    """The commands with which make would make a target."""
    command = ["make", "--dry-run", target, f"VENV={venv}"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout


def test_make_docs_installs_only_what_the_site_needs(tmp_path: Path) -> None:
    commands = made_by("docs", tmp_path)
    assert "'.[docs]'" in commands and "mkdocs build" in commands
    assert ",ray," not in commands and ",ray," in made_by("setup", tmp_path)


def test_make_docs_installs_nothing_after_make_setup(tmp_path: Path) -> None:
    assert f"touch {tmp_path}/.docs-ready {tmp_path}/.ready" in made_by("setup", tmp_path)
    for stamp in (".demo-ready", ".docs-ready"):
        (tmp_path / stamp).touch()
    assert "pip install" not in made_by("docs", tmp_path)


def test_navigation_has_every_page() -> None:
    navigation = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(page for page in navigation if not page.startswith("repository/")) == sorted(["index.md", *PAGES])


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    loaded = {address for page in pages for address in LOADED.findall(page.read_text())}
    loaded |= {address for sheet in site.rglob("*.css") for address in re.findall(r"url\(([^)]+)\)", sheet.read_text())}
    assert len(loaded) > 30
    assert sorted(filter(is_external, loaded)) == []


def test_reference_has_every_public_name(site: Path) -> None:
    reference = "".join(page.read_text() for page in site.glob("reference/*.html"))
    shown = set(re.findall(r'id="farstep\.(?:\w+\.)*(\w+)"', reference))
    names = {name for module in PUBLIC for name in module.__all__}
    assert len(names) > 80
    assert sorted(names - shown) == []


def test_reference_describes_options_arguments_and_errors(site: Path) -> None:
    configuration = (site / "reference" / "configuration.html").read_text()
    assert "Number of environments on each node." in configuration and "or_mapping" not in configuration
    environments = (site / "reference" / "environments.html").read_text()
    assert all(f">{section}:</" in environments for section in ("Parameters", "Returns", "Raises"))


def test_lists_tables_and_code_are_those_of_a_repository_host(site: Path) -> None:
    host = MarkdownIt("commonmark").enable("table")
    for page in PAGES:
        if not page.startswith("reference/"):
            article = (site / page).with_suffix(".html").read_text().partition("<article")[2].partition("</article")[0]
            expected = host.render((ROOT / "docs" / page).read_text())
            for tag in ("li", "table", "pre"):
                assert len(re.findall(rf"<{tag}[ >]", article)) == expected.count(f"<{tag}>"), (page, tag)


def test_search_works_from_a_folder(site: Path) -> None:
    with browser() as window:
        window.driver.get(f"file://{site}/index.html")
        window.driver.find_element(By.CSS_SELECTOR, "input[data-md-component=search-query]").send_keys("max_staleness")
        window.wait(lambda: "Your own learner" in window.text("[data-md-component=search-result]"))
        assert window.errors() == []
