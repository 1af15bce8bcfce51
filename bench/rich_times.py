"""When words begin: ours against references with times, and against another system's forced alignment.

Three kinds of reference, because no recording here has word times that a person set:

multilingual    `multilingual/test_data.json`: 8 languages, a sentence each, word times of another recogniser
aligned         `librispeech-test-other`: what pocketsphinx finds where it is told every word that is said; clips
                with a word that its lexicon lacks, or where it finds no way, are left out, and counted
turns           `two-speaker-mixes`: their seglst tells where utterances begin, not words; compared is the first
                word of each. Recordings of LibriSpeech begin with a little silence, so this error has a floor

    python bench/rich_times.py --data DIR --models moonshine-tiny-en,whisper-tiny-en,whisper-base --json times.json

DIR holds the three folders named above. rich.py runs this beside the other parts.
"""

from __future__ import annotations

import argparse
import json
import string
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import clips
import machine
import numpy as np

import asr_serve
from asr_serve.api.library import Model
from asr_serve.types import Word

Row = dict[str, Any]
PCM16 = 32_767
ALIGNER_FRAME_S = 0.01


class Said(NamedTuple):
    """A word of a reference."""

    text: str
    start_s: float


def letters(text: str) -> str:
    """What two spellings of a word have in common: no case, no marks."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return "".join(c for c in folded if c.isalnum())


def errors_s(reference: Sequence[Said], heard: Sequence[Word]) -> list[float]:
    """Start of each word that both have, ours less theirs. Words are matched letter by letter, so that languages
    whose words have no spaces between are matched too; one counts where its first letter begins a word of ours."""
    left = [(c, index, not at) for index, word in enumerate(reference) for at, c in enumerate(letters(word.text))]
    right = [(c, index, not at) for index, word in enumerate(heard) for at, c in enumerate(letters(word.text))]
    matcher = SequenceMatcher(None, [c for c, _, _ in left], [c for c, _, _ in right], autojunk=False)
    pairs: dict[int, int] = {}
    for block in matcher.get_matching_blocks():
        pairs |= {block.a + i: block.b + i for i in range(block.size)}
    found = []
    for at, (_, index, first) in enumerate(left):
        size = len(letters(reference[index].text))
        if not first or not all(at + i in pairs and pairs[at + i] == pairs[at] + i for i in range(size)):
            continue
        _, word, begins = right[pairs[at]]
        if begins:
            found.append(heard[word].start_s - reference[index].start_s)
    return found


def row(name: str, model: str, reference: int, errors: Sequence[float], **more: Any) -> Row:
    """In ms. `bias_ms`: the median with its sign."""
    if not errors:
        return {"name": name, "model": model, "words": reference, "matched": 0, **more}
    absolute = np.abs(errors) * 1_000
    return {
        "name": name,
        "model": model,
        "words": reference,
        "matched": len(errors),
        "start_error_p50_ms": round(float(np.median(absolute)), 1),
        "start_error_p90_ms": round(float(np.quantile(absolute, 0.9)), 1),
        "start_error_mean_ms": round(float(absolute.mean()), 1),
        "within_100_ms": round(float((absolute <= 100).mean()), 3),
        "bias_ms": round(float(np.median(errors)) * 1_000, 1),
        **more,
    }


def words(model: Model, path: Path, **options: Any) -> list[Word]:
    (transcript,) = model.transcribe(str(path), words=True, **options)
    return [word for segment in transcript.segments for word in segment.words]


def multilingual(model: Model, data: Path) -> Iterator[Row]:
    """A row for each language that the model hears."""
    for test in json.loads((data / "multilingual/test_data.json").read_text())["tests"]["language_tests"]:
        language = test["language"]
        if language not in model.card.languages:
            continue
        audio = (data / "multilingual" / test["audio_file"]).with_suffix(".flac")
        reference = [Said(word["word"], word["start_sec"]) for word in test["words"]]
        heard = words(model, audio, language=language)
        yield row(f"multilingual {language}", model.card.name, len(reference), errors_s(reference, heard))


def aligned(model: Model, data: Path, limit: int | None) -> Iterator[Row]:
    """One row; skipped where pocketsphinx is not installed."""
    try:
        import pocketsphinx
    except ImportError:
        yield {"name": "aligned en", "model": model.card.name, "skipped": "pip install pocketsphinx==5.1.1"}
        return
    decoder = pocketsphinx.Decoder(loglevel="FATAL")
    folder = data / "librispeech-test-other"
    speech = clips.load(folder, limit)
    found: list[float] = []
    total = left_out = 0
    for clip in speech:
        reference = forced(decoder, clip.audio, clip.text)
        if not reference:
            left_out += 1
            continue
        total += len(reference)
        found += errors_s(reference, words(model, folder / clip.path))
    yield row("aligned en", model.card.name, total, found, clips=len(speech) - left_out, left_out=left_out)


def forced(decoder: Any, pcm: np.ndarray, text: str) -> list[Said]:
    """Where pocketsphinx finds the words of `text`: words first, then their states. Nothing where its lexicon
    lacks one, or it finds no way through."""
    if not all(decoder.lookup_word(word) for word in text.split()):
        return []
    raw = (np.clip(pcm, -1, 1) * PCM16).astype("<i2").tobytes()
    decoder.set_align_text(text)
    try:
        for again in (False, True):
            if again:
                decoder.set_alignment()
            decoder.start_utt()
            decoder.process_raw(raw, full_utt=True)
            decoder.end_utt()
    except RuntimeError:  # its word for it
        return []
    spoken = [word for word in decoder.get_alignment() if word.name[0] in string.ascii_letters]
    return [Said(word.name.partition("(")[0], word.start * ALIGNER_FRAME_S) for word in spoken]


def turns(model: Model, data: Path) -> Iterator[Row]:
    """One row: the first word of each utterance of the mixes."""
    found: list[float] = []
    total = 0
    for path in sorted((data / "two-speaker-mixes").glob("*.seglst.json")):
        heard = words(model, path.with_name(path.name.replace(".seglst.json", ".flac")))
        for said in json.loads(path.read_text()):
            total += 1
            first = letters(said["words"].split()[0])
            near = [w.start_s - said["start_time"] for w in heard if letters(w.text) == first]
            near = [error for error in near if abs(error) < 2]
            found += [min(near, key=abs)] if near else []
    yield row("turns en", model.card.name, total, found)


def rows(model: Model, data: Path, limit: int | None) -> Iterator[Row]:
    yield from multilingual(model, data)
    if "en" in model.card.languages:
        yield from aligned(model, data, limit)
        yield from turns(model, data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--models", default="moonshine-tiny-en,whisper-tiny-en,whisper-base", metavar="NAMES")
    parser.add_argument("--clips", type=int, metavar="N", help="of the aligned ones only so many, spread evenly")
    parser.add_argument("--threads", type=int, default=machine.cores())
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    found: list[Row] = []
    for name in args.models.split(","):
        with asr_serve.load(name) as model:
            for made in rows(model, args.data, args.clips):
                found.append(made)
                print(made, file=sys.stderr, flush=True)
    machine.tell(args.json, {"bench": "rich_times", "machine": machine.describe(args.threads), "rows": found})


if __name__ == "__main__":
    main()
