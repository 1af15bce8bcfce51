"""The edge behind AF_XDP on a wire: many callers of real speech, whose every sample is accounted for, whatever the
network and others on it do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from packet_wire import NEIGHBOUR, RECEIVER, SENDER, PacketWire, open_xdp
from rtp_sender import UNITS, RtpSender, l16_packets
from running_edge import OPTIONS, RunningEdge
from running_server import WAIT_S, Running, eventually
from test_edge_senders import EdgeCommand, answers
from test_edge_service import check_account, words
from test_stream_python_client import Proxy

from asr_serve.audio import read_audio
from asr_serve.edge.control_api import PATH

NOBODY = "http://127.0.0.1:9"
LOSS, DUPLICATES, REACH = 0.05, 0.02, 4
"""Shares of packets that are lost or come twice, and how many places one may come too late."""
MAX_BURST = 100
"""Packets on their way at most: a veth pair itself drops what is beyond 256, when its kernel is busy."""


@pytest.fixture(scope="module")
def wire() -> Iterator[PacketWire]:
    with PacketWire() as made:
        yield made


@pytest.fixture(scope="module")
def speech(cities: Path) -> np.ndarray:
    return read_audio(cities)


class Caller:
    """Caller on the wire, and what the network does to its packets."""

    def __init__(
        self,
        edge: RunningEdge,
        pcm: np.ndarray,
        rng: np.random.Generator,
        loss: float = LOSS,
        within: tuple[float, float] = (0, 1),
    ) -> None:
        """`within`: the part of its packets of which that share is lost."""
        self.session = edge.create()
        assert self.session.ssrc is not None
        self.pcm = np.rint(pcm * 32_767).astype(np.int16)
        self.packets = l16_packets(pcm, self.session.ssrc, sequence=int(rng.integers(0, 2**16)))
        places = np.arange(len(self.packets)) / len(self.packets)
        torn = (rng.random(len(self.packets)) < loss) & (within[0] <= places) & (places < within[1])
        self.lost = {int(n) for n in np.flatnonzero(torn)} - {0, len(self.packets) - 1}
        places = np.arange(len(self.packets)) + rng.uniform(0, REACH, len(self.packets))
        places[0] = -1.0  # what is before the first packet is no part of a stream
        order = [int(n) for n in np.argsort(places) if n not in self.lost]
        self.sent = [self.packets[n] for n in order for _ in range(1 + int(rng.random() < DUPLICATES))]

    @property
    def arriving(self) -> int:
        return len(self.packets) - len(self.lost)


def send_all(edge: RunningEdge, queues: list[list[bytes]], senders: list[RtpSender], flood: list[list[bytes]]) -> int:
    """Sends the packets of each sender in turns, as fast as they are taken, and a flood of the last sender between two
    turns. Returns how many."""
    before = edge.driver.counts()["received"]
    sent = 0
    for turn in range(max(map(len, queues))):
        packets = [(sender, queue[turn]) for queue, sender in zip(queues, senders, strict=False) if turn < len(queue)]
        packets += [(senders[-1], packet) for packet in (flood[turn] if turn < len(flood) else [])]
        for start in range(0, len(packets), MAX_BURST):
            for sender, packet in packets[start : start + MAX_BURST]:
                sender.send([packet], 0)
            sent += len(packets[start : start + MAX_BURST])
            while sent - (edge.driver.counts()["received"] - before) > MAX_BURST:
                time.sleep(0.0005)
    eventually(lambda: edge.driver.counts()["received"] - before == sent)
    return sent


@contextmanager
def edge_on(wire: PacketWire, server: str, **settings: Any) -> Iterator[RunningEdge]:
    """An edge behind AF_XDP, whose sessions end with it whether their server is there or not."""
    edge = RunningEdge(server, open_xdp(wire, RECEIVER, gather_ms=0.5), **settings)
    try:
        yield edge
    finally:
        for task in list(edge.service._tasks.values()):
            edge.call(task.cancel)
        edge.close()


@contextmanager
def senders_on(wire: PacketWire, edge: RunningEdge, addresses: list[str]) -> Iterator[list[RtpSender]]:
    with wire.inside(wire.sender):
        made = [RtpSender(edge.driver.port, address, RECEIVER) for address in addresses]
    try:
        yield made
    finally:
        for sender in made:
            sender.close()


def check_audio(edge: RunningEdge, caller: Caller) -> None:
    """Every sample of a call that has ended is that of the sender at its position, but for those that were lost, which
    are told."""
    spool = edge.service._by_id[caller.session.id].session.spool
    heard = b""
    while len(heard) < 2 * spool.end:
        part = spool.read(len(heard) // 2, spool.end)
        heard += part if isinstance(part, bytes) else bytes(2 * part.samples)
    got = np.frombuffer(heard, "<i2")
    assert len(got) == len(caller.packets) * UNITS
    expected = np.resize(caller.pcm, len(got))
    expected[len(caller.pcm) :] = 0
    arrived = np.ones(len(caller.packets), bool)
    arrived[list(caller.lost)] = False
    mask = np.repeat(arrived, UNITS)
    assert np.array_equal(got[mask], expected[mask])
    state = edge.describe(caller.session.id)
    assert (state.packets, state.lost_packets) == (caller.arriving, len(caller.lost))
    assert state.received_s == pytest.approx(caller.arriving * UNITS / 16_000)
    assert state.concealed_s == pytest.approx(len(caller.lost) * UNITS / 16_000)
    assert (state.silent_s, state.adjusted_samples) == (0, 0)
    assert set(state.dropped) <= {"duplicate"}
    told = [(event["start_s"], event["packets"]) for event in edge.events(caller.session.id) if event["type"] == "loss"]
    assert sum(packets for _, packets in told) == len(caller.lost)
    assert {round(start_s * 50) for start_s, _ in told} <= caller.lost


def hostile(rng: np.random.Generator, callers: list[Caller], turn: int, count: int) -> list[bytes]:
    """Packets of a stranger: noise, other calls' packets, wrong lengths in RTP headers, unknown SSRCs."""
    made = []
    for number in range(count):
        victim = callers[int(rng.integers(len(callers)))]
        packet = victim.packets[turn % len(victim.packets)]
        noise = rng.bytes(int(rng.integers(0, 200)))
        made.append(
            (noise, b"\x80" + noise, packet, bytes([0xBF]) + packet[1:12] + noise, packet[:8] + noise)[number % 5]
        )
    return made


