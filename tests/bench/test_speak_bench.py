"""The arithmetic of bench/speak.py, its callers against a server that sends sound as it is told to, and peers."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_modules import bench_modules

HZ = 1_000
"""Of the sound here: a sample is a millisecond."""

pytest.importorskip("jiwer")
pytest.importorskip("whisper_normalizer")


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The bench's files as they import each other when run as scripts."""
    with bench_modules("speak", "speak_calls", "speak_load", "speak_peers", "speak_report") as modules:
        yield modules


# --- playing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrivals", "played"),
    [
        ([(1.0, 500)], (1.0, 0, 0.0, 1.5, 0.5)),
        ([(1.0, 500), (1.4, 100)], (1.0, 0, 0.0, 1.6, 0.6)),
        ([(1.0, 500), (1.5, 100)], (1.0, 0, 0.0, 1.6, 0.6)),  # just in time
        ([(1.0, 500), (1.75, 250)], (1.0, 1, 0.25, 2.0, 0.75)),
        ([(1.0, 500), (1.75, 250), (2.25, 125)], (1.0, 2, 0.5, 2.375, 0.875)),
        ([(1.0, 500), (1.75, 250), (1.875, 125)], (1.0, 1, 0.25, 2.125, 0.875)),  # one wait, then enough
    ],
)
def test_playback(
    bench: SimpleNamespace, arrivals: list[tuple[float, int]], played: tuple[float, int, float, float, float]
) -> None:
    found = bench.speak_calls.play(0.0, [bench.speak_calls.Arrival(*each) for each in arrivals], HZ)
    assert tuple(found) == pytest.approx(played)


def test_no_sound_is_an_error(bench: SimpleNamespace) -> None:
    assert bench.speak_calls.play(0.0, [], HZ) is None
    found = bench.speak_calls.saying(1, 2, 0.0, [], HZ)
    assert found == {"caller": 1, "text": 2, "error": "no sound"}
    assert bench.speak_calls.played_s(found, 10.0) == 10.0 + bench.speak_calls.RECOVER_S


def test_the_next_request_follows_the_end_of_playback(bench: SimpleNamespace) -> None:
    arrivals = [bench.speak_calls.Arrival(*each) for each in [(5.2, 500), (6.0, 100)]]
    found = bench.speak_calls.saying(0, 0, 5.0, arrivals, HZ)
    assert bench.speak_calls.played_s(found, 5.0) == pytest.approx(6.1)


def test_only_requests_begun_within_a_level_count(bench: SimpleNamespace) -> None:
    level = bench.speak_calls.Level(begins_s=10.0, settle_s=2.0, seconds=5.0)
    early, inside, late = (level.begin(at_s) for at_s in (11.9, 12.0, 17.0))
    assert (early, inside, late) == (False, True, False)
    assert not level.over(16.9)
    assert not level.over(20.0)  # one that counts is still being said
    for counts, name in ((early, "early"), (inside, "inside"), (late, "late")):
        level.end(counts, {"text": name})
    assert level.over(20.0)
    assert [saying["text"] for saying in level.sayings] == ["inside"]


def test_a_voice_slower_than_its_level_is_heard_once(bench: SimpleNamespace) -> None:
    level = bench.speak_calls.Level(begins_s=10.0, settle_s=2.0, seconds=5.0)
    assert not level.begin(11.0)
    assert not level.over(20.0)
    assert level.begin(25.0)
    assert not level.begin(26.0)
    level.end(True, {"text": "late"})
    assert level.over(27.0)


# --- rows ------------------------------------------------------------------------------------------------------


def said(first_ms: float, gaps: int = 0, error: str = "") -> dict[str, Any]:
    return {
        "caller": 0,
        "text": 0,
        "error": error,
        "first_ms": first_ms,
        "gaps": gaps,
        "starved_ms": 100.0 * gaps,
        "audio_s": 2.0,
        "made_s": 1.0,
    }


def level(*sayings: dict[str, Any], audio_s: float = 20.0, cpu_s: float = 2.0) -> dict[str, Any]:
    spent = {"audio_s": audio_s, "server_cpu_s": cpu_s, "client_cpu_s": 0.1, "rss_mib": 100.0, "wall_s": 10.0}
    return {"sayings": list(sayings), **spent}


