"""whisper.cpp's POST /inference: form to request, transcript to response.

Source  whisper.cpp 1.8, examples/server
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asr_serve.decoding.search_options import MAX_BEAMS, SearchOptions
from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.pipelines.prompting import MAX_PROMPT_CHARACTERS
from asr_serve.protocols import recognition_fields
from asr_serve.protocols.form_fields import FormFields
from asr_serve.protocols.ignored_fields import report_ignored
from asr_serve.text.formats.registry import JSON, PLAIN_TEXT, TRANSCRIPT_FORMATS
from asr_serve.text.formats.text_and_json import text
from asr_serve.text.languages import language_name
from asr_serve.types import Segment, Transcript

INFERENCE_FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
WITHOUT_EFFECT = (
    *("audio_ctx", "best_of", "carry_initial_prompt", "debug_mode", "entropy_thold", "logprob_thold", "max_context"),
    *("no_speech_thold", "offset_n", "split_on_word", "suppress_non_speech", "suppress_nst", "tinydiarize"),
    *("vad_max_speech_duration_s", "vad_min_silence_duration_ms", "vad_min_speech_duration_ms", "vad_samples_overlap"),
    "word_thold",
)
"""Settings of that program's own decoder: allowed, and reported as without effect."""
ONLY_ZERO = ("duration", "max_len", "offset_t")
"""Fields that would change the text, and are only allowed at their defaults."""
INFERENCE_FIELDS = (
    *("language", "detect_language", "translate", "prompt", "response_format", "temperature", "temperature_inc"),
    *("beam_size", "diarize", "no_language_probabilities", "no_timestamps", "token_timestamps"),
    *("vad", "vad_threshold", "vad_speech_pad_ms", *ONLY_ZERO, *WITHOUT_EFFECT),
    *("model", "hotwords"),
)
"""Every field but the file; `model` and `hotwords` are ours."""
MAX_PAD_MS = 5_000
MIN_VAD_THRESHOLD = 0.01


class InferenceRequest(msgspec.Struct, frozen=True):
    """Request of a form. `model` None: the server's own."""

    model: str | None
    options: TranscribeOptions
    response_format: str = "json"
    timestamps: bool = True
    """Whether segments of verbose_json have times."""
    probabilities: bool = True
    """Whether verbose_json has the probability of the language."""
    detects_language: bool = False
    """Whether the language must be detected: `detect_language`."""
    raw_pcm: bool = False
    """Always false: the file has a header."""
    stream: bool = False
    """Always false: the response is sent whole."""

    @property
    def option_to_field(self) -> dict[str, str]:
        """Options to the fields that set them, where the names differ."""
        return {
            "beam": "beam_size",
            "speakers": "diarize",
            "task": "translate",
            "temperatures": "temperature",
            "threshold": "vad_threshold",
            "pad_before_ms": "vad_speech_pad_ms",
            "words": "token_timestamps",
        }


def parse_inference_form(
    sent: Mapping[str, Sequence[str]], *, complete: bool, max_beam: int = MAX_BEAMS
) -> InferenceRequest:
    """Parses a form; until it is `complete`, errors that a later field can correct are ignored. `max_beam`: limit of a
    request. Raises OptionError; UnsupportedOption for a known field that would change the text."""
    fields = FormFields(sent, INFERENCE_FIELDS)
    report_ignored(name for name in WITHOUT_EFFECT if name in fields)
    for name in ONLY_ZERO:
        if (value := fields.number(name, -1e9, 1e9)) not in (None, 0):
            raise UnsupportedOption(
                f"{name}={value:g}", "the whole recording, in segments of its speech", f"leave {name} out", param=name
            )
    form = fields.choice("response_format", INFERENCE_FORMATS) or "json"
    times, words = not fields.flag("no_timestamps"), fields.flag("token_timestamps") is not False
    detect = fields.flag("detect_language")
    language = fields.language("language")
    return InferenceRequest(
        fields.text("model"),
        TranscribeOptions(
            language=None if detect else language,
            priority="interactive",
            task="translate" if fields.flag("translate") else "transcribe",
            temperatures=_temperatures(fields, complete=complete),
            beam=_beam(fields, max_beam),
            prompt=fields.text("prompt", MAX_PROMPT_CHARACTERS) or "",
            hotwords=recognition_fields.parse_hotwords(fields),
            threshold=fields.number("vad_threshold", MIN_VAD_THRESHOLD, 1),
            pad_before_ms=fields.integer("vad_speech_pad_ms", 0, MAX_PAD_MS),
            vad=fields.flag("vad") is not False,
            words=None if form == "verbose_json" and times and words else False,
            speakers=bool(fields.flag("diarize")),
        ),
        form,
        times,
        not fields.flag("no_language_probabilities"),
        detects_language=bool(detect),
    )


