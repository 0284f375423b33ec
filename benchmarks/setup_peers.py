"""Creates the virtual environments of the peers that the benchmarks compare farstep with.

Each peer gets ``.venvs/<name>`` beside this file, with pinned versions. A second call installs nothing
unless the pins changed; a peer that cannot be installed is reported in one line, and the others are installed.

    python benchmarks/setup_peers.py                 # all peers
    python benchmarks/setup_peers.py envpool rllib   # some
    python benchmarks/setup_peers.py --mujoco sb3    # also MuJoCo, which HalfCheetah-v5 needs
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from children import run_script

VENVS = Path(__file__).resolve().parent / ".venvs"
WHEELS = VENVS / "wheels"
TORCH = "torch==2.13.0"
ENVS = (
    "gymnasium==1.4.0",
    "numpy==2.4.6",
    "ale-py==0.12.1",
    "opencv-python-headless==5.0.0.93",
    "pygame-ce==2.5.8",
)
"""Packages of the environments, in the versions that farstep is measured with (see constraints.txt)."""

OLD_ENVS = ("gymnasium==0.29.1", "ale-py==0.12.1", "opencv-python-headless==4.11.0.86", "pygame-ce==2.5.8")
"""The same for a peer that supports only Gymnasium 0.29 and NumPy 1."""

BOX2D = ("box2d==2.3.10", "box2d-py==2.3.8")
"""Packages of LunarLander: the first has wheels for x86-64 only, the second compiles anywhere."""

MUJOCO = ("mujoco==3.3.2", "imageio")
"""Packages of HalfCheetah, installed only on request: not every platform has wheels. Gymnasium 0.29 needs imageio."""

INSTALL_TIMEOUT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A peer: the packages that pip installs into its environment, after torch and before Box2D."""

    name: str
    requirements: tuple[str, ...]
    sources: tuple[str, ...] = ()
    """Packages whose unpacked source is put on the path, because they cannot be built from PyPI alone."""
    extensions: tuple[str, ...] = ()
    """Packages whose C++ extension is recompiled for this torch, from the source in their wheel."""
    bare: bool = False
    """True for a peer that needs neither torch nor environments."""

    @property
    def pins(self) -> list[str]:
        """All pins; an existing environment with other pins is rebuilt."""
        recompiled = [f"recompiled {package}" for package in self.extensions]
        return [*self.requirements] if self.bare else [TORCH, *self.requirements, *self.sources, *recompiled, *BOX2D]


PEERS = (
    Peer(name="gymnasium", requirements=ENVS),
    Peer(name="sb3", requirements=("stable-baselines3==2.9.2", *ENVS)),
    Peer(name="envpool", requirements=("envpool==1.2.5", *ENVS)),
    Peer(
        name="pufferlib",
        requirements=("gym==0.23.0", "pettingzoo==1.24.1", "psutil==7.1.0", *ENVS),
        sources=("pufferlib==3.0.0",),
    ),
    Peer(name="sample-factory", requirements=("sample-factory==2.1.1", *OLD_ENVS)),
    Peer(name="torchrl", requirements=("torchrl==0.14.1", "tensordict==0.14.3", *ENVS), extensions=("torchrl",)),
    Peer(name="rllib", requirements=("ray[rllib]==2.60.0", "gymnasium==1.2.2", *ENVS[1:])),
    # CleanRL is a set of scripts, not a package: these are its imports, with the Gymnasium that it supports.
    Peer(name="cleanrl", requirements=("gymnasium==0.29.1", "numpy==1.26.4", "tyro==1.0.16", "pygame-ce==2.5.8")),
    # Wheels for x86-64 and Python up to 3.11 only, and no source on PyPI.
    Peer(name="reverb", requirements=("dm-reverb[tensorflow]==0.14.0",), bare=True),
)


class InstallError(Exception):
    """A command of an installation failed; the message is the line of output with the reason."""


def main() -> int:
    known = {peer.name: peer for peer in PEERS}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="PEER", help=f"some of {', '.join(known)}; default: all")
    parser.add_argument("--mujoco", action="store_true", help="also install MuJoCo")
    options = parser.parse_args()
    names = options.names or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"unknown peer {', '.join(unknown)}; known: {', '.join(known)}")
    failures = {}
    for index, name in enumerate(names, start=1):
        say(f"[{index}/{len(names)}] {name}")
        started = time.monotonic()
        try:
            done = install(known[name])
            if options.mujoco:
                pip(VENVS / name / "bin" / "python", "install", "--only-binary", ":all:", *MUJOCO)
        except InstallError as error:
            failures[name] = str(error)
            say(f"      cannot be installed: {error}")
        else:
            say(f"      {done} ({time.monotonic() - started:.0f} s)")
    ready = [name for name in names if name not in failures]
    say(f"ready: {', '.join(ready) or 'none'}")
    for name, reason in failures.items():
        say(f"not installed: {name}: {reason}")
    return 0


