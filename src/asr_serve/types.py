"""The nouns every room shares. Plain frozen data; positions are samples at 16 kHz since the start."""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, inspect

from asr_serve import units
from asr_serve.errors import OptionError

Priority = Literal["live", "interactive", "bulk"]
"""`live`: somebody is speaking. `interactive`: somebody waits for the answer. `bulk`: a batch job that takes what
is left. Most urgent first."""


class Span(msgspec.Struct, frozen=True, order=True):
    """A half-open range of samples, `start_samples` up to but not including `end_samples`."""

    start_samples: int
    end_samples: int

    @property
    def samples(self) -> int:
        return self.end_samples - self.start_samples


class EngineTimestamps(msgspec.Struct, frozen=True):
    """When an utterance passed through the engine: `time.time_ns`, which the server's clock reads too."""

    submitted_ns: int
    encode_start_ns: int
    encode_end_ns: int
    decode_end_ns: int


class SearchToken(NamedTuple):
    """Something a search found."""

    id: int
    frame: int
    """Encoder frame of the session at which it was said."""
    logprob: float
    """Natural log."""


class SearchResult(NamedTuple):
    """What a step of a search says of one session."""

    fixed_tokens: list[SearchToken]
    """New, and for ever."""
    tail_tokens: list[SearchToken]
    """After everything fixed: what is likeliest now, and may change."""
    token_runs: list[tuple[int, int]] = []  # noqa: RUF012
    """Where it was asked for: the first frame of each token, and the one behind its last, of all that were fixed
    since this was told last, these included."""


class NBestHypothesis(NamedTuple):
    """One entry of an n-best list, after what is fixed."""

    tokens: list[SearchToken]
    logprob: float
    """Of all that was heard, by the search; natural log."""
    gain: float = 0.0
    """What the caller's hot words in it are worth besides."""


class PhonemeSpan(msgspec.Struct, frozen=True):
    """Part of a sentence, all said in one manner."""

    phonemes: str
    """In the model's alphabet, a character each."""
    speed: float = 1.0
    """0.25 to 4 times as fast as the voice would by itself."""
    pitch: float = 0.0
    """Semitones, -12 to 12."""
    energy: float = 0.0
    """dB, -12 to 12."""


class Sentence(msgspec.Struct, frozen=True):
    """What a voice says in one breath: an engine encodes it once. Without pauses of its own at the ends."""

    spans: tuple[PhonemeSpan, ...]
    voice: str
    seed: int = 0
    """Of what is random: the same sentence and seed give the same samples, in any company."""

    @property
    def phonemes(self) -> str:
        """Of all stretches."""
        return "".join(stretch.phonemes for stretch in self.spans)


class SentenceAudio(NamedTuple):
    """A piece of a sentence as it is said, in order."""

    pcm: bytes
    """int16, little-endian, mono, at the card's rate."""
    phoneme_ends: tuple[int, ...]
    """With the first piece only: the sample at which each phoneme of the sentence ends."""
    is_last: bool


class Word(msgspec.Struct, frozen=True):
    """A word of a segment, or a character of a script that has no spaces, and when it was said."""

    text: str
    """As in the segment's text, with the marks that touch it, without spaces around it."""
    start_samples: int
    end_samples: int
    confidence: float = 0.0
    """0 to 1: the geometric mean of its tokens' probabilities."""
    speaker: str = ""
    """Who said it, where speakers were wanted: one of the names in `Transcript.turns`."""
    spoken: str = ""
    """Of the written form: the words that were said for it, where they are others."""

    @property
    def start_s(self) -> float:
        return units.samples_to_s(self.start_samples)

    @property
    def end_s(self) -> float:
        return units.samples_to_s(self.end_samples)


class SpeakerTurn(msgspec.Struct, frozen=True):
    """Somebody speaks. Turns of two speakers may overlap."""

    speaker: str
    start_samples: int
    end_samples: int


