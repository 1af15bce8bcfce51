"""Jitter buffer with an exact clock: packets in any order in, a gapless timeline out. Pure; time is an argument.

Packets in sequence leave at once; only a gap makes the ones behind it wait, for `window_s` at most. Every tick of the
timeline is accounted for once: as audio that was received, as loss that is to be concealed, or as silence. Positions
count ticks of the payload's clock since the first packet.
"""

from __future__ import annotations

from typing import NamedTuple

from asr_serve.edge.rtp import DropReason, RtpPacket

WINDOW_S = 0.2
"""Longest wait for a missing packet."""
SILENCE_AFTER_S = 0.5
"""Quiet time after which a sender counts as silent, and silence is told before its next packet."""
MAX_AHEAD_S = 5.0
"""Longest time without audio that may be told ahead of arrivals: a gap beyond it is a new timeline, not silence."""
MAX_PACKETS = 256
"""Packets that wait at most; at this number the gap in front of them is given up."""
MAX_JUMP = 3_000
MAX_MISORDER = 300
"""Distances of sequence numbers beyond which a packet does not belong to the stream (RFC 3550, appendix A.1)."""
HISTORY = 1_024
_HISTORY_MASK = (1 << HISTORY) - 1


class ReceivedAudio(NamedTuple):
    """Audio of one packet at `position`."""

    position: int
    units: int
    payload_type: int
    payload: bytes


class LostAudio(NamedTuple):
    """Place of `packets` that did not arrive. `next_payload`: the packet behind them, which may help to conceal."""

    position: int
    units: int
    packets: int
    payload_type: int
    next_payload: bytes


class SilentGap(NamedTuple):
    """Ticks that the sender did not fill: discontinuous transmission, comfort noise, digits, a stall."""

    position: int
    units: int


class TimelineShift(NamedTuple):
    """Change of the sender's timestamps that is no time: at `position` the timeline goes on without it. Negative:
    audio came for a time that was already told as silence, and follows it."""

    position: int
    units: int


TimelineItem = ReceivedAudio | LostAudio | SilentGap | TimelineShift


class _Waiting(NamedTuple):
    packet: RtpPacket
    units: int
    """0: no audio."""
    arrival_s: float


