"""What of a speech is under way: sentences in the engine, silence between them. Counted in the voice's own
samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from asr_serve.engine.calls import Ticket
from asr_serve.errors import AsrServeError
from asr_serve.text.spoken.passages import Clause, Manner, Word
from asr_serve.types import Sentence, Sound, Stretch

SILENCE_SAMPLES = 4_096
"""Of silence, a piece."""
QUIET = 64
"""Of 32,767: what is no louder is not heard."""


class Part(Protocol):
    """Sound that is to come, in order."""

    @property
    def under_way(self) -> bool:
        """The engine works on it."""

    @property
    def left_samples(self) -> int | None:
        """Not yet taken, as far as that is known; None: it is not."""

    @property
    def over(self) -> bool:
        """All of it was taken."""

    def take(self) -> np.ndarray | None:
        """The next piece (n,) int16, or None: there is none yet. Raises what went wrong, after all that was
        said."""

    def cancel(self) -> None: ...


class Silence:
    under_way = False

    def __init__(self, samples: int, *, asked: bool = False) -> None:
        """`asked`: somebody wants it so long; any other counts what was silent before it."""
        self.left_samples = samples
        self._more = not asked

    def begin(self, quiet_samples: int) -> None:
        """So much of what came before was silent: sentences fade out for as long as they like."""
        if self._more:
            self.left_samples = max(0, self.left_samples - quiet_samples)
            self._more = False

    @property
    def over(self) -> bool:
        return not self.left_samples

    def take(self) -> np.ndarray | None:
        if self.over:
            return None
        piece = np.zeros(min(SILENCE_SAMPLES, self.left_samples), np.int16)
        self.left_samples -= len(piece)
        return piece

    def cancel(self) -> None:
        self.left_samples = 0


class Said:
    """A sentence in the engine."""

    def __init__(
        self,
        clause: Clause,
        sentence: Sentence,
        say: Callable[[Sentence, Callable[[Sound], None]], Ticket],
        cancel: Callable[[Ticket], None],
        wake: Callable[[], None],
    ) -> None:
        """`say` and `cancel` are EngineClient's. Raises what `say` does."""
        self.clause = clause
        self._cancel, self._wake = cancel, wake
        self._sounds: deque[Sound] = deque()
        self._heard_samples = self._taken_samples = 0
        self._whole = False
        """All of it was heard."""
        self._ends: tuple[int, ...] = ()
        self._told = False
        self._ticket = say(sentence, self._hear)
        self._ticket.future.add_done_callback(lambda _: wake())

    @property
    def under_way(self) -> bool:
        return not self._whole

    @property
    def left_samples(self) -> int | None:
        if self._whole:
            return self._heard_samples - self._taken_samples
        return max(self._ends) - self._taken_samples if self._ends else None

    @property
    def over(self) -> bool:
        return self._whole and not self._sounds

    def take(self) -> np.ndarray | None:
        if not self._sounds:
            if self._ticket.future.done() and not self._sounds and not self._whole:
                self._ticket.future.result()  # it failed, else the last piece were here
                raise AsrServeError("a sentence ended without its last sound")
            return None
        pcm = np.frombuffer(self._sounds.popleft().pcm, "<i2")
        self._taken_samples += len(pcm)
        return pcm.astype(np.int16, copy=False)

    def words(self) -> list[tuple[Word, int, int]] | None:
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

    def _hear(self, sound: Sound) -> None:
        """On a thread of the engine's. Each field has one writer."""
        if sound.ends:
            self._ends = sound.ends
        self._sounds.append(sound)
        self._heard_samples += len(sound.pcm) // 2
        if sound.last:
            self._whole = True
        self._wake()


def sentence(clause: Clause, manner: Manner, voice: str, seed: int) -> Sentence:
    """A clause as the engine takes it, in a manner beside its own."""
    stretches = []
    for stretch in clause.stretches:
        both = Manner(stretch.speed, stretch.pitch, stretch.energy).within(manner)
        stretches.append(Stretch(stretch.phonemes, both.speed, both.pitch, both.energy))
    return Sentence(tuple(stretches), voice, seed)


def quiet_end(pcm: np.ndarray) -> int:
    """Of (n,) int16, the samples after the last that is heard."""
    loud = np.flatnonzero(np.abs(pcm.astype(np.int32)) > QUIET)
    return len(pcm) - 1 - int(loud[-1]) if len(loud) else len(pcm)
