"""Utterances of every pipeline: padding, rejection of hallucinations, segments; checks of options against the
model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from asr_serve import units
from asr_serve.audio.endpointing import WINDOW_SAMPLES
from asr_serve.audio.silence_schedule import SilenceSchedule
from asr_serve.decoding.hypothesis import Recognition, RecognitionHypothesis
from asr_serve.decoding.search_options import SearchOptions, Task
from asr_serve.engine.client import EngineClient
from asr_serve.errors import OptionError, UnsupportedOption, WeightsMissing
from asr_serve.models.registry import AsrCard
from asr_serve.text.languages import MULTILINGUAL_COMMAND, is_language_code, languages_by_name, requested_language_code
from asr_serve.text.normalization import inverse
from asr_serve.text.word_timing import align_words
from asr_serve.types import Alternative, Segment, Span, Word, suggest_name, unknown_name_error

PADDING_MS = 200
"""Digital silence added before and after a segment: a decoder drops words that touch the edge of its audio.
Chosen on telephone prompts, LJSpeech and LibriSpeech test-clean, where it made fewer errors than none or than
more."""
PADDING_SAMPLES = units.ms_to_samples(PADDING_MS)
HALLUCINATION_LOGPROB = -1.0
"""Mean log-probability of tokens below which a text, the best of all temperatures tried, counts as hallucinated.

Chosen on development speech with tiny (telephone prompts, LJSpeech, LibriSpeech test-clean), of which it drops
nothing, lone words in noise included. It is a backstop: hold music that passes voice activity scores as high as
real lone words, and stays.
"""

NO_SPEECH_PROB, NO_SPEECH_LOGPROB = 0.6, -0.3
"""Probability of no speech above which a text counts as hallucinated unless the mean log-probability of its tokens
is above NO_SPEECH_LOGPROB.

Chosen with Whisper tiny.en on telephone prompts, lone words in long silence included, of which it drops no speech,
and on silence, hum and music, where the model writes "you" or "Thank you."
"""
SPOKEN = 0.15
"""Probability of no speech below which a text is kept however improbable its tokens are: its language may have
been chosen wrongly, or speech may be unclear.

Chosen with Whisper base on LJSpeech and untranscribed LibriSpeech training speech, where it is 0.13 at most, and
0.19 at least on noise. Without it, two of three texts were lost with French, Spanish or Japanese chosen for their
language.
"""


def pad_with_silence(pcm: np.ndarray) -> np.ndarray:
    """Pads audio with PADDING_SAMPLES of silence on each side."""
    return np.pad(pcm, PADDING_SAMPLES)


def is_speech(recognition: Recognition, card: AsrCard | None = None, task: Task = "transcribe") -> bool:
    """Returns whether a recognition is plausible speech, not a hallucination.

    Voice activity lets some noise and music pass; text that a decoder invents for it is improbable even at its
    best temperature. A streaming model invents nothing: without words it emits none. A translation is exempt,
    since each of its words is one of many that would do, and improbable. A model's own probability of no speech,
    which is never quite 0, is trusted.
    """
    certain = (card is not None and card.streaming) or 0 < recognition.no_speech_prob < SPOKEN
    min_logprob = -math.inf if certain or task == "translate" else HALLUCINATION_LOGPROB
    if recognition.no_speech_prob > NO_SPEECH_PROB:
        min_logprob = NO_SPEECH_LOGPROB
    return bool(recognition.tokens) and recognition.avg_logprob > min_logprob


def build_segment(
    span: Span,
    recognition: Recognition,
    text: Callable[[list[int]], str],
    begins: int = 0,
    quiet: Sequence[Span] = (),
    n_best: int = 1,
) -> Segment | None:
    """Builds the segment of `span`; None if it has no text. It has words where the times of tokens are known:
    `begins` is the first sample of the audio that was recognized, `quiet` the silences in `span`. `n_best`: most
    alternatives, different texts of the recognition's hypotheses; 1: none."""
    decoded = text(list(recognition.tokens))
    if not decoded:
        return None

    def words(spelled: str, answer: Recognition | RecognitionHypothesis) -> tuple[Word, ...]:
        times = [(begins + start, begins + end) for start, end in answer.times]
        return align_words(spelled, answer.tokens, answer.logprobs, times, text, span, quiet) if times else ()

    distinct: dict[str, RecognitionHypothesis] = {}
    for hypothesis in recognition.hypotheses if n_best > 1 else ():
        distinct.setdefault(text(list(hypothesis.tokens)), hypothesis)
    return Segment(
        span.start_samples,
        span.end_samples,
        decoded,
        recognition.tokens,
        recognition.avg_logprob,
        recognition.temperature,
        recognition.finish,
        recognition.logprobs,
        recognition.no_speech_prob,
        words(decoded, recognition),
        alternatives=tuple(
            Alternative(spelled, hypothesis.logprob, words(spelled, hypothesis))
            for spelled, hypothesis in islice(distinct.items(), n_best)
        ),
    )


