"""The edge before a real server: words of RTP are those of the file, whatever the network and the server do."""

from __future__ import annotations

import base64
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from rtp_sender import UNITS, RtpSender, l16_packets
from running_edge import RunningEdge, expect_words, text_of, words
from running_server import Running, eventually
from test_stream_python_client import Proxy

from asr_serve.edge import edge_service
from asr_serve.edge.edge_config import EdgeConfig
from asr_serve.edge.edge_events import AudioPlayed
from asr_serve.edge.event_log import EventPosition
from asr_serve.edge.packet_driver import parse_source
from asr_serve.errors import AtCapacity, OptionError, SessionExpired, UnknownSession
from asr_serve.units import samples_to_s

SECONDS = 9
SECRET = "whsec_" + base64.b64encode(b"k" * 24).decode()
UPLINKS = ("websocket", "http2")


@pytest.fixture
def edge(server: Running) -> Iterator[RunningEdge]:
    made = RunningEdge(server.url)
    yield made
    made.close()


@pytest.fixture
def sender(edge: RunningEdge) -> Iterator[RtpSender]:
    made = RtpSender(edge.driver.port)
    yield made
    made.close()


def check_account(end: dict[str, Any]) -> None:
    """Seconds received, concealed and silent are all there are, but for single samples of drift."""
    assert end["type"] == "end"
    parts = end["received_s"] + end["concealed_s"] + end["silent_s"] + samples_to_s(end.get("adjusted_samples", 0))
    assert end["duration_s"] == pytest.approx(parts, abs=1 / 16_000)


@pytest.mark.parametrize("uplink", UPLINKS)
def test_words_of_clean_rtp_are_those_of_the_file(
    server: Running, speech: np.ndarray, expected: str, uplink: str
) -> None:
    edge = RunningEdge(server.url, uplink=uplink)
    sender = RtpSender(edge.driver.port)
    session = edge.create()
    assert session.ssrc is not None
    packets = l16_packets(speech, session.ssrc)
    sender.send(packets)
    edge.taken(session.id, len(packets))
    events = edge.end(session.id)
    assert text_of(events) == expected
    assert events[0] == {
        "type": "stream",
        "session": session.id,
        "position_s": 0.0,
        "ssrc": session.ssrc,
        "encoding": "L16",
        "reason": "first",
    }
    end = events[-1]
    check_account(end)
    assert end["received_s"] == pytest.approx(len(packets) * UNITS / 16_000)
    assert (end["reason"], end["packets"], end["lost_packets"]) == ("deleted", len(packets), 0)
    sender.close()
    edge.close()


def test_sessions_over_http2_share_a_connection_and_fail_alone(
    serve: Callable[..., Running], speech: np.ndarray, expected: str
) -> None:
    server = serve()
    proxy = Proxy(server.port)
    edge = RunningEdge(proxy.url, uplink="http2")
    sender = RtpSender(edge.driver.port)
    wrong = edge.create(options={"model": "nobody"})
    sessions = [edge.create() for _ in range(5)]
    hotwords = edge.create(options={"hotwords": ",".join(f"word{number}" for number in range(400))})  # not in a URL
    packets = [l16_packets(speech, each.ssrc) for each in (*sessions, hotwords)]
    sender.send(l16_packets(speech[:UNITS], wrong.ssrc))
    for each in packets:
        sender.send(each)
    eventually(lambda: any(event["type"] == "error" for event in edge.events(wrong.id)))
    assert [event["code"] for event in edge.events(wrong.id) if event["type"] == "error"] == ["model_not_found"]
    for each in (*sessions, hotwords):
        edge.taken(each.id, len(packets[0]))
        events = edge.end(each.id)
        if each is not hotwords:
            expect_words(text_of(events), expected)
        assert not any(event["type"] in ("error", "server_lost") for event in events)
    assert proxy.connections == 1
    sender.close()
    edge.close()
    server.expect_empty()
    proxy.close()


