"""criu from Debian's sources, built once into build/criu; `python -m tests.engines.criu_build` runs its tests.

The criu of Debian 12 is too old for Linux 6.18. Building takes 70 s of two cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from farstep.launch.daemon.criu import PROGRAM
from tests.engines.debian_source import archive_of, run

_ROOT = Path(__file__).parents[2]
_RELEASE = "trixie"
_TESTS = (
    "tests/cluster/test_criu.py",
    "tests/contract/test_start_backends.py",
    "tests/launch/daemon/test_dumpable_worker.py",
)
_NEEDED = (
    "gcc make pkg-config python3-protobuf protobuf-compiler protobuf-c-compiler libprotobuf-dev libprotobuf-c-dev "
    "libnl-3-dev libcap-dev libnet1-dev libaio-dev libgnutls28-dev libnftables-dev uuid-dev libbsd-dev"
)


def build(folder: Path) -> Path:
    """Return the path of criu."""
    source = folder / "source"
    program = source / "criu" / "criu"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        archive = archive_of("criu", folder, _RELEASE)
        source.mkdir(exist_ok=True)
        run(["tar", "--extract", f"--file={archive}", "--strip-components=1"], source)
        print(f"building criu; it needs apt-get install --no-install-recommends {_NEEDED}", flush=True)
        run(["make", f"-j{os.cpu_count() or 1}", "criu"], source)
    return program


def main() -> int:
    environment = {**os.environ, PROGRAM: str(build(_ROOT / "build" / "criu"))}
    command = [sys.executable, "-m", "pytest", "-n", "2", "-rs", *_TESTS, *sys.argv[1:]]
    return subprocess.run(command, cwd=_ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
