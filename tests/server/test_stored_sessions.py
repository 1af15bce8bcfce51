"""/v1/stream with sessions in Redis: a client goes on at another server, and no word, byte or event is lost, changed
or told twice. The servers of most tests share an engine process and, like two hosts, nothing else but Redis."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from redis_server import RedisServer
from resuming_caller import Caller
from running_server import Running, eventually
from server_process import Serving
from stream_client import Event, Http2, Line, WebSocket, expect_sound, numbered, pcm_of, pour, segments, whole
from test_stream_python_client import Proxy

from asr_serve.api.client.stream import StreamClient
from asr_serve.audio.encode.stream_encoder import AudioEncoder
from asr_serve.config import SessionsConfig
from asr_serve.protocols.stream.server_events import AckEvent, NumberedEvent, SegmentEvent

RESUME_S = 5.0
KEYS = ["00" * 32, "ab" * 32]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def pair(serve: Callable[..., Running], redis: RedisServer) -> list[Running]:
    """Two servers with the same Redis."""
    settings = SessionsConfig(redis_url=redis.url, checkpoint_ms=500)
    servers = [serve(sessions=settings, resume_s=RESUME_S) for _ in range(2)]
    for server in servers:
        assert server.http.get("/health").json()["session_store"] == "connected"
        assert server.counted("asr_serve_session_store_up", store="redis") == 1
    return servers


@pytest.fixture(scope="module")
def pcm(cities: Path) -> bytes:
    return pcm_of(cities, 12)


@pytest.fixture(scope="module")
def uncut(shared_server: Running, pcm: bytes) -> list[Event]:
    """The session's events without Redis, and on one server."""
    with WebSocket(shared_server.port) as line:
        events = whole(line, pcm)
        assert "durable" not in events[0]
        return numbered(events)


@pytest.mark.parametrize("kinds", [(WebSocket, Http2), (Http2, WebSocket)], ids=["websocket", "http2"])
def test_a_caller_who_goes_to_and_fro(pair, pcm: bytes, uncut: list[Event], kinds):
    caller = Caller(pcm)
    for step, until in enumerate((0.1, 0.25, 0.5, 0.6, 0.85, 1.0)):
        caller.connect(kinds[step % 2], pair[step % 2].port)
        caller.say(until)
        if step == 3:
            time.sleep(0.3)  # words that are locked meanwhile are told by the other server
        if until < 1:
            caller.leave()
    caller.end()
    caller.expect(uncut)
    assert pair[1].counted("asr_serve_live_resumes_total", outcome="taken_over") >= 2
    # Everything is told again by the server that never had the end, and commands reach the one that has it.
    with WebSocket(pair[0].port, session=caller.session, after=0) as line:
        assert numbered(line.rest()) == caller.told
    for server in pair:
        server.expect_empty()


def test_flushes_telephony_and_words_go_along(pair, shared_server: Running, pcm: bytes):
    """A rate that is resampled, and words with times, and a sentence that is flushed where it moves."""
    samples = np.frombuffer(pcm, "<i2")[::2].tobytes()  # half as many: 8 kHz
    query: dict[str, Any] = {"rate": 8_000, "words": "true", "max_segment_ms": 4_000}
    cut = len(samples) // 2 // 2 * 2

    def flushed(line: Line) -> list[Event]:
        line.until(lambda: any(event["type"] == "flushed" for event in line.events))
        return line.events

    with WebSocket(shared_server.port, **query) as line:
        pour(line, samples[:cut])
        line.flush("f")
        flushed(line)
        alone = numbered(whole(line, samples[cut:]))
    caller = Caller(samples, **query)
    caller.connect(WebSocket, pair[0].port)
    caller.say(0.5)
    caller.line.flush("f")
    caller.leave()
    caller.connect(WebSocket, pair[1].port)
    caller.say(0.5)
    caller.line.flush("f")  # whether it arrived is not known; it is one flush
    flushed(caller.line)
    caller.say(1.0)
    caller.end()
    expect_sound(caller.told)
    *found, (start_s, end_s, text) = segments(caller.told)
    *wanted, last = segments(alone)
    assert found == wanted
    # The audio ends in the middle of a word, and is resampled within the rounding of float32: that word may differ.
    assert (start_s, end_s, text.rpartition(" ")[0]) == (*last[:2], last[2].rpartition(" ")[0])
    assert sum(event["type"] == "flushed" for event in caller.told) == 1
    heard, expected = ([w["text"] for e in told for w in e.get("words", [])] for told in (caller.told, alone))
    assert heard[:-1] == expected[:-1]


