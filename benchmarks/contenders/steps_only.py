"""Vector environments stepped with constant actions, without a policy: what moving actions and results costs.

``alone`` is the limit: each process steps its share of the environments and nothing is moved.
``doorbells`` is the least that separate processes can do: shared arrays, one eventfd to each process and one back. It
keeps no order after errors, has no infos and does not notice a process that dies.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import _setup  # noqa: F401

# isort: split
import numpy as np
from _farstep import PACKAGES, gymnasium_source
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from limit import in_processes
from workload import Array, Measurement, Workload, make_env, measure, parse_arguments, report, spaces_of

import farstep

Vector = tuple[Callable[[Array], object], Callable[[], object]]
"""Functions that step all environments and that close them."""


def main() -> None:
    workload = parse_arguments(modes=("farstep", "sync", "async", "doorbells", "alone"))
    measurement = in_processes(workload, run_alone) if workload.mode == "alone" else measure_vector(workload)
    report(f"steps-{workload.mode}", workload, measurement, notes="autoreset NEXT_STEP", packages=PACKAGES)


def measure_vector(workload: Workload) -> Measurement:
    makers = {"farstep": farstep_vector, "sync": gymnasium_sync, "async": gymnasium_async, "doorbells": Doorbells.make}
    step, close = makers[workload.mode or ""](workload)
    actions = np.ones(workload.num_envs, np.int64)

    def collect() -> int:
        for _ in range(workload.steps):
            step(actions)
        return workload.transitions

    measurement = measure(collect, workload.seconds)
    close()
    return measurement


def run_alone(index: int, workload: Workload, barrier: Barrier, sender: Connection) -> None:
    """One of the processes of the limit: its environments, its arrays."""
    part = Part.empty(workload, workload.envs_per_process, np.zeros)
    step = part.stepper(workload, first_seed=index * workload.envs_per_process)
    part.action[:] = 1

    def collect() -> int:
        for _ in range(workload.steps):
            step()
        return workload.steps * workload.envs_per_process

    sender.send(measure(collect, workload.seconds, warm=barrier.wait))


def farstep_vector(workload: Workload) -> Vector:
    source = gymnasium_source(workload.env)
    config = farstep.LocalConfig(workers_per_node=workload.workers)
    envs = farstep.make_vec(source.pop("env_name"), workload.num_envs, config, **source)
    envs.reset(seed=1)
    return envs.step, envs.close


def gymnasium_sync(workload: Workload) -> Vector:
    envs = SyncVectorEnv([partial(make_env, workload.env)] * workload.num_envs)
    envs.reset(seed=1)
    return envs.step, envs.close


def gymnasium_async(workload: Workload) -> Vector:
    envs = AsyncVectorEnv([partial(make_env, workload.env)] * workload.num_envs)
    envs.reset(seed=1)
    return envs.step, envs.close


def shared(shape: tuple[int, ...], dtype: object) -> Array:
    """An array that forked processes share."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)


@dataclass(frozen=True)
class Part:
    """Actions and results of some environments."""

    obs: Array
    action: Array
    reward: Array
    terminated: Array
    truncated: Array

    @classmethod
    def empty(cls, workload: Workload, count: int, make: Callable[[tuple[int, ...], Any], Array]) -> Part:
        space, _ = spaces_of(workload.env)
        return cls(
            obs=make((count, *space.shape), space.dtype),
            action=make((count,), np.int64),
            reward=make((count,), np.float64),
            terminated=make((count,), np.bool_),
            truncated=make((count,), np.bool_),
        )

    def __getitem__(self, rows: slice) -> Part:
        return Part(self.obs[rows], self.action[rows], self.reward[rows], self.terminated[rows], self.truncated[rows])

    def stepper(self, workload: Workload, first_seed: int) -> Callable[[], None]:
        """Make and reset the environments; returns a function that steps all of them once."""
        obs, reward, terminated, truncated = self.obs, self.reward, self.terminated, self.truncated
        envs = [make_env(workload.env) for _ in obs]
        for i, env in enumerate(envs):
            obs[i], _ = env.reset(seed=first_seed + i)
        ended = [False] * len(envs)

        def step() -> None:
            for i, (env, action) in enumerate(zip(envs, self.action.copy(), strict=True)):
                if ended[i]:
                    obs[i], _ = env.reset()
                    reward[i], terminated[i], truncated[i], ended[i] = 0.0, False, False, False
                    continue
                obs[i], reward[i], terminated[i], truncated[i], _ = env.step(action)
                ended[i] = bool(terminated[i] or truncated[i])

        return step


class Doorbells:
    """Forked processes with shared arrays and two eventfds each."""

    def __init__(self, workload: Workload) -> None:
        self.all = Part.empty(workload, workload.num_envs, shared)
        self.running = shared((1,), np.bool_)
        self.running[0] = True
        self.bells = [(os.eventfd(0), os.eventfd(0)) for _ in range(workload.workers)]
        self.processes = [self.fork(index, workload) for index in range(workload.workers)]
        self.wait()

    @classmethod
    def make(cls, workload: Workload) -> Vector:
        vector = cls(workload)
        return vector.step, vector.close

    def fork(self, index: int, workload: Workload) -> int:
        process = os.fork()
        if not process:
            try:
                self.serve(index, workload)
            finally:
                os._exit(0)
        return process

    def serve(self, index: int, workload: Workload) -> None:
        count = workload.envs_per_process
        step = self.all[index * count : (index + 1) * count].stepper(workload, first_seed=index * count)
        request, reply = self.bells[index]
        os.eventfd_write(reply, 1)
        while os.eventfd_read(request) and self.running[0]:
            step()
            os.eventfd_write(reply, 1)

    def wait(self) -> None:
        for _, reply in self.bells:
            os.eventfd_read(reply)

    def step(self, actions: Array) -> tuple[Array, ...]:
        self.all.action[:] = actions
        for request, _ in self.bells:
            os.eventfd_write(request, 1)
        self.wait()
        results = (self.all.obs, self.all.reward, self.all.terminated, self.all.truncated)
        return tuple(array.copy() for array in results)

    def close(self) -> None:
        self.running[0] = False
        for request, _ in self.bells:
            os.eventfd_write(request, 1)
        for process in self.processes:
            os.waitpid(process, 0)


if __name__ == "__main__":
    main()
