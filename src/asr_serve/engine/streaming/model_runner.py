"""Runner of a streaming model over many sessions: chunks of all ready sessions run as one batch.

One session at a time is the default, and the reference: batches must give the same numbers and text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from asr_serve.decoding.biasing_list import BiasingSearch, StreamingBiasingList
from asr_serve.decoding.language_model.scorer import RescoringSearch
from asr_serve.decoding.language_model.token_models import SessionLanguageModel
from asr_serve.devices.interface import Device
from asr_serve.engine.session_snapshot import BytesLike, SessionSnapshot, SessionSnapshotView, decode_header
from asr_serve.engine.state_cache import StateCacheManager, StateSlot, state_row_bytes, tensor_bytes
from asr_serve.engine.streaming.audio_buffer import AudioBuffer, ChunkAudioPosition
from asr_serve.engine.streaming.search_router import add_prefix, select_prefix
from asr_serve.engine.streaming.token_aligner import SavedAlignment, StreamTokenAligner, compact_posteriors
from asr_serve.models.interfaces import (
    NBestHypothesis,
    RowValidatingSearch,
    SearchResult,
    StatefulSearch,
    StateSpec,
    StreamingChunk,
    StreamingEncoder,
    StreamingModel,
    StreamingSearch,
)

MAX_BATCH_ROWS = 64
"""Maximum sessions in one step."""
WAIT_MS = 10.0
"""Maximum time that a ready session waits for others."""
MAX_BATCH_WAIT_MS = 1_000.0
"""Delay of recordings in the order of ready sessions: their audio is all there already."""
BULK_FRAMES = 32
"""Encoder frames per step of a recording while no caller is live. The state of every session has room for them."""
LIVE_IDLE_MS = 5_000.0
"""Time without audio from live callers after which none counts as speaking."""


class StreamingSession:
    """Session of one stream through the model. Belongs to its runner."""

    def __init__(
        self,
        slot: StateSlot,
        audio: AudioBuffer,
        live: bool,
        aligner: StreamTokenAligner | None,
        biasing: StreamingBiasingList | None = None,
        language_model: SessionLanguageModel | None = None,
    ) -> None:
        self.slot, self.audio_buffer, self.live, self.aligner, self.biasing = slot, audio, live, aligner, biasing
        self.ready_since_ms: float | None = None
        """Time at which its next chunk became complete; None: it is not."""
        self.finished = False
        """Whether its last frame was processed."""
        self.hypotheses: list[NBestHypothesis] = []
        """Hypotheses of a finished session, best first."""
        self.language_model = language_model

    @property
    def biasing_digest(self) -> bytes:
        """Digest of its hotwords and its language model; empty without either."""
        words = self.biasing.digest if self.biasing is not None else b""
        return words if self.language_model is None else words + self.language_model.digest


class StreamingStepOutput(NamedTuple):
    """Result of a step for one session."""

    session: StreamingSession
    result: SearchResult


class _SavedSession(NamedTuple):
    """Header of a saved session. Its parts: a row of each state tensor; the queued audio; the frames for alignment;
    and, where the search has state outside its rows, that state as bytes and a tensor."""

    layout: bytes
    """Digest of model, search and state shapes; rows are compatible where it is equal."""
    position: ChunkAudioPosition
    hypotheses: Annotated[list[NBestHypothesis], msgspec.Meta(max_length=1_024)]
    """Hypotheses of a finished session, one or more."""
    alignment: SavedAlignment | None
    biasing: bytes = b""
    """Digest of its hotwords and its language model."""


class _StepInput(NamedTuple):
    """Inputs of a step in host memory, see StreamingChunk."""

    pcm: Tensor
    start_frames: Tensor
    frames: Tensor
    end_samples: Tensor


class _StepBatch:
    """Input buffers of all steps, so that inputs of any shape use the same memory."""

    def __init__(self, rows: int, samples: int) -> None:
        """`rows`, `samples`: of the largest step."""
        self._pcm = torch.zeros(rows * samples)
        self._numbers = torch.zeros(3, rows, dtype=torch.int64)

    def fill(self, rows: int, samples: int, sessions: Sequence[StreamingSession], frames: Sequence[int]) -> _StepInput:
        """Fills `rows` rows from the sessions; the rows after them are empty."""
        inputs = _StepInput(
            self._pcm[: rows * samples].view(rows, samples), *(buffer[:rows] for buffer in self._numbers)
        )
        pcm, starts, counts, ends = (buffer.numpy() for buffer in inputs)
        for row, (session, count) in enumerate(zip(sessions, frames, strict=True)):
            audio = session.audio_buffer
            audio.read_window(pcm[row])
            starts[row], counts[row], ends[row] = audio.seen_frames, count, audio.end_samples
        starts[len(sessions) :] = counts[len(sessions) :] = ends[len(sessions) :] = 0
        pcm[len(sessions) :] = 0.0
        return inputs


class ChunkedModelRunner:
    """Runs the sessions of one streaming model. Belongs to one thread.

    Ready sessions run in batches. A ready session waits for others, `wait_ms` at most, unless all sessions are
    ready or the step is full. Recordings take many chunks at once while most of their audio remains.
    """

    def __init__(
        self,
        model: StreamingEncoder,
        search: StreamingSearch,
        device: Device,
        *,
        slots: int,
        chunk: int,
        kv_bytes: int | None = None,
        use_chunked_inference: bool = False,
        max_rows: int = MAX_BATCH_ROWS,
        wait_ms: float = WAIT_MS,
        bulk_frames: int | None = None,
        aligns: bool = False,
        graphs: bool = True,
        poison: bool = False,
    ) -> None:
        """`chunk`: encoder frames of a step, a multiple of the model's block. `kv_bytes`: memory for the sessions'
        state; limits `slots` where it is not enough. `bulk_frames`: maximum frames, over all rows, of a step of
        many chunks; None: as many as the device needs to be busy. `aligns`: the search runs over the model's head
        `ctc`. `graphs`: capture steps, on a device that can. `poison`: see StateCacheManager."""
        assert chunk % model.frame_block == 0, f"chunks of {chunk} frames are not whole blocks of {model.frame_block}"
        self.model, self.search, self.device = model, search, device
        self._ctc: StreamingModel | None = None
        if aligns:
            assert isinstance(model, StreamingModel), "tokens are aligned by the head ctc, which this model has not"
            self._ctc = model
        self.chunked, self.wait_ms = use_chunked_inference, wait_ms
        self.sizes = (chunk, max(1, BULK_FRAMES // chunk) * chunk)
        self._windows = {size: model.audio_window(size).samples for size in self.sizes}
        for size, samples in self._windows.items():
            assert samples >= size * model.frame_samples, "a window is shorter than the step to the next one"
        encoder, search_specs = model.state_specs(self.sizes[-1]), search.state_specs()
        audio = StateSpec((self._windows[self.sizes[-1]],), initial_value=None, on_host=True)
        specs = {"audio": audio, **add_prefix("encoder", encoder), **add_prefix("search", search_specs)}
        if kv_bytes is not None:
            slots = max(1, min(slots, kv_bytes // state_row_bytes(specs)))
        self.max_rows = min(max_rows, slots) if self.chunked else 1
        self._bulk_rows = max(1, (bulk_frames or device.encode_frames) // self.sizes[-1])
        self.states = StateCacheManager(specs, slots, device.torch_device, poison=poison)
        kind = type(model).__module__, type(search).__name__
        facts = [*kind, model.session_layout, self._windows, list(specs.items())]
        self._layout = hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()
        self._stateful_search = search if isinstance(search, StatefulSearch) else None
        self._row_validating_search = search if isinstance(search, RowValidatingSearch) else None
        self._biasing_search = search if isinstance(search, BiasingSearch) else None
        self._rescoring_search = search if isinstance(search, RescoringSearch) else None
        self._encoder = select_prefix("encoder", self.states.tensors)
        self._search = select_prefix("search", self.states.tensors)
        self._sessions: set[StreamingSession] = set()
        self._ready: set[StreamingSession] = set()
        self._last_live_audio_ms = -LIVE_IDLE_MS
        """Time of the last audio of a live caller."""
        self._batch = _StepBatch(self._padded_rows(self.max_rows), self._windows[self.sizes[-1]])
        self._shapes: set[tuple[int, int]] = set()
        """Shapes (rows, frames) of earlier steps."""
        self._forward = device.capture(self._step) if graphs else self._step

    # --- sessions --------------------------------------------------------------------------------------

    def open_session(
        self,
        *,
        live: bool = True,
        words: bool = False,
        biasing: StreamingBiasingList | None = None,
        language_model: SessionLanguageModel | None = None,
    ) -> StreamingSession:
        """Opens a session. `words`: token times will be requested. `biasing`: compiled hotwords. Raises
        AtCapacity."""
        slot = self.states.allocate()
        row = self.states.tensors["audio"][slot.row]
        row.zero_()
        audio = AudioBuffer(row, self.model.audio_window(self.sizes[0]))
        aligner, fusion = (
            StreamTokenAligner() if words else None,
            None if language_model is None else language_model.fusion,
        )
        session = StreamingSession(slot, audio, live, aligner, biasing, language_model)
        if self._biasing_search is not None:
            self._biasing_search.set_biasing(slot.row, biasing, fusion)
        else:
            assert biasing is None, "hotwords for a search that takes none"
            if self._rescoring_search is not None:
                self._rescoring_search.set_language_model(slot.row, fusion)
            else:
                assert fusion is None, "a language model for a search that takes none"
        self._sessions.add(session)
        return session

    def append_audio(self, session: StreamingSession, pcm: np.ndarray, now_ms: float) -> None:
        """Appends `pcm` (n,) float32 at 16 kHz, any n. Unprocessed audio is queued without a bound:
        the caller must limit it."""
        if session.live:
            self._last_live_audio_ms = now_ms
        session.audio_buffer.append(pcm)
        self._update_readiness(session, now_ms)

    def finish_audio(self, session: StreamingSession, now_ms: float) -> None:
        """Ends the audio: the rest is ready, however short."""
        session.audio_buffer.ended = True
        self._update_readiness(session, now_ms)

    def close_session(self, session: StreamingSession) -> None:
        """Closes a session at any time and frees its slot."""
        self._sessions.remove(session)
        self._ready.discard(session)
        if self._stateful_search is not None:
            self._stateful_search.free(session.slot.row)
        if self._biasing_search is not None:
            self._biasing_search.set_biasing(session.slot.row, None)
        self.states.free(session.slot)

    def _update_readiness(self, session: StreamingSession, now_ms: float) -> None:
        audio = session.audio_buffer
        if audio.ended and audio.seen_frames >= self.model.count_frames(audio.samples):
            session.finished = True
            if not audio.seen_frames:
                self.states.prepare_rows([session.slot])  # it never ran: its row is not cleared yet
            session.hypotheses = self.search.finish(session.slot.row, self._search)
            if session.aligner is not None:
                session.aligner.append_step(session.hypotheses[0].tokens, None)
        if not session.finished and (
            audio.ended or audio.has_window(self._windows[self.sizes[0]], self.model.frame_samples)
        ):
            self._ready.add(session)
            if session.ready_since_ms is None:
                session.ready_since_ms = now_ms
        else:
            self._ready.discard(session)
            session.ready_since_ms = None

    @property
    def free_sessions(self) -> int:
        """Number of sessions that may still be opened."""
        return self.states.slots - self.states.used

    # --- saved sessions --------------------------------------------------------------------------------

    def save_session(self, session: StreamingSession) -> SessionSnapshot:
        """Snapshot of a session between two steps; `load_session` continues from it with identical results."""
        return self.saved_view(session).to_snapshot()

    def saved_view(self, session: StreamingSession) -> SessionSnapshotView:
        """Snapshot without a copy, valid until the session's next step."""
        audio, row = session.audio_buffer, session.slot.row
        aligner = session.aligner
        frames = b"" if aligner is None else aligner.frames.tobytes()
        parts: list[BytesLike] = [
            *self.states.export_parts(session.slot),
            tensor_bytes(torch.from_numpy(audio.unbuffered)),
            frames,
        ]
        if self._stateful_search is not None:
            search_state, tensor = self._stateful_search.export_state(row)
            parts += [memoryview(search_state), tensor_bytes(tensor)]
        alignment = None if aligner is None else aligner.saved
        header = _SavedSession(self._layout, audio.position, session.hypotheses, alignment, session.biasing_digest)
        return SessionSnapshotView(msgspec.msgpack.encode(header), parts)

    @property
    def part_count(self) -> int:
        """Number of parts of a saved session."""
        return len(self.states.specs) + (2 if self._stateful_search is None else 4)

    def validate_saved(self, saved: SessionSnapshot | SessionSnapshotView) -> ChunkAudioPosition:
        """Validates a snapshot and returns its audio position. Raises ValueError for another model or other sizes;
        the contents of rows are not checked: `restore_session` does that."""
        header, rows = decode_header(_SavedSession, saved.header), len(self.states.specs)
        if header.layout != self._layout or len(saved.parts) != self.part_count:
            raise ValueError("a snapshot of another model, or of this one with other settings")
        self.states.check_parts(saved.parts[:rows])
        blank = AudioBuffer(self.states.tensors["audio"][-1], self.model.audio_window(self.sizes[0]))
        blank.validate(header.position, saved.parts[rows], self.model.frame_samples)
        self._load_aligner(header, saved.parts[rows + 1])
        if header.hypotheses and not header.position.ended:
            raise ValueError("a snapshot has final hypotheses, but its audio has not ended")
        return header.position

    @staticmethod
    def _load_aligner(header: _SavedSession, frames: BytesLike) -> StreamTokenAligner | None:
        """Aligner of a saved session; None: it has none. Raises ValueError."""
        if header.alignment is not None:
            return StreamTokenAligner(header.alignment, frames, header.position.seen_frames)
        if len(frames):
            raise ValueError("a snapshot has frames for alignment, but no alignment")
        return None

    def load_session(
        self,
        saved: SessionSnapshot | SessionSnapshotView,
        live: bool,
        now_ms: float = 0.0,
        biasing: StreamingBiasingList | None = None,
        language_model: SessionLanguageModel | None = None,
    ) -> StreamingSession:
        """Opens a session from a snapshot. Raises AtCapacity, and ValueError as `validate_saved` and
        `restore_session` do."""
        self.validate_saved(saved)
        session = self.open_session(live=live, biasing=biasing, language_model=language_model)
        try:
            self.restore_session(session, saved, now_ms)
        except ValueError:
            self.close_session(session)
            raise
        return session

    def restore_session(
        self, session: StreamingSession, saved: SessionSnapshot | SessionSnapshotView, now_ms: float
    ) -> None:
        """Restores a snapshot into a new session, which must be closed if this raises. Raises ValueError, also for a
        row of state that the search cannot have written: a step of many sessions would fail with it."""
        header, rows = decode_header(_SavedSession, saved.header), len(self.states.specs)
        if header.biasing != session.biasing_digest:
            raise ValueError("a snapshot of a session with other hotwords, or another language model")
        self.states.import_parts(session.slot, saved.parts[:rows])
        if self._row_validating_search is not None:
            self._row_validating_search.validate_row(session.slot.row, self._search)
        session.audio_buffer.restore(header.position, saved.parts[rows])
        if self._stateful_search is not None:
            search_parts: list[BytesLike] = list(saved.parts[rows + 2 :])
            seen_frames, device = header.position.seen_frames, self.device.torch_device
            self._stateful_search.import_state(
                session.slot.row, bytes(search_parts[0]), bytes(search_parts[1]), seen_frames, device
            )
        session.aligner = self._load_aligner(header, saved.parts[rows + 1])
        session.hypotheses, session.finished = header.hypotheses, bool(header.hypotheses)
        if not session.finished:
            self._update_readiness(session, now_ms)

    # --- steps -----------------------------------------------------------------------------------------

    @property
    def due_ms(self) -> float | None:
        """Time of the next step, on the clock of `append_audio`; None when no session is ready."""
        if not self._ready:
            return None
        since = min(self._oldest_ready_ms(session) for session in self._ready)
        full = not self.chunked or len(self._ready) >= min(self.max_rows, len(self._sessions))
        return since if full else since + self.wait_ms

    def schedule(self, now_ms: float) -> list[StreamingSession]:
        """Returns the sessions of the next step, all with the same number of frames; none before it is due."""
        if (due_ms := self.due_ms) is None or now_ms < due_ms:
            return []
        first, *others = sorted(self._ready, key=self._urgency)
        size = self._step_frames(first, now_ms)
        fits = [session for session in others if self._step_frames(session, now_ms) == size]
        rows = self.max_rows if size == self.sizes[0] else min(self.max_rows, self._bulk_rows)
        return [first, *fits[: rows - 1]]

    @staticmethod
    def _oldest_ready_ms(session: StreamingSession) -> float:
        assert session.ready_since_ms is not None
        return session.ready_since_ms

    def _urgency(self, session: StreamingSession) -> tuple[float, int]:
        return self._oldest_ready_ms(session) + (0.0 if session.live else MAX_BATCH_WAIT_MS), session.slot.row

    def _step_frames(self, session: StreamingSession, now_ms: float) -> int:
        """Frames per step for a session: many for recordings while no caller is live. The remainder of a recording
        takes a long step if it fills more than half of it."""
        short, bulk = self.sizes[0], self.sizes[-1]
        if session.live or now_ms - self._last_live_audio_ms < LIVE_IDLE_MS:
            return short
        if session.audio_buffer.ended:
            return bulk if 2 * self._remaining_frames(session) > bulk else short
        return bulk if session.audio_buffer.has_window(self._windows[bulk], self.model.frame_samples) else short

    def step(self, sessions: Sequence[StreamingSession], now_ms: float) -> list[StreamingStepOutput]:
        """Processes a chunk of the sessions that `schedule` returned. After an error their state is invalid."""
        size = min(self._step_frames(session, now_ms) for session in sessions)
        frames = [min(size, self._remaining_frames(session)) for session in sessions]
        rows, samples = self._padded_rows(len(sessions)), self._windows[size]
        if (rows, size) not in self._shapes:
            self._capture_graph(rows, samples)
            self._shapes.add((rows, size))
        inputs = self._batch.fill(rows, samples, sessions, frames)
        results = self._advance(inputs, self.states.prepare_rows([each.slot for each in sessions], rows), sessions)
        for session, count in zip(sessions, frames, strict=True):
            session.audio_buffer.advance_frames(count, self.model.frame_samples)
            session.ready_since_ms = None  # its next chunk comes after the sessions that are ready now
            self._update_readiness(session, now_ms)
        return [StreamingStepOutput(session, each) for session, each in zip(sessions, results, strict=True)]

    def _remaining_frames(self, session: StreamingSession) -> int:
        """Frames that remain of ended audio; the most of a step while it goes on."""
        audio = session.audio_buffer
        return self.model.count_frames(audio.samples) - audio.seen_frames if audio.ended else self.sizes[-1]

    def _padded_rows(self, sessions: int) -> int:
        """Rows of a step of this many sessions, padded as the device requires."""
        return min(self.device.padded_rows(sessions), self.states.slots + 1)

    @torch.inference_mode()
    def _capture_graph(self, rows: int, samples: int) -> None:
        """Captures a new step shape with padding rows only, because the first call of a captured step runs more
        than once."""
        if self._forward != self._step:
            pcm, *numbers = self._batch.fill(rows, samples, [], [])
            self._forward(pcm, self.states.prepare_rows([], rows), *numbers)

    @torch.inference_mode()
    def _advance(self, inputs: _StepInput, rows: Tensor, sessions: Sequence[StreamingSession]) -> list[SearchResult]:
        pcm, *numbers = inputs
        (hidden,) = self._forward(pcm, rows, *numbers)
        n, device = len(sessions), self.device.torch_device
        chunk = StreamingChunk(pcm[:n], rows[:n], *(tensor[:n].to(device) for tensor in numbers))
        results = self.search.step(hidden[:n], chunk, self._search)
        self._collect_alignment(hidden, inputs.frames.tolist(), sessions, results)
        return results

    def _collect_alignment(
        self,
        hidden: Tensor,
        frames: Sequence[int],
        sessions: Sequence[StreamingSession],
        results: Sequence[SearchResult],
    ) -> None:
        """Collects frames and tokens for sessions whose token times will be requested."""
        aligned_rows = [row for row, session in enumerate(sessions) if session.aligner is not None]
        if not aligned_rows:
            return
        posteriors = (
            compact_posteriors(self._ctc.ctc_logprobs(hidden[aligned_rows]), self._ctc.blank_id)
            if self._ctc is not None
            else None
        )
        for i, row in enumerate(aligned_rows):
            aligner = sessions[row].aligner
            assert aligner is not None
            aligner.append_step(results[row].fixed_tokens, None if posteriors is None else posteriors[i, : frames[row]])

    def _step(self, *inputs: Tensor) -> tuple[Tensor]:
        return (
            self.model.step(StreamingChunk(*(part.to(self.device.torch_device) for part in inputs)), self._encoder),
        )