def check_callers(wire: PacketWire, speech: np.ndarray, rng: np.random.Generator, streams: int, seconds: float) -> None:
    """That many callers at once, beside a flood of ten packets for each of theirs, up to 400 in a turn."""
    samples = int(seconds * 50) * UNITS
    with ExitStack() as stack:
        edge = stack.enter_context(edge_on(wire, NOBODY, max_sessions=streams, window_ms=2_000))
        callers = [
            Caller(edge, speech[at : at + samples], rng) for at in rng.integers(0, len(speech) - samples, streams)
        ]
        senders = stack.enter_context(senders_on(wire, edge, [SENDER] * streams + [NEIGHBOUR]))
        running = [edge.service._by_id[caller.session.id] for caller in callers]
        sent = send_all(edge, [caller.sent[:1] for caller in callers], senders, [])
        eventually(lambda: all(each.session.latched for each in running))  # to its source
        flood = [hostile(rng, callers, turn, min(10 * streams, 400)) for turn in range(len(callers[0].sent))]
        sent += send_all(edge, [caller.sent[1:] for caller in callers], senders, flood)
        arriving = sum(caller.arriving for caller in callers)
        eventually(lambda: sum(each.session.stream.packets for each in running) == arriving)
        edge.call(lambda: [edge.service.end(each.session.id) for each in running])  # at once: nobody is silent for long
        for caller in callers:
            check_audio(edge, caller)
        counts = edge.driver.counts()
        assert counts["kernel"] == 0
        dropped = sum(count for name, count in counts.items() if name != "received")
        assert counts["received"] == sent
        assert counts["received"] - dropped == sum(len(caller.sent) for caller in callers)
        assert edge.metric("asr_serve_edge_dropped_packets_total", reason="unknown_source") >= sum(map(len, flood)) // 5
        assert edge.metric("asr_serve_edge_lost_packets_total") == sum(len(caller.lost) for caller in callers)


