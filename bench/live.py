"""Callers in real time against the live service: when their words come, and whether all of them do.

    python bench/live.py --data DIR --callers 1,8,32 --peers moonshine-voice,vosk --json live.json

DIR holds transcripts.tsv, lines of relative/path.flac<TAB>text. README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import batch_kills
import clips
import footprint
import live_peers
import live_report
import live_speech
import machine
import numpy as np
import offline
import openai
import serve
import serve_load
import serve_peers
from live_calls import Call
from live_protocols import NAMES, REFUSED
from live_report import OURS, Row
from live_speech import RATE_HZ, Caller
from offline import say
from openai.types.batch_request_counts import BatchRequestCounts

HERE = Path(__file__).resolve().parent
PACKAGES = (*serve.PACKAGES, "websockets")
SEED = 20_26
BATCH_CLIP_S = 3.0
GRACE_S = 30.0
"""How long a caller waits for its last words before it gives up."""
WARM_UP = 4
MOST_CALLERS = 4_096

Found = dict[str, Any]
Level = Callable[[int], Row]
"""Measures so many callers."""
ADMITTED = "admitted"
"""Key of a row while it is made: the numbers of the callers that it measures."""


class Bench:
    """What every system of a run is measured with."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.env = offline.environment(args.threads)
        self.speech = clips.load(args.data, args.clips)
        self.pcm = [np.clip(np.rint(clip.audio * 32_768), -32_768, 32_767).astype(np.int16) for clip in self.speech]
        self.pause = round(args.pause * RATE_HZ)
        self.saved = folder / "clips.npz"
        live_speech.save(self.saved, self.pcm)
        found = self.work("live_worker.py", {"work": "voices", "pause": self.pause})
        if "failed" in found:
            raise SystemExit(f"voice activity of the clips: {found['failed']}")
        self.probabilities: list[list[float]] = found["probabilities"]

    def callers(self, count: int, seconds: float) -> list[Caller]:
        """The same for every system: each goes through the clips in an order of its own."""
        lengths = [len(clip) for clip in self.pcm]
        orders = (serve_load.order(number, len(lengths), SEED) for number in range(count))
        limit = round(seconds * RATE_HZ)
        return [live_speech.plan(order, lengths, self.pause, limit) for order in orders]

    def work(self, script: str, job: Found, python: Path = Path(sys.executable)) -> Found:
        """What a process of its own found, pinned to the run's cores; or {"failed": why}."""
        asked, answered, errors = (self.folder / name for name in ("job.json", "found.json", "stderr.txt"))
        answered.unlink(missing_ok=True)
        asked.write_text(json.dumps({"clips": str(self.saved), **job}))
        with errors.open("w") as log:
            command = [str(python), str(HERE / script), str(asked), str(answered)]
            try:
                done = subprocess.run(
                    command,
                    env=self.env,
                    stdout=log,
                    stderr=log,
                    timeout=self.args.limit_s,
                    check=False,
                    preexec_fn=self.pin,
                )
            except subprocess.TimeoutExpired:
                return {"failed": f"not done after {self.args.limit_s:.0f} s"}
        if done.returncode or not answered.exists():
            text = errors.read_text(errors="replace")
            print(text[-4_000:], file=sys.stderr)
            return {"failed": f"exit {done.returncode}: {footprint.last_line(text)}"}
        found: Found = json.loads(answered.read_text())
        return found

    def pin(self) -> None:
        """For a process that begins: some take no thread count and use every core they see."""
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: self.args.threads])

    def row(self, system: str, callers: Sequence[Caller], found: Found) -> Row:
        for trouble in ("skipped", "failed"):
            if trouble in found:
                return {**live_report.blank(system, len(callers)), trouble: found[trouble]}
        calls = [
            Call(caller, live_speech.voiced(caller, self.probabilities), heard, self.args.silence_ms)
            for caller, heard in zip(callers, found["callers"], strict=True)
        ]
        references = [clip.text for clip in self.speech]
        admitted = [
            number for number, call in enumerate(calls) if not (self.args.at_once and call.heard["error"] == REFUSED)
        ]
        if not admitted:
            return {**live_report.blank(system, len(callers)), "failed": "every caller was refused"}
        spoken = [calls[number] for number in admitted]
        row = live_report.row(system, spoken, found, references, self.args.seconds, at_once=self.args.at_once)
        refused = len(calls) - len(admitted)
        return {**row, "callers": len(callers), "refused": refused, ADMITTED: admitted}


