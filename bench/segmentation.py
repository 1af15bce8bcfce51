"""Words with voice activity beside words without: how many change, and whether more of them are wrong.

    python bench/segmentation.py --speech DIR --json segmentation.json
    python bench/segmentation.py --data DIR --data DIR2 --json segmentation-check.json

--data holds transcripts.tsv, lines of relative/path.flac<TAB>text. --speech holds clips whose text need not be known:
what --judge, another model, hears in the clean clip whole, with a beam, stands for the text. That is no truth, but it
errs alike on both sides. Clips of --speech are recognized as they are, in noise, and as through a telephone; those of
--data too where --conditions names more. --thresholds tries other probabilities from which a window counts as speech.

Each row has the errors of both ways over the same clips, their difference, and the difference's standard deviation:
that of a sum of the clips' own differences. A difference within two of them is chance.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import clips
import machine
import numpy as np
from clips import RATE_HZ, Audio
from offline import named

import asr_serve
from asr_serve.config import EngineConfig
from asr_serve_tools.evaluate.wer import normalize, wer

Row = dict[str, Any]
NOISE_DB = 8.0
"""Level of speech above the noise, by their power."""
NOISE_HZ = 100.0
"""Above it the noise's power falls as brown noise's does."""
BAND_HZ = (300.0, 3_400.0)
MU = 255.0
FAINT_GAIN, LINE_NOISE = 0.1, 0.002


def noisy(audio: Audio) -> Audio:
    """With brown noise, as of wind and engines, and a little white noise."""
    chance = np.random.default_rng(len(audio))
    brown = filtered(chance.normal(size=len(audio)), lambda hz: 1 / np.maximum(hz, NOISE_HZ))
    noise = brown / brown.std() + 0.3 * chance.normal(size=len(audio))
    level = audio.std() * 10 ** (-NOISE_DB / 20)
    return np.asarray(audio + level * noise / noise.std(), np.float32)


def telephone(audio: Audio) -> Audio:
    """The band of a telephone, and 8 bits of mu-law."""
    low, high = BAND_HZ
    band = filtered(audio, lambda hz: ((hz >= low) & (hz <= high)).astype(float))
    band = band / (2 * np.abs(band).max())
    pressed = np.round(127 * np.log1p(MU * np.abs(band)) / np.log1p(MU)) / 127
    return np.asarray(np.sign(band) * np.expm1(pressed * np.log1p(MU)) / MU, np.float32)


def faint(audio: Audio) -> Audio:
    """Of somebody who speaks softly or far from a telephone, with the noise of a line."""
    chance = np.random.default_rng(len(audio))
    return np.asarray(FAINT_GAIN * telephone(audio) + chance.normal(0, LINE_NOISE, len(audio)), np.float32)


def filtered(audio: np.ndarray, gain: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """`gain`: factor of each frequency in Hz."""
    hz = np.fft.rfftfreq(len(audio), 1 / RATE_HZ)
    return np.fft.irfft(np.fft.rfft(audio) * gain(hz), len(audio))


CONDITIONS: dict[str, Callable[[Audio], Audio]] = {
    "clean": lambda audio: audio,
    "noise": noisy,
    "telephone": telephone,
    "faint": faint,
}


def compare(references: Sequence[str], whole: Sequence[str], segmented: Sequence[str]) -> Row:
    """Errors of two texts of each clip. Clips whose reference has no word are left out."""
    kept = [
        (reference, one, other)
        for reference, one, other in zip(references, whole, segmented, strict=True)
        if normalize(reference)
    ]
    pairs = [(wer([text], [one]).errors, wer([text], [other]).errors) for text, one, other in kept]
    differences = [after - before for before, after in pairs]
    mean = sum(differences) / len(differences)
    texts, one, other = map(list, zip(*kept, strict=True))
    changed = wer(one, other) if any(map(normalize, one)) else None
    before, after = wer(texts, one), wer(texts, other)
    return {
        "clips": len(kept),
        "words": before.reference,
        "errors_whole": before.errors,
        "errors_segmented": after.errors,
        "wer_whole": round(before.percent, 2),
        "wer_segmented": round(after.percent, 2),
        "words_changed": changed.errors if changed else None,
        "more_errors": sum(differences),
        "more_errors_sd": round(math.sqrt(sum((each - mean) ** 2 for each in differences)), 1),
    }


def hear(model: Any, audio: Sequence[Audio], **options: Any) -> list[str]:
    return [found.text for found in model.transcribe(list(audio), **options)]


def rows_of(
    model: Any,
    folder: Path,
    condition: str,
    references: Sequence[str],
    audio: Sequence[Audio],
    thresholds: Sequence[float],
) -> list[Row]:
    """A row for each threshold: the same clips whole, once, and segmented."""
    whole, rows = hear(model, audio, vad=False), []
    for threshold in thresholds:
        segmented = list(model.transcribe(list(audio), vad=True, threshold=threshold))
        row = {
            "data": folder.name,
            "condition": condition,
            "threshold": threshold,
            "minutes": round(clips.seconds(audio) / 60, 1),
            "segments": sum(len(found.segments) for found in segmented),
            **compare(references, whole, [found.text for found in segmented]),
        }
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def total(found: Sequence[Row]) -> Row:
    """All conditions of all speech together."""
    names = ("words", "errors_whole", "errors_segmented", "words_changed", "more_errors")
    sums = {name: sum(row[name] or 0 for row in found) for name in names}
    return {
        **sums,
        "wer_whole": round(100 * sums["errors_whole"] / sums["words"], 2),
        "wer_segmented": round(100 * sums["errors_segmented"] / sums["words"], 2),
        "more_errors_sd": round(math.sqrt(sum(row["more_errors_sd"] ** 2 for row in found)), 1),
    }


def numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, action="append", default=[], metavar="DIR", help="folder with transcripts.tsv")
    add("--speech", type=Path, action="append", default=[], metavar="DIR", help="folder of clips without text")
    add("--model", default="moonshine-tiny-en", metavar="NAME", help="(moonshine-tiny-en)")
    add("--judge", default="whisper-base", metavar="NAME", help="model whose text stands for that of --speech")
    add("--beam", type=int, default=5, metavar="N", help="of the judge (5)")
    add("--clips", type=int, metavar="N", help="of a folder at most (all)")
    add("--conditions", type=named(CONDITIONS), metavar="A,B", help=f"of {','.join(CONDITIONS)}")
    add("--thresholds", type=numbers, default=[0.5], metavar="P,P", help="a row each (0.5, the default)")
    add("--json", type=Path, metavar="FILE", help="where the result goes")
    args = parser.parse_args(argv)
    if not args.data and not args.speech:
        parser.error("--data or --speech is needed")
    known = {folder: clips.load(folder, args.clips) for folder in args.data}
    speech = {folder: clips.without_text(folder, args.clips) for folder in args.speech}
    judged: dict[Path, list[str]] = {}
    if speech:
        with asr_serve.load(args.judge, engine=EngineConfig(prefix_bytes=0)) as judge:
            for folder, heard in speech.items():
                judged[folder] = hear(judge, [clip.audio for clip in heard], vad=False, beam=args.beam, language="en")
    found: dict[str, Any] = {"bench": "segmentation", "machine": machine.describe(machine.cores()), "rows": []}
    with asr_serve.load(args.model, engine=EngineConfig(prefix_bytes=0)) as model:
        found |= {"model": args.model, "judge": args.judge, "products": model.describe()["products"]}
        for folder, heard in known.items():
            judged[folder] = [clip.text for clip in heard]
        for folder, heard in (known | speech).items():
            for name in args.conditions or (["clean"] if folder in known else ["clean", "noise", "telephone"]):
                audio = [CONDITIONS[name](clip.audio) for clip in heard]
                found["rows"] += rows_of(model, folder, name, judged[folder], audio, args.thresholds)
    for name, folders in (("data", args.data), ("speech", args.speech)):
        of_those = [row for row in found["rows"] if row["data"] in [folder.name for folder in folders]]
        if len(of_those) > 1 and len(args.thresholds) == 1:
            found[f"all_{name}"] = total(of_those)
    machine.tell(args.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
