"""/v1/stream when connections break: nothing is lost or comes twice, and the text is what it would have been."""

from __future__ import annotations

import contextlib
import json
import random
import time

import pytest
from case_tiers import exhaustive_after
from running_server import WAIT_S, Running, eventually
from stream_client import (
    TRANSPORTS,
    Event,
    Http1,
    Http2,
    Line,
    WebSocket,
    expect_sound,
    numbered,
    pcm_of,
    pour,
    segments,
    whole,
)
from websockets.sync.client import connect

from asr_serve.protocols.stream.server_events import FlushedEvent
from asr_serve.server.realtime.stream import event_log

SEEDS = 10


@pytest.fixture(scope="module")
def pcm(cities) -> bytes:
    return pcm_of(cities, 14)


@pytest.fixture(scope="module")
def uncut(shared_server: Running, pcm: bytes) -> list[Event]:
    with WebSocket(shared_server.port) as line:
        return numbered(whole(line, pcm))


class Phone:
    """A client that loses its connection, and goes on."""

    def __init__(self, server: Running, pcm: bytes, rng: random.Random) -> None:
        self._server, self._pcm, self._rng = server, pcm, rng
        self.told: list[Event] = []
        """Numbered events, as its user has seen them."""
        self.cuts = 0
        self._session: str | None = None
        self._line: Line | None = None

    def connect(self) -> Line:
        kind = self._rng.choice(TRANSPORTS)
        query = {} if self._session is None else {"session": self._session, "after": len(self.told)}
        old, line = self._line, kind(self._server.port, **query)
        opened = line.hear("session")
        assert opened["resumed"] == (self._session is not None)
        self._session, self._line, self._at = opened["session_id"], line, opened["received_bytes"]
        self._seen = 0
        if old is not None:
            if not old.over:
                self._expect_told_off(old)
            old.socket.close()
        return line

    def _expect_told_off(self, old: Line) -> None:
        """It was open still; what it says after the new one began is not heard."""
        last = old.rest()[-1]
        assert last.get("code") == "taken_over" or last["type"] == "end"

    def talk(self) -> None:
        line = self.connect()
        while self._at < len(self._pcm):
            size = self._rng.choice((320, 3_200, 9_001, 40_000))
            line.send(self._pcm[self._at : self._at + size])
            self._at += size
            self._listen(line)
            if self._rng.random() < 0.02 + 0.5 * (size > 9_001):
                line = self._lose(line)
        for _ in range(self._rng.randrange(3)):
            line = self._lose(line)  # perhaps all that was sent has to be sent again
            line.send(self._pcm[self._at :])
        line.end()
        while not (self.told and self.told[-1]["type"] == "end"):
            if self._rng.random() < 0.05:
                line = self._lose(line)
                line.send(self._pcm[self._at :])
                line.end()
            line.poll(0.05)
            self._listen(line)
            if line.over and not (self.told and self.told[-1]["type"] == "end"):
                line = self.connect()
        line.rest()
        line.socket.close()

    def _listen(self, line: Line) -> None:
        while line.poll():
            pass
        for event in line.events[self._seen :]:
            if "seq" in event:
                self.told.append(event)
        self._seen = len(line.events)

    def _lose(self, line: Line) -> Line:
        self.cuts += 1
        how = self._rng.random()
        if how < 0.4:
            line.cut(reset=True)
        elif how < 0.7:
            line.cut(reset=False)
        elif how < 0.8 and isinstance(line, WebSocket):
            line.close(1_001)
            line.socket.close()
        elif how < 0.8 and isinstance(line, Http2):
            line.abandon()
            line.socket.close()
        # else: it is still there, and is taken over
        time.sleep(self._rng.choice((0.0, 0.0, 0.02, 0.2)))
        return self.connect()


