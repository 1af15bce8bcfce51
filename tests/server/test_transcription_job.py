"""A transcription on a thread: its events in order, and nothing left of one that is cancelled."""

from __future__ import annotations

import asyncio
import gc
import io
import threading
import weakref
from collections.abc import Iterator

import pytest
from running_server import eventually

from asr_serve.audio.reader import AudioLimits
from asr_serve.errors import AudioTooLong, Cancelled, NotAudio, OptionError
from asr_serve.pipelines.offline import transcribe
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.server import transcription_job
from asr_serve.server.engine_registry import EngineParts, ModelEngine
from asr_serve.server.transcription_job import JobThreads, TranscriptionExecutor
from asr_serve.server.uploads.spool import Spool, SpoolReader

BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."


@pytest.fixture
def engine(parts: EngineParts) -> ModelEngine:
    return ModelEngine(parts)


@pytest.fixture
def jobs() -> Iterator[TranscriptionExecutor]:
    made = TranscriptionExecutor(4)
    yield made
    made.close()


def held(engine: ModelEngine) -> list[int]:
    found = engine.client.describe()
    return [found["requests"], found["sessions"], found["pages_used"], engine._users]


async def empty(engine: ModelEngine) -> None:
    await asyncio.to_thread(eventually, lambda: not any(held(engine)), lambda: str(held(engine)))


async def test_segments_and_then_the_transcript(engine, jobs, cities):
    with cities.open("rb") as audio:
        job = jobs.start(engine, audio, TranscribeOptions())
        segments = [event.segment async for event in job]
        transcript = await job.transcript
    assert len(segments) > 1
    assert transcript.segments == tuple(segments)
    assert all(len(segment.logprobs) == len(segment.tokens) for segment in segments)
    await job.wait_closed()
    await empty(engine)


async def test_a_long_recording_steps_back(engine, jobs, cities, monkeypatch):
    """Its first part is urgent, the rest is not: others need not wait for it."""
    priorities = []
    submit = engine.client.submit

    def noted(pcm, options, priority, **more):
        priorities.append(priority)
        return submit(pcm, options, priority, **more)

    monkeypatch.setattr(engine.client, "submit", noted)
    monkeypatch.setattr(transcribe, "PROMPT_SAMPLES", 16_000)
    with cities.open("rb") as audio:
        job = jobs.start(engine, audio, TranscribeOptions(priority="interactive"))
        await job.transcript
        await job.wait_closed()
    assert priorities == ["interactive", *["bulk"] * (len(priorities) - 1)]
    assert len(priorities) > 1


async def test_phases_come_with_each_segment(engine, jobs, beckett):
    with beckett.open("rb") as audio:
        job = jobs.start(engine, audio, TranscribeOptions())
        (event,) = [event async for event in job]
        await job.wait_closed()
    phases = event.phases
    assert phases.submitted_ns <= phases.encode_start_ns <= phases.encode_end_ns <= phases.decode_end_ns


async def test_what_goes_wrong_is_raised(engine, jobs, beckett):
    job = jobs.start(engine, io.BytesIO(b"no audio" * 100), TranscribeOptions())
    assert [event async for event in job] == []
    assert job.failed
    with pytest.raises(NotAudio):
        await job.transcript
    with beckett.open("rb") as audio:
        job = jobs.start(engine, audio, TranscribeOptions(limits=AudioLimits(max_duration_s=1)))
        with pytest.raises(AudioTooLong):
            await job.transcript
    with pytest.raises(OptionError) as refused:
        jobs.start(engine, io.BytesIO(), TranscribeOptions(language="fr"))
    assert refused.value.param == "language"
    await empty(engine)


async def test_cancelled_while_the_engine_works(engine, jobs, cities):
    audio = io.BytesIO(cities.read_bytes())
    job = jobs.start(engine, audio, TranscribeOptions())
    await asyncio.to_thread(eventually, lambda: held(engine)[0])
    job.cancel()
    job.cancel()
    await asyncio.wait_for(job.wait_closed(), 60)
    with pytest.raises(Cancelled):
        await job.transcript
    await empty(engine)


