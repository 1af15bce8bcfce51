"""Speakers that a caller makes known: names, and a few seconds of each in data URLs."""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

from asr_serve.errors import OptionError
from asr_serve.pipelines.options import KnownSpeaker
from asr_serve.protocols import speakers
from asr_serve.protocols.fields import Fields, shown

NAMES, REFERENCES = "known_speaker_names[]", "known_speaker_references[]"
MOST, LONGEST_NAME = 4, 64
MOST_BYTES = 4 << 20
"""Of a reference as it was sent, in base64: 10 s of stereo PCM at 48 kHz are 2.6 MB."""


def known(fields: Fields, *, complete: bool) -> tuple[KnownSpeaker, ...]:
    """Each name with its audio. While the form is not `complete`, names wait for references.
    Raises OptionError; that a reference is no audio, or too short, is found when it is heard."""
    names, references = fields.many(NAMES), fields.many(REFERENCES)
    _expect_names(names)
    for index, reference in enumerate(references):
        if len(reference) > MOST_BYTES:
            raise OptionError(
                f"{REFERENCES} {index + 1} holds {len(reference)} characters",
                f"up to {MOST_BYTES}: 2 to 10 s of audio",
                param=REFERENCES,
            )
    if len(names) != len(references):
        if not complete:
            return ()
        raise _unpaired(names, references)
    return tuple(KnownSpeaker(name, _data(each)) for name, each in zip(names, references, strict=True))


def _unpaired(names: Sequence[str], references: Sequence[str]) -> OptionError:
    """Who is named and not heard, or heard and not named."""
    count = f"{len(names)} {NAMES} came with {len(references)} {REFERENCES}"
    both = "as many of the one as of the other, in the same order"
    if len(references) > len(names):
        todo = f"send a name for reference {len(names) + 1}, or leave it out"
        return OptionError(f"{count}: whose voice the others are nobody says", both, todo, param=REFERENCES)
    name = shown(names[len(references)])
    todo = f"send 2 to 10 s of {name} as a data URL, or leave the name out"
    return OptionError(f"{count}: what {name} sounds like nobody says", both, todo, param=NAMES)


def _expect_names(names: Sequence[str]) -> None:
    if len(names) > MOST:
        raise OptionError(f"{len(names)} {NAMES} came", f"up to {MOST}", "name fewer", param=NAMES)
    for name in names:
        if len(name) > LONGEST_NAME or not name.isprintable():
            raise OptionError(
                f"{NAMES}={shown(name)}", f"up to {LONGEST_NAME} characters that can be printed", param=NAMES
            )
        if speakers.is_given(name):
            raise OptionError(
                f"{NAMES}={shown(name)}", "another: so are those called who are not known", param=NAMES
            )
    if len(set(names)) < len(names):
        raise OptionError(f"{NAMES} holds a name twice", "each speaker once", param=NAMES)


def _data(url: str) -> bytes:
    """What `data:audio/wav;base64,...` holds; its type is looked at no further, for the bytes tell what they are.

    >>> _data("data:audio/wav;base64,UklGRg=="), _data("data:,RIFF")
    (b'RIFF', b'RIFF')
    """
    head, comma, body = url.partition(",")
    if not comma and head.casefold().startswith("data:"):
        raise OptionError(
            f"{REFERENCES}={shown(url)} ends before its audio",
            "all of a data URL, like data:audio/wav;base64,UklGR...",
            "curl cuts it at the ; unless it is sent with --form-string instead of -F",
            param=REFERENCES,
        )
    if not comma or not head.casefold().startswith("data:"):
        raise OptionError(
            f"{REFERENCES}={shown(url)}",
            "a data URL, like data:audio/wav;base64,UklGR...: nothing is fetched from addresses",
            param=REFERENCES,
        )
    if not head.casefold().endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return binascii.a2b_base64("".join(body.split()), strict_mode=True)
    except (binascii.Error, ValueError):
        raise OptionError(
            f"{REFERENCES}={shown(url)}", "after the comma, base64 with its padding", param=REFERENCES
        ) from None
