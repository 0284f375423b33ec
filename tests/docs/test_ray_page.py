"""The example of Ray's page is run on a real cluster, and the page names tests that there are."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tests.docs.test_readme import ROOT, example
from tests.engines.ray_nodes import QUIET


@pytest.mark.timeout(240)
def test_the_example_prints_what_it_says(tmp_path):
    if importlib.util.find_spec("ray") is None and os.environ.get("FARSTEP_ENGINES") != "required":
        pytest.skip("pip install farstep[ray]")
    code, printed = example("docs/ray.md")
    script = tmp_path / "example.py"
    script.write_text(code)
    environment = {**os.environ, **QUIET, "RAY_ADDRESS": "127.0.0.1:9"}  # the example starts a cluster all the same
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environment
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == printed


def test_every_promise_has_its_test():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/ray.md").read_text()))
    defined = set(re.findall(r"^def (test_\w+)", (ROOT / "tests/cluster/test_ray.py").read_text(), re.M))
    assert named and named <= defined


def test_page_gives_the_seconds_that_the_first_node_may_be_silent():
    from farstep.launch.engines.ray import engine as ray

    assert f"silent for {ray.GONE_S:g} seconds" in (ROOT / "docs/ray.md").read_text()


def test_the_page_has_every_option_of_its_own():
    from farstep.config.launch import EngineConfig, RayConfig

    page = (ROOT / "docs/ray.md").read_text()
    for name in set(RayConfig.__dataclass_fields__) - set(EngineConfig.__dataclass_fields__):
        assert f"`{name}" in page, name
