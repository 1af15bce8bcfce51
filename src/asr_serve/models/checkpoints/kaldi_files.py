"""Readers of Kaldi's files: matrices, diagonal Gaussian mixtures, i-vector extractors, transition models and nnet3
networks in Kaldi's binary format, and the text files beside them.

A binary file begins with a zero byte and B. Tokens end with a space; a number is its size in bytes, then the number.
All numbers are little-endian.

Source: Kaldi's base/io-funcs, matrix/kaldi-matrix, matrix/compressed-matrix, hmm/transition-model, nnet3/nnet-nnet.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asr_serve.errors import WeightsCorrupt
from asr_serve.models.decoding_graph import WORD_BOUNDARIES

BINARY_MARK = b"\0B"
LONGEST_TOKEN_BYTES = 256
MOST_ITEMS = 1 << 24
"""Most entries of a list, a bound for files that are not what they seem."""
FLOAT_TYPES: dict[str, np.dtype[Any]] = {"F": np.dtype("<f4"), "D": np.dtype("<f8")}
INTEGER_FIELDS = {
    "<Dim>",
    "<BlockDim>",
    "<TimePeriod>",
    "<InputDim>",
    "<OutputDim>",
    "<RankIn>",
    "<RankOut>",
    "<RankInOut>",
    "<UpdatePeriod>",
    "<TimeMaskMaxFrames>",
}
"""Fields of nnet3 components whose numbers are integers; the format does not tell them from floats."""
INTEGER_VECTOR_FIELDS = {"<TimeOffsets>"}
FLAG_FIELDS = {"<Continuous>"}
"""Fields that stand alone, without a value."""

FieldValue = float | int | bool | np.ndarray


class DiagonalGaussians(NamedTuple):
    """Mixture of Gaussians with diagonal covariances; log-likelihoods of x are constants + linear @ x -
    inverse_variances @ (x * x) / 2."""

    constants: np.ndarray
    """(Gaussians,) float32, log weights included."""
    linear: np.ndarray
    """(Gaussians, width) float32: means over variances."""
    inverse_variances: np.ndarray
    """(Gaussians, width) float32."""


class IvectorExtractor(NamedTuple):
    """Total-variability model: Gaussian g has the mean projections[g] @ ivector.

    Source: Dehak et al. 2011, doi:10.1109/TASL.2010.2064307, without weights that depend on the i-vector.
    """

    projections: np.ndarray
    """(Gaussians, width, ivector width) float64."""
    inverse_covariances: np.ndarray
    """(Gaussians, width, width) float64."""
    prior_offset: float
    """First number of the prior's mean; the others are 0."""


class TransitionModel(NamedTuple):
    """Transition ids of a decoding graph, numbered from 1; entry 0 of the arrays belongs to none and is -1."""

    pdfs: np.ndarray
    """(ids + 1,) int32: output of the network that each transition id consumes."""
    phones: np.ndarray
    """(ids + 1,) int32."""
    self_loops: np.ndarray
    """(ids + 1,) bool."""


class KaldiComponent(NamedTuple):
    """Component of an nnet3 network."""

    kind: str
    """Class name, such as TdnnComponent."""
    fields: Mapping[str, tuple[FieldValue, ...]]
    """Values by token, brackets included; most fields have one value."""

    def array(self, field: str) -> np.ndarray:
        """The field's array. Raises WeightsCorrupt."""
        values = self.fields.get(field, ())
        if len(values) != 1 or not isinstance(values[0], np.ndarray):
            raise WeightsCorrupt(f"a {self.kind} without the array {field}", "as Kaldi writes it")
        return values[0]

    def number(self, field: str) -> float:
        """The field's number. Raises WeightsCorrupt."""
        values = self.fields.get(field, ())
        if len(values) != 1 or isinstance(values[0], np.ndarray):
            raise WeightsCorrupt(f"a {self.kind} without the number {field}", "as Kaldi writes it")
        return float(values[0])


class Nnet3(NamedTuple):
    """Network as Kaldi writes it: config lines that wire components by name."""

    lines: tuple[str, ...]
    components: Mapping[str, KaldiComponent]


