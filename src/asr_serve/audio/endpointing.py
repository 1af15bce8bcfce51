"""Endpointing: speech probabilities of one caller to closed spans of samples, in order and never overlapping.

Terms used here, all in whole windows of 512 samples:

speech   a window with probability >= `threshold`
pause    from the first window below `neg_threshold` to the next speech. A window between the two
         thresholds continues the current state (hysteresis), so a word may fade without ending.

A segment opens at speech, and closes at a pause once that lasts as long as the schedule requires for a segment
of that length. Its span is the speech with some padding, but never reaches into the previous span, nor past
the audio known to exist. So a returned span does not depend on later audio.

Dropped: a segment with less than `min_speech_ms` of speech that is isolated: before and after it lies the
schedule's whole silence, or the end of the audio. All other speech is kept.

Flushed: on request the open segment ends at the end of the audio so far, in the middle of a word if need be. The
last sound of that word, if nothing follows it, is dropped.

Cut: when one more window would make the span longer than `max_segment_ms`, it ends early, at the longest
pause in its last 40 %. If that pause still lasts, the segment closes there as it would have later.
If speech has resumed since, both parts meet in the middle of that pause. Without any pause they meet in
the quietest 96 ms. The parts share the cut position: no sample is lost or recognized twice.
"""

from __future__ import annotations

import sys
from collections import deque

import msgspec
import numpy as np
from numpy.typing import NDArray

from asr_serve.audio.silence_schedule import OFFLINE_SCHEDULE, SilenceSchedule
from asr_serve.errors import OptionError
from asr_serve.types import Span
from asr_serve.units import ms_to_samples

WINDOW_SAMPLES = 512
CALM_MS = 192
"""Least pause that lies between two words; a shorter one may be within a word."""
MIN_MAX_SEGMENT_MS = 1_000
LOOK_BACK = 0.4
LEFT_OVER_SAMPLES = 4 * WINDOW_SAMPLES
"""Longest speech after a flush in the middle of speech that counts as the end of the flushed word."""
NEVER = sys.maxsize


class EndpointConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Thresholds and lengths of endpointing.

    Raises  OptionError
    """

    threshold: float = 0.5
    """Probability at which speech starts. Silero is trained for one half."""
    neg_threshold: float = 0.35
    """Probability below which speech ends: 0.15 lower, as the model's authors use it, for fading vowels."""
    min_speech_ms: int = 60
    """Least speech of an isolated segment, two windows of 32 ms: one is a click or a breath, two may be a 'yes'."""
    pad_before_ms: int = 250
    """Padding before speech. Onsets are quiet: an 's' or 'h' starts 100-200 ms before what is clearly speech."""
    pad_after_ms: int = 250
    """Padding after speech. Endings are quiet too, and recognizers drop a word that touches the end."""
    max_segment_ms: int | None = None
    """Longest segment that the model takes, padding included; None for no limit."""
    schedule: SilenceSchedule = OFFLINE_SCHEDULE

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise OptionError(f"threshold is {self.threshold}", "it must be above 0 and at most 1", "try 0.5")
        if not 0 < self.neg_threshold <= self.threshold:
            raise OptionError(
                f"neg_threshold is {self.neg_threshold}",
                f"it must be above 0 and at most threshold, {self.threshold}",
                f"try {0.7 * self.threshold:.2g}",
            )
        for name in ("min_speech_ms", "pad_before_ms", "pad_after_ms"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name} is {getattr(self, name)}", "it must be 0 or more")
        if self.max_segment_ms is None:
            return
        if self.max_segment_ms < MIN_MAX_SEGMENT_MS:
            raise OptionError(
                f"max_segment_ms is {self.max_segment_ms}", f"it must be at least {MIN_MAX_SEGMENT_MS}, or None"
            )
        if 2 * (self.pad_before_ms + self.pad_after_ms) > self.max_segment_ms:
            raise OptionError(
                f"padding of {self.pad_before_ms} + {self.pad_after_ms} ms",
                f"it may fill at most half of max_segment_ms, {self.max_segment_ms}",
                "pad less or allow longer segments",
            )


class EndpointerState(msgspec.Struct, frozen=True):
    """State of an Endpointer between two windows, from which another one of the same configuration continues. The
    fields are those of Endpointer."""

    now: int
    floor: int
    alone_from: int
    flushed_at: int
    finished: bool
    open: bool
    split_mid_speech: bool
    start: int
    pause: int | None
    speech: int
    droppable: bool
    least: int
    pauses: list[Span]
    recent: list[float]


