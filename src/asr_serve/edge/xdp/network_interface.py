"""Facts about a network interface, by netlink: nothing of it changes, and no privilege is needed.

Source: rtnetlink(7), the kernel's Documentation/netlink/specs/netdev.yaml.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator

import msgspec

ROUTE, GENERIC = 0, 16
DONE, ERROR = 3, 2
REQUEST, DUMP = 1, 0x300
GET_LINK, GET_ADDRESS, CONTROL_FAMILY = 18, 22, 16
LINK_NAME, LINK_MTU, LINK_INFO, LINK_RX_QUEUES, LINK_XDP = 3, 4, 18, 32, 43
ADDRESS, LOCAL_ADDRESS = 1, 2
UP, LOOPBACK = 1, 8
TIMEOUT_S = 2.0
XDP_FEATURES = {"native": 1, "redirect": 2, "zero-copy": 8}
"""Bits of NETDEV_A_DEV_XDP_FEATURES that matter here."""


class NetworkInterface(msgspec.Struct, frozen=True, kw_only=True):
    """Interface of this network namespace."""

    name: str
    index: int
    up: bool
    loopback: bool
    mtu: int
    queues: int
    """Receive queues, at most."""
    kind: str
    """Kind of a virtual interface, else the driver of the card, else empty."""
    program: int
    """Number of the XDP program that is attached; 0: none."""
    addresses: tuple[str, ...]
    features: tuple[str, ...] | None
    """Features of XDP_FEATURES that its driver has; None: this kernel does not tell."""


def list_interfaces() -> list[NetworkInterface]:
    """Returns the interfaces of this network namespace. Raises OSError where there is no netlink."""
    addresses: dict[int, list[str]] = {}
    found = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, ROUTE) as route:
        for message in _request(route, GET_ADDRESS, REQUEST | DUMP, struct.pack("=BBBBI", 0, 0, 0, 0, 0)):
            (index,) = struct.unpack_from("=I", message, 4)
            fields = dict(_attributes(message[8:]))
            if raw := fields.get(LOCAL_ADDRESS, fields.get(ADDRESS)):
                addresses.setdefault(index, []).append(str(ipaddress.ip_address(raw)))
        for message in _request(route, GET_LINK, REQUEST | DUMP, bytes(16)):
            _, _, index, flags = struct.unpack_from("=BxHiI", message)
            found.append((index, flags, dict(_attributes(message[16:]))))
    return [_describe(index, flags, fields, tuple(addresses.get(index, ()))) for index, flags, fields in found]


def _describe(index: int, flags: int, fields: dict[int, bytes], addresses: tuple[str, ...]) -> NetworkInterface:
    name = fields[LINK_NAME].rstrip(b"\0").decode()
    kind = dict(_attributes(fields.get(LINK_INFO, b""))).get(1, b"").rstrip(b"\0").decode()
    if not kind:
        try:
            kind = os.path.basename(os.readlink(f"/sys/class/net/{name}/device/driver"))
        except OSError:
            kind = ""
    program = dict(_attributes(fields.get(LINK_XDP, b""))).get(4, bytes(4))
    return NetworkInterface(
        name=name,
        index=index,
        up=bool(flags & UP),
        loopback=bool(flags & LOOPBACK),
        mtu=struct.unpack("=I", fields[LINK_MTU])[0],
        queues=struct.unpack("=I", fields.get(LINK_RX_QUEUES, b"\1\0\0\0"))[0],
        kind=kind,
        program=struct.unpack("=I", program[:4])[0],
        addresses=addresses,
        features=_features(index),
    )


def _features(index: int) -> tuple[str, ...] | None:
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, GENERIC) as generic:
            name = _attribute(2, b"netdev\0")
            (answer,) = _request(generic, CONTROL_FAMILY, REQUEST, struct.pack("=BBH", 3, 1, 0) + name)
            family = struct.unpack("=H", dict(_attributes(answer[4:]))[1][:2])[0]
            asked = struct.pack("=BBH", 1, 1, 0) + _attribute(1, struct.pack("=I", index))
            (answer,) = _request(generic, family, REQUEST, asked)
            bits = struct.unpack("=Q", dict(_attributes(answer[4:]))[3][:8])[0]
    except (OSError, KeyError, ValueError, struct.error):  # kernels before 6.3 do not have it
        return None
    return tuple(name for name, bit in XDP_FEATURES.items() if bits & bit)


def _request(netlink: socket.socket, kind: int, flags: int, body: bytes) -> Iterator[bytes]:
    """Yields the bodies of the answers. Raises OSError."""
    netlink.settimeout(TIMEOUT_S)
    netlink.send(struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body)
    while True:
        data = netlink.recv(1 << 18)
        at = 0
        while at + 16 <= len(data):
            length, answer, _, _, _ = struct.unpack_from("=IHHII", data, at)
            if answer == DONE:
                return
            if answer == ERROR:
                number = -struct.unpack_from("=i", data, at + 16)[0]
                raise OSError(number, os.strerror(number))
            yield data[at + 16 : at + length]
            at += length + 3 & ~3
        if not flags & DUMP:
            return


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if length < 4:
            return
        yield kind & 0x3FFF, data[at + 4 : at + length]
        at += length + 3 & ~3
