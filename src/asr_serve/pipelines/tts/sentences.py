"""Parts of a speech in progress: sentences in the engine and the silence between them. Positions count samples
at the voice's own rate."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from asr_serve.engine.client import Ticket
from asr_serve.errors import AsrServeError
from asr_serve.text.g2p.clauses import Clause, ClauseWord, ProsodySettings
from asr_serve.types import PhonemeSpan, Sentence, SentenceAudio

SILENCE_CHUNK_SAMPLES = 4_096
"""Chunk length of silence."""
SILENCE_LEVEL = 64
"""Amplitude up to which a sample counts as silent, of 32,767."""


class SpeechPart(Protocol):
    """Audio to be returned in order."""

    @property
    def under_way(self) -> bool:
        """Returns whether the engine works on it."""

    @property
    def remaining_samples(self) -> int | None:
        """Samples not yet taken, as far as is known; None: unknown."""

    @property
    def finished(self) -> bool:
        """Returns whether all samples were taken."""

    def take_audio(self) -> np.ndarray | None:
        """Returns the next chunk, (n,) int16, or None if none is ready. Raises the engine's error after all
        audio before it."""

    def cancel(self) -> None: ...


class SilencePart:
    under_way = False

    def __init__(self, samples: int, *, is_requested: bool = False) -> None:
        """`is_requested`: the text requests this length. Any other silence is shortened by the silence that precedes
        it."""
        self.remaining_samples = samples
        self._more = not is_requested

    def begin(self, quiet_samples: int) -> None:
        """Reports how much of the audio before this part was silent: sentences fade out over any length."""
        if self._more:
            self.remaining_samples = max(0, self.remaining_samples - quiet_samples)
            self._more = False

    @property
    def finished(self) -> bool:
        return not self.remaining_samples

    def take_audio(self) -> np.ndarray | None:
        if self.finished:
            return None
        piece = np.zeros(min(SILENCE_CHUNK_SAMPLES, self.remaining_samples), np.int16)
        self.remaining_samples -= len(piece)
        return piece

    def cancel(self) -> None:
        self.remaining_samples = 0


class SentencePart:
    """Sentence in the engine."""

    def __init__(
        self,
        clause: Clause,
        sentence: Sentence,
        synthesize: Callable[[Sentence, Callable[[SentenceAudio], None]], Ticket],
        cancel: Callable[[Ticket], None],
        wake: Callable[[], None],
    ) -> None:
        """`synthesize` submits a sentence and `cancel` cancels it, as EngineClient's methods do. Raises what
        `synthesize` raises."""
        self.clause = clause
        self._cancel, self._wake = cancel, wake
        self._sounds: deque[SentenceAudio] = deque()
        self._received_samples = self._taken_samples = 0
        self._whole = False
        """Whether the last audio has arrived."""
        self._ends: tuple[int, ...] = ()
        self._words_returned = False
        self._ticket = synthesize(sentence, self._accept_audio)
        self._ticket.future.add_done_callback(lambda _: wake())

    @property
    def under_way(self) -> bool:
        return not self._whole

    @property
    def remaining_samples(self) -> int | None:
        if self._whole:
            return self._received_samples - self._taken_samples
        return max(self._ends) - self._taken_samples if self._ends else None

    @property
    def finished(self) -> bool:
        return self._whole and not self._sounds

    def take_audio(self) -> np.ndarray | None:
        if not self._sounds:
            if self._ticket.future.done() and not self._sounds and not self._whole:
                self._ticket.future.result()  # it failed, else the last piece were here
                raise AsrServeError("a sentence ended without its last sound")
            return None
        pcm = np.frombuffer(self._sounds.popleft().pcm, "<i2")
        self._taken_samples += len(pcm)
        return pcm.astype(np.int16, copy=False)

    def words(self) -> list[tuple[ClauseWord, int, int]] | None:
        """Returns the words with their start and end in the sentence, once, with the first chunk; None before
        and after."""
        if self._words_returned or not (self._ends or self._sounds):
            return None
        self._words_returned = True
        ends = self._ends
        if len(ends) < len(self.clause.phonemes):  # an engine died with them
            return []
        return [(word, ends[word.first - 1] if word.first else 0, ends[word.last]) for word in self.clause.words]

    def cancel(self) -> None:
        if not self._whole:
            self._cancel(self._ticket)

    def _accept_audio(self, sound: SentenceAudio) -> None:
        """Receives audio on a thread of the engine. Each field has one writer."""
        if sound.phoneme_ends:
            self._ends = sound.phoneme_ends
        self._sounds.append(sound)
        self._received_samples += len(sound.pcm) // 2
        if sound.is_last:
            self._whole = True
        self._wake()


def sentence_request(clause: Clause, manner: ProsodySettings, voice: str, seed: int) -> Sentence:
    """Builds the engine's request for a clause: its own prosody combined with `manner`."""
    spans = []
    for span in clause.phoneme_spans:
        prosody = ProsodySettings(span.speed, span.pitch, span.energy).combined_with(manner)
        spans.append(PhonemeSpan(span.phonemes, prosody.speed, prosody.pitch, prosody.energy))
    return Sentence(tuple(spans), voice, seed)


def trailing_silence_samples(pcm: np.ndarray) -> int:
    """Number of samples after the last audible one in (n,) int16."""
    loud = np.flatnonzero(np.abs(pcm.astype(np.int32)) > SILENCE_LEVEL)
    return len(pcm) - 1 - int(loud[-1]) if len(loud) else len(pcm)
