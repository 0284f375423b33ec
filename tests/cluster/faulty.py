"""Environments and agents that misbehave on purpose; workers import this module by its name."""

from __future__ import annotations

import fcntl
import inspect
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from farstep.rollout.progress import CANCEL, EPISODES, PHASE, Phase
from farstep.testing import CountingEnv, FaultyEnv, TableAgent
from farstep.testing.envs import do_fault
from farstep.wire import messages
from farstep.wire.channels.dealer import DealerLink
from farstep.wire.channels.local import LocalLink
from farstep.wire.codec import frame_lengths


def once(marker: str) -> bool:
    """True for the first call with this marker, among all processes of the machine."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class EachOnceEnv(FaultyEnv):
    """Does every one of `faults` once in `phase`, whichever environment of the cluster comes first."""

    def __init__(self, faults: list[str], phase: str, folder: str, at: int = 3) -> None:
        self._faults, self._folder = faults, folder
        super().__init__("", phase, at)

    def _maybe(self, phase: str, at: int) -> None:
        if phase == self._phase and self._calls >= at:
            for fault in self._faults:
                if once(f"{self._folder}/{phase}-{fault}"):
                    do_fault(fault)
                    return


class MortalEnv(CountingEnv):
    """Episodes of random length; the first environment to take its `at`-th step kills its worker."""

    def __init__(self, marker: str, at: int, length: int | None = 0) -> None:
        super().__init__(length)
        self._marker, self._at, self._steps = marker, at, 0

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._steps == self._at and once(self._marker):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class PoisonEnv(CountingEnv):
    """Raises in `phase` (reset, or the first step) of every episode that begins with one of `seeds`, or does worse."""

    def __init__(self, seeds: list[int], phase: str, how: str = "raise", length: int | None = 0) -> None:
        super().__init__(length)
        self._seeds, self._phase, self._how = seeds, phase, how

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._poisoned = seed in self._seeds
        self._maybe("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self._maybe("step")
        return super().step(action)

    def _maybe(self, phase: str) -> None:
        if self._poisoned and phase == self._phase:
            if self._how == "sys.exit":
                sys.exit(3)
            if self._how == "KeyboardInterrupt":
                raise KeyboardInterrupt
            if self._how == "SIGSEGV":
                os.kill(os.getpid(), signal.SIGSEGV)
            while self._how == "hang":
                time.sleep(60)
            raise ValueError("poison")


class OddRewardEnv(CountingEnv):
    """Returns `reward` in the third step of the episode that begins with `seed`."""

    def __init__(self, reward: Any, seed: int) -> None:
        super().__init__(length=4)
        self._reward, self._seed = reward, seed

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._odd = seed == self._seed
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        return obs, self._reward if self._odd and self.count == 3 else reward, *rest


class OldGymEnv(CountingEnv):
    """Returns four values, as environments of the old Gym did."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, info


class NoInfoEnv(CountingEnv):
    """Returns `info` instead of a dictionary."""

    def __init__(self, info: Any = None) -> None:
        super().__init__(length=2)
        self._info = info

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], self._info

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], self._info


class BareResetEnv(CountingEnv):
    """Returns the observation alone."""

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0]


class UnseededEnv(CountingEnv):
    """Takes no seed."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class FussyBoxEnv(CountingEnv):
    """Takes numbers between -1 and 1, and raises in its third step."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)

    def step(self, action: Any) -> Any:
        raise ValueError("of its own")


class SevenAgent(TableAgent):
    """Always acts with `action`."""

    def __init__(self, action: Any = 7) -> None:
        super().__init__()
        self._action = action

    def act(self, obs: Any) -> Any:
        return np.array([self._action] * len(obs))


def faulty_vector(num_envs: int, phase: str) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: FaultyEnv("raise", phase)] * num_envs)


def poisoned_vector(num_envs: int, seeds: list[int]) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: PoisonEnv(seeds, "step")] * num_envs)


