"""Contract between a live session and the recognizers of its segments, and what all recognizers need."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from asr_serve import units
from asr_serve.pipelines.live.segment_state import LiveSegmentStates
from asr_serve.pipelines.silence_tracker import SilenceTracker
from asr_serve.types import Priority, Segment

MAX_LIVE_LEAD_S = 5.0
"""Audio ahead of real time past which a session counts as a recording, not as live speech."""


class AudioPosition(NamedTuple):
    """Progress of a session, in samples."""

    scored_samples: int
    """Windows before this position have been scored."""
    decided_samples: int
    """End of the audio that may be in closed segments."""
    received_samples: int
    open_until_samples: int
    """End of the received audio that belongs to the open segment whatever voice activity says of it."""
    silent_from_samples: int | None
    """Start of the pause in which the scored audio ends; None during speech, or without an open segment."""
    input_ended: bool
    """Whether no more audio will arrive and all of it was scored."""


class LiveSegment(Protocol):
    """Live segment, as LiveSession sees it."""

    start: int
    output_from: int
    """Reported start."""
    end: int | None
    """End of the segment; None while it is open."""
    decided_samples: int
    """End of the audio known when it closed."""
    cut_off: bool
    """Whether it closed in the middle of speech."""

    @property
    def recognized_to(self) -> int:
        """End of the audio in its text."""

    @property
    def locked_to(self) -> int:
        """Position before which the words of `locked_text` were spoken."""

    @property
    def audio_from(self) -> int:
        """Start of the audio that it still needs."""

    @property
    def closed(self) -> bool: ...
    @property
    def finished(self) -> bool:
        """Returns whether all its words are known."""

    @property
    def start_resolved(self) -> bool:
        """Returns whether it is known which of its first words belong to the segment before."""

    @property
    def busy(self) -> bool:
        """Returns whether a request for it is pending."""

    @property
    def text_to(self) -> int:
        """End of the audio that has text, in a pause."""

    @property
    def locked_text(self) -> str:
        """Text that does not change any more."""

    @property
    def shown_text(self) -> str:
        """Newest text; starts with `locked_text`."""

    @property
    def language_and_prob(self) -> tuple[str, float]:
        """Language of its words once it is finished, empty where the model has only one; and its probability, 0
        where it was not detected."""

    def extend_speech(self, end: int, lock: int) -> None:
        """Reports that audio up to `end` is certainly speech."""

    def limit_overlap(self, position: int) -> None:
        """Handles a flush: audio past the segment's end is used up to `position` at most."""

    def build_segment(self, quiet: SilenceTracker) -> Segment | None:
        """Returns the segment once it is finished; None: it has no words."""


class LiveRecognizer(Protocol):
    """Source of the text of a session's segments."""

    due_s: float | None
    """Time at which to call `schedule` even without new results; None: never. Set by `schedule`."""

    def open_segment(self, start: int, starts_mid_speech: bool, before: LiveSegment | None) -> LiveSegment:
        """Opens a segment at `start`. `starts_mid_speech`: in the middle of speech, where `before` was cut off."""

    def collect_results(self, each: LiveSegment) -> None:
        """Collects its results. Raises an AsrServeError when it cannot be recognized."""

    def join_segments(self, left: LiveSegment, right: LiveSegment) -> None:
        """Joins two neighbours, `left` before `right`."""

    def schedule(self, each: LiveSegment, at: AudioPosition) -> None:
        """Submits what it needs next."""

    def discard(self, each: LiveSegment) -> None:
        """Cancels it."""

    def export_segments(self, segments: Sequence[LiveSegment]) -> LiveSegmentStates:
        """Returns the state of all segments of the session, in order."""

    def import_segments(self, states: LiveSegmentStates, received: int) -> list[LiveSegment]:
        """Returns the segments of these states. `received`: samples that have arrived."""


class PaceEstimator:
    """Estimate of whether a session's audio arrives at the pace of speech."""

    def __init__(self, received: int = 0) -> None:
        """`received`: samples that arrived before, at the pace of speech."""
        self._began_s = time.monotonic() - units.samples_to_s(received)

    def priority(self, received: int) -> Priority:
        ahead_s = units.samples_to_s(received) - (time.monotonic() - self._began_s)
        return "live" if ahead_s < MAX_LIVE_LEAD_S else "interactive"
