"""Kernels of streaming encoders in plain torch: the oracle of `streaming.h`, its fallback, and the kernels of a GPU.

A session's past is in its row of the caller's state tensors; both functions update it in place. Padding rows of a
batch point at the last row of the state, and have no frames: they change nothing, however many there are. Shapes
depend only on the shapes of the arguments and on `left`, so a CUDA graph can record them. Computed in float32 for
any input dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    seen: Tensor,
    frames: Tensor,
    bias: Tensor | None,
    left: int,
    block: int,
    out: Tensor,
) -> None:
    """Attention of a chunk to itself, block by block, and to `left` frames before each block.

    In      q, k, v (n, E, heads, head_dim); rows, seen, frames (n,) int64, as in
            `models.interfaces.StreamingChunk`. bias None or (n, heads, E, left + E), added to q . k before both
            are scaled by head_dim ** -0.5; its column j belongs to the session's frame seen - left + j. `seen` and
            E are multiples of `block`.
    State   keys, values (slots + 1, heads, capacity, head_dim): frame p is at p % capacity, capacity is at least
            left + E. The chunk's own k and v, of valid frames, are written before anything is read.
    Out     out (n, E, heads * head_dim). Frame p, in block b = p // block, attends to the frames t with max(0, b *
            block - left) <= t < min((b + 1) * block, seen + frames); past `frames` it is zero.
    Source  Chunked attention as in Emformer, arXiv:2010.10759, with the cache of arXiv:2312.17279.
    """
    n, steps, heads, head_dim = q.shape
    capacity = keys.shape[2]
    step = torch.arange(steps, device=q.device)
    live = step[None, :] < frames[:, None]

    # Padding frames write back what is stored at their place: the shape is fixed, and nothing changes.
    at = rows[:, None], slice(None), (seen[:, None] + step) % capacity
    for new, ring in ((k, keys), (v, values)):
        ring[at] = torch.where(live[:, :, None, None], new, ring[at])

    column = torch.arange(left + steps, device=q.device) - left
    window = rows[:, None], slice(None), (seen[:, None] + column) % capacity
    stored = (seen[:, None] + column >= 0) & (column < frames[:, None])
    block_start = step // block * block  # of the frame's block, counted from the chunk's start
    in_window = (column >= block_start[:, None] - left) & (column < block_start[:, None] + block)
    visible = (stored[:, None, :] & in_window & live[:, :, None])[:, None]

    # (n, heads, frames, head_dim); frames never written may hold anything, and 0 * NaN is NaN
    past = [ring[window].float().masked_fill(~stored[:, :, None, None], 0.0).transpose(1, 2) for ring in (keys, values)]
    scores = q.float().transpose(1, 2) @ past[0].transpose(2, 3)
    if bias is not None:
        scores = scores + bias.float()
    weights = torch.softmax((scores * head_dim**-0.5).masked_fill(~visible, float("-inf")), dim=-1)
    mixed = weights.masked_fill(~visible, 0.0) @ past[1]
    out.copy_(mixed.transpose(1, 2).reshape(n, steps, heads * head_dim))


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, rows: Tensor, frames: Tensor, out: Tensor
) -> None:
    """Depthwise convolution of each channel over the K frames that end with its own.

    In      x (n, E, C); weight (C, K), the last tap is the frame itself; bias (C,) or None; rows, frames (n,)
            int64, as in `models.interfaces.StreamingChunk`.
    State   tail (slots + 1, K - 1, C): the inputs before the chunk. After it: the last K - 1 of those before and
            of the chunk's first `frames`.
    Out     out (n, E, C); undefined past `frames`.
    Source  The causal depthwise convolution of Conformer, arXiv:2005.08100, with the cache of arXiv:2312.17279.
    """
    width = weight.shape[1]
    extended = torch.cat([tail[rows], x], dim=1)
    mixed = functional.conv1d(
        extended.float().transpose(1, 2),
        weight.float()[:, None],
        None if bias is None else bias.float(),
        groups=weight.shape[0],
    )
    out.copy_(mixed.transpose(1, 2))
    last = frames[:, None] + torch.arange(width - 1, device=x.device)
    tail[rows] = extended.gather(1, last[:, :, None].expand(-1, -1, extended.shape[2]))