def test_opus_in_ogg_goes_along(pair, shared_server: Running, pcm: bytes):
    """In the middle of pages, and of the sounds that its packets predict."""
    encoder = AudioEncoder("opus", 16_000)
    ogg = b"".join([encoder.encode(np.frombuffer(pcm, "<i2").astype(np.float32) / 32_768), encoder.finish()])
    with WebSocket(shared_server.port, encoding="ogg") as line:
        alone = numbered(whole(line, ogg))
    caller = Caller(ogg, encoding="ogg")
    for step, until in enumerate((0.15, 0.4, 0.55, 0.8, 1.0)):
        caller.connect((WebSocket, Http2)[step % 2], pair[step % 2].port)
        caller.say(until)
        if until < 1:
            caller.leave()
    caller.end()
    caller.expect(alone)


def test_a_session_that_must_be_durable(pair, shared_server: Running, redis: RedisServer):
    def refused(server: Running, **query: str) -> tuple[int, str]:
        answer = server.http.post("/v1/stream", params={"durable": "true"} | query, content=b"")
        return answer.status_code, answer.json()["error"]["code"]

    with WebSocket(pair[0].port, durable="true") as line:
        assert line.hear("session")["durable"] is True
        line.end()
        line.rest()
    assert refused(shared_server) == (400, "unsupported_option")
    assert refused(pair[0], speakers="true") == (400, "unsupported_option")
    redis.pause()
    try:
        assert refused(pair[0]) == (503, "store_unavailable")
    finally:
        redis.resume()
    for server in pair:
        eventually(lambda server=server: server.counted("asr_serve_session_store_up", store="redis") == 1)
        server.expect_empty()


def test_a_client_that_was_told_more_than_is_stored_is_left_with_its_server(pair, pcm: bytes, uncut: list[Event]):
    """That one has the rest in memory, cut off from Redis."""
    caller = Caller(pcm)
    caller.connect(WebSocket, pair[0].port)
    caller.say(0.4)
    caller.hear_more()
    refused = pair[1].http.post(f"/v1/stream?session={caller.session}&after=1000", content=b"")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
    caller.say(1.0)
    caller.end()
    caller.expect(uncut)


def test_audio_that_only_a_server_cut_off_from_redis_has_is_sent_again(
    serve: Callable[..., Running], redis: RedisServer, shared_server: Running, pcm: bytes
):
    """It was acknowledged as not durable, and its server is gone before Redis is back. Nothing was told meanwhile, so
    that another server continues from what is stored."""
    silence = bytes(6 * 32_000)
    with WebSocket(shared_server.port) as line:
        uncut = numbered(whole(line, silence + pcm))
    to_redis = Proxy(redis.port)
    settings = SessionsConfig(redis_url=f"redis://127.0.0.1:{to_redis.url.rpartition(':')[2]}/0", checkpoint_ms=500)
    cut_off = serve(sessions=settings, resume_s=RESUME_S)
    other = serve(sessions=SessionsConfig(redis_url=redis.url), resume_s=RESUME_S)
    way = Proxy(cut_off.port)
    try:
        with StreamClient(way.url, encoding="s16le") as client:
            client.send(silence[:64_000])
            wait_for_ack(client, 32_000, durable=True)
            to_redis.deaf = True
            to_redis.cut()
            eventually(lambda: cut_off.counted("asr_serve_session_store_up", store="redis") == 0)
            client.send(silence[64_000:])
            wait_for_ack(client, 140_000, durable=False)
            way.port = other.port
            way.cut()
            client.send(pcm)
            client.end()
            told = [event for event in client if isinstance(event, NumberedEvent)]
        found = [(each.text, each.start_s, each.end_s) for each in told if isinstance(each, SegmentEvent)]
        assert found == [(e["text"], e["start_s"], e["end_s"]) for e in uncut if e["type"] == "segment"]
        assert [event.seq for event in told] == list(range(1, len(told) + 1))
    finally:
        way.close()
        to_redis.close()


def wait_for_ack(client: StreamClient, received_bytes: int, *, durable: bool) -> None:
    while (event := client.take(60)) is not None:
        if isinstance(event, AckEvent) and event.received_bytes >= received_bytes:
            assert event.durable is durable
            return
    raise AssertionError("no acknowledgement came")


