"""Where a decoder's alignment heads look while it says again what it has said: all of it at once, up to the last
layer that has such a head, and without a product with the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asr_serve.models.batch import Packing, Paged


def scores(model: Any, x: Tensor, packing: Packing, audio: Paged, frames: Sequence[int]) -> list[Tensor]:
    """Nothing is written. A decoder layer offers `said` (self-attention, without pages), `asked` (queries) and
    `heard` (what the audio answers).

    In      x (packing.total, width): embedded tokens of each row end to end, its start before them; audio: pages
            with each row's cross keys; frames: how many of them are looked at
    Out     of each row (heads, packing.frames[row], frames[row]) float32: scaled products of queries and keys
    """
    spread, last = audio.spread(packing), max(model.alignment.heads)
    found: list[list[Tensor]] = [[] for _ in frames]
    for index, layer in enumerate(model.decoder[: last + 1]):
        x = layer.said(x, packing, model)
        query = layer.asked(x)
        if heads := model.alignment.heads.get(index):
            each = audio.scores(index, heads, query.view(len(x), model.heads, -1), packing, frames, layer.scale)
            for row, made in zip(found, each, strict=True):
                row.append(made)
        if index < last:
            x = layer.heard(index, x, query, spread, model.kernels)
    return [torch.cat(row) for row in found]
