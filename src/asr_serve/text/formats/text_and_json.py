"""A transcript as text and JSON."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from asr_serve.types import Segment, Transcript, Word
from asr_serve.units import samples_to_s

SEEK_SAMPLES = 160
"""One unit of verbose_json's `seek`: a 10 ms frame."""


def text(transcript: Transcript) -> str:
    """One line a segment that has words, behind the speaker's name where that is another than before; a transcript
    without segments is one line."""
    if not transcript.segments:
        return f"{line}\n" if (line := transcript.text.strip()) else ""
    made, told = [], ""
    for segment in transcript.segments:
        if line := speaker_line(segment, told):
            made.append(f"{line}\n")
            told = segment.speaker
    return "".join(made)


def speaker_line(segment: Segment, before: str = "") -> str:
    """A segment as a line of text. `before`: who said the one before."""
    line = " ".join(segment.text.split())
    name = " ".join(segment.speaker.split())
    return f"{name}: {line}" if line and name and segment.speaker != before else line


def json(transcript: Transcript) -> str:
    """`{key, text, language, duration, model, segments: [{start, end, text}]}`; times in seconds. Segments have
    `speaker`, `spoken` and `words` where they are known, the whole `language_probability` and `turns`."""
    return indented(_brief(transcript) | {"model": transcript.model})


def jsonl(transcript: Transcript) -> str:
    """The same without `model`, on one line: FunASR's `{"key", "text", ...}`."""
    return msgspec.json.encode(_brief(transcript)).decode() + "\n"


def verbose_json(transcript: Transcript) -> str:
    """OpenAI's `verbose_json`, and our `key`; all words that are known, at the top as OpenAI has them."""
    made = verbose_json_data(transcript)
    for entry, segment in zip(made["segments"], transcript.segments, strict=True):
        entry |= optional_fields(segment)
    if found := [word_entry(word) for segment in transcript.segments for word in segment.words]:
        made["words"] = found
    return indented({"key": transcript.key, **made, **_of_all(transcript)})


def verbose_json_data(transcript: Transcript) -> dict[str, Any]:
    """OpenAI's `verbose_json` as data. `seek` counts 10 ms frames to the start of the window decoded.
    `no_speech_prob` is 0 of a model that cannot tell: clients need the number."""
    return {
        "task": "transcribe",
        "language": transcript.language,
        "duration": transcript.duration_s,
        "text": transcript.text,
        "segments": [
            {
                "id": index,
                "seek": segment.start_samples // SEEK_SAMPLES,
                "start": segment.start_s,
                "end": segment.end_s,
                "text": segment.text,
                "tokens": segment.tokens,
                "temperature": segment.temperature,
                "avg_logprob": segment.avg_logprob,
                "compression_ratio": compression_ratio(segment.text),
                "no_speech_prob": segment.no_speech_prob,
            }
            for index, segment in enumerate(transcript.segments)
        ],
    }


def word_entry(word: Word) -> dict[str, Any]:
    """`{word, start, end}` as OpenAI and FunASR have it, and what we know more."""
    entry = {"word": word.text, "start": word.start_s, "end": word.end_s, "confidence": round(word.confidence, 4)}
    return (
        entry
        | ({"speaker": word.speaker} if word.speaker else {})
        | ({"spoken": word.spoken} if word.spoken else {})
    )


def compression_ratio(words: str) -> float:
    """Bytes of text per byte after zlib: high when a text repeats itself. As Whisper reports it."""
    raw = words.encode()
    return len(raw) / len(zlib.compress(raw))


def indented(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


def _brief(transcript: Transcript) -> dict[str, Any]:
    return {
        "key": transcript.key,
        "text": transcript.text,
        "language": transcript.language,
        "duration": transcript.duration_s,
        "segments": [
            {"start": s.start_s, "end": s.end_s, "text": s.text} | optional_fields(s) for s in transcript.segments
        ],
    } | _of_all(transcript)


def optional_fields(segment: Segment, *, words: bool = True) -> dict[str, Any]:
    """What not every segment has."""
    told: dict[str, Any] = {}
    if segment.speaker:
        told["speaker"] = segment.speaker
    if segment.spoken:
        told["spoken"] = segment.spoken
    if words and segment.words:
        told["words"] = [word_entry(word) for word in segment.words]
    return told


def _of_all(transcript: Transcript) -> dict[str, Any]:
    known: dict[str, Any] = {}
    if transcript.language_prob:
        known["language_probability"] = round(transcript.language_prob, 4)
    if transcript.turns:
        known["turns"] = [
            {
                "speaker": turn.speaker,
                "start": samples_to_s(turn.start_samples),
                "end": samples_to_s(turn.end_samples),
            }
            for turn in transcript.turns
        ]
    return known
