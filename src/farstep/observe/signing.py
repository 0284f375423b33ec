"""Tags that prove that this user wrote a run's config.json.

config.json names code that `--resume`, `eval` and `watch` execute: environments, wrappers, commands on nodes. A tag is
a keyed hash (HMAC-SHA256) of the options; only this user can read the key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from farstep.checkpoint.files import no_follow

_BYTES = 32
_PURPOSE = b"farstep run configuration 1\0"


class NoKey(Exception):
    """The key cannot be used. The message is a clause with the reason."""


def key_file() -> Path:
    """Return the path of the key, `$XDG_STATE_HOME/farstep/run.key`. XDG_STATE_HOME defaults to ~/.local/state."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():  # ignored, as the XDG specification requires
        try:
            base = Path.home() / ".local" / "state"
        except RuntimeError as error:
            raise NoKey(f"this user has no home folder ({error})") from None
    return base / "farstep" / "run.key"


def tag(config: Mapping[str, object]) -> str:
    """Return the tag of options (plain data). Create the key at first use; raise `NoKey` if this fails."""
    return _tag(_read_key() or _make_key(), config)


def why_not_ours(config: Mapping[str, object], found: object) -> str:
    """Return a clause with the reason why the tag does not prove that this user wrote the options; "" if it does."""
    if found is None:
        return "it has no signature"
    try:
        key = _read_key()
    except NoKey as reason:
        return f"its signature cannot be checked, since {reason}"
    if key is None:
        return f"its signature cannot be checked, since {key_file()} does not exist"
    same = isinstance(found, str) and hmac.compare_digest(_tag(key, config).encode(), found.encode(errors="replace"))
    return "" if same else "its signature does not match: another user or machine wrote it, or it was changed"


def _tag(key: bytes, config: Mapping[str, object]) -> str:
    text = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
    return hmac.new(key, _PURPOSE + text, hashlib.sha256).hexdigest()


def _read_key() -> bytes | None:
    """Return the key, or None if there is none yet."""
    path = key_file()
    try:
        with open(path, "rb", opener=no_follow) as stream:
            status, key = os.fstat(stream.fileno()), stream.read(_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NoKey(f"{path} cannot be read ({error.strerror})") from None
    if status.st_uid != os.geteuid():
        raise NoKey(f"{path} belongs to another user")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise NoKey(f"others can read {path} (mode {mode:04o}, 0600 expected; chmod 600, or remove it if it was read)")
    if len(key) != _BYTES:
        raise NoKey(f"{path} is damaged ({len(key)} bytes, {_BYTES} expected; remove it)")
    return key


def _make_key() -> bytes:
    """Create a key. If another process created it first, read that key."""
    path = key_file()
    partial = path.with_name(f".run.key.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as stream:
                stream.write(secrets.token_bytes(_BYTES))
                stream.flush()
                os.fsync(stream.fileno())
            os.link(partial, path)  # atomic, and fails if another process was first
        except FileExistsError:
            pass
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise NoKey(f"{path} cannot be created ({error.strerror})") from None
    key = _read_key()
    if key is None:
        raise NoKey(f"{path} was removed by another process")
    return key
