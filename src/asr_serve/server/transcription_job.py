"""One transcription for one request: the pipeline on a thread, its events on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, BinaryIO, ParamSpec, TypeVar

from asr_serve.audio.input_manifest import InputItem
from asr_serve.errors import AsrServeError
from asr_serve.pipelines.offline.transcribe import (
    Event,
    FileDone,
    FileFailed,
    Progress,
    SegmentDone,
    TranscribeCanceller,
)
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.server.engine_registry import FileEngine
from asr_serve.types import Transcript

UNNAMED_RECORDING = "audio"
MAX_KEY_CHARACTERS = 200
IDLE_THREAD_S = 10.0
"""Time after which a thread without a job ends."""

P = ParamSpec("P")
T = TypeVar("T")


class JobThreads(Executor):
    """Threads of jobs: at most `max_threads`, each of which ends when it had no job for IDLE_THREAD_S.

    A ThreadPoolExecutor would keep the threads of the busiest moment, 255 after so many uploads at once. A thread
    for each job would be started on the event loop, which waits until it runs.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads, self._threads, self._idle = max_threads, 0, 0
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._shut_down = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs `fn` on a thread of its own, or on the next that is free. Raises RuntimeError after `shutdown`."""
        future: Future[T] = Future()
        with self._changed:
            if self._shut_down:
                raise RuntimeError("no jobs after shutdown")
            if self._idle <= len(self._waiting) and self._threads < self._max_threads:
                # Under the lock: a system that has no thread left raises here, and nothing waits for it.
                threading.Thread(target=self._work, name="asr-serve job", daemon=True).start()
                self._threads += 1
            self._waiting.append((future, partial(fn, *args, **kwargs)))
            self._changed.notify()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accepts no more jobs; `cancel_futures` drops those that wait. Jobs that run are not waited for."""
        with self._changed:
            self._shut_down = True
            while cancel_futures and self._waiting:
                self._waiting.popleft()[0].cancel()
            self._changed.notify_all()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            future, work = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del job, future, work  # and what they hold, before the wait for the next

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """Waits for a job; None: this thread ends."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._waiting or self._shut_down, IDLE_THREAD_S)
            self._idle -= 1
            if self._waiting:
                return self._waiting.popleft()
            self._threads -= 1
            return None


class TranscriptionExecutor:
    """Thread pool of transcriptions, one thread each: as many as requests may be in progress. Speech synthesis
    borrows them for single steps."""

    def __init__(self, max_concurrent: int) -> None:
        self.threads = JobThreads(max_concurrent)

    def start(
        self, engine: FileEngine, audio: BinaryIO, options: TranscribeOptions, name: str | None = None
    ) -> TranscriptionJob:
        """Transcribes `audio` from its first byte, while the caller holds the engine's `in_use`. `name`: file name
        from the client. Raises OptionError for what this model cannot do."""
        return TranscriptionJob(self.threads, engine, InputItem(recording_key(name), audio), options)

    def close(self) -> None:
        """Starts no more jobs. A running job ends with its engine, if not before."""
        self.threads.shutdown(wait=False, cancel_futures=True)


class TranscriptionJob:
    """A running transcription. Its segments are iterated over once; `transcript` follows them.

    All methods belong to the event loop's thread. The owner of a job awaits `wait_closed`; to abandon the job, it
    first calls `cancel` and closes the audio.
    """

    def __init__(self, threads: JobThreads, engine: FileEngine, item: InputItem, options: TranscribeOptions) -> None:
        self._stop = TranscribeCanceller()
        stream = engine.events([item], options, self._stop)
        self._loop = asyncio.get_running_loop()
        self._segments: asyncio.Queue[SegmentDone | None] = asyncio.Queue()
        self.transcript: asyncio.Future[Transcript] = self._loop.create_future()
        """Result of the job; raises what the pipeline does."""
        self.transcript.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved: no warning
        context = contextvars.copy_context()  # the request's id, for the thread's logs
        self._thread = self._loop.run_in_executor(threads, context.run, self._run, stream)
        self._thread.add_done_callback(self._on_thread_done)

    async def __aiter__(self) -> AsyncIterator[SegmentDone]:
        while (event := await self._segments.get()) is not None:
            yield event

    @property
    def failed(self) -> bool:
        return self.transcript.done() and self.transcript.exception() is not None

    def cancel(self) -> None:
        """Stops the work in the engine; `transcript` raises Cancelled."""
        self._stop.cancel()

    async def wait_closed(self) -> None:
        """Waits until the job has ended, in the engine and on its thread."""
        await asyncio.wait({self._thread})

    def _run(self, stream: Generator[Event, None, None]) -> None:
        with contextlib.closing(stream):
            for event in stream:
                if not isinstance(event, Progress):
                    self._loop.call_soon_threadsafe(self._on_event, event)

    def _on_event(self, event: Event) -> None:
        match event:
            case SegmentDone():
                self._segments.put_nowait(event)
            case FileDone():
                self._resolve(event.transcript)
            case FileFailed():
                self._resolve(event.error)

    def _resolve(self, outcome: Transcript | BaseException) -> None:
        if self.transcript.done():
            return
        if isinstance(outcome, Transcript):
            self.transcript.set_result(outcome)
        else:
            self.transcript.set_exception(outcome)
        self._segments.put_nowait(None)

    def _on_thread_done(self, thread: asyncio.Future[None]) -> None:
        error = None if thread.cancelled() else thread.exception()
        self._resolve(error or AsrServeError("the transcription ended without a result"))


def recording_key(name: str | None) -> str:
    r"""Name of a recording in its transcript: its file name, without the folders that some clients send.

    >>> recording_key("C:\\calls\\monday 7.wav"), recording_key("calls/a.wav"), recording_key("/")
    ('monday 7.wav', 'a.wav', 'audio')
    """
    label = (name or "").replace("\\", "/").rpartition("/")[2]
    return "".join(c for c in label if c.isprintable()).strip()[-MAX_KEY_CHARACTERS:] or UNNAMED_RECORDING
