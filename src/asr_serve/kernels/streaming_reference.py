"""The kernels of streaming encoders in plain torch: what `streaming.h` computes, and the CUDA path.

A session's past lies in its row of tensors that somebody else owns; both functions write there in place. Rows
that only fill up a batch point at the last row of the state, and have no frames: they change nothing, and however
many of them may point there at once. Shapes depend on nothing but the shapes of the arguments and `left`, so a
CUDA graph can record them. In float32 inside, whatever comes.
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

    In      q, k, v (n, E, heads, head_dim); rows, seen, frames (n,) int64, as `models.streaming.Chunk` has them.
            bias None or (n, heads, E, left + E), added to q . k before both are scaled by head_dim ** -0.5; its
            column j belongs to the session's frame seen - left + j. `seen` and E are multiples of `block`.
    State   keys, values (slots + 1, heads, capacity, head_dim): frame p lies at p % capacity, capacity is at
            least left + E. The chunk's own k and v, of the frames there are, are written before anything is read.
    Out     out (n, E, heads * head_dim). Frame p, in block b = p // block, sees the frames t with
            max(0, b * block - left) <= t < min((b + 1) * block, seen + frames); past `frames` it is zero.
    Source  Chunked attention as in Emformer, arXiv:2010.10759, with the cache of arXiv:2312.17279.
    """
    n, steps, heads, head_dim = q.shape
    capacity = keys.shape[2]
    step = torch.arange(steps, device=q.device)
    live = step[None, :] < frames[:, None]

    # Frames that are not there put back what lies at their place: a fixed shape, and nothing is changed.
    at = rows[:, None], slice(None), (seen[:, None] + step) % capacity
    for new, ring in ((k, keys), (v, values)):
        ring[at] = torch.where(live[:, :, None, None], new, ring[at])

    column = torch.arange(left + steps, device=q.device) - left
    back = rows[:, None], slice(None), (seen[:, None] + column) % capacity
    held = (seen[:, None] + column >= 0) & (column < frames[:, None])
    begin = step // block * block  # of the frame's block, counted from the chunk's start
    near = (column >= begin[:, None] - left) & (column < begin[:, None] + block)
    sees = (held[:, None, :] & near & live[:, :, None])[:, None]

    # (n, heads, frames, head_dim); what was never written may be anything, and nothing times NaN is NaN
    past = [
        ring[back].float().masked_fill(~held[:, :, None, None], 0.0).transpose(1, 2) for ring in (keys, values)
    ]
    scores = q.float().transpose(1, 2) @ past[0].transpose(2, 3)
    if bias is not None:
        scores = scores + bias.float()
    weights = torch.softmax((scores * head_dim**-0.5).masked_fill(~sees, float("-inf")), dim=-1)
    mixed = weights.masked_fill(~sees, 0.0) @ past[1]
    out.copy_(mixed.transpose(1, 2).reshape(n, steps, heads * head_dim))


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, rows: Tensor, frames: Tensor, out: Tensor
) -> None:
    """A convolution of each channel over the K frames that end with its own.

    In      x (n, E, C); weight (C, K), the last tap is the frame itself; bias (C,) or None; rows, frames (n,)
            int64, as `models.streaming.Chunk` has them.
    State   tail (slots + 1, K - 1, C): the inputs before the chunk. After it: the last K - 1 of those before and
            of the chunk's first `frames`.
    Out     out (n, E, C); past `frames` it may be anything.
    Source  The causal depthwise convolution of Conformer, arXiv:2005.08100, with the cache of arXiv:2312.17279.
    """
    width = weight.shape[1]
    wide = torch.cat([tail[rows], x], dim=1)
    mixed = functional.conv1d(
        wide.float().transpose(1, 2),
        weight.float()[:, None],
        None if bias is None else bias.float(),
        groups=weight.shape[0],
    )
    out.copy_(mixed.transpose(1, 2))
    last = frames[:, None] + torch.arange(width - 1, device=x.device)
    tail[rows] = wide.gather(1, last[:, :, None].expand(-1, -1, wide.shape[2]))
