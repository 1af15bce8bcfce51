"""Who speaks, as each protocol calls them.

Inside they are SPEAKER_00, SPEAKER_01 and so on, by when they spoke first, as in an RTTM file; whom the caller has
made known has the name it gave.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import count, islice, product
from string import ascii_uppercase

_NUMBERED = re.compile(r"SPEAKER_(\d+)", re.ASCII)


def speaker_number(speaker: str) -> int | None:
    """
    >>> speaker_number("SPEAKER_07"), speaker_number("agent")
    (7, None)
    """
    found = _NUMBERED.fullmatch(speaker)
    return int(found[1]) if found else None


def is_allowed_name(name: str) -> bool:
    """Whether somebody who is not known may be called so.

    >>> is_allowed_name("SPEAKER_07"), is_allowed_name("SPK7"), is_allowed_name("SPKR")
    (True, True, False)
    """
    return speaker_number(name) is not None or re.fullmatch(r"SPK\d+", name, re.ASCII) is not None


def funasr_speaker(speaker: str) -> str:
    """FunASR's name in answers about recordings.

    >>> funasr_speaker("SPEAKER_07"), funasr_speaker("agent")
    ('SPK7', 'agent')
    """
    index = speaker_number(speaker)
    return speaker if index is None else f"SPK{index}"


def openai_speaker(speaker: str, known: Collection[str] = ()) -> str:
    """OpenAI's name. `known`: names that the caller gave, which no other speaker gets.

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
    """A to Z, then AA."""
    for length in count(1):
        yield from map("".join, product(ascii_uppercase, repeat=length))
