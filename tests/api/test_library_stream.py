"""`model.stream` with the real packaged model: the same text however the audio comes, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import io
import re
import threading
import time
import wave
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_tiers import exhaustive_after
from loaded_models import expect_idle, load_model

from asr_serve.api.library import Model
from asr_serve.api.stream import StreamResult
from asr_serve.audio import read_audio
from asr_serve.config import EngineConfig
from asr_serve.errors import (
    AsrServeError,
    AtCapacity,
    Cancelled,
    EngineClosed,
    NotAudio,
    OptionError,
    SourceNotFound,
    UnsupportedAudio,
)

RATE_HZ = 16_000
CHUNK_SAMPLES = 720 * 16
WAIT_S = 120.0
PAUSES = [(float("inf"), 300)]
"""A schedule that makes segments short."""


@pytest.fixture(scope="module")
def model(packaged_speech: Path) -> Iterator[Model]:
    with load_model() as model:
        yield model


@pytest.fixture(autouse=True)
def idle_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves anything held by the engine."""
    yield
    if "model" in request.fixturenames:
        expect_idle(request.getfixturevalue("model")._client)


def sessions(model: Model) -> int:
    return model._client._sessions


@pytest.fixture(scope="module")
def path(packaged_speech: Path) -> Path:
    return packaged_speech / "beckett.wav"


@pytest.fixture(scope="module")
def speech(path: Path) -> np.ndarray:
    return read_audio(path)


@pytest.fixture(scope="module")
def pcm16(speech: np.ndarray) -> np.ndarray:
    return np.round(speech * 32_767).astype(np.int16)


@pytest.fixture(scope="module")
def results_of_beckett(model: Model, pcm16: np.ndarray) -> list[StreamResult]:
    """Results for beckett.wav as 16-bit samples."""
    return list(model.stream([pcm16]))


@pytest.fixture(scope="module")
def beginning(pcm16: np.ndarray) -> np.ndarray:
    """Half of it, for tests that hear it many times."""
    return pcm16[: 5 * RATE_HZ]


@pytest.fixture(scope="module")
def times_of_beginning(model: Model, beginning: np.ndarray) -> list[tuple[int, int, str]]:
    *_, last = model.stream([beginning])
    assert len(words(last.text)) > 4
    return times(last)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def times(result: StreamResult) -> list[tuple[int, int, str]]:
    return [(each.start_samples, each.end_samples, each.text) for each in result.segments]


def cut(samples: np.ndarray, *sizes: int) -> Iterator[np.ndarray]:
    """Chunks of these sizes, again and again."""
    at = 0
    while at < len(samples):
        for size in sizes:
            yield samples[at : at + size]
            at += size


async def in_async(chunks: Iterator[Any] | list[Any]) -> AsyncIterator[Any]:
    for chunk in chunks:
        await asyncio.sleep(0)
        yield chunk


def expect_good(results: list[StreamResult], rollback: int = 8) -> None:
    """Fixed text stays, in whole words, and leaves `rollback` characters unfixed."""
    fixed = ""
    for result in results:
        assert result.fixed_text.startswith(fixed)
        assert result.text == result.fixed_text + result.unfixed_text
        assert not result.fixed_text[-1:].isspace()
        assert result.unfixed_text[:1] in ("", " ") or not result.fixed_text
        assert result.text.startswith(" ".join(each.text for each in result.segments))
        grown = len(result.fixed_text) > len(fixed)
        assert result.is_final or not grown or len(result.unfixed_text) >= rollback
        fixed = result.fixed_text
    assert [result.is_final for result in results] == [False] * (len(results) - 1) + [True]
    assert results[-1].fixed_text == results[-1].text == " ".join(each.text for each in results[-1].segments)


# --- results ---------------------------------------------------------------------------------------


