"""Deepgram's answer about a recording: transcript to JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise

import msgspec

from asr_serve.protocols.deepgram.listen_query import ListenQuery
from asr_serve.protocols.deepgram.models import DEPRECATED_KEY, DeepgramModelInfo, model_uuid
from asr_serve.protocols.deepgram.transcript_parts import PLACES, DeepgramWord, deepgram_words
from asr_serve.protocols.segment_text import CONFIDENCE_PLACES, segment_confidence, transcript_text
from asr_serve.protocols.speaker_names import speaker_number
from asr_serve.text.word_timing import locate_words
from asr_serve.types import Segment, Transcript

MAX_PARAGRAPH_SEGMENTS = 5
"""Segments of a paragraph of one speaker."""
SENTENCE_ENDS = (".", "?", "!", "。", "？", "！")


class DeepgramSentence(msgspec.Struct, frozen=True):
    """Sentence of a paragraph; times in seconds."""

    text: str
    start: float
    end: float


class DeepgramParagraph(msgspec.Struct, frozen=True, omit_defaults=True):
    """Paragraph: consecutive segments of one speaker."""

    sentences: list[DeepgramSentence]
    num_words: int
    start: float
    end: float
    speaker: int | None = None


class DeepgramParagraphs(msgspec.Struct, frozen=True):
    transcript: str
    """Paragraphs with empty lines between and, with speakers, their names before."""
    paragraphs: list[DeepgramParagraph]


class DeepgramAlternative(msgspec.Struct, frozen=True, omit_defaults=True):
    transcript: str
    confidence: float
    words: list[DeepgramWord]
    paragraphs: DeepgramParagraphs | None = None


class DeepgramChannel(msgspec.Struct, frozen=True, omit_defaults=True):
    alternatives: list[DeepgramAlternative]
    detected_language: str | None = None
    language_confidence: float | None = None
    """Both only with `detect_language`."""


class DeepgramUtterance(msgspec.Struct, frozen=True, omit_defaults=True):
    """Segment; times in seconds."""

    id: str
    start: float
    end: float
    confidence: float
    channel: int
    transcript: str
    words: list[DeepgramWord]
    speaker: int | None = None


class DeepgramResults(msgspec.Struct, frozen=True, omit_defaults=True):
    channels: list[DeepgramChannel]
    utterances: list[DeepgramUtterance] | None = None


class DeepgramMetadata(msgspec.Struct, frozen=True, omit_defaults=True):
    request_id: str
    sha256: str
    """Hash of the audio as it was sent."""
    created: str
    """Time of the request."""
    duration: float
    """Seconds of audio."""
    models: list[str]
    model_info: dict[str, DeepgramModelInfo]
    tags: list[str] | None = None
    channels: int = msgspec.field(default_factory=lambda: 1)
    transaction_key: str = msgspec.field(default_factory=lambda: DEPRECATED_KEY)


class DeepgramAnswer(msgspec.Struct, frozen=True):
    metadata: DeepgramMetadata
    results: DeepgramResults


def render_listen_answer(
    transcript: Transcript, query: ListenQuery, request_id: str, sha256: str, created: datetime
) -> bytes:
    """Body of the answer. `sha256` of the body that came, at `created`."""
    segments, model = transcript.segments, model_uuid(transcript.model)
    utterances = [_utterance(index, segment, request_id, query) for index, segment in enumerate(segments)]
    answer = DeepgramAnswer(
        DeepgramMetadata(
            request_id,
            sha256,
            timestamp(created),
            round(transcript.duration_s, PLACES),
            [model],
            {model: DeepgramModelInfo(transcript.model)},
            list(query.tags) or None,
        ),
        DeepgramResults(
            [
                DeepgramChannel(
                    [
                        DeepgramAlternative(
                            transcript_text(transcript.text, plain=query.plain),
                            _confidence(segments),
                            [word for utterance in utterances for word in utterance.words],
                            _paragraphs(segments) if query.paragraphs else None,
                        )
                    ],
                    *_detected(transcript, query),
                )
            ],
            utterances if query.utterances else None,
        ),
    )
    return msgspec.json.encode(answer)


def timestamp(created: datetime) -> str:
    return created.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _detected(transcript: Transcript, query: ListenQuery) -> tuple[str | None, float | None]:
    if not query.detect_language:
        return None, None
    return transcript.language, round(transcript.language_prob, CONFIDENCE_PLACES) or None


def _confidence(segments: Sequence[Segment]) -> float:
    """Mean confidence, each segment's by its length."""
    total = sum(segment.end_samples - segment.start_samples for segment in segments)
    weighed = sum(segment_confidence(each) * (each.end_samples - each.start_samples) for each in segments)
    return round(weighed / total, CONFIDENCE_PLACES) if total else 0.0


def _utterance(index: int, segment: Segment, request_id: str, query: ListenQuery) -> DeepgramUtterance:
    return DeepgramUtterance(
        f"{request_id}-{index}",
        round(segment.start_s, PLACES),
        round(segment.end_s, PLACES),
        segment_confidence(segment),
        0,
        transcript_text(segment.text, plain=query.plain),
        deepgram_words(segment),
        speaker_number(segment.speaker),
    )


def _paragraphs(segments: Sequence[Segment]) -> DeepgramParagraphs:
    groups = list[list[Segment]]()
    for segment in segments:
        if groups and groups[-1][-1].speaker == segment.speaker and len(groups[-1]) < MAX_PARAGRAPH_SEGMENTS:
            groups[-1].append(segment)
        else:
            groups.append([segment])
    paragraphs = [_paragraph(group) for group in groups]
    texts = []
    for paragraph in paragraphs:
        name = "" if paragraph.speaker is None else f"Speaker {paragraph.speaker}: "
        texts.append(name + " ".join(sentence.text for sentence in paragraph.sentences))
    return DeepgramParagraphs("\n\n".join(texts), paragraphs)


def _paragraph(segments: Sequence[Segment]) -> DeepgramParagraph:
    sentences = [sentence for segment in segments for sentence in _sentences(segment)]
    words = sum(len(segment.words) or len(segment.text.split()) for segment in segments)
    speaker = speaker_number(segments[0].speaker)
    return DeepgramParagraph(sentences, words, sentences[0].start, sentences[-1].end, speaker)


def _sentences(segment: Segment) -> Iterator[DeepgramSentence]:
    """Sentences of a segment, cut behind words that end one; a segment without words is one."""
    start_s, from_character = segment.start_s, 0
    spans = locate_words(segment.text, segment.words)
    for (word, after), (_, behind) in zip(pairwise(segment.words), spans, strict=False):
        if word.text.endswith(SENTENCE_ENDS):
            text = segment.text[from_character:behind].strip()
            yield DeepgramSentence(text, round(start_s, PLACES), round(word.end_s, PLACES))
            start_s, from_character = after.start_s, behind
    rest = segment.text[from_character:].strip()
    yield DeepgramSentence(rest, round(start_s, PLACES), round(segment.end_s, PLACES))
