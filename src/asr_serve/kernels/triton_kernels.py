"""Kernels of a CUDA device: those of a decoding step that read or write pages are in Triton, all others are those of
`reference`.

A step reads keys and values in the dtype of the pages, once for each query head; the reference gathers them into
float32 copies first, which costs many times the traffic. Shapes are those of `reference`. Triton's interpreter
(TRITON_INTERPRET=1, set before this module is imported) runs the same code on a CPU.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asr_serve.kernels import PAGE
from asr_serve.kernels.paging import split_pool
from asr_serve.kernels.reference import DecoderLayers as DecoderLayers
from asr_serve.kernels.reference import FrameLayers as FrameLayers
from asr_serve.kernels.reference import Int8Linear as Int8Linear
from asr_serve.kernels.reference import VoiceActivityEncoder as VoiceActivityEncoder
from asr_serve.kernels.reference import attend_clips as attend_clips
from asr_serve.kernels.reference import attend_int8 as attend_int8
from asr_serve.kernels.reference import causal_conv as causal_conv
from asr_serve.kernels.reference import gate as gate
from asr_serve.kernels.reference import lstm as lstm
from asr_serve.kernels.reference import pick as pick
from asr_serve.kernels.reference import rms_norm as rms_norm
from asr_serve.kernels.reference import rotate_append as rotate_append
from asr_serve.kernels.reference import softmax as softmax
from asr_serve.kernels.reference import store_int8 as store_int8
from asr_serve.kernels.reference import tanh_norm as tanh_norm
from asr_serve.kernels.reference import window_attention as window_attention

TILE = 4_096
"""Elements of a tile of keys, which a program holds in registers beside as many of values."""
WARP_BYTES = 8_192
"""Bytes of keys for each warp of a program that attends, which is a whole tile in 16 bits: sums stay within one warp,
and many programs hide each other's loads (docs/decisions/0049)."""
PROGRAMS = 1_056
"""Programs of a step that keep a large device busy: 8 for each of an H100's 132 multiprocessors. Where rows and heads
are fewer, the positions of each are split over several."""


