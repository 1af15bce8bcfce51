"""JSON schemas of speech requests and responses, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

import msgspec

from asr_serve.audio.encode import FORMATS, content_type
from asr_serve.protocols.openai import speech
from asr_serve.protocols.openai.speech import (
    MAX_LEXICON_WORD_CHARACTERS,
    MAX_LEXICON_WORDS,
    MAX_SEMITONES,
    MAX_SPEECH_SEED,
    MAX_SPEED,
    MIN_SPEED,
    MOST_DB,
    RATES_HZ,
    STREAMS,
)
from asr_serve.protocols.schemas.responses import Schema, ref

_TEXT: Schema = {"type": ["string", "null"]}


def speech_components() -> dict[str, Schema]:
    """Schemas that others refer to, by name."""
    kinds = (speech.SpeechDelta, speech.SpeechWords, speech.SpeechDone, speech.VoiceList)
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    return schemas


def speech_body_schema(most_characters: int) -> Schema:
    """Schema of the body of POST /v1/audio/speech."""
    flag: Schema = {"type": ["boolean", "null"], "default": False}
    word: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_LEXICON_WORD_CHARACTERS, "pattern": r"\S"}
    return {
        "type": "object",
        "description": "A member that is null is as good as none.",
        "properties": {
            "input": {"type": "string", "minLength": 1, "maxLength": most_characters, "description": "The text."},
            "model": {**_TEXT, "description": "Speech synthesis model, or an alias of one. Default: the server's."},
            "voice": {
                "anyOf": [
                    _TEXT,
                    {
                        "type": "object",
                        "properties": {"id": _TEXT},
                        "additionalProperties": False,
                        "description": "OpenAI's form of a custom voice.",
                    },
                ],
                "description": "A voice of GET /v1/audio/voices, or an alias of one. Default: the model's first.",
            },
            "instructions": {
                **_TEXT,
                "description": "Taken, and nothing is done with it: the answer's header x-ignored says so. "
                "See speed, pitch and energy.",
            },
            "response_format": _choice(FORMATS, "mp3"),
            "speed": _number(MIN_SPEED, MAX_SPEED, 1, "Times as fast as the voice would by itself."),
            "stream_format": _choice(STREAMS, "audio"),
            "words": {**flag, "description": "Ours, with stream_format=sse: the times of words, in events."},
            "ssml": {**flag, "description": "Ours. The text is SSML."},
            "phonemes": {**flag, "description": "Ours. The text is phonemes, in the model's alphabet."},
            "lexicon": {
                "type": ["object", "null"],
                "maxProperties": MAX_LEXICON_WORDS,
                "propertyNames": word,
                "additionalProperties": word,
                "description": "Ours. Words and how they are said, in the model's alphabet.",
            },
            "pitch": _number(-MAX_SEMITONES, MAX_SEMITONES, 0, "Ours. Semitones."),
            "energy": _number(-MOST_DB, MOST_DB, 0, "Ours. dB."),
            "seed": {
                "type": ["integer", "null"],
                "minimum": 0,
                "maximum": MAX_SPEECH_SEED,
                "default": 0,
                "description": "Ours. Of what is random in a voice: the same seed gives the same samples.",
            },
            "sample_rate": {
                "type": ["integer", "null"],
                "enum": [*RATES_HZ, None],
                "description": "Ours. Default: the voice's own; of pcm 24000, as OpenAI's. A format that has not "
                "that takes its next higher one.",
            },
            "watermark": {**flag, "description": "Ours. Mark the sound, inaudibly, as made by a machine."},
        },
        "required": ["input"],
        "additionalProperties": False,
    }


def speech_response_content() -> dict[str, Any]:
    """Schemas of the response, by content type."""
    audio = {"type": "string", "format": "binary"}
    return {
        **{content_type(form): {"schema": audio} for form in FORMATS},
        "text/event-stream": {
            "itemSchema": _server_sent(),
            "example": 'data: {"type":"speech.audio.delta","audio":"SUQzAwAAAAAA..."}\n\n'
            'data: {"type":"speech.audio.done","usage":{"input_tokens":6,"output_tokens":17,"total_tokens":23,'
            '"seconds":0.81}}\n\n',
        },
    }


def _server_sent() -> Schema:
    error = {"type": "object", "properties": {"type": {"enum": ["error"]}, "error": ref("Problem")}}
    events = [ref("SpeechDelta"), ref("SpeechWords"), ref("SpeechDone"), {**error, "required": ["type", "error"]}]
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": events}}
    return {"type": "object", "properties": {"data": data, "event": {"type": "string"}}, "required": ["data"]}


def _choice(values: tuple[str, ...], default: str) -> Schema:
    return {"type": ["string", "null"], "enum": [*values, None], "default": default}


def _number(low: float, high: float, default: float, description: str) -> Schema:
    return {"type": ["number", "null"], "minimum": low, "maximum": high, "default": default, "description": description}
