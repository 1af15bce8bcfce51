"""Callers of the live bench against real WebSockets, and its peers: in real time, whatever the other side does."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench_modules import bench_modules

S = 16_000

pytest.importorskip("jiwer")
pytest.importorskip("whisper_normalizer")
pytest.importorskip("websockets")


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The bench's files as they import each other when run as scripts."""
    with bench_modules("clips", "live_load", "live_peers", "live_protocols", "live_report", "live_speech") as modules:
        yield modules


def message(partial: str = "", *sentences: tuple[str, int, int]) -> dict[str, Any]:
    named = [{"text": text, "start": start, "end": end} for text, start, end in sentences]
    return {"sentences": named, "partial": partial, "is_final": False}


Answer = Callable[[Any], Awaitable[None]]


@asynccontextmanager
async def listening(answer: Answer) -> Any:
    """A WebSocket server on a free port; its URL."""
    from websockets.asyncio.server import serve

    async with serve(answer, "127.0.0.1", 0, compression=None) as server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/?sentences=new"


async def in_order(line: Any) -> None:
    """Says how many samples came since the last second, and locks each second of them."""
    assert await line.recv() == "START"
    await line.send('{"event":"started"}')
    samples = locked = 0
    async for frame in line:
        if frame == "STOP":
            await line.send(json.dumps({**message("", (f"{samples}", locked // 16, samples // 16)), "is_final": True}))
            await line.send('{"event":"stopped"}')
            return
        samples += len(frame) // 2
        if samples - locked >= S:
            await line.send(json.dumps(message("", (f"{S}", locked // 16, locked // 16 + 1_000))))
            locked += S
        else:
            await line.send(json.dumps(message(f"{samples - locked}")))


def job(bench: SimpleNamespace, tmp_path: Path, url: str, seconds: float, callers: int = 2) -> dict[str, Any]:
    path = tmp_path / "clips.npz"
    bench.live_speech.save(path, [np.ones(round(seconds * S), np.int16)])
    caller = bench.live_speech.Caller([0], [0], round(seconds * S))
    made: dict[str, Any] = {"clips": str(path), "callers": [caller] * callers, "seconds": seconds}
    made |= {"url": url.removesuffix("/"), "protocol": "funasr", "silence_ms": None, "at_once": False}
    return {**made, "grace_s": 30.0, "pid": os.getpid()}


async def test_sessions_send_audio_in_real_time(bench: SimpleNamespace, tmp_path: Path) -> None:
    async with listening(in_order) as url:
        found = await bench.live_load.run(job(bench, tmp_path, url, 1.25))
    json.dumps(found)
    for one, begins_s in zip(found["callers"], (0.0, 0.15625), strict=True):
        assert one["error"] is None
        assert one["begun_s"] == pytest.approx(begins_s, abs=0.05)
        assert len(one["moments_s"]) == 13
        late_s = [
            moment - one["begun_s"] - min(1.25, 0.1 * (place + 1)) for place, moment in enumerate(one["moments_s"])
        ]
        assert all(-0.002 < late < 10 for late in late_s)  # on an absolute clock: it does not drift
        assert one["stop_s"] >= one["moments_s"][-1]
        texts = [sentence["text"] for _, told in one["messages"] for sentence in told["sentences"]]
        assert texts == ["16000", "20000"]
        assert [when for when, _ in one["messages"]] == sorted(when for when, _ in one["messages"])
    assert found["wall_s"] > 1.25
    assert 0 < found["load_cpu"] < 1
    assert -0.1 < found["others_cpu"] < os.cpu_count()


@pytest.mark.parametrize("retry", [False, True])
async def test_who_is_refused_in_a_burst_dials_again_when_it_was_told_to(
    bench: SimpleNamespace, tmp_path: Path, retry: bool
) -> None:
    dialled_s: list[float] = []

    async def full_at_first(line: Any) -> None:
        dialled_s.append(time.monotonic())
        if len(dialled_s) > 2:
            await in_order(line)
        else:
            await line.recv()
            await line.send('{"event":"error","code":"at_capacity","message":"full","retry_after_ms":150}')

    async with listening(full_at_first) as url:
        asked = job(bench, tmp_path, url, 0.4, callers=1) | {"at_once": True, "retry": retry}
        [heard] = (await bench.live_load.run(asked))["callers"]
    if retry:
        assert (heard["error"], heard["retries"]) == (None, 2)
        assert all(later - before >= 0.15 for before, later in pairwise(dialled_s))
        assert heard["messages"]
    else:
        assert (heard["error"], heard["retries"], len(dialled_s)) == ("at_capacity", 0, 1)


@pytest.mark.slow
async def test_the_reason_that_ends_a_session_is_reported(bench: SimpleNamespace, tmp_path: Path) -> None:
    async def refuse(line: Any) -> None:
        await line.recv()
        await line.send('{"event":"error","code":"at_capacity","message":"full","retry_after_ms":500}')

    async def hang_up(line: Any) -> None:
        await line.recv()
        await line.send('{"event":"started"}')
        await line.recv()
        await line.close(1011)

    async def forget(line: Any) -> None:
        await line.recv()
        await line.send('{"event":"started"}')
        async for _ in line:
            pass

    for answer, error in ((refuse, "at_capacity"), (hang_up, "closed 1011"), (forget, "not stopped")):
        async with listening(answer) as url:
            found = await bench.live_load.run({**job(bench, tmp_path, url, 0.4, callers=1), "grace_s": 0.5})
        assert found["callers"][0]["error"].startswith(error)
        assert bench.live_report.error_of(found["callers"][0])
    nobody = await bench.live_load.run(job(bench, tmp_path, "ws://127.0.0.1:9/", 0.4, callers=1))
    assert nobody["callers"][0]["error"].startswith("no connection")


@pytest.mark.slow
async def test_a_server_that_does_not_read_shows_in_the_result(bench: SimpleNamespace, tmp_path: Path) -> None:
    """As soon as what the system keeps for it is full, packets are late, and go on being due."""

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        key = head.partition(b"Sec-WebSocket-Key: ")[2].split(b"\r\n")[0]
        accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n"
        )
        text = b'{"event":"started"}'
        writer.write(bytes([0x81, len(text)]) + text)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await over.wait()
        writer.transport.abort()

    over, listener = asyncio.Event(), socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    listener.bind(("127.0.0.1", 0))
    server = await asyncio.start_server(slow, sock=listener, limit=4_096)
    async with server:
        url = f"ws://127.0.0.1:{listener.getsockname()[1]}/"
        try:
            found = await bench.live_load.run({**job(bench, tmp_path, url, 3.0, callers=1), "grace_s": 1.0})
        finally:
            over.set()
    one = found["callers"][0]
    assert one["error"].startswith("not stopped")
    assert len(one["moments_s"]) < 30


def test_peers_are_fed_in_real_time(bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that needs half a second for each packet falls behind, and is given up."""
    threads: set[int] = set()

    class Slow:
        notes = "slow"

        def open(self) -> Any:
            return self

        def feed(self, pcm: Any) -> Any:
            threads.add(threading.get_ident())
            time.sleep(0.5 if len(threads) > 1 else 0.0)  # the first is the warm-up
            return message(f"{len(pcm)}")

        def finish(self) -> Any:
            return message("", ("done", 0, 400))

    monkeypatch.setitem(bench.live_peers.MAKERS, "slow", Slow)
    monkeypatch.setattr(bench.live_peers, "GIVE_UP_S", 1.0)
    found = bench.live_peers.run({**job(bench, tmp_path, "", 4.0), "peer": "slow"})
    assert len(threads) == 3
    assert {bench.live_report.error_of(one) for one in found["callers"]} == {"given up"}
    for one in found["callers"]:
        due_s = [one["begun_s"] + 0.1 * (place + 1) for place in range(len(one["moments_s"]))]
        assert one["moments_s"][1:] == pytest.approx(due_s[1:], abs=1e-3)  # only the first goes when there is time
        assert len(one["moments_s"]) < 10
    assert max(one["waits_ms"][-1] for one in found["callers"]) > 1_000


def test_a_peer_that_is_not_installed_is_an_error(bench: SimpleNamespace, tmp_path: Path) -> None:
    assert "not installed" in bench.live_peers.run({**job(bench, tmp_path, "", 0.1), "peer": "vosk"})["skipped"]


@pytest.mark.slow
def test_moonshines_own_streams(bench: SimpleNamespace, packaged_speech: Path, tmp_path: Path) -> None:
    sound = bench.clips.decode(packaged_speech / "beckett.wav")[: 4 * S]
    work = job(bench, tmp_path, "", 4.0, callers=1)
    bench.live_speech.save(Path(work["clips"]), [(sound * 32_767).astype(np.int16)])
    found = bench.live_peers.run({**work, "peer": "moonshine-voice"})
    (one,) = found["callers"]
    assert one["error"] is None
    assert any(told["partial"] for _, told in one["messages"])
    assert any(told["sentences"] for _, told in one["messages"])
    assert found["server_cpu"] > 0


def test_results_of_riva_become_sentences(bench: SimpleNamespace) -> None:
    """Their end is where the pause began by which they were decided, with the sound behind it that is part of them."""
    pytest.importorskip("riva.client", reason="no client of Riva here: pip install nvidia-riva-client")
    protocol = bench.live_protocols.NAMES["riva"](800)
    [first, rest] = protocol.packets(np.ones(2_000, np.int16))
    assert (len(first.audio_content), len(rest.audio_content)) == (3_200, 800)
    interim = {"type": "interim", "text": "Ever"}
    final = {"type": "final", "text": "Ever tried.", "start_ms": 100, "decided_ms": 3_000.0}
    assert list(protocol.heard([(1.0, interim), (2.0, final), (2.1, {"type": "ended"})])) == [
        (1.0, {"sentences": [], "partial": "Ever"}),
        (2.0, {"sentences": [{"text": "Ever tried.", "start": 100, "end": 2_450.0}], "partial": ""}),
    ]
    assert protocol.ended('{"type": "ended"}', parting=True)
