"""Native kernels in plain torch: the oracle of their tests, their fallback, and the kernels of a GPU that
`triton_kernels` does not replace.

Shapes are those of `kernels.h`. A pool is (pages, layers, 2, heads, head_dim * PAGE): K of a page is laid out
(heads, head_dim, PAGE), V is (heads, PAGE, head_dim). Nothing here depends on the length of a sequence other than
through the width of `tables`, so a CUDA graph can record it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr_serve.kernels import PAGE
from asr_serve.kernels.attention_reference import attend_clips as attend_clips
from asr_serve.kernels.decoder_reference import gate as gate
from asr_serve.kernels.decoder_reference import rms_norm as rms_norm
from asr_serve.kernels.decoder_reference import rotate_append as rotate_append
from asr_serve.kernels.int8_reference import Int8Linear as Int8Linear
from asr_serve.kernels.paging import round_heads, split_int8_pool, split_layers, split_pool, write_positions
from asr_serve.kernels.streaming_reference import causal_conv as causal_conv
from asr_serve.kernels.streaming_reference import window_attention as window_attention
from asr_serve.kernels.voice_activity_reference import VoiceActivityEncoder as VoiceActivityEncoder

FrameLayers: type | None = None
"""Layers of a network in one call. Models whose networks have one compute them by tensor operations themselves."""
DecoderLayers: type | None = None
"""Layers of a decoder in one call. Models compute them by tensor operations themselves."""


def rope(qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates q and k of `qkv` (rows, 3, heads, head_dim) in place, halves apart, in float32.

    Source: RoFormer, arXiv:2104.09864.
    """
    half = cos.shape[1]
    c, s = cos[positions][:, None, None, :], sin[positions][:, None, None, :]
    x, y = qkv[:, :2, :, :half].float(), qkv[:, :2, :, half : 2 * half].float()
    rotated = x * c - y * s, y * c + x * s  # both first: in float32 x and y are views of qkv
    qkv[:, :2, :, :half], qkv[:, :2, :, half : 2 * half] = rotated


def softmax(scores: Tensor, lengths: Tensor, scale: float) -> None:
    """softmax(scale * scores) (batch, heads, queries, keys) in place over the first `lengths` keys, else 0."""
    padding = torch.arange(scores.shape[-1], device=scores.device)[None, :] >= lengths[:, None]
    masked = (scores.float() * scale).masked_fill(padding[:, None, None, :], float("-inf"))
    scores.copy_(torch.softmax(masked, dim=-1))


