"""Transcription of files: audio -> segments, or windows -> engine -> text, in order. START HERE.

One short clip and a thousand three-hour files take the same code. It runs in the caller's thread as a generator:
it decodes ahead while the engine computes, within bounds, and blocks until something finishes.
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
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.diarization.word_speakers import TurnIndex
from asr_serve.engine.client import EngineClient, Ticket, VadSession
from asr_serve.errors import AsrServeError, AtCapacity, Cancelled
from asr_serve.pipelines.offline.audio_reader import AudioReader, OpenReader, open_reader
from asr_serve.pipelines.offline.file_diarizer import DiarizedReader, FileDiarizer, KnownSpeakerVoices
from asr_serve.pipelines.offline.long_form import LongFormStrategy, SegmentAnswer, SegmentRequest
from asr_serve.pipelines.offline.overlap_recognizer import OverlapRecognizer
from asr_serve.pipelines.offline.parallel import ParallelLongForm
from asr_serve.pipelines.offline.sequential import SequentialLongForm
from asr_serve.pipelines.offline.speech_activity import SpeechActivity
from asr_serve.pipelines.options import PROMPT_SAMPLES, TranscribeOptions
from asr_serve.pipelines.prompting import (
    check_language_model_beam,
    hotword_bias,
    language_model_choice,
    normalizes_text,
    prompt_hotwords,
    prompt_itn,
    prompt_tokens,
)
from asr_serve.pipelines.segment_recognizer import EngineRecognizer, SegmentRecognizer
from asr_serve.pipelines.segments import (
    SegmentNormalizer,
    check_decoder_options,
    check_n_best,
    check_search,
    check_timestamps,
    endpoint_overrides,
    requests_words,
    resolve_language,
    segment_limit_ms,
)
from asr_serve.text.tokenizers import Tokenizer
from asr_serve.types import EngineTimestamps, Priority, Segment, Span, SpeakerTurn, Transcript

MAX_OPEN_FILES = 64
"""Files that are read at once; results of the later ones wait, as text, for the first."""
MAX_AHEAD_SAMPLES = units.s_to_samples(1_200)
"""Limit of audio cut into segments and not yet recognized."""


class SegmentDone(msgspec.Struct, frozen=True):
    index: int
    """Position of the file among the items."""
    key: str
    segment: Segment
    phases: EngineTimestamps | None = None
    """Times at which the engine worked on it."""


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
    """Audio of all files whose text was emitted."""
    total_samples: int | None
    """Duration of all files by their headers; None while some are unopened or have none."""


Event = SegmentDone | FileDone | FileFailed | Progress


class TranscribeCanceller:
    """Cancels one call of `events` from any thread: its generator cancels its work in the engine and raises
    Cancelled. Closing the generator is only possible in the thread that runs it."""

    def __init__(self) -> None:
        self.awake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.recognizer: SegmentRecognizer | None = None
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self.awake.put(None)
        if self.recognizer is not None:
            self.recognizer.wake_waiters()

    def check(self) -> None:
        if self._cancelled:
            raise Cancelled("the transcription was stopped")


def events(
    client: EngineClient,
    tokenizer: Tokenizer,
    items: Iterable[InputItem],
    options: TranscribeOptions,
    stop: TranscribeCanceller | None = None,
    recognizer: SegmentRecognizer | None = None,
    open_reader: OpenReader = open_reader,
) -> Generator[Event, None, None]:
    """Transcribes `items`; see Model.events. `recognizer`: what recognizes segments, where it is not `client` alone,
    its first engine. `open_reader`: opens the reader of an item's source. Raises OptionError at once, Cancelled after
    `stop.cancel()`."""
    segments: SegmentRecognizer = EngineRecognizer(client, tokenizer.decode) if recognizer is None else recognizer
    work = _Transcription(client, tokenizer, options, stop or TranscribeCanceller(), segments, open_reader)
    return work.run(iter(items))


class _Transcription:
    """One call: a window of files being read, in order, and one queue that is notified of everything that
    finishes."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        options: TranscribeOptions,
        stop: TranscribeCanceller,
        recognizer: SegmentRecognizer,
        open_reader: OpenReader,
    ) -> None:
        self.client, self.tokenizer, self.options = client, tokenizer, options
        self.open_reader = open_reader
        self.stop, self.awake, self.recognizer = stop, stop.awake, recognizer
        stop.recognizer = recognizer
        self.language = resolve_language(client, options.language)
        check_search(client, options.task, options.temperatures, options.beam)
        check_decoder_options(client, options)
        check_n_best(client, options.n_best, options.beam, options.temperatures, options.hotwords)
        self.sequential = options.long_form == "sequential"
        if self.sequential:
            check_timestamps(client)
        self.endpoint = _endpoint(recognizer, options)
        self.prompt_tokens = prompt_tokens(client, tokenizer, options.prompt)
        self.search = SearchOptions(
            temperatures=options.temperatures,
            task=options.task,
            language=self.language,
            prompt=self.prompt_tokens,
            beam=options.beam,
            bias=hotword_bias(client, tokenizer, options.hotwords),
            hotwords=prompt_hotwords(client.card, options.hotwords),
            itn=prompt_itn(client.card, options.itn),
            repetition_penalty=options.repetition_penalty,
            top_k=options.top_k,
            top_p=options.top_p,
            max_new_tokens=options.max_new_tokens,
            words=requests_words([each.card for each in recognizer.clients], options.words, speakers=options.speakers),
            hypotheses=options.n_best,
            language_model=language_model_choice(client, options.language_model, options.language_model_weight),
        )
        check_language_model_beam(client.card, options.language_model, options.beam)
        written = "en" if options.task == "translate" else self.language
        self.normalizer = SegmentNormalizer(written, itn=normalizes_text(client.card, options.itn))
        self.ahead_samples = 0
        self.done_samples = 0
        self.announced: int | None = 0

    def run(self, items: Iterator[InputItem]) -> Generator[Event, None, None]:
        files: deque[_FileJob] = deque()
        opened, remaining, deferred = 0, True, None
        self.known_voices = KnownSpeakerVoices(self.client, self.options.known_speakers, self.wake, self.stop.check)
        try:
            while files or remaining:
                self.stop.check()
                while remaining and len(files) < MAX_OPEN_FILES and self.has_room:
                    item = deferred or next(items, None)
                    if item is None:
                        remaining = False
                        break
                    try:  # waits for another call's session; one of this call is freed when its file is read
                        session = self._session(wait=not files)
                    except AtCapacity:
                        deferred = item
                        break
                    deferred = None
                    files.append(_FileJob(self, opened, item, self.long_form(session)))
                    opened += 1
                progressed = False
                for file in files:
                    progressed |= file.advance()
                while files:
                    yield from files[0].ready(remaining)
                    if not files[0].finished:
                        break
                    files.popleft()
                    progressed = True
                if files and not progressed:
                    self.awake.get()
                    while not self.awake.empty():
                        self.awake.get()
        finally:
            for file in files:
                file.abandon()

    def _session(self, *, wait: bool) -> VadSession | None:
        return self.client.open_vad_session(wait=wait, check=self.stop.check) if self.options.vad else None

    def long_form(self, session: VadSession | None) -> LongFormStrategy:
        """Creates the strategy for one file."""
        client, text = self.client, self.tokenizer.decode
        most_windows = client.config.vad_windows - 32
        if not self.sequential:
            model_of = self.recognizer.model_of
            return ParallelLongForm(
                client.card, self.endpoint, self.search, session, most_windows, text, self.wake, model_of
            )
        return SequentialLongForm(
            client.card,
            client.max_samples,
            self.search,
            text,
            context_tokens=self.prompt_tokens,
            remember=self.options.condition_on_previous_text,
            spoken=SpeechActivity(session, self.endpoint.threshold, most_windows, self.wake) if session else None,
        )

    @property
    def has_room(self) -> bool:
        return self.ahead_samples < MAX_AHEAD_SAMPLES

    @property
    def word_times(self) -> bool:
        """Returns whether every model of the recognizer has times of words."""
        return all(each.card.word_times for each in self.recognizer.clients)

    def priority(self, span: Span) -> Priority:
        """Returns the priority of a request: the call's at the start of a file."""
        return "bulk" if span.start_samples >= PROMPT_SAMPLES else self.options.priority

    def wake(self, _: Future[Any] | None = None) -> None:
        self.awake.put(None)


