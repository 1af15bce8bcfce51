"""The table of transcript formats: one row for each format, read by the command line, HTTP, the OpenAPI document
and the tests.

A format is added by writing a function from `Transcript` to `str` and a row for it here: docs/adding-a-format.md.
Every function is pure. Text is cleaned on the way into subtitles and tables only: white space collapses, control
characters go.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from asr_serve.text.formats.subtitles import karaoke, srt, vtt
from asr_serve.text.formats.tables import ctm, rttm, textgrid
from asr_serve.text.formats.text_and_json import json, jsonl, text, verbose_json
from asr_serve.types import Transcript, unknown_name_error

JSON = "application/json"
PLAIN_TEXT = "text/plain; charset=utf-8"
WEBVTT = "text/vtt; charset=utf-8"


class TranscriptFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One output format of a transcript.

    Args:
        name: what `--format` and `response_format` call it.
        suffix: how its files end. A file name chooses the first row with its suffix.
        media_type: the `Content-Type` of an HTTP response.
        render: a transcript to the whole text of a file.
        shows_words: words with times are part of it, or change it, where the transcript has them.
        needs_words: it has little to show without words, so asking for it asks for word times.
        needs_speakers: the same for speakers.
        shows_alternatives: alternatives of segments are part of it, where the transcript has them.
        streams: a server can send its segments one after another.
        is_translation: `POST /v1/audio/translations` offers it.
        is_self_delimiting: each result names its recording, so that programs can read several in one stream.
        signature: what every file of this format begins with; a file that does not is incomplete.
    """

    name: str
    suffix: str
    media_type: str
    render: Callable[[Transcript], str]
    shows_words: bool = False
    needs_words: bool = False
    needs_speakers: bool = False
    shows_alternatives: bool = False
    streams: bool = False
    is_translation: bool = False
    is_self_delimiting: bool = False
    signature: str = ""


_ROWS = (
    TranscriptFormat(
        name="json",
        suffix=".json",
        media_type=JSON,
        render=json,
        shows_words=True,
        shows_alternatives=True,
        streams=True,
        is_translation=True,
        is_self_delimiting=True,
    ),
    TranscriptFormat(name="text", suffix=".txt", media_type=PLAIN_TEXT, render=text, streams=True, is_translation=True),
    TranscriptFormat(
        name="srt",
        suffix=".srt",
        media_type="application/x-subrip; charset=utf-8",
        render=srt,
        shows_words=True,
        is_translation=True,
    ),
    TranscriptFormat(
        name="verbose_json",
        suffix=".json",
        media_type=JSON,
        render=verbose_json,
        shows_words=True,
        shows_alternatives=True,
        streams=True,
        is_translation=True,
        is_self_delimiting=True,
    ),
    TranscriptFormat(
        name="vtt",
        suffix=".vtt",
        media_type=WEBVTT,
        render=vtt,
        shows_words=True,
        is_translation=True,
        signature="WEBVTT",
    ),
    TranscriptFormat(
        name="jsonl",
        suffix=".jsonl",
        media_type="application/jsonl",
        render=jsonl,
        shows_words=True,
        shows_alternatives=True,
        is_self_delimiting=True,
    ),
    TranscriptFormat(
        name="karaoke",
        suffix=".vtt",
        media_type=WEBVTT,
        render=karaoke,
        shows_words=True,
        needs_words=True,
        signature="WEBVTT",
    ),
    TranscriptFormat(
        name="rttm", suffix=".rttm", media_type=PLAIN_TEXT, render=rttm, needs_speakers=True, is_self_delimiting=True
    ),
    TranscriptFormat(
        name="ctm",
        suffix=".ctm",
        media_type=PLAIN_TEXT,
        render=ctm,
        shows_words=True,
        needs_words=True,
        is_self_delimiting=True,
    ),
    TranscriptFormat(
        name="textgrid",
        suffix=".TextGrid",
        media_type=PLAIN_TEXT,
        render=textgrid,
        shows_words=True,
        needs_words=True,
        signature="File type",
    ),
)
TRANSCRIPT_FORMATS: dict[str, TranscriptFormat] = {row.name: row for row in _ROWS}
"""Name -> format, in the order in which formats are listed to a caller."""


def transcript_format(name: str, *, param: str = "format") -> TranscriptFormat:
    """The row of a format. `param`: the option that named it. Raises OptionError with the nearest name."""
    if name not in TRANSCRIPT_FORMATS:
        raise unknown_name_error(param, name, list(TRANSCRIPT_FORMATS))
    return TRANSCRIPT_FORMATS[name]


def render(transcript: Transcript, form: str) -> str:
    """The transcript in one of TRANSCRIPT_FORMATS. Raises OptionError for any other name."""
    return transcript_format(form).render(transcript)
