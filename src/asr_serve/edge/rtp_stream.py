"""RTP stream of one session: packets in, samples at 16 kHz out, on an exact clock. Pure; time is an argument."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from fractions import Fraction
from typing import Literal

import numpy as np

from asr_serve.audio.pcm import clipped, to_int16
from asr_serve.audio.resample import Resampler
from asr_serve.edge.clock_drift import ClockDriftMeter, DriftCorrector
from asr_serve.edge.edge_events import DigitPressed, EdgeEvent, LossTold, StreamBegun, TimeShifted
from asr_serve.edge.jitter_buffer import (
    WINDOW_S,
    JitterBuffer,
    LostAudio,
    ReceivedAudio,
    SilentGap,
    TimelineItem,
    TimelineShift,
)
from asr_serve.edge.payload_decoder import PayloadDecoder, create_payload_decoder, payload_units
from asr_serve.edge.payload_format import PayloadFormat
from asr_serve.edge.rtp import DropReason, RtpPacket
from asr_serve.edge.speech_gate import GatedSilence, GatedSpeech, GateOutput
from asr_serve.errors import CorruptAudio
from asr_serve.units import RATE_HZ, resampled_samples, samples_to_s

DIGITS = "0123456789*#ABCD"
DIGITS_REMEMBERED = 8
"""Keys whose repeats are known: more than can be reordered."""
MIN_SHIFT_S = 0.02
"""Shortest shift of timestamps that is told; shorter ones are counted."""
SILENCE_BLOCK_S = 1
MAX_STEP_S = 10
"""Change of timestamps between two packets after which the drift is measured anew."""
JITTER_SHARE = 16
"""Weight of the past in the jitter (RFC 3550, section 6.4.1)."""


class RtpStream:
    """Stream of one caller, whose SSRC, sequence numbers, codec and clock may change.

    In      `push`: RTP packets with their time of arrival; `advance`: the time
    Out     `advance`, `finish`: samples (n,) int16 at 16 kHz, and digital zeros as counts; `take_events`: what happened
    State   a jitter buffer, a decoder for each payload type, a resampler

    Samples out are those received, concealed and silent, resampled, and `adjusted_samples`: none is lost between.
    """

    def __init__(
        self, formats: Mapping[int, PayloadFormat], *, window_s: float = WINDOW_S, corrects_drift: bool = True
    ) -> None:
        self._formats, self._window_s, self._corrects_drift = formats, window_s, corrects_drift
        self._buffer: JitterBuffer | None = None
        self._ssrc = 0
        self._candidate: tuple[RtpPacket, int, float] | None = None
        """Packet that may be the first of a new stream: the next in sequence confirms it."""
        self._decoders: dict[int, PayloadDecoder] = {}
        self._resampler = Resampler(RATE_HZ)
        self._finished_samples = 0
        """Output of earlier resamplers."""
        self._meter, self._corrector = ClockDriftMeter(), DriftCorrector()
        self._events: list[EdgeEvent] = []
        self._out: list[GateOutput] = []
        self._last: tuple[float, int] | None = None
        """Arrival and timestamp of the last audio packet."""
        self._sent_units = 0
        self._digit_timestamps: deque[int] = deque(maxlen=DIGITS_REMEMBERED)
        """Timestamps of the last keys that were told."""
        self.packets = self._lost_before = 0
        self._samples: dict[str, Counter[int]] = {kind: Counter() for kind in ("received", "concealed", "silent")}
        """Samples of each kind by their rate: exact, whatever codecs come."""
        self.jitter_s = 0.0
        self.last_arrival_s: float | None = None

    @property
    def position(self) -> int:
        """Position at 16 kHz of the end of all audio so far, including what the resampler still holds."""
        fed = resampled_samples(self._resampler.input_samples, self._resampler.rate_hz)
        return self._finished_samples + fed + self._corrector.adjusted_samples

    @property
    def adjusted_samples(self) -> int:
        return self._corrector.adjusted_samples

    @property
    def lost_packets(self) -> int:
        return self._lost_before + (0 if self._buffer is None else self._buffer.lost_packets)

    @property
    def drift_ppm(self) -> float:
        return self._meter.ppm

    @property
    def received_s(self) -> float:
        return self._seconds("received")

    @property
    def concealed_s(self) -> float:
        return self._seconds("concealed")

    @property
    def silent_s(self) -> float:
        return self._seconds("silent")

    def _seconds(self, kind: str) -> float:
        return float(sum(Fraction(samples, rate_hz) for rate_hz, samples in self._samples[kind].items()))

    def change_formats(self, formats: Mapping[int, PayloadFormat]) -> None:
        """Changes what payload types mean. What waits is decoded as what it was sent as."""
        if formats != self._formats:
            if self._buffer is not None:
                self._apply(self._buffer.finish())
            self._formats = formats
            self._decoders.clear()

    def push(self, packet: RtpPacket, arrival_s: float) -> DropReason | None:
        """Takes a packet, or returns why not. Call `advance` after a batch of them."""
        form = self._formats.get(packet.payload_type)
        if form is None:
            return DropReason.UNKNOWN_PAYLOAD_TYPE
        units = payload_units(form, packet.payload)
        if units is None:
            return DropReason.BAD_PAYLOAD
        if self._buffer is None:
            self._begin(packet, form, arrival_s, "first")
        elif packet.ssrc != self._ssrc:
            return self._consider(packet, units, arrival_s, "ssrc")
        elif form.is_audio and form.clock_hz != self._buffer.clock_hz:
            self._begin(packet, form, arrival_s, "clock")
        reason = self._accept(packet, units, arrival_s)
        if reason is DropReason.JUMP:
            return self._consider(packet, units, arrival_s, "sequence")
        if reason is None:
            self._candidate = None  # the stream goes on: two senders in turn are not one that has changed
        return reason

    def advance(self, now_s: float) -> list[GateOutput]:
        """Returns the samples that are in order by now."""
        if self._buffer is not None:
            self._apply(self._buffer.pop(now_s))
        return self._take()

    def finish(self) -> list[GateOutput]:
        """Returns all remaining samples, as if silence followed."""
        if self._buffer is not None:
            self._apply(self._buffer.finish())
            self._lost_before += self._buffer.lost_packets
            self._buffer = None
        self._put(self._resampler.finish())
        return self._take()

    def take_events(self) -> list[EdgeEvent]:
        events, self._events = self._events, []
        return events

    def _take(self) -> list[GateOutput]:
        out, self._out = self._out, []
        return out

    # --- packets ---------------------------------------------------------------------------------------

    def _accept(self, packet: RtpPacket, units: int, arrival_s: float) -> DropReason | None:
        assert self._buffer is not None
        reason = self._buffer.push(packet, units, arrival_s)
        if reason is not None:
            return reason
        self.packets += 1
        self.last_arrival_s = arrival_s
        if units:
            self._measure(packet.timestamp, arrival_s, self._buffer.clock_hz)
        elif self._formats[packet.payload_type].encoding == "telephone-event":
            self._tell_digit(packet)
        return None

    def _consider(
        self, packet: RtpPacket, units: int, arrival_s: float, reason: Literal["ssrc", "sequence"]
    ) -> DropReason | None:
        """Begins a new stream with the second packet of two in sequence; a single one is dropped."""
        before = self._candidate
        if before is None or before[0].ssrc != packet.ssrc or before[0].sequence + 1 & 0xFFFF != packet.sequence:
            self._candidate = packet, units, arrival_s
            return DropReason.JUMP
        first = before[0]
        self._begin(first, self._formats[first.payload_type], before[2], reason)
        self._accept(*before)
        return self._accept(packet, units, arrival_s)

    def _begin(
        self,
        packet: RtpPacket,
        form: PayloadFormat,
        arrival_s: float,
        reason: Literal["first", "ssrc", "sequence", "clock"],
    ) -> None:
        if self._buffer is not None:
            self._apply(self._buffer.finish())
            self._apply(self._buffer.fill_until(arrival_s))
            self._lost_before += self._buffer.lost_packets
        same_clock = [each for each in self._formats.values() if each.is_audio and each.clock_hz == form.clock_hz]
        granule = max((each.granule for each in same_clock), default=1)
        self._buffer = JitterBuffer(form.clock_hz, granule, window_s=self._window_s)
        self._ssrc, self._candidate, self._last = packet.ssrc, None, None
        self._decoders.clear()
        self._meter.restart()
        self._events.append(
            StreamBegun(position_s=samples_to_s(self.position), ssrc=packet.ssrc, encoding=form.encoding, reason=reason)
        )

    def _measure(self, timestamp: int, arrival_s: float, clock_hz: int) -> None:
        """Notes jitter and drift of an arrival."""
        if self._last is not None:
            step = (timestamp - self._last[1] + (1 << 31)) % (1 << 32) - (1 << 31)
            self._sent_units += step
            if abs(step) > MAX_STEP_S * clock_hz:
                self._meter.restart()
            else:
                difference_s = abs(arrival_s - self._last[0] - step / clock_hz)
                self.jitter_s += (difference_s - self.jitter_s) / JITTER_SHARE
        self._last = arrival_s, timestamp
        self._meter.append(arrival_s, self._sent_units / clock_hz)

    def _tell_digit(self, packet: RtpPacket) -> None:
        """Tells a key once, although several packets repeat it, some of them behind the next key's."""
        event = packet.payload[0] if len(packet.payload) >= 4 else len(DIGITS)
        if event < len(DIGITS) and packet.timestamp not in self._digit_timestamps:
            self._digit_timestamps.append(packet.timestamp)
            self._events.append(DigitPressed(position_s=samples_to_s(self.position), digit=DIGITS[event]))

    # --- the timeline ----------------------------------------------------------------------------------

    def _apply(self, items: list[TimelineItem]) -> None:
        assert self._buffer is not None
        clock_hz = self._buffer.clock_hz
        for item in items:
            match item:
                case ReceivedAudio():
                    self._decode(item)
                case LostAudio():
                    start = self.position
                    form, decoder = self._decoder(item.payload_type)
                    samples = form.samples(item.units)
                    self._count("concealed", samples, form.rate_hz)
                    try:
                        pcm = decoder.conceal(samples, item.next_payload)
                    except CorruptAudio:  # the next packet, which may hold this one too, is damaged
                        pcm = decoder.conceal(samples, b"")
                    self._append(pcm, form.rate_hz)
                    self._events.append(
                        LossTold(start_s=samples_to_s(start), end_s=samples_to_s(self.position), packets=item.packets)
                    )
                case SilentGap():
                    self._append_silence(item.units, clock_hz)
                case TimelineShift() if abs(item.units) >= MIN_SHIFT_S * clock_hz:
                    self._events.append(
                        TimeShifted(position_s=samples_to_s(self.position), shift_s=round(item.units / clock_hz, 4))
                    )

    def _decoder(self, payload_type: int) -> tuple[PayloadFormat, PayloadDecoder]:
        form = self._formats[payload_type]
        decoder = self._decoders.get(payload_type)
        if decoder is None:
            decoder = self._decoders[payload_type] = create_payload_decoder(form)
        return form, decoder

    def _decode(self, item: ReceivedAudio) -> None:
        form, decoder = self._decoder(item.payload_type)
        samples = form.samples(item.units)
        try:
            pcm = decoder.decode(item.payload)
        except CorruptAudio:
            pcm = decoder.conceal(samples, b"")
            self._count("concealed", samples, form.rate_hz)
        else:
            self._count("received", samples, form.rate_hz)
        self._append(pcm, form.rate_hz)

    def _append_silence(self, units: int, clock_hz: int) -> None:
        rate_hz = self._resampler.rate_hz
        form = next((self._formats[kind] for kind in self._decoders), None)
        if form is not None and form.clock_hz == clock_hz:
            rate_hz = form.rate_hz
            samples = form.samples(units)
        else:  # no audio has come yet: at the clock's own rate
            rate_hz, samples = clock_hz, units
        self._count("silent", samples, rate_hz)
        block = SILENCE_BLOCK_S * rate_hz
        for start in range(0, samples, block):
            self._append(np.zeros(min(block, samples - start), np.float32), rate_hz)

    def _count(self, kind: str, samples: int, rate_hz: int) -> None:
        self._samples[kind][rate_hz] += samples

    def _append(self, pcm: np.ndarray, rate_hz: int) -> None:
        if rate_hz != self._resampler.rate_hz:
            self._put(self._resampler.finish())
            self._finished_samples += self._resampler.output_samples
            self._resampler = Resampler(rate_hz)
        self._put(self._resampler.resample(pcm))

    def _put(self, pcm: np.ndarray) -> None:
        if not len(pcm):
            return
        if self._corrects_drift:
            pcm = self._corrector.correct(pcm, self._meter.ppm)
        samples = to_int16(clipped(pcm))
        if len(samples):
            self._out.append(GatedSpeech(samples) if samples.any() else GatedSilence(len(samples)))