class Segment(msgspec.Struct, frozen=True):
    """One closed utterance and its text."""

    start_samples: int
    end_samples: int
    text: str
    tokens: tuple[int, ...] = ()
    avg_logprob: float = 0.0
    """Mean natural-log probability of the tokens, end-of-text included."""
    temperature: float = 0.0
    """0 for greedy; above it when the greedy answer was rejected and sampled again."""
    finish: Literal["stop", "length", "repetition"] = "stop"
    """Why decoding ended: end-of-text, the token limit, or the repetition guard."""
    logprobs: tuple[float, ...] = ()
    """Natural-log probability of each token."""
    no_speech_prob: float = 0.0
    """How sure the model was that nobody speaks; 0 of one that cannot tell."""
    words: tuple[Word, ...] = ()
    """In order, inside the segment, never overlapping; empty unless they were wanted."""
    speaker: str = ""
    """Who said it, where speakers were wanted."""
    spoken: str = ""
    """Where the written form was wanted and is another: the text as it was said."""

    @property
    def start_s(self) -> float:
        return units.samples_to_s(self.start_samples)

    @property
    def end_s(self) -> float:
        return units.samples_to_s(self.end_samples)


class Transcript(msgspec.Struct, frozen=True):
    """What one input said. `segments` are in order and never overlap."""

    key: str
    text: str
    language: str
    duration_samples: int
    segments: tuple[Segment, ...]
    model: str = ""
    cached_samples: int = 0
    """Of what was heard in it, how much somebody had brought before: it was not computed anew, or not all."""
    language_prob: float = 0.0
    """How sure the model was of the language, where it was to hear it; 0 where it was told."""
    turns: tuple[SpeakerTurn, ...] = ()
    """Who spoke when, where speakers were wanted, in order of their starts."""

    @property
    def duration_s(self) -> float:
        return units.samples_to_s(self.duration_samples)

    @property
    def cached_s(self) -> float:
        return units.samples_to_s(self.cached_samples)


PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(gt=0, lt=1)]
Name = Annotated[str, Meta(pattern=r"\A[^\s,=]+\Z", description="a name without spaces, commas or =")]
NonEmptyText = Annotated[str, Meta(min_length=1)]
Host = Annotated[
    str,
    Meta(
        pattern=r"\A([\w.-]+|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[\w:.%]*)\Z",
        description="a host name or an IP address, without port or scheme",
    ),
]
ApiKey = Annotated[
    str, Meta(pattern=r"\A[!-+\--~]+\Z", description="a key of visible ASCII, without spaces or commas")
]
PeerKey = Annotated[
    str,
    Meta(pattern=r"\A[!-+\--~]{16,}\Z", description="16 or more of visible ASCII, without spaces or commas"),
]
Quantize = Literal["none", "int8", "dynamic"]
Window = Literal["packed", "checked", "whole"]
Role = Literal["both", "encode", "decode"]
DiskBackendName = Literal["auto", "uring", "threads", "nixl", "gds"]
PeerTransportName = Literal["auto", "shm", "nixl", "tcp"]
HandoverPayload = Literal["auto", "cross", "hidden"]
Peer = Annotated[
    str,
    Meta(
        pattern=r"\A([\w.-]+|\[[0-9A-Fa-f:.%]+\])"
        r":([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])\Z",
        description="host:port, an IPv6 address in brackets, a port from 1 to 65535",
    ),
]
Port = Annotated[int, Meta(ge=0, le=65_535)]
Url = Annotated[str, Meta(pattern=r"\Ahttps?://[^\s/]\S*\Z", description="a URL, http:// or https://")]
Origin = Annotated[
    str, Meta(pattern=r"\A(\*|https?://[^\s/,]+)\Z", description="an origin like https://example.org, or *")
]