def main(argv: Sequence[str] | None = None) -> int:
    """1 when one of our own rows failed; a peer that is missing or breaks is only a row that says so."""
    args = parse(argv)
    with tempfile.TemporaryDirectory(prefix="asr-serve-bench-") as name:
        found = measure(args, Path(name))
    machine.write(args.json, found)
    print(live_report.table(found["rows"]))
    for line in found["summary"]:
        print("  ".join(f"{key}={value}" for key, value in line.items()))
    return int(any("failed" in row for row in found["rows"] if row["system"] == OURS))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything asked for, as the one JSON object: each system in turn, its numbers of callers in turn."""
    bench = Bench(args, folder)
    about: dict[str, Any] = machine.describe(args.threads)
    about["packages"] |= {name: version for name in PACKAGES if (version := machine.installed(name))}
    say(f"{len(bench.speech)} clips, {args.pause} s pauses, {args.threads} threads, callers {args.callers}")
    rows = [] if args.only_peers else ours(bench)
    for name in args.peers:
        rows += peer(name, bench)
    settings = {
        "seconds": args.seconds,
        "pause_s": args.pause,
        "silence_ms": args.silence_ms,
        "at_once": args.at_once,
        "retry": args.retry,
        "device": args.device,
        "server": args.server,
    }
    return {
        "bench": "live",
        "machine": about,
        "settings": settings,
        "rows": rows,
        "summary": live_report.summarize(rows),
    }


def ours(bench: Bench) -> list[Row]:
    """One life of a server, every level in turn; then the same audio through the library."""
    args, port = bench.args, serve.free_port()
    riva_port = serve.free_port()
    options = ["--model", args.model, *args.server, "--device", args.device]
    if "riva" in args.protocol:
        options += ["--riva-port", str(riva_port)]
    options += [f"--set=batch.folder={bench.folder / 'batches'}"] if args.batch else []
    service = serve_peers.asr_serve(serve_peers.Setting(port, args.threads, bench.folder, options))
    run = serve.Run(args, bench.speech, [], bench.env, bench.folder)
    load = {"url": f"ws://{serve_peers.HOST}:{port}", "grace_s": GRACE_S, "silence_ms": args.silence_ms}
    load |= {"at_once": args.at_once, "retry": args.retry, "riva": f"{serve_peers.HOST}:{riva_port}"}
    rows: list[Row] = []
    with ExitStack() as stack:
        process, trouble = stack.enter_context(serve.started(service, port, run))

        def level(count: int, protocol: str, seconds: float = args.seconds, *, batch: int = 0) -> Row:
            callers = bench.callers(count, seconds)
            job = {**load, "protocol": protocol, "callers": callers, "pid": process.pid, "seconds": seconds}
            batch_lines_per_s = None
            if trouble:
                found = {"failed": trouble}
            elif batch:
                with RunningBatch(port, batch) as running:
                    found = bench.work("live_load.py", job)
                    batch_lines_per_s = running.lines_per_s()
                if batch_lines_per_s is None:
                    found = {"failed": f"the batch ended before the callers: more lines than {batch} are needed"}
            else:
                found = bench.work("live_load.py", job)
            if process.poll() is not None:
                found = {"failed": f"the server ended, exit {process.returncode}"}
            name = f"{protocol}, beside a batch" if batch else protocol
            row = {**bench.row(OURS, callers, found), "protocol": name, "notes": service.notes}
            return {**row, "batch_lines_per_s": batch_lines_per_s}

        for protocol in args.protocol:
            if trouble is None:
                level(WARM_UP, protocol, 0.0)
            for batch in (0, args.batch)[: 1 + bool(args.batch)]:
                rows += levels(OURS, partial(level, protocol=protocol, batch=batch), args)
    alone(bench, [row for row in rows if "failed" not in row and row["callers"] in args.callers])
    return [{key: value for key, value in row.items() if key != ADMITTED} for row in rows]


class RunningBatch:
    """A batch of clips of 3 s that the server answers meanwhile; what is left of it at the end is cancelled."""

    def __init__(self, port: int, lines: int) -> None:
        self._client = openai.OpenAI(base_url=f"http://{serve_peers.HOST}:{port}/v1", api_key="none", timeout=60)
        self._id, _ = batch_kills.submit(self._client, lines, BATCH_CLIP_S)

    def __enter__(self) -> RunningBatch:
        self._began_s, self._answered = time.perf_counter(), self._look().completed
        return self

    def __exit__(self, *problem: object) -> None:
        with self._client, contextlib.suppress(openai.ConflictError):  # it has ended
            self._client.batches.cancel(self._id)

    def lines_per_s(self) -> float | None:
        """Lines answered per second since it was entered; None where none are left."""
        counts, took_s = self._look(), time.perf_counter() - self._began_s
        done = counts.completed + counts.failed == counts.total
        return None if done else round((counts.completed - self._answered) / took_s, 2)

    def _look(self) -> BatchRequestCounts:
        counts = self._client.batches.retrieve(self._id).request_counts
        assert counts is not None
        assert not counts.failed, "a line failed"
        return counts


def alone(bench: Bench, rows: Sequence[Row]) -> None:
    """Adds `offline_wer`: what each level's callers said, heard whole. Callers who were refused said nothing."""
    callers = []
    for row in rows:
        level = bench.callers(row["callers"], bench.args.seconds)
        callers.append([level[number] for number in row[ADMITTED]])
    everybody = [caller for level in callers for caller in level]
    say(f"{OURS} offline: {len(everybody)} callers' audio")
    job = {"work": "offline", "callers": everybody, "device": bench.args.device, "model": bench.args.model}
    found = bench.work("live_worker.py", job) if everybody else {"texts": []}
    if "failed" in found:
        say(f"    {found['failed']}")
        return
    texts = iter(found["texts"])
    for row, level in zip(rows, callers, strict=True):
        said = [" ".join(bench.speech[clip].text for clip in caller.clips) for caller in level]
        row["offline_wer"] = live_report.error_rate(said, [next(texts) for _ in level])