def store(pool: Tensor, kv: Tensor, table: Tensor) -> None:
    """Writes K and V of `kv` (frames, layers, 2, heads * head_dim) to positions 0.. of the pages of `table`."""
    at = torch.arange(kv.shape[0], device=pool.device)
    pages, slots = table.long()[at // PAGE], at % PAGE
    into_k, into_v = split_layers(pool)
    heads, head_dim = into_k.shape[2:4]
    by_head = kv.reshape(*kv.shape[:3], heads, head_dim)
    into_k[pages, :, :, :, slots] = by_head[:, :, 0]
    into_v[pages, :, :, slots] = by_head[:, :, 1]


def store_int8(pool: Tensor, kv: Tensor, table: Tensor) -> None:
    """Writes K and V of `kv`, as `store` does, in 8 bits with a scale for each position of a head."""
    at = torch.arange(kv.shape[0], device=pool.device)
    pages, slots = table.long()[at // PAGE], at % PAGE
    for layer in range(kv.shape[1]):
        k, k_scales, v, v_scales = split_int8_pool(pool, layer)
        heads = kv[:, layer].view(len(kv), 2, pool.shape[3], -1)
        integers, scales = round_heads(heads)
        k[pages, :, :, slots], k_scales[pages, :, slots] = integers[:, 0], scales[:, 0]
        v[pages, :, slots], v_scales[pages, :, slots] = integers[:, 1], scales[:, 1]


def append(pool: Tensor, layer: int, qkv: Tensor, tables: Tensor, positions: Tensor) -> None:
    """Writes K and V of `qkv` (rows, 3, heads * head_dim), row r to position `positions[r]` of table r."""
    write_positions(pool, layer, qkv[:, 1], qkv[:, 2], tables, positions)


def attend(
    pool: Tensor, layer: int, q: Tensor, out: Tensor, tables: Tensor, lengths: Tensor, scale: float, window: int = 0
) -> None:
    """out[r] = softmax(scale * q[r] K^T) V over the first `lengths[r]` positions of table r, in float32.

    `q`, `out` (rows, group * heads * head_dim): the query has `group` heads for each head of the pool, side by side.
    `window`: only the last so many positions are attended to; 0: all.

    Source: PagedAttention, arXiv:2309.06180; grouped queries, arXiv:2305.13245.
    """
    _attend(*split_pool(pool, layer), q, out, tables, lengths, scale, window)


def attend_int8(
    pool: Tensor, layer: int, q: Tensor, out: Tensor, tables: Tensor, lengths: Tensor, scale: float
) -> None:
    """Like `attend`, over pages that `store_int8` wrote; `q`, `out` (rows, heads * head_dim)."""
    k, k_scales, v, v_scales = split_int8_pool(pool, layer)
    _attend(k * k_scales[:, :, None], v * v_scales[..., None], q, out, tables, lengths, scale, 0)


def _attend(
    k: Tensor, v: Tensor, q: Tensor, out: Tensor, tables: Tensor, lengths: Tensor, scale: float, window: int
) -> None:
    heads, head_dim = k.shape[1:3]
    rows, width = tables.shape
    span = torch.arange(width * PAGE, device=q.device)
    unseen = span[None, :] >= lengths[:, None]
    if window:
        unseen |= span[None, :] < lengths[:, None] - window
    # Table entries past the last position seen may be any number, and their pages hold anything: read page 0 in their
    # place, and mask what is read.
    valid_tables = tables.long().masked_fill(unseen.view(rows, width, PAGE).all(2), 0)
    keys = k[valid_tables].permute(0, 2, 3, 1, 4).reshape(rows, heads, head_dim, width * PAGE).float()
    values = v[valid_tables].permute(0, 2, 1, 3, 4).reshape(rows, heads, width * PAGE, head_dim).float()
    scores = q.reshape(rows, heads, -1, head_dim).float() @ keys * scale
    weights = torch.softmax(scores.masked_fill(unseen[:, None, None, :], float("-inf")), dim=-1)
    values = values.masked_fill(unseen[:, None, :, None], 0.0)
    out.copy_((weights @ values).reshape(out.shape))


def pick(logits: Tensor, hidden: Tensor | None, weight: Tensor | None, tokens: Tensor, logprobs: Tensor) -> None:
    """Writes the likeliest token of each row, and its natural-log probability.

    bf16 logits tie often; the leading candidates are compared again by their float32 product hidden . weight.
    float32 logits need neither.
    """
    values = logits.float()
    if logits.dtype == torch.bfloat16:
        assert hidden is not None
        assert weight is not None
        candidates = values.topk(min(16, values.shape[-1]), dim=-1)
        exact = (weight[candidates.indices].float() @ hidden.float()[:, :, None])[:, :, 0]
        near = candidates.values >= candidates.values[:, :1] - candidates.values[:, :1].abs() / 128
        best = exact.masked_fill(~near, float("-inf")).max(dim=-1)
        tokens.copy_(candidates.indices.gather(1, best.indices[:, None])[:, 0])
    else:
        best = values.max(dim=-1)
        tokens.copy_(best.indices)
    logprobs.copy_((best.values - values.logsumexp(dim=-1)).clamp(max=0.0))


def tanh_norm(x: Tensor, out: Tensor, eps: float) -> None:
    """Writes tanh(x), normalized to mean 0 and variance 1 over all elements, to `out`; float32 x is overwritten.

    The mean is subtracted first: squares of values with a large mean and a small spread would lose digits.
    """
    x.tanh_().sub_(x.mean())
    variance = torch.linalg.vector_norm(x).square() / x.numel()
    out.copy_(x.mul_((variance + eps).rsqrt()))


def lstm(gates: Tensor, weight: Tensor, offsets: Tensor, lengths: Tensor, h: Tensor, c: Tensor, out: Tensor) -> None:
    """One LSTM layer over concatenated sequences: row r takes lengths[r] steps from step offsets[r].

    gates (steps, 4 * width): the input's part with both biases, in the order i f g o; weight (width, 4 * width):
    the recurrent matrix transposed; h, c (rows, width) are updated in place; out (steps, width).

    Source: Hochreiter and Schmidhuber 1997, with the conventions of torch.nn.LSTM.
    """
    for step in range(int(lengths.max())):
        live = (step < lengths).nonzero()[:, 0]
        at = offsets[live] + step
        i, f, g, o = (gates[at] + h[live] @ weight).chunk(4, dim=1)
        c[live] = f.sigmoid() * c[live] + i.sigmoid() * g.tanh()
        h[live] = o.sigmoid() * c[live].tanh()
        out[at] = h[live]
