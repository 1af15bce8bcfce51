"""What every pipeline does with an utterance: pauses around it, whether to believe it, its segment."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from asr_serve import units
from asr_serve.audio.endpointing import WINDOW_SAMPLES
from asr_serve.audio.silence_schedule import SilenceSchedule
from asr_serve.decoding.seq2seq import Recognition, SearchOptions, Task
from asr_serve.engine.client import EngineClient
from asr_serve.errors import OptionError, UnsupportedOption, WeightsMissing
from asr_serve.models.registry import AsrCard
from asr_serve.text.languages import languages_by_name, requested_language_code
from asr_serve.text.normalization import inverse
from asr_serve.text.word_timing import align_words
from asr_serve.types import Segment, Span, suggest_name, unknown_name_error

PADDING_MS = 200
"""Digital silence put before and after a segment: a decoder drops words that touch the edge of its audio. Chosen
on telephone prompts, LJSpeech and LibriSpeech test-clean, where it made fewer errors than none or than more."""
PADDING_SAMPLES = units.ms_to_samples(PADDING_MS)
HALLUCINATION_LOGPROB = -1.0
"""A text whose tokens are less likely than this on average, at every temperature tried, was invented.

Chosen on development speech with tiny (telephone prompts, LJSpeech, LibriSpeech test-clean), of which it drops
nothing, lone words in noise included. It is a backstop: what voice activity lets through of hold music scores as
high as real lone words, and stays."""

NO_SPEECH_PROB, NO_SPEECH_LOGPROB = 0.6, -0.3
"""Where the model is surer than the one that nobody speaks, a text is invented unless its tokens are likelier than
the other.

Chosen with Whisper tiny.en on telephone prompts, lone words in long silence included, of which it drops nothing
that somebody says, and on silence, hum and music, where it says "you" or "Thank you." """
SPOKEN = 0.15
"""Where the model is as good as sure that somebody speaks, a text is kept however improbable: somebody says which
language it is in, and is wrong, or nobody speaks clearly.

Chosen with Whisper base on LJSpeech and untranscribed LibriSpeech training speech, where it is 0.13 at most, and
0.19 at least on noise. With French, Spanish or Japanese for their language two of three were lost without."""


def pad_with_silence(pcm: np.ndarray) -> np.ndarray:
    """The audio between two short pauses."""
    return np.pad(pcm, PADDING_SAMPLES)


def is_speech(heard: Recognition, card: AsrCard | None = None, task: Task = "transcribe") -> bool:
    """Whether a recognition is worth believing.

    Voice activity lets some noise and music through; what a decoder makes of it is improbable to itself even
    at its best try. A streaming model invents nothing: where it hears no words it says none. Of a translation
    every word is one of many that would do, and improbable. A model that tells whether somebody speaks, which is
    never quite 0, is believed.
    """
    certain = (card is not None and card.streaming) or 0 < heard.no_speech_prob < SPOKEN
    least = -math.inf if certain or task == "translate" else HALLUCINATION_LOGPROB
    if heard.no_speech_prob > NO_SPEECH_PROB:
        least = NO_SPEECH_LOGPROB
    return bool(heard.tokens) and heard.avg_logprob > least


def build_segment(
    span: Span,
    heard: Recognition,
    text: Callable[[list[int]], str],
    begins: int = 0,
    quiet: Sequence[Span] = (),
) -> Segment | None:
    """What was said in `span`; None when that was nothing. Where the times of tokens are known it has words:
    `begins` is the sample at which the audio began that was heard, `quiet` where nobody speaks in `span`."""
    said = text(list(heard.tokens))
    if not said:
        return None
    times = [(begins + start, begins + end) for start, end in heard.times]
    return Segment(
        span.start_samples,
        span.end_samples,
        said,
        heard.tokens,
        heard.avg_logprob,
        heard.temperature,
        heard.finish,
        heard.logprobs,
        heard.no_speech_prob,
        align_words(said, heard.tokens, heard.logprobs, times, text, span, quiet) if times else (),
    )


def select_tokens(heard: Recognition, kept: Sequence[int]) -> Recognition:
    """Of its tokens those at the places `kept`, with what is known of each."""
    return msgspec.structs.replace(
        heard,
        tokens=tuple(heard.tokens[i] for i in kept),
        logprobs=tuple(heard.logprobs[i] for i in kept) if heard.logprobs else (),
        times=tuple(heard.times[i] for i in kept) if heard.times else (),
    )


class SegmentNormalizer:
    """The last of what happens to a caller's segments: they are written as one writes, if that was asked for."""

    def __init__(self, language: str, *, itn: bool) -> None:
        """`language`: what is spoken, or translated into; empty: it is yet to be heard. Raises UnsupportedOption
        where nothing can be written so."""
        self._language, self._itn = language, itn
        if itn:
            inverse.check_inverse_normalization(language)

    def normalize(self, segment: Segment, heard: str) -> Segment:
        """`heard`: the language that was heard in it."""
        return inverse.inverse_normalize(segment, self._language or heard) if self._itn else segment


