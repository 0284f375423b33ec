"""The process that runs a `Coordinator`: a unix socket, a clock, and a file that survives a crash.

$XDG_STATE_HOME/farstep/coordinators/NAME/     mode 0700
├── socket        mode 0600; only processes of the same user are accepted
├── state.json    written before an answer is sent, so that no grant is forgotten
└── lock          locked while a coordinator runs
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from farstep.elastic.coordinator.coordinator import TURN_S, Coordinator, Workload
from farstep.elastic.coordinator.messages import (
    PROTOCOL,
    Answer,
    Heartbeat,
    Message,
    Refused,
    Register,
    Welcome,
)
from farstep.elastic.coordinator.state_file import StateFile
from farstep.errors import ConfigError, LaunchError, counted

PACKET_BYTES = 2**17
"""Maximum size of a message. The numbers of 10,000 slots take 30 kB, and the kernel sends at most 208 kB at once."""
_TICK_S = 0.1
_PAUSE_S = 1.0
"""Longest time in seconds between two readings of the clock that counts."""
_SAVE_EVERY_S = 10.0
_MAX_CLIENTS = 1000
_CREDENTIALS = struct.Struct("3i")


class StatusRequest(msgspec.Struct, tag="status", frozen=True):
    """Requests one `WorkloadStatus` per run, and then a `Status`."""

    protocol: int = 1


class WorkloadStatus(msgspec.Struct, tag="workload-status", frozen=True):
    """A registered run."""

    workload: Workload
    state: str
    device: int | None
    device_position: int | None
    """Position in the queue for devices, from 1."""


class Status(msgspec.Struct, tag="status-end", frozen=True):
    """What a coordinator has."""

    slots: int
    devices: int
    lease_s: float
    pid: int
    protocol: int = 1


_REQUESTS = msgspec.msgpack.Decoder(Message | StatusRequest)


def coordinator_folder(name: str) -> Path:
    """Return the folder of a coordinator.

    Args:
        name: Path of the folder if it contains a slash, otherwise a name under `$XDG_STATE_HOME/farstep/coordinators`.

    Raises:
        ConfigError: The name is not a plain name, or this user has no home folder.
    """
    if "://" in name or ("/" not in name and re.search(r":\d+\Z", name)):
        raise ConfigError(
            f"{name!r} is an address, but a coordinator has none: start it on the machine of the runs, and give its "
            "name, or the path of its folder."
        )
    if "/" in name:
        return Path(name).absolute()
    if not name or name.startswith(".") or "\0" in name:
        raise ConfigError(f"a coordinator cannot be named {name!r}; expected a plain name, or a path with a slash.")
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():  # ignored, as the XDG specification requires
        try:
            base = Path.home() / ".local" / "state"
        except RuntimeError as error:
            raise ConfigError(f"this user has no home folder ({error}); give the path of the coordinator.") from None
    return base / "farstep" / "coordinators" / name


@contextlib.contextmanager
def socket_path(folder: Path) -> Iterator[str]:
    """Context manager: yield a path of the socket that is short enough for the kernel (107 bytes)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/socket"
    finally:
        os.close(descriptor)


class _Clock:
    """Measures the time in which this process runs. Runs are not silent while the coordinator is suspended."""

    def __init__(self) -> None:
        self._read_at, self._paused_s = time.monotonic(), 0.0

    def now(self) -> float:
        """Return the time in seconds. The coordinator reads it several times a second, unless it is suspended."""
        now = time.monotonic()
        if (passed_s := now - self._read_at) > _PAUSE_S:
            self._paused_s += passed_s - _TICK_S
        self._read_at = now
        return now - self._paused_s


