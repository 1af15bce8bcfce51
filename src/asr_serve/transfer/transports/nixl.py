"""NIXL with UCX: the sender writes into the receiver's memory over any network between the two.

The offer holds the metadata of the receiver's NIXL agent: its addresses, and the keys of the receiver's memory
alone. A write is complete when UCX has flushed it, so the bytes are there before the answer on the control
connection; no other notification is needed. With InfiniBand, UCX chooses the network itself. Elsewhere the
receiver uses only the interface that has the address `host`, and the sender the one that leads there: of several,
UCX may choose one that does not, and then tries for minutes. Anyone who can reach the agent and has the offer may
write; nothing is encrypted. An offer names its address twice: in our form, which is compared with the origin of
the offer (`only_at`), and in UCX's packed form, which is not parsed here, so that this process does not limit
where UCX connects. Untrusted peers must be kept out before, by a key and by the network.

Over InfiniBand, deregistered memory cannot be written to, and over TCP the receiver's own agent writes. Within a
machine UCX could write into the other process directly (CMA), also into memory that was released long ago and is
used for something else by then; and its other shared memory does not work between two network namespaces. So both
are disabled here, and shm is the transport within a machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import socket
import struct
import threading
import time
from pathlib import Path

import msgspec
import numpy as np

from asr_serve.errors import OptionError, PeerGone, TransportFailed, TransportTimeout
from asr_serve.transfer import nixl_agent
from asr_serve.transfer.checksum import checksum
from asr_serve.transfer.nixl_agent import NixlAgent, NixlDescriptor
from asr_serve.transfer.transports import base
from asr_serve.transfer.transports.base import BufferRegion, ReceiverOffer

BETWEEN_MACHINES = {"engine_config": "TLS=^sm"}
"""Parameters of UCX that exclude shared memory; the environment's UCX_TLS takes precedence."""
INFINIBAND, IPV6 = Path("/sys/class/infiniband"), Path("/proc/net/if_inet6")
SIOCGIFADDR = 0x8915
"""Number of the ioctl for an interface's first IPv4 address (linux/sockios.h)."""
PAUSE_S = 200e-6
"""Pause between two polls: NIXL has no event to wait for, and TCP's buffers hold what arrives meanwhile."""
SLICE_S = 0.25
"""Interval at which `write_region` checks whether this end was closed."""


def is_available() -> bool:
    return nixl_agent.installed()


def create_receiver(nbytes: int, host: str) -> NixlReceiver:
    return NixlReceiver(nbytes, host)


def attach_sender(offer: ReceiverOffer, only_at: str | None) -> NixlSender:
    return NixlSender(offer, only_at)


class _PolledAgent(NixlAgent):
    """Agent that advances when it is polled. NIXL's own progress thread would occupy a core."""

    def poll(self) -> None:
        with contextlib.suppress(*self._failures):  # failures of one peer, which its control connection detects
            self._agent.get_new_notifs([self._backend])


class NixlReceiver(base.Receiver):
    """Receiver with a thread that polls its agent while a region is leased: over TCP the receiver's agent writes."""

    def __init__(self, nbytes: int, host: str) -> None:
        memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self._agent = _PolledAgent("UCX", BETWEEN_MACHINES | _devices(host))
        try:
            self._agent.register(memory.ctypes.data, nbytes)
            location = msgspec.msgpack.encode((self._agent.metadata(), memory.ctypes.data, host))
        except TransportFailed as error:
            self._agent.close()
            raise OptionError(f"a landing memory of {nbytes} bytes ({error})", todo="take another transport") from error
        super().__init__(ReceiverOffer("nixl", nbytes, base.new_token(), location), memory)
        self._out = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="nixl transport", daemon=True)
        self._thread.start()

    def lease(self, nbytes: int) -> BufferRegion | None:
        spot = super().lease(nbytes)
        self._out.set()
        return spot

    def _serve(self) -> None:
        """Polls the agent; all calls to it are made here from now on."""
        while self._out.wait():
            with self._lock:
                if self._closed:
                    break
                if all(lent.sender_done for lent in self._leased.values()):
                    self._out.clear()
                    continue
            self._agent.poll()
            time.sleep(PAUSE_S)
        self._agent.close()

    def _close_transport(self) -> None:
        self._out.set()
        self._thread.join()


