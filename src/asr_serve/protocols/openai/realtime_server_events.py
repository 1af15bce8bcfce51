"""OpenAI Realtime, transcription sessions: what is heard, to a server's events. No sockets here.

An item is what somebody said in one turn, or between two commits of the client's.

    (speech_started) -> delta ... -> (speech_stopped) -> committed, item added, done -> delta ... -> completed

What goes out in `delta` is for ever: the deltas of an item are its transcript.

Source  as for `openai_realtime`
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
    """Server events as JSON, each with an id of its own. `beta`: in the shape of before."""

    def __init__(self, *, beta: bool) -> None:
        self.beta = beta
        self._event_count, self._session = 0, secrets.token_hex(8)

    def event(self, kind: str, **members: Any) -> str:
        self._event_count += 1
        return _json({"type": kind, "event_id": f"event_{self._session}_{self._event_count}", **members})

    def item_id(self) -> str:
        return f"item_{secrets.token_hex(10)}"

    def session(self, what: str, settings: RealtimeSettings, model: str, expires_s: int) -> str:
        """`what`: created or updated. `model`: the one that hears. `expires_s`: Unix time."""
        known = {
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
            secret = {"value": "", "expires_at": expires_s}  # its clients' types demand one
            before = {
                "input_audio_format": BETA_FORMAT_NAMES[settings.format],
                "input_audio_transcription": transcription,
                "input_audio_noise_reduction": None,
                "turn_detection": turns,
                "client_secret": secret,
            }
            return self.event(f"transcription_session.{what}", session=known | before)
        form: dict[str, Any] = {"type": settings.format}
        if settings.format == "audio/pcm":
            form["rate"] = REALTIME_FORMATS[settings.format][1]
        heard = {
            "format": form,
            "transcription": transcription,
            "noise_reduction": None,
            "turn_detection": turns,
        }
        return self.event(f"session.{what}", session={"type": "transcription", **known, "audio": {"input": heard}})

    def error(self, what: Problem, retry_ms: int | None = None, caused_by: str | None = None) -> str:
        """`caused_by`: the id of the client's event, where it has one."""
        return self.event("error", error=_problem(what, retry_ms) | {"event_id": caused_by})


def _turns(settings: RealtimeSettings) -> dict[str, Any] | None:
    if settings.turn_detection is None:
        return None
    kind = "semantic_vad" if isinstance(settings.turn_detection, SemanticVad) else "server_vad"
    return {"type": kind, **msgspec.structs.asdict(settings.turn_detection)}


def _problem(what: Problem, retry_ms: int | None = None) -> dict[str, Any]:
    told = msgspec.structs.asdict(what)
    return told if retry_ms is None else told | {"retry_after_ms": retry_ms}


class ConversationItem:
    """One that is heard. Positions are samples at 16 kHz since the session's first."""

    def __init__(self, item_id: str, start_samples: int) -> None:
        self.id, self.start, self.end = item_id, start_samples, start_samples
        self.segments: list[Segment] = []
        self.transcribed = self.partial_text = ""
        """All deltas so far, and all that was told for the moment."""
        self.committed = self.discarded = False

    @property
    def text(self) -> str:
        """Of its segments."""
        return " ".join(segment.text for segment in self.segments)

    def next_delta(self, fixed: str) -> str:
        """What is new. `fixed`: of the words behind its segments, those that will not change."""
        whole = _joined(self.text, fixed)
        assert whole.startswith(self.transcribed), "words that were certain have changed"
        new, self.transcribed = whole[len(self.transcribed) :], whole
        return new


class BufferRequest(msgspec.Struct):
    """The client ended what had come up to `end`; the words before it are still being heard."""

    start: int
    end: int
    clear: bool
    item: ConversationItem | None
    """None where turns are items."""
    acknowledged: bool = False
    """A turn ended before `end`."""


