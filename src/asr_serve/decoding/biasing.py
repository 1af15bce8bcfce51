"""Hot words: a caller's list as a prefix graph over tokens, which tells what each token that goes on with one of
them is worth.

Source  the graph: Aho and Corasick 1975; words' parts that are worth something, and lose it where the word is not
        said to its end: shallow fusion, Zhao et al., Interspeech 2019; `tests/decoding/test_biasing.py` compares
        with a list that is searched word by word.
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
"""Of a word."""
MOST_IN_ALL = 1 << 18
"""Characters of a list's words: three times what ten thousand English words have. As a graph of single letters
so many take an eighth of a gigabyte."""
WEIGHTS = (0.1, 10.0)
PARAM = "hotwords"
BETWEEN, BEFORE_WEIGHT = "\n", "\t"
WORK_S, LONGEST_REST_S = 0.0005, 0.005


class BiasingPhrase(NamedTuple):
    """As the caller writes it, and how much more likely it is than others: 1 as usual."""

    text: str
    weight: float = 1.0


def yield_between(items: Iterable[T]) -> Iterator[T]:
    """The same, with a rest after each bit of work. What takes a second in Python on a thread of its own has the
    interpreter for 5 ms at a time, and a step of the loop, which gives it away with every product, wants it back a
    hundred times: callers beside it waited 2.5 s for what takes 0.1 s, and 0.25 s with rests."""
    since_s = time.perf_counter()
    for item in items:
        if (worked_s := time.perf_counter() - since_s) >= WORK_S:
            time.sleep(min(worked_s, LONGEST_REST_S))
            since_s = time.perf_counter()
        yield item


def parse_phrase(given: str) -> BiasingPhrase:
    """`word` or `word:weight`. A colon with a space behind it, and text, is part of the word, as any before a
    weight is. Raises OptionError."""
    text, colon, number = given.rpartition(":")
    try:
        weight = float(number) if colon else 1.0
    except ValueError:
        if not number.strip() or not number[0].isspace():
            raise OptionError(
                f"hotword {given[:60]!r} has no weight behind its colon",
                "word, or word:weight, like Ada:2",
                f"leave the colon out, or add {':1'!r} if it is part of the word",
                param=PARAM,
            ) from None
        text, colon, weight = given, "", 1.0
    text = " ".join((text if colon else given).split())
    if not text.isprintable() or not any(c.isalnum() for c in text):
        raise OptionError(f"hotword {given[:60]!r}", "a word with a letter or digit", "leave it out", param=PARAM)
    if len(text) > MOST_CHARACTERS:
        came = f"hotword {text[:30] + '…'!r} of {len(text)} characters"
        raise OptionError(came, f"up to {MOST_CHARACTERS}", "give the words that it is made of", param=PARAM)
    if not WEIGHTS[0] <= weight <= WEIGHTS[1]:
        allowed = f"{WEIGHTS[0]:g} to {WEIGHTS[1]:g}"
        raise OptionError(f"hotword {given[:60]!r} of weight {number}", allowed, param=PARAM)
    return BiasingPhrase(text, weight)


def pack_phrases(words: Sequence[BiasingPhrase]) -> str:
    """As SearchOptions.bias holds them: one text, for ten thousand fields would be read anew for each segment."""
    return BETWEEN.join(f"{word.text}{BEFORE_WEIGHT}{word.weight:g}" for word in words)


def unpack_phrases(bias: str) -> list[BiasingPhrase]:
    lines = (line.partition(BEFORE_WEIGHT) for line in bias.split(BETWEEN) if line)
    return [BiasingPhrase(text, float(weight)) for text, _, weight in lines]


def written_forms(text: str) -> list[str]:
    """How a model may write a word: as it was given, and as a name or as a common word where that says nothing of
    how it is written."""
    forms = [text]
    if text.islower() or (text.isupper() and len(text) > 3):
        forms += [text[:1].upper() + text[1:].lower(), text.lower()]
    return list(dict.fromkeys(forms))


class TokenizedPhrase(NamedTuple):
    """A way of saying a word in tokens. `inside`: without the space that a word begins with, and so only where the
    text before does not end in a letter."""

    tokens: tuple[int, ...]
    weight: float = 1.0
    inside: bool = False


def token_bonus(weight: float) -> float:
    """What each token of a word is worth: no weight makes the model say a word that it does not hear."""
    return max(WEIGHTS[0], 1 + math.log(weight))


def tokenize_phrases(words: Iterable[BiasingPhrase], encode: Callable[[str], list[int]]) -> list[TokenizedPhrase]:
    """All of their forms, with a space before them and without."""
    found = []
    for word in yield_between(words):
        for form in written_forms(word.text):
            found.append(TokenizedPhrase(tuple(encode(f" {form}")), token_bonus(word.weight)))
            found.append(TokenizedPhrase(tuple(encode(form)), token_bonus(word.weight), True))
    return [each for each in found if each.tokens]


WITHIN, OPEN = 0, 1
"""Nodes at which nothing is begun: where only what has its own space may begin, and where anything may."""


class BiasingArrays(NamedTuple):
    """A graph in arrays. Of the arcs, by node and then by token: the node, the token, where it leads. Of the
    nodes: where each goes back to, what is given for the part until it is a word, and what is kept of a word."""

    nodes: np.ndarray
    tokens: np.ndarray
    nexts: np.ndarray
    fails: np.ndarray
    pending: np.ndarray
    refunds: np.ndarray


def _arc(node: int, token: int) -> int:
    return node << 32 | token


class BiasingGraph:
    """Nodes are what of a word was just said: the longest end of the text that begins one. Read by any thread.

    Each token of a word is worth the word's weight. What was given for a part of a word is taken back where the
    word is not said to its end, so that the worth of a text is the sum of what it says, however it was searched:
    every token of it that is in a word, and of words within words those that end.
    """

    def __init__(
        self, words: Iterable[TokenizedPhrase], opens: Callable[[int], bool] = lambda token: False
    ) -> None:
        """`opens`: whether a word that has no space of its own may begin behind this token."""
        self._opens = opens
        self._next: dict[int, int] = {}
        """Where arcs lead, by `_arc`. A list may make a million nodes: what is held of each are numbers, for the
        collector goes through every tuple, and meanwhile nobody's thread goes on."""
        self._parents, self._tokens = array("q", [WITHIN, WITHIN]), array("q", [-1, -1])
        """Of each node, what it was reached from, and by which token."""
        self._fail = array("q", [WITHIN, WITHIN])
        self._hopes = array("d", [0.0, 0.0])
        """What is given for a part that may yet become a word, and taken back if not."""
        self._gives = array("d", [0.0, 0.0])
        """What is kept, of the word that ends here."""
        self._link(self._add(words))

    def _add(self, words: Iterable[TokenizedPhrase]) -> Sequence[int]:
        """The nodes; how many tokens each has."""
        depths, ends = array("q", [0, 0]), dict[int, float]()
        weights = array("d", [0.0, 0.0])
        for word in yield_between(words):
            node = OPEN if word.inside else WITHIN
            for depth, token in enumerate(word.tokens, start=1):
                if (then := self._next.get(_arc(node, token))) is None:
                    then = self._next[_arc(node, token)] = len(depths)
                    depths.append(depth)
                    self._parents.append(node)
                    self._tokens.append(token)
                    weights.append(0.0)
                node = then
                weights[node] = max(weights[node], word.weight)
            ends[node] = max(ends.get(node, 0.0), word.weight)
        kept = array("q", [0, 0])
        """Of its tokens, those of a shorter word that it begins with: they are paid for."""
        for node in yield_between(range(2, len(depths))):
            before = kept[self._parents[node]]
            if node in ends:
                self._gives.append(ends[node] * (depths[node] - before))
                self._hopes.append(0.0)
                kept.append(depths[node])
            else:
                self._gives.append(0.0)
                self._hopes.append(weights[node] * (depths[node] - before))
                kept.append(before)
        return depths

    def _link(self, depths: Sequence[int]) -> None:
        """Where a part that does not go on goes back to: the longest end of it that begins a word with a space."""
        self._fail.extend([WITHIN] * (len(self._hopes) - 2))
        for then in map(int, yield_between(np.argsort(depths, kind="stable")[2:])):
            node, token = self._parents[then], self._tokens[then]
            if node == OPEN:
                self._fail[then] = self._next.get(_arc(WITHIN, token), WITHIN)
            elif node != WITHIN:
                self._fail[then] = self._go(self._fail[node], token)
            if not self._gives[then]:
                self._gives[then] = self._gives[self._fail[then]]

    def _go(self, node: int, token: int) -> int:
        while True:
            if (then := self._next.get(_arc(node, token))) is not None:
                return then
            if node == WITHIN:
                return WITHIN
            node = self._fail[node]

    def step(self, node: int, token: int) -> tuple[int, float]:
        """The node after `token`, and what that is worth: less than nothing where a part comes to nothing."""
        then = self._go(node, token)
        gain = self._gives[then] + self._hopes[then] - self._hopes[node]
        return (OPEN if then == WITHIN and self._opens(token) else then), gain

    def final_cost(self, node: int) -> float:
        """What is taken back where the text ends."""
        return -self._hopes[node]

    def walk(self, tokens: Iterable[int], node: int = OPEN) -> int:
        """Where the graph is after these."""
        for token in tokens:
            node = self.step(node, token)[0]
        return node

    def links(self) -> BiasingArrays:
        """The whole."""
        parents, tokens = np.array(self._parents)[2:], np.array(self._tokens)[2:]
        order = np.lexsort((tokens, parents))
        fails, hopes, gives = map(np.array, (self._fail, self._hopes, self._gives))
        return BiasingArrays(parents[order], tokens[order], order + 2, fails, hopes, gives)

    def __len__(self) -> int:
        return len(self._fail)
