"""A long recording that is joined of clips, against the clips alone: what cutting costs, in words.

    python bench/long_form.py --data DIR --model whisper-tiny-en --json long_form.json

DIR holds transcripts.tsv, lines of relative/path.flac<TAB>text. The clips are shuffled and repeated, a pause
after each, until the recording is long enough; the same seed makes the same recording. Every clip is heard alone,
then the recording in segments that voice activity cuts (`parallel`) and, by a model that says when, window by
window (`sequential`). Rates are over the same words, after Whisper's normaliser.

`seam_edits` are words that are inserted or deleted within SEAM_WORDS words of where two clips meet, and would not
be if the clips were heard alone: of each seam the insertions beyond those of the clips alone are counted, and so
are the deletions. Some of them are mishearings: "whom so ever" for "whomsoever" inserts two words and doubles
none. `seam_errors` leaves those out: where words in a row came otherwise than they were said, and are about as
long together (not shorter than half of it, nor longer by half), nothing was lost or doubled.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

import clips
import jiwer
import machine
import numpy as np
import peers
from clips import RATE_HZ, Audio, Clip

import asr_serve
from asr_serve.api.library import Model
from asr_serve.config import EngineConfig
from asr_serve.models.registry import AsrCard
from asr_serve_tools.evaluate.wer import normalize, wer

SEAM_WORDS = 3
PAUSES_S = (0.0, 0.2, 0.5, 1.0, 2.0)
SHOWN = 12
"""Words around a seam that the result holds."""


class Joined(NamedTuple):
    order: list[int]
    """Clips, by number."""
    pauses_s: list[float]
    audio: Audio


class Edits(NamedTuple):
    """Where words are missing, and before which there are too many: positions among the words of a reference, as
    often as that happens. `shifts`: (position there, position among the words that were heard)."""

    deleted: list[int]
    inserted: list[int]
    shifts: list[tuple[int, int]]


class Seam(NamedTuple):
    deleted: int
    inserted: int


def join(speech: Sequence[Clip], minutes: float, seed: int) -> Joined:
    chance, order, pauses_s, parts = random.Random(seed), list[int](), list[float](), list[Audio]()
    samples, turn = 0, list[int]()
    while samples < minutes * 60 * RATE_HZ:
        turn = turn or chance.sample(range(len(speech)), len(speech))
        order.append(turn.pop())
        pauses_s.append(chance.choice(PAUSES_S))
        parts += [speech[order[-1]].audio, np.zeros(round(pauses_s[-1] * RATE_HZ), np.float32)]
        samples += len(parts[-2]) + len(parts[-1])
    return Joined(order, pauses_s, np.concatenate(parts))


def edits(reference: Sequence[str], heard: Sequence[str], *, misheard: bool) -> Edits:
    """Words that were said, as they were heard. `misheard`: count those too that are about as long as what was
    said there."""
    if not reference or not heard:
        return Edits(list(range(len(reference))), [0] * len(heard), [])
    found = Edits([], [], [])
    (alignment,) = jiwer.process_words(" ".join(reference), " ".join(heard)).alignments
    for same, run in groupby(alignment, lambda chunk: chunk.type == "equal"):
        chunks = list(run)
        first, last = chunks[0], chunks[-1]
        found.shifts.append((first.ref_start_idx, first.hyp_start_idx))
        said = sum(map(len, reference[first.ref_start_idx : last.ref_end_idx]))
        came = sum(map(len, heard[first.hyp_start_idx : last.hyp_end_idx]))
        if same or (not misheard and said / 2 <= came <= 1.5 * said):
            continue
        for chunk in chunks:
            if chunk.type == "delete":
                found.deleted.extend(range(chunk.ref_start_idx, chunk.ref_end_idx))
            elif chunk.type == "insert":
                found.inserted.extend([chunk.ref_start_idx] * (chunk.hyp_end_idx - chunk.hyp_start_idx))
    return found


def seams(starts: Sequence[int], found: Edits) -> list[Seam]:
    """Of each place where a clip begins behind another: edits at most SEAM_WORDS words from it."""
    return [
        Seam(
            sum(at - SEAM_WORDS <= word < at + SEAM_WORDS for word in found.deleted),
            sum(abs(word - at) <= SEAM_WORDS for word in found.inserted),
        )
        for at in starts[1:]
    ]


def moved(alone: Sequence[Edits], starts: Sequence[int]) -> Edits:
    """The edits of clips, as if all were one."""
    pairs = list(zip(alone, starts, strict=True))
    return Edits(
        [word + start for found, start in pairs for word in found.deleted],
        [word + start for found, start in pairs for word in found.inserted],
        [],
    )


def around(words: Sequence[str], at: int) -> str:
    return " ".join(words[max(0, at - SHOWN // 2) : at + SHOWN // 2])


def judged(
    name: str, heard: str, references: Sequence[str], alone: Sequence[str], joined: Joined, wall_s: float
) -> dict[str, Any]:
    """One way to hear the recording, against the clips alone; all of them normalised."""
    said = [reference.split() for reference in references]
    starts = [0, *accumulate(map(len, said))][:-1]
    whole = [word for words in said for word in words]
    words = normalize(heard).split()
    bad, counts = [], {True: 0, False: 0}
    for misheard in (True, False):
        found = edits(whole, words, misheard=misheard)
        theirs = [edits(a, b.split(), misheard=True) for a, b in zip(said, alone, strict=True)]
        before = moved(theirs, starts)
        for number, (now, then, at) in enumerate(
            zip(seams(starts, found), seams(starts, before), starts[1:], strict=True)
        ):
            worse = Seam(max(0, now.deleted - then.deleted), max(0, now.inserted - then.inserted))
            counts[misheard] += sum(worse)
            if misheard or not any(worse):
                continue
            near = next((heard_at + at - said_at for said_at, heard_at in reversed(found.shifts) if said_at <= at), at)
            bad.append(
                {
                    "after_clip": number,
                    "pause_s": joined.pauses_s[number],
                    **worse._asdict(),
                    "said": around(whole, at),
                    "alone": [alone[number], alone[number + 1]],
                    "heard": around(words, near),
                }
            )
    rate = wer([" ".join(references)], [heard])
    return {
        "name": name,
        "wer": round(rate.percent, 2),
        "substitutions": rate.substitutions,
        "deletions": rate.deletions,
        "insertions": rate.insertions,
        "seams": len(starts) - 1,
        "seam_errors": counts[False],
        "seam_edits": counts[True],
        "bad_seams": bad,
        "wall_s": round(wall_s, 2),
    }


def transcribed(model: Model, audio: Sequence[Audio], **options: Any) -> tuple[list[str], float]:
    began = time.perf_counter()
    texts = [found.text for found in model.transcribe(list(audio), **options)]
    return texts, time.perf_counter() - began


def measure(model: Model, speech: Sequence[Clip], joined: Joined) -> list[dict[str, Any]]:
    references = [normalize(speech[i].text) for i in joined.order]
    texts, wall_s = transcribed(model, [clip.audio for clip in speech])
    alone = [normalize(texts[i]) for i in joined.order]
    rate = wer(references, alone)
    rows: list[dict[str, Any]] = [{"name": "alone", "wer": round(rate.percent, 2), "words": rate.reference}]
    rows[0] |= {"deletions": rate.deletions, "insertions": rate.insertions, "wall_s": round(wall_s, 2)}
    for way in ("parallel", "sequential"):
        if way == "sequential" and isinstance(model.card, AsrCard) and model.card.times is None:
            rows.append({"name": way, "skipped": f"{model.card.name} does not say when"})
            continue
        (text,), wall_s = transcribed(model, [joined.audio], long_form=way)
        rows.append(judged(way, text, references, alone, joined, wall_s))
        rows[-1]["wer_minus_alone"] = round(rows[-1]["wer"] - rows[0]["wer"], 2)
    return rows


def beside(speech: Sequence[Clip], joined: Joined, threads: int) -> list[dict[str, Any]]:
    """faster-whisper, whose one way is window after window: against its own clips alone."""
    peer = peers.FasterWhisper("cpu", threads)
    references = [normalize(speech[i].text) for i in joined.order]
    texts = [normalize(peer.one(clip.audio)) for clip in speech]
    alone = [texts[i] for i in joined.order]
    began = time.perf_counter()
    heard = peer.one(joined.audio)
    wall_s = time.perf_counter() - began
    row = judged("faster-whisper", heard, references, alone, joined, wall_s)
    row["wer_alone"] = round(wer(references, alone).percent, 2)
    row["wer_minus_alone"] = round(row["wer"] - row["wer_alone"], 2)
    return [row]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with transcripts.tsv")
    parser.add_argument("--clips", type=int, help="so many of them, evenly spread; all")
    parser.add_argument("--model", default="whisper-tiny-en")
    parser.add_argument("--weights", help="a checkpoint's folder, instead of the package's")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON of EngineConfig")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--peer", action="store_true", help="faster-whisper tiny.en (int8, its defaults) as well")
    parser.add_argument("--json", type=Path, help="write the result there as well")
    args = parser.parse_args(argv)
    speech = clips.load(args.data, args.clips)
    joined = join(speech, args.minutes, args.seed)
    engine = EngineConfig(**{"prefix_bytes": 0} | args.engine)  # the same recording again is heard again
    with asr_serve.load(args.model, weights=args.weights, device=args.device, dtype=args.dtype, engine=engine) as model:
        told = model.describe()
        rows = measure(model, speech, joined)
    if args.peer:
        rows += beside(speech, joined, machine.cores())
    for row in rows:
        print({key: value for key, value in row.items() if key != "bad_seams"}, file=sys.stderr)
    result = {
        "bench": "long_form",
        "machine": machine.describe(told.get("threads", machine.cores())),
        "model": args.model,
        "dtype": told.get("dtype"),
        "audio_s": round(len(joined.audio) / RATE_HZ, 1),
        "clips": len(joined.order),
        "seed": args.seed,
        "rows": rows,
    }
    machine.tell(args.json, result)


if __name__ == "__main__":
    main()
