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
from asr_serve.protocols.openai import Problem, Spell, logprobs
from asr_serve.protocols.openai_realtime import BETA_FORMATS, FORMATS, LOGPROBS, SemanticVad, Settings
from asr_serve.types import Segment

BUFFER, TRANSCRIPTION = "input_audio_buffer", "conversation.item.input_audio_transcription"
FORMATS_BEFORE = {now: before for before, now in BETA_FORMATS.items()}


class Voice:
    """Server events as JSON, each with an id of its own. `beta`: in the shape of before."""

    def __init__(self, *, beta: bool) -> None:
        self.beta = beta
        self._told, self._session = 0, secrets.token_hex(8)

    def event(self, kind: str, **members: Any) -> str:
        self._told += 1
        return _json({"type": kind, "event_id": f"event_{self._session}_{self._told}", **members})

    def item_id(self) -> str:
        return f"item_{secrets.token_hex(10)}"

    def session(self, what: str, settings: Settings, model: str, expires_s: int) -> str:
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
                "input_audio_format": FORMATS_BEFORE[settings.format],
                "input_audio_transcription": transcription,
                "input_audio_noise_reduction": None,
                "turn_detection": turns,
                "client_secret": secret,
            }
            return self.event(f"transcription_session.{what}", session=known | before)
        form: dict[str, Any] = {"type": settings.format}
        if settings.format == "audio/pcm":
            form["rate"] = FORMATS[settings.format][1]
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


def _turns(settings: Settings) -> dict[str, Any] | None:
    if settings.turns is None:
        return None
    kind = "semantic_vad" if isinstance(settings.turns, SemanticVad) else "server_vad"
    return {"type": kind, **msgspec.structs.asdict(settings.turns)}


def _problem(what: Problem, retry_ms: int | None = None) -> dict[str, Any]:
    told = msgspec.structs.asdict(what)
    return told if retry_ms is None else told | {"retry_after_ms": retry_ms}


class Item:
    """One that is heard. Positions are samples at 16 kHz since the session's first."""

    def __init__(self, item_id: str, start_samples: int) -> None:
        self.id, self.start, self.end = item_id, start_samples, start_samples
        self.segments: list[Segment] = []
        self.said = self.shown = ""
        """All deltas so far, and all that was told for the moment."""
        self.committed = self.forgotten = False

    @property
    def text(self) -> str:
        """Of its segments."""
        return " ".join(segment.text for segment in self.segments)

    def delta(self, fixed: str) -> str:
        """What is new. `fixed`: of the words behind its segments, those that will not change."""
        whole = _joined(self.text, fixed)
        assert whole.startswith(self.said), "words that were certain have changed"
        new, self.said = whole[len(self.said) :], whole
        return new


class Request(msgspec.Struct):
    """The client ended what had come up to `end`; the words before it are still being heard."""

    start: int
    end: int
    clear: bool
    item: Item | None
    """None where turns are items."""
    met: bool = False
    """A turn ended before `end`."""


