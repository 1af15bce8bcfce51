"""What a streaming recogniser offers: state that is declared, and one step that takes a chunk of many sessions.

A session's audio is cut into encoder frames of `frame_samples`. A step takes the same number of frames, a
chunk, of every session in it, wherever each of them stands. What a session must remember between steps lies in
its row of tensors that somebody else owns (`engine/state_cache`): a step reads and writes rows in place, and keeps
nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from asr_serve.errors import OptionError, UnknownVoice
from asr_serve.types import NBestHypothesis as NBestHypothesis
from asr_serve.types import SearchResult as SearchResult
from asr_serve.types import SearchToken as SearchToken
from asr_serve.types import Sentence, suggest_name

UNBOUNDED_SAMPLES = 1 << 62
"""Length in samples of a session that goes on."""


class StateSpec(NamedTuple):
    """One tensor of state: `shape` of a session's row."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    initial_value: float | None = 0.0
    """What a new session's row is filled with. None: with nothing, for no step reads what the session itself has
    not written."""
    on_host: bool = False
    """It lies in the host's memory, whatever the device."""


State = Mapping[str, Tensor]
"""By name (slots + 1, *shape). The last row belongs to nobody: rows that only fill up a batch point there."""


class StreamingChunk(NamedTuple):
    """The input of a step: n rows."""

    pcm: Tensor
    """(n, window_samples) float32. Zeros where the session has no audio: before its start, and after its end."""
    rows: Tensor
    """(n,) int64: each session's row of the state."""
    start_frames: Tensor
    """(n,) int64: encoder frames of the session before this chunk."""
    frames: Tensor
    """(n,) int64: how many of the chunk's frames the session has. Fewer than the chunk only at its end."""
    total_samples: Tensor
    """(n,) int64: length of the session's audio in samples, FOREVER while it goes on."""


class AudioWindow(NamedTuple):
    """Which samples a chunk that begins with encoder frame s needs: `samples` of them, from s * frame_samples -
    `before` on."""

    left_samples: int
    samples: int


class StreamingModel(Protocol):
    """`Model` of a streaming model file. Made as Model(config, tensors, device), as other recognisers are."""

    frame_samples: int
    """From one encoder frame to the next."""
    frame_block: int
    """Encoder frames that see each other. Chunks are multiples of it: the numbers are the same for any."""
    vocab_size: int
    """With the blank."""
    blank_id: int
    heads: tuple[str, ...]
    """Of ctc, rnnt, tdt: the first is the one to use unless told."""

    def count_frames(self, samples: int) -> int:
        """Encoder frames of so many samples, the session over."""

    def audio_window(self, chunk: int) -> AudioWindow:
        """For a chunk of so many encoder frames."""

    def state_specs(self, chunk: int) -> dict[str, StateSpec]:
        """What the encoder remembers, when no step is longer than `chunk`."""

    def step(self, chunk: StreamingChunk, state: State) -> Tensor:
        """Encoder output (n, chunk, width); past a row's `frames` it may be anything. Rows of one step differ, but
        for those that point at the last row of the state."""

    def ctc_logprobs(self, hidden: Tensor) -> Tensor:
        """(n, frames, width) -> natural-log probabilities (n, frames, vocab) float32, contiguous."""


