"""Numbers of a few bits one after another, as files of n-gram models store them."""

from __future__ import annotations

import numpy as np


class PackedNumbers:
    """Numbers of up to 57 bits at any bit of a file, the lowest first."""

    def __init__(self, data: np.ndarray, start: int) -> None:
        """`data`: bytes of the file; `start`: byte of bit 0."""
        self._words = np.ndarray((len(data) - start - 7,), "<u8", data, start, (1,))

    def read(self, at: np.ndarray, bits: int) -> np.ndarray:
        """Numbers (int64) of `bits` bits that begin at bits `at` (int64)."""
        found: np.ndarray = self._words[at >> 3] >> (at & 7).astype(np.uint64)
        return (found & np.uint64((1 << bits) - 1)).astype(np.int64)


def required_bits(value: int) -> int:
    """Bits of the largest number."""
    return value.bit_length()
