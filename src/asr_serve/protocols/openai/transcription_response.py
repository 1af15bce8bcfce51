"""OpenAI's transcription responses: a transcript to bytes, at once or in events."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from asr_serve.protocols.openai.events import Logprob, TokenTexts, server_sent_event, token_logprobs
from asr_serve.protocols.openai.transcription_form import DIARIZED_JSON, TranscriptionRequest
from asr_serve.protocols.speaker_names import funasr_speaker, openai_speaker
from asr_serve.text.formats import registry, text_and_json
from asr_serve.types import Alternative, Segment, Transcript, Word

PLACES = 4
"""Decimal places of a probability."""


class Usage(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="duration"):
    seconds: int
    """Seconds of audio, rounded up."""
    cached_seconds: int = 0
    """Seconds of that which came from a cache, rounded down; left out if 0. Ours: OpenAI's clients ignore it."""


class Transcription(msgspec.Struct, frozen=True, omit_defaults=True):
    """Response with response_format=json."""

    text: str
    usage: Usage
    logprobs: list[Logprob] | None = None


class TimedWord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Word, or character of a script without spaces; times in seconds. Members after `end` are ours."""

    word: str
    start: float
    end: float
    confidence: float
    """0 to 1."""
    speaker: str | None = None
    spoken: str | None = None
    """Spoken form, where the written form differs."""


class VerboseAlternative(msgspec.Struct, frozen=True, omit_defaults=True):
    """Entry of a segment's n-best list. Ours."""

    text: str
    score: float
    """Natural log of the weight that the search gives the segment: only differences within a list matter."""
    words: list[TimedWord] | None = None


class DiarizedSegment(msgspec.Struct, frozen=True, tag_field="type", tag="transcript.text.segment"):
    """Segment of one speaker; times in seconds. Also an event of a stream."""

    id: str
    start: float
    end: float
    text: str
    speaker: str
    """Speaker: A, B and so on in order of first speech, or the name of a known one."""


class Diarized(msgspec.Struct, frozen=True):
    """Response with response_format=diarized_json."""

    task: str
    duration: float
    text: str
    segments: list[DiarizedSegment]
    usage: Usage


def render_transcription(transcript: Transcript, request: TranscriptionRequest, spell: TokenTexts) -> bytes:
    """Response in the requested format; RESPONSE_FORMATS has its media type."""
    usage = Usage(math.ceil(transcript.duration_s), math.floor(transcript.cached_s))
    task = request.options.task
    if task == "translate":
        transcript = msgspec.structs.replace(transcript, language="en", language_prob=0.0)
    match request.response_format:
        case "json":
            logprobs = token_logprobs(transcript.segments, spell) if request.logprobs else None
            return msgspec.json.encode(Transcription(transcript.text, usage, logprobs))
        case "verbose_json":
            return msgspec.json.encode({**render_verbose_json(transcript, request), "task": task, "usage": usage})
        case "text" if not request.options.speakers:
            return f"{transcript.text}\n".encode()
        case "vtt" if "word" in request.granularities:
            return registry.render(transcript, "karaoke").encode()
        case form if form == DIARIZED_JSON:
            known = known_speaker_names(request)
            segments = [diarized_segment(i, segment, known) for i, segment in enumerate(transcript.segments)]
            return msgspec.json.encode(Diarized(task, transcript.duration_s, transcript.text, segments, usage))
    return registry.render(transcript, request.response_format).encode()


def render_verbose_json(transcript: Transcript, request: TranscriptionRequest) -> dict[str, Any]:
    """OpenAI's verbose_json, with FunASR's words in segments unless only `segment` was requested."""
    response = text_and_json.verbose_json_data(transcript)
    nested = request.options.words is not False and request.granularities != ("segment",)
    for entry, segment in zip(response["segments"], transcript.segments, strict=True):
        if segment.speaker:
            entry["speaker"] = funasr_speaker(segment.speaker)
        if segment.spoken:
            entry["spoken"] = segment.spoken
        if nested and (segment.words or request.options.words):
            entry["words"] = timed_words(segment)
        if segment.alternatives:
            entry["alternatives"] = [_alternative(each, nested=nested) for each in segment.alternatives]
    if "word" in request.granularities:
        response["words"] = [word for segment in transcript.segments for word in timed_words(segment)]
    if transcript.language_prob:
        response["language_probability"] = round(transcript.language_prob, PLACES)
    return response


