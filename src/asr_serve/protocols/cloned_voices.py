"""Cloned voices over HTTP: what a client sends, and what it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from asr_serve.errors import MalformedRequest, MissingOption, OptionError
from asr_serve.protocols.form_fields import FormFields
from asr_serve.voices.cloned_voice import (
    EXAMPLE,
    NAME,
    STATEMENT_CHARACTERS,
    ClonedVoiceCard,
    Consent,
    check_voice_name,
    validated_consent,
)
from asr_serve.voices.cloning_messages import ClipReport, CloneProgress, CloneReport

FILES = ("files", "files[]", "file")
"""Fields that hold recordings."""
FIELDS = ("name", "consent", "texts", "model", "minutes", "seed")
MAX_TEXTS_CHARACTERS = 65_536
MAX_TRAINING_MINUTES = 60.0
MAX_CLONING_SEED = 2**31 - 1
CloningState = Literal["waiting", "running", "done", "failed", "cancelled"]


class ClonedVoice(msgspec.Struct, frozen=True):
    """A cloned voice."""

    name: str
    model: str
    """That it was taught to, and that speaks with it."""
    created: int
    """Unix seconds."""
    clips: int
    seconds: float
    """Of speech that it was learnt from."""
    start: str
    """The model's own voice that it began as."""
    similarity: float | None
    """Cosine of what it says to the recordings; null where that was not measured."""
    ceiling: float
    """The same of one half of the recordings to the other."""
    consent: Consent | None
    """The words of its speaker; null for who is no administrator."""
    object: Literal["voice"] = "voice"

    @classmethod
    def of(cls, card: ClonedVoiceCard, *, admin: bool) -> ClonedVoice:
        return cls(
            card.name,
            card.model,
            card.created,
            card.clips,
            card.seconds,
            card.start,
            card.similarity,
            card.ceiling,
            card.consent if admin else None,
        )


class ClonedVoices(msgspec.Struct, frozen=True):
    data: list[ClonedVoice]
    object: Literal["list"] = "list"


class CloningError(msgspec.Struct, frozen=True):
    """Why a cloning came to nothing."""

    code: str
    message: str


class Cloning(msgspec.Struct, frozen=True):
    """A cloning: one that waits, goes on or is over."""

    id: str
    name: str
    model: str
    state: CloningState
    progress: CloneProgress
    created: int
    """Unix seconds: when it came, was begun and was over."""
    begun: int | None
    ended: int | None
    files: int
    ahead: int
    """That wait before it."""
    voice: ClonedVoice | None = None
    """What it made."""
    clips: list[ClipReport] = []
    """What became of each clip, once that is known."""
    error: CloningError | None = None
    object: Literal["voice.cloning"] = "voice.cloning"


class Clonings(msgspec.Struct, frozen=True):
    data: list[Cloning]
    object: Literal["list"] = "list"


class RenameVoiceBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of PATCH."""

    name: str


class CloningForm(msgspec.Struct, frozen=True):
    """What a form asks for."""

    name: str
    consent: Consent
    texts: str
    model: str | None
    minutes: float
    seed: int


def parse_cloning_form(sent: Mapping[str, Sequence[str]], files: int, by: str) -> CloningForm:
    """Raises OptionError, MissingOption."""
    fields = FormFields(sent, FIELDS)
    agreed = validated_consent(fields.text("consent", STATEMENT_CHARACTERS + 1_000), by)
    name = fields.text("name")
    if name is None:
        raise MissingOption("name is missing", "a name for the voice", param="name")
    if not files:
        raise MissingOption("no recording came", f"files in the field {FILES[0]!r}", param=FILES[0])
    minutes, seed = fields.number("minutes", 0.1, MAX_TRAINING_MINUTES), fields.number("seed", 0, MAX_CLONING_SEED)
    if seed is not None and seed != int(seed):
        raise OptionError(f"seed={seed:g}", "a whole number", param="seed")
    return CloningForm(
        check_voice_name(name),
        agreed,
        fields.text("texts", MAX_TEXTS_CHARACTERS) or "",
        fields.text("model"),
        10.0 if minutes is None else minutes,
        int(seed or 0),
    )


def parse_rename_body(body: bytes) -> str:
    """The new name. Raises MalformedRequest, OptionError."""
    try:
        return check_voice_name(msgspec.json.decode(body, type=RenameVoiceBody).name)
    except (msgspec.DecodeError, UnicodeDecodeError) as failure:
        raise MalformedRequest(f"the body is no rename: {failure}", '{"name": "another-name"}') from failure


def cloned_voice_from_report(report: CloneReport) -> ClonedVoice:
    return ClonedVoice.of(report.card, admin=True)


def cloning_form_schema() -> dict[str, Any]:
    """Its schema."""
    recording = {"type": "string", "format": "binary"}
    return {
        "type": "object",
        "properties": {
            "name": _name(),
            "consent": {
                "type": "string",
                "description": "The words with which the speaker agrees that the voice is cloned. They are kept "
                "with it. Six words or more, of which one says agree, consent, permit or allow.",
                "examples": [EXAMPLE],
                "maxLength": STATEMENT_CHARACTERS,
            },
            FILES[0]: {
                "type": "array",
                "items": recording,
                "description": "Recordings of one speaker: about 20 of 3 to 12 s; longer ones are cut at pauses.",
            },
            "texts": {
                "type": "string",
                "maxLength": MAX_TEXTS_CHARACTERS,
                "description": "What is said in them: a line `NAME|TEXT` for each, or an object in JSON. What is "
                "not told is heard.",
            },
            "model": {"type": "string", "description": "Voice model that learns it. Default: the first that can."},
            "minutes": {
                "type": "number",
                "minimum": 0.1,
                "maximum": MAX_TRAINING_MINUTES,
                "default": 10,
                "description": "Of learning, at most. It ends when it gets no better.",
            },
            "seed": {"type": "integer", "minimum": 0, "maximum": MAX_CLONING_SEED, "default": 0},
        },
        "required": ["name", "consent", FILES[0]],
        "additionalProperties": False,
    }


def _name() -> dict[str, Any]:
    return {"type": "string", "pattern": f"^{NAME.pattern}$", "description": "Of the voice.", "examples": ["ada"]}


def rename_body_schema() -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": _name()},
        "required": ["name"],
        "additionalProperties": False,
    }


def cloned_voice_components() -> dict[str, Any]:
    """Schemas that others refer to, by name."""
    _, found = msgspec.json.schema_components(
        (ClonedVoice, ClonedVoices, Cloning, Clonings), ref_template="#/components/schemas/{name}"
    )
    return found
