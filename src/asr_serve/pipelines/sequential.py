"""A recording window by window, as Whisper's authors hear long ones: each begins where the model said that the
last sentence ended, and is heard knowing what was said before.

One request of a recording is under way at a time; many recordings go side by side. Voice activity cuts nothing. It
tells that nobody speaks in a whole window, or for long at its start, which is then left out, and that somebody
speaks behind the end of an answer, which is then where the next window begins. Without it windows are exactly
Whisper's, but that those go on behind the words of a sentence whose time tokens lie in silence alone, where words
are asked for.

Source  arXiv:2212.04356, section 4.5; windows, times and prompts are those of openai-whisper's `transcribe`, which
        tests/pipelines/test_sequential.py compares with. Four things differ. A window is heard by itself: its
        spectrogram knows nothing of the audio around it, nor how loud the loudest of the whole recording is. What
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
from asr_serve.audio.buffers import Kept
from asr_serve.decoding.attention import Recognition, SearchOptions
from asr_serve.models.card import Card, Times
from asr_serve.pipelines.prompts import ending
from asr_serve.pipelines.quiet import quiet_by_level
from asr_serve.pipelines.reading import Reading
from asr_serve.pipelines.spoken import Spoken
from asr_serve.pipelines.utterance import segment, some, speech
from asr_serve.pipelines.way import LEAST_HEARD_SAMPLES, LEFT_SAMPLES, Heard, Request
from asr_serve.types import Segment, Span

MAX_REMEMBERED_TEMPERATURE = 0.5
"""What was sampled above this may be anything, and would lead the next window astray."""
SHORT_SAMPLES, MOST_SHORT = units.ms_to_samples(1_000), 3
"""More windows in a row that end sooner are a model that has lost its place: from then on each goes on by that."""
ONSET_SAMPLES = units.ms_to_samples(500)
"""Before the end of audio in which nobody speaks, a word may begin."""
LEAD_SAMPLES = units.s_to_samples(5)
"""So long a silence at the start of a window is left out, where voice activity is asked: a model may tell times of
what is said behind it that lie in it. On sentences of one reading Whisper tiny does after 15 s."""
SAID_SAMPLES = units.ms_to_samples(100)
"""What is left of a silence at its edges is shorter: no sentence was said in it."""
LEAST_SAMPLES = units.ms_to_samples(10)
"""A recording's end that is shorter holds no sound: a frame of the spectrogram."""


class Part(NamedTuple):
    """One sentence of a window: its time tokens, in steps from the window's start, and its tokens, times included.
    `end` None: where the window ends."""

    start: int
    end: int | None
    first: int
    behind: int


class Parted(NamedTuple):
    """`heard`: steps of the window that have their text; None: all of it."""

    parts: list[Part]
    heard: int | None


def part(tokens: Sequence[int], times: Times) -> Parted:
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
            return Parted([Part(0, None, 0, len(step))], None)
        last, at = spoken[-1]
        return Parted([Part(at, None, 0, len(step)) if not last else Part(0, at, 0, len(step))], None)
    edges = [0, *cuts, *([len(step)] if ended else [])]
    parts = [Part(max(0, step[a]), max(0, step[b - 1]), a, b) for a, b in pairwise(edges)]
    return Parted(parts, None if ended else step[cuts[-1] - 1])


