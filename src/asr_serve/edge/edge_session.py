"""Session of one caller at the edge: its RTP stream, its spool, and what is counted of it."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import msgspec

from asr_serve.edge.audio_spool import AudioSpool
from asr_serve.edge.edge_events import AudioDiscarded, AudioUngated, EdgeEvent, PacketsDropped, SessionEnded
from asr_serve.edge.packet_driver import describe_source
from asr_serve.edge.payload_format import PayloadFormat
from asr_serve.edge.rtp import DropReason, RtpPacket, parse_rtp
from asr_serve.edge.rtp_stream import RtpStream
from asr_serve.edge.speech_gate import GatedSpeech, GateOutput
from asr_serve.edge.srtp import SrtpReceiver
from asr_serve.units import RATE_HZ, samples_to_s

EndReason = Literal["deleted", "hangup", "idle", "stopping", "failed"]


class EdgeSessionState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of a session, as the control API shows it."""

    id: str
    ssrc: int | None
    source: str | None
    connected: bool
    ended: bool
    duration_s: float
    received_s: float
    concealed_s: float
    silent_s: float
    discarded_s: float
    ungated_s: float = 0.0
    adjusted_samples: int
    packets: int
    lost_packets: int
    dropped: dict[str, int]
    encrypted: bool
    awaits_token: bool = False
    """Whether its sender has yet to tell its token."""
    jitter_ms: float
    drift_ppm: float
    segments: int
    events: int