class NixlSender(base.TransportSender):
    def __init__(self, offer: ReceiverOffer, only_at: str | None = None) -> None:
        super().__init__(offer)
        self._lock = threading.Lock()
        self._closed = self._parted = False
        try:
            metadata, self._at, host = msgspec.msgpack.decode(offer.where, type=tuple[bytes, int, str])
            base.expect_address(host, only_at)
            self._agent = NixlAgent("UCX", BETWEEN_MACHINES | _devices(_towards(host)))
        except (msgspec.DecodeError, OSError, ValueError, OptionError) as error:
            raise TransportFailed(
                f"a nixl transport was offered that cannot be reached ({error})", todo="take another"
            ) from error
        try:
            self._peer = self._agent.add_remote(metadata)
        except TransportFailed:
            self._agent.close()
            raise

    def write_region(self, spot: BufferRegion, data: np.ndarray, timeout_s: float) -> int:
        self._validate(spot, data)
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise TransportTimeout(f"the nixl transport was busy for {timeout_s:g} s")
        try:
            self._expect_open()
            digest = self._write(spot, data, deadline)
        except (TransportFailed, PeerGone):
            # A started write may still be in progress: closing the agent stops it from reading `data`.
            self._closed = True
            raise
        finally:
            if self._closed:
                self._part()
            self._lock.release()
        return digest

    def close(self) -> None:
        self._closed = True
        if self._lock.acquire(blocking=False):  # else a concurrent `write_region` closes it
            self._part()
            self._lock.release()

    def _write(self, spot: BufferRegion, data: np.ndarray, until: float) -> int:
        entry = self._agent.register(data.ctypes.data, data.nbytes)
        source, target = (
            NixlDescriptor(data.ctypes.data, data.nbytes),
            NixlDescriptor(self._at + spot.at, data.nbytes),
        )
        with self._agent.start_transfer("WRITE", [source], [target], peer=self._peer) as transfer:
            digest = checksum(data)  # while the bytes are in flight
            while not transfer.poll():
                self._expect_open()
                remaining_s = until - time.monotonic()
                try:
                    transfer.wait(min(max(remaining_s, 0.0), SLICE_S))
                except TransportTimeout:
                    if remaining_s <= SLICE_S:
                        raise TransportTimeout(f"{data.nbytes} bytes were not there by nixl in time") from None
                except TransportFailed as error:
                    raise PeerGone(f"the other end of a nixl transport is gone ({error})") from error
        self._agent.deregister(entry)
        return digest

    def _part(self) -> None:
        if not self._parted:
            self._parted = True
            self._agent.remove_remote(self._peer)
            self._agent.close()

    def _expect_open(self) -> None:
        if self._closed:
            raise PeerGone("this end of the nixl transport is closed")


def _devices(host: str) -> dict[str, str]:
    """Returns UCX's devices to use; empty where it chooses itself."""
    if any(INFINIBAND.glob("*")):
        return {}
    name = _interface(host)
    return {"ucx_devices": name} if name else {}


def _towards(host: str) -> str:
    """Returns this machine's address on the way to another. Nothing is sent for that. Raises OSError."""
    family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _interface(host: str) -> str | None:
    """Returns the network interface with this address. Raises OptionError where it is no address."""
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise OptionError(f"host={host!r} ({error})", "an address of this machine", param="host") from error
    packed_address = socket.inet_pton(family, str(address[0]).partition("%")[0])
    if family == socket.AF_INET6:
        rows = [line.split() for line in IPV6.read_text().splitlines()] if IPV6.exists() else []
        return next((row[-1] for row in rows if bytes.fromhex(row[0]) == packed_address), None)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if answer[20:24] == packed_address:
                    return name
    return None
