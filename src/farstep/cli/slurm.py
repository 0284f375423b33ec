"""`farstep slurm`: the job that SLURM would be given."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from farstep.cli.options import parse
from farstep.config.launch import SlurmConfig
from farstep.errors import ConfigError
from farstep.launch.slurm import batch_script, job_sizes


@dataclass(frozen=True, kw_only=True)
class Options:
    """Show the script that farstep gives to sbatch, with the fields of farstep.SlurmConfig as options.

    Nothing is submitted. A run submits it by itself, and tells each node through the standard input of its agent where
    the head is; the keys that are made for that are left out here.

    In a program: ClusterEnv({"env_name": "LunarLander-v3", "envs_per_node": 64}, SlurmConfig(nodes=4, partition="gpu"))

    On the command line: farstep train ppo --env LunarLander-v3 --launcher slurm --nodes 4 --partition gpu
    """

    config: tyro.conf.OmitArgPrefixes[SlurmConfig]
    print: bool = False
    """write the script to stdout"""


def main(arguments: Sequence[str]) -> int:
    """Parse, show."""
    options = parse(Options, arguments, "farstep slurm")
    if not options.print:
        raise ConfigError("'farstep slurm' shows the job that a run would submit, and does nothing else; say --print.")
    config = options.config
    if config.debug:
        raise ConfigError(
            "with --debug, workers run on this machine and no job is submitted; omit --debug to print one."
        )
    if config.spread:
        sys.stdout.write(batch_script(config, config.workers_on_node, config.nodes, least=config.fewest_nodes))
        return 0
    first, *others = job_sizes(config.nodes, config.fewest_nodes)
    sys.stdout.write(batch_script(config, config.workers_on_node, first))
    if others:
        jobs = "job of one node is" if len(others) == 1 else "jobs of one node each are"
        sys.stderr.write(f"{len(others)} more {jobs} submitted with it and may start later.\n")
    return 0
