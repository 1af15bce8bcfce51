"""Whole files, as fast as they go: this engine and its peers side by side in one run on one machine.

    python bench/offline.py --data DIR --peers moonshine-voice,onnx,faster-whisper --json offline.json

DIR holds transcripts.tsv, lines of relative/path.flac<TAB>text. README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import clips
import footprint
import machine
import report
from clips import Audio, Clip
from peers import PEERS, Options
from worker import Job, Result, job

HERE = Path(__file__).resolve().parent
OURS = "asr-serve"
PASSES = 3
"""Times a process goes through the clips: the first one still compiles for each new shape and maps memory."""
BATCHES = {"cpu": (1, 2, 4, 8, 16, 32, 64), "cuda": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)}
LENGTHS_S = (1, 2, 4, 8, 16, 30)
KV_BYTES_PER_ROW = 12 << 20
"""Enough for a row of 15 s in fp32, so that in the batch sweep the rows are the limit and not the pages."""

Start = Callable[[Job], Result]
Entry = tuple[str, str, Options]
"""Row name, maker, options."""


def entries(args: argparse.Namespace) -> list[Entry]:
    """Everything that takes its turn in a round, ours first."""
    peers: Iterable[str] = args.peers
    extra: Options = {
        "model": args.model,
        "language": args.language,
        **({"engine": args.engine} if args.engine else {}),
    }
    ours: list[Entry] = [(OURS, OURS, {"dtype": "auto", **extra})]
    ours += [(f"{OURS} {dtype}", OURS, {"dtype": dtype, **extra}) for dtype in args.dtypes]
    for kind in args.quantize:
        quantised = {**extra, "engine": {**args.engine, "quantize": kind}}
        ours += [(f"{OURS} {kind}", OURS, {"dtype": "auto", **quantised})]
    voice = {"vad": True, **extra}
    for beam in args.beams:
        ours += [(f"{OURS} beam {beam}", OURS, {"dtype": "auto", "beam": int(beam), **extra})]
        ours += [(f"{OURS} beam {beam} vad", OURS, {"dtype": "auto", "beam": int(beam), **voice})]
    ours += [(f"{OURS} vad", OURS, {"dtype": "auto", **voice})]
    return ours + [entry for peer in peers for entry in PEERS[peer]]


def side_by_side(
    turns: Sequence[Entry], speech: Sequence[Clip], args: argparse.Namespace, folder: Path, start: Start
) -> tuple[list[report.Row], dict[str, list[str]]]:
    """Each system once a round, round after round (A B C A B C), every time in a fresh process."""
    saved = folder / "clips.npz"
    clips.save(saved, [clip.audio for clip in speech])
    results: dict[str, list[Result]] = {name: [] for name, _, _ in turns}
    for number in range(args.repeats):
        for name, maker, options in turns:
            if any("walls_s" not in earlier for earlier in results[name]):
                continue  # missing or broken in the first round: it would be again
            result = start(job(maker, options, saved, args.device, args.threads, PASSES))
            results[name].append(result)
            say(f"round {number + 1}/{args.repeats}  {name}: {brief(result)}")
    references = [clip.text for clip in speech]
    rows = [report.row(name, results[name], references) for name, _, _ in turns]
    report.compare(rows)
    return rows, {name: runs[0]["texts"] for name, runs in results.items() if "texts" in runs[0]}


def batch_sweep(speech: Sequence[Clip], args: argparse.Namespace, folder: Path, start: Start) -> list[report.Row]:
    """Cost against the sequences that decode together; the clips are repeated until they fill them twice."""
    rows = []
    for batch in args.batches or BATCHES[args.device]:
        copies = -(-2 * batch // len(speech))
        engine = {**args.engine, "max_decode_rows": batch}
        if batch > 32:
            engine.setdefault("kv_bytes", batch * KV_BYTES_PER_ROW)
        audio = [clip.audio for clip in speech] * copies
        rows.append(
            point(f"{OURS} batch={batch}", OURS, {"engine": engine}, audio, args, folder, start)
            | {"sweep": "batch", "batch": batch}
        )
    return rows


def length_sweep(speech: Sequence[Clip], args: argparse.Namespace, folder: Path, start: Start) -> list[report.Row]:
    """Cost against clip length: the same speech cut anew, for us and for the plain loop beside us."""
    systems = [(OURS, {"engine": args.engine} if args.engine else {})]
    systems += [(report.BASE, {})] if report.BASE in args.peers else []
    rows = []
    for length_s in LENGTHS_S:
        audio = clips.cut([clip.audio for clip in speech], length_s)
        for name, options in systems:
            rows.append(
                point(f"{name} length={length_s}", name, options, audio, args, folder, start)
                | {"sweep": "length", "clip_s": length_s, "clips": len(audio)}
            )
    return rows


def point(
    name: str,
    maker: str,
    options: Options,
    audio: Sequence[Audio],
    args: argparse.Namespace,
    folder: Path,
    start: Start,
) -> report.Row:
    """One point of a sweep: one process, the median of its passes. No error rate: cuts go through words."""
    saved = folder / "sweep.npz"
    clips.save(saved, audio)
    result = start(job(maker, options, saved, args.device, args.threads, args.repeats))
    say(f"sweep  {name}: {brief(result)}")
    return report.row(name, [result], None)


def environment(threads: int) -> dict[str, str]:
    """The same number of threads for everybody, whichever library starts them."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ASR_SERVE_THREADS")
    paths = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        **dict.fromkeys(names, str(threads)),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


