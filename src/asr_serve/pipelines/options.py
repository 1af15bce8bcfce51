"""Options of transcription, of live sessions and of speech synthesis, and the audio that synthesis returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from asr_serve import units
from asr_serve.audio.endpointing import EndpointConfig
from asr_serve.audio.reader import AudioLimits
from asr_serve.audio.resample import MAX_RATE_HZ, MIN_RATE_HZ
from asr_serve.audio.silence_schedule import SilenceSchedule
from asr_serve.decoding.search_options import (
    REPETITION_PENALTIES,
    SearchOptions,
    Task,
    check_max_new_tokens,
    check_temperatures,
    check_truncation,
)
from asr_serve.errors import MissingOption, OptionError
from asr_serve.pipelines.segments import (
    check_optional_switch,
    check_switches,
    endpoint_overrides,
    normalize_language_option,
    validate_option_names,
)
from asr_serve.text.g2p.clauses import ENERGY_RANGE_DB, PITCH_RANGE_SEMITONES, SPEED_RANGE
from asr_serve.types import Priority, unknown_name_error
from asr_serve.units import samples_to_s

PROMPT_SAMPLES = units.s_to_samples(120)
"""Audio of a recording that an interactive client can wait for at once."""
MAX_SPEAKERS = 32
SPEAKER_COUNT_FIELDS = ("num_speakers", "min_speakers", "max_speakers")
MAX_LIVE_SEGMENT_MS = 20_000
"""Default limit of a segment: an open segment is recognized again for every partial.

Chosen on 14 minutes of LibriSpeech training speech, by bench/live_text.py: cuts at 16 s changed 0.3 % of the words,
cuts at 20 s none, for 4 % more computation."""
MAX_N_BEST = 50
ANCHOR_INTERVAL_MS = 1_920
"""Default interval between two anchors."""

LongForm = Literal["parallel", "sequential"]
SEGMENTATION_FIELDS = ("silence_schedule", "max_segment_ms", "threshold", "pad_before_ms")
"""Options of voice-activity segmentation, which sequential windows do not use."""


class KnownSpeaker(msgspec.Struct, frozen=True):
    """Speaker whose voice is known in advance."""

    name: str
    """Name in the transcript."""
    audio: bytes
    """Recording of a few seconds of this speaker alone, as a file in any format."""


class TranscribeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of transcription. Raises OptionError for invalid values."""

    language: str | None = None
    """Language code or name. None: the model's own, or detected where it can."""
    priority: Priority = "bulk"
    """`interactive` applies to PROMPT_SAMPLES of a recording; the rest is bulk, so that it delays no other
    client."""
    vad: bool = True
    """False: all audio counts as speech and is cut only where the model's limit demands, at the quietest point;
    windows of `sequential` are then Whisper's own, also over silence."""
    silence_schedule: SilenceSchedule | None = None
    max_segment_ms: int | None = None
    """Limit of a segment, below the model's own."""
    threshold: float | None = None
    """Probability at which a window is speech, above 0 up to 1. None: the default of EndpointConfig, as for the
    next."""
    pad_before_ms: int | None = None
    """Audio before the first window of speech that belongs to a segment."""
    temperatures: tuple[float, ...] = SearchOptions().temperatures
    top_k: int = 0
    """Likeliest tokens that are sampled from at a temperature above 0; 0: all."""
    top_p: float = 1.0
    """Share of probability whose likeliest tokens are sampled from, of the `top_k`; 1: all."""
    task: Task = "transcribe"
    """`translate`: into English, by models that can."""
    beam: int = 1
    """Beam width; 1: greedy."""
    repetition_penalty: float = 1.0
    """Factor from 1 to 2 by which tokens that an answer already has become less likely; 1: none."""
    max_new_tokens: int | None = None
    """Most tokens of a segment's text; None: as many as can be said in its time. Streaming models, which have no
    decoder, refuse it."""
    prompt: str = ""
    """Previous text, for models that read a prompt: names, spelling and style continue from it."""
    hotwords: tuple[str, ...] = ()
    """Words that are likely, for models that take hotwords."""
    language_model: str = ""
    """Language model of beam search, one that is loaded beside the model; empty: none."""
    language_model_weight: float | None = None
    """Factor of its log-probabilities, 0 to 4; None: LANGUAGE_MODEL_WEIGHT."""
    n_best: int = 1
    """Most alternatives of a segment, the best first, by searches that have so many hypotheses; 1: none."""
    long_form: LongForm = "parallel"
    """`parallel`: segments cut by voice activity, all at once. `sequential`: windows one after the other, each
    cut where the model's timestamps end a sentence, and decoded with the previous text as context; for models
    with timestamps. Options of segmentation are refused there."""
    condition_on_previous_text: bool = True
    """False: windows of `sequential` are independent, so that no error carries over."""
    words: bool | None = False
    """Whether segments have words with times and confidences. True is refused by a model without times of words;
    None: where the model has them."""
    speakers: bool = False
    """Whether segments have speakers. Segments then follow once the whole recording was read."""
    num_speakers: int | None = None
    """Number of speakers, if known; else `min_speakers` to `max_speakers`, or as many as are found. Any of the
    three switches `speakers` on."""
    min_speakers: int | None = None
    max_speakers: int | None = None
    known_speakers: tuple[KnownSpeaker, ...] = ()
    """Speakers to be identified by name."""
    itn: bool | None = None
    """Whether numbers, dates and money get their written form: inverse text normalization. None: as the model writes;
    False matters to models whose prompt can ask for the spoken form."""
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

        check_switches(self, "speakers", "condition_on_previous_text")
        check_optional_switch(self, "words")
        check_optional_switch(self, "itn")
        check_temperatures(self.temperatures)
        check_truncation(self.top_k, self.top_p)
        check_repetition_penalty_range(self.repetition_penalty)
        check_max_new_tokens(self.max_new_tokens)
        check_language_model_options(self.language_model, self.language_model_weight)
        normalize_speaker_options(self)
        check_n_best_options(self)
        if self.known_speakers and not self.speakers:
            raise OptionError("known_speakers came without speakers", "both, or neither", param="known_speakers")

    @classmethod
    def of(cls, options: dict[str, Any]) -> TranscribeOptions:
        """Builds options from keyword arguments; raises for an unknown name and suggests the nearest. A schedule
        may be a list of (up_to_ms, silence_ms)."""
        values = validate_option_names(options, cls.__struct_fields__)
        check_speakers_not_disabled(values)
        return cls(**values)


