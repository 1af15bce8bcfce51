"""A list of hot words, as all searches read it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from asr_serve.decoding.biasing import BiasingGraph, tokenize_phrases, unpack_phrases
from asr_serve.decoding.phonetic_index import PhoneticIndex
from asr_serve.models.interfaces import StreamingSearch

BOOST = 0.25
"""Natural-log probability that a token of a word of weight 1 is given, in attention decoders. Chosen on
LibriSpeech's train speech for Moonshine's and Whisper's tiny models: twice as much costs other words."""
MOST_SPELT = 4_096
"""Texts whose tokens are remembered."""


class CompiledBiasingList:
    """A list, as searches read it. Read by any thread."""

    def __init__(self, bias: str, encode: Callable[[str], list[int]], text: Callable[[list[int]], str]) -> None:
        self.words = unpack_phrases(bias)
        self.phonetic_index = PhoneticIndex([word.text for word in self.words])
        self.known = {word.text.casefold(): word for word in self.words}
        self._text, self._encode, self._opening = text, encode, dict[int, bool]()
        self._spelt: dict[str, tuple[int, ...]] = {}
        self.longest = max(word.text.count(" ") + 1 for word in self.words)

    @cached_property
    def graph(self) -> BiasingGraph:
        """For beams; of a long list it takes half a second."""
        return BiasingGraph(tokenize_phrases(self.words, self._encode), self._opens)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Its tokens. On the loop's thread."""
        if (found := self._spelt.get(text)) is None:
            if len(self._spelt) >= MOST_SPELT:
                self._spelt.clear()
            found = self._spelt[text] = tuple(self._encode(text))
        return found

    def _opens(self, token: int) -> bool:
        if (found := self._opening.get(token)) is None:
            found = self._opening[token] = _opens(self._text([token]))
        return found


class BiasingTensors(NamedTuple):
    """In the order in which the CTC search takes them; `kernels/ctc_search_reference.Bias` tells what they are."""

    firsts: Tensor
    tokens: Tensor
    nexts: Tensor
    fails: Tensor
    pending: Tensor
    refunds: Tensor
    word_starts: Tensor


class StreamingBiasingList:
    """The same for searches of streaming models, in arrays. Read by any thread once it is made. Equal lists make
    equal nodes, in whatever process: a saved session that is at one of them goes on in another."""

    def __init__(
        self, bias: str, encode: Callable[[str], list[int]], text: Callable[[list[int]], str], vocab: int
    ) -> None:
        """`bias`: as SearchOptions has it. `vocab`: with the blank."""
        self.digest = hashlib.blake2b(bias.encode(), digest_size=16).digest()
        self._opens = [_opens(text([token])) for token in range(vocab)]
        self.graph = BiasingGraph(tokenize_phrases(unpack_phrases(bias), encode), lambda token: self._opens[token])
        nodes, tokens, nexts, fails, hopes, gives = map(torch.from_numpy, self.graph.links())
        self.arrays = BiasingTensors(
            torch.searchsorted(nodes, torch.arange(len(fails) + 1)),
            tokens,
            nexts,
            fails,
            hopes,
            gives,
            torch.tensor(self._opens, dtype=torch.uint8),
        )

    def __len__(self) -> int:
        return len(self.graph)

    def bias(self, spots: Tensor, gains: Tensor, boost: float) -> tuple[Any, ...]:
        """What `native.search().step` takes."""
        return (spots, gains, *self.arrays, boost)


def _opens(said: str) -> bool:
    return not said or not said[-1].isalnum()


@runtime_checkable
class BiasingSearch(StreamingSearch, Protocol):
    """A search that may be told of hot words."""

    def set_biasing(self, row: int, words: StreamingBiasingList | None) -> None:
        """The session at that row has these, or none."""