class SelfNamingEnv(CountingEnv):
    """Its info has the id of its process."""

    def reset(self, **kwargs: Any) -> Any:
        obs, info = super().reset(**kwargs)
        return obs, {**info, "pid": os.getpid()}


class OnceOnlyEnv(CountingEnv):
    """Raises in its third step, and whenever it is built again."""

    def __init__(self, marker: str) -> None:
        super().__init__(length=None)
        if not once(marker):
            raise RuntimeError("this environment can be built only once")

    def step(self, action: Any) -> Any:
        if self.count == 2:
            raise ValueError("deliberate")
        return super().step(action)


def with_a_child(env: Any) -> Any:
    """A wrapper whose environment starts a process and has its id in the info."""
    child = subprocess.Popen(["sleep", "1000"])
    reset = env.reset

    def telling(**kwargs: Any) -> Any:
        obs, info = reset(**kwargs)
        return obs, {**info, "child": child.pid}

    env.reset = telling
    return env


class BusyParentEnv(CountingEnv):
    """Starts a process of its own; `stuck` names where it stays: construct, step (holding the interpreter)."""

    def __init__(self, stuck: str = "", marker: str = "") -> None:
        super().__init__(length=None)
        self._stuck, self._marker = stuck, marker
        self._child = subprocess.Popen(["sleep", "1000"])
        if stuck == "construct":
            self._say()
            do_fault("hang")

    def step(self, action: Any) -> Any:
        if self._stuck == "step":
            self._say()
            do_fault("hang-gil")
        return super().step(action)

    def _say(self) -> None:
        Path(self._marker).touch()


class FaultyAgent(TableAgent):
    """Misbehaves in `set_parameters` (or `act`) with each of `faults` once, or always with the only one."""

    def __init__(self, faults: list[str], folder: str = "", where: str = "load") -> None:
        super().__init__()
        self._faults, self._folder, self._where = faults, folder, where
        self._acted = 0

    def set_parameters(self, parameters: Any) -> None:
        self.table = parameters["table"]
        self._maybe("load")

    def act(self, obs: Any) -> Any:
        self._acted += 1
        if self._acted > 2:  # the first ones are the worker's trial
            self._maybe("act")
        return super().act(obs)

    def _maybe(self, where: str) -> None:
        if where == self._where:
            for fault in self._faults:
                if not self._folder or once(f"{self._folder}/{where}-{fault}"):
                    do_fault(fault)
                    return


def wait_for_byte(fifo: str) -> None:
    """Wait until the test writes a byte."""
    with Path(fifo).open("rb", buffering=0) as file:
        file.read(1)


class CutOffEnv(CountingEnv):
    """Kills its worker in its `at`-th step, once, after the test confirmed the rows that were sent before."""

    def __init__(self, marker: str, fifo: str, at: int) -> None:
        super().__init__(length=4)
        self._marker, self._fifo, self._at, self._steps = marker, fifo, at, 0

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._steps == self._at and once(self._marker):
            wait_for_byte(self._fifo)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class StageCutOffEnv(CountingEnv):
    """Its worker is killed instead of sending its second chunk, once, after the test has received its first parts."""

    def __init__(self, marker: str, fifo: str) -> None:
        super().__init__(length=4)
        send = DealerLink.send

        def deadly(link: Any, frames: Any, fds: Any = ()) -> None:
            message = messages.decode_from_worker(frames)
            if isinstance(message, messages.Chunk) and message.index == 2 and once(marker):
                wait_for_byte(fifo)
                os.kill(os.getpid(), signal.SIGKILL)
            send(link, frames, fds)

        DealerLink.send = deadly  # type: ignore[method-assign, assignment]


