"""The folder of a run: its layout, its options and its lock.

runs/CartPole-v1-ppo-seed1-20260131-120000/
├── config.json      the options of the run, and a tag that shows which user wrote them
├── config.yaml      the same options, for people and for `farstep train --config`
├── metrics.jsonl    one line per update
├── events.jsonl     one line per event
├── status           address of the status page, while the run trains
├── checkpoints/     `--resume` continues from the newest; buffer/ has those of a replay buffer
├── videos/
└── tensorboard/     with `--tensorboard`
"""

from __future__ import annotations

import contextlib
import datetime
import difflib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any

import msgspec

from farstep.checkpoint.files import no_follow
from farstep.config.field_docs import show_fields
from farstep.errors import ConfigError, RunError
from farstep.observe import signing
from farstep.observe.files import as_run_error, replace_file
from farstep.observe.line_file import is_disk_full

log = logging.getLogger("farstep")

_SHOWN = 5
_TAG = "tag"
"""Name of the tag's entry in config.json."""


def run_name(env_id: str, algorithm: str, seed: int | None = None, now: datetime.datetime | None = None) -> str:
    """Return the default name of a run: environment, algorithm, seed and time.

    Args:
        env_id: Name of the environment.
        algorithm: Name of the learner.
        seed: Seed of the run; None: the name has no seed.
        now: Time of the start; None: now.

    Returns:
        The name, without characters that are not portable in file names.
    """
    now = datetime.datetime.now() if now is None else now
    parts = [env_id, algorithm, *([] if seed is None else [f"seed{seed}"]), f"{now:%Y%m%d-%H%M%S}"]
    return re.sub(r"[^\w.-]", "_", "-".join(parts), flags=re.ASCII).lstrip(".")


@show_fields
@dataclass(frozen=True)
class RunFolder:
    """The folder of one run. `create` makes a new folder; `open` opens an existing folder."""

    path: Path
    """Path of the folder."""

    @classmethod
    def create(cls, root: str | os.PathLike[str], name: str, config: Mapping[str, object]) -> RunFolder:
        """Create a folder with the options of a run.

        Args:
            root: The folder of all runs; created if it does not exist.
            name: Name of the run. If it is taken, -2, -3, ... is appended.
            config: Options of the run; dataclasses, enums and paths are converted.

        Returns:
            The new folder.

        Raises:
            ConfigError: The name is invalid, or the options cannot be written as JSON.
            RunError: The folder cannot be written.
        """
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            raise ConfigError(f"a run cannot be named {name!r}; expected a plain name without slashes, e.g. 'first'.")
        content = _as_json(config)  # raises before anything is written
        with contextlib.ExitStack() as on_failure:
            try:
                Path(root).mkdir(parents=True, exist_ok=True)
                run = cls(_make_new(Path(root), name))
                on_failure.callback(shutil.rmtree, run.path, ignore_errors=True)
                for folder in (run.checkpoints, run.videos):
                    folder.mkdir()
                replace_file(run.config_file, run._signed(content))
            except OSError as error:
                remedy = "Free disk space (df -h), or choose" if is_disk_full(error) else "Choose"
                raise RunError(f"no run can be written under {root}: {error}. {remedy} another folder.") from error
            on_failure.pop_all()
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Return the folder of an existing run.

        Args:
            path: Path of the folder.

        Returns:
            The folder.

        Raises:
            RunError: There is no run; the message lists runs with similar names.
        """
        run = cls(Path(path))
        if not run.config_file.is_file():
            raise RunError(_not_a_run(Path(path)))
        return run

    @property
    def config_file(self) -> Path:
        """The options of the run."""
        return self.path / "config.json"

    @property
    def yaml_file(self) -> Path:
        """The options of the run for people. farstep does not trust this file."""
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        """One line of JSON per update."""
        return self.path / "metrics.jsonl"

    @property
    def events_file(self) -> Path:
        """One line of JSON per event; at most 5 MB."""
        return self.path / "events.jsonl"

    @property
    def status_file(self) -> Path:
        """Address of the status page, which only this user may read; exists while the run trains."""
        return self.path / "status"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints of the run."""
        return self.path / "checkpoints"

    @property
    def videos(self) -> Path:
        """Rendered episodes."""
        return self.path / "videos"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files, if the run writes them."""
        return self.path / "tensorboard"

    def read_config(self) -> dict[str, Any]:
        """Read the options of the run. Do not check who wrote them.

        Returns:
            The options as plain data, by name.

        Raises:
            RunError: The file cannot be read.
        """
        return self.read_signed_config()[0]

    def read_signed_config(self) -> tuple[dict[str, Any], str]:
        """Read the options and check their tag.

        Returns:
            The options as plain data, and a clause with the reason why another user may have written them; "" if the
            tag proves that this user did.

        Raises:
            RunError: The file cannot be read.
        """
        try:
            config = json.loads(self.config_file.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"{self.config_file} cannot be read: {error}.") from error
        if not isinstance(config, dict):
            raise RunError(f"{self.config_file} contains a {type(config).__name__}; expected an object with options.")
        tag = config.pop(_TAG, None)
        return config, signing.why_not_ours(config, tag)

    def write_config(self, config: Mapping[str, object]) -> None:
        """Replace the options, e.g. when a run is resumed for more steps, and tag them.

        Args:
            config: Options of the run, as in `create`.

        Raises:
            ConfigError: The options cannot be written as JSON.
            RunError: The file cannot be written.
        """
        content = self._signed(_as_json(config))
        with as_run_error(self.config_file):
            replace_file(self.config_file, content)

    def _signed(self, content: bytes) -> bytes:
        config = json.loads(content)
        try:
            config[_TAG] = signing.tag(config)
        except signing.NoKey as reason:
            log.warning(
                "%s has no signature, so --resume, eval and watch will need --trust: %s", self.config_file, reason
            )
        return json.dumps(config, indent=2).encode() + b"\n"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of the folder. The kernel releases it even if the process is killed.

        If the file system has no locks, log a warning and continue.

        Returns:
            A context manager that holds the lock inside.

        Raises:
            RunError: Another process holds the lock, or the lock file cannot be opened or written.
        """
        with self._open_lock() as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stream.seek(0)
                raise RunError(_in_use(self.path, stream.read())) from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
                log.warning("%s: this file system has no locks; make sure that only one run writes there", self.path)
            with as_run_error(self.path / ".lock"):
                stream.truncate(0)
                stream.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
            yield

    def is_locked(self) -> bool | None:
        """Check whether a process trains in the folder.

        Returns:
            Whether a process holds the lock. None: unknown, because the lock file cannot be read or the file system
            has no locks.
        """
        try:
            with open(self.path / ".lock", "rb", opener=no_follow) as stream:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no process has locked the folder yet, or its file system has no locks
            return None
        return False

    def _open_lock(self) -> IO[bytes]:
        path = self.path / ".lock"
        try:
            return open(path, "a+b", buffering=0, opener=no_follow)  # closing it writes nothing, and so cannot fail
        except OSError as error:
            hint = "Remove the symbolic link" if path.is_symlink() else "Make the folder writable"
            raise RunError(
                f"{path} cannot be opened to lock the run: {error.strerror}. {hint}, then try again."
            ) from error