def test_a_server_that_has_lost_a_session_does_not_continue_an_older_state_of_it(
    serve: Callable[..., Running], redis: RedisServer, pcm: bytes, uncut: list[Event]
):
    """It is cut off from Redis, and does not know that another server has claimed the session."""
    to_redis = Proxy(redis.port)
    settings = SessionsConfig(redis_url=f"redis://127.0.0.1:{to_redis.url.rpartition(':')[2]}/0", checkpoint_ms=500)
    cut_off = serve(sessions=settings, resume_s=RESUME_S)
    other = serve(sessions=SessionsConfig(redis_url=redis.url), resume_s=RESUME_S)
    try:
        caller = Caller(pcm)
        caller.connect(WebSocket, cut_off.port)
        caller.say(0.3)
        caller.hear_more()
        to_redis.deaf = True
        to_redis.cut()
        eventually(lambda: cut_off.counted("asr_serve_session_store_up", store="redis") == 0)
        caller.leave()
        opened = caller.connect(Http2, other.port).hear("session")
        query = {"session": caller.session, "after": len(caller.told), "epoch": opened["epoch"]}
        refused = cut_off.http.post("/v1/stream", params=query, content=b"")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        caller.say(1.0)
        caller.end()
        caller.expect(uncut)
    finally:
        to_redis.close()


def test_an_owner_that_is_still_there_stops(pair, pcm: bytes, uncut: list[Event]):
    """The network between client and server is lost, and not the server."""
    old = Caller(pcm)
    old.connect(WebSocket, pair[0].port)
    old.say(0.4)
    old.hear_more()
    caller = Caller(pcm)
    caller.continue_as(old)
    caller.connect(Http2, pair[1].port)
    refused = pair[0].counted("asr_serve_session_store_refused_writes_total")
    told = len(numbered(old.line.events))
    old.line.send(pcm[old.at : old.at + 64_000])  # what it does with this is refused
    old.line.flush("never")
    last = old.line.rest()[-1]
    assert (last["type"], last["code"]) == ("error", "taken_over")
    old.line.socket.close()
    assert len(numbered(old.line.events)) == told
    assert pair[0].counted("asr_serve_session_store_refused_writes_total") == refused + 1
    caller.say(1.0)
    caller.end()
    caller.expect(uncut)


def test_several_connections_claim_a_session_at_once(pair, pcm: bytes, uncut: list[Event]):
    """It is taken over once, and the last one has it."""
    caller = Caller(pcm)
    caller.connect(WebSocket, pair[0].port)
    caller.say(0.4)
    caller.leave()
    before = pair[1].counted("asr_serve_live_resumes_total", outcome="taken_over")
    query = {"session": caller.session, "after": len(caller.told)}
    lines = [WebSocket(pair[1].port, **query) for _ in range(4)]
    for line in lines:
        line.hear("session")
    caller.connect(Http2, pair[1].port)
    for line in lines:
        assert line.rest()[-1]["code"] == "taken_over"
        line.socket.close()
    assert pair[1].counted("asr_serve_live_resumes_total", outcome="taken_over") == before + 1
    caller.say(1.0)
    caller.end()
    caller.expect(uncut)


def test_redis_dies_and_comes_back_under_a_caller(pair, redis: RedisServer, pcm: bytes, uncut: list[Event]):
    caller = Caller(pcm)
    caller.connect(WebSocket, pair[0].port)
    caller.say(0.3)
    redis.kill()
    caller.say(0.6)
    caller.line.flush("in memory")
    caller.line.until(lambda: any(event["type"] == "flushed" for event in caller.line.events))
    eventually(lambda: pair[0].counted("asr_serve_session_store_up", store="redis") == 0)
    assert pair[0].http.get("/ready").json()["session_store"] == "away"
    assert [e for e in caller.line.events if e["type"] == "ack"][-1]["durable"] is False
    refused = pair[1].http.post(f"/v1/stream?session={caller.session}", content=b"")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
    assert refused.headers["retry-after-ms"]
    caller.say(0.7)
    redis.start()  # it has lost everything
    for server in pair:
        eventually(lambda server=server: server.counted("asr_serve_session_store_up", store="redis") == 1)
    caller.say(0.8)
    eventually(lambda: redis.client.exists(f"asr-serve:{{{caller.session}}}"))
    caller.leave()
    caller.connect(Http2, pair[1].port)
    caller.say(1.0)
    caller.end()
    expect_sound(caller.told)
    assert [e["type"] for e in caller.told].count("flushed") == 1
    assert caller.told[-1]["duration_s"] == uncut[-1]["duration_s"]


