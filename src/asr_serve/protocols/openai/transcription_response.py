"""OpenAI's answers about recordings: a transcript to bytes, at once or in events."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from asr_serve.protocols.openai.events import Logprob, TokenTexts, server_sent_event, token_logprobs
from asr_serve.protocols.openai.transcription_form import DIARIZED_JSON, TranscriptionRequest
from asr_serve.protocols.speaker_names import funasr_speaker, openai_speaker
from asr_serve.text.formats import registry, text_and_json
from asr_serve.types import Segment, Transcript, Word

PLACES = 4
"""Of a probability."""


class Usage(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="duration"):
    seconds: int
    """Of audio, rounded up."""
    cached_seconds: int = 0
    """Of these, how many had been heard before, rounded down; left out where it is 0. Ours: OpenAI's clients pass
    over it."""


class Transcription(msgspec.Struct, frozen=True, omit_defaults=True):
    """response_format=json"""

    text: str
    usage: Usage
    logprobs: list[Logprob] | None = None


class TimedWord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A word, or a character of a script without spaces; times in seconds. What follows `end` is ours."""

    word: str
    start: float
    end: float
    confidence: float
    """0 to 1."""
    speaker: str | None = None
    spoken: str | None = None
    """The words that were said for it, where it was written in another form."""


class DiarizedSegment(msgspec.Struct, frozen=True, tag_field="type", tag="transcript.text.segment"):
    """Somebody's words; times in seconds. Also an event of a stream."""

    id: str
    start: float
    end: float
    text: str
    speaker: str
    """A, B and so on by who spoke first, or the name of one who is known."""


class Diarized(msgspec.Struct, frozen=True):
    """response_format=diarized_json"""

    task: str
    duration: float
    text: str
    segments: list[DiarizedSegment]
    usage: Usage


def render_transcription(transcript: Transcript, asked: TranscriptionRequest, spell: TokenTexts) -> bytes:
    """The answer in the form asked for; FORMATS has its type."""
    usage = Usage(math.ceil(transcript.duration_s), math.floor(transcript.cached_s))
    task = asked.options.task
    if task == "translate":
        transcript = msgspec.structs.replace(transcript, language="en", language_prob=0.0)
    match asked.response_format:
        case "json":
            heard = token_logprobs(transcript.segments, spell) if asked.logprobs else None
            return msgspec.json.encode(Transcription(transcript.text, usage, heard))
        case "verbose_json":
            return msgspec.json.encode({**render_verbose_json(transcript, asked), "task": task, "usage": usage})
        case "text" if not asked.options.speakers:
            return f"{transcript.text}\n".encode()
        case "vtt" if "word" in asked.granularities:
            return registry.render(transcript, "karaoke").encode()
        case form if form == DIARIZED_JSON:
            known = known_speaker_names(asked)
            told = [diarized_segment(index, each, known) for index, each in enumerate(transcript.segments)]
            return msgspec.json.encode(Diarized(task, transcript.duration_s, transcript.text, told, usage))
    return registry.render(transcript, asked.response_format).encode()


def render_verbose_json(transcript: Transcript, asked: TranscriptionRequest) -> dict[str, Any]:
    """OpenAI's, with FunASR's words inside segments unless only `segment` was asked for."""
    made = text_and_json.verbose_json_data(transcript)
    nested = asked.options.words and asked.granularities != ("segment",)
    for entry, segment in zip(made["segments"], transcript.segments, strict=True):
        if segment.speaker:
            entry["speaker"] = funasr_speaker(segment.speaker)
        if segment.spoken:
            entry["spoken"] = segment.spoken
        if nested:
            entry["words"] = timed_words(segment)
    if "word" in asked.granularities:
        made["words"] = [word for segment in transcript.segments for word in timed_words(segment)]
    if transcript.language_prob:
        made["language_probability"] = round(transcript.language_prob, PLACES)
    return made


def timed_words(segment: Segment) -> list[TimedWord]:
    return [_word(word) for word in segment.words]


def _word(word: Word) -> TimedWord:
    speaker = funasr_speaker(word.speaker) if word.speaker else None
    confidence = round(word.confidence, PLACES)
    return TimedWord(word.text, word.start_s, word.end_s, confidence, speaker, word.spoken or None)


def known_speaker_names(asked: TranscriptionRequest) -> list[str]:
    """Of the speakers that the caller made known."""
    return [each.name for each in asked.options.known_speakers]


def diarized_segment(index: int, segment: Segment, known: list[str]) -> DiarizedSegment:
    name = openai_speaker(segment.speaker, known)
    return DiarizedSegment(_id(index), segment.start_s, segment.end_s, segment.text, name)


def _id(index: int) -> str:
    """
    >>> _id(0)
    'seg_001'
    """
    return f"seg_{index + 1:03}"


# --- one after another ------------------------------------------------------------------------------------


class TextDelta(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="transcript.text.delta"):
    delta: str
    logprobs: list[Logprob] | None = None
    segment_id: str | None = None
    """With diarized_json: of the segment that follows."""
    start: float | None = None
    """Of the segment, in seconds. This and what follows is ours, and comes with verbose_json."""
    end: float | None = None
    speaker: str | None = None
    spoken: str | None = None
    words: list[TimedWord] | None = None


class TextDone(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="transcript.text.done"):
    text: str
    logprobs: list[Logprob] | None = None
    language: str | None = None
    """Of all of it. This and what follows is ours, and comes with verbose_json."""
    language_probability: float | None = None
    """How sure the model was of the language, where it was to hear it."""


class TranscriptEventEncoder:
    """A transcript in events, a segment each; joined, the deltas are its text."""

    def __init__(self, asked: TranscriptionRequest, spell: TokenTexts) -> None:
        self._asked, self._spell = asked, spell
        self._known = known_speaker_names(asked)
        self._segment_count = 0

    def encode_segment(self, segment: Segment) -> bytes:
        """One event; of diarized_json, two."""
        index, asked = self._segment_count, self._asked
        self._segment_count += 1
        heard = token_logprobs([segment], self._spell, first=index == 0) if asked.logprobs else None
        delta = TextDelta(f" {segment.text}" if index else segment.text, heard)
        if asked.response_format == DIARIZED_JSON:
            whole = diarized_segment(index, segment, self._known)
            return server_sent_event(msgspec.structs.replace(delta, segment_id=whole.id)) + server_sent_event(
                whole
            )
        if asked.response_format == "verbose_json":
            delta = msgspec.structs.replace(
                delta,
                start=segment.start_s,
                end=segment.end_s,
                speaker=funasr_speaker(segment.speaker) if segment.speaker else None,
                spoken=segment.spoken or None,
                words=timed_words(segment) if asked.options.words else None,
            )
        return server_sent_event(delta)

    def encode_done(self, transcript: Transcript) -> bytes:
        heard = token_logprobs(transcript.segments, self._spell) if self._asked.logprobs else None
        done = TextDone(transcript.text, heard)
        if self._asked.response_format == "verbose_json":
            language, probability = transcript.language, round(transcript.language_prob, PLACES)
            done = msgspec.structs.replace(
                done, language=language or None, language_probability=probability or None
            )
        return server_sent_event(done)
