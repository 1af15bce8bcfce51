"""START HERE: files in, text out. audio -> segments, or windows -> engine -> text, in order.

One short clip and a thousand three-hour files are the same code. It runs in the caller's thread as a
generator: it decodes ahead while the engine computes, within bounds, and sleeps until something finishes.
"""

from __future__ import annotations

import queue
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec

from asr_serve import units
from asr_serve.audio.endpointing import EndpointConfig
from asr_serve.audio.input_manifest import InputItem
from asr_serve.audio.silence_schedule import OFFLINE_SCHEDULE
from asr_serve.decoding.seq2seq import SearchOptions
from asr_serve.diarization.word_speakers import TurnIndex
from asr_serve.engine.client import EngineClient, Ticket, VadSession
from asr_serve.errors import AsrServeError, AtCapacity, Cancelled
from asr_serve.pipelines.offline.audio_reader import AudioReader, open_reader
from asr_serve.pipelines.offline.file_diarizer import DiarizedReader, FileDiarizer, KnownSpeakerVoices
from asr_serve.pipelines.offline.long_form import LongFormStrategy, SegmentAnswer, SegmentRequest
from asr_serve.pipelines.offline.parallel import ParallelLongForm
from asr_serve.pipelines.offline.sequential import SequentialLongForm
from asr_serve.pipelines.offline.speech_activity import SpeechActivity
from asr_serve.pipelines.options import PROMPT_SAMPLES, TranscribeOptions
from asr_serve.pipelines.prompting import hotword_bias, prompt_tokens
from asr_serve.pipelines.segments import (
    SegmentNormalizer,
    check_search,
    check_timestamps,
    endpoint_overrides,
    resolve_language,
    segment_limit_ms,
)
from asr_serve.text.tokenizers import Tokenizer
from asr_serve.types import EngineTimestamps, Segment, Span, SpeakerTurn, Transcript

MAX_OPEN_FILES = 64
"""Files that are read at once; the results of the later ones wait, as text, for the first."""
MAX_AHEAD_SAMPLES = units.s_to_samples(1_200)
"""Audio cut into segments and not yet recognised."""


class SegmentDone(msgspec.Struct, frozen=True):
    index: int
    """Position of the file among the items."""
    key: str
    segment: Segment
    phases: EngineTimestamps | None = None
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


class TranscribeCanceller:
    """Ends one call of `events` from any thread: its generator cancels what it has in the engine and raises
    Cancelled. Closing the generator would do, but only the thread that is inside it can."""

    def __init__(self) -> None:
        self.awake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.client: EngineClient | None = None
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self.awake.put(None)
        if self.client is not None:
            self.client.wake_waiters()

    def check(self) -> None:
        if self._cancelled:
            raise Cancelled("the transcription was stopped")


def events(
    client: EngineClient,
    tokenizer: Tokenizer,
    items: Iterable[InputItem],
    options: TranscribeOptions,
    stop: TranscribeCanceller | None = None,
) -> Generator[Event, None, None]:
    """Transcribe `items`; see Model.events. Raises OptionError at once, Cancelled after `stop`."""
    return _Transcription(client, tokenizer, options, stop or TranscribeCanceller()).run(iter(items))


