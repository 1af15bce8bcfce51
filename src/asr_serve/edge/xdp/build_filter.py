"""Builder of rtp_filter.o: rtp_filter.c, compiled by clang for the BPF virtual machine.

Runs as `make rtp-filter`, or `python -m asr_serve.edge.xdp.build_filter`. The source includes no headers: clang alone
is needed. With the same clang the same bytes come out.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from asr_serve.errors import ProgramMissing
from asr_serve.output_file import replaced_file

SOURCE = Path(__file__).with_name("rtp_filter.c")
BUILT = SOURCE.with_suffix(".o")
CLANG = "14.0.6"
"""Version of clang that the committed file comes from."""
FLAGS = ("--target=bpfel", "-mcpu=v2", "-std=c11", "-O2", "-g0", "-Wall", "-Wextra", "-Werror")


def build(output: Path) -> None:
    """Writes rtp_filter.o to `output`. Raises ProgramMissing, subprocess.CalledProcessError, OSError."""
    if (clang := shutil.which("clang")) is None:
        raise ProgramMissing("clang is missing", "rtp_filter.o is built by it", "apt install clang")
    with replaced_file(output) as part:
        # From its folder: the object has the source's name in it.
        subprocess.run(
            [clang, *FLAGS, "-c", SOURCE.name, "-o", part.resolve()], cwd=SOURCE.parent, check=True, timeout=60
        )


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else BUILT)
