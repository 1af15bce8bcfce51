"""whisper-asr-webservice's POST /asr and POST /detect-language: query and form to request, transcript to response.

Source  whisper-asr-webservice 1.9, app/webservice.py and app/utils.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, quote

import msgspec

from asr_serve.audio.reader import AudioLimits
from asr_serve.errors import UnsupportedOption
from asr_serve.pipelines.options import MAX_SPEAKERS, TranscribeOptions, check_speakers_not_disabled
from asr_serve.pipelines.prompting import MAX_PROMPT_CHARACTERS
from asr_serve.protocols import recognition_fields
from asr_serve.protocols.form_fields import FormFields
from asr_serve.text.formats import registry
from asr_serve.text.formats.text_and_json import compression_ratio
from asr_serve.text.languages import language_name
from asr_serve.types import Segment, Transcript

FILE_FIELD = "audio_file"
OUTPUTS = ("txt", "vtt", "srt", "tsv", "json")
ASR_FIELDS = (
    *("encode", "task", "language", "initial_prompt", "vad_filter", "word_timestamps", "output"),
    *("diarize", "min_speakers", "max_speakers"),
    *("model", "hotwords"),
)
"""Every field but the file; `model` and `hotwords` are ours. That program has them in the query."""
DETECTION_FIELDS = ("encode", "model")
DETECTION_S = 30.0
"""Beginning of a recording by which its language is detected: Whisper's window."""
DETECTION_TOKENS = 4
"""Text that is decoded of each segment for it."""


class WhisperAsrRequest(msgspec.Struct, frozen=True):
    """Request of POST /asr. `model` None: the server's own."""

    model: str | None
    options: TranscribeOptions
    output: str = "txt"
    raw_pcm: bool = False
    """Whether the file is s16le at 16 kHz without a header: `encode=false`."""
    stream: bool = False
    """Always false: the response is sent whole."""
    detects_language: bool = False
    """Always false: the language is detected where the model can."""

    @property
    def option_to_field(self) -> dict[str, str]:
        """Options to the fields that set them, where the names differ."""
        return {"speakers": "diarize", "words": "word_timestamps", "prompt": "initial_prompt", "vad": "vad_filter"}


class DetectionRequest(msgspec.Struct, frozen=True):
    """Request of POST /detect-language. `model` None: the server's own."""

    model: str | None
    options: TranscribeOptions
    raw_pcm: bool = False
    stream: bool = False
    detects_language: bool = True

    @property
    def option_to_field(self) -> dict[str, str]:
        return {}


def parse_whisper_asr(sent: Mapping[str, Sequence[str]], *, complete: bool, query: str) -> WhisperAsrRequest:
    """Parses the fields of a query and of a form; until it is `complete`, errors that a later field can correct are
    ignored. Raises OptionError."""
    fields = FormFields(_with_query(sent, query), ASR_FIELDS)
    speakers: dict[str, Any] = {
        name: fields.integer(name, 1, MAX_SPEAKERS) for name in ("min_speakers", "max_speakers")
    }
    diarize = fields.flag("diarize")
    check_speakers_not_disabled({"diarize": diarize, **speakers}, "diarize")
    vad = fields.flag("vad_filter")
    task: Any = fields.choice("task", ["transcribe", "translate"]) or "transcribe"
    return WhisperAsrRequest(
        fields.text("model"),
        TranscribeOptions(
            language=fields.language("language"),
            priority="interactive",
            task=task,
            prompt=fields.text("initial_prompt", MAX_PROMPT_CHARACTERS) or "",
            hotwords=recognition_fields.parse_hotwords(fields),
            vad=vad is not False,
            words=bool(fields.flag("word_timestamps")),
            speakers=bool(diarize),
            **(speakers if complete else {}),
        ),
        fields.choice("output", OUTPUTS) or "txt",
        _raw_pcm(fields),
    )


def parse_detection(sent: Mapping[str, Sequence[str]], *, complete: bool, query: str) -> DetectionRequest:
    """Parses the fields of POST /detect-language, as `parse_whisper_asr` does."""
    fields = FormFields(_with_query(sent, query), DETECTION_FIELDS)
    options = TranscribeOptions(
        priority="interactive",
        temperatures=(0.0,),
        max_new_tokens=DETECTION_TOKENS,
        limits=AudioLimits(head_s=DETECTION_S),
    )
    return DetectionRequest(fields.text("model"), options, _raw_pcm(fields))


def _with_query(sent: Mapping[str, Sequence[str]], query: str) -> dict[str, list[str]]:
    found = {name: list(values) for name, values in sent.items()}
    for name, value in parse_qsl(query, keep_blank_values=True):
        found.setdefault(name, []).append(value)
    return found


def _raw_pcm(fields: FormFields) -> bool:
    return fields.flag("encode") is False


def render_whisper_asr(transcript: Transcript, request: WhisperAsrRequest) -> str:
    """Body of the response."""
    match request.output:
        case "txt":
            return registry.render(transcript, "text")
        case "tsv":
            rows = [f"{_ms(s.start_s)}\t{_ms(s.end_s)}\t{' '.join(s.text.split())}\n" for s in transcript.segments]
            return "".join(["start\tend\ttext\n", *rows])
        case "json":
            return _json(transcript, words=bool(request.options.words))
    return registry.render(transcript, request.output)


def response_headers(filename: str | None, output: str) -> dict[str, str]:
    """Headers beside those of every response. `filename`: the client's."""
    name = quote(filename or FILE_FIELD, safe="")
    return {"Asr-Engine": "asr-serve", "Content-Disposition": f'attachment; filename="{name}.{output}"'}


def render_detection(transcript: Transcript) -> bytes:
    """Response of POST /detect-language. Raises UnsupportedOption where nobody speaks."""
    if not transcript.language:
        raise UnsupportedOption(
            f"the first {DETECTION_S:g} s of the recording hold no speech",
            "a language is detected by speech",
            "send a part of it in which somebody speaks",
            param=FILE_FIELD,
        )
    return msgspec.json.encode(
        {
            "detected_language": language_name(transcript.language),
            "language_code": transcript.language,
            "confidence": round(transcript.language_prob, 4),
        }
    )


def _ms(seconds: float) -> int:
    return round(1_000 * seconds)


def _json(transcript: Transcript, *, words: bool) -> str:
    """Members as faster-whisper has them: times in seconds, and `words` null unless they were requested."""
    segments = [_segment(index, segment, words) for index, segment in enumerate(transcript.segments, start=1)]
    answer = {"language": transcript.language, "segments": segments, "text": transcript.text}
    return msgspec.json.encode(answer).decode()


def _segment(number: int, segment: Segment, words: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": number,
        "seek": segment.start_samples // 160,
        "start": segment.start_s,
        "end": segment.end_s,
        "text": segment.text,
        "tokens": segment.tokens,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": compression_ratio(segment.text),
        "no_speech_prob": segment.no_speech_prob,
        "words": [
            {"start": word.start_s, "end": word.end_s, "word": text, "probability": round(word.confidence, 4)}
            for word, text in zip(segment.words, spaced_words(segment), strict=True)
        ]
        if words
        else None,
        "temperature": segment.temperature,
    }
    return entry | ({"speaker": segment.speaker} if segment.speaker else {})


def spaced_words(segment: Segment) -> list[str]:
    """Texts of the words with the spaces before them: joined, they are the segment's text, as Whisper's are."""
    found, at = [], 0
    for word in segment.words:
        start = max(segment.text.find(word.text, at), at)
        end = start + len(word.text)
        found.append(f"{segment.text[at:start]}{word.text}")
        at = end
    return found
