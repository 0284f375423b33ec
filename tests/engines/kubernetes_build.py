"""A Kubernetes control plane and kubelet from Debian's source package, built once: `python kubernetes_build.py`.

No package has these programs. The source package has all that they need, so nothing else is downloaded. It takes 13
minutes of one core; what is there already is not built again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.engines.debian_source import archive_of, run
from tests.engines.guarded import require

PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
PAUSE = "pause"
_VERSION = "1.20.2"
_PAUSE_SOURCE = """package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ends := make(chan os.Signal, 1)
	signal.Notify(ends, syscall.SIGINT, syscall.SIGTERM)
	<-ends
}
"""
_NOT_SERVED = re.compile(r"testdata|code-generator|sample|/test/|/examples|kube-openapi")


def cache() -> Path:
    """Where sources and programs are kept."""
    given = os.environ.get("FARSTEP_K8S_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "farstep-k8s"


def build(folder: Path) -> Path:
    """The folder with the programs; says what it does, since it takes a while."""
    programs = folder / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    if all((programs / name).exists() for name in (*PROGRAMS, PAUSE)):
        return programs
    require("golang-go", "go")
    environment = {
        **os.environ,
        "GO111MODULE": "off",
        "CGO_ENABLED": "0",
        "GOPATH": str(folder / "go"),
        "GOCACHE": str(folder / "go-cache"),
    }
    source = _source(folder)
    _openapi(folder, source, environment)
    flags = "-s -w " + " ".join(
        f"-X k8s.io/kubernetes/vendor/k8s.io/{package}.git{key}={value}"
        for package in ("component-base/version", "client-go/pkg/version")
        for key, value in zip(("Version", "Major", "Minor"), (f"v{_VERSION}", *_VERSION.split(".")[:2]), strict=True)
    )
    pause = folder / "pause.go"
    pause.write_text(_PAUSE_SOURCE)
    for name, what in (*((name, f"./cmd/{name}") for name in PROGRAMS), (PAUSE, str(pause))):
        if not (programs / name).exists():
            print(f"building {name}", flush=True)
            half = programs / f"{name}.half"
            run(["go", "build", "-ldflags", flags, "-o", str(half), what], source, environment)
            half.rename(programs / name)
    return programs


def _source(folder: Path) -> Path:
    """Debian's, without its patches."""
    source = folder / "go" / "src" / "k8s.io" / "kubernetes"
    if source.exists():
        return source
    download = folder / "source"
    archive = archive_of("kubernetes", download)
    source.parent.mkdir(parents=True, exist_ok=True)
    run(["tar", "-xzf", str(archive), "-C", str(source.parent)], download)
    (unpacked,) = source.parent.glob("kubernetes-*")
    return unpacked.rename(source)


def _openapi(folder: Path, source: Path, environment: dict[str, str]) -> None:
    """The one generated file that the source package leaves out."""
    if (source / "pkg" / "generated" / "openapi" / "zz_generated.openapi.go").exists():
        return
    print("generating the API's description", flush=True)
    generator = folder / "openapi-gen"
    run(["go", "build", "-o", str(generator), "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"], source, environment)
    packages = sorted({package for package in map(_package, _tagged(source)) if not _NOT_SERVED.search(package)})
    command = [str(generator), "--logtostderr", "-i", ",".join(packages), "-O", "zz_generated.openapi"]
    command += ["-p", "k8s.io/kubernetes/pkg/generated/openapi", "--output-base", str(folder / "go" / "src")]
    command += ["--go-header-file", "hack/boilerplate/boilerplate.generatego.txt", "-r", str(folder / "violations")]
    run(command, source, environment)


def _tagged(source: Path) -> list[str]:
    """Folders of packages that are part of the API, relative to the source."""
    found = []
    for top in ("pkg", "staging/src/k8s.io", "cmd", "plugin"):
        for file in (source / top).rglob("*.go"):
            if "+k8s:openapi-gen=" in file.read_text(errors="replace"):
                found.append(str(file.parent.relative_to(source)))
    return found


def _package(folder: str) -> str:
    inside = folder.removeprefix("staging/src/")
    return f"k8s.io/kubernetes/{'vendor/' if inside != folder else ''}{inside}"


if __name__ == "__main__":
    print(build(cache()))
