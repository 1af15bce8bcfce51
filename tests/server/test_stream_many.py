"""Many sessions of /v1/stream: what is kept of those that are over is bounded; so is what waits for a reader."""

from __future__ import annotations

import asyncio
import gc
import json
import random

import pytest
from running_server import Running, eventually
from stream_client import TRANSPORTS, WebSocket, pcm_of, pour, whole

from asr_serve.errors import EventsExpired
from asr_serve.protocols.stream.server_events import AckEvent, EncodedEvent, FlushedEvent
from asr_serve.server.middleware import request_context
from asr_serve.server.realtime.stream import connection, event_log
from asr_serve.server.realtime.stream.connection import StreamConnection
from asr_serve.server.realtime.stream.session import StreamSession


@pytest.mark.slow
def test_of_sessions_that_are_over_only_so_many_are_kept(serve, beckett):
    server: Running = serve(max_live_sessions=3, resume_s=60.0)
    pcm, found = pcm_of(beckett, 1.0), []
    for _ in range(8):
        with WebSocket(server.port) as line:
            found.append(line.hear("session")["session_id"])
            assert whole(line, pcm)[-1]["type"] == "end"
    server.expect_empty()
    assert server.counted("asr_serve_live_waiting_sessions") == 0
    for number, session in enumerate(found):
        with WebSocket(server.port, session=session) as line:
            last = line.rest()[-1]
        assert last.get("code", last["type"]) == ("end" if number >= 5 else "session_expired"), number


@pytest.mark.slow
def test_sessions_that_are_cut_resumed_taken_over_and_left_leave_nothing(serve, beckett, monkeypatch):
    monkeypatch.setattr(request_context, "DRAIN_BODY_S", 0.05)
    server: Running = serve(max_live_sessions=8, resume_s=1.5)
    pcm, rng, found = pcm_of(beckett, 0.3), random.Random(5), set()
    for number in range(60):
        kind = rng.choice(TRANSPORTS)
        first = kind(server.port)
        session = first.hear("session")["session_id"]
        found.add(session)
        if rng.random() < 0.5:
            pour(first, pcm)
        fate = rng.choice(("cut", "resume", "take over", "end", "end and resume"))
        if fate in ("end", "end and resume"):
            first.end()
        if fate in ("cut", "resume", "end and resume"):
            first.cut(reset=rng.random() < 0.5)
        if fate in ("resume", "take over", "end and resume"):
            with kind(server.port, session=session) as second, kind(server.port, session=session) as third:
                third.hear("session")
                third.end()
                assert third.rest()[-1]["type"] == "end", number
                if fate == "take over":
                    first.rest()
                second.rest()
        first.socket.close()
        eventually(lambda: server.gate.live_sessions < 8)
    server.expect_empty()
    eventually(lambda: server.gate.live_sessions == 0)

    eventually(lambda: server.counted("asr_serve_live_waiting_sessions") == 0)

    def held() -> int:
        gc.collect()
        sessions = [each for each in gc.get_objects() if type(each) is StreamSession]
        return sum(each.info.session_id in found for each in sessions)

    eventually(lambda: not held(), lambda: f"{held()} are still in memory")


def partial(text: str) -> EncodedEvent:
    return EncodedEvent("partial", None, json.dumps({"text": text}).encode())


async def test_numbered_events_come_in_order_and_of_the_rest_the_newest():
    kept = event_log.EventLog()
    line = StreamConnection(kept, 0, str)
    for number in range(3):
        kept.append(FlushedEvent(id=str(number), position_s=1.0))
        line.show_partial(partial(f"p{number}"))
        line.acknowledge(AckEvent(received_bytes=number, received_s=0.5))
    line.send_error(ValueError("no"))
    line.finish()
    found = [json.loads(each.json) if each.json != b"no" else "no" async for each in line.events() if each]
    assert found[0] == "no"
    assert [each["id"] for each in found[1:4]] == ["0", "1", "2"]
    assert [found[4]["text"], found[5]["received_bytes"]] == ["p2", 2]


async def test_what_is_stopped_says_no_more_and_why():
    kept = event_log.EventLog()
    kept.append(FlushedEvent(id="1", position_s=1.0))
    line = StreamConnection(kept, 0, str)
    line.stop(EventsExpired("they are gone"))
    line.stop()
    with pytest.raises(EventsExpired):
        _ = [each async for each in line.events()]


async def test_a_reader_that_lags_far_behind_is_given_up():
    kept = event_log.EventLog()
    line = StreamConnection(kept, 0, str)
    for number in range(event_log.MAX_LOG_EVENTS + 1):
        kept.append(FlushedEvent(id=str(number), position_s=1.0))
    assert line.congested
    with pytest.raises(EventsExpired):
        _ = [each async for each in line.events()]


@pytest.mark.parametrize("what", ["events", "refusals"])
async def test_room_comes_when_all_was_told(what):
    kept = event_log.EventLog()
    line = StreamConnection(kept, 0, str)
    for number in range(connection.CONGESTION_EVENTS):
        if what == "events":
            kept.append(FlushedEvent(id=str(number), position_s=1.0))
        else:
            line.send_error(ValueError("no"))
    waiting = asyncio.create_task(line.pause_reading(line.wait_caught_up()))
    await asyncio.sleep(0)
    assert (line.congested, line.blocked, waiting.done()) == (True, True, False)
    quiet = 0
    async for each in line.events(0.01):
        quiet += each is None
        if quiet == 2:
            line.finish()
    await waiting
    assert (line.congested, line.blocked) == (False, False)


def test_only_sessions_that_hold_a_seat_are_counted_as_waiting(serve, beckett):
    server = serve()
    with WebSocket(server.port) as line:
        whole(line, pcm_of(beckett, 2.0))
    with WebSocket(server.port) as line:
        session = line.hear("session")["session_id"]
        line.cut(reset=True)
    eventually(lambda: server.counted("asr_serve_live_waiting_sessions") == 1)
    with WebSocket(server.port, session=session) as line:
        line.hear("session")
        line.end()
        assert line.rest()[-1]["type"] == "end"
    server.expect_empty()