def test_a_result_for_every_chunk_and_a_final_one(results_of_beckett: list[StreamResult], pcm16: np.ndarray) -> None:
    whole = len(pcm16) // CHUNK_SAMPLES
    assert [result.audio_duration_ms for result in results_of_beckett[:-1]] == [720 * (n + 1) for n in range(whole)]
    assert results_of_beckett[-1].audio_duration_ms == round(len(pcm16) / 16)
    expect_good(results_of_beckett)
    spoken = "ever tried ever failed no matter try again fail again fail better"
    assert " ".join(words(results_of_beckett[-1].text)) == spoken
    lengths = [len(words(result.text)) for result in results_of_beckett]
    assert lengths[4] >= 3, "words come while they are spoken"
    assert any(0 < len(result.fixed_text) < len(result.text) for result in results_of_beckett[:-1])
    (segment,) = results_of_beckett[-1].segments
    assert 0 <= segment.start_s < 1 < 8 < segment.end_s < 10


def test_a_result_has_the_fields_of_funasr(results_of_beckett: list[StreamResult]) -> None:
    result = results_of_beckett[-2]
    assert dict(result) == {
        "text": result.text,
        "fixed_text": result.fixed_text,
        "unfixed_text": result.unfixed_text,
        "audio_duration_ms": 9_360,
        "is_final": False,
        "segments": (),
        "language": "",
        "language_prob": 0.0,
    }
    with pytest.raises(KeyError, match="partial"):
        result["partial"]
    assert results_of_beckett[-1]["is_final"] is True


@pytest.mark.slow
@pytest.mark.parametrize(("rollback", "chunk_ms"), exhaustive_after(1, [(8, 250), (0, 720), (40, 720)]))
def test_fixed_text_only_grows_over_segments(model: Model, packaged_speech: Path, rollback: int, chunk_ms: int) -> None:
    cities = read_audio(packaged_speech / "two_cities.wav")[: 14 * RATE_HZ]
    results = list(
        model.stream(cities, rollback_chars=rollback, chunk_ms=chunk_ms, silence_schedule=PAUSES, lock_ms=500)
    )
    expect_good(results, rollback)
    assert len(results[-1].segments) >= 3
    assert any(result.segments and result.unfixed_text for result in results), "words beyond closed segments"
    assert "best of times" in results[-1].text
    if rollback == 0:
        assert any(result.text and not result.unfixed_text for result in results[:-1])


def test_silence_and_no_audio(model: Model) -> None:
    quiet = list(model.stream(np.zeros(2 * RATE_HZ, np.float32)))
    assert [(each.text, each.audio_duration_ms, each.is_final) for each in quiet] == [
        ("", 720, False),
        ("", 1_440, False),
        ("", 2_000, True),
    ]
    assert [(each.text, each.is_final, each.audio_duration_ms) for each in model.stream([])] == [("", True, 0)]


# --- sources -----------------------------------------------------------------------------------

