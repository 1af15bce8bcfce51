"""Queue of voice clonings during serving: one at a time, in a separate process of low priority."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
import sys
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from asr_serve.config import engine_environment
from asr_serve.errors import AtCapacity, EngineClosed, OptionError, UnknownJob
from asr_serve.protocols.cloned_voices import Cloning, CloningError, CloningState, cloned_voice_from_report
from asr_serve.voices.cloning_messages import (
    ClipReport,
    CloneFailed,
    CloneMessage,
    CloneProgress,
    CloneReport,
    CloneRequest,
)

log = logging.getLogger(__name__)

WORKER = ("-m", "asr_serve.cloning.worker")
MAX_QUEUED, MAX_FINISHED = 8, 64
"""Clonings that may wait; finished ones that are still listed."""
RETRY_MS = 30_000
STOP_S = 5.0
"""Time for a cloning to stop before it is killed."""
LINE_BYTES = 4 << 20
STDERR_LINES = 20
"""Last lines of stderr that are logged for a process that died."""
OVER: tuple[CloningState, ...] = ("done", "failed", "cancelled")


class CloningJob:
    """One cloning. It owns `folder`, which is deleted at its end; then `removed` is called."""

    def __init__(
        self, request: CloneRequest, folder: Path, files: int, removed: Callable[[], None] = lambda: None
    ) -> None:
        self.id = f"clone_{uuid.uuid4().hex[:16]}"
        self.order, self.folder, self.files, self._removed = request, folder, files, removed
        self.state: CloningState = "waiting"
        self.progress = CloneProgress("waiting", 0.0)
        self.created, self.begun, self.ended = int(time.time()), 0, 0
        self.report: CloneReport | None = None
        self.error: CloningError | None = None
        self.stopped = asyncio.Event()
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Notifies the iterators of `updates`."""
        self._changed.set()
        self._changed = asyncio.Event()

    def end(self, state: CloningState, error: CloningError | None = None) -> None:
        self.state, self.error, self.ended = state, error, int(time.time())
        shutil.rmtree(self.folder, ignore_errors=True)
        self._removed()
        self.notify()

    async def updates(self) -> AsyncIterator[None]:
        """Yields once now, and for every change until the job is over; several pending changes count as one."""
        while True:
            changed, finished = self._changed, self.state in OVER
            yield
            if finished:
                return
            await changed.wait()


