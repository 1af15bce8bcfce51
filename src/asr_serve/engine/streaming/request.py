"""Stream: what it has received and returned, and its snapshot for another engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from asr_serve.decoding.biasing_list import StreamingBiasingList
from asr_serve.decoding.hypothesis import Recognition, RecognitionHypothesis
from asr_serve.decoding.language_model.token_models import SessionLanguageModel
from asr_serve.engine.request import RecognitionRequest, StreamChunk
from asr_serve.engine.session_snapshot import SessionSnapshot, SessionSnapshotView, decode_header
from asr_serve.engine.streaming.model_runner import StreamingSession
from asr_serve.engine.streaming.token_aligner import searched_run
from asr_serve.errors import StepFailed
from asr_serve.text.word_timing import token_times_from_frames
from asr_serve.types import EngineTimestamps, LanguageModelChoice, NBestHypothesis, Priority, SearchResult, SearchToken

MAX_REPLAY_SAMPLES = 600 * 16_000
"""Maximum audio of a stream retained for replay. Pipelines start a new stream long before."""
MAX_REPLAY_BYTES = 256 << 20
"""Maximum retained audio of all streams: more than an hour, and as much as the default `host_bytes`."""
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _SavedStream(NamedTuple):
    """Header of a saved stream. The first part is its retained audio; the others are those of its session."""

    session: bytes | None
    """Header of its session; None: the stream has to be replayed."""
    fixed: list[SearchToken]
    tail: list[SearchToken]
    emitted: Count
    has_replay: bool
    """Whether the first part contains all processed audio."""
    timed_tokens: Count = 0


def to_recognition(
    utterance: RecognitionRequest, found: SearchResult, frame_samples: int, nbest: Sequence[NBestHypothesis]
) -> Recognition:
    """Builds the recognition of an utterance whose search has just finished. `nbest`: its hypotheses, the best, which
    ends `found`, first."""
    now_ns = time.time_ns()
    logprobs = tuple(token.logprob for token in found.fixed_tokens)
    return Recognition(
        tokens=tuple(token.id for token in found.fixed_tokens),
        avg_logprob=sum(logprobs) / max(1, len(logprobs)),
        temperature=0.0,
        finish="stop",
        compression_ratio=1.0,
        logprobs=logprobs,
        times=tuple(token_times_from_frames(found.token_runs, frame_samples, utterance.samples)),
        phases=EngineTimestamps(utterance.submitted_ns, utterance.encode_start_ns, now_ns, now_ns),
        hypotheses=_nbest_list(utterance, found, frame_samples, nbest) if utterance.options.hypotheses > 1 else (),
    )


def _nbest_list(
    utterance: RecognitionRequest, found: SearchResult, frame_samples: int, nbest: Sequence[NBestHypothesis]
) -> tuple[RecognitionHypothesis, ...]:
    """N-best list of an utterance. Times of the tokens that hypotheses do not share are those of the search's
    frames."""
    shared = len(found.fixed_tokens) - len(nbest[0].tokens)
    hypotheses = []
    for each in nbest[: utterance.options.hypotheses]:
        tokens = [*found.fixed_tokens[:shared], *each.tokens]
        runs = found.token_runs
        if runs and each is not nbest[0]:
            runs = [*runs[:shared], *map(searched_run, each.tokens)]
        hypotheses.append(
            RecognitionHypothesis(
                tuple(token.id for token in tokens),
                each.logprob + each.gain,
                tuple(token.logprob for token in tokens),
                tuple(token_times_from_frames(runs, frame_samples, utterance.samples)),
            )
        )
    return tuple(hypotheses)


def stream_state_lost() -> StepFailed:
    """Error of a stream whose state was lost and whose audio was not retained."""
    return StepFailed("the state of an offloaded stream was lost", todo="start the stream again")


class StreamRequest:
    """Stream of a caller, or a whole utterance. It has a session once it has audio and a slot is free."""

    def __init__(
        self,
        priority: Priority,
        live: bool,
        utterance: RecognitionRequest | None = None,
        samples: int | None = None,
        *,
        retain_audio: bool = False,
        words: bool = False,
        bias: str = "",
        language_model: LanguageModelChoice | None = None,
    ) -> None:
        """`priority`: for a slot. `live`: for steps. `samples`: the most that will come, if known. `retain_audio`:
        for replay. `words`: token times may be requested. `bias`, `language_model`: as in
        SearchOptions."""
        self.words = words if utterance is None else utterance.options.words
        self.bias = bias if utterance is None else utterance.options.bias
        self.language_model_choice = language_model if utterance is None else utterance.options.language_model
        self.language_model: SessionLanguageModel | None = None
        """The loaded model of that choice."""
        self.biasing: StreamingBiasingList | None = None
        """Compiled `bias`, once it is ready."""
        self.timed_tokens = 0
        """Tokens whose times were returned."""
        self.priority, self.live, self.utterance, self.samples = priority, live, utterance, samples
        self.session: StreamingSession | None = None
        self.pending_chunks: deque[StreamChunk] = deque()
        """Chunks that are not answered yet."""
        self.first_chunk_fed = self.answer_requested = False
        """Whether the session received the first pending chunk; and whether, after it processed that, an answer was
        requested."""
        self.fixed: list[SearchToken] = []
        """Fixed tokens since the last result: all, for an utterance."""
        self.tail: list[SearchToken] = []
        """Tokens after the fixed ones, which may still change."""
        self.emitted_tokens = 0
        """Tokens that were returned."""
        self.saved_session: SessionSnapshotView | None = None
        """Snapshot from which its next session continues."""
        self._retain_audio = retain_audio
        self.replay_audio: list[np.ndarray] | None = [] if retain_audio else None
        """All audio that its sessions received, for replay; None: not retained."""
        self._samples = 0
        """Samples that its sessions received, retained or not."""
        self._replayed_tokens = 0
        """Tokens that the replay has still to repeat: they were returned before."""

    @property
    def replay_bytes(self) -> int:
        """Bytes of retained audio."""
        return 0 if self.replay_audio is None else 4 * self._samples

    @property
    def not_replayable(self) -> bool:
        """Returns whether the stream has processed audio that was not retained."""
        return self.replay_audio is None and self._samples > 0

    def append_replay_audio(self, pcm: np.ndarray) -> None:
        """Retains audio that a session receives, up to MAX_REPLAY_SAMPLES."""
        self._samples += len(pcm)
        if self._samples > MAX_REPLAY_SAMPLES:
            self.replay_audio = None
        elif self.replay_audio is not None and len(pcm):
            self.replay_audio.append(pcm.copy())  # the caller may reuse its memory

    def restart_replay(self) -> list[np.ndarray]:
        """Resets the result of a lost session and returns the audio that a new one must process first."""
        self.fixed, self.tail, self._replayed_tokens = [], [], self.emitted_tokens
        return self.replay_audio or []

    def add_found(self, found: SearchResult) -> None:
        """Adds the result of a step, without replayed tokens that were returned before."""
        new = found.fixed_tokens[self._replayed_tokens :]
        self._replayed_tokens -= len(found.fixed_tokens) - len(new)
        self.fixed += new
        self.tail = found.tail_tokens

    def take_result(self, session: StreamingSession, timed: bool) -> SearchResult:
        """Returns the result since the last call; with the best ending, if the session has finished. `timed`: with
        token times."""
        if session.finished:
            self.add_found(SearchResult(session.hypotheses[0].tokens, []))
        runs: list[tuple[int, int]] = []
        if timed and session.aligner is not None:
            runs = session.aligner.token_runs(self.tail[0].frame if self.tail else None)[self.timed_tokens :]
            self.timed_tokens += len(runs)
        result, self.fixed = SearchResult(self.fixed, self.tail, runs), []
        self.emitted_tokens += len(result.fixed_tokens)
        return result

    def save_state(self, session_view: SessionSnapshotView | None) -> SessionSnapshot:
        """Snapshot of the stream. `session_view`: its session's snapshot; None: it has none and is to be replayed."""
        session = None if session_view is None else session_view.header
        header = _SavedStream(
            session, self.fixed, self.tail, self.emitted_tokens, self.replay_audio is not None, self.timed_tokens
        )
        audio = b"".join(pcm.tobytes() for pcm in self.replay_audio or ())
        return SessionSnapshot(
            msgspec.msgpack.encode(header), (audio, *map(bytes, session_view.parts if session_view else ()))
        )

    def load_state(self, saved: SessionSnapshot) -> SessionSnapshotView | None:
        """Restores the stream and returns its session's snapshot, not yet validated; the inverse of `save_state`.
        Raises ValueError."""
        header = decode_header(_SavedStream, saved.header)
        if not saved.parts or len(saved.parts[0]) % 4 or len(saved.parts[0]) > 4 * MAX_REPLAY_SAMPLES:
            raise ValueError("a snapshot of a stream has no part of retained audio, or one of another size")
        if header.session is None and not header.has_replay:
            raise ValueError("a snapshot of a stream has neither its session nor its audio")
        self.fixed, self.tail = header.fixed, header.tail
        self.emitted_tokens, self.timed_tokens = header.emitted, header.timed_tokens
        audio, *parts = map(bytes, saved.parts)  # copied, because the owner of the memory may reuse it
        needed = header.has_replay and (self._retain_audio or header.session is None)
        self.replay_audio = [np.frombuffer(audio, np.float32)] if needed else None
        self._samples = len(audio) // 4
        self.saved_session = None if header.session is None else SessionSnapshotView(header.session, parts)
        return self.saved_session


