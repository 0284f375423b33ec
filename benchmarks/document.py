"""What the files under ``results/`` have in common: date, command and machine; and the tables of the README."""

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


def header(script: str) -> dict[str, object]:
    """How every document begins; the command does not say where on this machine things are."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", f"benchmarks/{script}", *words]),
        "machine": machine(),
    }


def write_document(path: Path, document: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


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
    """What lscpu calls the processor; ARM kernels leave the name out of /proc/cpuinfo."""
    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or "unknown"
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("Model name:")]
    return named[0] if named else "unknown"


def write_markdown(path: Path, text: str, marks: tuple[str, str]) -> None:
    """Put ``text`` between the marks of an existing file; without them the file becomes the text."""
    before = path.read_text() if path.exists() else ""
    path.write_text(put_between(before, text, marks) if all(mark in before for mark in marks) else text + "\n")


def put_between(page: str, text: str, marks: tuple[str, str]) -> str:
    """The page with ``text`` between its marks."""
    begin, end = marks
    head, rest = page.split(begin, 1)
    return f"{head}{begin}\n\n{text}\n\n{end}{rest.split(end, 1)[1]}"
