"""Server events of /v1/stream, the same over both transports: WebSocket and server-sent events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from asr_serve import types
from asr_serve.pipelines.language_identification import LanguageIdentification, Outcome
from asr_serve.pipelines.live import events
from asr_serve.units import samples_to_s

MAX_SEGMENT_SPEAKERS = 1_000
"""Segments in one SpeakersEvent: events that are sent again after a resume must fit into a session's log."""


class EncodedEvent(NamedTuple):
    """Event as it is sent. `seq` None: it is not numbered, and not sent again."""

    type: str
    seq: int | None
    json: bytes

    @property
    def sse(self) -> bytes:
        """Encoding as a server-sent event."""
        number = b"" if self.seq is None else b"id: %d\n" % self.seq
        return b"event: %s\n%sdata: %s\n\n" % (self.type.encode(), number, self.json)


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of events. Times `*_s` are seconds since the session's first sample, in whole samples at 16 kHz."""

    @property
    def type(self) -> str:
        return str(self.__struct_config__.tag)

    def encode(self) -> EncodedEvent:
        return EncodedEvent(self.type, None, msgspec.json.encode(self))


class SessionEvent(StreamEvent, frozen=True, omit_defaults=True, tag="session"):
    """First event of every connection."""

    session_id: str
    resumed: bool
    model: str
    language: str
    encoding: str
    rate_hz: int
    received_bytes: int
    last_seq: int
    resume_s: float
    durable: bool = False
    """Whether the session is stored outside the server, and another server can resume it."""
    epoch: int = 0
    """Number of the server's claim of a stored session, for `epoch` of a resume."""


class PartialEvent(StreamEvent, frozen=True, tag="partial"):
    """Text beyond segments and locked text; it replaces the one before. The open segment begins at `start_s`, and
    audio up to `end_s` has been recognized."""

    start_s: float
    end_s: float
    text: str


class AckEvent(StreamEvent, frozen=True, omit_defaults=True, tag="ack"):
    """Audio received so far, which the client need not keep for a resume."""

    received_bytes: int
    received_s: float
    durable: bool = True
    """False: the session is durable, and its store is away: this server has the audio, and no other. A client keeps it
    for a resume at another server until a later event is durable."""


class StreamErrorEvent(StreamEvent, frozen=True, omit_defaults=True, tag="error"):
    code: str
    message: str
    retry_after_ms: int | None = None
    param: str | None = None


class NumberedEvent(StreamEvent, frozen=True, kw_only=True):
    """Base of numbered events: sent once, in order, and again after a resume."""

    seq: int = 0

    def encode(self) -> EncodedEvent:
        return EncodedEvent(self.type, self.seq, msgspec.json.encode(self))


class LockedTextEvent(NumberedEvent, frozen=True, kw_only=True, tag="locked"):
    """Text that the open segment will keep, after what was locked of it before. Its words were spoken between
    `start_s`, where the segment begins, and `end_s`."""

    start_s: float
    end_s: float
    text: str


class StreamWord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Word, or character of a script without spaces."""

    text: str
    start_s: float
    end_s: float
    confidence: float
    """0 to 1."""
    speaker: str | None = None
    """Speaker, if not the segment's."""
    spoken: str | None = None
    """Spoken form, where the written form differs."""


class SegmentEvent(NumberedEvent, frozen=True, kw_only=True, omit_defaults=True, tag="segment"):
    """Final segment. Its text, or `spoken` if it has one, begins with all text locked since the segment before.
    Where the speaker changes, several end at once, and their joined texts begin with it."""

    index: int
    start_s: float
    end_s: float
    text: str
    speaker: str | None = None
    """Speaker as far as known by then: see SpeakersEvent."""
    spoken: str | None = None
    """Spoken form of the text, where the written form differs."""
    words: list[StreamWord] | None = None
    language: str | None = None
    """Detected language, if none was requested and the model knows several."""
    language_probability: float | None = None
    """Probability of `language`, 0 to 1."""


