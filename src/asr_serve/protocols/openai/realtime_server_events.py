"""OpenAI Realtime, transcription sessions: live events to server events. No sockets here.

An item is the speech of one turn, or the audio between two commits of the client.

    (speech_started) -> delta ... -> (speech_stopped) -> committed, item added, done -> delta ... -> completed

A `delta` is final: the deltas of an item are its transcript.

Source  as for `realtime_client_events`
"""

from __future__ import annotations

import secrets
from collections import deque
from typing import Any

import msgspec

from asr_serve import units
from asr_serve.pipelines.live.events import (
    FlushDone,
    LiveEvent,
    LivePartial,
    LiveSegmentDone,
    SessionFinished,
    TurnEvent,
)
from asr_serve.protocols.openai.events import Problem, TokenTexts, token_logprobs
from asr_serve.protocols.openai.realtime_client_events import (
    BETA_FORMATS,
    LOGPROBS,
    REALTIME_FORMATS,
    RealtimeSettings,
    SemanticVad,
)
from asr_serve.types import Segment

BUFFER, TRANSCRIPTION = "input_audio_buffer", "conversation.item.input_audio_transcription"
BETA_FORMAT_NAMES = {now: before for before, now in BETA_FORMATS.items()}


class ServerEventEncoder:
    """Server events as JSON, each with its own id. `beta`: in the shapes of the beta API."""

    def __init__(self, *, beta: bool) -> None:
        self.beta = beta
        self._event_count, self._session = 0, secrets.token_hex(8)

    def event(self, kind: str, **members: Any) -> str:
        self._event_count += 1
        return _json({"type": kind, "event_id": f"event_{self._session}_{self._event_count}", **members})

    def item_id(self) -> str:
        return f"item_{secrets.token_hex(10)}"

    def session(self, kind: str, settings: RealtimeSettings, model: str, expires_s: int) -> str:
        """Session event. `kind`: created or updated. `model`: the one in use. `expires_s`: Unix time."""
        base = {
            "id": f"sess_{self._session}",
            "object": "realtime.transcription_session",
            "expires_at": expires_s,
            "include": [LOGPROBS] if settings.logprobs else None,
        }
        transcription: dict[str, Any] = {
            "model": settings.model or model,
            "language": settings.language,
            "prompt": settings.prompt,
        }
        if settings.hotwords:
            transcription["keywords"] = list(settings.hotwords)
        turns = _turns(settings)
        if self.beta:
            secret = {"value": "", "expires_at": expires_s}  # required by the types of its clients
            beta_session = {
                "input_audio_format": BETA_FORMAT_NAMES[settings.format],
                "input_audio_transcription": transcription,
                "input_audio_noise_reduction": None,
                "turn_detection": turns,
                "client_secret": secret,
            }
            return self.event(f"transcription_session.{kind}", session=base | beta_session)
        form: dict[str, Any] = {"type": settings.format}
        if settings.format == "audio/pcm":
            form["rate"] = REALTIME_FORMATS[settings.format][1]
        audio = {"format": form, "transcription": transcription, "noise_reduction": None, "turn_detection": turns}
        return self.event(f"session.{kind}", session={"type": "transcription", **base, "audio": {"input": audio}})

    def audio_lost(self, start_ms: int, end_ms: int, packets: int) -> str:
        """Event of ours, for calls: packets that did not arrive, whose time was concealed."""
        return self.event(f"{BUFFER}.audio_lost", audio_start_ms=start_ms, audio_end_ms=end_ms, packets=packets)

    def error(self, problem: Problem, retry_ms: int | None = None, caused_by: str | None = None) -> str:
        """Error event. `caused_by`: id of the client's event, if any."""
        return self.event("error", error=_problem(problem, retry_ms) | {"event_id": caused_by})


def _turns(settings: RealtimeSettings) -> dict[str, Any] | None:
    if settings.turn_detection is None:
        return None
    kind = "semantic_vad" if isinstance(settings.turn_detection, SemanticVad) else "server_vad"
    return {"type": kind, **msgspec.structs.asdict(settings.turn_detection)}


def _problem(problem: Problem, retry_ms: int | None = None) -> dict[str, Any]:
    members = msgspec.structs.asdict(problem)
    return members if retry_ms is None else members | {"retry_after_ms": retry_ms}


