"""OpenAPI entries of /v1/files and /v1/batches."""

from __future__ import annotations

from typing import Any

from asr_serve.protocols.openai.batches import ENDPOINTS, MAX_EXPIRY_S, MIN_EXPIRY_S, UPLOAD_PURPOSES, WINDOW_PATTERN
from asr_serve.protocols.schemas.responses import Schema, ref
from asr_serve.server.openapi import AUTH_ERRORS, error_response_entry, response_entry

OpenApi = dict[Any, Any]

_FILE = {
    "id": "file-0123456789abcdef0123456789abcdef",
    "object": "file",
    "bytes": 182,
    "created_at": 1_790_000_000,
    "expires_at": 1_792_592_000,
    "filename": "lines.jsonl",
    "purpose": "batch",
    "status": "processed",
}
_BATCH = {
    "id": "batch_0123456789abcdef0123456789abcdef",
    "object": "batch",
    "endpoint": "/v1/audio/transcriptions",
    "errors": None,
    "input_file_id": _FILE["id"],
    "completion_window": "24h",
    "status": "in_progress",
    "output_file_id": None,
    "error_file_id": None,
    "created_at": 1_790_000_000,
    "in_progress_at": 1_790_000_001,
    "expires_at": 1_790_086_400,
    "finalizing_at": None,
    "completed_at": None,
    "failed_at": None,
    "expired_at": None,
    "cancelling_at": None,
    "cancelled_at": None,
    "request_counts": {"total": 1_000, "completed": 412, "failed": 1},
    "metadata": {"project": "archive"},
}
_BAD_QUERY = error_response_entry(400, "A parameter is no good.")
_UNKNOWN = error_response_entry(404, "No such file of this key, or not any more.")
_UNKNOWN_BATCH = error_response_entry(404, "No such batch of this key, or not any more.")
_FORM: Schema = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "Lines of a batch in JSONL, or audio."},
        "purpose": {
            "type": "string",
            "enum": list(UPLOAD_PURPOSES),
            "description": "`batch` for the lines of a batch; either for audio.",
        },
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": MIN_EXPIRY_S,
            "maximum": MAX_EXPIRY_S,
            "description": "Age at which it is deleted; at most the server's batch.keep_s.",
        },
    },
    "required": ["file", "purpose"],
    "dependentRequired": {
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
    "additionalProperties": False,
}
_BODY: Schema = {
    "type": "object",
    "properties": {
        "input_file_id": {"type": "string", "minLength": 1, "description": "File with the purpose `batch`."},
        "endpoint": {"type": "string", "enum": list(ENDPOINTS), "description": "`url` of every line."},
        "completion_window": {
            "type": "string",
            "pattern": WINDOW_PATTERN,
            "description": "Time after which open lines are given up: a number with s, m, h or d, up to 30d.",
        },
        "metadata": {
            "type": ["object", "null"],
            "maxProperties": 16,
            "additionalProperties": {"type": "string", "maxLength": 512},
        },
        "output_expires_after": {
            "type": ["object", "null"],
            "properties": {
                "anchor": {"type": "string", "enum": ["created_at"]},
                "seconds": {"type": "integer", "minimum": MIN_EXPIRY_S, "maximum": MAX_EXPIRY_S},
            },
            "required": ["anchor", "seconds"],
            "additionalProperties": False,
        },
    },
    "required": ["input_file_id", "endpoint", "completion_window"],
    "additionalProperties": False,
}


def _parameters(**schemas: Schema) -> OpenApi:
    return {
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": schema} for name, schema in schemas.items()
        ]
    }


def _page(example: OpenApi) -> OpenApi:
    return {"data": [example], "first_id": example["id"], "last_id": example["id"], "has_more": False, "object": "list"}


_AFTER: Schema = {"type": "string", "description": "Id of the last one of the page before."}

UPLOAD: OpenApi = {
    **response_entry(
        ref("FileObject"),
        "It is on disk.",
        {
            **AUTH_ERRORS,
            **error_response_entry(400, "A field is no good; `param` and `code` say which and why."),
            **error_response_entry(408, "The upload stood still."),
            **error_response_entry(413, "More bytes than allowed, in this file or in all of them."),
        },
        _FILE,
    ),
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {"schema": _FORM, "example": {"file": "@lines.jsonl", "purpose": "batch"}}
            },
        }
    },
}
FILES: OpenApi = {
    **response_entry(ref("FileList"), "The files.", {**AUTH_ERRORS, **_BAD_QUERY, **_UNKNOWN}, _page(_FILE)),
    "openapi_extra": _parameters(
        limit={"type": "integer", "minimum": 1, "maximum": 10_000},
        after=_AFTER,
        order={"type": "string", "enum": ["asc", "desc"]},
        purpose={"type": "string", "enum": [*UPLOAD_PURPOSES, "batch_output"]},
    ),
}
FILE = response_entry(ref("FileObject"), "The file.", {**AUTH_ERRORS, **_UNKNOWN}, _FILE)
CONTENT = response_entry(
    {"type": "string", "format": "binary"}, "Its bytes.", {**AUTH_ERRORS, **_UNKNOWN}, media_type="*/*"
)
DELETE = response_entry(
    ref("FileDeleted"),
    "It is deleted.",
    {**AUTH_ERRORS, **_UNKNOWN, **error_response_entry(409, "A batch reads it.")},
    {"id": _FILE["id"], "object": "file", "deleted": True},
)
CREATE: OpenApi = {
    **response_entry(
        ref("Batch"),
        "It is in the queue.",
        {
            **AUTH_ERRORS,
            **error_response_entry(400, "A member is no good; `param` and `code` say which and why."),
            **_UNKNOWN,
            **error_response_entry(408, "The body did not come."),
            **error_response_entry(429, "Too many batches of this key have not ended.", Retry_After="Seconds."),
        },
        {**_BATCH, "status": "validating", "in_progress_at": None},
    ),
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": _BODY,
                    "example": {
                        "input_file_id": _FILE["id"],
                        "endpoint": "/v1/audio/transcriptions",
                        "completion_window": "24h",
                    },
                }
            },
        }
    },
}
BATCHES: OpenApi = {
    **response_entry(ref("BatchList"), "The batches.", {**AUTH_ERRORS, **_BAD_QUERY, **_UNKNOWN_BATCH}, _page(_BATCH)),
    "openapi_extra": _parameters(limit={"type": "integer", "minimum": 1, "maximum": 100}, after=_AFTER),
}
BATCH = response_entry(ref("Batch"), "The batch.", {**AUTH_ERRORS, **_UNKNOWN_BATCH}, _BATCH)
CANCEL = response_entry(
    ref("Batch"),
    "The batch.",
    {**AUTH_ERRORS, **_UNKNOWN_BATCH, **error_response_entry(409, "It has ended.")},
    {**_BATCH, "status": "cancelling", "cancelling_at": 1_790_000_100},
)
