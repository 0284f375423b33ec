"""The contenders of the benchmarks against peers, and the interpreter of each."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

BENCHMARKS = Path(__file__).resolve().parent
OWN = "farstep"
"""The virtual environment of this repository; every other name is one of setup_peers.py."""

LIMITS = {"eager": "limit-eager", "fast": "limit-fast", "none": "steps-alone"}
"""The limit that a contender is compared with, by kind of inference."""

FARSTEP = ("farstep-stream", "farstep-collect")
"""The contenders that others are compared with: the faster of these."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A script, its options, and the environment of its packages."""

    name: str
    script: str
    venv: str
    options: tuple[str, ...] = ()
    inference: str = "eager"
    """``fast`` if farstep's recorded inference path acts, ``eager`` if the policy is called directly, ``none`` without
    a policy."""
    by_default: bool = True
    """False for variants, which run only if ``--only`` names them."""
    envs: tuple[str, ...] = ()
    """The environments that it supports; empty: all."""

    @property
    def interpreter(self) -> Path | None:
        """The Python interpreter to run it with; None if it is not installed."""
        home = BENCHMARKS.parent / ".venv" if self.venv == OWN else BENCHMARKS / ".venvs" / self.venv
        marker = home if self.venv == OWN else home / "installed.json"
        python = home / "bin" / "python"
        return python if marker.exists() and python.exists() else None

    @property
    def how_to_install(self) -> str:
        return "make setup" if self.venv == OWN else f"python benchmarks/setup_peers.py {self.venv}"

    def command(self, arguments: list[str]) -> list[str]:
        script = BENCHMARKS / "contenders" / self.script
        return [str(self.interpreter), str(script), *self.options, *arguments]


AnyContender = TypeVar("AnyContender", bound=Contender)

EAGER = ("--inference", "eager")
PONG = ("ALE/Pong-v5",)

CONTENDERS = (
    Contender(name="limit-eager", script="limit.py", venv=OWN, options=EAGER),
    Contender(name="limit-fast", script="limit.py", venv=OWN, options=("--inference", "fast"), inference="fast"),
    Contender(name="farstep-collect", script="farstep_collect.py", venv=OWN, inference="fast"),
    Contender(
        name="farstep-collect-seeded-once",
        script="farstep_collect.py",
        venv=OWN,
        options=("--mode", "seeded-once"),
        inference="fast",
        by_default=False,
    ),
    Contender(name="farstep-stream", script="farstep_stream.py", venv=OWN, inference="fast"),
    Contender(name="farstep-collect-eager", script="farstep_collect.py", venv=OWN, options=EAGER),
    Contender(name="farstep-stream-eager", script="farstep_stream.py", venv=OWN, options=EAGER),
    Contender(name="farstep-make_vec", script="farstep_make_vec.py", venv=OWN),
    Contender(name="farstep-envpool-collect", script="farstep_envpool.py", venv=OWN, inference="fast"),
    Contender(
        name="farstep-envpool-stream",
        script="farstep_envpool.py",
        venv=OWN,
        options=("--mode", "stream"),
        inference="fast",
    ),
    Contender(name="farstep-envpool-collect-eager", script="farstep_envpool.py", venv=OWN, options=EAGER),
    Contender(name="envpool-sync", script="envpool_native.py", venv="envpool", options=("--mode", "sync")),
    Contender(name="envpool-async", script="envpool_native.py", venv="envpool", options=("--mode", "async")),
    Contender(name="gymnasium-sync", script="gymnasium_vector.py", venv="gymnasium", options=("--mode", "sync")),
    Contender(name="gymnasium-async", script="gymnasium_vector.py", venv="gymnasium", options=("--mode", "async")),
    Contender(name="sb3-subproc", script="sb3_subproc.py", venv="sb3"),
    Contender(name="sb3-dummy", script="sb3_subproc.py", venv="sb3", options=("--mode", "dummy"), by_default=False),
    Contender(name="pufferlib-serial", script="pufferlib_vector.py", venv="pufferlib", options=("--mode", "serial")),
    Contender(name="pufferlib-sync", script="pufferlib_vector.py", venv="pufferlib", options=("--mode", "sync")),
    Contender(
        name="pufferlib-async",
        script="pufferlib_vector.py",
        venv="pufferlib",
        options=("--mode", "async"),
        by_default=False,
    ),
    Contender(name="sample-factory", script="sample_factory_sampler.py", venv="sample-factory"),
    Contender(name="torchrl-sync", script="torchrl_collector.py", venv="torchrl", options=("--mode", "sync")),
    Contender(name="torchrl-async", script="torchrl_collector.py", venv="torchrl", options=("--mode", "async")),
    Contender(name="rllib", script="rllib_runners.py", venv="rllib"),
    Contender(name="ale-vector", script="ale_vector.py", venv=OWN, envs=PONG),
    Contender(
        name="farstep-ale-vector",
        script="ale_vector.py",
        venv=OWN,
        options=("--mode", "farstep"),
        inference="fast",
        envs=PONG,
    ),
    *(
        Contender(
            name=f"steps-{mode}",
            script="steps_only.py",
            venv=OWN,
            options=("--mode", mode),
            inference="none",
            by_default=False,
        )
        for mode in ("alone", "sync", "doorbells", "farstep", "async")
    ),
)


