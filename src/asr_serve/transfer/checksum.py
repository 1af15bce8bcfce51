"""Checksum of transferred and stored bytes: 64 bits that detect accidental damage, not forgery."""

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
"""Block size that fits into a core's second cache; the calls of Python between blocks are negligible."""
LARGE = 4 << 20
"""Least size for copies past the caches: smaller data may stay in a cache as a whole."""


def checksum(data: Buffer | npt.NDArray[Any]) -> int:
    """Returns the XXH3 of contiguous bytes, 64 bits. The package releases the GIL for large data.

    Source: https://xxhash.com, by the package xxhash, whose own tests hold the reference values.
    """
    return xxhash.xxh3_64_intdigest(data.data if isinstance(data, np.ndarray) else data)


def copy_and_sum(to: npt.NDArray[np.uint8], data: npt.NDArray[np.uint8]) -> int:
    """Copies contiguous bytes to memory that this process will not read soon, and returns their checksum.

    Large data is read from memory once: summed block by block, and copied while the block is in the cache. The
    copy bypasses the caches, where it would only evict data that is about to be read.
    """
    module = kernels.copy() if data.nbytes >= LARGE else None
    if module is None:
        np.copyto(to, data)
        return checksum(data)
    digest = xxhash.xxh3_64()
    for offset in range(0, data.nbytes, BLOCK):
        block = data[offset : offset + BLOCK]
        digest.update(block.data)
        module.past_caches(to[offset : offset + BLOCK], block)
    return digest.intdigest()


def file_checksum(path: Path) -> int:
    """Returns the checksum of a file that nothing else in this process maps: nothing of it stays in memory."""
    if not path.stat().st_size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return checksum(content)
