"""PCM from one process to another: the shared-memory ring, its Python reference, and what everybody has.

    python bench/ring.py --json ring.json

Each transport carries the same arrays from this process to a fresh one, which ends with an array of its own. README.md
says how to read the result.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, Protocol

import machine
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from asr_serve import kernels
from asr_serve.transfer import ring
from asr_serve.transfer.ring import PcmReader, PcmWriter

SIZES = {"2 KiB": 2 << 10, "512 KiB": 512 << 10}
"""32 ms of float32 at 16 kHz, one window of voice activity; and 8 s, an utterance."""
PENDING_BYTES, PENDING_MESSAGES = 16 << 20, 1_024
"""What may wait in a queue: as much as in the ring."""
PAUSE_S = 1e-3
"""Between two messages when latency is measured: the receiver sleeps by then."""
WARM_UP = 20
TIMEOUT_S = 120.0
LAST = -1

Array = np.ndarray[Any, np.dtype[np.int64]]
Receive = Callable[[int], Array]
SPAWN = multiprocessing.get_context("spawn")


class Transport(Protocol):
    """This process's end. `there` goes to the other process and becomes a Receive by `opened`."""

    there: Any

    def connect(self) -> None:
        """The other process has started."""

    def send(self, message: Array) -> None:
        """The caller may write into `message` again when this returns."""

    def close(self) -> None: ...


class Ring:
    """Ours, as the server uses it: PcmWriter and PcmReader."""

    def __init__(self, message_bytes: int) -> None:
        self._fd, _ = ring.create()
        self._bell, self.there = socket.socketpair()
        self._writer = PcmWriter(self._fd, self._bell)

    def connect(self) -> None:
        self.there.close()
        socket.send_fds(self._bell, [b"!"], [self._fd])
        os.close(self._fd)

    def send(self, message: Array) -> None:
        self._writer.write_message(0, message)

    def close(self) -> None:
        self._writer.close()

    @staticmethod
    def opened(there: socket.socket) -> Receive:
        _, fds, _, _ = socket.recv_fds(there, 1, 1)
        reader = PcmReader(fds[0], there)
        return lambda count: reader.read_message(0, count, np.int64)


