"""Registry of output formats by name; the entry point of this package. Every function is pure.

Text is cleaned for subtitles and tables only: white space collapses, control characters are removed.
"""

from __future__ import annotations

from collections.abc import Callable

from asr_serve.text.formats.subtitles import karaoke, srt, vtt
from asr_serve.text.formats.tables import ctm, rttm, textgrid
from asr_serve.text.formats.text_and_json import json, jsonl, text, verbose_json
from asr_serve.types import Transcript, unknown_name_error

FORMATS: dict[str, Callable[[Transcript], str]] = {
    "text": text,
    "json": json,
    "verbose_json": verbose_json,
    "srt": srt,
    "vtt": vtt,
    "jsonl": jsonl,
    "karaoke": karaoke,
    "rttm": rttm,
    "ctm": ctm,
    "textgrid": textgrid,
}
SUFFIXES = {name: f".{name}" for name in FORMATS} | {
    "text": ".txt",
    "verbose_json": ".json",
    "karaoke": ".vtt",
    "textgrid": ".TextGrid",
}
WORD_TIMING_FORMATS = ("karaoke", "ctm", "textgrid")
"""Formats with little or no content for a transcript without words."""
SPEAKER_FORMATS = ("rttm",)


def render(transcript: Transcript, form: str) -> str:
    """Render a transcript in one of FORMATS. Raises OptionError for any other name."""
    if form not in FORMATS:
        raise unknown_name_error("format", form, list(FORMATS))
    return FORMATS[form](transcript)
