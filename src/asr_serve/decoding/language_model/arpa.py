"""ARPA files of n-gram models: read, plain or compressed by gzip, and written.

Source  the format of SRILM, ngram-format(5): a header with counts, then for each order a section of lines
        `log10-probability words... [log10-back-off]`, and \\end\\.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from asr_serve.decoding.language_model.ngram_tables import (
    BEGIN,
    BEGIN_ID,
    END,
    END_ID,
    FIRST_WORD_ID,
    NgramTable,
    WordNgrams,
)
from asr_serve.errors import WeightsCorrupt

LN10 = math.log(10.0)
NEVER_LOG10 = -99.0
"""Log-probability, in base 10, that stands for none: <s> has it, since it is never predicted."""
MAX_ORDER = 16


def read_arpa(path: Path) -> WordNgrams:
    """Read an ARPA file, plain or `.gz`. Raises WeightsCorrupt with the line of what is wrong."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            return _ArpaReader(path, file).read()
    except (OSError, EOFError, UnicodeDecodeError) as failure:
        raise WeightsCorrupt(
            f"the language model {path} cannot be read: {failure}", "an ARPA file in UTF-8, plain or .gz"
        ) from failure


def write_arpa(tables: Sequence[NgramTable], words: Sequence[str], file: IO[str]) -> None:
    """Write tables of orders 1, 2, ... `words`: by id in the tables, from FIRST_WORD_ID on."""
    names = [BEGIN, END, *words]
    file.write("\\data\\\n" + "".join(f"ngram {n}={len(each.words)}\n" for n, each in enumerate(tables, start=1)))
    for order, table in enumerate(tables, start=1):
        file.write(f"\n\\{order}-grams:\n")
        logprobs = np.maximum(table.logprobs / LN10, NEVER_LOG10)
        for ids, logprob, backoff in zip(table.words.tolist(), logprobs, table.backoffs / LN10, strict=True):
            tail = "" if order == len(tables) else f"\t{backoff:.7g}"
            file.write(f"{logprob:.7g}\t{' '.join(names[each] for each in ids)}{tail}\n")
    file.write("\n\\end\\\n")


class _ArpaReader:
    """Parser of one file, line by line."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self._path, self._lines, self._number = path, iter(file), 0
        self._pending: str | None = None
        """A line that was read and not parsed yet."""
        self._ids = {BEGIN: BEGIN_ID, END: END_ID}

    def read(self) -> WordNgrams:
        counts, tables = self._counts(), []
        for order, count in enumerate(counts, start=1):
            if (line := self._next()) != f"\\{order}-grams:":
                raise self._broken(f"{(line or 'the end')[:60]!r} where \\{order}-grams: belongs")
            tables.append(self._table(order, count, order == len(counts)))
        if (line := self._next()) != "\\end\\":
            raise self._broken(f"{(line or 'the end')[:60]!r} where \\end\\ belongs")
        return WordNgrams.from_tables(tables, list(self._ids)[FIRST_WORD_ID:])

    def _next(self) -> str | None:
        if self._pending is not None:
            line, self._pending = self._pending, None
            return line
        for line in self._lines:
            self._number += 1
            if stripped := line.strip():
                return stripped
        return None

    def _counts(self) -> list[int]:
        while (line := self._next()) != "\\data\\":
            if line is None:
                raise self._broken("no \\data\\")
        counts: list[int] = []
        while (line := self._next()) is not None and line.startswith("ngram "):
            order, _, count = (part.strip() for part in line.removeprefix("ngram ").partition("="))
            if not (order.isdecimal() and count.isdecimal()) or int(order) != len(counts) + 1:
                raise self._broken(f"{line[:60]!r} where `ngram {len(counts) + 1}=COUNT` belongs")
            counts.append(int(count))
        self._pending = line
        if not 1 <= len(counts) <= MAX_ORDER:
            raise self._broken(f"a model of order {len(counts)}; orders 1 to {MAX_ORDER} are read")
        return counts

    def _section(self) -> Iterator[str]:
        while (line := self._next()) is not None:
            if line.startswith("\\") and line.endswith((":", "\\")):
                self._pending = line
                return
            yield line

    def _table(self, order: int, count: int, longest: bool) -> NgramTable:
        words: list[int] = []
        numbers: list[float] = []
        for line in self._section():
            fields = line.split()
            if not order + 1 <= len(fields) <= order + (1 if longest else 2):
                raise self._broken(f"{line[:60]!r} is no {order}-gram")
            try:
                logprob, backoff = float(fields[0]), float(fields[order + 1]) if len(fields) > order + 1 else 0.0
            except ValueError:
                raise self._broken(f"{line[:60]!r} has no numbers where they belong") from None
            if not logprob <= 0.0 or not math.isfinite(backoff):
                raise self._broken(f"{line[:60]!r}: a log-probability is 0 or less, a back-off weight finite")
            words += [self._id(word, order) for word in fields[1 : order + 1]]
            numbers += (-math.inf if logprob <= NEVER_LOG10 else logprob * LN10, backoff * LN10)
        if len(numbers) != 2 * count:
            raise self._broken(f"{len(numbers) // 2} {order}-grams, where the header counts {count}")
        logprobs, backoffs = np.array(numbers, np.float64).reshape(-1, 2).T
        return NgramTable(np.array(words, np.int32).reshape(-1, order), logprobs, backoffs)

    def _id(self, word: str, order: int) -> int:
        known = self._ids.get(word)
        if known is None:
            if order > 1:
                raise self._broken(f"the word {word[:40]!r} has no 1-gram")
            known = self._ids[word] = len(self._ids)
        return known

    def _broken(self, problem: str) -> WeightsCorrupt:
        return WeightsCorrupt(f"{self._path}, line {self._number}: {problem}", "an ARPA file, as SRILM and KenLM write")