class JitterBuffer:
    """Buffer of one SSRC whose payload types have one clock.

    In      `push`: packets as they arrive, their payload's length in ticks, the time of arrival
    Out     `pop`: items in order, each at the end of the one before
    State   at most MAX_PACKETS packets
    """

    def __init__(self, clock_hz: int, granule: int = 1, *, window_s: float = WINDOW_S) -> None:
        """`granule`: fewest ticks that are whole samples; gaps are multiples of it."""
        self.clock_hz, self._granule, self._window_s = clock_hz, granule, window_s
        self._waiting: dict[int, _Waiting] = {}
        """Packets by extended sequence number."""
        self._next: int | None = None
        """Extended sequence number that is to leave next; None before the first packet has left."""
        self._highest = 0
        self._history = 0
        """Bit k: the packet k + 1 before `_next` was received."""
        self._last_timestamp = 0
        self._origin = 0
        """Extended timestamp at position 0."""
        self._position = 0
        self._usual_units = 0
        self._missing = 0
        """Packets that did not arrive since the last audio."""
        self._provisional = 0
        """Ticks of silence told since the last packet, before anybody knew."""
        self._last_arrival_s = 0.0
        self._ahead_s = self._ahead_at_s = 0.0
        """Lead of told losses and silence over the clock, and the time at which they had it. The clock takes it
        back, so that a stall, or a sender whose clock is fast, does not use it up for the rest of a call."""
        self.received_units = self.lost_units = self.silent_units = 0
        self.lost_packets = 0

    @property
    def position(self) -> int:
        """End of what has left: received, lost and silent ticks together."""
        return self._position

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def extended_timestamp(self, timestamp: int) -> int:
        """Timestamp without wrap-around, by the last packet's."""
        return self._last_timestamp + _signed(timestamp - self._last_timestamp, 32)

    def push(self, packet: RtpPacket, units: int, arrival_s: float) -> DropReason | None:
        """Takes a packet, or returns why not. JUMP: the caller decides whether a new stream
        has begun. Call `pop` after it."""
        if self._next is None and not self._waiting:
            sequence = 1 << 16 | packet.sequence
            self._highest = sequence
            self._last_arrival_s = self._ahead_at_s = arrival_s
        else:
            sequence = self._highest + _signed(packet.sequence - self._highest, 16)
            if not self._highest - MAX_MISORDER <= sequence <= self._highest + MAX_JUMP:
                return DropReason.JUMP
        if self._next is not None and sequence < self._next:
            return DropReason.DUPLICATE if self._history >> (self._next - sequence - 1) & 1 else DropReason.LATE
        if sequence in self._waiting:
            return DropReason.DUPLICATE
        self._highest = max(self._highest, sequence)
        if units:  # comfort noise and keys are no audio: a pause that has them is told too
            self._last_arrival_s = max(self._last_arrival_s, arrival_s)
        self._waiting[sequence] = _Waiting(packet, units, arrival_s)
        return None

    @property
    def due_s(self) -> float | None:
        """Time at which `pop` gives up what is missing. None: nothing waits. Silence is told whenever it is called."""
        if self._waiting:
            return min(waiting.arrival_s for waiting in self._waiting.values()) + self._window_s
        return None

    def pop(self, now_s: float) -> list[TimelineItem]:
        """Returns what is in order, or was waited for long enough."""
        items: list[TimelineItem] = []
        while self._waiting:
            first = min(self._waiting) if self._next is None or self._next not in self._waiting else self._next
            if first != self._next and not self._is_due(now_s):
                return items
            missing = 0 if self._next is None else first - self._next
            self._release(first, missing, items)
        if self._next is not None:
            self._fill_silence(now_s, items)
        return items

    def finish(self) -> list[TimelineItem]:
        """Returns all that waits."""
        return self.pop(float("inf")) if self._waiting else []

    def fill_until(self, arrival_s: float) -> list[TimelineItem]:
        """Tells the pause before another stream's first packet, by times of arrival, as its timestamps say nothing
        about this one's. One within the window may be the network's, and is not told."""
        items: list[TimelineItem] = []
        pause_s = arrival_s - self._last_arrival_s - self._usual_units / self.clock_hz
        if self._next is not None and pause_s >= self._window_s:
            units = max(0, round(pause_s * self.clock_hz) - self._provisional)
            self._tell_silence(units - units % self._granule, items)
        return items

    def _is_due(self, now_s: float) -> bool:
        if len(self._waiting) >= MAX_PACKETS or now_s == float("inf"):
            return True
        # The same sum as in `due_s`: who wakes at that time must find it due.
        return min(waiting.arrival_s for waiting in self._waiting.values()) + self._window_s <= now_s

    def _release(self, sequence: int, missing: int, items: list[TimelineItem]) -> None:
        packet, units, arrival_s = self._waiting.pop(sequence)
        if self._next is None:
            self._last_timestamp = self._origin = packet.timestamp
        self._last_timestamp = self.extended_timestamp(packet.timestamp)
        self._history = (self._history << missing + 1 | 1) & _HISTORY_MASK if missing < HISTORY else 1
        self._next = sequence + 1
        self.lost_packets += missing
        self._missing += missing
        if not units:
            return
        self._close_gap(self._last_timestamp - self._origin - self._position, packet, units, arrival_s, items)
        items.append(ReceivedAudio(self._position, units, packet.payload_type, packet.payload))
        self._position += units
        self.received_units += units
        self._usual_units, self._missing, self._provisional = units, 0, 0

    def _close_gap(self, gap: int, packet: RtpPacket, units: int, arrival_s: float, items: list[TimelineItem]) -> None:
        """Accounts for the ticks between the end of what has left and this packet."""
        if abs(gap) < self._granule:
            return  # not lost: the next packet's gap is measured from the same origin
        gap -= gap % self._granule
        if gap < 0 or self._ahead_after(gap, arrival_s) > MAX_AHEAD_S:
            items.append(TimelineShift(self._position, gap))
            self._origin += gap
            return
        self._run_ahead(gap, arrival_s)
        lost = min(gap, self._missing * (self._usual_units or units))
        lost -= lost % self._granule
        if lost:
            items.append(LostAudio(self._position, lost, self._missing, packet.payload_type, packet.payload))
            self._position += lost
            self.lost_units += lost
        self._tell_silence(gap - lost, items)

    def _fill_silence(self, now_s: float, items: list[TimelineItem]) -> None:
        """Tells silence that must be: nothing has come for it, and what comes now would be too late anyway. Otherwise a
        sentence before a pause in which its sender is silent would not end before the pause does."""
        quiet_s = now_s - self._last_arrival_s
        if not SILENCE_AFTER_S <= quiet_s < float("inf"):
            return
        units = int((quiet_s - self._window_s) * self.clock_hz) - self._provisional
        if units * 50 >= self.clock_hz:  # 20 ms at least, not a few ticks at each call
            units -= units % self._granule
            self._provisional += units
            self._run_ahead(units, now_s)
            self._tell_silence(units, items)

    def _ahead_after(self, units: int, now_s: float) -> float:
        """Lead of losses and silence over the clock, once these are told too."""
        return max(0.0, self._ahead_s + units / self.clock_hz - max(0.0, now_s - self._ahead_at_s))

    def _run_ahead(self, units: int, now_s: float) -> None:
        self._ahead_s = self._ahead_after(units, now_s)
        self._ahead_at_s = max(self._ahead_at_s, now_s)

    def _tell_silence(self, units: int, items: list[TimelineItem]) -> None:
        if units:
            items.append(SilentGap(self._position, units))
            self._position += units
            self.silent_units += units


def _signed(difference: int, bits: int) -> int:
    """Difference of two numbers that wrap around, as the nearer of both ways."""
    half = 1 << bits - 1
    return (difference + half) % (1 << bits) - half
