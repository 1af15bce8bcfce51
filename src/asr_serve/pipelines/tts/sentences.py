"""What of a speech is under way: sentences in the engine, silence between them. Counted in the voice's own
samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from asr_serve.engine.client import Ticket
from asr_serve.errors import AsrServeError
from asr_serve.text.g2p.passages import Clause, ClauseWord, ProsodySettings
from asr_serve.types import PhonemeSpan, Sentence, SentenceAudio

SILENCE_CHUNK_SAMPLES = 4_096
"""Of silence, a piece."""
SILENCE_LEVEL = 64
"""Of 32,767: what is no louder is not heard."""


class SpeechPart(Protocol):
    """Sound that is to come, in order."""

    @property
    def under_way(self) -> bool:
        """The engine works on it."""

    @property
    def remaining_samples(self) -> int | None:
        """Not yet taken, as far as that is known; None: it is not."""

    @property
    def finished(self) -> bool:
        """All of it was taken."""

    def take_audio(self) -> np.ndarray | None:
        """The next piece (n,) int16, or None: there is none yet. Raises what went wrong, after all that was
        said."""

    def cancel(self) -> None: ...


class SilencePart:
    under_way = False

    def __init__(self, samples: int, *, asked: bool = False) -> None:
        """`asked`: somebody wants it so long; any other counts what was silent before it."""
        self.remaining_samples = samples
        self._more = not asked

    def begin(self, quiet_samples: int) -> None:
        """So much of what came before was silent: sentences fade out for as long as they like."""
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
    """A sentence in the engine."""

    def __init__(
        self,
        clause: Clause,
        sentence: Sentence,
        say: Callable[[Sentence, Callable[[SentenceAudio], None]], Ticket],
        cancel: Callable[[Ticket], None],
        wake: Callable[[], None],
    ) -> None:
        """`say` and `cancel` are EngineClient's. Raises what `say` does."""
        self.clause = clause
        self._cancel, self._wake = cancel, wake
        self._sounds: deque[SentenceAudio] = deque()
        self._heard_samples = self._taken_samples = 0
        self._whole = False
        """All of it was heard."""
        self._ends: tuple[int, ...] = ()
        self._told = False
        self._ticket = say(sentence, self._accept_audio)
        self._ticket.future.add_done_callback(lambda _: wake())

    @property
    def under_way(self) -> bool:
        return not self._whole

    @property
    def remaining_samples(self) -> int | None:
        if self._whole:
            return self._heard_samples - self._taken_samples
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
        """Each with where it begins and ends in the sentence; once, with its first piece; None before and
        after."""
        if self._told or not (self._ends or self._sounds):
            return None
        self._told = True
        ends = self._ends
        if len(ends) < len(self.clause.phonemes):  # an engine died with them
            return []
        return [(word, ends[word.first - 1] if word.first else 0, ends[word.last]) for word in self.clause.words]

    def cancel(self) -> None:
        if not self._whole:
            self._cancel(self._ticket)

    def _accept_audio(self, sound: SentenceAudio) -> None:
        """On a thread of the engine's. Each field has one writer."""
        if sound.phoneme_ends:
            self._ends = sound.phoneme_ends
        self._sounds.append(sound)
        self._heard_samples += len(sound.pcm) // 2
        if sound.is_last:
            self._whole = True
        self._wake()


def sentence_request(clause: Clause, manner: ProsodySettings, voice: str, seed: int) -> Sentence:
    """A clause as the engine takes it, in a manner beside its own."""
    stretches = []
    for stretch in clause.phoneme_spans:
        both = ProsodySettings(stretch.speed, stretch.pitch, stretch.energy).combined_with(manner)
        stretches.append(PhonemeSpan(stretch.phonemes, both.speed, both.pitch, both.energy))
    return Sentence(tuple(stretches), voice, seed)


def trailing_silence_samples(pcm: np.ndarray) -> int:
    """Of (n,) int16, the samples after the last that is heard."""
    loud = np.flatnonzero(np.abs(pcm.astype(np.int32)) > SILENCE_LEVEL)
    return len(pcm) - 1 - int(loud[-1]) if len(loud) else len(pcm)
