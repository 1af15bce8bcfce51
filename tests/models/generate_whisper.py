"""What transformers' Whisper hears and says with random weights, for test_whisper.py.

    pip install transformers==5.23.0 torch==2.13.0 && python tests/models/generate_whisper.py

writes fixtures/whisper.safetensors: checkpoints in half precision, with which the reference ran too, clips,
encoder output, logits after given tokens; and in its metadata the settings, the tokens and the versions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

FIXTURE = Path(__file__).parent / "fixtures" / "whisper.safetensors"
WINDOW_S = 2
CLIPS_SAMPLES = (6_400, 15_913, 50, 32_000)
"""The last fills its window."""
MOST_TOKENS = 12
SHARED: dict[str, Any] = {"max_source_positions": 50 * WINDOW_S, "max_target_positions": 64, "eos_token_id": 64}
SIZES: dict[str, dict[str, Any]] = {
    "two languages": {
        **SHARED,
        "vocab_size": 64 + 2 + 2 + 6 + 101,
        "num_mel_bins": 80,
        "d_model": 48,
        "encoder_layers": 2,
        "encoder_attention_heads": 3,
        "encoder_ffn_dim": 56,
        "decoder_layers": 3,
        "decoder_attention_heads": 3,
        "decoder_ffn_dim": 40,
    },
    # as the third large one and what was distilled of it: more mels, fewer decoder layers
    "third large": {
        **SHARED,
        "vocab_size": 64 + 2 + 3 + 6 + 101,
        "num_mel_bins": 128,
        "d_model": 32,
        "encoder_layers": 3,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_layers": 1,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
    },
}


def reference(settings: dict[str, Any]) -> WhisperForConditionalGeneration:
    """With large weights: with the usual small ones every token looks the same and nothing would be tested."""
    torch.manual_seed(3)
    ids = {"pad_token_id": 64, "bos_token_id": 64, "decoder_start_token_id": 65}
    model = WhisperForConditionalGeneration(WhisperConfig(**settings, **ids, attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.add_(0.2 * torch.randn_like(value))
            elif value.dim() > 1:
                value.copy_(torch.randn_like(value) * (0.6 if "embed" in name else 2.5 * value[0].numel() ** -0.5))
            elif value.dim():
                value.copy_(0.3 * torch.randn_like(value))
            value.copy_(value.half().float())
    return model


def logits(model: WhisperForConditionalGeneration, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    output = BaseModelOutput(last_hidden_state=hidden[None])
    return model(encoder_outputs=output, decoder_input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@torch.no_grad()
def main() -> None:
    rng = np.random.default_rng(7)
    clips = [(rng.standard_normal(n) * 3_000).astype(np.int16) for n in CLIPS_SAMPLES]
    tensors = {f"clip.{i}": torch.from_numpy(clip) for i, clip in enumerate(clips)}
    said: dict[str, Any] = {"versions": {"transformers": transformers.__version__, "torch": torch.__version__}}
    for size, settings in SIZES.items():
        model = reference(settings)
        features = WhisperFeatureExtractor(feature_size=settings["num_mel_bins"], chunk_length=WINDOW_S)
        weights = {name: value.half() for name, value in model.state_dict().items() if "proj_out" not in name}
        tensors |= {f"{size}.weights.{name}": value.contiguous() for name, value in weights.items()}
        given, greedy = [], []
        for i, clip in enumerate(clips):
            heard = features(clip.astype(np.float32) / 32_768, sampling_rate=16_000, return_tensors="pt")
            hidden = model.model.encoder(heard.input_features).last_hidden_state[0]
            tokens = [65, *rng.integers(0, settings["vocab_size"], 9).tolist()]
            tensors[f"{size}.hidden.{i}"] = hidden
            tensors[f"{size}.logits.{i}"] = logits(model, hidden, tokens)
            found = [65]
            while len(found) <= MOST_TOKENS and found[-1] != 64:
                found.append(int(logits(model, hidden, found)[-1].argmax()))
            given.append(tokens)
            greedy.append(found)
        said[size] = {"config": model.config.to_dict(), "given": given, "greedy": greedy}
        assert tensors[f"{size}.logits.1"].std() > 0.1
    FIXTURE.parent.mkdir(exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, FIXTURE, metadata={"said": json.dumps(said)})
    print(FIXTURE.stat().st_size, said["versions"], [said[size]["greedy"] for size in SIZES])


if __name__ == "__main__":
    main()
