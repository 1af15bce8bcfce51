"""Fields of optional results, under the names that OpenAI's route and FunASR's share."""

from __future__ import annotations

from typing import Any

from asr_serve.errors import OptionError
from asr_serve.pipelines.options import (
    LANGUAGE_MODEL_WEIGHTS,
    MAX_SPEAKERS,
    SPEAKER_COUNT_FIELDS,
    check_speakers_not_disabled,
)
from asr_serve.protocols.form_fields import FormFields

MAX_HOTWORDS, MAX_HOTWORDS_CHARACTERS = 10_000, 1 << 20
"""Limits of a form. The limits of a model are up to the pipelines."""
MAX_NAME_CHARACTERS = 200
FIELDS = ("hotwords", "spk", *SPEAKER_COUNT_FIELDS, "itn", "language_model", "language_model_weight")
"""All fields of this file. `spk` and `hotwords` are FunASR's names, the others ours."""


def parse_hotwords(fields: FormFields) -> tuple[str, ...]:
    """Parses words separated by commas, each with an optional weight: `Ada,Babbage:2`."""
    return fields.word_list("hotwords", MAX_HOTWORDS_CHARACTERS)


def parse_language_model(fields: FormFields, *, complete: bool) -> dict[str, Any]:
    """Arguments of TranscribeOptions and ListenOptions. Raises OptionError."""
    name = fields.text("language_model", MAX_NAME_CHARACTERS) or ""
    weight = fields.number("language_model_weight", *LANGUAGE_MODEL_WEIGHTS)
    return {"language_model": name, "language_model_weight": weight} if complete else {}


def parse_speaker_options(fields: FormFields, *, complete: bool, implied: bool = False) -> dict[str, Any]:
    """Arguments of TranscribeOptions. `implied`: `spk` may be absent, as with a count. Raises OptionError."""
    spk = fields.flag("spk")
    if implied and spk is False:
        raise OptionError("spk=false with a response_format that tells speakers", "true, or none", param="spk")
    counts: dict[str, Any] = {name: fields.integer(name, 1, MAX_SPEAKERS) for name in SPEAKER_COUNT_FIELDS}
    check_speakers_not_disabled({"spk": spk, **counts}, "spk")
    if spk or implied or any(counts.values()):
        return {"speakers": True, **counts}
    return {}


def parse_itn(fields: FormFields) -> bool | None:
    """Returns whether numbers, dates and money get their written form; None: as the model writes."""
    return fields.flag("itn")
