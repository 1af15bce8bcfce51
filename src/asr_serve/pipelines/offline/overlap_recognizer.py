"""Turns of a file in which two speakers talk at once, recognized one by one from separated audio.

A recognizer transcribes one of two people who talk at once. When the turns of a file are known, each segment in which
turns overlap is separated into what each speaker says, and the overlapped turns are recognized again. Segments
without overlap are left as they are, and cost nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asr_serve import units
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.diarization.overlapped_speech import (
    MAX_MIXTURE_SAMPLES,
    OverlappedSpeech,
    OverlappedTurn,
    overlapped_speech,
)
from asr_serve.diarization.word_speakers import outside_ranges
from asr_serve.engine.client import EngineClient, Ticket
from asr_serve.pipelines.offline.file_diarizer import FileDiarizer
from asr_serve.pipelines.offline.long_form import SegmentRequest
from asr_serve.pipelines.offline.parallel import ParallelLongForm
from asr_serve.pipelines.segment_recognizer import SegmentRecognizer
from asr_serve.types import Segment, Span, SpeakerTurn

MAX_KEPT_SAMPLES = units.s_to_samples(1_800)
"""Limit of a file's overlapped audio that is kept until its turns are known, 58 MB; of what is beyond, one speaker is
recognized."""
MAX_SEPARATED = 4
"""Segments of a file that are separated and recognized at once."""
FULL_SCALE = 32_767


class KeptSegment(NamedTuple):
    span: Span
    pcm: np.ndarray
    """(span.samples,) int16."""
    search: SearchOptions


class _SeparatedTurn(NamedTuple):
    turn: OverlappedTurn
    request: SegmentRequest
    ticket: Ticket


class _SeparatedSegment:
    """Segment in progress: mixtures in the engine, then turns in the recognizer."""

    def __init__(self, kept: KeptSegment, overlap: OverlappedSpeech) -> None:
        self.kept, self.overlap = kept, overlap
        self.mixtures: list[tuple[tuple[str, ...], Future[np.ndarray]]] = []
        """Speakers of the tracks that each future holds."""
        self.turns: list[_SeparatedTurn] | None = None
        """None: not separated yet."""


class OverlapRecognizer:
    """Overlapped speech of one file. Methods do not block, except for capacity in the engine."""

    def __init__(
        self,
        client: EngineClient,
        recognizer: SegmentRecognizer,
        long_form: ParallelLongForm,
        diarizer: FileDiarizer,
        wake: Callable[[Future[Any]], None],
        check: Callable[[], None],
        *,
        words: bool,
    ) -> None:
        """`words`: whether segments have words."""
        self._client, self._recognizer, self._long_form, self._diarizer = client, recognizer, long_form, diarizer
        self._wake, self._check, self._words = wake, check, words
        self._undecided: deque[KeptSegment] = deque()
        """Segments with audio that is not diarized yet."""
        self._kept: deque[KeptSegment] = deque()
        """Segments in which speakers may overlap."""
        self._kept_samples = 0
        self._started = False
        self._waiting: deque[_SeparatedSegment] = deque()
        self._running: deque[_SeparatedSegment] = deque()
        self._done: list[tuple[OverlappedSpeech, list[Segment]]] = []

    @property
    def finished(self) -> bool:
        """Whether every overlapped turn is recognized."""
        return self._started and not self._waiting and not self._running

    def keep(self, request: SegmentRequest) -> None:
        """Keeps a segment's audio until it is known whether speakers overlap in it."""
        span = request.span
        if request.retries or span.samples > MAX_MIXTURE_SAMPLES:
            return
        before = (len(request.pcm) - span.samples) // 2
        pcm = np.round(request.pcm[before : before + span.samples].clip(-1, 1) * FULL_SCALE).astype(np.int16)
        self._undecided.append(KeptSegment(span, pcm, request.search))

    def drop_single_speakers(self) -> None:
        """Drops the audio of segments that are diarized and have no overlap."""
        while self._undecided and self._diarizer.known_samples >= self._undecided[0].span.end_samples:
            kept = self._undecided.popleft()
            if self._diarizer.may_overlap(kept.span) and self._kept_samples + len(kept.pcm) <= MAX_KEPT_SAMPLES:
                self._kept_samples += len(kept.pcm)
                self._kept.append(kept)

    def start(self, turns: Sequence[SpeakerTurn]) -> None:
        """Begins to separate, once all segments are recognized and the turns of the file are known. Idempotent."""
        if self._started:
            return
        self._started = True
        self.drop_single_speakers()
        for kept in self._kept:
            if (overlap := overlapped_speech(kept.span, turns)) is not None:
                self._waiting.append(_SeparatedSegment(kept, overlap))
        self._kept.clear()

    def advance(self) -> bool:
        """Collects results and submits what is next; returns whether there was anything. Raises the errors of
        EngineClient.separate_speakers and of the recognizer."""
        progressed = False
        while self._waiting and len(self._running) < MAX_SEPARATED:
            segment = self._waiting.popleft()
            self._running.append(segment)
            self._separate(segment)
            progressed = True
        for segment in self._running:
            if segment.turns is None and all(answer.done() for _, answer in segment.mixtures):
                self._recognize(segment)
                progressed = True
        while self._running and (turns := self._running[0].turns) is not None:
            if not all(turn.ticket.future.done() for turn in turns):
                break
            segment = self._running.popleft()
            recognized = [self._segment(turn) for turn in turns]
            self._done.append((segment.overlap, [each for each in recognized if each is not None]))
            progressed = True
        return progressed

    def outside_turns(self, segment: Segment) -> list[Segment]:
        """Returns the parts of a segment of the file that overlapped turns do not replace; it has no speakers yet. A
        segment without times of words is replaced as a whole where turns overlap for the most of it."""
        for overlap, recognized in self._done:
            if recognized and overlap.span.start_samples <= segment.start_samples < overlap.span.end_samples:
                return outside_ranges(segment, overlap.ranges)
        return [segment]

    def segments(self) -> list[Segment]:
        """Returns the recognized turns, with their speakers."""
        return [each for _, recognized in self._done for each in recognized]

    def abandon(self) -> None:
        """Cancels everything pending."""
        for segment in self._running:
            for turn in segment.turns or ():
                self._recognizer.cancel(turn.ticket)
        for queue in (self._kept, self._undecided, self._waiting, self._running):
            queue.clear()

    def _separate(self, segment: _SeparatedSegment) -> None:
        pcm = segment.kept.pcm.astype(np.float32) / FULL_SCALE
        speakers = list(segment.overlap.talks)
        asked: list[tuple[str, ...]]
        if len(speakers) > 2:
            asked = [(name,) for name in dict.fromkeys(turn.speaker for turn in segment.overlap.turns)]
        else:
            asked = [tuple(speakers)]
        for names in asked:
            talks = segment.overlap.mixture_of(names[0])
            answer = self._client.separate_speakers(pcm, talks, wait=True, check=self._check)
            segment.mixtures.append((names, answer))
            answer.add_done_callback(self._wake)

    def _recognize(self, segment: _SeparatedSegment) -> None:
        tracks: dict[str, np.ndarray] = {}
        for names, answer in segment.mixtures:
            tracks |= zip(names, answer.result(), strict=False)
        segment.mixtures.clear()
        segment.turns = []
        first = segment.kept.span.start_samples
        for turn in segment.overlap.turns:
            span = Span(turn.start_samples, turn.end_samples)
            pcm = np.ascontiguousarray(tracks[turn.speaker][span.start_samples - first : span.end_samples - first])
            request = self._long_form.turn_request(span, pcm, segment.kept.search)
            ticket = self._recognizer.submit(request.pcm, request.search, "bulk", self._check)
            ticket.future.add_done_callback(self._wake)
            segment.turns.append(_SeparatedTurn(turn, request, ticket))

    def _segment(self, done: _SeparatedTurn) -> Segment | None:
        segment = self._long_form.turn_segment(done.request, done.ticket.future.result())
        if segment is None:
            return None
        words = tuple(msgspec.structs.replace(word, speaker=done.turn.speaker) for word in segment.words)
        return msgspec.structs.replace(segment, speaker=done.turn.speaker, words=words if self._words else ())