class AcousticModel(NamedTuple):
    """Content of a final.mdl of nnet3."""

    transitions: TransitionModel
    network: Nnet3
    priors: np.ndarray
    """(pdfs,) float32; empty for chain models."""


class KaldiReader:
    """Cursor over a binary file of Kaldi's. Every method raises WeightsCorrupt, with file and offset, for bytes
    that are not what is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._data = path.read_bytes()
        except OSError as failure:
            raise WeightsCorrupt(f"{path} cannot be read: {failure}") from failure
        self.offset = 0
        if self._data[:2] != BINARY_MARK:
            raise self.error("does not begin with a zero byte and B", "a file in Kaldi's binary format")
        self.offset = 2

    def error(self, problem: str, expected: str) -> WeightsCorrupt:
        return WeightsCorrupt(f"{self.path}, byte {self.offset}: {problem}", expected)

    def take(self, size: int) -> bytes:
        taken = self._data[self.offset : self.offset + size]
        if size < 0 or len(taken) != size:
            raise self.error(f"the file ends {size - len(taken)} bytes early", "a whole file")
        self.offset += size
        return taken

    def peek(self, size: int = 1) -> bytes:
        """The next bytes, without reading them; fewer at the end of the file."""
        return self._data[self.offset : self.offset + size]

    def token(self) -> str:
        end = self._data.find(b" ", self.offset, self.offset + LONGEST_TOKEN_BYTES)
        if end < 0:
            raise self.error("no token", f"a word of at most {LONGEST_TOKEN_BYTES} bytes and a space")
        try:
            text = self._data[self.offset : end].decode("utf-8")
        except UnicodeDecodeError as failure:
            raise self.error("a token that is not UTF-8", "a word and a space") from failure
        self.offset = end + 1
        return text

    def expect(self, *tokens: str) -> str:
        """Reads a token, one of `tokens`."""
        start = self.offset
        token = self.token()
        if token not in tokens:
            self.offset = start
            raise self.error(f"the token {token!r}", f"{' or '.join(tokens)}")
        return token

    def line(self) -> str:
        """Reads text up to the next line feed."""
        end = self._data.find(b"\n", self.offset)
        if end < 0:
            raise self.error("text without an end", "a line feed")
        text = self._data[self.offset : end].decode("utf-8", "replace")
        self.offset = end + 1
        return text.rstrip("\r")

    def integer(self) -> int:
        return int(self._number("<i4"))

    def real(self) -> float:
        """Reads a float or a double, as its size says."""
        return float(self._number("<f8" if self.peek() == b"\x08" else "<f4"))

    def flag(self) -> bool:
        mark = self.take(1)
        if mark not in (b"T", b"F"):
            raise self.error(f"a truth value {mark!r}", "T or F")
        return mark == b"T"

    def _number(self, dtype: str) -> Any:
        kind = np.dtype(dtype)
        size = self.take(1)[0]
        if size != kind.itemsize:
            self.offset -= 1
            raise self.error(f"a number of {size} bytes", f"{kind.itemsize}")
        return np.frombuffer(self.take(size), kind)[0]

    def _count(self) -> int:
        count = self.integer()
        if not 0 <= count <= MOST_ITEMS:
            raise self.error(f"a size of {count}", f"0 to {MOST_ITEMS}")
        return count

    def _reals(self, dtype: np.dtype[Any], count: int) -> np.ndarray:
        return np.frombuffer(self.take(dtype.itemsize * count), dtype)

    def vector(self) -> np.ndarray:
        """Reads a vector, in its own precision."""
        dtype = FLOAT_TYPES[self.expect("FV", "DV")[:1]]
        return self._reals(dtype, self._count())

    def matrix(self) -> np.ndarray:
        """Reads a matrix, compressed or not."""
        kind = self.expect("FM", "DM", "CM", "CM2", "CM3")
        if kind.startswith("C"):
            return self._compressed_matrix(kind)
        rows, columns = self._count(), self._count()
        return self._reals(FLOAT_TYPES[kind[:1]], rows * columns).reshape(rows, columns)

    def _compressed_matrix(self, kind: str) -> np.ndarray:
        low, span, rows, columns = struct.unpack("<ffii", self.take(16))
        if not (0 <= rows <= MOST_ITEMS and 0 <= columns <= MOST_ITEMS):
            raise self.error(f"a matrix of {rows} by {columns}", f"at most {MOST_ITEMS} rows and columns")
        if kind != "CM":
            width, steps = (2, 65_535.0) if kind == "CM2" else (1, 255.0)
            levels = np.frombuffer(self.take(width * rows * columns), f"<u{width}").reshape(rows, columns)
            values: np.ndarray = np.float32(low) + levels.astype(np.float32) * np.float32(span / steps)
            return values
        # Four points of each column's distribution, then a byte for each number, which interpolates between them.
        points = np.frombuffer(self.take(8 * columns), "<u2").reshape(columns, 4)
        corners = (np.float32(low) + points.astype(np.float32) * np.float32(span / 65_535.0)).T
        levels = np.frombuffer(self.take(rows * columns), "u1").reshape(columns, rows).T.astype(np.float32)
        first, second, third, last = corners
        interpolated: np.ndarray = np.where(
            levels <= 64,
            first + (second - first) * levels * np.float32(1 / 64),
            np.where(
                levels <= 192,
                second + (third - second) * (levels - 64) * np.float32(1 / 128),
                third + (last - third) * (levels - 192) * np.float32(1 / 63),
            ),
        )
        return interpolated

    def symmetric_matrix(self) -> np.ndarray:
        """Reads a packed symmetric matrix: the lower triangle, row by row."""
        dtype = FLOAT_TYPES[self.expect("FP", "DP")[:1]]
        size = self._count()
        packed = self._reals(dtype, size * (size + 1) // 2)
        matrix = np.zeros((size, size), dtype.type)
        rows, columns = np.tril_indices(size)
        matrix[rows, columns] = matrix[columns, rows] = packed
        return matrix

    def integers(self) -> np.ndarray:
        """Reads a vector of 32-bit integers."""
        if self.take(1) != b"\x04":
            self.offset -= 1
            raise self.error("a list that is not of 4-byte integers", "one that is")
        (count,) = struct.unpack("<i", self.take(4))
        if not 0 <= count <= MOST_ITEMS:
            raise self.error(f"a list of {count} integers", f"0 to {MOST_ITEMS}")
        return np.frombuffer(self.take(4 * count), "<i4")

    def field(self, name: str) -> FieldValue:
        """Reads one value of a component's field."""
        if name in INTEGER_VECTOR_FIELDS:
            return self.integers()
        head = self.peek(3)
        if head[:2] in (b"FM", b"DM", b"CM"):
            return self.matrix()
        if head in (b"FV ", b"DV "):
            return self.vector()
        if head[:1] in (b"T", b"F"):
            return self.flag()
        return self.integer() if name in INTEGER_FIELDS else self.real()


