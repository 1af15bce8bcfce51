"""Streams of tiny models that are offloaded: a clock set by hand, and a store that loses what it is told to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from tiny_streaming import SEARCHES, model

from asr_serve.config import EngineConfig
from asr_serve.engine.request import StreamChunk
from asr_serve.engine.stats import EngineStats
from asr_serve.engine.streaming import executor, offload
from asr_serve.engine.streaming.executor import StreamingExecutor
from asr_serve.engine.streaming.model_runner import ChunkedModelRunner
from asr_serve.metrics import EngineMetrics
from asr_serve.types import SearchResult

SHARES = EngineConfig().shares


class Clock:
    """Stands for `time` in the modules under test."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    perf_counter = monotonic

    def time_ns(self) -> int:
        return int(1e9 * self.now_s)


@contextmanager
def clock() -> Iterator[Clock]:
    made = Clock()
    with mock.patch.object(executor, "time", made), mock.patch.object(offload, "time", made):
        yield made


class FakeOffloadStore:
    """An offload store in memory, or as if on a disk, whose reads end when `read` is called."""

    def __init__(self, most_bytes: int = 1 << 30, *, disk: bool = False) -> None:
        self.most_bytes, self.disk = most_bytes, disk
        self.held: dict[bytes, list[bytes]] = {}
        self.lost: set[bytes] = set()
        self._reading: deque[tuple[bytes, Callable[[list[memoryview] | None], None]]] = deque()

    def put(self, name: bytes, parts: Any, *, pinned: bool) -> bool:
        assert pinned, "a stream may not be dropped for room"
        assert name not in self.held, "it sleeps twice"
        copied = [bytes(part) for part in parts]
        if sum(map(len, copied)) + sum(len(part) for each in self.held.values() for part in each) > self.most_bytes:
            return False
        self.held[name] = copied
        return True

    def get(self, name: bytes, done: Callable[[list[memoryview] | None], None]) -> None:
        self._reading.append((name, done))
        if not self.disk:
            self.read()

    def read(self) -> bool:
        """Answer the oldest pending read; False where there is none."""
        if not self._reading:
            return False
        name, done = self._reading.popleft()
        parts = None if name in self.lost else self.held.get(name)
        done(None if parts is None else [memoryview(part) for part in parts])
        return True

    def drop(self, name: bytes) -> None:
        self.held.pop(name, None)


class FakeLoop:
    """The engine loop, as far as streams see it."""

    def __init__(self) -> None:
        self.live_sessions = 1
        self.metrics = EngineMetrics("tiny")
        self.stats = EngineStats(self.metrics)
        self.jobs: deque[Callable[[], None]] = deque()
        self.running = True

    def call(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)


class ClipStream:
    """A stream from outside: the pieces written and their results."""

    def __init__(self, bench: ExecutorBench, number: int, pcm: np.ndarray, *, live: bool = True) -> None:
        self.number, self.pcm, self.at = number, pcm, 0
        self.results: list[Any] = []
        self.closed = False
        self._bench = bench
        bench.streams.open_stream(number, live)

    @property
    def finished(self) -> bool:
        return self.at == len(self.pcm) and bool(self.results) and self.results[-1][0]

    def send(self, samples: int) -> Any:
        """Write more, and run the executor until it rests; the future of the piece."""
        future = self.write(samples)
        self._bench.settle()
        return future

    def write(self, samples: int) -> Any:
        """Write more; the future of the piece."""
        piece = self.pcm[self.at : self.at + samples]
        self.at += len(piece)
        return self._put(piece.copy(), self.at == len(self.pcm))

    def _put(self, pcm: np.ndarray, last: bool) -> Any:
        made = StreamChunk(self.number, pcm, last, Future())
        self.results.append((last, made.future))
        self._bench.streams.append_audio(made)
        return made.future

    @property
    def answered(self) -> bool:
        return all(future.done() for _, future in self.results)

    def tokens(self) -> list[tuple[int, int]]:
        """Token and frame of all results."""
        found: list[SearchResult] = [future.result(0) for _, future in self.results]
        return [(token.id, token.frame) for each in found for token in each.fixed_tokens]

    def tails(self) -> list[list[int]]:
        return [[token.id for token in future.result(0).tail_tokens] for _, future in self.results]


class ExecutorBench:
    """An executor of streams over a tiny model, run step by step."""

    def __init__(
        self,
        clock: Clock,
        name: str,
        search: str,
        *,
        slots: int = 2,
        tiers: Any = None,
        after_s: float = 10.0,
        replay: bool = False,
        chunked: bool = False,
        make: Callable[[Any], Any] | None = None,
        spell: Callable[[str], Any] | None = None,
    ) -> None:
        network = model(name)
        self.clock, self.context = clock, FakeLoop()
        self.wrapper = ChunkedModelRunner(
            network,
            (make or SEARCHES[search])(network),
            network.device,
            slots=slots,
            chunk=network.frame_block * (2 if chunked else 1),
            use_chunked_inference=chunked,
            wait_ms=0.0,
            poison=True,
        )
        self.streams = StreamingExecutor(
            self.wrapper,
            SHARES,
            lambda _: None,
            lambda _: None,
            tiers=tiers,
            offload_after_s=after_s,
            replay=replay,
            compile_hotwords=spell,
        )
        self.streams.attach(self.context)
        self.tiers = tiers

    def read_all(self) -> None:
        """Let the disk answer, and run the executor, until both rest."""
        while self.tiers.read() or self.step():
            pass

    def close(self, *numbers: int) -> None:
        """Close these streams; nothing may be left of any."""
        for number in numbers:
            self.streams.close_stream(number)
        self.expect_empty()

    def step(self) -> bool:
        """One turn of the loop; whether there was anything to do."""
        had = bool(self.context.jobs)
        while self.context.jobs:
            self.context.jobs.popleft()()
        stepped = self.streams.step()
        kept = sum(pcm.nbytes for each in self.streams._streams.values() for pcm in each.replay_audio or ())
        assert self.kept_bytes == kept, "audio is kept that nobody counts"
        return stepped or had

    def settle(self) -> None:
        """Step until there is nothing to do now and nothing is due: a loop would not spin."""
        for _ in range(10_000):
            if not self.step():
                due_s = self.streams.due_s
                assert due_s is None or due_s > self.clock.now_s, "due, and nothing is done: the loop would spin"
                return
        raise AssertionError("it never comes to rest")

    def idle(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.settle()

    @property
    def asleep(self) -> set[int]:
        return set(self.streams._offloader.offloaded)

    @property
    def kept_bytes(self) -> int:
        """Bytes of audio kept for replay."""
        return self.streams._replay_budget.nbytes

    def metric(self, name: str) -> float:
        value = self.context.metrics.registry.get_sample_value(name, {"model": "tiny"})
        assert value is not None
        return value

    def expect_empty(self) -> None:
        self.streams.check()
        assert not self.streams._streams
        assert self.wrapper.states.used == 0
        assert self.kept_bytes == 0
        assert self.tiers is None or not self.tiers.held, "a stream that is gone left something"
        assert self.metric("asr_serve_streams_offloaded") == 0
