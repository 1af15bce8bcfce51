"""Pages of keys and values as the references read and write them.

A pool is (pages, layers, 2, heads, head_dim * PAGE): K of a page is laid out (heads, head_dim, PAGE), V is (heads,
PAGE, head_dim).
"""

from __future__ import annotations

from torch import Tensor

from asr_serve.kernels import PAGE


def split_pool(pool: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Views of the keys (pages, heads, head_dim, PAGE) and the values (pages, heads, PAGE, head_dim) of a layer."""
    pages, _, _, heads, width = pool.shape
    k = pool[:, layer, 0].view(pages, heads, width // PAGE, PAGE)
    v = pool[:, layer, 1].view(pages, heads, PAGE, width // PAGE)
    return k, v


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