# --- files ------------------------------------------------------------------------------------------------


def read_matrix(path: Path) -> np.ndarray:
    """Matrix of a file, binary or text. Raises WeightsCorrupt."""
    with path.open("rb") as file:
        binary = file.read(2) == BINARY_MARK
    if binary:
        return KaldiReader(path).matrix()
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    try:
        if not (text.startswith("[") and text.endswith("]")):
            raise ValueError("no brackets")
        return np.array([line.split() for line in text[1:-1].strip().splitlines()], np.float64)
    except ValueError as failure:
        raise WeightsCorrupt(f"{path} is no matrix: {failure}", "rows of numbers between [ and ]") from failure


def read_diagonal_gaussians(path: Path) -> DiagonalGaussians:
    """Mixture of a file, such as final.dubm. Raises WeightsCorrupt."""
    reader = KaldiReader(path)
    reader.expect("<DiagGMM>", "<DiagGMMBegin>")
    token, constants = reader.token(), None
    if token == "<GCONSTS>":
        constants, token = reader.vector(), reader.token()
    if token != "<WEIGHTS>":
        raise reader.error(f"the token {token!r}", "<WEIGHTS>")
    weights = reader.vector()
    reader.expect("<MEANS_INVVARS>")
    linear = reader.matrix()
    reader.expect("<INV_VARS>")
    inverse_variances = reader.matrix()
    reader.expect("</DiagGMM>", "<DiagGMMEnd>")
    if linear.shape != inverse_variances.shape or linear.shape[:1] != weights.shape:
        raise reader.error(f"means {linear.shape}, variances {inverse_variances.shape}", f"{len(weights)} rows each")
    if not (_positive(weights) and _positive(inverse_variances) and np.isfinite(linear).all()):
        raise reader.error("weights or variances that are not above 0", "a mixture of Gaussians")
    computed = np.log(weights.astype(np.float64)) + 0.5 * (
        np.log(inverse_variances.astype(np.float64)).sum(1)
        - linear.shape[1] * np.log(2 * np.pi)
        - (linear.astype(np.float64) ** 2 / inverse_variances).sum(1)
    )
    if constants is None:
        constants = computed
    elif constants.shape != computed.shape or not np.allclose(constants, computed, rtol=1e-3, atol=1e-2):
        raise reader.error("constants that do not belong to the Gaussians", "the log of their normalizations")
    return DiagonalGaussians(constants.astype(np.float32), linear, inverse_variances)


