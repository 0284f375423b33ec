"""A real Kubernetes cluster of two nodes on this machine; `python kubernetes_cluster.py` checks launchers on it.

Every host has a network, process numbers and mounts of its own: `control` runs the control plane, `node1` and `node2`
a kubelet with containerd, and the head is on a host outside the cluster, with no more rights than the page of
Kubernetes says it needs.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.engines import host_image, kubernetes_build
from tests.engines.guarded import EngineError, Guarded, require, system_path, tail, wait_until
from tests.engines.namespaces import Network

NODES = ("node1", "node2")
NAMESPACE, USER = "rl", "farstep"
_ADMIN_TOKEN, _USER_TOKEN = "of-the-administrator", "of-the-head"
_PAUSE = "localhost/pause:1"
_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "kubernetes.md"
_READY_S = 180.0


class KubernetesCluster(Network):
    """Up when entered; `kubeconfig(token)` is for clients on any of its hosts."""

    def __init__(self, programs: Path) -> None:
        super().__init__(["head", "control", *NODES])
        self._programs = programs

    def _start(self) -> None:
        require("etcd-server", "etcd")
        require("containerd", "containerd", "ctr")
        require("runc", "runc")
        require("openssl", "openssl")
        require("kubernetes-client", "kubectl")
        if not Path("/usr/lib/cni/bridge").exists():
            raise EngineError("apt-get install --no-install-recommends containernetworking-plugins")
        super()._start()
        self._stack.callback(_remove_cgroups)
        self._write_images()
        self._start_control()
        for node in NODES:
            self.start_node(node)
        self._apply_rights()

    # ---- the control plane ----

    def _start_control(self) -> None:
        folder, address = self.folder, self.address("control")
        subprocess.run(["openssl", "genrsa", "-out", folder / "account.key", "2048"], check=True, capture_output=True)
        (folder / "tokens.csv").write_text(f"{_ADMIN_TOKEN},admin,admin,system:masters\n{_USER_TOKEN},{USER},{USER}\n")
        etcd = "http://127.0.0.1:2379"
        self._serve("control", "etcd", ["etcd", "--data-dir", folder / "etcd", "--unsafe-no-fsync"])
        options = {
            "etcd-servers": etcd,
            "bind-address": address,
            "advertise-address": address,
            "secure-port": 6443,
            "cert-dir": folder / "certificates",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-signing-key-file": folder / "account.key",
            "service-account-key-file": folder / "account.key",
            "service-cluster-ip-range": "10.96.0.0/24",
            "authorization-mode": "RBAC",
            "token-auth-file": folder / "tokens.csv",
            "kubelet-preferred-address-types": "InternalIP",
            "default-not-ready-toleration-seconds": 3,
            "default-unreachable-toleration-seconds": 3,
        }
        server = self._serve("control", "kube-apiserver", [self._programs / "kube-apiserver", *_flags(options)])
        certificate = folder / "certificates" / "apiserver.crt"
        self._wait(certificate.exists, "the API server's certificate", server)
        admin = self.kubeconfig(_ADMIN_TOKEN)
        self._wait(lambda: "ok" in self._kubectl("get", "--raw", "/readyz", check=False), "the API server", server)
        shared = {
            "kubeconfig": admin,
            "authentication-kubeconfig": admin,
            "authorization-kubeconfig": admin,
            "bind-address": "127.0.0.1",
            "leader-elect": "false",
        }
        manager = {
            **shared,
            "service-account-private-key-file": folder / "account.key",
            "root-ca-file": certificate,
            "node-monitor-period": "1s",
            "node-monitor-grace-period": "16s",  # a busy machine's kubelets are late
        }
        for name, options in (("kube-controller-manager", manager), ("kube-scheduler", shared)):
            self._serve("control", name, [self._programs / name, *_flags(options)])

    def kubeconfig(self, token: str) -> Path:
        """A file for clients with this token."""
        path = self.folder / f"{token}.json"
        if path.exists():  # written once: a daemon may be reading it
            return path
        server = f"https://{self.address('control')}:6443"
        authority = str(self.folder / "certificates" / "apiserver.crt")
        contents = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": server, "certificate-authority": authority}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
            "current-context": "c",
        }
        path.write_text(json.dumps(contents))
        return path

    def _kubectl(self, *arguments: str, check: bool = True, text: str = "") -> str:
        command: list[str | Path] = [
            "kubectl",
            "--kubeconfig",
            self.kubeconfig(_ADMIN_TOKEN),
            "--request-timeout=10s",
            *arguments,
        ]
        if not check:
            with contextlib.suppress(EngineError):
                return self.run("control", command)
            return ""
        if text:
            (self.folder / "applied.yaml").write_text(text)
            command += ["-f", self.folder / "applied.yaml"]
        return self.run("control", command)

    def objects(self) -> list[str]:
        """All objects of farstep, with any name."""
        listed = self._kubectl("get", "jobs,deployments,secrets,pods", "-n", NAMESPACE, "-o", "name",
                               "-l", "app.kubernetes.io/managed-by=farstep")  # fmt: skip
        return listed.split()

    def _apply_rights(self) -> None:
        """Those of the page, and the same for the head's user."""
        self._kubectl("create", "namespace", NAMESPACE)
        (rights,) = re.findall(r"^ *```yaml\n(.*?)^ *```$", _PAGE.read_text(), re.S | re.M)
        user = f"   - {{kind: User, name: {USER}, apiGroup: rbac.authorization.k8s.io}}\n"
        self._kubectl("apply", text=re.sub(r"^   ", "", rights + user, flags=re.M))
        account = ["get", "serviceaccount", "default", "-n", NAMESPACE]
        self._wait(lambda: bool(self._kubectl(*account, check=False)), "the namespace's account")

    def start_pod(self, name: str, command: list[str]) -> None:
        """Start a pod with the rights of the page and the API server's own address, as services have no route."""
        server = {"KUBERNETES_SERVICE_HOST": self.address("control"), "KUBERNETES_SERVICE_PORT": "6443"}
        path = f"{_ROOT / 'src'}:{_ROOT}"
        spec = host_image.pod_template(**server, PYTHONPATH=path)["spec"]
        (container,) = spec["containers"]
        container |= {"name": name, "image": host_image.NAME, "imagePullPolicy": "Never", "command": command}
        spec |= {"serviceAccountName": "farstep", "restartPolicy": "Never"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}
        self._kubectl("apply", text=json.dumps(pod))

    def kubectl(self, *arguments: str) -> str:
        return self._kubectl("-n", NAMESPACE, *arguments)

    # ---- nodes ----

    def _write_images(self) -> None:
        for name, image in (("pause", _PAUSE), ("daemon", host_image.NAME)):
            root = self.folder / f"{name}.root.tar"
            if name == "pause":
                host_image.write_program(root, self._programs / kubernetes_build.PAUSE)
            else:
                host_image.write_root(root)
            host_image.write_archive(self.folder / f"{name}.tar", image, root, "/pause")

    def start_node(self, node: str) -> None:
        """Its daemons, on a host that has just been booted, until the cluster has it."""
        folder = self.folder / f"{node}-{time.monotonic_ns()}"
        folder.mkdir()
        # Of its own, as nodes do not share these; what kubelet mounts must be seen by containerd.
        hidden = " ".join(f"mount -t tmpfs tmpfs {path};" for path in ("/run", "/var/lib", "/var/log"))
        self.run(node, ["sh", "-ec", f"mount --make-rshared /; {hidden} mkdir -p /run/netns /var/lib/kubelet"])
        for other in NODES:
            if other != node:
                self.run(node, ["ip", "route", "replace", self._subnet(other), "via", self.address(other)])
        (folder / "cni").mkdir()
        (folder / "cni" / "10.conflist").write_text(json.dumps(_network(self._subnet(node), folder)))
        (folder / "containerd.toml").write_text(_CONTAINERD.format(folder=folder, pause=_PAUSE))
        (folder / "kubelet.json").write_text(json.dumps({**_KUBELET, "address": self.address(node)}))
        socket = folder / "containerd.sock"
        daemon = self._serve(node, f"{node}-containerd", ["containerd", "-c", folder / "containerd.toml"])
        self._wait(socket.exists, f"containerd of {node}", daemon)
        for name in ("pause", "daemon"):
            images: list[str | Path] = [
                "ctr",
                "-a",
                socket,
                "-n",
                "k8s.io",
                "images",
                "import",
                self.folder / f"{name}.tar",
            ]
            self.run(node, images, timeout_s=120)
        options = {
            "config": folder / "kubelet.json",
            "kubeconfig": self.kubeconfig(_ADMIN_TOKEN),
            "container-runtime": "remote",
            "container-runtime-endpoint": f"unix://{socket}",
            "hostname-override": node,
            "node-ip": self.address(node),
            "root-dir": folder / "kubelet",
            "cert-dir": folder / "certificates",
            "runtime-cgroups": "/",
        }
        kubelet = self._serve(node, f"{node}-kubelet", [self._programs / "kubelet", *_flags(options)])
        condition = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
        self._wait(
            lambda: self._kubectl("get", "node", node, "-o", condition, check=False) == "True", node, daemon, kubelet
        )

    def _subnet(self, node: str) -> str:
        """The addresses of its pods."""
        return f"10.80.{self.address(node).rpartition('.')[2]}.0/24"

    def _serve(self, host: str, name: str, command: list[Any]) -> Guarded:
        with (self.folder / f"{name}.log").open("a") as log:
            return self.popen(host, command, stdout=log, stderr=log, env=system_path(), cwd=self.folder)

    def _wait(self, done: Any, what: str, *alive: Guarded) -> None:
        wait_until(done, what, _READY_S, sorted(self.folder.glob("*.log")), alive, pause_s=0.2)


