"""Vector environments stepped with constant actions, without a policy: what moving actions and results costs.

``doorbells`` is the least that separate processes can do: shared arrays, one eventfd to each process and one back. It
keeps no order after errors, has no infos and does not notice a process that dies.
"""

import mmap
import os
from collections.abc import Callable
from functools import partial

import _setup  # noqa: F401

# isort: split
import numpy as np
from _farstep import PACKAGES, gymnasium_source
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from workload import NUM_PROCESSES, Array, Workload, make_env, measure, parse_arguments, report, spaces_of

import farstep

Vector = tuple[Callable[[Array], object], Callable[[], object]]
"""Functions that step all environments and that close them."""


def main() -> None:
    workload = parse_arguments(modes=("farstep", "sync", "async", "doorbells"))
    makers = {"farstep": farstep_vector, "sync": gymnasium_sync, "async": gymnasium_async, "doorbells": Doorbells.make}
    step, close = makers[workload.mode or ""](workload)
    actions = np.ones(workload.num_envs, np.int64)

    def collect() -> int:
        for _ in range(workload.steps):
            step(actions)
        return workload.transitions

    measurement = measure(collect, workload.seconds)
    close()
    report(f"steps-{workload.mode}", workload, measurement, notes="autoreset NEXT_STEP", packages=PACKAGES)


def farstep_vector(workload: Workload) -> Vector:
    source = gymnasium_source(workload.env)
    config = farstep.LocalConfig(workers_per_node=NUM_PROCESSES)
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


class Doorbells:
    """Forked processes with shared arrays and two eventfds each."""

    def __init__(self, workload: Workload) -> None:
        space, _ = spaces_of(workload.env)
        count = workload.num_envs
        self.obs = shared((count, *space.shape), space.dtype)
        self.action, self.reward = shared((count,), np.int64), shared((count,), np.float64)
        self.terminated, self.truncated = shared((count,), np.bool_), shared((count,), np.bool_)
        self.running = shared((1,), np.bool_)
        self.running[0] = True
        self.bells = [(os.eventfd(0), os.eventfd(0)) for _ in range(NUM_PROCESSES)]
        self.processes = [self.fork(index, workload) for index in range(NUM_PROCESSES)]
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
        part = slice(index * count, (index + 1) * count)
        obs, reward = self.obs[part], self.reward[part]
        terminated, truncated = self.terminated[part], self.truncated[part]
        envs = [make_env(workload.env) for _ in range(count)]
        for i, env in enumerate(envs):
            obs[i], _ = env.reset(seed=part.start + i)
        ended = [False] * count
        request, reply = self.bells[index]
        os.eventfd_write(reply, 1)
        while os.eventfd_read(request) and self.running[0]:
            for i, (env, action) in enumerate(zip(envs, self.action[part].copy(), strict=True)):
                if ended[i]:
                    obs[i], _ = env.reset()
                    reward[i], terminated[i], truncated[i], ended[i] = 0.0, False, False, False
                    continue
                obs[i], reward[i], terminated[i], truncated[i], _ = env.step(action)
                ended[i] = bool(terminated[i] or truncated[i])
            os.eventfd_write(reply, 1)

    def wait(self) -> None:
        for _, reply in self.bells:
            os.eventfd_read(reply)

    def step(self, actions: Array) -> tuple[Array, ...]:
        self.action[:] = actions
        for request, _ in self.bells:
            os.eventfd_write(request, 1)
        self.wait()
        return self.obs.copy(), self.reward.copy(), self.terminated.copy(), self.truncated.copy()

    def close(self) -> None:
        self.running[0] = False
        for request, _ in self.bells:
            os.eventfd_write(request, 1)
        for process in self.processes:
            os.waitpid(process, 0)


if __name__ == "__main__":
    main()
