"""TensorFlow Lite graphs: their operations in order, and their weights, dequantized.

A .tflite file is a FlatBuffer, whose tables hold the offsets of their fields; weights need little of the schema,
so it is read here, without a package. Options of custom operations are FlexBuffers: a map from names to numbers.

Source  TensorFlow Lite's schema.fbs, version 3; the FlatBuffers and FlexBuffers binary formats.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asr_serve.errors import WeightsCorrupt

IDENTIFIER = b"TFL3"
BUILTIN = {
    0: "ADD",
    2: "CONCATENATION",
    9: "FULLY_CONNECTED",
    14: "LOGISTIC",
    18: "MUL",
    22: "RESHAPE",
    25: "SOFTMAX",
    28: "TANH",
    45: "STRIDED_SLICE",
    49: "SPLIT",
    57: "MINIMUM",
}
"""Names of the operations used here; others go by their number."""
DTYPES = {0: "<f4", 1: "<f2", 2: "<i4", 3: "<u1", 4: "<i8", 6: "?", 7: "<i2", 9: "<i1"}
STRING = 5


class TfliteTensor(NamedTuple):
    """Tensor of the graph: a constant, or the result of an operation."""

    name: str
    shape: tuple[int, ...]
    type: int
    data: memoryview
    """Raw bytes; empty where the tensor is computed."""
    scales: np.ndarray
    """float32; none, one, or one for each index of `axis`. A value is scale * (integer - zero point)."""
    zeros: np.ndarray
    axis: int


class TfliteOperation(NamedTuple):
    name: str
    inputs: tuple[int, ...]
    """Indices of values; -1 for an omitted input."""
    outputs: tuple[int, ...]
    custom: memoryview
    """Options of a custom operation, as they are stored."""

    def option(self, name: str) -> float:
        """Returns an option of a custom operation. Raises WeightsCorrupt."""
        try:
            return _flexible(self.custom)[name]
        except (struct.error, ValueError, IndexError, KeyError) as failure:
            raise WeightsCorrupt(f"{self.name} has no option {name}: {failure!r}") from failure


class TfliteGraph(NamedTuple):
    """First subgraph of a file."""

    path: Path
    values: list[TfliteTensor]
    operations: list[TfliteOperation]
    """Operations in the order in which they run."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def named(self, name: str) -> int:
        """Returns the index of the value with that name. Raises WeightsCorrupt."""
        for index, value in enumerate(self.values):
            if value.name == name:
                return index
        raise WeightsCorrupt(f"{self.path} has no tensor {name}")

    def operations_named(self, name: str) -> list[TfliteOperation]:
        return [operation for operation in self.operations if operation.name == name]

    def producer(self, value: int) -> TfliteOperation | None:
        """Returns the operation that computes a value; None for constants and inputs."""
        return next((operation for operation in self.operations if value in operation.outputs), None)

    def constant(self, index: int) -> np.ndarray:
        """Returns a constant, integers dequantized to float32. Raises WeightsCorrupt when it is computed or omitted."""
        value = self.values[index]
        if index < 0 or value.type not in DTYPES or not value.data:
            raise WeightsCorrupt(f"{value.name or index} of {self.path} is no constant of numbers")
        stored = np.frombuffer(value.data, DTYPES[value.type])
        if stored.size != np.prod(value.shape, dtype=np.int64):
            raise WeightsCorrupt(f"{value.name} of {self.path} has {stored.size} numbers", f"{value.shape}")
        stored = stored.reshape(value.shape)
        if not value.scales.size:
            return stored
        shape = [1] * stored.ndim
        shape[value.axis] = -1
        array: np.ndarray = stored.astype(np.float32)
        if value.zeros.any():
            array -= value.zeros.astype(np.float32).reshape(shape if value.zeros.size > 1 else [1] * stored.ndim)
        array *= value.scales.reshape(shape if value.scales.size > 1 else [1] * stored.ndim)
        return array

    def text(self, index: int) -> bytes:
        """Returns the first string of a constant, which stores the number of strings, their offsets and the end of
        the last before them. Raises WeightsCorrupt."""
        value = self.values[index]
        if value.type != STRING or len(value.data) < 12:
            raise WeightsCorrupt(f"{value.name or index} of {self.path} is no constant string")
        _, begin, end = struct.unpack_from("<3i", value.data)
        return bytes(value.data[begin:end])


def read(path: Path) -> TfliteGraph:
    """Reads a graph. Raises WeightsCorrupt when the file is none."""
    data = memoryview(path.read_bytes())
    try:
        if data[4:8] != IDENTIFIER:
            raise ValueError(f"it does not say {IDENTIFIER.decode()}")
        return _graph(path, _Table(data, _unsigned(data, 0)))
    except (struct.error, ValueError, IndexError) as failure:
        raise WeightsCorrupt(f"{path} cannot be read as a graph: {failure}", "a .tflite file", "get it again") from (
            failure
        )


