"""Speakers that a client makes known: names, and a few seconds of each in data URLs."""

from __future__ import annotations

from collections.abc import Sequence

from asr_serve.errors import OptionError
from asr_serve.pipelines.options import KnownSpeaker
from asr_serve.protocols import speaker_names
from asr_serve.protocols.data_urls import decode_data_url
from asr_serve.protocols.form_fields import FormFields, quote_for_message

NAMES_FIELD, REFERENCES_FIELD = "known_speaker_names[]", "known_speaker_references[]"
MAX_KNOWN_SPEAKERS, MAX_SPEAKER_NAME_CHARACTERS = 4, 64
MAX_REFERENCE_BYTES = 4 << 20
"""Limit of a reference in base64: 10 s of stereo PCM at 48 kHz are 2.6 MB."""


def parse_known_speakers(fields: FormFields, *, complete: bool) -> tuple[KnownSpeaker, ...]:
    """Pairs each name with its audio. While the form is not `complete`, names wait for references. Raises
    OptionError; a reference that is no audio, or too short, is rejected when it is decoded."""
    names, references = fields.repeated(NAMES_FIELD), fields.repeated(REFERENCES_FIELD)
    _expect_names(names)
    for index, reference in enumerate(references):
        if len(reference) > MAX_REFERENCE_BYTES:
            raise OptionError(
                f"{REFERENCES_FIELD} {index + 1} holds {len(reference)} characters",
                f"up to {MAX_REFERENCE_BYTES}: 2 to 10 s of audio",
                param=REFERENCES_FIELD,
            )
    if len(names) != len(references):
        if not complete:
            return ()
        raise _unpaired(names, references)
    return tuple(
        KnownSpeaker(name, decode_data_url(url, REFERENCES_FIELD)) for name, url in zip(names, references, strict=True)
    )


def _unpaired(names: Sequence[str], references: Sequence[str]) -> OptionError:
    """Error for a name without a reference, or a reference without a name."""
    count = f"{len(names)} {NAMES_FIELD} came with {len(references)} {REFERENCES_FIELD}"
    both = "as many of the one as of the other, in the same order"
    if len(references) > len(names):
        todo = f"send a name for reference {len(names) + 1}, or leave it out"
        return OptionError(f"{count}: whose voice the others are nobody says", both, todo, param=REFERENCES_FIELD)
    name = quote_for_message(names[len(references)])
    todo = f"send 2 to 10 s of {name} as a data URL, or leave the name out"
    return OptionError(f"{count}: what {name} sounds like nobody says", both, todo, param=NAMES_FIELD)


def _expect_names(names: Sequence[str]) -> None:
    if len(names) > MAX_KNOWN_SPEAKERS:
        raise OptionError(
            f"{len(names)} {NAMES_FIELD} came", f"up to {MAX_KNOWN_SPEAKERS}", "name fewer", param=NAMES_FIELD
        )
    for name in names:
        if len(name) > MAX_SPEAKER_NAME_CHARACTERS or not name.isprintable():
            raise OptionError(
                f"{NAMES_FIELD}={quote_for_message(name)}",
                f"up to {MAX_SPEAKER_NAME_CHARACTERS} characters that can be printed",
                param=NAMES_FIELD,
            )
        if speaker_names.is_reserved_name(name):
            raise OptionError(
                f"{NAMES_FIELD}={quote_for_message(name)}",
                "another: so are those called who are not known",
                param=NAMES_FIELD,
            )
    if len(set(names)) < len(names):
        raise OptionError(f"{NAMES_FIELD} holds a name twice", "each speaker once", param=NAMES_FIELD)