def test_redis_hangs_and_loses_a_key(pair, redis: RedisServer, pcm: bytes, uncut: list[Event]):
    caller = Caller(pcm)
    caller.connect(WebSocket, pair[0].port)
    caller.say(0.3)
    redis.client.flushall()  # as an eviction or a failover may
    caller.say(0.5)
    eventually(lambda: redis.client.exists(f"asr-serve:{{{caller.session}}}"))
    redis.pause()
    caller.say(0.7)
    eventually(lambda: pair[0].counted("asr_serve_session_store_up", store="redis") == 0)
    redis.resume()
    eventually(lambda: pair[0].counted("asr_serve_session_store_up", store="redis") == 1)
    caller.leave()
    caller.connect(WebSocket, pair[1].port)
    caller.say(1.0)
    caller.end()
    caller.expect(uncut)


def test_a_server_that_goes_down_hands_its_sessions_over(
    serve: Callable[..., Running], pair: list[Running], redis: RedisServer, pcm: bytes, uncut: list[Event]
):
    """In the middle of a sentence, with all that it has received; one session has a connection, and one has none."""
    leaving = serve(sessions=pair[0].config.sessions, resume_s=RESUME_S)
    callers = [Caller(pcm), Caller(pcm)]
    for caller in callers:
        caller.connect(WebSocket, leaving.port)
        caller.say(0.4)
    callers[1].leave()
    leaving.loop.call_soon_threadsafe(leaving.gate.drain)
    last = callers[0].line.rest()[-1]
    callers[0].listen()
    assert (last["type"], last["code"]) == ("error", "draining")
    assert isinstance(callers[0].line, WebSocket)
    assert callers[0].line.code == 1_012
    assert not any(event["type"] == "end" for event in callers[0].told)
    leaving.expect_empty()
    for caller in callers:
        caller.connect(WebSocket, pair[1].port)
        caller.say(1.0)
        caller.end()
        caller.expect(uncut)


def test_a_server_that_goes_down_while_redis_hangs_ends_its_sessions(
    serve: Callable[..., Running], pair: list[Running], redis: RedisServer, pcm: bytes
):
    """Nobody could continue them: their words are told here."""
    leaving = serve(sessions=pair[0].config.sessions, resume_s=RESUME_S)
    caller = Caller(pcm)
    caller.connect(WebSocket, leaving.port)
    caller.say(0.4)
    caller.hear_more()
    redis.pause()
    try:
        leaving.loop.call_soon_threadsafe(leaving.gate.drain)
        events = caller.line.rest()
    finally:
        redis.resume()
    caller.listen()
    caller.line.socket.close()
    assert [event["code"] for event in events if event["type"] == "error"] == ["draining"]
    assert caller.told[-1]["type"] == "end"
    leaving.expect_empty()
    for server in pair:
        eventually(lambda server=server: server.counted("asr_serve_session_store_up", store="redis") == 1)


def test_what_is_stored_is_bounded_and_expires(pair, redis: RedisServer, pcm: bytes):
    caller = Caller(pcm + bytes(32_000 * 8))
    caller.connect(WebSocket, pair[0].port)
    caller.say(1.0)
    caller.line.until(lambda: any(e.get("received_bytes", 0) >= len(caller.pcm) - 32_000 for e in caller.line.events))
    own = f"asr-serve:{{{caller.session}}}*"
    caller.line.until(lambda: any(e["type"] == "segment" for e in caller.line.events))
    names = {key.decode().rpartition("}")[2] for key in redis.client.scan_iter(own)}
    assert names == {"", ":audio", ":events"}
    for key in redis.client.scan_iter("asr-serve:{*"):
        assert 0 < redis.client.pttl(key) <= 2_000 * RESUME_S
    # Eight seconds of silence behind twelve of speech: what is locked is gone.
    audio = f"asr-serve:{{{caller.session}}}:audio"
    eventually(lambda: sum(len(fields[b"d"]) for _, fields in redis.client.xrange(audio)) < 32_000 * 5)
    caller.line.close(1_000)
    caller.line.socket.close()
    eventually(lambda: redis.client.hexists(f"asr-serve:{{{caller.session}}}", "gone"))
    assert [key.decode() for key in redis.client.scan_iter(own)] == [f"asr-serve:{{{caller.session}}}"]
    with WebSocket(pair[1].port, session=caller.session) as line:
        [told] = line.rest()
    assert told["code"] == "session_expired"
    assert "ended by its client" in told["message"]


