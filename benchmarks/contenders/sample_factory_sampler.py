"""Sample Factory's sampler without its learner: rollout workers, and one process that acts for all."""

import contextlib
import os
import sys
import tempfile
from typing import Any

import _setup  # noqa: F401

# isort: split
import gymnasium as gym
from sample_factory.algo.sampling.simplified_sampling_api import SyncSamplingAPI
from sample_factory.algo.utils.env_info import obtain_env_info_in_a_separate_process
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from workload import PIXEL_ENVS, Workload, make_env, measure, parse_arguments, report


def main() -> None:
    workload = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        arguments = configuration(workload, folder)
        register_env(workload.env, sample_factory_env)
        parser, _ = parse_sf_args(argv=arguments)
        config = parse_full_cfg(parser, arguments)
        with quiet():
            sampler = SyncSamplingAPI(config, obtain_env_info_in_a_separate_process(config))
            sampler.start()

            def collect() -> int:
                # A trajectory is one environment's T steps, copied out of the shared buffer by the sampler.
                trajectories = [sampler.get_trajectories_sync() for _ in range(workload.num_envs)]
                return sum(trajectory["rewards"].numel() for trajectory in trajectories)

            measurement = measure(collect, workload.seconds)
            sampler.stop()
    report(
        "sample-factory",
        workload,
        measurement,
        sampler="own",
        notes="own network and sampler of the same size; N trajectories are not put into one array",
        packages=("sample-factory",),
    )


def configuration(workload: Workload, folder: str) -> list[str]:
    """Its command line: double-buffered workers, one per core, and a network as in ``workload``."""
    if workload.env in PIXEL_ENVS:
        network = {
            "encoder_conv_architecture": "convnet_atari",
            "encoder_conv_mlp_layers": "512",
            "nonlinearity": "relu",
            "obs_scale": 255.0,
            "actor_critic_share_weights": True,
        }
    else:
        network = {
            "encoder_mlp_layers": "64 64",
            "nonlinearity": "tanh",
            "actor_critic_share_weights": False,
        }
    options = {
        "env": workload.env,
        "experiment": "throughput",
        "train_dir": folder,
        "device": "cpu",
        "seed": 1,
        "num_workers": workload.workers,
        "num_envs_per_worker": workload.envs_per_process,
        "worker_num_splits": 2,
        "policy_workers_per_policy": 1,
        "set_workers_cpu_affinity": False,
        "rollout": workload.steps,
        "recurrence": 1,
        "batch_size": workload.transitions,
        "use_rnn": False,
        "normalize_input": False,
        "normalize_returns": False,
        **network,
    }
    return [part for name, value in options.items() for part in (f"--{name}", *str(value).split())]


def sample_factory_env(
    full_env_name: str,
    cfg: Any = None,
    env_config: Any = None,
    render_mode: str | None = None,
) -> gym.Env:
    return make_env(full_env_name)


@contextlib.contextmanager
def quiet() -> Any:
    """Send standard output, which its processes log to, where the errors go."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


if __name__ == "__main__":
    main()
