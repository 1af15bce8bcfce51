"""Reader of rtp_filter.o: instructions, maps, and where the instructions name them.

Source: System V ABI, chapter 4 (ELF64); the kernel's Documentation/bpf/llvm_reloc.rst.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

INSTRUCTION_BYTES = 8
MAGIC, LITTLE_ENDIAN_64, MACHINE_BPF = b"\x7fELF", b"\x02\x01", 247
SYMBOL_TABLE, RELOCATIONS = 2, 9
MAP_ADDRESS = 1
"""Relocation of a 64-bit immediate (R_BPF_64_64); also the pseudo source register of a map's descriptor."""


class MapDefinition(NamedTuple):
    """Map that a program wants: `struct map` of rtp_filter.c."""

    type: int
    key_bytes: int
    value_bytes: int
    entries: int


class FilterObject(NamedTuple):
    """XDP program and its maps. `references`: offset of an instruction, and the map whose descriptor it loads."""

    code: bytes
    maps: dict[str, MapDefinition]
    references: list[tuple[int, str]]

    def linked(self, descriptors: Mapping[str, int]) -> bytes:
        """Returns the code with the descriptors of the maps."""
        code = bytearray(self.code)
        for offset, name in self.references:
            code[offset + 1] = code[offset + 1] & 0x0F | MAP_ADDRESS << 4
            code[offset + 4 : offset + 8] = struct.pack("<i", descriptors[name])
        return bytes(code)


class _Section(NamedTuple):
    name: str
    type: int
    content: bytes


def read_filter(path: Path) -> FilterObject:
    """Reads an object file. Raises OSError; ValueError for one that is not of rtp_filter.c's form."""
    data = path.read_bytes()
    if data[:4] != MAGIC or data[4:6] != LITTLE_ENDIAN_64 or struct.unpack_from("<H", data, 18)[0] != MACHINE_BPF:
        raise ValueError(f"{path} is no object of little-endian BPF")
    sections = _sections(data)
    names = [section.name for section in sections]
    code, maps = sections[names.index("xdp")].content, sections[names.index("maps")].content
    symbols = next(section.content for section in sections if section.type == SYMBOL_TABLE)
    strings = sections[names.index(".strtab")].content
    map_names: dict[int, str] = {}
    by_symbol: dict[int, str] = {}
    for number, (name, _, _, section, value, _) in enumerate(struct.iter_unpack("<IBBHQQ", symbols)):
        if section < len(sections) and names[section] == "maps" and name:
            map_names[value] = by_symbol[number] = _string(strings, name)
    references = []
    for section in sections:
        if section.type == RELOCATIONS and section.name == ".relxdp":
            for offset, info in struct.iter_unpack("<QQ", section.content):
                if info & 0xFFFFFFFF != MAP_ADDRESS or info >> 32 not in by_symbol:
                    raise ValueError(f"{path} has a relocation of something that is no map")
                references.append((offset, by_symbol[info >> 32]))
    size = struct.calcsize("<4I")
    defined = {name: MapDefinition(*struct.unpack_from("<4I", maps, at)) for at, name in sorted(map_names.items())}
    if not code or len(code) % INSTRUCTION_BYTES or len(maps) != size * len(defined):
        raise ValueError(f"{path} has {len(code)} bytes of code and {len(maps)} of maps")
    return FilterObject(code, defined, references)


def _sections(data: bytes) -> list[_Section]:
    start, size, count, names = *struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, start + number * size) for number in range(count)]
    contents = [data[offset : offset + length] for _, _, _, _, offset, length in headers]
    return [
        _Section(_string(contents[names], header[0]), header[1], content)
        for header, content in zip(headers, contents, strict=True)
    ]


def _string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()
