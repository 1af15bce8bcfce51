"""Cloned voices over HTTP: requests and responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from asr_serve.errors import MissingOption, OptionError
from asr_serve.protocols.form_fields import FormFields
from asr_serve.protocols.json_members import decode_json
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
    """Cloned voice."""

    name: str
    model: str
    """Model that was trained on it and speaks with it."""
    created: int
    """Unix seconds."""
    clips: int
    seconds: float
    """Seconds of speech that it was trained on."""
    start: str
    """Voice of the model that it was initialized from."""
    similarity: float | None
    """Cosine of synthesized speech with the recordings; null where not measured."""
    ceiling: float
    """Cosine of one half of the recordings with the other."""
    consent: Consent | None
    """Statement of its speaker; null for clients without an admin key."""
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
    """Error that ended a cloning."""

    code: str
    message: str


class Cloning(msgspec.Struct, frozen=True):
    """Cloning job: waiting, running or ended."""

    id: str
    name: str
    model: str
    state: CloningState
    progress: CloneProgress
    created: int
    """Time of the request in Unix seconds; the next two are those of start and end."""
    begun: int | None
    ended: int | None
    files: int
    ahead: int
    """Number of jobs that wait before it."""
    voice: ClonedVoice | None = None
    """Resulting voice."""
    clips: list[ClipReport] = []
    """Result for each clip, once known."""
    error: CloningError | None = None
    object: Literal["voice.cloning"] = "voice.cloning"


class Clonings(msgspec.Struct, frozen=True):
    data: list[Cloning]
    object: Literal["list"] = "list"


class RenameVoiceBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of PATCH."""

    name: str


class CloningForm(msgspec.Struct, frozen=True):
    """Request of a form."""

    name: str
    consent: Consent
    texts: str
    model: str | None
    minutes: float
    seed: int


def parse_cloning_form(sent: Mapping[str, Sequence[str]], files: int, by: str) -> CloningForm:
    """Parses a form with `files` recordings, sent by client `by`. Raises OptionError, MissingOption."""
    fields = FormFields(sent, FIELDS)
    consent = validated_consent(fields.text("consent", STATEMENT_CHARACTERS + 1_000), by)
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
        consent,
        fields.text("texts", MAX_TEXTS_CHARACTERS) or "",
        fields.text("model"),
        10.0 if minutes is None else minutes,
        int(seed or 0),
    )


def parse_rename_body(body: bytes) -> str:
    """Parses a body into the new name. Raises MalformedRequest, OptionError."""
    example = 'a body is like {"name": "another-name"}'
    return check_voice_name(decode_json(body, RenameVoiceBody, "the body cannot be read", example).name)


def cloned_voice_from_report(report: CloneReport) -> ClonedVoice:
    return ClonedVoice.of(report.card, admin=True)


def cloning_form_schema() -> dict[str, Any]:
    """JSON schema of the form."""
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
                "description": "Recordings of one speaker: about 20 of 3 to 12 s; longer ones are split at pauses.",
            },
            "texts": {
                "type": "string",
                "maxLength": MAX_TEXTS_CHARACTERS,
                "description": "Transcripts of the recordings: a line `NAME|TEXT` for each, or a JSON object. "
                "Recordings without one are recognized.",
            },
            "model": {
                "type": "string",
                "description": "Speech synthesis model to train. Default: the first that can clone voices.",
            },
            "minutes": {
                "type": "number",
                "minimum": 0.1,
                "maximum": MAX_TRAINING_MINUTES,
                "default": 10,
                "description": "Longest training time in minutes; it ends earlier when the loss no longer falls.",
            },
            "seed": {"type": "integer", "minimum": 0, "maximum": MAX_CLONING_SEED, "default": 0},
        },
        "required": ["name", "consent", FILES[0]],
        "additionalProperties": False,
    }


def _name() -> dict[str, Any]:
    return {"type": "string", "pattern": f"^{NAME.pattern}$", "description": "Name of the voice.", "examples": ["ada"]}


def rename_body_schema() -> dict[str, Any]:
    return {"type": "object", "properties": {"name": _name()}, "required": ["name"], "additionalProperties": False}


def cloned_voice_components() -> dict[str, Any]:
    """Schemas that others refer to, by name."""
    _, schemas = msgspec.json.schema_components(
        (ClonedVoice, ClonedVoices, Cloning, Clonings), ref_template="#/components/schemas/{name}"
    )
    return schemas
