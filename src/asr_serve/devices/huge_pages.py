"""Pages of 2 MB for large tensors."""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

MADV_HUGEPAGE = 14
HUGE_BYTES = 2 << 20


def ask_for_huge_pages(address: int, size_bytes: int) -> None:
    """Advises the kernel to back a range by pages of 2 MB: touching memory for the first time, 4 kB after 4 kB, is
    slow, most of all in a virtual machine. If the advice is refused, all works as before."""
    first = -(-address // HUGE_BYTES) * HUGE_BYTES
    last = (address + size_bytes) // HUGE_BYTES * HUGE_BYTES
    if sys.platform == "linux" and first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_HUGEPAGE)


def in_huge_pages(tensor: Tensor) -> Tensor:
    """Returns a contiguous copy in huge pages, for weights that are read as fast as the memory is: pages of 4 kB are
    looked up too often."""
    copied = tensor.new_empty(tensor.shape)
    ask_for_huge_pages(copied.data_ptr(), copied.nbytes)
    return copied.copy_(tensor)
