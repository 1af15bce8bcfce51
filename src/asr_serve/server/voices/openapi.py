"""OpenAPI entries of /v1/voices."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from asr_serve.protocols import cloned_voices
from asr_serve.protocols.schemas.responses import ref
from asr_serve.server.openapi import AUTH_ERRORS, error_response_entry, response_entry
from asr_serve.voices.cloned_voice import EXAMPLE

OpenApi = dict[Any, Any]

_VOICE = {
    "name": "ada",
    "model": "fastpitch-en",
    "created": 1_790_000_000,
    "clips": 20,
    "seconds": 96.4,
    "start": "emma",
    "similarity": 0.82,
    "ceiling": 0.95,
    "consent": None,
    "object": "voice",
}
_CLONING = {
    "id": "clone_0123456789abcdef",
    "name": "ada",
    "model": "fastpitch-en",
    "state": "running",
    "progress": {"type": "progress", "stage": "learning", "share": 0.41, "held_out": 0.712, "left_s": 350.0},
    "created": 1_790_000_000,
    "begun": 1_790_000_002,
    "ended": None,
    "files": 20,
    "ahead": 0,
    "voice": None,
    "clips": [],
    "error": None,
    "object": "voice.cloning",
}
_ADMIN: OpenApi = {**AUTH_ERRORS, **error_response_entry(403, "Not with this key.")}
_NO_VOICE = error_response_entry(404, "No such voice.")
_UNKNOWN_CLONING = error_response_entry(404, "No such cloning, or not any more.")
_UPLOAD: OpenApi = {
    **_ADMIN,
    **error_response_entry(400, "A field or the audio is no good; `param` and `code` say which and why."),
    **error_response_entry(404, "No such model."),
    **error_response_entry(408, "The upload stood still."),
    **error_response_entry(413, "More bytes than allowed."),
    **error_response_entry(429, "Too many clonings wait.", Retry_After="Seconds."),
}


def _body(schema: OpenApi, media_type: str, example: OpenApi) -> OpenApi:
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema, "example": example}}}}


CLONE: OpenApi = {
    **response_entry(ref("Cloning"), "It is in the queue.", _UPLOAD, _CLONING, status=202),
    "openapi_extra": _body(
        cloned_voices.cloning_form_schema(),
        "multipart/form-data",
        {"name": "ada", "consent": EXAMPLE, "files": ["@1.wav", "@2.wav"]},
    ),
}
VOICES = response_entry(ref("ClonedVoices"), "The voices.", AUTH_ERRORS, {"data": [_VOICE], "object": "list"})
VOICE = response_entry(ref("ClonedVoice"), "The voice.", {**AUTH_ERRORS, **_NO_VOICE}, _VOICE)
DELETE = response_entry(ref("ClonedVoice"), "The deleted voice.", {**_ADMIN, **_NO_VOICE}, _VOICE)
RENAME: OpenApi = {
    **response_entry(
        ref("ClonedVoice"),
        "The voice.",
        {**_ADMIN, **_NO_VOICE, **error_response_entry(400, "The new name is none, or taken.")},
        _VOICE,
    ),
    "openapi_extra": _body(cloned_voices.rename_body_schema(), "application/json", {"name": "countess"}),
}
EXPORT = response_entry(
    {"type": "string", "format": "binary"}, "The zip.", {**_ADMIN, **_NO_VOICE}, media_type="application/zip"
)
JOBS = response_entry(ref("Clonings"), "The clonings.", _ADMIN, {"data": [_CLONING], "object": "list"})
JOB = response_entry(ref("Cloning"), "The cloning.", {**_ADMIN, **_UNKNOWN_CLONING}, _CLONING)
EVENTS: OpenApi = {
    "response_class": Response,
    "responses": {
        200: {
            "description": "Until it is over.",
            "content": {
                "text/event-stream": {
                    "itemSchema": {
                        "type": "object",
                        "properties": {
                            "data": {
                                "type": "string",
                                "contentMediaType": "application/json",
                                "contentSchema": ref("Cloning"),
                            }
                        },
                        "required": ["data"],
                    }
                }
            },
        },
        **_ADMIN,
        **_UNKNOWN_CLONING,
    },
}
