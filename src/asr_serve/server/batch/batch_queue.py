"""Queue of batches: checks their inputs, has their lines answered, writes their outputs, and ends them.

All that it must remember is in BatchStore, which it calls on a thread of its own, never on the event loop. What is here
can be lost at any time: a queue that starts finds the batches that have not ended, and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar

import msgspec

from asr_serve.config import BatchConfig
from asr_serve.errors import AsrServeError, Draining, EngineCrashed, NoSuchRoute, QuotaExceeded, StoreUnavailable
from asr_serve.metrics import BatchMetrics
from asr_serve.protocols.key_status import BatchQuotas, Quota
from asr_serve.protocols.openai.batches import (
    MAX_INPUT_BYTES,
    MAX_LINE_BYTES,
    MAX_LINE_ERRORS,
    MAX_LINES,
    BatchLineError,
    BatchStatus,
    OutputLine,
    parse_line,
)
from asr_serve.protocols.openai.events import Problem
from asr_serve.server.batch.batch_store import (
    MAX_ATTEMPTS,
    STORE_RETRY_MS,
    SUSPECT_ATTEMPTS,
    AnsweredLine,
    BatchLine,
    BatchStore,
    NewFile,
    OpenBatch,
    OwnerUsage,
    has_queue,
    new_file_id,
    output_file,
)
from asr_serve.server.batch.line_runner import (
    RETRIED,
    RETRIED_TWICE,
    WAITED_FOR,
    LineAnswer,
    LineRunner,
    failed_line,
    line_request_id,
)
from asr_serve.server.batch.notice_sender import NoticeSender, open_poster
from asr_serve.server.uploads.thread_work import finished

JSONL = "application/jsonl"
LINES_AHEAD = 16
"""Lines of a batch that are taken from the store at once."""
ANSWERS_AT_ONCE = 16
"""Answers that are read from the store at once, to be written: each has megabytes where it is the words of a day."""
FIRST_RETRY_S, MAX_RETRY_S = 0.5, 30.0
MODEL_WAIT_S = 600.0
"""Time for which lines wait for a model that is not loaded, before they fail."""
CLEAN_S = 5.0
"""Time between two looks for files that are too old, and for what metrics show."""
MAX_SLEEP_S = 3_600.0
"""Longest time between two looks at what is due."""
REOPEN_S = 1.0
"""Time between two attempts to open a folder that another server has: its lock cannot be waited for with a limit."""

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class ActiveBatch:
    """Batch whose lines are answered."""

    def __init__(self, batch: OpenBatch) -> None:
        self.batch = batch
        self.ahead: deque[BatchLine] = deque()
        """Lines to be begun, taken from the store."""
        self.running: dict[asyncio.Task[None], BatchLine] = {}
        self.failures = Counter[int]()
        """Times that a line in `ahead` or `running` failed by what is in RETRIED_TWICE."""
        self._missing_s: tuple[float, float] | None = None
        """First and last time at which a model was not loaded."""
        self.last_line = 0
        """Last line that was taken from the store."""
        self.exhausted = self.ending = self.fetching = False
        self.retry_s, self.retry_at_s, self.served_s = 0.0, 0.0, 0.0

    @property
    def idle(self) -> bool:
        return not self.running and not self.fetching

    def waits_for_model(self, now_s: float) -> bool:
        """Notes that a model is not loaded; returns whether its lines still wait for it."""
        first_s, last_s = self._missing_s or (now_s, now_s)
        if now_s - last_s > MODEL_WAIT_S:  # it was there meanwhile
            first_s = now_s
        self._missing_s = first_s, now_s
        return now_s - first_s < MODEL_WAIT_S


class BatchQueue:
    """Queue of one folder. Belongs to the event loop's thread.

    Everything is begun by `_step`, which runs whenever something may have changed: it starts the check of new batches,
    lines as there is room for them, and the ends of batches without further lines. Lines are taken from the batch of
    the owner with the fewest lines in work.
    """

    def __init__(self, config: BatchConfig, runner: LineRunner, metrics: BatchMetrics) -> None:
        """Raises OptionError for a secret of the webhook that cannot be read."""
        self._config, self._runner, self._metrics = config, runner, metrics
        self._store: BatchStore | None = None
        self._threads = ThreadPoolExecutor(1, "batch-store")
        self._opening = asyncio.Lock()
        self._main: asyncio.Task[None] | None = None
        self._active: dict[int, ActiveBatch] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Checks of inputs and ends of batches in progress, by batch."""
        self._slot = asyncio.Semaphore(1)
        """Held by the check or end in progress: each reads or writes a file of up to MAX_INPUT_BYTES."""
        self._wake = asyncio.Event()
        self._changed = True
        """Whether batches were added or changed from outside since they were last read from the store."""
        self._clean_at = 0.0
        self._closed = False
        self._poster = open_poster(config)
        self._notices: NoticeSender | None = None
        self._fetches: set[asyncio.Task[None]] = set()
        self._reopening: asyncio.Task[None] | None = None

    # --- for the routes

    async def start(self) -> None:
        """Opens the folder if it has a queue, and goes on with it. Without one, nothing is written before the first
        file comes. A folder that cannot be used is logged: requests are told so."""
        if not self._config.enabled or not await asyncio.to_thread(has_queue, self._config):
            return
        try:
            await self.store()
        except StoreUnavailable as error:
            log.warning("batches do not go on: %s", error)
            self._reopening = asyncio.create_task(self._reopen())

    async def store(self) -> BatchStore:
        """The store, opened now if it was not. Raises StoreUnavailable, Draining, NoSuchRoute where batches are off."""
        if not self._config.enabled:
            raise NoSuchRoute("this server keeps no files and no batches", "one with the setting batch.enabled")
        if self._closed:
            raise Draining("the server is going down", "it takes no new requests", STORE_RETRY_MS)
        async with self._opening:
            if self._store is None:
                opened = self._store = await self._open()
                if self._poster is not None:
                    self._notices = NoticeSender(opened, self._poster, self.call, self._metrics)
                self._main = asyncio.create_task(self._run())
            return self._store

    async def _open(self) -> BatchStore:
        opening = asyncio.get_running_loop().run_in_executor(self._threads, BatchStore, self._config)
        try:
            return await finished(opening)
        except asyncio.CancelledError:
            # The client whose request came first has left: the folder must not stay locked.
            if opening.done() and opening.exception() is None:
                await self.call(opening.result().close)
            raise

    async def quotas(self, owners: Sequence[str]) -> list[BatchQuotas] | None:
        """Limits of each of these owners, and their use; None where batches are off. Raises StoreUnavailable,
        Draining."""
        config = self._config
        if not config.enabled:
            return None
        if self._store is None and not await asyncio.to_thread(has_queue, config):
            usage = [OwnerUsage(0, 0, 0)] * len(owners)  # nothing is written before the first file comes
        else:
            usage = await self.call((await self.store()).usage, owners)
        return [
            BatchQuotas(
                Quota(each.bytes, config.bytes_per_key),
                Quota(each.files, config.files_per_key),
                Quota(each.open_batches, config.batches_per_key),
            )
            for each in usage
        ]

    async def call(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a method of the store on its thread. Raises what that does."""
        return await finished(asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **kwargs)))

    def notify(self) -> None:
        """Reads batches again: one was created or cancelled."""
        self._changed = True
        self._clean_at = 0.0
        self._wake.set()

    def drain(self) -> None:
        """Begins no more lines, and stops those in work: the next server answers them."""
        self._closed = True
        self._wake.set()
        for active in self._active.values():
            for task in active.running:
                task.cancel()

    async def close(self) -> None:
        self.drain()
        async with self._opening:  # what is being opened is closed too
            pass
        tasks = [task for active in self._active.values() for task in active.running] + [*self._fetches]
        for task in (self._reopening, self._main, *self._tasks.values()):
            if task is not None:
                task.cancel()
                tasks.append(task)
        if tasks:
            await asyncio.wait(tasks)
        if self._notices is not None:
            await self._notices.close()
        if self._store is not None:
            await self.call(self._store.close)
        self._threads.shutdown(wait=False)

    async def _reopen(self) -> None:
        while not self._closed:
            await asyncio.sleep(REOPEN_S)
            with contextlib.suppress(StoreUnavailable, Draining):
                await self.store()
                return

    # --- the loop

    async def _run(self) -> None:
        while not self._closed:
            self._wake.clear()
            try:
                due_s = await self._step()
            except StoreUnavailable as error:
                log.error("batches wait: %s", error)
                due_s = MAX_RETRY_S
            except Exception:  # without this task, batches would wait for ever in a server that looks healthy
                log.exception("a step of the queue of batches failed")
                due_s = MAX_RETRY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(due_s, MAX_SLEEP_S)):
                    await self._wake.wait()

    async def _step(self) -> float:
        """Starts what can be started; returns the seconds after which something else is due."""
        assert self._store is not None
        store, now = self._store, time.time()
        if self._changed:
            self._changed = False
            for batch in await self.call(store.open_batches):
                self._note(batch)
        for active in list(self._active.values()):
            if active.batch.expires <= now and not active.ending:
                self._stop(active, "expired")
            if active.ending and active.idle and active.batch.number not in self._tasks:
                self._start_task(active.batch, self._finish(active))
        next_s = self._start_lines()
        if now >= self._clean_at:
            expiry = await self.call(store.remove_expired, now)
            self._metrics.open_batches.set(len(self._active.keys() | self._tasks.keys()))
            self._metrics.waiting_lines.set(await self.call(store.count_open_lines))
            self._metrics.stored_bytes.set(await self.call(store.stored_bytes))
            # Soon while there is work, whose figures change; else when the next file is too old.
            busy = bool(self._active or self._tasks)
            self._clean_at = now + (CLEAN_S if busy else max(CLEAN_S, (expiry or now + MAX_SLEEP_S) - now))
        dues = [active.batch.expires - now for active in self._active.values() if not active.ending]
        return max(0.0, min([*dues, next_s, self._clean_at - now]))

    def _note(self, batch: OpenBatch) -> None:
        """Takes a batch as the store has it."""
        active = self._active.get(batch.number)
        if active is not None:
            active.batch = batch._replace(ending=batch.ending or active.batch.ending)
            if batch.status == "cancelling" and not active.ending:
                self._stop(active, "cancelled")
        elif batch.number in self._tasks:
            pass
        elif batch.status == "validating" and batch.expires > time.time():
            self._start_task(batch, self._check(batch))
        else:
            if batch.status == "validating":  # its input could not be read until now, or no server ran
                batch = batch._replace(ending="expired")
            active = self._active[batch.number] = ActiveBatch(batch)
            active.ending = batch.ending is not None

    def _stop(self, active: ActiveBatch, ending: BatchStatus) -> None:
        """Begins no more lines of a batch, and stops those in work."""
        active.ending = True
        active.batch = active.batch._replace(ending=active.batch.ending or ending)
        for task in active.running:
            task.cancel()

    def _start_task(self, batch: OpenBatch, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                async with self._slot:
                    await work
            except Exception as error:
                expected = isinstance(error, StoreUnavailable | OSError)  # a full disk
                log.error("batch %s waits: %s", batch.id, error, exc_info=None if expected else error)
                await asyncio.sleep(MAX_RETRY_S)
            finally:
                work.close()  # where it was not begun
                self._tasks.pop(batch.number, None)
                self.notify()

        self._tasks[batch.number] = asyncio.create_task(guarded())

    # --- lines

    def _start_lines(self) -> float:
        """Starts lines while there is room; returns the seconds after which a batch may be tried again."""
        now_s = asyncio.get_running_loop().time()
        running = Counter[str]()
        for active in self._active.values():
            running[active.batch.owner] += len(active.running)
        room = self._config.concurrent_lines - running.total()
        if any(_is_suspect(line) for active in self._active.values() for line in active.running.values()):
            room = 0
        while room > 0 and not self._closed:
            ready = [
                active
                for active in self._active.values()
                if not active.ending and active.retry_at_s <= now_s and active.ahead
            ]
            if not ready:
                break
            active = min(ready, key=lambda each: (running[each.batch.owner], each.served_s))
            if (suspect := _is_suspect(active.ahead[0])) and running.total():
                break  # it begins when those in work have ended
            active.served_s = now_s
            running[active.batch.owner] += 1
            room = 0 if suspect else room - 1
            line = active.ahead.popleft()
            task = asyncio.create_task(self._answer(active, line))
            active.running[task] = line
            task.add_done_callback(partial(self._on_line_done, active))
            now_s += 1e-9  # batches that are begun in one step are served in turn
        for active in self._active.values():
            self._refill(active)
        waits = [
            active.retry_at_s - now_s
            for active in self._active.values()
            if active.retry_at_s > now_s and not active.ending
        ]
        return max(0.01, min(waits)) if waits else MAX_SLEEP_S

    def _refill(self, active: ActiveBatch) -> None:
        """Takes more lines from the store; without any left, the batch ends with its last answer."""
        waits = active.retry_at_s > asyncio.get_running_loop().time()
        if waits or active.ending or active.fetching or len(active.ahead) > LINES_AHEAD // 2 or self._closed:
            return
        if not active.exhausted:
            active.fetching = True
            self._background(self._fetch(active))
        elif not active.ahead and not active.running:
            active.ending = True
            active.batch = active.batch._replace(ending="completed")
            self._wake.set()

    async def _fetch(self, active: ActiveBatch) -> None:
        assert self._store is not None
        try:
            lines = await self.call(self._store.open_lines, active.batch.number, active.last_line, LINES_AHEAD)
        except StoreUnavailable as error:
            log.error("batch %s waits: %s", active.batch.id, error)
            active.retry_at_s = asyncio.get_running_loop().time() + MAX_RETRY_S
        else:
            active.ahead += lines
            active.exhausted = len(lines) < LINES_AHEAD
            if lines:
                active.last_line = lines[-1].number
        finally:
            active.fetching = False
            self._wake.set()

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._fetches.add(task)
        task.add_done_callback(self._fetches.discard)

    async def _answer(self, active: ActiveBatch, line: BatchLine) -> None:
        """Answers a line and stores the answer. Raises what is in RETRIED, RETRIED_TWICE or WAITED_FOR where it is to
        be tried again."""
        assert self._store is not None
        store, batch, answer, stored = self._store, active.batch, None, False
        try:
            await self.call(store.begin_line, batch.number, line.number)
            answer = await self._line_answer(store, active, line)
            if await self._store_answer(store, batch, line, answer):
                self._metrics.lines.labels(batch.endpoint, answer.outcome).inc()
            stored = True
            active.failures.pop(line.number, None)
        finally:
            if answer is not None and answer.file is not None:
                answer.file.part.unlink(missing_ok=True)  # where it was not moved: the disk is full, the line stopped
            if not stored:
                with contextlib.suppress(StoreUnavailable):
                    await self.call(store.release_line, batch.number, line.number)

    def _on_line_done(self, active: ActiveBatch, task: asyncio.Task[None]) -> None:
        """Puts a line back that has no answer: the engine had no room, the store failed, or it was stopped."""
        line = active.running.pop(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, EngineCrashed):
            line = line._replace(attempts=max(line.attempts, SUSPECT_ATTEMPTS))
        if task.cancelled() or error is not None:
            active.ahead.appendleft(line)
        if error is None:
            active.retry_s = 0.0
        else:
            active.retry_s = min(MAX_RETRY_S, 2 * active.retry_s or FIRST_RETRY_S)
            active.retry_at_s = asyncio.get_running_loop().time() + active.retry_s
            expected = isinstance(error, (*RETRIED, *RETRIED_TWICE, *WAITED_FOR, EngineCrashed))
            log.log(
                logging.INFO if expected else logging.ERROR,
                "line %d of %s waits %g s: %s",
                *(line.number, active.batch.id, active.retry_s, error),
                exc_info=None if expected else error,
            )
        self._wake.set()

    async def _line_answer(self, store: BatchStore, active: ActiveBatch, line: BatchLine) -> LineAnswer:
        batch, request_id = active.batch, line_request_id(active.batch, line)
        if line.attempts >= MAX_ATTEMPTS:
            error = EngineCrashed(
                f"the server died {line.attempts} times while it worked on this line", "requests that it can do"
            )
            return failed_line(line, error, request_id)
        try:
            return await self._runner.run(store, batch, line)
        except RETRIED:  # those of the store among them
            raise
        except RETRIED_TWICE as error:
            active.failures[line.number] += 1
            if active.failures[line.number] <= 2:
                raise
            return failed_line(line, error, request_id)
        except EngineCrashed as error:
            if not _is_suspect(line):  # one of the lines beside it may be the cause: it is tried again, alone
                raise
            return failed_line(line, error, request_id)
        except WAITED_FOR as error:
            if active.waits_for_model(asyncio.get_running_loop().time()):
                raise
            return failed_line(line, error, request_id)
        except Exception as error:
            log.exception("line %d of %s failed inside", line.number, batch.id)
            return failed_line(line, error, request_id)

    async def _store_answer(self, store: BatchStore, batch: OpenBatch, line: BatchLine, answer: LineAnswer) -> bool:
        try:
            return await self.call(store.answer_line, batch, line.number, answer.outcome, answer.line, answer.file)
        except StoreUnavailable:
            raise
        except AsrServeError as error:  # no room for it
            failed = failed_line(line, error, line_request_id(batch, line))
            return await self.call(store.answer_line, batch, line.number, failed.outcome, failed.line)

    # --- begin and end of a batch

    async def _check(self, batch: OpenBatch) -> None:
        """Reads the input of a batch, and starts it or fails it."""
        assert self._store is not None
        store = self._store
        lines, errors = await _in_thread(partial(read_input, store.path(batch.input_file), batch.endpoint))
        if not errors:
            try:
                await self.call(store.begin_batch, batch.number, lines)
            except QuotaExceeded as full:
                errors = [BatchLineError(full.code, str(full), None)]
        if errors:
            await self.call(store.fail_batch, batch.number, errors)
            self._note_end(batch, "failed")
            log.info("batch %s failed: %s", batch.id, errors[0].message)
        else:
            log.info("batch %s of %d lines for %s", batch.id, len(lines), batch.endpoint)

    async def _finish(self, active: ActiveBatch) -> None:
        """Writes the files of a batch's answers, and ends it."""
        assert self._store is not None
        store, batch = self._store, active.batch
        assert batch.ending is not None
        await self.call(store.begin_ending, batch.number, batch.ending)
        writer = await _in_thread(partial(OutputWriter, store, batch, self._config.keep_s))
        try:
            after = 0
            while lines := await self.call(store.answers, batch.number, after, ANSWERS_AT_ONCE):
                await _in_thread(partial(writer.write, lines))
                after = lines[-1].number
            output, errors = await _in_thread(writer.finish)
            ending = await self.call(store.finish_batch, batch.number, output, errors)
        finally:
            await _in_thread(writer.close)
        self._active.pop(batch.number, None)
        self._note_end(batch, ending)
        log.info("batch %s is %s", batch.id, ending)

    def _note_end(self, batch: OpenBatch, status: BatchStatus) -> None:
        self._metrics.batches.labels(batch.endpoint, status).inc()
        if self._notices is not None:
            self._notices.wake()


class OutputWriter:
    """Writer of the files of a batch's answers."""

    def __init__(self, store: BatchStore, batch: OpenBatch, keep_s: float) -> None:
        self._batch, self._keep_s = batch, keep_s
        self._ids = {kind: new_file_id() for kind in ("output", "error")}
        self._parts = {kind: store.part_path(file_id) for kind, file_id in self._ids.items()}
        self._files: dict[str, BinaryIO] = {}
        with contextlib.ExitStack() as undo:
            for kind, part in self._parts.items():
                self._files[kind] = undo.enter_context(part.open("wb"))
            undo.pop_all()
        self._bytes = Counter[str]()

    def write(self, lines: list[AnsweredLine]) -> None:
        for line in lines:
            kind = "output" if line.outcome == "completed" else "error"
            answer = line.answer if line.answer is not None else self._unanswered(line)
            self._bytes[kind] += self._files[kind].write(answer + b"\n")

    def finish(self) -> tuple[NewFile | None, NewFile | None]:
        """Files that hold something, synced: of answers, and of errors."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        made = {
            kind: output_file(
                self._ids[kind], part, f"{self._batch.id}_{kind}.jsonl", self._bytes[kind], JSONL, self._keep_s
            )
            for kind, part in self._parts.items()
            if self._bytes[kind]
        }
        return made.get("output"), made.get("error")

    def close(self) -> None:
        """Deletes what was written and not moved. Idempotent."""
        for file in self._files.values():
            file.close()
        for part in self._parts.values():
            part.unlink(missing_ok=True)

    def _unanswered(self, line: AnsweredLine) -> bytes:
        """Line of a request that the end of its batch left without an answer."""
        expired = self._batch.ending == "expired"
        message = (
            "the completion window of the batch ended before it" if expired else "the batch was cancelled before it"
        )
        problem = Problem(message, "invalid_request_error", None, "batch_expired" if expired else "batch_cancelled")
        request_id = line_request_id(self._batch, BatchLine(line.number, line.custom_id, 0, 0, 0))
        return msgspec.json.encode(OutputLine(request_id, line.custom_id, None, problem))


def read_input(path: Path, endpoint: str) -> tuple[list[tuple[str, int, int]], list[BatchLineError]]:
    """Lines of an input: custom_id, position and length of each; and errors, with which there is no batch."""
    lines, errors, seen, start = list[tuple[str, int, int]](), list[BatchLineError](), set[str](), 0
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return [], [BatchLineError("unknown_file", "the input was deleted. a file that is there", None)]
    if size > MAX_INPUT_BYTES:
        message = f"the input has {size} bytes. up to {MAX_INPUT_BYTES}. make several batches"
        return [], [BatchLineError("file_too_large", message, None)]
    with path.open("rb") as file:
        for number in range(1, MAX_LINES + MAX_LINE_ERRORS + 2):
            line = file.readline(MAX_LINE_BYTES + 2)
            if not line or len(errors) >= MAX_LINE_ERRORS:
                break
            if len(line) > MAX_LINE_BYTES + 1:
                message = f"line {number} has over {MAX_LINE_BYTES} bytes. that many at most. upload its audio"
                errors.append(BatchLineError("line_too_long", message, number))
                break
            if line.strip():
                try:
                    custom_id = parse_line(line, endpoint).custom_id
                except AsrServeError as error:
                    errors.append(BatchLineError(error.code, str(error), number, error.param))
                else:
                    if custom_id in seen:
                        message = f"custom_id {custom_id[:80]!r} came before. each once. number the lines"
                        errors.append(BatchLineError("duplicate_custom_id", message, number, "custom_id"))
                    seen.add(custom_id)
                    lines.append((custom_id, start, len(line)))
            start += len(line)
            if len(lines) > MAX_LINES:
                message = f"the input has over {MAX_LINES} requests. that many at most. make several batches"
                errors.append(BatchLineError("too_many_requests", message, None))
                break
    if not lines and not errors:
        errors.append(
            BatchLineError("empty_file", "the input has no requests. one or more. write a line for each", None)
        )
    return lines, errors


def _is_suspect(line: BatchLine) -> bool:
    """Returns whether several servers or engines in a row died while a line was in work."""
    return line.attempts >= SUSPECT_ATTEMPTS


async def _in_thread(work: Callable[[], T]) -> T:
    return await finished(asyncio.get_running_loop().run_in_executor(None, work))
