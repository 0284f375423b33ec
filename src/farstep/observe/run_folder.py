"""The folder of a run: where its parts are, and who writes to it.

runs/CartPole-v1-ppo-seed1-20260131-120000/
├── config.json      the options it was started with, and a tag that shows which user wrote them
├── metrics.jsonl    one line per update
├── checkpoints/     what `--resume` goes on from
├── videos/
├── plots/
└── tensorboard/     where it was asked for
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
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any

import msgspec

from farstep.checkpoint.files import no_follow
from farstep.errors import ConfigError, RunError
from farstep.observe import signing
from farstep.observe.files import as_run_error, replace_file

log = logging.getLogger("farstep")

_SHOWN = 5
_TAG = "tag"
"""The entry of config.json that shows who wrote the others."""


def run_name(env_id: str, algorithm: str, seed: int | None = None, now: datetime.datetime | None = None) -> str:
    """The name a run gets by itself: environment, algorithm, seed and time."""
    now = datetime.datetime.now() if now is None else now
    parts = [env_id, algorithm, *([] if seed is None else [f"seed{seed}"]), f"{now:%Y%m%d-%H%M%S}"]
    return re.sub(r"[^\w.-]", "_", "-".join(parts), flags=re.ASCII).lstrip(".")


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    @classmethod
    def create(cls, root: str | os.PathLike[str], name: str, config: Mapping[str, object]) -> RunFolder:
        """A new folder under `root` with the run's options in it; a name that is taken gets -2, -3 and so on."""
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            raise ConfigError(f"a run cannot be named {name!r}; expected a plain name without slashes, e.g. 'first'.")
        content = _as_json(config)  # raises before anything is written
        try:
            Path(root).mkdir(parents=True, exist_ok=True)
            run = cls(_make_new(Path(root), name))
            for folder in (run.checkpoints, run.videos, run.plots):
                folder.mkdir()
            replace_file(run.config_file, run._signed(content))
        except OSError as error:
            raise RunError(f"no run can be written under {root}: {error}. Choose another folder.") from error
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """The folder of a run that exists."""
        run = cls(Path(path))
        if not run.config_file.is_file():
            raise RunError(_not_a_run(Path(path)))
        return run

    @property
    def config_file(self) -> Path:
        """The options the run was started with."""
        return self.path / "config.json"

    @property
    def metrics_file(self) -> Path:
        """One line of JSON per update."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """What the run can be resumed from."""
        return self.path / "checkpoints"

    @property
    def videos(self) -> Path:
        """Rendered episodes."""
        return self.path / "videos"

    @property
    def plots(self) -> Path:
        """Drawings of the metrics."""
        return self.path / "plots"

    @property
    def tensorboard(self) -> Path:
        """Event files, where they were asked for."""
        return self.path / "tensorboard"

    def read_config(self) -> dict[str, Any]:
        """The options the run was started with, as plain data; their tag is not checked."""
        return self.read_signed_config()[0]

    def read_signed_config(self) -> tuple[dict[str, Any], str]:
        """The options, and why they may not be this user's, as a clause; "" if their tag shows that they are."""
        try:
            config = json.loads(self.config_file.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"{self.config_file} cannot be read: {error}.") from error
        if not isinstance(config, dict):
            raise RunError(f"{self.config_file} holds {type(config).__name__}, expected an object with options.")
        tag = config.pop(_TAG, None)
        return config, signing.why_not_ours(config, tag)

    def write_config(self, config: Mapping[str, object]) -> None:
        """Replace the options, e.g. when a run is resumed for more steps, and tag them as this user's."""
        content = self._signed(_as_json(config))
        with as_run_error(self.config_file):
            replace_file(self.config_file, content)

    def _signed(self, content: bytes) -> bytes:
        config = json.loads(content)
        try:
            config[_TAG] = signing.tag(config)
        except signing.NoKey as reason:
            log.warning("%s has no tag, so --resume and watch will need --trust: %s", self.config_file, reason)
        return json.dumps(config, indent=2).encode() + b"\n"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep others from training in this folder meanwhile; the lock ends with the process, however that ends."""
        with self._open_lock() as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stream.seek(0)
                raise RunError(_in_use(self.path, stream.read())) from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
                log.warning("%s: this file system has no locks; see to it that only one run writes there", self.path)
            with as_run_error(self.path / ".lock"):
                stream.truncate(0)
                stream.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
                stream.flush()
            yield

    def _open_lock(self) -> IO[bytes]:
        path = self.path / ".lock"
        try:
            return open(path, "a+b", opener=no_follow)
        except OSError as error:
            hint = "Remove that symbolic link" if path.is_symlink() else "Make the folder writable"
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
    """Options as indented JSON; dataclasses, enums and paths become plain data."""
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
    raise TypeError(f"a {type(value).__name__} has no form as JSON; expected numbers, text, lists, objects")


def _in_use(path: Path, owner: bytes) -> str:
    try:
        holder = json.loads(owner)
        who = f"process {holder['pid']} on host {holder['host']}"
    except (ValueError, TypeError, KeyError):
        who = "another process"  # which has the lock and has not written its name yet
    return f"{who} trains in {path} already. Wait for it or stop it, or start a run of its own."


def _not_a_run(path: Path) -> str:
    """Why a path is no run, and what may have been meant."""
    if not path.exists():
        found = f"{path} does not exist"
    elif not path.is_dir():
        found = f"{path} is a file"
    else:
        found = f"{path} has no config.json"
    start = f"{found}; expected the folder of a run, with config.json and metrics.jsonl in it."
    for place in (path, path.parent):
        if names := _runs_in(place):
            near = difflib.get_close_matches(path.name, names, n=_SHOWN, cutoff=0.3) if place != path else []
            shown = (near + [name for name in names if name not in near])[:_SHOWN]
            more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
            return f"{start} Runs in {place}: {', '.join(shown)}{more}."
    return f"{start} No run is in {path.parent} either."


def _runs_in(folder: Path) -> list[str]:
    """Names of the runs in a folder, the newest first."""
    try:
        found = [(entry.stat().st_mtime, entry.parent.name) for entry in folder.glob("*/config.json")]
    except OSError:
        return []
    return [name for _, name in sorted(found, reverse=True)]