SOURCES: dict[str, Callable[[np.ndarray], Any]] = {
    "array": lambda pcm: pcm,
    "array-and-rate": lambda pcm: (pcm, RATE_HZ),
    "float32": lambda pcm: [pcm.astype(np.float32) / np.float32(32_768)],
    "float64": lambda pcm: [pcm / 32_768],
    "chunks": lambda pcm: list(cut(pcm, CHUNK_SAMPLES)),
    "packets": lambda pcm: cut(pcm, 320),
    "odd": lambda pcm: cut(pcm, 1, 5_000, 0, 77, 40_000),
    "bytes": lambda pcm: (pcm.tobytes()[at : at + 333] for at in range(0, 2 * len(pcm), 333)),
    "views": lambda pcm: iter([memoryview(pcm.tobytes())[:999], bytearray(pcm.tobytes()[999:]), b"\0"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", exhaustive_after(4, SOURCES))
def test_any_source_gives_the_same_text(
    model: Model, results_of_beckett: list[StreamResult], pcm16: np.ndarray, name: str
) -> None:
    *_, final = results = list(model.stream(SOURCES[name](pcm16)))
    assert len(results) == len(results_of_beckett)
    assert (final.text, times(final)) == (results_of_beckett[-1].text, times(results_of_beckett[-1]))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in ("array", "chunks", "odd")] + ["async"]
)
@pytest.mark.repeats(name={"array", "odd"})
async def test_async_gives_the_same_text(
    model: Model, results_of_beckett: list[StreamResult], pcm16: np.ndarray, name: str
) -> None:
    source = in_async(cut(pcm16, 1_600)) if name == "async" else SOURCES[name](pcm16)
    results = [result async for result in model.stream(source)]
    expect_good(results)
    assert len(results) == len(results_of_beckett)
    assert (results[-1].text, times(results[-1])) == (results_of_beckett[-1].text, times(results_of_beckett[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("chunk_ms", exhaustive_after(2, [300, 30_000, 2_000]))
def test_any_chunk_size_ends_in_the_same_text(
    model: Model, results_of_beckett: list[StreamResult], pcm16: np.ndarray, chunk_ms: int
) -> None:
    results = list(model.stream(pcm16, chunk_ms=chunk_ms))
    expect_good(results)
    assert len(results) == len(pcm16) // (chunk_ms * 16) + 1
    assert times(results[-1]) == times(results_of_beckett[-1])


@pytest.mark.slow
async def test_files_bytes_and_streams(
    model: Model, beginning: np.ndarray, times_of_beginning: list[tuple[int, int, str]], tmp_path: Path
) -> None:
    path = tmp_path / "beginning.wav"
    with wave.open(str(path), "wb") as out:
        out.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        out.writeframes(beginning.tobytes())
    *_, plain = model.stream(path)
    *_, held = model.stream(path.read_bytes())
    with path.open("rb") as file:
        *_, read = model.stream(file)
    later = [each async for each in model.stream(str(path))][-1]
    memory = [each async for each in model.stream(io.BytesIO(path.read_bytes()))][-1]
    assert [times(final) for final in (plain, held, read, later, memory)] == [times_of_beginning] * 5


def test_chunks_at_another_rate(model: Model, speech: np.ndarray) -> None:
    fast = np.repeat(speech, 3)
    *_, chunks = model.stream(cut(fast, 4_800), rate_hz=48_000)
    *_, whole = model.stream((fast, 48_000))
    assert times(chunks) == times(whole)
    assert "no matter" in chunks.text


def test_a_source_may_reuse_one_array(model: Model, results_of_beckett: list[StreamResult], speech: np.ndarray) -> None:
    def recorded() -> Iterator[np.ndarray]:
        buffer = np.empty(4_000, np.float32)
        for chunk in cut(speech, 4_000):
            buffer[: len(chunk)] = chunk
            yield buffer[: len(chunk)]

    *_, final = model.stream(recorded())
    assert words(final.text) == words(results_of_beckett[-1].text)


# --- reading and stopping ---------------------------------------------------------------------------


def test_nothing_is_read_before_the_results_are(model: Model, pcm16: np.ndarray) -> None:
    taken = 0

    def microphone() -> Iterator[np.ndarray]:
        nonlocal taken
        for chunk in cut(pcm16, CHUNK_SAMPLES):
            taken += 1
            yield chunk

    stream = model.stream(microphone())
    assert (taken, sessions(model)) == (0, 0)
    results = iter(stream)
    assert (taken, sessions(model)) == (0, 0)
    next(results)
    next(results)
    assert (taken, sessions(model)) == (2, 1)
    stream.close()
    assert sessions(model) == 0
    with pytest.raises(Cancelled):
        next(results)


def test_leaving_the_loop_frees_the_session_at_once(model: Model, path: Path) -> None:
    stream = model.stream(path)
    for result in stream:
        assert not result.is_final
        assert sessions(model) == 1
        break
    assert sessions(model) == 0
    with pytest.raises(OptionError, match="read again"):
        next(iter(stream))

    def fail() -> None:
        for _ in model.stream(path):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    gc.collect()  # the traceback held the loop's frame
    assert sessions(model) == 0
    with model.stream(path) as stream:
        next(results := iter(stream))
        assert sessions(model) == 1
    assert sessions(model) == 0
    results.close()


async def test_leaving_an_async_loop_frees_the_session(model: Model, path: Path, pcm16: np.ndarray) -> None:
    async with model.stream(path) as stream:
        async for _ in stream:
            break
    assert sessions(model) == 0
    results = aiter(model.stream(in_async(cut(pcm16, 320))))
    await anext(results)
    assert sessions(model) == 1
    await results.aclose()
    assert sessions(model) == 0
    async for _ in model.stream(in_async(cut(pcm16, 320))):
        break
    for _ in range(5):  # turns of the event loop, in which it closes generators that nobody holds
        await asyncio.sleep(0)
    assert sessions(model) == 0


async def test_cancelling_frees_the_session(model: Model, path: Path, pcm16: np.ndarray) -> None:
    received = asyncio.Event()

    async def silent() -> AsyncIterator[np.ndarray]:
        yield pcm16[:CHUNK_SAMPLES]
        received.set()
        await asyncio.Event().wait()

    async def reader(source: Any) -> None:
        async for _ in model.stream(source):
            pass

    waiting = asyncio.create_task(reader(silent()))
    await asyncio.wait_for(received.wait(), WAIT_S)
    assert sessions(model) == 1
    working = [asyncio.create_task(reader(source)) for source in (path, pcm16, in_async([pcm16]))]
    while sessions(model) < 4:
        await asyncio.sleep(0.01)
    for task in (waiting, *working):
        task.cancel()
    assert all(
        isinstance(each, asyncio.CancelledError)
        for each in await asyncio.gather(waiting, *working, return_exceptions=True)
    )
    assert sessions(model) == 0


async def test_a_source_that_waits_blocks_no_event_loop(model: Model, pcm16: np.ndarray) -> None:
    spoken, ended = threading.Event(), threading.Event()

    def microphone() -> Iterator[np.ndarray]:
        try:
            yield pcm16[:CHUNK_SAMPLES]
            assert spoken.wait(WAIT_S)
            yield pcm16[CHUNK_SAMPLES:]
        finally:
            ended.set()

    async def second_result() -> tuple[AsyncIterator[StreamResult], asyncio.Future[StreamResult]]:
        results = aiter(model.stream(microphone()))
        await anext(results)
        following = asyncio.ensure_future(anext(results))
        await asyncio.sleep(0.05)
        return results, following

    results, following = await second_result()
    spoken.set()  # nobody could say so if the loop were blocked
    assert (await following).audio_duration_ms == 1_440
    await results.aclose()

    spoken.clear()
    ended.clear()
    _, following = await second_result()
    following.cancel()  # while a thread is inside the generator
    with pytest.raises(asyncio.CancelledError):
        await following
    assert sessions(model) == 0
    spoken.set()
    assert await asyncio.to_thread(ended.wait, WAIT_S)


def test_closing_from_another_thread_wakes_the_reader(model: Model, pcm16: np.ndarray) -> None:
    never, waits = threading.Event(), threading.Event()

    def microphone() -> Iterator[np.ndarray]:
        yield pcm16[: 2 * CHUNK_SAMPLES]
        waits.set()
        never.wait(WAIT_S)
        yield pcm16

    stream = model.stream(microphone())
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(list, stream)
        assert waits.wait(WAIT_S)
        stream.close()
        assert sessions(model) == 0
        never.set()
        with pytest.raises(Cancelled):
            reading.result(WAIT_S)


@pytest.fixture
def busy_model(packaged_speech: Path) -> Iterator[Model]:
    """A model of their own for tests of many streams: after them it admits nobody for a while."""
    with load_model() as model:
        yield model
        expect_idle(model._client)


@pytest.mark.slow
def test_many_threads(busy_model: Model, beginning: np.ndarray, times_of_beginning: list[tuple[int, int, str]]) -> None:
    def final(packet: int) -> StreamResult:
        while True:
            try:
                *_, last = busy_model.stream(cut(beginning, packet))
            except AtCapacity as full:
                time.sleep(full.retry_after_ms / 1_000)
            else:
                return last

    with ThreadPoolExecutor(12) as pool:
        finals = list(pool.map(final, range(1_000, 13_000, 1_000)))
    assert [times(each) for each in finals] == [times_of_beginning] * 12


@pytest.mark.slow
async def test_many_tasks_and_no_thread_each(
    busy_model: Model, beginning: np.ndarray, times_of_beginning: list[tuple[int, int, str]]
) -> None:
    threads = threading.active_count()
    most = 0

    async def final(packet: int) -> StreamResult:
        nonlocal most
        while True:
            try:
                results = [each async for each in busy_model.stream(in_async(cut(beginning, packet)))]
            except AtCapacity as full:
                await asyncio.sleep(full.retry_after_ms / 1_000)
            else:
                most = max(most, threading.active_count())
                return results[-1]

    finals = await asyncio.gather(*map(final, range(1_000, 13_000, 1_000)))
    assert [times(each) for each in finals] == [times_of_beginning] * 12
    assert most == threads


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"chunk_msec": 720}, "did you mean 'chunk_ms'"),
        ({"rollback": 8}, "did you mean 'rollback_chars'"),
        ({"partial_ms": 480}, "unknown option 'partial_ms'"),
        ({"chunk_ms": 50}, "100 to 30000"),
        ({"chunk_ms": 720.0}, "chunk_ms=720.0"),
        ({"rollback_chars": -1}, "0 or more"),
        ({"rate_hz": "16k"}, "rate_hz='16k'"),
        ({"rate_hz": 500}, "1000 to 384000"),
        ({"language": "tlh"}, "unknown language"),
        ({"lock_ms": 1}, "200 or more"),
        ({"silence_schedule": "5000:1500"}, "inf"),
    ],
)
def test_invalid_options(model: Model, options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=re.escape(match)):
        model.stream([], **options)