def test_order_and_duplicates_change_no_word_and_a_loss_is_told_where_it_was(
    edge: RunningEdge, sender: RtpSender, speech: np.ndarray, expected: str, rng: np.random.Generator
) -> None:
    session = edge.create()
    packets = l16_packets(speech, session.ssrc)
    order = sorted(range(len(packets)), key=lambda number: number + rng.uniform(0, 4))
    sent = [packets[number] for number in order for _ in range(1 + (number % 7 == 0))]
    sender.send(sent)
    edge.taken(session.id, len(packets))
    assert text_of(edge.end(session.id)) == expected
    lossy = edge.create()
    packets = l16_packets(speech, lossy.ssrc)
    lost = {100, 101, 200}
    sender.send([packet for number, packet in enumerate(packets) if number not in lost])
    edge.taken(lossy.id, len(packets) - len(lost))
    events = edge.end(lossy.id)
    told = [(event["start_s"], event["end_s"], event["packets"]) for event in events if event["type"] == "loss"]
    assert told == [(2.0, 2.04, 2), (4.0, 4.02, 1)]
    check_account(events[-1])
    assert events[-1]["duration_s"] == len(packets) * UNITS / 16_000
    assert edge.metric("asr_serve_edge_lost_packets_total") == 3
    assert edge.metric("asr_serve_edge_dropped_packets_total", reason="duplicate") > 0


@pytest.mark.parametrize("uplink", UPLINKS)
def test_the_gate_sends_lengths_of_silence_and_changes_no_word(
    server: Running, speech: np.ndarray, expected: str, uplink: str
) -> None:
    """Between two halves of silence; what is held for a replay is little more than the speech."""
    edge = RunningEdge(server.url, voice_activity=True, uplink=uplink)
    sender = RtpSender(edge.driver.port)
    session = edge.create()
    hiss = np.random.default_rng(7).normal(0, 1e-3, 12 * 16_000).astype(np.float32)
    packets = l16_packets(np.concatenate([hiss, speech, hiss]), session.ssrc)
    sender.send(packets)
    edge.taken(session.id, len(packets))
    eventually(lambda: edge.describe(session.id).duration_s > 12 + SECONDS + 11)
    events = edge.end(session.id)
    assert words(text_of(events)) == words(expected)
    check_account(events[-1])
    assert events[-1]["duration_s"] == pytest.approx(len(packets) * UNITS / 16_000)
    assert 0 < events[-1]["sent_speech_s"] < SECONDS + 3
    sender.close()
    edge.close()


def test_audio_that_no_gate_has_looked_at_is_told_and_in_the_account() -> None:
    edge = RunningEdge("http://127.0.0.1:9", voice_activity=True)  # nobody listens there
    gates, sender = edge.service._gates, RtpSender(edge.driver.port)
    assert gates is not None
    taken = [gates._pool.open() for _ in range(gates._pool.free_slots)]
    session = edge.create()
    packets = l16_packets(np.full(50 * UNITS, 0.25, np.float32), session.ssrc)
    sender.send(packets)
    edge.taken(session.id, len(packets))
    eventually(lambda: edge.describe(session.id).ungated_s == 1.0)
    told = [event["ungated_s"] for event in edge.events(session.id) if event["type"] == "ungated"]
    assert told
    assert told[-1] <= 1.0 < 2 * told[-1]
    assert all(2 * before <= after for before, after in pairwise(told))
    edge.call(edge.service.render_metrics)
    assert edge.metric("asr_serve_edge_ungated_audio_seconds_total") == 1.0
    edge.service._tasks[session.id].cancel()
    eventually(lambda: edge.events(session.id)[-1]["type"] == "end")
    assert edge.events(session.id)[-1]["ungated_s"] == 1.0
    for each in taken:
        each.close()
    edge.close()
    sender.close()


