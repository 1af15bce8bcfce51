"""Recognition of live segments by a streaming model, which processes the audio once, as it arrives.

A `_TokenStream` follows the audio. Its tokens are final, except for a tail that a wider search may still change. A
stream begins and ends with a segment. Where a segment is cut in the middle of speech, the stream continues in the
next segment, and the times of words tell which side they belong to.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from asr_serve import units
from asr_serve.audio.audio_buffers import AudioHistory
from asr_serve.audio.endpointing import CALM_MS
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.engine.client import EngineClient
from asr_serve.engine.client import RecognitionStream as EngineStream
from asr_serve.errors import Cancelled, EngineCrashed, StepFailed
from asr_serve.pipelines.live.recognizer import AudioPosition, LiveSegment, PaceEstimator
from asr_serve.pipelines.live.segment_state import LiveSegmentStates, StreamedSegmentState, TokenStreamState
from asr_serve.pipelines.segments import PADDING_SAMPLES, build_segment
from asr_serve.pipelines.silence_tracker import SilenceTracker
from asr_serve.text.word_timing import token_times_from_frames
from asr_serve.types import LanguageModelChoice, SearchResult, SearchToken, Segment, Span

MIN_CHUNK_SAMPLES = units.ms_to_samples(80)
"""Smallest chunk sent to the engine; no model's chunk is shorter."""
MAX_STREAM_TRIES = 3
"""Attempts for a stream that fails in a step of the engine."""
MAX_CARRY_AT_PAUSE_SAMPLES = units.s_to_samples(60)
"""Length past which a stream is not carried over a cut that lies in a pause: all its audio is kept, to be
recognized again if an engine dies."""
MAX_STREAM_SAMPLES = units.s_to_samples(300)
"""Length past which a stream is carried over no cut at all."""
PAUSE_MARGIN_SAMPLES = units.ms_to_samples(CALM_MS // 2)
"""Silence on each side of a cut that lies in a pause."""
WORD_SETTLE_SAMPLES = units.ms_to_samples(1_500)
"""Audio to process after the last word before a cut until that word counts as complete, if no other begins."""
Detokenize = Callable[[list[int]], str]


class _TokenStream:
    """Streaming recognition from the start of a segment, with tokens at positions in the session's audio."""

    def __init__(
        self,
        client: EngineClient,
        text: Detokenize,
        start: int,
        wants_words: bool,
        bias: str,
        language_model: LanguageModelChoice | None,
    ) -> None:
        """`bias`, `language_model`: as in SearchOptions."""
        self._client, self._text, self._start, self.wants_words = client, text, start, wants_words
        self._bias, self._language_model = bias, language_model
        self._padding_samples = PADDING_SAMPLES if client.card.pads_segments else 0
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.token_samples: list[int] = []
        """Time of each token, as a sample position; non-decreasing."""
        self.word_starts: list[int] = []
        """Indices of the tokens that begin words."""
        self.runs: list[tuple[int, int]] = []
        """First frame of each token and the one behind its last, as far as they have been reported."""
        self.tail: tuple[int, ...] = ()
        self.recognized_to = start
        self.pending: Future[SearchResult] | None = None
        self.stops: deque[int] = deque()
        """Positions at which chunks end, so that what is known there does not depend on how the audio arrived."""
        self._sent_to = start
        self._received_tokens = self._received_runs = self._tries = 0
        self._stream: EngineStream | None = None
        self._last = self.finished = False

    def export_state(self) -> TokenStreamState:
        return TokenStreamState(
            start=self._start,
            tokens=list(self.tokens),
            logprobs=list(self.logprobs),
            token_samples=list(self.token_samples),
            word_starts=list(self.word_starts),
            runs=list(self.runs),
            tail=self.tail,
            recognized_to=self.recognized_to,
            stops=list(self.stops),
            finished=self.finished,
        )

    def import_state(self, state: TokenStreamState) -> None:
        """Continues with these tokens. The audio is sent from its start again, unless all of it was recognized."""
        self.tokens, self.logprobs = list(state.tokens), list(state.logprobs)
        self.token_samples, self.word_starts = list(state.token_samples), list(state.word_starts)
        self.runs, self.tail, self.stops = list(state.runs), state.tail, deque(state.stops)
        self.recognized_to = state.recognized_to
        self.finished = self._last = state.finished

    @property
    def start(self) -> int:
        """Start of the audio to keep in case it must be recognized again."""
        return self._start

    @property
    def text_to(self) -> int:
        """End of the audio whose words are all among the tokens."""
        lag = self._client.card.lag_samples(self._client.config.chunk_frames or 0)
        return self.recognized_to if self.finished else self.recognized_to - lag

    def collect_results(self) -> None:
        """Collects tokens. Raises StepFailed, Cancelled or EngineCrashed after the last attempt, AtCapacity at
        once: no slot is free."""
        if self.pending is None or not self.pending.done():
            return
        future, self.pending = self.pending, None
        try:
            result = future.result()
        except (StepFailed, Cancelled, EngineCrashed) as failure:  # the stream's state in the engine is lost
            self.close()
            self._tries += 1
            if self._tries == MAX_STREAM_TRIES or isinstance(failure, EngineCrashed):
                raise
            self._sent_to, self._received_tokens, self._received_runs, self._last = self._start, 0, 0, False
            self.runs.clear()
            return
        self.recognized_to, self.finished = max(self.recognized_to, self._sent_to), self._last
        if self.finished:
            self.close()
        for token in result.fixed_tokens:
            self._received_tokens += 1
            if self._received_tokens > len(self.tokens):  # else known from before a failed step
                self._append_token(token)
        for run in result.token_runs:
            self._received_runs += 1
            if self._received_runs > len(self.runs):  # else known from another engine
                self.runs.append(run)
        self.tail = tuple(token.id for token in result.tail_tokens)

    def send_audio(self, audio: AudioHistory, end: int, *, last: bool, live: bool, wake: Callable[[], None]) -> None:
        """Sends the audio up to `end` if nothing is pending and there is enough of it. `last`: no more follows."""
        if self.pending is not None or self._last:
            return
        stop = next((at for at in self.stops if self._sent_to < at <= end), None)
        if stop is not None:
            end, last = stop, False
        if end - self._sent_to < MIN_CHUNK_SAMPLES and not last and stop is None:
            return
        silence = np.zeros(self._padding_samples, np.float32)
        parts = [silence] if self._stream is None else []
        if end > self._sent_to:
            parts.append(audio.slice(Span(self._sent_to, end)))
        if last:
            parts.append(silence)
        if self._stream is None:
            self._stream = self._client.open_stream(
                live=live, words=self.wants_words, bias=self._bias, language_model=self._language_model
            )
        timed = self.wants_words and (last or stop is not None)
        self.pending = self._stream.submit_audio(np.concatenate(parts), last=last, timed=timed)
        self._sent_to, self._last = max(end, self._sent_to), last
        self.pending.add_done_callback(lambda _: wake())

    def last_stop(self, end: int) -> int:
        """Returns the last position up to `end` at which a chunk ends; 0: there is none."""
        return max((at for at in self.stops if at <= end), default=0)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = self.pending = None

    def _append_token(self, token: SearchToken) -> None:
        count = len(self.tokens)
        self.tokens.append(token.id)
        self.logprobs.append(token.logprob)
        at = self._start - self._padding_samples + token.frame * self._client.card.frame_samples
        self.token_samples.append(max(self.token_samples[-1] if self.token_samples else self._start, at))
        if not self.word_starts or self._begins_word():
            self.word_starts.append(count)

    def _begins_word(self) -> bool:
        """Returns whether the last token begins a word: behind a space, or in a script without any."""
        alone = self._text(self.tokens[-1:])
        return bool(alone) and (_unspaced(alone[0]) or len(self._text(self.tokens[self.word_starts[-1] :]).split()) > 1)

    def times(self, own: slice) -> tuple[tuple[int, int], ...]:
        """Returns start and end of these tokens, in samples of the session; empty unless the frames of all are
        known."""
        if len(self.runs) < own.stop:
            return ()
        origin = self._start - self._padding_samples
        spans = token_times_from_frames(self.runs, self._client.card.frame_samples, self.recognized_to - origin)
        return tuple((origin + start, origin + end) for start, end in spans[own])

    def word_from(self, position: int) -> int:
        """Index of the first token of the first word at `position` or later."""
        word = bisect_left(self.word_starts, position, key=self.token_samples.__getitem__)
        return self.word_starts[word] if word < len(self.word_starts) else len(self.tokens)


def _unspaced(letter: str) -> bool:
    """Returns whether the letter's script separates no words by spaces: Chinese and Japanese."""
    return unicodedata.east_asian_width(letter) == "W" and not "가" <= letter <= "힣"


class StreamedSegment:
    """Segment recognized by a stream. See LiveSegment."""

    def __init__(self, start: int, stream: _TokenStream, text: Detokenize, before: StreamedSegment | None) -> None:
        """`before`: the segment that was cut off where this one begins, in the same stream."""
        self.start = self.output_from = start
        self.stream, self._text, self.before = stream, text, before
        self.after: StreamedSegment | None = None
        """Next segment of the same stream."""
        self.previous = before
        """Segment whose `after` is this one, resolved or not."""
        self.end: int | None = None
        self.decided_samples = 0
        self.cut_off = False
        self.until: int | None = None
        """Position from which words belong to the next segment, where this one was cut for its length."""
        self._settle_at = 0
        self._confirmed_to = start
        """End of the audio that is certainly speech and will not be cut before; words after it may still be
        withdrawn."""
        self._first = 0 if before is None else -1
        self._count = -1
        """Number of the stream's tokens up to this segment's last one; -1: not known yet."""
        self._texts: dict[tuple[int, int, tuple[int, ...]], str] = {}

    def export_state(
        self, streams: Sequence[_TokenStream], segments: Sequence[StreamedSegment]
    ) -> StreamedSegmentState:
        """Returns the state, with indices into these."""
        before = None if self.start_resolved or self.before is None else segments.index(self.before)
        return StreamedSegmentState(
            stream=streams.index(self.stream),
            before=before,
            after=None if self.after is None else segments.index(self.after),
            start=self.start,
            end=self.end,
            decided_samples=self.decided_samples,
            cut_off=self.cut_off,
            until=self.until,
            settle_at=self._settle_at,
            confirmed_to=self._confirmed_to,
            first=self._first,
            count=self._count,
        )

    def import_state(self, state: StreamedSegmentState, segments: Sequence[StreamedSegment]) -> None:
        self.before = None if state.before is None else segments[state.before]
        self.after = None if state.after is None else segments[state.after]
        if self.after is not None:
            self.after.previous = self
        self.end, self.decided_samples, self.cut_off = state.end, state.decided_samples, state.cut_off
        self.until, self._settle_at, self._confirmed_to = state.until, state.settle_at, state.confirmed_to
        self._first, self._count = state.first, state.count

    def continue_in(self, after: StreamedSegment) -> None:
        assert self.end is not None
        self.after = after
        self._settle_at = max(self.end + WORD_SETTLE_SAMPLES, self.decided_samples)
        self.stream.stops.append(self._settle_at)

    @property
    def closed(self) -> bool:
        return self.end is not None

    @property
    def start_resolved(self) -> bool:
        if self._first < 0 and self.before is not None and self.before.finished:
            self._first, self.before.previous, self.before = self.before.last, None, None
        return self._first >= 0

    @property
    def first(self) -> int:
        """Index of this segment's first token in the stream."""
        assert self.start_resolved
        return self._first

    @property
    def last(self) -> int:
        """Index behind this segment's last token in the stream."""
        assert self._count >= 0
        return max(self._count, self.first)

    @property
    def finished(self) -> bool:
        return self._count >= 0 and self.start_resolved

    def resolve_end(self) -> None:
        """Checks whether the last word is complete; call whenever the stream has processed more audio."""
        stream = self.stream
        if self._count < 0 and self.closed:
            own = self._words_end
            known = own < len(stream.tokens) and not stream.wants_words  # word times arrive at the settling position
            if stream.finished or (self.after is not None and (known or self._end_resolved)):
                self._count = own

    @property
    def _end_resolved(self) -> bool:
        return self.stream.recognized_to >= self._settle_at

    @property
    def _words_end(self) -> int:
        """Index behind the segment's last word, as far as it is known."""
        return len(self.stream.tokens) if self.until is None else self.stream.word_from(self.until)

    @property
    def recognized_to(self) -> int:
        recognized_to = max(self.start, self.stream.recognized_to)
        return recognized_to if self.end is None else min(recognized_to, self.end)

    @property
    def text_to(self) -> int:
        return self.stream.text_to

    @property
    def busy(self) -> bool:
        return self.stream.pending is not None

    @property
    def audio_from(self) -> int:
        return self.stream.start

    @property
    def _locked_tokens(self) -> int:
        """Number of tokens of complete words (another word has begun or no audio follows) that no cut can move
        to another segment."""
        if self.finished:
            return self.last
        words = self.stream.word_starts
        own = self._words_end if self.closed else self.stream.word_from(self._confirmed_to)
        return max(self.first, min(own, words[-1])) if words else self.first

    @property
    def locked_text(self) -> str:
        return self._decode_tokens(self._locked_tokens)

    @property
    def locked_to(self) -> int:
        fixed = self._locked_tokens
        return max(self.start, self.stream.token_samples[fixed - 1]) if fixed > self.first else self.start

    @property
    def shown_text(self) -> str:
        if self.finished:
            return self._decode_tokens(self.last)
        return self._decode_tokens(len(self.stream.tokens), self.stream.tail)

    def _decode_tokens(self, end: int, tail: tuple[int, ...] = ()) -> str:
        """Decodes tokens up to `end`, cached: called far more often than tokens change."""
        key = self.first, end, tail
        if key not in self._texts:
            if len(self._texts) == 2:
                self._texts.clear()
            self._texts[key] = self._text([*self.stream.tokens[self.first : end], *tail])
        return self._texts[key]

    @property
    def language_and_prob(self) -> tuple[str, float]:
        return "", 0.0  # a streaming model uses the chosen language

    def extend_speech(self, end: int, lock: int) -> None:
        self._confirmed_to = end  # the stream advances without anchors

    def limit_overlap(self, position: int) -> None:
        """Does nothing: the segment ends where it closed, and so does its stream."""

    def build_segment(self, quiet: SilenceTracker) -> Segment | None:
        assert self.end is not None
        own, span = slice(self.first, self.last), Span(self.start, self.end)
        tokens, logprobs = tuple(self.stream.tokens[own]), tuple(self.stream.logprobs[own])
        mean = sum(logprobs) / max(1, len(logprobs))
        times = self.stream.times(own)
        recognition = Recognition(tokens, mean, 0.0, "stop", 1.0, logprobs, times=times)
        return build_segment(span, recognition, self._text, quiet=quiet.silences_in(span))


class StreamingRecognizer:
    """LiveRecognizer for streaming models."""

    def __init__(
        self,
        client: EngineClient,
        text: Detokenize,
        audio: AudioHistory,
        pad_after_ms: int,
        wants_words: bool,
        wake: Callable[[], None],
        bias: str = "",
        language_model: LanguageModelChoice | None = None,
    ) -> None:
        """`pad_after_ms`: as in EndpointConfig; `bias`, `language_model`: as in SearchOptions."""
        self._client, self._text, self._audio, self._wake = client, text, audio, wake
        self._pad_after = units.ms_to_samples(pad_after_ms)
        lag = client.card.lag_samples(client.config.chunk_frames or 0)
        self._pause_samples = max(self._pad_after, lag + 2 * MIN_CHUNK_SAMPLES)
        """Audio of a pause that is recognized even if no more speech follows: the words before it are complete by
        then."""
        self._wants_words, self._bias, self._language_model = wants_words, bias, language_model
        self.due_s: float | None = None
        self._pace = PaceEstimator()

    def open_segment(self, start: int, starts_mid_speech: bool, before: LiveSegment | None) -> StreamedSegment:
        if before is None:
            return StreamedSegment(start, self._new_stream(start), self._text, None)
        assert isinstance(before, StreamedSegment)
        if start - before.stream.start >= (MAX_STREAM_SAMPLES if starts_mid_speech else MAX_CARRY_AT_PAUSE_SAMPLES):
            before.until = start if starts_mid_speech else start + PAUSE_MARGIN_SAMPLES
            return self.open_segment(start, starts_mid_speech, None)
        before.until = start
        segment = StreamedSegment(start, before.stream, self._text, before)
        before.continue_in(segment)
        return segment

    def _new_stream(self, start: int) -> _TokenStream:
        return _TokenStream(self._client, self._text, start, self._wants_words, self._bias, self._language_model)

    def collect_results(self, each: LiveSegment) -> None:
        assert isinstance(each, StreamedSegment)
        each.stream.collect_results()
        each.resolve_end()

    def join_segments(self, left: LiveSegment, right: LiveSegment) -> None:
        """Does nothing: neighbours share one stream, or no audio."""

    def schedule(self, each: LiveSegment, at: AudioPosition) -> None:
        """Sends audio. Audio that cannot be past the end of the open segment does not wait for its voice activity.
        Of a pause only the beginning is sent, and the rest when speech goes on in the same segment: most callers are
        silent most of the time, and their silence costs as much as speech. So no audio is sent before it is known
        not to lie deeper in a pause, and the words depend on the audio alone."""
        assert isinstance(each, StreamedSegment)
        while each.after is not None:
            each = each.after
        if each.finished:
            return
        live = self._pace.priority(at.received_samples) == "live"
        if each.end is not None:
            end, quiet_from = each.decided_samples, each.end - self._pad_after
        else:
            end = at.open_until_samples
            quiet_from = at.scored_samples if at.silent_from_samples is None else at.silent_from_samples
        end = min(end, max(quiet_from + self._pause_samples, each.stream.last_stop(end)))
        each.stream.send_audio(self._audio, end, last=each.closed, live=live, wake=self._wake)

    def export_segments(self, segments: Sequence[LiveSegment]) -> LiveSegmentStates:
        own: list[StreamedSegment] = []
        streams: list[_TokenStream] = []
        for segment in segments:
            assert isinstance(segment, StreamedSegment)
            own.append(segment)
            if segment.stream not in streams:
                streams.append(segment.stream)
        return LiveSegmentStates(
            streamed=[segment.export_state(streams, own) for segment in own],
            streams=[stream.export_state() for stream in streams],
        )

    def import_segments(self, states: LiveSegmentStates, received: int) -> list[LiveSegment]:
        self._pace = PaceEstimator(received)
        streams = []
        for state in states.streams:
            streams.append(self._new_stream(state.start))
            streams[-1].import_state(state)
        segments = [StreamedSegment(each.start, streams[each.stream], self._text, None) for each in states.streamed]
        for segment, each in zip(segments, states.streamed, strict=True):
            segment.import_state(each, segments)
        return list(segments)

    def discard(self, each: LiveSegment) -> None:
        assert isinstance(each, StreamedSegment)
        if each.previous is not None:
            each.previous.after = None
        if each.start_resolved:
            each.stream.close()
        elif each.before is not None:  # the stream and all its words still belong to the segment before
            each.before.until = None
