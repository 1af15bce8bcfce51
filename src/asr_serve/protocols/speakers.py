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


def number(speaker: str) -> int | None:
    """
    >>> number("SPEAKER_07"), number("agent")
    (7, None)
    """
    found = _NUMBERED.fullmatch(speaker)
    return int(found[1]) if found else None


def is_given(name: str) -> bool:
    """Whether somebody who is not known may be called so.

    >>> is_given("SPEAKER_07"), is_given("SPK7"), is_given("SPKR")
    (True, True, False)
    """
    return number(name) is not None or re.fullmatch(r"SPK\d+", name, re.ASCII) is not None


def spk(speaker: str) -> str:
    """FunASR's name in answers about recordings.

    >>> spk("SPEAKER_07"), spk("agent")
    ('SPK7', 'agent')
    """
    index = number(speaker)
    return speaker if index is None else f"SPK{index}"


def letter(speaker: str, known: Collection[str] = ()) -> str:
    """OpenAI's name. `known`: names that the caller gave, which no other speaker gets.

    >>> letter("SPEAKER_01"), letter("SPEAKER_26"), letter("SPEAKER_01", ["A"]), letter("agent", ["agent"])
    ('B', 'AA', 'C', 'agent')
    """
    index = number(speaker)
    if index is None:
        return speaker
    return next(islice((name for name in _letters() if name not in known), index, None))


def _letters() -> Iterator[str]:
    """A to Z, then AA."""
    for length in count(1):
        yield from map("".join, product(ascii_uppercase, repeat=length))
