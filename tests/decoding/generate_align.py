"""Writes fixtures/align.npz: real posteriors, letters, and the frames that ctc-segmentation gives them.

In two steps, for the package wants a numpy that is older than ours:

    PYTHONPATH=src:tests/engine python tests/decoding/generate_align.py hear
    pip install --target PEERS --no-deps ctc-segmentation==1.7.4 numpy==1.26.4
    PYTHONPATH=PEERS python tests/decoding/generate_align.py align

The speech is English, of the package moonshine-voice, and the model hears Armenian: what it spells says nothing,
but its posteriors are those of a real model. Letters are those of its best path.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import sys
from pathlib import Path

import numpy as np

FIXTURE = Path(__file__).parent / "fixtures" / "align.npz"
SECONDS = 16
MODEL = "armspeech-hy"


def hear() -> None:
    """logprobs (frames, vocab) float16: natural log-probabilities, rounded; and what they say."""
    import torch
    from safetensors.torch import load_file
    from tiny_streaming import device

    from asr_serve.audio import read_audio
    from asr_serve.engine.builder import AsrCheckpoint

    folder = Path(str(importlib.resources.files("moonshine_voice"))) / "assets"
    pcm = read_audio(folder / "two_cities.wav")[: SECONDS * 16_000]
    found = AsrCheckpoint.find(MODEL, None)
    model = found.file.Model(found.config, load_file(found.folder / "model.safetensors"), device(torch.float32))
    with torch.inference_mode():
        logprobs = model.ctc(model.masked(torch.from_numpy(pcm)))[0].half().numpy()
    best, blank = logprobs.argmax(-1).tolist(), model.blank
    tokens = [s for s, before in zip(best, [blank, *best], strict=False) if s not in (blank, before)]
    versions = {name: importlib.metadata.version(name) for name in ("armspeech", "moonshine-voice")}
    np.savez_compressed(FIXTURE, logprobs=logprobs, tokens=tokens, blank=blank, versions=json.dumps(versions))


def align() -> None:
    """frames (tokens,) int64: at which the package's path enters each."""
    import ctc_segmentation

    made = dict(np.load(FIXTURE))
    logprobs, blank = made["logprobs"].astype(np.float32), int(made["blank"])
    config = ctc_segmentation.CtcSegmentationParameters(
        blank=blank, index_duration=1.0, char_list=[str(i) for i in range(logprobs.shape[1])]
    )
    truth, _ = ctc_segmentation.prepare_token_list(config, [made["tokens"]])
    timings, _, _ = ctc_segmentation.ctc_segmentation(config, logprobs, truth)
    versions = json.loads(str(made["versions"]))
    for name in ("ctc-segmentation", "numpy"):
        versions[name] = importlib.metadata.version(name)
    made |= {"frames": timings[2:-1].astype(np.int64), "versions": np.array(json.dumps(versions))}
    np.savez_compressed(FIXTURE, **made)


if __name__ == "__main__":
    {"hear": hear, "align": align}[sys.argv[1]]()
