"""A list of hot words with all that a second look reads: how each is written, by the token that it begins with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from asr_serve.decoding.bias import written
from asr_serve.decoding.hotwords import HotWords


class Form(NamedTuple):
    """A way of writing a word: which one of the list it is, and its tokens behind a space."""

    word: int
    text: str
    tokens: tuple[int, ...]


class Listed(HotWords):
    """Made on a thread beside the loop, and read by any."""

    def __init__(self, bias: str, encode: Callable[[str], list[int]], text: Callable[[list[int]], str]) -> None:
        known: dict[str, list[int]] = {}

        def once(said: str) -> list[int]:
            if said not in known:
                known[said] = encode(said)
            return known[said]

        super().__init__(bias, once, text)
        self._encode = encode
        self.beginning: dict[int, list[Form]] = {}
        """Forms by their first token."""
        self.tokens: dict[str, tuple[int, ...]] = {}
        """Of each form."""
        for number, word in enumerate(self.words):
            for form in written(word.text):
                if tokens := tuple(once(f" {form}")):
                    self.tokens[form] = tokens
                    self.beginning.setdefault(tokens[0], []).append(Form(number, form, tokens))
