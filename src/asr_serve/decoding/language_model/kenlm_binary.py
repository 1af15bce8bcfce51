"""KenLM's binary files of n-gram models: tries and probing hash tables, read into tables of n-grams.

A trie stores its n-grams from the last word to the first, in records of a few bits; they are read back as they were.
A probing table stores only a hash of each n-gram: the n-grams are found again by hashing all that may be there, those
whose first words and whose last words are n-grams themselves. That is fast for vocabularies of tokens and takes
minutes for those of words, so its work is bounded.

Source  KenLM, Heafield 2011, "KenLM: Faster and Smaller Language Model Queries"; quantization: Federico and Bertoldi
        2006; compressed pointers: Raj and Whittaker 2003. tests/decoding/generate_kenlm.py makes the files that tests
        compare with KenLM's own scores.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asr_serve.decoding.language_model.ngram_tables import (
    BEGIN,
    BEGIN_ID,
    END,
    END_ID,
    FIRST_WORD_ID,
    UNKNOWN,
    NgramTable,
    WordNgrams,
)
from asr_serve.decoding.language_model.packed_numbers import PackedNumbers, required_bits
from asr_serve.errors import WeightsCorrupt

MAGIC = b"mmap lm http://kheafield.com/code "
"""Start of every binary file of KenLM."""
_VERSIONED = MAGIC + b"format version 5\n\0\0"
_SANITY = _VERSIONED.ljust(-(-len(_VERSIONED) // 8) * 8, b"\0") + struct.pack(
    "<fffIIIQ", 0, 1, -0.5, 1, 2**32 - 1, 0, 1
)
"""Start of a file of the version and byte order that are read."""
_PARAMETERS = struct.Struct("<B3xfIB3xI")
"""Order, multiplier of hash tables, kind, whether the words are in the file, version of the kind."""
KINDS = ("probing", "rest probing", "trie", "quantized trie", "compressed trie", "quantized compressed trie")
_KIND_VERSIONS = (0, 0, 1, 1, 1, 1)
MAX_ORDER = 16
MAX_HASHED_NGRAMS = 1 << 33
"""Most n-grams that are hashed to find those of a probing table: about five minutes."""
_HASHED_AT_ONCE = 1 << 22
_FILTER_BITS_PER_NGRAM = 32
_LN10, _MAX_LOG10 = math.log(10.0), 1e6
_NO_EXTENSION = 0x8000_0000
"""Bits of the back-off weight -0.0, which an n-gram has that no longer one begins with."""
_REBUILD = "its ARPA file, or a trie: build_binary trie MODEL.arpa MODEL.bin"


def is_kenlm_binary(path: Path) -> bool:
    """Returns whether a file starts as KenLM's binary files do. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_kenlm_binary(path: Path) -> WordNgrams:
    """Read a binary file of KenLM. Raises WeightsCorrupt for one that is broken, of another version or byte order,
    without its words, or too large a probing table."""
    try:
        data = np.memmap(path, np.uint8, "r")
        header = _Header.parse(path, data)
        reader = _read_trie if header.kind >= KINDS.index("trie") else _read_probing
        return reader(header, data).to_ngrams()
    except (OSError, IndexError, struct.error, UnicodeDecodeError, ValueError) as failure:
        raise WeightsCorrupt(f"the language model {path} is broken: {failure}", _REBUILD) from failure


