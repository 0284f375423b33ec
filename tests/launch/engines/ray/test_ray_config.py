"""Options of Ray's launch configuration, and the error if Ray is not installed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import farstep
from farstep.testing import CountingEnv


def test_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    env = farstep.ClusterEnv({"type": "factory", "env_name": CountingEnv}, farstep.RayConfig(workers_per_node=1))
    with pytest.raises(farstep.LaunchError) as caught:
        env.launch()
    assert str(caught.value) == "Ray is not installed here; install it with `pip install farstep[ray]`."


def test_the_launcher_does_not_import_ray() -> None:
    code = "import sys, farstep.launch.engines.ray.engine\nfarstep.RayConfig()\nassert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"adress": "auto"}, "address"),
        ({"address": ""}, "expected text"),
        ({"address": 6379}, "expected text"),
        ({"address": "ray://host:10001"}, "Ray Client"),
        ({"namespace": 1}, "expected text"),
        ({"resources_per_node": {"camera": 0}}, "amounts by name"),
        ({"resources_per_node": {"camera": float("inf")}}, "amounts by name"),
        ({"resources_per_node": ["camera"]}, "amounts by name"),
        ({"resources_per_node": {"CPU": 4}}, "cpus_per_worker"),
        ({"resources_per_node": {"GPU": 1}}, "gpus_per_node"),
        ({"python": "python3"}, "runtime_env"),
        ({"setup": "module load cuda"}, "runtime_env"),
        ({"nodes": 2, "min_nodes": 3}, "min_nodes <= nodes"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(farstep.ConfigError, match=said):
        farstep.RayConfig.of(options)
