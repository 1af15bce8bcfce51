"""RTP packets to Python: the edge's drivers beside plain asyncio UDP, over a wire between two network namespaces.

    python bench/edge.py --json edge.json

Each driver receives the same packets in a fresh process, which checks the sequence numbers of each stream and the age
of each packet. Without root there is no wire: loopback stands in for it, and there is no AF_XDP. README.md says how to
read the result.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import multiprocessing
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import machine
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from asr_serve.edge.packet_driver import RECEIVE_BUFFER_BYTES, PacketDriver, RecvmmsgDriver, parse_source
from asr_serve.edge.xdp.xdp_driver import XdpDriver

PACKETS_PER_S = 50
"""Packets of one stream: 20 ms each."""
PAYLOAD = bytes(152)
"""With the 8 bytes of the time of sending: 20 ms of G.711."""
PACKET = struct.Struct("=HHIIQ")
"""First bytes in network order, which nobody reads; sequence number, timestamp, SSRC, time of sending in ns."""
FIELDS = np.dtype([("first", "u2"), ("sequence", "u2"), ("timestamp", "u4"), ("ssrc", "u4"), ("sent_ns", "i8")])
DATAGRAM = np.dtype([("head", FIELDS), ("payload", "V", len(PAYLOAD))])
FIRST = int.from_bytes(b"\x80\x00", sys.byteorder)
SLICE_S = 0.001
ACCOUNT_BATCH = 64
"""Packets that came one by one and are noted together: every driver pays the same for the account."""
TIMEOUT_S = 30.0
SPAWN = multiprocessing.get_context("spawn")
CLONE_NEWNET = 0x40000000


class Link(NamedTuple):
    """Where packets go: addresses of both ends, and for a wire the device and the namespaces."""

    sender: str = "127.0.0.1"
    receiver: str = "127.0.0.1"
    device: str = ""
    namespaces: tuple[str, str] | None = None
    """Sender's and receiver's."""

    @contextlib.contextmanager
    def inside(self, end: int) -> Iterator[None]:
        """This thread, and children that it starts, are at an end: 0 the sender's, 1 the receiver's."""
        if self.namespaces is None:
            yield
            return
        with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{self.namespaces[end]}") as there:
            enter(there.fileno())
            try:
                yield
            finally:
                enter(home.fileno())


def enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


@contextlib.contextmanager
def open_link() -> Iterator[Link]:
    """A veth pair between two namespaces, or loopback where there can be none."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=TIMEOUT_S)

    names = f"bench-callers-{os.getpid()}", f"bench-edge-{os.getpid()}"
    if os.geteuid() != 0:
        print("no root: over loopback, without AF_XDP", file=sys.stderr)
        yield Link()
        return
    link = Link("10.92.0.1", "10.92.0.2", "rtp0", names)
    with contextlib.ExitStack() as undo:
        for name in names:
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
        ip("-n", names[1], "link", "add", "rtp0", "type", "veth", "peer", "name", "rtp1", "netns", names[0])
        for name, device, address in ((names[0], "rtp1", link.sender), (names[1], "rtp0", link.receiver)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
        yield link


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Account:
    """Record of what a process has received, checked when it is over."""

    def __init__(self) -> None:
        self._batches: list[tuple[bytes, int, int]] = []
        """Packets, the time, and how many of the last of them came at that time."""
        self._waiting: list[bytes] = []
        self.cpu_s = 0.0

    def begin(self) -> None:
        """Processor time counts from here, where the driver is open, to `end`."""
        self.cpu_s = -cpu_s()

    def end(self) -> None:
        self.cpu_s += cpu_s()

    def take_batch(self, datagrams: list[bytes]) -> None:
        self._batches.append((b"".join(datagrams), time.monotonic_ns(), len(datagrams)))

    def take(self, datagram: bytes) -> None:
        """Takes a packet that came alone. As in a batch, one join and one look at the clock stand for many packets; the
        age is that of the last of them."""
        self._waiting.append(datagram)
        if len(self._waiting) == ACCOUNT_BATCH:
            self._batches.append((b"".join(self._waiting), time.monotonic_ns(), 1))
            self._waiting.clear()

    def result(self) -> tuple[int, int, float, float]:
        """Packets, those out of order in their stream, and ages in ns: median and 99th percentile."""
        heads = [np.frombuffer(data, DATAGRAM)["head"] for data, _, _ in self._batches]
        ages = [now - head["sent_ns"][-aged:] for head, (_, now, aged) in zip(heads, self._batches, strict=True)]
        if not heads:
            return len(self._waiting), 0, 0.0, 0.0
        if self._waiting:
            heads.append(np.frombuffer(b"".join(self._waiting), DATAGRAM)["head"])
        head, age = np.concatenate(heads), np.concatenate(ages)
        order = np.argsort(head["ssrc"], kind="stable")
        sequence, ssrc = head["sequence"][order].astype(np.int64), head["ssrc"][order]
        same = ssrc[1:] == ssrc[:-1]
        out_of_order = int(((sequence[1:] - sequence[:-1])[same] != 1).sum())
        return len(head), out_of_order, float(np.median(age)), float(np.percentile(age, 99))


def receive_by(driver: PacketDriver, link: Link, control: Connection, account: Account) -> None:
    driver.admit_source(1, parse_source(link.sender), 1e7, 1e7)
    print(driver.details, file=sys.stderr)
    over = threading.Event()

    def wait() -> None:
        control.recv()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    account.begin()
    control.send(driver.port)
    while not over.is_set():
        if batch := driver.receive(100):
            account.take_batch([payload for _, _, payload, _ in batch])
    account.end()
    driver.close()


def receive_by_recvmmsg(link: Link, control: Connection, account: Account) -> None:
    receive_by(RecvmmsgDriver(link.receiver, 0), link, control, account)


def receive_by_af_xdp(link: Link, control: Connection, account: Account) -> None:
    receive_by(XdpDriver(link.receiver, 0, link.device), link, control, account)


def receive_by_asyncio(link: Link, control: Connection, account: Account) -> None:
    class Receiver(asyncio.DatagramProtocol):
        def datagram_received(self, data: bytes, address: Any) -> None:
            account.take(data)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(Receiver, (link.receiver, 0))
        bound: socket.socket = transport.get_extra_info("socket")
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        if hasattr(socket, "SO_RCVBUFFORCE"):
            try:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES)
            except OSError:
                print("asyncio: the kernel's buffer stays at its limit", file=sys.stderr)
        account.begin()
        control.send(bound.getsockname()[1])
        over = asyncio.Event()
        loop.add_reader(control.fileno(), over.set)
        await over.wait()
        account.end()
        loop.remove_reader(control.fileno())
        transport.close()

    asyncio.run(run())


