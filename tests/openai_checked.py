"""OpenAI Realtime's events, held against the types of the unmodified SDK."""

from __future__ import annotations

import typing
from typing import Any

from openai.types import realtime
from openai.types.beta import realtime as before
from openai.types.beta.realtime.transcription_session import TranscriptionSession
from pydantic import BaseModel

PARTIAL = "conversation.item.input_audio_transcription.partial"
OURS = {"retry_after_ms", "id", "object", "expires_at"}
"""Members that the SDK's types have not; the last three OpenAI sends, too."""


def _models(union: Any) -> dict[str, type[BaseModel]]:
    members = typing.get_args(typing.get_args(union)[0])
    return {typing.get_args(model.model_fields["type"].annotation)[0]: model for model in members}


NOW, BEFORE = _models(realtime.RealtimeServerEvent), _models(before.RealtimeServerEvent)


def checked(event: dict[str, Any], *, beta: bool = False) -> dict[str, Any]:
    """The event, once it has turned out to be what the SDK's types say, all members known to them."""
    kind, session = event["type"], event.get("session")
    assert isinstance(event["event_id"], str)
    if kind == PARTIAL:
        assert set(event) == {"type", "event_id", "item_id", "content_index", "transcript"}
        return event
    if beta and session is not None:
        # Of what is created the SDK has no type, and to both the server gives members that it has not.
        assert kind in ("transcription_session.created", "transcription_session.updated")
        known = set(TranscriptionSession.model_fields) | {"id", "object", "expires_at", "include"}
        assert set(session) <= known | {"input_audio_noise_reduction"}
        TranscriptionSession.model_validate(session)
        return event
    _expect_known((BEFORE if beta else NOW)[kind].model_validate(event))
    return event


def _expect_known(value: Any) -> None:
    if isinstance(value, BaseModel):
        assert set(value.model_extra or ()) <= OURS, value
        for name in value.model_fields_set & set(type(value).model_fields):
            _expect_known(getattr(value, name))
    elif isinstance(value, list):
        for each in value:
            _expect_known(each)
