"""Executor of streaming models, for streams, which arrive chunk by chunk, and for utterances, which arrive whole."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from asr_serve.decoding.biasing_list import StreamingBiasingList
from asr_serve.decoding.language_model.token_models import TokenLanguageModel, choose_language_model
from asr_serve.engine.executor import CheckThrottle, LoopContext, StepGuard
from asr_serve.engine.request import RecognitionRequest, StreamChunk, reject, resolve
from asr_serve.engine.session_snapshot import SessionSnapshot, SessionSnapshotView
from asr_serve.engine.streaming.biasing_compiler import StreamBiasingCompiler
from asr_serve.engine.streaming.model_runner import ChunkedModelRunner, StreamingSession, StreamingStepOutput
from asr_serve.engine.streaming.offload import MAX_OFFLOADS_PER_STEP, OffloadStore, StreamOffloader
from asr_serve.engine.streaming.request import ReplayAudioBudget, StreamRequest, stream_state_lost, to_recognition
from asr_serve.engine.streaming.slot_queue import LIVE_SLOTS_DIVISOR, MAX_WAIT_S, MAX_WAITING, SlotQueue
from asr_serve.errors import Cancelled, OptionError
from asr_serve.types import LanguageModelChoice, Priority, SearchResult


class StreamingExecutor:
    """Executor of a streaming model: owns its runner and all streams. See engine/executor.ModelExecutor."""

    def __init__(
        self,
        runner: ChunkedModelRunner,
        shares: Mapping[Priority, float],
        on_done: Callable[[int], None],
        on_start: Callable[[list[int]], None],
        *,
        tiers: OffloadStore | None = None,
        offload_after_s: float = 10.0,
        replay: bool = False,
        compile_hotwords: Callable[[str], StreamingBiasingList] | None = None,
        language_models: Mapping[str, TokenLanguageModel] = MappingProxyType({}),
    ) -> None:
        """`shares`: share of slots of each class while several wait. `tiers`: where callers' streams are offloaded
        after `offload_after_s` without audio; None: never. `replay`: the tiers may lose a stream, which is then
        replayed from its retained audio. `compile_hotwords`: for the search; None: it takes none. `language_models`:
        those of the search by name."""
        self.model_runner, self.device = runner, runner.device
        self._offloader, self._replays = StreamOffloader(tiers, offload_after_s), replay
        self._on_done, self._on_start = on_done, on_start
        self._streams: dict[int, StreamRequest] = {}
        self._failures: dict[int, Exception] = {}
        """Errors of streams that failed while they had no chunk to reject. Each rejects the stream's next chunk; it is
        dropped when the stream is closed."""
        self._replay_budget = ReplayAudioBudget(self._streams, self._offloader.offloaded)
        self._stream_by_session: dict[StreamingSession, int] = {}
        self._waiting = SlotQueue(shares)
        """Streams and utterances with audio that wait for a slot; without offloading, all that have no slot."""
        self._recordings = 0
        """Number of utterances that have a slot."""
        self._biasing, self._language_models = (
            StreamBiasingCompiler(compile_hotwords, self._fail_stream),
            language_models,
        )
        self._check_throttle = CheckThrottle()

    def attach(self, context: LoopContext) -> None:
        self._context = context
        self._offloader.attach(context)
        self._biasing.attach(context)

    @property
    def due_s(self) -> float | None:
        due_ms, longest = self.model_runner.due_ms, self._waiting.longest_waiting
        due_s = [
            None if due_ms is None else due_ms / 1_000,
            None if longest is None else longest[1] + MAX_WAIT_S,
            self._offloader.due_s(self._slots_wanted),
        ]
        return min((due for due in due_s if due is not None), default=None)

    @property
    def idle(self) -> bool:
        return True

    def check(self) -> None:
        states = self.model_runner.states
        assert states.used == len(self._stream_by_session), "a slot was lost"
        if not self._check_throttle(states.slots + len(self._streams)):
            return
        states.check()
        with_slot, waiting = set(self._stream_by_session.values()), set(self._waiting)
        assert len(with_slot) == len(self._stream_by_session), "a stream has two slots"
        assert with_slot.isdisjoint(waiting), "a stream with a slot waits for one"
        busy = {number for number, stream in self._streams.items() if stream.utterance or stream.pending_chunks}
        inactive = self._streams.keys() - busy
        assert busy <= with_slot | waiting <= self._streams.keys(), (
            "a stream with chunks neither has a slot nor waits for one"
        )
        self._offloader.check_invariants(inactive & with_slot, inactive - with_slot - waiting)
        self._replay_budget.check()

    def shutdown(self, error: Exception) -> None:
        remaining = list(self._streams.values())
        try:
            for number in list(self._streams):
                self._remove_stream(number)
        finally:
            self._failures.clear()
            for stream in remaining:
                self._reject(stream, error)
            self._biasing.close()

    def cached_audio(self) -> list[bytes]:
        return []

    def watch_audio(self, on_change: Callable[[bytes, bool], None]) -> None:
        """Does nothing: no audio is cached."""

    def report(self) -> dict[str, int]:
        states = self.model_runner.states
        pages = {"pages": states.slots, "pages_used": states.used}
        return {"waiting": len(self._waiting), "decoding": len(self._stream_by_session), **pages}

    def describe(self) -> dict[str, Any]:
        slots = {"slots": self.model_runner.states.slots, "slots_used": self.model_runner.states.used}
        return slots | {"streams_offloaded": len(self._offloader.offloaded)}

    # --- utterances --------------------------------------------------------------------------------------

    def submit(self, utterance: RecognitionRequest) -> None:
        stream = StreamRequest(utterance.priority, utterance.priority == "live", utterance)
        try:
            self._set_language_model(stream)
        except OptionError as error:
            self._reject(stream, error)
            return
        self._streams[utterance.id] = stream
        self._waiting.enqueue(utterance.id, stream.priority)
        self._biasing.compile(utterance.id, stream)

    def cancel(self, request_id: int) -> None:
        self._fail_stream(request_id, Cancelled("the request was cancelled"))

    def expedite(self, request_id: int, within_ms: int) -> None:
        """Does nothing: chunks are processed in the order in which they came."""

    # --- streams -----------------------------------------------------------------------------------------

    def open_stream(
        self,
        number: int,
        live: bool,
        samples: int | None = None,
        saved: SessionSnapshot | None = None,
        words: bool = False,
        bias: str = "",
        language_model: LanguageModelChoice | None = None,
    ) -> None:
        """Opens a caller's stream. `samples`: the most that will come. `saved`: its snapshot, from here or from
        another engine of the same model. `words`: chunks may be timed. `bias`, `language_model`: as in
        SearchOptions. Raises ValueError for a snapshot that cannot be continued, and UnsupportedOption where it has a
        language model that is not loaded; without a snapshot the first chunk is rejected with that error."""
        stream = StreamRequest(
            "live",
            live,
            samples=samples,
            retain_audio=self._replays,
            words=words,
            bias=bias,
            language_model=language_model,
        )
        try:
            self._set_language_model(stream)
        except OptionError as error:
            if saved is not None:
                raise  # the stream may go on elsewhere
            self._failures[number] = error
            return
        if saved is not None and (session_view := stream.load_state(saved)) is not None:
            self._validate_saved(stream, session_view)
            if self._offloader.enabled and self._offloader.offload(number, session_view):
                stream.saved_session = None  # so that any number of offloaded streams can move here
        self._streams[number] = stream
        self._replay_budget.add(stream)
        if not self._offloader.enabled:  # then a stream has its slot from the start, in order of arrival
            self._waiting.enqueue(number, "live")
        self._biasing.compile(number, stream)

    def _set_language_model(self, stream: StreamRequest) -> None:
        """Sets the loaded model of the stream's choice. Raises UnsupportedOption."""
        stream.language_model = choose_language_model(self._language_models, stream.language_model_choice)

    def export_stream(self, number: int) -> SessionSnapshot | None:
        """Removes a stream, all of whose chunks are answered, and returns its snapshot. None: the stream had no audio,
        lost its state, or failed; then its audio, if any, must be sent again from the start."""
        if self._failures.pop(number, None) is not None:
            return None
        session_view = (stream := self._streams[number]).saved_session
        assert not stream.pending_chunks, "a stream is exported while it has chunks"
        if stream.session is not None and stream.session.audio_buffer.samples:
            session_view = self._saved_state(number, stream.session)
        elif number in self._offloader.offloaded:
            session_view = self._offloader.read_blocking(number)
        saved = stream.save_state(session_view) if session_view is not None or stream.replay_audio else None
        self._remove_stream(number)
        return saved

    def append_audio(self, chunk: StreamChunk) -> None:
        stream = self._streams.get(chunk.session)
        if stream is None:
            reject(chunk.future, self._failures.pop(chunk.session, Cancelled("the stream was closed")))
            return
        stream.pending_chunks.append(chunk)
        if stream.session is not None:
            self._offloader.mark_active(chunk.session)
            self._advance_stream(chunk.session)
        elif len(stream.pending_chunks) == 1:
            self._enqueue_for_slot(chunk.session, stream)

    def close_stream(self, number: int) -> None:
        """Closes a stream at any time; its pending chunks raise Cancelled. Idempotent."""
        self._fail_stream(number, Cancelled("the stream was closed"))
        self._failures.pop(number, None)

    # --- a step ------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Assigns slots to waiting streams, and steps a chunk of each ready session if a step is due."""
        self._offloader.expire_reads()
        self._assign_slots()
        offloaded = self._offload_idle()
        self._refuse_overdue()
        started, runner = time.perf_counter(), self.model_runner
        if not (running := runner.schedule(1_000 * time.monotonic())):
            return offloaded

        def fail(error: Exception) -> None:
            for session in running:
                self._fail_stream(self._stream_by_session[session], error)

        outputs: list[StreamingStepOutput] = []
        with StepGuard(self._context.stats, "chunk", "processing a chunk", fail):
            outputs = runner.step(running, 1_000 * time.monotonic())
        for session, result in outputs:
            number = self._stream_by_session[session]
            self._streams[number].add_found(result)
            self._advance_stream(number)
        rows = len(running)
        self._context.stats.record_step("chunk", time.perf_counter() - started, rows, rows / runner.max_rows)
        return True

    def _assign_slots(self) -> None:
        """Assigns slots to waiting streams, and to utterances as many as fit in one step: more would only delay each
        other, and callers."""
        reserved = self.model_runner.states.slots // LIVE_SLOTS_DIVISOR if self._context.live_sessions else 0
        while len(self._waiting) and (free := self._free_slots):
            live_only = self._recordings >= self.model_runner.max_rows or free <= reserved
            allowed: tuple[Priority, ...] = ("live",) if live_only else ("live", "interactive", "bulk")
            number = self._waiting.pop(allowed, self._offloader.restoring.keys() | self._biasing.waiting_streams)
            if number is None:
                return
            stream = self._streams[number]
            session = stream.session = self._open_session(number, stream)
            self._stream_by_session[session] = number
            if stream.utterance is not None:
                self._recordings += 1
                self._start_utterance(session, stream.utterance)
            else:
                self._resume_session(number, stream, session)
            self._advance_stream(number)

    def _resume_session(self, number: int, stream: StreamRequest, session: StreamingSession) -> None:
        """Restores the state of a stream that had a session before, or replays its audio."""
        snapshot, stream.saved_session = stream.saved_session, None
        with self._isolate_failure(number):
            if snapshot is not None:
                self._restore_session(number, session, snapshot)
            elif stream.not_replayable:
                self._fail_stream(number, stream_state_lost())
            else:
                for pcm in stream.restart_replay():
                    self._append_to_session(session, pcm, last=False)
        if number in self._streams:
            self._offloader.restored(number)

    def _enqueue_for_slot(self, number: int, stream: StreamRequest) -> None:
        """Enqueues a stream with audio for a slot, and reads its state if it was offloaded."""
        self._waiting.enqueue(number, "live", time.monotonic() if stream.live else None)
        if self._waiting.count("live") > MAX_WAITING:
            self._fail_stream(number, self._waiting.at_capacity(self.model_runner.states.slots))
        elif number in self._offloader.offloaded:
            self._offloader.prefetch(number, self._on_restored)

    def _on_restored(self, number: int, snapshot: SessionSnapshotView | None) -> None:
        """Sets the snapshot that was read for a stream; None: its state is lost."""
        stream = self._streams[number]
        with contextlib.suppress(ValueError):  # this engine wrote it: faulty storage is a lost state
            if snapshot is not None:
                self._validate_saved(stream, snapshot)
                stream.saved_session = snapshot
        if stream.saved_session is None:
            self._context.stats.record_recompute()
            if not stream.replay_audio:
                self._fail_stream(number, stream_state_lost())

    def _refuse_overdue(self) -> None:
        """Refuses streams that have waited for a slot for too long."""
        while (longest := self._waiting.longest_waiting) and longest[1] + MAX_WAIT_S <= time.monotonic():
            self._fail_stream(longest[0], self._waiting.at_capacity(self.model_runner.states.slots))

    def _start_utterance(self, session: StreamingSession, utterance: RecognitionRequest) -> None:
        assert utterance.pcm is not None
        utterance.encode_start_ns = time.time_ns()
        waited_s = max(0, utterance.encode_start_ns - utterance.submitted_ns) / 1e9
        self._context.stats.record_queue_time(utterance.priority, waited_s)
        self._on_start([utterance.id])
        with self._isolate_failure(utterance.id):
            self._append_to_session(session, utterance.pcm, last=True)
            utterance.pcm = None

    def _append_to_session(self, session: StreamingSession, pcm: np.ndarray, last: bool) -> None:
        now_ms = 1_000 * time.monotonic()
        self.model_runner.append_audio(session, pcm, now_ms)
        if last:
            self.model_runner.finish_audio(session, now_ms)

    def _advance_stream(self, number: int) -> None:
        """Answers what can be answered, and feeds the next chunk when the session has consumed the first one."""
        if (stream := self._streams.get(number)) is None or (session := stream.session) is None:
            return
        with self._isolate_failure(number):
            while stream.pending_chunks and session.ready_since_ms is None and not stream.answer_requested:
                if not stream.first_chunk_fed:
                    self._replay_budget.append_audio(stream, stream.pending_chunks[0].pcm)
                    self._append_to_session(session, stream.pending_chunks[0].pcm, stream.pending_chunks[0].last)
                    stream.first_chunk_fed = True
                    continue
                stream.answer_requested = True
                self._request_answer(number, stream, session)
                if number not in self._streams:
                    return
            if stream.utterance is not None and session.finished:
                self._finish_utterance(number, stream.utterance, session, stream.take_result(session, timed=True))

    def _request_answer(self, number: int, stream: StreamRequest, session: StreamingSession) -> None:
        """Answers the first chunk, whose audio was all processed."""
        result = stream.take_result(session, stream.pending_chunks[0].with_times)
        if session.finished:
            self._context.stats.record_recognition(session.audio_buffer.samples, stream.emitted_tokens)
        self._emit_answer(number, stream, session, result)

    def _emit_answer(self, number: int, stream: StreamRequest, session: StreamingSession, result: Any) -> None:
        stream.first_chunk_fed = stream.answer_requested = False
        chunk = stream.pending_chunks.popleft()
        if session.finished:
            self._remove_stream(number)
        elif not stream.pending_chunks:
            self._offloader.mark_idle(number)
        resolve(chunk.future, result)

    def _isolate_failure(self, number: int) -> StepGuard:
        """Context in which an error fails one stream only."""
        return StepGuard(self._context.stats, "chunk", "recognition", lambda error: self._fail_stream(number, error))

    def _finish_utterance(
        self, number: int, utterance: RecognitionRequest, session: StreamingSession, result: SearchResult
    ) -> None:
        answer = to_recognition(utterance, result, self.model_runner.model.frame_samples, session.hypotheses)
        self._remove_stream(number)
        self._on_done(utterance.samples)
        self._context.stats.record_recognition(utterance.samples, len(answer.tokens))
        resolve(utterance.future, answer)

    # --- offload -----------------------------------------------------------------------------------------

    @property
    def _slots_wanted(self) -> bool:
        """Returns whether a stream waits for a slot that could be assigned."""
        wants = self._waiting.waiting_priorities(self._offloader.restoring.keys() | self._biasing.waiting_streams)
        return "live" in wants or (bool(wants) and self._recordings < self.model_runner.max_rows)

    def _offload_idle(self) -> bool:
        """Offloads idle streams, a few at a time, and assigns their slots."""
        offloaded = False
        for _ in range(MAX_OFFLOADS_PER_STEP):
            if (number := self._offloader.next_to_offload(self._slots_wanted)) is None:
                break
            offloaded |= self._offload_stream(number)
            self._assign_slots()
        return offloaded

    def _offload_stream(self, number: int) -> bool:
        """Offloads one stream; returns False when there is no room."""
        session = (stream := self._streams[number]).session
        assert session is not None
        waiting = ((other, self._streams[other]) for other in self._waiting)
        if session.audio_buffer.samples and not self._offloader.offload(
            number, self._saved_state(number, session), waiting
        ):
            return False
        self._release_session(number, stream, session)
        return True

    def _saved_state(self, number: int, session: StreamingSession) -> SessionSnapshotView:
        """Snapshot of a session, without a copy."""
        return self.model_runner.saved_view(session)

    def _validate_saved(self, stream: StreamRequest, snapshot: SessionSnapshotView) -> None:
        """Raises ValueError for a snapshot from which its session cannot continue."""
        self.model_runner.validate_saved(snapshot)

    def _restore_session(self, number: int, session: StreamingSession, snapshot: SessionSnapshotView) -> None:
        self.model_runner.restore_session(session, snapshot, 1_000 * time.monotonic())

    # --- endings -----------------------------------------------------------------------------------------

    @property
    def _free_slots(self) -> int:
        """Number of slots that may be assigned."""
        return self.model_runner.free_sessions

    def _open_session(self, number: int, stream: StreamRequest) -> StreamingSession:
        return self.model_runner.open_session(
            live=stream.live, words=stream.words, biasing=stream.biasing, language_model=stream.language_model
        )

    def _remove_stream(self, number: int) -> StreamRequest:
        """Removes a stream and frees all its resources."""
        stream = self._streams.pop(number)
        self._replay_budget.remove(stream)
        self._waiting.remove(number, stream.priority)
        if stream.session is not None:
            self._release_session(number, stream, stream.session)
        self._offloader.forget(number)
        self._biasing.cancel(number)
        return stream

    def _release_session(self, number: int, stream: StreamRequest, session: StreamingSession) -> None:
        """Closes the stream's session and frees its slot."""
        self._offloader.mark_active(number)
        self._recordings -= stream.utterance is not None
        stream.session = None
        del self._stream_by_session[session]
        self.model_runner.close_session(session)

    def _fail_stream(self, number: int, error: Exception) -> None:
        """Removes a stream, if it is still open, and rejects its pending chunks; of a caller's stream without any, the
        next."""
        if number in self._streams:
            stream = self._remove_stream(number)
            if stream.utterance is None and not stream.pending_chunks:
                self._failures[number] = error
            self._reject(stream, error)

    def _reject(self, stream: StreamRequest, error: Exception) -> None:
        if stream.utterance is not None:
            self._on_done(stream.utterance.samples)
            reject(stream.utterance.future, error)
        while stream.pending_chunks:
            reject(stream.pending_chunks.popleft().future, error)