def test_floods_and_hostile_packets_disturb_nobody(
    edge: RunningEdge, sender: RtpSender, speech: np.ndarray, expected: str, rng: np.random.Generator
) -> None:
    session, victim = edge.create(), edge.create()
    attacker, other = RtpSender(edge.driver.port), RtpSender(edge.driver.port)
    sender.send(l16_packets(speech[:UNITS], session.ssrc))  # its source is known from now on
    edge.taken(session.id, 1)
    packets = l16_packets(speech, session.ssrc)
    for number, packet in enumerate(packets[1:]):
        sender.send([packet], 0.001)
        noise = rng.integers(0, 256, rng.integers(0, 200), dtype=np.uint8).tobytes()
        spoofed = packets[-number % len(packets)]
        wrong = packet[:2] + noise[:2] + packet[4:]
        lengths = bytes([0xBF]) + packet[1:12] + noise
        attacker.send([noise, b"\x80" + noise, spoofed, wrong, lengths], 0)
        other.send([bytes([packet[0], 97]) + noise[:6] + victim.ssrc.to_bytes(4, "big") + noise], 0)
    edge.taken(session.id, len(packets))
    events = edge.end(session.id)
    assert text_of(events) == expected
    assert events[-1]["packets"] == len(packets)
    assert edge.metric("asr_serve_edge_dropped_packets_total", reason="unknown_source") > len(packets)
    edge.end(victim.id)
    attacker.close()
    other.close()


@pytest.mark.parametrize("uplink", UPLINKS)
def test_a_server_that_is_away_and_one_that_forgot_lose_no_word(
    serve: Callable[..., Running], speech: np.ndarray, expected: str, uplink: str
) -> None:
    """First the connection breaks for a while, then the server is another one, as after kill and restart."""
    first, second = serve(resume_s=15.0), serve()  # what is given up is forgotten soon
    proxy = Proxy(first.port)
    edge = RunningEdge(proxy.url, uplink=uplink)
    sender = RtpSender(edge.driver.port)
    session = edge.create()
    packets = l16_packets(speech, session.ssrc)
    third = len(packets) // 3
    sender.send(packets[:third])
    eventually(lambda: edge.describe(session.id).connected)
    proxy.deaf = True
    proxy.cut()
    sender.send(packets[third : 2 * third])
    eventually(lambda: any(event["type"] == "server_lost" for event in edge.events(session.id)))
    proxy.deaf = False
    eventually(lambda: any(event["type"] == "server_back" for event in edge.events(session.id)))
    proxy.deaf = True
    proxy.port = second.port
    proxy.cut()
    sender.send(packets[2 * third :])
    edge.taken(session.id, len(packets))
    proxy.deaf = False
    events = edge.end(session.id)
    back = [event.get("again_from_s") for event in events if event["type"] == "server_back"]
    assert back[0] is None
    assert back[-1] is not None
    finals = [event for event in events if event["type"] == "segment"]
    assert back[-1] == max([0.0, *(event["end_s"] for event in finals if event["end_s"] <= back[-1])])
    assert [event["index"] for event in finals] == list(range(len(finals)))
    expect_words(text_of(events), expected)
    check_account(events[-1])
    edge.close()
    sender.close()
    for server in (first, second):
        server.expect_empty()


