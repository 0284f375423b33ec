"""Where nodes may find this machine."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
_ANYWHERE = ("192.0.2.1", 9)
"""An address of nobody (RFC 5737): nothing is sent, but the kernel says by which interface it would go."""


def own_addresses() -> list[str]:
    """The IPv4 addresses of this machine's interfaces, the one towards the world first; loopback if there is nothing
    else. A host's name is not asked: on many it stands for 127.0.1.1."""
    found = [
        address for address in map(_address_of, socket.if_nameindex()) if address and not address.startswith("127.")
    ]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(_ANYWHERE)
        found.sort(key=lambda address: address != probe.getsockname()[0])
    return list(dict.fromkeys(found)) or ["127.0.0.1"]


def _address_of(interface: tuple[int, str]) -> str:
    request = struct.pack("256s", interface[1].encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
        except OSError:  # it has none
            return ""
    return socket.inet_ntoa(answer[20:24])
