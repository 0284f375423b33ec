"""Checks the environment of a run before anything starts."""

from __future__ import annotations

from farstep.learners.options.run_config import RunConfig
from farstep.rollout.sources import Source


def check_env(run: RunConfig) -> None:
    """Raise `ConfigError` if workers on this machine could certainly not build the environment of a run."""
    if run.launcher in ("local", "in-process"):  # nodes may have other packages
        Source.of(run.env_config(stagger=None, inference=None)).check(load=True)
