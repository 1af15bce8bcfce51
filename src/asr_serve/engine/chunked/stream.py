"""What the engine holds of one stream; and what of it goes to another engine."""

from __future__ import annotations

import time
from collections import deque
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from asr_serve.decoding.attention import Recognition
from asr_serve.engine.chunked.wrapper import Session
from asr_serve.engine.saved import Held, Saved, read
from asr_serve.engine.session import Piece, Utterance
from asr_serve.types import Found, Phases, Priority, Token

MOST_AGAIN_SAMPLES = 600 * 16_000
"""Of a stream, that are kept to be heard again. Pipelines begin another one long before."""
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


def recognition(utterance: Utterance, tokens: list[Token]) -> Recognition:
    """The answer, now."""
    now_ns = time.time_ns()
    logprobs = tuple(token.logprob for token in tokens)
    return Recognition(
        tokens=tuple(token.id for token in tokens),
        avg_logprob=sum(logprobs) / max(1, len(logprobs)),
        temperature=0.0,
        finish="stop",
        compression_ratio=1.0,
        logprobs=logprobs,
        phases=Phases(utterance.submitted_ns, utterance.encode_start_ns, now_ns, now_ns),
    )


class Stream:
    """One of a caller, or an utterance. It has a session once it has something to hear and a slot is free."""

    def __init__(
        self,
        priority: Priority,
        live: bool,
        utterance: Utterance | None = None,
        samples: int | None = None,
    ) -> None:
        """`priority`: for a slot. `live`: for steps. `samples`: the most that will come, if that is known."""
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
        self.heard: list[np.ndarray] | None = None
        """All that a session has taken, should it have to be heard again; None: that is not kept."""
        self._samples = self._again = 0
        """What they were; and tokens that come again, and were told."""

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

    def told(self, session: Session) -> Found:
        """Since the last time; the best ending, if there is one."""
        if session.over:
            self.hears(Found(session.guesses[0].tokens, []))
        found, self.fixed = Found(self.fixed, self.tail), []
        self.said += len(found.fixed)
        return found

    def saved(self, held: Held | None) -> Saved:
        """`held`: its session; None: it has none, and is to be heard again."""
        numbers = None if held is None else held.numbers
        told = _Told(numbers, self.fixed, self.tail, self.said, self.heard is not None)
        heard = b"".join(each.tobytes() for each in self.heard or ())
        return Saved(msgspec.msgpack.encode(told), (heard, *map(bytes, held.parts if held else ())))

    def load(self, saved: Saved) -> Held | None:
        """The inverse: what its session goes on from, to be checked. Raises ValueError."""
        told = read(_Told, saved.numbers)
        if not saved.parts or len(saved.parts[0]) % 4 or len(saved.parts[0]) > 4 * MOST_AGAIN_SAMPLES:
            raise ValueError("a saved stream without the audio that it has heard")
        if told.session is None and not told.keeps:
            raise ValueError("a saved stream of which nothing was kept")
        self.fixed, self.tail, self.said = told.fixed, told.tail, told.said
        heard, *parts = map(bytes, saved.parts)  # whose memory they are in may take it back
        self.heard = [np.frombuffer(heard, np.float32)] if told.keeps else None
        self._samples = len(heard) // 4
        self.held = None if told.session is None else Held(told.session, parts)
        return self.held
