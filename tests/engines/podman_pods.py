"""Pods without a cluster: `podman kube play` of farstep's own manifests, on a host of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farstep.config.kubernetes import KubernetesConfig
from farstep.head.events import EventLog
from farstep.launch import launchers
from farstep.launch.daemon.guardian import Guardian
from farstep.launch.engines.engine import Group, RequestStatus
from farstep.launch.engines.kubernetes.engine import KubernetesEngine
from farstep.launch.engines.kubernetes.manifests import manifests
from tests.engines import host_image
from tests.engines.guarded import require, system_path, wait_until
from tests.engines.namespaces import Network

PACKAGES = "podman runc conmon netavark aardvark-dns catatonit iptables"
_PROGRAMS = ("podman", "runc", "conmon", "catatonit", "iptables")
_HELPERS = ("/usr/lib/podman/netavark", "/usr/lib/podman/aardvark-dns")
_SETTINGS = """
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[containers]
log_driver = "k8s-file"
default_ulimits = ["nofile=20000:20000", "nproc=20000:20000"]
"""


class PodmanPods(Network):
    """A host `pods`, on which podman serves a socket, and a host `head`; pods reach the head as through a router."""

    def __init__(self) -> None:
        super().__init__(["head", "pods"])

    def _start(self) -> None:
        podman, *_ = require(PACKAGES, *_PROGRAMS, *_HELPERS)
        super()._start()
        (self.folder / "containers.conf").write_text(_SETTINGS)
        folders = {name: self.folder / name for name in ("root", "runroot", "tmpdir", "network-config-dir")}
        places = " ".join(f"--{name} {path}" for name, path in folders.items())
        log = self.folder / "podman.log"
        # A /run of its own: podman keeps pods' namespaces there, which go with the host.
        serve = f"mount -t tmpfs tmpfs /run; exec {podman} {places} system service --time=0 {self.url}"
        environment = {**system_path(), "CONTAINERS_CONF": str(self.folder / "containers.conf")}
        with log.open("w") as output:
            service = self.popen("pods", ["sh", "-ec", serve], env=environment, stdout=output, stderr=output)
        self._stack.callback(_remove_cgroups)
        wait_until(lambda: (self.folder / "podman.sock").exists(), "podman's socket", logs=[log], alive=[service])
        self._stack.callback(self.podman, "pod", "rm", "--force", "--all", "--time", "0")
        host_image.write_root(self.folder / "root.tar")
        self.podman("import", str(self.folder / "root.tar"), host_image.NAME)

    @property
    def url(self) -> str:
        return f"unix://{self.folder}/podman.sock"

    def podman(self, *arguments: str) -> str:
        return podman(self.url, *arguments)

    def pods(self) -> list[str]:
        return self.podman("pod", "ps", "--format", "{{.Name}}").split()


def podman(url: str, *arguments: str) -> str:
    """The output of a command; raises with its error output if it fails."""
    command = ["podman", "--remote", "--url", url, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=system_path())
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout


def _remove_cgroups() -> None:
    for folder in Path("/sys/fs/cgroup").glob("*/libpod_parent"):
        for below in (*folder.glob("*/"), folder):
            with contextlib.suppress(OSError):  # podman of another process
                below.rmdir()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodmanConfig(KubernetesConfig):
    """As on Kubernetes, with podman in place of the API server."""

    url: str = ""
    folder: str = ""

    @classmethod
    def make(cls, url: str, folder: str, **options: Any) -> PodmanConfig:
        template = host_image.pod_template()
        # podman does not know the node's name.
        template["spec"]["containers"][0]["env"] += [{"name": "FARSTEP_NODE", "value": "podman", "valueFrom": None}]
        given = {**host_image.options(), "kind": "deployment", "pod_template": template, **options}
        return cls(url=url, folder=folder, **given)


class PodmanEngine:
    """See `farstep.launch.engines.engine.Engine`."""

    grace_s = 5.0

    def __init__(self, config: PodmanConfig) -> None:
        self._config, self._asked, self._guardian = config, 0, Guardian()

    def listen_on(self) -> Sequence[str]:
        return KubernetesEngine(self._config, EventLog().emit).listen_on()

    def request(self, nodes: int, bootstrap: bytes) -> Played:
        run = str(json.loads(bootstrap)["run"])
        wanted = manifests(self._config, run, self._asked, nodes, bootstrap, self.grace_s)
        self._asked += 1
        return Played(self._config, wanted, self._guardian)

    def close(self) -> None:
        self._guardian.close()


class Played(Group):
    """Pods that podman was asked for together."""

    def __init__(self, config: PodmanConfig, wanted: list[dict[str, Any]], guardian: Guardian) -> None:
        self._url, self._guardian = config.url, guardian
        secret, deployment = wanted
        self._name = secret["metadata"]["name"]
        command = deployment["spec"]["template"]["spec"]["containers"][0]["command"]
        # podman 4.3 does not decode what is in a Secret when it mounts it.
        daemon, file_name = command[3].split(" < ")
        command[3] = f"{daemon} <<END\n$(base64 -d {file_name})\nEND"
        file = Path(config.folder, f"{self._name}.yaml")
        file.write_text("\n---\n".join(map(json.dumps, wanted)))
        # Again while there are some: podman may be about to restart one, and does not remove it then.
        words = f"podman --remote --url {self._url}"
        pods = f"$({words} pod ps -q --filter name={self._name})"
        removal = f'while [ -n "{pods}" ]; do {words} pod rm --force --time 0 {pods}; done'
        self._down = ["timeout", "60", "sh", "-c", f"{removal}; {words} secret rm {self._name}; true"]
        guardian.register(self._name, self._down)
        podman(self._url, "kube", "play", str(file))

    def status(self) -> RequestStatus:
        pods = podman(self._url, "pod", "ps", "--filter", f"name={self._name}", "--format", "{{.Status}}").split()
        return RequestStatus(f"podman has pods {pods}", sum(pod not in ("Exited", "Degraded") for pod in pods))

    def logs(self) -> str:
        names = podman(
            self._url, "ps", "-a", "--filter", f"name={self._name}.*node-daemon", "--format", "{{.Names}}"
        ).split()
        return "\n".join(f"{name}:\n{podman(self._url, 'logs', '--tail', '40', name)}" for name in names)

    def cancel(self) -> None:
        subprocess.run(self._down, capture_output=True, timeout=60, env=system_path())
        self._guardian.unregister(self._name)


def _engine_for(config: Any, workers_per_node: int, emit: Any, known: Any = launchers.engine_for) -> Any:
    return PodmanEngine(config) if isinstance(config, PodmanConfig) else known(config, workers_per_node, emit)


launchers.engine_for = _engine_for
