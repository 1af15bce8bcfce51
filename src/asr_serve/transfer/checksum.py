"""The checksum of what travels or is put away: 64 bits that tell chance damage, not a forger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Buffer


def checksum(data: Buffer | npt.NDArray[Any]) -> int:
    """XXH3 of contiguous bytes, 64 bits. The package lets go of the GIL for much at once.

    Source: https://xxhash.com, by the package xxhash, whose own tests hold the reference values.
    """
    return xxhash.xxh3_64_intdigest(data.data if isinstance(data, np.ndarray) else data)
