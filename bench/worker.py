"""One system in one process: load, one clip to warm up, then the whole set on the clock.

    python worker.py JOB.json RESULT.json

A process each, so that thread pools, caches and memory of two systems never mix. The result is a file
because libraries print to stdout.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import clips
import machine
from clips import Audio
from peers import MAKERS, System

Job = dict[str, Any]
Result = dict[str, Any]


def job(maker: str, options: dict[str, Any], audio: Path, device: str, threads: int, passes: int = 1) -> Job:
    return {
        "maker": maker,
        "options": options,
        "audio": str(audio),
        "device": device,
        "threads": threads,
        "passes": passes,
        "spawned_s": time.time(),
    }


def measure(system: System, audio: Sequence[Audio], passes: int) -> Result:
    """Warm up on the clip of middle length, then time `passes` passes over all of them."""
    middle = sorted(audio, key=len)[len(audio) // 2]
    system.transcribe(system.prepare([middle]))
    first_text_s = time.time()
    prepared, walls, cpus, texts = system.prepare(audio), [], [], []
    for _ in range(passes):
        wall, cpu = time.perf_counter(), time.process_time()
        texts = system.transcribe(prepared)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return {
        "walls_s": walls,
        "cpus_s": cpus,
        "texts": texts,
        "first_text_s": first_text_s,
        "facts": system.facts,
        "audio_s": clips.seconds(audio),
    }


def run(work: Job) -> Result:
    """The result, or {"skipped": why} when the system is not installed."""
    if hasattr(os, "sched_setaffinity"):  # some take no thread count and use every core they see
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: work["threads"]])
    audio = clips.restore(Path(work["audio"]))
    try:
        started = time.time()
        system = MAKERS[work["maker"]](work["device"], work["threads"], **work["options"])
        load_s = time.time() - started
    except ImportError as missing:
        return {"skipped": f"not installed: {missing}"}
    result = measure(system, audio, work["passes"])
    system.close()
    result["first_text_s"] -= work["spawned_s"]
    return {**result, "load_s": load_s, "peak_mib": machine.peak_mib()}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))
