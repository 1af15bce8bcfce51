"""Messages of Deepgram's WebSocket `/v1/listen`: text frames to commands, live events to messages. No sockets here.

Source  Deepgram's API reference, Listen v1, streaming
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec

from asr_serve import units
from asr_serve.errors import UnknownCommand
from asr_serve.pipelines.language_identification import LanguageIdentification
from asr_serve.pipelines.live.events import FlushDone, LiveEvent, LivePartial, LiveSegmentDone, TurnEvent
from asr_serve.protocols.deepgram.listen_query import ListenQuery
from asr_serve.protocols.deepgram.models import DEPRECATED_KEY, DeepgramModelInfo, model_uuid
from asr_serve.protocols.deepgram.transcript_parts import PLACES, DeepgramWord, deepgram_words
from asr_serve.protocols.form_fields import quote_for_message
from asr_serve.protocols.json_members import decode_json
from asr_serve.protocols.segment_text import segment_confidence, transcript_text
from asr_serve.types import suggest_name

COMMANDS = ("KeepAlive", "Finalize", "CloseStream", "Configure")
MAX_COMMAND_CHARACTERS = 1 << 16
Command = Literal["KeepAlive", "Finalize", "CloseStream", "Configure"]
CHANNEL = [0, 1]
"""Channel of a message, and number of channels."""


def parse_listen_command(text: str) -> str:
    """Parses a text frame to one of COMMANDS. Raises MalformedRequest, UnknownCommand."""
    if len(text) > MAX_COMMAND_CHARACTERS:
        raise UnknownCommand(
            f"a text of {len(text)} characters came",
            f"messages are up to {MAX_COMMAND_CHARACTERS} characters long",
            "send audio in binary frames",
        )
    allowed = 'messages are JSON like {"type": "Finalize"}, with a type of: ' + ", ".join(COMMANDS)
    message: object = decode_json(text, object, "a message came that cannot be read", allowed)
    kind = message.get("type") if isinstance(message, dict) else None
    if kind in COMMANDS:
        return str(kind)
    raise UnknownCommand(
        f"the message {quote_for_message(text)} is no command", allowed, suggest_name(str(kind), COMMANDS)
    )


# --- server messages ----------------------------------------------------------------------------------------


class ListenMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of messages. Times are seconds since the first sample."""

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()


class LiveAlternative(msgspec.Struct, frozen=True, omit_defaults=True):
    transcript: str
    confidence: float
    words: Sequence[DeepgramWord]
    languages: list[str] = []
    """Language of the words, where it was detected or identified."""


class LiveChannel(msgspec.Struct, frozen=True):
    alternatives: list[LiveAlternative]


class LiveMetadata(msgspec.Struct, frozen=True):
    request_id: str
    model_info: DeepgramModelInfo
    model_uuid: str


class ListenResults(ListenMessage, frozen=True, kw_only=True, tag="Results"):
    """Text of some audio: interim, which later results replace, or final."""

    channel_index: list[int]
    duration: float
    start: float
    is_final: bool
    speech_final: bool
    """Whether a pause has ended the utterance."""
    channel: LiveChannel
    metadata: LiveMetadata
    from_finalize: bool


class ListenSpeechStarted(ListenMessage, frozen=True, kw_only=True, tag="SpeechStarted"):
    channel: list[int]
    timestamp: float


class ListenUtteranceEnd(ListenMessage, frozen=True, kw_only=True, tag="UtteranceEnd"):
    """Silence of `utterance_end_ms` after the last word."""

    channel: list[int]
    last_word_end: float


class ListenMetadata(ListenMessage, frozen=True, kw_only=True, tag="Metadata"):
    """Last message: all audio is in results."""

    transaction_key: str
    request_id: str
    sha256: str
    created: str
    duration: float
    channels: int
    models: list[str]
    model_info: dict[str, DeepgramModelInfo]
    ignored: tuple[str, ...] = ()
    """Fields of the query that had no effect. Ours."""


class ListenConfigureFailure(ListenMessage, frozen=True, kw_only=True, tag="ConfigureFailure"):
    """Refusal of a change of the session's options."""

    request_id: str
    code: str
    description: str


class ListenError(ListenMessage, frozen=True, kw_only=True, tag="Error"):
    """Refusal or failure. `description` says what came, what is allowed, what to do."""

    variant: str
    """Error code of this server."""
    code: str
    description: str
    message: str
    """The same: clients show either."""
    retry_after_ms: int | None = None


def deepgram_error(code: str, message: str, retry_after_ms: int | None = None) -> str:
    """Error message, of `/v1/speak` too."""
    return ListenError(
        variant=code, code=code, description=message, message=message, retry_after_ms=retry_after_ms
    ).to_json()


