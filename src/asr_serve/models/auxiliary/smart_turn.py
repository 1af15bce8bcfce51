"""Smart Turn: probability that a speaker has finished, from the last eight seconds of audio.

Whisper-tiny's encoder over 8 s, attention pooling of its frames into one vector, and a classifier. It uses
prosody, not only words: melody mostly tells whether a sentence that could be complete is. It was trained on speech
that ends in some 200 ms of silence.

Every layer rounds to 8 bits, so that near the decision boundary the rounding of a feature alone moves the result
by up to 0.2. Features are computed in double precision, as in the source, to get the same results.

Source   smart-turn v3.2 (Daily, BSD 2-clause) as pipecat-ai 1.14.0 runs it; tests/models/test_smart_turn.py
         compares with that package's own preparation of the audio
Weights  `smart-turn-v3.2-cpu.onnx`, quantized to 8 bits, activations too: published as a graph only, so it runs as
         one. A row of a batch costs as much as a run of its own: there is nothing to batch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from asr_serve import units
from asr_serve.audio.features.whisper_log_mel import LogMel
from asr_serve.models.checkpoints.onnx_graph import OnnxGraph
from asr_serve.models.registry import PackagedWeights, TurnCard

GRAPH = "smart-turn-v3.2-cpu.onnx"
LANGUAGES = "ar bn da de en es fi fr hi id it ja ko mr nl no pl pt ru tr uk vi zh"
CARDS = (
    TurnCard(
        name="smart-turn",
        task="turn",
        kind="smart_turn",
        languages=tuple(LANGUAGES.split()),
        parameters=8_000_000,
        licence="BSD-2-Clause",
        source="https://github.com/pipecat-ai/smart-turn",
        hub="pipecat-ai/smart-turn-v3",
        revision="f766f81d3cfdf7737ac64aad813d91bbfd56bf93",
        packaged=PackagedWeights(
            requirement="--no-deps pipecat-ai==1.14.0",
            module="pipecat",
            folder="audio/turn/smart_turn/data",
            sha256={GRAPH: "2bb026316b14a660486a75b1733cd3fbab8c2fd0314dc9af7be49f8cca967e4f"},
        ),
        files=(GRAPH,),
        hears_ms=8_000,
    ),
)
CONTEXT_SAMPLES = units.ms_to_samples(CARDS[0].hears_ms)
FAINT = 1e-7
"""Added to the variance, so that digital silence stays silence."""


class Model:
    """Network with its weights. Any number of threads may call it.

    In      pcm (samples,) float32 in -1..1, 16 kHz, one sample at least; only the last 8 s are used
    Out     a probability
    """

    def __init__(self, folder: Path) -> None:
        """Loads the graph. Raises WeightsMissing when the package that runs graphs is not installed, WeightsCorrupt."""
        self._features, self._graph = LogMel(dtype=torch.float64), OnnxGraph(folder / GRAPH)

    @torch.inference_mode()
    def finished(self, pcm: np.ndarray) -> float:
        # Silence in front is part of the normalization to mean 0 and variance 1, as in training.
        end = pcm[-CONTEXT_SAMPLES:]
        window = np.pad(end, (CONTEXT_SAMPLES - len(end), 0))
        with np.errstate(over="ignore"):  # audio of overflowing loudness becomes silence
            window = (window - window.mean()) / np.sqrt(window.var() + FAINT)
        features = self._features(torch.from_numpy(window)[None].double())
        return float(self._graph(input_features=features.float().numpy())[0, 0])
