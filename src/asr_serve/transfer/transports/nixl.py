"""NIXL with UCX: the sender writes into the landing memory by whatever network lies between the two.

The offer holds what NIXL tells of the landing's agent: its addresses, and the keys of the landing memory alone. A
write is done when UCX has flushed it, so it is there before the answer on the control connection; nothing has to
be notified besides. Where there is InfiniBand, UCX chooses the network itself. Elsewhere the landing uses nothing
but the interface that has the address `host`, and the sender the one that leads there: of several, UCX may choose
one that does not, and then tries for minutes. Whoever can reach the agent and has the offer may write; nothing is
encrypted. An offer names its address in our own words, which is compared with where the offer comes from
(`only_at`), and once more in UCX's: those are packed as UCX likes, are not read here, and where UCX connects is
not bounded by this process. Who must not choose that has to be kept out before, by a key and by the network.

Over InfiniBand, memory that is registered no more cannot be written to, and over TCP it is the landing's own agent
that writes. Within a machine UCX could write into the other process without asking anybody (CMA), also into memory
that was given back long ago and is used for something else by then; and its other shared memory does not work
between two network namespaces. So both are left out here, and shm is the road within a machine.
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

from asr_serve.errors import OptionError, PeerGone, RoadFailed, RoadTimeout
from asr_serve.transfer import nixl_agent
from asr_serve.transfer.checksum import checksum
from asr_serve.transfer.nixl_agent import NixlAgent, NixlDescriptor
from asr_serve.transfer.transports import base
from asr_serve.transfer.transports.base import BufferRegion, ReceiverOffer

BETWEEN_MACHINES = {"engine_config": "TLS=^sm"}
"""UCX without what it has for one machine; who sets UCX_TLS chooses for himself."""
INFINIBAND, IPV6 = Path("/sys/class/infiniband"), Path("/proc/net/if_inet6")
SIOCGIFADDR = 0x8915
"""The first IPv4 address of an interface, as Linux numbers the question (linux/sockios.h)."""
PAUSE_S = 200e-6
"""Between two questions: NIXL has no event to wait for, and TCP's buffers hold what comes meanwhile."""
SLICE_S = 0.25
"""How long `put` waits before it looks whether this end was closed."""


def is_available() -> bool:
    return nixl_agent.installed()


def create_receiver(nbytes: int, host: str) -> NixlReceiver:
    return NixlReceiver(nbytes, host)


def attach_sender(offer: ReceiverOffer, only_at: str | None) -> NixlSender:
    return NixlSender(offer, only_at)


class _PolledAgent(NixlAgent):
    """One that works on what comes when it is asked. NIXL's own thread for that never rests: it takes a core."""

    def poll(self) -> None:
        with contextlib.suppress(*self._failures):  # of one peer, which its control connection tells
            self._agent.get_new_notifs([self._backend])


class NixlReceiver(base.Receiver):
    """Over TCP it is the landing's agent that writes what comes, so a thread asks it to, while a spot is out."""

    def __init__(self, nbytes: int, host: str) -> None:
        memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self._agent = _PolledAgent("UCX", BETWEEN_MACHINES | _devices(host))
        try:
            self._agent.register(memory.ctypes.data, nbytes)
            where = msgspec.msgpack.encode((self._agent.metadata(), memory.ctypes.data, host))
        except RoadFailed as error:
            self._agent.close()
            raise OptionError(f"a landing memory of {nbytes} bytes ({error})", todo="take another road") from error
        super().__init__(ReceiverOffer("nixl", nbytes, base.new_token(), where), memory)
        self._out = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="nixl road", daemon=True)
        self._thread.start()

    def lease(self, nbytes: int) -> BufferRegion | None:
        spot = super().lease(nbytes)
        self._out.set()
        return spot

    def _serve(self) -> None:
        """Every call to the agent is made here from now on."""
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
            raise RoadFailed(
                f"a nixl road is offered that leads nowhere ({error})", todo="take another"
            ) from error
        try:
            self._peer = self._agent.add_remote(metadata)
        except RoadFailed:
            self._agent.close()
            raise

    def write_region(self, spot: BufferRegion, data: np.ndarray, timeout_s: float) -> int:
        self._validate(spot, data)
        until = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise RoadTimeout(f"a nixl road was taken for {timeout_s:g} s")
        try:
            self._expect_open()
            found = self._write(spot, data, until)
        except (RoadFailed, PeerGone):
            self._closed = (
                True  # what was begun may still be under way: the agent ends here, and reads `data` no more
            )
            raise
        finally:
            if self._closed:
                self._part()
            self._lock.release()
        return found

    def close(self) -> None:
        self._closed = True
        if self._lock.acquire(blocking=False):  # else the `put` under way sees it
            self._part()
            self._lock.release()

    def _write(self, spot: BufferRegion, data: np.ndarray, until: float) -> int:
        entry = self._agent.register(data.ctypes.data, data.nbytes)
        here, there = (
            NixlDescriptor(data.ctypes.data, data.nbytes),
            NixlDescriptor(self._at + spot.at, data.nbytes),
        )
        with self._agent.start_transfer("WRITE", [here], [there], peer=self._peer) as transfer:
            found = checksum(data)  # while it is on its way
            while not transfer.poll():
                self._expect_open()
                left = until - time.monotonic()
                try:
                    transfer.wait(min(max(left, 0.0), SLICE_S))
                except RoadTimeout:
                    if left <= SLICE_S:
                        raise RoadTimeout(f"{data.nbytes} bytes were not there by nixl in time") from None
                except RoadFailed as error:
                    raise PeerGone(f"the other end of a nixl road is gone ({error})") from error
        self._agent.deregister(entry)
        return found

    def _part(self) -> None:
        if not self._parted:
            self._parted = True
            self._agent.remove_remote(self._peer)
            self._agent.close()

    def _expect_open(self) -> None:
        if self._closed:
            raise PeerGone("this end of the nixl road is closed")


def _devices(host: str) -> dict[str, str]:
    """Which of UCX's to use; nothing where it shall choose."""
    if any(INFINIBAND.glob("*")):
        return {}
    name = _interface(host)
    return {"ucx_devices": name} if name else {}


def _towards(host: str) -> str:
    """Our own address on the way to another. Nothing is sent for that. Raises OSError."""
    family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        asked.connect(address)
        return str(asked.getsockname()[0])


def _interface(host: str) -> str | None:
    """The network interface that has this address as its own. Raises OptionError where it is no address."""
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise OptionError(f"host={host!r} ({error})", "an address of this machine", param="host") from error
    wanted = socket.inet_pton(family, str(address[0]).partition("%")[0])
    if family == socket.AF_INET6:
        rows = [line.split() for line in IPV6.read_text().splitlines()] if IPV6.exists() else []
        return next((row[-1] for row in rows if bytes.fromhex(row[0]) == wanted), None)
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                found = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if found[20:24] == wanted:
                    return name
    return None
