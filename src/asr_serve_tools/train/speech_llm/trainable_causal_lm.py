"""Trainable form of the language model in models/causal_lm.py: frozen weights, and low-rank changes to them.

Source: low-rank adaptation, arXiv:2106.09685.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asr_serve.errors import WeightsCorrupt
from asr_serve.models.causal_lm import SLIDING, CausalConfig

PROJECTIONS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}


class LowRankLinear(nn.Module):
    """Linear layer with a frozen weight, and the product of two narrow matrices beside it. rank 0: without them."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, rank: int) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.low: nn.Parameter | None = None
        if rank:
            self.low = nn.Parameter(torch.randn(rank, weight.shape[1]) * weight.shape[1] ** -0.5)
            self.high = nn.Parameter(torch.zeros(len(weight), rank))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if self.low is None:
            return y
        return y + F.linear(F.linear(x, self.low.to(x.dtype)), self.high.to(x.dtype))

    def merged(self, weight: Tensor) -> Tensor:
        """The weight, float32, with what was learnt added."""
        return weight.float() if self.low is None else weight.float() + self.high.detach() @ self.low.detach()


class TrainableCausalLm(nn.Module):
    """Language model over whole sequences of embeddings. Its parameters are the low-rank matrices alone."""

    embedding: Tensor
    head: Tensor

    def __init__(self, config: CausalConfig, tensors: Mapping[str, Tensor], rank: int, dtype: torch.dtype) -> None:
        """`tensors`: those of transformers' class. Raises WeightsCorrupt."""
        super().__init__()
        self.config, self.dtype = config, dtype

        def take(name: str) -> Tensor:
            if name not in tensors:
                raise WeightsCorrupt(f"the checkpoint has no tensor {name}", "a causal language model has it")
            return tensors[name]

        self.register_buffer("embedding", take("model.embed_tokens.weight").to(dtype), persistent=False)
        head = tensors.get("lm_head.weight")
        self.register_buffer("head", self.embedding if head is None else head.to(dtype), persistent=False)
        self.layers = nn.ModuleList(_Layer(config, i, take, rank, dtype) for i in range(config.num_hidden_layers))
        self.norm = _Norm(config, take("model.norm.weight"))
        # Rounded as it is where the model is served.
        self.embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of tokens, as the first layer reads them."""
        return F.embedding(tokens, self.embedding) * self.embedding_scale

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states (clips, n, hidden_size), from which `logits` are made, of embeddings (clips, n, hidden_size).
        Clips are filled up at their ends, which no position before sees."""
        x, count = x.to(self.dtype), x.shape[1]
        angles: dict[str, Any] = {
            kind: each.angles(self.config.head_dim, count) for kind, each in self.config.rotary.items()
        }
        for layer in self.layers:
            x = layer(x, *angles[cast(_Layer, layer).kind])
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head).float()

    def merge(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The checkpoint's tensors with what was learnt added, in their own dtype."""
        merged = dict(tensors)
        for name, part in self.named_modules():
            if isinstance(part, LowRankLinear):
                weight = tensors[f"model.{name}.weight"]
                merged[f"model.{name}.weight"] = part.merged(weight).to(weight.dtype)
        return merged


class _Norm(nn.Module):
    weight: Tensor

    def __init__(self, config: CausalConfig, weight: Tensor) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.register_buffer("weight", weight.float() + config.norm_offset, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)


class _Layer(nn.Module):
    def __init__(self, config: CausalConfig, index: int, take: Any, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.kind = config, config.layer_types[index]
        at = f"model.layers.{index}"
        biased = {"self_attn": config.input_bias, "mlp": config.mlp_bias}

        def products(part: str) -> nn.ModuleDict:
            made = nn.ModuleDict()
            for name in PROJECTIONS[part]:
                bias = config.output_bias if name == "o_proj" else biased[part]
                key = f"{at}.{part}.{name}"
                weight = take(f"{key}.weight").to(dtype)
                made[name] = LowRankLinear(weight, take(f"{key}.bias").to(dtype) if bias else None, rank)
            return made

        self.self_attn, self.mlp = products("self_attn"), products("mlp")

        def norm(name: str) -> _Norm:
            return _Norm(config, take(f"{at}.{name}.weight"))

        self.input_norm = norm("input_layernorm")
        if config.norms_outputs:
            self.mlp_norm = norm("pre_feedforward_layernorm")
            self.attention_out = norm("post_attention_layernorm")
            self.mlp_out = norm("post_feedforward_layernorm")
        else:
            self.mlp_norm = norm("post_attention_layernorm")
        if config.query_key_norm:
            self.query_norm, self.key_norm = norm("self_attn.q_norm"), norm("self_attn.k_norm")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        config, products, (clips, count, _) = self.config, self.self_attn, x.shape
        normed = self.input_norm(x)
        q, k, v = (products[f"{name}_proj"](normed).view(clips, count, -1, config.head_dim) for name in "qkv")
        if config.query_key_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        groups = config.num_attention_heads // config.num_key_value_heads
        q, k, v = q.transpose(1, 2), *(each.transpose(1, 2).repeat_interleave(groups, 1) for each in (k, v))
        window = None
        if self.kind == SLIDING and count > config.sliding_window:
            at = torch.arange(count, device=x.device)
            window = (at <= at[:, None]) & (at > at[:, None] - config.sliding_window)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=window, is_causal=window is None, scale=config.attention_scale
        )
        added = products["o_proj"](mixed.transpose(1, 2).reshape(clips, count, -1))
        x = x + (self.attention_out(added) if config.norms_outputs else added)
        normed, products = self.mlp_norm(x), self.mlp
        gate = products["gate_proj"](normed)
        gate = F.silu(gate) if config.activation == "silu" else F.gelu(gate, approximate="tanh")
        added = products["down_proj"](gate * products["up_proj"](normed))
        out: Tensor = x + (self.mlp_out(added) if config.norms_outputs else added)
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of each head of x (clips, n, heads, head_dim) by cos, sin (n, head_dim / 2)."""
    left, right = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)