@pytest.mark.parametrize("source", [None, 7, 1.5, object()])
def test_an_invalid_source(model: Model, source: Any) -> None:
    with pytest.raises(UnsupportedAudio, match="came as audio"):
        model.stream(source)


def test_the_rate_of_a_whole_source_is_its_own(model: Model, path: Path) -> None:
    with pytest.raises(OptionError, match="rate_hz"):
        model.stream(path, rate_hz=8_000)


@pytest.mark.parametrize(
    ("chunk", "match"),
    [
        (np.zeros((100, 2), np.float32), "shape (100, 2)"),
        (np.zeros((1, 100), np.int16), "shape (1, 100)"),
        (np.zeros((), np.float32), "shape ()"),
        (np.zeros(100, np.int32), "int32"),
        (np.zeros(100, np.uint8), "uint8"),
        (np.zeros(100, np.complex64), "complex64"),
        (np.full(100, np.nan, np.float32), "nan"),
        (np.full(100, np.inf, np.float64), "inf"),
        (np.full(100, 3_000.0, np.float32), "3000"),
        (0.5, "a float came as a chunk"),
        ("talk.wav", "a str came as a chunk"),
        ((np.zeros(100, np.float32), 8_000), "a tuple came as a chunk"),
        (None, "a NoneType came as a chunk"),
    ],
)
async def test_invalid_chunks(model: Model, pcm16: np.ndarray, chunk: Any, match: str) -> None:
    results = iter(model.stream([pcm16[:CHUNK_SAMPLES], chunk]))
    assert next(results).audio_duration_ms == 720
    with pytest.raises(UnsupportedAudio, match=re.escape(match)):
        next(results)
    assert sessions(model) == 0
    with pytest.raises(UnsupportedAudio, match=re.escape(match)):
        await anext(aiter(model.stream(in_async([chunk]))))


