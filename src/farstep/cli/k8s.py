"""`farstep k8s`: what Kubernetes would be asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from farstep.cli.options import parse
from farstep.errors import ConfigError
from farstep.launch.kubernetes import KubernetesEngine
from farstep.launch.manifests import manifests, redacted
from farstep.launch_config import KubernetesConfig
from farstep.observe.extras import require

_JSON = {Mapping[str, object]: Mapping, Sequence[Mapping[str, object]]: Sequence}
"""Options that are given as JSON, with what it must describe."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Show what farstep asks Kubernetes for, with the fields of farstep.KubernetesConfig as options."""

    config: tyro.conf.OmitArgPrefixes[KubernetesConfig]
    print: bool = False
    """write the manifests to stdout as YAML, without the keys; nothing is sent to a cluster"""


def main(arguments: Sequence[str]) -> int:
    """Parse, show."""
    options = parse(Options, arguments, "farstep k8s", registry=_registry())
    if not options.print:
        raise ConfigError("'farstep k8s' shows manifests and does nothing else; say --print.")
    config = options.config
    yaml = require("yaml", "pyyaml", "'farstep k8s --print'", "safe_dump_all")
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


def _registry() -> ConstructorRegistry:
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def from_json(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if info.type not in _JSON:
            return None
        expected = _JSON[info.type]
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="JSON",
            instance_from_str=lambda words: json.loads(words[0]),
            is_instance=lambda value: isinstance(value, expected),
            str_from_instance=lambda value: [json.dumps(value)],
        )

    return registry
