"""From configurations to a running server: splits slots over workers and picks the engine."""

from __future__ import annotations

import cloudpickle

from farstep.config import InProcessConfig, LaunchConfig, LocalConfig
from farstep.errors import ConfigError
from farstep.head.seats import Engine, InprocessEngine, LocalEngine, Seat, ZmqEngine
from farstep.head.server import Client, Server
from farstep.worker.program import Program
from farstep.worker.progress import Board


class Cluster:
    """A server with what it stands on; `close` frees all of it."""

    def __init__(
        self,
        config: LaunchConfig,
        program: Program,
        envs_per_node: int,
        root: int,
        budget: int,
        client: Client,
    ) -> None:
        workers = config.num_workers(envs_per_node)
        roots = [root] * (config.nodes * envs_per_node)
        payload = _pickled(program)
        self.seats = split(config.nodes, envs_per_node, workers)
        self._board = Board(workers)
        try:
            engine = _engine(config, self._board)
            self.server = Server(engine, self.seats, payload, config.timeouts, budget, roots, client)
        except BaseException:
            self._board.close()
            raise

    def close(self) -> None:
        self.server.close()
        self._board.close()


def _pickled(program: Program) -> bytes:
    try:
        payload: bytes = cloudpickle.dumps(program)
    except Exception as error:
        raise ConfigError(
            f"the environment's factory, arguments or wrappers cannot be sent to workers: {type(error).__name__}: "
            f"{error}. Give a dotted path ('package.module:function'), or build what cannot travel inside the factory."
        ) from error
    return payload


def _engine(config: LaunchConfig, board: Board) -> Engine:
    if isinstance(config, InProcessConfig):
        return InprocessEngine(board)
    if isinstance(config, LocalConfig):
        if config.gpus_per_node:
            raise ConfigError("LocalConfig.gpus_per_node: workers of this version act on the CPU; set it to 0.")
        if config.transport == "shm":
            return LocalEngine(board, config.cpus_per_worker)
        return ZmqEngine(config.cpus_per_worker, config.transport)
    raise ConfigError(f"{type(config).__name__} is not a launch configuration that this version can start.")


def split(nodes: int, envs_per_node: int, workers: int) -> list[Seat]:
    """Slots in order, as even as they go: sizes of one node's workers differ by at most one."""
    per_node = workers // nodes
    seats: list[Seat] = []
    first = 0
    for _ in range(nodes):
        for k in range(per_node):
            count = envs_per_node // per_node + (k < envs_per_node % per_node)
            seats.append(Seat(len(seats), first, first + count))
            first += count
    return seats