def install(peer: Peer) -> str:
    """Install ``peer``'s environment as pinned; returns what was done, in a few words."""
    home = VENVS / peer.name
    marker = home / "installed.json"
    if marker.exists() and json.loads(marker.read_text()) == peer.pins:
        return "is up to date"
    shutil.rmtree(home, ignore_errors=True)
    python = create(home)
    if peer.bare:
        pip(python, "install", *peer.requirements)
        marker.write_text(json.dumps(peer.pins))
        return "installed"
    # torch is installed first and kept; otherwise pip would replace it with the newest one, built for GPUs.
    keep_torch = VENVS / "constraints.txt"
    keep_torch.write_text(f"{TORCH}\n")
    pip(python, "install", TORCH)
    pip(python, "install", "--constraint", keep_torch, *peer.requirements)
    for requirement in peer.sources:
        add_source(python, requirement)
    for package in peer.extensions:
        recompile(python, package)
    add_box2d(python)
    marker.write_text(json.dumps(peer.pins))
    return "installed"


def add_box2d(python: Path) -> None:
    """Install Box2D from a published wheel, or from a wheel that is compiled once for all peers."""
    prebuilt, compiled = BOX2D
    try:
        pip(python, "install", "--only-binary", ":all:", "--no-deps", prebuilt)
        return
    except InstallError:
        pass
    if not any(WHEELS.glob("box2d*.whl")):
        say(f"      compiling {compiled}, about a minute")
        pip(builder(), "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", WHEELS, compiled)
    pip(python, "install", "--no-deps", "--no-index", "--find-links", WHEELS, compiled)


def add_source(python: Path, requirement: str) -> None:
    """Put the unpacked source of ``requirement`` on the path of ``python``, without building it."""
    package = requirement.partition("==")[0]
    target = python.parent.parent / "src" / package
    with tempfile.TemporaryDirectory() as scratch:
        # pip unpacks a source distribution before it gets metadata from setup.py, and setup.py fails at once
        # if NumPy is missing; --no-clean keeps the unpacked files.
        source_only = ("--no-binary", ":all:", "--no-deps", "--no-build-isolation", "--no-clean")
        try:
            pip(builder(), "download", *source_only, "--dest", scratch, requirement, scratch=scratch)
        except InstallError as error:
            reason = error
        else:
            reason = InstallError(f"{requirement}: pip left no unpacked source")
        found = [path for path in Path(scratch).glob(f"*/*/{package}") if path.is_dir()]
        if not found:
            raise reason
        target.parent.mkdir(parents=True)
        shutil.move(found[0].parent, target)
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    Path(purelib, f"{package}-source.pth").write_text(f"{target}\n")


def recompile(python: Path, package: str) -> None:
    """Compile the extension of ``package`` for the installed torch.

    TorchRL's wheels contain an extension for a single version of torch (0.13: before 2.13.0; 0.14: after it), without
    which there are no prioritized buffers. They also contain its C++ source.
    """
    say(f"      compiling the extension of {package}, about two minutes")
    pip(python, "install", "setuptools==80.9.0", "ninja==1.13.2")
    line = [str(python), "-c", RECOMPILE, package]
    done = subprocess.run(line, env=with_programs_of(python), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise InstallError(reason_in(done.stderr.splitlines()))


RECOMPILE = """
import shutil, sys, tempfile
from importlib.util import find_spec
from pathlib import Path
from torch.utils.cpp_extension import load

package = sys.argv[1]
home = Path(find_spec(package).origin).parent
sources = [str(path) for path in (home / "csrc").glob("*.cpp")]
with tempfile.TemporaryDirectory() as scratch:
    load(f"_{package}", sources, extra_cflags=["-O3"], build_directory=scratch, is_python_module=False)
    shutil.copy(Path(scratch, f"_{package}.so"), next(home.glob(f"_{package}*.so")))
"""


def builder() -> Path:
    """The interpreter of an environment with build tools and without NumPy."""
    home = VENVS / "builder"
    marker = home / "installed.json"
    if marker.exists():
        return home / "bin" / "python"
    shutil.rmtree(home, ignore_errors=True)
    python = create(home)
    pip(python, "install", "swig==4.3.1", "setuptools==80.9.0", "wheel==0.45.1")
    marker.write_text("[]")
    return python


def create(home: Path) -> Path:
    VENVS.mkdir(exist_ok=True)
    venv.create(home, with_pip=True)
    return home / "bin" / "python"


def pip(python: Path, command: str, *arguments: object, scratch: str | None = None) -> None:
    """Run pip under ``python``, with the programs of that environment first on the path."""
    environment = with_programs_of(python)
    if scratch is not None:
        environment["TMPDIR"] = scratch
    line = [str(python), "-m", "pip", "--disable-pip-version-check", command, "--quiet"]
    line += [str(argument) for argument in arguments]
    try:
        done = subprocess.run(
            line, env=environment, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"pip {command} took more than {INSTALL_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise InstallError(reason_in(done.stderr.splitlines()))


def with_programs_of(python: Path) -> dict[str, str]:
    """This process's environment, with the programs beside ``python`` first on the path."""
    return {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def reason_in(lines: Iterable[str]) -> str:
    """The most informative line of pip's output about a failure."""
    texts = [line.strip() for line in lines if line.strip()]
    for sign in ("no matching distribution", "modulenotfounderror", "error: command", "error:"):
        for text in texts:
            if sign in text.lower() and "subprocess-exited" not in text:
                return text
    return texts[-1] if texts else "pip said nothing"


def say(text: str) -> None:
    print(text, file=sys.stdout, flush=True)


if __name__ == "__main__":
    run_script(main)
