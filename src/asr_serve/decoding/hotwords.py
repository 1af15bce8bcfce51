"""A list of hot words, as all searches read it."""

from __future__ import annotations

from collections.abc import Callable

from asr_serve.decoding.bias import Graph, spelt, unpacked
from asr_serve.decoding.soundalikes import SoundIndex

BOOST = 0.25
"""Natural-log probability that a token of a word of weight 1 is given, in attention decoders. Chosen on
LibriSpeech's train speech for Moonshine's and Whisper's tiny models: twice as much costs other words."""
MOST_SPELT = 4_096
"""Texts whose tokens are remembered."""


class HotWords:
    """A list, as searches read it. Read by any thread."""

    def __init__(self, bias: str, encode: Callable[[str], list[int]], text: Callable[[list[int]], str]) -> None:
        self.words = unpacked(bias)
        self.sounds = SoundIndex([word.text for word in self.words])
        self.known = {word.text.casefold(): word for word in self.words}
        self._text, self._encode, self._opening = text, encode, dict[int, bool]()
        self._spelt: dict[str, tuple[int, ...]] = {}
        self.graph = Graph(spelt(self.words, encode), self._opens)
        self.longest = max(word.text.count(" ") + 1 for word in self.words)

    def spell(self, text: str) -> tuple[int, ...]:
        """Its tokens. On the loop's thread."""
        if (found := self._spelt.get(text)) is None:
            if len(self._spelt) >= MOST_SPELT:
                self._spelt.clear()
            found = self._spelt[text] = tuple(self._encode(text))
        return found

    def _opens(self, token: int) -> bool:
        if (found := self._opening.get(token)) is None:
            said = self._text([token])
            found = self._opening[token] = not said or not said[-1].isalnum()
        return found
