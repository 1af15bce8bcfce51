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

from asr_serve.transfer.disk.door import Disk, open_disk
from asr_serve.transfer.disk.file import BLOCK, aligned
from asr_serve.transfer.disk.road import still_under_way

__all__ = ["BLOCK", "Disk", "aligned", "open_disk", "still_under_way"]
