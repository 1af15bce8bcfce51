"""A file cut by voice activity into segments that know nothing of each other: the parallel way.

A decoder may end its answer at a pause, though more is said behind it: Whisper does where speakers change. One
that says when it heard something shows that it did, so it is always asked for times; a segment whose answer ends
early is heard on from there. Only where voice activity cut it: then it ends where speech does, so there is some.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from asr_serve.audio.buffers import Kept, Piece
from asr_serve.decoding.attention import Recognition, SearchOptions
from asr_serve.engine.client import VadSession
from asr_serve.models.card import Card
from asr_serve.pipelines.quiet import Quiet, quiet_by_level
from asr_serve.pipelines.reading import Reading
from asr_serve.pipelines.utterance import CONTEXT_SAMPLES, as_if_spoken, in_context, segment, some, speech
from asr_serve.pipelines.way import LEAST_HEARD_SAMPLES, LEFT_SAMPLES, Heard, Request
from asr_serve.types import Span
from asr_serve.vad.endpoint import WINDOW_SAMPLES, EndpointConfig, Endpointer

PIECE_WINDOWS = 512
"""Windows handed to voice activity at once: 16 s."""
PIECES_AHEAD = 2
"""Pieces of one file that may wait for voice activity."""
MOST_AGAIN = 8
"""So often a segment is heard on; then the model has lost its place."""


class Cutting:
    """See way.Way. It holds PIECES_AHEAD pieces, the one that is read, and what the open segment may need."""

    def __init__(
        self,
        card: Card,
        endpoint: EndpointConfig,
        search: SearchOptions,
        session: VadSession | None,
        most_windows: int,
        text: Callable[[list[int]], str],
        wake: Callable[[Future[Any]], None],
    ) -> None:
        """`session`: None where every sample counts as speech. `most_windows`: that it takes at once. `wake` is
        called when it answers."""
        self._card, self._endpoint, self._text = card, endpoint, text
        self._search = msgspec.structs.replace(search, timestamps=card.times is not None)
        self._session, self._wake = session, wake
        self._piece_samples = min(PIECE_WINDOWS, most_windows) * WINDOW_SAMPLES
        self.read_samples = 0
        self.over = False
        self._reading = True
        self._piece = Piece()
        self._kept = Kept()
        self._pieces: deque[tuple[np.ndarray, Future[np.ndarray]]] = deque()
        self._endpointer = Endpointer(endpoint)
        self._quiet = Quiet(endpoint.neg_threshold)
        self._asked: deque[Request] = deque()
        """Not answered yet."""

    def advance(self, source: Reading, room: bool) -> tuple[bool, list[Request]]:
        moved, requests = False, list[Request]()
        while room and self._reading and len(self._pieces) < PIECES_AHEAD:
            if not self._read(source):
                break
            moved = True
        while self._pieces and self._pieces[0][1].done():
            moved = True
            pcm, future = self._pieces.popleft()
            probabilities = future.result()
            self._kept.add(pcm)
            if self._search.words and self._session is not None:
                self._quiet.add(probabilities)
            requests += self._cut(self._endpointer.push(probabilities))
        # Not when the last piece is heard: a recording may end where a piece does, and that is seen later.
        if not self.over and not self._reading and not self._pieces:
            moved = self.over = True
            requests += self._cut(self._endpointer.finish(self.read_samples))
        return moved, requests

    def answered(self, span: Span, answer: Recognition) -> Heard:
        request = self._asked.popleft()
        assert request.span == span, "answers come in the order of requests"
        if not speech(answer, self._card, request.search.task):
            return Heard((), span.end_samples, answer.language, answer.phases)
        then = self._rest(request, answer)
        if then is not None:
            self._asked.appendleft(then)
            span = Span(span.start_samples, then.span.start_samples)
        begins = request.span.start_samples - self._context
        found = segment(span, self._without_times(answer), self._text, begins, request.quiet)
        told = (found,) if found else ()
        return Heard(told, span.end_samples, answer.language, answer.phases, then, answer.language_prob)

    def _rest(self, request: Request, answer: Recognition) -> Request | None:
        """What the answer says nothing of, at the end of its segment."""
        times, span = self._card.times, request.span
        if times is None or self._session is None or request.again == MOST_AGAIN:
            return None
        if answer.finish != "stop" or answer.tokens[-1] < times.first:
            return None
        heard = (answer.tokens[-1] - times.first) * times.step_samples - CONTEXT_SAMPLES
        if heard < LEAST_HEARD_SAMPLES or span.samples - heard <= LEFT_SAMPLES:
            return None
        rest = Span(span.start_samples + heard, span.end_samples)
        spoken = request.pcm[CONTEXT_SAMPLES + heard : CONTEXT_SAMPLES + span.samples]
        search = msgspec.structs.replace(request.search, language=request.search.language or answer.language)
        return Request(rest, in_context(spoken), search, request.again + 1, request.quiet)

    def _without_times(self, answer: Recognition) -> Recognition:
        times = self._card.times
        if times is None:
            return answer
        return some(answer, [i for i, token in enumerate(answer.tokens) if token < times.words_below])

    def close(self) -> None:
        self._pieces.clear()
        if self._session is not None:
            self._session.close()

    def _read(self, source: Reading) -> bool:
        """Hand the next piece to voice activity, or end the reading; False when a slow input has too little.

        What a slow input has is handed on as soon as nothing of it is under way, so that its text comes early.
        """
        while self._piece.samples < self._piece_samples and (chunk := source.take()) is not None:
            self._piece.add(chunk)
            self.read_samples += len(chunk)
        self._reading = not source.ended
        whole_samples = self._piece.samples // WINDOW_SAMPLES * WINDOW_SAMPLES
        if self._reading and whole_samples < self._piece_samples and (self._pieces or not whole_samples):
            return False
        pcm = self._piece.take(min(whole_samples, self._piece_samples), WINDOW_SAMPLES, last=not self._reading)
        if len(pcm):
            future = self._voice_activity(pcm)
            self._pieces.append((pcm, future))
            future.add_done_callback(self._wake)
        return True

    def _voice_activity(self, pcm: np.ndarray) -> Future[np.ndarray]:
        if self._session is not None:
            return self._session.put(pcm)
        future: Future[np.ndarray] = Future()
        future.set_result(as_if_spoken(pcm, self._endpoint.threshold))
        return future

    def _cut(self, spans: list[Span]) -> list[Request]:
        requests = []
        for span in spans:
            pcm = self._kept.cut(span)
            heard = pcm if self._session is None else in_context(pcm)
            requests.append(Request(span, heard, self._search, quiet=self._quiet_in(span, pcm)))
        self._asked += requests
        self._kept.drop_before(self._endpointer.keep_from_samples)
        self._quiet.forget_before(self._endpointer.keep_from_samples)
        return requests

    def _quiet_in(self, span: Span, pcm: np.ndarray) -> tuple[Span, ...]:
        if not self._search.words:
            return ()
        return quiet_by_level(pcm, span) if self._session is None else self._quiet.within(span)

    @property
    def _context(self) -> int:
        """Samples of silence on each side of a segment; none where no pauses were looked for."""
        return 0 if self._session is None else CONTEXT_SAMPLES
