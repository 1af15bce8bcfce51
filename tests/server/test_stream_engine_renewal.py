"""A new engine process in the middle of a sentence: clients of /v1/stream notice nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import WAIT_S, Running, eventually
from stream_client import Event, WebSocket, numbered, pcm_of, pour, segments, whole

from asr_serve.config import EngineConfig, ServeConfig
from asr_serve.server.engine_registry import open_engine

NEMO = Path(__file__).parents[1] / "models" / "fixtures" / "fastconformer_hybrid.nemo"
ADMIN = {"Authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def streaming(cities: Path) -> Iterator[Running]:
    """A server whose model hears audio as it comes; its weights are chance, and so are its words."""
    config = ServeConfig(
        model="fastconformer-streaming-medium-en",
        weights=str(NEMO),
        turn_model="none",
        engine_threads=1,
        admin_keys=("boss",),
        engine=EngineConfig(max_sessions=8, use_chunked_inference=True),
    )
    running = Running(config, open_engine)
    yield running
    parts = [engine.client for engine in running.engines]
    running.stop()
    for client in parts:
        client.close()


@pytest.fixture(params=["hears utterances", "hears as it comes"])
def renewable(request: pytest.FixtureRequest) -> Running:
    if request.param == "hears as it comes":
        return request.getfixturevalue("streaming")
    return request.getfixturevalue("serve")(admin_keys=("boss",))


def renewed_while(server: Running, pcm: bytes) -> tuple[list[Event], dict[str, Any]]:
    """All events of a session, in whose middle another process takes over; and what was said of that."""
    with WebSocket(server.port) as line:
        middle = len(pcm) // 2 & ~1
        pour(line, pcm[:middle])
        line.hear("partial" if not server.engines.get().card.streaming else "locked")
        answers: list[httpx.Response] = []
        path = f"/v1/models/{server.config.model}/renew"
        renewing = threading.Thread(target=lambda: answers.append(server.http.post(path, headers=ADMIN)))
        renewing.start()
        at = middle
        while renewing.is_alive():  # words go on, but the sentence is not to end
            if at < middle + len(pcm) // 4:
                pour(line, pcm[at : at + 3_200])
                at += 3_200
            line.poll(0.1)
        pour(line, pcm[at:])
        line.end()
        events = line.rest()
    assert answers[0].status_code == 200, answers[0].text
    return events, answers[0].json()


def expect_locked(events: list[Event]) -> None:
    """What was locked is what the segment says."""
    locked = ""
    for event in events:
        if event["type"] == "locked":
            locked += event["text"]
        elif event["type"] == "segment":
            assert event["text"].startswith(locked)
            locked = ""
    assert not locked


def test_a_sentence_goes_on(renewable: Running, cities: Path) -> None:
    server, pcm = renewable, pcm_of(cities, 12.0)
    link = server.engines.get().client.backend
    with WebSocket(server.port) as line:
        expected = whole(line, pcm)
    before = link._current.process.pid
    events, told = renewed_while(server, pcm)
    told_events = numbered(events)
    assert [event["seq"] for event in told_events] == list(range(1, len(told_events) + 1))
    expect_locked(told_events)
    assert segments(events) == segments(expected)
    assert segments(events)[0][2]
    assert (told["object"], told["state"], told["id"]) == ("model.renewal", "ready", server.config.model)
    assert (told["sessions"], told["replayed"], told["repeated"]) == (1, 0, 0)
    assert told["streams"] == int(server.engines.get().card.streaming)
    assert 0 < told["load_s"] <= told["total_s"]
    assert link._current.process.pid != before
    server.http.get("/metrics")
    labels = {"model": server.config.model, "what": "session", "how": "state"}
    eventually(lambda: server.counted("asr_serve_migrations_total", **labels) >= 1, wait_s=WAIT_S)
    eventually(lambda: link._current.idle and not server.gate.in_flight_requests)


def test_no_renewal_of_what_is_not_loaded(streaming: Running) -> None:
    for model, code in (("moonshine-tiny-en", "model_not_loaded"), ("nobody", "model_not_found")):
        answer = streaming.http.post(f"/v1/models/{model}/renew", headers=ADMIN)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, code)
