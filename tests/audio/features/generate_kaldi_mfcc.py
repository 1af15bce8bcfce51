"""Writes fixtures/kaldi_mfcc.safetensors: what kaldi-native-fbank makes of the signal of generate_fbank.py.

pip install kaldi-native-fbank==1.23.0 numpy safetensors
python tests/audio/features/generate_kaldi_mfcc.py
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import kaldi_native_fbank as knf
import numpy as np
from generate_fbank import RATE_HZ, signal
from safetensors.numpy import save_file

FIXTURE = Path(__file__).parent / "fixtures" / "kaldi_mfcc.safetensors"
CASES: dict[str, dict[str, float]] = {
    "vosk, English": {"coefficients": 40, "mels": 40, "low_hz": 20.0, "high_hz": 7_600.0},
    "vosk, Chinese": {"coefficients": 40, "mels": 40, "low_hz": 40.0, "high_hz": -200.0},
    "Kaldi's own": {"coefficients": 13, "mels": 23},
    "no lifter": {"coefficients": 13, "mels": 30, "lifter": 0.0},
}


def frames(pcm: np.ndarray, asked: dict[str, float]) -> np.ndarray:
    options = knf.MfccOptions()
    options.frame_opts.dither = 0.0
    options.frame_opts.samp_freq = RATE_HZ
    options.use_energy = False
    options.num_ceps = int(asked["coefficients"])
    options.mel_opts.num_bins = int(asked["mels"])
    options.mel_opts.low_freq = asked.get("low_hz", 20.0)
    options.mel_opts.high_freq = asked.get("high_hz", 0.0)
    options.cepstral_lifter = asked.get("lifter", 22.0)
    computer = knf.OnlineMfcc(options)
    computer.accept_waveform(RATE_HZ, pcm.astype(np.float32).tolist())
    computer.input_finished()
    return np.stack([computer.get_frame(i) for i in range(computer.num_frames_ready)]).astype(np.float32)


def main() -> None:
    pcm = signal()
    tensors = {name: frames(pcm, asked) for name, asked in CASES.items()} | {"pcm": pcm}
    version = importlib.metadata.version("kaldi-native-fbank")
    metadata = {"cases": json.dumps(CASES), "written by": f"kaldi-native-fbank {version}"}
    save_file(tensors, FIXTURE, metadata=metadata)


if __name__ == "__main__":
    main()
