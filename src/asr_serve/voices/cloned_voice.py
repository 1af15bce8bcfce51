"""Card of a cloned voice; rules for names and statements of consent."""

from __future__ import annotations

import re
import time

import msgspec

from asr_serve.errors import MissingOption, OptionError

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
RESERVED = frozenset({"jobs", "import", "export", "voices", "con", "nul", "aux", "prn"})
"""Names that other paths use, and file names that some systems do not allow."""
STATEMENT_CHARACTERS, STATEMENT_WORDS = 4_000, 6
EXAMPLE = "I, NAME, am the speaker in these recordings and agree that my voice is cloned and used to speak."
AGREES = re.compile(r"\b(agree|agreed|agrees|consent|consents|consented|permit|permission|allow|allowed)\b", re.I)


class Consent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Statement that this voice may be cloned, in the speaker's own words. It stays with the voice."""

    statement: str
    by: str
    """Submitter: a user of this machine, or a key of the server."""
    at: int
    """Unix seconds."""


class ClonedVoiceCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metadata of a cloned voice; NAME.json beside its NAME.safetensors."""

    name: str
    created: int
    """Unix seconds."""
    model: str
    """Text-to-speech model that it was trained for."""
    fingerprint: str
    """sha256 of that model's weights: with others it would be another voice, or noise."""
    consent: Consent
    clips: int
    seconds: float
    """Seconds of speech that it was trained on."""
    start: str
    """Voice of the model that it was initialized from: the most similar one."""
    similarity: float | None
    """Cosine of synthesized speech with the recordings, by a speaker encoder (GE2E); null without synthesis."""
    ceiling: float
    """Cosine of one half of the recordings with the other."""
    steps: int
    seed: int
    sha256: str
    """sha256 of its tensors."""
    release: str
    """Version of asr-serve that made it."""


def check_voice_name(name: str) -> str:
    """Returns the name unchanged if it is valid. Raises OptionError."""
    if NAME.fullmatch(name) is None or name in RESERVED:
        reserved = " and is none of " + ", ".join(sorted(RESERVED)) if name in RESERVED else ""
        raise OptionError(
            f"the voice name {name[:80]!r}",
            f"1 to 64 of a-z, 0-9, - and _, which begins with a letter or a figure{reserved}",
            param="name",
        )
    return name


def validated_consent(statement: str | None, by: str, at: float | None = None) -> Consent:
    """Returns the checked statement, with submitter and time. Raises MissingOption, OptionError."""
    text = " ".join((statement or "").split())
    if not text:
        raise MissingOption(
            "no statement of consent came",
            "the words with which the speaker agrees that this voice is cloned; they are kept with it",
            f"like: {EXAMPLE}",
            param="consent",
        )
    if len(text) > STATEMENT_CHARACTERS:
        raise OptionError(
            f"a statement of consent of {len(text)} characters", f"up to {STATEMENT_CHARACTERS}", param="consent"
        )
    if len(text.split()) < STATEMENT_WORDS or AGREES.search(text) is None:
        raise OptionError(
            f"the statement of consent {text[:80]!r} does not say who agrees to what",
            "a sentence in which the speaker, by name, agrees that this voice is cloned",
            f"like: {EXAMPLE}",
            param="consent",
        )
    return Consent(text, by, int(time.time() if at is None else at))
