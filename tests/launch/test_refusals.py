"""Which nodes are refused, and how often refused nodes and invalid messages are reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from farstep.config.launch import RayConfig
from farstep.errors import WireError
from farstep.launch.refusals import Refusals, objection_to
from farstep.wire import node_messages as n
from farstep.wire.versions import versions


@dataclass
class Events:
    """The texts that were emitted."""

    texts: list[str] = field(default_factory=list)

    def emit(self, kind: str, text: str, **about: Any) -> None:
        self.texts.append(text)


def hello(**changes: Any) -> n.NodeHello:
    return n.NodeHello("node-1", "run", "host", 1, 4, **{"versions": versions(), **changes})


def test_node_is_refused_for_its_versions_or_for_what_it_cannot_do() -> None:
    assert objection_to(hello()) is None
    cases = [
        (hello(versions={**versions(), "farstep": "0.0"}), "and 0.0 on the worker", "same versions"),
        (hello(cannot_pin="it has 1 core."), "cannot be used: it has 1 core", "cpu_affinity='off'"),
        (hello(cannot_park="no criu"), "cannot be used: no criu", "park_method='suspend'"),
    ]
    for message, why, remedy in cases:
        found = objection_to(message)
        assert found is not None and why in found[0] and remedy in found[1]


@pytest.mark.parametrize(("min_nodes", "is_server", "ends"), [(2, False, True), (1, False, False), (1, True, True)])
def test_refused_node_ends_the_run_if_no_other_replaces_it(min_nodes: int, is_server: bool, ends: bool) -> None:
    events = Events()
    refusals = Refusals(RayConfig(nodes=2, min_nodes=min_nodes), events.emit)
    for _ in range(2):
        refusals.add("host", "is too old", "Update it.", is_server=is_server)
    assert (refusals.error is not None) == ends
    assert events.texts == ["the node host is too old. Update it." + " Continuing without it." * (not is_server)]
    assert refusals.hosts == {"host": ("is too old", "Update it.")}


def test_reports_are_bounded() -> None:
    events = Events()
    refusals = Refusals(RayConfig(nodes=1), events.emit)
    for i in range(100):
        refusals.add(f"host{i}", "is too old", "Update it.", is_server=False)
    assert len(refusals.hosts) == len(events.texts) == 64
    events.texts.clear()
    for _ in range(9):
        refusals.add_message(0, [b"no message"], WireError("no message."), is_server=False)
    assert [text.split("(")[1].split(")")[0] for text in events.texts] == ["1", "2", "4", "8"]
