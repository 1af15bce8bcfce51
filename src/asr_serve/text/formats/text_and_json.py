"""Text and JSON formats of a transcript."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from asr_serve.types import Alternative, Segment, Transcript, Word
from asr_serve.units import samples_to_s

SEEK_SAMPLES = 160
"""Unit of verbose_json's `seek`, a 10 ms frame."""


def text(transcript: Transcript) -> str:
    """One line for each segment with text, after the speaker's name where the speaker changes; a transcript
    without segments is one line."""
    if not transcript.segments:
        return f"{line}\n" if (line := transcript.text.strip()) else ""
    lines, speaker = [], ""
    for segment in transcript.segments:
        if line := speaker_line(segment, speaker):
            lines.append(f"{line}\n")
            speaker = segment.speaker
    return "".join(lines)


def speaker_line(segment: Segment, before: str = "") -> str:
    """One segment as a line of text. `before`: speaker of the previous segment, whose name is not repeated."""
    line = " ".join(segment.text.split())
    name = " ".join(segment.speaker.split())
    return f"{name}: {line}" if line and name and segment.speaker != before else line


def json(transcript: Transcript) -> str:
    """`{key, text, language, duration, model, segments: [{start, end, text}]}`; times in seconds. Where known,
    segments have `speaker`, `spoken`, `words` and `alternatives`, and the transcript `language_probability` and
    `turns`."""
    return indented(_brief(transcript) | {"model": transcript.model})


def jsonl(transcript: Transcript) -> str:
    """JSON without `model`, on one line: FunASR's `{"key", "text", ...}`."""
    return msgspec.json.encode(_brief(transcript)).decode() + "\n"


def verbose_json(transcript: Transcript) -> str:
    """OpenAI's `verbose_json`, with our `key` and optional fields; all known words are also at the top level, as
    in OpenAI's."""
    data = verbose_json_data(transcript)
    for entry, segment in zip(data["segments"], transcript.segments, strict=True):
        entry |= optional_fields(segment)
    if found := [word_entry(word) for segment in transcript.segments for word in segment.words]:
        data["words"] = found
    return indented({"key": transcript.key, **data, **_of_all(transcript)})


def verbose_json_data(transcript: Transcript) -> dict[str, Any]:
    """OpenAI's `verbose_json` as data. `seek` counts 10 ms frames to the start of the decoded window.
    `no_speech_prob` is 0 for a model that does not estimate it, because clients need a number."""
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
    """`{word, start, end}` as in OpenAI's and FunASR's formats, with confidence, and speaker and spoken form where
    known."""
    entry = {"word": word.text, "start": word.start_s, "end": word.end_s, "confidence": round(word.confidence, 4)}
    return (
        entry | ({"speaker": word.speaker} if word.speaker else {}) | ({"spoken": word.spoken} if word.spoken else {})
    )


def compression_ratio(words: str) -> float:
    """Bytes of text per byte after zlib, as Whisper reports it: high for repetitive text."""
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
    """Fields that not every segment has: speaker, spoken form, words, alternatives."""
    fields: dict[str, Any] = {}
    if segment.speaker:
        fields["speaker"] = segment.speaker
    if segment.spoken:
        fields["spoken"] = segment.spoken
    if words and segment.words:
        fields["words"] = [word_entry(word) for word in segment.words]
    if segment.alternatives:
        fields["alternatives"] = [alternative_entry(each) for each in segment.alternatives]
    return fields


def alternative_entry(alternative: Alternative) -> dict[str, Any]:
    """`{text, score}`, with words where known."""
    entry: dict[str, Any] = {"text": alternative.text, "score": round(alternative.score, 4)}
    return entry | ({"words": [word_entry(word) for word in alternative.words]} if alternative.words else {})


def _of_all(transcript: Transcript) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if transcript.language_prob:
        fields["language_probability"] = round(transcript.language_prob, 4)
    if transcript.turns:
        fields["turns"] = [
            {"speaker": turn.speaker, "start": samples_to_s(turn.start_samples), "end": samples_to_s(turn.end_samples)}
            for turn in transcript.turns
        ]
    return fields
