"""JSON schemas of transcription forms, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, get_args

from asr_serve.decoding.search_options import MAX_BEAMS, REPETITION_PENALTIES
from asr_serve.pipelines.options import LANGUAGE_MODEL_WEIGHTS, MAX_N_BEST, MAX_SPEAKERS, LongForm
from asr_serve.pipelines.prompting import LANGUAGE_MODEL_WEIGHT, MAX_PROMPT_CHARACTERS
from asr_serve.protocols import recognition_fields
from asr_serve.protocols.openai import known_speakers
from asr_serve.protocols.openai.chunking_strategy import MAX_PREFIX_PADDING_MS, MAX_SILENCE_MS, STRATEGY
from asr_serve.protocols.openai.transcription_form import (
    FORMATS_OF_WORDS,
    FORMATS_WITH_ALTERNATIVES,
    FORMATS_WITH_SPEAKERS,
    FORMATS_WITH_WORDS,
    GRANULARITIES,
    MAX_TOP_K,
    RESPONSE_FORMATS,
    STREAMED_FORMATS,
    TRANSLATION_FIELDS,
    TRANSLATION_FORMATS,
)
from asr_serve.protocols.whisper_asr.asr import FILE_FIELD
from asr_serve.protocols.whisper_cpp.inference import (
    INFERENCE_FORMATS,
    MAX_PAD_MS,
    MIN_VAD_THRESHOLD,
    ONLY_ZERO,
    WITHOUT_EFFECT,
)

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_WHOLE: Schema = {"type": "integer"}
_FILE: Schema = {
    "type": "string",
    "format": "binary",
    "description": "The audio: wav, flac, mp3, m4a, ogg, opus, webm and whatever else ffmpeg reads. "
    "Sent as a file, with a filename; never a path or an address. It is transcribed while it arrives.",
}
_PROMPT_MODELS_ONLY = "For models that `/v1/models` lists with `prompts`; others refuse it unless it is empty."


def transcription_form_schema() -> Schema:
    return _form(_openai_fields())


def translation_form_schema() -> Schema:
    fields = _openai_fields()
    fields["response_format"] = {"type": "string", "enum": list(TRANSLATION_FORMATS), "default": "json"}
    return _form({name: fields[name] for name in ("file", *TRANSLATION_FIELDS)})


def _openai_fields() -> dict[str, Schema]:
    return {
        "file": _FILE,
        "model": {"type": "string", "description": "A model, or an alias of one. Default: the server's."},
        "language": _language(),
        "response_format": {
            "type": "string",
            "enum": list(RESPONSE_FORMATS),
            "default": "json",
            "description": f"{_named(FORMATS_WITH_SPEAKERS)} name speakers; {_named(FORMATS_OF_WORDS)} time words.",
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
            "description": "Send text as server-sent events while the audio is transcribed; with the fields before the "
            f"file, while it still arrives. For response_format {', '.join(STREAMED_FORMATS)}.",
        },
        GRANULARITIES: {
            "type": "array",
            "items": {"type": "string", "enum": ["segment", "word"]},
            "description": f"Whose times are told. With response_format {', '.join(FORMATS_WITH_WORDS)}.",
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
            "Audio before speech that belongs to a segment; up to a quarter of max_segment_ms.", MAX_PREFIX_PADDING_MS
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
            "maxLength": MAX_PROMPT_CHARACTERS,
            "description": "Text that precedes the audio: names, spelling and style follow it. Only the end of a long "
            f"text is used. {_PROMPT_MODELS_ONLY}",
            "examples": ["A talk about Kubernetes."],
        },
        "hotwords": _hotwords("FunASR's, and vLLM's. "),
        "beam": {
            **_WHOLE,
            "minimum": 1,
            "maximum": MAX_BEAMS,
            "default": 1,
            "description": "Ours. Beam width, up to the server's max_beam; 1 is greedy search.",
        },
        "repetition_penalty": {
            **_NUMBER,
            "minimum": REPETITION_PENALTIES[0],
            "maximum": REPETITION_PENALTIES[1],
            "default": 1,
            "description": "vLLM's. Tokens that an answer already has become less likely by this factor; 1: none.",
        },
        "top_k": {
            **_WHOLE,
            "minimum": -1,
            "maximum": MAX_TOP_K,
            "default": 0,
            "description": "vLLM's. At a temperature above 0, the number of likeliest tokens that are sampled from; "
            "0 or -1: all. For models with a decoder, as top_p.",
        },
        "top_p": {
            **_NUMBER,
            "exclusiveMinimum": 0,
            "maximum": 1,
            "default": 1,
            "description": "vLLM's. Share of the probability of these tokens whose likeliest are sampled from; 1: all.",
        },
        "n_best": {
            **_WHOLE,
            "minimum": 1,
            "maximum": MAX_N_BEST,
            "default": 1,
            "description": "Ours. Most `alternatives` of a segment, where the search has so many hypotheses. With "
            f"response_format {', '.join(FORMATS_WITH_ALTERNATIVES)}.",
        },
        "long_form": {
            "type": "string",
            "enum": list(get_args(LongForm)),
            "default": "parallel",
            "description": "Ours. `parallel`: segments split at pauses, in one batch. `sequential`: windows in "
            "order, each with the text before it as its prompt.",
        },
        **_speakers("FunASR's. "),
        "itn": _itn(),
        **_language_model(),
        "keywords[]": {"type": "array", "items": _TEXT, "description": "As `hotwords`, a word each; one of the two."},
        known_speakers.NAMES_FIELD: {
            "type": "array",
            "items": {**_TEXT, "maxLength": known_speakers.MAX_SPEAKER_NAME_CHARACTERS},
            "maxItems": known_speakers.MAX_KNOWN_SPEAKERS,
            "description": "Speakers that are to be told by name.",
        },
        known_speakers.REFERENCES_FIELD: {
            "type": "array",
            "items": {**_TEXT, "maxLength": known_speakers.MAX_REFERENCE_BYTES, "pattern": "^data:.*,"},
            "maxItems": known_speakers.MAX_KNOWN_SPEAKERS,
            "description": "2 to 10 s of each of them, alone, as a data URL of an audio file.",
        },
    }


def asr_form_schema() -> Schema:
    return _form(
        {
            "file": _FILE,
            "language": _language(),
            "model": {"type": "string", "description": "Ours. A model of GET /v1/models. Default: the server's."},
            "hotwords": _hotwords(),
            **_speakers(),
            "itn": _itn(),
            **_language_model(),
            "timestamp": {
                "type": "boolean",
                "default": True,
                "description": "Words of segments, and their times; of Chinese and Japanese, characters.",
            },
        }
    )


def inference_form_schema() -> Schema:
    switch: Schema = {"type": "boolean"}
    without_effect = {**_TEXT, "description": "A setting of whisper.cpp's own decoder: without effect."}
    return _form(
        {
            "file": _FILE,
            "response_format": {"type": "string", "enum": list(INFERENCE_FORMATS), "default": "json"},
            "language": _language(),
            "detect_language": {**switch, "description": "As no language."},
            "translate": {**switch, "default": False, "description": "Into English, by models that can."},
            "prompt": {**_TEXT, "maxLength": MAX_PROMPT_CHARACTERS, "description": _PROMPT_MODELS_ONLY},
            "temperature": {**_NUMBER, "minimum": 0, "maximum": 1, "default": 0},
            "temperature_inc": {
                **_NUMBER,
                "minimum": 0,
                "maximum": 1,
                "default": 0.2,
                "description": "Step to the next temperature, where an answer is improbable; 0: none is tried.",
            },
            "beam_size": {
                **_WHOLE,
                "minimum": -1,
                "maximum": MAX_BEAMS,
                "description": "Up to the server's max_beam; -1, 0 and 1 are greedy search.",
            },
            "diarize": {**switch, "default": False, "description": "Label speakers, of one channel too."},
            "no_language_probabilities": {**switch, "default": False},
            "no_timestamps": {**switch, "default": False},
            "token_timestamps": {**switch, "default": True, "description": "Words with times in verbose_json."},
            "vad": {**switch, "default": True, "description": "False: all audio counts as speech."},
            "vad_threshold": {**_NUMBER, "minimum": MIN_VAD_THRESHOLD, "maximum": 1},
            "vad_speech_pad_ms": _ms("Audio before speech that belongs to a segment.", MAX_PAD_MS),
            "model": {"type": "string", "description": "Ours. A model of GET /v1/models. Default: the server's."},
            "hotwords": _hotwords("Ours. "),
            **{name: {**_NUMBER, "enum": [0], "description": "Refused otherwise."} for name in ONLY_ZERO},
            **dict.fromkeys(WITHOUT_EFFECT, without_effect),
        }
    )


def detection_form_schema() -> Schema:
    fields = {
        FILE_FIELD: _FILE,
        "encode": {
            "type": "boolean",
            "default": True,
            "description": "False: the file is s16le at 16 kHz without a header. As `model`, in the query too.",
        },
        "model": {"type": "string", "description": "Ours. A model that tells languages apart."},
    }
    return {**_form(fields), "required": [FILE_FIELD]}


def _form(fields: dict[str, Schema]) -> Schema:
    return {
        "type": "object",
        "description": "An empty field is as good as none, `1` and `yes` as good as true, `0` and `no` as false.",
        "properties": fields,
        "required": ["file"],
        "additionalProperties": False,
    }


def _named(names: tuple[str, ...]) -> str:
    """Returns names as a phrase of Markdown: `a`, `b` and `c`."""
    *first, last = (f"`{name}`" for name in names)
    return f"{', '.join(first)} and {last}"


def _language() -> Schema:
    return {
        "type": "string",
        "description": "ISO 639-1 code or name: `en`, `English`. Default: the model's own.",
        "examples": ["en"],
    }


def _hotwords(origin: str = "") -> Schema:
    return {
        **_TEXT,
        "maxLength": recognition_fields.MAX_HOTWORDS_CHARACTERS,
        "description": f"{origin}Words that may come, with commas between them, each with its weight where it has one.",
        "examples": ["Beckett,Godot:2"],
    }


def _speakers(origin: str = "") -> dict[str, Schema]:
    number = {**_WHOLE, "minimum": 1, "maximum": MAX_SPEAKERS}
    return {
        "spk": {"type": "boolean", "default": False, "description": f"{origin}Label speakers."},
        "num_speakers": {**number, "description": "Ours. Number of speakers, if known; implies spk."},
        "min_speakers": {**number, "description": "Ours. So many there are at least; as num_speakers."},
        "max_speakers": {**number, "description": "Ours. So many there are at most; as num_speakers."},
    }


def _language_model() -> dict[str, Schema]:
    least, most = LANGUAGE_MODEL_WEIGHTS
    return {
        "language_model": {
            **_TEXT,
            "maxLength": recognition_fields.MAX_NAME_CHARACTERS,
            "description": "Ours. A language model that is loaded beside the model: see its `language_models`. A model "
            "without streaming takes it with a `beam` of 2 or more; one that searches a decoding graph rescores "
            "lattices.",
        },
        "language_model_weight": {
            "type": "number",
            "minimum": least,
            "maximum": most,
            "default": LANGUAGE_MODEL_WEIGHT,
            "description": "Ours. Factor of its log-probabilities.",
        },
    }


def _itn() -> Schema:
    return {
        "type": "boolean",
        "description": "Ours. Write numbers, dates and money as one writes them. Without it, as the model writes; "
        "false asks a speech LLM for the spoken form.",
    }


def _ms(description: str, longest_ms: int = MAX_SILENCE_MS) -> Schema:
    return {**_WHOLE, "minimum": 0, "maximum": longest_ms, "description": description}
