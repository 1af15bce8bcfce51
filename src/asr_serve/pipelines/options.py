"""What a caller may choose of recordings."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from asr_serve import units
from asr_serve.audio.io import AudioLimits
from asr_serve.decoding.attention import SearchOptions, Task
from asr_serve.errors import OptionError
from asr_serve.pipelines.utterance import expect_switches, known_options
from asr_serve.types import Priority
from asr_serve.vad.schedule import SilenceSchedule
from asr_serve.values import unknown

PROMPT_SAMPLES = units.s_to_samples(120)
"""How much of a recording somebody can be waiting for at once."""
MOST_SPEAKERS = 32

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
    """None: the model's own, or detected where it can."""
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
    """How many there are, if that is known; else `min_speakers` to `max_speakers`, or as many as are heard."""
    min_speakers: int | None = None
    max_speakers: int | None = None
    known_speakers: tuple[KnownSpeaker, ...] = ()
    """Those of the speakers that are to be told by name."""
    itn: bool = False
    """Whether numbers, dates and money are written as one writes them: inverse text normalisation."""
    limits: AudioLimits = AudioLimits()

    def __post_init__(self) -> None:
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
        expect_speakers(self.speakers, self.num_speakers, self.min_speakers, self.max_speakers)
        if self.known_speakers and not self.speakers:
            raise OptionError("known_speakers came without speakers", "both, or neither", param="known_speakers")

    @classmethod
    def of(cls, options: dict[str, Any]) -> TranscribeOptions:
        """From keyword arguments; an unknown one fails and names the nearest. A schedule may be a list of
        (up_to_ms, silence_ms)."""
        return cls(**known_options(options, cls.__struct_fields__))


def expect_speakers(wanted: bool, exactly: int | None, least: int | None, most: int | None) -> None:
    """Raises OptionError for numbers of speakers that cannot be, or that nobody asked to be told of."""
    for name, value in (("num_speakers", exactly), ("min_speakers", least), ("max_speakers", most)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_SPEAKERS:
            raise OptionError(f"{name}={value!r}", f"a whole number from 1 to {MOST_SPEAKERS}", param=name)
        if not wanted:
            raise OptionError(f"{name} came without speakers", "both, or neither", param=name)
        if name != "num_speakers" and exactly is not None:
            raise OptionError(f"{name} beside num_speakers", "one says how many there are", param=name)
    if least is not None and most is not None and least > most:
        raise OptionError(f"min_speakers={least} with max_speakers={most}", f"1 to {most}", param="min_speakers")