def _make_new(root: Path, name: str) -> Path:
    for number in count(1):
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError


def _as_json(config: Mapping[str, object]) -> bytes:
    """Encode options as indented JSON; dataclasses, enums and paths become plain data."""
    try:
        plain = msgspec.to_builtins(dict(config), enc_hook=_as_text)
    except TypeError as error:
        raise ConfigError(f"the options of a run cannot be saved: {error}.") from error
    return json.dumps(plain, indent=2).encode() + b"\n"


def _as_text(value: object) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if callable(value):
        return f"{value.__module__}:{getattr(value, '__qualname__', type(value).__qualname__)}"
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON; expected numbers, text, lists, objects")


def _in_use(path: Path, owner: bytes) -> str:
    try:
        contents = json.loads(owner)
        holder = f"process {contents['pid']} on host {contents['host']}"
    except (ValueError, TypeError, KeyError):
        holder = "another process"  # it has the lock, but has not written its process id yet
    return f"{holder} is already training in {path}. Wait for it or stop it, or start a new run."


def _not_a_run(path: Path) -> str:
    """Return why a path is not a run, with a list of runs nearby."""
    if not path.exists():
        found = f"{path} does not exist"
    elif not path.is_dir():
        found = f"{path} is a file"
    else:
        found = f"{path} has no config.json"
    start = f"{found}; expected the folder of a run, with config.json and metrics.jsonl in it."
    for folder in (path, path.parent, Path("runs")):
        if names := _runs_in(folder):
            near = difflib.get_close_matches(path.name, names, n=_SHOWN, cutoff=0.3) if folder != path else []
            shown = (near + [name for name in names if name not in near])[:_SHOWN]
            more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
            return f"{start} Runs in {folder}: {', '.join(shown)}{more}."
    return f"{start} {path.parent} has no runs either."


def _runs_in(folder: Path) -> list[str]:
    """Return the names of the runs in a folder, newest first."""
    try:
        found = [(entry.stat().st_mtime, entry.parent.name) for entry in folder.glob("*/config.json")]
    except OSError:
        return []
    return [name for _, name in sorted(found, reverse=True)]
