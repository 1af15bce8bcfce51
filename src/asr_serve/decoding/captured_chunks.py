"""Steps of a search that a device captures: one function of tensors for each chunk, over the rows of the search's
state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.devices.interface import Device
from asr_serve.models.interfaces import State, StreamingChunk

ChunkFunction = Callable[..., tuple[Tensor, ...]]
"""Function of the state, scores (n, frames, columns), rows, start frames and frames (n,), and what else a search gives
it. It updates these rows of the state in place, a row of no frames to what it was, and returns tensors (n, ...). It
reads nothing back, and its operations depend on shapes alone."""


class CapturedChunks:
    """A ChunkFunction as a device captures it: once for each number of rows and frames.

    Rows are padded to the numbers that the device repeats, with the padding row of the state, its last, and no frames.
    The first call of a captured shape runs the function more than once: it is made of padding rows alone.
    """

    def __init__(self, device: Device, function: ChunkFunction) -> None:
        self._device, self._function = device, function
        self._captured: Callable[..., tuple[Tensor, ...]] = function
        self._tensors: tuple[Tensor, ...] = ()
        """State that the captured function reads and writes: it holds the addresses of these tensors."""
        self._captures = False
        """Whether the device captures at all."""
        self._shapes: set[tuple[torch.Size, ...]] = set()

    def __call__(self, state: State, scores: Tensor, chunk: StreamingChunk, *more: Tensor) -> tuple[Tensor, ...]:
        """Returns what the function does, valid until the next call. `more`: its other arguments."""
        tensors = tuple(state.values())
        if len(tensors) != len(self._tensors) or any(a is not b for a, b in zip(tensors, self._tensors, strict=True)):
            function = partial(self._function, state)
            self._captured, self._tensors = self._device.capture(function), tensors
            self._captures = self._captured is not function
            self._shapes.clear()
        n, padding_row = len(scores), len(tensors[0]) - 1
        extra = max(0, min(self._device.padded_rows(n), padding_row + 1) - n)
        scores = F.pad(scores, (0, 0, 0, 0, 0, extra))
        rows = F.pad(chunk.rows, (0, extra), value=padding_row)
        starts, frames = F.pad(chunk.start_frames, (0, extra)), F.pad(chunk.frames, (0, extra))
        if self._captures and (shape := (scores.shape, *(each.shape for each in more))) not in self._shapes:
            nobody = torch.zeros_like(frames)
            self._captured(torch.zeros_like(scores), torch.full_like(rows, padding_row), nobody, nobody, *more)
            self._shapes.add(shape)
        return tuple(each[:n] for each in self._captured(scores, rows, starts, frames, *more))
