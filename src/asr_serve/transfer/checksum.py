"""The checksum of what travels or is put away: 64 bits that tell chance damage, not a forger."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from asr_serve import kernels

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Buffer

BLOCK = 512 << 10
"""Fits into a core's second cache; calls of Python between blocks cost nothing beside it."""
LARGE = 4 << 20
"""What is smaller may be in a cache as a whole."""


def checksum(data: Buffer | npt.NDArray[Any]) -> int:
    """XXH3 of contiguous bytes, 64 bits. The package lets go of the GIL for much at once.

    Source: https://xxhash.com, by the package xxhash, whose own tests hold the reference values.
    """
    return xxhash.xxh3_64_intdigest(data.data if isinstance(data, np.ndarray) else data)


def copy_and_sum(to: npt.NDArray[np.uint8], data: npt.NDArray[np.uint8]) -> int:
    """Copy contiguous bytes to where nobody of this process will read them soon, and return their checksum.

    What is large is read from memory once: summed block by block, and copied while the block is in the cache. The
    copy goes past the caches, in which it would only take the place of what is about to be read.
    """
    module = kernels.copy() if data.nbytes >= LARGE else None
    if module is None:
        np.copyto(to, data)
        return checksum(data)
    found = xxhash.xxh3_64()
    for at in range(0, data.nbytes, BLOCK):
        block = data[at : at + BLOCK]
        found.update(block.data)
        module.past_caches(to[at : at + BLOCK], block)
    return found.intdigest()


def file_checksum(path: Path) -> int:
    """Of a file that is no part of ours while it is read: nothing of it stays in memory."""
    if not path.stat().st_size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return checksum(content)
