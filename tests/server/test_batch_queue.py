"""The queue of batches without a server: what it counts, what it keeps, what it gives back. Its runner holds lines for
as long as a test wants; lines of the real one are in test_batches."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from asr_serve.config import BatchConfig
from asr_serve.errors import EngineCrashed, ModelNotLoaded, ModelUnavailable, QuotaExceeded, StepFailed
from asr_serve.metrics import ServerMetrics
from asr_serve.protocols.openai.batches import ENDED_STATUSES, Batch, BatchRequest, BatchStatus, ListQuery
from asr_serve.server.batch.batch_queue import BatchQueue
from asr_serve.server.batch.batch_store import (
    ROW_BYTES,
    SUSPECT_ATTEMPTS,
    BatchLine,
    BatchStore,
    NewFile,
    OpenBatch,
    new_file_id,
)
from asr_serve.server.batch.line_runner import LineAnswer, LineRunner

ENDPOINT = "/v1/audio/transcriptions"
OWNER = "somebody"
LIMIT_S = 60.0


class HeldRunner(LineRunner):
    """Runner whose lines are answered when the test says so."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.failures: dict[int, list[Exception]] = {}
        """Errors with which a line fails before it is answered, by its number."""
        self.in_work: set[int] = set()
        self.together: dict[int, int] = {}
        """Most lines that were in work beside each line, itself counted."""

    async def run(self, store: BatchStore, batch: OpenBatch, line: BatchLine) -> LineAnswer:
        self.in_work.add(line.number)
        for number in self.in_work:
            self.together[number] = max(self.together.get(number, 0), len(self.in_work))
        try:
            await self.go_on.wait()
            await asyncio.sleep(0)
            if self.failures.get(line.number):
                raise self.failures[line.number].pop()
        finally:
            self.in_work.discard(line.number)
        return LineAnswer("completed", b"{}")


@pytest.fixture
def config(tmp_path: Path) -> BatchConfig:
    return BatchConfig(folder=str(tmp_path / "batch"), concurrent_lines=3)


def add_file(store: BatchStore, data: bytes, owner: str = OWNER) -> str:
    file_id = new_file_id()
    part = store.part_path(file_id)
    part.write_bytes(data)
    made = NewFile(file_id, part, "lines.jsonl", "batch", "application/jsonl", len(data), 3_600.0)
    return store.add_file(owner, made, object()).id


def add_batch(store: BatchStore, lines: int, window_s: int = 86_400) -> Batch:
    """A batch in the store, whose input is read when a queue opens it."""
    each = {"method": "POST", "url": ENDPOINT, "body": {"file": "data:,x"}}
    data = b"\n".join(msgspec.json.encode({"custom_id": str(number), **each}) for number in range(lines))
    request = BatchRequest(add_file(store, data), ENDPOINT, "24h", window_s, None, None)
    return store.create_batch(OWNER, "", request)


def attempts(config: BatchConfig) -> list[int]:
    assert config.folder is not None
    with closing(sqlite3.connect(Path(config.folder) / "queue.sqlite")) as db:
        return [row[0] for row in db.execute("SELECT attempts FROM lines ORDER BY number")]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not true():
            await asyncio.sleep(0.01)


async def until_ended(store: BatchStore, batch_id: str) -> BatchStatus:
    await until(lambda: store.batch(OWNER, batch_id).status in ENDED_STATUSES)
    return store.batch(OWNER, batch_id).status


def with_queue(config: BatchConfig, test: Callable[[BatchQueue, HeldRunner], Awaitable[None]]) -> None:
    async def run() -> None:
        runner = HeldRunner()
        queue = BatchQueue(config, runner, ServerMetrics("0").batch)
        try:
            await test(queue, runner)
        finally:
            await queue.close()

    asyncio.run(run())


