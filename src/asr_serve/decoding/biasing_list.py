"""Hotword lists, compiled for attention decoders and for streaming searches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from asr_serve.decoding.biasing_graph import BiasingGraph, tokenize_phrases, unpack_phrases
from asr_serve.decoding.language_model.scorer import LanguageModelFusion
from asr_serve.decoding.phonetic_index import PhoneticIndex
from asr_serve.models.interfaces import StreamingSearch

BOOST = 0.25
"""Natural-log bonus of each token of a word of weight 1, in attention decoders. Chosen on LibriSpeech's train
speech for Moonshine's and Whisper's tiny models: twice as much costs other words."""
MOST_SPELT = 4_096
"""Texts whose tokens are cached."""


class CompiledBiasingList:
    """Hotword list for attention decoders. Read by any thread."""

    def __init__(self, bias: str, encode: Callable[[str], list[int]], text: Callable[[list[int]], str]) -> None:
        self.words = unpack_phrases(bias)
        self.phonetic_index = PhoneticIndex([word.text for word in self.words])
        self.known = {word.text.casefold(): word for word in self.words}
        self._text, self._encode, self._opening = text, encode, dict[int, bool]()
        self._spelt: dict[str, tuple[int, ...]] = {}
        self.longest = max(word.text.count(" ") + 1 for word in self.words)

    @cached_property
    def graph(self) -> BiasingGraph:
        """Biasing graph for beam search, built on first use; half a second for a long list."""
        return BiasingGraph(tokenize_phrases(self.words, self._encode), self._opens)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of `text`, cached. Only on the loop's thread."""
        if (tokens := self._spelt.get(text)) is None:
            if len(self._spelt) >= MOST_SPELT:
                self._spelt.clear()
            tokens = self._spelt[text] = tuple(self._encode(text))
        return tokens

    def _opens(self, token: int) -> bool:
        if (opens := self._opening.get(token)) is None:
            opens = self._opening[token] = _opens(self._text([token]))
        return opens


class BiasingTensors(NamedTuple):
    """Biasing graph as tensors, in the argument order of the CTC search; see
    `kernels/ctc_search_reference.CtcBiasing`."""

    firsts: Tensor
    tokens: Tensor
    nexts: Tensor
    fails: Tensor
    partial_bonuses: Tensor
    word_bonuses: Tensor
    word_starts: Tensor


class StreamingBiasingList:
    """Hotword list as arrays, for searches of streaming models. Read by any thread once it is built. Equal lists
    have equal nodes in every process, so a saved session may be resumed in another one."""

    def __init__(
        self, bias: str, encode: Callable[[str], list[int]], text: Callable[[list[int]], str], vocab: int
    ) -> None:
        """`bias`: packed as in SearchOptions.bias. `vocab`: vocabulary size with the blank."""
        self.digest = hashlib.blake2b(bias.encode(), digest_size=16).digest()
        self._opens = [_opens(text([token])) for token in range(vocab)]
        self.graph = BiasingGraph(tokenize_phrases(unpack_phrases(bias), encode), lambda token: self._opens[token])
        nodes, tokens, nexts, fails, partial_bonuses, word_bonuses = map(torch.from_numpy, self.graph.links())
        self.arrays = BiasingTensors(
            torch.searchsorted(nodes, torch.arange(len(fails) + 1)),
            tokens,
            nexts,
            fails,
            partial_bonuses,
            word_bonuses,
            torch.tensor(self._opens, dtype=torch.uint8),
        )

    def __len__(self) -> int:
        return len(self.graph)

    def bias(self, spots: Tensor, gains: Tensor, boost: float) -> tuple[Any, ...]:
        """Returns the `bias` argument of the CTC search's `step`."""
        return (spots, gains, *self.arrays, boost)


def _opens(token_text: str) -> bool:
    return not token_text or not token_text[-1].isalnum()


@runtime_checkable
class BiasingSearch(StreamingSearch, Protocol):
    """Search that supports hotwords, and a language model where one is loaded."""

    def set_biasing(
        self, row: int, words: StreamingBiasingList | None, fusion: LanguageModelFusion | None = None
    ) -> None:
        """Sets the hotwords and the language model of the session at that row; None: it has none."""
