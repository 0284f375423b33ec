"""Checks what workers send to an acting server, and transfers requests and answers over the network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from farstep.acting import messages as am
from farstep.acting.mailbox import (
    CONTINUES,
    EPISODES,
    HELD,
    IS_FIRST,
    ROOTS,
    SERVER_WORDS,
    TOTALS,
    USED,
    WORKER_WORDS,
    Mailbox,
)
from farstep.core import Array, BytesLike
from farstep.errors import WireError
from farstep.schema import Schema
from farstep.wire import messages as m

_MAX_GROUPS = 16


def check_join(join: am.Join, admitted: m.AdmitClient) -> None:
    """Raise `WireError` unless a worker joins with its own environments."""
    claimed = (join.worker, join.first, join.obs, join.obs_schema, join.action_schema)
    expected = (admitted.worker, admitted.first, admitted.obs, admitted.obs_schema, admitted.action_schema)
    if claimed != expected:
        raise WireError("a Join with other environments than those of the worker.")
    counts = (sum(join.groups), len(join.roots), len(join.episodes))
    if counts != (admitted.num_envs,) * 3 or not 1 <= len(join.groups) <= _MAX_GROUPS or min(join.groups) < 1:
        raise WireError(f"a Join with {counts} environments, seeds and episodes; the worker has {admitted.num_envs}.")
    if min(*join.roots, *join.episodes) < 0:
        raise WireError("a Join with a negative seed or episode.")


def check_arrays(arrays: object, schema: Schema, num_envs: int) -> dict[str, Array]:
    """Return decoded arrays of all environments of a worker. Raise `WireError` if they do not fit the schema."""
    if not isinstance(arrays, dict) or arrays.keys() != schema.keys():
        raise WireError("arrays that are not those of the environments.")
    if not all(fits_spec(arrays[name], schema, name, num_envs) for name in schema):
        raise WireError("arrays that do not fit the environments.")
    return arrays


def fits_spec(array: object, schema: Schema, name: str, num_envs: int) -> bool:
    spec = schema[name]
    return (
        isinstance(array, np.ndarray) and array.dtype == np.dtype(spec.dtype) and array.shape == (num_envs, *spec.shape)
    )


def check_saved(saved: object, state: Schema, num_envs: int) -> dict[str, Any]:
    """Return what a worker wants to restore. Raise `WireError` if it does not fit the agent."""
    if not isinstance(saved, dict) or not all(isinstance(saved.get(key), list) for key in ("state", "generators")):
        raise WireError("saved state that is not a mapping of lists.")
    arrays = saved["state"]
    fits = not arrays or len(arrays) == len(state)
    if not fits or not all(fits_spec(array, state, name, num_envs) for name, array in zip(state, arrays, strict=False)):
        raise WireError("saved state that does not fit the agent.")
    if len(saved["generators"]) > num_envs:
        raise WireError(f"{len(saved['generators'])} generators for {num_envs} environments.")
    return saved


def check_rows(rows: object, num_envs: int) -> Mapping[str, Any]:
    """Return the rows of a chunk for `priorities`. Raise `WireError` unless they are arrays of all environments."""
    if not isinstance(rows, dict):
        raise WireError("rows that are not a mapping.")
    for key, value in rows.items():
        axis = 0 if key == "last_obs" else 1
        for leaf in _leaves(value):
            is_array = isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject
            if not is_array or leaf.ndim <= axis or leaf.shape[axis] != num_envs:
                raise WireError(f"rows whose array {key} does not have {num_envs} environments.")
    return rows


def _leaves(value: object) -> Iterator[Any]:
    if isinstance(value, (dict, tuple)):
        for sub in value.values() if isinstance(value, dict) else value:
            yield from _leaves(sub)
    else:
        yield value


def take_request(mailbox: Mailbox, act: am.Act, payload: BytesLike) -> None:
    """Write a request into the mailbox of its worker. Raise `WireError` if it does not fit."""
    if act.group >= len(mailbox.ranges) or len(act.words) != WORKER_WORDS.stop - WORKER_WORDS.start:
        raise WireError(f"a request of group {act.group} with {len(act.words)} words.")
    rows = mailbox.ranges[act.group]
    any_starts = any(memoryview(payload)[: rows.stop - rows.start])
    mailbox.fill(mailbox.layout.request(any_starts), act.group, payload)
    if min(int(mailbox.arrays[name][rows].min()) for name in (ROOTS, EPISODES)) < 0:
        raise WireError("a request with a negative seed or episode.")
    words = mailbox.group_words[act.group]
    for i, word in enumerate(act.words):
        words[i] = word
    mailbox.words[HELD] = act.held


def take_update(mailbox: Mailbox, update: am.Update) -> None:
    """Write the words of an `Update` into the mailbox of its worker."""
    if len(update.used) != len(mailbox.group_words):
        raise WireError(f"an Update of {len(update.used)} groups.")
    mailbox.words[HELD] = update.held
    for words, used in zip(mailbox.group_words, update.used, strict=True):
        words[USED], words[CONTINUES] = used, 0


def answer_frames(mailbox: Mailbox, group: int) -> list[bytes]:
    """The answer that the server has written into the mailbox, as a message."""
    words = mailbox.group_words[group]
    payload = mailbox.packed(mailbox.layout.answer(bool(words[IS_FIRST])), group)
    return [am.encode(am.Acted(group, words[SERVER_WORDS].tolist(), mailbox.words[TOTALS].tolist())), payload]
