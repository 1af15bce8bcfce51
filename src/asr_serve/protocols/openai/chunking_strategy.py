"""Segmentation of recordings: fields of voice activity, ours and OpenAI's, to options."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from asr_serve.audio.silence_schedule import SilenceSchedule
from asr_serve.errors import OptionError
from asr_serve.protocols.form_fields import FormFields, expect_choice, quote_for_message

STRATEGY = "chunking_strategy"
STRATEGY_MEMBERS = ("type", "threshold", "prefix_padding_ms", "silence_duration_ms")
MAX_SILENCE_MS, MAX_PREFIX_PADDING_MS = 60_000, 10_000
CHUNKING_FIELDS = (STRATEGY, *(f"{STRATEGY}[{member}]" for member in STRATEGY_MEMBERS))
SEGMENTATION_FIELDS = ("vad", "max_segment_ms", "silence_schedule")


def parse_segmentation_options(fields: FormFields, *, complete: bool) -> dict[str, Any]:
    """Arguments of TranscribeOptions. While the form is not `complete`, errors that a later field can correct are
    passed over. Raises OptionError."""
    vad = fields.flag("vad")
    threshold, pad_ms, schedule = _strategy(fields, complete)
    if "silence_schedule" in fields:
        if schedule is not None:
            raise OptionError(
                f"silence_schedule came beside {STRATEGY}'s silence_duration_ms",
                "one of them says when a segment ends",
                param="silence_schedule",
            )
        schedule = _schedule(fields.text("silence_schedule") or "")
    if vad is False and (threshold, pad_ms, schedule) != (None, None, None):
        raise OptionError("vad=false came beside options of voice activity", "one or the other", param="vad")
    longest_ms = fields.integer("max_segment_ms", 1_000, 86_400_000)
    if pad_ms is not None and longest_ms is not None and 4 * pad_ms > longest_ms:
        raise OptionError(
            f"{STRATEGY}'s prefix_padding_ms={pad_ms} with max_segment_ms={longest_ms}",
            "padding may be a quarter of a segment",
            param=f"{STRATEGY}[prefix_padding_ms]",
        )
    return {
        "vad": vad is not False,
        "silence_schedule": schedule,
        "max_segment_ms": longest_ms,
        "threshold": threshold,
        "pad_before_ms": pad_ms,
    }


def _schedule(text: str) -> SilenceSchedule:
    try:
        return SilenceSchedule.from_text(text)
    except OptionError as error:
        raise OptionError(error.came, error.allowed, error.todo, param="silence_schedule") from None


def _strategy(fields: FormFields, complete: bool) -> tuple[float | None, int | None, SilenceSchedule | None]:
    """Threshold, padding before speech in ms, and schedule of the chunking strategy; None: our default."""
    members = [f"{STRATEGY}[{member}]" for member in STRATEGY_MEMBERS]
    if any(name in fields for name in members):
        if STRATEGY in fields:
            raise OptionError(f"{STRATEGY} came as a whole and in parts", "one or the other", param=STRATEGY)
    else:
        text = fields.text(STRATEGY)
        if text is None or text == "auto":
            return None, None, None
        fields = FormFields(_members(text), members)
    kind, threshold, pad, silence = members
    if kind in fields or complete:
        expect_choice(kind, fields.text(kind) or "", ["server_vad"])
    silence_ms = fields.integer(silence, 0, MAX_SILENCE_MS)
    return (
        fields.number(threshold, 0.001, 1),
        fields.integer(pad, 0, MAX_PREFIX_PADDING_MS),
        None if silence_ms is None else SilenceSchedule(((math.inf, silence_ms),)),
    )


def _members(text: str) -> dict[str, list[str]]:
    """Members of `{"type": "server_vad", "threshold": 0.4}`, under their names in a form."""
    try:
        members = msgspec.json.decode(text, type=dict[str, str | int | float])
    except msgspec.MsgspecError:
        raise OptionError(
            f"{STRATEGY}={quote_for_message(text)}",
            'auto, or {"type": "server_vad"} with threshold, prefix_padding_ms, silence_duration_ms',
            param=STRATEGY,
        ) from None
    return {f"{STRATEGY}[{name}]": [str(value)] for name, value in members.items()}
