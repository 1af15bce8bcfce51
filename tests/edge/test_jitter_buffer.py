"""The jitter buffer's clock: every tick accounted for once, whatever happens to packets on their way."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.edge.jitter_buffer import (
    MAX_AHEAD_S,
    MAX_PACKETS,
    WINDOW_S,
    JitterBuffer,
    LostAudio,
    ReceivedAudio,
    SilentGap,
    TimelineItem,
    TimelineShift,
)
from asr_serve.edge.rtp import DropReason, RtpPacket

UNITS, CLOCK_HZ, PACKET_S = 160, 8_000, 0.02
SEQUENCE, TIMESTAMP = 65_530, 2**32 - 1_000  # both wrap around soon


def packet(number: int, *, at_units: int | None = None, kind: int = 0) -> RtpPacket:
    """Packet `number` of a stream of 20 ms packets."""
    units = number * UNITS if at_units is None else at_units
    payload = (number % 2**32).to_bytes(4, "big") + bytes(UNITS - 4)
    return RtpPacket(kind, False, (SEQUENCE + number) % 2**16, (TIMESTAMP + units) % 2**32, 1, payload)


def play(
    arrivals: Iterable[tuple[float, RtpPacket, int]], end_s: float = 0.0
) -> tuple[JitterBuffer, list[TimelineItem]]:
    """Pushes packets as they arrive, and pops at each arrival and whenever the buffer is due."""
    buffer = JitterBuffer(CLOCK_HZ)
    items: list[TimelineItem] = []
    for arrival_s, sent, units in sorted(arrivals, key=lambda arrival: arrival[0]):
        while (due_s := buffer.due_s) is not None and due_s <= arrival_s:
            items += buffer.pop(due_s)
        buffer.push(sent, units, arrival_s)
        items += buffer.pop(arrival_s)
    if end_s:
        items += buffer.pop(end_s)
    items += buffer.finish()
    return buffer, items


def check_accounts(buffer: JitterBuffer, items: Sequence[TimelineItem]) -> None:
    """Each item begins where the one before ended, and the sums agree."""
    at = 0
    for item in items:
        assert item.position == at
        at += 0 if isinstance(item, TimelineShift) else item.units
    assert at == buffer.position == buffer.received_units + buffer.lost_units + buffer.silent_units
    for kind, total in (
        (ReceivedAudio, buffer.received_units),
        (LostAudio, buffer.lost_units),
        (SilentGap, buffer.silent_units),
    ):
        assert sum(item.units for item in items if isinstance(item, kind)) == total


def numbers(items: Sequence[TimelineItem]) -> list[int]:
    return [int.from_bytes(item.payload[:4], "big") for item in items if isinstance(item, ReceivedAudio)]


def test_packets_in_order_leave_at_once_after_the_first() -> None:
    buffer = JitterBuffer(CLOCK_HZ)
    buffer.push(packet(0), UNITS, 0.0)
    assert buffer.pop(WINDOW_S / 2) == []
    assert numbers(buffer.pop(WINDOW_S)) == [0]
    for number in range(1, 20):
        buffer.push(packet(number), UNITS, 1.0 + number * PACKET_S)
        assert numbers(buffer.pop(1.0 + number * PACKET_S)) == [number]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_tick_is_accounted_for_and_order_does_not_matter(data: st.DataObject) -> None:
    """Loss, duplicates and delays below the window; pauses of the sender; numbers that wrap around."""
    count = data.draw(st.integers(2, 60))
    lost = data.draw(st.sets(st.integers(1, count - 1), max_size=count // 3))
    pauses = data.draw(st.dictionaries(st.integers(1, count - 1), st.integers(1, 3_000), max_size=3))
    seed = data.draw(st.integers(0, 2**32))
    at, starts = 0, []
    for number in range(count):
        at += pauses.get(number, 0)
        starts.append(at)
        at += UNITS
    kept = [number for number in range(count) if number not in lost]

    def arrive(delay: random.Random | None) -> list[tuple[float, RtpPacket, int]]:
        found = []
        for number in kept:
            sent_s = starts[number] / CLOCK_HZ
            for _ in range(1 if delay is None else delay.choice((1, 1, 2))):
                delay_s = 0.0 if delay is None else delay.uniform(0, WINDOW_S * 0.95)
                found.append((sent_s + delay_s, packet(number, at_units=starts[number]), UNITS))
        return found

    buffer, items = play(arrive(None))
    check_accounts(buffer, items)
    assert numbers(items) == kept
    assert buffer.position == (starts[kept[-1]] + UNITS - starts[kept[0]])
    assert buffer.lost_packets == kept[-1] - kept[0] + 1 - len(kept)
    shuffled, other = play(arrive(random.Random(seed)))
    assert merged(other) == merged(items)
    check_accounts(shuffled, other)


def merged(items: Sequence[TimelineItem]) -> list[TimelineItem]:
    """Silence told in parts is the same as silence told at once."""
    out: list[TimelineItem] = []
    for item in items:
        if out and isinstance(item, SilentGap) and isinstance(out[-1], SilentGap):
            out[-1] = SilentGap(out[-1].position, out[-1].units + item.units)
        else:
            out.append(item)
    return out


def test_a_loss_is_told_with_the_packet_behind_it() -> None:
    _, items = play([(n * PACKET_S, packet(n), UNITS) for n in (0, 1, 4, 5)])
    (loss,) = (item for item in items if isinstance(item, LostAudio))
    assert (loss.position, loss.units, loss.packets) == (2 * UNITS, 2 * UNITS, 2)
    assert loss.next_payload == packet(4).payload


def test_a_packet_behind_its_window_is_late_and_one_that_came_twice_a_duplicate() -> None:
    buffer = JitterBuffer(CLOCK_HZ)
    for number in (0, 2):
        assert buffer.push(packet(number), UNITS, 0.0) is None
    assert buffer.push(packet(2), UNITS, 0.0) is DropReason.DUPLICATE
    assert numbers(buffer.pop(WINDOW_S)) == [0, 2]
    assert buffer.push(packet(1), UNITS, 0.3) is DropReason.LATE
    assert buffer.push(packet(2), UNITS, 0.3) is DropReason.DUPLICATE
    assert buffer.push(packet(0), UNITS, 0.3) is DropReason.DUPLICATE


def test_silence_is_told_before_the_sender_speaks_again() -> None:
    buffer = JitterBuffer(CLOCK_HZ)
    buffer.push(packet(0), UNITS, 0.0)
    first = buffer.pop(WINDOW_S)
    early = buffer.pop(2.0)
    assert [type(item) for item in early] == [SilentGap]
    assert early[0].units == int((2.0 - WINDOW_S) * CLOCK_HZ)
    buffer.push(packet(1, at_units=24_000), UNITS, 3.0)
    rest = buffer.pop(3.0)
    assert numbers(rest) == [1]
    check_accounts(buffer, [*first, *early, *rest])
    assert rest[-1].position == 24_000


def test_audio_that_a_stalled_network_brings_later_is_kept() -> None:
    buffer = JitterBuffer(CLOCK_HZ)
    buffer.push(packet(0), UNITS, 0.0)
    items = buffer.pop(WINDOW_S) + buffer.pop(2.0)
    for number in range(1, 100):
        buffer.push(packet(number), UNITS, 2.0)
        items += buffer.pop(2.0)
    check_accounts(buffer, items)
    assert numbers(items) == list(range(100))
    (shift,) = (item for item in items if isinstance(item, TimelineShift))
    assert shift.units == -int((2.0 - WINDOW_S) * CLOCK_HZ)


def test_timestamps_from_nowhere_make_no_silence() -> None:
    """One packet must not cost hours of zeros."""
    for jump in (int(CLOCK_HZ * (MAX_AHEAD_S + 1)), 2**31 - 1, -50_000):
        buffer, items = play([(0.0, packet(0), UNITS), (0.02, packet(1, at_units=jump), UNITS)])
        check_accounts(buffer, items)
        assert buffer.position == 2 * UNITS
        assert any(isinstance(item, TimelineShift) for item in items)


def test_a_loss_after_stalls_is_still_concealed() -> None:
    """What a stalled network brings comes behind the silence told meanwhile, three times; then a packet is lost."""
    buffer, now_s, number = JitterBuffer(CLOCK_HZ), 0.0, 0
    items: list[TimelineItem] = []
    for _ in range(3):
        for _ in range(50):
            buffer.push(packet(number), UNITS, now_s)
            items += buffer.pop(now_s)
            number, now_s = number + 1, now_s + PACKET_S
        for _ in range(100):
            items += buffer.pop(now_s)
            now_s += PACKET_S
        for _ in range(100):
            buffer.push(packet(number), UNITS, now_s)
            items += buffer.pop(now_s)
            number += 1
    number += 1
    buffer.push(packet(number), UNITS, now_s + 2 * PACKET_S)
    items += buffer.pop(now_s + 1)
    check_accounts(buffer, items)
    assert [(item.units, item.packets) for item in items if isinstance(item, LostAudio)] == [(UNITS, 1)]
    assert all(item.units < 0 for item in items if isinstance(item, TimelineShift))


def test_a_fast_clock_does_not_use_up_what_pauses_may_be() -> None:
    """A second of theirs is 0.9 of ours, for two minutes; then the sender pauses for 0.4 s."""
    buffer, items = play([(n * PACKET_S * 0.9, packet(n), UNITS) for n in range(6_000)])
    now_s = 6_000 * PACKET_S * 0.9 + 0.4
    buffer.push(packet(6_000, at_units=6_000 * UNITS + 3_200), UNITS, now_s)
    items += buffer.pop(now_s)
    check_accounts(buffer, items)
    assert [item.units for item in items if not isinstance(item, ReceivedAudio)] == [3_200]
    assert buffer.silent_units == 3_200


def test_digits_leave_their_time_as_silence() -> None:
    arrivals = [(0.0, packet(0), UNITS), (0.02, packet(1, kind=101), 0), (0.04, packet(2, at_units=480), UNITS)]
    buffer, items = play(arrivals)
    check_accounts(buffer, items)
    assert [type(item) for item in items] == [ReceivedAudio, SilentGap, ReceivedAudio]


def test_a_pause_with_comfort_noise_is_told_while_it_lasts() -> None:
    buffer = JitterBuffer(CLOCK_HZ)
    buffer.push(packet(0), UNITS, 0.0)
    items = buffer.pop(WINDOW_S)
    for number in range(1, 51):
        buffer.push(packet(number, at_units=number * 1_600, kind=13), 0, number * 0.2)
        items += buffer.pop(number * 0.2)
    assert buffer.position >= (10 - WINDOW_S) * CLOCK_HZ - UNITS
    buffer.push(packet(51, at_units=81_600), UNITS, 10.2)
    items += buffer.pop(10.2)
    check_accounts(buffer, items)
    assert (items[-1].position, buffer.silent_units) == (81_600, 81_600 - UNITS)


def test_a_sequence_number_from_nowhere_is_not_taken() -> None:
    buffer = JitterBuffer(CLOCK_HZ)
    buffer.push(packet(0), UNITS, 0.0)
    assert buffer.push(packet(20_000), UNITS, 0.0) is DropReason.JUMP
    assert buffer.push(packet(-20_000), UNITS, 0.0) is DropReason.JUMP


def test_a_flood_behind_a_gap_stays_bounded() -> None:
    buffer = JitterBuffer(CLOCK_HZ)
    buffer.push(packet(0), UNITS, 0.0)
    buffer.pop(WINDOW_S)
    items = []
    for number in range(2, 2_000):
        buffer.push(packet(number), UNITS, 0.3)
        items += buffer.pop(0.3)
        assert buffer.waiting <= MAX_PACKETS
    assert len(numbers(items)) == 1_998


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 400), st.floats(0, 0.3)),
        max_size=60,
    )
)
def test_hostile_numbers_break_no_account(sent: list[tuple[int, int, int, float]]) -> None:
    buffer, items, now_s = JitterBuffer(48_000, 3), [], 0.0
    for sequence, timestamp, size, wait_s in sent:
        now_s += wait_s
        buffer.push(RtpPacket(96, False, sequence, timestamp, 1, b""), size * 3, now_s)
        items += buffer.pop(now_s)
    items += buffer.finish()
    check_accounts(buffer, items)
    assert all(item.units % 3 == 0 for item in items)
    played_s = (buffer.silent_units + buffer.lost_units) / 48_000
    assert played_s <= now_s + MAX_AHEAD_S + 0.1
