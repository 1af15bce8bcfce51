"""A cascade of two recognizers: word error rate and processor time of each alone, and of both at several thresholds.

    python bench/cascade.py --data DIR --second whisper-base --json cascade.json

DIR holds transcripts.tsv, lines of relative/path.flac<TAB>text. Rows of other thresholds than the default one,
chain-then-whisper.toml's, are there to show the trade: none was chosen by them. `--second` puts another model than
the file's into the second stage. `--lm` adds the pipeline chain-lm.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import clips
import machine

import asr_serve
from asr_serve.api.library import FileTranscriber
from asr_serve.config import EngineConfig
from asr_serve.pipelines.stages.pipeline_file import find_pipeline
from asr_serve_tools.evaluate.wer import normalize, wer

CHAIN, WHISPER, CASCADE, LM = "vosk-small-en", "whisper-tiny-en", "chain-then-whisper", "chain-lm"
ENGINE = EngineConfig(prefix_bytes=0, use_chunked_inference=True)
"""Without a cache: a pass must not find the answers of the one before. The chain model takes many segments a step."""
DEFAULT_CONDITION = "confidence < 0.9"
"""As the shipped file has it; replaced for the other rows."""


def measure(load: Callable[[], Any], speech: Sequence[clips.Clip], passes: int) -> dict[str, Any]:
    """Error rate over the clips, and the median processor time of a pass. The first pass, in which memory is mapped
    and kernels are chosen, is not measured. Text must be the same in every pass."""
    audio, references = [clip.audio for clip in speech], [normalize(clip.text) for clip in speech]
    with load() as model:
        transcribe(model, audio)
        before = segments(model)
        cpu_s, wall_s, texts = [], [], []
        for _ in range(passes):
            cpu, wall = time.process_time(), time.perf_counter()
            texts = transcribe(model, audio)
            cpu_s.append(time.process_time() - cpu)
            wall_s.append(time.perf_counter() - wall)
        processed = [after - first for after, first in zip(segments(model), before, strict=True)]
    rate, audio_s = wer(references, [normalize(text) for text in texts]), clips.seconds(audio)
    return {
        "wer": round(rate.percent, 2),
        "errors": rate.errors,
        "words": rate.reference,
        "audio_s": round(audio_s, 1),
        "cpu_s": round(statistics.median(cpu_s), 2),
        "cpu_ms_per_audio_s": round(1_000 * statistics.median(cpu_s) / audio_s, 2),
        "wall_s": round(statistics.median(wall_s), 2),
        **({"second_share": round(processed[1] / processed[0], 4)} if len(processed) > 1 else {}),
    }


def transcribe(model: FileTranscriber, audio: Sequence[clips.Audio]) -> list[str]:
    return [transcript.text for transcript in model.transcribe(list(audio))]


def segments(model: Any) -> list[float]:
    """Seconds of audio that each stage of a pipeline has processed; none for a model."""
    return [stage["audio_s"] for stage in model.describe().get("stages", [])]


def cascade(threshold: float, second: str, folder: Path) -> str:
    """Path of the shipped cascade with another threshold and another second model."""
    text = find_pipeline(CASCADE).read_text().replace(WHISPER, second)
    assert text.count(DEFAULT_CONDITION) == 1
    path = folder / f"cascade-{threshold:g}.toml"
    path.write_text(text.replace(DEFAULT_CONDITION, f"confidence < {threshold:g}"))
    return str(path)


def run(args: argparse.Namespace) -> dict[str, Any]:
    speech = clips.load(args.data, args.clips)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        turns: list[tuple[dict[str, Any], Callable[[], Any]]] = [
            ({"name": CHAIN}, lambda: asr_serve.load(CHAIN, turn_model="none", engine=ENGINE)),
            ({"name": args.second}, lambda: asr_serve.load(args.second, turn_model="none", engine=ENGINE)),
        ]
        for threshold in args.thresholds:
            file = cascade(threshold, args.second, Path(temporary))
            row = {
                "name": CASCADE,
                "second": args.second,
                "threshold": threshold,
                "default": f"< {threshold:g}" in DEFAULT_CONDITION,
            }
            turns.append((row, lambda file=file: asr_serve.load_pipeline(file, engine=ENGINE)))  # type: ignore[misc]
        if args.lm:
            turns.append(({"name": LM}, lambda: asr_serve.load_pipeline(LM, engine=ENGINE)))
        for row, load in turns:
            rows.append(row | measure(load, speech, args.passes))
            print(rows[-1], file=sys.stderr, flush=True)
    return {"bench": "cascade", "machine": machine.describe(args.threads), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--clips", type=int, help="only this many, spread evenly")
    parser.add_argument(
        "--thresholds", type=lambda text: [float(each) for each in text.split(",")], default=[0.8, 0.85, 0.9, 0.95]
    )
    parser.add_argument("--second", default=WHISPER, help="model of the second stage (default: %(default)s)")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lm", action="store_true", help=f"the pipeline {LM} too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["ASR_SERVE_THREADS"] = str(args.threads)
    machine.tell(args.json, run(args))


if __name__ == "__main__":
    main()