class Transducer(Protocol):
    """What a streaming model with the head rnnt or tdt has besides: predictor and joint network."""

    durations: tuple[int, ...]
    """tdt: frames that a token may last. rnnt: ()."""

    def predictor_state_specs(self) -> dict[str, StateSpec]:
        """What the predictor remembers."""

    def predict(self, tokens: Tensor, memory: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """One token of each row further: tokens (n,) int64, blank for the start; memory by name (n, *shape).
        Returns the predictor's output (n, width) and the memory after; what was passed in is left as it was."""

    def project_encoder(self, hidden: Tensor) -> Tensor:
        """The encoder's half of the joint network, (n, frames, width) -> (n, frames, joint width)."""

    def joint(self, projected: Tensor, predicted: Tensor) -> Tensor:
        """Row i of each: `projected` (n, joint width), `predicted` (n, width) -> logits (n, vocab + durations)
        float32; tokens first."""


class StreamingSearch(Protocol):
    """Encoder output to tokens, chunk by chunk. What it remembers of a session lies in rows of state too."""

    def state_specs(self) -> dict[str, StateSpec]:
        """What it remembers of a session: a fixed size, however long that lasts."""

    def step(self, hidden: Tensor, chunk: StreamingChunk, state: State) -> list[SearchResult]:
        """`hidden` (n, frames, width) of `chunk`; one SearchResult for each row of it."""

    def finish(self, row: int, state: State) -> list[NBestHypothesis]:
        """The session at that row is over: what may still be said after all that was fixed, best first, at least
        one."""


@runtime_checkable
class StatefulSearch(StreamingSearch, Protocol):
    """A search that keeps more of a session than its row holds, for what it keeps grows."""

    def export_state(self, row: int) -> tuple[bytes, Tensor]:
        """That, as numbers of its own and one tensor."""

    def import_state(self, row: int, numbers: bytes, tensor: bytes, seen: int, device: torch.device) -> None:
        """The inverse, of a session that has so many frames behind it. Raises ValueError."""

    def free(self, row: int) -> None:
        """The session at that row is gone."""


MELS = 80
"""Of a frame: the natural logs of HiFi-GAN's mel bands (22.05 kHz, n_fft 1024, hop 256, Slaney, 0 to 8 kHz,
clamped at 1e-5)."""
FRAME_WIDTH = MELS + 1
"""Of a frame: the bands, and F0 in Hz, 0 where unvoiced."""


class SynthesizedSentence(NamedTuple):
    """A sentence that was said as a whole."""

    pcm: np.ndarray
    """(n,) float32 in -1..1, at the card's rate."""
    phoneme_ends_samples: tuple[int, ...]
    """The sample at which each phoneme ends."""


class TtsModel(Protocol):
    """What both kinds have. Belongs to the engine's thread."""

    rate_hz: int

    def validate(self, sentence: Sentence) -> None:
        """Raises OptionError for what it cannot say, with the phonemes that it does not know; UnknownVoice."""


@runtime_checkable
class WholeSentenceTtsModel(TtsModel, Protocol):
    """Says a sentence at once."""

    def synthesize(self, sentence: Sentence) -> SynthesizedSentence:
        """The same sentence gives the same samples."""


class EncodedSentence(Protocol):
    """A sentence that is about to be said. Its tensors are the model's own affair."""

    @property
    def frames(self) -> int:
        """How long it is."""

    @property
    def lead_frames(self) -> int:
        """Frames at its start that are made because of what follows them, and are not heard."""

    @property
    def phoneme_ends_samples(self) -> Sequence[int]:
        """The sample at which each phoneme ends, of those that are heard."""


@runtime_checkable
class StreamingTtsModel(TtsModel, Protocol):
    """Says sentences chunk by chunk: what it needs of the past is a fixed size."""

    chunk_frames: int
    """Frames of a step."""
    hop_samples: int
    """Samples of a frame."""
    frame_width: int
    """Numbers of a frame: WIDTH."""

    def state_specs(self) -> dict[str, StateSpec]:
        """What it remembers of a sentence."""

    def encode(self, sentences: Sequence[Sentence]) -> Sequence[EncodedSentence]:
        """In one batch; each as if it were alone."""

    def step(self, encoded: Sequence[EncodedSentence], rows: Tensor, seen: Tensor, state: State) -> Tensor:
        """A chunk of each: `rows` (n,) int64, each one's row of the state; `seen` (n,) int64, its frames before
        this chunk. Out (n, chunk, width) float32; past a sentence's end it may be anything."""


class Vocoder(Protocol):
    """Frames to sound, chunk by chunk or all at once, with the same samples."""

    rate_hz: int
    hop_samples: int
    delay_frames: int
    """Frames that it must see ahead."""

    def state_specs(self, chunk: int) -> dict[str, StateSpec]:
        """What it remembers of a sentence, in steps of so many frames."""

    def step(
        self, frames: Tensor, rows: Tensor, seen: Tensor, ends: Tensor, seeds: Tensor, state: State
    ) -> Tensor:
        """`frames` (n, chunk, width) of n sentences; `rows`, `seen` as above; `ends` (n,) int64: frames of the
        sentence, those past it are ignored; `seeds` (n,) int64. Out (n, chunk * hop) float32 in -1..1: sample 0
        belongs to frame seen - delay."""

    def vocode(self, frames: Tensor) -> Tensor:
        """(1, frames, width) -> (1, frames * hop)."""


def validate_phonemes(sentence: Sentence, known: Container[str], model: str, alphabet: str) -> None:
    """Raises OptionError with those that are none of `known`."""
    strange = dict.fromkeys(each for each in sentence.phonemes if each not in known)
    if strange:
        shown = " ".join(f"{each!r} (U+{ord(each):04X})" for each in list(strange)[:8])
        raise OptionError(
            f"phonemes that {model} does not know: {shown}",
            f"those of the alphabet {alphabet}, as far as {model} was taught them",
            param="input",
        )


def validate_voice(sentence: Sentence, voices: Iterable[str], model: str) -> None:
    """Raises UnknownVoice with the nearest name."""
    names = list(voices)
    if sentence.voice not in names:
        raise UnknownVoice(
            f"{model} has no voice {sentence.voice[:100]!r}",
            f"voices: {', '.join(names)}",
            suggest_name(sentence.voice, names),
            param="voice",
        )