class ListenResultsEncoder:
    """Encoder of one connection's results, from the events of its live session."""

    def __init__(self, query: ListenQuery, model: str, request_id: str) -> None:
        self._query, self._request_id = query, request_id
        self._set_model(model)
        self._open_turns: deque[int] = deque()
        """Starts of turns that have not ended: the next one may start before the text of the last is final."""
        self._last_word_end: int | None = None
        """End of the last word, until the silence after it was reported."""
        self._final_samples = 0
        """End of the audio in final results."""

    def _set_model(self, model: str) -> None:
        self._metadata = LiveMetadata(self._request_id, DeepgramModelInfo(model), model_uuid(model))

    @property
    def busy(self) -> bool:
        """Returns whether somebody speaks, or text of what was said is not final."""
        return bool(self._open_turns)

    def on_events(self, events: Sequence[LiveEvent]) -> list[str]:
        """Messages for new events, interim results excepted."""
        messages = list[str]()
        segment: LiveSegmentDone | None = None
        """Segment whose result waits for the event behind it, which tells how it ended."""
        speech_final = False
        for event in events:
            match event:
                case LiveSegmentDone() | TurnEvent("started") if segment is not None:
                    messages.append(self._final(segment, speech_final=speech_final))
                    messages += self._late_utterance_end()
                    segment = None
            match event:
                case LanguageIdentification():
                    self._set_model(event.model)
                case LiveSegmentDone():
                    segment, speech_final = event, False
                case TurnEvent("started", position):
                    if not self.busy and (message := self.on_silence(position)):
                        messages.append(message)
                    self._open_turns.append(position)
                    if self._query.vad_events:
                        messages.append(ListenSpeechStarted(channel=CHANNEL, timestamp=_seconds(position)).to_json())
                case TurnEvent("ended", position):
                    if self._open_turns:
                        self._open_turns.popleft()
                    speech_final = True
                    if segment is None:  # also of no speech: clients wait for the end of what has started
                        messages.append(self._empty(position, speech_final=True))
                case FlushDone(_, position):
                    if segment is None:
                        messages.append(self._empty(position, from_finalize=True))
                    else:
                        messages.append(self._final(segment, speech_final=speech_final, from_finalize=True))
                        segment = None
        if segment is not None:
            messages.append(self._final(segment, speech_final=speech_final))
        return messages + self._late_utterance_end()

    def _late_utterance_end(self) -> list[str]:
        """Message for the silence between the last word and the next turn, which started before that word was final."""
        return [message] if self._open_turns and (message := self._utterance_end(self._open_turns[0])) else []

    def interim(self, partial: LivePartial) -> str:
        """Interim result: the text known beyond the final results."""
        start, end = partial.start_samples, partial.heard_samples
        return self._results(start, end, partial.text, 0.0, [], is_final=False)

    def on_silence(self, scored_samples: int) -> str | None:
        """The message for silence up to a position, where it has become long enough; None: no message."""
        return None if self.busy else self._utterance_end(scored_samples)

    def _utterance_end(self, silent_to_samples: int) -> str | None:
        end, needed_ms = self._last_word_end, self._query.utterance_end_ms
        if end is None or needed_ms is None:
            return None
        if silent_to_samples - end < units.ms_to_samples(needed_ms):
            return None
        self._last_word_end = None
        return ListenUtteranceEnd(channel=CHANNEL, last_word_end=_seconds(end)).to_json()

    def metadata(self, samples: int, sha256: str, created: str, ignored: tuple[str, ...]) -> str:
        """Last message, about `samples` of audio whose bytes had that hash."""
        return ListenMetadata(
            transaction_key=DEPRECATED_KEY,
            request_id=self._request_id,
            sha256=sha256,
            created=created,
            duration=_seconds(samples),
            channels=1,
            models=[self._metadata.model_uuid],
            model_info={self._metadata.model_uuid: self._metadata.model_info},
            ignored=ignored,
        ).to_json()

    def configure_failure(self) -> str:
        return ListenConfigureFailure(
            request_id=self._request_id,
            code="CONFIGURE_KEYTERMS_NOT_SUPPORTED",
            description="the options of a session are those of its query; connect again with others",
        ).to_json()

    def _final(self, done: LiveSegmentDone, *, speech_final: bool = False, from_finalize: bool = False) -> str:
        segment, words = done.segment, deepgram_words(done.segment)
        self._last_word_end = segment.words[-1].end_samples if segment.words else segment.end_samples
        self._final_samples = max(self._final_samples, segment.end_samples)
        return self._results(
            segment.start_samples,
            segment.end_samples,
            segment.text,
            segment_confidence(segment),
            words,
            [done.language] if done.language_prob else [],
            is_final=True,
            speech_final=speech_final,
            from_finalize=from_finalize,
        )

    def _empty(self, position: int, *, speech_final: bool = False, from_finalize: bool = False) -> str:
        """Final result without text: of the audio from the last final result to a position."""
        start = min(self._final_samples, position)
        return self._results(
            start, position, "", 0.0, [], is_final=True, speech_final=speech_final, from_finalize=from_finalize
        )

    def _results(
        self,
        start: int,
        end: int,
        text: str,
        confidence: float,
        words: Sequence[DeepgramWord],
        languages: Sequence[str] = (),
        *,
        is_final: bool,
        speech_final: bool = False,
        from_finalize: bool = False,
    ) -> str:
        transcript = transcript_text(text.strip(), plain=self._query.plain)
        return ListenResults(
            channel_index=CHANNEL,
            duration=_seconds(end - start),
            start=_seconds(start),
            is_final=is_final,
            speech_final=speech_final,
            channel=LiveChannel([LiveAlternative(transcript, confidence, words, list(languages))]),
            metadata=self._metadata,
            from_finalize=from_finalize,
        ).to_json()


def _seconds(samples: int) -> float:
    return round(units.samples_to_s(samples), PLACES)