def test_every_sample_of_64_callers_is_accounted_for_beside_a_flood(
    wire: PacketWire, speech: np.ndarray, rng: np.random.Generator
) -> None:
    check_callers(wire, speech, rng, 64, 1.5)


@pytest.mark.exhaustive
def test_every_sample_of_512_callers_is_accounted_for_beside_a_flood(
    wire: PacketWire, speech: np.ndarray, rng: np.random.Generator
) -> None:
    check_callers(wire, speech, rng, 512, 2.5)


Spoken = tuple[float, float, list[str]]
"""Start and end of a segment, s, and its words."""
CLIP_S, CLIP_STARTS_S = 8, (0, 11, 22, 33)


def untouched(segments: list[Spoken], others: list[Spoken], lost_s: list[float]) -> list[Spoken]:
    """Segments in which nothing was lost, and which overlap none of the other run in which something was."""
    spans = [(start, end) for start, end, _ in (*segments, *others)]
    torn = [span for span in spans if any(span[0] - 0.02 < at_s < span[1] for at_s in lost_s)]
    while found := [s for s in spans if s not in torn and any(s[0] < end and start < s[1] for start, end in torn)]:
        torn += found
    return [segment for segment in segments if segment[:2] not in torn]


def segments_of(events: list[dict[str, Any]]) -> list[Spoken]:
    found = [event for event in events if event["type"] == "segment"]
    return [(event["start_s"], event["end_s"], words(event["text"])) for event in found]