@pytest.mark.slow
@pytest.mark.parametrize("seed", exhaustive_after(3, range(SEEDS)))
def test_connections_that_are_cut_at_random(server: Running, pcm: bytes, uncut: list[Event], seed: int):
    phone = Phone(server, pcm, random.Random(seed))
    phone.talk()
    assert phone.cuts
    expect_sound(phone.told)
    assert segments(phone.told) == segments(uncut)
    assert phone.told[-1]["duration_s"] == uncut[-1]["duration_s"] == len(pcm) / 32_000
    turns = [[(e["state"], e["position_s"]) for e in told if e["type"] == "turn"] for told in (phone.told, uncut)]
    assert turns[0] == turns[1]


def test_missed_events_are_told_at_once_and_the_text_goes_on_meanwhile(server: Running, pcm: bytes):
    with WebSocket(server.port) as line:
        session = line.hear("session")["session_id"]
        pour(line, pcm[:320_000])
        line.flush("f")
        line.until(lambda: any(event.get("received_bytes") == 320_000 for event in line.events))
        seen = len(numbered(line.events))
        line.cut(reset=True)
    eventually(lambda: server.counted("asr_serve_live_waiting_sessions") > 0)
    sessions = server.counted("asr_serve_live_waiting_sessions")
    with Http2(server.port, session=session, after=seen) as line:
        line.until(lambda: any(event["type"] == "flushed" for event in line.events))
        opened = line.events[0]
        assert (opened["resumed"], opened["received_bytes"]) == (True, 320_000)
        assert [e["seq"] for e in numbered(line.events)][:3] == [seen + 1, seen + 2, seen + 3]
        assert server.counted("asr_serve_live_waiting_sessions") <= sessions
        pour(line, pcm[320_000:])
        line.end()
        events = line.rest()
    assert events[-1]["duration_s"] == len(pcm) / 32_000
    with WebSocket(server.port, session=session, after=0) as line:
        everything = line.rest()
        assert line.code == 1_000
    expect_sound(everything)
    assert everything[-1]["type"] == "end"
    with WebSocket(server.port, session=session, after=len(numbered(everything)) + 1) as line:
        assert [(e["type"], e["code"], e["param"]) for e in line.rest()] == [("error", "option_error", "after")]


def test_the_newest_partial_is_shown_again(server: Running, pcm: bytes):
    with WebSocket(server.port) as line:
        session = line.hear("session")["session_id"]
        pour(line, pcm[:96_000])
        line.hear("partial")
        line.cut(reset=False)
    with WebSocket(server.port, session=session) as line:
        assert line.hear("partial")["text"]
        line.close(1_000)


def test_a_client_that_hangs_up_wants_no_more(server: Running, pcm: bytes):
    with WebSocket(server.port) as line:
        session = line.hear("session")["session_id"]
        pour(line, pcm[:64_000])
        line.close(1_000)
    server.expect_empty()
    with WebSocket(server.port, session=session) as line:
        [told] = line.rest()
    assert (told["code"], line.code) == ("session_expired", 1_008)
    assert "ended by its client" in told["message"]


def test_a_session_waits_so_long_and_no_longer(serve, pcm: bytes):
    server = serve(resume_s=1.0, max_live_sessions=1)
    resumed = server.counted("asr_serve_live_resumes_total", outcome="resumed")
    with Http1(server.port) as line:
        session = line.hear("session")["session_id"]
        pour(line, pcm[:64_000])
        line.cut(reset=True)
    eventually(lambda: server.counted("asr_serve_live_waiting_sessions") == 1)
    with WebSocket(server.port) as other:  # it keeps its seat
        assert [(e["type"], e["code"]) for e in other.rest()] == [("error", "at_capacity")]
        assert other.code == 1_013
    with WebSocket(server.port, session=session) as line:
        assert line.hear("session")["received_bytes"] <= 64_000
        assert server.counted("asr_serve_live_waiting_sessions") == 0
        line.cut(reset=False)
    assert server.counted("asr_serve_live_resumes_total", outcome="resumed") == resumed + 1
    server.expect_empty()
    refused = server.http.post(f"/v1/stream?session={session}", content=b"")
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "session_expired")
    assert "waited 1 s" in refused.json()["error"]["message"]
    with WebSocket(server.port) as line:
        session = line.hear("session")["session_id"]
        assert whole(line, pcm[:64_000])[-1]["type"] == "end"
    # It holds no seat, and is kept for as long. The question has no body: it does not go on with the session.
    eventually(lambda: server.http.post(f"/v1/stream/{session}/flush").status_code == 410)
    assert "has ended" in server.http.post(f"/v1/stream?session={session}").json()["error"]["message"]


