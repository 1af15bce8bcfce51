"""What transformers' Moonshine Streaming hears and says with random weights, for test_moonshine_streaming.py.

    pip install transformers==5.23.0 torch==2.13.0 && python tests/models/generate_moonshine_streaming.py

writes fixtures/moonshine_streaming.safetensors: checkpoints in half precision, with which the reference ran too,
clips, encoder output, logits after given tokens; and in its metadata the settings, the tokens and the versions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import MoonshineStreamingConfig, MoonshineStreamingForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

FIXTURE = Path(__file__).parent / "fixtures" / "moonshine_streaming.safetensors"
CLIPS_SAMPLES = (6_400, 16_000, 21_913, 50)
"""The third is no multiple of a short frame; the last is shorter than one."""
SHORT_SAMPLES = 80
MOST_TOKENS = 12
SIZES: dict[str, dict[str, Any]] = {
    # small's and medium's shape: an encoder as wide as neither its heads nor the decoder; and of 8 dimensions of a
    # head 7 turn, by four angles
    "wide": {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.9},
        "encoder_config": {
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_windows": [[5, 3], [6, 0], [4, 2], [3, 4]],
        },
    },
    # tiny's: as wide as the decoder, its windows, heads of 40 turned by 0.8
    "tiny's": {
        "vocab_size": 64,
        "hidden_size": 40,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "encoder_config": {
            "hidden_size": 40,
            "intermediate_size": 48,
            "num_hidden_layers": 6,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
        },
    },
}


def reference(settings: dict[str, Any]) -> MoonshineStreamingForConditionalGeneration:
    """With large weights: with the usual small ones every token looks the same and nothing would be tested."""
    torch.manual_seed(3)
    config = MoonshineStreamingConfig(**settings, attn_implementation="eager")
    model = MoonshineStreamingForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.add_(0.2 * torch.randn_like(value))
            elif value.dim() > 1:
                # Of a size with which each layer changes what it gets, and none drowns it.
                value.copy_(torch.randn_like(value) * (1.0 if "emb" in name else 1.2 * value[0].numel() ** -0.5))
            elif value.dim():
                value.copy_(0.3 * torch.randn_like(value))
            value.copy_(value.half().float())
    return model


def heard(model: MoonshineStreamingForConditionalGeneration, clip: torch.Tensor) -> torch.Tensor:
    """Encoder output of the clip's whole short frames, of one at least."""
    whole = max(len(clip) // SHORT_SAMPLES, 1) * SHORT_SAMPLES
    pcm = torch.nn.functional.pad(clip, (0, max(0, whole - len(clip))))[None, :whole]
    # Without a mask there are no windows either: the reference attends to everything then.
    return model.model.encoder(pcm, attention_mask=torch.ones_like(pcm, dtype=torch.long)).last_hidden_state[0]


def logits(model: MoonshineStreamingForConditionalGeneration, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    # A copy: the reference adds positions to what it is given.
    output = BaseModelOutput(last_hidden_state=hidden[None].clone())
    output.attention_mask = None
    return model(encoder_outputs=output, decoder_input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@torch.no_grad()
def main() -> None:
    rng = np.random.default_rng(7)
    clips = [(rng.standard_normal(n) * 3_000).astype(np.int16) for n in CLIPS_SAMPLES]
    tensors = {f"clip.{i}": torch.from_numpy(clip) for i, clip in enumerate(clips)}
    said: dict[str, Any] = {"versions": {"transformers": transformers.__version__, "torch": torch.__version__}}
    for size, settings in SIZES.items():
        model = reference(settings)
        weights = {name: value.half() for name, value in model.state_dict().items()}
        tensors |= {f"{size}.weights.{name}": value.contiguous() for name, value in weights.items()}
        given, greedy = [], []
        for i, clip in enumerate(clips):
            hidden = heard(model, torch.from_numpy(clip.astype(np.float32) / 32_768))
            tokens = [1, *rng.integers(3, settings["vocab_size"], 9).tolist()]
            tensors[f"{size}.hidden.{i}"] = hidden
            tensors[f"{size}.logits.{i}"] = logits(model, hidden, tokens)
            found = [1]
            while len(found) <= MOST_TOKENS and found[-1] != 2:
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