def check_transcripts(
    wire: PacketWire,
    server: Running,
    speech: np.ndarray,
    rng: np.random.Generator,
    streams: int,
    wait_s: float = WAIT_S,
) -> None:
    """That many callers at once, whose packets are reordered and come twice. Of every other one 5 % are lost, all in
    one quarter of its call, so that it has segments without a loss. The text is that of the same clip on a good
    network, but for segments in which packets were lost."""
    clips = [speech[start * 16_000 : (start + CLIP_S) * 16_000] for start in CLIP_STARTS_S[: streams // 2]]
    options = {**OPTIONS, "partial_ms": 60_000}  # the final text is what is compared
    with ExitStack() as stack:
        # Recognition begins when all packets are in: it shares this machine with their sender.
        proxy = stack.enter_context(contextlib.closing(Proxy(server.port)))
        proxy.deaf = True
        settings = {"max_sessions": streams + len(clips), "window_ms": 2_000, "options": options}
        edge = stack.enter_context(edge_on(wire, proxy.url, **settings))
        clean = [Caller(edge, clip, rng, 0) for clip in clips]
        for caller in clean:
            caller.sent = caller.packets
        callers = []
        for number in range(streams):
            begin, loss = rng.uniform(0, 0.75), 4 * LOSS * (number // len(clips) % 2)
            callers.append(Caller(edge, clips[number % len(clips)], rng, loss, (begin, begin + 0.25)))
        everyone = [*clean, *callers]
        senders = stack.enter_context(senders_on(wire, edge, [SENDER] * len(everyone)))
        send_all(edge, [caller.sent for caller in everyone], senders, [])
        running = [edge.service._by_id[caller.session.id] for caller in everyone]
        eventually(
            lambda: all(each.session.stream.packets == c.arriving for each, c in zip(running, everyone, strict=True))
        )
        proxy.deaf = False
        edge.call(lambda: [edge.service.end(each.session.id) for each in running])  # at once: nobody is silent for long
        logs = [edge.call(edge.service.events, caller.session.id) for caller in everyone]
        eventually(lambda: all(log.ended for log in logs), wait_s=wait_s)
        heard = []
        for caller in everyone:
            events = edge.events(caller.session.id)
            check_account(events[-1])
            assert events[-1]["concealed_s"] == pytest.approx(0.02 * len(caller.lost))
            heard.append(segments_of(events))
        kept = 0
        for number, caller in enumerate(callers):
            expected, got = heard[number % len(clips)], heard[len(clips) + number]
            assert sum(len(each) for _, _, each in expected) > 8
            lost_s = [0.02 * n for n in sorted(caller.lost)]
            if not lost_s:
                assert got == expected
                continue
            whole = untouched(got, expected, lost_s)
            assert [each for _, _, each in whole] == [each for _, _, each in untouched(expected, got, lost_s)]
            kept += len(whole)
        assert kept > streams // 8


def test_words_of_a_bad_network_are_those_of_a_good_one_but_for_what_was_lost(
    wire: PacketWire, server: Running, speech: np.ndarray, rng: np.random.Generator
) -> None:
    check_transcripts(wire, server, speech, rng, 4)


@pytest.mark.exhaustive
def test_words_of_64_callers_are_those_of_a_good_network_but_for_what_was_lost(
    wire: PacketWire, server: Running, speech: np.ndarray, rng: np.random.Generator
) -> None:
    """Samples are compared for 512: to recognize as many wants more than two cores that others use too."""
    check_transcripts(wire, server, speech, rng, 64, 1_200)


@pytest.mark.exhaustive
def test_drift_of_64_callers_in_real_time(wire: PacketWire, speech: np.ndarray) -> None:
    """Clocks up to 500 ppm off are measured, and taken out in single samples, which are counted."""
    seconds, streams = 45, 64
    drifts = np.linspace(-500e-6, 500e-6, streams)
    with ExitStack() as stack:
        edge = stack.enter_context(edge_on(wire, NOBODY, max_sessions=streams, drift=True))
        senders = stack.enter_context(senders_on(wire, edge, [SENDER] * streams))
        sessions = [edge.create() for _ in drifts]
        packets = [l16_packets(np.resize(speech, seconds * 16_000), session.ssrc) for session in sessions]
        begun_s = time.monotonic()
        due = sorted((n * 0.02 * (1 + drift), k, n) for k, drift in enumerate(drifts) for n in range(len(packets[k])))
        for at_s, k, n in due:
            while (wait_s := begun_s + at_s - time.monotonic()) > 0:
                time.sleep(min(wait_s, 0.002))
            senders[k].send([packets[k][n]], 0)
        for k, session in enumerate(sessions):
            edge.taken(session.id, len(packets[k]))
        edge.call(lambda: [edge.service.end(session.id) for session in sessions])
        for session, drift in zip(sessions, drifts, strict=True):
            state = edge.describe(session.id)
            assert state.drift_ppm == pytest.approx(drift * 1e6, abs=100)
            assert (state.lost_packets, state.concealed_s) == (0, 0)
            parts_s = state.received_s + state.silent_s + state.adjusted_samples / 16_000
            assert state.duration_s == pytest.approx(parts_s, abs=1 / 16_000)
            if abs(drift) > 1.5e-4:
                assert np.sign(state.adjusted_samples) == np.sign(drift)


def test_an_edge_that_is_killed_and_started_again_takes_calls_past_the_kernel(
    wire: PacketWire, speech: np.ndarray, tmp_path: Path
) -> None:
    open_xdp(wire, RECEIVER).close()  # or skip
    flags = ("--server", NOBODY, "--host", RECEIVER, "--port", "5004", "--control-port", "8004")
    with wire.inside(wire.sender):
        sender = RtpSender(5004, SENDER, RECEIVER)
    for turn in range(2):
        with wire.inside(wire.receiver):  # a child is where its parent's thread is
            command = EdgeCommand(tmp_path / f"{turn}.log", *flags, "--driver", "af_xdp", "--interface", wire.device)
        assert command.said(r"packets\s+(AF_XDP on rtp0: native mode)")
        with wire.inside(wire.receiver), httpx.Client(base_url="http://127.0.0.1:8004", timeout=WAIT_S) as http:
            eventually(lambda: answers(http))
            created = http.post(PATH, json={}).json()
            packets = l16_packets(speech[: 50 * UNITS], created["ssrc"])
            sender.send(packets, 0)
            state = f"{PATH}/{created['id']}"
            eventually(lambda state=state: http.get(state).json()["packets"] == 50)
            assert f"asr_serve_edge_packets_total {len(packets)}.0" in http.get("/metrics").text
        assert wire.program()
        command.process.kill()
        command.process.wait(WAIT_S)
        assert not wire.program()
    sender.close()
