"""Events of live sessions."""

from __future__ import annotations

from typing import Literal

import msgspec

from asr_serve.audio.endpointing import EndpointConfig
from asr_serve.audio.silence_schedule import STREAMING_SCHEDULE
from asr_serve.engine.client import EngineClient
from asr_serve.pipelines.language_identification import LanguageIdentification
from asr_serve.pipelines.live.repeated_segment import OVERLAP_MS
from asr_serve.pipelines.options import MAX_LIVE_SEGMENT_MS, ListenOptions
from asr_serve.pipelines.segments import PADDING_MS, endpoint_overrides, segment_limit_ms
from asr_serve.types import Segment


class LivePartial(msgspec.Struct, frozen=True):
    """Text known beyond the last segment that is done. Empty when that text was withdrawn."""

    start_samples: int
    heard_samples: int
    """End of the audio in the text."""
    locked_text: str = ""
    """Words that will not change any more, though a comma may follow."""
    tentative_text: str = ""
    """Remaining text, which may change, with the space before it."""
    locked_samples: int = 0
    """Position before which the words of `locked_text` were spoken."""

    @property
    def text(self) -> str:
        return self.locked_text + self.tentative_text


class LiveSegmentDone(msgspec.Struct, frozen=True):
    """Final segment."""

    segment: Segment
    decided_samples: int
    """End of the audio known when it ended: past its end by the pause that ended it."""
    language: str = ""
    """Language of its words; empty where the model has only the chosen one."""
    language_prob: float = 0.0
    """Probability of the language, 0 to 1; 0 where it was not detected."""


def endpoint_config(client: EngineClient, options: ListenOptions) -> EndpointConfig:
    """Endpointing of a session. Leaves room for the overlap of segments that are cut off. Raises OptionError."""
    limit_ms = segment_limit_ms(client, options.max_segment_ms)
    if options.max_segment_ms is None:
        limit_ms = min(limit_ms, MAX_LIVE_SEGMENT_MS)
    return EndpointConfig(
        max_segment_ms=min(limit_ms, client.card.max_segment_ms - 2 * PADDING_MS - 2 * OVERLAP_MS),
        schedule=options.silence_schedule or STREAMING_SCHEDULE,
        **endpoint_overrides(options.threshold, options.pad_before_ms),
    )


TurnState = Literal["started", "eager_end", "resumed", "stopped", "ended"]


class TurnEvent(msgspec.Struct, frozen=True, tag=True):
    """Event of a turn: speech between two pauses that are long enough, or that a turn model accepts as the end.

    started     speech began; position: where its audio begins
    eager_end   probably over; the text is complete if it is
    resumed     it was not over
    stopped     it is over; position: where its audio ends
    ended       all its segments are out. A turn that turned out to be no speech has none
    """

    state: TurnState
    position_samples: int
    probability: float | None = None
    by: str = "silence"
    """Cause of the decision: `silence`, or the name of the turn model."""


class FlushDone(msgspec.Struct, frozen=True, tag=True):
    """All speech before that position is in segments that are out."""

    name: str
    position_samples: int


class SpeakersRevised(msgspec.Struct, frozen=True):
    """Speaker of each segment by all audio; emitted before `SessionFinished` if speakers were requested."""

    speakers: tuple[str, ...]
    """Speaker of each `LiveSegmentDone`, in order."""


class SessionFinished(msgspec.Struct, frozen=True):
    """Last event, after `finish`: all audio is in segments or was no speech."""

    duration_samples: int


LiveEvent = (
    LivePartial | LiveSegmentDone | TurnEvent | FlushDone | SpeakersRevised | SessionFinished | LanguageIdentification
)
