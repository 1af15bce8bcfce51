"""Predictions of `asr-serve plan` beside measured runs of 1, 2 and 3 engines on this machine.

    python bench/plan_validation.py --data DIR --service-times FILE --json plan-validation.json

Each engine is a plain `asr-serve serve` with one thread, on a core of its own while there are enough; of more engines
than cores each has its share. Live callers speak clips with pauses over /v1/stream and stay where they were put;
files arrive at random times and go to the shorter of two queues in audio seconds, as the simulated router sends them.
The simulation is given the clips' lengths, the same rates, and the service times; nothing is fitted to the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import clips
import live_finals
import machine
import numpy as np
import serve_load
from clips import RATE_HZ
from serve import free_port, wait_ready
from service_times import write_wav

HOST, SEED = "127.0.0.1", 7
MODEL = "moonshine-tiny-en"
SILENCE_MS, PAUSE_S, WARM_S = 800, 2.5, 3.0
Row = dict[str, Any]


# --- load, in a process of its own -----------------------------------------------------------------------------


async def load(job: dict[str, Any]) -> dict[str, Any]:
    """Callers and files against all servers for `seconds`; (latency in ms, when in s) of each answer."""
    chance = random.Random(SEED)
    pcm = [np.load(path) for path in job["pcm"]]
    ports: list[int] = job["ports"]
    began_s = time.monotonic()
    finals: list[tuple[float, float]] = []
    answers: list[tuple[float, float, float]] = []
    failed: list[str] = []
    queued = dict.fromkeys(ports, 0.0)

    async def caller(number: int) -> None:
        try:
            await talk(number, ports[number % len(ports)])
        except Exception as failure:
            failed.append(f"caller {number}: {failure!r}"[:200])

    async def talk(number: int, port: int) -> None:
        mine = random.Random(f"{SEED}/{number}")
        parts: list[np.ndarray] = []
        clips_in_turn = serve_load.order(number, len(pcm), SEED)
        while sum(map(len, parts)) < job["seconds"] * RATE_HZ:
            pause_s = max(SILENCE_MS / 1_000, mine.expovariate(1 / PAUSE_S))
            parts += [pcm[next(clips_in_turn)], np.zeros(round(pause_s * RATE_HZ), np.int16)]
        sound = np.concatenate(parts)[: round(job["seconds"] * RATE_HZ)]
        await asyncio.sleep(mine.uniform(0, WARM_S))
        heard = await live_finals.speak(HOST, port, sound, SILENCE_MS)
        finals.extend((ms, sent_s - began_s) for ms, sent_s in heard)

    async def file(at_s: float, which: int) -> None:
        await asyncio.sleep(began_s + at_s - time.monotonic())
        port = min(chance.sample(ports, min(2, len(ports))), key=queued.__getitem__)
        audio_s = job["lengths_s"][which]
        queued[port] += audio_s
        asked_s = time.monotonic()
        line = serve_load.Line(HOST, port)
        status, _, body = await line.ask(serve_load.request(Path(job["files"][which]), HOST, job["path"], {}))
        line.drop()
        queued[port] -= audio_s
        if status == 200:
            answers.append((1_000 * (time.monotonic() - asked_s), at_s, audio_s))
        else:
            failed.append(f"file: {status} {body[:100]!r}")

    # As many as the rate says, at random times, and each clip as often as another: of so few, a random number of random
    # lengths would be another load than the one that is simulated.
    count = round(job["files_per_s"] * job["seconds"])
    arrivals = sorted(chance.uniform(0, job["seconds"]) for _ in range(count))
    in_turn = serve_load.order(-1, len(job["files"]), SEED)
    before_s, own_s, wall_s = serve_load_cpu(job["pids"]), time.process_time(), time.monotonic()
    work = [caller(number) for number in range(job["callers"])]
    work += [file(at_s, next(in_turn)) for at_s in arrivals]
    await asyncio.gather(*work)
    wall_s = time.monotonic() - wall_s
    used = (serve_load_cpu(job["pids"]) - before_s) / wall_s
    load_cores = (time.process_time() - own_s) / wall_s
    found = {"finals": finals, "answers": answers, "cpu": used, "failed": failed, "arrived": count}
    return {**found, "load_cores": load_cores}


def serve_load_cpu(pids: Sequence[int]) -> float:
    return sum(serve_load.tree_cpu_s(pid) for pid in pids)


# --- runs ------------------------------------------------------------------------------------------------------


@contextmanager
def server(core: int | None, folder: Path) -> Iterator[tuple[int, int]]:
    """An engine with its server: its port and its process."""
    port = free_port()
    code = "from asr_serve.api.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "--port", str(port), "--model", MODEL, "--voice", "none"]
    command += ["--set", "engine.prefix_bytes=0", "--set", "turn_model=none"]
    env = {**os.environ, "ASR_SERVE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    pin = (lambda: os.sched_setaffinity(0, [core])) if core is not None else None
    with (folder / f"server-{port}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=folder, preexec_fn=pin)
        try:
            if trouble := wait_ready(process, port, "/ready", 300):
                raise SystemExit(f"{trouble}: {(folder / f'server-{port}.log').read_text()[-2_000:]}")
            yield port, process.pid
        finally:
            process.terminate()
            process.wait(60)


def measure(replicas: int, job: dict[str, Any], prefix: Sequence[str], folder: Path) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as held:
        started = [
            held.enter_context(server(cores[i] if replicas <= len(cores) else None, folder)) for i in range(replicas)
        ]
        job = {**job, "ports": [port for port, _ in started], "pids": [pid for _, pid in started]}
        asked, answered = folder / "job.json", folder / "found.json"
        warm = {**job, "seconds": 4.0, "callers": replicas, "files_per_s": 1.0}
        for each, command in ((warm, ()), (job, prefix)):
            asked.write_text(json.dumps(each))
            line = [*command, sys.executable, __file__, "--child", str(asked), str(answered)]
            subprocess.run(line, check=True, cwd=folder, timeout=600)
        found: dict[str, Any] = json.loads(answered.read_text())
        return found


def percentiles(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    if not values:
        return None, None
    p50, p95 = np.quantile(values, [0.5, 0.95], method="inverted_cdf")
    return round(float(p50), 1), round(float(p95), 1)


def predict(args: argparse.Namespace, job: dict[str, Any], replicas: int, load_cores: float) -> Row:
    """The same load, simulated: ten times as long, so that it is the simulation's mean that is compared. `load_cores`:
    cores that the load generator takes from the replicas of this machine."""
    from asr_serve.planning.mix import Files, LiveCallers, Mix
    from asr_serve.planning.service_times import read_service_times
    from asr_serve.planning.simulation import Layout, simulate

    lengths = np.array(job["lengths_s"])
    spread = float(np.std(np.log(lengths)))
    mean = float(np.mean(lengths))
    live = LiveCallers(MODEL, 1.0, 1.0, mean, spread, PAUSE_S, SILENCE_MS)
    per_hour = 3_600 * job["files_per_s"] / job["callers"]
    mix = Mix("validation", "", (live,), (Files(MODEL, per_hour, mean, spread),))
    table = read_service_times(args.service_times)
    layout = Layout(replicas, cores=machine.cores() - load_cores)
    found = simulate(mix, table, layout, job["callers"], 10 * job["seconds"], seed=1)
    row = {"cpu": round(found.utilisation * replicas, 3)}
    for name in ("live", "files"):
        result = found.classes[name]  # type: ignore[index]
        row |= {f"{name}_p50_ms": round(result.p50_ms, 1), f"{name}_p95_ms": round(result.p95_ms, 1)}
    row["files_audio_s_per_s"] = round(found.classes["files"].audio_s / found.seconds, 2)
    return row


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.child:
        asked, answered = args.child
        Path(answered).write_text(json.dumps(asyncio.run(load(json.loads(Path(asked).read_text())))))
        return 0
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="asr-serve-bench-") as name:
        folder = Path(name)
        chosen = [clip.audio for clip in clips.load(args.data) if 2.0 < len(clip.audio) / RATE_HZ < 8.0][:24]
        files, pcm = [], []
        for number, audio in enumerate(chosen):
            write_wav(folder / f"{number}.wav", audio)
            np.save(folder / f"{number}.npy", np.clip(np.rint(audio * 32_768), -32_768, 32_767).astype(np.int16))
            files.append(str(folder / f"{number}.wav"))
            pcm.append(str(folder / f"{number}.npy"))
        for replicas in args.replicas:
            share = min(1.0, machine.cores() / replicas) * replicas
            job = {
                "files": files,
                "pcm": pcm,
                "lengths_s": [len(audio) / RATE_HZ for audio in chosen],
                "path": "/v1/audio/transcriptions",
                "seconds": args.seconds,
                "callers": round(args.callers * share),
                "files_per_s": args.files_per_s * share,
            }
            found = measure(replicas, job, args.load_prefix, folder)
            predicted = predict(args, job, replicas, found["load_cores"])
            live = percentiles([ms for ms, at_s in found["finals"] if at_s >= WARM_S])
            answered = percentiles([ms for ms, at_s, _ in found["answers"] if at_s >= WARM_S])
            row: Row = {
                "name": "asr-serve",
                "replicas": replicas,
                "callers": job["callers"],
                "files_per_s": job["files_per_s"],
                "finals": len(found["finals"]),
                "files": len(found["answers"]),
                "failed": found["failed"],
                "load_cores": round(found["load_cores"], 3),
            }
            measured = {
                "live_p50_ms": live[0],
                "live_p95_ms": live[1],
                "files_p50_ms": answered[0],
                "files_p95_ms": answered[1],
                "files_audio_s_per_s": round(sum(audio_s for _, _, audio_s in found["answers"]) / args.seconds, 2),
                "cpu": round(found["cpu"], 3),
            }
            for key, value in measured.items():
                row[key] = value
                row[f"predicted_{key}"] = predicted[key]
                row[f"error_{key}"] = None if not value else round(predicted[key] / value - 1, 3)
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    machine.tell(args.json, {"bench": "plan-validation", "machine": machine.describe(1), "rows": rows})
    return int(any(row["failed"] for row in rows))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="folder with transcripts.tsv")
    add("--service-times", type=Path, metavar="FILE", help="table of this machine")
    add("--replicas", type=lambda text: [int(each) for each in text.split(",")], default=[1, 2, 3], metavar="A,B")
    add("--callers", type=int, default=5, metavar="N", help="live callers for each replica (5)")
    add("--files-per-s", type=float, default=2.0, metavar="X", help="files a second for each replica (2)")
    add("--seconds", type=float, default=25.0, metavar="S", help="length of a run (25)")
    add("--load-prefix", type=shlex.split, default=[], metavar="CMD", help="command that runs the load generator")
    add("--json", type=Path, metavar="FILE", help="where the result goes")
    add("--child", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
