"""Registry of disk back ends: opens a disk by the requested one, or by the best that is available."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

from asr_serve.errors import OptionError
from asr_serve.transfer.disk.base import DiskBackend
from asr_serve.transfer.disk.nameless_file import NamelessFile
from asr_serve.transfer.disk.nixl import GdsDiskBackend, NixlDiskBackend
from asr_serve.transfer.disk.thread_pool import ThreadPoolDiskBackend
from asr_serve.transfer.disk.uring import UringDiskBackend
from asr_serve.types import DiskBackendName

DISK_BACKENDS: dict[str, type[DiskBackend]] = {
    "uring": UringDiskBackend,
    "threads": ThreadPoolDiskBackend,
    "nixl": NixlDiskBackend,
    "gds": GdsDiskBackend,
}

log = logging.getLogger("asr_serve.disk")


class Disk(Protocol):
    """File of a fixed size, past the page cache. See `base.DiskBackend` for its contract."""

    @property
    def name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...

    def write(self, extents: Sequence[tuple[int, memoryview]]) -> Iterator[int]: ...
    def read(self, extents: Sequence[tuple[int, memoryview]]) -> Iterator[int]: ...
    def close(self) -> None: ...


def open_disk(folder: str | None, nbytes: int, backend_name: DiskBackendName = "auto") -> Disk:
    """Creates a file of `nbytes` (rounded up to whole blocks) in `folder`, None: the system's folder for temporary
    files.

    Its room is reserved now. auto: uring, or threads where there is no io_uring. Kernel and disk are the same for
    all of them, so they are about equally fast; but uring uses the least of a core, and nixl, which must be
    polled, the most (bench/swap.py).

    Raises OptionError (the back end is not available, or the folder cannot be used), DiskFull.
    """
    if nbytes < 1:
        raise OptionError(f"disk_bytes {nbytes}", "1 or more", param="disk_bytes")
    file = NamelessFile(folder, nbytes)
    with contextlib.ExitStack() as undo:
        undo.callback(file.close)
        disk = _open_backend(file, backend_name)
        undo.pop_all()
    return disk


def _open_backend(file: NamelessFile, name: DiskBackendName) -> DiskBackend:
    if name == "auto":
        try:
            return _open_backend(file, "uring")
        except OptionError as error:
            log.info("%s The disk goes by threads.", error)
            name = "threads"
    backend = DISK_BACKENDS[name](file)
    backend.probe()
    return backend
