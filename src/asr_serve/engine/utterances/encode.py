"""Utterances through a model's encoder, and what it hands to the decoder.

`EncodeRunner` and `runner.DecodeRunner` meet only in `EncoderResult`, so that they may live in different
processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr_serve.devices.base import Device
from asr_serve.models.batch import Packing


class EncoderResult(NamedTuple):
    """All a decoder needs of one utterance: cross-attention keys and values, (frames, layers, 2, width)."""

    cross: Tensor

    @property
    def frames(self) -> int:
        return self.cross.shape[0]


class Lent(NamedTuple):
    """Cross-attention keys and values that lie in pages already. Whoever lends them keeps them until the row has
    left."""

    pages: list[int]
    frames: int


class Held(NamedTuple):
    """The same in pages that the row gives back: they are its own as much as anybody's."""

    pages: list[int]
    frames: int


class EncodeRunner:
    """Utterances to EncoderResults, in one batch."""

    def __init__(self, model: Any, device: Device) -> None:
        self.model, self.device = model, device

    @torch.inference_mode()
    def run(self, batch: Sequence[np.ndarray], whole: Sequence[bool] = ()) -> list[EncoderResult]:
        """`whole`: of which all of the window is encoded, where the model has one; without, of none."""
        hidden, packing = self.hidden(batch, whole)
        cross = self.model.cross(hidden)
        return [
            EncoderResult(cross[offset : offset + frames])
            for offset, frames in zip(packing.offsets, packing.frames, strict=True)
        ]

    @torch.inference_mode()
    def hidden(self, batch: Sequence[np.ndarray], whole: Sequence[bool] = ()) -> tuple[Tensor, Packing]:
        """The encoder's frames alone, clips end to end: what `cross` makes the rest from, here or elsewhere."""
        clips = [tensor_of(pcm) for pcm in batch]
        return self.model.encode(clips, whole) if any(whole) else self.model.encode(clips)  # type: ignore[no-any-return]


def tensor_of(array: np.ndarray) -> Tensor:
    """Without a copy, unless the array is read-only, which torch has no notion of."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
