"""Finds the addresses at which nodes may reach this machine."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
_ANYWHERE = ("192.0.2.1", 9)
"""An unused address (RFC 5737). Nothing is sent to it, but the kernel chooses the interface for it."""


def own_addresses() -> list[str]:
    """The IPv4 addresses of this machine, the default route's address first; loopback if there is no other.

    The host name is not resolved, because many machines resolve it to 127.0.1.1.
    """
    found = [
        address for address in map(_address_of, socket.if_nameindex()) if address and not address.startswith("127.")
    ]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(_ANYWHERE)
        found.sort(key=lambda address: address != probe.getsockname()[0])
    return list(dict.fromkeys(found)) or ["127.0.0.1"]


def _address_of(interface: tuple[int, str]) -> str:
    request = struct.pack("256s", interface[1].encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
        except OSError:  # the interface has no IPv4 address
            return ""
    return socket.inet_ntoa(answer[20:24])
