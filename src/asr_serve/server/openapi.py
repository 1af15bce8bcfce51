"""OpenAPI document: what FastAPI cannot infer, because the routes read their bodies themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

from asr_serve.evaluation.reader import EvaluationClips, EvaluationList
from asr_serve.protocols import cloned_voices
from asr_serve.protocols.deepgram.listen_query import RAW_ENCODINGS
from asr_serve.protocols.deepgram.speak import CONTAINERS, UPLOAD_ENCODINGS
from asr_serve.protocols.key_status import key_status_components
from asr_serve.protocols.openai.transcription_form import RESPONSE_FORMATS
from asr_serve.protocols.schemas import forms as heard
from asr_serve.protocols.schemas import responses
from asr_serve.protocols.schemas import speech as spoken
from asr_serve.protocols.schemas.responses import Schema, ref

OpenApi = dict[Any, Any]

DESCRIPTION = """\
Speech in, text out, and the other way round. Clients of OpenAI's audio API, of FunASR's `POST /asr` and of
whisper.cpp's `POST /inference` work as they are. `POST /asr` with `audio_file` and options in the query is
whisper-asr-webservice's.

Errors have OpenAI's shape on every route; every answer carries `x-request-id`.

WebSockets are beyond what this document can describe: FunASR's at `/` and `/ws`, OpenAI's at `/v1/realtime`, ours
at `/v1/stream` and, to speak, at `/v1/audio/speech/stream`, Deepgram's at `/v1/listen` and `/v1/speak`. So is
`POST /v1/stream`, whose answer comes while its body is sent: see docs/protocols.md.
"""
TAGS = [
    {"name": "Transcription", "description": "Audio to text."},
    {"name": "Speech", "description": "Text to audio."},
    {"name": "Batches", "description": "Files, and batches of requests that wait for room. They outlive the server."},
    {"name": "Voices", "description": "Voices that were cloned, and cloning them. For administrators."},
    {"name": "Live", "description": "Transcription of live audio."},
    {"name": "Models", "description": "Models of this server."},
    {"name": "Server", "description": "How it is."},
]

_JSON = "application/json"
_SEGMENT = {
    "id": 0,
    "seek": 0,
    "start": 0.0,
    "end": 5.31,
    "text": "It was the best of times.",
    "tokens": [739, 471, 278, 1900, 310, 3064, 29889],
    "temperature": 0.0,
    "avg_logprob": -0.08,
    "compression_ratio": 0.84,
    "no_speech_prob": 0.0,
}
_USAGE = {"type": "duration", "seconds": 6}


def error_response_entry(status: int, description: str, **headers: str) -> OpenApi:
    """Entry of one error status. `headers`: name -> description."""
    entry: OpenApi = {"description": description, "content": {_JSON: {"schema": ref("ErrorAnswer")}}}
    if headers:
        entry["headers"] = {
            name.replace("_", "-"): {"description": text, "schema": {"type": "string"}}
            for name, text in headers.items()
        }
    return {status: entry}


AUTH_ERRORS: OpenApi = error_response_entry(
    401, "No key, or a wrong one.", WWW_Authenticate="`Bearer`"
) | error_response_entry(503, "The server is going down, or an engine is restarting.", Retry_After="Seconds.")
WORK_ERRORS: OpenApi = {
    **AUTH_ERRORS,
    **error_response_entry(400, "A field or the audio is no good; `param` and `code` say which and why."),
    **error_response_entry(404, "No such model, or it is not loaded."),
    **error_response_entry(408, "The upload stood still."),
    **error_response_entry(413, "More bytes than allowed."),
    **error_response_entry(429, "Full, or too many requests with this key.", Retry_After="Seconds."),
    **error_response_entry(500, "Our failure; the message has the request's id."),
}


def _route(form: Schema, example: OpenApi, answers: OpenApi) -> OpenApi:
    """Arguments of a route that takes `form`. `answers`: content type -> schema and example of the response."""
    body = {"schema": form, "example": {form["required"][0]: "@audio.wav", **example}}
    return {
        "response_class": Response,
        "responses": {200: {"description": "The text.", "content": answers}, **WORK_ERRORS},
        "openapi_extra": {"requestBody": {"required": True, "content": {"multipart/form-data": body}}},
    }


def _texts() -> OpenApi:
    examples = {
        "text": "It was the best of times.\n",
        "srt": "1\n00:00:00,000 --> 00:00:05,310\nIt was the best of times.\n",
        "vtt": "WEBVTT\n\n00:00:00.000 --> 00:00:05.310\nIt was the best of times.\n",
    }
    return {
        RESPONSE_FORMATS[form].partition(";")[0]: {"schema": {"type": "string"}, "example": text}
        for form, text in examples.items()
    }


def _lines() -> OpenApi:
    """Response of one JSON object per line."""
    transcript = {"key": "audio", "text": _SEGMENT["text"], "language": "en", "duration": 5.61, "segments": []}
    return {RESPONSE_FORMATS["jsonl"]: {"schema": {"type": "string"}, "example": f"{json.dumps(transcript)}\n"}}


TRANSCRIPTIONS = _route(
    heard.transcription_form_schema(),
    {"model": "moonshine-tiny-en", "response_format": "verbose_json"},
    {
        _JSON: {
            "schema": {"anyOf": [ref("Transcription"), ref("VerboseTranscription"), ref("Diarized")]},
            "examples": {
                "json": {"value": {"text": _SEGMENT["text"], "usage": _USAGE}},
                "verbose_json": {
                    "value": {
                        "task": "transcribe",
                        "language": "en",
                        "duration": 5.61,
                        "text": _SEGMENT["text"],
                        "segments": [_SEGMENT],
                        "usage": _USAGE,
                    }
                },
            },
        },
        **_texts(),
        **_lines(),
        "text/event-stream": {
            "itemSchema": responses.transcription_event_schema(),
            "example": 'data: {"type":"transcript.text.delta","delta":"It was the best of times."}\n\n'
            'data: {"type":"transcript.text.done","text":"It was the best of times."}\n\n',
        },
    },
)
TRANSLATIONS = _route(
    heard.translation_form_schema(),
    {"model": "whisper-base", "response_format": "text"},
    {
        _JSON: {
            "schema": {"anyOf": [ref("Transcription"), ref("VerboseTranscription")]},
            "example": {"text": _SEGMENT["text"], "usage": _USAGE},
        },
        **_texts(),
    },
)
ASR = _route(
    heard.asr_form_schema(),
    {"language": "English"},
    {
        _JSON: {
            "schema": ref("AsrAnswer"),
            "example": {
                "text": _SEGMENT["text"],
                "segments": [{"text": _SEGMENT["text"], "start": 0.0, "end": 5.31}],
                "duration": 5.61,
                "processing_time": 0.094,
                "rtf": 0.0168,
            },
        }
    },
)
INFERENCE = _route(
    heard.inference_form_schema(),
    {"response_format": "json"},
    {
        _JSON: {
            "schema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
            "example": {"text": f"{_SEGMENT['text']}\n"},
        },
        **_texts(),
    },
)
DETECT_LANGUAGE = _route(
    heard.detection_form_schema(),
    {},
    {
        _JSON: {
            "schema": {
                "type": "object",
                "properties": {
                    "detected_language": {"type": "string", "description": "Its English name."},
                    "language_code": {"type": "string", "description": "ISO 639-1."},
                    "confidence": {"type": "number", "minimum": 0, "maximum": 1},
                },
                "required": ["detected_language", "language_code", "confidence"],
            },
            "example": {"detected_language": "english", "language_code": "en", "confidence": 0.9921},
        }
    },
)

SPEECH_ERRORS: OpenApi = {
    **WORK_ERRORS,
    **error_response_entry(400, "A member or the text is no good; `param` and `code` say which and why."),
    **error_response_entry(404, "No such model, or it is not loaded; or nothing speaks here."),
}
del SPEECH_ERRORS[413]


def speech_operation(most_characters: int) -> OpenApi:
    """Arguments of the speech synthesis route."""
    body = {
        "schema": spoken.speech_body_schema(most_characters),
        "example": {"model": "tts-1", "voice": "alloy", "input": "Ever tried. Ever failed. No matter."},
    }
    return {
        "response_class": Response,
        "responses": {200: {"description": "The sound.", "content": spoken.speech_response_content()}, **SPEECH_ERRORS},
        "openapi_extra": {"requestBody": {"required": True, "content": {_JSON: body}}},
    }


def _parameters(**schemas: Schema) -> list[OpenApi]:
    """Parameters of a query."""
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in schemas.items()]


_NAME: Schema = {"type": "string", "maxLength": 200}
_FLAG: Schema = {"type": "boolean"}
_RATE: Schema = {"type": "integer", "minimum": 8_000, "maximum": 48_000}
LISTEN: OpenApi = {
    "response_class": Response,
    "responses": {
        200: {"description": "The text.", "content": {_JSON: {"schema": ref("DeepgramAnswer")}}},
        **WORK_ERRORS,
        **error_response_entry(415, "A form came: the body is the audio."),
    },
    "openapi_extra": {
        "parameters": _parameters(
            model=_NAME,
            language=_NAME,
            detect_language=_FLAG,
            punctuate=_FLAG,
            smart_format=_FLAG,
            numerals=_FLAG,
            diarize=_FLAG,
            utterances=_FLAG,
            paragraphs=_FLAG,
            keyterm=_NAME,
            encoding={"enum": list(RAW_ENCODINGS)},
            sample_rate=_RATE,
        ),
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        },
    },
}
SPEAK: OpenApi = {
    "response_class": Response,
    "responses": {200: {"description": "The sound.", "content": spoken.speech_response_content()}, **SPEECH_ERRORS},
    "openapi_extra": {
        "parameters": _parameters(
            model=_NAME,
            encoding={"enum": list(UPLOAD_ENCODINGS)},
            sample_rate=_RATE,
            container={"enum": list(CONTAINERS)},
        ),
        "requestBody": {
            "required": True,
            "content": {
                _JSON: {
                    "schema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
                    "example": {"text": "Ever tried. Ever failed. No matter."},
                }
            },
        },
    },
}


LIVE_ERRORS: OpenApi = {
    **AUTH_ERRORS,
    **error_response_entry(400, "The body is no JSON of that form, or the session takes no more audio."),
    **error_response_entry(408, "The body did not come."),
    **error_response_entry(410, "No such session of this key's, or not any more."),
}
_ID: Schema = {"type": "string", "maxLength": 200, "description": "Comes back with `flushed`. Default: one of ours."}
_NAMED: Schema = {"type": "object", "properties": {"id": _ID}}


def response_entry(
    schema: Schema,
    description: str,
    refusals: OpenApi,
    example: object = None,
    media_type: str = _JSON,
    status: int = 200,
) -> OpenApi:
    """Arguments of a route with one kind of response."""
    content: OpenApi = {"schema": schema}
    if example is not None:
        content["example"] = example
    return {
        "response_class": Response,
        "responses": {status: {"description": description, "content": {media_type: content}}, **refusals},
    }


FLUSH: OpenApi = {
    **response_entry(
        {**_NAMED, "required": ["id"]},
        "`flushed` will come, with this id.",
        {
            **LIVE_ERRORS,
            **error_response_entry(429, "Too many flushes of this session are under way.", Retry_After="Seconds."),
        },
        {"id": "1"},
        status=202,
    ),
    "openapi_extra": {"requestBody": {"required": False, "content": {_JSON: {"schema": _NAMED}}}},
}
END = response_entry({"type": "object"}, "`end` will come.", LIVE_ERRORS, {}, status=202)
VOICES: OpenApi = response_entry(
    ref("VoiceList"),
    "The voices.",
    AUTH_ERRORS,
    {"voices": [{"id": "heart", "name": "heart", "model": "hibari", "default": True, "cloned": False}]},
)


def openapi_builder(
    app: FastAPI, open_paths: Collection[str], *, keys: bool, strict_fields: bool
) -> Callable[[], OpenApi]:
    """Builder for `app.openapi`. `keys`: whether API keys are required, except on `open_paths`. `strict_fields`:
    whether unknown fields are refused, and not ignored."""

    def document() -> OpenApi:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=DESCRIPTION, tags=TAGS, routes=app.routes
            )
            components = schema.setdefault("components", {})
            components["schemas"] = {
                **responses.response_components(),
                **spoken.speech_components(),
                **cloned_voices.cloned_voice_components(),
                **key_status_components(),
                **msgspec.json.schema_components(
                    (EvaluationList, EvaluationClips), ref_template="#/components/schemas/{name}"
                )[1],
            }
            components["securitySchemes"] = {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A key of this server; admin keys are good for everything. "
                    + ("Needed." if keys else "This server asks for none, except to load and unload models."),
                }
            }
            for path, methods in schema["paths"].items():
                for operation in methods.values():
                    operation["responses"].pop("422", None)  # FastAPI's own format, which no route returns
                    if "requestBody" in operation and not strict_fields:
                        operation["requestBody"] = _with_any_properties(operation["requestBody"])
                    if path not in open_paths:
                        required = keys or "403" in operation["responses"]
                        operation["security"] = [{"key": []}] if required else [{"key": []}, {}]
            app.openapi_schema = schema
        return app.openapi_schema

    return document


def _with_any_properties(schema: Any) -> Any:
    """Copy of a schema whose objects may have further properties."""
    if isinstance(schema, list):
        return [_with_any_properties(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _with_any_properties(value)
        for name, value in schema.items()
        if (name, value) != ("additionalProperties", False)
    }
