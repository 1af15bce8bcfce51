"""FunASR's POST /asr: form to request, transcript to response.

Source  FunASR's vLLM guide, section 5.3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.protocols import recognition_fields
from asr_serve.protocols.form_fields import FormFields
from asr_serve.protocols.speaker_names import funasr_speaker
from asr_serve.types import Segment, Transcript

ASR_FIELDS = ("language", "timestamp", "model", *recognition_fields.FIELDS)
"""Every field but the file. `model` is our extension."""


class AsrRequest(msgspec.Struct, frozen=True):
    """Request of a form. `model` None: the server's own."""

    model: str | None
    options: TranscribeOptions
    stream: bool = False
    """Always false: the response is sent whole."""
    raw_pcm: bool = False
    """Always false: the file has a header."""
    detects_language: bool = False
    """Always false: the language is detected where the model can."""

    @property
    def option_to_field(self) -> dict[str, str]:
        """Options to the fields that set them, where the names differ."""
        return {"speakers": "spk", "words": "timestamp"}


def parse_asr_form(sent: Mapping[str, Sequence[str]], *, complete: bool) -> AsrRequest:
    """Parses a form; until it is `complete`, errors that a later field can correct are ignored. Raises OptionError."""
    fields = FormFields(sent, ASR_FIELDS)
    return AsrRequest(
        fields.text("model"),
        TranscribeOptions(
            language=fields.language("language"),
            priority="interactive",
            hotwords=recognition_fields.parse_hotwords(fields),
            words=fields.flag("timestamp"),
            itn=recognition_fields.parse_itn(fields),
            **recognition_fields.parse_language_model(fields, complete=complete),
            **recognition_fields.parse_speaker_options(fields, complete=complete),
        ),
    )


class AsrWord(msgspec.Struct, frozen=True):
    """Word, or character of a script without spaces; times in seconds."""

    word: str
    start: float
    end: float


class AsrSegment(msgspec.Struct, frozen=True, omit_defaults=True):
    """Segment; times in seconds."""

    text: str
    start: float
    end: float
    speaker: str | None = None
    """SPK0, SPK1 and so on in order of first speech, with `spk`."""
    words: list[AsrWord] | None = None
    """Words of the segment, unless `timestamp` is false or the model has no times of words."""


class AsrAnswer(msgspec.Struct, frozen=True):
    text: str
    segments: list[AsrSegment]
    duration: float
    """Seconds of audio."""
    processing_time: float
    """Seconds from the request's head to its response."""
    rtf: float
    """processing_time over duration."""


def render_asr_answer(transcript: Transcript, request: AsrRequest, processing_s: float) -> bytes:
    duration_s, options = transcript.duration_s, request.options
    return msgspec.json.encode(
        AsrAnswer(
            transcript.text,
            [_segment(segment, options.words) for segment in transcript.segments],
            duration_s,
            round(processing_s, 3),
            round(processing_s / duration_s, 4) if duration_s else 0.0,
        )
    )


def _segment(segment: Segment, words: bool | None) -> AsrSegment:
    wanted = bool(segment.words) if words is None else words
    return AsrSegment(
        segment.text,
        segment.start_s,
        segment.end_s,
        funasr_speaker(segment.speaker) if segment.speaker else None,
        [AsrWord(word.text, word.start_s, word.end_s) for word in segment.words] if wanted else None,
    )
