"""Reader of GGUF files: metadata, and tensors that are dequantized as they are read.

Source: GGUF specification and block formats of ggml (github.com/ggml-org/ggml, docs/gguf.md and ggml-common.h).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asr_serve.errors import WeightsCorrupt

MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a metadata value -> its format for `struct`."""
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
DEFAULT_ALIGNMENT = 32
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class BlockFormat(NamedTuple):
    """Format of a tensor's data: blocks of `values` numbers in `nbytes` bytes. `dequantize`: blocks (n, nbytes) uint8
    -> numbers (n, values) float32."""

    name: str
    values: int
    nbytes: int
    dequantize: Callable[[Bytes], Floats]


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, (n, 1) float32."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Low halves of the bytes (n, k), then high halves: (n, 2 k)."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Bits of a little-endian 32-bit word (n, 4), lowest first, as 0 or 16: (n, 32)."""
    return np.unpackbits(packed, axis=1, bitorder="little") * np.uint8(16)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    numbers = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (numbers.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    numbers = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * numbers.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and minima of the eight groups of a block of Q4_K or Q5_K, (n, 8, 1) float32: products of a float16 for
    the block and six bits for the group."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1).astype(np.float32)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1).astype(np.float32)
    return (_half(blocks, 0) * scales)[..., None], (_half(blocks, 2) * minima)[..., None]


def _groups_of_32(packed: Bytes) -> Bytes:
    """(n, 128) bytes, 32 of which hold two groups: (n, 8, 32) numbers of four bits."""
    pairs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: Bytes) -> Floats:
    scales, minima = _scales_and_minima(blocks)
    return (scales * _groups_of_32(blocks[:, 16:]).astype(np.float32) - minima).reshape(-1, 256)


def _q5_k(blocks: Bytes) -> Floats:
    scales, minima = _scales_and_minima(blocks)
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    numbers = _groups_of_32(blocks[:, 48:]) | fifth << 4
    return (scales * numbers.astype(np.float32) - minima).reshape(-1, 256)


def _q6_k(blocks: Bytes) -> Floats:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    numbers = (low | high << 4).astype(np.float32) - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (numbers.reshape(-1, 16, 16) * scales[..., None]).reshape(-1, 256)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


FORMATS = {
    0: BlockFormat("F32", 1, 4, lambda blocks: blocks.view(np.float32)),
    1: BlockFormat("F16", 1, 2, lambda blocks: blocks.view(np.float16).astype(np.float32)),
    2: BlockFormat("Q4_0", 32, 18, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, _q4_1),
    6: BlockFormat("Q5_0", 32, 22, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, _q5_1),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    12: BlockFormat("Q4_K", 256, 144, _q4_k),
    13: BlockFormat("Q5_K", 256, 176, _q5_k),
    14: BlockFormat("Q6_K", 256, 210, _q6_k),
    30: BlockFormat("BF16", 1, 2, _bf16),
}
"""Block formats by their number in the file."""


class GgufTensor(NamedTuple):
    """Tensor of a file: its shape, as torch has it, its format, and the byte of the file at which it begins."""

    shape: tuple[int, ...]
    format: BlockFormat
    start: int


T = TypeVar("T")


class GgufFile:
    """GGUF file, of which only the metadata is in memory."""

    def __init__(self, path: Path) -> None:
        """Raises WeightsCorrupt for a file that is no GGUF, or is cut short."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as failure:  # an empty file cannot be mapped
            raise WeightsCorrupt(f"{path} cannot be read: {failure}", "a GGUF file") from failure
        self._at = 4
        if self._data[:4] != MAGIC:
            raise WeightsCorrupt(f"{path} begins with {self._data[:4]!r}", "a GGUF file")
        version = self._number("I")
        if version not in VERSIONS:
            raise WeightsCorrupt(f"{path} is GGUF of version {version}", f"versions {VERSIONS}")
        tensors, values = self._number("Q"), self._number("Q")
        self.metadata: dict[str, Any] = {}
        """Values by name: numbers, texts, and lists of these."""
        for _ in range(values):
            name = self._text()
            self.metadata[name] = self._value(self._number("I"))
        headers = [self._header() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise WeightsCorrupt(f"{path}: general.alignment={alignment!r}", "a number of bytes")
        first = -(-self._at // alignment) * alignment
        self.tensors = {name: GgufTensor(shape, layout, first + offset) for name, shape, layout, offset in headers}
        """Tensors by name."""
        for name, tensor in self.tensors.items():
            if tensor.start + _nbytes(tensor) > len(self._data):
                raise WeightsCorrupt(f"{path} ends within {name}", "a whole GGUF file", "get it again")

    def value(self, name: str, kind: type[T]) -> T:
        """A value of the metadata. Raises WeightsCorrupt if there is none of that type."""
        found = self.metadata.get(name)
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise WeightsCorrupt(f"{self.path}: {name} is {str(found)[:80]!r}", f"a value of type {kind.__name__}")
        return found

    def tensor(self, name: str) -> Tensor:
        """A tensor by name, dequantized, float32."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, _nbytes(tensor), tensor.start)
        numbers = tensor.format.dequantize(raw.reshape(-1, tensor.format.nbytes))
        return torch.from_numpy(np.array(numbers, np.float32)).view(tensor.shape)

    # --- parsing ----------------------------------------------------------------------------------------

    def _bytes(self, count: int) -> bytes:
        data = self._data[self._at : self._at + count]
        if len(data) < count:
            raise WeightsCorrupt(f"{self.path} ends within its metadata", "a whole GGUF file", "get it again")
        self._at += count
        return data

    def _number(self, layout: str) -> Any:
        return struct.unpack(f"<{layout}", self._bytes(struct.calcsize(f"<{layout}")))[0]

    def _text(self) -> str:
        return self._bytes(self._number("Q")).decode(errors="replace")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self._text()
        if kind == ARRAY and depth < MAX_ARRAY_DEPTH:
            item, count = self._number("I"), self._number("Q")
            if item in NUMBERS:
                layout = NUMBERS[item]
                data = self._bytes(count * struct.calcsize(f"<{layout}"))
                return list(struct.unpack(f"<{count}{layout}", data))
            return [self._value(item, depth + 1) for _ in range(count)]
        if kind not in NUMBERS:
            raise WeightsCorrupt(f"{self.path}: a value of type {kind}", "types 0 to 12 of GGUF")
        return self._number(NUMBERS[kind])

    def _header(self) -> tuple[str, tuple[int, ...], BlockFormat, int]:
        name, dimensions = self._text(), self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise WeightsCorrupt(f"{self.path}: {name} has {dimensions} dimensions", f"1 to {MAX_DIMENSIONS}")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]  # the fastest comes first in the file
        number, offset = self._number("I"), self._number("Q")
        if number not in FORMATS:
            known = ", ".join(layout.name for layout in FORMATS.values())
            raise WeightsCorrupt(f"{self.path}: {name} is of type {number}", f"one of {known}")
        if shape[-1] % FORMATS[number].values:
            raise WeightsCorrupt(
                f"{self.path}: {name} has rows of {shape[-1]}", f"whole blocks of {FORMATS[number].values}"
            )
        return name, shape, FORMATS[number], offset


def _nbytes(tensor: GgufTensor) -> int:
    size = 1
    for dimension in tensor.shape:
        size *= dimension
    return size // tensor.format.values * tensor.format.nbytes