class HeldBackEnv(CountingEnv):
    """Its worker sends the last part of each chunk when the test writes a byte; each worker has one of `fifos`."""

    def __init__(self, fifos: list[str]) -> None:
        super().__init__(length=4)
        send = DealerLink.send
        if send.__name__ == "hold_back":
            return  # another one of this worker has done it
        fifo = next(path for path in fifos if once(path + ".taken"))

        def hold_back(link: Any, frames: Any, fds: Any = ()) -> None:
            message = messages.decode_from_worker(frames)
            if isinstance(message, messages.Chunk) and message.keys:
                wait_for_byte(fifo)
            send(link, frames, fds)

        DealerLink.send = hold_back  # type: ignore[method-assign, assignment]


class RogueEnv(CountingEnv):
    """Its worker does each of `misdeeds` once, to the head's end of its local link."""

    link: Any
    """The worker's end."""

    def __init__(self, misdeeds: list[str], folder: str) -> None:
        super().__init__(length=4)
        self._misdeeds, self._folder, self._steps = misdeeds, folder, 0
        send = LocalLink.send
        if send.__name__ == "noting":
            return  # another environment of this worker has done it

        def noting(link: LocalLink, frames: Any, fds: Any = ()) -> None:
            RogueEnv.link = link
            send(link, frames, fds)

        LocalLink.send = noting  # type: ignore[method-assign, assignment]

    def step(self, action: Any) -> Any:
        self._steps += 1
        for misdeed in self._misdeeds if self._steps == 6 else ():
            if once(f"{self._folder}/{misdeed}"):
                getattr(self, "_" + misdeed)()
                break
        return super().step(action)

    def _holes(self) -> None:
        """A valid header of a reply, followed by four gigabytes of unwritten memory."""
        size, header = 4 << 30, messages.encode(messages.Reply(0))
        fd = os.memfd_create("holes", os.MFD_ALLOW_SEALING)
        os.write(fd, header)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, 1033, 2 | 4 | 8)
        with self._socket() as sock:
            socket.send_fds(sock, [b"M" + frame_lengths([len(header), size - len(header)])], [fd])

    def _progress(self) -> None:
        words = [0] * (EPISODES + 1)
        words[CANCEL] = 2**62  # no ticket is done any more
        self.link.send([messages.encode(messages.Progress(words))])

    def _hello_again(self) -> None:
        self.link.send([messages.encode(messages.Hello(0, 0, "run", "host", 1, {}))])

    def _descriptor(self) -> None:
        with self._socket() as sock:
            socket.send_fds(sock, [b"I" + frame_lengths([1]) + b"x"], [0])

    def _endless_phase(self) -> None:
        """Report the phase `queued`, which has no time limit, and never answer."""
        frame: Any = inspect.currentframe()
        while "words" not in frame.f_locals:  # the frame of the worker's rollout loop
            frame = frame.f_back
        frame.f_locals["words"][PHASE] = Phase.QUEUED
        do_fault("hang")

    def _socket(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self.link.fileno()))


class MuteError(Exception):
    """Its text cannot be formatted."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class MuteEnv(CountingEnv):
    """Raises `MuteError`, or an exception whose text cannot be encoded, in `phase`: construct, reset or step."""

    def __init__(self, phase: str, error: str = "mute") -> None:
        super().__init__()
        self._phase, self._error = phase, error
        self._maybe("construct")

    def reset(self, **kwargs: Any) -> Any:
        self._maybe("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self._maybe("step")
        return super().step(action)

    def _maybe(self, phase: str) -> None:
        if phase == self._phase:
            raise MuteError if self._error == "mute" else ValueError("a file named \udcff")


class MuteAgent(TableAgent):
    """Raises `MuteError` when it acts."""

    def act(self, obs: Any) -> Any:
        raise MuteError


class SlowToCloseEnv(CountingEnv):
    """Its close() creates the file `closing` and waits for the file `gate`."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)

    def close(self) -> None:
        (self._folder / "closing").touch()
        while not (self._folder / "gate").exists():
            time.sleep(0.01)
