"""farstep's VectorEnv: the environments on workers, the policy in this process, for unmodified learners."""

import _setup  # noqa: F401

# isort: split
import torch
from _farstep import PACKAGES, gymnasium_source
from gymnasium.vector import AutoresetMode
from workload import NUM_PROCESSES, Rollout, make_policy, measure, parse_arguments, report

import farstep


def main() -> None:
    workload = parse_arguments()
    policy = make_policy(workload)
    rollout = Rollout.empty(workload)
    source = gymnasium_source(workload.env)
    envs = farstep.make_vec(
        source.pop("env_name"),
        num_envs=workload.num_envs,
        config=farstep.LocalConfig(nodes=1, workers_per_node=NUM_PROCESSES),
        autoreset_mode=AutoresetMode.SAME_STEP,
        **source,
    )
    obs, _ = envs.reset(seed=1)

    def collect() -> int:
        nonlocal obs
        with torch.inference_mode():
            for t in range(workload.steps):
                action = rollout.write_action(t, obs, policy.act(obs))
                obs, reward, terminated, truncated, _ = envs.step(action)
                rollout.write_outcome(t, reward, terminated, truncated)
        return workload.transitions

    measurement = measure(collect, workload.seconds)
    envs.close()
    report("farstep-make_vec", workload, measurement, notes="autoreset SAME_STEP", packages=PACKAGES)


if __name__ == "__main__":
    main()