def check_n_best_options(options: TranscribeOptions) -> None:
    """Raises OptionError for a number out of range, and beside options that split a segment after its search: its
    alternatives have no such parts."""
    n_best = options.n_best
    if isinstance(n_best, bool) or not isinstance(n_best, int) or not 1 <= n_best <= MAX_N_BEST:
        raise OptionError(f"n_best={n_best!r}", f"a whole number from 1 to {MAX_N_BEST}", param="n_best")
    if n_best == 1:
        return
    for split, name in ((options.speakers, "speakers"), (options.long_form == "sequential", "long_form=sequential")):
        if split:
            raise OptionError(
                f"n_best beside {name}",
                "alternatives are of whole segments, which that splits",
                "leave one of them out",
                param="n_best",
            )


def check_repetition_penalty_range(penalty: object) -> None:
    """Raises OptionError for what is no number in REPETITION_PENALTIES."""
    least, most = REPETITION_PENALTIES
    if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not least <= penalty <= most:
        came, allowed = f"repetition_penalty={penalty!r}", f"a number from {least:g} to {most:g}"
        raise OptionError(came, allowed, param="repetition_penalty")


LANGUAGE_MODEL_WEIGHTS = (0.0, 4.0)


def check_language_model_options(name: object, weight: object) -> None:
    """Raises OptionError for a name that is no text, and for a weight that is out of range or has no model."""
    if not isinstance(name, str):
        raise OptionError(f"language_model={name!r}", "a name", param="language_model")
    if weight is None:
        return
    least, most = LANGUAGE_MODEL_WEIGHTS
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not least <= weight <= most:
        raise OptionError(
            f"language_model_weight={weight!r}", f"a number, {least:g} to {most:g}", param="language_model_weight"
        )
    if not name:
        raise OptionError(
            "language_model_weight without language_model", "both, or the name alone", param="language_model_weight"
        )


def normalize_speaker_options(options: Any) -> None:
    """Checks numbers of speakers in new options, and switches `speakers` on if one is set. Called by
    `__post_init__`. Raises OptionError."""
    numbers = {name: getattr(options, name) for name in SPEAKER_COUNT_FIELDS}
    check_speaker_counts(**numbers)
    if any(numbers.values()):
        msgspec.structs.force_setattr(options, "speakers", True)


def check_speaker_counts(num_speakers: int | None, min_speakers: int | None, max_speakers: int | None) -> None:
    """Raises OptionError for invalid numbers of speakers."""
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
    """Raises OptionError where speakers are switched off and a number of speakers is set."""
    for name in SPEAKER_COUNT_FIELDS if options.get(switch) is False else ():
        if options.get(name) is not None:
            raise OptionError(
                f"{name} with {switch}=false",
                "a number of speakers implies that speakers are labelled",
                "send one of them",
                param=name,
            )


MAX_SEED = (1 << 62) - 1
PROSODY_LIMITS: dict[str, tuple[float, float]] = {
    "speed": SPEED_RANGE,
    "pitch": PITCH_RANGE_SEMITONES,
    "energy": ENERGY_RANGE_DB,
}


