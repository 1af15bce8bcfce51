"""The work of a model whose encoder carries state and whose decoder does not: utterances that grow.

While somebody speaks, the encoder hears each chunk once, and what the decoder needs of its frames goes straight
into pages. A hypothesis is a row that reads those pages: it decodes all of the utterance so far, with the
hypothesis before as its draft, so that it costs a pass and the few tokens that are new. Nothing is encoded twice,
and nothing is copied. Whole utterances go the way of engine/utterances, beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from asr_serve.decoding.seq2seq import Recognition
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

RESERVED_SLOTS = 4
"""One in so many pages is not given to audio that grows: rows need some to decode it."""
EMPTY_RECOGNITION = Recognition(tokens=(), avg_logprob=0.0, temperature=0.0, finish="stop", compression_ratio=1.0)
"""Of a stream whose first frame is yet to come."""


class EncoderFrameStore:
    """Where each session's frames go: what a wrapper takes for its search."""

    def __init__(
        self, model: IncrementalEncoderDecoderModel, runner: DecodeRunner, slots: int, longest: int
    ) -> None:
        """`longest`: frames of an utterance; those past them are dropped."""
        self._model, self._runner = model, runner
        self.max_frames = pages_for(longest)
        """Pages."""
        self._tables = torch.zeros(slots + 1, self.max_frames, dtype=torch.int32)
        self._limits = torch.zeros(slots + 1, dtype=torch.int64)

    def assign_pages(self, row: int, pages: list[int]) -> None:
        """To the session at that row of the state, for as many of its frames as they hold."""
        self._tables[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self._limits[row] = len(pages) * PAGE

    @torch.inference_mode()
    def clear_positions(self, row: int, positions: Iterable[int]) -> None:
        """Of the session at that row of the state: what somebody had there before is in nothing that is saved."""
        if len(at := torch.tensor(list(positions), device=self._runner.kv_cache.device)):
            layers, _, heads, block = self._runner.kv_cache.shape[1:]
            cross = self._runner.kv_cache.new_zeros(len(at), layers, 2, heads * block // PAGE)
            tables = self._tables[row].to(at.device).expand(len(at), -1).contiguous()
            self._runner.write_cross_kv(cross, tables, at)

    def state_specs(self) -> dict[str, StateSpec]:
        return {}

    @torch.inference_mode()
    def step(self, hidden: Tensor, chunk: StreamingChunk, state: State) -> list[SearchResult]:
        at = chunk.start_frames[:, None] + torch.arange(hidden.shape[1], device=hidden.device)
        rows = chunk.rows.cpu()
        new = at < torch.minimum(chunk.start_frames + chunk.frames, self._limits[rows].to(at.device))[:, None]
        positions = at[new]
        if len(positions):
            cross = self._model.cross_keys_values(self._model.add_positions(hidden[new], positions))
            tables = self._tables[rows].to(hidden.device)
            self._runner.write_cross_kv(cross, tables.repeat_interleave(new.sum(1), dim=0), positions)
        return [SearchResult([], [])] * len(hidden)

    def finish(self, row: int, state: State) -> list[NBestHypothesis]:
        return [NBestHypothesis([], 0.0)]


class IncrementalEncoderExecutor(StreamingExecutor):
    """Owns whole utterances too. See engine/executor.ModelExecutor."""

    def __init__(
        self,
        wrapper: ChunkedModelRunner,
        frames: EncoderFrameStore,
        utterances: Seq2SeqExecutor,
        shares: Mapping[Priority, float],
        on_done: Callable[[int], None],
        on_start: Callable[[list[int]], None],
        **sleep: Any,
    ) -> None:
        """`frames`: what the wrapper has for its search. `sleep`: see Streams."""
        super().__init__(wrapper, shares, on_done, on_start, **sleep)
        self._frames, self._utterances = frames, utterances
        self._pages: dict[int, list[int]] = {}
        """Of those that have a slot."""
        self._owned_utterances = pages_for(utterances.model.max_tokens)
        """Pages that one hypothesis needs at most."""
        chunk, window = wrapper.sizes[0], wrapper.model.audio_window(wrapper.sizes[0])
        self._first, self._each = window.samples - window.left_samples, chunk * wrapper.model.frame_samples
        """Samples until a stream's first chunk is whole, and from one to the next."""

    def attach(self, keeper: LoopContext) -> None:
        super().attach(keeper)
        self._utterances.attach(keeper)

    @property
    def due_s(self) -> float | None:
        return min((due for due in (super().due_s, self._utterances.due_s) if due is not None), default=None)

    @property
    def idle(self) -> bool:
        return self._utterances.idle

    def check(self) -> None:
        super().check()
        assert self._utterances.borrowed_page_count == sum(map(len, self._pages.values())), (
            "a stream's pages were lost"
        )
        self._utterances.check()

    def shutdown(self, error: Exception) -> None:
        try:
            super().shutdown(error)
        finally:
            self._utterances.shutdown(error)

    def report(self) -> dict[str, int]:
        found = self._utterances.report()
        return {**found, "waiting": found["waiting"] + len(self._waiting)}

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), **self._utterances.describe()}

    def submit(self, utterance: RecognitionRequest) -> None:
        self._utterances.submit(utterance)

    def cancel(self, request_id: int) -> None:
        self._utterances.cancel(request_id)

    def step(self) -> bool:
        heard = super().step()
        return self._utterances.step() or heard

    # --- hypotheses --------------------------------------------------------------------------------------

    def _request_answer(self, number: int, stream: StreamRequest, session: StreamingSession) -> None:
        wanted = stream.pending_chunks[0].hypothesis
        if wanted is None:
            self._emit_answer(number, stream, session, SearchResult([], []))
        elif not (frames := min(self._visible_frames(session, wanted.samples), len(self._pages[number]) * PAGE)):
            self._emit_answer(number, stream, session, EMPTY_RECOGNITION)
        else:
            decoded: Future[Recognition] = Future()
            decoded.add_done_callback(lambda _: self._on_decoded(number, decoded))
            # A stream has one hypothesis under way at most, and its number is nobody else's.
            utterance = RecognitionRequest(
                number, None, wanted.samples, wanted.options, wanted.priority, decoded, wanted.draft
            )
            self._utterances.submit_encoded(utterance, BorrowedPages(self._pages[number], frames))

    def _visible_frames(self, session: StreamingSession, samples: int) -> int:
        """Frames of so many samples that a hypothesis may read: those of chunks that are whole with these samples,
        however many have come since; so it depends on the audio alone."""
        if session.finished:
            known = min(self.model_runner.model.count_frames(samples), session.audio_buffer.seen_frames)
        else:
            chunks = max(0, samples - self._first + self._each) // self._each
            known = min(chunks * self.model_runner.sizes[0], session.audio_buffer.seen_frames)
        return known

    def _on_decoded(self, number: int, decoded: Future[Recognition]) -> None:
        if (stream := self._streams.get(number)) is None:
            return  # it was dropped, and its hypothesis with it
        assert stream.session is not None
        error = decoded.exception()
        if error is not None:
            assert isinstance(error, Exception)
            self._fail_stream(number, error)
            return
        with self._isolate_failure(number):  # a future would swallow what goes wrong here
            self._emit_answer(number, stream, stream.session, decoded.result())
        self._advance_stream(number)

    # --- slots -------------------------------------------------------------------------------------------

    def _pages_needed(self, stream: StreamRequest) -> int:
        """Pages: reserved whole, as those of a row are."""
        if stream.samples is None:
            return self._frames.max_frames
        return min(self._frames.max_frames, pages_for(self.model_runner.model.count_frames(stream.samples)))

    @property
    def _free_slots(self) -> int:
        pages = self._utterances.decode_runner.page_pool
        kept = (
            pages.pages // RESERVED_SLOTS if self._pages else self._owned_utterances
        )  # in the smallest pool one has room
        left = pages.free_count - self._utterances.encoder_pool.reserved_pages - kept
        need = max(self._pages_needed(self._streams[number]) for number in self._waiting)
        return min(super()._free_slots, max(0, left) // need)

    def _open_session(self, number: int, stream: StreamRequest) -> StreamingSession:
        session = super()._open_session(number, stream)
        pages = self._pages[number] = self._utterances.decode_runner.page_pool.allocate(self._pages_needed(stream))
        self._utterances.borrowed_page_count += len(pages)
        self._frames.assign_pages(session.slot.row, pages)
        return session

    def _release_session(self, number: int, stream: StreamRequest, session: StreamingSession) -> None:
        super()._release_session(number, stream, session)
        self._utterances.cancel(number)  # nobody reads the pages from here on
        if (pages := self._pages.pop(number, None)) is not None:
            self._utterances.borrowed_page_count -= len(pages)
            self._utterances.decode_runner.page_pool.free_pages(pages)

    # --- sleep -------------------------------------------------------------------------------------------

    def _saved_state(self, number: int, session: StreamingSession) -> SessionSnapshotView:
        """With the pages that hold frames, behind the session's own parts."""
        numbers, parts = super()._saved_state(number, session)
        frames = min(session.audio_buffer.seen_frames, len(self._pages[number]) * PAGE)
        pages, pool = self._pages[number][: pages_for(frames)], self._utterances.decode_runner.kv_cache
        self._frames.clear_positions(session.slot.row, range(frames, len(pages) * PAGE))
        if not pool.is_cpu:  # from there it is one copy for all of them
            pool, pages = pool[torch.tensor(pages, device=pool.device)].cpu(), list(range(len(pages)))
        return SessionSnapshotView(numbers, [*parts, *(tensor_bytes(pool[page]) for page in pages)])

    def _validate_saved(self, stream: StreamRequest, held: SessionSnapshotView) -> None:
        session, pages = self._split_saved(held)
        seen = self.model_runner.validate_saved(session).seen_frames
        count, pool = (
            pages_for(min(seen, self._pages_needed(stream) * PAGE)),
            self._utterances.decode_runner.kv_cache,
        )
        sizes, page_bytes = [len(page) for page in pages], pool[0].nbytes
        if sizes != [page_bytes] * count:
            raise ValueError(f"saved pages of {sizes} bytes, where there are {count} of {page_bytes}")

    def _restore_session(self, number: int, session: StreamingSession, held: SessionSnapshotView) -> None:
        own, saved = self._split_saved(held)
        super()._restore_session(number, session, own)
        pool = self._utterances.decode_runner.kv_cache
        for page, part in zip(self._pages[number], saved, strict=False):
            copy_into_tensor(pool[page], part)

    def _split_saved(self, held: SessionSnapshotView) -> tuple[SessionSnapshotView, list[BytesLike]]:
        """A session's own; and its pages."""
        own = self.model_runner.part_sizes
        return SessionSnapshotView(held.header, held.parts[:own]), list(held.parts[own:])
