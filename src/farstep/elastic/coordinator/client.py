"""The connection of a run to its coordinator: a thread that sends heartbeats and receives allowances, and one that
applies them.

A pool may hold its lock for longer than a lease, such as while it requests nodes. Therefore the thread of the
connection never takes this lock.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from farstep.elastic.coordinator.messages import (
    PROTOCOL,
    Answer,
    GrantDevice,
    GrantSlots,
    Heartbeat,
    Leave,
    Message,
    NotRegistered,
    Refused,
    Register,
    Released,
    RequestDevice,
    RequestSlots,
    ReturnDevice,
    ReturnSlots,
    Welcome,
)
from farstep.elastic.coordinator.server import (
    PACKET_BYTES,
    connect,
    coordinator_folder,
    no_coordinator,
    other_version,
)
from farstep.elastic.coordinator.wait_ledger import WaitLedger
from farstep.elastic.coordinator.worker_pool import WorkerPool
from farstep.errors import ClosedError, ConfigError, FarstepError, LaunchError, counted
from farstep.event import Emit

_HEARTBEAT_S = 0.25
_POLL_S = 0.02
"""Seconds between two checks whether workers are parked, while slots are to be released."""
_CONNECT_S = 5.0
_REPORT_S = 60.0
"""Seconds between two reports of the number of workers, unless the user has changed it."""
_ANSWERS = msgspec.msgpack.Decoder(Answer)


class CoordinatorClient:
    """Keeps the number of running workers within what the coordinator allows.

    If the coordinator ends, the run keeps its slots, and connects again when another coordinator has been started.

    Args:
        name: Name or path of the coordinator.
        priority: Priority of the run, from 1 to 100.
        minimum: Number of workers without which the run waits.
        wanted: Number of workers that the run can use.
        emit: Receives events.
        run_name: Name of the run for people; empty: that of the script.
        per_session: Whether the run holds slots only while it launches and while a session of tickets is open.

    Raises:
        LaunchError: No coordinator can be reached.
    """

    def __init__(
        self,
        name: str,
        priority: int,
        minimum: int,
        wanted: int,
        emit: Emit,
        *,
        run_name: str = "",
        per_session: bool = False,
    ) -> None:
        self._name, self._folder, self._emit = name, coordinator_folder(name), emit
        self._workers, self._per_session = wanted, per_session
        first = minimum if per_session else wanted  # all workers start at launch, for any number of slots
        shown = _shown_name(run_name)
        self._register = Register(secrets.token_hex(16), shown, priority, minimum, first, protocol=PROTOCOL)
        self._uses_session = True
        """Whether the run launches, or a session is open; always, if slots are not held per session."""
        self._waits = WaitLedger()
        self._report_at = 0.0
        """When the next change of the number of workers is reported."""
        self._is_compatible = True
        """Whether no coordinator of another version has answered; otherwise the run does not connect again."""
        self._welcomed = False
        """Whether the coordinator has answered on this connection, in the protocol of this process."""
        self._has_ended = False
        """Whether an event has reported that the coordinator has ended, and none that it is back."""
        self._changed = threading.Condition()
        self._allowed: tuple[int, ...] = ()
        """The numbers of the slots that the run may use."""
        self._round = self._acknowledged = 0
        self._pool: WorkerPool | None = None
        self._uses_slots = False
        """Whether workers were started, or are being started."""
        self._applied: tuple[int, ...] | None = None
        """The slots that the pool was last told to use."""
        self._refused = self._no_device = ""
        """Why the coordinator refuses this run, and why it refuses to lend it a device; empty if it does not."""
        self._closed = False
        self._device: int | None = None
        self._request = 0
        self._requests_device = False
        self._turns: deque[object] = deque()
        """The threads of this run that use or want a device, in the order of their calls."""
        self._socket: socket.socket | None = None
        try:
            self._connect()
        except OSError as error:
            raise LaunchError(no_coordinator(name, error)) from None
        self._wake, self._woken = socket.socketpair()
        self._has_changed = threading.Event()
        """Set when the allowance or the session may have changed."""
        self._threads = [
            threading.Thread(target=self._run_connection, name="farstep-coordinator", daemon=True),
            threading.Thread(target=self._run_pool, name="farstep-slots", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _connect(self) -> None:
        client = connect(self._folder, _CONNECT_S)
        with self._changed:  # otherwise a request of another thread could be neither repeated here nor sent there
            if not self._uses_session and self._register.wanted:
                self._forget_slots()  # the coordinator was down when the session ended
            try:
                client.send(msgspec.msgpack.encode(self._register))
                if self._requests_device:
                    client.send(msgspec.msgpack.encode(RequestDevice(self._register.workload, self._request)))
            except OSError:
                client.close()
                raise
            self._socket, self._welcomed = client, False
            self._refused = self._no_device = ""  # a restarted coordinator may have more slots and devices

    # ---- calls of the run's threads ----

    def wait(self, check_open: Callable[[], None]) -> tuple[int, ...]:
        """Wait until the coordinator allows the minimum, and return the numbers of the slots that the run may use.

        Args:
            check_open: Raises if the wait is to end. Called several times a second.

        Raises:
            ConfigError: The minimum is larger than what the coordinator has.
        """
        with self._changed:
            self._waits.begin(time.monotonic())
            while not self._allowed:
                check_open()
                if self._refused:
                    raise self._refusal()
                self._changed.wait(_HEARTBEAT_S)
                self._report_wait()
            self._waits.end(time.monotonic())
            self._uses_slots = True
            return self._allowed

    @property
    def waiting_for(self) -> str:
        """The slots that the run waits for; empty while it needs none or may use some."""
        if self._allowed or not self._register.wanted:
            return ""
        reason = "which other runs are using" if self._welcomed else "which does not answer"
        if self._socket is None:
            reason = "which does not run"
        return f"{counted(self._register.minimum, 'slot')} of coordinator {self._name!r}, {reason}"

    def snapshot(self) -> dict[str, Any]:
        """Return what the run wants and has got, as in `ClusterEnv.stats`."""
        return {"name": self._name, "granted": len(self._allowed), "wanted": self._register.wanted}

    def drive(self, pool: WorkerPool, slots: tuple[int, ...]) -> None:
        """From now on, scale this pool, which uses these slots."""
        with self._changed:
            self._pool, self._applied = pool, slots
        if self._per_session:
            pool.use_slots_per_session(self)
        self._has_changed.set()

    def want(self, workers: int) -> None:
        """Tell the coordinator how many workers the run can use."""
        with self._changed:
            self._workers, self._report_at = workers, 0.0
            if self._register.wanted:
                self._request_slots()

    def begin(self, *, for_rollout: bool) -> None:
        """Request slots for a session (see `SessionSlots`)."""
        with self._changed:
            self._uses_session, self._applied = True, None
            number = self._register.request
            # If `wanted` is not 0, the run still has slots: it requested them early, or could not return those of the
            # last session because the coordinator was down.
            if not self._register.wanted:
                self._waits.begin(time.monotonic())
                number += 1
            self._register = msgspec.structs.replace(self._register, request=number, for_rollout=for_rollout)
            self._request_slots()
        self._has_changed.set()

    def _request_slots(self) -> None:
        self._register = register = msgspec.structs.replace(self._register, wanted=self._workers)
        self._send(RequestSlots(register.workload, register.wanted, register.request, register.for_rollout))

    def end(self) -> None:
        """Return the slots of a session (see `SessionSlots`)."""
        with self._changed:
            self._uses_session, self._applied = False, None
            self._waits.end(time.monotonic())
            if self._socket is not None:
                self._forget_slots()
                self._send(ReturnSlots(self._register.workload, self._register.request))

    def _forget_slots(self) -> None:
        self._register = msgspec.structs.replace(self._register, wanted=0)
        self._allowed, self._acknowledged = (), self._round

    def waited_seconds(self) -> float:
        """Return for how many seconds the run has waited for slots."""
        with self._changed:
            return self._waits.seconds(time.monotonic())

    def _report_wait(self) -> None:
        if not self._allowed and self._waits.report_is_due(time.monotonic()):
            remedy = (
                f"start it with 'farstep coordinator start --slots N{_option(self._name)}'"
                if self._socket is None
                else f"'farstep coordinator status{_option(self._name)}' shows which runs hold slots"
            )
            self._emit("warned", f"waiting for {self.waiting_for}; {remedy}")

    def _refusal(self) -> ConfigError:
        return ConfigError(f"coordinator {self._name!r} refuses this run: {self._refused}.")

    @contextlib.contextmanager
    def device_token(self, check_open: Callable[[], None]) -> Iterator[int]:
        """Context manager: wait for a device, yield its number, and return it at the end."""
        turn = object()
        with self._changed:
            self._turns.append(turn)
        try:
            self._wait_for(lambda: self._turns[0] is turn, check_open)
            with self._changed:
                self._requests_device, self._request = True, self._request + 1
                self._send(RequestDevice(self._register.workload, self._request))
            self._wait_for(lambda: self._device is not None, check_open)
            assert self._device is not None
            yield self._device
        finally:
            with self._changed:
                requested = self._turns[0] is turn and self._requests_device
                if requested:
                    self._requests_device, self._device = False, None
                self._turns.remove(turn)
                self._changed.notify_all()
            if requested:
                self._send(ReturnDevice(self._register.workload))

    def _wait_for(self, is_done: Callable[[], bool], check_open: Callable[[], None]) -> None:
        with self._changed:
            while not is_done():
                check_open()
                if self._closed:
                    raise ClosedError("the ClusterEnv was closed while a learner waited for a device.")
                if reason := self._no_device or self._refused:
                    raise ConfigError(f"coordinator {self._name!r} refuses to lend a device: {reason}.")
                self._changed.wait(_HEARTBEAT_S)

    def close(self) -> None:
        """Give everything back, and end the threads. Call it after the workers have ended."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._has_changed.set()
        self._wake.send(b"x")
        for thread in self._threads:
            thread.join()
        self._wake.close()
        self._woken.close()

    # ---- the thread of the connection ----

    def _run_connection(self) -> None:
        heartbeat = 0.0
        while not self._closed:
            if self._socket is None and self._is_compatible:
                self._reconnect()
            if self._has_answer():
                self._receive()
                self._has_changed.set()
            with self._changed:
                self._report_wait()
            if (now := time.monotonic()) > heartbeat + _HEARTBEAT_S:
                heartbeat = now
                self._send(Heartbeat(self._register.workload))
        self._send(Leave(self._register.workload))
        if self._socket is not None:
            self._socket.close()

    def _has_answer(self) -> bool:
        """Wait for an answer, at most for the time between two heartbeats, and return whether there is one."""
        poll = select.poll()  # `select.select` refuses descriptors from 1024
        poll.register(self._woken, select.POLLIN)
        if self._socket is not None:
            poll.register(self._socket, select.POLLIN)
        ready = dict(poll.poll(_HEARTBEAT_S * 1000))
        if self._woken.fileno() in ready:
            self._woken.recv(1)  # a fork of this process may have sent it
        return self._socket is not None and self._socket.fileno() in ready

    def _reconnect(self) -> None:
        with contextlib.suppress(OSError):
            self._connect()

    def _receive(self) -> None:
        assert self._socket is not None
        try:
            packet = self._socket.recv(PACKET_BYTES)
            answer = _ANSWERS.decode(packet) if packet else None
        except OSError:
            answer = None
        except msgspec.MsgspecError as error:
            self._abandon(f"its answer cannot be read ({error}), so it may be of another version of farstep")
            return
        if answer is None:
            self._disconnect()
            return
        with self._changed:
            if answer.workload == self._register.workload:
                self._handle(answer)
                self._changed.notify_all()

    def _abandon(self, reason: str) -> None:
        """Continue without the coordinator, because it has another version."""
        with self._changed:
            self._send(Leave(self._register.workload))
            if self._socket is not None:
                self._socket.close()
            self._socket, self._is_compatible, self._refused = None, False, reason
            self._changed.notify_all()
        if self._uses_slots:  # otherwise `wait` raises
            self._emit("warned", f"coordinator {self._name!r} cannot be used any more: {reason}")

    def _handle(self, answer: Answer) -> None:
        match answer:
            case Welcome(protocol=protocol) if protocol == PROTOCOL:
                self._welcomed = True
                if self._has_ended:
                    self._has_ended = False
                    self._emit("warned", f"connected to coordinator {self._name!r} again")
            case Refused() if not self._welcomed:
                self._abandon(answer.reason)
            case _ if not self._welcomed:  # version 1 has no `Welcome`
                self._abandon(other_version(answer.protocol if isinstance(answer, Welcome) else 1))
            case GrantSlots():
                if answer.request == self._register.request and self._register.wanted:
                    self._allowed, self._round = answer.numbers, answer.round
                    self._acknowledged = -1
                    (self._waits.end if answer.numbers else self._waits.begin)(time.monotonic())
            case GrantDevice() if self._requests_device and answer.request == self._request:
                self._device = answer.device
            case GrantDevice() if not self._requests_device:  # the coordinator ended before it knew
                self._send(ReturnDevice(self._register.workload))
            case Refused(device=True):
                self._no_device = answer.reason
            case Refused():
                self._refused = answer.reason
            case NotRegistered() if not self._refused:  # a refused run is not registered either
                self._allowed, self._device = (), None
                self._register = msgspec.structs.replace(self._register, workload=secrets.token_hex(16))
                if self._register.wanted:
                    self._emit(
                        "warned",
                        f"coordinator {self._name!r} heard nothing from this run for longer than its lease, and gave "
                        "its slots to others; waiting for slots again",
                    )
                self._send(self._register)
                if self._requests_device:
                    self._send(RequestDevice(self._register.workload, self._request))

    # ---- the thread of the pool ----

    def _run_pool(self) -> None:
        while not self._closed:
            self._has_changed.wait(_HEARTBEAT_S if self._acknowledged == self._round else _POLL_S)
            self._has_changed.clear()
            self._apply()

    def _apply(self) -> None:
        """Scale the workers as allowed, and acknowledge as soon as no more than that run."""
        with self._changed:
            pool, allowed, this_round = self._pool, self._allowed, self._round
        if pool is None:
            running = 0 if not self._uses_slots else len(allowed) + 1
        else:
            with pool.locked():  # no session begins or ends meanwhile
                if pool.state == "running":  # otherwise the error is raised by the user's next call, not here
                    self._adjust(pool, allowed)
            running = pool.num_running()
        with self._changed:
            is_current = (self._allowed, self._round) == (allowed, this_round)
            if is_current and self._acknowledged != this_round and running <= len(allowed):
                self._acknowledged = this_round
                self._send(Released(self._register.workload, this_round))

    def _adjust(self, pool: WorkerPool, allowed: tuple[int, ...]) -> None:
        with self._changed:
            applied = self._applied
            if self._allowed != allowed or not self._uses_session:
                return
            is_refused = self._refused and not allowed
            if not is_refused and (allowed == applied or (not allowed and applied is None)):
                return  # in the latter case, a session waits for its first slots, and the pool is paused already
            self._applied = allowed
        if is_refused:
            pool.fail(self._refusal())
        elif allowed:
            try:
                pool.use_slots(allowed, quiet=self._is_quiet(time.monotonic()))
            except FarstepError as error:
                text = f"this run may use {counted(len(allowed), 'worker')}, but its nodes cannot be requested"
                self._emit("warned", f"{text}: {error}")
                with self._changed:
                    # Call again later: the launcher now requests the nodes itself, and the call then only unparks
                    # workers.
                    self._applied = applied
                return
            if applied == ():
                self._emit("scaled", f"continuing with {counted(len(allowed), 'worker')}")
        else:
            pool.pause()
            self._emit("scaled", f"paused: coordinator {self._name!r} has given all slots of this run to other runs")

    def _is_quiet(self, now: float) -> bool:
        """Return whether to skip the report of a changed number of workers: the last was less than a minute ago.
        Runs that return their slots between rollouts may change the share of other runs several times a second."""
        if now < self._report_at:
            return True
        self._report_at = now + _REPORT_S
        return False

    def _send(self, message: Message) -> None:
        """Send a message. If this fails, the thread connects again, which repeats what the coordinator must know."""
        if (client := self._socket) is None:
            return
        try:
            client.send(msgspec.msgpack.encode(message))
        except OSError:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def _disconnect(self) -> None:
        assert self._socket is not None
        self._socket.close()
        self._socket = None
        if not self._closed and not self._has_ended:
            self._has_ended = True
            keeps = "keeps its slots" if self._register.wanted and self._allowed else "has no slots now"
            self._emit(
                "warned",
                f"coordinator {self._name!r} has ended; this run {keeps} and connects again when you start it with the "
                "same name",
            )


def _option(name: str) -> str:
    return "" if name == "default" else f" --name {name}"


def _shown_name(name: str) -> str:
    """Return the name of this run for people, or the name of its script, and its process."""
    script = Path(sys.argv[0]).name if sys.argv else ""
    plain = "".join(letter for letter in name or script if letter.isprintable())[-100:] or "python"
    return f"{plain} ({os.getpid()})"