def test_a_row_has_the_documented_keys(bench: SimpleNamespace) -> None:
    rounds = [level(*(said(ms) for ms in range(1, 51))), level(*(said(ms, gaps=ms == 99) for ms in range(51, 101)))]
    row = bench.speak_report.row("asr-serve", "talk", 8, rounds)
    assert {"callers", "first_audio_p50_ms", "first_audio_p95_ms", "rtf", "gaps"} <= set(row)
    assert (row["callers"], row["first_audio_p50_ms"], row["first_audio_p95_ms"]) == (8, 50, 95)
    assert row["rtf"] == pytest.approx(0.1)
    assert (row["gaps"], row["starved_ms"], row["sayings"]) == (1, 100.0, 100)
    assert row["made_p50"] == 50.0


def test_failures_are_reported_and_are_no_measurement(bench: SimpleNamespace) -> None:
    report = bench.speak_report
    silent = {"caller": 0, "text": 0, "error": "429 at_capacity"}
    row = report.row("asr-serve", "talk", 1, [level(said(5), silent)])
    assert row["errors"] == {"429": 1}
    assert not report.flawless(row, 1_000)
    assert report.row("x", "talk", 1, [{"skipped": "missing"}])["skipped"] == "missing"
    assert "x: skipped: missing" in report.table([report.row("x", "talk", 1, [{"skipped": "missing"}])])
    assert report.row("x", "talk", 1, [level()])["first_audio_p50_ms"] is None


def test_flawless(bench: SimpleNamespace) -> None:
    report = bench.speak_report
    row = report.row("asr-serve", "talk", 1, [level(said(80), said(90))])
    assert report.flawless(row, 100)
    assert not report.flawless(row, 85)
    assert not report.flawless(report.row("asr-serve", "talk", 1, [level(said(80, gaps=1))]), 100)
    assert not report.flawless(report.row("asr-serve", "talk", 1, [level()]), 100)


@pytest.mark.parametrize(("truth", "limit"), [(0, 64), (1, 64), (2, 64), (7, 64), (13, 64), (64, 64), (90, 64), (5, 5)])
def test_the_highest_level_that_holds(bench: SimpleNamespace, truth: int, limit: int) -> None:
    found, tried = bench.speak_report.most(lambda number: number <= truth, limit)
    assert found == min(truth, limit)
    assert len({number for number, _ in tried}) == len(tried)
    assert all(held == (number <= truth) for number, held in tried)


def test_the_highest_of_many_levels_is_found_to_one_sixteenth(bench: SimpleNamespace) -> None:
    found, tried = bench.speak_report.most(lambda number: number <= 1_000, 4_096)
    assert 1_000 - 1_000 / 16 <= found <= 1_000
    assert len(tried) < 18


def test_texts_without_a_file_are_all_different(bench: SimpleNamespace) -> None:
    texts = bench.speak.sentences(None)
    assert len(texts) == len(set(texts)) > 100
    assert texts == bench.speak.sentences(None)


def test_texts_of_a_file_are_held_out_of_training(bench: SimpleNamespace, tmp_path: Path) -> None:
    from asr_serve_tools.train.voice.sentences import held_out

    book = tmp_path / "book.txt"
    book.write_text(" ".join(f"The {number} ships of the fleet were seen again at noon." for number in range(300)))
    texts = bench.speak.sentences(book)
    assert texts
    assert all(map(held_out, texts))
    book.write_text("The ship was seen. ")
    with pytest.raises(SystemExit):
        bench.speak.sentences(book)


# --- callers ---------------------------------------------------------------------------------------------------

Script = list[tuple[float, bytes]]
"""Seconds to wait, and what to send then."""


