"""A recording window by window, as Whisper's authors hear long ones: each begins where the model said that the
last sentence ended, and is heard knowing what was said before.

One request of a recording is under way at a time; many recordings go side by side. Voice activity cuts nothing. It
tells that nobody speaks in a whole window, or for long at its start, which is then left out, and that somebody
speaks behind the end of an answer, which is then where the next window begins. Without it windows are exactly
Whisper's, but that those go on behind the words of a sentence whose time tokens lie in silence alone, where words
are asked for.

Source  arXiv:2212.04356, section 4.5; windows, times and prompts are those of openai-whisper's `transcribe`, which
        tests/pipelines/test_sequential_long_form.py compares with. Four things differ. A window is encoded by
        itself: its spectrogram knows nothing of the audio around it, nor how loud the whole recording is. What
        repeats itself at every temperature is not remembered, as what was sampled at a high one is not. Where a
        lone time stands before a text, that is its start and not its end. Windows that hardly go on are bounded.
        Where voice activity is asked, what `utterance.speech` does not believe is not said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from asr_serve import units
from asr_serve.audio.audio_buffers import AudioHistory
from asr_serve.decoding.seq2seq import Recognition, SearchOptions
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
from asr_serve.pipelines.silence import silences_by_level
from asr_serve.types import Segment, Span

MAX_REMEMBERED_TEMPERATURE = 0.5
"""What was sampled above this may be anything, and would lead the next window astray."""
SHORT_WINDOW_SAMPLES, MAX_SHORT_WINDOWS = units.ms_to_samples(1_000), 3
"""More windows in a row that end sooner are a model that has lost its place: from then on each goes on by that."""
ONSET_SAMPLES = units.ms_to_samples(500)
"""Before the end of audio in which nobody speaks, a word may begin."""
MIN_LEADING_SILENCE_SAMPLES = units.s_to_samples(5)
"""So long a silence at the start of a window is left out, where voice activity is asked: a model may tell times of
what is said behind it that lie in it. On sentences of one reading Whisper tiny does after 15 s."""
MIN_SPEECH_SAMPLES = units.ms_to_samples(100)
"""What is left of a silence at its edges is shorter: no sentence was said in it."""
MIN_WINDOW_SAMPLES = units.ms_to_samples(10)
"""A recording's end that is shorter holds no sound: a frame of the spectrogram."""


class TimedSentence(NamedTuple):
    """One sentence of a window: its time tokens, in steps from the window's start, and its tokens, times included.
    `end` None: where the window ends."""

    start_step: int
    end_step: int | None
    first_token: int
    end_token: int


class WindowSplit(NamedTuple):
    """`heard`: steps of the window that have their text; None: all of it."""

    sentences: list[TimedSentence]
    heard_steps: int | None


def split_at_timestamps(tokens: Sequence[int], times: TimestampTokens) -> WindowSplit:
    """A window's answer at its pairs of times, the end of one sentence and the start of the next.

    What comes after the last pair is unfinished, and heard again in the next window, which begins at that pair;
    unless it has an end too: then nothing is said after it.
    """
    step = [token - times.first for token in tokens]
    cuts = [i for i in range(1, len(step)) if step[i - 1] >= 0 and step[i] >= 0]
    ended = len(step) > 1 and step[-1] >= 0 and step[-2] < 0
    if not cuts:
        spoken = [(i, at) for i, at in enumerate(step) if at >= 0]
        if not spoken or spoken[-1][1] == 0:
            return WindowSplit([TimedSentence(0, None, 0, len(step))], None)
        last, at = spoken[-1]
        return WindowSplit(
            [TimedSentence(at, None, 0, len(step)) if not last else TimedSentence(0, at, 0, len(step))], None
        )
    edges = [0, *cuts, *([len(step)] if ended else [])]
    parts = [TimedSentence(max(0, step[a]), max(0, step[b - 1]), a, b) for a, b in pairwise(edges)]
    return WindowSplit(parts, None if ended else step[cuts[-1] - 1])


