"""Callers of the soak: what they say, what is counted, when memory is called flat; some against a real WebSocket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http.client import BadStatusLine, RemoteDisconnected
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import numpy as np
import psutil
import pytest
from bench_modules import bench_modules

S = 16_000

pytest.importorskip("jiwer")
pytest.importorskip("whisper_normalizer")
pytest.importorskip("websockets")


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The bench's files as they import each other when run as scripts."""
    with bench_modules("soak_callers", "live_speech", "live_calls") as modules:
        yield modules


def speech(bench: SimpleNamespace, seconds: list[float], texts: list[str]) -> Any:
    """A Speech without a model: clips of so many seconds, voiced throughout, which say `texts`."""
    made = object.__new__(bench.soak_callers.Speech)
    made.pcm = [np.ones(round(each * S), np.int16) for each in seconds]
    made.pause = S // 2
    made.texts = texts
    windows = [bench.live_speech.windows(len(pcm) + made.pause) for pcm in made.pcm]
    made.probabilities = [
        [1.0] * (len(pcm) // 512) + [0.0] * (count - len(pcm) // 512)
        for pcm, count in zip(made.pcm, windows, strict=True)
    ]
    return made


def plan(bench: SimpleNamespace, **options: float) -> Any:
    return bench.soak_callers.Plan(
        **{"callers": 2, "speed": 1.0, "audio_s": 60.0, "session_s": 20.0, "flat_mib": 32.0, **options}
    )


def test_sessions_hold_what_fits_and_all_audio_is_spoken(bench: SimpleNamespace) -> None:
    clips = speech(bench, [2.0, 3.0, 4.0], ["a", "b", "c"])
    wanted = plan(bench)
    found = list(clips.sessions(0, wanted))
    assert all(caller.clips and caller.samples <= 20 * S for caller in found)
    spoken_s = sum(caller.samples + clips.pause for caller in found) / S
    assert 60 - 2 - 0.5 < spoken_s < 60 + 0.5
    assert found == list(clips.sessions(0, wanted))
    assert [caller.clips for caller in found] != [caller.clips for caller in clips.sessions(1, wanted)]


def test_a_clip_longer_than_a_session_is_spoken_whole(bench: SimpleNamespace) -> None:
    clips = speech(bench, [5.0], ["a"])
    assert [caller.samples for caller in clips.sessions(0, plan(bench, audio_s=12.0, session_s=1.0))] == [5 * S] * 2


def session(
    bench: SimpleNamespace, reference: str = "red green blue grey", text: str = "red green blue grey", **more: Any
) -> Any:
    values = {"finals": [], "error": None, "refusals": 0, "audio_s": 10.0, **more}
    return bench.soak_callers.Session(bench.soak_callers.wer([reference], [text]), **values)


def test_words_lost_added_and_changed_are_told_apart(bench: SimpleNamespace) -> None:
    sessions = [
        session(bench, text="red blue grey"),
        session(bench, text="red green and blue grey"),
        session(bench, text="read green blue grey"),
        session(bench)._replace(word_errors=None),
    ]
    found = bench.soak_callers.words(sessions)
    assert found == {"words": 12, "words_lost": 1, "words_added": 1, "words_changed": 1, "words_unlike_percent": 25.0}
    assert bench.soak_callers.words(sessions[3:])["words_unlike_percent"] is None


def test_finals_are_told_by_ten_minutes(bench: SimpleNamespace) -> None:
    finals = [(100.0 + 6 * number, float(number)) for number in range(100)] + [(100.0 + 1_900, 7.0)]
    assert bench.soak_callers.stretches(finals, 100.0) == [
        {"from_minute": 0, "finals": 100, "p95_ms": 94.0, "p99_ms": 98.0},
        {"from_minute": 30, "finals": 1, "p95_ms": 7.0, "p99_ms": 7.0},
    ]


@pytest.mark.parametrize(
    ("rss_mib", "growth_mib", "flat"),
    [
        ([500.0] * 5, None, None),
        ([100.0, 400.0, 500.0, 500.0, 500.0, 500.0], 0.0, True),  # warming up does not count
        ([500.0, 500.0, 500.0, 500.0, 531.0, 531.0], 31.0, True),
        ([500.0, 500.0, 500.0, 500.0, 532.0, 532.0], 32.0, False),
        ([600.0, 600.0, 500.0, 500.0, 400.0, 400.0], -100.0, True),
        ([float(500 + minute) for minute in range(180)], 60.0, False),  # a MiB a minute leaks
        ([500.0] * 179 + [900.0], 0.0, True),  # a lone peak is none
    ],
)
def test_memory_is_flat_when_the_last_third_is_as_high_as_the_second(
    bench: SimpleNamespace, rss_mib: list[float], growth_mib: float | None, flat: bool | None
) -> None:
    expected = {"rss_growth_mib": growth_mib, "memory_flat": flat}
    assert bench.soak_callers.is_flat(rss_mib, len(rss_mib), 32.0) == expected


def test_memory_is_not_judged_by_less_than_nine_tenths_of_the_minutes(bench: SimpleNamespace) -> None:
    unknown = {"rss_growth_mib": None, "memory_flat": None}
    assert bench.soak_callers.is_flat([500.0] * 90, 100.0, 32.0)["memory_flat"]
    assert bench.soak_callers.is_flat([500.0] * 89, 100.0, 32.0) == unknown


class Held:
    """What is watched of a server."""

    def __init__(self) -> None:
        self.rss_mib: list[float] = []

    def watch(self) -> None:
        self.rss_mib.append(500.0 + len(self.rss_mib))

    def metric(self, name: str) -> float:
        return {"asr_serve_pages_used": 40.0, "asr_serve_live_open_sessions": 2.0, "asr_serve_sessions": 2.0}[name]


def test_a_row_tells_what_was_seen_so_far(bench: SimpleNamespace) -> None:
    soak = bench.soak_callers.Soak(plan(bench), "clips")
    assert json.loads(json.dumps(soak.row()))["words"] == 0
    soak.sessions += [session(bench, refusals=2), session(bench, error="closed 1011", audio_s=26.0)]
    for _ in range(6):
        minute = soak.minute(held := Held())
    assert minute["sessions_done"] == 2
    assert (minute["ended_early"], minute["rss_mib"], minute["pages_used"]) == (1, held.rss_mib[0], 40.0)
    row = json.loads(json.dumps(soak.row()))
    assert (row["sessions"], row["ended_early"], row["refusals"]) == (2, {"closed 1011": 1}, 2)
    assert (row["audio_h"], row["memory_flat"], len(row["memory"])) == (0.01, True, 6)


async def test_minutes_go_on_after_one_that_the_server_did_not_answer(bench: SimpleNamespace) -> None:
    failures = [URLError("refused"), RemoteDisconnected("closed"), psutil.NoSuchProcess(1), BadStatusLine("")]

    class Unwell(Held):
        def metric(self, name: str) -> float:
            if failures:
                raise failures.pop()
            return super().metric(name)

    soak, reported, enough = bench.soak_callers.Soak(plan(bench), "clips"), [], asyncio.Event()

    def report(minute: Any) -> None:
        reported.append(minute)
        if len(reported) == 2:
            enough.set()

    watching = asyncio.create_task(soak.watch(Unwell(), report, every_s=0.0))
    async with asyncio.timeout(30):
        await enough.wait()
    watching.cancel()
    assert not failures
    assert [minute["rss_mib"] for minute in soak.minutes][:2] == [504.0, 505.0]
    assert reported[0]["minute"] == soak.minutes[0]["minute"]


async def test_callers_speak_one_session_after_another_faster_than_people(bench: SimpleNamespace) -> None:
    """Against a WebSocket that hears a clip in each second of speech; the third call is hung up on."""
    from websockets.asyncio.server import serve

    calls = 0

    async def answer(line: Any) -> None:
        nonlocal calls
        calls += 1
        broken = calls == 3
        assert await line.recv() == "START"
        await line.send('{"event":"started"}')
        samples = 0
        async for frame in line:
            if frame == "STOP":
                break
            samples += len(frame) // 2
            if broken and samples > S:
                await line.close(1011)
                return
        sentences = [{"text": "red green", "start": at, "end": at + 900} for at in range(0, samples // 16 - 900, 1_500)]
        await line.send(json.dumps({"sentences": sentences, "partial": "", "is_final": True}))
        await line.send('{"event":"stopped"}')

    clips = speech(bench, [1.0], ["red green"])
    wanted = plan(bench, callers=1, speed=20.0, audio_s=15.5, session_s=4.1)
    found: list[Any] = []
    async with serve(answer, "127.0.0.1", 0, compression=None) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        begun_s = asyncio.get_running_loop().time()
        await bench.soak_callers.call_all(clips, wanted, url, found.append)
        took_s = asyncio.get_running_loop().time() - begun_s
    assert [each.error for each in found] == [None, None, "closed 1011", None]
    assert [each.audio_s for each in found][:2] == [64_128 / S] * 2
    assert took_s >= (4 + 4 + 1) / 20
    whole = bench.soak_callers.words([each for each in found if each.error is None])
    assert (whole["words"], whole["words_unlike_percent"]) == (14, 0.0)


async def test_a_final_that_stop_asked_for_is_not_counted_among_those_after_a_pause(bench: SimpleNamespace) -> None:
    """Two clips with three seconds between them: the first final comes in the pause, the second after STOP."""
    from websockets.asyncio.server import serve

    clips = speech(bench, [1.0], ["red green"])
    clips.pause = 3 * S
    first_end_ms = 1_000 // 32 * 32 + bench.live_calls.PAD_MS

    async def answer(line: Any) -> None:
        assert await line.recv() == "START"
        await line.send('{"event":"started"}')
        samples, first = 0, {"text": "red green", "start": 0, "end": first_end_ms}
        async for frame in line:
            if frame == "STOP":
                break
            before, samples = samples, samples + len(frame) // 2
            if before < 3.5 * S <= samples:
                await line.send(json.dumps({"sentences": [first], "partial": "", "is_final": False}))
        last = {"text": "red green", "start": 4_032, "end": samples // 16}
        await line.send(json.dumps({"sentences": [last], "partial": "", "is_final": True}))
        await line.send('{"event":"stopped"}')

    found: list[Any] = []
    async with serve(answer, "127.0.0.1", 0, compression=None) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        wanted = plan(bench, callers=1, speed=20.0, audio_s=5.1, session_s=5.1)
        await bench.soak_callers.call_all(clips, wanted, url, found.append)
    (only,) = found
    assert (only.error, only.word_errors.reference, only.word_errors.errors) == (None, 4, 0)
    ((_, wait_ms),) = only.finals
    assert wait_ms > 0