class Sounding:
    """A server that answers each request as its script says, and keeps what it was asked."""

    def __init__(self, script: Script, status: str = "200 OK", kind: str = "audio/pcm") -> None:
        self.script, self.status, self.kind = script, status, kind
        self.asked: list[dict[str, Any]] = []
        self.port = 0
        self._ready, self._over = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> Sounding:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(60)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0, family=socket.AF_INET)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._over.wait()
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.asked.append(json.loads(await reader.readexactly(size)))
                kinds = f"Content-Type: {self.kind}\r\nTransfer-Encoding: chunked\r\n"
                writer.write(f"HTTP/1.1 {self.status}\r\n{kinds}\r\n".encode())
                for wait_s, sent in self.script:
                    await asyncio.sleep(wait_s)
                    writer.write(f"{len(sent):x}\r\n".encode() + sent + b"\r\n")
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def heard(bench: SimpleNamespace, server: Sounding, **job: Any) -> dict[str, Any]:
    usual = {
        "host": "127.0.0.1",
        "port": server.port,
        "path": "/v1/audio/speech",
        "body": {"voice": "heart"},
        "texts": ["One.", "Two."],
        "rate_hz": HZ,
        "seed": 1,
        "way": "talk",
        "callers": 2,
        "settle_s": 0.2,
        "seconds": 0.6,
        "limit_s": 20,
    }
    found: dict[str, Any] = asyncio.run(bench.speak_load.run({**usual, **job}))
    return found


@pytest.mark.slow
def test_clients_receive_audio_in_chunks(bench: SimpleNamespace) -> None:
    """A byte too many is joined with what comes next; then for a while there is nothing to play."""
    with Sounding([(0.0, b"\0" * 401), (0.0, b"\0" * 399), (1.0, b"\0" * 100)]) as server:
        found = heard(bench, server, seconds=3.5)
    assert {asked["input"] for asked in server.asked} == {"One.", "Two."}
    assert all(asked["voice"] == "heart" for asked in server.asked)
    assert found["sayings"]
    for saying in found["sayings"]:
        assert saying["error"] == ""
        assert saying["audio_s"] == pytest.approx(0.45)
        assert saying["gaps"] >= 1
        assert saying["starved_ms"] > 0


@pytest.mark.parametrize("way", [{"way": "together"}, {"way": "open", "rate": 20}])
def test_other_ways_to_call(bench: SimpleNamespace, way: dict[str, Any]) -> None:
    with Sounding([(0.0, b"\0" * 100)]) as server:
        found = heard(bench, server, **way)
    assert found["sayings"]
    assert all(saying["gaps"] == 0 for saying in found["sayings"])
    assert found["audio_s"] > 0


def test_refusals_are_errors(bench: SimpleNamespace) -> None:
    refusal = b'{"error": {"code": "at_capacity"}}'
    with Sounding([(0.0, refusal)], "429 Too Many Requests", "application/json") as server:
        found = heard(bench, server, settle_s=0.0)
    row = bench.speak_report.row("asr-serve", "talk", 2, [found])
    assert row["errors"]["429"] == row["sayings"]


# --- peers -----------------------------------------------------------------------------------------------------


class Slow:
    """A voice that takes a while, and gives all at once."""

    rate_hz, notes = HZ, "slow"

    def say(self, text: str) -> Iterator[int]:
        time.sleep(0.05)
        yield 100


def peers(bench: SimpleNamespace, voice: Any, callers: int) -> dict[str, Any]:
    job = {"texts": ["One."], "orders": [[0]] * callers, "callers": callers, "seed": 1}
    found: dict[str, Any] = bench.speak_peers.serve(voice, {**job, "settle_s": 0.2, "seconds": 1.0})
    return found


def test_peers_take_turns(bench: SimpleNamespace) -> None:
    """Whoever comes while another is served waits: with many, everybody's turn comes after everybody else's."""
    alone, crowd = (peers(bench, Slow(), callers)["sayings"] for callers in (1, 8))
    assert min(saying["first_ms"] for saying in alone) >= 50
    assert max(saying["first_ms"] for saying in crowd) > 3 * 50
    assert {saying["caller"] for saying in crowd} == set(range(8))
    assert all(saying["gaps"] == 0 for saying in crowd)


def test_every_peer_is_pinned(bench: SimpleNamespace) -> None:
    made: dict[str, Callable[..., Any]] = bench.speak_peers.VOICES
    assert set(made) == set(bench.speak_peers.PINS)
    for pins in bench.speak_peers.PINS.values():
        assert all("==" in pin for pin in pins)
