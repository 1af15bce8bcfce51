"""The last of what happens to a segment: it is written as one writes it, if that was asked for."""

from __future__ import annotations

from asr_serve.text.written import written
from asr_serve.types import Segment


class Finishing:
    """Of one caller's segments."""

    def __init__(self, language: str, *, itn: bool) -> None:
        """`language`: what is spoken, or translated into; empty: it is yet to be heard. Raises UnsupportedOption
        where nothing can be written so."""
        self._language, self._itn = language, itn
        if itn:
            written.expect(language)

    def of(self, segment: Segment, heard: str) -> Segment:
        """`heard`: the language that was heard in it."""
        return written.written(segment, self._language or heard) if self._itn else segment
