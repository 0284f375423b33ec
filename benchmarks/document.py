"""Reads and writes the files under ``results/`` (date, command, machine, runs) and the tables of the README."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def header(script: str) -> dict[str, object]:
    """The first entries of every document; the command contains no absolute paths."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", f"benchmarks/{script}", *words]),
        "machine": machine(),
    }


def continued(path: Path, script: str) -> dict[str, Any]:
    """Open or create the document of a benchmark that is measured in several sittings, and add a sitting.

    Date, command and machine are those of the first sitting; `sittings` has those of all.
    """
    now = header(script)
    document = json.loads(path.read_text()) if path.exists() else {**now, "sittings": [], "runs": []}
    if "sittings" not in document:
        document["sittings"] = [{name: document[name] for name in now}]
    document["sittings"].append(now)
    return document


def machines(document: Mapping[str, Any]) -> str:
    """A description of the machines on which a document was measured."""
    found = [sitting["machine"] for sitting in document.get("sittings", [document])]
    *others, last = dict.fromkeys(f"{machine['cores']} cores ({machine['cpu']})" for machine in found)
    return f"{', '.join(others)} and {last}" if others else last


def check_machine(document: Mapping[str, Any], path: Path) -> None:
    """Exit with an error if a document whose seconds are compared was started on another machine."""
    first, now = ({key: found[key] for key in ("cpu", "cores")} for found in (document["machine"], machine()))
    if first != now:
        raise SystemExit(
            f"{path} was started on {first['cores']} cores ({first['cpu']}); this machine has {now['cores']} "
            f"({now['cpu']}), and seconds cannot be compared: use another --out"
        )


def write_document(path: Path, document: Mapping[str, object]) -> None:
    """Write a document atomically, with one line per run, so that diffs are small."""
    runs = document.get("runs")
    text = json.dumps({**document, "runs": []} if runs else document, indent=1)
    if isinstance(runs, list) and runs:
        lines = ",\n  ".join(json.dumps(run) for run in runs)
        text = text.replace('"runs": []', f'"runs": [\n  {lines}\n ]')
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(text + "\n")
    beside.replace(path)


def machine() -> dict[str, object]:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def cpu_model() -> str:
    """The processor's name according to lscpu; on ARM, /proc/cpuinfo does not have it."""
    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or "unknown"
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("Model name:")]
    return named[0] if named else "unknown"


def write_markdown(path: Path, text: str, marks: tuple[str, str]) -> None:
    """Write ``text`` between the marks of an existing file; without marks, as the whole file."""
    before = path.read_text() if path.exists() else ""
    path.write_text(put_between(before, text, marks) if all(mark in before for mark in marks) else text + "\n")


def put_between(page: str, text: str, marks: tuple[str, str]) -> str:
    """The page, with ``text`` between its marks."""
    begin, end = marks
    head, rest = page.split(begin, 1)
    return f"{head}{begin}\n\n{text}\n\n{end}{rest.split(end, 1)[1]}"
