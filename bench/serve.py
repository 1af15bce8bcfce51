"""The HTTP service under load: clients that each wait for an answer before they ask again.

    python bench/serve.py --data DIR --clients 1,8,32,128 --peers agent-cli --json serve.json

DIR holds transcripts.tsv, lines of relative/path.flac<TAB>text. README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import clips
import contention
import footprint
import machine
import numpy as np
import offline
import serve_report
from clips import Clip
from offline import say
from serve_peers import ENVIRONMENTS, HOST, PEERS, Absent, Service, Setting, asr_serve
from worker import job

HERE = Path(__file__).resolve().parent
OURS = serve_report.OURS
LOADED = f"{OURS} beside a full load"
OFFLINE: dict[str, dict[str, Any]] = {
    serve_report.OFFLINE: {"dtype": "auto", "vad": True},
    serve_report.WHOLE: {"dtype": "auto"},
}
"""The same clips through the engine without a server. The service looks for voice activity; so does the first."""
PACKAGES = ("granian", "fastapi", "starlette", "uvloop", "python-multipart")
SEED = 20_26
WARM_UP_CLIENTS = 8
STOP_S = 30.0

Found = dict[str, Any]
"""What the load generator, or the worker, wrote; or why there is nothing."""
Make = Callable[[Setting], Service]


class Run(NamedTuple):
    """What every system of a run is measured with."""

    args: argparse.Namespace
    speech: Sequence[Clip]
    files: Sequence[Path]
    env: dict[str, str]
    folder: Path

    @property
    def lengths_s(self) -> list[float]:
        return [len(clip.audio) / clips.RATE_HZ for clip in self.speech]


def main(argv: Sequence[str] | None = None) -> int:
    """1 when one of our own rows failed; a peer that is missing or breaks is only a row that says so."""
    args = parse(argv)
    with tempfile.TemporaryDirectory(prefix="asr-serve-bench-") as name:
        found = measure(args, Path(name))
    machine.write(args.json, found)
    print(serve_report.table(found["rows"]))
    print(serve_report.lines(found["summary"]))
    return int(any("failed" in row for row in found["rows"] if row["system"].startswith(OURS)))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything asked for, as the one JSON object. Systems take turns, round after round."""
    speech = clips.load(args.data, args.clips)
    files = [args.data / clip.path for clip in speech]
    if args.wav:
        files = [write_wav(folder / f"{place:04d}.wav", clip) for place, clip in enumerate(speech)]
    run = Run(args, speech, files, offline.environment(args.threads), folder)
    say(f"{len(speech)} clips, {sum(run.lengths_s):.1f} s, {args.threads} threads, clients {args.clients}")
    about: dict[str, Any] = machine.describe(args.threads)
    about["packages"] |= {name: version for name in PACKAGES if (version := machine.installed(name))}

    servers: list[tuple[str, Make]] = [] if args.only_peers else [(OURS, asr_serve)]
    if args.beside_load:
        servers.append((LOADED, asr_serve))
    servers += [(f"{OURS} spins={spins}", partial(asr_serve, spins=spins)) for spins in args.spins]
    servers += [entry for peer in args.peers for entry in PEERS[peer]]
    levels: dict[tuple[str, int], list[Found]] = {(n, count): [] for n, _ in servers for count in args.clients}
    alone: dict[str, list[Found]] = {} if args.only_peers else {name: [] for name in OFFLINE}
    notes: dict[str, str] = {}
    for number in range(args.repeats):
        for name, make in servers:
            if any("wall_s" not in earlier for count in args.clients for earlier in levels[name, count]):
                continue  # missing or broken in an earlier round: it would be again
            say(f"round {number + 1}/{args.repeats}  {name}")
            with contention.full_load() if name == LOADED else nullcontext():
                notes[name], found = one_server(make, run)
            for count in args.clients:
                levels[name, count].append(found[count])
        for name, results in alone.items():
            results.append(without_server(OFFLINE[name], run))
            say(f"round {number + 1}/{args.repeats}  {name}: {offline.brief(results[-1])}")

    said = [clip.text for clip in speech]
    rows = [
        serve_report.row(name, count, results, said, run.lengths_s) | {"notes": notes[name]}
        for (name, count), results in levels.items()
    ]
    rows += [serve_report.alone(name, results, said) for name, results in alone.items()]
    summary = serve_report.summarize(rows)
    return {"bench": "serve", "machine": about, "rows": rows, "summary": summary}


def one_server(make: Make, run: Run) -> tuple[str, dict[int, Found]]:
    """One life of a server: ready, warmed up, each number of clients in turn. Its notes, and what was found."""
    args, port = run.args, free_port()
    try:
        service = make(Setting(port, args.threads, run.folder, args.server, args.peer_venvs))
    except Absent as why:
        say(f"    cannot be installed: {why}")
        return "", {count: {"skipped": f"cannot be installed: {why}"} for count in args.clients}
    found: dict[int, Found] = {}
    with started(service, port, run) as (process, trouble):
        load = {
            "host": HOST,
            "port": port,
            "path": "/v1/audio/transcriptions",
            "files": [str(file) for file in run.files],
            "fields": {"model": service.model, "response_format": "json"},
            "seed": SEED,
            "limit_s": args.limit_s,
            "pid": process.pid,
        }
        warm_up = {"clients": WARM_UP_CLIENTS, "seconds": 0, "requests": len(run.files), "per_client": 1}
        enough = {"seconds": args.seconds, "requests": args.requests, "per_client": args.per_client}
        if trouble is None:
            trouble = generate({**load, **warm_up}, run.folder).get("failed")
        for count in args.clients:
            if trouble is None:
                found[count] = generate({**load, **enough, "clients": count}, run.folder)
                trouble = found[count].get("failed")
                if process.poll() is not None:
                    trouble = f"the server ended, exit {process.returncode}"
            if trouble:
                found[count] = {"failed": trouble}
            say(f"    {count} clients: {trouble or serve_report.brief(found[count], run.lengths_s)}")
    return service.notes, found