def _flags(options: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]


def _network(subnet: str, folder: Path) -> dict[str, Any]:
    """Pods behind a bridge, seen by others as their node."""
    addresses = {"ranges": [[{"subnet": subnet}]], "routes": [{"dst": "0.0.0.0/0"}]}
    ipam = {"type": "host-local", "dataDir": str(folder / "addresses"), **addresses}
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": True, "ipam": ipam}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}


def _remove_cgroups() -> None:
    for folder in Path("/sys/fs/cgroup").glob("*/k8s.io"):
        for below in (*folder.glob("*/"), folder):
            with contextlib.suppress(OSError):
                below.rmdir()


_CONTAINERD = """
version = 2
root = "{folder}/containerd"
state = "{folder}/state"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
"""
_KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "port": 10250,
    "readOnlyPort": 0,
    "cgroupDriver": "cgroupfs",
    "cgroupsPerQOS": False,
    "enforceNodeAllocatable": [],
    "failSwapOn": False,
    "makeIPTablesUtilChains": False,
    "resolvConf": "",
    "nodeStatusUpdateFrequency": "2s",
    "nodeLeaseDurationSeconds": 6,
    "evictionHard": {"memory.available": "100Mi"},
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
}
"""Without cgroups of kubelet's own, which need more of them than machines in a container have."""


