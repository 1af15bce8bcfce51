"""JSON schemas of transcription responses, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

import msgspec

from asr_serve.protocols.deepgram import listen_response
from asr_serve.protocols.funasr import asr
from asr_serve.protocols.openai import batches, events, models, transcription_response

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_WHOLE: Schema = {"type": "integer"}


def response_components() -> dict[str, Schema]:
    """Schemas that others refer to, by name."""
    _, schemas = msgspec.json.schema_components(
        (
            transcription_response.Transcription,
            transcription_response.Diarized,
            transcription_response.VerboseAlternative,
            transcription_response.TextDelta,
            transcription_response.TextDone,
            events.ErrorAnswer,
            models.ModelEntry,
            models.ModelList,
            models.ModelRenewal,
            asr.AsrAnswer,
            listen_response.DeepgramAnswer,
            batches.FileList,
            batches.FileDeleted,
            batches.BatchList,
        ),
        ref_template="#/components/schemas/{name}",
    )
    return {**schemas, "VerboseTranscription": _verbose()}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def transcription_event_schema() -> Schema:
    """Schema of one event of a stream."""
    error = {"type": "object", "properties": {"type": {"enum": ["error"]}, "error": ref("Problem")}}
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {
            "anyOf": [*map(ref, ("TextDelta", "DiarizedSegment", "TextDone")), {**error, "required": ["type", "error"]}]
        },
    }
    return {"type": "object", "properties": {"data": data, "event": _TEXT}, "required": ["data"]}


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
        "no_speech_prob": {**_NUMBER, "description": "Probability that there is no speech; 0 for models without one."},
    }
    words: Schema = {"type": "array", "items": ref("TimedWord")}
    extensions: dict[str, Schema] = {
        "words": {**words, "description": "Unless `segment` alone was asked for."},
        "speaker": {**_TEXT, "description": "With `spk`: SPK0, SPK1 and so on by who spoke first."},
        "alternatives": {
            "type": "array",
            "items": ref("VerboseAlternative"),
            "description": "With `n_best`: different texts of the segment, the best first, which is its own.",
        },
        "spoken": {**_TEXT, "description": "With `itn`: the text as it was said, where it is written otherwise."},
    }
    fields: dict[str, Schema] = {
        "task": {"type": "string", "enum": ["transcribe"]},
        "language": {"type": "string", "description": "ISO 639-1."},
        "duration": {**_NUMBER, "description": "Seconds of audio."},
        "text": _TEXT,
        "segments": {
            "type": "array",
            "items": {"type": "object", "properties": segment | extensions, "required": list(segment)},
        },
        "usage": ref("Usage"),
    }
    more: dict[str, Schema] = {
        "words": {**words, "description": "With timestamp_granularities[]=word: those of all segments."},
        "language_probability": {
            **_NUMBER,
            "description": "How sure the model was of the language, where it was to hear it.",
        },
    }
    return {"title": "VerboseTranscription", "type": "object", "properties": fields | more, "required": list(fields)}