class ConversationItem:
    """Item being transcribed. Positions are samples at 16 kHz since the session's first."""

    def __init__(self, item_id: str, start_samples: int) -> None:
        self.id, self.start, self.end = item_id, start_samples, start_samples
        self.segments: list[Segment] = []
        self.transcribed = self.partial_text = ""
        """All deltas so far; and the last partial text."""
        self.committed = self.discarded = False

    @property
    def text(self) -> str:
        """Text of its segments."""
        return " ".join(segment.text for segment in self.segments)

    def next_delta(self, fixed: str) -> str:
        """Text since the last delta. `fixed`: words after its segments that will not change."""
        text = _joined(self.text, fixed)
        assert text.startswith(self.transcribed), "words that were certain have changed"
        delta, self.transcribed = text[len(self.transcribed) :], text
        return delta


class BufferRequest(msgspec.Struct):
    """Commit or clear of the audio up to `end`, whose words are not all final yet."""

    start: int
    end: int
    clear: bool
    item: ConversationItem | None
    """None if turns are the items."""
    acknowledged: bool = False
    """Whether a turn ended before `end`."""


class ItemTracker:
    """Items of one session. Methods return the events to be sent."""

    def __init__(self, encoder: ServerEventEncoder, *, turns: bool, partials: bool) -> None:
        """`turns`: turns are the items, else commits of the client. `partials`: send text that may change, too."""
        self._voice, self._turns, self._partials = encoder, turns, partials
        self.spell: TokenTexts | None = None
        """Decoder of tokens; set when log-probabilities are requested."""
        self._base = 0
        self._open_items: deque[ConversationItem] = deque()
        """Items, oldest first. New text belongs to the first; the last may be open."""
        self._open: ConversationItem | None = None
        self._pending_requests: deque[BufferRequest] = deque()
        self._last_id: str | None = None
        self.accepted_samples = 0
        """Audio before this is in closed items, or discarded."""

    @property
    def busy(self) -> bool:
        """Returns whether text is still to be sent."""
        return any(item.committed or self._turns for item in self._open_items)

    # --- live events ----------------------------------------------------------------------------------

    def on_event(self, event: LiveEvent) -> list[str]:
        match event:
            case TurnEvent(state, position) if self._turns:
                return self._turn(state, self._base + position)
            case FlushDone():
                return self._met(self._pending_requests.popleft())
            case SessionFinished():  # requests at the very end were not flushed
                return [
                    message
                    for _ in range(len(self._pending_requests))
                    for message in self._met(self._pending_requests.popleft())
                ]
            case LiveSegmentDone(segment) if self._open_items:
                self._open_items[0].segments.append(segment)
                return self._words(self._open_items[0], "")
            case LivePartial(locked_text=fixed) if self._open_items:
                return [*self._words(self._open_items[0], fixed), *self._show(self._open_items[0], event.text)]
        return []

    def start_listener(self, base_samples: int, *, turns: bool) -> None:
        """Starts another listener at that position; the one before has finished."""
        assert not self._pending_requests, "a caller that has finished has been flushed"
        if turns and self._open is not None:  # it has less than a sample of audio
            self._open_items.remove(self._open)
            self._open = None
        self._base, self._turns = base_samples, turns

    def fail(self, problem: Problem) -> list[str]:
        """Fails the pending items: no more text will come."""
        pending = [
            item
            for item in self._open_items
            if not item.discarded and (self._turns or item.committed or item.transcribed)
        ]
        self._open_items.clear()
        return [
            self._voice.event(f"{TRANSCRIPTION}.failed", item_id=item.id, content_index=0, error=_problem(problem))
            for item in pending
        ]

    def _turn(self, state: str, position: int) -> list[str]:
        if state == "started":
            return [self._speech("started", self._add(position), audio_start_ms=_ms(position))]
        if state == "stopped":
            item, self._open = self._open_items[-1], None
            item.end = self.accepted_samples = max(self.accepted_samples, position)
            # A turn may have begun just before a clear, not yet certain to be speech, and continues.
            item.discarded |= any(request.clear and position <= request.end for request in self._pending_requests)
            stopped = self._speech("stopped", item, audio_end_ms=_ms(position))
            if item.discarded:
                return [stopped]  # `speech_started` was sent and needs its end
            for request in self._pending_requests:
                request.acknowledged |= position <= request.end
            return [stopped, *self._commit(item)]
        return self._complete(self._open_items.popleft()) if state == "ended" else []

    def _met(self, request: BufferRequest) -> list[str]:
        if request.item is not None:
            assert self._open_items.popleft() is request.item, "items end in order"
            return self._complete(request.item)
        if request.clear or request.acknowledged:
            return []
        silent = ConversationItem(self._voice.item_id(), request.start)
        silent.end = request.end
        return [*self._commit(silent), *self._complete(silent)]

    # --- client events --------------------------------------------------------------------------------

    def on_audio(self) -> None:
        """Opens an item for new audio, unless turns are the items."""
        if not self._turns and self._open is None:
            self._add(self.accepted_samples)

    def commit(self, received_samples: int) -> list[str]:
        """Commits the audio so far as an item; `FlushDone` follows."""
        item = self._request(received_samples, clear=False).item
        return [] if item is None else self._commit(item)

    def clear(self, received_samples: int) -> list[str]:
        """Discards the audio so far, except in closed items; `FlushDone` follows."""
        if self._open is not None:
            self._open.discarded = True
        self._request(received_samples, clear=True)
        return [self.cleared()]

    def cleared(self) -> str:
        return self._voice.event(f"{BUFFER}.cleared")

    def _request(self, received_samples: int, *, clear: bool) -> BufferRequest:
        item = None
        if not self._turns:
            item, self._open = self._open, None
            assert item is not None, "no audio came"
            item.end = received_samples
        request = BufferRequest(self.accepted_samples, received_samples, clear, item)
        self._pending_requests.append(request)
        self.accepted_samples = received_samples
        return request

    # --- server events --------------------------------------------------------------------------------

    def _add(self, start_samples: int) -> ConversationItem:
        self._open = ConversationItem(self._voice.item_id(), start_samples)
        self._open_items.append(self._open)
        return self._open

    def _speech(self, kind: str, item: ConversationItem, **when: int) -> str:
        return self._voice.event(f"{BUFFER}.speech_{kind}", item_id=item.id, **when)

    def _words(self, item: ConversationItem, fixed: str) -> list[str]:
        delta = item.next_delta(fixed)
        if not delta or item.discarded:
            return []
        return [self._voice.event(f"{TRANSCRIPTION}.delta", item_id=item.id, content_index=0, delta=delta)]

    def _show(self, item: ConversationItem, text: str) -> list[str]:
        """Partial text of an open item; after a closed one, the text may belong to the next."""
        whole = _joined(item.text, text)
        if not self._partials or item is not self._open or item.discarded or whole == item.partial_text:
            return []
        item.partial_text = whole
        return [self._voice.event(f"{TRANSCRIPTION}.partial", item_id=item.id, content_index=0, transcript=whole)]

    def _commit(self, item: ConversationItem) -> list[str]:
        previous_id, self._last_id, item.committed = self._last_id, item.id, True
        content = {"type": "input_audio", "transcript": None}
        message = {
            "id": item.id,
            "object": "realtime.item",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [content],
        }
        kinds = ["created"] if self._voice.beta else ["added", "done"]
        return [
            self._voice.event(f"{BUFFER}.committed", item_id=item.id, previous_item_id=previous_id),
            *(
                self._voice.event(f"conversation.item.{kind}", previous_item_id=previous_id, item=message)
                for kind in kinds
            ),
        ]

    def _complete(self, item: ConversationItem) -> list[str]:
        if item.discarded:
            return []
        seconds = round(units.samples_to_s(item.end - item.start), 3)
        logprobs = {} if self.spell is None else {"logprobs": token_logprobs(item.segments, self.spell)}
        return [
            self._voice.event(
                f"{TRANSCRIPTION}.completed",
                item_id=item.id,
                content_index=0,
                transcript=item.transcribed,
                usage={"type": "duration", "seconds": seconds},
                **logprobs,
            )
        ]


def _joined(text: str, more: str) -> str:
    return f"{text} {more}" if text and more else text or more


def _ms(position_samples: int) -> int:
    return units.samples_to_ms(position_samples)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
