"""FunASR's POST /asr: form to what is asked, transcript to its answer.

Source  FunASR's vLLM guide, section 5.3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.pipelines.prompts import MOST_CHARACTERS
from asr_serve.protocols.fields import Fields
from asr_serve.types import Transcript

FIELDS = ("language", "hotwords", "spk", "timestamp", "model")
"""Every field but the file. `model` is ours."""


class Ask(msgspec.Struct, frozen=True):
    """What a form asks for. `model` None: the server's own."""

    model: str | None
    options: TranscribeOptions
    stream: bool = False
    """Never: the answer is of one piece."""


def ask(sent: Mapping[str, Sequence[str]], *, complete: bool) -> Ask:
    """Read a form; no field depends on another, so `complete` changes nothing.

    The protocol's own default, `timestamp` true, would be refused: unless it is sent, there are no words.
    Raises OptionError, UnsupportedOption for what is known and not honoured.
    """
    fields = Fields(sent, FIELDS)
    fields.refuse_true("spk", "the models here hear words, not speakers")
    fields.refuse_true("timestamp", "the models here tell the times of segments, which are always sent")
    return Ask(
        fields.text("model"),
        TranscribeOptions(
            language=fields.language("language"),
            priority="interactive",
            hotwords=fields.words("hotwords", MOST_CHARACTERS),
        ),
    )


class AsrSegment(msgspec.Struct, frozen=True):
    """A segment; times in seconds."""

    text: str
    start: float
    end: float


class AsrAnswer(msgspec.Struct, frozen=True):
    text: str
    segments: list[AsrSegment]
    duration: float
    """Seconds of audio."""
    processing_time: float
    """Seconds from the request's head to its answer."""
    rtf: float
    """processing_time over duration."""


def render(transcript: Transcript, processing_s: float) -> bytes:
    duration_s = transcript.duration_s
    return msgspec.json.encode(
        AsrAnswer(
            transcript.text,
            [AsrSegment(s.text, s.start_s, s.end_s) for s in transcript.segments],
            duration_s,
            round(processing_s, 3),
            round(processing_s / duration_s, 4) if duration_s else 0.0,
        )
    )
