"""What a caller may choose of recordings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from asr_serve import units
from asr_serve.audio.io import AudioLimits
from asr_serve.decoding.attention import SearchOptions, Task
from asr_serve.errors import OptionError
from asr_serve.pipelines.utterance import expect_switches, known_options, settle_language
from asr_serve.types import Priority
from asr_serve.vad.schedule import SilenceSchedule
from asr_serve.values import unknown

PROMPT_SAMPLES = units.s_to_samples(120)
"""How much of a recording somebody can be waiting for at once."""
MOST_SPEAKERS = 32
NUMBERS = ("num_speakers", "min_speakers", "max_speakers")

LongForm = Literal["parallel", "sequential"]
OF_SEGMENTS = ("silence_schedule", "max_segment_ms", "threshold", "pad_before_ms")
"""What is asked of voice activity, which has no part in windows."""


class KnownSpeaker(msgspec.Struct, frozen=True):
    """Somebody whose voice the caller knows."""

    name: str
    """What this speaker is called in the transcript."""
    audio: bytes
    """A few seconds in which nobody else speaks, as a file in any format."""


class TranscribeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller may choose. Raises OptionError for what cannot be."""

    language: str | None = None
    """A code or a name. None: the model's own, or detected where it can."""
    priority: Priority = "bulk"
    """`interactive` holds for PROMPT_SAMPLES of a recording; the rest is bulk, so that nobody waits for it."""
    vad: bool = True
    """False: every sample is speech, cut only where the model's limit demands, at the quietest point; windows of
    `sequential` are then Whisper's own, also over silence."""
    silence_schedule: SilenceSchedule | None = None
    max_segment_ms: int | None = None
    """Cut segments shorter than the model's own limit."""
    threshold: float | None = None
    """Probability at which a window is speech, above 0 up to 1. None: EndpointConfig's, as for the next."""
    pad_before_ms: int | None = None
    """Audio before the first window of speech that belongs to a segment."""
    temperatures: tuple[float, ...] = SearchOptions().temperatures
    task: Task = "transcribe"
    """`translate`: into English, by models that can."""
    beam: int = 1
    """Hypotheses that a decoder follows at once; 1: greedy."""
    prompt: str = ""
    """What was said before, for models that read: names, spelling and style go on from it."""
    hotwords: tuple[str, ...] = ()
    """Words that may come, for models that read."""
    long_form: LongForm = "parallel"
    """`parallel`: segments that voice activity cuts, all at once. `sequential`: windows one after the other, each
    cut where the model says that a sentence ended, and heard knowing what was said before; by models that say
    when. What shapes segments is refused there."""
    condition_on_previous_text: bool = True
    """False: the windows of `sequential` do not know of each other. Then nothing misheard is carried on."""
    words: bool = False
    """Whether each segment tells its words: when each was said, and how sure the model was."""
    speakers: bool = False
    """Whether it is told who speaks. Segments are then told once the recording was read to its end."""
    num_speakers: int | None = None
    """How many there are, if that is known; else `min_speakers` to `max_speakers`, or as many as are heard. Who
    says how many wants speakers."""
    min_speakers: int | None = None
    max_speakers: int | None = None
    known_speakers: tuple[KnownSpeaker, ...] = ()
    """Those of the speakers that are to be told by name."""
    itn: bool = False
    """Whether numbers, dates and money are written as one writes them: inverse text normalisation."""
    limits: AudioLimits = AudioLimits()

    def __post_init__(self) -> None:
        settle_language(self)
        if self.priority not in ("interactive", "bulk"):
            raise unknown("priority", str(self.priority), ["interactive", "bulk"])
        if self.long_form not in get_args(LongForm):
            raise unknown("long_form", str(self.long_form), get_args(LongForm))
        for name in OF_SEGMENTS if self.long_form == "sequential" else ():
            if getattr(self, name) is not None:
                raise OptionError(
                    f"{name} beside long_form=sequential",
                    "there the model's own times cut a recording, and not voice activity",
                    f"leave {name} out, or ask for long_form=parallel",
                    param=name,
                )

        expect_switches(self, "words", "speakers", "itn", "condition_on_previous_text")
        settle_speakers(self)
        if self.known_speakers and not self.speakers:
            raise OptionError("known_speakers came without speakers", "both, or neither", param="known_speakers")

    @classmethod
    def of(cls, options: dict[str, Any]) -> TranscribeOptions:
        """From keyword arguments; an unknown one fails and names the nearest. A schedule may be a list of
        (up_to_ms, silence_ms)."""
        found = known_options(options, cls.__struct_fields__)
        expect_not_off(found)
        return cls(**found)


def settle_speakers(options: Any) -> None:
    """Of new options: how many speakers there are is looked at, and who says that wants them. For their
    `__post_init__`. Raises OptionError."""
    numbers = {name: getattr(options, name) for name in NUMBERS}
    expect_numbers(**numbers)
    if any(numbers.values()):
        msgspec.structs.force_setattr(options, "speakers", True)


def expect_numbers(num_speakers: int | None, min_speakers: int | None, max_speakers: int | None) -> None:
    """Raises OptionError for numbers of speakers that cannot be."""
    for name, value in zip(NUMBERS, (num_speakers, min_speakers, max_speakers), strict=True):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_SPEAKERS:
            raise OptionError(f"{name}={value!r}", f"a whole number from 1 to {MOST_SPEAKERS}", param=name)
        if name != "num_speakers" and num_speakers is not None:
            raise OptionError(f"{name} beside num_speakers", "one says how many there are", param=name)
    if min_speakers is not None and max_speakers is not None and min_speakers > max_speakers:
        came = f"min_speakers={min_speakers} with max_speakers={max_speakers}"
        raise OptionError(came, f"1 to {max_speakers}", param="min_speakers")


def expect_not_off(options: Mapping[str, Any], switch: str = "speakers") -> None:
    """Raises OptionError where a caller has switched speakers off and says how many there are."""
    for name in NUMBERS if options.get(switch) is False else ():
        if options.get(name) is not None:
            raise OptionError(
                f"{name} beside {switch}=false", "whoever says how many speak wants them", "send one", param=name
            )
