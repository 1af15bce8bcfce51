"""Events of an edge session: what was recognized, and what happened to the audio on its way. Data only.

Times are seconds of the session's audio at 16 kHz, as the recognizer gets it.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class EdgeEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of events."""

    @property
    def type(self) -> str:
        return str(self.__struct_config__.tag)


class StreamBegun(EdgeEvent, frozen=True, kw_only=True, tag="stream"):
    """First packets of an RTP stream. `reason`: what began it."""

    position_s: float
    ssrc: int
    encoding: str
    reason: Literal["first", "ssrc", "sequence", "clock"]


class TokenTaken(EdgeEvent, frozen=True, kw_only=True, tag="token"):
    """Sender that has told the session's token: packets with this SSRC from this address are the session's."""

    ssrc: int
    address: str


class LossTold(EdgeEvent, frozen=True, kw_only=True, tag="loss"):
    """Packets that did not arrive, and whose time was concealed."""

    start_s: float
    end_s: float
    packets: int


class TimeShifted(EdgeEvent, frozen=True, kw_only=True, tag="shift"):
    """Change of the sender's timestamps that was no time. Negative: audio arrived after its time had been told as
    silence, and follows it."""

    position_s: float
    shift_s: float


class DigitPressed(EdgeEvent, frozen=True, kw_only=True, tag="digit"):
    """Key of a telephone (RFC 4733)."""

    position_s: float
    digit: str


class AudioDiscarded(EdgeEvent, frozen=True, kw_only=True, tag="discarded"):
    """Audio that the spool had no room for: the server was away, or too slow, for too long. Silence stands for it. Or
    audio over which the engine died twice, which is not sent again."""

    start_s: float
    end_s: float


class PacketsDropped(EdgeEvent, frozen=True, kw_only=True, tag="dropped"):
    """Packets of the session's own source that were dropped: `packets` so far. Told at the first, and whenever their
    number has doubled; the last event has the account of all reasons."""

    position_s: float
    reason: Literal["over_rate"]
    packets: int


class AudioUngated(EdgeEvent, frozen=True, kw_only=True, tag="ungated"):
    """Audio that was sent on without a look for speech, as this host is too slow for it: `ungated_s` so far. Told at
    the first, and whenever it has doubled; no word is lost."""

    position_s: float
    ungated_s: float


class ServerLost(EdgeEvent, frozen=True, kw_only=True, tag="server_lost"):
    """Connection to the server was lost; audio is spooled, and attempts to resume continue."""

    position_s: float
    reason: str


class ServerFound(EdgeEvent, frozen=True, kw_only=True, tag="server_back"):
    """Connection to the server again. `again_from_s`: the server does not know the session any more, and recognizes
    audio again from here, the end of the last segment; locked text beyond it is void."""

    position_s: float
    again_from_s: float | None = None


class PartialText(EdgeEvent, frozen=True, kw_only=True, tag="partial"):
    """Text of the open segment that may change."""

    start_s: float
    end_s: float
    text: str


class LockedText(EdgeEvent, frozen=True, kw_only=True, tag="locked"):
    """Text of the open segment that will not change, after what was locked of it before."""

    start_s: float
    end_s: float
    text: str


class SegmentText(EdgeEvent, frozen=True, kw_only=True, tag="segment"):
    """Final segment."""

    index: int
    start_s: float
    end_s: float
    text: str
    speaker: str | None = None
    spoken: str | None = None
    language: str | None = None


class TurnTold(EdgeEvent, frozen=True, kw_only=True, tag="turn"):
    state: str
    position_s: float
    by: str


class CallBegun(EdgeEvent, frozen=True, kw_only=True, tag="call"):
    """Telephone call whose audio the session is. `call_id`: SIP's Call-ID."""

    call_id: str
    caller: str
    called: str
    direction: Literal["in", "out"]
    encoding: str


class CallHeld(EdgeEvent, frozen=True, kw_only=True, tag="hold"):
    """Call that the other side holds; what it plays meanwhile is not heard."""

    position_s: float


class CallResumed(EdgeEvent, frozen=True, kw_only=True, tag="resume"):
    position_s: float


class AudioPlayed(EdgeEvent, frozen=True, kw_only=True, tag="played"):
    """Audio that was sent to the caller. `interrupted`: it was stopped before its end."""

    played_s: float
    interrupted: bool


class SessionFailed(EdgeEvent, frozen=True, kw_only=True, tag="error"):
    """Refusal by the server, after which nothing more is recognized."""

    code: str
    message: str


class SessionEnded(EdgeEvent, frozen=True, kw_only=True, tag="end"):
    """Last event, with the account of all samples at 16 kHz and of the packets."""

    reason: Literal["deleted", "hangup", "idle", "stopping", "failed"]
    duration_s: float
    segments: int
    received_s: float
    concealed_s: float
    silent_s: float
    adjusted_samples: int
    packets: int
    lost_packets: int
    discarded_s: float
    dropped: dict[str, int] = {}
    """Packets that were dropped, by reason."""
    sent_speech_s: float
    """Audio that was sent as samples; the rest went as lengths of silence."""
    ungated_s: float = 0.0
    """Audio of it that was sent on without a look for speech, where there is voice activity."""