class CoordinatorServer:
    """Serves one coordinator until `stop` is called.

    Args:
        folder: Folder of the coordinator; created if necessary. A saved state in it is restored.
        slots: Number of slots.
        devices: Number of devices.
        lease_s: Seconds of silence after which a run loses what it holds.
        turn_s: Seconds for which a run of priority 1 keeps its slots while another one waits for its minimum.

    Raises:
        LaunchError: Another coordinator uses the folder, or it cannot be written.
        ConfigError: The saved state cannot be read.
    """

    def __init__(
        self, folder: Path, slots: int, devices: int = 0, lease_s: float = 10.0, turn_s: float = TURN_S
    ) -> None:
        self._folder, self._connections = folder, dict[str, socket.socket]()
        self._clock, self._saved_at = _Clock(), 0.0
        self._file = StateFile(folder)
        with contextlib.ExitStack() as opened:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                if (status := folder.stat()).st_uid != os.geteuid() or status.st_mode & 0o077:
                    raise LaunchError(
                        f"others can use {folder}; the folder of a coordinator must be yours, with mode 0700."
                    )
                self._lock(opened)
                self.coordinator = self._restored(slots, devices, lease_s, turn_s)
                (folder / "socket").unlink(missing_ok=True)
                self._listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                with socket_path(folder) as path:
                    self._listener.bind(path)
                (folder / "socket").chmod(0o600)
                self._listener.listen(64)
            except OSError as error:
                raise LaunchError(f"the coordinator cannot use {folder}: {error}.") from error
            self._listener.setblocking(False)
            self._wake, self._woken = socket.socketpair()
            opened.enter_context(self._wake)
            opened.enter_context(self._woken)
            self._selector = opened.enter_context(selectors.DefaultSelector())
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._selector.register(self._woken, selectors.EVENT_READ, None)
            self._opened = opened.pop_all()

    def _lock(self, opened: contextlib.ExitStack) -> None:
        stream = opened.enter_context((self._folder / "lock").open("ab"))
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(
                f"another coordinator runs in {self._folder}; runs can join it, or choose another --name."
            ) from None

    def _restored(self, slots: int, devices: int, lease_s: float, turn_s: float) -> Coordinator:
        now = self._clock.now()
        if (saved := self._file.read()) is None:
            return Coordinator(slots, devices, lease_s, turn_s, now)
        try:
            coordinator = Coordinator.load(saved, slots, devices, lease_s, turn_s)
        except ConfigError as error:
            raise ConfigError(f"{error} If none of its runs is alive, remove {self._folder / 'state.json'}.") from None
        coordinator.renew(now)
        return coordinator

    # ---- the loop ----

    def serve(self) -> None:
        """Serve until `stop` is called, and close everything."""
        with self._opened:
            try:
                self._send(self.coordinator.tick(self._clock.now()))
                while True:
                    for key, _ in self._selector.select(_TICK_S):
                        if key.data is None:
                            return
                        key.data()
                    now = self._clock.now()
                    if answers := self.coordinator.tick(now):
                        self._save()
                        self._send(answers)
                    elif now > self._saved_at + _SAVE_EVERY_S:
                        self._save()
            finally:
                self._file.replace(self.coordinator.save())
                self._file.close()
                for key in list(self._selector.get_map().values()):
                    if key.fileobj not in (self._listener, self._woken):
                        self._close(key.fileobj)  # type: ignore[arg-type]
                (self._folder / "socket").unlink(missing_ok=True)

    def stop(self) -> None:
        """End `serve`. Any thread or signal handler may call this."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _, user, _ = _CREDENTIALS.unpack(credentials)
            if user != os.geteuid() or len(self._selector.get_map()) > _MAX_CLIENTS:
                client.close()
                return
            client.setblocking(False)
            self._selector.register(client, selectors.EVENT_READ, lambda: self._read(client))

    def _read(self, client: socket.socket) -> None:
        packet = b""
        try:
            packet = client.recv(PACKET_BYTES)
            message = _REQUESTS.decode(packet)
        except BlockingIOError:
            return
        except (OSError, msgspec.MsgspecError):  # an empty packet is the end of the connection
            if other := _other_protocol(packet):
                self._refuse(client, *other)
            else:
                self._close(client)
            return
        if isinstance(message, (Register, StatusRequest)) and message.protocol != PROTOCOL:
            self._refuse(client, getattr(message, "workload", ""), message.protocol)
            return
        if isinstance(message, StatusRequest):
            self._send_status(client)
            return
        if isinstance(message, Register):
            self._connections[message.workload] = client
            self._send_packet(client, Welcome(message.workload, PROTOCOL))
        answers = self.coordinator.handle(message, self._clock.now())
        if answers or not isinstance(message, Heartbeat):
            self._save()
        self._send(answers)

    def _send(self, answers: list[Answer]) -> None:
        for answer in answers:
            if (client := self._connections.get(answer.workload)) is not None:
                self._send_packet(client, answer)

    def _send_packet(self, client: socket.socket, message: object) -> None:
        try:
            client.send(msgspec.msgpack.encode(message))
        except BrokenPipeError:  # what the client has sent before its end, such as `Leave`, is still to be read
            pass
        except OSError:  # or the client does not read; it learns the current state when it connects again
            self._close(client)

    def _close(self, client: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client)
        self._connections = {id_: other for id_, other in self._connections.items() if other is not client}
        client.close()

    def _refuse(self, client: socket.socket, workload: str, protocol: int) -> None:
        """Refuse a client of another version, and ignore what else it sends: it would not understand the answers."""
        self._selector.modify(client, selectors.EVENT_READ, lambda: self._ignore(client))
        reason = (
            f"the coordinator uses version {PROTOCOL} of its protocol, and this process version {protocol}; run both "
            "with the same version of farstep, or start another coordinator for this process"
        )
        self._send_packet(client, Refused(workload, reason))

    def _ignore(self, client: socket.socket) -> None:
        try:
            if client.recv(PACKET_BYTES):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._close(client)

    def _save(self) -> None:
        self._file.append(self.coordinator.save())
        self._saved_at = self._clock.now()

    def _send_status(self, client: socket.socket) -> None:
        coordinator = self.coordinator
        for workload in coordinator.workloads:
            waiting = coordinator.device_queue
            self._send_packet(
                client,
                WorkloadStatus(
                    workload,
                    coordinator.state_of(workload),
                    coordinator.devices.index(workload.id) if workload.id in coordinator.devices else None,
                    waiting.index(workload.id) + 1 if workload.id in waiting else None,
                ),
            )
        devices = len(coordinator.devices)
        self._send_packet(client, Status(coordinator.slots, devices, coordinator.lease_s, os.getpid(), PROTOCOL))


def _other_protocol(packet: bytes) -> tuple[str, int] | None:
    """Return the id and the version of a client of another version whose first message cannot be decoded."""
    try:
        match msgspec.msgpack.decode(packet):
            case {"type": "register" | "status", "protocol": int(protocol), **rest} if protocol != PROTOCOL:
                workload = rest.get("workload", "")
                return (workload if isinstance(workload, str) else ""), protocol
    except msgspec.MsgspecError:
        pass
    return None


def connect(folder: Path, timeout_s: float) -> socket.socket:
    """Connect to the coordinator of a folder. Raise `OSError` if none runs there, or it belongs to another user."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        client.settimeout(timeout_s)
        with socket_path(folder) as path:
            client.connect(path)
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if (user := _CREDENTIALS.unpack(credentials)[1]) != os.geteuid():
            raise PermissionError(f"the coordinator belongs to the user with id {user}")
    except BaseException:
        client.close()
        raise
    return client


