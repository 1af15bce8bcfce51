"""OpenFst's binary files as arrays: readers of transducers of the types vector, const, olabel_lookahead and ngram, with
their symbol tables; a writer of the type vector; and the decoding graph that Kaldi's look-ahead decoder composes of two
of them.

Weights are tropical (arc type `standard`): costs, negative natural logs. All numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asr_serve.errors import WeightsCorrupt
from asr_serve.models.decoding_graph import DecodingGraph
from asr_serve.models.ngram import NgramModel

FST_MAGIC, SYMBOLS_MAGIC, ADD_ON_MAGIC = 0x7EB2FDD6, 0x7EB2FB74, 0x1A9FD15A
HAS_INPUT_SYMBOLS, HAS_OUTPUT_SYMBOLS, IS_ALIGNED = 1, 2, 4
"""Flags of a header."""
ALIGNMENT_BYTES = 16
ALIGNED_CONST_VERSION = 1
"""Version of `const` files that are aligned whatever their flags say."""
EPSILON = 0
"""Label that reads or writes nothing."""
ARC = np.dtype([("input", "<i4"), ("output", "<i4"), ("cost", "<f4"), ("state", "<i4")])
CONST_STATE = np.dtype(
    [("final", "<f4"), ("first", "<u4"), ("arcs", "<u4"), ("input_epsilons", "<u4"), ("output_epsilons", "<u4")]
)
STATE_WORDS, ARC_WORDS = 3, ARC.itemsize // 4
"""Sizes of a state and of an arc in a file of type vector, in units of 4 bytes."""
VECTOR_VERSION, EXPANDED_AND_MUTABLE = 2, 3
"""Version of files of type vector, and the properties that all of them have."""
LOOK_AHEAD_TYPES = ("olabel_lookahead", "ilabel_lookahead", "arc_lookahead")
MOST_NAME_BYTES = 1 << 16


class FstFile(NamedTuple):
    """Weighted transducer: the arcs of state s are arcs[offsets[s] : offsets[s + 1]]."""

    start_state: int
    offsets: np.ndarray
    """(states + 1,) int64."""
    arcs: np.ndarray
    """(arcs,) of the record type ARC."""
    final_costs: np.ndarray
    """(states,) float32; inf for states that are not final."""
    input_symbols: dict[int, str] | None = None
    output_symbols: dict[int, str] | None = None


class WordAcceptor(NamedTuple):
    """N-gram model and the names of its words."""

    model: NgramModel
    symbols: dict[int, str] | None


class _Header(NamedTuple):
    type: str
    version: int
    flags: int
    start_state: int
    states: int
    arcs: int
    input_symbols: dict[int, str] | None
    output_symbols: dict[int, str] | None


class _Reader:
    """Cursor over a file's bytes, which tells where a file ends too early."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, 0
        try:
            self.data = path.read_bytes()
        except OSError as failure:
            raise WeightsCorrupt(f"{path} cannot be read: {failure}") from failure

    def error(self, problem: str, expected: str) -> WeightsCorrupt:
        return WeightsCorrupt(f"{self.path}, byte {self.offset}: {problem}", expected)

    def numbers(self, layout: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{layout}")
        if self.offset + size > len(self.data):
            raise self.error(f"the file ends, and {size} more bytes are due", "a whole file")
        found = struct.unpack_from(f"<{layout}", self.data, self.offset)
        self.offset += size
        return found

    def array(self, dtype: np.dtype[Any] | str, count: int) -> np.ndarray:
        kind = np.dtype(dtype)
        if count < 0 or self.offset + count * kind.itemsize > len(self.data):
            raise self.error(
                f"{count} records of {kind.itemsize} bytes are due, and {len(self.data) - self.offset} bytes follow",
                "a whole file",
            )
        found = np.frombuffer(self.data, kind, count, self.offset)
        self.offset += count * kind.itemsize
        return found

    def text(self) -> str:
        (length,) = self.numbers("i")
        if not 0 <= length <= MOST_NAME_BYTES:
            raise self.error(f"a name of {length} bytes", f"0 to {MOST_NAME_BYTES}")
        return self.array("u1", length).tobytes().decode("utf-8", "replace")

    def align(self) -> None:
        self.offset += -self.offset % ALIGNMENT_BYTES

    def symbols(self) -> dict[int, str]:
        (magic,) = self.numbers("i")
        if magic != SYMBOLS_MAGIC:
            raise self.error(f"a symbol table begins with {magic:#x}", f"{SYMBOLS_MAGIC:#x}")
        self.text()
        _, count = self.numbers("qq")
        if not 0 <= count <= len(self.data):
            raise self.error(f"a symbol table of {count} symbols", "no more than the file has bytes")
        table: dict[int, str] = {}
        for _ in range(count):
            name = self.text()
            table[self.numbers("q")[0]] = name
        return table

    def header(self, types: Collection[str]) -> _Header:
        (magic,) = self.numbers("i")
        if magic != FST_MAGIC:
            raise self.error(f"a transducer begins with {magic & 0xFFFFFFFF:#x}", f"{FST_MAGIC:#x}: a file of OpenFst")
        kind, arc_type = self.text(), self.text()
        if kind not in types:
            raise self.error(f"a transducer of type {kind!r}", f"one of {', '.join(types)}")
        if arc_type != "standard":
            raise self.error(f"arcs of type {arc_type!r}", "standard: tropical weights")
        version, flags, _, start_state, states, arcs = self.numbers("iiQqqq")
        read_symbols = [self.symbols() if flags & flag else None for flag in (HAS_INPUT_SYMBOLS, HAS_OUTPUT_SYMBOLS)]
        return _Header(kind, version, flags, start_state, states, arcs, *read_symbols)


def read_transducer(path: Path) -> FstFile:
    """Transducer from a file of type vector, const or a look-ahead type (whose tables of reachable labels are
    skipped). Raises WeightsCorrupt with file and offset."""
    reader = _Reader(path)
    header = reader.header(("vector", "const", *LOOK_AHEAD_TYPES))
    symbols = header.input_symbols, header.output_symbols
    if header.type in LOOK_AHEAD_TYPES:
        (magic,) = reader.numbers("i")
        if magic != ADD_ON_MAGIC:
            raise reader.error(f"an add-on begins with {magic:#x}", f"{ADD_ON_MAGIC:#x}")
        header = reader.header(("const", "vector"))
        symbols = header.input_symbols or symbols[0], header.output_symbols or symbols[1]
    read = _read_vector if header.type == "vector" else _read_const
    offsets, arcs, final_costs = read(reader, header)
    states = len(final_costs)
    if not 0 <= header.start_state < states:
        raise reader.error(f"start state {header.start_state} of {states} states", "a transducer with a start state")
    if len(arcs) and not 0 <= arcs["state"].min() <= arcs["state"].max() < states:
        raise reader.error("arcs that lead to states which the file lacks", f"states 0 to {states - 1}")
    if np.isnan(arcs["cost"]).any() or np.isnan(final_costs).any():
        raise reader.error("costs that are no numbers", "numbers, or inf")
    return FstFile(header.start_state, offsets, arcs, final_costs, *symbols)


def _read_const(reader: _Reader, header: _Header) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    aligned = bool(header.flags & IS_ALIGNED) or header.version == ALIGNED_CONST_VERSION
    if aligned:
        reader.align()
    states = reader.array(CONST_STATE, header.states)
    if aligned:
        reader.align()
    arcs = reader.array(ARC, header.arcs)
    offsets = np.zeros(len(states) + 1, np.int64)
    np.cumsum(states["arcs"], out=offsets[1:])
    if offsets[-1] != len(arcs) or (states["first"] != offsets[:-1]).any():
        raise reader.error("arcs of a const transducer do not lie one behind the other", "states in order")
    return offsets, arcs, states["final"].astype(np.float32)


def _read_vector(reader: _Reader, header: _Header) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    counts: list[int] = []
    finals: list[float] = []
    blocks: list[np.ndarray] = []
    while len(counts) < header.states if header.states >= 0 else reader.offset < len(reader.data):
        final, count = reader.numbers("fq")
        finals.append(final)
        counts.append(count)
        blocks.append(reader.array(ARC, count))
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(np.array(counts, np.int64), out=offsets[1:])
    arcs = np.concatenate(blocks) if blocks else np.empty(0, ARC)
    return offsets, arcs, np.array(finals, np.float32)


def make_transducer(
    start_state: int,
    final_costs: np.ndarray,
    sources: np.ndarray,
    inputs: np.ndarray,
    outputs: np.ndarray,
    costs: np.ndarray | float,
    targets: np.ndarray,
) -> FstFile:
    """Transducer of arcs in any order."""
    arcs = np.empty(len(sources), ARC)
    arcs["input"], arcs["output"], arcs["cost"], arcs["state"] = inputs, outputs, costs, targets
    order = np.argsort(sources, kind="stable")
    offsets = np.zeros(len(final_costs) + 1, np.int64)
    np.cumsum(np.bincount(sources, minlength=len(final_costs)), out=offsets[1:])
    return FstFile(start_state, offsets, arcs[order], np.asarray(final_costs, np.float32))


def write_transducer(transducer: FstFile, path: Path) -> None:
    """Write a transducer as a file of type vector, without its symbol tables."""
    states, arcs = len(transducer.final_costs), len(transducer.arcs)
    kinds = b"".join(struct.pack("<i", len(name)) + name for name in (b"vector", b"standard"))
    header = struct.pack("<i", FST_MAGIC) + kinds
    header += struct.pack("<iiQqqq", VECTOR_VERSION, 0, EXPANDED_AND_MUTABLE, transducer.start_state, states, arcs)
    # In units of 4 bytes: a state is its final cost and a count of 8 bytes, an arc four numbers.
    words = np.empty(STATE_WORDS * states + ARC_WORDS * arcs, "<i4")
    first = STATE_WORDS * np.arange(states) + ARC_WORDS * transducer.offsets[:-1]
    words[first] = transducer.final_costs.astype("<f4").view("<i4")
    counts = np.diff(transducer.offsets).astype("<i8").view("<i4").reshape(states, 2)
    words[first + 1], words[first + 2] = counts.T
    sources = np.repeat(np.arange(states), np.diff(transducer.offsets))
    places = STATE_WORDS * (sources + 1) + ARC_WORDS * np.arange(arcs)
    words[places[:, None] + np.arange(ARC_WORDS)] = (
        np.ascontiguousarray(transducer.arcs, ARC).view("<i4").reshape(arcs, ARC_WORDS)
    )
    with path.open("wb") as file:
        file.write(header)
        file.write(words.data)


# --- n-gram models ----------------------------------------------------------------------------------------


def read_ngram(path: Path) -> WordAcceptor:
    """N-gram model from a file of type ngram. Raises WeightsCorrupt with file and offset.

    The file is a tree of contexts and a list of futures (words that follow a context), both as bit strings: a node
    writes a 1 for each of its children and a 0 behind them (LOUDS). A child's context is its parent's with an
    earlier word before it, so the parent is the back-off.

    Source: Sorensen and Allauzen 2011, Unary data structures for language models.
    """
    reader = _Reader(path)
    header = reader.header(("ngram",))
    states, futures, finals = (int(count) for count in reader.numbers("QQQ"))
    if not 0 < states < 1 << 31 or futures > len(reader.data) or finals > states:
        raise reader.error(f"{states} contexts, {futures} futures and {finals} final contexts", "counts that agree")
    contexts = _bits(reader, 2 * states + 1)
    future_bits = _bits(reader, futures + states + 1)
    is_final = _bits(reader, states)
    context_words = reader.array("<i4", states + 1)
    future_words = reader.array("<i4", futures)
    backoff_costs = reader.array("<f4", states + 1)
    final_costs = reader.array("<f4", finals)
    future_costs = reader.array("<f4", futures)
    ends = np.flatnonzero(~contexts)
    future_ends = np.flatnonzero(~future_bits)
    if (
        len(ends) != states + 1
        or ends[0] != 1
        or len(future_ends) != states + 1
        or future_ends[0] != 0
        or is_final.sum() != finals
        or not 0 <= header.start_state < states
    ):
        raise reader.error("bit strings of contexts or futures that do not agree with their counts", "an ngram file")
    if not all(np.isfinite(costs).all() for costs in (backoff_costs[1:states], final_costs, future_costs)):
        raise reader.error("costs of an n-gram model that are no finite numbers", "costs")
    # The children of node n are the ones between zero n and zero n + 1; nodes are numbered by their ones.
    parents = np.repeat(np.arange(states), np.diff(ends) - 1)
    if len(parents) != states - 1 or (parents >= np.arange(1, states)).any():
        raise reader.error("a tree of contexts whose nodes do not follow their parents", "an ngram file")
    backoff_states = np.concatenate([[-1], parents]).astype(np.int32)
    words = context_words[:states].astype(np.int64)
    arc_offsets = np.zeros(states + 1, np.int64)
    np.cumsum(np.diff(future_ends) - 1, out=arc_offsets[1:])
    all_final_costs = np.full(states, np.inf, np.float32)
    all_final_costs[is_final] = final_costs
    order = _rising_within(arc_offsets, future_words)
    model = NgramModel(
        arc_offsets,
        np.ascontiguousarray(future_words[order]),
        -future_costs[order],
        _states_after(backoff_states, words, arc_offsets, future_words[order].astype(np.int64)),
        backoff_states,
        -np.concatenate([np.zeros(1, np.float32), backoff_costs[1:states]]),
        _with_backoff(backoff_states, backoff_costs, all_final_costs),
        header.start_state,
    )
    try:
        model.validate()
    except WeightsCorrupt as failure:
        raise WeightsCorrupt(f"{path}: {failure}") from failure
    return WordAcceptor(model, header.input_symbols or header.output_symbols)


def _bits(reader: _Reader, count: int) -> np.ndarray:
    words = reader.array("<u8", (count + 63) // 64)
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:count].astype(bool)


def _rising_within(offsets: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Order of arcs that sorts the words of each state."""
    return np.lexsort((words, np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))))


def _with_backoff(backoff_states: np.ndarray, backoff_costs: np.ndarray, final_costs: np.ndarray) -> np.ndarray:
    """Log-probabilities of the end in each state: its own, else that of its back-off state; states come after
    their back-off states."""
    logprobs = -final_costs
    for depth in _levels(backoff_states)[1:]:
        missing = depth[np.isinf(logprobs[depth])]
        logprobs[missing] = logprobs[backoff_states[missing]] - backoff_costs[missing]
    return logprobs


def _levels(backoff_states: np.ndarray) -> list[np.ndarray]:
    """States by the length of their context, 0 first."""
    depths = np.zeros(len(backoff_states), np.int32)
    reached = backoff_states.copy()
    while (reached >= 0).any():
        depths += reached >= 0
        reached = np.where(reached >= 0, backoff_states[reached], -1)
    order = np.argsort(depths, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(depths[order])) + 1)


def _states_after(
    backoff_states: np.ndarray, words: np.ndarray, arc_offsets: np.ndarray, arc_words: np.ndarray
) -> np.ndarray:
    """(arcs,) int32: the longest context that ends in each arc's word.

    Args:
        words: (states,) int64, first word of each context, the one that its back-off lacks.
        arc_words: (arcs,) int64.

    The context after word w in (a b) is the node w, then its child b, then that one's child a, as far as there
    are such nodes.
    """
    width = int(max(words.max(initial=0), arc_words.max(initial=0))) + 2
    keys = backoff_states[1:].astype(np.int64) * width + words[1:]
    order = np.argsort(keys, kind="stable")
    keys, nodes = keys[order], order + 1

    def child(parents: np.ndarray, by: np.ndarray) -> np.ndarray:
        wanted = parents * width + by
        if not len(keys):
            return np.full(len(wanted), -1)
        places = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
        return np.where(keys[places] == wanted, nodes[places], -1)

    levels = _levels(backoff_states)
    longest = len(levels) - 1
    # ancestors[d] of a state: its context cut to its last d words.
    ancestors = np.full((longest + 1, len(backoff_states)), -1, np.int64)
    for depth, states in enumerate(levels):
        ancestors[depth, states] = states
        for shorter in range(depth):
            ancestors[shorter, states] = ancestors[shorter, backoff_states[states]]
    sources = np.repeat(np.arange(len(backoff_states)), np.diff(arc_offsets))
    result = np.zeros(len(arc_words), np.int64)
    current = child(np.zeros(len(arc_words), np.int64), arc_words)
    alive = np.arange(len(arc_words))
    for depth in range(1, longest + 2):
        found = current >= 0
        alive, current = alive[found], current[found]
        result[alive] = current
        if depth > longest:
            break
        context = ancestors[depth, sources[alive]]
        long = context >= 0
        alive, current, context = alive[long], current[long], context[long]
        current = child(current, words[context])
    return result.astype(np.int32)


# --- decoding graphs --------------------------------------------------------------------------------------


def make_decoding_graph(
    transducer: FstFile,
    label_columns: np.ndarray,
    *,
    label_phones: np.ndarray | None = None,
    phone_boundaries: np.ndarray | None = None,
    silent_labels: Collection[int] = (),
    language_model: NgramModel | None = None,
) -> DecodingGraph:
    """Decoding graph of a transducer from acoustic labels (transition ids, or tokens plus 1) to words.

    Args:
        label_columns: (labels,) int32: column of the scores of each input label; that of label 0 is not read.
        label_phones: (labels,) int32, see DecodingGraph; None: unknown.
        phone_boundaries: (phones,) int8, see DecodingGraph; None: words are not marked by phones.
        silent_labels: input labels beside epsilon that consume nothing (disambiguation symbols).
        language_model: model with which the graph is composed while it is searched; its words are the
            transducer's output labels.

    Raises: WeightsCorrupt for input labels without a column.
    """
    arcs, inputs = transducer.arcs, transducer.arcs["input"]
    silent = np.isin(inputs, [EPSILON, *silent_labels])
    consumed = inputs[~silent]
    if len(consumed) and not 0 < consumed.min() <= consumed.max() < len(label_columns):
        raise WeightsCorrupt(
            f"a transducer with the input labels {consumed.min()} to {consumed.max()}",
            f"the acoustic model knows 1 to {len(label_columns) - 1}; other labels are disambiguation symbols, which "
            "must be named",
        )
    sources = np.repeat(np.arange(len(transducer.final_costs)), np.diff(transducer.offsets))
    order = np.lexsort((silent, sources))
    consuming = np.bincount(sources[~silent], minlength=len(transducer.final_costs))
    labels = np.where(silent, -1, inputs)[order].astype(np.int32)
    words = np.where(arcs["output"] == EPSILON, -1, arcs["output"])[order].astype(np.int32)
    graph = DecodingGraph(
        transducer.offsets.astype(np.int32),
        (transducer.offsets[:-1] + consuming).astype(np.int32),
        labels,
        words,
        np.ascontiguousarray(arcs["cost"][order], np.float32),
        np.ascontiguousarray(arcs["state"][order], np.int32),
        np.ascontiguousarray(transducer.final_costs, np.float32),
        np.ascontiguousarray(label_columns, np.int32),
        np.full(len(label_columns), -1, np.int32)
        if label_phones is None
        else np.ascontiguousarray(label_phones, np.int32),
        np.zeros(0, np.int8) if phone_boundaries is None else np.ascontiguousarray(phone_boundaries, np.int8),
        transducer.start_state,
        language_model,
    )
    graph.validate()
    return graph


def read_lookahead_graph(
    labels_to_words: Path,
    words: Path,
    label_columns: np.ndarray,
    *,
    label_phones: np.ndarray,
    phone_boundaries: np.ndarray,
    silent_labels: Collection[int],
) -> tuple[DecodingGraph, dict[int, str]]:
    """Decoding graph and names of words of a Kaldi look-ahead pair (HCLr.fst, Gr.fst), whose words were renumbered
    alike in both files. Arguments as of `make_decoding_graph`. Raises WeightsCorrupt."""
    acceptor = read_ngram(words)
    if acceptor.symbols is None:
        raise WeightsCorrupt(f"{words} has no symbol table", "the words of a look-ahead pair are named in it")
    graph = make_decoding_graph(
        read_transducer(labels_to_words),
        label_columns,
        label_phones=label_phones,
        phone_boundaries=phone_boundaries,
        silent_labels=silent_labels,
        language_model=acceptor.model,
    )
    unknown = np.setdiff1d(graph.arc_words[graph.arc_words >= 0], np.fromiter(acceptor.symbols, np.int64))
    if len(unknown):
        raise WeightsCorrupt(
            f"{labels_to_words} outputs {len(unknown)} words that {words} does not name, {unknown[0]} the first",
            "two files that were made together",
        )
    return graph, acceptor.symbols
