"""The model block: named objects with versions (parameters, a noise scale, anything), each published whole.

An object's arrays are kept twice in shared memory. A new version is written over the older one, stamped, and only then
named the current one; a reader copies and looks at the stamp again. So whoever reads, in whichever process, gets one
version and never parts of two, also when the writer dies while it writes.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from farstep.buffer.blocks import Layout
from farstep.buffer.cyclic import fence
from farstep.core import Array, Nested
from farstep.errors import AgentError, BufferTimeout, ClosedError, ConfigError
from farstep.spec import ArraySpec, Schema, Structure, differences, nest, structure_of, value_structure
from farstep.wire.memory import SharedMemory

_MAGIC = 0x6661727374656F62  # "farsteob"
_PAGE = 4096
_WORDS = 4  # magic, bytes of the description, current version, free; then a stamp for each of the two copies
_READ_S = 10.0


class _Description(msgspec.Struct):
    schema: Schema
    structure: Any


class SharedObject:
    """One object; whoever made it publishes, others `attach` and read."""

    def __init__(self, memory: SharedMemory, schema: Schema, structure: Structure) -> None:
        self._memory, self._schema, self._structure = memory, schema, structure
        self._words = np.frombuffer(memory.map, np.int64, _WORDS + 2)
        self._copies = Layout(2, 0, 1, schema).views(memory.map[_PAGE:])
        self._publishing = threading.Lock()
        self._pid = os.getpid()

    @classmethod
    def create(cls, value: Nested) -> SharedObject:
        """Room for objects shaped like `value`; publishes nothing yet."""
        schema, structure, _ = _taken_apart(value)
        said = msgspec.msgpack.encode(_Description(schema, structure))
        if len(said) > _PAGE - 8 * (_WORDS + 2):
            raise ConfigError(f"an object of {len(schema)} arrays is too many to describe; put some of them together.")
        memory = SharedMemory.create(_PAGE + Layout(2, 0, 1, schema).nbytes, "farstep-object")
        start = 8 * (_WORDS + 2)
        memory.map[start : start + len(said)] = said
        np.frombuffer(memory.map, np.int64, _WORDS + 2)[:] = _MAGIC, len(said), -1, 0, -1, -1
        return cls(memory, schema, structure)

    @classmethod
    def attach(cls, path: str | Path) -> SharedObject:
        """The object of another process of this host; only data is read there."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = SharedMemory(fd, max(_PAGE, os.fstat(fd).st_size))
        except (ValueError, OSError) as error:
            os.close(fd)
            raise ConfigError(f"{path} holds no object of farstep's: {error}.") from None
        try:
            magic, length = np.frombuffer(memory.map, np.int64, 2).tolist()
            if magic != _MAGIC or not 0 < length <= _PAGE:
                raise ConfigError(f"{path} holds no object of farstep's.")
            start = 8 * (_WORDS + 2)
            said = msgspec.msgpack.decode(memory.map[start : start + length], type=_Description)
            if _PAGE + Layout(2, 0, 1, said.schema).nbytes > memory.nbytes:
                raise ConfigError(f"{path} is smaller than the object it describes.")
            return cls(memory, said.schema, structure_of(said.structure))
        except (msgspec.DecodeError, ConfigError) as error:
            memory.close()
            raise error if isinstance(error, ConfigError) else ConfigError(f"{path} holds no object: {error}") from None

    @property
    def path(self) -> str:
        """Where other processes of this user find it while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._memory.fd}"

    @property
    def version(self) -> int:
        """The newest; -1: none was published."""
        return int(self._words[2])

    def publish(self, value: Nested) -> int:
        """A new version, all of it or none."""
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this object belongs to process {self._pid}; its fork {os.getpid()} can read it, and publish others."
            )
        schema, structure, arrays = _taken_apart(value)
        if found := differences(self._schema, schema) or structure != self._structure:
            raise ConfigError(f"this object holds other arrays: {found}. Publish it under another name.")
        with self._publishing:
            version = self.version + 1
            self._words[_WORDS + version % 2] = -1
            fence()
            for name, array in arrays.items():
                self._copies[name][version % 2, 0, 0] = array
            fence()
            self._words[_WORDS + version % 2] = version
            fence()
            self._words[2] = version
            return version

    def read(self) -> tuple[int, Nested]:
        """The newest version and a copy of the object."""
        deadline = time.monotonic() + _READ_S
        while True:
            version = self.version
            if version < 0:
                raise ConfigError("nothing was published under this name yet.")
            fence()
            copies: dict[str, Array] = {name: block[version % 2, 0, 0].copy() for name, block in self._copies.items()}
            fence()
            if self._words[_WORDS + version % 2] == version:
                return version, nest(self._structure, copies)
            if time.monotonic() > deadline:
                raise BufferTimeout(f"an object was published faster than it can be read, for {_READ_S:g} s.")

    def close(self) -> None:
        self._memory.close()


class ModelBlock:
    """Named objects, each made by its first `publish`."""

    def __init__(self) -> None:
        self._objects: dict[str, SharedObject] = {}
        self._making = threading.Lock()

    def publish(self, name: str, value: Nested) -> int:
        """A new version of an object: a number, an array, or mappings and tuples of these."""
        with self._making:
            if name not in self._objects:
                self._objects[name] = SharedObject.create(value)
        return self._objects[name].publish(value)

    def read(self, name: str) -> tuple[int, Nested]:
        """The newest version of an object, and a copy of it."""
        return self._find(name).read()

    def path(self, name: str) -> str:
        """Where another process finds an object: `SharedObject.attach(path)`."""
        return self._find(name).path

    def _find(self, name: str) -> SharedObject:
        if name not in self._objects:
            raise ConfigError(
                f"there is no object {name!r}; published are: {', '.join(sorted(self._objects)) or 'none'}."
            )
        return self._objects[name]

    def close(self) -> None:
        for each in self._objects.values():
            each.close()
        self._objects.clear()


def _taken_apart(value: Nested) -> tuple[Schema, Structure, dict[str, Array]]:
    arrays: dict[str, Array] = {}
    try:
        structure = value_structure(value, "object", arrays)
    except AgentError:
        raise ConfigError(
            f"{value!r} cannot be published; expected a number, an array of numbers, or mappings (with names without a "
            "dot) and tuples of these."
        ) from None
    return {name: ArraySpec(array.shape, array.dtype.str) for name, array in arrays.items()}, structure, arrays
