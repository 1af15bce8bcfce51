"""Said to written, as grammars of transducers propose it. The only file that loads wetext, and that when it is
first needed; of its graphs those of a language when that is first written.

Source  WeTextProcessing's grammars, by its runtime wetext
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

from asr_serve.errors import UnsupportedOption

GRAMMAR_LANGUAGES: Final = ("en", "ja", "zh")
MAX_CACHED_REWRITES = 4_096
"""Stretches whose rewrites are kept: people say the same."""
_LOCK = threading.Lock()
"""The graphs are one thread's at a time. A stretch takes some milliseconds."""


class GrammarRewrite(NamedTuple):
    """Characters of what was said, and what is written for them."""

    start: int
    end: int
    kind: str
    """The grammar's: cardinal, date, money and so on."""
    text: str


@lru_cache(MAX_CACHED_REWRITES)
def find_rewrites(said: str, language: str) -> tuple[GrammarRewrite, ...]:
    """`said`: a few plain words in lower case, or characters without marks. Raises UnsupportedOption."""
    normalise, failed = load_wetext()
    try:
        with _LOCK:
            found = normalise(said, lang=language, operator="itn")
    except failed:  # nothing is written of what the grammar cannot trace
        return ()
    return tuple(
        GrammarRewrite(each.input_start, each.input_end, each.token_type, each.output_text)
        for each in found.mappings
        if each.output_text and each.output_text != each.input_text
    )


def is_wetext_installed() -> bool:
    """Whether the package is; it is not loaded."""
    return find_spec("wetext") is not None


def require_wetext() -> None:
    """Nothing is loaded. Raises UnsupportedOption."""
    if not is_wetext_installed():
        raise _missing()


@lru_cache(1)
def load_wetext() -> tuple[Any, type[Exception]]:
    """Raises UnsupportedOption where the package is missing."""
    try:
        with _lazy_graph_loading():
            from wetext import normalize_with_mapping
    except ImportError:
        raise _missing() from None
    return normalize_with_mapping, RuntimeError


class _LazyGraph:
    """A graph of kaldifst's that is read when a text is first put through it."""

    def __init__(self, read: Callable[[str], Callable[[str], str]], path: str) -> None:
        self._read, self._path = read, path

    def __call__(self, text: str) -> str:
        return self._graph(text)

    @cached_property
    def _graph(self) -> Callable[[str], str]:
        return self._read(self._path)


@contextmanager
def _lazy_graph_loading() -> Iterator[None]:
    """While wetext is imported: it reads every graph that it has, those that read numbers aloud too, which nobody
    here asks for. That is half a second and 40 MB, and up to 0.2 s of it the interpreter's lock is held over one
    graph: so long no thread of a server gets on."""
    import kaldifst

    read = kaldifst.TextNormalizer
    kaldifst.TextNormalizer = partial(_LazyGraph, read)
    try:
        yield
    finally:
        kaldifst.TextNormalizer = read


def _missing() -> UnsupportedOption:
    return UnsupportedOption(
        "itn, and wetext is not installed",
        "the written form needs the extra itn",
        "pip install 'asr-serve[itn]'",
        param="itn",
    )
