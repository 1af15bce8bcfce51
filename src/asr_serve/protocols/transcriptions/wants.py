"""What may be wanted beside the text, under the names that OpenAI's route and FunASR's share."""

from __future__ import annotations

from typing import Any

from asr_serve.errors import OptionError
from asr_serve.pipelines.options import MAX_SPEAKERS, SPEAKER_COUNT_FIELDS, check_speakers_not_disabled
from asr_serve.protocols.fields import Fields

MOST_HOTWORDS, HOTWORDS_CHARACTERS = 10_000, 1 << 20
"""What a form has room for. What a model takes of it, pipelines say."""
FIELDS = ("hotwords", "spk", *SPEAKER_COUNT_FIELDS, "itn")
"""Those of all these. `spk` and `hotwords` are FunASR's names, the others ours."""


def hotwords(fields: Fields) -> tuple[str, ...]:
    """Between commas, each with its weight where it has one: `Ada,Babbage:2`."""
    return fields.words("hotwords", HOTWORDS_CHARACTERS)


def speakers(fields: Fields, *, complete: bool, implied: bool = False) -> dict[str, Any]:
    """Members of TranscribeOptions. `implied`: nobody need say `spk`, as beside a number. Raises OptionError."""
    wanted = fields.flag("spk")
    if implied and wanted is False:
        raise OptionError("spk=false with a response_format that tells speakers", "true, or none", param="spk")
    found: dict[str, Any] = {name: fields.whole(name, 1, MAX_SPEAKERS) for name in SPEAKER_COUNT_FIELDS}
    check_speakers_not_disabled({"spk": wanted, **found}, "spk")
    if wanted or implied or any(found.values()):
        return {"speakers": True, **found}
    return {}


def itn(fields: Fields) -> bool:
    """Whether numbers, dates and money are written as one writes them."""
    return fields.flag("itn") or False