class Items:
    """Those of one session. Methods return the events that there are to tell."""

    def __init__(self, voice: Voice, *, turns: bool, partials: bool) -> None:
        """`turns`: they are the items; else what the client commits is. `partials`: tell what may change, too."""
        self._voice, self._turns, self._partials = voice, turns, partials
        self.spell: Spell | None = None
        """Set when probabilities are asked for."""
        self._base = 0
        self._going: deque[Item] = deque()
        """Oldest first. What is heard belongs to the first; the last may be open."""
        self._open: Item | None = None
        self._requests: deque[Request] = deque()
        self._last_id: str | None = None
        self.taken_samples = 0
        """Audio before this is in items that are closed, or forgotten."""

    @property
    def busy(self) -> bool:
        """Words are still owed."""
        return any(item.committed or self._turns for item in self._going)

    # --- what is heard --------------------------------------------------------------------------------

    def hear(self, event: LiveEvent) -> list[str]:
        match event:
            case TurnEvent(state, position) if self._turns:
                return self._turn(state, self._base + position)
            case FlushDone():
                return self._met(self._requests.popleft())
            case SessionFinished():  # what was asked for at the very end was not flushed
                return [told for _ in range(len(self._requests)) for told in self._met(self._requests.popleft())]
            case LiveSegmentDone(segment) if self._going:
                self._going[0].segments.append(segment)
                return self._words(self._going[0], "")
            case LivePartial(locked_text=fixed) if self._going:
                return [*self._words(self._going[0], fixed), *self._show(self._going[0], event.text)]
        return []

    def begin(self, base_samples: int, *, turns: bool) -> None:
        """Another caller is heard from now on, from that position; the one before has finished."""
        assert not self._requests, "a caller that has finished has been flushed"
        if turns and self._open is not None:  # less than a sample came for it
            self._going.remove(self._open)
            self._open = None
        self._base, self._turns = base_samples, turns

    def failed(self, what: Problem) -> list[str]:
        """Nothing more will be heard."""
        lost = [
            item for item in self._going if not item.forgotten and (self._turns or item.committed or item.said)
        ]
        self._going.clear()
        return [
            self._voice.event(f"{TRANSCRIPTION}.failed", item_id=item.id, content_index=0, error=_problem(what))
            for item in lost
        ]

    def _turn(self, state: str, position: int) -> list[str]:
        if state == "started":
            return [self._speech("started", self._add(position), audio_start_ms=_ms(position))]
        if state == "stopped":
            item, self._open = self._going[-1], None
            item.end = self.taken_samples = max(self.taken_samples, position)
            # One may have begun before it was cleared, too late to be speech for sure, and goes on.
            item.forgotten |= any(request.clear and position <= request.end for request in self._requests)
            stopped = self._speech("stopped", item, audio_end_ms=_ms(position))
            if item.forgotten:
                return [stopped]  # whoever was told that somebody speaks must hear that it is over
            for request in self._requests:
                request.met |= position <= request.end
            return [stopped, *self._commit(item)]
        return self._complete(self._going.popleft()) if state == "ended" else []

    def _met(self, request: Request) -> list[str]:
        if request.item is not None:
            assert self._going.popleft() is request.item, "items end in order"
            return self._complete(request.item)
        if request.clear or request.met:
            return []
        silent = Item(self._voice.item_id(), request.start)
        silent.end = request.end
        return [*self._commit(silent), *self._complete(silent)]

    # --- what the client does -------------------------------------------------------------------------

    def arrive(self) -> None:
        """Audio comes."""
        if not self._turns and self._open is None:
            self._add(self.taken_samples)

    def commit(self, received_samples: int) -> list[str]:
        """What came so far is an item; `Flushed` follows."""
        item = self._request(received_samples, clear=False).item
        return [] if item is None else self._commit(item)

    def clear(self, received_samples: int) -> list[str]:
        """What came so far is forgotten, but what is in items that are closed; `Flushed` follows."""
        if self._open is not None:
            self._open.forgotten = True
        self._request(received_samples, clear=True)
        return [self.cleared()]

    def cleared(self) -> str:
        return self._voice.event(f"{BUFFER}.cleared")

    def _request(self, received_samples: int, *, clear: bool) -> Request:
        item = None
        if not self._turns:
            item, self._open = self._open, None
            assert item is not None, "no audio came"
            item.end = received_samples
        asked = Request(self.taken_samples, received_samples, clear, item)
        self._requests.append(asked)
        self.taken_samples = received_samples
        return asked

    # --- what is told ---------------------------------------------------------------------------------

    def _add(self, start_samples: int) -> Item:
        self._open = Item(self._voice.item_id(), start_samples)
        self._going.append(self._open)
        return self._open

    def _speech(self, what: str, item: Item, **when: int) -> str:
        return self._voice.event(f"{BUFFER}.speech_{what}", item_id=item.id, **when)

    def _words(self, item: Item, fixed: str) -> list[str]:
        delta = item.delta(fixed)
        if not delta or item.forgotten:
            return []
        return [self._voice.event(f"{TRANSCRIPTION}.delta", item_id=item.id, content_index=0, delta=delta)]

    def _show(self, item: Item, text: str) -> list[str]:
        """Not of an item that is closed: what is heard may be the next one's."""
        shown = _joined(item.text, text)
        if not self._partials or item is not self._open or item.forgotten or shown == item.shown:
            return []
        item.shown = shown
        return [self._voice.event(f"{TRANSCRIPTION}.partial", item_id=item.id, content_index=0, transcript=shown)]

    def _commit(self, item: Item) -> list[str]:
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

    def _complete(self, item: Item) -> list[str]:
        if item.forgotten:
            return []
        seconds = round(units.samples_to_s(item.end - item.start), 3)
        heard = {} if self.spell is None else {"logprobs": logprobs(item.segments, self.spell)}
        return [
            self._voice.event(
                f"{TRANSCRIPTION}.completed",
                item_id=item.id,
                content_index=0,
                transcript=item.said,
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
