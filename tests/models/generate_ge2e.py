"""Writes fixtures/ge2e.safetensors: what resemblyzer's own code hears in a few signals.

Only its preparation of audio is left out: WebRTC's voice activity decides there what is heard, and is replaced by
ours (`prepared`). The package's modules import what that needs at their top, so it is there in name.

    pip install --no-deps resemblyzer==0.1.4
    pip install librosa==0.11.0 torch==2.13.0 safetensors numpy scipy
    python tests/models/generate_ge2e.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
from safetensors.numpy import save_file

FIXTURE = Path(__file__).parent / "fixtures" / "ge2e.safetensors"
RATE_HZ = 16_000
LENGTHS = {"blip": 700, "short": 9_000, "one": 25_600, "odd": 40_321, "edge": 44_640, "long": 80_007}


def signal(samples: int, seed: int) -> np.ndarray:
    """Something like a voice: a pulse train that glides, three resonances, noise."""
    rng = np.random.default_rng(seed)
    seconds = np.arange(samples) / RATE_HZ
    f0 = 110 + 30 * np.sin(2 * np.pi * (0.7 * seconds + rng.random())) + 20 * seed
    phase = np.cumsum(f0) / RATE_HZ
    sound = np.zeros(samples)
    for harmonic in range(1, 40):
        hz = harmonic * f0
        gain = sum(np.exp(-(((hz - middle) / 150) ** 2)) for middle in (500 + 60 * seed, 1_500, 2_500 - 90 * seed))
        sound += gain * np.sin(2 * np.pi * harmonic * phase)
    sound *= 0.6 + 0.4 * np.sin(2 * np.pi * 3 * seconds)
    return (0.05 * sound + 0.001 * rng.standard_normal(samples)).astype(np.float32)


def main() -> None:
    for name in ("webrtcvad", "scipy.ndimage.morphology"):
        stood_for = sys.modules[name] = ModuleType(name)
        stood_for.binary_dilation = None  # type: ignore[attr-defined]
    from resemblyzer import VoiceEncoder
    from resemblyzer.audio import wav_to_mel_spectrogram

    encoder = VoiceEncoder("cpu", verbose=False)
    kept: dict[str, np.ndarray] = {}
    for seed, (name, samples) in enumerate(LENGTHS.items()):
        pcm = signal(samples, seed)
        kept[f"{name}.pcm"] = np.round(pcm * 32_767).astype(np.int16)
        heard = kept[f"{name}.pcm"].astype(np.float32) / 32_768
        kept[f"{name}.voice"] = encoder.embed_utterance(heard)
    mel = wav_to_mel_spectrogram(kept["short.pcm"].astype(np.float32) / 32_768)
    kept["short.mel"] = np.ascontiguousarray(mel, np.float32)
    save_file(kept, FIXTURE)


if __name__ == "__main__":
    main()
