"""Lexicons: words and their spellings in the tokens of a CTC model."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from asr_serve.decoding.language_model.ngram_tables import BEGIN, END, UNKNOWN
from asr_serve.errors import OptionError, SourceNotFound
from asr_serve.text.tokenizers import SPACE, Tokenizer, sentence_encoder
from asr_serve.types import suggest_name

MAX_LINE_CHARACTERS = 1 << 16
MAX_WORDS = 1 << 22
NOT_WORDS = (BEGIN, END, UNKNOWN)
"""Words of language models that nobody says."""


class CtcTokens(NamedTuple):
    """Tokens of a CTC model, as a lexicon spells words with them."""

    model: str
    """Name of the model, for messages."""
    names: tuple[str, ...]
    """Name of each token (Tokenizer.token_names)."""
    blank: int
    separator: int | None
    """Token between words; None where words are told by their first tokens, or have nothing between them."""

    @classmethod
    def of(cls, model: str, tokenizer: Tokenizer, blank: int) -> CtcTokens:
        """Tokens of a tokenizer, and the blank, which may be one more. Raises OptionError for one out of range."""
        names = tokenizer.token_names()
        if not 0 <= blank <= len(names):
            raise OptionError(f"the blank {blank} of {model}", f"0 to {len(names)}, its tokens", param="blank")
        if blank == len(names):
            names.append(f"<token:{blank}>")
        mark = SPACE.decode()
        begins_words = any(len(name) > 1 and name[0] == mark for name in names)
        return cls(model, tuple(names), blank, names.index(mark) if mark in names and not begins_words else None)


class DecodingLexicon(NamedTuple):
    """Words, each with one spelling or more."""

    words: tuple[str, ...]
    spellings: tuple[tuple[int, tuple[int, ...]], ...]
    """Each the index of a word, and its tokens, one at least and without those between words. All differ."""


def read_lexicon(path: Path, tokens: CtcTokens) -> DecodingLexicon:
    """Lexicon from a file with a word and the names of its tokens on each line, plain or `.gz`. A word on several lines
    has several spellings.

    Raises OptionError with file and line for a word without tokens, for a token that the model lacks, for the blank or
    a token between words in a spelling, and for a line that comes twice; SourceNotFound.
    """
    ids = {name: token for token, name in enumerate(tokens.names)}
    allowed = ", ".join(name for name in tokens.names[:12] if not name.startswith("<"))
    words: dict[str, int] = {}
    lines: dict[tuple[int, tuple[int, ...]], int] = {}
    for number, fields in _lines(path):
        word, names = fields[0], fields[1:]
        if word in NOT_WORDS:
            raise _error(path, number, f"{word} is no word", "words that somebody says", "remove the line")
        if not names:
            raise _error(
                path,
                number,
                f"the word {word[:60]!r} has no spelling",
                "a word, and the names of its tokens behind it",
                "leave --lexicon out, and its tokenizer spells the words",
            )
        for name in names:
            if name not in ids:
                raise _error(
                    path,
                    number,
                    f"{name[:60]!r} is no token of {tokens.model}",
                    f"its {len(ids)} tokens, like {allowed}",
                    suggest_name(name, list(ids)),
                )
        spelling = tuple(ids[name] for name in names)
        if tokens.blank in spelling:
            raise _error(path, number, f"{names[spelling.index(tokens.blank)]!r} is the blank", "the other tokens")
        if tokens.separator is not None and tokens.separator in spelling:
            came = f"{tokens.names[tokens.separator]!r} in the spelling of {word[:60]!r}"
            raise _error(path, number, came, "it comes between words by itself", "take it out")
        entry = words.setdefault(word, len(words)), spelling
        if entry in lines:
            came = f"{word[:60]!r} with the same spelling as in line {lines[entry]}"
            raise _error(path, number, came, "each once", "remove the line")
        lines[entry] = number
    if not words:
        raise OptionError(f"the lexicon {path} is empty", "a word and its tokens a line", param="lexicon")
    return DecodingLexicon(tuple(words), tuple(lines))


def read_words(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and words of a file with a word a line, plain or `.gz`. Raises OptionError, SourceNotFound."""
    for number, fields in _lines(path):
        if len(fields) != 1:
            came = f"{' '.join(fields)[:60]!r} is {len(fields)} words"
            raise _error(path, number, came, "a word a line", "a word with its tokens belongs in a --lexicon")
        yield number, fields[0]


class WordSpeller:
    """Spelling of words by a model's own tokenizer."""

    def __init__(self, tokenizer: Tokenizer, tokens: CtcTokens) -> None:
        self._tokenizer, self._tokens = tokenizer, tokens
        self._encode = sentence_encoder(tokenizer)
        self._ids = {name: token for token, name in enumerate(tokens.names)}

    def spell(self, word: str) -> tuple[int, ...]:
        """Tokens of a word, empty for one that the vocabulary cannot write. A word may be in another case than the
        vocabulary has."""
        spelling = tuple(self._ids[name] for name in self._encode(word))
        written = self._tokenizer.decode(spelling)
        unusable = self._tokens.blank in spelling or self._tokens.separator in spelling
        return () if unusable or written.casefold() != word.casefold() else spelling

    def lexicon(self, words: Iterable[str]) -> tuple[DecodingLexicon, list[str]]:
        """Lexicon of the words that can be spelled, each once, and the words that cannot."""
        spellings = {word: self.spell(word) for word in dict.fromkeys(words) if word not in NOT_WORDS}
        spelled = [(word, spelling) for word, spelling in spellings.items() if spelling]
        lexicon = DecodingLexicon(
            tuple(word for word, _ in spelled), tuple((index, each) for index, (_, each) in enumerate(spelled))
        )
        return lexicon, [word for word, spelling in spellings.items() if not spelling]

    def word_pieces(self, lexicon: DecodingLexicon) -> list[str]:
        """Text of each word as a token of a SentencePieceTokenizer: with the space before it where its spelling has
        one."""
        spaced = self._tokens.separator is not None
        first = dict(reversed(lexicon.spellings))
        return [
            SPACE.decode() + word if spaced or " " in self._tokenizer.decode(first[index] * 2) else word
            for index, word in enumerate(lexicon.words)
        ]


def _lines(path: Path) -> Iterator[tuple[int, Sequence[str]]]:
    """Numbers, from 1, and fields of the lines that are not empty."""
    number = 0
    try:
        with _open(path) as file:
            while line := file.readline(MAX_LINE_CHARACTERS + 1):
                number += 1
                if len(line) > MAX_LINE_CHARACTERS or number > MAX_WORDS:
                    came = f"more than {MAX_LINE_CHARACTERS:,} characters, or more than {MAX_WORDS:,} lines"
                    raise _error(path, number, came, "a list of words")
                if fields := line.split():
                    yield number, fields
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError) as failure:
        came = f"{path} is no text after line {number}: {failure}"
        raise OptionError(came, "UTF-8, or that compressed by gzip as .gz", param="lexicon") from None
    except OSError as failure:
        raise SourceNotFound(f"{path}: {failure.strerror or failure}", "", "check the path") from None


def _open(path: Path) -> IO[str]:
    return gzip.open(path, "rt", encoding="utf-8-sig") if path.suffix == ".gz" else path.open(encoding="utf-8-sig")


def _error(path: Path, line: int, came: str, allowed: str, todo: str = "") -> OptionError:
    return OptionError(f"{path}, line {line}: {came}", allowed, todo, param="lexicon")
