"""Norms, rotations and gates of a causal language model's layers in plain torch: the oracle of `decoder.cpp`, the
fallback, and what a GPU computes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.kernels.paging import write_positions


def rms_norm(x: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    """Writes x / rms(x) * weight over the last axis of x (rows, width), computed in float32, to `out`; weight (width,)
    float32. Source: arXiv:1910.07467."""
    out.copy_(F.rms_norm(x.float(), weight.shape, weight, eps))


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the halves of each head of x (rows, heads, head_dim) against each other, by cos and sin (rows, 1,
    head_dim / 2). Source: RoFormer, arXiv:2104.09864."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rotate_append(
    pool: Tensor,
    layer: int,
    qkv: Tensor,
    norms: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    tables: Tensor,
) -> None:
    """Rotates the queries of `qkv` (rows, (heads + 2 * kv_heads) * head_dim) in place, and writes its keys, rotated,
    and its values to position `positions[r]` of the pages of table r.

    `norms` (heads + kv_heads, head_dim) float32: weights of a norm of each head of queries and keys before; None: there
    is none. cos, sin (positions, head_dim / 2) float32.
    """
    kv_heads, head_dim = pool.shape[3], cos.shape[1] * 2
    heads = qkv.view(len(qkv), -1, head_dim)
    rotated = heads.shape[1] - kv_heads
    turned = heads[:, :rotated].float()
    if norms is not None:
        turned = F.rms_norm(turned, (head_dim,), eps=eps) * norms
    turned = rotate_halves(turned, cos[positions, None], sin[positions, None]).to(qkv.dtype)
    write_positions(pool, layer, turned[:, rotated - kv_heads :], heads[:, rotated:], tables, positions)
    heads[:, : rotated - kv_heads] = turned[:, : rotated - kv_heads]


def activate(x: Tensor, activation: str) -> Tensor:
    """silu or gelu_tanh of x."""
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")


def gate(gate_up: Tensor, out: Tensor, activation: str) -> None:
    """Writes act(gate) * up of gate_up (rows, 2 * width), computed in float32, to `out` (rows, width)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(activate(gate, activation) * up)
