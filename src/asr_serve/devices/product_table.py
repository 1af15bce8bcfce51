"""Table of the products that were measured on this machine, so that a model's next load need not measure them again.

The file is one for all machines that share the cache folder. Its entries are those of one processor, of one build of
the native kernels and of one version of torch; a file that cannot be read, or holds something else, is as one that is
not there.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from asr_serve.config import cache_dir
from asr_serve.output_file import replaced_file

log = logging.getLogger(__name__)

FORMAT = 1
MAX_MACHINES, MAX_PRODUCTS = 16, 512
"""Machines in the file, and products of each; of more, the oldest are dropped."""
MAX_BYTES = 4 << 20
CPU_FIELDS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "CPU part", "Features")
"""Fields of /proc/cpuinfo by which a processor is known, on x86 and on Arm."""

Gain = Annotated[float, Meta(gt=0.0, lt=1e6)]


class ProductFile(msgspec.Struct, forbid_unknown_fields=True):
    """Content of the file: machine -> name of a product -> measured gain."""

    format: int = FORMAT
    machines: dict[str, dict[str, Gain]] = {}


def machine_key(library: Path, *versions: str) -> str:
    """Digest of this machine's processor and of what multiplies on it: torch, the native kernels in the file `library`,
    and `versions` of their instructions. Raises OSError."""
    with library.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # kernels may change between releases
    facts = [f"{name}={value}" for name, value in cpu_fields().items()]
    facts += [platform.machine(), torch.__version__, digest, *versions]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def cpu_fields() -> dict[str, str]:
    """CPU_FIELDS of the first processor; empty where there is no /proc/cpuinfo."""
    try:
        first = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        return {"processor": platform.processor()}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs if name.strip() in CPU_FIELDS}


class ProductTable:
    """Measured gains of one machine, in memory and in the file."""

    def __init__(self, machine: str, path: Path | None = None) -> None:
        """`path`: the file, by default that in the cache folder."""
        self.machine = machine
        self.path = cache_dir() / "products.json" if path is None else path
        self._gains = self._read().machines.get(machine, {})

    def gain(self, product: str, measure: Callable[[], float]) -> float:
        """Returns the gain of a product, which is measured where it is not known. Where the file cannot be written, it
        is known in this process only."""
        if product not in self._gains:
            self._gains[product] = round(max(measure(), 1e-3), 3)
            self._write()
        return self._gains[product]

    def _read(self) -> ProductFile:
        try:
            with self.path.open("rb") as file:
                found = msgspec.json.decode(file.read(MAX_BYTES), type=ProductFile)
        except FileNotFoundError:
            return ProductFile()
        except (OSError, msgspec.MsgspecError) as failure:
            log.warning("%s cannot be read, so products are measured anew: %s", self.path, failure)
            return ProductFile()
        return found if found.format == FORMAT else ProductFile()

    def _write(self) -> None:
        content = self._read()  # another process may have added to it
        gains = content.machines.pop(self.machine, {}) | self._gains
        content.machines[self.machine] = dict([*gains.items()][-MAX_PRODUCTS:])
        content.machines = dict([*content.machines.items()][-MAX_MACHINES:])
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replaced_file(self.path) as part:
                part.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
        except OSError as failure:
            log.debug("measured products are not kept: %s", failure)
