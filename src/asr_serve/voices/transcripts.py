"""Transcripts of recordings, as users supply them."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from asr_serve.errors import OptionError


def parse_transcripts(source: str) -> dict[str, str]:
    """Parses `NAME<tab or |>TEXT` lines, or a JSON object, to transcripts by the recording's name without ending.
    Of LJSpeech's three columns the last is read. Raises OptionError."""
    if source.lstrip().startswith("{"):
        try:
            return {
                recording_stem(name): text for name, text in msgspec.json.decode(source, type=dict[str, str]).items()
            }
        except msgspec.DecodeError as failure:
            raise OptionError(f"texts: {failure}", "an object of names and texts", param="texts") from None
    transcripts = {}
    for number, line in enumerate(source.splitlines(), 1):
        if not line.strip():
            continue
        parts = [part.strip() for part in re.split(r"\t|\|", line)]
        if len(parts) < 2 or not parts[0] or not parts[-1]:
            raise OptionError(
                f"line {number} of the texts is {line[:60]!r}", "a name, a tab or |, and a text", param="texts"
            )
        transcripts[recording_stem(parts[0])] = parts[-1]
    return transcripts


def recording_stem(name: str) -> str:
    """Returns a recording's name, without its folder and ending."""
    path = Path(name)
    return path.stem if re.fullmatch(r"\.\w{2,4}", path.suffix) else path.name