def test_lines_in_work_are_counted_as_begun_and_no_others(config: BatchConfig) -> None:
    """A server that is killed counts against the lines in work alone, not against those read ahead; one that goes down
    in order counts against none."""
    with closing(BatchStore(config)) as store:
        add_batch(store, 30)

    async def test(queue: BatchQueue, runner: HeldRunner) -> None:
        await queue.start()
        await until(lambda: len(runner.in_work) == 3)
        assert attempts(config) == [1] * 3 + [0] * 27

    with_queue(config, test)
    assert attempts(config) == [0] * 30


def test_a_line_over_which_servers_died_is_in_work_alone(config: BatchConfig) -> None:
    with closing(BatchStore(config)) as store:
        batch = add_batch(store, 8)

    async def begin(queue: BatchQueue, runner: HeldRunner) -> None:
        await queue.start()
        await until(lambda: len(runner.in_work) == 3)

    with_queue(config, begin)
    with closing(BatchStore(config)) as store:
        (number,) = [each.number for each in store.open_batches()]
        for line in (2, 5):
            for _ in range(SUSPECT_ATTEMPTS):
                store.begin_line(number, line)

    async def test(queue: BatchQueue, runner: HeldRunner) -> None:
        store = await queue.store()
        await until(lambda: bool(runner.in_work))
        runner.go_on.set()
        assert await until_ended(store, batch.id) == "completed"
        assert sorted(runner.together) == list(range(1, 9))
        assert (runner.together[2], runner.together[5]) == (1, 1)

    with_queue(config, test)


def test_a_client_that_leaves_while_the_folder_is_opened_leaves_it_free(config: BatchConfig) -> None:
    async def test(queue: BatchQueue, runner: HeldRunner) -> None:
        first = asyncio.create_task(queue.store())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        assert first.cancelled()
        await queue.store()

    with_queue(config, test)


def test_uploads_in_progress_take_no_room_from_answers(config: BatchConfig) -> None:
    config = msgspec.structs.replace(config, bytes_per_key=10_000)
    with closing(BatchStore(config)) as store:
        batch = add_batch(store, 2)
        store.reserve(ticket := object(), OWNER, 9_000)
        with pytest.raises(QuotaExceeded):
            store.reserve(object(), OWNER, 9_000)
        (found,) = store.open_batches()
        store.begin_batch(found.number, [("0", 0, 1), ("1", 1, 1)])
        assert store.answer_line(found, 1, "completed", bytes(5_000))
        with pytest.raises(QuotaExceeded):
            store.answer_line(found, 2, "completed", bytes(5_000))
        store.release(ticket)
        store.release(ticket)
        assert store.batch(OWNER, batch.id).request_counts.completed == 1


def used_bytes(store: BatchStore) -> int:
    return store.usage([OWNER])[0].bytes


def test_the_rows_of_lines_count_in_the_quota_of_their_key(config: BatchConfig) -> None:
    """Many batches of one input: its bytes count once, and the lines of each batch as long as it runs."""
    config = msgspec.structs.replace(config, bytes_per_key=100 * (ROW_BYTES + 1) + 20_000)
    with closing(BatchStore(config)) as store:
        first = add_batch(store, 100)
        alone = used_bytes(store)
        request = BatchRequest(first.input_file_id, ENDPOINT, "24h", 86_400, None, None)
        second = store.create_batch(OWNER, "", request)
        lines = [(str(number % 10), 0, 1) for number in range(100)]
        one, other = store.open_batches()
        store.begin_batch(one.number, lines)
        assert used_bytes(store) == alone + 100 * (ROW_BYTES + 1)
        with pytest.raises(QuotaExceeded, match="bytes_per_key"):
            store.begin_batch(other.number, lines)
        assert store.batch(OWNER, second.id).status == "validating"
        assert used_bytes(store) == alone + 100 * (ROW_BYTES + 1)
        assert store.answer_line(one, 1, "failed", bytes(10))
        with closing(sqlite3.connect(store.folder / "queue.sqlite")) as db, db:
            db.execute("UPDATE usage SET bytes = 0")  # as a version left it that counted no lines
    with closing(BatchStore(config)) as store:
        assert used_bytes(store) == alone + 100 * (ROW_BYTES + 1) + 10
        store.begin_ending(one.number, "cancelled")
        store.finish_batch(one.number, None, None)
        assert used_bytes(store) == alone


