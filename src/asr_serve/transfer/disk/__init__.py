"""Disk file past the page cache, for data that does not fit in memory any more.

    disk = open_disk("/var/tmp", 8 << 30)
    memory = aligned_memory(16 << 20)
    list(disk.write([(0, memory)]))
    for index in disk.read([(0, memory)]):      # as each extent completes
        ...
    disk.close()

`registry` opens it; `nameless_file` is the storage; `base` is the interface of the back ends `uring`,
`thread_pool` and `nixl` (also gds).
"""

from asr_serve.transfer.disk.base import still_under_way
from asr_serve.transfer.disk.nameless_file import BLOCK, aligned_memory
from asr_serve.transfer.disk.registry import Disk, open_disk

__all__ = ["BLOCK", "Disk", "aligned_memory", "open_disk", "still_under_way"]
