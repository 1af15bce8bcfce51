"""What the engine holds of one stream; and what of it goes to another engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from asr_serve.decoding.attention import Recognition
from asr_serve.decoding.hotwords import StreamWords
from asr_serve.engine.chunked.wrapper import Session
from asr_serve.engine.saved import Held, Saved, read
from asr_serve.engine.session import Piece, Utterance
from asr_serve.errors import StepFailed
from asr_serve.text.words import sounding
from asr_serve.types import Found, Phases, Priority, Token

MOST_AGAIN_SAMPLES = 600 * 16_000
"""Of a stream, that are kept to be heard again. Pipelines begin another one long before."""
MOST_KEPT_BYTES = 256 << 20
"""Of all streams together, that are kept for that: more than an hour. As much as `host_bytes` is by itself."""
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _Told(NamedTuple):
    """Of a saved stream. Its first part is the audio that it has heard; the others are its session's."""

    session: bytes | None
    """Its numbers; None: it is to be heard again."""
    fixed: list[Token]
    tail: list[Token]
    said: Count
    keeps: bool
    """The first part has all that was heard."""
    timed: Count = 0


def recognition(utterance: Utterance, found: Found, frame_samples: int) -> Recognition:
    """The answer, now: all that was `found`."""
    now_ns = time.time_ns()
    logprobs = tuple(token.logprob for token in found.fixed)
    return Recognition(
        tokens=tuple(token.id for token in found.fixed),
        avg_logprob=sum(logprobs) / max(1, len(logprobs)),
        temperature=0.0,
        finish="stop",
        compression_ratio=1.0,
        logprobs=logprobs,
        times=tuple(sounding(found.runs, frame_samples, utterance.samples)),
        phases=Phases(utterance.submitted_ns, utterance.encode_start_ns, now_ns, now_ns),
    )


def lost() -> StepFailed:
    """There is nothing that it could go on from."""
    return StepFailed("what a sleeping stream had heard was lost", todo="begin it again")


class Stream:
    """One of a caller, or an utterance. It has a session once it has something to hear and a slot is free."""

    def __init__(
        self,
        priority: Priority,
        live: bool,
        utterance: Utterance | None = None,
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
        self.hot: StreamWords | None = None
        """Of that, once they are ready."""
        self.timed = 0
        """Tokens of which that was told."""
        self.priority, self.live, self.utterance, self.samples = priority, live, utterance, samples
        self.session: Session | None = None
        self.pieces: deque[Piece] = deque()
        """Not yet answered."""
        self.begun = self.asked = False
        """The first of them is in the session; and the session has taken all that it could."""
        self.fixed: list[Token] = []
        """Of a caller: since the last answer. Of an utterance: all."""
        self.tail: list[Token] = []
        self.said = 0
        """Tokens that were told."""
        self.held: Held | None = None
        """What its next session goes on from."""
        self._keeps = keeps
        self.heard: list[np.ndarray] | None = [] if keeps else None
        """All that a session has taken, should it have to be heard again; None: that is not kept."""
        self._samples = self._again = 0
        """What they were; and tokens that come again, and were told."""

    @property
    def kept_bytes(self) -> int:
        """Of audio."""
        return 0 if self.heard is None else 4 * self._samples

    @property
    def spent(self) -> bool:
        """It has heard something, and that is not kept."""
        return self.heard is None and self._samples > 0

    def put(self, pcm: np.ndarray) -> None:
        """A session takes it."""
        self._samples += len(pcm)
        if self._samples > MOST_AGAIN_SAMPLES:
            self.heard = None
        elif self.heard is not None and len(pcm):
            self.heard.append(pcm.copy())  # whoever put it may use that memory again

    def begin_again(self) -> list[np.ndarray]:
        """What a new session has to hear first, of one whose session was lost."""
        self.fixed, self.tail, self._again = [], [], self.said
        return self.heard or []

    def hears(self, found: Found) -> None:
        """What a step found, but for what was told before it was lost."""
        new = found.fixed[self._again :]
        self._again -= len(found.fixed) - len(new)
        self.fixed += new
        self.tail = found.tail

    def told(self, session: Session, timed: bool) -> Found:
        """Since the last time; the best ending, if there is one. `timed`: and when it was said."""
        if session.over:
            self.hears(Found(session.guesses[0].tokens, []))
        runs: list[tuple[int, int]] = []
        if timed and session.evidence is not None:
            runs = session.evidence.runs(self.tail[0].frame if self.tail else None)[self.timed :]
            self.timed += len(runs)
        found, self.fixed = Found(self.fixed, self.tail, runs), []
        self.said += len(found.fixed)
        return found

    def saved(self, held: Held | None) -> Saved:
        """`held`: its session; None: it has none, and is to be heard again."""
        numbers = None if held is None else held.numbers
        told = _Told(numbers, self.fixed, self.tail, self.said, self.heard is not None, self.timed)
        heard = b"".join(each.tobytes() for each in self.heard or ())
        return Saved(msgspec.msgpack.encode(told), (heard, *map(bytes, held.parts if held else ())))

    def load(self, saved: Saved) -> Held | None:
        """The inverse: what its session goes on from, to be checked. Raises ValueError."""
        told = read(_Told, saved.numbers)
        if not saved.parts or len(saved.parts[0]) % 4 or len(saved.parts[0]) > 4 * MOST_AGAIN_SAMPLES:
            raise ValueError("a saved stream without the audio that it has heard")
        if told.session is None and not told.keeps:
            raise ValueError("a saved stream of which nothing was kept")
        self.fixed, self.tail, self.said, self.timed = told.fixed, told.tail, told.said, told.timed
        heard, *parts = map(bytes, saved.parts)  # whose memory they are in may take it back
        needed = told.keeps and (self._keeps or told.session is None)
        self.heard = [np.frombuffer(heard, np.float32)] if needed else None
        self._samples = len(heard) // 4
        self.held = None if told.session is None else Held(told.session, parts)
        return self.held


class Kept:
    """The audio that is kept of all streams, should they have to be heard again: so much, and no more."""

    def __init__(self, streams: Mapping[int, Stream], asleep: Iterable[int]) -> None:
        """`streams`: all. `asleep`: those of them that sleep, the longest first."""
        self._streams, self._asleep = streams, asleep
        self.nbytes = 0

    def add(self, stream: Stream) -> None:
        """It is one of them from here on."""
        self.nbytes += stream.kept_bytes
        self._make_room()

    def remove(self, stream: Stream) -> None:
        """It is not one of them any more."""
        self.nbytes -= stream.kept_bytes

    def put(self, stream: Stream, pcm: np.ndarray) -> None:
        """Its session takes it."""
        self.nbytes -= stream.kept_bytes
        stream.put(pcm)
        self.add(stream)

    def _make_room(self) -> None:
        """Of who sleeps longest nothing is kept from here on: it may be that nobody ever calls it."""
        while self.nbytes > MOST_KEPT_BYTES:
            asleep = (self._streams[number] for number in self._asleep)
            stream = next((each for each in asleep if each.kept_bytes), None)
            stream = stream or max(self._streams.values(), key=_dispensable)
            self.remove(stream)
            stream.heard = None

    def check(self) -> None:
        kept = sum(stream.kept_bytes for stream in self._streams.values())
        assert self.nbytes == kept <= MOST_KEPT_BYTES, "audio is kept that nobody counts"


def _dispensable(stream: Stream) -> tuple[bool, bool, int]:
    """Who knows what it heard may never need the audio; of these, the longest."""
    knows = stream.session is not None or stream.held is not None
    return stream.kept_bytes > 0, knows, stream.kept_bytes
