"""Replicas of the simulation: continuous batching as the engine does it, with steps that take their measured time.

`UtteranceReplica` asks the engine's own scheduler which requests are encoded next. `StreamingReplica` repeats the
rules of `engine/streaming/model_runner.py`, which cannot be imported without torch.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from math import ceil, inf

from asr_serve.config import EngineConfig
from asr_serve.engine.seq2seq.scheduler import LIVE_RESERVE_FRACTION, ScheduledRequest, Seq2SeqScheduler
from asr_serve.planning.service_times import SpeechModelTimes, StepCost, StreamingModelTimes, UtteranceModelTimes
from asr_serve.types import Priority

LIVE_DECODE_STEPS, MAX_BULK_ENCODES = 6, 8
"""Limits of a step of engine/seq2seq/executor.py."""
FILE_HANDICAP_S = 1.0
"""Delay of files in the order of ready streams (MAX_BATCH_WAIT_MS of engine/streaming/model_runner.py)."""
MAX_BACKGROUND = 0.95
"""Most of a replica that work outside of steps may take in the simulation; above, it is overloaded anyway."""
FRAMES_PER_S = 1_000
"""Frames of the simulated scheduler: audio in milliseconds."""
UNBOUNDED = 1 << 40

Action = Callable[[], None]


class VirtualClock:
    """Event queue: actions in order of time, and in order of insertion at one time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, time_s: float, action: Action) -> None:
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, action))

    def run(self, until_s: float) -> None:
        """Runs all actions up to a time."""
        events = self._events
        while events and events[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(events)
            action()


class Work:
    """Request: an utterance, a file's audio on a streaming model, or a sentence."""

    __slots__ = ("audio_s", "draft_tokens", "live", "on_done", "priority", "tokens_left", "within_ms")

    def __init__(
        self,
        audio_s: float,
        on_done: Action,
        priority: Priority = "interactive",
        within_ms: int | None = None,
        draft_tokens: float = 0.0,
    ) -> None:
        self.audio_s, self.on_done, self.priority, self.within_ms = audio_s, on_done, priority, within_ms
        self.draft_tokens, self.live, self.tokens_left = draft_tokens, priority == "live", 1


class SharedCores:
    """Cores that the replicas of a machine share, each of which uses one."""

    def __init__(self, cores: float = inf) -> None:
        self.cores = cores
        self.running = 0
        """Replicas that run a step."""

    @property
    def share(self) -> float:
        """Share of a core that each running replica has."""
        return min(1.0, self.cores / self.running) if self.running else 1.0


class Replica(ABC):
    """One engine with its server: runs one step at a time."""

    def __init__(self, clock: VirtualClock, machine: SharedCores) -> None:
        self.clock, self.machine = clock, machine
        self.queued_audio_s = 0.0
        """Audio of requests that are here: the length of its queue for the router."""
        self.live_callers = 0
        self.work_s = 0.0
        """Time that steps and server work took, without what live packets take."""
        self.step_end_s = 0.0
        """End of the running step."""
        self.background = 0.0
        """Share of the replica that packets of live callers take."""
        self._debt_s = 0.0
        """Server work that the next step waits for."""
        self.running = False

    @abstractmethod
    def submit(self, work: Work) -> None:
        """Adds a request."""

    @abstractmethod
    def cancel(self, work: Work) -> None:
        """Drops a request: its result is not told."""

    def add_background(self, share: float) -> None:
        """Adds a live caller's packets, which slow every step down."""
        self.background += share

    def add_server_work(self, seconds: float) -> None:
        """Adds work on a file outside of steps."""
        self._debt_s += seconds

    def take_server_work(self) -> float:
        """Returns the time of the server work that waits, which is done now."""
        seconds, self._debt_s = self._debt_s, 0.0
        self.work_s += seconds
        return seconds * self._slowdown()

    def _slowdown(self) -> float:
        """Time that a second of work takes, as long as no other replica begins or ends a step."""
        return 1 / ((1 - min(MAX_BACKGROUND, self.background)) * self.machine.share)

    def _start(self, seconds: float, then: Action) -> None:
        """Runs a step of that much work."""
        seconds += self._debt_s
        self._debt_s = 0.0
        self.work_s += seconds
        self.running = True
        self.machine.running += 1
        self.step_end_s = self.clock.now_s + seconds * self._slowdown()

        def end() -> None:
            self.running = False
            self.machine.running -= 1
            then()

        self.clock.at(self.step_end_s, end)


class UtteranceReplica(Replica):
    """Replica of an encoder-decoder model.

    `deliver`: sends an encoded request to a decode replica; None: it is decoded here."""

    def __init__(
        self,
        clock: VirtualClock,
        machine: SharedCores,
        times: UtteranceModelTimes,
        deliver: Callable[[Work], None] | None = None,
    ) -> None:
        super().__init__(clock, machine)
        self._times, self._deliver = times, deliver
        config = EngineConfig(max_decode_rows=times.max_rows)
        self._scheduler = Seq2SeqScheduler(config, round(FRAMES_PER_S * times.encode_audio_s), packed=times.packed)
        self._waiting: dict[int, Work] = {}
        self._rows: list[Work] = []
        self._encoding: list[Work] = []
        self._ids: dict[int, int] = {}
        self._count = 0
        self._encodes, self._owed_steps = 0, 0
        """Encode batches since the last decoding step; decoding steps that come before the next batch."""
        self._block: tuple[float, float, int] | None = None
        """Start, time of a step and number of steps of the decoding that runs."""
        self._block_number = 0

    def submit(self, work: Work) -> None:
        """Adds a request that is to be encoded."""
        self.queued_audio_s += work.audio_s
        self._count += 1
        self._waiting[self._count] = work
        self._ids[id(work)] = self._count
        frames = max(1, round(FRAMES_PER_S * work.audio_s))
        now_ms = 1_000 * self.clock.now_s
        self._scheduler.enqueue(
            ScheduledRequest(self._count, frames, 1, work.priority, now_ms, within_ms=work.within_ms)
        )
        self._wake()

    def submit_encoded(self, work: Work) -> None:
        """Adds a request that another replica encoded."""
        self.queued_audio_s += work.audio_s
        self._add_row(work)
        self._wake()

    def cancel(self, work: Work) -> None:
        """Removes a request wherever it is; one that is being encoded is dropped afterwards."""
        work.on_done = _nothing
        number = self._ids.pop(id(work), None)
        if number is not None and self._scheduler.remove(number):
            del self._waiting[number]
            self.queued_audio_s -= work.audio_s
        elif work in self._rows:
            work.tokens_left = 0  # leaves with the step that runs

    def _wake(self) -> None:
        if not self.running and self._block is None:
            self._advance()
        elif self._block is not None:
            self._cut_block()

    def _advance(self) -> None:
        rows, times = self._rows, self._times
        if len(self._scheduler) and (self._owed_steps <= 0 or not rows):
            live_waits = rows and self.live_callers
            reserved = (times.max_rows // LIVE_RESERVE_FRACTION, 0) if live_waits else (0, 0)
            ids = self._scheduler.schedule(times.max_rows - len(rows), UNBOUNDED, reserved=reserved)
            if ids:
                self._encoding = [self._waiting.pop(number) for number in ids]
                for work in self._encoding:
                    self._ids.pop(id(work), None)
                audio_s = sum(work.audio_s for work in self._encoding)
                self._start(times.encode.seconds(len(ids), audio_s), self._encoded)
                return
        if rows:
            self._start_block()

    def _encoded(self) -> None:
        batch, self._encoding = self._encoding, []
        for work in batch:
            if self._deliver is not None or work.on_done is _nothing:
                self.queued_audio_s -= work.audio_s
            if work.on_done is _nothing:
                continue
            if self._deliver is not None:
                self._deliver(work)
            else:
                self._add_row(work)
        self._encodes += 1
        hurried = any(work.priority != "bulk" for work in batch)
        if hurried or self._encodes >= MAX_BULK_ENCODES:
            self._owed_steps = LIVE_DECODE_STEPS if any(row.live for row in self._rows) else 1
            self._encodes = 0
        self._advance()

    def _add_row(self, work: Work) -> None:
        times = self._times
        tokens = times.tokens_fixed + times.tokens_per_s * work.audio_s
        accepted = times.accepted * work.draft_tokens
        if work.draft_tokens:
            self._debt_s += times.verify.seconds(work.draft_tokens)
        work.tokens_left = max(1, ceil(tokens - accepted))
        self._rows.append(work)

    def _start_block(self) -> None:
        """Decodes until a row ends, or a batch may be encoded."""
        rows = self._rows
        steps = max(1, min(row.tokens_left for row in rows))
        if len(self._scheduler) and len(rows) < self._times.max_rows:
            steps = min(steps, max(1, self._owed_steps))
        self.machine.running += 1
        slow = self._slowdown()
        step_s = self._times.decode.seconds(len(rows)) * slow
        debt_s, self._debt_s = self._debt_s, 0.0
        self.work_s += debt_s
        start_s = self.clock.now_s + debt_s * slow
        self._block = (start_s, step_s, steps)
        self._schedule_block_end()

    def _cut_block(self) -> None:
        """Ends the decoding that runs after its current step, because a request came."""
        assert self._block is not None
        start_s, step_s, steps = self._block
        done = max(1, ceil((self.clock.now_s - start_s) / step_s)) if step_s > 0 else steps
        if done < steps:
            self._block = (start_s, step_s, done)
            self._schedule_block_end()

    def _schedule_block_end(self) -> None:
        assert self._block is not None
        start_s, step_s, steps = self._block
        self._block_number += 1
        number = self._block_number
        self.step_end_s = start_s + step_s  # a step ends soon: nobody waits for the whole block

        def end() -> None:
            if number == self._block_number:
                self._end_block()

        self.clock.at(start_s + step_s * steps, end)

    def _end_block(self) -> None:
        assert self._block is not None
        _, _, steps = self._block
        self._block = None
        self.machine.running -= 1
        self._owed_steps -= steps
        self.work_s += steps * self._times.decode.seconds(len(self._rows))
        left: list[Work] = []
        done: list[Work] = []
        for row in self._rows:
            row.tokens_left -= steps
            (left if row.tokens_left > 0 else done).append(row)
        self._rows = left
        for row in done:
            self.queued_audio_s -= row.audio_s
        for row in done:
            row.on_done()
        if not self.running and self._block is None:
            self._advance()


class Stream:
    """Stream of a live caller or of a file through a streaming model."""

    __slots__ = ("chunks", "ended", "on_done", "since_s")

    def __init__(self, on_done: Action) -> None:
        self.on_done = on_done
        self.chunks = 0
        """Chunks that are complete and not yet processed."""
        self.ended = False
        self.since_s = 0.0
        """Time since when it is ready, later for files."""


class StreamingReplica(Replica):
    """Replica of a streaming model: a chunk of each ready stream in one step."""

    def __init__(self, clock: VirtualClock, machine: SharedCores, times: StreamingModelTimes) -> None:
        super().__init__(clock, machine)
        self._times = times
        self._live: deque[Stream] = deque()
        self._files: deque[tuple[Stream, Work]] = deque()
        """Ready streams in order."""
        self._file_of: dict[int, Work] = {}
        self._open = 0
        self._timer_s = inf

    def open_stream(self, on_done: Action) -> Stream:
        self._open += 1
        return Stream(on_done)

    def append_chunk(self, stream: Stream, *, last: bool = False) -> None:
        """Adds a chunk that has arrived. After the last one the stream is closed, and its result known."""
        stream.chunks += 1
        stream.ended |= last
        if stream.chunks == 1:
            stream.since_s = self.clock.now_s
            self._live.append(stream)
        self._advance()

    def submit(self, work: Work) -> None:
        """Adds a file, all of whose audio is there."""
        self.queued_audio_s += work.audio_s
        stream = self.open_stream(work.on_done)
        size_s = self._times.chunk_s if self.live_callers else self._times.bulk_s
        stream.chunks = max(1, ceil(work.audio_s / size_s))
        stream.ended = True
        stream.since_s = self.clock.now_s + FILE_HANDICAP_S
        self._files.append((stream, work))
        self._advance()

    def cancel(self, work: Work) -> None:
        work.on_done = _nothing

    def _advance(self) -> None:
        if self.running or not (self._live or self._files):
            return
        now_s, times = self.clock.now_s, self._times
        if times.max_rows > 1:
            ready = len(self._live) + len(self._files)
            if ready < min(times.max_rows, self._open):
                oldest_s = min(each[0].since_s for each in self._files) - FILE_HANDICAP_S if self._files else inf
                oldest_s = min(oldest_s, self._live[0].since_s if self._live else inf)
                due_s = oldest_s + times.wait_s
                if due_s > now_s + 1e-12:
                    if due_s != self._timer_s:
                        self._timer_s = due_s
                        self.clock.at(due_s, self._advance)
                    return
        live: list[Stream] = []
        files: list[tuple[Stream, Work]] = []
        while len(live) + len(files) < times.max_rows and (self._live or self._files):
            if self._live and (not self._files or self._live[0].since_s <= self._files[0][0].since_s):
                live.append(self._live.popleft())
            else:
                files.append(self._files.popleft())
        size_s = times.chunk_s if self.live_callers else times.bulk_s
        rows = len(live) + len(files)
        self._start(times.chunk.seconds(rows, rows * size_s), lambda: self._stepped(live, files))

    def _stepped(self, live: list[Stream], files: list[tuple[Stream, Work]]) -> None:
        now_s = self.clock.now_s
        done: list[Action] = []
        for stream in live:
            stream.chunks -= 1
            if stream.chunks:
                stream.since_s = now_s
                self._live.append(stream)
            elif stream.ended:
                self._open -= 1
                done.append(stream.on_done)
        for stream, work in files:
            stream.chunks -= 1
            if stream.chunks:
                stream.since_s = now_s + FILE_HANDICAP_S
                self._files.append((stream, work))
            else:
                self._open -= 1
                self.queued_audio_s -= work.audio_s
                done.append(work.on_done)
        for action in done:
            action()
        self._advance()


class SpeechReplica(Replica):
    """Replica of a voice model: one sentence after another."""

    def __init__(self, clock: VirtualClock, machine: SharedCores, times: SpeechModelTimes) -> None:
        super().__init__(clock, machine)
        self._cost: StepCost = times.speak
        self._queue: deque[Work] = deque()

    def submit(self, work: Work) -> None:
        self.queued_audio_s += work.audio_s
        self._queue.append(work)
        self._advance()

    def cancel(self, work: Work) -> None:
        work.on_done = _nothing

    def _advance(self) -> None:
        if self.running or not self._queue:
            return
        work = self._queue.popleft()

        def spoken() -> None:
            self.queued_audio_s -= work.audio_s
            work.on_done()
            self._advance()

        self._start(self._cost.seconds(1, work.audio_s), spoken)


def _nothing() -> None:
    """Result that nobody waits for any more."""