def _graph(path: Path, model: _Table) -> TfliteGraph:
    names = [_operation_name(code) for code in model.tables(1)]
    buffers = [table.bytes(0) for table in model.tables(4)]
    main = next(iter(model.tables(2)))
    values = [_value(table, buffers) for table in main.tables(0)]
    operations = [
        TfliteOperation(names[table.number(0, "I")], table.indices(1), table.indices(2), table.bytes(5))
        for table in main.tables(3)
    ]
    return TfliteGraph(path, values, operations, main.indices(1), main.indices(2))


def _operation_name(code: _Table) -> str:
    custom = bytes(code.bytes(1)).decode()
    # Older files, from before there were 128 operations, hold the number in a byte.
    number = max(code.number(0, "b"), code.number(3, "i"))
    return custom or BUILTIN.get(number, str(number))


def _value(table: _Table, buffers: list[memoryview]) -> TfliteTensor:
    scales, zeros, axis = np.empty(0, "<f4"), np.empty(0, "<i8"), 0
    if quantised := table.table(4):
        scales, zeros = quantised.array(2, "<f4"), quantised.array(3, "<i8")
        axis = quantised.number(6, "i")
    return TfliteTensor(
        name=bytes(table.bytes(3)).decode(),
        shape=table.indices(0),
        type=table.number(1, "b"),
        data=buffers[table.number(2, "I")],
        scales=scales,
        zeros=zeros,
        axis=axis,
    )


class _Table:
    """FlatBuffer table: fields by their number in the schema; a missing field is empty, or zero."""

    def __init__(self, data: memoryview, at: int) -> None:
        self.data, self.at = data, at
        self.fields = at - struct.unpack_from("<i", data, at)[0]
        self.known = (struct.unpack_from("<H", data, self.fields)[0] - 4) // 2

    def field(self, number: int) -> int | None:
        if number >= self.known:
            return None
        offset: int = struct.unpack_from("<H", self.data, self.fields + 4 + 2 * number)[0]
        return self.at + offset if offset else None

    def number(self, number: int, code: str) -> int:
        at = self.field(number)
        return 0 if at is None else int(struct.unpack_from(f"<{code}", self.data, at)[0])

    def table(self, number: int) -> _Table | None:
        at = self.field(number)
        return None if at is None else _Table(self.data, at + _unsigned(self.data, at))

    def tables(self, number: int) -> Iterator[_Table]:
        for at in self._elements(number, 4):
            yield _Table(self.data, at + _unsigned(self.data, at))

    def array(self, number: int, dtype: str) -> np.ndarray:
        span = self._elements(number, np.dtype(dtype).itemsize)
        return np.frombuffer(self.data[span.start : span.stop], dtype)

    def indices(self, number: int) -> tuple[int, ...]:
        return tuple(int(index) for index in self.array(number, "<i4"))

    def bytes(self, number: int) -> memoryview:
        """Returns a field that is a vector of bytes, or a string."""
        span = self._elements(number, 1)
        return self.data[span.start : span.stop]

    def _elements(self, number: int, size: int) -> range:
        field = self.field(number)
        if field is None:
            return range(0)
        at = field + _unsigned(self.data, field)
        end = at + 4 + _unsigned(self.data, at) * size
        if end > len(self.data):
            raise ValueError(f"a vector of it ends at byte {end} of {len(self.data)}")
        return range(at + 4, end, size)


def _unsigned(data: memoryview, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


_INTEGERS, _UNSIGNED, _FLOATS = "_bh_i___q", "_BH_I___Q", "__e_f___d"
"""Format letters of struct, by size in bytes."""
_LETTERS = {1: _INTEGERS, 2: _UNSIGNED, 3: _FLOATS, 26: _UNSIGNED}
"""FlexBuffer type (integer, unsigned, float, boolean) -> letters."""
_MAP = 9


def _flexible(data: memoryview) -> dict[str, float]:
    """Reads a FlexBuffer whose root, located by its last bytes, is a map of numbers."""

    def unsigned(at: int, width: int) -> int:
        return int(struct.unpack_from(f"<{_UNSIGNED[width]}", data, at)[0])

    root, kind = len(data) - 2 - data[-1], data[-2]
    if kind >> 2 != _MAP:
        raise ValueError("an operation's options are no map")
    at, width = root - unsigned(root, data[-1]), 1 << (kind & 3)
    count = unsigned(at - width, width)
    keys, keys_width = at - 3 * width - unsigned(at - 3 * width, width), unsigned(at - 2 * width, width)
    options: dict[str, float] = {}
    for i in range(count):
        key = keys + i * keys_width
        key -= unsigned(key, keys_width)
        name = bytes(data[key:]).partition(b"\0")[0].decode()
        letters = _LETTERS.get(data[at + count * width + i] >> 2)
        if letters is None:
            raise ValueError(f"option {name} is no number")
        options[name] = struct.unpack_from(f"<{letters[width]}", data, at + i * width)[0]
    return options
