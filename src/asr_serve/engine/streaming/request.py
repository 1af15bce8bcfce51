"""What the engine holds of one stream; and what of it goes to another engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from asr_serve.decoding.biasing_list import StreamingBiasingList
from asr_serve.decoding.seq2seq import Recognition
from asr_serve.engine.request import RecognitionRequest, StreamChunk
from asr_serve.engine.session_snapshot import SessionSnapshot, SessionSnapshotView, decode_header
from asr_serve.engine.streaming.model_runner import StreamingSession
from asr_serve.errors import StepFailed
from asr_serve.text.word_timing import token_times_from_frames
from asr_serve.types import EngineTimestamps, Priority, SearchResult, SearchToken

MAX_REPLAY_SAMPLES = 600 * 16_000
"""Of a stream, that are kept to be heard again. Pipelines begin another one long before."""
MAX_REPLAY_BYTES = 256 << 20
"""Of all streams together, that are kept for that: more than an hour. As much as `host_bytes` is by itself."""
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _SavedStream(NamedTuple):
    """Of a saved stream. Its first part is the audio that it has heard; the others are its session's."""

    session: bytes | None
    """Its numbers; None: it is to be heard again."""
    fixed: list[SearchToken]
    tail: list[SearchToken]
    emitted: Count
    has_replay: bool
    """The first part has all that was heard."""
    timed_tokens: Count = 0


def to_recognition(utterance: RecognitionRequest, found: SearchResult, frame_samples: int) -> Recognition:
    """The answer, now: all that was `found`."""
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
    )


def stream_state_lost() -> StepFailed:
    """There is nothing that it could go on from."""
    return StepFailed("what a sleeping stream had heard was lost", todo="begin it again")


class StreamRequest:
    """One of a caller, or an utterance. It has a session once it has something to hear and a slot is free."""

    def __init__(
        self,
        priority: Priority,
        live: bool,
        utterance: RecognitionRequest | None = None,
        samples: int | None = None,
        *,
        keeps: bool = False,
        words: bool = False,
        bias: str = "",
    ) -> None:
        """`priority`: for a slot. `live`: for steps. `samples`: the most that will come, if that is known.
        `keeps`: what it hears, should it have to be heard again. `words`: it may be asked when tokens were
        said. `bias`: its hot words, as SearchOptions has them."""
        self.words = words if utterance is None else utterance.options.words
        self.bias = bias if utterance is None else utterance.options.bias
        self.biasing: StreamingBiasingList | None = None
        """Of that, once they are ready."""
        self.timed_tokens = 0
        """Tokens of which that was told."""
        self.priority, self.live, self.utterance, self.samples = priority, live, utterance, samples
        self.session: StreamingSession | None = None
        self.pending_chunks: deque[StreamChunk] = deque()
        """Not yet answered."""
        self.first_chunk_fed = self.answer_requested = False
        """The first of them is in the session; and the session has taken all that it could."""
        self.fixed: list[SearchToken] = []
        """Of a caller: since the last answer. Of an utterance: all."""
        self.tail: list[SearchToken] = []
        self.emitted_tokens = 0
        """Tokens that were told."""
        self.saved_session: SessionSnapshotView | None = None
        """What its next session goes on from."""
        self._keep_replay = keeps
        self.replay_audio: list[np.ndarray] | None = [] if keeps else None
        """All that a session has taken, should it have to be heard again; None: that is not kept."""
        self._samples = self._replayed_tokens = 0
        """What they were; and tokens that come again, and were told."""

    @property
    def replay_bytes(self) -> int:
        """Of audio."""
        return 0 if self.replay_audio is None else 4 * self._samples

    @property
    def not_replayable(self) -> bool:
        """It has heard something, and that is not kept."""
        return self.replay_audio is None and self._samples > 0

    def append_replay_audio(self, pcm: np.ndarray) -> None:
        """A session takes it."""
        self._samples += len(pcm)
        if self._samples > MAX_REPLAY_SAMPLES:
            self.replay_audio = None
        elif self.replay_audio is not None and len(pcm):
            self.replay_audio.append(pcm.copy())  # whoever put it may use that memory again

    def restart_replay(self) -> list[np.ndarray]:
        """What a new session has to hear first, of one whose session was lost."""
        self.fixed, self.tail, self._replayed_tokens = [], [], self.emitted_tokens
        return self.replay_audio or []

    def add_found(self, found: SearchResult) -> None:
        """What a step found, but for what was told before it was lost."""
        new = found.fixed_tokens[self._replayed_tokens :]
        self._replayed_tokens -= len(found.fixed_tokens) - len(new)
        self.fixed += new
        self.tail = found.tail_tokens

    def take_result(self, session: StreamingSession, timed: bool) -> SearchResult:
        """Since the last time; the best ending, if there is one. `timed`: and when it was said."""
        if session.finished:
            self.add_found(SearchResult(session.hypotheses[0].tokens, []))
        runs: list[tuple[int, int]] = []
        if timed and session.aligner is not None:
            runs = session.aligner.token_runs(self.tail[0].frame if self.tail else None)[self.timed_tokens :]
            self.timed_tokens += len(runs)
        found, self.fixed = SearchResult(self.fixed, self.tail, runs), []
        self.emitted_tokens += len(found.fixed_tokens)
        return found

    def save_state(self, held: SessionSnapshotView | None) -> SessionSnapshot:
        """`held`: its session; None: it has none, and is to be heard again."""
        numbers = None if held is None else held.header
        told = _SavedStream(
            numbers, self.fixed, self.tail, self.emitted_tokens, self.replay_audio is not None, self.timed_tokens
        )
        heard = b"".join(each.tobytes() for each in self.replay_audio or ())
        return SessionSnapshot(msgspec.msgpack.encode(told), (heard, *map(bytes, held.parts if held else ())))

    def load_state(self, saved: SessionSnapshot) -> SessionSnapshotView | None:
        """The inverse: what its session goes on from, to be checked. Raises ValueError."""
        told = decode_header(_SavedStream, saved.header)
        if not saved.parts or len(saved.parts[0]) % 4 or len(saved.parts[0]) > 4 * MAX_REPLAY_SAMPLES:
            raise ValueError("a saved stream without the audio that it has heard")
        if told.session is None and not told.has_replay:
            raise ValueError("a saved stream of which nothing was kept")
        self.fixed, self.tail, self.emitted_tokens, self.timed_tokens = (
            told.fixed,
            told.tail,
            told.emitted,
            told.timed_tokens,
        )
        heard, *parts = map(bytes, saved.parts)  # whose memory they are in may take it back
        needed = told.has_replay and (self._keep_replay or told.session is None)
        self.replay_audio = [np.frombuffer(heard, np.float32)] if needed else None
        self._samples = len(heard) // 4
        self.saved_session = None if told.session is None else SessionSnapshotView(told.session, parts)
        return self.saved_session


