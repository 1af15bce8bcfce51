"""START HERE: files in, text out. audio -> voice activity -> segments -> engine -> text, in order.

One short clip and a thousand three-hour files are the same code. It runs in the caller's thread as a
generator: it decodes ahead while the engine computes, within bounds, and sleeps until something finishes.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from asr_serve import units
from asr_serve.audio.buffers import Kept, Piece
from asr_serve.audio.io import AudioLimits
from asr_serve.audio.manifest import Item
from asr_serve.config import unknown
from asr_serve.decoding.attention import Recognition, SearchOptions
from asr_serve.engine.client import EngineClient, Ticket, VadSession
from asr_serve.errors import AsrServeError, AtCapacity, Cancelled
from asr_serve.pipelines.reading import Reading, reading
from asr_serve.pipelines.utterance import (
    endpoint_settings,
    in_context,
    known_options,
    language,
    segment,
    segment_limit_ms,
    speech,
)
from asr_serve.types import Phases, Priority, Segment, Span, Transcript
from asr_serve.vad.endpoint import WINDOW_SAMPLES, EndpointConfig, Endpointer
from asr_serve.vad.schedule import OFFLINE, SilenceSchedule

MAX_OPEN_FILES = 64
"""Files that are read at once; the results of the later ones wait, as text, for the first."""
MAX_AHEAD_SAMPLES = units.s_to_samples(1_200)
"""Audio cut into segments and not yet recognised."""
PROMPT_SAMPLES = units.s_to_samples(120)
"""How much of a recording somebody can be waiting for at once."""
PIECE_WINDOWS = 512
"""Windows handed to voice activity at once: 16 s."""
PIECES_AHEAD = 2
"""Pieces of one file that may wait for voice activity."""


class TranscribeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller may choose. Raises OptionError for what cannot be."""

    language: str | None = None
    """None: the model's own, or detected where it can."""
    priority: Priority = "bulk"
    """`interactive` holds for PROMPT_SAMPLES of a recording; the rest is bulk, so that nobody waits for it."""
    vad: bool = True
    """False: every sample is speech, cut only where the model's limit demands, at the quietest point."""
    silence_schedule: SilenceSchedule | None = None
    max_segment_ms: int | None = None
    """Cut segments shorter than the model's own limit."""
    threshold: float | None = None
    """Probability at which a window is speech, above 0 up to 1. None: EndpointConfig's, as for the next."""
    pad_before_ms: int | None = None
    """Audio before the first window of speech that belongs to a segment."""
    temperatures: tuple[float, ...] = SearchOptions().temperatures
    limits: AudioLimits = AudioLimits()

    def __post_init__(self) -> None:
        if self.priority not in ("interactive", "bulk"):
            raise unknown("priority", str(self.priority), ["interactive", "bulk"])

    @classmethod
    def of(cls, options: dict[str, Any]) -> TranscribeOptions:
        """From keyword arguments; an unknown one fails and names the nearest. A schedule may be a list of
        (up_to_ms, silence_ms)."""
        return cls(**known_options(options, cls.__struct_fields__))


class SegmentDone(msgspec.Struct, frozen=True):
    index: int
    """Position of the file among the items."""
    key: str
    segment: Segment
    phases: Phases | None = None
    """When the engine worked on it."""


class FileDone(msgspec.Struct, frozen=True):
    index: int
    key: str
    transcript: Transcript


class FileFailed(msgspec.Struct, frozen=True):
    index: int
    key: str
    error: AsrServeError


class Progress(msgspec.Struct, frozen=True):
    audio_samples: int
    """Audio whose text is out, over all files."""
    total_samples: int | None
    """What the headers of all files announce; None while some are unopened or announce nothing."""


Event = SegmentDone | FileDone | FileFailed | Progress


class Stop:
    """Ends one call of `events` from any thread: its generator cancels what it has in the engine and raises
    Cancelled. Closing the generator would do, but only the thread that is inside it can."""

    def __init__(self) -> None:
        self.awake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.client: EngineClient | None = None
        self._wanted = False

    def set(self) -> None:
        self._wanted = True
        self.awake.put(None)
        if self.client is not None:
            self.client.nudge()

    def check(self) -> None:
        if self._wanted:
            raise Cancelled("the transcription was stopped")


def events(
    client: EngineClient,
    text: Callable[[list[int]], str],
    items: Iterable[Item],
    options: TranscribeOptions,
    stop: Stop | None = None,
) -> Generator[Event, None, None]:
    """Transcribe `items`; see Model.events. Raises OptionError at once, Cancelled after `stop`."""
    return _Transcription(client, text, options, stop or Stop()).run(iter(items))


