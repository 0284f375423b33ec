"""`farstep kubernetes`: prints the manifests that a run would create."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tyro

from farstep.cli.options.parsing import parse
from farstep.config.kubernetes import KubernetesConfig
from farstep.errors import ConfigError
from farstep.launch.engines.kubernetes.engine import KubernetesEngine
from farstep.launch.engines.kubernetes.manifests import manifests, redacted
from farstep.observe.extras import require


@dataclass(frozen=True, kw_only=True)
class Options:
    """Print the manifests that a run would create. The options are the fields of farstep.KubernetesConfig."""

    config: tyro.conf.OmitArgPrefixes[KubernetesConfig]
    print: bool = False
    """Write the manifests to stdout as YAML, without the keys. Nothing is sent to a cluster."""


def main(arguments: Sequence[str]) -> int:
    """Parse the options and print the manifests. Return the exit status."""
    options = parse(Options, arguments, "farstep kubernetes")
    if not options.print:
        raise ConfigError("'farstep kubernetes' only prints manifests; add --print.")
    config = options.config
    yaml = require("yaml", "pyyaml", "'farstep kubernetes --print'", "safe_dump_all")
    created = manifests(config, "0123456789abcdef", 0, config.nodes, b"", KubernetesEngine.grace_s)
    shown = [_with_namespace(redacted(manifest), config.namespace) for manifest in created]
    yaml.add_representer(str, _text, yaml.SafeDumper)
    sys.stdout.write(yaml.safe_dump_all(shown, sort_keys=False, width=120))
    return 0


def _with_namespace(manifest: dict[str, Any], namespace: str | None) -> dict[str, Any]:
    if namespace is None:
        return manifest
    return {**manifest, "metadata": {"namespace": namespace, **manifest["metadata"]}}


def _text(dumper: Any, text: str) -> Any:
    """Represent text of several lines as a YAML block, which keeps the line breaks."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