def test_a_batch_takes_no_room_that_an_upload_reserved(config: BatchConfig) -> None:
    config = msgspec.structs.replace(config, bytes_per_key=10_000)
    with closing(BatchStore(config)) as store:
        add_batch(store, 1)
        (found,) = store.open_batches()
        store.reserve(ticket := object(), OWNER, 10_000 - used_bytes(store) - ROW_BYTES)
        with pytest.raises(QuotaExceeded, match="bytes_per_key"):
            store.begin_batch(found.number, [("0", 0, 1)])
        store.release(ticket)
        store.begin_batch(found.number, [("0", 0, 1)])


def test_rows_that_an_earlier_version_accepted_leave_room_for_answers(config: BatchConfig) -> None:
    """It counted no rows: with them its key is over its limit."""
    with closing(BatchStore(config)) as store:
        batch = add_batch(store, 100)
        input_bytes = used_bytes(store)
        (found,) = store.open_batches()
        store.begin_batch(found.number, [(str(number), 0, 1) for number in range(100)])
    config = msgspec.structs.replace(config, bytes_per_key=input_bytes + 1_000)
    with closing(BatchStore(config)) as store:
        assert used_bytes(store) > input_bytes + 1_000
        with pytest.raises(QuotaExceeded):
            store.reserve(object(), OWNER, 1)
        assert store.answer_line(found, 1, "completed", bytes(1_000))
        with pytest.raises(QuotaExceeded, match=f"beside {input_bytes + 1_000} bytes of this key"):
            store.answer_line(found, 2, "completed", bytes(1))  # answers themselves are bounded as ever
        assert store.batch(OWNER, batch.id).request_counts.completed == 1
        store.begin_ending(found.number, "cancelled")
        store.finish_batch(found.number, None, None)
        assert used_bytes(store) == input_bytes
        store.reserve(object(), OWNER, 1_000)


def test_a_batch_without_room_for_its_lines_fails(config: BatchConfig) -> None:
    config = msgspec.structs.replace(config, bytes_per_key=15_000)
    with closing(BatchStore(config)) as store:
        batch = add_batch(store, 100)

    async def test(queue: BatchQueue, runner: HeldRunner) -> None:
        store = await queue.store()
        assert await until_ended(store, batch.id) == "failed"
        errors = store.batch(OWNER, batch.id).errors
        assert errors is not None
        assert [error.code for error in errors.data] == ["quota_exceeded"]
        assert "batch.bytes_per_key" in errors.data[0].message

    with_queue(config, test)