class _Transcription:
    """One call: a window of files being read, in order, and one queue on which everything that finishes
    wakes us."""

    def __init__(
        self, client: EngineClient, text: Callable[[list[int]], str], options: TranscribeOptions, stop: Stop
    ) -> None:
        self.client, self.text, self.options = client, text, options
        self.stop, self.awake, stop.client = stop, stop.awake, client
        self.language = language(client, options.language)
        self.endpoint = _endpoint(client, options)
        self.search = SearchOptions(temperatures=options.temperatures)
        self.piece_samples = min(PIECE_WINDOWS, client.config.vad_windows - 32) * WINDOW_SAMPLES
        self.ahead_samples = 0
        self.done_samples = 0
        self.announced: int | None = 0

    def run(self, items: Iterator[Item]) -> Generator[Event, None, None]:
        files: deque[_File] = deque()
        opened, more = 0, True
        refused: Item | None = None
        try:
            while files or more:
                self.stop.check()
                while more and len(files) < MAX_OPEN_FILES and self.ahead_samples < MAX_AHEAD_SAMPLES:
                    item = refused or next(items, None)
                    if item is None:
                        more = False
                        break
                    try:  # for a session of somebody else we wait; one of ours comes back when its file is read
                        session = self._session(wait=not files)
                    except AtCapacity:
                        refused = item
                        break
                    refused = None
                    files.append(_File(self, opened, item, session))
                    opened += 1
                moved = False
                for file in files:
                    moved |= file.advance()
                while files:
                    yield from files[0].ready(more)
                    if not files[0].over:
                        break
                    files.popleft()
                    moved = True
                if files and not moved:
                    self.awake.get()
                    while not self.awake.empty():
                        self.awake.get()
        finally:
            for file in files:
                file.abandon()

    def _session(self, *, wait: bool) -> VadSession | None:
        return self.client.session(wait=wait, check=self.stop.check) if self.options.vad else None

    def wake(self, _: Future[Any] | None = None) -> None:
        self.awake.put(None)