async def test_cancelled_while_it_waits_for_bytes(engine, jobs, cities):
    """An upload that stands still: its job holds a session, and a thread that waits for the rest."""
    threads = set(threading.enumerate())
    spool = Spool(1 << 20)
    spool.append(memoryview(cities.read_bytes())[:1_000_000])
    job = jobs.start(engine, SpoolReader(spool), TranscribeOptions())
    await asyncio.to_thread(eventually, lambda: held(engine)[1])
    job.cancel()
    await asyncio.wait_for(job.wait_closed(), 60)
    await empty(engine)
    spool.close()

    def workers() -> set[threading.Thread]:
        return {t for t in set(threading.enumerate()) - threads if not t.name.startswith(("asr-serve job", "asyncio"))}

    await asyncio.to_thread(eventually, lambda: not workers(), lambda: str(workers()))


async def test_many_cancelled_at_any_moment(engine, jobs, cities):
    data = cities.read_bytes()
    for wait_ms in (0, 1, 5, 20, 50, 100, 200):
        under_way = [jobs.start(engine, io.BytesIO(data), TranscribeOptions()) for _ in range(6)]
        await asyncio.sleep(wait_ms / 1_000)
        for job in under_way:
            job.cancel()
        await asyncio.wait_for(asyncio.gather(*(job.wait_closed() for job in under_way)), 60)
    await empty(engine)


class BlockingJobs:
    """Jobs that block until `gate` is set, on three threads."""

    def __init__(self, count: int) -> None:
        self.threads, self.gate, self.running = JobThreads(3), threading.Event(), threading.Semaphore(0)
        known = set(threading.enumerate())
        self.futures = [self.threads.submit(self.job, number) for number in range(count)]
        for _ in range(3):
            assert self.running.acquire(timeout=30)
        self.started = [thread for thread in threading.enumerate() if thread not in known]

    def job(self, number: int) -> int:
        self.running.release()
        assert self.gate.wait(30)
        if number == 5:
            raise ValueError("of the job")
        return number


def test_threads_of_jobs_are_bounded_and_end_when_no_job_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcription_job, "IDLE_THREAD_S", 0.05)
    jobs = BlockingJobs(20)
    assert len(jobs.started) == 3
    assert jobs.futures[7].cancel()
    jobs.gate.set()
    assert jobs.futures[19].result(30) == 19
    with pytest.raises(ValueError, match="of the job"):
        jobs.futures[5].result(30)
    for thread in jobs.started:
        thread.join(30)
        assert not thread.is_alive()
    assert jobs.threads.submit(jobs.job, 1).result(30) == 1, "a thread starts again"


def test_an_idle_thread_keeps_nothing_of_a_job_that_failed() -> None:
    """The future holds the exception, whose traceback holds the thread's frame: that may not hold the future."""
    threads = JobThreads(1)

    class JobError(Exception):
        pass

    def fail(_: object) -> None:
        raise JobError("of the job")

    gc.disable()
    try:
        audio = io.BytesIO(b"what the job reads")
        future = threads.submit(fail, audio)
        weak = [weakref.ref(future), weakref.ref(audio), weakref.ref(future.exception(30))]
        del future, audio
        eventually(lambda: not any(each() for each in weak), wait_s=5)  # the thread waits for its next job
    finally:
        gc.enable()
        threads.shutdown()


def test_an_idle_thread_takes_the_next_job() -> None:
    threads = JobThreads(8)
    assert len({threads.submit(threading.current_thread).result(30) for _ in range(20)}) <= 8
    threads.shutdown()


def test_jobs_that_wait_are_cancelled_at_shutdown() -> None:
    jobs = BlockingJobs(8)
    jobs.threads.shutdown(cancel_futures=True)
    jobs.gate.set()
    assert jobs.futures[0].result(30) == 0
    assert [future.cancelled() for future in jobs.futures] == [False] * 3 + [True] * 5
    with pytest.raises(RuntimeError):
        jobs.threads.submit(jobs.job, 1)