SECRETS = ("api_keys", "admin_keys", "peer_keys")
"""Fields that are never printed."""


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, and nothing that is sent there leaves it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def coerce_fields(config: msgspec.Struct) -> None:
    """Bring every field to its declared type: a list to a tuple, an int to a float.

    Raises OptionError, with the field as `param`, for what does not fit.
    """
    for field in msgspec.structs.fields(config):
        value = getattr(config, field.name)
        try:
            msgspec.structs.force_setattr(config, field.name, msgspec.convert(value, field.type))
        except msgspec.ValidationError:
            shown = "***" if field.name in SECRETS else repr(value)
            kind = inspect.type_info(field.type)
            near = suggest_name(value, map(str, kind.values)) if isinstance(kind, inspect.LiteralType) else ""
            raise OptionError(f"{field.name}={shown}", describe_allowed(kind), near, param=field.name) from None


def describe_allowed(kind: inspect.Type) -> str:
    """What a type takes, in words: `a whole number, 1 or more; or none`."""
    match kind:
        case inspect.Metadata():
            return str((kind.extra_json_schema or {})["description"])
        case inspect.UnionType():
            return (
                f"{describe_allowed(next(t for t in kind.types if not isinstance(t, inspect.NoneType)))}; or none"
            )
        case inspect.IntType():
            return f"a whole number, {describe_range(kind)}"
        case inspect.FloatType():
            return f"a number, {describe_range(kind)}"
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "text"
        case inspect.LiteralType():
            return ", ".join(map(str, kind.values))
        case inspect.VarTupleType():
            return f"a list; each one {describe_allowed(kind.item_type)}"
        case inspect.DictType():
            return "pairs name=model"
        case _:
            return "a table of settings"


def describe_range(kind: inspect.IntType | inspect.FloatType) -> str:
    """`0 to 65535`, `1 or more`, `more than 0, less than 1`."""
    if kind.ge is not None:
        return f"{kind.ge:g} to {kind.le:g}" if kind.le is not None else f"{kind.ge:g} or more"
    most = f", less than {kind.lt:g}" if kind.lt is not None else ""
    most = f", up to {kind.le:g}" if kind.le is not None else most
    return f"more than {kind.gt:g}{most}"


_SPEAKERS = ("spk", "speakers")
_WORDS = ("words", "timestamp_granularities[]", "timestamp")
_HOTWORDS = ("hotwords",)
_HOW_MANY = ("num_speakers", *_SPEAKERS)
OPTION_SYNONYMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("diarize", "diarise", "diarization", "diarisation", "speaker_labels", "speaker"), _SPEAKERS),
    **dict.fromkeys(("enable_diarization", "enable_speaker_diarization", *_SPEAKERS), _SPEAKERS),
    **dict.fromkeys(("speaker_count", "speakers_expected", "number_of_speakers", "n_speakers"), _HOW_MANY),
    **dict.fromkeys(("word_timestamps", "word_times", "word_time_offsets", "timestamps"), _WORDS),
    **dict.fromkeys(("enable_word_time_offsets", "words", "timestamp_granularities", "timestamp"), _WORDS),
    **dict.fromkeys(("hot_words", "hot_word", "keywords", "keyterms", "keyterm", "boost"), _HOTWORDS),
    **dict.fromkeys(("word_boost", "phrases", "phrase_hints", "vocabulary", "custom_vocabulary"), _HOTWORDS),
    **dict.fromkeys(("inverse_text_normalization", "smart_format", "numerals", "format_text"), ("itn",)),
}
"""What other programs call something, and what it may be called here."""


def suggest_name(came: object, names: Iterable[str]) -> str:
    """`did you mean 'port'?`, or nothing where no name is near: the one that means the same, or is spelt about the
    same. Of a mapping, the value is what is shown."""
    shown = names if isinstance(names, Mapping) else {name: name for name in names}
    text = str(came)
    meant = OPTION_SYNONYMS.get(text.strip().casefold().replace("-", "_").removesuffix("[]"), ())
    near = [name for name in meant if name in shown] or difflib.get_close_matches(text, shown, n=1)
    return f"did you mean {shown[near[0]]!r}?" if near else ""


def unknown_name_error(what: str, came: str, allowed: tuple[str, ...] | list[str]) -> OptionError:
    """The error for a name that is not one of `allowed`, with the nearest one first."""
    return OptionError(f"unknown {what} {came!r}", f"allowed: {', '.join(allowed)}", suggest_name(came, allowed))
