"""Hotwords: a client's list as an Aho-Corasick graph over tokens, which scores each token that continues a word.

Source  the graph: Aho and Corasick 1975; bonuses for parts of words, taken back where the word is not completed:
        shallow fusion, Zhao et al., Interspeech 2019; `tests/decoding/test_biasing.py` compares with a list that
        is searched word by word.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from asr_serve.errors import OptionError

T = TypeVar("T")
MOST_WORDS = 10_000
MOST_CHARACTERS = 200
"""Length limit of a word."""
MOST_IN_ALL = 1 << 18
"""Limit of the characters of a list: three times what ten thousand English words have. As a graph of single
letters so many take an eighth of a gigabyte."""
WEIGHTS = (0.1, 10.0)
PARAM = "hotwords"
BETWEEN, BEFORE_WEIGHT = "\n", "\t"
WORK_S, LONGEST_REST_S = 0.0005, 0.005


class BiasingPhrase(NamedTuple):
    """Hotword as the client writes it, and its weight: how much likelier than usual it is; 1 is the default."""

    text: str
    weight: float = 1.0


def yield_between(items: Iterable[T]) -> Iterator[T]:
    """Yields the items unchanged, and sleeps after each bit of work. A second of Python on a thread of its own
    holds the interpreter lock for 5 ms at a time, and a step of the loop, which releases it with every product,
    needs it back a hundred times: concurrent requests waited 2.5 s for what takes 0.1 s, and 0.25 s with these
    pauses."""
    since_s = time.perf_counter()
    for item in items:
        if (worked_s := time.perf_counter() - since_s) >= WORK_S:
            time.sleep(min(worked_s, LONGEST_REST_S))
            since_s = time.perf_counter()
        yield item


def parse_phrase(value: str) -> BiasingPhrase:
    """Parses `word` or `word:weight`. A colon followed by a space and text belongs to the word, as does any colon
    before the last. Raises OptionError."""
    text, colon, number = value.rpartition(":")
    try:
        weight = float(number) if colon else 1.0
    except ValueError:
        if not number.strip() or not number[0].isspace():
            raise OptionError(
                f"hotword {value[:60]!r} has no weight behind its colon",
                "word, or word:weight, like Ada:2",
                f"leave the colon out, or add {':1'!r} if it is part of the word",
                param=PARAM,
            ) from None
        text, colon, weight = value, "", 1.0
    text = " ".join((text if colon else value).split())
    if not text.isprintable() or not any(c.isalnum() for c in text):
        raise OptionError(f"hotword {value[:60]!r}", "a word with a letter or digit", "leave it out", param=PARAM)
    if len(text) > MOST_CHARACTERS:
        problem = f"hotword {text[:30] + '…'!r} of {len(text)} characters"
        raise OptionError(problem, f"up to {MOST_CHARACTERS}", "give the words that it is made of", param=PARAM)
    if not WEIGHTS[0] <= weight <= WEIGHTS[1]:
        allowed = f"{WEIGHTS[0]:g} to {WEIGHTS[1]:g}"
        raise OptionError(f"hotword {value[:60]!r} of weight {number}", allowed, param=PARAM)
    return BiasingPhrase(text, weight)


def pack_phrases(words: Sequence[BiasingPhrase]) -> str:
    """Joins words as stored in SearchOptions.bias: one string, since ten thousand fields would be parsed again for
    each segment."""
    return BETWEEN.join(f"{word.text}{BEFORE_WEIGHT}{word.weight:g}" for word in words)


def unpack_phrases(bias: str) -> list[BiasingPhrase]:
    lines = (line.partition(BEFORE_WEIGHT) for line in bias.split(BETWEEN) if line)
    return [BiasingPhrase(text, float(weight)) for text, _, weight in lines]


def written_forms(text: str) -> list[str]:
    """Returns the spellings a model may use: as given, and capitalized or in lower case where the given spelling
    shows no intended case."""
    forms = [text]
    if text.islower() or (text.isupper() and len(text) > 3):
        forms += [text[:1].upper() + text[1:].lower(), text.lower()]
    return list(dict.fromkeys(forms))


class TokenizedPhrase(NamedTuple):
    """One tokenization of a word. `inside`: without the space that a word begins with, so it may only follow text
    that does not end in a letter or digit."""

    tokens: tuple[int, ...]
    weight: float = 1.0
    inside: bool = False


def token_bonus(weight: float) -> float:
    """Bonus of each token of a word: logarithmic in its weight, so that no weight inserts words that are not in
    the audio."""
    return max(WEIGHTS[0], 1 + math.log(weight))


def tokenize_phrases(words: Iterable[BiasingPhrase], encode: Callable[[str], list[int]]) -> list[TokenizedPhrase]:
    """Tokenizes all spellings, with a space before them and without."""
    phrases = []
    for word in yield_between(words):
        for form in written_forms(word.text):
            phrases.append(TokenizedPhrase(tuple(encode(f" {form}")), token_bonus(word.weight)))
            phrases.append(TokenizedPhrase(tuple(encode(form)), token_bonus(word.weight), True))
    return [phrase for phrase in phrases if phrase.tokens]


WITHIN, OPEN = 0, 1
"""Root nodes, where no word has begun: in WITHIN only a word with its own space may begin, in OPEN any."""


class BiasingArrays(NamedTuple):
    """Biasing graph as arrays. Arcs, sorted by node and then by token: source node, token, target node. Nodes:
    failure link, bonus of a part until it is a word (`partial_bonuses`), and bonus kept for a completed word
    (`word_bonuses`)."""

    nodes: np.ndarray
    tokens: np.ndarray
    nexts: np.ndarray
    fails: np.ndarray
    partial_bonuses: np.ndarray
    word_bonuses: np.ndarray


def _arc(node: int, token: int) -> int:
    return node << 32 | token


class BiasingGraph:
    """Aho-Corasick graph: each node is the longest suffix of the text that begins a word. Read by any thread.

    Each token of a word earns the word's weight. The bonus of an incomplete word is taken back where the word is
    not completed, so the total of a text does not depend on how it was searched: every token of it that is in a
    word, and for words within words those that end.
    """

    def __init__(self, words: Iterable[TokenizedPhrase], opens: Callable[[int], bool] = lambda token: False) -> None:
        """`opens`: whether a word without its own space may begin after this token."""
        self._opens = opens
        self._next: dict[int, int] = {}
        """Target node by `_arc`. A list may make a million nodes, so nodes are stored as numbers: the garbage
        collector would visit every tuple, and stop all threads meanwhile."""
        self._parents, self._tokens = array("q", [WITHIN, WITHIN]), array("q", [-1, -1])
        """Parent of each node, and the token of the arc from it."""
        self._fail = array("q", [WITHIN, WITHIN])
        self._partial_bonuses = array("d", [0.0, 0.0])
        """Bonus of a part that may still become a word, taken back if it does not."""
        self._word_bonuses = array("d", [0.0, 0.0])
        """Bonus kept for the word that ends here."""
        self._link(self._add(words))

    def _add(self, words: Iterable[TokenizedPhrase]) -> Sequence[int]:
        """Adds the words to the graph. Returns the depth of each node, in tokens."""
        depths, ends = array("q", [0, 0]), dict[int, float]()
        weights = array("d", [0.0, 0.0])
        for word in yield_between(words):
            node = OPEN if word.inside else WITHIN
            for depth, token in enumerate(word.tokens, start=1):
                if (child := self._next.get(_arc(node, token))) is None:
                    child = self._next[_arc(node, token)] = len(depths)
                    depths.append(depth)
                    self._parents.append(node)
                    self._tokens.append(token)
                    weights.append(0.0)
                node = child
                weights[node] = max(weights[node], word.weight)
            ends[node] = max(ends.get(node, 0.0), word.weight)
        earned = array("q", [0, 0])
        """Tokens of each node that a shorter word at its start has already earned."""
        for node in yield_between(range(2, len(depths))):
            earned_before = earned[self._parents[node]]
            if node in ends:
                self._word_bonuses.append(ends[node] * (depths[node] - earned_before))
                self._partial_bonuses.append(0.0)
                earned.append(depths[node])
            else:
                self._word_bonuses.append(0.0)
                self._partial_bonuses.append(weights[node] * (depths[node] - earned_before))
                earned.append(earned_before)
        return depths

    def _link(self, depths: Sequence[int]) -> None:
        """Sets the failure links: the longest suffix of a node that begins a word with a space."""
        self._fail.extend([WITHIN] * (len(self._partial_bonuses) - 2))
        for child in map(int, yield_between(np.argsort(depths, kind="stable")[2:])):
            node, token = self._parents[child], self._tokens[child]
            if node == OPEN:
                self._fail[child] = self._next.get(_arc(WITHIN, token), WITHIN)
            elif node != WITHIN:
                self._fail[child] = self._go(self._fail[node], token)
            if not self._word_bonuses[child]:
                self._word_bonuses[child] = self._word_bonuses[self._fail[child]]

    def _go(self, node: int, token: int) -> int:
        while True:
            if (target := self._next.get(_arc(node, token))) is not None:
                return target
            if node == WITHIN:
                return WITHIN
            node = self._fail[node]

    def step(self, node: int, token: int) -> tuple[int, float]:
        """Returns the node after `token`, and its gain: negative where a part is not continued."""
        target = self._go(node, token)
        gain = self._word_bonuses[target] + self._partial_bonuses[target] - self._partial_bonuses[node]
        return (OPEN if target == WITHIN and self._opens(token) else target), gain

    def final_cost(self, node: int) -> float:
        """Returns the gain (0 or less) of ending the text at `node`: an incomplete word loses its bonus."""
        return -self._partial_bonuses[node]

    def walk(self, tokens: Iterable[int], node: int = OPEN) -> int:
        """Returns the node after `tokens`."""
        for token in tokens:
            node = self.step(node, token)[0]
        return node

    def links(self) -> BiasingArrays:
        """Returns the whole graph as arrays."""
        parents, tokens = np.array(self._parents)[2:], np.array(self._tokens)[2:]
        order = np.lexsort((tokens, parents))
        fails, partial_bonuses, word_bonuses = map(np.array, (self._fail, self._partial_bonuses, self._word_bonuses))
        return BiasingArrays(parents[order], tokens[order], order + 2, fails, partial_bonuses, word_bonuses)

    def __len__(self) -> int:
        return len(self._fail)
