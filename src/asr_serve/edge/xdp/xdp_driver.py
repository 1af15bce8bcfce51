"""Driver past the kernel's stack: an XDP program hands the edge's datagrams to AF_XDP sockets, whose rings this process
reads. What the program does not take comes by the ordinary socket of the same port, which is read too.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import mmap
import os
import socket
import struct
import sys
import time
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from asr_serve import kernels
from asr_serve.edge.packet_driver import GATHER_MS, SocketDriver, bind_udp, receiver_settings
from asr_serve.edge.xdp.build_filter import BUILT
from asr_serve.edge.xdp.filter_object import read_filter
from asr_serve.edge.xdp.network_interface import NetworkInterface, list_interfaces
from asr_serve.errors import OptionError
from asr_serve.kernels.packets_reference import source_key
from asr_serve.types import is_address

FRAME_BYTES = 2_048
FRAMES = 8_192
"""Frames of one queue, 16 MiB: a third of a second of 512 callers."""
MAX_FRAMES = 32_768
"""Frames of all queues, beyond which each has fewer."""
MAX_QUEUES = 16
"""Queues with a socket; what comes by others is left to the kernel."""
MAX_ADDRESSES = 256
FREED_S = 2.0
"""Longest time after which the kernel has freed the queue of a process that has ended."""
LICENSE = "Apache-2.0"
"""The program calls no function of the kernel that wants another."""
AF_XDP = 44
GENERIC, NATIVE = 2, 4
"""XDP_FLAGS of the link. No link replaces another program."""
MAP_HUGETLB = 0x40000
MEND = "see `asr-serve doctor --edge`, or take --driver recvmmsg"


class DriverUnavailable(OptionError):
    """The edge cannot take packets by AF_XDP here."""

    def __init__(self, came: str, allowed: str = "", todo: str = MEND) -> None:
        super().__init__(came, allowed, todo, param="driver")


class XdpDriver(SocketDriver):
    """Driver by AF_XDP, with a socket for each queue of an interface. Raises DriverUnavailable, OptionError.

    A process that ends in whatever way leaves nothing behind: program, sockets and maps end with their descriptors.
    """

    name = "af_xdp"

    def __init__(
        self, host: str, port: int, interface: str, *, gather_ms: float = GATHER_MS, busy_poll_us: int = 0
    ) -> None:
        native = native_module()
        device = find_interface(interface)
        with ExitStack() as undo:
            bound = undo.enter_context(bind_udp(host, port))
            addresses = _addresses(device, host)
            sockets, zero_copy, huge = _open_sockets(native, device, busy_poll_us)
            for each in sockets:
                undo.callback(each.close)
            mode, descriptors = _load(
                native, device, bound.getsockname()[1], addresses, [each.fileno() for each in sockets]
            )
            for descriptor in descriptors:
                undo.callback(os.close, descriptor)
            receiver = native.PacketReceiver([bound.fileno()], sockets, **receiver_settings(gather_ms))
            undo.callback(receiver.close)
            self.mode, self.zero_copy, self.queues = mode, zero_copy, len(sockets)
            copies = "zero-copy" if zero_copy else "copy mode"
            pages = "huge pages" if huge else "ordinary pages"
            self.details = (
                f"AF_XDP on {device.name}: {mode} mode, {copies}, {len(sockets)} of {device.queues} queues, {pages}"
            )
            super().__init__(bound, receiver)
            self._undo = undo.pop_all()

    def close(self) -> None:
        self._undo.close()


def native_module() -> ModuleType:
    """Native receiver. Raises DriverUnavailable."""
    module = kernels.native_packets()
    if module is None:
        raise DriverUnavailable(
            "the native receiver is not built, or this is no Linux", "AF_XDP needs it", "make setup"
        )
    if sys.byteorder != "little":
        raise DriverUnavailable("this machine is big-endian", "the XDP program is built for little-endian ones")
    return module


def find_interface(name: str) -> NetworkInterface:
    """Facts about an interface that can have the driver. Raises DriverUnavailable."""
    try:
        found = list_interfaces()
    except OSError as error:
        raise DriverUnavailable(f"the interfaces cannot be listed: {error.strerror}") from error
    names = ", ".join(each.name for each in found if not each.loopback) or "none"
    for each in found:
        if each.name == name:
            if not each.up:
                raise DriverUnavailable(
                    f"{name} is down", "AF_XDP needs an interface that is up", f"ip link set {name} up"
                )
            return each
    raise DriverUnavailable(f"no interface {name[:40]!r}", f"interfaces here: {names}", "choose one with --interface")


def try_loading() -> None:
    """Opens an AF_XDP socket and has the program verified by this kernel, without any interface. Raises
    DriverUnavailable."""
    native = native_module()
    made = read_filter(BUILT)
    try:
        socket.socket(AF_XDP, socket.SOCK_RAW).close()
        with ExitStack() as undo:
            maps = {}
            for name, each in made.maps.items():
                maps[name] = native.create_map(*each)
                undo.callback(os.close, maps[name])
            os.close(native.load_program(made.linked(maps), LICENSE))
    except OSError as error:
        raise _refused(error, "this host") from error


def _addresses(device: NetworkInterface, host: str) -> list[str]:
    """Addresses of the interface that are the edge's: datagrams for others, that this host may forward, are not."""
    address = ipaddress.ip_address(host) if is_address(host) else None
    if address is None:
        raise DriverUnavailable(f"host={host!r} is no address", "AF_XDP compares addresses", "give the address itself")
    if address.is_unspecified:
        wanted = [each for each in device.addresses if ":" not in each or address.version == 6]
    else:
        wanted = [each for each in device.addresses if each == str(address)]
    if not wanted:
        raise DriverUnavailable(
            f"{device.name} has no address {host}",
            f"its addresses: {', '.join(device.addresses) or 'none'}",
            "choose another --host or --interface",
        )
    return wanted[:MAX_ADDRESSES]


