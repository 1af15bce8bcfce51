"""Interface of the strategies that turn the audio of one file into requests, and answers into segments.

`ParallelLongForm` cuts by voice activity and submits all segments at once; `SequentialLongForm` submits one window
after the other.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from asr_serve import units
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.pipelines.offline.audio_reader import AudioReader
from asr_serve.types import EngineTimestamps, Segment, Span

TIMESTAMP_SLACK_SAMPLES = units.ms_to_samples(1_000)
"""Audio that the last word may take behind the last timestamp of an answer: timestamps are those of subtitles,
often whole seconds, and segments are padded."""
MIN_ANSWER_SAMPLES = units.ms_to_samples(200)
"""Shortest duration of a word: the last timestamp of a shorter answer is not trusted."""


class SegmentRequest(NamedTuple):
    """One utterance for the engine. `span`: its position in the file; `retries`: how often its segment was
    continued behind the end of an answer; `silences`: silences in it, if words are requested."""

    span: Span
    pcm: np.ndarray
    search: SearchOptions
    retries: int = 0
    silences: tuple[Span, ...] = ()


class SegmentAnswer(NamedTuple):
    """Answer to one request, as segments. `end_samples`: all audio of the file before it now has its text.
    `follow_up`: request to submit before any later part of the file is emitted."""

    segments: tuple[Segment, ...]
    end_samples: int
    language: str = ""
    phases: EngineTimestamps | None = None
    follow_up: SegmentRequest | None = None
    language_prob: float = 0.0
    """Probability of the language; 0 where it was not detected."""


class LongFormStrategy(Protocol):
    """Strategy for one file. Methods neither block nor run a model."""

    read_samples: int
    """Samples of the file read so far."""

    @property
    def finished(self) -> bool:
        """Returns whether everything was read and submitted, except for what follows from pending answers."""

    def advance(self, source: AudioReader, room: bool) -> tuple[bool, list[SegmentRequest]]:
        """Reads on and cuts. Returns whether anything was done, and the requests to submit now. Without `room`
        it reads nothing that would only wait. Raises the errors of the source and of voice activity."""

    def accept_answer(self, span: Span, answer: Recognition) -> SegmentAnswer:
        """Converts an answer. Answers come in the order of requests."""

    def close(self) -> None:
        """Cancels what is pending. Idempotent."""
