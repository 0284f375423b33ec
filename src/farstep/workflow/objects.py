"""The model block: named, versioned objects in shared memory (parameters, a noise scale, ...).

An object is an array, or arrays nested in mappings with string keys, tuples and lists. Readers get torch tensors, e.g.
of a `state_dict`, as NumPy arrays, and lists as tuples.

The memory holds a description of the arrays, then two copies of the arrays. To publish a version, the writer overwrites
the older copy, stamps it, and makes it current. A reader copies the current version, then checks the stamp again. A
reader in any process therefore gets one whole version, even if the writer dies while writing.
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
_WORDS = 4  # magic, bytes of the description, current version, reserved; then a stamp for each of the two copies
_START = 8 * (_WORDS + 2)  # first byte of the description
_READ_S = 10.0


class _Description(msgspec.Struct):
    schema: Schema
    structure: Any


class SharedObject:
    """One object. The process that created it publishes versions; other processes `attach` and read."""

    def __init__(self, memory: SharedMemory, schema: Schema, structure: Structure) -> None:
        self._memory, self._schema, self._structure = memory, schema, structure
        self._words = np.frombuffer(memory.map, np.int64, _WORDS + 2)
        self._copies = Layout(2, 0, 1, schema).views(memory.map[_header_bytes(int(self._words[1])) :])
        self._publishing = threading.Lock()
        self._pid = os.getpid()

    @classmethod
    def create(cls, value: Nested) -> SharedObject:
        """Allocate memory for values like `value`, without publishing `value`.

        Args:
            value: A value with the nesting, shapes and dtypes of all versions.

        Returns:
            The object, without a version.

        Raises:
            ConfigError: A part of `value` is not an array of numbers.
        """
        schema, structure, _ = _flattened(value)
        encoded = msgspec.msgpack.encode(_Description(schema, structure))
        memory = SharedMemory.create(_header_bytes(len(encoded)) + Layout(2, 0, 1, schema).nbytes, "farstep-object")
        memory.map[_START : _START + len(encoded)] = encoded
        np.frombuffer(memory.map, np.int64, _WORDS + 2)[:] = _MAGIC, len(encoded), -1, 0, -1, -1
        return cls(memory, schema, structure)

    @classmethod
    def attach(cls, path: str | Path) -> SharedObject:
        """Map the object of another process of this host. No code from the memory is executed.

        Args:
            path: The attribute `path` of the object in the other process.

        Returns:
            The same object, for reading.

        Raises:
            ConfigError: The file does not hold an object of farstep.
            OSError: The file cannot be opened, e.g. because the other process has ended.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = SharedMemory(fd, max(_PAGE, os.fstat(fd).st_size))
        except (ValueError, OSError) as error:
            os.close(fd)
            raise ConfigError(f"{path} does not hold an object of farstep: {error}.") from None
        try:
            magic, length = np.frombuffer(memory.map, np.int64, 2).tolist()
            if magic != _MAGIC or not 0 < length <= memory.nbytes - _START:
                raise ConfigError(f"{path} does not hold an object of farstep.")
            description = msgspec.msgpack.decode(memory.map[_START : _START + length], type=_Description)
            if _header_bytes(length) + Layout(2, 0, 1, description.schema).nbytes > memory.nbytes:
                raise ConfigError(f"{path} is smaller than the object it describes.")
            return cls(memory, description.schema, structure_of(description.structure))
        except (msgspec.DecodeError, ConfigError) as error:
            memory.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path} does not hold an object of farstep: {error}") from None

    @property
    def path(self) -> str:
        """Path of the memory, for other processes of this user. Valid while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._memory.fd}"

    @property
    def version(self) -> int:
        """The newest version; -1 if none was published."""
        return int(self._words[2])

    def publish(self, value: Nested) -> int:
        """Publish a new version atomically.

        Args:
            value: The new value.

        Returns:
            Its version: 0, 1, 2, ...

        Raises:
            ConfigError: `value` differs from the object in nesting, shapes or dtypes.
            ClosedError: Called in a fork of the process that created the object.
        """
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this object belongs to process {self._pid}; its fork {os.getpid()} can read the object, but must "
                "publish under another name."
            )
        schema, structure, arrays = _flattened(value)
        found = differences(self._schema, schema)
        if found or structure != self._structure:
            reason = "; ".join(found) or "the same arrays, nested differently"
            raise ConfigError(f"this object holds other arrays: {reason}. Publish the value under another name.")
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
        """Read the newest version.

        Returns:
            Its version, and a copy of the value.

        Raises:
            ConfigError: No version was published yet.
            BufferTimeout: For 10 s, newer versions overwrote every copy while it was read.
        """
        deadline = time.monotonic() + _READ_S
        while True:
            version = self.version
            if version < 0:
                raise ConfigError("no value has been published under this name yet.")
            fence()
            copies: dict[str, Array] = {name: block[version % 2, 0, 0].copy() for name, block in self._copies.items()}
            fence()
            if self._words[_WORDS + version % 2] == version:
                return version, nest(self._structure, copies)
            if time.monotonic() > deadline:
                raise BufferTimeout(f"for {_READ_S:g} s, an object was published faster than it could be read.")

    def close(self) -> None:
        """Close the memory."""
        self._memory.close()


class ModelBlock:
    """Named objects; the first `publish` of a name creates its object."""

    def __init__(self) -> None:
        self._objects: dict[str, SharedObject] = {}
        self._making = threading.Lock()

    def publish(self, name: str, value: Nested) -> int:
        """Publish a new version of an object.

        Args:
            name: Its name.
            value: A number, an array, a torch tensor, or mappings with string keys, tuples and lists of these. All
                versions must have the same nesting, shapes and dtypes.

        Returns:
            The version: 0, 1, 2, ...

        Raises:
            ConfigError: A part of `value` is not an array of numbers, or its nesting, shape or dtype differs from
                earlier versions.
        """
        if hasattr(value, "__next__"):  # e.g. network.parameters(): can be iterated only once
            value = list(value)
        with self._making:
            if name not in self._objects:
                self._objects[name] = SharedObject.create(value)
        return self._objects[name].publish(value)

    def read(self, name: str) -> tuple[int, Nested]:
        """Read the newest version of an object.

        Args:
            name: Its name.

        Returns:
            Its version, and a copy of the value.

        Raises:
            ConfigError: There is no such object.
        """
        return self._find(name).read()

    def number(self, name: str) -> float | None:
        """Return the newest version of an object that is a number; None if nothing was published under this name.

        Args:
            name: Its name.

        Returns:
            The number.

        Raises:
            ConfigError: The object is not a number.
        """
        if name not in self._objects or self._objects[name].version < 0:
            return None
        _, value = self._objects[name].read()
        if np.size(value) != 1:
            raise ConfigError(f"the object {name!r} has the value {value!r}; expected a number.")
        return float(np.asarray(value).item())

    def path(self, name: str) -> str:
        """Return the path of an object, for `SharedObject.attach(path)` in another process.

        Args:
            name: Its name.

        Returns:
            The path, valid while this process lives.

        Raises:
            ConfigError: There is no such object.
        """
        return self._find(name).path

    def _find(self, name: str) -> SharedObject:
        if name not in self._objects:
            raise ConfigError(
                f"there is no object {name!r}; published objects: {', '.join(sorted(self._objects)) or 'none'}."
            )
        return self._objects[name]

    def close(self) -> None:
        """Close all objects."""
        for each in self._objects.values():
            each.close()
        self._objects.clear()


def _header_bytes(description_bytes: int) -> int:
    """Return the number of bytes before the arrays: words and description, rounded up to whole pages."""
    return -(-(_START + description_bytes) // _PAGE) * _PAGE


def _flattened(value: Nested) -> tuple[Schema, Structure, dict[str, Array]]:
    """Return the schema and nesting of a value, and its arrays by path."""
    arrays: dict[str, Array] = {}
    structure = _visit(value, "object", arrays)
    return {path: ArraySpec(array.shape, array.dtype.str) for path, array in arrays.items()}, structure, arrays


def _visit(value: Nested, path: str, arrays: dict[str, Array]) -> Structure:
    """Return the nesting of a value, and add its arrays to `arrays` by path, e.g. `object['net.0.weight']`."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{path} cannot be published: its key {key!r} is not a string. Use strings as keys.")
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
            f"and lists of these, got {type(value).__name__}."
        )
    arrays[path] = array
    return path