class CloningQueue:
    """Queue of cloning jobs. Belongs to the event loop's thread."""

    def __init__(self, threads: int, worker: Sequence[str] = WORKER) -> None:
        self._threads, self._worker = threads, worker
        self._jobs: dict[str, CloningJob] = {}
        self._waiting: deque[CloningJob] = deque()
        self._running: CloningJob | None = None
        self._work: asyncio.Task[None] | None = None
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    def check_capacity(self) -> None:
        """Checks that a job can be added. Raises AtCapacity, EngineClosed."""
        if self._closed:
            raise EngineClosed("the server is going down", "no cloning is begun any more")
        if len(self._waiting) >= MAX_QUEUED:
            raise AtCapacity(
                f"{len(self._waiting)} clonings wait for the one that goes on", f"up to {MAX_QUEUED}", RETRY_MS
            )

    def enqueue(
        self, request: CloneRequest, folder: Path, files: int, removed: Callable[[], None] = lambda: None
    ) -> CloningJob:
        """Adds a job. Raises AtCapacity, EngineClosed; OptionError if another job makes a voice of that name."""
        self.check_capacity()
        for job in (*self._waiting, *([self._running] if self._running else [])):
            if job.order.name == request.name:
                raise OptionError(
                    f"the cloning {job.id} makes a voice {request.name!r} already",
                    "",
                    "choose another name",
                    param="name",
                )
        job = CloningJob(request, folder, files, removed)
        self._jobs[job.id] = job
        self._waiting.append(job)
        finished = [other for other in self._jobs.values() if other.state in OVER]
        for oldest in finished[: max(0, len(finished) - MAX_FINISHED)]:
            del self._jobs[oldest.id]
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._start_next())
        return job

    def get(self, name: str) -> CloningJob:
        """Returns a job by its id. Raises UnknownJob."""
        if name in self._jobs:
            return self._jobs[name]
        raise UnknownJob(
            f"there is no cloning {name[:80]!r}",
            f"those of this server since it began, the last {MAX_FINISHED} that are over among them",
            "GET /v1/voices/jobs lists them",
        )

    def __iter__(self) -> Iterator[CloningJob]:
        """Iterates over the jobs, latest first."""
        return iter(list(self._jobs.values())[::-1])

    def describe(self, job: CloningJob) -> Cloning:
        return Cloning(
            job.id,
            job.order.name,
            job.order.model,
            job.state,
            job.progress,
            job.created,
            job.begun or None,
            job.ended or None,
            job.files,
            self._waiting.index(job) + (self._running is not None) if job in self._waiting else 0,
            cloned_voice_from_report(job.report) if job.report else None,
            [public_verdict(verdict) for verdict in job.report.clips] if job.report else [],
            job.error,
        )

    async def cancel(self, job: CloningJob) -> None:
        """Cancels a job and waits until it is over. A finished one stays as it is."""
        if job in self._waiting:
            self._waiting.remove(job)
            job.end("cancelled")
        elif job.state == "running":
            job.stopped.set()
            async for _ in job.updates():
                pass

    def drain(self) -> None:
        """Starts `close` when the server goes down, without waiting for it."""
        if not self._closed:
            self._closing = asyncio.create_task(self.close())

    async def close(self) -> None:
        """Starts no more jobs, and cancels the waiting and running ones."""
        self._closed = True
        unfinished = [*self._waiting, *([self._running] if self._running else [])]
        if unfinished:
            names = ", ".join(job.order.name for job in unfinished)
            log.warning("the server goes down: %d clonings are cancelled: %s", len(unfinished), names)
        await asyncio.gather(*(self.cancel(job) for job in unfinished))
        if self._work is not None:
            await asyncio.gather(self._work, return_exceptions=True)

    async def _start_next(self) -> None:
        while self._waiting:
            job = self._running = self._waiting.popleft()
            for other in self._waiting:
                other.notify()
            try:
                await self._run(job)
            except OSError as error:  # no resources for another process
                job.end("failed", CloningError("system_error", str(error)))
            finally:
                self._running = None
                if job.state not in OVER:
                    job.end("cancelled")
            log.info("cloning %s of %r: %s", job.id, job.order.name, job.error.message if job.error else job.state)

    async def _run(self, job: CloningJob) -> None:
        job.state, job.begun = "running", int(time.time())
        job.notify()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self._worker,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**engine_environment(self._threads), "TMPDIR": str(job.folder)},
            limit=LINE_BYTES,
            start_new_session=True,  # ctrl-C at a terminal reaches the server only, which stops this process
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        last_lines: deque[str] = deque(maxlen=STDERR_LINES)
        reading = asyncio.create_task(self._read_messages(process.stdout, job))
        reading_stderr = asyncio.create_task(_remember(process.stderr, last_lines))
        stopped = asyncio.create_task(job.stopped.wait())
        result: CloneMessage | None = None
        try:
            with contextlib.suppress(ConnectionError):
                process.stdin.write(msgspec.json.encode(job.order) + b"\n")
                await process.stdin.drain()
            await asyncio.wait({reading, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                process.stdin.close()  # end of input: the worker stops
                await asyncio.wait({reading}, timeout=STOP_S)
            result = reading.result() if reading.done() else None
        finally:
            process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                if result is None or not await _ends(process, STOP_S):
                    process.kill()
            await process.wait()
            stopped.cancel()
            reading.cancel()
            await asyncio.gather(reading, reading_stderr, stopped, return_exceptions=True)
        self._finish(job, result, process.returncode, list(last_lines))

    def _finish(self, job: CloningJob, result: CloneMessage | None, code: int | None, last_lines: list[str]) -> None:
        if isinstance(result, CloneReport):
            job.report, job.progress = result, CloneProgress("done", 1.0)
            job.end("done")
        elif job.stopped.is_set():
            job.end("cancelled")
        elif isinstance(result, CloneFailed):
            job.end("failed", CloningError(result.code, strip_folder(result.message, job.folder)))
        else:
            log.error("the process of cloning %s ended with %s:\n%s", job.id, code, "\n".join(last_lines))
            job.end(
                "failed", CloningError("worker_died", f"the process that cloned ended with {code}; its log says why")
            )

    async def _read_messages(self, out: asyncio.StreamReader, job: CloningJob) -> CloneMessage | None:
        """Reads progress until the worker's result, which is returned; None if it ends without one."""
        while line := await out.readline():
            message: CloneMessage = msgspec.json.decode(line, type=CloneMessage)
            if not isinstance(message, CloneProgress):
                return message
            job.progress = message
            job.notify()
        return None


async def _ends(process: asyncio.subprocess.Process, wait_s: float) -> bool:
    try:
        async with asyncio.timeout(wait_s):
            await process.wait()
    except TimeoutError:
        return False
    return True


async def _remember(lines: asyncio.StreamReader, last_lines: deque[str]) -> None:
    while line := await lines.readline():
        last_lines.append(line.decode(errors="replace").rstrip()[:500])


def strip_folder(message: str, folder: Path) -> str:
    """Removes the upload's folder from recordings' paths in a message: clients see the names they sent."""
    return re.sub(rf"{re.escape(str(folder))}/\d+-", "", message)


def public_verdict(verdict: ClipReport) -> ClipReport:
    """Returns the report without the upload's folder and the number before the recording's name."""
    return msgspec.structs.replace(verdict, clip=Path(verdict.clip).name.partition("-")[2])