def no_coordinator(name: str, error: OSError) -> str:
    """Return the text of the error that no coordinator can be reached."""
    if isinstance(error, TimeoutError):
        return f"the coordinator in {coordinator_folder(name)} does not answer; it may be suspended or overloaded."
    option = "" if name == "default" else f" --name {name}"
    return (
        f"no coordinator can be reached in {coordinator_folder(name)} ({error.strerror or error}); start one with "
        f"'farstep coordinator start --slots N{option}'."
    )


def read_status(name: str, timeout_s: float = 5.0) -> tuple[Status, list[WorkloadStatus]]:
    """Request the status of a coordinator. Raise `LaunchError` if none runs."""
    decoder = msgspec.msgpack.Decoder(WorkloadStatus | Status | Refused)
    runs: list[WorkloadStatus] = []
    try:
        with connect(coordinator_folder(name), timeout_s) as client:
            client.send(msgspec.msgpack.encode(StatusRequest(PROTOCOL)))
            while isinstance(answer := decoder.decode(client.recv(PACKET_BYTES)), WorkloadStatus):
                runs.append(answer)
    except OSError as error:
        raise LaunchError(no_coordinator(name, error)) from None
    except msgspec.MsgspecError as error:
        raise LaunchError(f"the coordinator gave no valid answer ({error}); is it of another version?") from None
    if isinstance(answer, Refused):
        raise LaunchError(f"the coordinator refuses to answer: {answer.reason}.")
    if answer.protocol != PROTOCOL:
        raise LaunchError(f"the coordinator cannot be asked for its status: {other_version(answer.protocol)}.")
    return answer, runs


def other_version(protocol: int) -> str:
    """Return the reason why a coordinator of another version cannot be used."""
    return (
        f"it uses version {protocol} of its protocol, and this process version {PROTOCOL}; restart it with the version "
        "of farstep that this process uses, when its runs have ended"
    )


def status_text(status: Status, runs: list[WorkloadStatus]) -> Iterator[str]:
    """Yield the lines that `farstep coordinator status` prints."""
    used = sum(len(run.workload.held) for run in runs)
    held = sum(run.device is not None for run in runs)
    devices = f", {held} of {counted(status.devices, 'device')} in use" if status.devices else ""
    yield f"{used} of {counted(status.slots, 'slot')} in use{devices}; lease {status.lease_s:g} s, process {status.pid}"
    width = max([28, *(len(run.workload.name) for run in runs)])
    if runs:
        yield f"{'run':<{width}} priority slots  min  max  slot time device time  state"
    for run in runs:
        w = run.workload
        yield (
            f"{w.name:<{width}} {w.priority:>8} {len(w.held):>5} {w.minimum:>4} {w.wanted:>4} {w.slot_s:>8.1f} s "
            f"{w.device_s:>9.1f} s  {_state(run)}"
        )


def _state(run: WorkloadStatus) -> str:
    device = "" if run.device is None else f", holds device {run.device}"
    waiting = "" if run.device_position is None else f", number {run.device_position} in the queue for a device"
    return f"{run.state}{device}{waiting}"