def test_what_is_missed_must_not_be_too_much(server: Running, monkeypatch, pcm: bytes):
    monkeypatch.setattr(event_log, "MAX_LOG_EVENTS", 5)
    with WebSocket(server.port) as line:
        session = line.hear("session")["session_id"]
        pour(line, pcm[:64_000])
        for number in range(8):
            line.flush(str(number))
            line.until(lambda n=number: numbered(line.events)[-1:] and numbered(line.events)[-1].get("id") == str(n))
        last = numbered(line.events)[-1]["seq"]
        line.cut(reset=True)
    for after in (0, last - 6):
        with WebSocket(server.port, session=session, after=after) as line:
            assert [(e["type"], e["code"]) for e in line.rest()] == [("error", "events_expired")]
            assert line.code == 1_008
        refused = server.http.post(f"/v1/stream?session={session}&after={after}", content=b"")
        assert (refused.status_code, refused.json()["error"]["code"]) == (410, "events_expired")
    with WebSocket(server.port, session=session, after=last - 5) as line:
        line.until(lambda: len(numbered(line.events)) == 5)
        line.close(1_000)


def test_a_log_is_bounded_in_bytes_too(monkeypatch):
    monkeypatch.setattr(event_log, "MAX_LOG_BYTES", 1_000)
    kept = event_log.EventLog()
    for number in range(100):
        kept.append(FlushedEvent(id=str(number), position_s=1.0))
    held = [kept.next(after) for after in range(90, 100)]
    assert [json.loads(told.json)["id"] for told in held] == [str(n) for n in range(90, 100)]
    assert kept.next(100) is None
    with pytest.raises(event_log.EventsExpired):
        kept.next(0)


def test_another_key_finds_nothing(serve, pcm: bytes):
    server = serve(api_keys=("k1", "k2"))
    with WebSocket(server.port) as line:
        assert [e["code"] for e in line.rest()] == ["invalid_api_key"]
    with WebSocket(server.port, {"Authorization": "Bearer k1"}) as line:
        session = line.hear("session")["session_id"]
        pour(line, pcm[:64_000])
        for path in ("", f"/{session}/flush", f"/{session}/end"):
            said = server.http.post(
                f"/v1/stream{path}",
                params={"session": session} if not path else {},
                headers={"Authorization": "Bearer k2"},
            )
            assert (said.status_code, said.json()["error"]["code"]) == (410, "session_expired")
            assert "none of this server's" in said.json()["error"]["message"]
        with WebSocket(server.port, session=session, api_key="k2") as other:
            assert [e["code"] for e in other.rest()] == ["session_expired"]
        line.cut(reset=True)
    with WebSocket(server.port, session=session, api_key="k1") as line:
        line.end()
        assert line.rest()[-1]["type"] == "end"
    server.expect_empty()


