"""Turns of a file in which two speakers talk at once, recognized one by one from separated audio.

A recognizer transcribes one of two people who talk at once. When the turns of a file are known, each segment in which
turns overlap is separated into what each speaker says, and the overlapped turns are recognized again. Segments
without overlap are left as they are, and cost nothing. A word of the file is only replaced where its turn was
recognized again: where that fails or finds nothing, the transcript stays as it was.
"""

from __future__ import annotations

import logging
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
    subtract_ranges,
)
from asr_serve.diarization.word_speakers import outside_ranges
from asr_serve.engine.client import EngineClient, Ticket
from asr_serve.errors import AsrServeError, Cancelled, EngineClosed
from asr_serve.pipelines.offline.file_diarizer import FileDiarizer
from asr_serve.pipelines.offline.long_form import SegmentRequest
from asr_serve.pipelines.offline.parallel import ParallelLongForm
from asr_serve.pipelines.segment_recognizer import SegmentRecognizer
from asr_serve.types import Priority, Segment, Span, SpeakerTurn

log = logging.getLogger(__name__)

MAX_KEPT_SAMPLES = units.s_to_samples(600)
"""Limit of a file's overlapped audio that is kept until its turns are known, 19 MB; of what is beyond, one speaker is
recognized."""
MAX_SEPARATED = 4
"""Segments of a file that are separated and recognized at once."""
FULL_SCALE = 32_767


class KeptSegment(NamedTuple):
    """Audio of a segment in which speakers may overlap."""

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


