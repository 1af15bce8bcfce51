"""Texts of recordings, by the recordings' names."""

from __future__ import annotations

import pytest

from asr_serve.errors import OptionError
from asr_serve.voices.transcripts import parse_transcripts


def test_texts_by_name():
    wanted = {"a": "One.", "b-1": "Two, or three.", "c": "Four"}
    assert parse_transcripts("a.wav\tOne.\n\nb-1|Two, or 2|Two, or three.\nsub/c.flac\tFour\n") == wanted
    assert parse_transcripts('{"a.wav": "One.", "b-1": "Two, or three.", "c": "Four"}') == wanted
    for bad in ("only a name", "\ttext", "a.wav\t", '{"a": 1}', "{"):
        with pytest.raises(OptionError, match="text"):
            parse_transcripts(bad)
