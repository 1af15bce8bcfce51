"""Transcript of a session, accumulated from its events."""

from __future__ import annotations

from msgspec.structs import replace

from asr_serve.api.client.stream import ClientEvent
from asr_serve.protocols.stream.server_events import (
    AckEvent,
    EndEvent,
    LockedTextEvent,
    PartialEvent,
    SegmentEvent,
    SpeakersEvent,
)


class SessionTranscript:
    """Text so far: `segments` are final, `locked` is the beginning of the next, `partial` may change."""

    def __init__(self, *, itn: bool = False) -> None:
        """`itn`: whether the session was opened with it. Then locked text is in spoken form, and not yet certain."""
        self._itn = itn
        self.segments: list[SegmentEvent] = []
        self.locked = self.partial = ""
        self.heard_s = 0.0
        """Audio that the server is known to have received."""
        self.ended = False

    def note(self, event: ClientEvent) -> bool:
        """Applies an event; returns whether the text or its speakers have changed."""
        match event:
            case SegmentEvent():
                self.segments.append(event)
                spoken_text = event.spoken or event.text
                # If two speakers were recognized as one segment, the second's words belong to the next segment.
                self.locked = self.locked[len(spoken_text) :].lstrip() if self.locked.startswith(spoken_text) else ""
                self.partial = ""
            case SpeakersEvent(segments=others):
                for other in others:
                    self.segments[other.index] = replace(self.segments[other.index], speaker=other.speaker)
                return bool(others)
            case LockedTextEvent(text=text):
                self.locked += text
                self.partial = ""
            case PartialEvent(text=text):
                changed, self.partial = text != self.partial, text
                return changed
            case AckEvent(received_s=received_s):
                self.heard_s = received_s
                return False
            case EndEvent(duration_s=duration_s):
                self.heard_s, self.ended = duration_s, True
            case _:
                return False
        return True

    @property
    def final(self) -> str:
        """Text of all segments."""
        return " ".join(segment.text for segment in self.segments)

    @property
    def certain(self) -> str:
        """Beginning of `text` that will not change."""
        return " ".join(part for part in (self.final, "" if self._itn else self.locked) if part)

    @property
    def text(self) -> str:
        """All text so far."""
        return " ".join(part for part in (self.final, self.locked + self.partial) if part)
