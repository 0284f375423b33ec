"""Checks of the samplers that a buffer gets, and a copy of a sampler with another beta."""

from __future__ import annotations

from dataclasses import replace

from farstep.buffer.samplers.consecutive_rows import Composed
from farstep.buffer.samplers.episodes import DPER
from farstep.buffer.samplers.sampler import Sampler
from farstep.buffer.samplers.single_rows import FIFO, FullBatch, Prioritized
from farstep.errors import ConfigError


def check_sampler(what: str, value: object) -> Sampler:
    """Return the sampler. Raise `ConfigError` for any other object."""
    if not isinstance(value, Sampler):
        hint = "; create an instance: add ()" if isinstance(value, type) else ""
        raise ConfigError(f"{what} is {value!r}; expected a sampler such as farstep.buffer.Uniform(){hint}.")
    return value


def with_beta(sampler: Sampler, beta: float) -> Sampler:
    """Return a copy of the sampler with another exponent of importance weights."""
    if isinstance(sampler, Composed):
        return replace(sampler, by=with_beta(sampler.by, beta))
    if not isinstance(sampler, (Prioritized, DPER)):
        raise ConfigError(f"{sampler!r} has no beta; only Prioritized(...) and DPER(...) have importance weights.")
    return replace(sampler, beta=beta)


def check_remover(remover: Sampler, sampler: Sampler) -> None:
    """Raise `ConfigError` if the remover does not choose single rows, or would break an order that the sampler
    needs."""
    if sampler.needs_order and type(remover) is not FIFO:
        raise ConfigError(
            f"{sampler!r} needs rows in order, so only the oldest rows can be removed; leave out remover."
        )
    if isinstance(remover, FullBatch):
        raise ConfigError(
            "remover=FullBatch(), but a remover chooses single rows. To remove the oldest rows first, "
            "leave out remover."
        )
    if remover.needs_order:
        raise ConfigError(f"remover={remover!r}; a remover must be a sampler of single rows.")