def test_a_reservation_is_released_while_the_store_is_busy(config: BatchConfig) -> None:
    """The event loop's thread releases it, and must not wait for a transaction."""

    async def test(queue: BatchQueue, runner: HeldRunner) -> None:
        store, ticket = await queue.store(), object()
        await queue.call(store.reserve, ticket, OWNER, 1)
        with closing(sqlite3.connect(store.folder / "queue.sqlite", isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")  # the next write waits for this one, with the store's lock
            writing = asyncio.create_task(queue.call(store.begin_line, 1, 1))
            await asyncio.sleep(0.2)
            store.release(ticket)
            assert not writing.done()
            db.execute("ROLLBACK")
            await writing

    with_queue(config, test)


def test_a_line_whose_step_failed_is_tried_again_twice(config: BatchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asr_serve.server.batch.batch_queue.FIRST_RETRY_S", 0.01)
    with closing(BatchStore(config)) as store:
        batch = add_batch(store, 3)

    async def test(queue: BatchQueue, runner: HeldRunner) -> None:
        runner.failures = {1: [StepFailed("a step failed")] * 2, 2: [StepFailed("a step failed")] * 3}
        runner.go_on.set()
        store = await queue.store()
        assert await until_ended(store, batch.id) == "completed"
        counts = store.batch(OWNER, batch.id).request_counts
        assert (counts.completed, counts.failed) == (2, 1)

    with_queue(config, test)


def test_a_line_in_work_when_engines_died_is_tried_again_alone(
    config: BatchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asr_serve.server.batch.batch_queue.FIRST_RETRY_S", 0.01)
    with closing(BatchStore(config)) as store:
        batch = add_batch(store, 3)

    async def test(queue: BatchQueue, runner: HeldRunner) -> None:
        crash = EngineCrashed("the engine died three times")
        runner.failures = {1: [crash], 2: [crash] * 2, 3: [crash]}
        runner.go_on.set()
        store = await queue.store()
        assert await until_ended(store, batch.id) == "completed"
        counts = store.batch(OWNER, batch.id).request_counts
        assert (counts.completed, counts.failed) == (2, 1)

    with_queue(config, test)


@pytest.mark.parametrize(("wait_s", "failed"), [(60.0, 0), (0.0, 1)])
def test_a_line_waits_for_its_model(
    config: BatchConfig, monkeypatch: pytest.MonkeyPatch, wait_s: float, failed: int
) -> None:
    monkeypatch.setattr("asr_serve.server.batch.batch_queue.FIRST_RETRY_S", 0.01)
    monkeypatch.setattr("asr_serve.server.batch.batch_queue.MODEL_WAIT_S", wait_s)
    with closing(BatchStore(config)) as store:
        batch = add_batch(store, 3)

    async def test(queue: BatchQueue, runner: HeldRunner) -> None:
        runner.failures = {2: [ModelNotLoaded("the model is not loaded")] * 4}
        runner.go_on.set()
        store = await queue.store()
        assert await until_ended(store, batch.id) == "completed"
        assert store.batch(OWNER, batch.id).request_counts.failed == failed

    with_queue(config, test)


def test_lines_wait_for_a_model_that_could_not_be_loaded(config: BatchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asr_serve.server.batch.batch_queue.FIRST_RETRY_S", 0.01)
    monkeypatch.setattr("asr_serve.server.batch.batch_queue.MODEL_WAIT_S", 0.0)
    with closing(BatchStore(config)) as store:
        batch = add_batch(store, 3)

    async def test(queue: BatchQueue, runner: HeldRunner) -> None:
        runner.failures = {line: [ModelUnavailable("it could not be loaded", "", 10)] * 3 for line in (1, 2, 3)}
        runner.go_on.set()
        store = await queue.store()
        assert await until_ended(store, batch.id) == "completed"
        counts = store.batch(OWNER, batch.id).request_counts
        assert (counts.completed, counts.failed) == (3, 0)

    with_queue(config, test)


def test_ended_batches_are_bounded(config: BatchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asr_serve.server.batch.batch_store.MAX_ENDED", 3)
    config = msgspec.structs.replace(config, batches_per_key=2)
    with closing(BatchStore(config)) as store:
        made = []
        for _ in range(8):
            made.append(add_batch(store, 1).id)
            (found,) = store.open_batches()
            store.fail_batch(found.number, [])
        listed = [each.id for each in store.list_batches(OWNER, ListQuery(None, 20))]
        assert listed == made[:-6:-1]


def test_a_batch_whose_input_was_not_read_in_time_expires(config: BatchConfig) -> None:
    with closing(BatchStore(config)) as store:
        batch = add_batch(store, 3, window_s=-1)

    async def test(queue: BatchQueue, runner: HeldRunner) -> None:
        store = await queue.store()
        assert await until_ended(store, batch.id) == "expired"
        assert runner.together == {}

    with_queue(config, test)


def test_files_that_are_too_old_are_deleted_in_parts(config: BatchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asr_serve.server.batch.batch_store.EXPIRED_AT_ONCE", 2)
    with closing(BatchStore(config)) as store:
        kept = [add_file(store, b"x") for _ in range(3)]
        expires = store.file(OWNER, kept[0]).object.expires_at
        later = float(expires + 60)
        assert store.remove_expired(expires - 1.0) == expires
        first = store.remove_expired(later)
        assert first is not None
        assert first <= later
        assert store.remove_expired(later) is None
        assert list((store.folder / "files").iterdir()) == []
