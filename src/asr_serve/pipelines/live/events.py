"""Options and events of live sessions."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from asr_serve.audio.endpointing import EndpointConfig
from asr_serve.audio.silence_schedule import STREAMING_SCHEDULE, SilenceSchedule
from asr_serve.engine.client import EngineClient
from asr_serve.errors import OptionError
from asr_serve.pipelines.live.segment_hypotheses import OVERLAP_MS
from asr_serve.pipelines.options import check_speakers_not_disabled, normalize_speaker_options
from asr_serve.pipelines.segments import (
    PADDING_MS,
    check_switches,
    endpoint_overrides,
    normalize_language_option,
    segment_limit_ms,
    validate_option_names,
)
from asr_serve.types import Segment

MAX_LIVE_SEGMENT_MS = 16_000
"""Default limit of a segment: an open segment is recognized again for every partial."""
ANCHOR_INTERVAL_MS = 1_920
"""Default interval between two anchors."""


_KINDS: dict[str, tuple[type, ...]] = {
    "language": (str,),
    "silence_schedule": (SilenceSchedule,),
    "max_segment_ms": (int,),
    "threshold": (int, float),
    "pad_before_ms": (int,),
}


class TurnOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of turn detection. Raises OptionError for invalid values."""

    model: str | None = None
    """Turn model, which predicts at a pause whether the speaker has finished; None: only the length of the
    pause decides. A pause that is long enough ends a turn in any case."""
    threshold: float = 0.5
    """Probability from the model that ends a turn."""
    eager_threshold: float | None = None
    """Probability at which an `eager_end` is emitted: the turn may be over. Without a model it is the share of
    the pause that has passed. None: no such event."""

    def __post_init__(self) -> None:
        for name in ("threshold", "eager_threshold"):
            value = getattr(self, name)
            if name == "eager_threshold" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise OptionError(f"{name}={value!r}", "a probability, above 0 and at most 1", param=name)


class ListenOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a live session. Raises OptionError for invalid values."""

    language: str | None = None
    """Language code or name. None: the model's own, or detected where it can."""
    partial_ms: int = 480
    """Interval between two partials; longer when the engine is busy."""
    lock_ms: int = ANCHOR_INTERVAL_MS
    """Interval between two anchors: words are locked two to three of these after they were spoken."""
    silence_schedule: SilenceSchedule | None = None
    max_segment_ms: int | None = None
    """Limit of a segment, at most the model's own. None: MAX_LIVE_SEGMENT_MS."""
    threshold: float | None = None
    """Probability at which a window is speech, above 0 up to 1. None: the default of EndpointConfig, as for the
    next."""
    pad_before_ms: int | None = None
    """Audio before the first window of speech that belongs to a segment."""
    turn: TurnOptions = TurnOptions()
    prompt: str = ""
    """Previous text, for models that read a prompt: names, spelling and style continue from it."""
    hotwords: tuple[str, ...] = ()
    """Words that are likely, for models that take hot words."""
    words: bool = False
    """Whether segments have words with times and confidences."""
    speakers: bool = False
    """Whether segments have speakers; at the end all of them are revised by all audio."""
    num_speakers: int | None = None
    """Number of speakers, if known; else `min_speakers` to `max_speakers`. Applies to the revision at the end.
    Any of the three switches `speakers` on."""
    min_speakers: int | None = None
    max_speakers: int | None = None
    itn: bool = False
    """Whether numbers, dates and money get their written form: inverse text normalization."""

    def __post_init__(self) -> None:
        normalize_language_option(self)
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
                raise OptionError(f"{name}={value!r}", f"{kinds[-1].__name__}, or None", param=name)
        check_switches(self, "words", "speakers", "itn")
        normalize_speaker_options(self)
        # EndpointConfig raises for values out of range: here, not at the first speech.
        limit_ms = MAX_LIVE_SEGMENT_MS if self.max_segment_ms is None else self.max_segment_ms
        EndpointConfig(max_segment_ms=limit_ms, **endpoint_overrides(self.threshold, self.pad_before_ms))
        for name, least in (("partial_ms", 100), ("lock_ms", 200)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise OptionError(f"{name}={value!r}", f"a whole number of ms, {least} or more", param=name)

    @classmethod
    def of(cls, options: dict[str, Any]) -> ListenOptions:
        """Builds options from keyword arguments; raises for an unknown name and suggests the nearest. A
        schedule may be a list of (up_to_ms, silence_ms)."""
        values = validate_option_names(options, cls.__struct_fields__)
        check_speakers_not_disabled(values)
        return cls(**values)


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


class TurnEvent(msgspec.Struct, frozen=True):
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


class FlushDone(msgspec.Struct, frozen=True):
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


LiveEvent = LivePartial | LiveSegmentDone | TurnEvent | FlushDone | SpeakersRevised | SessionFinished