def _open_sockets(native: ModuleType, device: NetworkInterface, busy_poll_us: int) -> tuple[list[Any], bool, bool]:
    """Sockets of the interface's queues; whether frames are shared with the card, and lie on huge pages."""
    count = min(device.queues, MAX_QUEUES)
    frames = FRAMES
    while frames * count > MAX_FRAMES:
        frames //= 2
    sockets: list[Any] = []
    huge = True
    end_s = time.monotonic() + FREED_S
    zero_copy = device.features is None or "zero-copy" in device.features
    try:
        for queue in range(count):
            memory, is_huge = _memory(frames * FRAME_BYTES)
            settings = {"frame_bytes": FRAME_BYTES, "ring": frames, "interface": device.index, "queue": queue}
            while True:
                try:
                    made = native.XdpSocket(memory, **settings, zero_copy=zero_copy, busy_poll_us=busy_poll_us)
                except OSError as error:
                    if zero_copy and not sockets and error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTSUP):
                        zero_copy = False
                        continue
                    if sockets and error.errno == errno.EINVAL:
                        return sockets, zero_copy, huge  # fewer queues are in use than there may be
                    if error.errno == errno.EBUSY and time.monotonic() < end_s:
                        time.sleep(FREED_S / 100)  # nothing tells when it is free
                        continue
                    raise
                break
            sockets.append(made)
            huge = huge and is_huge
    except OSError as error:
        for each in sockets:
            each.close()
        raise _refused(error, device.name) from error
    return sockets, zero_copy, huge


def _memory(size: int) -> tuple[mmap.mmap, bool]:
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        return mmap.mmap(-1, size, flags=private | MAP_HUGETLB), True
    except OSError:
        made = mmap.mmap(-1, size, flags=private)
        with contextlib.suppress(OSError):  # transparent ones, where the kernel has them: as good, but not certain
            made.madvise(mmap.MADV_HUGEPAGE)
        return made, False


def _load(
    native: ModuleType, device: NetworkInterface, port: int, addresses: list[str], sockets: list[int]
) -> tuple[str, list[int]]:
    """Loads the program and attaches it: natively where the driver can, else by the kernel's generic mode. Returns the
    mode, and what is to be closed."""
    made = read_filter(BUILT)
    with ExitStack() as undo:
        maps = {}
        try:
            for name, each in made.maps.items():
                maps[name] = native.create_map(*each)
                undo.callback(os.close, maps[name])
            one = struct.pack("=I", 1)
            native.update_map(maps["ports"], port.to_bytes(2, "big"), one)
            for address in addresses:
                native.update_map(maps["addresses"], source_key(address, 0)[:16], one)
            for queue, fd in enumerate(sockets):
                native.update_map(maps["sockets"], struct.pack("=I", queue), struct.pack("=I", fd))
            program = native.load_program(made.linked(maps), LICENSE)
            undo.callback(os.close, program)
            mode, link = _attach(native, program, device)
        except OSError as error:
            raise _refused(error, device.name) from error
        undo.pop_all()
    return mode, [link, program, *maps.values()]


def _attach(native: ModuleType, program: int, device: NetworkInterface) -> tuple[str, int]:
    try:
        return "native", native.attach_program(program, device.index, NATIVE)
    except OSError as error:
        refused = error
    link = native.attach_program(program, device.index, GENERIC)
    return f"generic (its driver refuses native mode: {os.strerror(refused.errno or 0)})", link


def _refused(error: OSError, place: str) -> DriverUnavailable:
    came = f"AF_XDP on {place} was refused: {error.strerror}"
    match error.errno:
        case errno.EPERM | errno.EACCES:
            return DriverUnavailable(came, "it needs CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF")
        case errno.EBUSY | errno.EEXIST:
            return DriverUnavailable(came, f"{place} has an XDP program, or its queues are another socket's")
        case errno.ENOBUFS | errno.ENOMEM:
            return DriverUnavailable(
                came, "the memory of its frames must be locked: CAP_IPC_LOCK, or ulimit -l unlimited"
            )
        case errno.EAFNOSUPPORT | errno.ENOSYS:
            return DriverUnavailable(came, "the kernel needs CONFIG_XDP_SOCKETS and CONFIG_BPF_SYSCALL")
    return DriverUnavailable(came)