DRIVERS = {"af_xdp": receive_by_af_xdp, "recvmmsg": receive_by_recvmmsg, "asyncio": receive_by_asyncio}


def receive(driver: str, link: Link, control: Connection) -> None:
    """The receiving process: tells its port, and its account when it is told to stop."""
    account = Account()
    DRIVERS[driver](link, control, account)
    control.send((*account.result(), account.cpu_s))


def measure(driver: str, streams: int, seconds: float, link: Link) -> dict[str, Any]:
    """Sends that many streams in real time, spread evenly."""
    control, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=receive, args=(driver, link, theirs), daemon=True)
    with link.inside(1):
        process.start()
    theirs.close()
    if not control.poll(TIMEOUT_S):
        raise RuntimeError(f"{driver} did not begin within {TIMEOUT_S:g} s")
    to = link.receiver, control.recv()
    with link.inside(0):
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sent, begun_s = 0, time.monotonic()
    with sender:
        sender.bind((link.sender, 0))
        while (now_s := time.monotonic() - begun_s) < seconds:
            due = int(now_s * streams * PACKETS_PER_S)
            while sent < due:
                number, ssrc = divmod(sent, streams)
                head = PACKET.pack(FIRST, number & 0xFFFF, number * 160 & 0xFFFFFFFF, ssrc, time.monotonic_ns())
                sender.sendto(head + PAYLOAD, to)
                sent += 1
            time.sleep(SLICE_S)
        took_s = time.monotonic() - begun_s
        time.sleep(0.5)
        control.send("stop")
    if not control.poll(TIMEOUT_S):
        raise RuntimeError(f"{driver} did not end within {TIMEOUT_S:g} s")
    packets, out_of_order, p50_ns, p99_ns, used_s = control.recv()
    process.join(TIMEOUT_S)
    return {
        "name": "asyncio" if driver == "asyncio" else "asr-serve",
        "driver": driver,
        "streams": streams,
        "pps": round(sent / took_s),
        "cpu_share": round(used_s / took_s, 4),
        "packets_per_core_s": round(packets / used_s),
        "lost": sent - packets,
        "out_of_order": out_of_order,
        "p50_us": round(p50_ns / 1e3),
        "p99_us": round(p99_ns / 1e3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the result")
    parser.add_argument("--drivers", default=",".join(DRIVERS), help=f"any of {', '.join(DRIVERS)}")
    parser.add_argument("--streams", default="64,512,2048", help="streams of 50 packets a second")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each row")
    parser.add_argument("--repeats", type=int, default=3, help="turns: each driver's best, and the most it lost")
    options = parser.parse_args()
    described = machine.describe(1)
    best: dict[tuple[int, str], dict[str, Any]] = {}
    with open_link() as link:
        drivers = [name for name in options.drivers.split(",") if name != "af_xdp" or link.device]
        for _ in range(options.repeats):
            for streams in map(int, options.streams.split(",")):
                for driver in drivers:
                    row = measure(driver, streams, options.seconds, link)
                    before = best.get((streams, driver), row)
                    lost = max(row["lost"], before["lost"])
                    if row["packets_per_core_s"] < before["packets_per_core_s"]:
                        row = before
                    best[streams, driver] = row | {"lost": lost}
    columns = ("driver", "streams", "pps", "cpu_share", "packets_per_core_s", "lost", "p50_us", "p99_us")
    print(" ".join(f"{column:>18}" for column in columns))
    for row in best.values():
        print(" ".join(f"{row[column]:>18}" for column in columns))
    if options.json is not None:
        options.json.write_text(
            json.dumps({"bench": "edge", "machine": described, "rows": list(best.values())}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
