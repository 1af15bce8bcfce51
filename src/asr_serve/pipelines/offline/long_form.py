"""How the audio of one file becomes requests, and their answers segments: what `transcribe` asks of either way.

`cutting` has voice activity cut it and asks for all at once; `sequential` asks for one window after the other.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from asr_serve import units
from asr_serve.decoding.seq2seq import Recognition, SearchOptions
from asr_serve.pipelines.offline.audio_reader import AudioReader
from asr_serve.types import EngineTimestamps, Segment, Span

TIMESTAMP_SLACK_SAMPLES = units.ms_to_samples(1_000)
"""Behind the last time that an answer gives there may be so much of its last word: times are those of subtitles,
often whole seconds, and segments are padded."""
MIN_ANSWER_SAMPLES = units.ms_to_samples(200)
"""A word takes that long: an answer that ends sooner is not to be believed as to where."""


class SegmentRequest(NamedTuple):
    """One utterance for the engine. `span` is where it lies in the file; `again`: how often its segment was heard
    on from where an answer ended; `quiet`: where nobody speaks in it, if its words are wanted."""

    span: Span
    pcm: np.ndarray
    search: SearchOptions
    retries: int = 0
    silences: tuple[Span, ...] = ()


class SegmentAnswer(NamedTuple):
    """The answer to one request, as segments. `end_samples`: all of the file up to there has its text now.
    `then`: what is to be asked before anything that comes later in the file is told."""

    segments: tuple[Segment, ...]
    end_samples: int
    language: str = ""
    phases: EngineTimestamps | None = None
    follow_up: SegmentRequest | None = None
    language_prob: float = 0.0
    """How sure the model was of the language; 0 where it was told."""


class LongFormStrategy(Protocol):
    """Of one file. Nothing in it waits, and nothing in it computes words."""

    read_samples: int
    """Of the file, so far."""

    @property
    def finished(self) -> bool:
        """Everything was read and asked, but for what is answered later."""

    def advance(self, source: AudioReader, room: bool) -> tuple[bool, list[SegmentRequest]]:
        """Read on and cut: whether anything was done, and what is to be asked now. Without `room` nothing is read
        that would only wait. Raises the source's errors, and those of voice activity."""

    def accept_answer(self, span: Span, answer: Recognition) -> SegmentAnswer:
        """Of the requests, in their order."""

    def close(self) -> None:
        """Nothing is wanted any more. Idempotent."""
