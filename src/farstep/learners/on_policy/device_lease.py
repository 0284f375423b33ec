"""Holding a GPU only during updates: takes a device token, moves the learner there, and moves it back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from farstep.cluster_env import ClusterEnv
from farstep.learners.loop.timing import Timer
from farstep.learners.networks.nets import ActorCritic
from farstep.learners.on_policy.optimizer import Optimizer, pinned

CPU = torch.device("cpu")


class DeviceLease:
    """Keeps a learner in main memory, and moves it to its device for each update.

    Between updates, parameters and optimizer state are in pinned memory. The GPU's memory is freed after each update,
    except for the CUDA context and some of PyTorch's workspace, which the process keeps until it ends.

    Args:
        agent: The agent of the learner; it is moved to the CPU.
        optimizer: Its optimizer.
        device: The device for updates. With a coordinator, runs share its devices, which are numbered like torch's; an
            index in `device` is then ignored. If this is the CPU, nothing is moved, but updates still take turns.
    """

    def __init__(self, agent: ActorCritic, optimizer: Optimizer, device: torch.device) -> None:
        self._agent, self._optimizer, self._device = agent, optimizer, device
        self._frozen: list[tuple[Tensor, Tensor]] | None = None
        """Frozen parameters, each with its copy in main memory; None before the first update."""
        if device.type != "cpu":
            optimizer.move(CPU)
            torch.cuda.synchronize(device)
        agent.to(CPU)

    @contextmanager
    def update(self, env: ClusterEnv, timer: Timer) -> Iterator[torch.device]:
        """Context manager: wait for a device, move the learner there, yield the device; at the end undo both.

        Args:
            env: The environments of the run, which know its coordinator.
            timer: Measures `device_wait` and `device_move`.
        """
        with ExitStack() as stack:
            with timer("device_wait"):
                index = stack.enter_context(env.device_token())
            has_index = env.has_coordinator and self._device.type != "cpu"
            device = torch.device(self._device.type, index) if has_index else self._device
            try:
                with timer("device_move"):
                    self._move_to(device)
                yield device
            finally:
                with timer("device_move"):
                    self._move_back(device)

    def _move_to(self, device: torch.device) -> None:
        if device.type == "cpu":
            return
        if self._frozen is None:
            frozen = [parameter for parameter in self._agent.parameters() if not parameter.requires_grad]
            self._frozen = [(parameter, pinned(parameter.data)) for parameter in frozen]
        for parameter, kept in self._frozen:
            parameter.data = kept.to(device, non_blocking=True)
        self._optimizer.move(device)
        self._agent.to(device)  # buffers; parameters are there already
        torch.cuda.synchronize(device)

    def _move_back(self, device: torch.device) -> None:
        if device.type == "cpu":
            return
        for parameter, kept in self._frozen or ():
            parameter.data = kept
        self._optimizer.move(CPU)
        torch.cuda.synchronize(device)
        self._agent.to(CPU)
        torch.cuda.empty_cache()