class ReplayAudioBudget:
    """The audio that is kept of all streams, should they have to be heard again: so much, and no more."""

    def __init__(self, streams: Mapping[int, StreamRequest], asleep: Iterable[int]) -> None:
        """`streams`: all. `asleep`: those of them that sleep, the longest first."""
        self._streams, self._asleep = streams, asleep
        self.nbytes = 0

    def add(self, stream: StreamRequest) -> None:
        """It is one of them from here on."""
        self.nbytes += stream.replay_bytes
        self._evict()

    def remove(self, stream: StreamRequest) -> None:
        """It is not one of them any more."""
        self.nbytes -= stream.replay_bytes

    def append_audio(self, stream: StreamRequest, pcm: np.ndarray) -> None:
        """Its session takes it."""
        self.nbytes -= stream.replay_bytes
        stream.append_replay_audio(pcm)
        self.add(stream)

    def _evict(self) -> None:
        """Of who sleeps longest nothing is kept from here on: it may be that nobody ever calls it."""
        while self.nbytes > MAX_REPLAY_BYTES:
            asleep = (self._streams[number] for number in self._asleep)
            stream = next((each for each in asleep if each.replay_bytes), None)
            stream = stream or max(self._streams.values(), key=_dispensable)
            self.remove(stream)
            stream.replay_audio = None

    def check(self) -> None:
        kept = sum(stream.replay_bytes for stream in self._streams.values())
        assert self.nbytes == kept <= MAX_REPLAY_BYTES, "audio is kept that nobody counts"


def _dispensable(stream: StreamRequest) -> tuple[bool, bool, int]:
    """Who knows what it heard may never need the audio; of these, the longest."""
    knows = stream.session is not None or stream.saved_session is not None
    return stream.replay_bytes > 0, knows, stream.replay_bytes
