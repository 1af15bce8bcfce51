"""RTP packets to Python: the edge's driver beside plain asyncio UDP, over loopback.

    python bench/edge.py --json edge.json

Each driver receives the same packets in a fresh process, which checks the sequence numbers of each stream and the age
of each packet. README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import socket
import statistics
import struct
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from asr_serve.edge.packet_driver import RECEIVE_BUFFER_BYTES, RecvmmsgDriver, parse_source

PACKETS_PER_S = 50
"""Packets of one stream: 20 ms each."""
PAYLOAD = bytes(152)
"""With the 8 bytes of the time of sending: 20 ms of G.711."""
PACKET = struct.Struct("=HHIIQ")
"""First bytes in network order, which nobody reads; sequence number, timestamp, SSRC, time of sending in ns."""
FIRST = int.from_bytes(b"\x80\x00", sys.byteorder)
SLICE_S = 0.001
TIMEOUT_S = 30.0
SPAWN = multiprocessing.get_context("spawn")


class Account:
    """What a process has received: of each stream the packets, and the age of each."""

    def __init__(self) -> None:
        self.packets = 0
        self.next: dict[int, int] = {}
        self.out_of_order = 0
        self.ages_ns: list[int] = []

    def take(self, datagram: memoryview | bytes) -> None:
        _, sequence, _, ssrc, sent_ns = PACKET.unpack_from(datagram)
        self.out_of_order += sequence != self.next.get(ssrc, 0)
        self.next[ssrc] = (sequence + 1) & 0xFFFF
        self.packets += 1
        self.ages_ns.append(time.monotonic_ns() - sent_ns)


def receive_by_recvmmsg(control: Connection) -> Account:
    account = Account()
    driver = RecvmmsgDriver("127.0.0.1", 0)
    driver.admit_source(1, parse_source("127.0.0.1"), 1e7, 1e7)
    control.send(driver.port)
    while not control.poll():
        batch = driver.receive(100)
        if batch is not None:
            for _, _, payload, _ in batch.datagrams:
                account.take(payload)
            batch.release()
    driver.close()
    return account


def receive_by_asyncio(control: Connection) -> Account:
    account = Account()

    class Receiver(asyncio.DatagramProtocol):
        def datagram_received(self, data: bytes, address: Any) -> None:
            account.take(data)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(Receiver, ("127.0.0.1", 0))
        bound: socket.socket = transport.get_extra_info("socket")
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        if hasattr(socket, "SO_RCVBUFFORCE"):
            try:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES)
            except OSError:
                print("asyncio: the kernel's buffer stays at its limit", file=sys.stderr)
        control.send(bound.getsockname()[1])
        over = asyncio.Event()
        loop.add_reader(control.fileno(), over.set)
        await over.wait()
        loop.remove_reader(control.fileno())
        transport.close()

    asyncio.run(run())
    return account


DRIVERS = {"recvmmsg": receive_by_recvmmsg, "asyncio": receive_by_asyncio}
"""A driver past the kernel's stack joins this table; it wants an interface of its own to send from."""


def receive(driver: str, control: Connection) -> None:
    """The receiving process: tells its port, and its account when it is told to stop."""
    started = resource.getrusage(resource.RUSAGE_SELF)
    account = DRIVERS[driver](control)
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = used.ru_utime + used.ru_stime - started.ru_utime - started.ru_stime
    quantiles = statistics.quantiles(account.ages_ns, n=100) if len(account.ages_ns) > 1 else [0.0] * 99
    control.send((account.packets, account.out_of_order, cpu_s, quantiles[49], quantiles[98]))


def measure(driver: str, streams: int, seconds: float) -> dict[str, Any]:
    """Sends that many streams in real time, spread evenly."""
    control, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=receive, args=(driver, theirs), daemon=True)
    process.start()
    theirs.close()
    if not control.poll(TIMEOUT_S):
        raise RuntimeError(f"{driver} did not begin within {TIMEOUT_S:g} s")
    to = "127.0.0.1", control.recv()
    sent, begun_s = 0, time.monotonic()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.bind(("127.0.0.1", 0))
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
    packets, out_of_order, cpu_s, p50_ns, p99_ns = control.recv()
    process.join(TIMEOUT_S)
    return {
        "name": "asr-serve" if driver == "recvmmsg" else driver,
        "driver": driver,
        "streams": streams,
        "pps": round(sent / took_s),
        "cpu_share": round(cpu_s / took_s, 4),
        "packets_per_core_s": round(packets / cpu_s),
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
    parser.add_argument("--repeats", type=int, default=3, help="turns of all drivers; the best of each is shown")
    options = parser.parse_args()
    described = machine.describe(1)
    best: dict[tuple[int, str], dict[str, Any]] = {}
    for _ in range(options.repeats):
        for streams in map(int, options.streams.split(",")):
            for driver in options.drivers.split(","):
                row = measure(driver, streams, options.seconds)
                before = best.get((streams, driver))
                if before is None or row["packets_per_core_s"] > before["packets_per_core_s"]:
                    best[streams, driver] = row
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
