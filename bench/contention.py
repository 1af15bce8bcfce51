"""One engine alone, two at once on the same cores, and one beside a neighbour that keeps all cores busy, for several
lengths of OpenMP's spinning.

    python bench/contention.py --data DIR --json contention.json

Decision 0009 stands on it. DIR as for offline.py. Every engine is a process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import clips
import machine

HERE = Path(__file__).resolve().parent
SETTINGS: dict[str, dict[str, str]] = {
    "300 (ours)": {"GOMP_SPINCOUNT": "300"},
    "3000": {"GOMP_SPINCOUNT": "3000"},
    "300000 (the default)": {"GOMP_SPINCOUNT": "300000"},
    "1000": {"GOMP_SPINCOUNT": "1000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}


def work(data: Path, seconds: float) -> float:
    """Times real time, over whole passes of the clips."""
    import asr_serve
    from asr_serve.config import EngineConfig

    speech = clips.load(data, 25)
    audio = [clip.audio for clip in speech]
    with asr_serve.load(engine=EngineConfig(prefix_bytes=0)) as model:
        model.transcribe(audio[:8], vad=False)
        started, passes = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            model.transcribe(audio, vad=False)
            passes += 1
        return passes * clips.seconds(audio) / (time.perf_counter() - started)


def at_once(count: int, setting: dict[str, str], args: argparse.Namespace) -> list[float]:
    command = [sys.executable, __file__, "--data", str(args.data), "--seconds", str(args.seconds), "--worker"]
    env = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} | setting
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent / "src"), env.get("PYTHONPATH", "")])
    running = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    return [float(process.communicate()[0]) for process in running]


@contextmanager
def full_load() -> Iterator[None]:
    """A neighbour: on every core a process that never waits."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(machine.cores())]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder with transcripts.tsv")
    parser.add_argument("--seconds", type=float, default=6.0, metavar="S", help="each engine works so long (6)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds (3)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(work(args.data, args.seconds))
        return
    rows: list[dict[str, Any]] = []
    for number in range(args.repeats):
        for name, setting in SETTINGS.items():
            [alone] = at_once(1, setting, args)
            two = at_once(2, setting, args)
            row = {"round": number + 1, "spins": name, "alone": round(alone, 1), "two": [round(x, 1) for x in two]}
            row["kept"] = round(sum(two) / alone, 3)
            with full_load():
                [beside] = at_once(1, setting, args)
            row |= {"beside": round(beside, 1), "beside_kept": round(beside / alone, 3)}
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    result = {"bench": "contention", "machine": machine.describe(machine.cores()), "rows": rows}
    machine.tell(args.json, result)


if __name__ == "__main__":
    main()