@pytest.mark.one_server("ingresses of a run share the places for new callers: each has few")
@pytest.mark.parametrize("path", ["/", "/v1/stream"])
def test_new_callers_of_one_key_leave_places_to_those_of_another(serve, path: str):
    server = serve(api_keys=("k1", "k2"))
    with contextlib.ExitStack() as stack:

        def first_message(key: str) -> str:
            """What another caller is told when it has connected."""
            url, headers = f"ws://127.0.0.1:{server.port}{path}", {"Authorization": f"Bearer {key}"}
            line = stack.enter_context(connect(url, additional_headers=headers, proxy=None))
            if path == "/":
                line.send("START")
            return str(line.recv(WAIT_S))

        assert "at_capacity" not in first_message("k2")
        for _ in range(24):
            assert "at_capacity" not in first_message("k1")
        refused = first_message("k1")
        assert "at_capacity" in refused
        assert "24 live callers with this key" in refused
        assert "at_capacity" not in first_message("k2")
    server.expect_empty()


def test_a_frame_too_large_is_not_taken_and_the_session_waits(serve, pcm: bytes):
    server = serve(max_frame_bytes=4_096)
    with WebSocket(server.port) as line:
        session = line.hear("session")["session_id"]
        line.send(pcm[:4_096])
        line.send(pcm[4_096:8_193])
        told = line.rest()[-1]
        assert (told["code"], line.code) == ("audio_too_large", 1_009)
    with WebSocket(server.port, session=session) as line:
        assert line.hear("session")["received_bytes"] == 4_096
        events = whole(line, pcm[4_096:64_000], 4_096)
        assert events[-1]["duration_s"] == 2.0
    server.expect_empty()


@pytest.mark.slow
def test_a_session_too_long_or_too_quiet_is_finished(serve, pcm: bytes):
    short, quiet = serve(max_session_s=5.0), serve(session_idle_s=1.0)
    for kind in TRANSPORTS:
        with kind(short.port) as line:
            pour(line, pcm[:200_000], 8_000)
            events = line.rest()
        assert [e["code"] for e in events if e["type"] == "error"] == ["audio_too_long"]
        assert events[-1]["type"] == "end"
        assert segments(events)
        with kind(quiet.port) as line:
            pour(line, pcm[:64_000], 64_000)
            events = line.rest()
        assert [e["code"] for e in events if e["type"] == "error"] == ["idle_timeout"]
        assert (events[-1]["type"], events[-1]["duration_s"]) == ("end", 2.0)
    short.expect_empty()
    quiet.expect_empty()


def test_a_client_that_does_not_read_holds_up_nobody(serve, pcm: bytes) -> None:
    """Its events wait, of partials the newest; sooner or later it is read no more."""
    server = serve()
    with WebSocket(server.port, partial_ms=100) as deaf, WebSocket(server.port) as other:
        for at in range(0, len(pcm), 3_200):
            deaf.send(pcm[at : at + 3_200])
        deaf.end()
        assert whole(other, pcm[:64_000])[-1]["type"] == "end"
        expect_sound(deaf.rest())
    server.expect_empty()


@pytest.mark.one_server("it looks inside the server's process: gate")
def test_on_drain_all_are_told_and_finished(serve, pcm: bytes):
    server = serve(resume_s=30.0)
    lines = [kind(server.port) for kind in TRANSPORTS]
    for line in lines:
        pour(line, pcm[:160_000])
        line.until(lambda line=line: any(event.get("received_bytes") == 160_000 for event in line.events))
    with WebSocket(server.port) as lost:
        pour(lost, pcm[:64_000])
        lost.cut(reset=True)
    eventually(lambda: server.counted("asr_serve_live_waiting_sessions") == 1)
    server.loop.call_soon_threadsafe(server.gate.drain)
    for line in lines:
        events = line.rest()
        line.socket.close()
        [told] = [e for e in events if e["type"] == "error"]
        assert (told["code"], told["retry_after_ms"] > 0) == ("draining", True)
        assert segments(events)
        assert (events[-1]["type"], events[-1]["duration_s"]) == ("end", 5.0)
    assert lines[0].code == 1_012
    server.expect_empty()
    with WebSocket(server.port) as late:
        assert [e["code"] for e in late.rest()] == ["draining"]
