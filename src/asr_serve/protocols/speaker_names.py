"""Speaker names of each protocol.

Internally speakers are SPEAKER_00, SPEAKER_01 and so on in order of first speech, as in an RTTM file; a speaker
whom the client has made known has the given name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import count, islice, product
from string import ascii_uppercase

_NUMBERED = re.compile(r"SPEAKER_(\d+)", re.ASCII)


def speaker_number(speaker: str) -> int | None:
    """Number of an unknown speaker; None for a known one.

    >>> speaker_number("SPEAKER_07"), speaker_number("agent")
    (7, None)
    """
    match = _NUMBERED.fullmatch(speaker)
    return int(match[1]) if match else None


def is_reserved_name(name: str) -> bool:
    """Returns whether a name is one that unknown speakers get.

    >>> is_reserved_name("SPEAKER_07"), is_reserved_name("SPK7"), is_reserved_name("SPKR")
    (True, True, False)
    """
    return speaker_number(name) is not None or re.fullmatch(r"SPK\d+", name, re.ASCII) is not None


def funasr_speaker(speaker: str) -> str:
    """Name in FunASR's responses about recordings.

    >>> funasr_speaker("SPEAKER_07"), funasr_speaker("agent")
    ('SPK7', 'agent')
    """
    index = speaker_number(speaker)
    return speaker if index is None else f"SPK{index}"


def openai_speaker(speaker: str, known: Collection[str] = ()) -> str:
    """Name in OpenAI's responses. `known`: names given by the client, which no other speaker gets.

    >>> openai_speaker("SPEAKER_01"), openai_speaker("SPEAKER_26")
    ('B', 'AA')
    >>> openai_speaker("SPEAKER_01", ["A"]), openai_speaker("agent", ["agent"])
    ('C', 'agent')
    """
    index = speaker_number(speaker)
    if index is None:
        return speaker
    return next(islice((name for name in _letters() if name not in known), index, None))


def _letters() -> Iterator[str]:
    """Yields A to Z, then AA and so on."""
    for length in count(1):
        yield from map("".join, product(ascii_uppercase, repeat=length))
