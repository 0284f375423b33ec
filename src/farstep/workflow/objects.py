"""The model block: named objects with versions (parameters, a noise scale, anything), each published whole.

An object is an array, or mappings (with any strings as keys), tuples and lists of arrays; torch tensors, e.g. of a
`state_dict`, are read back as NumPy arrays, lists as tuples. Its description, which grows with the number of arrays, is
at the start of the memory. The arrays are kept twice. A new version is written over the older one, stamped, and only
then named the current one; a reader copies and looks at the stamp again. So a reader, in whichever process, gets one
version and never parts of two, also when the writer dies while it writes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from farstep.agents.parameters import as_array
from farstep.buffer.storage.cyclic import fence
from farstep.core import Array, Nested
from farstep.errors import AgentError, BufferTimeout, ClosedError, ConfigError
from farstep.rollout.blocks import Layout
from farstep.schema import ArraySpec, Schema, Structure, differences, nest, structure_of
from farstep.wire.channels.memory import SharedMemory

_MAGIC = 0x6661727374656F62  # "farsteob"
_PAGE = 4096
_WORDS = 4  # magic, bytes of the description, current version, free; then a stamp for each of the two copies
_START = 8 * (_WORDS + 2)  # of the description
_READ_S = 10.0


class _Description(msgspec.Struct):
    schema: Schema
    structure: Any


class SharedObject:
    """One object; whoever made it publishes, others `attach` and read."""

    def __init__(self, memory: SharedMemory, schema: Schema, structure: Structure) -> None:
        self._memory, self._schema, self._structure = memory, schema, structure
        self._words = np.frombuffer(memory.map, np.int64, _WORDS + 2)
        self._copies = Layout(2, 0, 1, schema).views(memory.map[_header_bytes(int(self._words[1])) :])
        self._publishing = threading.Lock()
        self._pid = os.getpid()

    @classmethod
    def create(cls, value: Nested) -> SharedObject:
        """Room for objects shaped like `value`; publishes nothing yet."""
        schema, structure, _ = _taken_apart(value)
        said = msgspec.msgpack.encode(_Description(schema, structure))
        memory = SharedMemory.create(_header_bytes(len(said)) + Layout(2, 0, 1, schema).nbytes, "farstep-object")
        memory.map[_START : _START + len(said)] = said
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
            if magic != _MAGIC or not 0 < length <= memory.nbytes - _START:
                raise ConfigError(f"{path} holds no object of farstep's.")
            said = msgspec.msgpack.decode(memory.map[_START : _START + length], type=_Description)
            if _header_bytes(length) + Layout(2, 0, 1, said.schema).nbytes > memory.nbytes:
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
        """Publish a new version of an object.

        Args:
            name: The name by which `read` and `path` find it.
            value: A number, an array, a torch tensor, or mappings with strings as keys, tuples and lists of these; for
                every version the same nesting, shapes and dtypes.

        Returns:
            The version: 0, 1, 2, ...

        Raises:
            ConfigError: A part of `value` is not an array of numbers, or differs in nesting, shape or dtype from the
                versions before.
        """
        if hasattr(value, "__next__"):  # e.g. network.parameters(), which can be iterated only once
            value = list(value)
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


def _header_bytes(described: int) -> int:
    """What precedes the arrays: words and a description of as many bytes, in whole pages."""
    return -(-(_START + described) // _PAGE) * _PAGE


def _taken_apart(value: Nested) -> tuple[Schema, Structure, dict[str, Array]]:
    arrays: dict[str, Array] = {}
    structure = _visit(value, "object", arrays)
    return {path: ArraySpec(array.shape, array.dtype.str) for path, array in arrays.items()}, structure, arrays


def _visit(value: Nested, path: str, arrays: dict[str, Array]) -> Structure:
    """The nesting of a value; its arrays are added under their paths, e.g. `object['net.0.weight']`."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{path} cannot be published: its key {key!r} is no string. Use strings as keys.")
        return {key: _visit(part, f"{path}[{key!r}]", arrays) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_visit(part, f"{path}[{i}]", arrays) for i, part in enumerate(value))
    try:
        array = as_array(value)
    except AgentError as error:
        raise ConfigError(f"{path} cannot be published: {error}") from None
    if array.dtype.kind not in "biufc":
        raise ConfigError(
            f"{path} cannot be published; expected a number, an array of numbers, a torch tensor, or mappings, tuples "
            f"and lists of these, and got {type(value).__name__}."
        )
    arrays[path] = array
    return path