class _RecognizedSegment(NamedTuple):
    overlap: OverlappedSpeech
    turns: list[tuple[OverlappedTurn, Segment]]
    """Turns that have words."""


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
        priority: Callable[[Span], Priority],
    ) -> None:
        """`recognizer` has times of words. `words`: whether the result has words. `priority`: of each request."""
        self._client, self._recognizer, self._long_form, self._diarizer = client, recognizer, long_form, diarizer
        self._wake, self._check, self._words, self._priority = wake, check, words, priority
        self._undecided: deque[KeptSegment] = deque()
        """Segments with audio that is not diarized yet."""
        self._kept: deque[KeptSegment] = deque()
        """Segments in which speakers may overlap."""
        self._kept_samples = 0
        self._started = False
        self._waiting: deque[_SeparatedSegment] = deque()
        self._running: deque[_SeparatedSegment] = deque()
        self._done: list[_RecognizedSegment] = []
        self._replaced: list[tuple[int, int]] = []
        """Ranges (start, end) whose words are those of `_segments`."""
        self._segments: list[Segment] = []

    @property
    def finished(self) -> bool:
        """Returns whether every overlapped turn is recognized."""
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
        """Collects results and submits what is next; returns whether there was anything. A segment that fails keeps the
        transcript that it has. Raises EngineClosed, Cancelled."""
        progressed = False
        while self._waiting and len(self._running) < MAX_SEPARATED:
            self._running.append(self._waiting.popleft())
            self._attempt(self._separate, self._running[-1])
            progressed = True
        for segment in tuple(self._running):
            if segment.turns is None and all(answer.done() for _, answer in segment.mixtures):
                self._attempt(self._recognize, segment)
                progressed = True
        for segment in tuple(self._running):
            if segment.turns is not None and all(turn.ticket.future.done() for turn in segment.turns):
                self._attempt(self._collect, segment)
                progressed = True
        return progressed

    def replace(self, segments: Sequence[Segment]) -> None:
        """Decides which words of the file's segments, which have no speakers yet, are replaced; once finished. Segments
        without words stay."""
        wordless = [(each.start_samples, each.end_samples) for each in segments if not each.words]
        self._replaced, self._segments = [], []
        for recognized in self._done:
            self._replace(recognized, wordless)

    def outside_turns(self, segment: Segment) -> list[Segment]:
        """Returns the parts of a segment of the file that are not replaced."""
        return outside_ranges(segment, self._replaced)

    def segments(self) -> list[Segment]:
        """Returns the segments that replace others, with their speakers."""
        return self._segments

    def abandon(self) -> None:
        """Cancels everything pending."""
        for segment in self._running:
            self._cancel(segment)
        for queue in (self._kept, self._undecided, self._waiting, self._running):
            queue.clear()

    def _attempt(self, step: Callable[[_SeparatedSegment], None], segment: _SeparatedSegment) -> None:
        """Takes a step with a running segment, and gives the segment up if that fails."""
        try:
            step(segment)
        except (EngineClosed, Cancelled):
            raise
        except AsrServeError as error:
            start_s = units.samples_to_s(segment.kept.span.start_samples)
            log.warning("speakers who overlap in the segment at %.1f s are not recognized apart: %s", start_s, error)
            self._cancel(segment)
            self._running.remove(segment)

    def _cancel(self, segment: _SeparatedSegment) -> None:
        for _, answer in segment.mixtures:
            self._client.cancel_separation(answer)
        for turn in segment.turns or ():
            self._recognizer.cancel(turn.ticket)

    def _replace(self, recognized: _RecognizedSegment, unchanged: Sequence[tuple[int, int]]) -> None:
        """Replaces the words of each turn that has words in its own range. Ranges of other turns are left unchanged,
        with what anybody says in them, and so is the rest of a turn whose answer ends early."""
        turns, fixed = list(recognized.turns), list(unchanged)
        lost = [each for each in recognized.overlap.turns if each not in dict(turns)]
        fixed += [(turn.start_samples, turn.end_samples) for turn in lost]
        fixed += [
            (segment.end_samples, turn.end_samples) for turn, segment in turns if segment.end_samples < turn.end_samples
        ]
        while True:
            parts = [self._own_parts(turn, segment, fixed) for turn, segment in turns]
            if all(parts):
                break
            lost = [turn for (turn, _), own in zip(turns, parts, strict=True) if not own]
            fixed += [(turn.start_samples, turn.end_samples) for turn in lost]
            turns = [each for each in turns if each[0] not in lost]
        self._replaced += subtract_ranges([(turn.start_samples, turn.end_samples) for turn, _ in turns], fixed)
        self._segments += [part for own in parts for part in own]

    def _own_parts(self, turn: OverlappedTurn, segment: Segment, unchanged: Sequence[tuple[int, int]]) -> list[Segment]:
        """Returns the parts of a recognized turn that are in its own range, and not in an unchanged one."""
        around = [(turn.audio.start_samples, turn.start_samples), (turn.end_samples, turn.audio.end_samples)]
        parts = []
        for part in outside_ranges(segment, [*around, *unchanged]):
            words = tuple(msgspec.structs.replace(word, speaker=turn.speaker) for word in part.words)
            parts.append(msgspec.structs.replace(part, speaker=turn.speaker, words=words if self._words else ()))
        return parts

    def _separate(self, segment: _SeparatedSegment) -> None:
        pcm = segment.kept.pcm.astype(np.float32) / FULL_SCALE
        speakers = list(segment.overlap.turns_by_speaker)
        groups: list[tuple[str, ...]]
        if len(speakers) > 2:
            groups = [(name,) for name in dict.fromkeys(turn.speaker for turn in segment.overlap.turns)]
        else:
            groups = [tuple(speakers)]
        for names in groups:
            if not segment.overlap.separable(names[0]):
                continue
            speaker_ranges = segment.overlap.mixture_of(names[0])
            answer = self._client.separate_speakers(pcm, speaker_ranges, wait=True, check=self._check)
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
            if turn.speaker not in tracks:
                continue
            span = turn.audio
            pcm = np.ascontiguousarray(tracks[turn.speaker][span.start_samples - first : span.end_samples - first])
            request = self._long_form.turn_request(span, pcm, segment.kept.search)
            ticket = self._recognizer.submit(request.pcm, request.search, self._priority(span), self._check)
            ticket.future.add_done_callback(self._wake)
            segment.turns.append(_SeparatedTurn(turn, request, ticket))

    def _collect(self, segment: _SeparatedSegment) -> None:
        answers = [
            (each.turn, self._long_form.turn_segment(each.request, each.ticket.future.result()))
            for each in segment.turns or ()
        ]
        timed = [(turn, answer) for turn, answer in answers if answer is not None and answer.words]
        self._done.append(_RecognizedSegment(segment.overlap, timed))
        self._running.remove(segment)
