"""Positions of Whisper's 30 s window that are encoded where a clip does not fill it.

Padding silence cannot be cut off: the model, trained on 30 s, puts much of its attention there, most of all on the
window's very end, and without it recognizes other words, or repeats one for ever. So positions near the clip and
near the end are encoded one by one, and those between in strides, each weighted as several.

Source  measured: bench/padding.py, docs/decisions/0019
"""

from __future__ import annotations

import torch
from torch import Tensor

POSITION_SAMPLES = 320
"""Samples from one encoder position to the next: 20 ms."""
AFTER_POSITIONS = 32
"""Positions after the clip that are encoded one by one."""
END_POSITIONS = 32
"""Positions before the window's end that are encoded one by one. Without them hidden states are further off."""
SILENCE_STRIDE = 4
"""Positions of the silence between that are encoded as one."""


class WhisperWindow:
    """Window of `most` positions with silence in strides of `stride`; 1 encodes everything."""

    def __init__(self, most: int, stride: int, after: int = AFTER_POSITIONS, before_end: int = END_POSITIONS) -> None:
        self.most, self.stride, self.after, self.before_end = most, stride, after, before_end

    def clip_positions(self, samples: int, whole: bool = False) -> int:
        """Returns the positions that are encoded one by one: all where little would be saved, or with `whole`."""
        count = -(-samples // POSITION_SAMPLES) + self.after
        strided = self.stride > 1 and not whole and count + self.before_end < self.most
        return count if strided else self.most

    def count_frames(self, samples: int, whole: bool = False) -> int:
        """Returns the number of encoded positions of a clip. Audio longer than the window is cut."""
        return self.encoded(self.clip_positions(samples, whole))

    def encoded(self, real: int) -> int:
        """Returns the number of encoded positions when `real` from the start are encoded one by one."""
        if real == self.most:
            return real
        return real + -(-(self.most - self.before_end - real) // self.stride) + self.before_end

    def silence_spans(self, real: int) -> tuple[Tensor, Tensor]:
        """Returns the spans after the first `real` positions: where each begins (count,), and how many positions
        it has (count,) float32. `real` is less than `most`."""
        end = self.most - self.before_end
        first = torch.arange(real, end, self.stride)
        last = torch.arange(end, self.most)
        sizes = torch.cat([(end - first).clamp(max=self.stride), torch.ones_like(last)])
        return torch.cat([first, last]), sizes.float()