class Endpointer:
    """Endpointing of one caller: `append_probabilities` as they come, `finish` once.

    State   one open segment and, with a length limit, the probabilities of its last 40 %: bounded
    """

    def __init__(self, config: EndpointConfig) -> None:
        self.config = config
        self._schedule = tuple(
            (np.inf if up_to_ms == np.inf else ms_to_samples(up_to_ms), ms_to_samples(silence_ms))
            for up_to_ms, silence_ms in config.schedule.rows
        )
        self._pad_before = ms_to_samples(config.pad_before_ms)
        self._pad_after = ms_to_samples(config.pad_after_ms)
        self._min_speech = ms_to_samples(config.min_speech_ms)
        limit_ms = config.max_segment_ms
        self._limit = NEVER if limit_ms is None else ms_to_samples(limit_ms)
        self.settled_samples = NEVER if limit_ms is None else ms_to_samples(limit_ms * (1 - LOOK_BACK))
        """Samples at the start of a span within which it is never cut."""
        look_back = 0 if limit_ms is None else ms_to_samples(limit_ms * LOOK_BACK) // WINDOW_SAMPLES + 1

        self._now = 0
        """Start of the next window; everything before it is audio that exists."""
        self._floor = 0
        """End of the last returned span."""
        self._alone_from = 0
        """Position from which on a segment has the schedule's whole silence before it."""
        self._flushed_at = -WINDOW_SAMPLES
        """Position at which a segment was last flushed in the middle of speech."""
        self._finished = False
        self._open = False
        self.split_mid_speech = False
        """Whether the open segment, or else the last one, begins in the middle of speech, cut without a pause."""
        # of the open segment:
        self._start = 0
        self._pause: int | None = None
        self._speech = 0
        self._droppable = False
        self._least = self._min_speech
        """Least speech that keeps a droppable segment."""
        self._pauses: list[Span] = []
        """Pauses that have ended, at which the segment could still be cut."""
        self._recent: deque[float] = deque(maxlen=look_back)

    def export_state(self) -> EndpointerState:
        return EndpointerState(
            self._now,
            self._floor,
            self._alone_from,
            self._flushed_at,
            self._finished,
            self._open,
            self.split_mid_speech,
            self._start,
            self._pause,
            self._speech,
            self._droppable,
            self._least,
            list(self._pauses),
            list(self._recent),
        )

    def import_state(self, state: EndpointerState) -> None:
        self._now, self._floor, self._alone_from = state.now, state.floor, state.alone_from
        self._flushed_at, self._finished, self._open = state.flushed_at, state.finished, state.open
        self.split_mid_speech, self._start, self._pause = state.split_mid_speech, state.start, state.pause
        self._speech, self._droppable, self._least = state.speech, state.droppable, state.least
        self._pauses = list(state.pauses)
        self._recent.clear()
        self._recent.extend(state.recent)

    @property
    def open_from_samples(self) -> int | None:
        """Start of the open segment; None when none is open."""
        return self._start if self._open else None

    @property
    def pause_from_samples(self) -> int | None:
        """Start of the open segment's current pause; None during speech, or without an open segment."""
        return self._pause if self._open else None

    @property
    def closes_at_samples(self) -> int | None:
        """Position at which the current pause closes the segment, if it lasts; None outside a pause."""
        return self._enough_at(self._pause) if self._open and self._pause is not None else None

    @property
    def open_until_samples(self) -> int:
        """Position that the scored audio must reach before the open segment can close or be cut, whatever the windows
        until then contain. Without an open segment, the end of the scored audio."""
        if not self._open:
            return self._now
        earliest, above = self._start + self._limit, 0.0
        if self._pause is not None:
            earliest = min(earliest, self._enough_at(self._pause))
        for up_to, silence in self._schedule:  # a pause that begins later, in a segment that is longer by then
            if self._now - self._start <= up_to:
                earliest = min(earliest, max(self._now, self._start + int(above)) + silence)
            above = up_to
        return max(self._now, earliest)

    @property
    def is_certain(self) -> bool:
        """Returns whether the open segment can no longer be dropped: it has enough speech, or is not isolated."""
        return self._open and not (self._droppable and self._speech < self._least)

    @property
    def keep_from_samples(self) -> int:
        """Earliest sample that a future span may include; older audio can be dropped."""
        return self._start if self._open else max(self._floor, self._now - self._pad_before)

    def append_probabilities(self, probabilities: NDArray[np.floating]) -> list[Span]:
        """Process the probabilities (windows,) of the next windows; return the spans that they close."""
        assert not self._finished, "push after finish"
        assert not np.isnan(probabilities).any(), "a speech probability is NaN"
        closed: list[Span] = []
        for probability in probabilities.tolist():
            if self._open and self._now + WINDOW_SAMPLES - self._start > self._limit:
                self._cut(closed)
            if probability >= self.config.threshold:
                self._hear_speech()
            elif self._open:
                self._hear_pause(probability, closed)
            self._recent.append(probability)
            self._now += WINDOW_SAMPLES
        return closed

    def finish(self, total_samples: int) -> list[Span]:
        """End the audio and return the span of the open segment. The last window may have been a partial one.

        In      total_samples: the audio's length, which the appended windows must cover without a spare one
        """
        assert not self._finished, "finish twice"
        assert 0 <= self._now - total_samples < WINDOW_SAMPLES, f"{self._now} samples scored of {total_samples}"
        self._finished = True
        closed: list[Span] = []
        if self._open:
            self._close(total_samples if self._pause is None else self._pause, total_samples, closed)
        self._floor = total_samples
        return closed

    def flush(self, at_samples: int) -> list[Span]:
        """Close the open segment at `at_samples`, which lies within the next window, and return its span; the next
        segment begins there at the earliest. A segment that is not `is_certain` stays open: it may not be speech."""
        assert not self._finished, "flush after finish"
        assert 0 <= at_samples - self._now < WINDOW_SAMPLES, f"{self._now} samples scored, flushed at {at_samples}"
        closed: list[Span] = []
        if self.is_certain:
            if self._pause is None:
                self._flushed_at = at_samples
                self._close(at_samples, at_samples, closed)
            else:
                self._alone_from = self._enough_at(self._pause)
                self._close(self._pause, at_samples, closed)
        return closed

    def _hear_speech(self) -> None:
        if not self._open:
            self._begin(max(self._floor, self._now - self._pad_before), droppable=self._now >= self._alone_from)
        elif self._pause is not None:
            if self._now > self._start + self.settled_samples:
                self._pauses.append(Span(self._pause, self._now))
            self._pause = None
        self._speech += WINDOW_SAMPLES

    def _hear_pause(self, probability: float, closed: list[Span]) -> None:
        if self._pause is None:
            if probability >= self.config.neg_threshold:
                return
            self._pause = self._now
        if self._now + WINDOW_SAMPLES >= self._enough_at(self._pause):
            self._close(self._pause, self._now, closed)

    def _enough_at(self, pause: int) -> int:
        """Position at which a pause that started at `pause` closes the segment."""
        length = pause - self._start
        return pause + next(silence for up_to, silence in self._schedule if length <= up_to)

    def _begin(self, start: int, *, droppable: bool) -> None:
        self._open, self._start, self._droppable, self.split_mid_speech = True, start, droppable, False
        self._least = self._min_speech
        if start <= self._flushed_at:
            self._droppable, self._least = True, LEFT_OVER_SAMPLES
        self._speech = 0  # read only if droppable, so a part after a cut need not count inherited speech
        self._pauses = [pause for pause in self._pauses if pause.end_samples > start + self.settled_samples]

    def _close(self, end_of_speech: int, known: int, closed: list[Span]) -> None:
        """Append the span to `closed`, unless it is dropped. `known`: audio up to here is known to exist."""
        self._open, self._pause, self._pauses = False, None, []
        if self._droppable and self._speech < self._least:
            return
        self._floor = min(end_of_speech + self._pad_after, known)
        if self._floor > self._start:  # the audio may have been flushed up to its very end
            closed.append(Span(self._start, self._floor))

    def _cut(self, closed: list[Span]) -> None:
        """Cut the open segment before the window at `_now`, which would make it too long."""
        earliest = self._start + self.settled_samples
        pauses = [Span(max(p.start_samples, earliest), p.end_samples) for p in self._pauses]
        if self._pause is not None:
            pauses.append(Span(max(self._pause, earliest), self._now))
        # The later of two equal pauses, for a longer first part.
        longest = max(pauses, key=lambda p: (p.samples, p.start_samples), default=Span(0, 0))
        if self._pause is not None and longest.end_samples == self._now:
            self._droppable = False
            self._alone_from = self._enough_at(self._pause)
            self._close(self._pause, self._now, closed)
            return
        cut = (longest.start_samples + longest.end_samples) // 2 if longest.samples > 0 else self._quietest(earliest)
        closed.append(Span(self._start, cut))
        self._floor = cut
        self._begin(cut, droppable=False)
        self.split_mid_speech = longest.samples < ms_to_samples(CALM_MS)

    def _quietest(self, earliest: int) -> int:
        """Middle of the three windows with the lowest mean probability between `earliest` and `_now`."""
        count = min(len(self._recent), (self._now - earliest) // WINDOW_SAMPLES)
        recent = np.array(self._recent)[len(self._recent) - count :]
        means = np.convolve(recent, np.full(3, 1 / 3), mode="valid")
        from_end = int(means[::-1].argmin()) + 1
        return self._now - from_end * WINDOW_SAMPLES - WINDOW_SAMPLES // 2
