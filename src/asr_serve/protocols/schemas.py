"""JSON schemas of forms and answers, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from asr_serve.decoding.attention import MOST_BEAMS
from asr_serve.pipelines.options import LongForm
from asr_serve.pipelines.prompts import MOST_CHARACTERS
from asr_serve.protocols import funasr, openai, openai_models
from asr_serve.protocols.openai import (
    FORMATS,
    LONGEST_MS,
    LONGEST_PADDING_MS,
    SPEAKERS,
    STRATEGY,
    TRANSLATION_FIELDS,
)

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_WHOLE: Schema = {"type": "integer"}
_FILE: Schema = {
    "type": "string",
    "format": "binary",
    "description": "The audio: wav, flac, mp3, m4a, ogg, opus, webm and whatever else ffmpeg reads. "
    "Sent as a file, with a filename; never a path or an address. It is heard while it arrives.",
}
_ONLY_SOME = "For models that `/v1/models` lists with `prompts`; others refuse it unless it is empty."


def components() -> dict[str, Schema]:
    """Schemas that others refer to, by name."""
    _, found = msgspec.json.schema_components(
        (
            openai.Transcription,
            openai.TextDelta,
            openai.TextDone,
            openai.ErrorAnswer,
            openai_models.ModelEntry,
            openai_models.ModelList,
            openai_models.ModelRenewal,
            funasr.AsrAnswer,
        ),
        ref_template="#/components/schemas/{name}",
    )
    return {**found, "VerboseTranscription": _verbose()}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def server_sent() -> Schema:
    """One event of a stream."""
    failed = {"type": "object", "properties": {"type": {"enum": ["error"]}, "error": ref("Problem")}}
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [ref("TextDelta"), ref("TextDone"), {**failed, "required": ["type", "error"]}]},
    }
    return {"type": "object", "properties": {"data": data, "event": _TEXT}, "required": ["data"]}


def openai_form() -> Schema:
    return _form(_openai_fields())


def translation_form() -> Schema:
    fields = _openai_fields()
    return _form({name: fields[name] for name in ("file", *TRANSLATION_FIELDS)})


def _openai_fields() -> dict[str, Schema]:
    return {
        "file": _FILE,
        "model": {"type": "string", "description": "A model, or an alias of one. Default: the server's."},
        "language": _language(),
        "response_format": {
            "type": "string",
            "enum": list(FORMATS),
            "default": "json",
            "description": f"`{SPEAKERS}` is refused: no model here tells speakers apart.",
        },
        "temperature": {
            **_NUMBER,
            "minimum": 0,
            "maximum": 1,
            "default": 0,
            "description": "0: greedy, and sampled at rising temperatures where that is improbable. "
            "Above 0: sampled at exactly this temperature.",
        },
        "stream": {
            "type": "boolean",
            "default": False,
            "description": "Send text as server-sent events while the audio is heard; with the fields before the "
            "file, while it still arrives. For response_format json and text.",
        },
        "timestamp_granularities[]": {
            "type": "array",
            "items": {"type": "string", "enum": ["segment"]},
            "description": "With response_format=verbose_json. `word` is refused: no model here knows.",
        },
        "include[]": {
            "type": "array",
            "items": {"type": "string", "enum": ["logprobs"]},
            "description": "With response_format=json.",
        },
        STRATEGY: {
            "type": "string",
            "description": '`auto`, or `{"type": "server_vad", "threshold": 0.5, "prefix_padding_ms": 250, '
            '"silence_duration_ms": 800}`; or its members, each in a field of its own.',
            "examples": ["auto", '{"type": "server_vad", "silence_duration_ms": 800}'],
            "pattern": '^(auto|\\{.*"type".*\\})$',
        },
        f"{STRATEGY}[type]": {"type": "string", "enum": ["server_vad"]},
        f"{STRATEGY}[threshold]": {
            **_NUMBER,
            "minimum": 0.001,
            "maximum": 1,
            "description": "Probability at which sound counts as speech.",
        },
        f"{STRATEGY}[prefix_padding_ms]": _ms(
            "Audio before speech that belongs to a segment; up to a quarter of max_segment_ms.", LONGEST_PADDING_MS
        ),
        f"{STRATEGY}[silence_duration_ms]": _ms("Silence that ends a segment."),
        "vad": {
            "type": "boolean",
            "default": True,
            "description": "Ours. False: every sample is speech, cut only where the model's limit demands.",
        },
        "max_segment_ms": {
            **_WHOLE,
            "minimum": 1_000,
            "description": "Ours. The longest segment, up to the model's own limit.",
        },
        "silence_schedule": {
            "type": "string",
            "description": "Ours. The silence that ends a segment, by its length: `5000:1500,20000:800,inf:300`.",
            "examples": ["5000:1500,20000:800,inf:300"],
            "pattern": "^([0-9]+:[0-9]+,)*inf:[0-9]+$",
        },
        "languages[]": {
            "type": "array",
            "items": _TEXT,
            "maxItems": 1,
            "description": "As `language`; several are refused: no model here tells languages apart.",
        },
        "prompt": {
            **_TEXT,
            "maxLength": MOST_CHARACTERS,
            "description": "What was said before: names, spelling and style go on from it. Of a long one, its end "
            f"is read. {_ONLY_SOME}",
            "examples": ["A talk about Kubernetes."],
        },
        "hotwords": _hotwords("FunASR's, and vLLM's. "),
        "beam": {
            **_WHOLE,
            "minimum": 1,
            "maximum": MOST_BEAMS,
            "default": 1,
            "description": "Ours. Hypotheses that a decoder follows at once, up to the server's max_beam; "
            "1: greedy.",
        },
        "long_form": {
            "type": "string",
            "enum": list(get_args(LongForm)),
            "default": "parallel",
            "description": "Ours. `parallel`: segments that voice activity cuts, all at once. `sequential`: "
            "windows one after the other, each heard knowing what was said before.",
        },
        "spk": {"type": "boolean", "enum": [False], "description": "FunASR's. Refused when true."},
        "keywords[]": {
            "type": "array",
            "items": _TEXT,
            "description": f"As `hotwords`, a word each; one of the two. {_ONLY_SOME}",
        },
        "known_speaker_names[]": _none(),
        "known_speaker_references[]": _none(),
    }


def funasr_form() -> Schema:
    return _form(
        {
            "file": _FILE,
            "language": _language(),
            "model": {"type": "string", "description": "Ours. A model of GET /v1/models. Default: the server's."},
            "hotwords": _hotwords(),
            "spk": {"type": "boolean", "enum": [False], "description": "Speakers. Refused when true."},
            "timestamp": {
                "type": "boolean",
                "enum": [False],
                "description": "Times of characters. Refused when true; segments always have theirs.",
            },
        }
    )


def _form(fields: dict[str, Schema]) -> Schema:
    return {
        "type": "object",
        "description": "An empty field is as good as none, `1` and `yes` as good as true, `0` and `no` as false.",
        "properties": fields,
        "required": ["file"],
        "additionalProperties": False,
    }


def _language() -> Schema:
    return {
        "type": "string",
        "description": "ISO 639-1 code or name: `en`, `English`. Default: the model's own.",
        "examples": ["en"],
    }


def _hotwords(whose: str = "") -> Schema:
    return {
        **_TEXT,
        "maxLength": MOST_CHARACTERS,
        "description": f"{whose}Words that may come, with commas between them. {_ONLY_SOME}",
        "examples": ["Beckett,Godot"],
    }


def _ms(description: str, longest_ms: int = LONGEST_MS) -> Schema:
    return {**_WHOLE, "minimum": 0, "maximum": longest_ms, "description": description}


def _none() -> Schema:
    return {"type": "array", "items": _TEXT, "maxItems": 0, "description": "Refused unless empty."}


def _verbose() -> Schema:
    segment: dict[str, Schema] = {
        "id": _WHOLE,
        "seek": {**_WHOLE, "description": "Start in frames of 10 ms."},
        "start": {**_NUMBER, "description": "Seconds."},
        "end": {**_NUMBER, "description": "Seconds."},
        "text": _TEXT,
        "tokens": {"type": "array", "items": _WHOLE},
        "temperature": _NUMBER,
        "avg_logprob": _NUMBER,
        "compression_ratio": _NUMBER,
        "no_speech_prob": {
            **_NUMBER,
            "description": "That nobody speaks; 0 of a model that cannot tell.",
        },
    }
    fields: dict[str, Schema] = {
        "task": {"type": "string", "enum": ["transcribe"]},
        "language": {"type": "string", "description": "ISO 639-1."},
        "duration": {**_NUMBER, "description": "Seconds of audio."},
        "text": _TEXT,
        "segments": {
            "type": "array",
            "items": {"type": "object", "properties": segment, "required": list(segment)},
        },
        "usage": ref("Usage"),
    }
    return {"title": "VerboseTranscription", "type": "object", "properties": fields, "required": list(fields)}
