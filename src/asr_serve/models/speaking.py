"""What a voice model offers: a sentence said as a whole, or frames of many sentences, a chunk of each in a step.

A file in models/tts has `load(folder, card, device)`, which makes one or the other. Frames are made into sound by
a codec, of a file in models/codec, whose `load` is the same. State is declared and passed in, as streaming
recognisers do it (models/streaming): rows of tensors that somebody else owns.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from asr_serve.errors import OptionError, UnknownVoice
from asr_serve.models.streaming import State as State
from asr_serve.models.streaming import StateSpec as StateSpec
from asr_serve.types import Sentence
from asr_serve.values import nearest

MELS = 80
"""Of a frame: the natural logs of HiFi-GAN's mel bands (22.05 kHz, n_fft 1024, hop 256, Slaney, 0 to 8 kHz,
clamped at 1e-5)."""
WIDTH = MELS + 1
"""Of a frame: the bands, and F0 in Hz, 0 where unvoiced."""


class Spoken(NamedTuple):
    """A sentence that was said as a whole."""

    pcm: np.ndarray
    """(n,) float32 in -1..1, at the card's rate."""
    ends: tuple[int, ...]
    """The sample at which each phoneme ends."""


class Speaker(Protocol):
    """What both kinds have. Belongs to the engine's thread."""

    rate_hz: int

    def expect(self, sentence: Sentence) -> None:
        """Raises OptionError for what it cannot say, with the phonemes that it does not know; UnknownVoice."""


@runtime_checkable
class Whole(Speaker, Protocol):
    """Says a sentence at once."""

    def say(self, sentence: Sentence) -> Spoken:
        """The same sentence gives the same samples."""


class Encoded(Protocol):
    """A sentence that is about to be said. Its tensors are the model's own affair."""

    @property
    def frames(self) -> int:
        """How long it is."""

    @property
    def lead(self) -> int:
        """Frames at its start that are made because of what follows them, and are not heard."""

    @property
    def ends(self) -> Sequence[int]:
        """The sample at which each phoneme ends, of those that are heard."""


@runtime_checkable
class Incremental(Speaker, Protocol):
    """Says sentences chunk by chunk: what it needs of the past is a fixed size."""

    chunk: int
    """Frames of a step."""
    hop: int
    """Samples of a frame."""
    width: int
    """Numbers of a frame: WIDTH."""

    def state(self) -> dict[str, StateSpec]:
        """What it remembers of a sentence."""

    def encode(self, sentences: Sequence[Sentence]) -> Sequence[Encoded]:
        """In one batch; each as if it were alone."""

    def step(self, encoded: Sequence[Encoded], rows: Tensor, seen: Tensor, state: State) -> Tensor:
        """A chunk of each: `rows` (n,) int64, each one's row of the state; `seen` (n,) int64, its frames before
        this chunk. Out (n, chunk, width) float32; past a sentence's end it may be anything."""


class Codec(Protocol):
    """Frames to sound, chunk by chunk or all at once, with the same samples."""

    rate_hz: int
    hop: int
    delay: int
    """Frames that it must see ahead."""

    def state(self, chunk: int) -> dict[str, StateSpec]:
        """What it remembers of a sentence, in steps of so many frames."""

    def step(
        self, frames: Tensor, rows: Tensor, seen: Tensor, ends: Tensor, seeds: Tensor, state: State
    ) -> Tensor:
        """`frames` (n, chunk, width) of n sentences; `rows`, `seen` as above; `ends` (n,) int64: frames of the
        sentence, those past it are ignored; `seeds` (n,) int64. Out (n, chunk * hop) float32 in -1..1: sample 0
        belongs to frame seen - delay."""

    def whole(self, frames: Tensor) -> Tensor:
        """(1, frames, width) -> (1, frames * hop)."""


def expect_phonemes(sentence: Sentence, known: Container[str], model: str, alphabet: str) -> None:
    """Raises OptionError with those that are none of `known`."""
    strange = dict.fromkeys(each for each in sentence.phonemes if each not in known)
    if strange:
        shown = " ".join(f"{each!r} (U+{ord(each):04X})" for each in list(strange)[:8])
        raise OptionError(
            f"phonemes that {model} does not know: {shown}",
            f"those of the alphabet {alphabet}, as far as {model} was taught them",
            param="input",
        )


def expect_voice(sentence: Sentence, voices: Iterable[str], model: str) -> None:
    """Raises UnknownVoice with the nearest name."""
    names = list(voices)
    if sentence.voice not in names:
        raise UnknownVoice(
            f"{model} has no voice {sentence.voice[:100]!r}",
            f"voices: {', '.join(names)}",
            nearest(sentence.voice, names),
            param="voice",
        )