def resolve_language(client: EngineClient, wanted: str | None) -> str:
    """The language to hear, of those the model knows; empty: whichever it hears. Raises OptionError."""
    languages = client.card.languages
    if wanted is not None and wanted not in languages:
        raise OptionError(
            f"unknown language for {client.card.name}: {str(wanted)[:20]!r}",
            f"it hears: {', '.join(languages)}",
            suggest_name(wanted, languages_by_name(languages)),
            param="language",
        )
    return client.card.language(wanted)


def check_task(client: EngineClient, task: str) -> None:
    """Raises UnsupportedOption."""
    tasks = client.card.tasks
    if task not in tasks:
        raise UnsupportedOption(
            f"task={task}",
            f"{client.card.name} can only {' or '.join(tasks)}",
            "ask a multilingual Whisper",
            param="task",
        )


def check_search(client: EngineClient, task: str, temperatures: Sequence[float], beam: int) -> None:
    """Raises UnsupportedOption for what a model's search cannot do."""
    check_task(client, task)
    if not client.card.streaming:
        return
    if any(temperatures) and tuple(temperatures) != SearchOptions().temperatures:
        raise UnsupportedOption(
            f"temperature={', '.join(map(str, temperatures))}",
            f"{client.card.name} says what is likeliest; it has no decoder to sample from",
            "leave it out, or 0",
            param="temperature",
        )
    if beam != 1:
        raise UnsupportedOption(
            f"beam={beam}",
            f"{client.card.name} has the same for all: its engine's",
            "set engine.beam where it is loaded",
            param="beam",
        )


def check_timestamps(client: EngineClient) -> None:
    """Raises UnsupportedOption where a recording cannot be heard window by window."""
    if client.card.times is None:
        raise UnsupportedOption(
            "long_form=sequential",
            f"{client.card.name} does not say when something was said; every Whisper does",
            "leave it out, or say parallel: segments that voice activity cuts",
            param="long_form",
        )


def check_diarization(client: EngineClient) -> None:
    """Raises WeightsMissing where the engine could not hear who speaks."""
    if not client.has_diarization:
        raise WeightsMissing(
            "the models that hear who speaks are not on this machine",
            todo="`asr-serve models list` says how to get pyannote-segmentation and eres2net; then load it again",
        )


def constant_speech_scores(pcm: np.ndarray, threshold: float) -> np.ndarray:
    """Scores of whole windows where nobody asks for voice activity: every one is speech; the louder, the surer, so
    that a cut falls where it is quiet."""
    loudness = np.sqrt(np.square(pcm.reshape(-1, WINDOW_SAMPLES)).mean(axis=1))
    return np.asarray(threshold + (1 - threshold) * np.minimum(loudness, 1))


def segment_limit_ms(client: EngineClient, wanted: int | None) -> int:
    """How long a segment may be: as wanted, or the model's own limit. Raises OptionError."""
    limit = client.card.max_segment_ms
    if wanted is not None and wanted > limit:
        raise OptionError(
            f"max_segment_ms={wanted}",
            f"{client.card.name} hears up to {limit} ms at once",
            param="max_segment_ms",
        )
    return min(limit if wanted is None else wanted, limit - 2 * PADDING_MS)


def endpoint_overrides(threshold: float | None, pad_before_ms: int | None) -> dict[str, Any]:
    """What of EndpointConfig a caller chose."""
    chosen: dict[str, Any] = {}
    if threshold is not None:
        # The share of the defaults, and of the model's authors.
        chosen |= {"threshold": threshold, "neg_threshold": 0.7 * threshold}
    if pad_before_ms is not None:
        chosen["pad_before_ms"] = pad_before_ms
    return chosen


def normalize_language_option(options: Any) -> None:
    """`language` of new options, which a caller may name, becomes its code. For their `__post_init__`."""
    if isinstance(options.language, str):
        msgspec.structs.force_setattr(options, "language", requested_language_code(options.language))


def check_switches(options: object, *names: str) -> None:
    """Raises OptionError for one that is neither on nor off."""
    for name in names:
        if not isinstance(value := getattr(options, name), bool):
            raise OptionError(f"{name}={value!r}", "True or False", param=name)


def validate_option_names(options: dict[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """Keyword arguments as fields: an unknown one fails and names the nearest. A schedule may be text, or a list
    of (up_to_ms, silence_ms)."""
    for name in options:
        if name not in known:
            raise unknown_name_error("option", name, known)
    schedule = options.get("silence_schedule")
    if isinstance(schedule, str):
        return {**options, "silence_schedule": SilenceSchedule.from_text(schedule)}
    if isinstance(schedule, list | tuple):
        return {**options, "silence_schedule": SilenceSchedule.parse(schedule)}
    return options