class EdgeSession:
    """Session whose packets are pushed by the thread that receives them."""

    def __init__(
        self,
        flow: int,
        formats: Mapping[int, PayloadFormat],
        *,
        ssrc: int | None,
        source: bytes,
        window_s: float,
        spool_s: float,
        corrects_drift: bool,
        now_s: float,
        srtp: SrtpReceiver | None = None,
    ) -> None:
        self.id = f"edge_{secrets.token_hex(12)}"
        self.flow, self.ssrc, self.source = flow, ssrc, source
        self.formats = formats
        self._srtp = srtp
        self.stream = RtpStream(formats, window_s=window_s, corrects_drift=corrects_drift)
        self.spool = AudioSpool(int(spool_s * RATE_HZ))
        self.dropped: Counter[DropReason] = Counter()
        self.latched = False
        self.awaits_token = False
        self.last_packet_s = now_s
        self.is_held = False
        """Whether its sender is on hold, so that no packets are expected."""
        self.end_reason: EndReason | None = None
        self._flow_over_rate = self._told_over_rate = 0
        """Packets beyond the rate: as the driver has counted them since it knows the flow, and as they were told."""
        self._ungated_samples = self._told_ungated_samples = 0
        """Samples that went on without a look for speech, and those of them that were told."""
        self._discarded: tuple[int, int] | None = None
        """Start and end of the audio that is being discarded."""

    def expects(self, source: bytes) -> bool:
        """Returns whether its packets may come from there now."""
        if self.is_held:
            return False
        any_port = self.source[16:] == b"\0\0"
        return self.source in (b"", source) or (any_port and self.source[:16] == source[:16])

    def push(self, payload: bytes, arrival_s: float) -> RtpPacket | DropReason:
        """Takes a datagram; returns its packet, or why it was dropped."""
        plain = payload if self._srtp is None else self._srtp.unprotect(payload)
        packet = plain if isinstance(plain, DropReason) else parse_rtp(plain)
        reason = packet if isinstance(packet, DropReason) else self.stream.push(packet, arrival_s)
        if reason is not None:
            self.dropped[reason] += 1
            return reason
        self.last_packet_s = max(self.last_packet_s, arrival_s)
        return packet

    def note_over_rate(self, count: int) -> list[EdgeEvent]:
        """Notes how many packets the driver has dropped of the flow, since it was admitted, for coming too fast."""
        self.dropped[DropReason.OVER_RATE] += count - self._flow_over_rate
        self._flow_over_rate = count
        total = self.dropped[DropReason.OVER_RATE]
        if not total or total < 2 * self._told_over_rate:
            return []
        self._told_over_rate = total
        return [PacketsDropped(position_s=samples_to_s(self.stream.position), reason="over_rate", packets=total)]

    def readmit(self) -> None:
        """Notes that the driver counts anew: it has forgotten the flow."""
        self._flow_over_rate = 0

    def advance(self, now_s: float) -> tuple[list[GateOutput], list[EdgeEvent]]:
        """Returns the samples that are in order by now, and what happened."""
        return self.stream.advance(now_s), self.stream.take_events()

    def change_formats(self, formats: Mapping[int, PayloadFormat]) -> None:
        """Takes these payload types too, or in place of those of the same number."""
        self.formats = {**self.formats, **formats}
        self.stream.change_formats(self.formats)

    def change_key(self, srtp: SrtpReceiver | None) -> None:
        """Takes packets of another key, or plain ones, from now on."""
        self._srtp = srtp

    def finish(self, reason: EndReason) -> tuple[list[GateOutput], list[EdgeEvent]]:
        """Ends the audio: nothing is taken any more. Returns the rest of the samples, and what happened."""
        self.end_reason = reason
        return self.stream.finish(), self.stream.take_events()

    def spool_in(self, audio: list[GateOutput], *, last: bool = False) -> list[EdgeEvent]:
        """Appends audio to the spool, in order; returns what was discarded. `last`: ends the spool."""
        events: list[EdgeEvent] = []
        try:
            for each in audio:
                start = self.spool.end
                if self.spool.append(each):
                    self._discarded = (self._discarded[0] if self._discarded else start, self.spool.end)
                elif isinstance(each, GatedSpeech):
                    events += self._told_discarded()
            return events + (self._told_discarded() if last else [])
        finally:
            if last:
                self.spool.close()

    def note_ungated(self, samples: int) -> list[EdgeEvent]:
        """Notes how many samples went on without a look for speech."""
        self._ungated_samples += samples
        total = self._ungated_samples
        if not total or total < 2 * self._told_ungated_samples:
            return []
        self._told_ungated_samples = total
        return [AudioUngated(position_s=samples_to_s(self.spool.end), ungated_s=samples_to_s(total))]

    def ended_event(self, segments: int) -> SessionEnded:
        stream = self.stream
        return SessionEnded(
            reason=self.end_reason or "failed",
            duration_s=samples_to_s(self.spool.end),
            segments=segments,
            received_s=stream.received_s,
            concealed_s=stream.concealed_s,
            silent_s=stream.silent_s,
            adjusted_samples=stream.adjusted_samples,
            packets=stream.packets,
            lost_packets=stream.lost_packets,
            discarded_s=samples_to_s(self.spool.discarded_samples),
            dropped=self._dropped_packets(),
            sent_speech_s=samples_to_s(self.spool.speech_samples),
            ungated_s=samples_to_s(self._ungated_samples),
        )

    def _dropped_packets(self) -> dict[str, int]:
        return {str(reason): count for reason, count in self.dropped.items() if count}

    def describe(self, *, connected: bool, segments: int, events: int) -> EdgeSessionState:
        stream = self.stream
        known = self.latched or self.source
        return EdgeSessionState(
            id=self.id,
            ssrc=self.ssrc,
            source=describe_source(self.source) if known else None,
            connected=connected,
            ended=self.end_reason is not None,
            duration_s=samples_to_s(self.spool.end),
            received_s=stream.received_s,
            concealed_s=stream.concealed_s,
            silent_s=stream.silent_s,
            discarded_s=samples_to_s(self.spool.discarded_samples),
            ungated_s=samples_to_s(self._ungated_samples),
            adjusted_samples=stream.adjusted_samples,
            packets=stream.packets,
            lost_packets=stream.lost_packets,
            dropped=self._dropped_packets(),
            encrypted=self._srtp is not None,
            awaits_token=self.awaits_token and self.end_reason is None,
            jitter_ms=round(stream.jitter_s * 1_000, 2),
            drift_ppm=round(stream.drift_ppm, 1),
            segments=segments,
            events=events,
        )

    def _told_discarded(self) -> list[EdgeEvent]:
        """The event of what was discarded, once there is room again."""
        if self._discarded is None:
            return []
        start, end = self._discarded
        self._discarded = None
        return [AudioDiscarded(start_s=samples_to_s(start), end_s=samples_to_s(end))]
