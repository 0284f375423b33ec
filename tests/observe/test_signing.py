"""The key that tags runs: made once, read only if it is this user's own."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from farstep.observe import signing
from farstep.observe.run_folder import RunFolder


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has no key yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_without_a_place_for_the_key_a_run_says_that_it_will_need_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    run = RunFolder.create(tmp_path, "run", {"seed": 1})
    assert (
        "has no signature, so --resume, eval and watch will need --trust" in caplog.text
        and "Not a directory" in caplog.text
    )
    assert run.read_signed_config() == ({"seed": 1}, "it has no signature")


def test_a_key_that_is_a_link_is_not_followed(state: Path, tmp_path: Path) -> None:
    (tmp_path / "known").write_bytes(bytes(32))
    (tmp_path / "known").chmod(0o600)
    (state / "farstep").mkdir(parents=True)
    (state / "farstep" / "run.key").symlink_to(tmp_path / "known")
    with pytest.raises(signing.NoKey, match="cannot be read"):
        signing.tag({})


def test_a_relative_state_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert signing.key_file() == tmp_path / ".local/state/farstep/run.key"


def test_processes_that_make_a_key_at_once_agree_on_one(state: Path) -> None:
    tags: list[str] = []
    start = threading.Barrier(8)

    def make() -> None:
        start.wait(timeout=30)
        tags.append(signing.tag({"seed": 1}))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tags) == 8 and len(set(tags)) == 1
    assert [entry.name for entry in (state / "farstep").iterdir()] == ["run.key"]
