"""Whisper's encoder with random weights, as transformers computes it, for test_llm_asr_whisper.py.

    pip install torch==2.13.0 transformers==5.23.0
    python tests/models/generate_llm_asr_whisper.py

(with src on PYTHONPATH) writes fixtures/llm_asr_whisper.safetensors: weights in half precision, with which the
reference ran too, and the positions of each clip in windows of two seconds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from fun_asr_folders import clips
from safetensors.torch import save_file
from transformers import WhisperConfig, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoder

FIXTURE = Path(__file__).parent / "fixtures" / "llm_asr_whisper.safetensors"
WINDOW_S, POSITION_SAMPLES = 2, 320
CONFIG = {
    "num_mel_bins": 80,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "max_source_positions": 50 * WINDOW_S,
}


def samples() -> list[np.ndarray]:
    """A clip that fills half of a window, one that fills less, and one of a window and a half."""
    return [clips()[0], clips()[2], np.tile(clips()[0], 3)]


def main() -> None:
    torch.manual_seed(13)
    encoder = WhisperEncoder(WhisperConfig(**CONFIG)).eval()
    for name, value in encoder.state_dict().items():
        deviation = 1.2 * value[0].numel() ** -0.5 if value.dim() > 1 and "positions" not in name else 0.2
        centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        value.copy_((torch.randn_like(value) * deviation + centre).half().float())
    stored = {f"weights.{name}": value.half() for name, value in encoder.state_dict().items()}
    extract = WhisperFeatureExtractor(feature_size=CONFIG["num_mel_bins"], chunk_length=WINDOW_S)
    for index, pcm in enumerate(samples()):
        frames = []
        for first in range(0, len(pcm), WINDOW_S * 16_000):
            window = pcm[first : first + WINDOW_S * 16_000]
            features = extract(window, sampling_rate=16_000, return_tensors="pt").input_features
            with torch.no_grad():
                positions = encoder(features).last_hidden_state[0]
            frames.append(positions[: -(-len(window) // POSITION_SAMPLES)])
        stored[f"frames.{index}"] = torch.cat(frames).contiguous()
    save_file(stored, FIXTURE)
    print(FIXTURE, FIXTURE.stat().st_size)


if __name__ == "__main__":
    main()
