"""Where transformers' Whisper looks in its audio, with the random weights of generate_whisper.py, for
test_alignment.py.

    pip install transformers==5.23.0 torch==2.13.0 && python tests/models/generate_whisper_attention.py

writes fixtures/whisper_attention.safetensors: of each size and clip the cross-attention of all decoder layers
(layers, heads, tokens, frames), over the encoder output and the tokens of fixtures/whisper.safetensors.
"""

from __future__ import annotations

import json

import torch
from generate_whisper import FIXTURE, SIZES, reference
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.modeling_outputs import BaseModelOutput

ATTENTION = FIXTURE.with_name("whisper_attention.safetensors")
CLIPS = (0, 1)


@torch.no_grad()
def main() -> None:
    tensors = {}
    with safe_open(FIXTURE, "pt") as file:
        said = json.loads(file.metadata()["said"])
        for size, settings in SIZES.items():
            model = reference(settings)
            for clip in CLIPS:
                hidden = BaseModelOutput(last_hidden_state=file.get_tensor(f"{size}.hidden.{clip}")[None])
                tokens = torch.tensor([said[size]["given"][clip]])
                made = model(encoder_outputs=hidden, decoder_input_ids=tokens, use_cache=False, output_attentions=True)
                again = file.get_tensor(f"{size}.logits.{clip}")
                assert torch.allclose(made.logits[0], again, atol=1e-4), "the weights are others"
                tensors[f"{size}.{clip}"] = torch.cat(made.cross_attentions)
    save_file(tensors, ATTENTION)
    print(ATTENTION.stat().st_size)


if __name__ == "__main__":
    main()
