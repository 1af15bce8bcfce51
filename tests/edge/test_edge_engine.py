"""The edge on the engine of a server on its host, by shared memory: words are those over a WebSocket, whatever the
engine and the server do."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import Child
from rtp_sender import RtpSender, l16_packets
from running_edge import RunningEdge, expect_words, text_of
from running_server import MODEL, eventually

from asr_serve.config import EngineConfig, ServeConfig
from asr_serve.engine.process.backend import ProcessBackend
from asr_serve.engine.process.local_offer import OFFER_FILE, lock_offer_folder, read_offer
from asr_serve.errors import OptionError, UnknownModel
from asr_serve.server.engine_registry import EngineParts, open_engine

SESSIONS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("edge") / "offer"


@pytest.fixture(scope="module")
def offered(folder: Path) -> Iterator[EngineParts]:
    """An engine process that is offered to edges, and that nothing else uses."""
    config = ServeConfig(
        engine_threads=1,
        engine=EngineConfig(prefix_bytes=0, max_sessions=8),
        edge_folder=str(folder),
        edge_sessions=SESSIONS,
    )
    made = open_engine(MODEL, config)
    yield made
    made.client.close()


@pytest.fixture
def edge(folder: Path, offered: EngineParts) -> Iterator[RunningEdge]:
    made = RunningEdge("http://127.0.0.1:9", engine=str(folder))  # no server is asked
    yield made
    made.close()


@pytest.fixture
def sender(edge: RunningEdge) -> Iterator[RtpSender]:
    made = RtpSender(edge.driver.port)
    yield made
    made.close()


def backend_of(offered: EngineParts) -> ProcessBackend:
    assert isinstance(offered.client.backend, ProcessBackend)
    return offered.client.backend


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


def test_words_are_those_over_a_websocket_and_nothing_is_left(
    edge: RunningEdge, sender: RtpSender, offered: EngineParts, speech: np.ndarray, expected: str
) -> None:
    session = edge.create()
    packets = l16_packets(speech, session.ssrc)
    sender.send(packets)
    edge.taken(session.id, len(packets))
    events = edge.end(session.id)
    assert text_of(events) == expected
    assert events[-1]["type"] == "end"
    assert "error" not in kinds(events)
    for wrong, problem in (({"model": "nobody"}, UnknownModel), ({"language": "fi"}, OptionError)):
        with pytest.raises(problem):  # of an engine that is connected, its models and languages are known
            edge.create(options=wrong)
    eventually(lambda: not backend_of(offered).describe()["sessions_used"])


def test_an_engine_that_is_killed_and_one_that_is_renewed_lose_no_word(
    edge: RunningEdge, sender: RtpSender, offered: EngineParts, folder: Path, speech: np.ndarray, expected: str
) -> None:
    session = edge.create()
    packets = l16_packets(speech, session.ssrc)
    backend = backend_of(offered)
    sender.send(packets)  # all at once: a pause of the sender would be told as silence
    eventually(lambda: {"partial", "segment"} & set(kinds(edge.events(session.id))))  # slow cores skip partials
    first, before = read_offer(str(folder)), backend.restarts
    assert first is not None
    assert backend.pid is not None
    os.kill(backend.pid, signal.SIGKILL)
    eventually(lambda: backend.restarts > before and backend.state == "ready")
    backend.renew(30.0)
    edge.taken(session.id, len(packets))
    events = edge.end(session.id)
    second = read_offer(str(folder))
    assert second is not None
    assert second.path != first.path
    expect_words(text_of(events), expected)
    assert "error" not in kinds(events)


def test_sessions_of_edges_are_bounded_and_the_server_keeps_its_own(
    edge: RunningEdge, sender: RtpSender, offered: EngineParts, speech: np.ndarray
) -> None:
    """The one beyond the limit waits, with its audio in the spool, until another has ended."""
    sessions = [edge.create() for _ in range(SESSIONS + 1)]
    packets = [l16_packets(speech[: 3 * 16_000], session.ssrc) for session in sessions]
    for each in packets:
        sender.send(each)
    eventually(lambda: any("server_lost" in kinds(edge.events(session.id)) for session in sessions))
    (waits,) = [session for session in sessions if "server_lost" in kinds(edge.events(session.id))]
    assert backend_of(offered).describe()["sessions_used"] <= SESSIONS
    own = [offered.client.open_vad_session() for _ in range(8)]
    for each in own:
        assert len(each.submit_windows(np.zeros(512, np.float32)).result(60)) == 1
        each.close()
    for session in sessions:
        if session is not waits:
            edge.end(session.id)
    assert len(text_of(edge.end(waits.id))) > 5


def test_an_offer_is_its_users_alone(folder: Path, offered: EngineParts, tmp_path: Path) -> None:
    eventually((folder / OFFER_FILE).exists)
    assert stat.S_IMODE((folder / OFFER_FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o755)
    os.chmod(open_folder, 0o755)
    with pytest.raises(OptionError, match="chmod 700"):
        lock_offer_folder(str(open_folder), "edge_folder")


@pytest.mark.parametrize("outage_s", [0.0, pytest.param(20.0, marks=pytest.mark.exhaustive)])
def test_a_server_that_is_killed_and_started_again_loses_no_word(
    tmp_path: Path, speech: np.ndarray, expected: str, outage_s: float
) -> None:
    folder = tmp_path / "offer"
    settings = [f"edge_folder={folder}", "port=0", "voice=none", "engine_threads=1", "engine.prefix_bytes=0"]
    command = [
        str(Path(sys.executable).with_name("asr-serve")),
        "serve",
        *(word for each in settings for word in ("--set", each)),
    ]

    def start() -> Child[bytes]:
        return Child(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    server = start()
    edge = RunningEdge("http://127.0.0.1:9", engine=str(folder))
    sender = RtpSender(edge.driver.port)
    try:
        session = edge.create()
        packets = l16_packets(speech, session.ssrc)
        sender.send(packets)  # all at once: a pause of the sender would be told as silence
        eventually(lambda: {"partial", "segment"} & set(kinds(edge.events(session.id))))
        server.kill()
        server.wait()
        edge.taken(session.id, len(packets))
        time.sleep(outage_s)
        server = start()
        events = edge.end(session.id)
        expect_words(text_of(events), expected)
        assert "error" not in kinds(events)
    finally:
        sender.close()
        edge.close()
        server.kill()
        server.wait()