class SequentialLongForm:
    """See way.Way. It holds two windows of audio at most, and of what was said no more than the model reads.

    `said`: tokens before the first window, as if they had been said.
    `remember`: a window is told what the ones before it were heard as. `spoken`: None without voice activity.
    """

    def __init__(
        self,
        card: AsrCard,
        window_samples: int,
        search: SearchOptions,
        text: Callable[[list[int]], str],
        *,
        said: tuple[int, ...] = (),
        remember: bool = True,
        spoken: SpeechActivity | None = None,
    ) -> None:
        assert card.times is not None, f"{card.name} does not say when"
        self._card, self._times, self._text = card, card.times, text
        self._window_samples, self._condition_on_previous = window_samples, remember
        self._search = msgspec.structs.replace(search, timestamps=True)
        self._context_tokens = list(said)
        self.read_samples = 0
        self._position_samples = 0
        """Where the next window begins."""
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
        before = self.read_samples
        moved = self._reading and self._read(source, 2 if room else 1)
        moved |= self.read_samples > before
        if self._activity is not None:
            moved |= self._activity.advance(last=not self._reading)
        if self._request_pending or (span := self._next_window()) is None:
            return moved, []
        if self._activity is not None and not self._activity.has_speech(span.start_samples, span.end_samples):
            # A word that begins at its end may not be told yet.
            self._advance_to(span.end_samples - (ONSET_SAMPLES if self._has_audio_after(span) else 0))
            return True, []
        if self._activity is not None:
            lead = self._activity.first_speech(span.start_samples, span.end_samples) - ONSET_SAMPLES
            if lead - span.start_samples >= MIN_LEADING_SILENCE_SAMPLES:
                self._advance_to(lead)
                return True, []
        self._request_pending = True
        search = msgspec.structs.replace(self._search, prompt=truncate_context(self._card, self._context_tokens))
        return True, [SegmentRequest(span, self._audio.slice(span), search)]

    def _next_window(self) -> Span | None:
        """The next window, if it is there."""
        if self._remaining_samples < (self._window_samples if self._reading else MIN_WINDOW_SAMPLES):
            return None
        span = Span(
            self._position_samples, self._position_samples + min(self._remaining_samples, self._window_samples)
        )
        known = self._activity is None or self._activity.is_scored_to(span.end_samples)
        return span if known else None

    def _has_audio_after(self, span: Span) -> bool:
        return self._reading or span.end_samples < self.read_samples

    def _read(self, source: AudioReader, windows: int) -> bool:
        """Whether the recording has ended."""
        while (
            self._remaining_samples < windows * self._window_samples and (chunk := source.next_chunk()) is not None
        ):
            self._audio.append(chunk)
            if self._activity is not None:
                self._activity.append_audio(chunk)
            self.read_samples += len(chunk)
        self._reading = not source.ended
        return not self._reading

    def accept_answer(self, span: Span, answer: Recognition) -> SegmentAnswer:
        self._request_pending = False
        invented = self._activity is not None and not is_speech(answer, self._card, self._search.task)
        if not answer.tokens or invented:  # nobody spoke
            self._advance_to(span.end_samples)
            return SegmentAnswer((), self._position_samples, answer.language, answer.phases)
        parted = split_at_timestamps(answer.tokens, self._times)
        ended = self._text_end(span, parted, answer)
        quiet = self._silences(span) if answer.times else ()
        starts = [self._step_position(span, each.start_step) for each in parted.sentences[1:]]
        segments: list[Segment] = []
        for each, latest in zip(parted.sentences, [*starts, ended], strict=True):
            room = Span(segments[-1].end_samples if segments else span.start_samples, latest)
            room = self._search_range(span, each, answer, room, quiet)
            if made := self._segment(span, each, answer, room, quiet):
                segments.append(made)
                self._context_tokens += answer.tokens[each.first_token : each.end_token]
        if segments:
            ended = max(ended, segments[-1].end_samples)
        if (
            not self._condition_on_previous
            or answer.temperature > MAX_REMEMBERED_TEMPERATURE
            or self._repeats(answer)
        ):
            self._context_tokens.clear()
        del self._context_tokens[: -self._card.prompt_tokens or None]
        if not self._search.language and segments:
            # What the first words are in, the rest is too: a pause alone could be anything.
            self._search = msgspec.structs.replace(self._search, language=answer.language)
        self._advance_to(ended)
        sure = answer.language_prob
        return SegmentAnswer(
            tuple(segments), self._position_samples, answer.language, answer.phases, language_prob=sure
        )

    def _text_end(self, span: Span, parted: WindowSplit, answer: Recognition) -> int:
        """Where the window's text ends, never where it began."""
        steps, last = parted.heard_steps, answer.tokens[-1] - self._times.first
        if steps is None and self._activity is not None and last * self._times.step_samples >= MIN_ANSWER_SAMPLES:
            ended = span.start_samples + last * self._times.step_samples
            if self._activity.has_speech(ended + TIMESTAMP_SLACK_SAMPLES, span.end_samples):
                steps = last
        if steps is None:
            self._short_windows = 0
            return span.end_samples
        heard = max(1, steps) * self._times.step_samples
        self._short_windows = self._short_windows + 1 if heard < SHORT_WINDOW_SAMPLES else 0
        if self._short_windows > MAX_SHORT_WINDOWS:
            heard = SHORT_WINDOW_SAMPLES
        return min(span.start_samples + heard, span.end_samples)

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
        """None where nothing was said, or only after the recording's end. Its times are those of its time tokens;
        but words may lie anywhere in `room`, and it reaches as far as they do."""
        kept = [i for i in range(each.first_token, each.end_token) if answer.tokens[i] < self._times.words_below]
        start = self._step_position(span, each.start_step)
        end = span.end_samples if each.end_step is None else self._step_position(span, each.end_step)
        if start >= end:
            return None
        heard = select_tokens(answer, kept)
        if each.end_token < len(answer.tokens):
            heard = msgspec.structs.replace(heard, finish="stop")
        widest = Span(start, end)
        if answer.times and room.samples > 0:
            start = max(start, room.start_samples)
            widest = Span(room.start_samples, max(end, room.end_samples))
        made = build_segment(widest, heard, self._text, span.start_samples, quiet)
        if made is None or not made.words:
            return made
        start, end = min(start, made.words[0].start_samples), max(end, made.words[-1].end_samples)
        return msgspec.structs.replace(made, start_samples=start, end_samples=end)

    def _search_range(
        self, span: Span, each: TimedSentence, answer: Recognition, room: Span, quiet: Sequence[Span]
    ) -> Span:
        """Where the words of a part may lie. Where its time tokens leave it nothing but silence, they are wrong:
        then up to where it was heard."""
        start, end = room.start_samples, room.end_samples
        silent = sum(max(0, min(q.end_samples, end) - max(q.start_samples, start)) for q in quiet)
        if not answer.times or room.samples - silent >= MIN_SPEECH_SAMPLES:
            return room
        heard = min(span.start_samples + answer.times[each.end_token - 1][1], span.end_samples)
        return Span(start, max(end, heard))

    def _step_position(self, span: Span, step: int) -> int:
        """In the recording, of a time token in a window."""
        return min(span.end_samples, span.start_samples + step * self._times.step_samples)

    def _silences(self, span: Span) -> tuple[Span, ...]:
        """Where nobody speaks in a window."""
        if self._activity is None:
            return silences_by_level(self._audio.slice(span), span)
        return self._activity.silence.silences_in(span)

    def close(self) -> None:
        self._audio = AudioHistory()
        if self._activity is not None:
            self._activity.close()
