"""Named nodes for acting servers: which node has which name, and the error for missing ones."""

from __future__ import annotations

from typing import Any

import pytest

from farstep.config.inference import ServedInference
from farstep.config.launch import EngineConfig, RayConfig, SSHConfig
from farstep.errors import ConfigError, LaunchError
from farstep.head.events import EventLog
from farstep.launch.acting_plan import ActingPlan
from farstep.launch.groups import Groups
from farstep.launch.launchers import launcher_for
from farstep.launch.nodes import NO_BLOCK, Node
from farstep.launch.server_nodes import ServerNodes
from tests.launch.test_groups import Fake


class World:
    """Connected nodes of a run whose acting servers are to run on `names`; those in `hosts` run no workers."""

    def __init__(self, config: EngineConfig, names: list[str], hosts: list[str]) -> None:
        self.connected: dict[str, Node] = {}
        groups = Groups(Fake(), config, lambda group: b"", EventLog().emit, fewest=len(hosts))
        self.servers = ServerNodes(names, hosts, groups, self.connected, config)

    def join(self, host: str, place: str = "", block: int = 0) -> Node:
        hub: Any = None
        node = self.connected[f"{len(self.connected)}"] = Node(hub, host, 0, host, 1, place, "", 0.0, block)
        return node


def test_a_node_with_workers_does_not_stand_in_for_one_without() -> None:
    world = World(SSHConfig(hosts=["me@gpu", "cpu"]), ["gpu", "cpu"], ["gpu"])
    worker, cpu = world.join("gpu", "ssh me@gpu"), world.join("vm", "ssh cpu", block=1)
    assert world.servers.find("gpu") is None and world.servers.find("cpu") is cpu
    assert [world.servers.is_shared(node) for node in (worker, cpu)] == [False, True]
    assert world.servers.waiting() == "1 node for acting servers (gpu) not connected yet"
    assert not world.servers.check_names(others_connected=True)
    node = world.join("gpu", "ssh gpu", NO_BLOCK)
    assert world.servers.find("gpu") is node and world.servers.without_workers() == [node]
    assert world.servers.check_names(others_connected=True) and not world.servers.waiting()
    node.leaving = True
    assert world.servers.find("gpu") is None


def test_unknown_node_name_is_refused_once_all_nodes_are_connected() -> None:
    world = World(RayConfig(nodes=2), ["gpu"], [])
    world.join("a")
    assert not world.servers.check_names(others_connected=False)
    world.join("b", block=1)
    with pytest.raises(LaunchError, match=r"on gpu, but the connected nodes are a, b.*RayConfig run workers.*'head'"):
        world.servers.check_names(others_connected=True)


def test_a_named_node_that_was_lost_may_return() -> None:
    world = World(RayConfig(nodes=1), ["gpu"], [])
    world.join("gpu")
    assert world.servers.check_names(others_connected=True)
    world.connected.clear()
    world.join("other")
    assert not world.servers.check_names(others_connected=True)


def test_a_spare_host_cannot_have_servers() -> None:
    config = SSHConfig(hosts=["a", "b"], nodes=1)
    plan = ActingPlan(1, 1, ServedInference(where=["b"]))
    with pytest.raises(ConfigError, match=r"b is a spare host.*remove it from hosts"):
        launcher_for(config, plan, 1, [], EventLog().emit)


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "two words", " ", ""])
def test_name_of_a_node_is_one_word_and_not_an_ssh_option(name: str) -> None:
    with pytest.raises(ConfigError, match="a list of distinct nodes"):
        ServedInference(where=[name])
