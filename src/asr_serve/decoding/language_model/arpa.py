"""ARPA files of n-gram models: read, plain or compressed by gzip, and written.

Source  the format of the CMU and SRILM toolkits (ngram-format(5)): a header with counts, then for each order a line
        `log10-probability words... [log10-back-off]`, and \\end\\.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from asr_serve.errors import WeightsCorrupt
from asr_serve.models.ngram import NgramModel

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
LN10 = math.log(10.0)
NEVER_LOG10 = -99.0
"""Log-probability, in base 10, that stands for none; <s> has it, since it is never predicted."""
MAX_ORDER = 16


class NgramEntry(NamedTuple):
    """One n-gram: its words as ids, natural-log probability and back-off weight."""

    words: tuple[int, ...]
    logprob: float
    backoff: float


class WordNgrams(NamedTuple):
    """N-gram model with its vocabulary."""

    model: NgramModel
    words: tuple[str, ...]
    """Words by id. <s> and </s> are not among them: the one is the start state, the other the final
    log-probabilities."""


def read_arpa(path: Path) -> WordNgrams:
    """Read an ARPA file. Raises WeightsCorrupt with the line of what is wrong."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            return _Reader(path, file).read()
    except (OSError, EOFError, UnicodeDecodeError) as failure:
        raise WeightsCorrupt(f"the language model {path} cannot be read: {failure}", "an ARPA file in UTF-8") from failure


class _Reader:
    def __init__(self, path: Path, file: IO[str]) -> None:
        self._path, self._lines, self._number = path, iter(file), 0
        self._ids: dict[str, int] = {BEGIN: 0, END: 1}

    def read(self) -> WordNgrams:
        counts = self._counts()
        builder = NgramBuilder()
        for order, count in enumerate(counts, start=1):
            self._expect(f"\\{order}-grams:")
            for line in self._section():
                builder.add(self._entry(line, order, order == len(counts)))
                count -= 1
            if count:
                raise self._broken(f"{abs(count)} {order}-grams {'fewer' if count > 0 else 'more'} than counted")
        self._expect("\\end\\")
        return builder.build(list(self._ids))

    def _next(self) -> str | None:
        for line in self._lines:
            self._number += 1
            if stripped := line.strip():
                return stripped
        return None

    def _expect(self, wanted: str) -> None:
        if (line := self._pending or self._next()) != wanted:
            raise self._broken(f"{(line or 'the end')[:60]!r} where {wanted!r} belongs")
        self._pending: str | None = None

    def _counts(self) -> list[int]:
        while (line := self._next()) != "\\data\\":
            if line is None:
                raise self._broken("no \\data\\")
        counts: list[int] = []
        while (line := self._next()) and line.startswith("ngram "):
            order, _, count = line.removeprefix("ngram ").partition("=")
            if not (order.strip().isdecimal() and count.strip().isdecimal()) or int(order) != len(counts) + 1:
                raise self._broken(f"{line[:60]!r} where `ngram {len(counts) + 1}=COUNT` belongs")
            counts.append(int(count))
        self._pending = line
        if not 1 <= len(counts) <= MAX_ORDER:
            raise self._broken(f"a model of order {len(counts)}; 1 to {MAX_ORDER} are read")
        return counts

    def _section(self) -> Iterator[str]:
        while (line := self._next()) is not None:
            if line.startswith("\\"):
                self._pending = line
                return
            yield line
        self._pending = None

    def _entry(self, line: str, order: int, highest: bool) -> NgramEntry:
        fields = line.split()
        if not order + 1 <= len(fields) <= order + (1 if highest else 2):
            raise self._broken(f"{line[:60]!r} is no {order}-gram")
        try:
            logprob = float(fields[0])
            backoff = float(fields[order + 1]) if len(fields) == order + 2 else 0.0
        except ValueError:
            raise self._broken(f"{line[:60]!r} has no numbers where they belong") from None
        if not (logprob <= 0.0 and math.isfinite(backoff)) and order + 1 != len(fields):
            raise self._broken(f"{line[:60]!r} has numbers out of range")
        ids = tuple(self._id(word, order) for word in fields[1 : order + 1])
        return NgramEntry(ids, -math.inf if logprob <= NEVER_LOG10 else logprob * LN10, backoff * LN10)

    def _id(self, word: str, order: int) -> int:
        known = self._ids.get(word)
        if known is None:
            if order > 1:
                raise self._broken(f"the word {word[:40]!r} has no 1-gram")
            known = self._ids[word] = len(self._ids)
        return known

    def _broken(self, problem: str) -> WeightsCorrupt:
        return WeightsCorrupt(f"{self._path}, line {self._number}: {problem}", "an ARPA file, as SRILM and KenLM write")


class NgramBuilder:
    """Builder of a model's arrays from n-grams, those of a lower order first. Ids 0 and 1 are <s> and </s>."""

    def __init__(self) -> None:
        self._logprobs: dict[tuple[int, ...], float] = {}
        self._backoffs: dict[tuple[int, ...], float] = {}
        self._contexts: dict[tuple[int, ...], None] = {(): None}

    def add(self, entry: NgramEntry) -> None:
        """Add an n-gram; one whose context has no entry of its own makes that a context."""
        self._logprobs[entry.words] = entry.logprob
        if entry.backoff:
            self._backoffs[entry.words] = entry.backoff
        for length in range(1, len(entry.words)):
            self._contexts.setdefault(entry.words[:length])
        # A context can only be left by words whose shorter contexts are there too.
        for start in range(1, len(entry.words) - 1):
            for length in range(1, len(entry.words) - start):
                self._contexts.setdefault(entry.words[start : start + length])

    def build(self, names: Sequence[str]) -> WordNgrams:
        """The model, and its words without <s> and </s>. `names`: words by id."""
        contexts = sorted(self._contexts, key=lambda context: (len(context), context))
        state_of = {context: state for state, context in enumerate(contexts)}

        def longest(words: tuple[int, ...]) -> int:
            while words not in state_of:
                words = words[1:]
            return state_of[words]

        final = np.full(len(contexts), -math.inf, np.float32)
        arcs: list[tuple[int, int, float, int]] = []
        for words, logprob in self._logprobs.items():
            state = state_of[words[:-1]]
            if words[-1] == 1:
                final[state] = logprob
            elif words[-1] > 1:
                arcs.append((state, words[-1] - 2, logprob, longest(words)))
        arcs.sort()
        backoffs = np.array([self._backoffs.get(context, 0.0) for context in contexts], np.float32)
        parents = np.array([-1, *(longest(context[1:]) for context in contexts[1:])], np.int32)
        given = np.zeros(len(contexts), bool)
        for words in self._logprobs:
            given[state_of[words[:-1]]] |= words[-1] == 1
        for state in range(1, len(contexts)):  # shorter contexts come first
            if not given[state]:
                final[state] = backoffs[state] + final[parents[state]]
        counts = np.bincount(np.array([arc[0] for arc in arcs], np.int64), minlength=len(contexts))
        model = NgramModel(
            arc_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            arc_words=np.array([arc[1] for arc in arcs], np.int32),
            arc_logprobs=np.array([arc[2] for arc in arcs], np.float32),
            arc_states=np.array([arc[3] for arc in arcs], np.int32),
            backoff_states=parents,
            backoff_logprobs=backoffs,
            final_logprobs=final,
            start_state=state_of.get((0,), 0),
        )
        model.validate()
        return WordNgrams(model, tuple(names[2:]))
