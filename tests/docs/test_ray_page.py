"""Ray's page has every option, and names existing tests. tests/cluster/test_ray.py runs its example."""

import re

from tests.docs.test_readme import ROOT


def test_every_promise_has_its_test():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/ray.md").read_text()))
    defined = set(re.findall(r"^def (test_\w+)", (ROOT / "tests/cluster/test_ray.py").read_text(), re.M))
    assert named and named <= defined


def test_page_gives_the_seconds_that_the_first_node_may_be_silent():
    from farstep.launch.engines.ray import engine as ray

    assert f"not answered for {ray.GONE_S:g} seconds" in (ROOT / "docs/ray.md").read_text()


def test_the_page_has_every_option_of_its_own():
    from farstep.config.launch import EngineConfig, RayConfig

    page = (ROOT / "docs/ray.md").read_text()
    for name in set(RayConfig.__dataclass_fields__) - set(EngineConfig.__dataclass_fields__):
        assert f"`{name}" in page, name