class _Header(NamedTuple):
    """Header of a file."""

    path: Path
    order: int
    multiplier: np.float32
    """Buckets of a hash table for each of its entries."""
    kind: int
    counts: tuple[int, ...]
    """N-grams of orders 1, 2, ..."""
    nbytes: int

    @classmethod
    def parse(cls, path: Path, data: np.ndarray) -> _Header:
        def refused(problem: str, allowed: str = _REBUILD) -> WeightsCorrupt:
            return WeightsCorrupt(f"the language model {path} {problem}", allowed)

        start = data[: len(_SANITY)].tobytes()
        if start.startswith(MAGIC + b"incomplete"):
            raise refused("was not written to its end")
        if not start.startswith(_VERSIONED):
            raise refused("is of another version of KenLM's binary files than 5")
        if start != _SANITY:
            raise refused("was written on a machine of another byte order or word size")
        order, multiplier, kind, has_words, version = _PARAMETERS.unpack(
            data[len(_SANITY) :][: _PARAMETERS.size].tobytes()
        )
        if not 2 <= order <= MAX_ORDER:
            raise refused(f"is of order {order}", f"2 to {MAX_ORDER}")
        if kind >= len(KINDS):
            raise refused(f"is of kind {kind}", ", ".join(KINDS))
        if version != _KIND_VERSIONS[kind]:
            raise refused(f"is a {KINDS[kind]} of version {version}, and {_KIND_VERSIONS[kind]} is read")
        if not has_words:
            raise refused("was built without its words")
        at = len(_SANITY) + _PARAMETERS.size
        counts = tuple(map(int, np.frombuffer(data[at : at + 8 * order].tobytes(), "<u8")))
        if any(count > len(data) for count in counts) or not 1 <= multiplier < 1e3:
            raise refused("has a broken header")
        return cls(path, order, np.float32(multiplier), kind, counts, -(-(at + 8 * order) // 8) * 8)

    def words(self, data: np.ndarray, at: int) -> list[str]:
        """Words by id, which are at the end of the file."""
        words = data[at:].tobytes().decode().split("\0")
        if not words[0] == UNKNOWN or words.pop() or len(words) > self.counts[0] + 1:
            raise ValueError("its words are not where they belong")
        return words


class _Level(NamedTuple):
    """N-grams of one order, with KenLM's ids of words."""

    words: np.ndarray
    """(rows, order) int64."""
    logprobs: np.ndarray
    """(rows,) float32: log-probability in base 10."""
    backoffs: np.ndarray
    """(rows,) float32: back-off weight in base 10."""


class _Levels(NamedTuple):
    """All n-grams of a file."""

    levels: list[_Level]
    words: list[str]

    def to_ngrams(self) -> WordNgrams:
        special = {BEGIN: BEGIN_ID, END: END_ID}
        others = [word for word in self.words if word not in special]
        ids = np.array([special.get(word, -1) for word in self.words], np.int32)
        ids[ids < 0] = FIRST_WORD_ID + np.arange(len(others))
        tables = []
        for each in self.levels:
            logprobs, backoffs = each.logprobs.astype(np.float64), each.backoffs.astype(np.float64)
            if not ((logprobs >= -_MAX_LOG10) & (logprobs <= 0) & (np.abs(backoffs) <= _MAX_LOG10)).all():
                raise ValueError("its log-probabilities are none")
            tables.append(NgramTable(ids[each.words], logprobs * _LN10, backoffs * _LN10))
        return WordNgrams.from_tables(tables, others)


# --- tries ------------------------------------------------------------------------------------------------------


def _read_trie(header: _Header, data: np.ndarray) -> _Levels:
    counts, order = header.counts, header.order
    quantized, compressed = header.kind in (3, 5), header.kind in (4, 5)
    at = header.nbytes + 8 + 8 * counts[0]  # hashes of the words, which are read as text
    tables = _QuantizationTables.read(data, at, order) if quantized else None
    at += tables.nbytes if tables else 0
    unigrams = np.frombuffer(
        data[at : at + 16 * (counts[0] + 1)].tobytes(), [("logprob", "<f4"), ("backoff", "<f4"), ("next", "<u8")]
    )
    at += 16 * (counts[0] + 2)
    levels = [_Level(np.arange(counts[0])[:, None], unigrams["logprob"][:-1], unigrams["backoff"][:-1])]
    nexts = unigrams["next"].astype(np.int64)
    chop_limit = int(data[at + 1]) if compressed and order > 2 else 0
    word_bits = required_bits(counts[0])
    for n in range(2, order + 1):
        count, longest = counts[n - 1], n == order
        value_bits = tables.value_bits(longest) if tables else 31 if longest else 63
        pointers = None if longest else _Pointers.read(data, at, count + 1, counts[n], chop_limit, compressed)
        at += pointers.nbytes if pointers else 0
        total_bits = word_bits + value_bits + (pointers.inline_bits if pointers else 0)
        bits, records = PackedNumbers(data, at), np.arange(count + 1) * total_bits
        rows = records[:-1]
        words = bits.read(rows, word_bits)
        if tables:
            logprobs, backoffs = tables.decode(bits, rows + word_bits, n, longest)
        else:
            logprobs = (bits.read(rows + word_bits, 31) | _NO_EXTENSION).astype(np.uint32).view(np.float32)
            read = np.zeros(count, np.int64) if longest else bits.read(rows + word_bits + 31, 32)
            backoffs = read.astype(np.uint32).view(np.float32)
        # The children of a record, which are one word longer to the left, lie from its pointer to the next one's.
        if nexts[0] != 0 or nexts[-1] != count or (np.diff(nexts) < 0).any() or (words >= counts[0]).any():
            raise ValueError(f"its {n}-grams do not fit those before them")
        parents = np.repeat(np.arange(counts[n - 2]), np.diff(nexts))
        levels.append(_Level(np.column_stack([words, levels[-1].words[parents]]), logprobs, backoffs))
        if pointers:
            inline = bits.read(records + word_bits + value_bits, pointers.inline_bits)
            nexts = pointers.decode(inline)
        at += (total_bits * (count + 1) + 7) // 8 + 8
    return _Levels(levels, header.words(data, at))


class _QuantizationTables(NamedTuple):
    """Log-probabilities and back-off weights of each order, to which records point."""

    logprobs: list[np.ndarray]
    backoffs: list[np.ndarray]
    logprob_bits: int
    backoff_bits: int
    nbytes: int

    @classmethod
    def read(cls, data: np.ndarray, at: int, order: int) -> _QuantizationTables:
        version, logprob_bits, backoff_bits = map(int, data[at : at + 3])
        if version != 2 or not (1 <= logprob_bits <= 25 and 1 <= backoff_bits <= 25):
            raise ValueError(f"its quantization is of version {version}, and 2 is read")
        start, logprobs, backoffs = at, list[np.ndarray](), list[np.ndarray]()
        at += 8
        for n in range(2, order + 1):
            for tables, bits in ((logprobs, logprob_bits), (backoffs, backoff_bits))[: 1 if n == order else 2]:
                tables.append(np.frombuffer(data[at : at + 4 * (1 << bits)].tobytes(), "<f4"))
                at += 4 * (1 << bits)
        return cls(logprobs, backoffs, logprob_bits, backoff_bits, at - start)

    def value_bits(self, longest: bool) -> int:
        return self.logprob_bits + (0 if longest else self.backoff_bits)

    def decode(self, bits: PackedNumbers, at: np.ndarray, n: int, longest: bool) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities and back-off weights of n-grams whose values begin at bits `at`."""
        if longest:
            return self.logprobs[n - 2][bits.read(at, self.logprob_bits)], np.zeros(len(at), np.float32)
        backoffs = self.backoffs[n - 2][bits.read(at, self.backoff_bits)]
        return self.logprobs[n - 2][bits.read(at + self.backoff_bits, self.logprob_bits)], backoffs


class _Pointers(NamedTuple):
    """Form of pointers to the next order: whole, or their lower bits, with a sorted array for the higher ones."""

    inline_bits: int
    offsets: np.ndarray
    """First record of each value of the higher bits."""
    nbytes: int
    """Length of the array, with what aligns it."""

    @classmethod
    def read(cls, data: np.ndarray, at: int, records: int, most: int, chop_limit: int, compressed: bool) -> _Pointers:
        """`most`: largest pointer; `chop_limit`: most bits that are left to the array."""
        required = required_bits(most)
        if not compressed:
            return cls(required, np.zeros(1, np.int64), 0)
        if data[at] != 0:
            raise ValueError(f"its compressed pointers are of version {data[at]}, and 0 is read")
        # The number of bits that makes the whole smallest; the fewest of equals.
        chopped = min(
            range(min(required, chop_limit) + 1), key=lambda bits: (most >> (required - bits)) * 64 - records * bits
        )
        count = (most >> (required - chopped)) + 1
        aligned = -(-at // 8) * 8 + 8
        offsets = np.frombuffer(data[aligned : aligned + 8 * count].tobytes(), "<u8").astype(np.int64)
        return cls(required - chopped, offsets, 8 * (1 + count) + 7)

    def decode(self, inline: np.ndarray) -> np.ndarray:
        """Pointers from what is in the records."""
        high: np.ndarray = np.searchsorted(self.offsets, np.arange(len(inline)), "right") - 1
        pointers: np.ndarray = (high << self.inline_bits) | inline
        return pointers


# --- probing hash tables ----------------------------------------------------------------------------------------


def _read_probing(header: _Header, data: np.ndarray) -> _Levels:
    rest = [("rest", "<f4")] if header.kind == KINDS.index("rest probing") else []
    """An upper bound of the log-probability, for decoders that extend to the left."""
    weights = [("logprob", "<f4"), ("backoff", "<f4"), *rest]
    at = header.nbytes + 8 + 12 * _buckets(header, 0)  # hashes of the words, which are read as text
    unigrams, at = _records(data, at, weights, header.counts[0] + 1)
    tables = []
    for n in range(1, header.order):
        entry = [("key", "<u8"), *(weights if n < header.order - 1 else weights[:1])]
        table, at = _records(data, at, entry, _buckets(header, n))
        tables.append(np.sort(table[table["key"] != 0], order="key"))
    words = header.words(data, at)
    unigrams = unigrams[: len(words)]
    ids, keys = np.arange(len(words))[:, None], np.arange(len(words), dtype=np.uint64)
    levels = [_Level(ids, -np.abs(unigrams["logprob"]), unigrams["backoff"])]
    found = unigrams
    # Rows of the order below that an n-gram without its last word, and without its first, are.
    begins = ends = np.zeros(len(ids), np.int64)
    for n, table in enumerate(tables, start=2):
        longer = ~np.signbit(found["logprob"])  # some longer n-gram ends in it
        begun = found["backoff"].view(np.uint32) != _NO_EXTENSION  # some longer n-gram begins with it
        pairs = _Pairs.join(np.flatnonzero(begun), ends, np.flatnonzero(longer), begins)
        if pairs.total > MAX_HASHED_NGRAMS:
            raise WeightsCorrupt(
                f"the language model {header.path} is a probing hash table of {len(words)} words, which holds no "
                f"n-grams but their hashes: {pairs.total:.1e} would have to be tried",
                _REBUILD,
            )
        left, right, row = _find_hashed(pairs, ids[:, 0], keys, table["key"])
        if len(row) != len(table) or len(np.unique(row)) != len(row):
            raise ValueError(f"{len(row)} of its {len(table)} {n}-grams are found again")
        ids = np.column_stack([ids[left, 0], ids[right]])
        found, keys, begins, ends = table[row], table["key"][row], left, right
        backoffs = found["backoff"] if n < header.order else np.zeros(len(found), np.float32)
        levels.append(_Level(ids, -np.abs(found["logprob"]), backoffs))
    return _Levels(levels, words)


def _buckets(header: _Header, n: int) -> int:
    count = header.counts[n]
    return max(count + 1, int(header.multiplier * np.float32(count)))


def _records(data: np.ndarray, at: int, fields: Sequence[tuple[str, str]], count: int) -> tuple[np.ndarray, int]:
    dtype = np.dtype(list(fields))
    return np.frombuffer(data[at : at + count * dtype.itemsize].tobytes(), dtype), at + count * dtype.itemsize


class _Pairs(NamedTuple):
    """Pairs of an n-gram and one that begins with all but its first word, by those words in common."""

    left: np.ndarray
    """Rows, sorted by what they have in common."""
    left_first: np.ndarray
    left_end: np.ndarray
    """Places in `left`, for each of `right`, of those that fit it."""
    right: np.ndarray

    @classmethod
    def join(cls, left: np.ndarray, left_ends: np.ndarray, right: np.ndarray, right_begins: np.ndarray) -> _Pairs:
        """`left_ends`, `right_begins`: of all rows, what a left and a right one have in common."""
        left = left[np.argsort(left_ends[left], kind="stable")]
        common, wanted = left_ends[left], right_begins[right]
        return cls(left, np.searchsorted(common, wanted, "left"), np.searchsorted(common, wanted, "right"), right)

    @property
    def total(self) -> int:
        return int((self.left_end - self.left_first).sum())

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Rows of the left and of the right n-gram of all pairs, some at a time."""
        sizes = self.left_end - self.left_first
        ends = np.cumsum(sizes)
        start = 0
        while start < len(sizes):
            done = ends[start] - sizes[start]
            end = max(start + 1, int(np.searchsorted(ends, done + _HASHED_AT_ONCE, "right")))
            chosen = sizes[start:end]
            within = np.arange(chosen.sum()) - np.repeat(ends[start:end] - chosen - done, chosen)
            yield (
                self.left[np.repeat(self.left_first[start:end], chosen) + within],
                np.repeat(self.right[start:end], chosen),
            )
            start = end


def _find_hashed(
    pairs: _Pairs, first_words: np.ndarray, keys: np.ndarray, wanted: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pairs that a table has: rows of the left and the right n-gram, and rows of the sorted `wanted` keys."""
    size = 1 << max(10, (_FILTER_BITS_PER_NGRAM * len(wanted)).bit_length())
    mask = np.uint64(size - 1)
    may_be = np.zeros(size, bool)
    may_be[wanted & mask] = True
    found = []
    scaled = keys * np.uint64(8978948897894561157)
    words = (first_words + 1).astype(np.uint64) * np.uint64(17894857484156487943)
    for left, right in pairs.batches():
        hashes = scaled[right] ^ words[left]
        likely = np.flatnonzero(may_be[hashes & mask])
        rows = np.searchsorted(wanted, hashes[likely]).clip(max=max(len(wanted) - 1, 0))
        equal = wanted[rows] == hashes[likely] if len(wanted) else np.zeros(0, bool)
        found.append((left[likely][equal], right[likely][equal], rows[equal]))
    empty = np.zeros(0, np.int64)
    parts = zip(*found, strict=True) if found else ((empty,), (empty,), (empty,))
    left, right, rows = (np.concatenate(part) for part in parts)
    return left, right, rows