def test_encrypted_sessions(serve: Callable[..., Running], redis: RedisServer, pcm: bytes, uncut, tmp_path: Path):
    """Neither words nor audio can be read in Redis, and keys can be replaced. A server without the key refuses."""
    servers = []
    for number, keys in enumerate((KEYS[:1], KEYS[::-1], KEYS[1:])):
        file = tmp_path / f"keys-{number}"
        file.write_text("\n".join(keys) + "\n")
        settings = SessionsConfig(redis_url=redis.url, key_file=str(file), prefix="sealed", checkpoint_ms=500)
        servers.append(serve(sessions=settings, resume_s=RESUME_S))
    old, both, new = servers
    caller = Caller(pcm)
    caller.connect(WebSocket, old.port)
    caller.say(0.7)
    caller.line.until(lambda: any(e["type"] == "segment" for e in caller.line.events) or len(caller.line.events) > 8)
    caller.leave()
    eventually(lambda: redis.client.exists(f"sealed:{{{caller.session}}}:audio"))
    contents = redis.contents("sealed:{*")
    assert len(contents) > 20_000
    for text in (b"best of times", b"worst", b"text", b"s16le", b"moonshine"):
        assert text not in contents
    audio = np.frombuffer(pcm, "<i2")
    for at in range(0, len(audio) - 16, 997):
        if np.abs(audio[at : at + 16]).max() > 50:
            assert audio[at : at + 16].tobytes() not in contents
    refused = new.http.post(f"/v1/stream?session={caller.session}", content=b"")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
    assert "cannot read" in refused.json()["error"]["message"]
    caller.connect(Http2, both.port)
    caller.say(1.0)
    caller.end()
    caller.expect(uncut)


@pytest.mark.slow
def test_an_engine_that_dies_again_and_again_under_a_session(
    pair, redis: RedisServer, pcm: bytes, uncut: list[Event], tmp_path: Path
):
    """Its last state is stored, and not its end: another server goes on with it."""
    flags = [f"--set=sessions.redis_url={redis.url}", "--port=0", f"--set=resume_s={RESUME_S}"]
    server = Serving(tmp_path / "failing.log", *flags)
    try:
        caller = Caller(pcm)
        caller.connect(WebSocket, int(server.url.rpartition(":")[2]))
        caller.say(0.35)
        caller.hear_more()
        parent = psutil.Process(server.process.pid)
        while not any(event["type"] == "error" for event in caller.line.events):
            for engine in parent.children():
                with suppress(psutil.NoSuchProcess):
                    engine.kill()
            caller.line.poll(0.3)
            if caller.at < len(pcm) * 0.5:
                caller.say(caller.at / len(pcm) + 0.01)
        caller.line.rest()
        caller.listen()
        assert not any(event["type"] == "end" for event in caller.told)
        caller.connect(WebSocket, pair[1].port)
        caller.say(1.0)
        caller.end()
        caller.expect(uncut)
    finally:
        server.kill()


@pytest.mark.slow
def test_a_server_that_is_paused_and_one_that_is_killed(
    redis: RedisServer, pcm: bytes, uncut: list[Event], tmp_path: Path
):
    flags = ["--quantize=none", f"--set=sessions.redis_url={redis.url}", "--port=0", f"--set=resume_s={RESUME_S}"]
    paused, killed = servers = [Serving(tmp_path / f"{name}.log", *flags) for name in ("paused", "killed")]
    try:
        ports = [int(server.url.rpartition(":")[2]) for server in servers]
        caller = Caller(pcm)
        caller.connect(WebSocket, ports[0])
        caller.say(0.35)
        caller.hear_more()
        paused.process.send_signal(signal.SIGSTOP)
        caller.leave()
        caller.connect(Http2, ports[1])
        caller.say(0.6)
        paused.process.send_signal(signal.SIGCONT)
        caller.say(0.7)
        killed.kill()
        caller.line.rest()
        caller.listen()
        caller.connect(WebSocket, ports[0])
        caller.say(1.0)
        caller.end()
        caller.expect(uncut)
    finally:
        for server in servers:
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGCONT)
                server.kill()