def expect_nothing(cluster: KubernetesCluster) -> None:
    """Pods have a while to end."""
    try:
        wait_until(lambda: not cluster.objects(), "everything of farstep to be gone", 60.0, pause_s=0.5)
    except EngineError as error:
        left = cluster.kubectl("get", *cluster.objects(), "-o", "wide")
        raise EngineError(f"{error}; there is\n{left}") from None


def check(cluster: KubernetesCluster, kind: str) -> None:
    """The contract with Jobs or a Deployment; the head says when a node is to crash."""
    head = cluster.popen(
        "head",
        [sys.executable, "-u", "-m", "tests.engines.kubernetes_head", kind],
        cwd=_ROOT,
        env={**system_path(), "KUBECONFIG": str(cluster.kubeconfig(_USER_TOKEN))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert head.stdin is not None and head.stdout is not None
    crashed = ""
    for line in head.stdout:
        print(f"{kind}: {line.strip()}", flush=True)
        if line.startswith("crash "):
            if crashed:  # there must be one that its pods can go to
                cluster.start_node(crashed)
            crashed = line.split()[1]
            cluster.crash(crashed)
            head.stdin.write("crashed\n")
            head.stdin.flush()
    if head.wait() != 0:
        happened = cluster.kubectl("get", "nodes") + cluster.kubectl("get", "events", "--sort-by=.lastTimestamp")
        logs = "".join(map(tail, sorted(cluster.folder.glob("*.log"))))
        raise EngineError(f"the contract is not kept with kind={kind!r}:\n{happened}{logs}")
    if crashed:
        cluster.start_node(crashed)
    expect_nothing(cluster)


def check_inside(cluster: KubernetesCluster) -> None:
    """A head in a pod: what it asks for is its pod's, and goes with it."""
    cluster.start_pod("head", [sys.executable, "-u", "-m", "tests.engines.kubernetes_head", "inside"])

    def is_training() -> bool:
        with contextlib.suppress(EngineError):  # no log yet
            said = cluster.kubectl("logs", "head")
            if "Error" in said:
                sys.exit(said)
            return "training" in said
        return False

    wait_until(is_training, "a head in a pod to train", 120.0, pause_s=0.5)
    owners = cluster.kubectl("get", "jobs", "-o", "jsonpath={.items[*].metadata.ownerReferences[*].name}")
    assert owners == "head", owners
    cluster.kubectl("delete", "pod", "head", "--grace-period=0", "--force")
    expect_nothing(cluster)


def main() -> None:
    programs = kubernetes_build.build(kubernetes_build.cache())
    begun = time.monotonic()
    with KubernetesCluster(programs) as cluster:
        print(f"a cluster of {len(NODES)} nodes is up after {time.monotonic() - begun:.0f} s", flush=True)
        check_inside(cluster)
        print(f"a head in a pod trains, and what it asked for goes with it ({time.monotonic() - begun:.0f} s)")
        for kind in ("job", "deployment"):
            check(cluster, kind)
            print(f"{kind}: the contract is kept, and nothing is left ({time.monotonic() - begun:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
