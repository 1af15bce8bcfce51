"""Cross-attention heads that align text with audio, by the sizes of published models.

Source  Whisper's, but for the two named below: openai-whisper, `_ALIGNMENT_HEADS` (those of large-v2 for both
        large models of its size). Ours: bench/alignment_heads.py chose them, with the shift, on development speech
        that pocketsphinx aligned: 14 clips of LJSpeech and of voxint, and 68 of LibriSpeech's training part as
        whisper-base recognizes them. Its frames are named by the start of a window of 25.6 ms, and taken to be in
        the middle of it
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from asr_serve.devices.interface import Device
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.packing import PackedBatch, PagedKeyValues
from asr_serve.units import ms_to_samples


class AlignmentHeads(NamedTuple):
    """Alignment heads of a decoder. `heads`: layer -> heads, for layers that have any. `shift_samples`: mean time
    from the heads' attention to the start of the word; negative where they attend too late."""

    heads: dict[int, tuple[int, ...]]
    shift_samples: int = 0


Head = tuple[int, int]
"""Layer, and head in it."""

_MOONSHINE: dict[tuple[int, ...], tuple[tuple[Head, ...], int]] = {
    (6, 288): (((3, 0), (3, 7), (4, 2), (4, 6), (5, 6)), 31)
}
"""(layers, width) -> heads, and the shift in milliseconds."""
_WHISPER: dict[tuple[int, ...], tuple[tuple[Head, ...], int]] = {
    (51_864, 4, 384): (((2, 1), (2, 3), (2, 5), (3, 1)), -7),  # ours
    (51_865, 6, 512): (((3, 1), (3, 3), (4, 0), (4, 1), (5, 0), (5, 1), (5, 3), (5, 7)), -7),  # ours
    (51_865, 4, 384): (((2, 2), (3, 0), (3, 2), (3, 3), (3, 4), (3, 5)), 0),
    (51_864, 6, 512): (((3, 3), (4, 7), (5, 1), (5, 5), (5, 7)), 0),
    (51_864, 12, 768): (
        (
            *((6, 6), (7, 0), (7, 3), (7, 8), (8, 2), (8, 5), (8, 7), (9, 0), (9, 4), (9, 8), (9, 10)),
            *((10, 0), (10, 1), (10, 2), (10, 3), (10, 6), (10, 11), (11, 2), (11, 4)),
        ),
        0,
    ),
    (51_865, 12, 768): (((5, 3), (5, 9), (8, 0), (8, 4), (8, 7), (8, 8), (9, 0), (9, 7), (9, 9), (10, 5)), 0),
    (51_864, 24, 1_024): (
        (
            *((11, 4), (14, 1), (14, 12), (14, 14), (15, 4), (16, 0), (16, 4), (16, 9), (17, 12), (17, 14)),
            *((18, 7), (18, 10), (18, 15), (20, 0), (20, 3), (20, 9), (20, 14), (21, 12)),
        ),
        0,
    ),
    (51_865, 24, 1_024): (((13, 15), (15, 4), (15, 15), (16, 1), (20, 0), (23, 4)), 0),
    (51_865, 32, 1_280): (
        (
            *((10, 12), (13, 17), (16, 11), (16, 12), (16, 13), (17, 15), (17, 16), (18, 4), (18, 11), (18, 19)),
            *((19, 11), (21, 2), (21, 3), (22, 3), (22, 9), (22, 12), (23, 5), (23, 7), (23, 13), (25, 5)),
            *((26, 1), (26, 12), (27, 15)),
        ),
        0,
    ),
    (51_866, 32, 1_280): (
        ((7, 0), (10, 17), (12, 18), (13, 12), (16, 1), (17, 14), (19, 11), (21, 4), (24, 1), (25, 6)),
        0,
    ),
    (51_866, 4, 1_280): (((2, 4), (2, 11), (3, 3), (3, 6), (3, 11), (3, 14)), 0),
}
"""(vocabulary, decoder layers, width) -> heads, and the shift in milliseconds; 0 where it was not measured."""