def _temperatures(fields: FormFields, *, complete: bool) -> tuple[float, ...]:
    """Temperatures that are tried in order, until an answer passes: the first, and steps of `temperature_inc` up to
    the highest of ours; without a step only the first."""
    first, step = fields.number("temperature", 0, 1), fields.number("temperature_inc", 0, 1)
    ours = SearchOptions().temperatures
    if (not first and step is None) or not complete:
        return ours
    first, step = first or 0.0, 0.2 if step is None else step
    count = 1 if step < 0.01 else int((max(first, ours[-1]) - first) / step + 1e-6) + 1
    return tuple(round(first + n * step, 4) for n in range(count))


def _beam(fields: FormFields, most: int) -> int:
    """Beam width; -1, whisper.cpp's default, and 0 are greedy search."""
    beam = fields.integer("beam_size", -1, MAX_BEAMS) or 1
    if beam > most:
        raise OptionError(
            f"beam_size={beam}", f"up to {most} on this server", "see its setting max_beam", param="beam_size"
        )
    return max(1, beam)


def render_inference(transcript: Transcript, request: InferenceRequest) -> tuple[bytes, str]:
    """Body of the response, and its media type. Text has one line for each segment."""
    match request.response_format:
        case "json":
            return msgspec.json.encode({"text": text(transcript)}), JSON
        case "text":  # whisper.cpp says text/html, as which a browser would run it
            return text(transcript).encode(), PLAIN_TEXT
        case "verbose_json":
            return msgspec.json.encode(_verbose(transcript, request)), JSON
    row = TRANSCRIPT_FORMATS[request.response_format]
    return row.render(transcript).encode(), row.media_type


def _verbose(transcript: Transcript, request: InferenceRequest) -> dict[str, Any]:
    """Members as whisper.cpp has them: times in seconds, languages by their English names."""
    language, probability = transcript.language, round(transcript.language_prob, 4)
    answer: dict[str, Any] = {
        "task": request.options.task,
        "language": language_name(language),
        "duration": transcript.duration_s,
        "text": text(transcript),
        "segments": [_segment(index, segment, request) for index, segment in enumerate(transcript.segments)],
    }
    if probability and request.probabilities:
        answer |= {
            "detected_language": language_name(language),
            "detected_language_probability": probability,
            "language_probabilities": {language: probability},
        }
    return answer


def _segment(index: int, segment: Segment, request: InferenceRequest) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": index, "text": segment.text}
    if request.timestamps:
        entry |= {"start": segment.start_s, "end": segment.end_s}
    if segment.speaker:
        entry["speaker"] = segment.speaker
    entry["tokens"] = segment.tokens
    if segment.words:
        entry["words"] = [
            {
                "word": word.text,
                "start": word.start_s,
                "end": word.end_s,
                "t_dtw": -1,
                "probability": round(word.confidence, 4),
            }
            for word in segment.words
        ]
    return entry | {
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "no_speech_prob": segment.no_speech_prob,
    }