@dataclass(frozen=True, kw_only=True)
class BufferContender(Contender):
    """A buffer in one set-up, and the samplers that it supports."""

    samplers: tuple[str, ...] = ("uniform", "prioritized")


BUFFER_LIMITS = ("numpy-fancy", "numpy-take", "numpy-out")
"""Upper limits: the same rows from plain arrays, one for each kind of measurement."""

BUFFERS = (
    BufferContender(name="numpy-fancy", script="buffer_numpy.py", venv=OWN, options=("--mode", "fancy")),
    BufferContender(name="numpy-take", script="buffer_numpy.py", venv=OWN, options=("--mode", "take")),
    BufferContender(name="numpy-out", script="buffer_numpy.py", venv=OWN, options=("--mode", "out")),
    BufferContender(name="farstep", script="buffer_farstep.py", venv=OWN),
    BufferContender(name="farstep-next-row", script="buffer_farstep.py", venv=OWN, options=("--mode", "next-row")),
    *(
        BufferContender(
            name=f"farstep-remover-{kind}",
            script="buffer_farstep.py",
            venv=OWN,
            options=("--mode", f"remover-{kind}"),
            by_default=False,
        )
        for kind in ("lifo", "uniform", "prioritized", "heap")
    ),
    BufferContender(name="torchrl", script="buffer_torchrl.py", venv="torchrl"),
    BufferContender(
        name="torchrl-tensordict", script="buffer_torchrl.py", venv="torchrl", options=("--mode", "tensordict")
    ),
    BufferContender(name="sb3", script="buffer_sb3.py", venv="sb3", samplers=("uniform",)),
    BufferContender(
        name="sb3-optimized", script="buffer_sb3.py", venv="sb3", options=("--mode", "optimized"), samplers=("uniform",)
    ),
    BufferContender(name="reverb", script="buffer_reverb.py", venv="reverb"),
)


def add_contender_options(parser: ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="contenders, as shell patterns")
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="contenders to skip, as shell patterns")


def parse_contenders(parser: ArgumentParser, among: Sequence[Contender]) -> Namespace:
    """Parse the command line; ``options.contenders`` are the contenders that it chooses."""
    options = parser.parse_args()
    try:
        options.contenders = choose(among, options.only, options.skip)
    except ValueError as error:
        parser.error(str(error))
    return options


def choose(among: Sequence[AnyContender], only: list[str], skip: list[str]) -> list[AnyContender]:
    """Contenders that ``only`` names (shell patterns; empty: the default ones), without those that ``skip`` names."""
    for pattern in (*only, *skip):
        if not any(fnmatchcase(contender.name, pattern) for contender in among):
            known = ", ".join(contender.name for contender in among)
            raise ValueError(f"no contender matches {pattern!r}; known: {known}")
    return [
        contender
        for contender in among
        if (matches(contender, only) if only else contender.by_default) and not matches(contender, skip)
    ]


def matches(contender: Contender, patterns: list[str]) -> bool:
    return any(fnmatchcase(contender.name, pattern) for pattern in patterns)
