"""Checks of this machine by `farstep doctor`."""

from __future__ import annotations

import os
import resource
import socket
from types import SimpleNamespace

import pytest

import farstep
from farstep.doctor import machine
from farstep.doctor.findings import Finding, problem


def levels(found: list[Finding], word: str) -> list[str]:
    return [finding.level for finding in found if word in finding.text]


def test_scarce_resources_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(machine, "available_memory", lambda: 2.0**20)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=2, f_frsize=4096))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 4096))
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    found = list(machine.machine())
    for word in ("of memory", "/dev/shm", "only 64 files", "has no address"):
        assert levels(found, word) == ["warning"], word
    assert all(finding.fix for finding in found if finding.level != "ok")


def test_host_name_that_resolves_to_loopback_is_not_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert levels(list(machine.machine()), "resolves to 127.0.1.1") == ["ok"]


def test_loopback_address_of_the_head_is_a_warning() -> None:
    found = list(machine.addresses(farstep.SSHConfig(hosts="a", head_address="127.0.0.1")))
    assert [finding.level for finding in found] == ["warning", "ok"]
    assert "no other machine" in found[0].text


def test_finding_of_several_lines_is_indented() -> None:
    assert str(problem("first\nsecond", "do it.")).splitlines() == [
        "  problem  first",
        "           second",
        "           -> do it.",
    ]
