"""Writes fixtures/fbank.safetensors: what kaldi-native-fbank makes of a signal, for several options.

pip install kaldi-native-fbank==1.23.0 numpy safetensors
python tests/audio/features/generate_fbank.py
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import kaldi_native_fbank as knf
import numpy as np
from safetensors.numpy import save_file

RATE_HZ = 16_000
FIXTURE = Path(__file__).parent / "fixtures" / "fbank.safetensors"
CASES: dict[str, dict[str, object]] = {
    "wenet": {"scale": 32_768.0},
    "unscaled": {},
    "40 mels": {"scale": 32_768.0, "mels": 40},
    "hamming, band": {"scale": 32_768.0, "window": "hamming", "low_hz": 60.0, "high_hz": -400.0},
    "hanning, high": {"mels": 23, "window": "hanning", "low_hz": 0.0, "high_hz": 7_600.0},
    "rectangular, no preemphasis": {"window": "rectangular", "preemphasis": 0.0},
    "dc kept": {"scale": 32_768.0, "remove_dc": False},
    "edges": {"snip_edges": False, "high_hz": -400.0},
    "edges, 40 mels": {"snip_edges": False, "mels": 40, "scale": 32_768.0},
    "energy": {"scale": 32_768.0, "energy": True, "mels": 23},
    "energy, floor": {"energy": True, "energy_floor": 1.0, "mels": 23},
    "short windows": {"window_samples": 320, "hop_samples": 80, "mels": 23},
}


def signal() -> np.ndarray:
    """Noise that swells, a chirp over a hiss, a step of direct current, silence: int16, 0.36 s.

    The hiss is 10 dB below the chirp. Over a faint one, bins beside the chirp would differ by the rounding of
    float32, in which Kaldi computes too.
    """
    rng = np.random.default_rng(1)
    count = RATE_HZ * 9 // 100
    time = np.arange(count) / RATE_HZ
    noise = rng.standard_normal(count) * np.geomspace(10, 6_000, count)
    chirp = 9_000 * np.sin(2 * np.pi * (200 * time + 35_000 * time**2)) + rng.standard_normal(count) * 2_000
    step = 3_000 + 200 * rng.standard_normal(count)
    parts = np.concatenate([noise, chirp, step, np.zeros(count)])
    return np.clip(np.round(parts), -32_768, 32_767).astype(np.int16)


def frames(pcm: np.ndarray, asked: dict[str, object]) -> np.ndarray:
    options = knf.FbankOptions()
    options.frame_opts.dither = 0.0
    options.frame_opts.samp_freq = RATE_HZ
    options.frame_opts.frame_length_ms = int(asked.get("window_samples", 400)) * 1_000 / RATE_HZ  # type: ignore[call-overload]
    options.frame_opts.frame_shift_ms = int(asked.get("hop_samples", 160)) * 1_000 / RATE_HZ  # type: ignore[call-overload]
    options.frame_opts.window_type = asked.get("window", "povey")
    options.frame_opts.preemph_coeff = asked.get("preemphasis", 0.97)
    options.frame_opts.remove_dc_offset = asked.get("remove_dc", True)
    options.frame_opts.snip_edges = asked.get("snip_edges", True)
    options.mel_opts.num_bins = asked.get("mels", 80)
    options.mel_opts.low_freq = asked.get("low_hz", 20.0)
    options.mel_opts.high_freq = asked.get("high_hz", 0.0)
    options.use_energy = asked.get("energy", False)
    options.energy_floor = asked.get("energy_floor", 0.0)
    fbank = knf.OnlineFbank(options)
    fbank.accept_waveform(RATE_HZ, (pcm.astype(np.float32) / 32_768 * asked.get("scale", 1.0)).tolist())  # type: ignore[operator]
    fbank.input_finished()
    return np.stack([fbank.get_frame(i) for i in range(fbank.num_frames_ready)])


def main() -> None:
    pcm = signal()
    FIXTURE.parent.mkdir(exist_ok=True)
    save_file(
        {"pcm": pcm, **{name: frames(pcm, asked) for name, asked in CASES.items()}},
        FIXTURE,
        metadata={"kaldi-native-fbank": importlib.metadata.version("kaldi-native-fbank"), "cases": json.dumps(CASES)},
    )


if __name__ == "__main__":
    main()
