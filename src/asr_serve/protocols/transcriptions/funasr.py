"""FunASR's POST /asr: form to what is asked, transcript to its answer.

Source  FunASR's vLLM guide, section 5.3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.protocols.fields import Fields
from asr_serve.protocols.speakers import spk
from asr_serve.protocols.transcriptions import wants
from asr_serve.types import Segment, Transcript

FIELDS = ("language", "timestamp", "model", *wants.FIELDS)
"""Every field but the file. `model` is ours."""


class Ask(msgspec.Struct, frozen=True):
    """What a form asks for. `model` None: the server's own."""

    model: str | None
    options: TranscribeOptions
    stream: bool = False
    """Never: the answer is of one piece."""

    @property
    def params(self) -> dict[str, str]:
        """Options to the fields that ask for them, where these have other names."""
        return {"speakers": "spk", "words": "timestamp"}


def ask(sent: Mapping[str, Sequence[str]], *, complete: bool) -> Ask:
    """Read a form. While it is not `complete`, what only a later field can put right is let pass. Raises
    OptionError."""
    fields = Fields(sent, FIELDS)
    return Ask(
        fields.text("model"),
        TranscribeOptions(
            language=fields.language("language"),
            priority="interactive",
            hotwords=wants.hotwords(fields),
            words=fields.flag("timestamp") is not False,
            itn=wants.itn(fields),
            **wants.speakers(fields, complete=complete),
        ),
    )


class AsrWord(msgspec.Struct, frozen=True):
    """A word, or a character of a script without spaces; times in seconds."""

    word: str
    start: float
    end: float


class AsrSegment(msgspec.Struct, frozen=True, omit_defaults=True):
    """A segment; times in seconds."""

    text: str
    start: float
    end: float
    speaker: str | None = None
    """SPK0, SPK1 and so on by who spoke first, with `spk`."""
    words: list[AsrWord] | None = None
    """Unless `timestamp` was false."""


class AsrAnswer(msgspec.Struct, frozen=True):
    text: str
    segments: list[AsrSegment]
    duration: float
    """Seconds of audio."""
    processing_time: float
    """Seconds from the request's head to its answer."""
    rtf: float
    """processing_time over duration."""


def render(transcript: Transcript, asked: Ask, processing_s: float) -> bytes:
    duration_s, options = transcript.duration_s, asked.options
    return msgspec.json.encode(
        AsrAnswer(
            transcript.text,
            [_segment(segment, words=options.words) for segment in transcript.segments],
            duration_s,
            round(processing_s, 3),
            round(processing_s / duration_s, 4) if duration_s else 0.0,
        )
    )


def _segment(segment: Segment, *, words: bool) -> AsrSegment:
    return AsrSegment(
        segment.text,
        segment.start_s,
        segment.end_s,
        spk(segment.speaker) if segment.speaker else None,
        [AsrWord(word.text, word.start_s, word.end_s) for word in segment.words] if words else None,
    )