@contextmanager
def started(service: Service, port: int, run: Run) -> Iterator[tuple[subprocess.Popen[bytes], str | None]]:
    """The server, and why it never became ready if it did not. It and all it started are gone afterwards."""
    log, pin = run.folder / "server.log", None
    if hasattr(os, "sched_setaffinity"):  # some take no thread count and use every core they see
        pin = partial(os.sched_setaffinity, 0, sorted(os.sched_getaffinity(0))[: run.args.threads])
    with log.open("w") as out:
        process = subprocess.Popen(
            service.command,
            env={**run.env, **service.variables},
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=pin,
        )
    try:
        trouble = wait_ready(process, port, service.ready, run.args.limit_s)
        if trouble:
            text = log.read_text(errors="replace")
            print(text[-4_000:], file=sys.stderr)
            trouble = f"{trouble}: {footprint.last_line(text)}"
        yield process, trouble
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_ready(process: subprocess.Popen[bytes], port: int, path: str, limit_s: float) -> str | None:
    """None when GET path answers 200; why not, when the server ended or the time is up."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        if process.poll() is not None:
            return f"exit {process.returncode} before it was ready"
        with (
            suppress(OSError, http.client.HTTPException),
            closing(http.client.HTTPConnection(HOST, port, timeout=5)) as line,
        ):
            line.request("GET", path)
            if line.getresponse().status == 200:
                return None
        time.sleep(0.1)
    return f"not ready after {limit_s:.0f} s"


def generate(load: dict[str, Any], folder: Path) -> Found:
    """One level of load, from a process of its own."""
    asked, answered = folder / "load.json", folder / "found.json"
    asked.write_text(json.dumps(load))
    command = [sys.executable, str(HERE / "serve_load.py"), str(asked), str(answered)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"failed": f"load generator, exit {done.returncode}: {footprint.last_line(done.stderr)}"}
    found: Found = json.loads(answered.read_text())
    return found


def without_server(options: dict[str, Any], run: Run) -> Found:
    """The way of offline.py: one process, every clip in one call, three passes."""
    saved = run.folder / "clips.npz"
    clips.save(saved, [clip.audio for clip in run.speech])
    start = offline.starter(run.folder, run.env, run.args.limit_s)
    return start(job(OURS, options, saved, "cpu", run.args.threads, offline.PASSES))


def write_wav(path: Path, clip: Clip) -> Path:
    pcm = np.clip(np.rint(clip.audio * 32_768), -32_768, 32_767).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, clips.RATE_HZ, 0, "NONE", ""))
        file.writeframes(pcm.tobytes())
    return path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def numbers(text: str) -> list[int]:
    """`1,8,32` for argparse."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: each number must be 1 or more")
    return list(dict.fromkeys(found))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="folder with transcripts.tsv")
    add("--clients", type=numbers, default=[1, 8, 32, 128], metavar="A,B", help="how many at once (1,8,32,128)")
    add("--peers", type=offline.named(PEERS), default=[], metavar="A,B", help=f"any of {','.join(PEERS)}")
    add("--only-peers", action="store_true", help="leave asr-serve out")
    add("--json", type=Path, metavar="FILE", help="where the result goes; without it only the table is printed")
    add("--repeats", type=int, default=3, metavar="N", help="rounds (3)")
    add("--seconds", type=float, default=10.0, metavar="S", help="a level lasts at least so long (10)")
    add("--requests", type=int, default=200, metavar="N", help="and at least so many answers (200)")
    add("--per-client", type=int, default=4, metavar="N", help="and at least so many for each client (4)")
    add("--clips", type=int, metavar="N", help="only N clips, spread evenly over the set")
    add("--wav", action="store_true", help="post 16-bit WAV instead of the files as they are")
    add("--threads", type=int, default=machine.cores(), metavar="N", help="for every server (all cores)")
    add("--server", type=shlex.split, default=[], metavar="OPTIONS", help="more options for `asr-serve serve`")
    add("--beside-load", action="store_true", help="also asr-serve beside a process on every core that never waits")
    add("--spins", type=numbers, default=[], metavar="A,B", help="GOMP_SPINCOUNT of our engine: a row each")
    add("--peer-venvs", type=Path, default=ENVIRONMENTS, metavar="DIR", help="peers' environments (.venv-peers)")
    add("--limit-s", type=float, default=1_800, metavar="S", help="longest a level may take (1800)")
    args = parser.parse_args(argv)
    for name in ("repeats", "clips", "threads", "requests", "per_client"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    return args


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent / "src"))  # for the error rates, when asr-serve is not installed
    sys.exit(main())