class Windows:
    """See way.Way. It holds two windows of audio at most, and of what was said no more than the model reads.

    `said`: tokens before the first window, as if they had been said.
    `remember`: a window is told what the ones before it were heard as. `spoken`: None without voice activity.
    """

    def __init__(
        self,
        card: Card,
        window_samples: int,
        search: SearchOptions,
        text: Callable[[list[int]], str],
        *,
        said: tuple[int, ...] = (),
        remember: bool = True,
        spoken: Spoken | None = None,
    ) -> None:
        assert card.times is not None, f"{card.name} does not say when"
        self._card, self._times, self._text = card, card.times, text
        self._window_samples, self._remember = window_samples, remember
        self._search = msgspec.structs.replace(search, timestamps=True)
        self._said = list(said)
        self.read_samples = 0
        self._at = 0
        """Where the next window begins."""
        self._reading, self._asked = True, False
        self._short = 0
        """Windows in a row whose text ended at once."""
        self._kept, self._spoken = Kept(), spoken

    @property
    def over(self) -> bool:
        return not self._reading and not self._asked and self._rest < LEAST_SAMPLES

    @property
    def _rest(self) -> int:
        return self.read_samples - self._at

    def advance(self, source: Reading, room: bool) -> tuple[bool, list[Request]]:
        before = self.read_samples
        moved = self._reading and self._read(source, 2 if room else 1)
        moved |= self.read_samples > before
        if self._spoken is not None:
            moved |= self._spoken.advance(last=not self._reading)
        if self._asked or (span := self._next()) is None:
            return moved, []
        if self._spoken is not None and not self._spoken.within(span.start_samples, span.end_samples):
            # A word that begins at its end may not be told yet.
            self._go_on(span.end_samples - (ONSET_SAMPLES if self._more_behind(span) else 0))
            return True, []
        if self._spoken is not None:
            lead = self._spoken.first(span.start_samples, span.end_samples) - ONSET_SAMPLES
            if lead - span.start_samples >= LEAD_SAMPLES:
                self._go_on(lead)
                return True, []
        self._asked = True
        search = msgspec.structs.replace(self._search, prompt=ending(self._card, self._said))
        return True, [Request(span, self._kept.cut(span), search)]

    def _next(self) -> Span | None:
        """The next window, if it is there."""
        if self._rest < (self._window_samples if self._reading else LEAST_SAMPLES):
            return None
        span = Span(self._at, self._at + min(self._rest, self._window_samples))
        known = self._spoken is None or self._spoken.knows(span.end_samples)
        return span if known else None

    def _more_behind(self, span: Span) -> bool:
        return self._reading or span.end_samples < self.read_samples

    def _read(self, source: Reading, windows: int) -> bool:
        """Whether the recording has ended."""
        while self._rest < windows * self._window_samples and (chunk := source.take()) is not None:
            self._kept.add(chunk)
            if self._spoken is not None:
                self._spoken.add(chunk)
            self.read_samples += len(chunk)
        self._reading = not source.ended
        return not self._reading

    def answered(self, span: Span, answer: Recognition) -> Heard:
        self._asked = False
        invented = self._spoken is not None and not speech(answer, self._card, self._search.task)
        if not answer.tokens or invented:  # nobody spoke
            self._go_on(span.end_samples)
            return Heard((), self._at, answer.language, answer.phases)
        parted = part(answer.tokens, self._times)
        ended = self._end(span, parted, answer)
        quiet = self._quiet(span) if answer.times else ()
        starts = [self._place(span, each.start) for each in parted.parts[1:]]
        segments: list[Segment] = []
        for each, latest in zip(parted.parts, [*starts, ended], strict=True):
            room = Span(segments[-1].end_samples if segments else span.start_samples, latest)
            room = self._loud(span, each, answer, room, quiet)
            if made := self._segment(span, each, answer, room, quiet):
                segments.append(made)
                self._said += answer.tokens[each.first : each.behind]
        if segments:
            ended = max(ended, segments[-1].end_samples)
        if not self._remember or answer.temperature > MAX_REMEMBERED_TEMPERATURE or self._repeats(answer):
            self._said.clear()
        del self._said[: -self._card.prompt_tokens or None]
        if not self._search.language and segments:
            # What the first words are in, the rest is too: a pause alone could be anything.
            self._search = msgspec.structs.replace(self._search, language=answer.language)
        self._go_on(ended)
        sure = answer.language_prob
        return Heard(tuple(segments), self._at, answer.language, answer.phases, language_prob=sure)

    def _end(self, span: Span, parted: Parted, answer: Recognition) -> int:
        """Where the window's text ends, never where it began."""
        steps, last = parted.heard, answer.tokens[-1] - self._times.first
        if steps is None and self._spoken is not None and last * self._times.step_samples >= LEAST_HEARD_SAMPLES:
            ended = span.start_samples + last * self._times.step_samples
            if self._spoken.within(ended + LEFT_SAMPLES, span.end_samples):
                steps = last
        if steps is None:
            self._short = 0
            return span.end_samples
        heard = max(1, steps) * self._times.step_samples
        self._short = self._short + 1 if heard < SHORT_SAMPLES else 0
        if self._short > MOST_SHORT:
            heard = SHORT_SAMPLES
        return min(span.start_samples + heard, span.end_samples)

    def _go_on(self, end_samples: int) -> None:
        self._at = end_samples
        self._kept.drop_before(self._at)
        if self._spoken is not None:
            self._spoken.forget_before(self._at)

    def _repeats(self, answer: Recognition) -> bool:
        return answer.finish == "repetition" or answer.compression_ratio > self._search.max_compression_ratio

    def _segment(
        self, span: Span, each: Part, answer: Recognition, room: Span, quiet: Sequence[Span]
    ) -> Segment | None:
        """None where nothing was said, or only after the recording's end. Its times are those of its time tokens;
        but words may lie anywhere in `room`, and it reaches as far as they do."""
        kept = [i for i in range(each.first, each.behind) if answer.tokens[i] < self._times.words_below]
        start = self._place(span, each.start)
        end = span.end_samples if each.end is None else self._place(span, each.end)
        if start >= end:
            return None
        heard = some(answer, kept)
        if each.behind < len(answer.tokens):
            heard = msgspec.structs.replace(heard, finish="stop")
        widest = Span(start, end)
        if answer.times and room.samples > 0:
            start = max(start, room.start_samples)
            widest = Span(room.start_samples, max(end, room.end_samples))
        made = segment(widest, heard, self._text, span.start_samples, quiet)
        if made is None or not made.words:
            return made
        start, end = min(start, made.words[0].start_samples), max(end, made.words[-1].end_samples)
        return msgspec.structs.replace(made, start_samples=start, end_samples=end)

    def _loud(self, span: Span, each: Part, answer: Recognition, room: Span, quiet: Sequence[Span]) -> Span:
        """Where the words of a part may lie. Where its time tokens leave it nothing but silence, they are wrong:
        then up to where it was heard."""
        start, end = room.start_samples, room.end_samples
        silent = sum(max(0, min(q.end_samples, end) - max(q.start_samples, start)) for q in quiet)
        if not answer.times or room.samples - silent >= SAID_SAMPLES:
            return room
        heard = min(span.start_samples + answer.times[each.behind - 1][1], span.end_samples)
        return Span(start, max(end, heard))

    def _place(self, span: Span, step: int) -> int:
        """In the recording, of a time token in a window."""
        return min(span.end_samples, span.start_samples + step * self._times.step_samples)

    def _quiet(self, span: Span) -> tuple[Span, ...]:
        """Where nobody speaks in a window."""
        if self._spoken is None:
            return quiet_by_level(self._kept.cut(span), span)
        return self._spoken.quiet.within(span)

    def close(self) -> None:
        self._kept = Kept()
        if self._spoken is not None:
            self._spoken.close()