def _positive(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).all() and (values > 0).all())


def read_ivector_extractor(path: Path) -> IvectorExtractor:
    """Extractor of a file, such as final.ie. Raises WeightsCorrupt, also for weights that depend on the i-vector."""
    reader = KaldiReader(path)
    reader.expect("<IvectorExtractor>")
    reader.expect("<w>")
    if reader.matrix().size:
        raise reader.error("weights of Gaussians that depend on the i-vector", "weights that do not")
    reader.expect("<w_vec>")
    weights = reader.vector()
    reader.expect("<M>")
    size = reader.integer()
    if size != len(weights) or not size:
        raise reader.error(f"{size} projections", f"as many as weights, {len(weights)}")
    projections = [reader.matrix() for _ in range(size)]
    reader.expect("<SigmaInv>")
    covariances = [reader.symmetric_matrix() for _ in range(size)]
    reader.expect("<IvectorOffset>")
    prior_offset = reader.real()
    reader.expect("</IvectorExtractor>")
    shapes = {each.shape for each in projections}, {each.shape for each in covariances}
    width = projections[0].shape[0]
    if len(shapes[0]) != 1 or shapes[1] != {(width, width)}:
        raise reader.error("Gaussians of several sizes", f"projections of {width} rows, covariances {width}x{width}")
    return IvectorExtractor(
        np.stack(projections).astype(np.float64), np.stack(covariances).astype(np.float64), prior_offset
    )


def read_acoustic_model(path: Path) -> AcousticModel:
    """Acoustic model of a file of nnet3, such as final.mdl. Raises WeightsCorrupt."""
    reader = KaldiReader(path)
    transitions = _read_transitions(reader)
    network = _read_nnet3(reader)
    reader.expect("<LeftContext>")
    reader.integer()
    reader.expect("<RightContext>")
    reader.integer()
    reader.expect("<Priors>")
    return AcousticModel(transitions, network, reader.vector())


def _read_transitions(reader: KaldiReader) -> TransitionModel:
    reader.expect("<TransitionModel>")
    entry_of_phone, entries = _read_topology(reader)
    quadruples = reader.expect("<Tuples>", "<Triples>") == "<Tuples>"
    pdfs, phones, loops = [-1], [-1], [False]
    for _ in range(reader.integer()):
        phone, state, forward_pdf = reader.integer(), reader.integer(), reader.integer()
        loop_pdf = reader.integer() if quadruples else forward_pdf
        entry = int(entry_of_phone[phone]) if 0 < phone < len(entry_of_phone) else -1
        if not 0 <= entry < len(entries) or not 0 <= state < len(entries[entry]):
            raise reader.error(f"state {state} of phone {phone}", "one that the topology has")
        for target in entries[entry][state]:
            pdfs.append(loop_pdf if target == state else forward_pdf)
            phones.append(phone)
            loops.append(target == state)
    reader.expect("</Tuples>", "</Triples>")
    reader.expect("<LogProbs>")
    logprobs = reader.vector()
    reader.expect("</LogProbs>")
    reader.expect("</TransitionModel>")
    if len(logprobs) != len(pdfs):
        raise reader.error(f"{len(logprobs)} transition probabilities", f"{len(pdfs)}, one of them for no transition")
    return TransitionModel(np.array(pdfs, np.int32), np.array(phones, np.int32), np.array(loops))


