"""Clonings beside serving: one at a time, in a process of its own that is nice to everybody else."""

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
    CloneProgress,
    CloneReport,
    CloneRequest,
    Said,
)

log = logging.getLogger(__name__)

WORKER = ("-m", "asr_serve.cloning.worker")
MAX_QUEUED, MAX_FINISHED = 8, 64
"""Clonings that wait; those that are over and still told of."""
RETRY_MS = 30_000
STOP_S = 5.0
"""For a cloning that is told to stop; then it is killed."""
LINE_BYTES = 4 << 20
STDERR_LINES = 20
"""Lines of what a process that died has said."""
OVER: tuple[CloningState, ...] = ("done", "failed", "cancelled")


class CloningJob:
    """One cloning. `folder` is its own, and goes away with it; `removed` is then called."""

    def __init__(
        self, order: CloneRequest, folder: Path, files: int, removed: Callable[[], None] = lambda: None
    ) -> None:
        self.id = f"clone_{uuid.uuid4().hex[:16]}"
        self.order, self.folder, self.files, self._removed = order, folder, files, removed
        self.state: CloningState = "waiting"
        self.progress = CloneProgress("waiting", 0.0)
        self.created, self.begun, self.ended = int(time.time()), 0, 0
        self.report: CloneReport | None = None
        self.error: CloningError | None = None
        self.stopped = asyncio.Event()
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake who follows it."""
        self._changed.set()
        self._changed = asyncio.Event()

    def end(self, state: CloningState, error: CloningError | None = None) -> None:
        self.state, self.error, self.ended = state, error, int(time.time())
        shutil.rmtree(self.folder, ignore_errors=True)
        self._removed()
        self.notify()

    async def updates(self) -> AsyncIterator[None]:
        """Once now, and for every change until it is over; several at once are one."""
        while True:
            changed, over = self._changed, self.state in OVER
            yield
            if over:
                return
            await changed.wait()


class CloningQueue:
    """The queue. Belongs to the event loop's thread."""

    def __init__(self, threads: int, worker: Sequence[str] = WORKER) -> None:
        self._threads, self._worker = threads, worker
        self._jobs: dict[str, CloningJob] = {}
        self._waiting: deque[CloningJob] = deque()
        self._running: CloningJob | None = None
        self._work: asyncio.Task[None] | None = None
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    def check_capacity(self) -> None:
        """Raises AtCapacity, EngineClosed."""
        if self._closed:
            raise EngineClosed("the server is going down", "no cloning is begun any more")
        if len(self._waiting) >= MAX_QUEUED:
            raise AtCapacity(
                f"{len(self._waiting)} clonings wait for the one that goes on", f"up to {MAX_QUEUED}", RETRY_MS
            )

    def enqueue(
        self, order: CloneRequest, folder: Path, files: int, removed: Callable[[], None] = lambda: None
    ) -> CloningJob:
        """Raises AtCapacity, EngineClosed; OptionError where another makes a voice of that name."""
        self.check_capacity()
        for job in (*self._waiting, *([self._running] if self._running else [])):
            if job.order.name == order.name:
                raise OptionError(
                    f"the cloning {job.id} makes a voice {order.name!r} already", "another name", param="name"
                )
        job = CloningJob(order, folder, files, removed)
        self._jobs[job.id] = job
        self._waiting.append(job)
        over = [each for each in self._jobs.values() if each.state in OVER]
        for old in over[: max(0, len(over) - MAX_FINISHED)]:
            del self._jobs[old.id]
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._start_next())
        return job

    def get(self, name: str) -> CloningJob:
        """By its id. Raises UnknownJob."""
        if name in self._jobs:
            return self._jobs[name]
        raise UnknownJob(
            f"there is no cloning {name[:80]!r}",
            f"those of this server since it began, the last {MAX_FINISHED} that are over among them",
            "GET /v1/voices/jobs lists them",
        )

    def __iter__(self) -> Iterator[CloningJob]:
        """The latest first."""
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
        """It is over when this returns, unless it was before."""
        if job in self._waiting:
            self._waiting.remove(job)
            job.end("cancelled")
        elif job.state == "running":
            job.stopped.set()
            async for _ in job.updates():
                pass

    def drain(self) -> None:
        """The server goes down: `close`, without waiting for it."""
        if not self._closed:
            self._closing = asyncio.create_task(self.close())

    async def close(self) -> None:
        """Nothing is begun any more, and what goes on is stopped."""
        self._closed = True
        under_way = [*self._waiting, *([self._running] if self._running else [])]
        if under_way:
            names = ", ".join(job.order.name for job in under_way)
            log.warning("the server goes down: %d clonings are cancelled: %s", len(under_way), names)
        await asyncio.gather(*(self.cancel(job) for job in under_way))
        if self._work is not None:
            await asyncio.gather(self._work, return_exceptions=True)

    async def _start_next(self) -> None:
        while self._waiting:
            job = self._running = self._waiting.popleft()
            for other in self._waiting:
                other.notify()
            try:
                await self._run(job)
            except OSError as failure:  # there is no room for another process
                job.end("failed", CloningError("system_error", str(failure)))
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
            start_new_session=True,  # ctrl-C at a terminal is for the server, which stops this one
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        last: deque[str] = deque(maxlen=STDERR_LINES)
        hearing = asyncio.create_task(self._read_messages(process.stdout, job))
        listening = asyncio.create_task(_remember(process.stderr, last))
        stopped = asyncio.create_task(job.stopped.wait())
        said: Said | None = None
        try:
            with contextlib.suppress(ConnectionError):
                process.stdin.write(msgspec.json.encode(job.order) + b"\n")
                await process.stdin.drain()
            await asyncio.wait({hearing, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not hearing.done():
                process.stdin.close()  # that is how it is told
                await asyncio.wait({hearing}, timeout=STOP_S)
            said = hearing.result() if hearing.done() else None
        finally:
            process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                if said is None or not await _ends(process, STOP_S):
                    process.kill()
            await process.wait()
            stopped.cancel()
            hearing.cancel()
            await asyncio.gather(hearing, listening, stopped, return_exceptions=True)
        self._finish(job, said, process.returncode, list(last))

    def _finish(self, job: CloningJob, said: Said | None, code: int | None, last: list[str]) -> None:
        if isinstance(said, CloneReport):
            job.report, job.progress = said, CloneProgress("done", 1.0)
            job.end("done")
        elif job.stopped.is_set():
            job.end("cancelled")
        elif isinstance(said, CloneFailed):
            job.end("failed", CloningError(said.code, strip_folder(said.message, job.folder)))
        else:
            log.error("the process of cloning %s ended with %s:\n%s", job.id, code, "\n".join(last))
            job.end(
                "failed",
                CloningError("worker_died", f"the process that cloned ended with {code}; its log says why"),
            )

    async def _read_messages(self, out: asyncio.StreamReader, job: CloningJob) -> Said | None:
        """The last thing that it says; None where it ends before."""
        while line := await out.readline():
            said: Said = msgspec.json.decode(line, type=Said)
            if not isinstance(said, CloneProgress):
                return said
            job.progress = said
            job.notify()
        return None


async def _ends(process: asyncio.subprocess.Process, wait_s: float) -> bool:
    try:
        async with asyncio.timeout(wait_s):
            await process.wait()
    except TimeoutError:
        return False
    return True


async def _remember(lines: asyncio.StreamReader, last: deque[str]) -> None:
    while line := await lines.readline():
        last.append(line.decode(errors="replace").rstrip()[:500])


def strip_folder(message: str, folder: Path) -> str:
    """Recordings by the names that they came with: where they lay is nobody's business."""
    return re.sub(rf"{re.escape(str(folder))}/\d+-", "", message)


def public_verdict(verdict: ClipReport) -> ClipReport:
    """Without the folder of the upload and the number that a recording has there."""
    return msgspec.structs.replace(verdict, clip=Path(verdict.clip).name.partition("-")[2])
