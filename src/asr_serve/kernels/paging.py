"""Pages of keys and values as the references read and write them.

A pool is (pages, layers, 2, heads, head_dim * PAGE): K of a page is laid out (heads, head_dim, PAGE), V is (heads,
PAGE, head_dim). Pages of cross-attention may be in 8 bits: then K of a layer begins with int8 (heads, head_dim, PAGE),
V with int8 (heads, PAGE, head_dim), and in both there follows a float32 scale for each position of a head, (heads,
PAGE). The rest of a page is not used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr_serve.kernels import PAGE


def split_layers(pool: Tensor) -> tuple[Tensor, Tensor]:
    """Views of all keys (pages, layers, heads, head_dim, PAGE) and values (pages, layers, heads, PAGE, head_dim)."""
    pages, layers, _, heads, width = pool.shape
    k = pool[:, :, 0].view(pages, layers, heads, width // PAGE, PAGE)
    v = pool[:, :, 1].view(pages, layers, heads, PAGE, width // PAGE)
    return k, v


def split_pool(pool: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Views of the keys (pages, heads, head_dim, PAGE) and the values (pages, heads, PAGE, head_dim) of a layer."""
    k, v = split_layers(pool)
    return k[:, layer], v[:, layer]


def write(pool: Tensor, layer: int, k: Tensor, v: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Writes keys and values (n, heads * head_dim) to slots (n,) of pages (n,)."""
    into_k, into_v = split_pool(pool, layer)
    heads, head_dim = into_k.shape[1:3]
    into_k[pages, :, :, slots] = k.reshape(-1, heads, head_dim)
    into_v[pages, :, slots, :] = v.reshape(-1, heads, head_dim)


def write_positions(pool: Tensor, layer: int, k: Tensor, v: Tensor, tables: Tensor, positions: Tensor) -> None:
    """Writes keys and values (rows, heads * head_dim), row r to position `positions[r]` of table r."""
    pages = tables.long().gather(1, (positions // PAGE)[:, None])[:, 0]
    write(pool, layer, k, v, pages, positions % PAGE)


def split_int8_pool(pool: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of a layer's 8-bit pages: keys (pages, heads, head_dim, PAGE) int8 and their scales (pages, heads, PAGE)
    float32, values (pages, heads, PAGE, head_dim) and theirs."""
    pages, _, _, heads, width = pool.shape
    data = pool[:, layer].flatten(2).view(torch.int8)
    numbers, scales = data[..., : heads * width], data[..., heads * width : heads * (width + 4 * PAGE)]
    scales = scales.view(torch.float32).view(pages, 2, heads, PAGE)
    k = numbers[:, 0].view(pages, heads, width // PAGE, PAGE)
    v = numbers[:, 1].view(pages, heads, PAGE, width // PAGE)
    return k, scales[:, 0], v, scales[:, 1]


def zero_unused(pages: Tensor, positions: int, *, int8: bool) -> None:
    """Zeroes what `positions` do not fill of a copy of their pages, laid out as a pool: it is data of earlier users.

    `int8`: the pages hold 8 bits."""
    filled = positions - (len(pages) - 1) * PAGE
    for layer in range(pages.shape[1]):
        if int8:
            k, k_scales, v, v_scales = split_int8_pool(pages, layer)
            k_scales[-1, :, filled:] = v_scales[-1, :, filled:] = 0
            pages[:, layer].flatten(2).view(torch.int8)[..., k[0].numel() + 4 * k_scales[0].numel() :] = 0
        else:
            k, v = split_pool(pages, layer)
        k[-1, :, :, filled:] = 0
        v[-1, :, filled:] = 0


def round_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds heads x (..., head_dim) to int8 in -127..127; returns them and a scale (...) float32 of each, which is not
    finite where the head is not."""
    top = x.float().abs().amax(dim=-1)
    usable = top > SMALLEST
    inverse = torch.where(usable, torch.full_like(top, 127.0) / top, 0.0)
    integers = (x.float() * inverse[..., None]).round().clamp(-127, 127).nan_to_num(0.0).to(torch.int8)
    return integers, torch.where(top.isfinite(), top / torch.full_like(top, 127.0), torch.nan)


SMALLEST = 1e-30
"""Heads whose largest number is below this count as zero."""