class SegmentSpeaker(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    """Index of a segment."""
    speaker: str


class SpeakersEvent(NumberedEvent, frozen=True, kw_only=True, tag="speakers"):
    """Segments whose speaker was revised by the whole session. Sent at its end if speakers were requested; more
    than MAX_SEGMENT_SPEAKERS of them come in several events."""

    segments: list[SegmentSpeaker]


class FlushedEvent(NumberedEvent, frozen=True, kw_only=True, tag="flushed"):
    id: str
    position_s: float


class StreamTurnEvent(NumberedEvent, frozen=True, kw_only=True, tag="turn"):
    state: events.TurnState
    position_s: float
    probability: float | None
    by: str


class LanguageEvent(NumberedEvent, frozen=True, kw_only=True, omit_defaults=True, tag="language"):
    """Result of the identification of the session's language, once. `model` serves the session from here on."""

    outcome: Outcome
    model: str
    language: str | None = None
    probability: float | None = None
    """Probability of `language`, 0 to 1."""


class EndEvent(NumberedEvent, frozen=True, kw_only=True, tag="end"):
    """Last event."""

    duration_s: float
    segments: int


def stream_error(code: str, message: str, retry_after_ms: int | None = None, param: str | None = None) -> str:
    """Error event of a refusal or failure. `message` says what came, what is allowed, what to do."""
    event = StreamErrorEvent(code=code, message=message, retry_after_ms=retry_after_ms, param=param)
    return msgspec.json.encode(event).decode()


class StreamEventEncoder:
    """Encoder of live events as events of this protocol. `seq` is assigned elsewhere."""

    def __init__(self, *, words: bool = False) -> None:
        """`words`: whether segments have words."""
        self._words = words
        self._locked = ""
        self._segments = 0
        self._segment_speakers: list[str] = []
        """Speaker that was sent with each segment."""

    def import_state(self, locked: str, segments: int) -> None:
        """Continues after so many segments, with that locked text; not for sessions with speakers."""
        self._locked, self._segments = locked, segments

    def export_state(self) -> tuple[str, int]:
        return self._locked, self._segments

    def encode_events(self, event: events.LiveEvent) -> Iterator[NumberedEvent | PartialEvent]:
        match event:
            case events.LivePartial():
                yield from self._partial(event)
            case events.LiveSegmentDone(segment):
                yield self._segment(event)
                self._segments += 1
                self._segment_speakers.append(segment.speaker)
                self._locked = ""
            case events.SpeakersRevised(speakers):
                yield from self._speakers(speakers)
            case events.TurnEvent(state, position, probability, by):
                yield StreamTurnEvent(state=state, position_s=samples_to_s(position), probability=probability, by=by)
            case LanguageIdentification(outcome, model, language, probability):
                yield LanguageEvent(
                    outcome=outcome,
                    model=model,
                    language=language or None,
                    probability=round(probability, 4) if language else None,
                )
            case events.FlushDone(name, position):
                yield FlushedEvent(id=name, position_s=samples_to_s(position))
            case events.SessionFinished(duration):
                yield EndEvent(duration_s=samples_to_s(duration), segments=self._segments)

    def _segment(self, done: events.LiveSegmentDone) -> SegmentEvent:
        segment, probability = done.segment, round(done.language_prob, 4)
        return SegmentEvent(
            index=self._segments,
            start_s=segment.start_s,
            end_s=segment.end_s,
            text=segment.text,
            speaker=segment.speaker or None,
            spoken=segment.spoken or None,
            words=[_word(word, segment.speaker) for word in segment.words] if self._words else None,
            language=done.language if probability else None,
            language_probability=probability or None,
        )

    def _speakers(self, speakers: Sequence[str]) -> Iterator[SpeakersEvent]:
        pairs = zip(self._segment_speakers, speakers, strict=True)
        revised = [SegmentSpeaker(index=i, speaker=now) for i, (before, now) in enumerate(pairs) if now != before]
        for start in range(0, len(revised) or 1, MAX_SEGMENT_SPEAKERS):
            yield SpeakersEvent(segments=revised[start : start + MAX_SEGMENT_SPEAKERS])

    def _partial(self, event: events.LivePartial) -> Iterator[NumberedEvent | PartialEvent]:
        start_s, end_s = samples_to_s(event.start_samples), samples_to_s(event.heard_samples)
        if len(event.locked_text) > len(self._locked):
            locked_s = samples_to_s(event.locked_samples)
            yield LockedTextEvent(start_s=start_s, end_s=locked_s, text=event.locked_text[len(self._locked) :])
            self._locked = event.locked_text
        yield PartialEvent(start_s=start_s, end_s=end_s, text=event.tentative_text)


def _word(word: types.Word, speaker: str) -> StreamWord:
    return StreamWord(
        text=word.text,
        start_s=word.start_s,
        end_s=word.end_s,
        confidence=round(word.confidence, 4),
        speaker=word.speaker if word.speaker not in ("", speaker) else None,
        spoken=word.spoken or None,
    )
