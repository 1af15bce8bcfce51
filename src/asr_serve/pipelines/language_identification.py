"""Identification of the spoken language from the first seconds of speech, by a model that tells languages apart: which
piece of audio is asked about, what its answer is worth, and what came of it."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from asr_serve import units
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.client import EngineClient, Ticket
from asr_serve.errors import UnsupportedOption
from asr_serve.models.registry import AsrCard
from asr_serve.pipelines.prompting import normalizes_text
from asr_serve.pipelines.segments import SegmentNormalizer
from asr_serve.types import Priority

PIECE_SAMPLES = units.s_to_samples(4)
"""Longest piece of audio that is asked about."""
EARLY_PIECE_SAMPLES = units.s_to_samples(2)
"""Speech after which a live caller's language is asked for first; where the answer is unsure, it is asked for again
with PIECE_SAMPLES."""
MIN_PIECE_SAMPLES = units.ms_to_samples(500)
"""Shortest piece: in less, languages sound alike."""
SHORT_PIECE_SAMPLES = EARLY_PIECE_SAMPLES
"""Pieces below this must be more certain: of 1 s, whisper-base takes Spanish for Arabic at 0.83, and of 1.5 s English
at 0.74."""
MIN_PROBABILITY, MIN_SHORT_PROBABILITY = 0.5, 0.9
"""Least probability of a language that is believed, of a piece and of a short one, measured by
bench/language_identification.py."""

_FIRST_TOKEN = SearchOptions(temperatures=(0.0,), max_new_tokens=1, hurried=True)
"""One pass of the encoder and of the decoder's prompt: no more is needed of the answer than its language."""

Outcome = Literal["identified", "unsure", "no_speech", "timeout", "unavailable", "refused"]


class LanguageIdentification(msgspec.Struct, frozen=True):
    """Result of an identification, of a recording or of a live session.

    identified   the language is believed, and `model` serves it
    unsure       no language was likely enough, or a live caller's words could not be asked about
    no_speech    nobody spoke
    timeout      the identifying model did not answer in time
    unavailable  its engine has failed, or was full
    refused      the model of that language does not take the request's other options

    `model` is the default one in all cases but the first.
    """

    outcome: Outcome
    model: str
    language: str = ""
    """Code of the language; empty unless it is identified or refused."""
    probability: float = 0.0
    """Probability of that language among all that the identifying model knows."""


def submit_piece(client: EngineClient, pcm: np.ndarray, priority: Priority) -> Ticket:
    """Submits a piece, `pcm` (n,) float32 at 16 kHz. It skips the limit of requests: those who ask were admitted
    themselves, and ask for one piece at a time. The future holds a Recognition. Raises EngineClosed."""
    return client.submit(pcm, _FIRST_TOKEN, priority, admitted=True)


def believed_language(answer: Recognition, samples: int) -> str | None:
    """Language of a piece of so many samples; None: the answer is unsure."""
    needed = MIN_SHORT_PROBABILITY if samples < SHORT_PIECE_SAMPLES else MIN_PROBABILITY
    return answer.language if answer.language and answer.language_prob >= needed else None


def possible_itn(card: AsrCard, language: str, itn: bool | None) -> bool | None:
    """The option `itn` as far as a model can do it in a language: it was asked for before either was known."""
    if itn:
        try:
            SegmentNormalizer(language, itn=normalizes_text(card, itn))
        except UnsupportedOption:
            return None
    return itn