class ReplayAudioBudget:
    """Limit on the audio that all streams together retain for replay."""

    def __init__(self, streams: Mapping[int, StreamRequest], offloaded: Iterable[int]) -> None:
        """`streams`: all streams. `offloaded`: the offloaded ones, longest first."""
        self._streams, self._offloaded = streams, offloaded
        self.nbytes = 0

    def add(self, stream: StreamRequest) -> None:
        """Adds a stream."""
        self.nbytes += stream.replay_bytes
        self._evict()

    def remove(self, stream: StreamRequest) -> None:
        """Removes a stream."""
        self.nbytes -= stream.replay_bytes

    def append_audio(self, stream: StreamRequest, pcm: np.ndarray) -> None:
        """Retains audio that the stream's session receives."""
        self.nbytes -= stream.replay_bytes
        stream.append_replay_audio(pcm)
        self.add(stream)

    def _evict(self) -> None:
        """Drops retained audio until the limit holds: first of the streams offloaded longest, which may never
        continue."""
        while self.nbytes > MAX_REPLAY_BYTES:
            offloaded = (self._streams[number] for number in self._offloaded)
            stream = next((candidate for candidate in offloaded if candidate.replay_bytes), None)
            stream = stream or max(self._streams.values(), key=_eviction_order)
            self.remove(stream)
            stream.replay_audio = None

    def check(self) -> None:
        nbytes = sum(stream.replay_bytes for stream in self._streams.values())
        assert self.nbytes == nbytes <= MAX_REPLAY_BYTES, "the bytes of retained audio were miscounted"


def _eviction_order(stream: StreamRequest) -> tuple[bool, bool, int]:
    """Sort key; the greatest is evicted: a stream with state, which may never need its audio, and among these the one
    with the most."""
    has_state = stream.session is not None or stream.saved_session is not None
    return stream.replay_bytes > 0, has_state, stream.replay_bytes
