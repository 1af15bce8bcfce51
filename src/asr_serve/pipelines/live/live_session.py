"""Live session of one client: samples in as they are spoken, events out.

Sans I/O: `append_audio` takes samples, `advance` returns new events, and `wake` is called, from any thread, when
it is worth calling again. Nothing here blocks, sleeps or starts a thread, so that a library's iterator and a
server's socket drive it alike. Positions are samples since the start of the session.

1. `LiveVoiceActivity` sends whole windows to the engine, one chunk at a time; audio that arrives meanwhile is the
   next chunk. The engine's loop steps the chunks of all sessions in one batch.
2. `Endpointer` (`audio/endpointing`) opens and closes segments by the streaming schedule.
3. A recognizer gives each segment its text. `RepeatedRecognizer` makes anchors and a final, which are always
   made, and partials as often as the load allows. In a pause it makes the final early, so that it is ready when
   the pause has lasted long enough. `StreamingRecognizer` serves streaming models.
4. `LiveSegmentDone` events come in order and never change; `LivePartial` holds the text known after them.
5. `TurnDetector` reports turns. `flush` ends the open segment where the audio ends.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from asr_serve import units
from asr_serve.audio.audio_buffers import AudioHistory
from asr_serve.audio.endpointing import WINDOW_SAMPLES, Endpointer
from asr_serve.diarization.clustering import SpeakerCount
from asr_serve.engine.client import EngineClient
from asr_serve.errors import AtCapacity
from asr_serve.pipelines.live.events import (
    FlushDone,
    LiveEvent,
    LivePartial,
    LiveSegmentDone,
    SessionFinished,
    TurnEvent,
    endpoint_config,
)
from asr_serve.pipelines.live.live_diarizer import LiveDiarizer
from asr_serve.pipelines.live.live_normalizer import LiveNormalizer
from asr_serve.pipelines.live.recognizer import AudioPosition, LiveRecognizer, LiveSegment
from asr_serve.pipelines.live.repeated_recognizer import RepeatedRecognizer
from asr_serve.pipelines.live.session_state import LiveSessionState, SavedLiveSession
from asr_serve.pipelines.live.streaming_recognizer import StreamingRecognizer
from asr_serve.pipelines.live.turn_detector import TurnDetector
from asr_serve.pipelines.live.voice_activity import LiveVoiceActivity
from asr_serve.pipelines.options import ListenOptions
from asr_serve.pipelines.prompting import hotword_bias, live_language_model, normalizes_text, prompt_tokens
from asr_serve.pipelines.segments import (
    check_decoder_options,
    check_diarization,
    check_search,
    requests_words,
    resolve_language,
)
from asr_serve.pipelines.silence_tracker import SilenceTracker
from asr_serve.text.tokenizers import Tokenizer
from asr_serve.types import Segment, Span

MAX_OPEN_SAMPLES = units.s_to_samples(60)
"""Limit for audio received and not yet in a segment that is done."""
MAX_CONCURRENT_SEGMENTS = 4
"""Closed segments of one session that are recognized at once."""
MAX_PENDING_FLUSHES = 64
FLUSH_RETRY_MS = 1_000


class LiveSession:
    """Recognition of one live client. Call from one thread at a time."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        options: ListenOptions,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        api_client: str | None = None,
        saved: SavedLiveSession | None = None,
    ) -> None:
        """`clock`: time in seconds by which partials are spaced. `api_client`: whose session it is, where that is
        known, for a fair share of new sessions. `saved`: the session to continue, of the same options. Raises
        OptionError, WeightsMissing, AtCapacity (no session is free, or live sessions already wait too long),
        EngineClosed, ValueError (a state that does not fit)."""
        self.language = resolve_language(client, options.language)
        normalizes = normalizes_text(client.card, options.itn)
        self._normalizer = LiveNormalizer(self.language, wake) if normalizes else None
        how_many = SpeakerCount.of(options.num_speakers, options.min_speakers, options.max_speakers)
        if options.speakers:
            check_diarization(client)
        self._diarizer = LiveDiarizer(client, options.words is not False, how_many, wake) if options.speakers else None
        words = requests_words([client.card], options.words, speakers=options.speakers)
        prompt = prompt_tokens(client, tokenizer, options.prompt)
        bias = hotword_bias(client, tokenizer, options.hotwords)
        language_model = live_language_model(client, options)
        check_search(client, "transcribe", options.temperatures, beam=1)
        check_decoder_options(client, options)
        self._endpointer = Endpointer(endpoint_config(client, options))
        self._anchor_interval_samples = units.ms_to_samples(options.lock_ms)
        self.received_samples = 0
        self._audio = AudioHistory()
        if client.card.streaming:
            self._recognizer: LiveRecognizer = StreamingRecognizer(
                client,
                tokenizer.decode,
                self._audio,
                self._endpointer.config.pad_after_ms,
                words,
                wake,
                bias,
                language_model,
            )
        else:
            self._recognizer = RepeatedRecognizer(
                client, tokenizer.decode, options, prompt, bias, self._endpointer, self._audio, wake, clock, words=words
            )
        self._silence = SilenceTracker(self._endpointer.config.neg_threshold)
        self._scored_samples = 0
        """Windows before this have been scored."""
        self._segments: deque[LiveSegment] = deque()
        self._turns = TurnDetector(options.turn, client, wake)
        self._flushes: deque[FlushDone] = deque()
        """Flushes to be done when all windows before their position have been scored."""
        self._flushed = 0
        """Position of the last flush that ended a segment; audio up to here is decided, whatever its window's
        score."""
        self._new_events: list[LiveEvent] = []
        self._deferred_events: deque[tuple[int, LiveEvent]] = deque()
        """Events that follow the segments before their position."""
        self._last_partial = LivePartial(0, 0)
        self._finishing = self._input_ended = self._finished_all = False
        network = None if saved is None else saved.state.voice_activity.network
        self._session = client.open_vad_session(live=True, api_client=api_client, state=network)
        self._voice_activity = LiveVoiceActivity(self._session, client.config.vad_windows - 32, wake)
        if saved is not None:
            with contextlib.ExitStack() as failed:
                failed.callback(self.close)
                try:
                    self._import(saved)
                except (LookupError, TypeError, AttributeError, AssertionError) as failure:
                    raise ValueError(f"the state does not fit: {type(failure).__name__} {failure}") from failure
                failed.pop_all()

    # --- state -----------------------------------------------------------------------------------------

    def export_state(self) -> LiveSessionState | None:
        """Returns the state after the events that were returned, from which another session continues with the audio
        from `audio_from` on. None while an event waits for a stage after recognition or for the turn model: try again
        after the next `advance`. Always None with speakers, once the session is closed, and where the engine does not
        report the state of voice activity."""
        turns, voice_activity = self._turns.export_state(), self._voice_activity.export_state()
        normalizing = self._normalizer is not None and self._normalizer.busy
        if turns is None or voice_activity is None or normalizing or self._diarizer is not None or self._finished_all:
            return None
        deferred: list[tuple[int, TurnEvent | FlushDone]] = []
        for position, event in self._deferred_events:
            assert isinstance(event, TurnEvent | FlushDone)
            deferred.append((position, event))
        return LiveSessionState(
            audio_from=min(self._oldest_needed, voice_activity.scored_samples, self.received_samples),
            scored_samples=self._scored_samples,
            flushed=self._flushed,
            flushes=list(self._flushes),
            deferred_events=deferred,
            last_partial=self._last_partial,
            endpointer=self._endpointer.export_state(),
            silence=self._silence.export_state(),
            turns=turns,
            voice_activity=voice_activity,
            segments=self._recognizer.export_segments(self._segments),
            finishing=self._finishing,
            input_ended=self._input_ended,
        )

    @property
    def needed_from_samples(self) -> int:
        """Start of the audio that may still be needed."""
        return self._audio.start

    def received_audio(self, from_samples: int) -> tuple[int, np.ndarray]:
        """Returns the audio from there on that may still be needed, and its first position."""
        start = max(from_samples, self._audio.start)
        if start >= self._audio.end:
            return start, np.zeros(0, np.float32)
        return start, self._audio.slice(Span(start, self._audio.end))

    def _import(self, saved: SavedLiveSession) -> None:
        state = saved.state
        self._audio.start = self._audio.end = state.audio_from
        self._audio.append(saved.pcm)
        self.received_samples = self._audio.end
        self._scored_samples, self._flushed = state.scored_samples, state.flushed
        self._flushes.extend(state.flushes)
        self._deferred_events.extend(state.deferred_events)
        self._last_partial = state.last_partial
        self._endpointer.import_state(state.endpointer)
        self._silence.import_state(state.silence)
        self._turns.import_state(state.turns)
        self._voice_activity.import_state(state.voice_activity)
        if len(unscored := saved.pcm[max(0, state.voice_activity.scored_samples - state.audio_from) :]):
            self._voice_activity.append_audio(unscored)
        self._segments.extend(self._recognizer.import_segments(state.segments, self.received_samples))
        self._input_ended = state.input_ended
        if state.finishing:
            self.finish()

    # --- client ----------------------------------------------------------------------------------------

    def append_audio(self, pcm: np.ndarray) -> None:
        """Appends `pcm` (n,) float32 at 16 kHz, any n."""
        assert not self._finishing, "put after finish"
        if len(pcm):
            self._voice_activity.append_audio(pcm)
            self._audio.append(pcm)
            self.received_samples += len(pcm)

    def flush(self, name: str) -> None:
        """Finalizes all audio so far: the open segment ends here. A `FlushDone` of that name follows. Raises
        AtCapacity when MAX_PENDING_FLUSHES are pending."""
        assert not self._finishing, "flush after finish"
        if len(self._flushes) + len(self._deferred_events) >= MAX_PENDING_FLUSHES:
            raise AtCapacity(f"{MAX_PENDING_FLUSHES} flushes are under way", "no more at once", FLUSH_RETRY_MS)
        self._flushes.append(FlushDone(name, self.received_samples))

    def finish(self) -> None:
        """Ends the audio; `SessionFinished` follows."""
        self._finishing = True
        self._voice_activity.finish()

    @property
    def full(self) -> bool:
        """Returns whether no more audio should be appended until `advance` has caught up."""
        unwritten = self._normalizer is not None and self._normalizer.full
        return unwritten or self.open_samples > MAX_OPEN_SAMPLES

    @property
    def open_samples(self) -> int:
        """Audio received that is neither in a segment that is done nor known to be silence."""
        done = self._segments[0].start if self._segments else self._scored_samples
        return max(0, self.received_samples - done)

    @property
    def open_speech(self) -> tuple[Span, bool] | None:
        """Span of the first segment that is not done, as far as it is known, and whether it has ended; None: there is
        none."""
        if not self._segments:
            return None
        first = self._segments[0]
        end = self.scored_samples if first.end is None else min(first.end, self.received_samples)
        return Span(first.start, max(first.start, end)), first.closed

    @property
    def scored_samples(self) -> int:
        """End of the received audio in which speech has been looked for; all of it that is in events is before that."""
        return min(self._scored_samples, self.received_samples)

    @property
    def due_s(self) -> float | None:
        """Time on `clock` at which to call `advance` even without `wake`, for a partial that was put off; None:
        never."""
        return self._recognizer.due_s

    @property
    def idle(self) -> bool:
        """Returns whether nothing is pending: there are no events before more audio is appended."""
        stages_busy = any(stage is not None and stage.busy for stage in (self._diarizer, self._normalizer))
        busy = stages_busy or self._turns.waiting or any(segment.busy for segment in self._segments)
        return self._voice_activity.idle and not busy

    def advance(self) -> list[LiveEvent]:
        """Collects the engine's results, submits what is next and returns new events.

        Raises an AsrServeError when this session cannot go on.
        """
        if self._finished_all:
            return self._post_process([])
        self._recognizer.due_s = None
        self._process_windows()
        for segment in self._segments:
            self._recognizer.collect_results(segment)
        for left, right in zip(self._segments, list(self._segments)[1:], strict=False):
            self._recognizer.join_segments(left, right)
        events, self._new_events = self._new_events, []
        events += self._segments_done()
        position = self._position
        for index, segment in enumerate(self._segments):
            if index < MAX_CONCURRENT_SEGMENTS or not segment.closed:
                self._recognizer.schedule(segment, position)
        self._release_audio()
        known = self._segments[-1].text_to if self._segments else 0
        events += self._turns.eager_end(self._endpointer, self._scored_samples, known)
        partial = self._partial_now()
        if events or (partial.locked_text, partial.tentative_text) != (
            self._last_partial.locked_text,
            self._last_partial.tentative_text,
        ):
            if partial.text or self._last_partial.text:
                events.append(partial)
            self._last_partial = partial
        if self._input_ended and not self._segments:
            self._finished_all = True
            self._session.close()
            events.append(SessionFinished(self.received_samples))
        return self._post_process(events)

    def close(self) -> None:
        """Cancels what is pending and frees the session. May be called at any time."""
        self._finished_all = True
        for segment in self._segments:
            self._recognizer.discard(segment)
        for stage in (self._diarizer, self._normalizer):
            if stage is not None:
                stage.close()
        self._session.close()

    # --- voice activity --------------------------------------------------------------------------------

    def _process_windows(self) -> None:
        """Processes scored windows one by one until the turn model has to answer, with flushes at their
        positions."""
        self._voice_activity.advance()
        while not self._turns.waiting:
            if self._turns.turn_ended() and self._scored_samples <= self.received_samples:
                self._flush(self._scored_samples)
            while self._flushes and self._flushes[0].position_samples < self._scored_samples + WINDOW_SAMPLES:
                flushed = self._flushes.popleft()
                self._flush(flushed.position_samples)
                self._deferred_events.append((flushed.position_samples, flushed))
            if (score := self._voice_activity.next_probability()) is None:
                break
            spans = self._endpointer.append_probabilities(score)
            self._silence.append_scores(score)
            self._scored_samples += WINDOW_SAMPLES
            self._update_segments(spans)
            if span := self._turns.model_input(self._endpointer, min(self._scored_samples, self.received_samples)):
                self._turns.submit_to_model(self._endpointer, self._audio.slice(span))
        if self._voice_activity.finished and not (self._input_ended or self._turns.waiting):
            self._input_ended = True
            self._update_segments(self._endpointer.finish(self.received_samples))

    def _flush(self, position: int) -> None:
        self._flushed = max(self._flushed, min(position, self.received_samples))
        self._update_segments(self._endpointer.flush(position))
        for segment in self._segments:
            segment.limit_overlap(self._flushed)

    def _update_segments(self, closed: list[Span]) -> None:
        """Updates the segments after a window: those that closed, one that opened, an anchor that is due."""
        endpointer = self._endpointer
        self._update_turns(closed)
        # The rest of a cut segment may end in the same window.
        starts = [span.start_samples for span in closed[1:]]
        for span, after in zip(closed, [*starts, endpointer.open_from_samples], strict=False):
            segment = self._segment_at(span.start_samples, closed)
            segment.end, segment.decided_samples = span.end_samples, self._decided_samples
            segment.cut_off = after == span.end_samples and endpointer.split_mid_speech
        start = endpointer.open_from_samples
        last = self._segments[-1] if self._segments else None
        if last is not None and not last.closed and last.start != start:
            self._recognizer.discard(self._segments.pop())  # the endpointer dropped it: too little speech
        if start is None:
            return
        segment = self._segment_at(start, closed)
        settled = self._scored_samples - segment.start <= endpointer.settled_samples
        if endpointer.is_certain and endpointer.pause_from_samples is None and settled:
            segment.extend_speech(min(self._scored_samples, self.received_samples), self._anchor_interval_samples)

    def _update_turns(self, closed: list[Span]) -> None:
        for turn in self._turns.update(self._endpointer, self._decided_samples, closed):
            if turn.state == "ended":
                self._deferred_events.append((turn.position_samples, turn))
            else:
                self._new_events.append(turn)

    @property
    def _decided_samples(self) -> int:
        """End of the audio that may be in closed segments."""
        return max(self._flushed, min(self._scored_samples, self.received_samples))

    @property
    def _position(self) -> AudioPosition:
        return AudioPosition(
            self._scored_samples,
            self._decided_samples,
            self.received_samples,
            self._open_until_samples,
            self._endpointer.pause_from_samples,
            self._input_ended,
        )

    @property
    def _open_until_samples(self) -> int:
        """End of the received audio that no pause, cut, flush or turn can move out of the open segment."""
        scored = self._scored_samples
        limits = [self._endpointer.open_until_samples, self._turns.earliest_end_samples(self._endpointer, scored)]
        limits += [flush.position_samples for flush in list(self._flushes)[:1]]
        return min(max(scored, min(limits)), self.received_samples)

    def _segment_at(self, start: int, closed: list[Span]) -> LiveSegment:
        """Returns the segment that starts at `start`: the last one, or a new one. `closed`: spans that closed
        in this window. One ends where another starts only if it was cut; one that closed earlier ended in a
        pause."""
        if not self._segments or self._segments[-1].start != start:
            cut = any(span.end_samples == start for span in closed)
            before = self._segments[-1] if cut else None
            self._segments.append(self._recognizer.open_segment(start, self._endpointer.split_mid_speech, before))
        return self._segments[-1]

    def _release_audio(self) -> None:
        """Drops the audio that nothing can need any more."""
        oldest = self._oldest_needed
        self._audio.drop_before(oldest)
        self._silence.forget_before(oldest)

    @property
    def _oldest_needed(self) -> int:
        oldest = min((segment.audio_from for segment in self._segments), default=self._scored_samples)
        return min(oldest, self._endpointer.keep_from_samples)

    # --- events ----------------------------------------------------------------------------------------

    def _segments_done(self) -> list[LiveEvent]:
        """Returns the segments that are final, in order, and the events that follow them."""
        events: list[LiveEvent] = []
        while self._segments and self._is_complete(0):
            done = self._segments.popleft()
            if segment := done.build_segment(self._silence):
                events.append(self._segment_done(done, segment))
            events += self._due_events()
        return events + self._due_events()

    def _segment_done(self, done: LiveSegment, found: Segment) -> LiveSegmentDone:
        event = LiveSegmentDone(found, done.decided_samples, *done.language_and_prob)
        if self._diarizer is not None:
            assert done.end is not None
            span = Span(done.start, min(done.end, self.received_samples))
            self._diarizer.submit_segment(event, span, self._audio.slice(span))
        return event

    def _post_process(self, events: list[LiveEvent]) -> list[LiveEvent]:
        """Adds speakers, then written forms, and returns the events that are complete, in order, earlier ones
        included."""
        for stage in (self._diarizer, self._normalizer):
            if stage is not None:
                stage.enqueue(events)
                events = stage.ready_events()
        return events

    def _due_events(self) -> list[LiveEvent]:
        first = self._segments[0] if self._segments else None
        due: list[LiveEvent] = []
        while self._deferred_events and (
            first is None or not first.closed or first.start >= self._deferred_events[0][0]
        ):
            due.append(self._deferred_events.popleft()[1])
        return due

    def _is_complete(self, index: int) -> bool:
        segment = self._segments[index]
        if not segment.finished:
            return False
        return not segment.cut_off or (len(self._segments) > index + 1 and self._segments[index + 1].start_resolved)

    def _partial_now(self) -> LivePartial:
        if not self._segments:
            return LivePartial(self._decided_samples, self._decided_samples)
        first, texts = self._segments[0], []
        end = first.recognized_to
        for segment in self._segments:
            # Text behind a segment without any would seem to follow directly.
            if not segment.start_resolved or segment.recognized_to == segment.start:
                break
            texts.append(segment.shown_text)
            end = segment.recognized_to
        words, fixed = " ".join(text for text in texts if text), first.locked_text
        end = min(end, self.received_samples)
        return LivePartial(first.output_from, end, fixed, words[len(fixed) :], first.locked_to)
