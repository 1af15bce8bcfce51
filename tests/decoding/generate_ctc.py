"""Writes fixtures/ctc.safetensors: posteriors, and what other people's CTC searches make of them.

Run with Python 3.11 in an environment of its own:

    pip install numpy==1.26.4 safetensors torch==2.13.0
    pip install pyctcdecode==0.5.0 flashlight-text==0.0.7 fast-ctc-decode==0.3.7
    pip install --no-deps masr==3.0.3

masr's search is WeNet's: the same prefix beam, nothing pruned but by the beam.
"""

from __future__ import annotations

import json
import math
from importlib.metadata import version
from pathlib import Path

import fast_ctc_decode
import numpy as np
from flashlight.lib.text.decoder import CriterionType, LexiconFreeDecoder, LexiconFreeDecoderOptions, ZeroLM
from masr.decoders.ctc_prefix_beam_search import run_ctc_prefix_beam_search
from pyctcdecode import build_ctcdecoder
from safetensors.numpy import save_file

LABELS = "_abcdefghijk"
BLANK = 0
NOISY, CLEAR, FRAMES = 6, 3, 36
NARROW, WIDE = len(LABELS), 600
FEW, FEW_BEAM = 24, 4
PACKAGES = ("masr", "pyctcdecode", "flashlight-text", "fast-ctc-decode", "numpy")


def noisy(rng: np.random.Generator) -> np.ndarray:
    """Frames in which several tokens are possible, and tokens last for some frames."""
    logits = rng.normal(0, 1.5, (FRAMES, len(LABELS)))
    at = 0
    while at < FRAMES:
        token, lasts = rng.integers(len(LABELS)), rng.integers(1, 4)
        logits[at : at + lasts, token] += rng.uniform(1.5, 5)
        at += lasts
        logits[at : at + rng.integers(0, 3), BLANK] += 3
    return logits


def clear(rng: np.random.Generator) -> np.ndarray:
    """Peaks one frame wide, a blank or more between them."""
    logits = rng.normal(0, 1, (FRAMES, len(LABELS)))
    logits[:, BLANK] += 9
    for frame in range(1, FRAMES, 3):
        logits[frame, rng.integers(1, len(LABELS))] += 16
    return logits


def log_softmax(logits: np.ndarray) -> np.ndarray:
    top = logits - logits.max(-1, keepdims=True)
    return (top - np.log(np.exp(top).sum(-1, keepdims=True))).astype(np.float32)


def ids(text: str) -> list[int]:
    return [LABELS.index(letter) for letter in text]


def wenet(logprobs: np.ndarray, beam: int = NARROW) -> list[dict]:
    _, best = run_ctc_prefix_beam_search(logprobs.tolist(), len(logprobs), beam, BLANK)
    return [{"tokens": list(tokens), "logprob": score} for tokens, score in best]


def kensho(logprobs: np.ndarray) -> dict:
    decoder = build_ctcdecoder(["", *LABELS[1:]])
    best = decoder.decode_beams(logprobs, WIDE, beam_prune_logp=-math.inf, token_min_logp=-math.inf)
    return {"tokens": ids(best[0][0])}


def flashlight(logprobs: np.ndarray) -> dict:
    options = LexiconFreeDecoderOptions(WIDE, len(LABELS), 1e9, 0.0, 0.0, True, CriterionType.CTC)
    decoder = LexiconFreeDecoder(options, ZeroLM(), -1, BLANK, [])
    frames = np.ascontiguousarray(logprobs)
    # The alignment begins and ends with a token of no frame.
    path = decoder.decode(frames.ctypes.data, *frames.shape)[0].tokens[1:-1]
    starts = [i for i, t in enumerate(path) if t != BLANK and (i == 0 or t != path[i - 1])]
    return {"tokens": [path[i] for i in starts], "frames": starts}


def nanopore(logprobs: np.ndarray) -> dict:
    return {"tokens": ids(fast_ctc_decode.beam_search(np.exp(logprobs), LABELS, WIDE, 0.0)[0])}


def main() -> None:
    rng = np.random.default_rng(2014)
    clips = np.stack([log_softmax(make(rng)) for make in [noisy] * NOISY + [clear] * CLEAR])
    said = [
        {"wenet": wenet(c), "pyctcdecode": kensho(c), "flashlight": flashlight(c), "fast_ctc_decode": nanopore(c)}
        for c in clips
    ]
    # Three symbols: entries often leave the beam and come back.
    few = log_softmax(rng.normal(0, 2, (FEW, FRAMES, 3)))
    about = {
        "few": json.dumps([wenet(c, FEW_BEAM) for c in few]),
        "said": json.dumps(said),
        "clear": json.dumps(list(range(NOISY, NOISY + CLEAR))),
        "versions": json.dumps({name: version(name) for name in PACKAGES}),
    }
    save_file({"logprobs": clips, "few": few}, Path(__file__).parent / "fixtures" / "ctc.safetensors", about)


if __name__ == "__main__":
    main()
