"""What a caller may choose of recordings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from asr_serve import units
from asr_serve.audio.reader import AudioLimits
from asr_serve.audio.resample import MAX_RATE_HZ, MIN_RATE_HZ
from asr_serve.audio.silence_schedule import SilenceSchedule
from asr_serve.decoding.seq2seq import SearchOptions, Task
from asr_serve.errors import MissingOption, OptionError
from asr_serve.pipelines.segments import check_switches, normalize_language_option, validate_option_names
from asr_serve.text.g2p.passages import ENERGY_RANGE_DB, PITCH_RANGE_SEMITONES, SPEED_RANGE
from asr_serve.types import Priority, unknown_name_error
from asr_serve.units import samples_to_s

PROMPT_SAMPLES = units.s_to_samples(120)
"""How much of a recording somebody can be waiting for at once."""
MAX_SPEAKERS = 32
SPEAKER_COUNT_FIELDS = ("num_speakers", "min_speakers", "max_speakers")

LongForm = Literal["parallel", "sequential"]
SEGMENTATION_FIELDS = ("silence_schedule", "max_segment_ms", "threshold", "pad_before_ms")
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
        normalize_language_option(self)
        if self.priority not in ("interactive", "bulk"):
            raise unknown_name_error("priority", str(self.priority), ["interactive", "bulk"])
        if self.long_form not in get_args(LongForm):
            raise unknown_name_error("long_form", str(self.long_form), get_args(LongForm))
        for name in SEGMENTATION_FIELDS if self.long_form == "sequential" else ():
            if getattr(self, name) is not None:
                raise OptionError(
                    f"{name} beside long_form=sequential",
                    "there the model's own times cut a recording, and not voice activity",
                    f"leave {name} out, or ask for long_form=parallel",
                    param=name,
                )

        check_switches(self, "words", "speakers", "itn", "condition_on_previous_text")
        normalize_speaker_options(self)
        if self.known_speakers and not self.speakers:
            raise OptionError("known_speakers came without speakers", "both, or neither", param="known_speakers")

    @classmethod
    def of(cls, options: dict[str, Any]) -> TranscribeOptions:
        """From keyword arguments; an unknown one fails and names the nearest. A schedule may be a list of
        (up_to_ms, silence_ms)."""
        found = validate_option_names(options, cls.__struct_fields__)
        check_speakers_not_disabled(found)
        return cls(**found)


def normalize_speaker_options(options: Any) -> None:
    """Of new options: how many speakers there are is looked at, and who says that wants them. For their
    `__post_init__`. Raises OptionError."""
    numbers = {name: getattr(options, name) for name in SPEAKER_COUNT_FIELDS}
    check_speaker_counts(**numbers)
    if any(numbers.values()):
        msgspec.structs.force_setattr(options, "speakers", True)


def check_speaker_counts(num_speakers: int | None, min_speakers: int | None, max_speakers: int | None) -> None:
    """Raises OptionError for numbers of speakers that cannot be."""
    for name, value in zip(SPEAKER_COUNT_FIELDS, (num_speakers, min_speakers, max_speakers), strict=True):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SPEAKERS:
            raise OptionError(f"{name}={value!r}", f"a whole number from 1 to {MAX_SPEAKERS}", param=name)
        if name != "num_speakers" and num_speakers is not None:
            raise OptionError(f"{name} beside num_speakers", "one says how many there are", param=name)
    if min_speakers is not None and max_speakers is not None and min_speakers > max_speakers:
        came = f"min_speakers={min_speakers} with max_speakers={max_speakers}"
        raise OptionError(came, f"1 to {max_speakers}", param="min_speakers")


def check_speakers_not_disabled(options: Mapping[str, Any], switch: str = "speakers") -> None:
    """Raises OptionError where a caller has switched speakers off and says how many there are."""
    for name in SPEAKER_COUNT_FIELDS if options.get(switch) is False else ():
        if options.get(name) is not None:
            raise OptionError(
                f"{name} beside {switch}=false", "whoever says how many speak wants them", "send one", param=name
            )


MAX_SEED = (1 << 62) - 1
PROSODY_LIMITS: dict[str, tuple[float, float]] = {
    "speed": SPEED_RANGE,
    "pitch": PITCH_RANGE_SEMITONES,
    "energy": ENERGY_RANGE_DB,
}


class SpeakOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Raises OptionError for what cannot be."""

    voice: str | None = None
    """None: the model's first."""
    speed: float = 1.0
    """0.25 to 4 times as fast; with SSML's own, both together."""
    pitch: float = 0.0
    """Semitones, -12 to 12."""
    energy: float = 0.0
    """dB, -12 to 12."""
    ssml: bool = False
    """The text is SSML: break, prosody, say-as, phoneme, sub, p, s."""
    phonemes: bool = False
    """The text is phonemes in the model's alphabet."""
    seed: int = 0
    """Of what is random in a voice: the same text and seed give the same samples."""
    rate_hz: int | None = None
    """Of the samples that come. None: the model's own."""
    watermark: bool = False
    """An inaudible mark that asr_serve.audio.watermark.detect finds again."""
    priority: Priority = "interactive"

    def __post_init__(self) -> None:
        if self.priority not in ("interactive", "bulk"):
            raise unknown_name_error("priority", str(self.priority), ["interactive", "bulk"])
        for name, (least, most) in PROSODY_LIMITS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise OptionError(f"{name}={_shown(value)}", f"a number, {least:g} to {most:g}", param=name)
        if type(self.seed) is not int or not 0 <= self.seed <= MAX_SEED:
            raise OptionError(f"seed={_shown(self.seed)}", f"a whole number, 0 to {MAX_SEED}", param="seed")
        if self.rate_hz is not None and not MIN_RATE_HZ <= self.rate_hz <= MAX_RATE_HZ:
            raise OptionError(
                f"rate_hz={self.rate_hz}", f"{MIN_RATE_HZ} to {MAX_RATE_HZ}, or none", param="rate_hz"
            )
        if self.ssml and self.phonemes:
            raise OptionError(
                "ssml and phonemes", "one of them", "in SSML, <phoneme> holds phonemes", param="phonemes"
            )

    @classmethod
    def of(cls, options: dict[str, Any]) -> SpeakOptions:
        """From keyword arguments; an unknown one fails and names the nearest."""
        for name in options:
            if name not in cls.__struct_fields__:
                raise unknown_name_error("option", name, cls.__struct_fields__)
        return cls(**options)


class SpokenWord(msgspec.Struct, frozen=True):
    """A written word, and when it sounds."""

    text: str
    start_samples: int
    """Since the speech began, at the rate that comes out."""
    end_samples: int


class AudioChunk(msgspec.Struct, frozen=True):
    """A piece of speech, in order. Nothing is missing between two."""

    pcm: np.ndarray
    """(n,) int16; now and then none."""
    rate_hz: int
    start_samples: int
    """Of its first sample, since the speech began."""
    sentence: str = ""
    """Where one begins to be said: its words. Empty elsewhere."""
    words: tuple[SpokenWord, ...] = ()
    """Of that sentence, all of them: when each will sound."""

    @property
    def samples(self) -> np.ndarray:
        """(n,) float32 in -1..1."""
        return np.asarray(self.pcm * np.float32(1 / 32_768))

    @property
    def start_s(self) -> float:
        return samples_to_s(self.start_samples, self.rate_hz)


def check_text(text: object) -> str:
    """Raises OptionError, MissingOption."""
    if text is None:
        raise MissingOption("no text to speak", "some", param="input")
    if not isinstance(text, str):
        raise OptionError(f"a {type(text).__name__} to speak", "text", param="input")
    return text


def _shown(value: object) -> str:
    return str(value)[:20]