Recognized = TypeVar("Recognized", Recognition, RecognitionHypothesis)


def select_tokens(recognition: Recognized, indices: Sequence[int]) -> Recognized:
    """Returns the recognition with only the tokens at the indices `indices`; its hypotheses have all of theirs."""
    return msgspec.structs.replace(
        recognition,
        tokens=tuple(recognition.tokens[i] for i in indices),
        logprobs=tuple(recognition.logprobs[i] for i in indices) if recognition.logprobs else (),
        times=tuple(recognition.times[i] for i in indices) if recognition.times else (),
    )


class SegmentNormalizer:
    """Inverse text normalization of segments, if requested; the last step before they are emitted."""

    def __init__(self, language: str, *, itn: bool) -> None:
        """`language`: language of the speech, or of the translation; empty: not known yet. Raises
        UnsupportedOption for a language without grammars."""
        self._language, self._itn = language, itn
        if itn:
            inverse.check_inverse_normalization(language)

    def normalize(self, segment: Segment, detected_language: str) -> Segment:
        """Normalizes a segment and its alternatives. `detected_language`: its detected language."""
        if not self._itn:
            return segment
        language = self._language or detected_language
        alternatives = []
        for each in segment.alternatives:
            whole = msgspec.structs.replace(segment, text=each.text, words=each.words, spoken="")
            written = inverse.inverse_normalize(whole, language)
            alternatives.append(msgspec.structs.replace(each, text=written.text, words=written.words))
        return msgspec.structs.replace(inverse.inverse_normalize(segment, language), alternatives=tuple(alternatives))


def resolve_language(client: EngineClient, wanted: str | None) -> str:
    """Returns the model's code for the chosen language; empty: detect it. Raises OptionError."""
    check_language(client.card, wanted)
    return client.card.language(wanted)


def check_language(card: AsrCard, wanted: str | None) -> None:
    """Raises OptionError for the code of a language that a model does not have."""
    if wanted is not None and wanted not in card.languages:
        raise OptionError(
            f"unknown language for {card.name}: {str(wanted)[:20]!r}",
            f"languages that it recognizes: {', '.join(card.languages)}",
            MULTILINGUAL_COMMAND
            if is_language_code(str(wanted)) and not card.detects
            else suggest_name(wanted, languages_by_name(card.languages)),
            param="language",
        )


def check_task(client: EngineClient, task: str) -> None:
    """Raises UnsupportedOption for a task that the model does not support."""
    tasks = client.card.tasks
    if task not in tasks:
        raise UnsupportedOption(
            f"task={task}", f"{client.card.name} can only {' or '.join(tasks)}", MULTILINGUAL_COMMAND, param="task"
        )


def check_search(client: EngineClient, task: str, temperatures: Sequence[float], beam: int) -> None:
    """Raises UnsupportedOption for options that the model's search does not support."""
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
        setting = "graph_beam" if client.card.heads == ("wfst",) else "beam"
        raise UnsupportedOption(
            f"beam={beam}",
            f"{client.card.name} has the same for all: its engine's",
            f"set engine.{setting} where it is loaded",
            param="beam",
        )


class DecoderOptions(Protocol):
    """Options that only models with a decoder have, of transcription and of live sessions."""

    @property
    def repetition_penalty(self) -> float: ...
    @property
    def max_new_tokens(self) -> int | None: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...


def check_decoder_options(client: EngineClient, options: DecoderOptions) -> None:
    """Raises UnsupportedOption for options of a decoder where the model has none."""
    for name, none, reason in (
        ("repetition_penalty", 1.0, "whose answer could repeat"),
        ("max_new_tokens", None, "whose answer could go on"),
        ("top_k", 0, "to sample from"),
        ("top_p", 1.0, "to sample from"),
    ):
        if (value := getattr(options, name)) != none and client.card.streaming:
            allowed = f"{client.card.name} has no decoder {reason}"
            raise UnsupportedOption(f"{name}={value}", allowed, "leave it out", param=name)


def check_n_best(
    client: EngineClient, n_best: int, beam: int, temperatures: Sequence[float], hotwords: Sequence[str]
) -> None:
    """Raises UnsupportedOption for an n-best list that the model's search does not have: its beam is narrower, that of
    the engine for a streaming model, else that of the request; or hotwords change its answer afterwards."""
    card = client.card
    if n_best == 1:
        return
    if hotwords and not card.streaming:
        raise UnsupportedOption(
            "n_best beside hotwords",
            f"{card.name} puts hotwords into its best hypothesis only, after the search",
            "leave one of them out",
            param="n_best",
        )
    width = client.config.beam if card.streaming else beam if temperatures[0] == 0 else 1
    if n_best <= width:
        return
    came, setting = f"n_best={n_best}", "its engine's beam" if card.streaming else "beam"
    allowed = (
        f"up to {width}, {setting}" if width > 1 else f"1: {setting} is 1, and {card.name} lists no other hypothesis"
    )
    wider = "set engine.beam where it is loaded" if card.streaming else f"ask for beam={n_best}, at temperature 0"
    raise UnsupportedOption(came, allowed, wider, param="n_best")


