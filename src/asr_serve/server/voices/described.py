"""The OpenAPI document of /v1/voices."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from asr_serve.protocols import voices
from asr_serve.protocols.schemas import ref
from asr_serve.server.documents import KEY_REFUSALS, answer, refusal
from asr_serve.voices.cloned_voice import EXAMPLE

Document = dict[Any, Any]

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
_ADMIN: Document = {**KEY_REFUSALS, **refusal(403, "Not with this key.")}
_NO_VOICE = refusal(404, "No such voice.")
_NO_JOB = refusal(404, "No such cloning, or not any more.")
_UPLOAD: Document = {
    **_ADMIN,
    **refusal(400, "A field or the audio is no good; `param` and `code` say which and why."),
    **refusal(404, "No such model."),
    **refusal(408, "The upload stood still."),
    **refusal(413, "More bytes than allowed."),
    **refusal(429, "Too many clonings wait.", Retry_After="Seconds."),
}


def _body(schema: Document, media_type: str, example: Document) -> Document:
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema, "example": example}}}}


CLONE: Document = {
    "response_class": Response,
    "responses": {
        202: {
            "description": "It is in the queue.",
            "content": {"application/json": {"schema": ref("Cloning"), "example": _CLONING}},
        },
        **_UPLOAD,
    },
    "openapi_extra": _body(
        voices.form(),
        "multipart/form-data",
        {"name": "ada", "consent": EXAMPLE, "files": ["@1.wav", "@2.wav"]},
    ),
}
VOICES = answer(ref("ClonedVoices"), "The voices.", KEY_REFUSALS, {"data": [_VOICE], "object": "list"})
VOICE = answer(ref("ClonedVoice"), "The voice.", {**KEY_REFUSALS, **_NO_VOICE}, _VOICE)
DELETE = answer(ref("ClonedVoice"), "What it was.", {**_ADMIN, **_NO_VOICE}, _VOICE)
RENAME: Document = {
    **answer(
        ref("ClonedVoice"),
        "The voice.",
        {**_ADMIN, **_NO_VOICE, **refusal(400, "The new name is none, or taken.")},
        _VOICE,
    ),
    "openapi_extra": _body(voices.rename_body(), "application/json", {"name": "countess"}),
}
EXPORT = answer(
    {"type": "string", "format": "binary"},
    "The zip.",
    {**_ADMIN, **_NO_VOICE},
    media_type="application/zip",
)
JOBS = answer(ref("Clonings"), "The clonings.", _ADMIN, {"data": [_CLONING], "object": "list"})
JOB = answer(ref("Cloning"), "The cloning.", {**_ADMIN, **_NO_JOB}, _CLONING)
EVENTS: Document = {
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
        **_NO_JOB,
    },
}