@pytest.mark.parametrize("outage_s", [1.0, pytest.param(20.0, marks=pytest.mark.exhaustive)])
def test_an_outage_over_http2_loses_no_word_of_any_session(
    serve: Callable[..., Running], speech: np.ndarray, expected: str, outage_s: float
) -> None:
    """All on one connection; what they say meanwhile waits in their spools."""
    server = serve()
    proxy = Proxy(server.port)
    edge = RunningEdge(proxy.url, uplink="http2")
    sender = RtpSender(edge.driver.port)
    sessions = [edge.create() for _ in range(2)]
    packets = [l16_packets(speech, session.ssrc) for session in sessions]
    for each in packets:
        sender.send(each[: len(each) // 3])
    eventually(lambda: all(edge.describe(session.id).connected for session in sessions))
    proxy.deaf = True
    proxy.cut()
    for each in packets:
        sender.send(each[len(each) // 3 :])
    for session, each in zip(sessions, packets, strict=True):
        edge.taken(session.id, len(each))
    time.sleep(outage_s)
    assert not any(edge.describe(session.id).connected for session in sessions)
    proxy.deaf = False
    for session in sessions:
        events = edge.end(session.id)
        kinds = [event["type"] for event in events]
        assert "server_lost" in kinds
        assert "server_back" in kinds
        assert not {"error", "discarded"} & set(kinds)
        expect_words(text_of(events), expected)
        check_account(events[-1])
    edge.close()
    sender.close()
    proxy.close()


def test_nothing_comes_behind_the_end_of_a_session_and_all_before_it_can_be_read() -> None:
    """Whoever publishes, and whenever somebody begins to listen."""
    edge = RunningEdge("http://127.0.0.1:9")  # nobody listens there
    sender = RtpSender(edge.driver.port)
    session = edge.create()
    packets = l16_packets(np.full(10 * UNITS, 0.25, np.float32), session.ssrc)
    sender.send(packets)
    edge.taken(session.id, len(packets))
    played = AudioPlayed(played_s=1.0, interrupted=False)
    edge.call(edge.service.publish, session.id, played)
    edge.service._tasks[session.id].cancel()
    eventually(lambda: edge.events(session.id)[-1]["type"] == "end")
    running = edge.service._by_id[session.id]
    edge.call(edge.service.publish, session.id, played)
    edge.call(edge.service._hand_over, running, [played])
    edge.call(edge.service._deliver)
    sender.send(packets)
    log = edge.call(edge.service.events, session.id)

    async def listen(after: int) -> list[tuple[int, str]]:
        events = [event async for event in log.listen(EventPosition(log.epoch, after), 60.0)]
        return [(event.number, event.type) for event in events if event is not None]

    told = edge.call(listen, 0)
    kinds = [kind for _, kind in told]
    assert [number for number, _ in told] == list(range(1, len(told) + 1))
    assert kinds[0] == "stream"
    assert (kinds.count("played"), kinds.count("end"), kinds[-1]) == (1, 1, "end")
    for after in range(1, len(told) + 1):
        assert edge.call(listen, after) == told[after:]
    edge.close()
    sender.close()


def test_a_server_that_goes_down_in_order_loses_no_word(
    serve: Callable[..., Running], speech: np.ndarray, expected: str
) -> None:
    """It ends the session with what it has, in mid-sentence; another one goes on from the last final text."""
    first, second = serve(), serve()
    proxy = Proxy(first.port)
    edge = RunningEdge(proxy.url)
    sender = RtpSender(edge.driver.port)
    session = edge.create()
    packets = l16_packets(speech, session.ssrc)
    sender.send(packets[: len(packets) // 2])
    eventually(lambda: any(event["type"] == "partial" for event in edge.events(session.id)))
    proxy.port = second.port
    first.loop.call_soon_threadsafe(first.gate.drain)
    sender.send(packets[len(packets) // 2 :])
    events = edge.end(session.id)
    kinds = [event["type"] for event in events]
    assert "error" not in kinds
    (back,) = (event for event in events if event["type"] == "server_back")
    finals = [event["end_s"] for event in events if event["type"] == "segment"]
    assert back["again_from_s"] == max([0.0, *(end_s for end_s in finals if end_s <= back["again_from_s"])])
    expect_words(text_of(events), expected)
    check_account(events[-1])
    edge.close()
    sender.close()
    for server in (first, second):
        server.expect_empty()


def test_a_spool_that_is_full_tells_what_it_discards(speech: np.ndarray) -> None:
    edge = RunningEdge("http://127.0.0.1:9", spool_s=35.0)  # nobody listens there
    sender = RtpSender(edge.driver.port)
    session = edge.create()
    packets = l16_packets(np.resize(speech, 40 * 16_000) + 1e-3, session.ssrc)
    sender.send(packets, 0.0005)
    edge.taken(session.id, len(packets))
    state = edge.describe(session.id)
    assert state.discarded_s == pytest.approx(5.0, abs=0.05)
    assert state.duration_s == pytest.approx(40.0, abs=0.05)
    edge.call(edge.service.end, session.id)
    eventually(lambda: any(event["type"] == "discarded" for event in edge.events(session.id)))
    (told,) = (event for event in edge.events(session.id) if event["type"] == "discarded")
    assert told["end_s"] - told["start_s"] == pytest.approx(state.discarded_s)
    assert edge.metric("asr_serve_edge_audio_seconds_total", kind="discarded") == pytest.approx(state.discarded_s)
    edge.service._tasks[session.id].cancel()
    edge.close()
    sender.close()


def test_what_a_network_held_back_for_seven_seconds_is_not_over_the_rate() -> None:
    edge = RunningEdge("http://127.0.0.1:9", packets_per_s=200)  # nobody listens there
    sender = RtpSender(edge.driver.port)
    session = edge.create()
    packets = l16_packets(np.full(355 * UNITS, 0.25, np.float32), session.ssrc)
    sender.send(packets, 0.0002)
    edge.taken(session.id, len(packets))
    edge.call(edge.service.render_metrics)
    assert edge.metric("asr_serve_edge_dropped_packets_total", reason="over_rate") == 0
    edge.service._tasks[session.id].cancel()
    edge.close()
    sender.close()


def test_packets_beyond_the_rate_are_in_the_account_of_their_session_alone() -> None:
    edge = RunningEdge("http://127.0.0.1:9", packets_per_s=10)  # 150 at once; nobody listens there
    sender, quiet = RtpSender(edge.driver.port), RtpSender(edge.driver.port)
    session, other = edge.create(), edge.create()
    packets = l16_packets(np.full(400 * UNITS, 0.25, np.float32), session.ssrc)
    sender.send(packets, 0.0002)
    quiet.send(l16_packets(np.full(5 * UNITS, 0.25, np.float32), other.ssrc))
    edge.taken(other.id, 5)
    state = edge.describe(session.id)
    dropped = state.dropped["over_rate"]
    assert 0 < dropped == len(packets) - state.packets
    assert edge.describe(other.id).dropped == {}
    assert edge.metric("asr_serve_edge_dropped_packets_total", reason="over_rate") == dropped
    running = edge.service._by_id[session.id]
    edge.call(edge.service.redirect, session.id, sender.source, running.session.formats)  # the driver counts anew
    assert edge.describe(session.id).dropped["over_rate"] == dropped
    told = [event for event in edge.events(session.id) if event["type"] == "dropped"]
    counts = [event["packets"] for event in told]
    assert {event["reason"] for event in told} == {"over_rate"}
    assert counts
    assert counts[-1] <= dropped < 2 * counts[-1]
    assert all(2 * before <= after for before, after in pairwise(counts))
    for each in (session, other):
        edge.service._tasks[each.id].cancel()
    eventually(lambda: edge.events(session.id)[-1]["type"] == "end")
    assert edge.events(session.id)[-1]["dropped"]["over_rate"] == dropped
    edge.close()
    sender.close()
    quiet.close()


def test_sessions_are_bounded_and_named_by_ssrc_or_source(server: Running) -> None:
    edge = RunningEdge(server.url, max_sessions=3, idle_s=1.0)
    by_ssrc = edge.create(ssrc=7)
    by_source = edge.create(source="127.0.0.1:9999")
    assert (by_ssrc.ssrc, by_source.ssrc, by_source.source) == (7, None, "127.0.0.1:9999")
    for wrong in ({"ssrc": 7}, {"source": "127.0.0.1:9999"}, {"source": "here"}, {"options": {"rate": 8_000}}):
        with pytest.raises(OptionError):
            edge.create(**wrong)
    with pytest.raises(OptionError, match="one of them"):
        edge.create(sdp="v=0", payload_types={})
    edge.create(sdp="m=audio 1 RTP/AVP 8")
    with pytest.raises(AtCapacity):
        edge.create()
    eventually(lambda: edge.events(by_ssrc.id)[-1:] and edge.events(by_ssrc.id)[-1]["type"] == "end")
    assert edge.events(by_ssrc.id)[-1]["reason"] == "idle"
    edge.create(ssrc=7)
    with pytest.raises(UnknownSession):
        edge.describe("edge_0")
    edge.close()


def test_a_session_that_has_ended_is_gone_after_a_while_and_not_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_service, "KEEP_S", 0.0)
    monkeypatch.setattr(edge_service, "MAX_GONE", 2)
    edge = RunningEdge("http://127.0.0.1:9")
    sessions = [edge.create() for _ in range(3)]
    for each in sessions:
        edge.call(edge.service.end, each.id)
        eventually(lambda: not edge.call(edge.service.describe_all) or len(edge.service._by_id) < 3)
    eventually(lambda: not edge.service._by_id)
    for each in sessions[1:]:
        with pytest.raises(SessionExpired) as gone:
            edge.describe(each.id)
        assert not isinstance(gone.value, UnknownSession)
    with pytest.raises(UnknownSession):  # a bounded number is remembered
        edge.describe(sessions[0].id)
    edge.close()


def test_options_that_no_server_takes_are_refused_where_a_session_is_created() -> None:
    edge = RunningEdge("http://127.0.0.1:9")
    for options in ({"words": "perhaps"}, {"language": "klingon"}, {"threshold": 3}, {"turn_threshold": 0.5}):
        with pytest.raises(OptionError) as refused:
            edge.create(options=options)
        assert refused.value.param == next(iter(options))
        with pytest.raises(OptionError):
            EdgeConfig(options=options)
    for options in ({"words": True}, {"language": "German"}, {"language": "yue"}, {"model": "that-it-may-have"}):
        edge.create(options=options)
    edge.close()


def test_a_session_by_source_takes_any_ssrc_and_follows_its_change(
    edge: RunningEdge, sender: RtpSender, speech: np.ndarray, expected: str
) -> None:
    session = edge.create(source=sender.source)
    half = SECONDS * 8_000 // UNITS * UNITS
    sender.send(l16_packets(speech[:half], 11) + l16_packets(speech[half:], 12, sequence=3, timestamp=4))
    edge.taken(session.id, SECONDS * 50)
    with pytest.raises(OptionError, match="another session's"):
        edge.create(source=sender.source)  # or that one would get this caller's audio
    events = edge.end(session.id)
    assert [event["reason"] for event in events if event["type"] == "stream"] == ["first", "ssrc"]
    assert text_of(events) == expected


def test_a_packet_of_the_old_source_behind_a_redirect_is_not_latched() -> None:
    """It was received before, and is pushed after."""
    edge = RunningEdge("http://127.0.0.1:9")
    old, new = RtpSender(edge.driver.port), RtpSender(edge.driver.port)
    session, packets = edge.create(source=old.source), l16_packets(np.full(40 * UNITS, 0.25, np.float32), 5)
    old.send(packets[:20])
    edge.taken(session.id, 20)
    running = edge.service._by_id[session.id]

    def redirect() -> None:
        edge.service.redirect(session.id, new.source, running.session.formats)
        with edge.service._lock:
            edge.service._push_batch([(running.session.flow, parse_source(old.source), packets[20], time.monotonic())])

    edge.call(redirect)
    new.send(packets[20:])
    edge.taken(session.id, 40)
    assert edge.describe(session.id).source == new.source
    edge.service._tasks[session.id].cancel()  # nobody listens there
    edge.close()
    old.close()
    new.close()


def test_events_are_posted_in_order_and_again_until_they_are_taken(server: Running, speech: np.ndarray) -> None:
    got: list[dict[str, Any]] = []
    refused: list[bool] = []
    names: list[str] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            name, time_s = self.headers["webhook-id"], self.headers["webhook-timestamp"]
            digest = hmac.digest(b"k" * 24, f"{name}.{time_s}.".encode() + body, "sha256")
            assert self.headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"
            assert abs(time.time() - int(time_s)) < 600
            names.append(name)
            refuse = not refused
            refused.append(refuse)
            if not refuse:
                got.append(json.loads(body))
            self.send_response(503 if refuse else 204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    http = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    edge = RunningEdge(server.url, webhook=f"http://127.0.0.1:{http.server_port}/words", webhook_secret=SECRET)
    sender = RtpSender(edge.driver.port)
    session = edge.create()
    sender.send(l16_packets(speech[: 3 * 16_000], session.ssrc))
    edge.taken(session.id, 150)
    events = edge.end(session.id)
    edge.close()
    assert names[0] == names[1] == f"{session.id}-{got[0]['id']}"  # it was refused, and posted again
    assert names[1:] == list(dict.fromkeys(names))
    ids = [event.pop("id").split("-") for event in got]
    assert got == [event for event in events if event["type"] != "partial"]
    assert len({epoch for epoch, _ in ids}) == 1
    numbers = [number for number, event in enumerate(events, 1) if event["type"] != "partial"]
    assert [int(number) for _, number in ids] == numbers  # what is posted again can be told from what is new
    sender.close()
    http.shutdown()
    http.server_close()
    thread.join(60)
