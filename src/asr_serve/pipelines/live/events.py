"""What a live caller may choose, and what it is told."""

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
"""The longest segment: what is open is heard again for every partial."""
ANCHOR_INTERVAL_MS = 1_920
"""Between two anchors."""


_KINDS: dict[str, tuple[type, ...]] = {
    "language": (str,),
    "silence_schedule": (SilenceSchedule,),
    "max_segment_ms": (int,),
    "threshold": (int, float),
    "pad_before_ms": (int,),
}


class TurnOptions(msgspec.Struct, frozen=True, kw_only=True):
    """When a turn is over. Raises OptionError for what cannot be."""

    model: str | None = None
    """What says at a pause whether the speaker has finished; None: only the pause does, by its length. A pause
    that is long enough ends a turn in any case."""
    threshold: float = 0.5
    """The model's probability that ends a turn."""
    eager_threshold: float | None = None
    """The probability at which it is told that the turn may be over. Without a model that is the share of the
    pause that has passed. None: it is not told."""

    def __post_init__(self) -> None:
        for name in ("threshold", "eager_threshold"):
            value = getattr(self, name)
            if name == "eager_threshold" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise OptionError(f"{name}={value!r}", "a probability, above 0 and at most 1", param=name)


class ListenOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller may choose. Raises OptionError for what cannot be."""

    language: str | None = None
    """A code or a name. None: the model's own, or detected where it can."""
    partial_ms: int = 480
    """Time between two partials; longer when the engine has much to do."""
    lock_ms: int = ANCHOR_INTERVAL_MS
    """Time between two anchors: words are locked two to three of these after they were spoken."""
    silence_schedule: SilenceSchedule | None = None
    max_segment_ms: int | None = None
    """Cut segments shorter, or let them grow longer, up to the model's own limit. None: LIVE_SEGMENT_MS."""
    threshold: float | None = None
    """Probability at which a window is speech, above 0 up to 1. None: EndpointConfig's, as for the next."""
    pad_before_ms: int | None = None
    """Audio before the first window of speech that belongs to a segment."""
    turn: TurnOptions = TurnOptions()
    prompt: str = ""
    """What was said before, for models that read: names, spelling and style go on from it."""
    hotwords: tuple[str, ...] = ()
    """Words that may come, for models that read."""
    words: bool = False
    """Whether each segment tells its words: when each was said, and how sure the model was."""
    speakers: bool = False
    """Whether each segment tells who speaks; at the end all of them are told once more, as all that was said
    shows."""
    num_speakers: int | None = None
    """How many there are, if that is known; else `min_speakers` to `max_speakers`. Holds for what is told at the
    end. Who says how many wants speakers."""
    min_speakers: int | None = None
    max_speakers: int | None = None
    itn: bool = False
    """Whether numbers, dates and money in segments are written as one writes them."""

    def __post_init__(self) -> None:
        normalize_language_option(self)
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
                raise OptionError(f"{name}={value!r}", f"{kinds[-1].__name__}, or None", param=name)
        check_switches(self, "words", "speakers", "itn")
        normalize_speaker_options(self)
        # Out of range, it says so here and not when somebody speaks.
        limit_ms = MAX_LIVE_SEGMENT_MS if self.max_segment_ms is None else self.max_segment_ms
        EndpointConfig(max_segment_ms=limit_ms, **endpoint_overrides(self.threshold, self.pad_before_ms))
        for name, least in (("partial_ms", 100), ("lock_ms", 200)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise OptionError(f"{name}={value!r}", f"a whole number of ms, {least} or more", param=name)

    @classmethod
    def of(cls, options: dict[str, Any]) -> ListenOptions:
        """From keyword arguments; an unknown one fails and names the nearest. A schedule may be a list of
        (up_to_ms, silence_ms)."""
        found = validate_option_names(options, cls.__struct_fields__)
        check_speakers_not_disabled(found)
        return cls(**found)


class LivePartial(msgspec.Struct, frozen=True):
    """What is known beyond the last segment that is done. Empty when that came to nothing."""

    start_samples: int
    heard_samples: int
    """Audio up to here is in the text."""
    locked_text: str = ""
    """Words that will not change any more, though a comma may follow."""
    tentative_text: str = ""
    """The rest, which may, with the space before it."""
    locked_samples: int = 0
    """The words of `fixed` were spoken before this."""

    @property
    def text(self) -> str:
        return self.locked_text + self.tentative_text


class LiveSegmentDone(msgspec.Struct, frozen=True):
    """Locked for ever."""

    segment: Segment
    decided_samples: int
    """It ended when audio up to here had been heard: past its end by the pause that ended it."""
    language: str = ""
    """That it was heard in; empty where the model knows only the one that was chosen."""
    language_prob: float = 0.0
    """How probable that is, 0 to 1; 0 where nobody asked the audio."""


def endpoint_config(client: EngineClient, options: ListenOptions) -> EndpointConfig:
    """How this caller's speech is cut. Segments that are cut off are heard past both ends. Raises OptionError."""
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
    """Somebody's turn to speak: what lies between two pauses that are long enough, or that a turn model took for
    the end.

    started     speech began; position: where its audio does
    eager_end   probably over, and the text is complete if it is
    resumed     it was not
    stopped     it is over; position: where its audio ends
    ended       and all its segments are out. One that was no speech after all has none
    """

    state: TurnState
    position_samples: int
    probability: float | None = None
    by: str = "silence"
    """What decided it: the pause, or the turn model of that name."""


class FlushDone(msgspec.Struct, frozen=True):
    """All that was said before that position is in segments that are out."""

    name: str
    position_samples: int


class SpeakersRevised(msgspec.Struct, frozen=True):
    """Before `Finished`, where speakers were wanted: who said each segment that is out, as all of it shows."""

    speakers: tuple[str, ...]
    """One for each `SegmentDone`, in order."""


class SessionFinished(msgspec.Struct, frozen=True):
    """After `finish`: all that was put is in segments, or was no speech. Nothing follows."""

    duration_samples: int


LiveEvent = LivePartial | LiveSegmentDone | TurnEvent | FlushDone | SpeakersRevised | SessionFinished
