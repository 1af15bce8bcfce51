"""What may be wanted beside the text, under the names that OpenAI's route and FunASR's share."""

from __future__ import annotations

from typing import Any

from asr_serve.errors import OptionError
from asr_serve.pipelines.options import MAX_SPEAKERS, SPEAKER_COUNT_FIELDS, check_speakers_not_disabled
from asr_serve.protocols.form_fields import FormFields

MAX_HOTWORDS, MAX_HOTWORDS_CHARACTERS = 10_000, 1 << 20
"""What a form has room for. What a model takes of it, pipelines say."""
FIELDS = ("hotwords", "spk", *SPEAKER_COUNT_FIELDS, "itn")
"""Those of all these. `spk` and `hotwords` are FunASR's names, the others ours."""


def parse_hotwords(fields: FormFields) -> tuple[str, ...]:
    """Between commas, each with its weight where it has one: `Ada,Babbage:2`."""
    return fields.word_list("hotwords", MAX_HOTWORDS_CHARACTERS)


def parse_speaker_options(fields: FormFields, *, complete: bool, implied: bool = False) -> dict[str, Any]:
    """Members of TranscribeOptions. `implied`: nobody need say `spk`, as beside a number. Raises OptionError."""
    wanted = fields.flag("spk")
    if implied and wanted is False:
        raise OptionError("spk=false with a response_format that tells speakers", "true, or none", param="spk")
    found: dict[str, Any] = {name: fields.integer(name, 1, MAX_SPEAKERS) for name in SPEAKER_COUNT_FIELDS}
    check_speakers_not_disabled({"spk": wanted, **found}, "spk")
    if wanted or implied or any(found.values()):
        return {"speakers": True, **found}
    return {}


def parse_itn(fields: FormFields) -> bool:
    """Whether numbers, dates and money are written as one writes them."""
    return fields.flag("itn") or False
