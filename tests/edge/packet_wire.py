"""A wire of a test's own: a veth pair whose ends are in two network namespaces, with IPv4 and IPv6 addresses.

Neither end is ever in the namespace of this machine, whose programs would notice. A thread can step into a namespace:
sockets that it opens there stay there.

    with PacketWire() as wire:
        driver = open_xdp(wire, RECEIVER, 5004)
        with wire.inside(wire.sender):
            sender = RtpSender(5004, to=RECEIVER, address=SENDER)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from asr_serve.edge.xdp.xdp_driver import DriverUnavailable, XdpDriver

SENDER, RECEIVER, NEIGHBOUR = "10.91.0.1", "10.91.0.2", "10.91.0.3"
"""NEIGHBOUR: a second address of the sender's end."""
SENDER_6, RECEIVER_6 = "fd91::1", "fd91::2"
FORBIDDEN = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EAFNOSUPPORT)
CLONE_NEWNET = 0x40000000
TIMEOUT_S = 60


class PacketWire:
    """Two namespaces and a wire between them. `device`: the receiver's end, with a program attached natively if any."""

    device, sender_device = "rtp0", "rtp1"

    def __init__(self) -> None:
        if os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None:
            pytest.skip("no network namespaces here: they need root and the command ip")
        mark = secrets.token_hex(4)
        self.receiver, self.sender = f"asr-edge-{mark}", f"asr-callers-{mark}"
        self._undo = ExitStack()
        try:
            for name in (self.receiver, self.sender):
                run("ip", "netns", "add", name)
                self._undo.callback(run, "ip", "netns", "del", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            pair = ["type", "veth", "peer", "name", self.sender_device, "netns", self.sender]
            run("ip", "-n", self.receiver, "link", "add", self.device, *pair)
        except OSError as error:
            self._undo.close()
            pytest.skip(f"no network namespaces here: {error}")
        for name, device, addresses in (
            (self.receiver, self.device, (RECEIVER, RECEIVER_6)),
            (self.sender, self.sender_device, (SENDER, NEIGHBOUR, SENDER_6)),
        ):
            for address in addresses:
                length = ["/64", "nodad"] if ":" in address else ["/24"]
                run("ip", "-n", name, "addr", "replace", address + length[0], "dev", device, *length[1:])
            run("ip", "-n", name, "link", "set", device, "up")

    def __enter__(self) -> PacketWire:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    @contextlib.contextmanager
    def inside(self, namespace: str) -> Iterator[None]:
        """This thread is in a namespace."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        try:
            _enter(there)
            try:
                yield
            finally:
                _enter(home)
        finally:
            os.close(there)
            os.close(home)

    def send_frames(self, frames: list[bytes]) -> None:
        """Sends frames, each from its EtherType on, to the receiver's end."""
        link = json.loads(run("ip", "-j", "-n", self.receiver, "link", "show", self.device))[0]["address"]
        with self.inside(self.sender), socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
            raw.bind((self.sender_device, 0))
            for frame in frames:
                raw.send(bytes.fromhex(link.replace(":", "")) + bytes.fromhex("020000000001") + frame)

    def kernel_datagrams(self) -> int:
        """UDP datagrams that the receiver's kernel has delivered to sockets."""
        with self.inside(self.receiver):
            files = Path("/proc/thread-self/net/snmp"), Path("/proc/thread-self/net/snmp6")
            names, values = (line.split() for line in files[0].read_text().splitlines() if line.startswith("Udp:"))
            found = dict(zip(names, values, strict=True)) | dict(
                line.split() for line in files[1].read_text().splitlines()
            )
        return int(found["InDatagrams"]) + int(found["Udp6InDatagrams"])

    def program(self) -> bool:
        """Returns whether an XDP program is attached to the receiver's end."""
        return "xdp" in run("ip", "-n", self.receiver, "link", "show", self.device)


def open_xdp(wire: PacketWire, host: str, port: int = 0, **settings: Any) -> XdpDriver:
    """AF_XDP on the receiver's end. Skips where the system does not have or allow it."""
    try:
        with wire.inside(wire.receiver):
            return XdpDriver(host, port, wire.device, **settings)
    except DriverUnavailable as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in FORBIDDEN:
            pytest.skip(f"no AF_XDP here: {error}")
        raise


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "setns")


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
