"""What a live caller may choose, and what it is told."""

from __future__ import annotations

from typing import Any

import msgspec

from asr_serve.errors import OptionError
from asr_serve.pipelines.utterance import endpoint_settings, known_options
from asr_serve.types import Segment
from asr_serve.vad.endpoint import EndpointConfig
from asr_serve.vad.schedule import SilenceSchedule

LIVE_SEGMENT_MS = 16_000
"""The longest segment: what is open is heard again for every partial."""
LOCK_MS = 1_920
"""Between two anchors."""


_KINDS: dict[str, tuple[type, ...]] = {
    "language": (str,),
    "silence_schedule": (SilenceSchedule,),
    "max_segment_ms": (int,),
    "threshold": (int, float),
    "pad_before_ms": (int,),
}


class ListenOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller may choose. Raises OptionError for what cannot be."""

    language: str | None = None
    """None: the model's own, or detected where it can."""
    partial_ms: int = 480
    """Time between two partials; longer when the engine has much to do."""
    lock_ms: int = LOCK_MS
    """Time between two anchors: words are locked two to three of these after they were spoken."""
    silence_schedule: SilenceSchedule | None = None
    max_segment_ms: int | None = None
    """Cut segments shorter, or let them grow longer, up to the model's own limit. None: LIVE_SEGMENT_MS."""
    threshold: float | None = None
    """Probability at which a window is speech, above 0 up to 1. None: EndpointConfig's, as for the next."""
    pad_before_ms: int | None = None
    """Audio before the first window of speech that belongs to a segment."""

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
                raise OptionError(f"{name}={value!r}", f"{kinds[-1].__name__}, or None", param=name)
        # Out of range, it says so here and not when somebody speaks.
        limit_ms = LIVE_SEGMENT_MS if self.max_segment_ms is None else self.max_segment_ms
        EndpointConfig(max_segment_ms=limit_ms, **endpoint_settings(self.threshold, self.pad_before_ms))
        for name, least in (("partial_ms", 100), ("lock_ms", 200)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise OptionError(f"{name}={value!r}", f"a whole number of ms, {least} or more", param=name)

    @classmethod
    def of(cls, options: dict[str, Any]) -> ListenOptions:
        """From keyword arguments; an unknown one fails and names the nearest. A schedule may be a list of
        (up_to_ms, silence_ms)."""
        return cls(**known_options(options, cls.__struct_fields__))


class Partial(msgspec.Struct, frozen=True):
    """What is known beyond the last segment that is done. Empty when that came to nothing."""

    start_samples: int
    heard_samples: int
    """Audio up to here is in the text."""
    fixed: str = ""
    """Words that will not change any more, though a comma may follow."""
    unfixed: str = ""
    """The rest, which may, with the space before it."""

    @property
    def text(self) -> str:
        return self.fixed + self.unfixed


class SegmentDone(msgspec.Struct, frozen=True):
    """Locked for ever."""

    segment: Segment
    decided_samples: int
    """It ended when audio up to here had been heard: past its end by the pause that ended it."""


class Finished(msgspec.Struct, frozen=True):
    """After `finish`: all that was put is in segments, or was no speech. Nothing follows."""

    duration_samples: int


Event = Partial | SegmentDone | Finished