class ItemTracker:
    """Those of one session. Methods return the events that there are to tell."""

    def __init__(self, voice: ServerEventEncoder, *, turns: bool, partials: bool) -> None:
        """`turns`: they are the items; else what the client commits is. `partials`: tell what may change, too."""
        self._voice, self._turns, self._partials = voice, turns, partials
        self.spell: TokenTexts | None = None
        """Set when probabilities are asked for."""
        self._base = 0
        self._open_items: deque[ConversationItem] = deque()
        """Oldest first. What is heard belongs to the first; the last may be open."""
        self._open: ConversationItem | None = None
        self._pending_requests: deque[BufferRequest] = deque()
        self._last_id: str | None = None
        self.accepted_samples = 0
        """Audio before this is in items that are closed, or forgotten."""

    @property
    def busy(self) -> bool:
        """Words are still owed."""
        return any(item.committed or self._turns for item in self._open_items)

    # --- what is heard --------------------------------------------------------------------------------

    def on_event(self, event: LiveEvent) -> list[str]:
        match event:
            case TurnEvent(state, position) if self._turns:
                return self._turn(state, self._base + position)
            case FlushDone():
                return self._met(self._pending_requests.popleft())
            case SessionFinished():  # what was asked for at the very end was not flushed
                return [
                    told
                    for _ in range(len(self._pending_requests))
                    for told in self._met(self._pending_requests.popleft())
                ]
            case LiveSegmentDone(segment) if self._open_items:
                self._open_items[0].segments.append(segment)
                return self._words(self._open_items[0], "")
            case LivePartial(locked_text=fixed) if self._open_items:
                return [*self._words(self._open_items[0], fixed), *self._show(self._open_items[0], event.text)]
        return []

    def start_listener(self, base_samples: int, *, turns: bool) -> None:
        """Another caller is heard from now on, from that position; the one before has finished."""
        assert not self._pending_requests, "a caller that has finished has been flushed"
        if turns and self._open is not None:  # less than a sample came for it
            self._open_items.remove(self._open)
            self._open = None
        self._base, self._turns = base_samples, turns

    def fail(self, what: Problem) -> list[str]:
        """Nothing more will be heard."""
        lost = [
            item
            for item in self._open_items
            if not item.discarded and (self._turns or item.committed or item.transcribed)
        ]
        self._open_items.clear()
        return [
            self._voice.event(f"{TRANSCRIPTION}.failed", item_id=item.id, content_index=0, error=_problem(what))
            for item in lost
        ]

    def _turn(self, state: str, position: int) -> list[str]:
        if state == "started":
            return [self._speech("started", self._add(position), audio_start_ms=_ms(position))]
        if state == "stopped":
            item, self._open = self._open_items[-1], None
            item.end = self.accepted_samples = max(self.accepted_samples, position)
            # One may have begun before it was cleared, too late to be speech for sure, and goes on.
            item.discarded |= any(request.clear and position <= request.end for request in self._pending_requests)
            stopped = self._speech("stopped", item, audio_end_ms=_ms(position))
            if item.discarded:
                return [stopped]  # whoever was told that somebody speaks must hear that it is over
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

    # --- what the client does -------------------------------------------------------------------------

    def on_audio(self) -> None:
        """Audio comes."""
        if not self._turns and self._open is None:
            self._add(self.accepted_samples)

    def commit(self, received_samples: int) -> list[str]:
        """What came so far is an item; `Flushed` follows."""
        item = self._request(received_samples, clear=False).item
        return [] if item is None else self._commit(item)

    def clear(self, received_samples: int) -> list[str]:
        """What came so far is forgotten, but what is in items that are closed; `Flushed` follows."""
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
        asked = BufferRequest(self.accepted_samples, received_samples, clear, item)
        self._pending_requests.append(asked)
        self.accepted_samples = received_samples
        return asked

    # --- what is told ---------------------------------------------------------------------------------

    def _add(self, start_samples: int) -> ConversationItem:
        self._open = ConversationItem(self._voice.item_id(), start_samples)
        self._open_items.append(self._open)
        return self._open

    def _speech(self, what: str, item: ConversationItem, **when: int) -> str:
        return self._voice.event(f"{BUFFER}.speech_{what}", item_id=item.id, **when)

    def _words(self, item: ConversationItem, fixed: str) -> list[str]:
        delta = item.next_delta(fixed)
        if not delta or item.discarded:
            return []
        return [self._voice.event(f"{TRANSCRIPTION}.delta", item_id=item.id, content_index=0, delta=delta)]

    def _show(self, item: ConversationItem, text: str) -> list[str]:
        """Not of an item that is closed: what is heard may be the next one's."""
        shown = _joined(item.text, text)
        if not self._partials or item is not self._open or item.discarded or shown == item.partial_text:
            return []
        item.partial_text = shown
        return [self._voice.event(f"{TRANSCRIPTION}.partial", item_id=item.id, content_index=0, transcript=shown)]

    def _commit(self, item: ConversationItem) -> list[str]:
        before, self._last_id, item.committed = self._last_id, item.id, True
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
            self._voice.event(f"{BUFFER}.committed", item_id=item.id, previous_item_id=before),
            *(
                self._voice.event(f"conversation.item.{kind}", previous_item_id=before, item=message)
                for kind in kinds
            ),
        ]

    def _complete(self, item: ConversationItem) -> list[str]:
        if item.discarded:
            return []
        seconds = round(units.samples_to_s(item.end - item.start), 3)
        heard = {} if self.spell is None else {"logprobs": token_logprobs(item.segments, self.spell)}
        return [
            self._voice.event(
                f"{TRANSCRIPTION}.completed",
                item_id=item.id,
                content_index=0,
                transcript=item.transcribed,
                usage={"type": "duration", "seconds": seconds},
                **heard,
            )
        ]


def _joined(text: str, more: str) -> str:
    return f"{text} {more}" if text and more else text or more


def _ms(position_samples: int) -> int:
    return units.samples_to_ms(position_samples)


def _json(what: object) -> str:
    return msgspec.json.encode(what).decode()
