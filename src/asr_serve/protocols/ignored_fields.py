"""Fields of a request that nobody knows: ignored and reported, unless they look like a misspelling or the server is
strict.

Clients of OpenAI's API send fields of other servers, and of newer versions (`user`, `seed`). A request with one is
answered as if it had not been sent. The parsers of forms, queries and JSON bodies find such fields deep inside a
message, so what they find belongs to the request that they run for, a context variable. Without a request, as in a
library call, every unknown field is refused.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar

from asr_serve.errors import OptionError
from asr_serve.types import option_synonyms

MAX_REPORTED = 32
"""Names that one request reports; further ones are counted, up to MAX_COUNTED."""
MAX_COUNTED = 4_096
MAX_REPORTED_CHARACTERS = 60
MAX_EDITS = ((8, 2), (5, 1), (0, 0))
"""Edits by which a misspelling may differ, for names of at least so many letters."""
_PRINTABLE = re.compile(r"[\w.\[\]-]{1,60}", re.ASCII)


class IgnoredFields:
    """Names of the ignored fields of one request. `strict`: none is ignored."""

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._names: dict[str, None] = {}
        self._unnamed: set[int] = set()
        """Hashes of further names: a form whose file comes first is parsed twice."""

    def add(self, names: Iterable[str]) -> None:
        """Adds names, which may be any text that a client sent."""
        for name in names:
            shown = name if _PRINTABLE.fullmatch(name) else ascii(name[:MAX_REPORTED_CHARACTERS])
            if shown in self._names or len(self._names) < MAX_REPORTED:
                self._names[shown] = None
            elif len(self._unnamed) < MAX_COUNTED:
                self._unnamed.add(hash(shown))

    def __str__(self) -> str:
        """Names with commas between, in printable ASCII, for a header and a log line; empty if there is none."""
        return ", ".join([*self._names, *([f"{len(self._unnamed)} more"] if self._unnamed else [])])


_current: ContextVar[IgnoredFields | None] = ContextVar("ignored_fields", default=None)


@contextlib.contextmanager
def collect_ignored_fields(ignored: IgnoredFields) -> Iterator[None]:
    """Collects unknown fields of everything parsed within."""
    token = _current.set(ignored)
    try:
        yield
    finally:
        _current.reset(token)


def report_ignored(names: Iterable[str]) -> None:
    """Reports fields that are known, and that have no effect here."""
    if (ignored := _current.get()) is not None:
        ignored.add(names)


def refuse_or_ignore(name: str, known: Collection[str], shown: str, refusal: Callable[[], OptionError]) -> None:
    """Handles an unknown field, which is reported as `shown`. Raises `refusal` where nobody collects, the server is
    strict, or `name` is another spelling or another program's name of a `known` one. It is made only then: it looks
    for the nearest name among all, and a body may have thousands of unknown ones."""
    ignored = _current.get()
    if ignored is None or ignored.strict or _means_a_known_one(name, known):
        raise refusal()
    ignored.add([shown or name])


def _means_a_known_one(name: str, known: Collection[str]) -> bool:
    """Returns whether a name is meant to be a known one: `langauge`, `responseFormat`, `diarize`, but not
    `to_language`."""
    if option_synonyms(name, known):
        return True
    letters = _letters(name)
    allowed = next(edits for length, edits in MAX_EDITS if len(letters) >= length)
    # Not of two letters more: `to_language` is another field.
    near = (own for own in map(_letters, known) if abs(len(letters) - len(own)) <= 1)
    return any(_edits(letters, own) <= allowed for own in near)


def _edits(first: str, second: str) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours between two words.

    Source  optimal string alignment, Damerau 1964
    """
    before, row = list[int](), list(range(len(second) + 1))
    for i, letter in enumerate(first):
        before, last, row = row, before, [i + 1]
        for j, other in enumerate(second):
            edits = min(before[j] + (letter != other), before[j + 1] + 1, row[j] + 1)
            if i and j and (letter, first[i - 1]) == (second[j - 1], other):
                edits = min(edits, last[j - 1] + 1)
            row.append(edits)
    return row[-1]


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name[:MAX_REPORTED_CHARACTERS].casefold())
