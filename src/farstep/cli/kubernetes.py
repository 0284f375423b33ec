"""`farstep kubernetes`: what Kubernetes would be asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tyro

from farstep.cli.options import parse
from farstep.config.kubernetes import KubernetesConfig
from farstep.errors import ConfigError
from farstep.launch.kubernetes.engine import KubernetesEngine
from farstep.launch.kubernetes.manifests import manifests, redacted
from farstep.observe.extras import require


@dataclass(frozen=True, kw_only=True)
class Options:
    """Show what farstep asks Kubernetes for, with the fields of farstep.KubernetesConfig as options."""

    config: tyro.conf.OmitArgPrefixes[KubernetesConfig]
    print: bool = False
    """write the manifests to stdout as YAML, without the keys; nothing is sent to a cluster"""


def main(arguments: Sequence[str]) -> int:
    """Parse, show."""
    options = parse(Options, arguments, "farstep kubernetes")
    if not options.print:
        raise ConfigError("'farstep kubernetes' shows manifests and does nothing else; say --print.")
    config = options.config
    yaml = require("yaml", "pyyaml", "'farstep kubernetes --print'", "safe_dump_all")
    asked = manifests(config, "0123456789abcdef", 0, config.nodes, b"", KubernetesEngine.grace_s)
    shown = [_placed(redacted(manifest), config.namespace) for manifest in asked]
    yaml.add_representer(str, _text, yaml.SafeDumper)
    sys.stdout.write(yaml.safe_dump_all(shown, sort_keys=False, width=120))
    return 0


def _placed(manifest: dict[str, Any], namespace: str | None) -> dict[str, Any]:
    if namespace is None:
        return manifest
    return {**manifest, "metadata": {"namespace": namespace, **manifest["metadata"]}}


def _text(dumper: Any, text: str) -> Any:
    """Scripts of several lines as they are written."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