_LISTEN_KINDS: dict[str, tuple[type, ...]] = {
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
    """Interval between two anchors: words are locked one to two of these after they were spoken
    at the earliest."""
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
    temperatures: tuple[float, ...] = SearchOptions().temperatures
    """Temperatures of a segment's last hypothesis, tried in order until an answer passes. Others are greedy, and words
    that they have locked stay."""
    top_k: int = 0
    """Likeliest tokens that are sampled from at a temperature above 0; 0: all."""
    top_p: float = 1.0
    """Share of probability whose likeliest tokens are sampled from, of the `top_k`; 1: all."""
    repetition_penalty: float = 1.0
    """Factor from 1 to 2 by which tokens that a hypothesis already has become less likely; 1: none."""
    max_new_tokens: int | None = None
    """Most tokens of a segment's text; None: as many as can be said in its time."""
    hotwords: tuple[str, ...] = ()
    """Words that are likely, for models that take hotwords."""
    language_model: str = ""
    """Language model of beam search, one that is loaded beside the model; empty: none."""
    language_model_weight: float | None = None
    """Factor of its log-probabilities, 0 to 4; None: LANGUAGE_MODEL_WEIGHT."""
    words: bool | None = False
    """Whether segments have words with times and confidences. True is refused by a model without times of words;
    None: where the model has them."""
    speakers: bool = False
    """Whether segments have speakers; at the end all of them are revised by all audio."""
    num_speakers: int | None = None
    """Number of speakers, if known; else `min_speakers` to `max_speakers`. Applies to the revision at the end.
    Any of the three switches `speakers` on."""
    min_speakers: int | None = None
    max_speakers: int | None = None
    itn: bool | None = None
    """Whether numbers, dates and money get their written form: inverse text normalization. None: as the model writes;
    False matters to models whose prompt can ask for the spoken form."""

    def __post_init__(self) -> None:
        normalize_language_option(self)
        for name, kinds in _LISTEN_KINDS.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
                raise OptionError(f"{name}={value!r}", f"{kinds[-1].__name__}, or None", param=name)
        check_switches(self, "speakers")
        check_optional_switch(self, "words")
        check_optional_switch(self, "itn")
        check_temperatures(self.temperatures)
        check_truncation(self.top_k, self.top_p)
        check_repetition_penalty_range(self.repetition_penalty)
        check_max_new_tokens(self.max_new_tokens)
        check_language_model_options(self.language_model, self.language_model_weight)
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


class SpeakOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of speech synthesis. Raises OptionError for invalid values."""

    voice: str | None = None
    """Voice name; None: the model's first."""
    speed: float = 1.0
    """Speed factor, 0.25 to 4; multiplied with that of SSML."""
    pitch: float = 0.0
    """Pitch shift in semitones, -12 to 12."""
    energy: float = 0.0
    """Energy in dB, -12 to 12."""
    ssml: bool = False
    """Whether the text is SSML: break, prosody, say-as, phoneme, sub, p, s."""
    phonemes: bool = False
    """Whether the text is phonemes in the model's alphabet."""
    seed: int = 0
    """Random seed of the voice: the same text and seed give the same samples."""
    rate_hz: int | None = None
    """Sample rate of the output. None: the model's own."""
    watermark: bool = False
    """Whether to add an inaudible watermark that asr_serve.audio.watermark.detect finds."""
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
            raise OptionError(f"rate_hz={self.rate_hz}", f"{MIN_RATE_HZ} to {MAX_RATE_HZ}, or none", param="rate_hz")
        if self.ssml and self.phonemes:
            raise OptionError("ssml and phonemes", "one of them", "in SSML, <phoneme> holds phonemes", param="phonemes")

    @classmethod
    def of(cls, options: dict[str, Any]) -> SpeakOptions:
        """Builds options from keyword arguments; raises for an unknown name and suggests the nearest."""
        for name in options:
            if name not in cls.__struct_fields__:
                raise unknown_name_error("option", name, cls.__struct_fields__)
        return cls(**options)


class SpokenWord(msgspec.Struct, frozen=True):
    """Written word and the time it is spoken."""

    text: str
    start_samples: int
    """Start since the speech began, at the output rate."""
    end_samples: int


class AudioChunk(msgspec.Struct, frozen=True):
    """Consecutive chunk of speech."""

    pcm: np.ndarray
    """Samples (n,) int16; n may be 0."""
    rate_hz: int
    start_samples: int
    """Position of the first sample since the speech began."""
    sentence: str = ""
    """Text of the sentence that begins in this chunk; empty if none does."""
    words: tuple[SpokenWord, ...] = ()
    """Words of that sentence, with the times at which they are spoken."""

    @property
    def samples(self) -> np.ndarray:
        """Samples (n,) float32 in -1..1."""
        return np.asarray(self.pcm * np.float32(1 / 32_768))

    @property
    def start_s(self) -> float:
        return samples_to_s(self.start_samples, self.rate_hz)


def check_text(text: object) -> str:
    """Returns the text. Raises OptionError, MissingOption."""
    if text is None:
        raise MissingOption("no text to speak", "some", param="input")
    if not isinstance(text, str):
        raise OptionError(f"a {type(text).__name__} to speak", "text", param="input")
    return text


def _shown(value: object) -> str:
    return str(value)[:20]
