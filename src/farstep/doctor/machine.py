"""Checks of this machine, on which the head will run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import zmq

from farstep.config.launch import EngineConfig, LaunchConfig
from farstep.doctor.findings import Finding, ok, problem, warning
from farstep.errors import LaunchError
from farstep.launch.addresses import own_addresses
from farstep.launch.daemon.criu import working_criu
from farstep.resources import available_memory, usable_cpus
from farstep.version import VERSION
from farstep.wire.channels.zmq import Hub

_LITTLE_MEMORY, _LITTLE_SHM = 2**30, 256 * 2**20
_FEW_FILES = 1024
_SHM = Path("/dev/shm")


def machine() -> Iterator[Finding]:
    """Check versions, memory and limits of this machine."""
    yield _programs()
    yield _torch()
    yield _cores()
    yield _memory()
    yield from _shm()
    yield _files()
    yield _criu()
    yield _name()


def addresses(config: LaunchConfig) -> Iterator[Finding]:
    """Check that the head can listen on its addresses, with two ports each. The system chooses the ports."""
    engine = isinstance(config, EngineConfig)
    chosen = config.head_address if isinstance(config, EngineConfig) else None
    found: Sequence[str] = chosen or (own_addresses() if engine else ["127.0.0.1"])
    if engine and all(address.startswith("127.") for address in found):
        yield warning(
            f"the head would listen on {', '.join(found)} only, which no other machine can reach",
            "connect this machine to the nodes' network, or set --head-address.",
        )
    try:
        hub = Hub([f"tcp://{address}:*" for address in found], reliable=True)
    except zmq.ZMQError as error:
        yield problem(
            f"the head cannot listen on {' and '.join(found)}: {error}",
            f"use an address of this machine ({', '.join(own_addresses())}) as --head-address.",
        )
        return
    ports = (hub.address.rpartition(":")[2], hub.bulk_port)
    hub.close()
    yield ok(f"the head can listen on {' and '.join(found)}, with two ports each (now {ports[0]} and {ports[1]})")


def _programs() -> Finding:
    found = [f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "gymnasium", "pyzmq")]
    return ok(f"farstep {VERSION}, Python {platform.python_version()}, {', '.join(found)}")


def _torch() -> Finding:
    try:
        return ok(f"torch {importlib.metadata.version('torch')}")
    except importlib.metadata.PackageNotFoundError:
        return warning(
            "torch is not installed; 'farstep train' needs it",
            "pip install torch, unless you train with your own program and agents.",
        )


def _cores() -> Finding:
    usable, total = usable_cpus(), os.cpu_count() or 1
    return ok(f"{usable} of {total} cores may be used" if usable < total else f"{usable} cores")


def _memory() -> Finding:
    available = available_memory()
    text = f"{available / 2**30:,.1f} GiB of memory are available"
    if available < _LITTLE_MEMORY:
        return warning(text, "end other programs, or give the container or job more memory for rollouts.")
    return ok(text)


def _shm() -> Iterator[Finding]:
    if not _SHM.exists():
        return
    size = os.statvfs(_SHM)
    free = size.f_bavail * size.f_frsize
    text = f"{free / 2**20:,.0f} MiB are free in {_SHM}"
    if free < _LITTLE_SHM:
        yield warning(
            f"{text}; farstep does not use it, but some environments and torch's data loaders do",
            "remove old files there, or start the container with --shm-size=2g.",
        )
    else:
        yield ok(text)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        allowed = "any number is allowed" if hard == resource.RLIM_INFINITY else f"at most {hard} are allowed"
        return warning(
            f"only {soft} files may be open; a worker needs about eight", f"ulimit -n {_FEW_FILES} ({allowed})."
        )
    return ok(f"{soft} files may be open" if soft != resource.RLIM_INFINITY else "any number of files may be open")


def _criu() -> Finding:
    try:
        working_criu().close()
    except LaunchError as error:
        return ok(f"parked workers cannot be written to disk: {str(error).removesuffix('.')}")
    return ok("criu can write parked workers to disk (park_method='criu')")


def _name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return warning(f"the host name {name} has no address", f"add a line '127.0.1.1 {name}' to /etc/hosts.")
    if address.startswith("127."):
        return ok(f"the host name {name} resolves to {address}; farstep uses the network interfaces' addresses instead")
    return ok(f"the host name {name} resolves to {address}")
