"""A file past the page cache, for what does not fit in memory any more.

    disk = open_disk("/var/tmp", 8 << 30)
    memory = aligned(16 << 20)
    list(disk.write([(0, memory)]))
    for index in disk.read([(0, memory)]):      # as each extent is there
        ...
    disk.close()

`door`: opens it; `file`: where the bytes lie; `road`: what every way there has; `uring`, `threads`, `nixl` (and
gds): the ways.
"""

from asr_serve.transfer.disk.base import still_under_way
from asr_serve.transfer.disk.nameless_file import BLOCK, aligned_memory
from asr_serve.transfer.disk.registry import Disk, open_disk

__all__ = ["BLOCK", "Disk", "aligned_memory", "open_disk", "still_under_way"]
