"""The coordinator's state file: the newest complete line counts, and the file stays small."""

from __future__ import annotations

from pathlib import Path

from farstep.elastic.coordinator.state_file import StateFile


def test_file_returns_the_newest_complete_state(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    assert file.read() is None
    for number in range(3):
        file.append(b'{"number": %d}' % number)
        assert file.read() == b'{"number": %d}' % number
    file.close()
    with (tmp_path / "state.json").open("ab") as stream:
        stream.write(b'{"number')  # killed while it wrote
    assert StateFile(tmp_path).read() == b'{"number": 2}'
    with (tmp_path / "state.json").open("ab") as stream:
        stream.write(b"\0" * 100 + b"\n")  # the machine crashed before the disk was written
    assert StateFile(tmp_path).read() == b'{"number": 2}'


def test_file_does_not_grow_without_end(tmp_path: Path) -> None:
    file, line = StateFile(tmp_path), b'"' + b"x" * 2**17 + b'"'
    for _ in range(30):
        file.append(line)
    assert file.read() == line
    assert (tmp_path / "state.json").stat().st_size < 2**21
    file.close()
