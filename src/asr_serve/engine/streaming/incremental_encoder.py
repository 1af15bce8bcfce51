"""Executor of models whose encoder carries state and whose decoder does not, for utterances that are still spoken.

While a caller speaks, the encoder processes each chunk once, and the cross-attention keys and values of its frames
are written directly into pages. A hypothesis is a row that reads those pages: it decodes the whole utterance so
far with the previous hypothesis as its draft, so that it costs one pass and the few new tokens. Nothing is encoded
twice, and nothing is copied. Whole utterances go through engine/seq2seq, beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asr_serve.decoding.hypothesis import Recognition
from asr_serve.engine.executor import LoopContext
from asr_serve.engine.request import RecognitionRequest
from asr_serve.engine.seq2seq.decode_batch import pages_for
from asr_serve.engine.seq2seq.decoder import DecodeRunner
from asr_serve.engine.seq2seq.encoder import BorrowedPages
from asr_serve.engine.seq2seq.executor import Seq2SeqExecutor
from asr_serve.engine.session_snapshot import BytesLike, SessionSnapshotView
from asr_serve.engine.state_cache import copy_into_tensor, tensor_bytes
from asr_serve.engine.streaming.executor import StreamingExecutor
from asr_serve.engine.streaming.model_runner import ChunkedModelRunner, StreamingSession
from asr_serve.engine.streaming.request import StreamRequest
from asr_serve.kernels import PAGE
from asr_serve.models.interfaces import (
    IncrementalEncoderDecoderModel,
    NBestHypothesis,
    SearchResult,
    State,
    StateSpec,
    StreamingChunk,
)
from asr_serve.types import Priority

RESERVED_PAGES_DIVISOR = 4
"""Share of pages, one in this many, that growing audio may not use: rows need some to decode it."""
EMPTY_RECOGNITION = Recognition(tokens=(), avg_logprob=0.0, temperature=0.0, finish="stop", compression_ratio=1.0)
"""Hypothesis of a stream without frames."""


class EncoderFrameStore:
    """Store of each session's encoder frames; takes the place of the runner's search."""

    def __init__(
        self, model: IncrementalEncoderDecoderModel, runner: DecodeRunner, slots: int, max_frames: int
    ) -> None:
        """`max_frames`: of an utterance; later ones are dropped."""
        self._model, self._runner = model, runner
        self.max_pages = pages_for(max_frames)
        """Maximum pages of an utterance."""
        self._tables = torch.zeros(slots + 1, self.max_pages, dtype=torch.int32)
        self._limits = torch.zeros(slots + 1, dtype=torch.int64)
        """Frames for which the session at each row of the state has pages."""

    def assign_pages(self, row: int, pages: list[int]) -> None:
        """Assigns pages to the session at a row of the state; it stores as many frames as they hold."""
        self._tables[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self._limits[row] = len(pages) * PAGE

    @torch.inference_mode()
    def clear_positions(self, row: int, positions: Iterable[int]) -> None:
        """Zeroes positions of the session at a row of the state, so that saved pages hold nothing of earlier ones."""
        if len(indices := torch.tensor(list(positions), device=self._runner.kv_cache.device)):
            layers, _, heads, block = self._runner.kv_cache.shape[1:]
            cross = self._runner.kv_cache.new_zeros(len(indices), layers, 2, heads * block // PAGE)
            tables = self._tables[row].to(indices.device).expand(len(indices), -1).contiguous()
            self._runner.write_cross_kv(cross, tables, indices)

    def state_specs(self) -> dict[str, StateSpec]:
        return {}

    @torch.inference_mode()
    def step(self, hidden: Tensor, chunk: StreamingChunk, state: State) -> list[SearchResult]:
        frames = chunk.start_frames[:, None] + torch.arange(hidden.shape[1], device=hidden.device)
        rows = chunk.rows.cpu()
        ends = torch.minimum(chunk.start_frames + chunk.frames, self._limits[rows].to(frames.device))
        new = frames < ends[:, None]
        positions = frames[new]
        if len(positions):
            cross = self._model.cross_keys_values(self._model.add_positions(hidden[new], positions))
            tables = self._tables[rows].to(hidden.device)
            self._runner.write_cross_kv(cross, tables.repeat_interleave(new.sum(1), dim=0), positions)
        return [SearchResult([], [])] * len(hidden)

    def finish(self, row: int, state: State) -> list[NBestHypothesis]:
        return [NBestHypothesis([], 0.0)]


class IncrementalEncoderExecutor(StreamingExecutor):
    """Executor of streams, which are encoded as they arrive, and of whole utterances. See ModelExecutor."""

    def __init__(
        self,
        runner: ChunkedModelRunner,
        frames: EncoderFrameStore,
        seq2seq: Seq2SeqExecutor,
        shares: Mapping[Priority, float],
        on_done: Callable[[int], None],
        on_start: Callable[[list[int]], None],
        **offload: Any,
    ) -> None:
        """`frames`: the runner's search. `seq2seq`: for whole utterances, and rows of hypotheses. `offload`: options of
        StreamingExecutor."""
        super().__init__(runner, shares, on_done, on_start, **offload)
        self._frames, self._seq2seq = frames, seq2seq
        self._pages: dict[int, list[int]] = {}
        """Pages of the streams that have a slot."""
        self._max_token_pages = pages_for(seq2seq.model.max_tokens)
        """Maximum pages of the tokens of one hypothesis."""
        chunk, window = runner.sizes[0], runner.model.audio_window(runner.sizes[0])
        self._first_chunk_samples = window.samples - window.left_samples
        """Samples until a stream's first chunk is complete."""
        self._chunk_samples = chunk * runner.model.frame_samples
        """Samples from one chunk to the next."""

    def attach(self, context: LoopContext) -> None:
        super().attach(context)
        self._seq2seq.attach(context)

    @property
    def due_s(self) -> float | None:
        return min((due for due in (super().due_s, self._seq2seq.due_s) if due is not None), default=None)

    @property
    def idle(self) -> bool:
        return self._seq2seq.idle

    def check(self) -> None:
        super().check()
        assert self._seq2seq.borrowed_page_count == sum(map(len, self._pages.values())), "a stream's pages were lost"
        self._seq2seq.check()

    def shutdown(self, error: Exception) -> None:
        try:
            super().shutdown(error)
        finally:
            self._seq2seq.shutdown(error)

    def report(self) -> dict[str, int]:
        counters = self._seq2seq.report()
        return {**counters, "waiting": counters["waiting"] + len(self._waiting)}

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), **self._seq2seq.describe()}

    def submit(self, utterance: RecognitionRequest) -> None:
        self._seq2seq.submit(utterance)

    def cancel(self, request_id: int) -> None:
        self._seq2seq.cancel(request_id)

    def expedite(self, request_id: int, within_ms: int) -> None:
        self._seq2seq.expedite(request_id, within_ms)

    def step(self) -> bool:
        stepped = super().step()
        return self._seq2seq.step() or stepped

    # --- hypotheses --------------------------------------------------------------------------------------

    def _request_answer(self, number: int, stream: StreamRequest, session: StreamingSession) -> None:
        request = stream.pending_chunks[0].hypothesis
        if request is None:
            self._emit_answer(number, stream, session, SearchResult([], []))
        elif not (frames := min(self._visible_frames(session, request.samples), len(self._pages[number]) * PAGE)):
            self._emit_answer(number, stream, session, EMPTY_RECOGNITION)
        else:
            decoded: Future[Recognition] = Future()
            decoded.add_done_callback(partial(self._on_decoded, number))
            # A stream has at most one hypothesis in flight, so its number can be the request's id.
            utterance = RecognitionRequest(
                number, None, request.samples, request.options, request.priority, decoded, request.draft
            )
            self._seq2seq.submit_encoded(utterance, BorrowedPages(self._pages[number], frames))

    def _visible_frames(self, session: StreamingSession, samples: int) -> int:
        """Frames that a hypothesis of the first `samples` samples may read: those of chunks that these samples
        complete, however many arrived since, so that the result depends on the audio alone."""
        if session.finished:
            frames = self.model_runner.model.count_frames(samples)
        else:
            chunks = max(0, samples - self._first_chunk_samples + self._chunk_samples) // self._chunk_samples
            frames = chunks * self.model_runner.sizes[0]
        return min(frames, session.audio_buffer.seen_frames)

    def _on_decoded(self, number: int, decoded: Future[Recognition]) -> None:
        if (stream := self._streams.get(number)) is None:
            return  # the stream was closed
        assert stream.session is not None
        error = decoded.exception()
        if error is not None:
            assert isinstance(error, Exception)
            self._fail_stream(number, error)
            return
        with self._isolate_failure(number):  # a future's callback would swallow errors
            self._emit_answer(number, stream, stream.session, decoded.result())
        self._advance_stream(number)

    # --- slots -------------------------------------------------------------------------------------------

    def _pages_needed(self, stream: StreamRequest) -> int:
        """Pages that a stream reserves at its start, as rows do: one at least."""
        if stream.samples is None:
            return self._frames.max_pages
        return min(self._frames.max_pages, max(1, pages_for(self.model_runner.model.count_frames(stream.samples))))

    @property
    def _free_slots(self) -> int:
        pages = self._seq2seq.decode_runner.page_pool
        # The first stream leaves room for one hypothesis alone, so that it fits into the smallest pool.
        reserved = pages.pages // RESERVED_PAGES_DIVISOR if self._pages else self._max_token_pages
        available = pages.free_count - self._seq2seq.encoder_pool.reserved_pages - reserved
        need = max(self._pages_needed(self._streams[number]) for number in self._waiting)
        return min(super()._free_slots, max(0, available) // need)

    def _open_session(self, number: int, stream: StreamRequest) -> StreamingSession:
        session = super()._open_session(number, stream)
        pages = self._pages[number] = self._seq2seq.decode_runner.page_pool.allocate(self._pages_needed(stream))
        self._seq2seq.borrowed_page_count += len(pages)
        self._frames.assign_pages(session.slot.row, pages)
        return session

    def _release_session(self, number: int, stream: StreamRequest, session: StreamingSession) -> None:
        super()._release_session(number, stream, session)
        self._seq2seq.cancel(number)  # before the pages are freed
        if (pages := self._pages.pop(number, None)) is not None:
            self._seq2seq.borrowed_page_count -= len(pages)
            self._seq2seq.decode_runner.page_pool.free_pages(pages)

    # --- offload -----------------------------------------------------------------------------------------

    def _saved_state(self, number: int, session: StreamingSession) -> SessionSnapshotView:
        """Snapshot of a session, followed by the pages that hold its frames."""
        header, parts = super()._saved_state(number, session)
        frames = min(session.audio_buffer.seen_frames, len(self._pages[number]) * PAGE)
        pages, pool = self._pages[number][: pages_for(frames)], self._seq2seq.decode_runner.kv_cache
        self._frames.clear_positions(session.slot.row, range(frames, len(pages) * PAGE))
        if not pool.is_cpu:  # one copy from the device for all pages
            pool, pages = pool[torch.tensor(pages, device=pool.device)].cpu(), list(range(len(pages)))
        return SessionSnapshotView(header, [*parts, *(tensor_bytes(pool[page]) for page in pages)])

    def _validate_saved(self, stream: StreamRequest, snapshot: SessionSnapshotView) -> None:
        session, pages = self._split_snapshot(snapshot)
        seen_frames = self.model_runner.validate_saved(session).seen_frames
        count = pages_for(min(seen_frames, self._pages_needed(stream) * PAGE))
        sizes, page_bytes = [len(page) for page in pages], self._seq2seq.decode_runner.kv_cache[0].nbytes
        if sizes != [page_bytes] * count:
            raise ValueError(f"a snapshot has pages of {sizes} bytes; it must have {count} of {page_bytes}")

    def _restore_session(self, number: int, session: StreamingSession, snapshot: SessionSnapshotView) -> None:
        own, saved = self._split_snapshot(snapshot)
        super()._restore_session(number, session, own)
        pool = self._seq2seq.decode_runner.kv_cache
        for page, part in zip(self._pages[number], saved, strict=False):
            copy_into_tensor(pool[page], part)

    def _split_snapshot(self, snapshot: SessionSnapshotView) -> tuple[SessionSnapshotView, list[BytesLike]]:
        """Splits a snapshot into the session's own parts and its pages."""
        own = self.model_runner.part_count
        return SessionSnapshotView(snapshot.header, snapshot.parts[:own]), list(snapshot.parts[own:])
