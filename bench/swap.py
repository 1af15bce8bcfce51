"""To sleep and to wake through the tiers, beside fio on the same disk in the same minute.

    python bench/swap.py --json swap.json

Every blob is put, written to the file, taken from memory (warm), pushed out of memory, and read again (cold). Both
go past the page cache, so cold is what the disk gives. README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Any, get_args

import machine
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from asr_serve.config import DiskBackendName
from asr_serve.engine.cache import TieredStore
from asr_serve.errors import AsrServeError, OptionError
from asr_serve.transfer.checksum import checksum
from asr_serve.transfer.disk import open_disk

MIB = 1 << 20
SIZES = {"64 MiB": 64 * MIB, "512 MiB": 512 * MIB, "4 GiB": 4_096 * MIB}
PART_BYTES = 64 * MIB
"""A blob is so many of these."""
FILLER_BYTES = 4 * MIB
FIO_BYTES = 512 * MIB
"""Read or written in a run of fio at least: a small file again and again, since its first moments are slow."""
DEPTHS = (4, 16, 32)
TIMEOUT_S = 600.0
STEPS = ("put", "written", "warm", "cold")


# --- fio ----------------------------------------------------------------------------------------------


def fio(folder: str, work: str, size: int, depth: int, *, huge: bool = True) -> float:
    """Bytes a second, in blocks of 1 MiB past the page cache. The file stays for the next. `huge`: from and to
    memory of huge pages, as ours is: without, each block reaches the disk in more and smaller requests."""
    command = ["fio", "--name=swap", f"--filename={folder}/fio", f"--rw={work}", f"--size={size}", "--bs=1M"]
    command += ["--direct=1", "--ioengine=io_uring", f"--iodepth={depth}", "--output-format=json"]
    command += [f"--loops={max(1, FIO_BYTES // size)}", "--mem=malloc"]
    tuned = {**os.environ, "GLIBC_TUNABLES": f"glibc.malloc.hugetlb={int(huge)}"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=tuned)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job[work]["bw_bytes"])


def best_depth(folder: str, size: int) -> int:
    """Of which fio reads fastest."""
    fio(folder, "write", size, DEPTHS[-1])
    return max(DEPTHS, key=lambda depth: fio(folder, "read", size, depth))


# --- ours ---------------------------------------------------------------------------------------------


class Swap:
    """One backend to the disk, with a blob of one size."""

    def __init__(self, backend: DiskBackendName, sealed: bool, folder: str, size: int) -> None:
        room = size + 2 * FILLER_BYTES
        key = os.urandom(32) if sealed else None
        self._tiers = TieredStore(size + FILLER_BYTES, lambda: open_disk(folder, room, backend), key=key)
        part = np.random.default_rng(0).bytes(min(size, PART_BYTES))
        self._parts = [part] * (size // len(part))
        self._sum = checksum(part)
        self._target = np.empty(len(part), np.uint8)
        self.size = size

    def sleep(self) -> dict[str, float]:
        """Seconds of each step, until the blob lies in the file and nowhere else."""
        tiers, spent = self._tiers, {}
        before = tiers.describe().get("host_to_disk", 0)
        begun = time.perf_counter()
        if not tiers.put(b"blob", self._parts, pinned=True):
            raise RuntimeError("there is no room")
        spent["put"] = time.perf_counter() - begun
        waiting = threading.Event()
        while tiers.describe().get("host_to_disk", 0) == before:
            waiting.wait(0.001)
        spent["written"] = time.perf_counter() - begun - spent["put"]
        spent["warm"] = self._woken(copied=True)
        # More than is free beside the blob, which lies in the file too and so gives way.
        if not tiers.put(b"filler", [bytes(FILLER_BYTES + 1)], pinned=False):
            raise RuntimeError("the blob does not give way")
        tiers.drop(b"filler")
        if tiers.describe()["host_entries"]:
            raise RuntimeError("the blob is still in memory")
        return spent

    def wake(self) -> dict[str, float]:
        """Raises RuntimeError where what came back is not what was put."""
        spent = self._woken(copied=False)
        self._tiers.drop(b"blob")
        return {"cold": spent}

    def _woken(self, copied: bool) -> float:
        """Until its parts are there; `copied`: and have been copied to where a device would have them."""
        read: Queue[list[memoryview] | None] = Queue()
        begun = time.perf_counter()
        self._tiers.get(b"blob", read.put)
        try:
            parts = read.get(timeout=TIMEOUT_S)
        except Empty:
            parts = None
        if parts is None:
            raise RuntimeError("it was lost")
        if copied:
            for part in parts:
                np.copyto(self._target, np.frombuffer(part, np.uint8))
        spent = time.perf_counter() - begun
        if any(checksum(part) != self._sum for part in parts):
            raise RuntimeError("it came back as something else")
        return spent

    def close(self) -> None:
        self._tiers.close()


def measure(
    backend: DiskBackendName, sealed: bool, size_name: str, folder: str, repeats: int, depth: int
) -> dict[str, Any]:
    size = SIZES[size_name]
    row: dict[str, Any] = {"name": "asr-serve", "backend": backend, "check": "aes-256-gcm" if sealed else "xxh3-64"}
    row |= {"blob": size_name, "bytes": size}
    rounds: list[dict[str, float]] = []
    limits: dict[str, list[float]] = {"read": [], "write": []}
    small_pages: list[float] = []
    loads = []
    swap = Swap(backend, sealed, folder, size)
    try:
        swap.sleep(), swap.wake()  # memory is touched, and the kernel knows the file
        for number in range(repeats):
            loads.append(round(os.getloadavg()[0], 1))
            limits["write"].append(fio(folder, "write", size, depth))
            spent = swap.sleep()
            # Each reads what it wrote a while ago, and takes turns to be first.
            if number % 2:
                spent |= swap.wake()
            limits["read"].append(fio(folder, "read", size, depth))
            rounds.append(spent if number % 2 else spent | swap.wake())
            small_pages.append(fio(folder, "read", size, depth, huge=False))
    finally:
        swap.close()
        del swap
        gc.collect()
    for step in STEPS:
        seconds = [each[step] for each in rounds]
        row[f"{step}_ms"] = round(1_000 * statistics.median(seconds), 1)
        row[f"{step}_worst_ms"] = round(1_000 * max(seconds), 1)
        row[f"{step}_gb_per_s"] = round(size / statistics.median(seconds) / 1e9, 3)
    for work, step in (("read", "cold"), ("write", "written")):
        row[f"fio_{work}_gb_per_s"] = round(statistics.median(limits[work]) / 1e9, 3)
        ratios = [size / each[step] / limit for each, limit in zip(rounds, limits[work], strict=True)]
        row[f"{step}_of_fio"] = round(statistics.median(ratios), 3)
        row[f"{step}_of_fio_rounds"] = [round(ratio, 3) for ratio in ratios]
    row["fio_read_small_pages_gb_per_s"] = round(statistics.median(small_pages) / 1e9, 3)
    return {**row, "load_1m": loads}


def available_backends(folder: str) -> list[DiskBackendName]:
    """Those that are here."""
    here: list[DiskBackendName] = []
    for backend in get_args(DiskBackendName):
        if backend == "auto":
            continue
        try:
            open_disk(folder, MIB, backend).close()
        except OptionError as error:
            print(f"{backend}: {error}", file=sys.stderr)
        else:
            here.append(backend)
    return here


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk; default: %(default)s")
    parser.add_argument("--sizes", default=",".join(SIZES), help="some of: %(default)s")
    parser.add_argument("--backends", help="default: all that are here")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    args = parser.parse_args(arguments)
    if shutil.which("fio") is None:
        parser.error("fio is not installed: apt install fio")
    facts = machine.describe(threads=1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        chosen = args.backends.split(",") if args.backends else available_backends(folder)
        for size_name in args.sizes.split(","):
            depth = best_depth(folder, SIZES[size_name])
            for backend in chosen:
                for sealed in (False, True):
                    try:
                        row = measure(backend, sealed, size_name, folder, args.repeats, depth)
                    except (AsrServeError, RuntimeError) as error:
                        row = {"name": "asr-serve", "backend": backend, "blob": size_name, "failed": repr(error)}
                    rows.append({**row, "fio_iodepth": depth})
                    print(json.dumps(rows[-1]), file=sys.stderr)
            (Path(folder) / "fio").unlink()
    machine.tell(args.json, {"bench": "swap", "machine": facts, "rows": rows})
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
