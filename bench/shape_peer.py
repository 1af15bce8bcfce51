"""faster-whisper's engine, CTranslate2, on the random weights of shape.py: the same shape, windows and answers.

Features are made off the clock, in its favour: what is timed is encoding whole windows of 30 s, as it always does, and
decoding greedily to the length of our answers, all windows in one call.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ctranslate2
import machine
import numpy as np
from ctranslate2.specs import whisper_spec
from torch import Tensor

from asr_serve.decoding.search_options import SearchOptions
from asr_serve.models.asr.whisper import whisper

ROUNDS = 3


def spec_of(config: whisper.Config, tensors: dict[str, Tensor]) -> whisper_spec.WhisperSpec:
    """CTranslate2's form of a checkpoint's tensors."""
    spec = whisper_spec.WhisperSpec(
        config.encoder_layers, config.encoder_attention_heads, config.decoder_layers, config.decoder_attention_heads
    )

    def array(name: str) -> np.ndarray:
        return tensors[name].numpy()

    def linear(into: Any, *names: str) -> None:
        """Several matrices of one input are stacked; keys have no bias."""
        into.weight = np.concatenate([array(f"{name}.weight") for name in names])
        missing = np.zeros(config.d_model, np.float32)
        into.bias = np.concatenate([tensors.get(f"{name}.bias", missing) for name in names])

    def norm(into: Any, name: str) -> None:
        into.gamma, into.beta = array(f"{name}.weight"), array(f"{name}.bias")

    for name in ("conv1", "conv2"):
        conv = getattr(spec.encoder, name)
        conv.weight, conv.bias = array(f"encoder.{name}.weight"), array(f"encoder.{name}.bias")
    for side, part in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        part.position_encodings.encodings = array(f"{side}.embed_positions.weight")
        norm(part.layer_norm, f"{side}.layer_norm")
        for index, layer in enumerate(part.layer):
            at = f"{side}.layers.{index}"
            norm(layer.self_attention.layer_norm, f"{at}.self_attn_layer_norm")
            linear(layer.self_attention.linear[0], *(f"{at}.self_attn.{kind}_proj" for kind in "qkv"))
            linear(layer.self_attention.linear[1], f"{at}.self_attn.out_proj")
            if side == "decoder":
                norm(layer.attention.layer_norm, f"{at}.encoder_attn_layer_norm")
                linear(layer.attention.linear[0], f"{at}.encoder_attn.q_proj")
                linear(layer.attention.linear[1], *(f"{at}.encoder_attn.{kind}_proj" for kind in "kv"))
                linear(layer.attention.linear[2], f"{at}.encoder_attn.out_proj")
            norm(layer.ffn.layer_norm, f"{at}.final_layer_norm")
            linear(layer.ffn.linear_0, f"{at}.fc1")
            linear(layer.ffn.linear_1, f"{at}.fc2")
    spec.decoder.embeddings.weight = array("decoder.embed_tokens.weight")
    spec.decoder.projection.weight = array("decoder.embed_tokens.weight")
    names = [f"<{number}>" for number in range(config.vocab_size)]
    special = config.special
    names[special.eot], names[special.sot] = "<|endoftext|>", "<|startoftranscript|>"
    names[special.no_timestamps] = "<|notimestamps|>"
    spec.register_vocabulary(names)
    return spec


def point(
    config: whisper.Config,
    tensors: dict[str, Tensor],
    compute: str,
    threads: int,
    requests: int,
    clip_s: float,
    tokens: int,
) -> dict[str, Any]:
    """A row like those of shape.py, for `requests` windows with answers of `tokens`."""
    with tempfile.TemporaryDirectory() as name:
        spec = spec_of(config, tensors)
        spec.validate()
        spec.optimize(quantization=compute)
        spec.save(name)
        del spec
        gc.collect()
        model = ctranslate2.models.Whisper(name, device="cpu", compute_type=compute, intra_threads=threads)
        nbytes = Path(name, "model.bin").stat().st_size
    frames = np.random.default_rng(0).standard_normal((requests, config.num_mel_bins, 2 * config.max_source_positions))
    features = ctranslate2.StorageView.from_array(frames.astype(np.float32))
    start = list(config.special.prompt_tokens(SearchOptions(language="en"), config.max_target_positions // 2 - 1))
    walls, answers = [], []
    for number in range(ROUNDS + 1):
        began = time.perf_counter()
        # An answer is half of `max_length` at most: the rest is for prompts.
        answers = model.generate(features, [start] * requests, beam_size=1, max_length=2 * tokens)
        if number:
            walls.append(time.perf_counter() - began)
    wall = statistics.median(walls)
    made = sum(len(answer.sequences_ids[0]) for answer in answers)
    return {
        "name": f"ctranslate2 {compute}",
        "requests": requests,
        "x_real_time": round(requests * clip_s / wall, 2),
        "tokens_per_s": round(made / wall, 1),
        "tokens_each": made / requests,
        "wall_s": round(wall, 4),
        "walls_s": [round(each, 4) for each in walls],
        "weights_gib": round(nbytes / 2**30, 2),
        "resident_gib": machine.resident_gib(),
    }
