"""Throughput of Pong rollouts from a worker on another host, with farstep and with Ray's object store.

    python benchmarks/network.py [--rounds 3] [--seconds 8] [--ray .venv/bin/python]

Hosts are network namespaces of this machine (needs root; Debian: iproute2, nftables, openssh-server). Environments
play a recording, so that they cost almost nothing and the transfer is what is measured. The fast network is not
throttled; the slow one has 100 Mbit/s and 25 ms each way. Runs of the contenders alternate. Megabytes are those of
observations, before compression.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from children import run_script
from document import header, write_document, write_markdown
from roster import BENCHMARKS
from tables import table
from tape import recording

sys.path.append(str(BENCHMARKS.parent))
from tests.engines.namespaces import Network
from tests.engines.ray_nodes import RayCluster
from tests.engines.ssh_hosts import SshServer

MARKS = ("<!-- network: begin -->", "<!-- network: end -->")
PORT = 5001
FAST: dict[str, Any] = {}
SLOW: dict[str, Any] = {"delay_ms": 25, "rate_mbit": 100}
PLAIN = {"source": {"compression": "none"}, "encrypted": False}
SEALED = {"source": {"compression": "none"}, "encrypted": True}
SMALL = {"source": {"compression": "auto"}, "encrypted": True}
WAYS: dict[str, dict[str, Any]] = {
    "plain TCP": {"way": "tcp"},
    "farstep, plain": PLAIN,
    "farstep, encrypted": SEALED,
    "farstep, encrypted and compressed": SMALL,
    "Ray's object store": {"way": "ray"},
}
TRAINED = {
    "farstep, training": {**SMALL, "train": True},
    "farstep, training with AAPS": {
        "source": {"compression": "auto", "kl_threshold": 0.05},
        "encrypted": True,
        "train": True,
    },
}
SENDER = """
import socket, sys, time
deadline = time.monotonic() + 30
while True:
    try:
        connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
        break
    except OSError:
        assert time.monotonic() < deadline
        time.sleep(0.05)
data = bytes(1 << 20)
try:
    while True:
        connection.sendall(data)
except OSError:
    pass
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement")
    parser.add_argument("--only", nargs="+", choices=["fast", "slow"], default=["fast", "slow"], help="networks")
    parser.add_argument("--ray", default=sys.executable, help="Python interpreter that has Ray")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "network.json")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write tables to this file, between their marks")
    options = parser.parse_args()
    document: dict[str, Any] = {**header("network.py"), "runs": []}
    with tempfile.TemporaryDirectory() as folder:
        tape = Path(folder, "tape.npy")
        np.save(tape, recording())
        for number in range(1, options.rounds + 1):
            for name, network in (("fast", FAST), ("slow", SLOW)):
                ways = WAYS if name == "fast" else {**WAYS, **TRAINED}
                for way, asked in ways.items() if name in options.only else ():
                    found = run(network, asked, options.seconds, tape, options.ray)
                    document["runs"].append({"round": number, "network": name, "way": way, **found})
                    print(f"round {number}, {name}: {way}: {found}", flush=True)
                    write_document(options.out, document)
    text = summary(document)
    print(f"\n{text}")
    if options.markdown:
        write_markdown(options.markdown, text, MARKS)
    return 0


def run(network: dict[str, Any], asked: dict[str, Any], seconds: float, tape: Path, ray: str) -> dict[str, Any]:
    with Network(["h1", "h2"], **network) as net:
        asked = {"way": "farstep", **asked, "seconds": seconds, "address": net.address("h1"), "port": PORT}
        if asked["way"] == "tcp":
            sender = net.popen("h2", [sys.executable, "-c", SENDER, net.address("h1"), str(PORT)])
            try:
                return head(net, sys.executable, asked)
            finally:
                sender.end()
        if asked["way"] == "ray":
            with RayCluster(1, python=ray, network=net, store_bytes=1 << 30) as cluster:
                return head(net, ray, {**asked, "recording": str(tape)}, cluster.environment)
        with SshServer(network=net) as server:
            return head(net, sys.executable, {**asked, "hosts": ["h2"], "ssh": ["ssh", "-T", *server.options]})


def head(net: Network, python: str, asked: dict[str, Any], environment: dict[str, str] | None = None) -> dict[str, Any]:
    env = {**os.environ, **(environment or {}), "PYTHONPATH": str(BENCHMARKS)}
    began = time.monotonic()
    process = net.popen(
        "h1",
        [python, str(BENCHMARKS / "network_head.py"), json.dumps(asked)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        process.end()
    lines = [line for line in str(output).splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"{asked['way']} failed:\n{errors[-3000:]}")
    return {**json.loads(lines[-1]), "whole_s": round(time.monotonic() - began, 1)}


def summary(document: dict[str, Any]) -> str:
    parts = []
    for network, title in (("fast", "This machine's own network"), ("slow", "100 Mbit/s, 25 ms each way")):
        runs = [run for run in document["runs"] if run["network"] == network]
        if not runs:
            continue
        limit = median(run["megabytes_per_second"] for run in runs if run["way"] == "plain TCP")
        rows = []
        for way in dict.fromkeys(run["way"] for run in runs):
            mine = [run for run in runs if run["way"] == way]
            rates = [run["megabytes_per_second"] for run in mine]
            rate = median(rates)
            syncs = [run.get("weight_syncs") for run in mine]
            rows.append(
                [
                    way,
                    f"{rate:,.1f} ({min(rates):,.1f} - {max(rates):,.1f})",
                    f"{rate / limit:.2f}",
                    f"{median(run['wire_share'] for run in mine):.3f}" if "wire_share" in mine[0] else "-",
                    f"{median(run['weights_megabytes'] for run in mine):,.0f}" if syncs[0] else "-",
                ]
            )
        header_row = ["", "MB/s", "of plain TCP", "bytes on the wire, share", "weights, MB"]
        parts += [f"{title}, medians of {len(mine)} (from the worst to the best):", table(header_row, rows)]
    return "\n\n".join(parts)


if __name__ == "__main__":
    run_script(main)
