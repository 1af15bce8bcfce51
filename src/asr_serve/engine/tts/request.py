"""A sentence that somebody wants to hear, and who hears it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from types import TracebackType

import msgspec

from asr_serve.errors import OptionError, StepFailed
from asr_serve.models.registry import TtsCard
from asr_serve.types import PhonemeSpan, Priority, Sentence, SentenceAudio
from asr_serve.units import RATE_HZ

PHONEME_S = 0.08
"""How long one takes, about: what a sentence counts as before it is said."""
SPEED, PITCH, ENERGY = (0.25, 4.0), (-12.0, 12.0), (-12.0, 12.0)
MAX_SEED = (1 << 63) - 1

log = logging.getLogger(__name__)

SoundCallback = Callable[[SentenceAudio], None]


class TtsRequest(msgspec.Struct):
    """Only the loop touches it, but for what it is made of."""

    id: int
    sentence: Sentence
    on_sound: SoundCallback
    """In order, on the thread that has the sound: it must not wait."""
    priority: Priority
    future: Future[int]
    """How many samples the sentence has, after the last of them."""
    within_ms: int | None = None
    """How soon its first sound is wanted; None: as its priority asks."""
    skip_samples: int = 0
    """Samples at its start that were heard, of an engine that is gone: they are made, and not told again."""
    submitted_ns: int = msgspec.field(default_factory=time.time_ns)
    arrived_s: float = 0.0
    """By the clock of the engine."""

    @property
    def samples(self) -> int:
        """What it counts as, at 16 kHz: about as long as it will be."""
        return describe_sentence(self.sentence)


def describe_sentence(sentence: Sentence) -> int:
    spoken_s = sum(PHONEME_S * len(each.phonemes) / each.speed for each in sentence.spans)
    return max(1, int(spoken_s * RATE_HZ))


def validate_sentence(sentence: Sentence, card: TtsCard) -> None:
    """What can be told without the model. Raises OptionError."""
    phonemes = sum(len(each.phonemes) for each in sentence.spans)
    if not phonemes:
        raise OptionError("a sentence without a phoneme", "one at least", param="input")
    if phonemes > card.max_phonemes:
        raise OptionError(
            f"a sentence of {phonemes} phonemes",
            f"{card.name} says up to {card.max_phonemes} at once",
            "make two sentences of it",
            param="input",
        )
    for stretch in sentence.spans:
        _validate_prosody(stretch)
    if not 0 <= sentence.seed <= MAX_SEED:
        raise OptionError(f"seed={sentence.seed}", f"a whole number, 0 to {MAX_SEED}", param="seed")


def _validate_prosody(stretch: PhonemeSpan) -> None:
    for name, (least, most) in (("speed", SPEED), ("pitch", PITCH), ("energy", ENERGY)):
        value = getattr(stretch, name)
        if not least <= value <= most:
            raise OptionError(f"{name}={value:g}", f"{least:g} to {most:g}", param=name)


class SoundDelivery:
    """Who hears a sentence. What goes wrong there is their affair: they hear no more of it, and nobody else
    notices."""

    def __init__(self, hear: SoundCallback, stop: Callable[[], None]) -> None:
        """`stop`: called once, where `hear` has raised."""
        self._on_sound, self._on_failure = hear, stop
        self._failure: StepFailed | None = None

    def __call__(self, sound: SentenceAudio) -> None:
        if self._failure is None:
            with self:
                self._on_sound(sound)

    def resolve(self, future: Future[int]) -> Future[int]:
        """The same for the caller, who is told if it was they who failed."""
        told: Future[int] = Future()

        def settle(ended: Future[int]) -> None:
            with contextlib.suppress(InvalidStateError):  # nobody waits any more
                if (failure := self._failure or ended.exception()) is not None:
                    told.set_exception(failure)
                else:
                    told.set_result(ended.result())

        future.add_done_callback(settle)
        return told

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(failure, Exception):
            return False
        log.error("who hears a sentence failed", exc_info=failure)
        self._failure = StepFailed(f"who hears the sentence failed: {type(failure).__name__}: {failure}")
        self._failure.__cause__ = failure
        self._on_failure()
        return True
