"""Sequential long-form transcription, as Whisper's authors do it: each window begins where the model's timestamps
ended the last sentence, and is decoded with the previous text as context.

One request of a recording is pending at a time; many recordings are transcribed side by side. Voice activity cuts
nothing. It skips windows without speech and long silences at the start of a window; and where speech follows the
end of an answer, the next window begins at that end. Without it windows are exactly Whisper's, except that with
words requested they continue behind the words of a sentence whose timestamps cover silence alone.

Source  arXiv:2212.04356, section 4.5; windows, timestamps and prompts are those of openai-whisper's `transcribe`,
        which tests/pipelines/test_sequential_long_form.py compares with. Four things differ. A window is encoded
        by itself: its spectrogram depends neither on the audio around it nor on the level of the whole recording.
        Text that repeats itself at every temperature does not become context, as text sampled at a high one does
        not. A lone timestamp before a text is its start and not its end. The number of very short windows in a row
        is bounded. With voice activity, text that `segments.is_speech` rejects is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from asr_serve import units
from asr_serve.audio.audio_buffers import AudioHistory
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.models.registry import AsrCard, TimestampTokens
from asr_serve.pipelines.offline.audio_reader import AudioReader
from asr_serve.pipelines.offline.long_form import (
    MIN_ANSWER_SAMPLES,
    TIMESTAMP_SLACK_SAMPLES,
    SegmentAnswer,
    SegmentRequest,
)
from asr_serve.pipelines.offline.speech_activity import SpeechActivity
from asr_serve.pipelines.prompting import truncate_context
from asr_serve.pipelines.segments import build_segment, is_speech, select_tokens
from asr_serve.pipelines.silence_tracker import silences_by_level
from asr_serve.types import Segment, Span

MAX_REMEMBERED_TEMPERATURE = 0.5
"""Temperature above which text does not become context: it may be anything, and would mislead the next window."""
SHORT_WINDOW_SAMPLES, MAX_SHORT_WINDOWS = units.ms_to_samples(1_000), 3
"""Limit of consecutive windows shorter than the first; more of them mean that the model has lost its place, and
every further window advances by at least that."""
ONSET_SAMPLES = units.ms_to_samples(500)
"""Margin at the end of a silence in which a word may begin."""
MIN_LEADING_SILENCE_SAMPLES = units.s_to_samples(5)
"""Shortest silence at the start of a window that is skipped, with voice activity: a model may give speech
behind it timestamps within it. On sentences of one reading Whisper tiny does so after 15 s."""
MIN_SPEECH_SAMPLES = units.ms_to_samples(100)
"""Least non-silent audio in the range of a sentence; less is the edge of a silence, and no sentence."""
MIN_WINDOW_SAMPLES = units.ms_to_samples(10)
"""Shortest window: a shorter rest of a recording holds no sound. One frame of the spectrogram."""


class TimedSentence(NamedTuple):
    """One sentence of a window: its timestamps, in steps from the window's start, and its tokens, timestamps
    included. `end_step` None: the end of the window."""

    start_step: int
    end_step: int | None
    first_token: int
    end_token: int


class WindowSplit(NamedTuple):
    """Sentences of a window. `heard_steps`: steps of the window whose text is complete; None: all."""

    sentences: list[TimedSentence]
    complete_steps: int | None


def split_at_timestamps(tokens: Sequence[int], times: TimestampTokens) -> WindowSplit:
    """Splits a window's answer at its pairs of timestamps, the end of one sentence and the start of the next.

    Text after the last pair is incomplete and recognized again in the next window, which begins at that pair;
    unless it has an end timestamp too: then no speech follows it.
    """
    step = [token - times.first for token in tokens]
    cuts = [i for i in range(1, len(step)) if step[i - 1] >= 0 and step[i] >= 0]
    is_ended = len(step) > 1 and step[-1] >= 0 and step[-2] < 0
    if not cuts:
        timestamps = [(i, at) for i, at in enumerate(step) if at >= 0]
        if not timestamps or timestamps[-1][1] == 0:
            return WindowSplit([TimedSentence(0, None, 0, len(step))], None)
        last, at = timestamps[-1]
        return WindowSplit(
            [TimedSentence(at, None, 0, len(step)) if not last else TimedSentence(0, at, 0, len(step))], None
        )
    edges = [0, *cuts, *([len(step)] if is_ended else [])]
    parts = [TimedSentence(max(0, step[a]), max(0, step[b - 1]), a, b) for a, b in pairwise(edges)]
    return WindowSplit(parts, None if is_ended else step[cuts[-1] - 1])


class SequentialLongForm:
    """LongFormStrategy. Buffers two windows of audio at most, and as many context tokens as the model reads.

    `said`: context tokens of the first window. `remember`: whether a window's text is context of the next.
    `spoken`: None without voice activity.
    """

    def __init__(
        self,
        card: AsrCard,
        window_samples: int,
        search: SearchOptions,
        text: Callable[[list[int]], str],
        *,
        context_tokens: tuple[int, ...] = (),
        remember: bool = True,
        spoken: SpeechActivity | None = None,
    ) -> None:
        assert card.times is not None, f"{card.name} does not say when"
        self._card, self._times, self._text = card, card.times, text
        self._window_samples, self._condition_on_previous = window_samples, remember
        self._search = msgspec.structs.replace(search, timestamps=True)
        self._context_tokens = list(context_tokens)
        self.read_samples = 0
        self._position_samples = 0
        """Start of the next window."""
        self._reading, self._request_pending = True, False
        self._short_windows = 0
        """Windows in a row whose text ended at once."""
        self._audio, self._activity = AudioHistory(), spoken

    @property
    def finished(self) -> bool:
        return not self._reading and not self._request_pending and self._remaining_samples < MIN_WINDOW_SAMPLES

    @property
    def _remaining_samples(self) -> int:
        return self.read_samples - self._position_samples

    def advance(self, source: AudioReader, room: bool) -> tuple[bool, list[SegmentRequest]]:
        read_before = self.read_samples
        progressed = self._reading and self._read(source, 2 if room else 1)
        progressed |= self.read_samples > read_before
        if self._activity is not None:
            progressed |= self._activity.advance(last=not self._reading)
        if self._request_pending or (span := self._next_window()) is None:
            return progressed, []
        if self._activity is not None and not self._activity.has_speech(span.start_samples, span.end_samples):
            # A word may begin at the end of the window and not be scored as speech yet.
            self._advance_to(span.end_samples - (ONSET_SAMPLES if self._has_audio_after(span) else 0))
            return True, []
        if self._activity is not None:
            speech_from = self._activity.first_speech(span.start_samples, span.end_samples) - ONSET_SAMPLES
            if speech_from - span.start_samples >= MIN_LEADING_SILENCE_SAMPLES:
                self._advance_to(speech_from)
                return True, []
        self._request_pending = True
        search = msgspec.structs.replace(self._search, prompt=truncate_context(self._card, self._context_tokens))
        return True, [SegmentRequest(span, self._audio.slice(span), search)]

    def _next_window(self) -> Span | None:
        """Returns the next window if its audio is available."""
        if self._remaining_samples < (self._window_samples if self._reading else MIN_WINDOW_SAMPLES):
            return None
        span = Span(self._position_samples, self._position_samples + min(self._remaining_samples, self._window_samples))
        is_scored = self._activity is None or self._activity.is_scored_to(span.end_samples)
        return span if is_scored else None

    def _has_audio_after(self, span: Span) -> bool:
        return self._reading or span.end_samples < self.read_samples

    def _read(self, source: AudioReader, windows: int) -> bool:
        """Reads up to `windows` windows ahead and returns whether the recording has ended."""
        while self._remaining_samples < windows * self._window_samples and (chunk := source.next_chunk()) is not None:
            self._audio.append(chunk)
            if self._activity is not None:
                self._activity.append_audio(chunk)
            self.read_samples += len(chunk)
        self._reading = not source.ended
        return not self._reading

    def accept_answer(self, span: Span, answer: Recognition) -> SegmentAnswer:
        self._request_pending = False
        is_invented = self._activity is not None and not is_speech(answer, self._card, self._search.task)
        if not answer.tokens or is_invented:  # no speech
            self._advance_to(span.end_samples)
            return SegmentAnswer((), self._position_samples, answer.language, answer.phases)
        split = split_at_timestamps(answer.tokens, self._times)
        end = self._text_end(span, split, answer)
        quiet = self._silences(span) if answer.times else ()
        starts = [self._step_position(span, sentence.start_step) for sentence in split.sentences[1:]]
        segments: list[Segment] = []
        for sentence, latest in zip(split.sentences, [*starts, end], strict=True):
            room = Span(segments[-1].end_samples if segments else span.start_samples, latest)
            room = self._search_range(span, sentence, answer, room, quiet)
            if segment := self._segment(span, sentence, answer, room, quiet):
                segments.append(segment)
                self._context_tokens += answer.tokens[sentence.first_token : sentence.end_token]
        if segments:
            end = max(end, segments[-1].end_samples)
        if not self._condition_on_previous or answer.temperature > MAX_REMEMBERED_TEMPERATURE or self._repeats(answer):
            self._context_tokens.clear()
        del self._context_tokens[: -self._card.prompt_tokens or None]
        if not self._search.language and segments:
            # The language of the first text holds for the rest: on a pause alone detection could give any.
            self._search = msgspec.structs.replace(self._search, language=answer.language)
        self._advance_to(end)
        language_prob = answer.language_prob
        return SegmentAnswer(
            tuple(segments), self._position_samples, answer.language, answer.phases, language_prob=language_prob
        )

    def _text_end(self, span: Span, parted: WindowSplit, answer: Recognition) -> int:
        """Returns the end of the window's text, which lies after the window's start."""
        steps, last = parted.complete_steps, answer.tokens[-1] - self._times.first
        if steps is None and self._activity is not None and last * self._times.step_samples >= MIN_ANSWER_SAMPLES:
            end = span.start_samples + last * self._times.step_samples
            if self._activity.has_speech(end + TIMESTAMP_SLACK_SAMPLES, span.end_samples):
                steps = last
        if steps is None:
            self._short_windows = 0
            return span.end_samples
        advance = max(1, steps) * self._times.step_samples
        self._short_windows = self._short_windows + 1 if advance < SHORT_WINDOW_SAMPLES else 0
        if self._short_windows > MAX_SHORT_WINDOWS:
            advance = SHORT_WINDOW_SAMPLES
        return min(span.start_samples + advance, span.end_samples)

    def _advance_to(self, end_samples: int) -> None:
        self._position_samples = end_samples
        self._audio.drop_before(self._position_samples)
        if self._activity is not None:
            self._activity.forget_before(self._position_samples)

    def _repeats(self, answer: Recognition) -> bool:
        return answer.finish == "repetition" or answer.compression_ratio > self._search.max_compression_ratio

    def _segment(
        self, span: Span, each: TimedSentence, answer: Recognition, room: Span, quiet: Sequence[Span]
    ) -> Segment | None:
        """Returns the segment of a sentence; None if it has no text or begins after the recording's end. Its
        times are those of its timestamps; but words may lie anywhere in `room`, and it extends as far as they
        do."""
        indices = [i for i in range(each.first_token, each.end_token) if answer.tokens[i] < self._times.words_below]
        start = self._step_position(span, each.start_step)
        end = span.end_samples if each.end_step is None else self._step_position(span, each.end_step)
        if start >= end:
            return None
        recognition = select_tokens(answer, indices)
        if each.end_token < len(answer.tokens):
            recognition = msgspec.structs.replace(recognition, finish="stop")
        widest = Span(start, end)
        if answer.times and room.samples > 0:
            start = max(start, room.start_samples)
            widest = Span(room.start_samples, max(end, room.end_samples))
        segment = build_segment(widest, recognition, self._text, span.start_samples, quiet)
        if segment is None or not segment.words:
            return segment
        start, end = min(start, segment.words[0].start_samples), max(end, segment.words[-1].end_samples)
        return msgspec.structs.replace(segment, start_samples=start, end_samples=end)

    def _search_range(
        self, span: Span, each: TimedSentence, answer: Recognition, room: Span, quiet: Sequence[Span]
    ) -> Span:
        """Returns the range in which the words of a sentence may lie. Timestamps that leave it nothing but
        silence are wrong: then it extends to where its last token was aligned."""
        start, end = room.start_samples, room.end_samples
        silent = sum(max(0, min(q.end_samples, end) - max(q.start_samples, start)) for q in quiet)
        if not answer.times or room.samples - silent >= MIN_SPEECH_SAMPLES:
            return room
        aligned_end = min(span.start_samples + answer.times[each.end_token - 1][1], span.end_samples)
        return Span(start, max(end, aligned_end))

    def _step_position(self, span: Span, step: int) -> int:
        """Converts a timestamp of a window to a position in the recording."""
        return min(span.end_samples, span.start_samples + step * self._times.step_samples)

    def _silences(self, span: Span) -> tuple[Span, ...]:
        """Returns the silences in a window."""
        if self._activity is None:
            return silences_by_level(self._audio.slice(span), span)
        return self._activity.silence.silences_in(span)

    def close(self) -> None:
        self._audio = AudioHistory()
        if self._activity is not None:
            self._activity.close()