def starter(folder: Path, env: dict[str, str], limit_s: float) -> Start:
    """Runs jobs in processes of their own; what goes wrong there becomes a row, not the end of the bench."""

    def start(work: Job) -> Result:
        asked, answered, errors = (folder / name for name in ("job.json", "result.json", "stderr.txt"))
        answered.unlink(missing_ok=True)
        asked.write_text(json.dumps(work))
        command = [sys.executable, str(HERE / "worker.py"), str(asked), str(answered)]
        with errors.open("w") as log:
            try:
                done = subprocess.run(command, env=env, stdout=log, stderr=log, timeout=limit_s, check=False)
            except subprocess.TimeoutExpired:
                return {"failed": f"not done after {limit_s:.0f} s"}
        if done.returncode or not answered.exists():
            log_text = errors.read_text(errors="replace")
            print(log_text[-4_000:], file=sys.stderr)
            return {"failed": f"exit {done.returncode}: {footprint.last_line(log_text)}"}
        result: Result = json.loads(answered.read_text())
        return result

    return start


def brief(result: Result) -> str:
    for trouble in ("skipped", "failed"):
        if trouble in result:
            return f"{trouble}: {result[trouble]}"
    return f"{result['audio_s'] / min(result['walls_s']):.1f} x real time"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def named(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    """A comma-separated list for argparse, each name one of `allowed`."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r}: one of {', '.join(allowed)}")
        return names

    return parse


def counts(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=NUMBER")
    return name, json.loads(value)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="folder with transcripts.tsv")
    add("--peers", type=named(PEERS), default=[], metavar="A,B", help=f"any of {','.join(PEERS)}")
    add("--model", default="moonshine-tiny-en", help="ours (moonshine-tiny-en)")
    add("--language", help="of the clips, for ours that would detect it")
    add("--quantize", type=named(("none", "int8", "dynamic", "auto")), default=[], metavar="A,B", help="a row each")
    add("--beams", type=named(("2", "5", "8")), default=[], metavar="A,B", help="2, 5, 8: a row each")
    add("--device", choices=tuple(BATCHES), default="cpu")
    add("--dtypes", type=named(("fp32", "bf16")), default=["fp32", "bf16"], metavar="A,B")
    add("--json", type=Path, metavar="FILE", help="where the result goes; without it only the table is printed")
    add("--repeats", type=int, default=3, metavar="N", help="rounds (3)")
    add("--clips", type=int, metavar="N", help="only N clips, spread evenly over the set")
    add("--threads", type=int, default=machine.cores(), metavar="N", help="for every system (all cores)")
    add("--sweep", type=named(("batch", "length")), default=[], metavar="A,B", help="batch,length")
    add("--batches", type=counts, metavar="N,N", help="of the sweep (cpu: 1 to 64, cuda: 1 to 512)")
    add("--memory", action="store_true", help="peak memory over a generated three-hour file")
    add("--startup", action="store_true", help="seconds to the first text, cold and warm")
    add("--texts", type=Path, metavar="FILE", help="write every system's text for every clip")
    add("--engine", type=setting, action="append", default=[], metavar="NAME=N", help="an EngineConfig setting")
    add("--limit-s", type=float, default=3_600, metavar="S", help="longest a single run may take (3600)")
    args = parser.parse_args(argv)
    args.engine = dict(args.engine)
    for name in ("repeats", "clips", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    return args


def run(args: argparse.Namespace, folder: Path, start: Start, env: dict[str, str]) -> dict[str, Any]:
    """Everything asked for, as the one JSON object; also writes --texts."""
    speech = clips.load(args.data, args.clips)
    audio_s = clips.seconds([clip.audio for clip in speech])
    say(f"{len(speech)} clips, {audio_s:.1f} s, {args.threads} threads, {args.device}")
    about = machine.describe(args.threads)
    rows, heard = side_by_side(entries(args), speech, args, folder, start)
    if args.texts:
        shown = report.texts([clip.path for clip in speech], [clip.text for clip in speech], heard)
        args.texts.write_text(json.dumps(shown, indent=1, ensure_ascii=False), encoding="utf-8")
    if "batch" in args.sweep:
        rows += batch_sweep(speech, args, folder, start)
    if "length" in args.sweep:
        rows += length_sweep(speech, args, folder, start)
    if args.memory:
        say("memory: a three-hour file")
        rows.append(footprint.memory(speech, args.device, env))
    if args.startup:
        say("startup: one clip, empty cache, then again")
        rows += footprint.startup(speech[0], args.device, env, args.repeats, folder)
    return report.bench(about, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """1 when one of our own rows failed; a peer that is missing or breaks is only a row that says so."""
    args, env = parse(argv), {}
    env = environment(args.threads)
    with tempfile.TemporaryDirectory(prefix="asr-serve-bench-") as name:
        found = run(args, Path(name), starter(Path(name), env, args.limit_s), env)
    machine.write(args.json, found)
    print(report.table(found["rows"]))
    return int(any(row["rtfx"] is None for row in found["rows"] if row["name"].startswith(OURS)))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent / "src"))  # for the error rates, when asr-serve is not installed
    sys.exit(main())