async def test_failing_sources(model: Model, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound):
        list(model.stream(tmp_path / "none.wav"))
    with pytest.raises(NotAudio):
        [each async for each in model.stream(b"no audio at all" * 100)]
    with pytest.raises(UnsupportedAudio, match="async for"):
        list(model.stream(in_async([])))

    def fail() -> Iterator[bytes]:
        yield b"\0" * 100
        raise ConnectionResetError("the microphone is gone")

    with pytest.raises(ConnectionResetError):
        list(model.stream(fail()))
    with pytest.raises(ConnectionResetError):
        [each async for each in model.stream(fail())]


async def test_a_full_and_a_closed_engine(packaged_speech: Path, pcm16: np.ndarray) -> None:
    with load_model(engine=EngineConfig(max_sessions=1, prefix_bytes=0)) as model:
        first = iter(model.stream(pcm16))
        next(first)
        second = model.stream(pcm16)
        with pytest.raises(AtCapacity) as full:
            next(iter(second))
        assert full.value.retry_after_ms > 0
        first.close()
        first = iter(second)
        next(first)
        model.close()
        with pytest.raises(EngineClosed):
            next(first)
        for broken in (model.stream(pcm16), model.stream(packaged_speech / "beckett.wav")):
            with pytest.raises(AsrServeError) as closed:
                [each async for each in broken]
            assert isinstance(closed.value, EngineClosed)