class _File:
    """One input on its way: chunks read, pieces at voice activity, segments at the engine, text out."""

    def __init__(self, call: _Transcription, index: int, item: Item, session: VadSession | None) -> None:
        self.call, self.index, self.key = call, index, item.key
        self.over = False
        self.error: AsrServeError | None = None
        self.segments: list[Segment] = []
        self.announced = self.reported = self.read_samples = 0
        self.source: Reading | None = None
        self.reading = self.open = True
        self.session = session
        self.piece = Piece()
        self.kept = Kept()
        self.pieces: deque[tuple[np.ndarray, Future[np.ndarray]]] = deque()
        self.waiting: deque[tuple[Span, Ticket]] = deque()
        self.heard: deque[tuple[Span, Recognition]] = deque()
        self.endpointer = Endpointer(call.endpoint)
        try:
            self.source = reading(item.source, call.options.limits, call.wake)
            self.announced = self.source.hint_samples or 0
            if not self.announced:
                call.announced = None
            elif call.announced is not None:
                call.announced += self.announced
        except AsrServeError as error:
            self._end(error)

    # --- reading ahead ------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Do what can be done without waiting; True when something was."""
        moved = False
        while self.reading and len(self.pieces) < PIECES_AHEAD and self._room():
            if not self._read():
                break
            moved = True
        while self.pieces and self.pieces[0][1].done() and self.error is None:
            moved = True
            pcm, future = self.pieces.popleft()
            try:
                probabilities = future.result()
            except AsrServeError as error:
                self._end(error)
                break
            self.kept.add(pcm)
            self._submit(self.endpointer.push(probabilities))
        # Not when the last piece is heard: a recording may end where a piece does, and that is seen later.
        if self.open and not self.reading and not self.pieces:
            moved, self.open = True, False
            self._submit(self.endpointer.finish(self.read_samples))
            self._release()
        while self.waiting and self.waiting[0][1].future.done():
            moved = True
            span, ticket = self.waiting.popleft()
            self.call.ahead_samples -= span.samples
            try:
                self.heard.append((span, ticket.future.result()))
            except AsrServeError as error:
                self._end(error)
        return moved

    def _room(self) -> bool:
        return self.call.ahead_samples < MAX_AHEAD_SAMPLES

    def _read(self) -> bool:
        """Hand the next piece to voice activity, or end the reading; False when a slow input has too little.

        What a slow input has is handed on as soon as nothing of it is under way, so that its text comes early.
        """
        assert self.source is not None
        try:
            while self.piece.samples < self.call.piece_samples and (chunk := self.source.take()) is not None:
                self.piece.add(chunk)
                self.read_samples += len(chunk)
            self.reading = not self.source.ended
        except AsrServeError as error:
            self._end(error)
            return True
        whole_samples = self.piece.samples // WINDOW_SAMPLES * WINDOW_SAMPLES
        if self.reading and whole_samples < self.call.piece_samples and (self.pieces or not whole_samples):
            return False
        pcm = self.piece.take(min(whole_samples, self.call.piece_samples), WINDOW_SAMPLES, last=not self.reading)
        if len(pcm):
            future = self._voice_activity(pcm)
            self.pieces.append((pcm, future))
            future.add_done_callback(self.call.wake)
        return True

    def _voice_activity(self, pcm: np.ndarray) -> Future[np.ndarray]:
        if self.session is not None:
            return self.session.put(pcm)
        # Without it every window counts as speech; the louder, the surer, so that a cut falls where it is quiet.
        loudness = np.sqrt(np.square(pcm.reshape(-1, WINDOW_SAMPLES)).mean(axis=1))
        future: Future[np.ndarray] = Future()
        future.set_result(
            self.call.endpoint.threshold + (1 - self.call.endpoint.threshold) * np.minimum(loudness, 1)
        )
        return future

    def _submit(self, spans: list[Span]) -> None:
        check = self.call.stop.check
        for span in spans:
            check()
            pcm = self._with_context(span)
            priority = "bulk" if span.start_samples >= PROMPT_SAMPLES else self.call.options.priority
            ticket = self.call.client.submit(pcm, self.call.search, priority, wait=True, check=check)
            self.call.ahead_samples += span.samples
            self.waiting.append((span, ticket))
            ticket.future.add_done_callback(self.call.wake)
        self.kept.drop_before(self.endpointer.keep_from_samples)

    def _with_context(self, span: Span) -> np.ndarray:
        """The audio of `span` between two short pauses."""
        pcm = self.kept.cut(span)
        return in_context(pcm) if self.call.options.vad else pcm

    # --- results ------------------------------------------------------------------------------------

    def ready(self, unopened: bool) -> Iterator[Event]:
        """The events of this file that are due. Only the first file of the window is asked."""
        while self.heard:
            span, heard = self.heard.popleft()
            if segment := self._segment(span, heard):
                self.segments.append(segment)
                yield SegmentDone(self.index, self.key, segment, heard.phases)
            yield self._progress(span.end_samples, unopened)
        if self.waiting or self.open:
            return
        self.over = True
        yield self._progress(self.read_samples, unopened)
        if self.error is not None:
            yield FileFailed(self.index, self.key, self.error)
        else:
            spoken = " ".join(s.text for s in self.segments)
            yield FileDone(
                self.index,
                self.key,
                Transcript(
                    self.key,
                    spoken,
                    self.call.language,
                    self.read_samples,
                    tuple(self.segments),
                    self.call.client.card.name,
                ),
            )

    def _segment(self, span: Span, heard: Recognition) -> Segment | None:
        return segment(span, heard, self.call.text) if speech(heard) else None

    def _progress(self, position: int, unopened: bool) -> Progress:
        self.call.done_samples += position - self.reported
        self.reported = position
        total = None if unopened else self.call.announced
        return Progress(self.call.done_samples, total if total is None else max(total, self.call.done_samples))

    # --- endings ------------------------------------------------------------------------------------

    def _end(self, error: AsrServeError) -> None:
        """The file cannot go on; what is already cut is let go."""
        self.error = self.error or error
        self.abandon()

    def abandon(self) -> None:
        """Cancel everything under way."""
        self.reading = self.open = False
        self.pieces.clear()
        for span, ticket in self.waiting:
            self.call.ahead_samples -= span.samples
            self.call.client.cancel(ticket)
        self.waiting.clear()
        self._release()

    def _release(self) -> None:
        if self.session is not None:
            self.session.close()
        if self.source is not None:
            self.source.close()


def _endpoint(client: EngineClient, options: TranscribeOptions) -> EndpointConfig:
    chosen = endpoint_settings(options.threshold, options.pad_before_ms)
    if not options.vad:
        chosen["min_speech_ms"] = 0
    return EndpointConfig(
        max_segment_ms=segment_limit_ms(client, options.max_segment_ms),
        schedule=options.silence_schedule or OFFLINE,
        **chosen,
    )
