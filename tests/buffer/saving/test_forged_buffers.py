"""A buffer's checkpoint with valid checksums and wrong content is refused, whichever field is wrong."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farstep import Batch, Buffer
from farstep.batch import FinalObs
from farstep.buffer import DPER, LIFO, MaxHeap, MinHeap, Prioritized, Sequence, Uniform
from farstep.checkpoint import folder as checkpoint
from farstep.errors import BufferTimeout, CheckpointError
from tests.forging import REMOVED, Folder, Way, changed, fields, forgeries

CAPACITY = 12
CASES: dict[str, dict[str, Any]] = {
    "ring": {"sampler": Uniform()},
    "prioritized": {"sampler": Prioritized()},
    "episodes": {"sampler": DPER()},
    "batches": {"sampler": Sequence(2)},
    "linked": {"sampler": Sequence(2), "max_times_sampled": 1},
    "pooled": {"sampler": Sequence(2), "pooled": True},
    "lifo": {"sampler": LIFO()},
    "heaps": {"sampler": MaxHeap(), "remover": MinHeap()},
}


def rows(first: int, count: int) -> dict[str, np.ndarray]:
    number = np.arange(first, first + count)
    return {"obs": number[:, None] * np.ones(2, np.float32), "reward": number / 2, "terminated": number % 4 == 3}


def batch(first: int) -> Batch:
    """Three steps of two environments; an episode of the second one ends with the second step."""
    obs = np.arange(first, first + 6.0).reshape(3, 2)
    ended = np.zeros((3, 2), bool)
    ended[1, 1] = True
    one = np.ones(1, np.int64)
    arrays = {"obs.x": obs, "terminated": ended}
    final = FinalObs(one, one, {"x": np.array([-1.0])})
    episodes = {"slot": one, "return": one, "length": one}
    slots = np.arange(2)
    return Batch(arrays, {"obs": {"x": "obs.x"}}, {"x": obs[-1] + 2}, final, episodes, slots, np.ones(2, bool))


def insert(buffer: Buffer, case: str, first: int) -> None:
    if case in ("batches", "linked", "pooled"):
        buffer.insert(batch(first), timeout_s=0)
    else:
        buffer.insert(rows(first, 5), timeout_s=0)


def filled(case: str) -> Buffer:
    """A buffer that has wrapped around, with some items sampled, changed and deleted."""
    buffer = Buffer(CAPACITY, seed=1, **CASES[case])
    for first in (0, 6, 12):
        insert(buffer, case, first)
    keys = buffer.sample(2, timeout_s=0)[1].keys
    if buffer.sampler.uses_priorities:
        buffer.update_priorities(keys, np.arange(2.0, 4.0))
    if case not in ("ring", "batches"):  # a deletion would turn their rings into linked rows
        buffer.delete(keys[:1])
    return buffer


class Forger(Folder):
    """The checkpoint of a buffer, and forgeries of it."""

    def __init__(self, folder: Path, case: str) -> None:
        with filled(case) as buffer:
            loaded = checkpoint.load(buffer.checkpoint(folder / "saved").parent)
        self.state: dict[str, Any] = {"arrays": loaded.arrays, "meta": loaded.meta}
        super().__init__(folder, loaded.arrays, loaded.meta)

    def forge(self, way: Way, new: Any) -> None:
        """The newest checkpoint is one with `new` there."""
        forged = changed(self.state, way, new)
        self.write(forged["arrays"], forged["meta"])


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def forger(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Forger:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # none of them has to survive a power failure
    return Forger(tmp_path, case)


SHARED = ["schema", "removed", "limiter", "rng", "format", "rows/obs", "rows/reward", "rows/terminated"]
"""Fields that all buffers restore alike: they are walked for the first one only."""


def forged_fields(forger: Forger, case: str) -> Iterator[tuple[Way, str, Any]]:
    """Forgeries of every field of a checkpoint: the path of the field, the kind of forgery, and the value."""
    first = next(iter(CASES))
    for way, value in fields(forger.state):
        if len(way) > 1 and (case == first or way[1] not in SHARED):
            forged = forgeries(value)
            if isinstance(value, dict):
                forged["extra"] = value | {"extra": next(iter(value.values()), 1)}
            elif isinstance(value, np.ndarray):
                forged = {k: new for k, new in forged.items() if new is REMOVED or isinstance(new, np.ndarray)}
                forged |= more_arrays(value)
            for kind, new in forged.items():
                if not is_equal(value, new) and (case == first or kind not in ("list", "mapping", "wider")):
                    yield way, kind, new
    for kind in "arrays", "meta":
        value = forger.state[kind]
        yield (kind,), "extra", value | {"extra": next(iter(value.values()))}


def more_arrays(array: np.ndarray) -> dict[str, np.ndarray]:
    found = {"shorter": array[:-1]} if array.ndim and len(array) else {}
    if array.dtype.kind == "i":
        for kind, entry in ("negative", -2), ("lowest", np.iinfo(array.dtype).min):
            found[kind] = array.copy()
            found[kind].reshape(-1)[:1] = entry
    return found


def is_equal(value: Any, new: Any) -> bool:
    if isinstance(value, np.ndarray) and isinstance(new, np.ndarray):
        return (value.dtype, value.shape, value.tobytes()) == (new.dtype, new.shape, new.tobytes())
    return type(value) is type(new) and bool(value == new)


def is_possible(way: Way, kind: str, case: str) -> bool:
    """Whether a buffer could have been saved with the forged state."""
    match way[1:], kind:
        case (("rows/obs" | "rows/obs.x" | "rows/reward" | "store/tails.obs.x",), "negative" | "infinite" | "nan"):
            return True
        case (("store/cut",), "flipped"):  # rows that follow it may have been lost
            return case in ("ring", "batches")  # elsewhere rows have no neighbors, or links must agree
        case (("selector0/log" | "selector1/log",), "longer" | "shorter"):  # by the key of an item that is gone
            return case == "lifo"
        case (("table/times",), "huge"):
            return "max_times_sampled" not in CASES[case] and case != "lifo"
        case (("limiter", "max_diff"), "huge" | "negative") | (("limiter", "min_diff"), "negative"):
            return True
        case (("limiter", "samples_per_insert"), "huge"):
            return True
        case (("sampler", "alpha" | "beta"), "huge") | (("sampler", "pad"), "bool"):
            return True
        case (("rng", "state", "state"), "huge"):  # any 128 bits
            return True
    return False


@pytest.mark.slow
def test_every_wrong_field_is_refused(forger: Forger, case: str) -> None:
    wrong = []
    for way, kind, new in forged_fields(forger, case):
        forger.forge(way, new)
        try:
            with warnings.catch_warnings(action="ignore"), Buffer.restore(forger.folder) as restored:
                if not is_possible(way, kind, case):
                    wrong.append((way, kind, "accepted"))
                with contextlib.suppress(BufferTimeout):  # a limiter may make either wait
                    insert(restored, case, 20)
                    restored.sample(1, timeout_s=0)
        except CheckpointError as error:
            said = f"no checkpoint in {forger.folder} can be used:\n  {forger.folder / '000002'} is not used: "
            if is_possible(way, kind, case) or not str(error).startswith(said):
                wrong.append((way, kind, str(error)))
        except Exception as error:
            wrong.append((way, kind, repr(error)))
    assert not wrong, "\n".join(map(str, wrong))


def test_the_checkpoint_before_is_used_with_one_warning(
    forger: Forger, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(forger.real, forger.folder / "000001")
    with filled(case) as buffer:
        expected = len(buffer), buffer.limiter
    for kind, content in forger.state.items():
        for name in content:
            forger.forge((kind, name), REMOVED)
            caplog.clear()
            with Buffer.restore(forger.folder) as restored:
                assert (len(restored), restored.limiter) == expected
            (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
            assert record.getMessage().startswith(f"{forger.folder / '000002'} is not used: "), name


Change = Callable[[Any], None]


def set_to(place: Any, value: Any) -> Change:
    def change(array: Any) -> None:
        array[place] = value

    return change


def swap(array: Any) -> None:
    array[[0, 1]] = array[[1, 0]]


def more(array: Any) -> None:
    array += 1


def invert(array: Any) -> None:
    array ^= True


INCONSISTENT: list[tuple[str, str, Change, str]] = [
    ("ring", "table/keys", swap, "keys has a key that belongs to another cell"),
    ("ring", "table/used", set_to(0, CAPACITY - 1), "keys and used do not agree"),
    ("ring", "table/laps", set_to(0, 1), "laps has 1, at least 3 expected"),
    ("ring", "table/laps", set_to(1, 0), "laps has row 0, but keys from that row on are already in use"),
    ("ring", "store/written", more, "newest is not the last written row"),
    ("ring", "store/newest", more, "newest is not the last written row"),
    ("ring", "store/cut", set_to(..., False), "cut lets a row follow the last one"),
    ("ring", "store/open", invert, "open does not match the episodes that are still running"),
    ("batches", "store/written", set_to((0, 0), 8), "written differs between arrays"),
    ("batches", "store/tails", set_to(0, 1), "tails names a row that cannot have a tail"),
    ("batches", "slots", swap, "slots has an environment slot of another column"),
    ("linked", "store/after", set_to(0, 0), "after and cut do not agree"),
    ("linked", "store/after", set_to(0, 99), "after names a cell that does not exist"),
    ("linked", "store/newest", set_to(slice(2), 7), "newest is not the last row of an environment"),
    ("linked", "store/open", invert, "open does not match the episodes that are still running"),
    ("linked", "store/written", more, "written counts rows, but the rows are linked"),
    ("linked", "store/tails", set_to(0, 0), "tails names a row that cannot have a tail"),
    ("episodes", "begun", set_to(0, 10**6), "begun has a key that no row"),
    ("prioritized", "selector0/weights", set_to(..., 1.0), "weights has a value above 0 for a cell without an item"),
    ("prioritized", "selector0/weights", set_to(..., math.nan), "weights holds nan"),
    ("prioritized", "selector0/highest", set_to((), 0.5), "highest is 0.5"),
    ("lifo", "selector0/log", set_to(slice(5), 13), "log does not name every item once"),
    ("lifo", "selector0/log", set_to(0, 10**6), "log has a key that no item ever had"),
    ("heaps", "selector0/stamp", set_to(slice(4), 3), "stamp"),
    ("heaps", "selector1/cells", set_to(0, 1), "cells does not name every item once"),
    ("heaps", "selector1/of", set_to(..., -1.0), "of has a negative priority"),
]


@pytest.mark.parametrize(("case", "name", "change", "reason"), INCONSISTENT, ids=lambda value: str(value)[:20])
def test_arrays_that_contradict_each_other_are_refused(forger: Forger, name: str, change: Change, reason: str) -> None:
    array = forger.state["arrays"][name].copy()
    change(array)
    forger.forge(("arrays", name), array)
    with pytest.raises(CheckpointError, match=reason):
        Buffer.restore(forger.folder)


@pytest.mark.parametrize("case", ["linked"])
def test_links_with_a_cycle_are_refused(forger: Forger) -> None:
    after, cut = (forger.state["arrays"][f"store/{name}"].copy() for name in ("after", "cut"))
    is_cut = cut.reshape(-1)
    first = next(cell for cell in np.flatnonzero(~is_cut) if not is_cut[after[cell]])
    before = np.flatnonzero((after == first) & ~is_cut)
    after[before], is_cut[before] = before, True
    after[after[first]] = first
    arrays = forger.state["arrays"] | {"store/after": after, "store/cut": cut}
    forger.write(arrays, forger.state["meta"])
    with pytest.raises(CheckpointError, match="after has a cycle"):
        Buffer.restore(forger.folder)


@pytest.mark.parametrize("case", ["lifo", "linked"])
def test_free_cells_are_those_without_an_item(forger: Forger) -> None:
    free = forger.state["meta"]["free"]
    for wrong in (free[:-1], [*free[:-1], free[0]], [*free[:-1], -1], [*free[:-1], 0], [*free, 99]):
        forger.forge(("meta", "free"), wrong)
        with pytest.raises(CheckpointError, match="free does not name every free cell exactly once"):
            Buffer.restore(forger.folder)
    forger.forge(("meta", "free"), free[::-1])
    Buffer.restore(forger.folder).close()


@pytest.mark.parametrize("case", ["batches"])
def test_deeply_nested_metadata_is_refused(forger: Forger) -> None:
    structure: Any = "obs"
    sampler: Any = {"kind": "Uniform"}
    for _ in range(400):
        structure, sampler = [structure], {"kind": "Sequence", "length": 2, "pad": False, "by": sampler}
    for way, new in (("sampler", sampler), ("structures", {"obs": structure})):
        forger.forge(("meta", way), new)
        with pytest.raises(CheckpointError, match="000002 is not used"):
            Buffer.restore(forger.folder)


@pytest.mark.parametrize("case", ["ring"])
def test_the_error_says_why_each_checkpoint_was_refused(forger: Forger) -> None:
    forger.forge(("meta", "limiter", "inserts"), 3)
    (forger.folder / "000002").rename(forger.folder / "000001")
    forger.forge(("meta", "capacity"), "many")
    with pytest.raises(CheckpointError) as caught:
        Buffer.restore(forger.folder)
    head, newest, before, advice = str(caught.value).splitlines()
    assert head == f"no checkpoint in {forger.folder} can be used:"
    assert "000002 is not used: meta.json is malformed: Expected `int`, got `str` - at `$.capacity`" in newest
    assert "000001 is not used: the limiter counts 0 items, 12 expected" in before
    assert "restore the folder from a backup" in advice
