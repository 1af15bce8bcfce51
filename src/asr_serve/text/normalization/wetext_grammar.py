"""Rewrites of spoken text to written text, proposed by finite-state grammars. The only file that imports wetext,
at first use; the graphs of a language are loaded at its first use.

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
"""Texts whose rewrites are cached, because speech repeats itself."""
_LOCK = threading.Lock()
"""Lock for the graphs, which are not thread-safe. A text takes some milliseconds."""


class GrammarRewrite(NamedTuple):
    """Range of characters of the spoken text, and their written form."""

    start: int
    end: int
    kind: str
    """Kind in the grammar: cardinal, date, money and so on."""
    text: str


@lru_cache(MAX_CACHED_REWRITES)
def find_rewrites(spoken_text: str, language: str) -> tuple[GrammarRewrite, ...]:
    """Rewrites of a spoken text, cached. `spoken_text`: a few plain words in lower case, or characters without
    punctuation. Raises UnsupportedOption."""
    normalise, failed = load_wetext()
    try:
        with _LOCK:
            found = normalise(spoken_text, lang=language, operator="itn")
    except failed:  # without a mapping from the grammar nothing is rewritten
        return ()
    return tuple(
        GrammarRewrite(mapping.input_start, mapping.input_end, mapping.token_type, mapping.output_text)
        for mapping in found.mappings
        if mapping.output_text and mapping.output_text != mapping.input_text
    )


def is_wetext_installed() -> bool:
    """Returns whether the package is installed; it is not loaded."""
    return find_spec("wetext") is not None


def require_wetext() -> None:
    """Raise UnsupportedOption unless the package is installed; it is not loaded."""
    if not is_wetext_installed():
        raise _missing()


@lru_cache(1)
def load_wetext() -> tuple[Any, type[Exception]]:
    """Import wetext; returns its function and the error that it raises. Raises UnsupportedOption where it is
    missing."""
    try:
        with _lazy_graph_loading():
            from wetext import normalize_with_mapping
    except ImportError:
        raise _missing() from None
    return normalize_with_mapping, RuntimeError


class _LazyGraph:
    """A kaldifst graph that is loaded at its first use."""

    def __init__(self, read: Callable[[str], Callable[[str], str]], path: str) -> None:
        self._read, self._path = read, path

    def __call__(self, text: str) -> str:
        return self._graph(text)

    @cached_property
    def _graph(self) -> Callable[[str], str]:
        return self._read(self._path)


@contextmanager
def _lazy_graph_loading() -> Iterator[None]:
    """Make graphs load lazily while wetext is imported. It would load all of its graphs, including those for
    verbalization, which are not used here. That takes half a second and 40 MB, and a single graph holds the
    interpreter's lock for up to 0.2 s, during which no other thread of a server runs."""
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
