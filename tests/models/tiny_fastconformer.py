"""A FastConformer of random weights, by the names of our checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asr_serve.models.asr.nemo.fastconformer import Config


def weights(config: Config, seed: int = 5) -> dict[str, Tensor]:
    """Weights under which every part moves the result, and blank is not all that is ever said."""
    found = {name: torch.empty(shape) for name, shape in shapes(config).items()}
    chance = torch.Generator().manual_seed(seed)
    for name, value in found.items():
        noise = torch.randn(value.shape, generator=chance)
        if name.endswith("running_var"):
            value.copy_(noise.abs() + 0.5)
        elif "norm" in name and name.endswith("weight"):
            value.copy_(1 + 0.3 * noise)
        elif value.dim() < 2 or "pos_bias" in name:
            value.copy_(0.3 * noise)
        else:
            value.copy_(noise * 1.2 / math.sqrt(value[0].numel()))
    for head in ("ctc", "joint.out"):
        if f"{head}.weight" in found:
            found[f"{head}.weight"] *= 3
    return found


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    width, heads, inner = config.d_model, config.n_heads, config.d_model * config.ff_expansion_factor
    bins, channels = config.feat_in, config.subsampling_conv_channels
    found: dict[str, tuple[int, ...]] = {}

    def layer(name: str, out: int, *into: int, bias: bool = True) -> None:
        found[f"{name}.weight"] = (out, *into)
        if bias:
            found[f"{name}.bias"] = (out,)

    for i in range(config.subsampling_factor.bit_length() - 1):
        bins = bins // 2 + 1
        layer(f"encoder.pre_encode.conv.{3 * i - 1 if i else 0}", channels, 1, 3, 3)
        if i:
            layer(f"encoder.pre_encode.conv.{3 * i}", channels, channels, 1, 1)
    layer("encoder.pre_encode.out", width, channels * bins)
    for i in range(config.n_layers):
        at, bias = f"encoder.layers.{i}", config.use_bias
        for norm in ("norm_feed_forward1", "norm_self_att", "norm_conv", "norm_feed_forward2", "norm_out"):
            layer(f"{at}.{norm}", width)
        for side in (1, 2):
            layer(f"{at}.feed_forward{side}.linear1", inner, width, bias=bias)
            layer(f"{at}.feed_forward{side}.linear2", width, inner, bias=bias)
        for part in ("linear_q", "linear_k", "linear_v", "linear_out"):
            layer(f"{at}.self_attn.{part}", width, width, bias=bias)
        layer(f"{at}.self_attn.linear_pos", width, width, bias=False)
        for kind in "uv":
            found[f"{at}.self_attn.pos_bias_{kind}"] = (heads, width // heads)
        layer(f"{at}.conv.pointwise_conv1", 2 * width, width, 1, bias=bias)
        layer(f"{at}.conv.depthwise_conv", width, 1, config.conv_kernel_size, bias=bias)
        layer(f"{at}.conv.pointwise_conv2", width, width, 1, bias=bias)
        layer(f"{at}.conv.batch_norm", width)
        if config.conv_norm_type == "batch_norm":
            found |= {f"{at}.conv.batch_norm.running_{kind}": (width,) for kind in ("mean", "var")}
    if "ctc" in config.heads:
        layer("ctc", config.vocab_size + 1, width, 1)
    if config.heads[0] != "ctc":
        hidden, joint = config.pred_hidden, config.joint_hidden
        layer("decoder.prediction.embed", config.vocab_size + 1, hidden, bias=False)
        for i in range(config.pred_rnn_layers):
            for side in ("ih", "hh"):
                found[f"decoder.prediction.dec_rnn.lstm.weight_{side}_l{i}"] = (4 * hidden, hidden)
                found[f"decoder.prediction.dec_rnn.lstm.bias_{side}_l{i}"] = (4 * hidden,)
        layer("joint.enc", joint, width)
        layer("joint.pred", joint, hidden)
        layer("joint.out", config.vocab_size + 1 + len(config.durations), joint)
    return found