class _FileJob:
    """One input in progress: chunks read, requests in the engine, text returned."""

    def __init__(self, call: _Transcription, index: int, item: InputItem, way: LongFormStrategy) -> None:
        self.call, self.index, self.key, self.long_form = call, index, item.key, way
        self.finished = False
        self.error: AsrServeError | None = None
        self.segments: list[Segment] = []
        self.languages: Counter[str] = Counter()
        """Samples recognized in each language."""
        self.language_probs: dict[str, list[tuple[float, int]]] = {}
        """Detected probabilities of each language, with numbers of samples; empty where the language was
        chosen."""
        self.announced = self.reported = self.cached_samples = 0
        self.source: AudioReader | None = None
        options, check = call.options, call.stop.check
        self.diarizer = (
            FileDiarizer(call.client, options, call.known_voices, call.wake, check) if options.speakers else None
        )
        self.overlaps = (
            OverlapRecognizer(
                call.client,
                call.recognizer,
                way,
                self.diarizer,
                call.wake,
                check,
                words=options.words is not False,
                priority=call.priority,
            )
            if self.diarizer is not None and isinstance(way, ParallelLongForm) and call.word_times
            else None
        )
        self.undiarized: list[tuple[Segment, EngineTimestamps | None, str]] = []
        """Segments with their languages, emitted once their speakers are known."""
        self.turns: tuple[SpeakerTurn, ...] | None = None
        """Turns of all speakers, once they are known."""
        self.pending: deque[tuple[Span, Ticket]] = deque()
        self.answers: deque[SegmentAnswer] = deque()
        try:
            source = call.open_reader(item.source, options.limits, call.wake)
            self.source = DiarizedReader(source, self.diarizer) if self.diarizer else source
            self.announced = self.source.hint_samples or 0
            if not self.announced:
                call.announced = None
            elif call.announced is not None:
                call.announced += self.announced
        except AsrServeError as error:
            self._fail(error)

    # --- reading and recognition ----------------------------------------------------------------------

    def advance(self) -> bool:
        """Does what can be done without waiting, except for capacity in the engine. Returns whether anything
        was done."""
        if not self.open:
            return self._take_answers()
        assert self.source is not None
        try:
            progressed, requests = self.long_form.advance(self.source, self.has_room)
        except AsrServeError as error:
            self._fail(error)
            return True
        self.pending.extend(map(self._submit, requests))
        return self._take_answers() or progressed

    @property
    def has_room(self) -> bool:
        return self.call.has_room and (self.diarizer is None or self.diarizer.has_room)

    @property
    def _recognized(self) -> bool:
        """Returns whether all of it is recognized, but for overlapped speech."""
        return not self.pending and not self.open

    def _diarized(self) -> tuple[SpeakerTurn, ...]:
        """Returns the turns of all speakers, once the diarizer has finished."""
        assert self.diarizer is not None
        if self.turns is None:
            self.turns = self.diarizer.turns()
        return self.turns

    @property
    def open(self) -> bool:
        """Returns whether more of it is to be submitted."""
        return self.error is None and not self.long_form.finished

    def _submit(self, request: SegmentRequest) -> tuple[Span, Ticket]:
        check, span = self.call.stop.check, request.span
        check()
        ticket = self.call.recognizer.submit(request.pcm, request.search, self.call.priority(span), check)
        if self.overlaps is not None:
            self.overlaps.keep(request)
        self.call.ahead_samples += span.samples
        ticket.future.add_done_callback(self.call.wake)
        return span, ticket

    def _take_answers(self) -> bool:
        progressed = False
        try:
            progressed = self.diarizer is not None and self.diarizer.advance()
            if self.overlaps is not None and self.error is None:
                self.overlaps.drop_single_speakers()
                if self._recognized and self.diarizer is not None and self.diarizer.finished:
                    self.overlaps.start(self._diarized())
                    progressed |= self.overlaps.advance()
        except AsrServeError as error:
            self._fail(error)
        while self.pending and self.pending[0][1].future.done():
            progressed = True
            span, ticket = self.pending.popleft()
            self.call.ahead_samples -= span.samples
            try:
                answer = ticket.future.result()
                result = self.long_form.accept_answer(span, answer)
            except AsrServeError as error:
                self._fail(error)
                break
            self.answers.append(result)
            if answer.reused:
                self.cached_samples += result.end_samples - span.start_samples
            if result.follow_up:
                self.pending.appendleft(self._submit(result.follow_up))
        if self.long_form.finished:  # frees its session early, before the last answer: other files may wait for it
            if self.diarizer is not None and self.error is None:
                self.diarizer.finish()
            self._release()
        return progressed

    # --- results ------------------------------------------------------------------------------------

    def ready(self, unopened: bool) -> Iterator[Event]:
        """Yields the events of this file that are due. Only called for the first file of the window."""
        while self.answers:
            answer = self.answers.popleft()
            for segment in answer.segments:
                samples = segment.end_samples - segment.start_samples
                self.languages[answer.language] += samples
                if answer.language_prob:
                    self.language_probs.setdefault(answer.language, []).append((answer.language_prob, samples))
                if self.diarizer is not None:
                    self.undiarized.append((segment, answer.phases, answer.language))
                else:
                    yield self._segment_done(segment, answer.phases, answer.language)
            yield self._progress(answer.end_samples, unopened)
        if not self._recognized or not (self.error or self.diarizer is None or self.diarizer.finished):
            return
        if self.overlaps is not None and self.error is None and not self.overlaps.finished:
            return
        turns: tuple[SpeakerTurn, ...] = ()
        if self.diarizer is not None and self.error is None:
            turns = self._diarized()
            for segment, phases, language in self._by_speaker(TurnIndex(turns)):
                yield self._segment_done(segment, phases, language)
        self._release()
        self.finished = True
        yield self._progress(self.long_form.read_samples, unopened)
        if self.error is not None:
            yield FileFailed(self.index, self.key, self.error)
        else:
            text, model = " ".join(s.text for s in self.segments), self.call.recognizer.name
            length, segments, cached = self.long_form.read_samples, tuple(self.segments), self.cached_samples
            language, language_prob = self._language, self._language_prob
            transcript = Transcript(self.key, text, language, length, segments, model, cached, language_prob, turns)
            yield FileDone(self.index, self.key, transcript)

    def _by_speaker(self, turns: TurnIndex) -> list[tuple[Segment, EngineTimestamps | None, str]]:
        """Returns the segments of the file, each of one speaker, in order of time."""
        assert self.diarizer is not None
        found = []
        if self.overlaps is not None:
            self.overlaps.replace([segment for segment, _, _ in self.undiarized])
        for segment, phases, language in self.undiarized:
            for rest in [segment] if self.overlaps is None else self.overlaps.outside_turns(segment):
                found += [(part, phases, language) for part in self.diarizer.split_by_speaker(rest, turns)]
        if self.overlaps is not None:
            found += [(segment, None, self._language) for segment in self.overlaps.segments()]
            found.sort(key=lambda each: each[0].start_samples)
        return found

    def _segment_done(self, segment: Segment, phases: EngineTimestamps | None, language: str) -> SegmentDone:
        segment = self.call.normalizer.normalize(segment, language)
        self.segments.append(segment)
        return SegmentDone(self.index, self.key, segment, phases)

    @property
    def _language(self) -> str:
        """Chosen language, or the one of most audio."""
        return self.call.language or next((name for name, _ in self.languages.most_common(1)), "")

    @property
    def _language_prob(self) -> float:
        """Mean probability of the language; 0 where it was chosen."""
        weighted = self.language_probs.get(self._language, ())
        samples = sum(count for _, count in weighted)
        return sum(prob * count for prob, count in weighted) / samples if samples else 0.0

    def _progress(self, position: int, unopened: bool) -> Progress:
        self.call.done_samples += position - self.reported
        self.reported = position
        total = None if unopened else self.call.announced
        return Progress(self.call.done_samples, total if total is None else max(total, self.call.done_samples))

    # --- endings ------------------------------------------------------------------------------------

    def _fail(self, error: AsrServeError) -> None:
        """Fails the file and cancels its requests."""
        self.error = self.error or error
        self.abandon()

    def abandon(self) -> None:
        """Cancels everything pending."""
        for span, ticket in self.pending:
            self.call.ahead_samples -= span.samples
            self.call.recognizer.cancel(ticket)
        self.pending.clear()
        if self.overlaps is not None:
            self.overlaps.abandon()
        self._release()

    def _release(self) -> None:
        self.long_form.close()
        if self.source is not None:
            self.source.close()


def _endpoint(recognizer: SegmentRecognizer, options: TranscribeOptions) -> EndpointConfig:
    chosen = endpoint_overrides(options.threshold, options.pad_before_ms)
    if not options.vad:
        chosen["min_speech_ms"] = 0
    return EndpointConfig(
        max_segment_ms=min(segment_limit_ms(client, options.max_segment_ms) for client in recognizer.clients),
        schedule=options.silence_schedule or OFFLINE_SCHEDULE,
        **chosen,
    )