class _Transcription:
    """One call: a window of files being read, in order, and one queue on which everything that finishes
    wakes us."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, options: TranscribeOptions, stop: TranscribeCanceller
    ) -> None:
        self.client, self.tokenizer, self.options = client, tokenizer, options
        self.stop, self.awake, stop.client = stop, stop.awake, client
        self.language = resolve_language(client, options.language)
        check_search(client, options.task, options.temperatures, options.beam)
        self.sequential = options.long_form == "sequential"
        if self.sequential:
            check_timestamps(client)
        self.endpoint = _endpoint(client, options)
        self.prompt_tokens = prompt_tokens(client, tokenizer, options.prompt)
        self.search = SearchOptions(
            temperatures=options.temperatures,
            task=options.task,
            language=self.language,
            prompt=self.prompt_tokens,
            beam=options.beam,
            bias=hotword_bias(client, tokenizer, options.hotwords),
            words=options.words or options.speakers,
        )
        self.normalizer = SegmentNormalizer(
            "en" if options.task == "translate" else self.language, itn=options.itn
        )
        self.ahead_samples = 0
        self.done_samples = 0
        self.announced: int | None = 0

    def run(self, items: Iterator[InputItem]) -> Generator[Event, None, None]:
        files: deque[_FileJob] = deque()
        opened, more, refused = 0, True, None
        self.known_voices = KnownSpeakerVoices(
            self.client, self.options.known_speakers, self.wake, self.stop.check
        )
        try:
            while files or more:
                self.stop.check()
                while more and len(files) < MAX_OPEN_FILES and self.has_room:
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
                    files.append(_FileJob(self, opened, item, self.long_form(session)))
                    opened += 1
                moved = False
                for file in files:
                    moved |= file.advance()
                while files:
                    yield from files[0].ready(more)
                    if not files[0].finished:
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
        return self.client.open_vad_session(wait=wait, check=self.stop.check) if self.options.vad else None

    def long_form(self, session: VadSession | None) -> LongFormStrategy:
        """Of one file."""
        client, text = self.client, self.tokenizer.decode
        most_windows = client.config.vad_windows - 32
        if not self.sequential:
            return ParallelLongForm(
                client.card, self.endpoint, self.search, session, most_windows, text, self.wake
            )
        return SequentialLongForm(
            client.card,
            client.max_samples,
            self.search,
            text,
            said=self.prompt_tokens,
            remember=self.options.condition_on_previous_text,
            spoken=SpeechActivity(session, self.endpoint.threshold, most_windows, self.wake) if session else None,
        )

    @property
    def has_room(self) -> bool:
        return self.ahead_samples < MAX_AHEAD_SAMPLES

    def wake(self, _: Future[Any] | None = None) -> None:
        self.awake.put(None)


class _FileJob:
    """One input on its way: chunks read, requests at the engine, text out."""

    def __init__(self, call: _Transcription, index: int, item: InputItem, way: LongFormStrategy) -> None:
        self.call, self.index, self.key, self.long_form = call, index, item.key, way
        self.finished = False
        self.error: AsrServeError | None = None
        self.segments: list[Segment] = []
        self.languages: Counter[str] = Counter()
        """Samples in which each was heard."""
        self.language_probs: dict[str, list[tuple[float, int]]] = {}
        """How sure the model was of each, in so many samples; not where it was told."""
        self.announced = self.reported = self.cached_samples = 0
        self.source: AudioReader | None = None
        options, check = call.options, call.stop.check
        self.diarizer = (
            FileDiarizer(call.client, options, call.known_voices, call.wake, check) if options.speakers else None
        )
        self.undiarized: list[tuple[Segment, EngineTimestamps | None, str]] = []
        """With their languages; told when it is known who said them."""
        self.pending: deque[tuple[Span, Ticket]] = deque()
        self.answers: deque[SegmentAnswer] = deque()
        try:
            source = open_reader(item.source, options.limits, call.wake)
            self.source = DiarizedReader(source, self.diarizer) if self.diarizer else source
            self.announced = self.source.hint_samples or 0
            if not self.announced:
                call.announced = None
            elif call.announced is not None:
                call.announced += self.announced
        except AsrServeError as error:
            self._fail(error)

    # --- on the way -----------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Do what can be done without waiting, but for room in the engine; True when something was."""
        if not self.open:
            return self._take_answers()
        assert self.source is not None
        try:
            moved, requests = self.long_form.advance(self.source, self.has_room)
        except AsrServeError as error:
            self._fail(error)
            return True
        self.pending.extend(map(self._submit, requests))
        return self._take_answers() or moved

    @property
    def has_room(self) -> bool:
        return self.call.has_room and (self.diarizer is None or self.diarizer.has_room)

    @property
    def open(self) -> bool:
        """There is more of it to be asked for."""
        return self.error is None and not self.long_form.finished

    def _submit(self, request: SegmentRequest) -> tuple[Span, Ticket]:
        check, span = self.call.stop.check, request.span
        check()
        priority = "bulk" if span.start_samples >= PROMPT_SAMPLES else self.call.options.priority
        ticket = self.call.client.submit(request.pcm, request.search, priority, wait=True, check=check)
        self.call.ahead_samples += span.samples
        ticket.future.add_done_callback(self.call.wake)
        return span, ticket

    def _take_answers(self) -> bool:
        moved = False
        try:
            moved = self.diarizer is not None and self.diarizer.advance()
        except AsrServeError as error:
            self._fail(error)
        while self.pending and self.pending[0][1].future.done():
            moved = True
            span, ticket = self.pending.popleft()
            self.call.ahead_samples -= span.samples
            try:
                answer = ticket.future.result()
                heard = self.long_form.accept_answer(span, answer)
            except AsrServeError as error:
                self._fail(error)
                break
            self.answers.append(heard)
            if answer.reused:
                self.cached_samples += heard.end_samples - span.start_samples
            if heard.follow_up:
                self.pending.appendleft(self._submit(heard.follow_up))
        if self.long_form.finished:  # nobody else need wait for its session until the last answer is there
            if self.diarizer is not None and self.error is None:
                self.diarizer.finish()
            self._release()
        return moved

    # --- results ------------------------------------------------------------------------------------

    def ready(self, unopened: bool) -> Iterator[Event]:
        """The events of this file that are due. Only the first file of the window is asked."""
        while self.answers:
            heard = self.answers.popleft()
            for segment in heard.segments:
                samples = segment.end_samples - segment.start_samples
                self.languages[heard.language] += samples
                if heard.language_prob:
                    self.language_probs.setdefault(heard.language, []).append((heard.language_prob, samples))
                if self.diarizer is not None:
                    self.undiarized.append((segment, heard.phases, heard.language))
                else:
                    yield self._segment_done(segment, heard.phases, heard.language)
            yield self._progress(heard.end_samples, unopened)
        if self.pending or self.open or not (self.error or self.diarizer is None or self.diarizer.finished):
            return
        turns: tuple[SpeakerTurn, ...] = ()
        if self.diarizer is not None and self.error is None:
            turns = self.diarizer.turns()
            who = TurnIndex(turns)
            for segment, phases, language in self.undiarized:
                for part in self.diarizer.split_by_speaker(segment, who):
                    yield self._segment_done(part, phases, language)
        self._release()
        self.finished = True
        yield self._progress(self.long_form.read_samples, unopened)
        if self.error is not None:
            yield FileFailed(self.index, self.key, self.error)
        else:
            spoken, model = " ".join(s.text for s in self.segments), self.call.client.card.name
            length, segments, cached = self.long_form.read_samples, tuple(self.segments), self.cached_samples
            language, sure = self._language, self._language_prob
            transcript = Transcript(self.key, spoken, language, length, segments, model, cached, sure, turns)
            yield FileDone(self.index, self.key, transcript)

    def _segment_done(self, segment: Segment, phases: EngineTimestamps | None, language: str) -> SegmentDone:
        segment = self.call.normalizer.normalize(segment, language)
        self.segments.append(segment)
        return SegmentDone(self.index, self.key, segment, phases)

    @property
    def _language(self) -> str:
        """The one that was asked for, or most of it was in."""
        return self.call.language or next((name for name, _ in self.languages.most_common(1)), "")

    @property
    def _language_prob(self) -> float:
        """Of the language, on average; 0 where it was told."""
        found = self.language_probs.get(self._language, ())
        samples = sum(each for _, each in found)
        return sum(sure * each for sure, each in found) / samples if samples else 0.0

    def _progress(self, position: int, unopened: bool) -> Progress:
        self.call.done_samples += position - self.reported
        self.reported = position
        total = None if unopened else self.call.announced
        return Progress(self.call.done_samples, total if total is None else max(total, self.call.done_samples))

    # --- endings ------------------------------------------------------------------------------------

    def _fail(self, error: AsrServeError) -> None:
        """The file cannot go on; what is already cut is let go."""
        self.error = self.error or error
        self.abandon()

    def abandon(self) -> None:
        """Cancel everything under way."""
        for span, ticket in self.pending:
            self.call.ahead_samples -= span.samples
            self.call.client.cancel(ticket)
        self.pending.clear()
        self._release()

    def _release(self) -> None:
        self.long_form.close()
        if self.source is not None:
            self.source.close()


def _endpoint(client: EngineClient, options: TranscribeOptions) -> EndpointConfig:
    chosen = endpoint_overrides(options.threshold, options.pad_before_ms)
    if not options.vad:
        chosen["min_speech_ms"] = 0
    return EndpointConfig(
        max_segment_ms=segment_limit_ms(client, options.max_segment_ms),
        schedule=options.silence_schedule or OFFLINE_SCHEDULE,
        **chosen,
    )
