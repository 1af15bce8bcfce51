"""Self-attention within clips whose frames lie end to end, in plain torch: the reference of `attention.cpp` and of
`attention_f32.cpp`, and their fallback."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.kernels.decoder_reference import rotate_halves


def attend_clips(
    qkv: Tensor, frames: Sequence[int], cos: Tensor | None, sin: Tensor | None, scale: float, out: Tensor
) -> None:
    """Writes softmax(scale * q k^T) v of each clip to `out` (total, heads * head_dim), zeros past the last.

    qkv (total, 3, heads, head_dim): clip after clip, of `frames[i]` frames each. cos, sin (positions, half) float32:
    queries and keys are rotated in their first 2 * half dimensions by their position in the clip, halves apart.
    """
    out[sum(frames) :] = 0
    offset = 0
    for count in frames:
        clip = qkv[offset : offset + count]
        q, k, v = (clip[:, i] for i in range(3))
        if cos is not None and sin is not None:
            q, k = (_rotated(x, cos[:count, None], sin[:count, None]) for x in (q, k))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, scale=scale)
        out[offset : offset + count] = mixed[0].transpose(0, 1).flatten(1)
        offset += count


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary = 2 * cos.shape[-1]
    return torch.cat([rotate_halves(x[..., :rotary].float(), cos, sin).to(x.dtype), x[..., rotary:]], dim=-1)