def requests_words(cards: Sequence[AsrCard], words: bool | None, *, speakers: bool) -> bool:
    """Returns whether times of words are requested of the models of a recognizer: for `words`, where None is where a
    model has them, and for `speakers`, between which segments are cut at words. Segments of a model without times stay
    whole. Raises UnsupportedOption."""
    if words and (without := [card.name for card in cards if not card.word_times]):
        raise UnsupportedOption(
            "words=True", f"{without[0]} has no times of words", "leave it out, or take a model that has", param="words"
        )
    return (words is not False or speakers) and any(card.word_times for card in cards)


def check_timestamps(client: EngineClient) -> None:
    """Raises UnsupportedOption for a model without timestamps, which cannot do sequential long form."""
    if client.card.times is None:
        raise UnsupportedOption(
            "long_form=sequential",
            f"{client.card.name} does not say when something was said; every Whisper does",
            "leave it out, or say parallel: segments that voice activity cuts",
            param="long_form",
        )


def check_diarization(client: EngineClient) -> None:
    """Raises WeightsMissing where the diarization models are missing."""
    if not client.has_diarization:
        raise WeightsMissing(
            "the models for diarization are not on this machine",
            todo="`asr-serve models list` says how to get pyannote-segmentation and eres2net; then load it again",
        )


def constant_speech_scores(pcm: np.ndarray, threshold: float) -> np.ndarray:
    """Scores of whole windows without voice activity: all are speech, and louder ones score higher, so that a
    cut falls where it is quiet."""
    loudness = np.sqrt(np.square(pcm.reshape(-1, WINDOW_SAMPLES)).mean(axis=1))
    return np.asarray(threshold + (1 - threshold) * np.minimum(loudness, 1))


def segment_limit_ms(client: EngineClient, wanted: int | None) -> int:
    """Returns the limit of a segment: `wanted`, or the model's own. Raises OptionError."""
    limit = client.card.max_segment_ms
    if wanted is not None and wanted > limit:
        raise OptionError(
            f"max_segment_ms={wanted}", f"{client.card.name} takes up to {limit} ms at once", param="max_segment_ms"
        )
    return min(limit if wanted is None else wanted, limit - 2 * PADDING_MS)


def endpoint_overrides(threshold: float | None, pad_before_ms: int | None) -> dict[str, Any]:
    """Returns the fields of EndpointConfig that are set."""
    overrides: dict[str, Any] = {}
    if threshold is not None:
        # The ratio of the defaults, and of the model's authors.
        overrides |= {"threshold": threshold, "neg_threshold": 0.7 * threshold}
    if pad_before_ms is not None:
        overrides["pad_before_ms"] = pad_before_ms
    return overrides


def normalize_language_option(options: Any) -> None:
    """Replaces a language name in new options by its code. Called by `__post_init__`."""
    if isinstance(options.language, str):
        msgspec.structs.force_setattr(options, "language", requested_language_code(options.language))


def check_switches(options: object, *names: str) -> None:
    """Raises OptionError for a switch that is not a bool."""
    for name in names:
        if not isinstance(value := getattr(options, name), bool):
            raise OptionError(f"{name}={value!r}", "True or False", param=name)


def check_optional_switch(options: object, name: str) -> None:
    """Raises OptionError for a switch that is neither a bool nor None."""
    if getattr(options, name) is not None:
        check_switches(options, name)


def validate_option_names(options: dict[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """Checks the names of keyword arguments and parses a schedule, which may be text or a list of (up_to_ms,
    silence_ms). Raises for an unknown name and suggests the nearest."""
    for name in options:
        if name not in known:
            raise unknown_name_error("option", name, known)
    schedule = options.get("silence_schedule")
    if isinstance(schedule, str):
        return {**options, "silence_schedule": SilenceSchedule.from_text(schedule)}
    if isinstance(schedule, list | tuple):
        return {**options, "silence_schedule": SilenceSchedule.parse(schedule)}
    if schedule is not None and not isinstance(schedule, SilenceSchedule):
        rows = "rows like [(5000, 1500), (inf, 300)], or text like '5000:1500,inf:300'"
        raise OptionError(f"silence_schedule={schedule!r}", rows, param="silence_schedule")
    return options
