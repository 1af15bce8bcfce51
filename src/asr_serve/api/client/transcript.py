"""Events of a session, added up to what is known so far."""

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
    """What was said: `segments` are final, `locked` is the beginning of the next, `partial` may change."""

    def __init__(self, *, itn: bool = False) -> None:
        """`itn`: the session was opened with it. Then what is locked is as it was said, and not yet certain."""
        self._itn = itn
        self.segments: list[SegmentEvent] = []
        self.locked = self.partial = ""
        self.heard_s = 0.0
        """Audio that the server is known to have."""
        self.ended = False

    def note(self, event: ClientEvent) -> bool:
        """Whether the text has changed, or who said it."""
        match event:
            case SegmentEvent():
                self.segments.append(event)
                said = event.spoken or event.text
                # Of two who were heard as one, the second's words are the next segment's.
                self.locked = self.locked[len(said) :].lstrip() if self.locked.startswith(said) else ""
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
        """The text of all segments."""
        return " ".join(segment.text for segment in self.segments)

    @property
    def certain(self) -> str:
        """The beginning of `text` that will not change."""
        return " ".join(part for part in (self.final, "" if self._itn else self.locked) if part)

    @property
    def text(self) -> str:
        """All that is known."""
        return " ".join(part for part in (self.final, self.locked + self.partial) if part)