def peer(name: str, bench: Bench) -> list[Row]:
    """A fresh process for every level; numbers above one that broke are not tried."""
    pins, args = live_peers.PINS[name], bench.args
    try:
        python = serve_peers.environment(args.peer_venvs / name, pins) if pins else Path(sys.executable)
    except serve_peers.Absent as why:
        trouble = {"skipped": f"cannot be installed: {why}"}
        return [{**live_report.blank(name, count), **trouble} for count in args.callers]

    def level(count: int) -> Row:
        callers = bench.callers(count, args.seconds)
        found = bench.work("live_peers.py", {"peer": name, "callers": callers, "seconds": args.seconds}, python)
        row = {**bench.row(name, callers, found), "notes": found.get("notes")}
        row.pop(ADMITTED, None)
        return row

    return levels(name, level, args)


def levels(system: str, level: Level, args: argparse.Namespace) -> list[Row]:
    """Every number of callers asked for, and with --find-max those on the way to the most that are fine."""
    rows: dict[int, Row] = {}

    def measured(count: int) -> bool:
        if count not in rows:
            rows[count] = level(count)
            say(f"{system}  {live_report.brief(rows[count])}")
        return live_report.holds(rows[count])

    for count in sorted(args.callers):
        least = min((done for done, row in rows.items() if not live_report.holds(row)), default=None)
        if system != OURS and least is not None:
            why = rows[least].get("skipped") or f"{least} were too many already"
            rows[count] = {**live_report.blank(system, count), "skipped": why}
        else:
            measured(count)
    if args.find_max and all("failed" not in row for row in rows.values()):
        tried = {count: live_report.holds(row) for count, row in rows.items() if "skipped" not in row}
        if tried:
            say(f"{system} holds {most(measured, tried)} callers")
    return [rows[count] for count in sorted(rows)]