class ProcessQueue:
    """multiprocessing.Queue. It is handed bytes: of all it can pickle they are the quickest."""

    def __init__(self, message_bytes: int) -> None:
        self.there: Queue[bytes] = SPAWN.Queue(min(PENDING_MESSAGES, PENDING_BYTES // message_bytes))

    def connect(self) -> None:
        pass

    def send(self, message: Array) -> None:
        self.there.put(message.tobytes())

    def close(self) -> None:
        self.there.close()
        self.there.join_thread()

    @staticmethod
    def opened(there: Queue[bytes]) -> Receive:
        return lambda count: np.frombuffer(there.get(), np.int64)


class UnixSocket:
    """A stream socket pair with its default buffers: sixteen bytes that announce the message, then the message."""

    HEAD = struct.Struct("=QQ")

    def __init__(self, message_bytes: int) -> None:
        self._end, self.there = socket.socketpair()

    def connect(self) -> None:
        self.there.close()

    def send(self, message: Array) -> None:
        data = message.data.cast("B")
        sent = self._end.sendmsg([self.HEAD.pack(0, len(data)), data]) - self.HEAD.size
        if sent < len(data):
            self._end.sendall(data[sent:])

    def close(self) -> None:
        self._end.close()

    @classmethod
    def opened(cls, there: socket.socket) -> Receive:
        head = bytearray(cls.HEAD.size)

        def receive(count: int) -> Array:
            there.recv_into(head, 0, socket.MSG_WAITALL)
            _, nbytes = cls.HEAD.unpack(head)
            message = np.empty(nbytes // 8, np.int64)
            there.recv_into(message.data.cast("B"), 0, socket.MSG_WAITALL)
            return message

        return receive


TRANSPORTS: dict[str, tuple[type[Any], str]] = {
    "asr-serve": (Ring, "1"),
    "asr-serve reference": (Ring, "0"),
    "multiprocessing.Queue": (ProcessQueue, "1"),
    "unix socket": (UnixSocket, "1"),
}
"""Name to class and ASR_SERVE_NATIVE, for both processes."""


# --- the other process --------------------------------------------------------------------------------


def consume(kind: type[Any], there: Any, count: int, results: Connection) -> None:
    """Receives until LAST; tells when the first and the last came, how many, and how old each was, in ns.

    The first two numbers of a message are when it was sent and which one it is.
    """
    receive: Receive = kind.opened(there)
    results.send("ready")
    ages, first_ns, now_ns, expected = [], 0, 0, 0
    while True:
        message = receive(count)
        now_ns = time.monotonic_ns()
        sent_ns, number = int(message[0]), int(message[1])
        if number == LAST:
            break
        if number != expected or len(message) != count or message[-1] != number:
            raise RuntimeError(f"message {expected} came as {number}, {len(message)} numbers")
        expected += 1
        first_ns = first_ns or now_ns
        ages.append(now_ns - sent_ns)
    results.send((now_ns - first_ns, len(ages), ages))


# --- this process -------------------------------------------------------------------------------------


def carry(
    name: str, message_bytes: int, messages: int, seconds: float = 0.0, pause_s: float = 0.0
) -> tuple[int, int, list[int]]:
    """Send so many messages, and go on until so many seconds are over; what the other process tells."""
    kind, os.environ["ASR_SERVE_NATIVE"] = TRANSPORTS[name]
    transport: Transport = kind(message_bytes)
    here, results = SPAWN.Pipe()
    message = np.zeros(message_bytes // 8, np.int64)
    other = SPAWN.Process(target=consume, args=(kind, transport.there, len(message), results), daemon=True)
    other.start()
    results.close()
    transport.connect()
    try:
        answer(here)
        end, number = time.monotonic() + seconds, 0
        while number < messages or time.monotonic() < end:
            if pause_s:
                time.sleep(pause_s)
            message[1] = message[-1] = number
            message[0] = time.monotonic_ns()
            transport.send(message)
            number += 1
        message[1] = LAST
        transport.send(message)
        told: tuple[int, int, list[int]] = answer(here)
        return told
    finally:
        transport.close()
        other.join(1)
        other.kill()
        here.close()


def answer(results: Connection) -> Any:
    if not results.poll(TIMEOUT_S):
        raise TimeoutError(f"no answer in {TIMEOUT_S:.0f} s")
    return results.recv()


def throughput(name: str, message_bytes: int, seconds: float) -> float:
    """Messages a second, as fast as both processes go."""
    spent_ns, count, _ = carry(name, message_bytes, 2, seconds)
    return (count - 1) / spent_ns * 1e9


def latency_us(name: str, message_bytes: int, messages: int) -> list[float]:
    """Microseconds from just before `send` to a received array, one message at a time."""
    _, _, ages = carry(name, message_bytes, messages + WARM_UP, pause_s=PAUSE_S)
    return [age / 1_000 for age in ages[WARM_UP:]]


def row(name: str, size: str, rates: Sequence[float], ages_us: Sequence[float]) -> dict[str, Any]:
    rate = statistics.median(rates)
    p50, p95, p99 = np.percentile(ages_us, (50, 95, 99))
    return {
        "name": f"{name} {size}",
        "message_bytes": SIZES[size],
        "messages_per_s": round(rate),
        "mib_per_s": round(rate * SIZES[size] / (1 << 20), 1),
        "mib_per_s_rounds": [round(each * SIZES[size] / (1 << 20), 1) for each in rates],
        "p50_us": round(float(p50), 1),
        "p95_us": round(float(p95), 1),
        "p99_us": round(float(p99), 1),
    }


def measure(names: Sequence[str], seconds: float, messages: int, repeats: int) -> list[dict[str, Any]]:
    """Rows. The transports take turns (A B C A B C), so a slow moment of the machine hits all of them."""
    rates: dict[tuple[str, str], list[float]] = {(name, size): [] for size in SIZES for name in names}
    ages: dict[tuple[str, str], list[float]] = {key: [] for key in rates}
    failed: dict[tuple[str, str], str] = {}
    for number in range(repeats):
        for key in rates:
            name, size = key
            if key in failed:
                continue
            try:
                rates[key].append(throughput(name, SIZES[size], seconds))
                ages[key] += latency_us(name, SIZES[size], messages)
            except (EOFError, OSError, RuntimeError) as error:
                failed[key] = f"{type(error).__name__}: {error}"
            result = failed.get(key) or f"{rates[key][-1]:,.0f} messages/s, {np.median(ages[key]):.0f} us"
            print(f"round {number + 1}/{repeats}  {name} {size}: {result}", file=sys.stderr)
    return [
        {"name": " ".join(key), "message_bytes": SIZES[key[1]], "failed": failed[key]}
        if key in failed
        else row(*key, rates[key], ages[key])
        for key in rates
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="some of: %(default)s")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each throughput round")
    parser.add_argument("--messages", type=int, default=1_000, help="of each latency round, 1 ms apart")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    args = parser.parse_args()
    names = args.transports.split(",")
    if unknown := set(names) - set(TRANSPORTS):
        parser.error(f"unknown transport {sorted(unknown)}: some of {', '.join(TRANSPORTS)}")
    rows = []
    if "asr-serve" in names and kernels.ring().__name__.endswith("ring_reference"):
        names.remove("asr-serve")
        rows = [{"name": "asr-serve", "skipped": "the native ring is not built"}]
    facts = machine.describe(threads=2)
    rows += measure(names, args.seconds, args.messages, args.repeats)
    machine.tell(args.json, {"bench": "ring", "machine": facts, "rows": rows})
    return int(any("failed" in each for each in rows if str(each["name"]).startswith("asr-serve")))


if __name__ == "__main__":
    sys.exit(main())