def timed_words(of: Segment | Alternative) -> list[TimedWord]:
    return [_word(word) for word in of.words]


def _alternative(alternative: Alternative, *, nested: bool) -> VerboseAlternative:
    words = timed_words(alternative) if nested and alternative.words else None
    return VerboseAlternative(alternative.text, round(alternative.score, PLACES), words)


def _word(word: Word) -> TimedWord:
    speaker = funasr_speaker(word.speaker) if word.speaker else None
    confidence = round(word.confidence, PLACES)
    return TimedWord(word.text, word.start_s, word.end_s, confidence, speaker, word.spoken or None)


def known_speaker_names(request: TranscriptionRequest) -> list[str]:
    """Names of the speakers that the client made known."""
    return [speaker.name for speaker in request.options.known_speakers]


def diarized_segment(index: int, segment: Segment, known: list[str]) -> DiarizedSegment:
    name = openai_speaker(segment.speaker, known)
    return DiarizedSegment(_id(index), segment.start_s, segment.end_s, segment.text, name)


def _id(index: int) -> str:
    """Id of a segment.

    >>> _id(0)
    'seg_001'
    """
    return f"seg_{index + 1:03}"


# --- server-sent events -----------------------------------------------------------------------------------


class TextDelta(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="transcript.text.delta"):
    delta: str
    logprobs: list[Logprob] | None = None
    segment_id: str | None = None
    """Id of the segment that follows, with diarized_json."""
    start: float | None = None
    """Start of the segment, in seconds. This and the members below are ours, and come with verbose_json."""
    end: float | None = None
    speaker: str | None = None
    spoken: str | None = None
    words: list[TimedWord] | None = None


class TextDone(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="transcript.text.done"):
    text: str
    logprobs: list[Logprob] | None = None
    language: str | None = None
    """Language of the transcript. This and the member below are ours, and come with verbose_json."""
    language_probability: float | None = None
    """Probability of the language, if it was detected."""


class TranscriptEventEncoder:
    """Transcript as events, one for each segment; joined, the deltas are its text."""

    def __init__(self, request: TranscriptionRequest, spell: TokenTexts) -> None:
        self._asked, self._spell = request, spell
        self._known = known_speaker_names(request)
        self._segment_count = 0

    def encode_segment(self, segment: Segment) -> bytes:
        """Encodes a segment as one event, or two with diarized_json."""
        index, request = self._segment_count, self._asked
        self._segment_count += 1
        logprobs = token_logprobs([segment], self._spell, first=index == 0) if request.logprobs else None
        delta = TextDelta(f" {segment.text}" if index else segment.text, logprobs)
        if request.response_format == DIARIZED_JSON:
            diarized = diarized_segment(index, segment, self._known)
            return server_sent_event(msgspec.structs.replace(delta, segment_id=diarized.id)) + server_sent_event(
                diarized
            )
        if request.response_format == "verbose_json":
            delta = msgspec.structs.replace(
                delta,
                start=segment.start_s,
                end=segment.end_s,
                speaker=funasr_speaker(segment.speaker) if segment.speaker else None,
                spoken=segment.spoken or None,
                words=timed_words(segment) if request.options.words or segment.words else None,
            )
        return server_sent_event(delta)

    def encode_done(self, transcript: Transcript) -> bytes:
        logprobs = token_logprobs(transcript.segments, self._spell) if self._asked.logprobs else None
        done = TextDone(transcript.text, logprobs)
        if self._asked.response_format == "verbose_json":
            language, probability = transcript.language, round(transcript.language_prob, PLACES)
            done = msgspec.structs.replace(done, language=language or None, language_probability=probability or None)
        return server_sent_event(done)