def most(holds: Callable[[int], bool], tried: dict[int, bool]) -> int:
    """The most that hold, to a sixteenth: doubling from the most known to, then halving what is between."""
    broken = min((count for count, fine in tried.items() if not fine), default=None)
    held = max((count for count, fine in tried.items() if fine and (broken is None or count < broken)), default=0)
    while broken is None and held < MOST_CALLERS:
        count = max(1, 2 * held)
        if holds(count):
            held = count
        else:
            broken = count
    while broken is not None and broken - held > max(1, held // 16):
        middle = (held + broken) // 2
        if holds(middle):
            held = middle
        else:
            broken = middle
    return held


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="folder with transcripts.tsv")
    add("--callers", type=serve.numbers, default=[1, 8, 32], metavar="A,B", help="how many speak at once (1,8,32)")
    add("--seconds", type=float, default=60.0, metavar="S", help="how long each speaks, about (60)")
    add("--pause", type=float, default=2.5, metavar="S", help="silence between clips (2.5)")
    add("--protocol", type=offline.named(NAMES), default=["funasr"], metavar="A,B", help=f"{','.join(NAMES)} (funasr)")
    add("--silence-ms", type=int, metavar="MS", help="the pause that ends a sentence; default: the streaming table's")
    add("--at-once", action="store_true", help="all connect in one instant; those refused are counted, not measured")
    add("--retry", action="store_true", help="with --at-once: those refused dial again when they were told to")
    add("--batch", type=int, default=0, metavar="N", help="each level again, beside a batch of N clips of 3 s (0)")
    add("--peers", type=offline.named(live_peers.MAKERS), default=[], metavar="A,B", help="moonshine-voice,vosk")
    add("--only-peers", action="store_true", help="leave asr-serve out")
    add("--find-max", action="store_true", help="look for the most callers that each system holds")
    add("--model", default="moonshine-tiny-en", metavar="NAME", help="that asr-serve serves (moonshine-tiny-en)")
    add("--device", default="auto", help="for asr-serve: auto, cpu, cuda (auto)")
    add("--json", type=Path, metavar="FILE", help="where the result goes; without it only the table is printed")
    add("--clips", type=int, metavar="N", help="only N clips, spread evenly over the set")
    add("--threads", type=int, default=machine.cores(), metavar="N", help="for every system (all cores)")
    add("--server", type=shlex.split, default=[], metavar="OPTIONS", help="more options for `asr-serve serve`")
    add("--peer-venvs", type=Path, default=serve_peers.ENVIRONMENTS, metavar="DIR", help="(.venv-peers)")
    add("--limit-s", type=float, default=1_800, metavar="S", help="longest a level may take (1800)")
    args = parser.parse_args(argv)
    if "openai" in args.protocol and args.silence_ms is None:
        parser.error("--protocol openai needs --silence-ms: it waits for one pause, whatever was said before")
    if "riva" in args.protocol and args.silence_ms is None:
        parser.error("--protocol riva needs --silence-ms: the ends of sentences are told by it")
    if args.at_once and args.find_max:
        parser.error("--at-once refuses callers whom --find-max looks for: one or the other")
    if args.retry and not args.at_once:
        parser.error("--retry needs --at-once: otherwise all who are refused dial again, every 3 s")
    for name in ("seconds", "clips", "threads", "pause"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            parser.error(f"--{name} must be above 0")
    return args


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent / "src"))  # for the error rates, when asr-serve is not installed
    sys.exit(main())
