"""Replay learners: seconds and steps until a task is learned, and seconds per update.

    python benchmarks/setup_peers.py cleanrl sb3 rllib
    git clone https://github.com/vwxyzjn/cleanrl /tmp/cleanrl && git -C /tmp/cleanrl checkout fe8d8a0
    python benchmarks/offpolicy.py --cleanrl /tmp/cleanrl/cleanrl/dqn.py --cores 2 --markdown benchmarks/README.md
    python benchmarks/offpolicy.py --minutes 60 --only 'farstep-*'             # repeat to continue
    python benchmarks/offpolicy.py --show benchmarks/results/offpolicy.json    # only tables and plots

The first question is ARTOS's own claim: farstep's SAC that learns while workers roll, compared with the same SAC that
alternates between rolling and learning (`--no-concurrent`), with the same seeds and the same ratio of updates to steps.
The second is how farstep's SAC, DQN and Ape-X compare with CleanRL, Stable-Baselines3 and RLlib, which run SAC on
Pendulum-v1 and HalfCheetah-v5, and DQN on LunarLander-v3. HalfCheetah-v5 needs MuJoCo (`pip install mujoco`, and
`setup_peers.py --mujoco` for the peers); without it the task is skipped. It has no threshold: runs end after 100,000
steps, and their returns are compared.

Tasks, seeds, processes and seconds are those of learning.py, which also has the options.
"""

from __future__ import annotations

import learning
from children import run_script
from learning import CLEANRL, FARSTEP, RLLIB, Benchmark, Learner, Task
from offpolicy_tables import REPLAY, summary
from roster import BENCHMARKS, OWN

TASKS = {
    "Pendulum-v1": Task(env="Pendulum-v1", threshold=-200.0, max_steps=100_000),
    "LunarLander-v3": Task(env="LunarLander-v3", threshold=200.0, max_steps=250_000),
    "HalfCheetah-v5": Task(env="HalfCheetah-v5", threshold=None, max_steps=100_000, package="mujoco"),
}

SAC_OPTIONS = {
    "Pendulum-v1": "",
    "LunarLander-v3": "",
    "HalfCheetah-v5": (
        "--updates-per-step 1 --learning-starts 5000 --buffer-size 1000000 --policy-lr 3e-4 --hidden 256 256"
    ),
}
"""Options of farstep's SAC: its defaults, and on HalfCheetah-v5 CleanRL's networks, batches and updates per step."""

SAC_SCRIPT, DQN_SCRIPT = ("--script", "sac_continuous_action.py"), ("--script", "dqn.py")
SAC, DQN = ("--algorithm", "sac"), ("--algorithm", "dqn")
RLLIBS = {"Pendulum-v1": SAC, "LunarLander-v3": DQN, "HalfCheetah-v5": SAC}


def farstep_sac(name: str, further: str) -> Learner:
    """farstep's SAC on all tasks, with an option besides those of the task."""
    options = {env: (f"--options={chosen} {further}".rstrip(),) for env, chosen in SAC_OPTIONS.items()}
    return Learner(name=name, script=FARSTEP, venv=OWN, options=("--learner", "sac"), by_task=options)


LEARNERS = (
    Learner(
        name="cleanrl",
        script=CLEANRL,
        venv="cleanrl",
        by_task={"Pendulum-v1": SAC_SCRIPT, "LunarLander-v3": DQN_SCRIPT, "HalfCheetah-v5": SAC_SCRIPT},
    ),
    Learner(name="sb3", script="learning_sb3.py", venv="sb3"),
    Learner(name="rllib", script=RLLIB, venv="rllib", by_task=RLLIBS),
    Learner(name="rllib-2", script=RLLIB, venv="rllib", options=("--num-envs", "2"), by_task=RLLIBS),
    farstep_sac("farstep-sac-alternating", "--no-concurrent"),
    farstep_sac("farstep-sac", ""),
    *(
        Learner(
            name=f"farstep-{learner}",
            script=FARSTEP,
            venv=OWN,
            options=("--learner", learner),
            by_task={"LunarLander-v3": ()},
        )
        for learner in ("dqn", "apex")
    ),
)
"""`rllib` has one environment, in the process of the learner; `rllib-2` has one in each of two runners."""

OFFPOLICY = Benchmark(
    script="offpolicy.py",
    description=__doc__,
    tasks=TASKS,
    learners=LEARNERS,
    cleanrl=BENCHMARKS / ".venvs" / "cleanrl" / "cleanrl" / "dqn.py",
    layout=REPLAY,
    summary=summary,
    timeout_s=7200.0,
)


def main() -> int:
    return learning.main(OFFPOLICY)


if __name__ == "__main__":
    run_script(main)