def _read_topology(reader: KaldiReader) -> tuple[np.ndarray, list[list[list[int]]]]:
    """Entry of each phone, and for each entry and state the states to which transitions lead."""
    reader.expect("<Topology>")
    reader.integers()  # the phones, sorted
    entry_of_phone = reader.integers()
    count = reader.integer()
    # Below 0: states have a pdf for their self-loop beside the one for leaving them.
    two_pdfs = count < 0
    if two_pdfs:
        count = reader.integer()
    entries = []
    for _ in range(count):
        states = []
        for _ in range(reader.integer()):
            reader.integer()
            if two_pdfs:
                reader.integer()
            targets = []
            for _ in range(reader.integer()):
                targets.append(reader.integer())
                reader.real()
            states.append(targets)
        entries.append(states)
    reader.expect("</Topology>")
    return entry_of_phone, entries


def _read_nnet3(reader: KaldiReader) -> Nnet3:
    reader.expect("<Nnet3>")
    reader.line()
    lines = []
    while line := reader.line():
        lines.append(line)
    reader.expect("<NumComponents>")
    components = {}
    for _ in range(reader.integer()):
        reader.expect("<ComponentName>")
        name = reader.token()
        components[name] = _read_component(reader)
    reader.expect("</Nnet3>")
    return Nnet3(tuple(lines), components)


def _read_component(reader: KaldiReader) -> KaldiComponent:
    opening = reader.token()
    if not (opening.startswith("<") and opening.endswith("Component>")):
        raise reader.error(f"the token {opening!r}", "the class of a component")
    fields: dict[str, tuple[FieldValue, ...]] = {}
    while (name := reader.token()) != f"</{opening[1:]}":
        if not name.startswith("<"):
            raise reader.error(f"the token {name!r}", f"a field of {opening} or its end")
        values: list[FieldValue] = []
        while name not in FLAG_FIELDS and (not values or reader.peek() != b"<"):
            values.append(reader.field(name))
        fields[name] = tuple(values)
    return KaldiComponent(opening[1:-1], fields)


def read_word_boundaries(path: Path) -> np.ndarray:
    """Kinds of phones of a word_boundary.int, (phones + 1,) int8, indices into WORD_BOUNDARIES; phones without a
    line are `nonword`. Raises WeightsCorrupt."""
    kinds = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        parts = line.split()
        if len(parts) != 2 or not parts[0].isdigit() or parts[1] not in WORD_BOUNDARIES:
            raise WeightsCorrupt(
                f"{path}, line {number}: {line[:100]!r}", f"a phone and one of {', '.join(WORD_BOUNDARIES)}"
            )
        kinds[int(parts[0])] = WORD_BOUNDARIES.index(parts[1])
    result = np.zeros(max(kinds, default=-1) + 1, np.int8)
    for phone, kind in kinds.items():
        result[phone] = kind
    return result


def read_integer_list(path: Path) -> tuple[int, ...]:
    """Integers of a text file, such as disambig_tid.int. Raises WeightsCorrupt."""
    try:
        return tuple(int(word) for word in path.read_text(encoding="utf-8", errors="replace").split())
    except ValueError as failure:
        raise WeightsCorrupt(f"{path}: {failure}", "whole numbers") from failure


def read_options(path: Path) -> dict[str, str]:
    """Options of a .conf file by name: a line is --name=value, or --name for true; # begins a comment. Raises
    WeightsCorrupt."""
    options = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        words = line.split("#")[0].strip()
        if not words:
            continue
        if not words.startswith("--"):
            raise WeightsCorrupt(f"{path}, line {number}: {line[:100]!r}", "--name=value")
        name, _, value = words[2:].partition("=")
        options[name.strip()] = value.strip() or "true"
    return options
