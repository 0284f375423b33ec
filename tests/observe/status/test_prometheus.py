"""A real Prometheus reads the metrics of a real run."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

import farstep
from farstep.testing import CountingEnv, TableAgent
from tests.engines.guarded import EngineMissing

pytestmark = pytest.mark.slow  # real processes, or learning

DEADLINE_S = 60.0


def page_config(*urls: str) -> dict[str, Any]:
    """The configuration that docs/status.md shows, with an entry for each of these status pages, read every second."""
    page = (Path(__file__).parents[3] / "docs/status.md").read_text()
    (shown,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.S | re.M)
    (host, token), *_ = re.findall(r"http://([\w.:]+)/\?token=(\w+)", page)
    config: dict[str, Any] = yaml.safe_load(shown)
    (job,) = config["scrape_configs"]
    entry = json.dumps(job["static_configs"][0])
    assert host in entry and token in entry
    job["static_configs"] = [
        json.loads(entry.replace(host, url.netloc).replace(token, parse_qs(url.query)["token"][0]))
        for url in map(urlsplit, urls)
    ]
    job["scrape_interval"] = "1s"
    return config


@contextlib.contextmanager
def prometheus(folder: Path, *urls: str) -> Iterator[str]:
    """Context manager: start a Prometheus that reads status pages; yield its address."""
    program = shutil.which("prometheus")
    if program is None:
        raise EngineMissing("prometheus")
    config = folder / "prometheus.yml"  # JSON is YAML
    config.write_text(json.dumps(page_config(*urls)))
    options = [
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        "--log.format=json",
    ]
    with subprocess.Popen([program, *options], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                entry = json.loads(line)
                if entry.get("msg") == "Listening on" and entry.get("address", "").startswith("127.0.0.1:"):
                    yield f"http://{entry['address']}"
                    return
            raise AssertionError("Prometheus did not start")
        finally:
            process.kill()
            process.stderr.read()


def query(address: str, expression: str) -> list[dict[str, object]]:
    parameters = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"{address}/api/v1/query?{parameters}", timeout=DEADLINE_S) as answer:
            return list(json.loads(answer.read())["data"]["result"])
    except urllib.error.HTTPError as error:
        if error.code == 503:  # not ready yet
            return []
        raise AssertionError(f"{expression}: {error.read().decode()}") from error


def test_prometheus_reads_counters_by_worker(tmp_path: Path) -> None:
    described = {"type": "factory", "env_name": CountingEnv, "envs_per_node": 4}
    with farstep.ClusterEnv(described, {"workers_per_node": 2}) as env:
        env.collect(TableAgent(), steps=8)
        with prometheus(tmp_path, env.status_url) as address:
            deadline = time.monotonic() + DEADLINE_S
            while not (found := query(address, "farstep_steps_total")):
                assert time.monotonic() < deadline, "Prometheus has read nothing"
                time.sleep(0.2)
            assert [float(each["value"][1]) for each in found] == [32.0]  # type: ignore[index]
            workers = query(address, "farstep_time_per_worker_env_seconds_total")
            assert sorted(each["metric"]["worker"] for each in workers) == ["0", "1"]  # type: ignore[index]
