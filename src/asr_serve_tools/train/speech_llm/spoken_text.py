"""Spoken form of labels, and the pieces of words that CTC aligns with audio."""

from __future__ import annotations

import itertools
import json
import re
from functools import lru_cache
from pathlib import Path

from asr_serve.errors import WeightsCorrupt

PUNCTUATION = re.compile(r'[.,;:!?"()\[\]\u2026\u2013\u2014\u201c\u201d-]+')
SPOKEN = re.compile(r"[a-z']+( [a-z']+)*")
LETTERS = "abcdefghijklmnopqrstuvwxyz'"
SPACES = ("\u2581", "\u0120")
"""Marks of the space before a word in a tokenizer.json: SentencePiece's, and that of bytes as GPT-2 writes them."""


def spoken_form(text: str) -> str | None:
    """Lower-case words of letters and apostrophes. None for a text with anything else but punctuation, such as digits,
    whose spoken form is not known.

    >>> spoken_form("Well-known, isn't it?"), spoken_form("In 1851.")
    ("well known isn't it", None)
    """
    words = PUNCTUATION.sub(" ", text.lower().replace("\u2019", "'")).split()
    spoken = " ".join(word for word in words if word.strip("'"))
    return spoken if SPOKEN.fullmatch(spoken) else None


class CtcPieces:
    """Vocabulary of CTC: the most frequent pieces of English words among the tokens of a language model.

    The pieces come from the first merges of the language model's own byte-pair encoding, so that each is one of its
    tokens: an embedding near a piece's own is something that the language model can read. Whole tokens would be too
    many to learn from a few hours of speech.
    """

    def __init__(self, tokenizer: Path, pieces: int) -> None:
        """`tokenizer`: a tokenizer.json. `pieces`: most pieces beside the letters. Raises WeightsCorrupt."""
        try:
            model = json.loads(tokenizer.read_text("utf-8"))["model"]
            vocabulary, merges = model["vocab"], model["merges"]
        except (OSError, ValueError, KeyError, TypeError) as failure:
            raise WeightsCorrupt(f"{tokenizer} is no byte-pair encoding: {failure}", "vocab and merges") from failure
        self.space = next((space for space in SPACES if space in vocabulary), "")
        if missing := [letter for letter in (self.space, *LETTERS) if letter not in vocabulary]:
            allowed = "a language model whose tokens spell English words"
            raise WeightsCorrupt(f"{tokenizer} has no token {missing[0]!r}", allowed)
        chosen, used = dict.fromkeys((self.space, *LETTERS)), list[tuple[str, str]]()
        plain = re.compile(f"{self.space}?[a-z']+")
        for merge in merges:
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            if left in chosen and right in chosen and plain.fullmatch(left + right):
                chosen[left + right] = None
                used.append((left, right))
            if len(used) >= pieces:
                break
        self.names = list(chosen)
        self.tokens = [int(vocabulary[name]) for name in self.names]
        """Token of each piece."""
        self._ids = {name: piece for piece, name in enumerate(self.names)}
        self._ranks = {pair: rank for rank, pair in enumerate(used)}
        self._encode_word = lru_cache(50_000)(self._word)

    def _word(self, word: str) -> list[int]:
        """Pieces of a word: of all neighbours the pair whose merge comes first is joined, until none is left."""
        parts = list(self.space + word)
        while len(parts) > 1:
            ranked = [(self._ranks.get(pair, len(self._ranks)), i) for i, pair in enumerate(itertools.pairwise(parts))]
            rank, at = min(ranked)
            if rank == len(self._ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self._ids[part] for part in parts]

    def encode(self, spoken: str) -> list[int]:
        """Pieces of a spoken form."""
        return [piece for word in spoken.split() for piece in self._encode_word(word)]

    def decode(self, pieces: list[int]) -> str:
        return "".join(self.names[piece] for piece in pieces).replace(self.space, " ").strip()
