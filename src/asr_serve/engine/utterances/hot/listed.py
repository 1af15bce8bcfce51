"""A list of hot words with all that a second look reads: how each is written, by the token that it begins with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from asr_serve.decoding.bias import unhurried, written
from asr_serve.decoding.hotwords import HotWords


class Form(NamedTuple):
    """A way of writing a word: which one of the list it is, and its tokens behind a space."""

    word: int
    text: str
    tokens: tuple[int, ...]


class Listed(HotWords):
    """Made on a thread beside the loop, and read by any."""

    def __init__(self, bias: str, encode: Callable[[str], list[int]], text: Callable[[list[int]], str]) -> None:
        super().__init__(bias, encode, text)
        self.beginning: dict[int, list[Form]] = {}
        """Forms by their first token."""
        self.tokens: dict[str, tuple[int, ...]] = {}
        """Of each form."""
        for number, word in enumerate(unhurried(self.words)):
            for form in written(word.text):
                if tokens := tuple(encode(f" {form}")):
                    self.tokens[form] = tokens
                    self.beginning.setdefault(tokens[0], []).append(Form(number, form, tokens))

    @classmethod
    def made(
        cls, bias: str, encode: Callable[[str], list[int]], text: Callable[[list[int]], str], beams: bool
    ) -> HotWords:
        """With its graph, where beams are to read it."""
        found = cls(bias, encode, text)
        if beams:
            _ = found.graph
        return found
