"""`farstep slurm`: prints the batch script that a run would submit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from farstep.cli.options.parsing import parse
from farstep.config.launch import SlurmConfig
from farstep.errors import ConfigError
from farstep.launch.engines.slurm import batch_script, job_sizes


@dataclass(frozen=True, kw_only=True)
class Options:
    """Print the batch script that a run would submit. The options are the fields of farstep.SlurmConfig.

    This command submits nothing; a run submits its script itself. The script passes the head's address and the keys to
    the standard input of each node daemon. The printed script omits them.

    In a program: ClusterEnv({"env_name": "LunarLander-v3", "envs_per_node": 64}, SlurmConfig(nodes=4, partition="gpu"))

    On the command line: farstep train ppo --env LunarLander-v3 --launcher slurm --nodes 4 --partition gpu
    """

    config: tyro.conf.OmitArgPrefixes[SlurmConfig]
    print: bool = False
    """Write the script to stdout."""


def main(arguments: Sequence[str]) -> int:
    """Parse the options and print the script. Return the exit status."""
    options = parse(Options, arguments, "farstep slurm")
    if not options.print:
        raise ConfigError("'farstep slurm' only prints the job that a run would submit; add --print.")
    config = options.config
    if config.debug:
        raise ConfigError(
            "with --debug, workers run on this machine and no job is submitted; to print the script, omit --debug."
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