def moonshine_alignment(layers: int, heads: int, width: int, checkpoint_heads: Sequence[Head] = ()) -> AlignmentHeads:
    """Returns Moonshine's alignment heads. `checkpoint_heads`: heads in the checkpoint's settings, if any. Raises
    WeightsCorrupt for heads that the model does not have."""
    return _of(_MOONSHINE.get((layers, width)), layers, heads, checkpoint_heads)


def whisper_alignment(
    vocabulary: int, layers: int, heads: int, width: int, checkpoint_heads: Sequence[Head] = ()
) -> AlignmentHeads:
    """Returns Whisper's alignment heads; `checkpoint_heads` and errors as above."""
    return _of(_WHISPER.get((vocabulary, layers, width)), layers, heads, checkpoint_heads)


def _of(
    known: tuple[tuple[Head, ...], int] | None, layers: int, heads: int, checkpoint_heads: Sequence[Head]
) -> AlignmentHeads:
    """Chooses the checkpoint's heads, else the known ones, else all heads of the later half of the layers."""
    later = tuple((layer, head) for layer in range(layers // 2, layers) for head in range(heads))
    chosen, shift_ms = (tuple(checkpoint_heads), 0) if checkpoint_heads else known or (later, 0)
    wrong = [each for each in chosen if not (0 <= each[0] < layers and 0 <= each[1] < heads)]
    if wrong:
        raise WeightsCorrupt(f"alignment_heads has {list(wrong[0])}", f"{layers} layers of {heads} heads")
    by_layer = {layer: tuple(h for at, h in chosen if at == layer) for layer in sorted({at for at, _ in chosen})}
    return AlignmentHeads(by_layer, ms_to_samples(shift_ms))


class AlignmentLayer(Protocol):
    """Decoder layer that can be gone through without pages of its own."""

    scale: float
    """Factor of products of queries and keys."""

    def self_attention(self, x: Tensor, packing: PackedBatch) -> Tensor:
        """Causal self-attention of whole rows: x (packing.total, width), with the residual."""

    def cross_query(self, x: Tensor) -> Tensor:
        """Cross-attention queries (packing.total, heads * head_dim)."""

    def cross_attention(
        self, index: int, x: Tensor, query: Tensor, audio: PagedKeyValues, kernels: ModuleType
    ) -> Tensor:
        """The rest of the layer, with the residual; `index` is the layer's number in the pages."""


class AlignmentDecoder(Protocol):
    """Decoder as `alignment_scores` goes through it."""

    heads: int
    """Heads of a layer on this rank."""
    device: Device
    kernels: ModuleType
    alignment: AlignmentHeads
    """Heads of all ranks."""

    @property
    def decoder(self) -> Sequence[AlignmentLayer]: ...


def alignment_scores(
    model: AlignmentDecoder, x: Tensor, packing: PackedBatch, audio: PagedKeyValues, frames: Sequence[int]
) -> list[Tensor]:
    """Computes cross-attention scores of the alignment heads over known tokens; no cache is written.

    In      x (packing.total, width): embedded tokens of each row end to end, its start before them; audio: pages
            with each row's cross keys; frames: encoder frames of each row
    Out     for each row (heads, packing.frames[row], frames[row]) float32: scaled products of queries and keys, of
            all ranks of the device's group
    """
    spread, last, group = audio.expand_rows(packing), max(model.alignment.heads), model.device.group
    first = group.rank * model.heads
    scores: list[list[Tensor]] = [[] for _ in frames]
    for index, layer in enumerate(model.decoder[: last + 1]):
        x = layer.self_attention(x, packing)
        query = layer.cross_query(x)
        if heads := model.alignment.heads.get(index):
            own = [place for place, head in enumerate(heads) if first <= head < first + model.heads]
            own_heads, queries = [heads[place] - first for place in own], query.view(len(x), model.heads, -1)
            layer_scores = audio.attention_scores(index, own_heads, queries, packing, frames, layer.scale)
            for row, row_scores in zip(scores, layer_scores, strict=True):
                row.append(row_scores.new_zeros(len(heads), *row_scores.shape[1:]))
                row[-1][own] = row_scores
        if index < last:
            x = layer.cross_attention(index, x, query, spread, model.kernels)
    return [group.all_reduce(torch.cat(row)) for row in scores]
