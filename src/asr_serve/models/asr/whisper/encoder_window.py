"""Which positions of Whisper's 30 s window are encoded, where a clip does not fill it.

Silence that fills the window may not be cut off: the model, made for 30 s, leaves much of its attention there,
most of all at the window's very end, and says other words without it, or one for ever. So what is near the clip
and near the end is encoded position by position, and what lies between in strides: one is heard as so many.

Source  measured: bench/padding.py, docs/decisions/0019
"""

from __future__ import annotations

import torch
from torch import Tensor

POSITION_SAMPLES = 320
"""From one encoder position to the next: 20 ms."""
AFTER_POSITIONS = 32
"""Behind the clip, encoded one by one."""
END_POSITIONS = 32
"""Before the window's end, encoded one by one. Without them hidden states are further off."""
SILENCE_STRIDE = 4
"""Of what lies between, so many positions are encoded as one."""


class WhisperWindow:
    """Of `most` positions, silence in strides of `stride`; 1 encodes everything."""

    def __init__(
        self, most: int, stride: int, after: int = AFTER_POSITIONS, before_end: int = END_POSITIONS
    ) -> None:
        self.most, self.stride, self.after, self.before_end = most, stride, after, before_end

    def clip_positions(self, samples: int, whole: bool = False) -> int:
        """Positions from the start that stand for themselves: all of them where little would be left out, or where
        the window is wanted `whole`."""
        count = -(-samples // POSITION_SAMPLES) + self.after
        packs = self.stride > 1 and not whole and count + self.before_end < self.most
        return count if packs else self.most

    def count_frames(self, samples: int, whole: bool = False) -> int:
        """Positions that are encoded of it. What is longer than the window is cut."""
        return self.encoded(self.clip_positions(samples, whole))

    def encoded(self, real: int) -> int:
        """Positions that are encoded, where so many from the start stand for themselves."""
        if real == self.most:
            return real
        return real + -(-(self.most - self.before_end - real) // self.stride) + self.before_end

    def silence_spans(self, real: int) -> tuple[Tensor, Tensor]:
        """After so many from the start, none of them the last: where each stretch of positions that is encoded as
        one begins (count,), and how many positions it has (count,) float32."""
        end = self.most - self.before_end
        first = torch.arange(real, end, self.stride)
        last = torch.arange(end, self.most)
        sizes = torch.cat([(end - first).clamp(max=self.stride), torch.ones_like(last)])
        return torch.cat([first, last]), sizes.float()
