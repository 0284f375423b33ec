"""A nearly empty image, for pods that use this machine's programs, Python and farstep by mounts."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import sys
import tarfile
from pathlib import Path
from typing import Any

NAME = "localhost/farstep-test:1"
_REPOSITORY = Path(__file__).parents[2]
_FOLDERS = ("usr", "etc", "tmp", "run", "proc", "dev", "sys", "root", "var")
_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
_USERS = "root:x:0:0:root:/root:/bin/sh\nfarstep:x:1000:1000::/tmp:/bin/sh\n"


def write_root(tar: Path) -> None:
    """The image's files, as `podman import` takes them."""
    with tarfile.open(tar, "w") as files:
        for name in _FOLDERS:
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            files.addfile(folder)
        for name, target in _LINKS.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            files.addfile(link)
        _add(files, "etc/passwd", _USERS.encode())


def write_archive(archive: Path, name: str, root: Path, command: str) -> None:
    """An image of one layer, as `ctr images import` takes it."""
    layer = root.read_bytes()
    digest = hashlib.sha256(layer).hexdigest()
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    settings = {
        "architecture": machine,
        "os": "linux",
        "config": {"Cmd": [command]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    listed = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    contents = {"config.json": settings, "manifest.json": listed}
    with tarfile.open(archive, "w") as files:
        for file, data in {
            **{key: json.dumps(value).encode() for key, value in contents.items()},
            "layer.tar": layer,
        }.items():
            _add(files, file, data)


def write_program(tar: Path, program: Path) -> None:
    """A root with one static program."""
    with tarfile.open(tar, "w") as files:
        _add(files, program.name, program.read_bytes(), 0o755)


def _add(files: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), mode
    files.addfile(info, io.BytesIO(data))


def mounts() -> list[str]:
    """What pods need of this machine, none inside another."""
    paths = {Path("/usr"), Path(sys.base_prefix), Path(sys.prefix), _REPOSITORY}
    return sorted(str(path) for path in paths if not any(parent in paths for parent in path.parents))


def pod_template(**env: str) -> dict[str, Any]:
    """Lets pods of the image run this Python with this farstep."""
    variables = {"PYTHONPATH": str(_REPOSITORY / "src"), **env}
    container = {
        "name": "node-daemon",
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "volumeMounts": [{"name": f"host{i}", "mountPath": path, "readOnly": True} for i, path in enumerate(mounts())],
    }
    volumes = [{"name": f"host{i}", "hostPath": {"path": path}} for i, path in enumerate(mounts())]
    return {"spec": {"containers": [container], "volumes": volumes}}


def options() -> dict[str, Any]:
    """Of a `KubernetesConfig` for such pods; many of them fit on a small machine."""
    return {
        "image": NAME,
        "image_pull_policy": "Never",
        "python": sys.executable,
        "requests": {"cpu": "100m"},
        "pod_template": pod_template(),
    }
