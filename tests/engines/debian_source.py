"""Downloads source packages of Debian."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def archive_of(package: str, folder: Path, release: str | None = None) -> Path:
    """Return the archive of a source package, without Debian's patches. Download it unless it is in `folder`.

    Args:
        package: The name of the package.
        folder: Where to keep it.
        release: The release of Debian. None: that of this machine.
    """
    if not list(folder.glob(f"{package}_*.orig.tar.*")):
        print(f"downloading the source package {package}", flush=True)
        (folder / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        sources = folder / "src.sources"
        known = Path("/etc/apt/sources.list.d/debian.sources").read_text()
        known = re.sub(r"^Types: deb$", "Types: deb-src", known, flags=re.M)
        if release is not None:
            known = re.sub(r"^Suites: [a-z]+", f"Suites: {release}", known, flags=re.M)
            known = re.sub(r" [a-z]+-updates", f" {release}-updates", known)
        sources.write_text(known)
        settings = {
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::Etc::SourceList": sources,
            "Dir::State::Lists": folder / "lists",
            "APT::Sandbox::User": "root",
        }
        apt = ["apt-get", *(f"-o{key}={value}" for key, value in settings.items())]
        run([*apt, "update"], folder)
        run([*apt, "source", "--download-only", "--tar-only", package], folder)
    (archive,) = folder.glob(f"{package}_*.orig.tar.*")
    return archive


def run(command: Sequence[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    """Run a command; exit with its output if it fails."""
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{' '.join(command)[:500]} failed:\n{done.stdout.decode(errors='replace')[-4000:]}")
