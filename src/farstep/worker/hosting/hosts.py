"""Makes the host that a program asks for, and locates an error in it."""

from __future__ import annotations

from gymnasium.vector import AutoresetMode

from farstep.rollout.program import Program
from farstep.rollout.progress import Phase
from farstep.rollout.rows import Slots
from farstep.worker.hosting.base import HostedEnvs
from farstep.worker.hosting.stagger import StaggerSchedule
from farstep.worker.hosting.staggered import StaggeredEnvs, StaggeredVector
from farstep.worker.hosting.strict import StrictEnvs
from farstep.worker.hosting.vector import HostedVector

AnyHost = HostedEnvs | HostedVector | StrictEnvs


def make_host(program: Program, slots: Slots, progress: memoryview, clock: int) -> AnyHost:
    """Construct the environments of these slots, and the host that steps them.

    Args:
        program: Says which environments to run, and how they are reset.
        slots: The slots of the worker.
        progress: The worker's progress words.
        clock: The last `Chunk.clock` of the worker that this one replaces, for staggered resets.
    """
    source = program.source
    if program.autoreset_mode:
        return StrictEnvs(source, slots, progress, AutoresetMode(program.autoreset_mode))
    if program.stagger is not None:
        schedule = StaggerSchedule(program.stagger, program.num_slots, clock)
        return (StaggeredVector if source.is_vector else StaggeredEnvs)(source, slots, progress, schedule)
    return (HostedVector if source.is_vector else HostedEnvs)(source, slots, progress)


def failed_env(program: Program, host: AnyHost | None, first_slot: int, i: int, phase: Phase) -> dict[str, int]:
    """Return slot, seed and step of the environment that raised; empty if it is inside a vector environment.

    Args:
        program: Says which environments the worker runs.
        host: The host; None if it could not be constructed.
        first_slot: The worker's first slot.
        i: Index of the environment in the worker.
        phase: What the worker was doing.
    """
    if program.source.is_vector or phase not in (Phase.CONSTRUCT, Phase.RESET, Phase.STEP):
        return {}
    where = {"slot": first_slot + i}
    if host is None or phase is Phase.CONSTRUCT:
        return where
    if (seed := host.seed_of(i)) is not None:
        where["seed"] = seed
    if phase is Phase.STEP:
        where["episode_step"] = host.slots.episode_step(i)
    return where
