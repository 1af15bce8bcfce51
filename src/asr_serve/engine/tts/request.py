"""TTS request of one sentence, and the delivery of its audio."""

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
"""Approximate duration of a phoneme: estimates a sentence before it is synthesized."""
SPEED, PITCH, ENERGY = (0.25, 4.0), (-12.0, 12.0), (-12.0, 12.0)
MAX_SEED = (1 << 63) - 1

log = logging.getLogger(__name__)

SoundCallback = Callable[[SentenceAudio], None]


class TtsRequest(msgspec.Struct):
    """Sentence to synthesize. Only the loop's thread uses it, apart from the objects it was made of."""

    id: int
    sentence: Sentence
    on_sound: SoundCallback
    """Called in order, on the thread that has the audio; it must not block."""
    priority: Priority
    future: Future[int]
    """Number of samples of the sentence, once all were delivered."""
    slack_ms: int | None = None
    """Time by which the first audio may come later than `priority` asks."""
    skip_samples: int = 0
    """Samples at its start that were delivered by an engine that is gone: they are generated, and not delivered
    again."""
    submitted_ns: int = msgspec.field(default_factory=time.time_ns)
    arrived_s: float = 0.0
    """Arrival, by the engine's clock."""

    @property
    def samples(self) -> int:
        """Estimated length at 16 kHz; counts for admission."""
        return describe_sentence(self.sentence)


def describe_sentence(sentence: Sentence) -> int:
    spoken_s = sum(PHONEME_S * len(span.phonemes) / span.speed for span in sentence.spans)
    return max(1, int(spoken_s * RATE_HZ))


def validate_sentence(sentence: Sentence, card: TtsCard) -> None:
    """Checks what can be checked without the model. Raises OptionError."""
    phonemes = sum(len(span.phonemes) for span in sentence.spans)
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
    """Delivery of audio to a client's callback. A callback that raises gets no more audio; nothing else is
    affected."""

    def __init__(self, on_sound: SoundCallback, stop: Callable[[], None]) -> None:
        """`stop`: called once, after `on_sound` has raised."""
        self._on_sound, self._on_failure = on_sound, stop
        self._failure: StepFailed | None = None

    def __call__(self, sound: SentenceAudio) -> None:
        if self._failure is None:
            with self:
                self._on_sound(sound)

    def resolve(self, future: Future[int]) -> Future[int]:
        """Returns a future for the client: that of the sentence, or the callback's failure."""
        result: Future[int] = Future()

        def settle(ended: Future[int]) -> None:
            with contextlib.suppress(InvalidStateError):  # cancelled
                if (failure := self._failure or ended.exception()) is not None:
                    result.set_exception(failure)
                else:
                    result.set_result(ended.result())

        future.add_done_callback(settle)
        return result

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
