"""Bytes from one engine to another: every transport, against a plain copy of as many bytes in memory.

    python bench/transports.py --json results/transports-cpu.json

This process sends, a fresh one receives. `put` is what the sender spends until the bytes are there; `whole` is
until the other process has looked at them and said so over a pipe. README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import machine
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from asr_serve.errors import AsrServeError
from asr_serve.transfer import transports
from asr_serve.transfer.checksum import checksum, copy_and_sum
from asr_serve.transfer.transports import base, nixl, shm, tcp

SIZES_MB = (1, 16, 64)
"""MiB. A minute of Whisper base's keys and values is 74, half a minute of tiny's encoder output 2."""
MIB = 1 << 20
PARTS = 16
WARM_UP = 3
TIMEOUT_S = 60.0
HOST = "127.0.0.1"
TRANSPORTS: dict[str, ModuleType] = {"shm": shm, "tcp": tcp, "nixl": nixl}

SPAWN = multiprocessing.get_context("spawn")


def nothing(data: object) -> int:
    return 0


def copy_alone(to: np.ndarray, data: np.ndarray) -> int:
    np.copyto(to, data)
    return 0


def receive(kind: str, nbytes: int, line: Connection) -> None:
    """The other process. Told (sum it?, the parts with their checksums), it looks, and says that it has."""
    landing = transports.create_receiver(kind, nbytes, HOST)
    spot = landing.lease(nbytes)
    line.send((landing.offer, spot))
    while (told := line.recv()) is not None:
        summed, parts = told
        base.checksum_of = checksum if summed else nothing
        for part, found in parts:
            landing.received(part, part.nbytes, found)
        line.send("seen")
    landing.close()


class TransportPair:
    """This process's end of one transport, and the other process."""

    def __init__(self, kind: str) -> None:
        self._module = TRANSPORTS[kind]
        self._line, there = SPAWN.Pipe()
        self._other = SPAWN.Process(target=receive, args=(kind, max(SIZES_MB) * MIB + 64, there), daemon=True)
        self._other.start()
        there.close()
        offer, self._spot = self._answer()
        self._sender = transports.attach_sender(offer)

    def carry(self, data: np.ndarray, summed: bool, parts: int) -> tuple[float, float]:
        """Seconds of `put`, and of the whole."""
        if self._module is shm:
            shm.copy_and_sum = copy_and_sum if summed else copy_alone
        else:
            self._module.checksum = checksum if summed else nothing  # type: ignore[attr-defined]
        length = data.nbytes // parts
        began = time.perf_counter()
        put_s, told = 0.0, []
        for number in range(parts):
            part = self._spot.subregion(number * length, length)
            start = time.perf_counter()
            told.append((part, self._sender.write_region(part, data[number * length :][:length], TIMEOUT_S)))
            put_s += time.perf_counter() - start
            if parts > 1 or number == parts - 1:
                self._line.send((summed, told))
                told = []
        for _ in range(parts):
            self._answer()
        return put_s, time.perf_counter() - began

    def close(self) -> None:
        self._line.send(None)
        self._sender.close()
        self._other.join(5)
        self._other.kill()

    def _answer(self) -> Any:
        if not self._line.poll(TIMEOUT_S):
            raise TimeoutError(f"no answer in {TIMEOUT_S:.0f} s")
        return self._line.recv()


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(kind: str, rounds: int) -> list[dict[str, Any]]:
    """Rows of one transport. In every round all ways take turns with the plain copy: a slow moment hits all of them."""
    ways = {"checksum": (True, 1), "no checksum": (False, 1), f"checksum, {PARTS} parts": (True, PARTS)}
    transport, rows = TransportPair(kind), []
    try:
        for size in SIZES_MB:
            data = np.random.default_rng(size).integers(0, 256, size * MIB, np.uint8)
            copy = np.zeros_like(data)
            plain: list[float] = []
            took: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            for number in range(rounds + WARM_UP):
                copied = timed(lambda to=copy, of=data: np.copyto(to, of))  # type: ignore[misc]
                carried = {way: transport.carry(data, *ways[way]) for way in ways}
                if number >= WARM_UP:
                    plain.append(copied)
                    for way, seconds in carried.items():
                        took[way].append(seconds)
            rows.append({"transport": "memcpy", "beside": kind, "mib": size, **told("put", plain, size)})
            rows += [
                {
                    "transport": kind,
                    "mib": size,
                    "how": way,
                    **told("put", [put for put, _ in each], size),
                    "put_of_memcpy": round(statistics.median(plain) / statistics.median(p for p, _ in each), 2),
                    "put_of_memcpy_best": round(min(plain) / min(p for p, _ in each), 2),
                    **told("whole", [whole for _, whole in each], size),
                }
                for way, each in took.items()
            ]
            print(f"{kind} {size} MiB: {rounds} rounds", file=sys.stderr)
    finally:
        transport.close()
    return rows


def told(name: str, seconds: Sequence[float], size: int) -> dict[str, float]:
    middle = statistics.median(seconds)
    return {
        f"{name}_ms": round(middle * 1e3, 3),
        f"{name}_best_ms": round(min(seconds) * 1e3, 3),
        f"{name}_gb_per_s": round(size * MIB / middle / 1e9, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="some of: %(default)s")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    names = args.transports.split(",")
    if unknown := set(names) - set(TRANSPORTS):
        parser.error(f"unknown transport {sorted(unknown)}: some of {', '.join(TRANSPORTS)}")
    skipped = [
        {"transport": name, "skipped": "not in this installation"}
        for name in names
        if name not in transports.available_transports()
    ]
    facts = machine.describe(threads=2)
    try:
        rows = [
            row for name in names if name in transports.available_transports() for row in measure(name, args.rounds)
        ]
    except (AsrServeError, EOFError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    machine.tell(args.json, {"bench": "transports", "machine": facts, "rows": rows + skipped})
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
