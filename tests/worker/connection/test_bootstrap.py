"""The file with a worker's keys."""

from pathlib import Path

import pytest

from farstep.worker.connection.bootstrap import read_bootstrap


def test_file_that_only_its_owner_may_read_is_read(tmp_path: Path) -> None:
    file = tmp_path / "bootstrap"
    file.write_text('{"threads": 2}')
    file.chmod(0o600)
    assert read_bootstrap(None, file) == {"threads": 2}


def test_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bootstrap"
    file.write_text('{"threads": 2}')
    file.chmod(0o644)
    with pytest.raises(SystemExit, match="has mode 644; it must be 600"):
        read_bootstrap(None, file)