def rope(qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates q and k of `qkv` (rows, 3, heads, head_dim) in place, halves apart, in float32.

    Source: RoFormer, arXiv:2104.09864.
    """
    rows, _, heads, head_dim = qkv.shape
    half = cos.shape[1]
    assert qkv.stride(3) == 1
    assert qkv.stride(2) == head_dim
    _rope_kernel[rows, 2](
        qkv, positions, cos, sin, qkv.stride(0), qkv.stride(1),
        HEADS=heads, HEAD_DIM=head_dim, HALF=half,
        HEAD_TILE=triton.next_power_of_2(heads), HALF_TILE=triton.next_power_of_2(half),
    )  # fmt: skip


@triton.jit
def _rope_kernel(
    qkv, positions, cos, sin, row_stride, kind_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HEAD_TILE: tl.constexpr, HALF_TILE: tl.constexpr,
):  # fmt: skip
    """Rotates the queries or the keys of one row."""
    row, kind = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row)
    pair = tl.arange(0, HALF_TILE)
    c = tl.load(cos + position * HALF + pair, mask=pair < HALF, other=0.0)
    s = tl.load(sin + position * HALF + pair, mask=pair < HALF, other=0.0)
    head = tl.arange(0, HEAD_TILE)
    mask = (head < HEADS)[:, None] & (pair < HALF)[None, :]
    at = qkv + row * row_stride + kind * kind_stride + head[:, None] * HEAD_DIM + pair[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, x * c[None, :] - y * s[None, :], mask=mask)
    tl.store(at + HALF, y * c[None, :] + x * s[None, :], mask=mask)


def append(pool: Tensor, layer: int, qkv: Tensor, tables: Tensor, positions: Tensor) -> None:
    """Writes K and V of `qkv` (rows, 3, heads * head_dim), row r to position `positions[r]` of table r."""
    k, _ = split_pool(pool, layer)
    heads, head_dim = k.shape[1:3]
    assert qkv.stride(2) == 1
    _append_kernel[heads, len(qkv)](
        k, qkv, tables, positions, pool.stride(0), pool.stride(2), qkv.stride(0), qkv.stride(1), tables.stride(0),
        HEAD_DIM=head_dim, DIM_TILE=triton.next_power_of_2(head_dim), PAGE_SIZE=PAGE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"])
def _append_kernel(
    keys, qkv, tables, positions, page_stride, values_offset, row_stride, kind_stride, table_stride,
    HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Writes key and value of one head of one row."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = tl.load(positions + row)
    page = tl.load(tables + row * table_stride + position // PAGE_SIZE).to(tl.int64)
    slot = position % PAGE_SIZE
    dim = tl.arange(0, DIM_TILE)
    mask = dim < HEAD_DIM
    source = qkv + row * row_stride + kind_stride + head * HEAD_DIM + dim
    target = keys + page * page_stride + head * (HEAD_DIM * PAGE_SIZE)
    tl.store(target + dim * PAGE_SIZE + slot, tl.load(source, mask=mask), mask=mask)
    tl.store(target + values_offset + slot * HEAD_DIM + dim, tl.load(source + kind_stride, mask=mask), mask=mask)


def store(pool: Tensor, kv: Tensor, table: Tensor) -> None:
    """Writes K and V of `kv` (frames, layers, 2, heads * head_dim) to positions 0.. of the pages of `table`."""
    k, _ = split_pool(pool, 0)
    heads, head_dim = k.shape[1:3]
    frames, layers = kv.shape[:2]
    assert kv.stride(3) == 1
    if not frames:
        return
    _store_kernel[-(-frames // PAGE), layers, heads](
        pool, kv, table, frames, pool.stride(0), pool.stride(1), pool.stride(2), kv.stride(0), kv.stride(1),
        kv.stride(2), HEAD_DIM=head_dim, DIM_TILE=triton.next_power_of_2(head_dim), PAGE_SIZE=PAGE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["frames"])
def _store_kernel(
    pool, kv, table, frames, page_stride, layer_stride, values_offset, frame_stride, kv_layer_stride, kind_stride,
    HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Writes keys and values of one head of one layer to one page."""
    entry, layer, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    slot, dim = tl.arange(0, PAGE_SIZE), tl.arange(0, DIM_TILE)
    frame = entry * PAGE_SIZE + slot
    mask = (frame < frames)[:, None] & (dim < HEAD_DIM)[None, :]
    source = kv + frame[:, None] * frame_stride + layer * kv_layer_stride + head * HEAD_DIM + dim[None, :]
    page = tl.load(table + entry).to(tl.int64)
    target = pool + page * page_stride + layer * layer_stride + head * (HEAD_DIM * PAGE_SIZE)
    key, value = tl.load(source, mask=mask), tl.load(source + kind_stride, mask=mask)
    tl.store(target + dim[None, :] * PAGE_SIZE + slot[:, None], key, mask=mask)
    tl.store(target + values_offset + slot[:, None] * HEAD_DIM + dim[None, :], value, mask=mask)


def attend(
    pool: Tensor, layer: int, q: Tensor, out: Tensor, tables: Tensor, lengths: Tensor, scale: float, window: int = 0
) -> None:
    """out[r] = softmax(scale * q[r] K^T) V over the first `lengths[r]` positions of table r, in float32.

    `q`, `out` (rows, group * heads * head_dim): the query has `group` heads for each head of the pool, side by side.
    `window`: only the last so many positions are attended to; 0: all.

    Source: PagedAttention, arXiv:2309.06180; grouped queries, arXiv:2305.13245; positions split over programs:
    Flash-Decoding, Dao et al. 2023.
    """
    k, _ = split_pool(pool, layer)
    heads, head_dim = k.shape[1:3]
    rows, width = tables.shape
    query_heads = q.shape[1] // head_dim
    assert q.stride(1) == out.stride(1) == 1
    dim_tile = triton.next_power_of_2(head_dim)
    pages = max(1, TILE // (dim_tile * PAGE))
    most = min(width, window // PAGE + 2) if window else width
    parts = _parts(rows * query_heads, most, pages)
    partial = q.new_empty(rows, query_heads, parts, head_dim + 2, dtype=torch.float32) if parts > 1 else q
    span = -(-most // (parts * pages)) * pages
    _attend_kernel[query_heads, rows, parts](
        q, k, tables, lengths, out, partial, scale, q.stride(0), out.stride(0), pool.stride(0), pool.stride(2),
        tables.stride(0), span,
        GROUP=query_heads // heads, WINDOW=window, HEAD_DIM=head_dim, DIM_TILE=dim_tile, PAGE_SIZE=PAGE, PAGES=pages,
        PARTS=parts, num_warps=_warps(pages * dim_tile * PAGE * pool.element_size()),
    )  # fmt: skip
    if parts > 1:
        _combine_kernel[query_heads, rows](
            partial, out, out.stride(0), HEAD_DIM=head_dim, DIM_TILE=dim_tile, PARTS=parts
        )


def _warps(tile_bytes: int) -> int:
    """Warps of a program whose tile of keys has so many bytes, a power of two."""
    return max(1, tile_bytes // WARP_BYTES)


def _parts(programs: int, width: int, pages: int) -> int:
    """Programs that share the pages of a head: a power of two, each with two tiles of `pages` at least."""
    parts = 1
    while programs * parts < PROGRAMS and 4 * parts * pages <= width:
        parts *= 2
    return parts


@triton.jit(do_not_specialize=["table_stride", "span"])
def _attend_kernel(
    q, keys, tables, lengths, out, partial, scale, q_stride, out_stride, page_stride, values_offset, table_stride, span,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Attends with one query head of one row to `span` of its pages, PAGES at a time, with a running softmax. Tiles
    have an axis for pages and one for positions in a page: so the compiler knows which numbers lie side by side."""
    head, row, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    first = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    begin = first // PAGE_SIZE + part * span
    end = tl.minimum(tl.cdiv(length, PAGE_SIZE), begin + span)
    dim, slot = tl.arange(0, DIM_TILE), tl.arange(0, PAGE_SIZE)
    in_head = dim < HEAD_DIM
    query = tl.load(q + row * q_stride + head * HEAD_DIM + dim, mask=in_head, other=0.0).to(tl.float32) * scale
    key_head = keys + (head // GROUP) * (HEAD_DIM * PAGE_SIZE)
    key_offset = dim[None, :, None] * PAGE_SIZE + slot[None, None, :]
    value_offset = values_offset + slot[None, :, None] * HEAD_DIM + dim[None, None, :]
    top, total = -float("inf"), 0.0
    mixed = tl.zeros([DIM_TILE], tl.float32)
    for start in range(begin, end, PAGES):
        entry = start + tl.arange(0, PAGES)
        page = tl.load(tables + row * table_stride + entry, mask=entry < end, other=0).to(tl.int64)
        at = (key_head + page * page_stride)[:, None, None]
        there = (entry < end)[:, None, None]
        position = entry[:, None] * PAGE_SIZE + slot[None, :]
        seen = (position < length) & (position >= first) & (entry < end)[:, None]
        # Both loads are under way before the first sum waits for one.
        key = tl.load(at + key_offset, mask=there & in_head[None, :, None], other=0.0).to(tl.float32)
        value = tl.load(at + value_offset, mask=there & in_head[None, None, :], other=0.0).to(tl.float32)
        # Slots past the length may hold anything, NaN included.
        scores = tl.where(seen, tl.sum(key * query[None, :, None], axis=1), -float("inf"))
        new_top = tl.maximum(top, tl.max(tl.max(scores, axis=1), axis=0))
        weights = tl.exp(scores - new_top)
        decay = tl.exp(top - new_top)
        value = tl.where(seen[:, :, None], value * weights[:, :, None], 0.0)
        mixed = mixed * decay + tl.sum(tl.sum(value, axis=1), axis=0)
        total = total * decay + tl.sum(tl.sum(weights, axis=1), axis=0)
        top = new_top
    if PARTS == 1:
        tl.store(out + row * out_stride + head * HEAD_DIM + dim, mixed / total, mask=in_head)
    else:
        at = partial + ((row * tl.num_programs(0) + head) * PARTS + part) * (HEAD_DIM + 2)
        tl.store(at + dim, mixed, mask=in_head)
        tl.store(at + HEAD_DIM, top)
        tl.store(at + HEAD_DIM + 1, total)


@triton.jit
def _combine_kernel(partial, out, out_stride, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr, PARTS: tl.constexpr):
    """Combines the parts of one query head of one row."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    part, dim = tl.arange(0, PARTS), tl.arange(0, DIM_TILE)
    in_head = dim < HEAD_DIM
    at = partial + ((row * tl.num_programs(0) + head) * PARTS + part) * (HEAD_DIM + 2)
    tops = tl.load(at + HEAD_DIM)
    weights = tl.where(tops > -float("inf"), tl.exp(tops - tl.max(tops, axis=0)), 0.0)
    total = tl.sum(weights * tl.load(at + HEAD_DIM + 1), axis=0)
    mixed = tl.load(at[:, None] + dim[None, :], mask=in_head[None, :], other=0.0)
    mixed = tl.sum(mixed * weights[:, None], axis=0) / total
    tl.store(out + row * out_stride + head * HEAD_DIM + dim, mixed, mask=in_head)
