"""Records shared by all packages: plain frozen data. Positions are samples at 16 kHz since the start."""

from __future__ import annotations

import difflib
import fnmatch
import ipaddress
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, inspect

from asr_serve import units
from asr_serve.errors import OptionError

Priority = Literal["live", "interactive", "bulk"]
"""Priority of a request, most urgent first. `live`: a caller is speaking. `interactive`: a client waits for the
response. `bulk`: a batch job that uses the remaining capacity."""


class LanguageModelChoice(msgspec.Struct, frozen=True):
    """Language model that a search adds to the recogniser."""

    name: str
    """Name in EngineConfig.language_models."""
    weight: float
    """Factor of its log-probabilities."""


class Int8Calibration(msgspec.Struct, frozen=True):
    """Layers of a set of weights that quantize=auto may compute in 8 bits, as bench/int8_layers.py chose them."""

    kept: tuple[str, ...] = ()
    """Patterns (fnmatch) of the names of layers, see devices/interface.Device.linear, that keep the device's dtype."""

    def quantizes(self, name: str) -> bool:
        """Returns whether the layer of that name may be quantized."""
        return not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.kept)


class Span(msgspec.Struct, frozen=True, order=True):
    """A half-open range of samples, `start_samples` up to but not including `end_samples`."""

    start_samples: int
    end_samples: int

    @property
    def samples(self) -> int:
        return self.end_samples - self.start_samples


class PeerTimings(msgspec.Struct, frozen=True):
    """Times of an utterance that another engine encoded: when it was sent and its output received, by `time.time_ns`
    of the engine that decodes, and durations by the peer's own clock."""

    peer: str
    """Address of the peer."""
    sent_ns: int
    received_ns: int
    waited_s: float
    encoded_s: float
    """Time of its batch."""
    transfer_s: float


class EngineTimestamps(msgspec.Struct, frozen=True):
    """Times of an utterance's stages in the engine, by `time.time_ns` of its host; `submitted_ns` by the server's."""

    submitted_ns: int
    encode_start_ns: int
    encode_end_ns: int
    decode_end_ns: int
    peer: PeerTimings | None = None
    """Encoding at a peer, if that is where it was encoded."""
    replica: str = ""
    """Replica that answered, where a model has several; filled in by the server."""


class SearchToken(NamedTuple):
    """One token of a search's output."""

    id: int
    frame: int
    """Encoder frame of the session at which the token was emitted."""
    logprob: float
    """Natural-log probability."""
    end_frame: int | None = None
    """Frame behind the last of the token's sound; None where the search does not know it."""


class SearchResult(NamedTuple):
    """Output of one step of a search for one session."""

    fixed_tokens: list[SearchToken]
    """New final tokens."""
    tail_tokens: list[SearchToken]
    """Most likely continuation after all fixed tokens; it may still change."""
    token_runs: list[tuple[int, int]] = []  # noqa: RUF012
    """Frame ranges (first, end), where requested, of all tokens fixed since the last report, this step's included."""


class NBestHypothesis(NamedTuple):
    """One entry of an n-best list, after the fixed tokens."""

    tokens: list[SearchToken]
    logprob: float
    """Natural-log probability of all audio so far, by the search."""
    gain: float = 0.0
    """Bonus of the hotwords in it, not included in `logprob`."""


class PhonemeSpan(msgspec.Struct, frozen=True):
    """Part of a sentence with one prosody."""

    phonemes: str
    """Phonemes in the model's alphabet, one character each."""
    speed: float = 1.0
    """Factor on the voice's own speed, 0.25 to 4."""
    pitch: float = 0.0
    """Semitones, -12 to 12."""
    energy: float = 0.0
    """dB, -12 to 12."""


class Sentence(msgspec.Struct, frozen=True):
    """Unit of speech synthesis, which an engine encodes once. It has no pauses at its ends."""

    spans: tuple[PhonemeSpan, ...]
    voice: str
    seed: int = 0
    """Random seed: the same sentence and seed give the same samples in any batch."""

    @property
    def phonemes(self) -> str:
        """Phonemes of all spans."""
        return "".join(span.phonemes for span in self.spans)


class SentenceAudio(NamedTuple):
    """A chunk of a sentence's audio; chunks come in order."""

    pcm: bytes
    """Samples as int16, little-endian, mono, at the card's rate."""
    phoneme_ends: tuple[int, ...]
    """Sample at which each phoneme of the sentence ends; in the first chunk only."""
    is_last: bool


class Word(msgspec.Struct, frozen=True):
    """A word of a segment, or a character of a script without spaces, with its time."""

    text: str
    """Text as in the segment, with adjacent punctuation, without spaces around it."""
    start_samples: int
    end_samples: int
    confidence: float = 0.0
    """0 to 1: the geometric mean of its tokens' probabilities."""
    speaker: str = ""
    """Speaker, one of the names in `Transcript.turns`; empty unless speakers were requested."""
    spoken: str = ""
    """Spoken words, where the written form differs from them."""

    @property
    def start_s(self) -> float:
        return units.samples_to_s(self.start_samples)

    @property
    def end_s(self) -> float:
        return units.samples_to_s(self.end_samples)


class Alternative(msgspec.Struct, frozen=True):
    """Entry of a segment's n-best list."""

    text: str
    score: float
    """Natural log of the weight that the search gives the whole segment: only differences within a list matter."""
    words: tuple[Word, ...] = ()
    """Words as in the segment; empty unless requested, and from a search that tells no times of its hypotheses."""


class SpeakerTurn(msgspec.Struct, frozen=True):
    """Stretch of one speaker's speech. Turns of two speakers may overlap."""

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
    """Sampling temperature: 0 for greedy; above it when the greedy result was rejected and sampled again."""
    finish: Literal["stop", "length", "repetition"] = "stop"
    """Reason why decoding ended: end-of-text, the token limit, or the repetition guard."""
    logprobs: tuple[float, ...] = ()
    """Natural-log probability of each token."""
    no_speech_prob: float = 0.0
    """The model's probability that the segment holds no speech; 0 for a model that does not estimate it."""
    words: tuple[Word, ...] = ()
    """Words in order, inside the segment, never overlapping; empty unless requested."""
    speaker: str = ""
    """Speaker; empty unless speakers were requested."""
    spoken: str = ""
    """Text as spoken, where the written form was requested and differs from it."""
    alternatives: tuple[Alternative, ...] = ()
    """N-best list of different texts, the best first, which is this segment's; empty unless requested."""

    @property
    def start_s(self) -> float:
        return units.samples_to_s(self.start_samples)

    @property
    def end_s(self) -> float:
        return units.samples_to_s(self.end_samples)


class Transcript(msgspec.Struct, frozen=True):
    """Transcript of one input. `segments` are in order and never overlap."""

    key: str
    text: str
    language: str
    duration_samples: int
    segments: tuple[Segment, ...]
    model: str = ""
    cached_samples: int = 0
    """Samples of its speech that were in the cache, and so not computed again, or not completely."""
    language_prob: float = 0.0
    """The model's probability of the language, where it detected it; 0 where the request named it."""
    turns: tuple[SpeakerTurn, ...] = ()
    """Speaker turns in order of their starts; empty unless speakers were requested."""

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
NamedFile = Annotated[
    str, Meta(pattern=r"\A[^\s,=]+=[^,]+\Z", description="a name and a file, NAME=FILE, without commas")
]
NonEmptyText = Annotated[str, Meta(min_length=1)]
Host = Annotated[
    str,
    Meta(
        pattern=r"\A([\w.-]+|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[\w:.%]*)\Z",
        description="a host name or an IP address, without port or scheme",
    ),
]
IpAddress = Annotated[
    str, Meta(pattern=r"\A(\d{1,3}(\.\d{1,3}){3}|[0-9A-Fa-f]*:[0-9A-Fa-f:.]+)\Z", description="an IP address")
]
ApiKey = Annotated[str, Meta(pattern=r"\A[!-+\--~]+\Z", description="a key of visible ASCII, without spaces or commas")]
WebhookSecret = Annotated[
    str,
    Meta(
        pattern=r"\Awhsec_[A-Za-z0-9+/]{32,88}={0,2}\Z",
        description="whsec_ and 24 to 64 random bytes in base64, like whsec_$(openssl rand -base64 32)",
    ),
]
PeerKey = Annotated[
    str, Meta(pattern=r"\A[!-+\--~]{16,}\Z", description="16 or more of visible ASCII, without spaces or commas")
]
DeviceName = Annotated[
    str, Meta(pattern=r"\A(auto|cpu|cuda(:\d{1,3})?)\Z", description="auto, cpu, cuda or cuda:N, N the number of a GPU")
]
DtypeName = Literal["auto", "fp32", "bf16"]
Quantize = Literal["auto", "none", "int8", "dynamic"]
LanguageModelBackend = Literal["native", "vllm"]
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
RedisUrl = Annotated[
    str,
    Meta(
        pattern=r"\A(rediss?(\+cluster)?|unix)://\S+\Z",
        description="a URL, redis://, rediss://, redis+cluster://, rediss+cluster:// or unix://",
    ),
]
Origin = Annotated[
    str, Meta(pattern=r"\A(\*|https?://[^\s/,]+)\Z", description="an origin like https://example.org, or *")
]

SECRETS = ("api_keys", "admin_keys", "peer_keys")
"""Fields that are never printed."""
HIDDEN = (*SECRETS, "password", "callers", "webhook_secret")
"""The same, with secrets of the edge."""


def is_loopback(host: str) -> bool:
    """Returns whether a host is this machine, so that nothing sent to it leaves the machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def is_address(host: str) -> bool:
    """Returns whether a host is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def coerce_fields(config: msgspec.Struct) -> None:
    """Convert every field to its declared type in place: a list to a tuple, an int to a float. Raises OptionError, with
    the field as `param`, for a value that does not fit."""
    for field in msgspec.structs.fields(config):
        value = getattr(config, field.name)
        try:
            msgspec.structs.force_setattr(config, field.name, msgspec.convert(value, field.type))
        except msgspec.ValidationError:
            shown = "***" if field.name in HIDDEN else repr(value)
            kind = inspect.type_info(field.type)
            near = suggest_name(value, map(str, kind.values)) if isinstance(kind, inspect.LiteralType) else ""
            raise OptionError(f"{field.name}={shown}", describe_allowed(kind), near, param=field.name) from None


def without_secrets(url: str) -> str:
    """The URL as it may be printed: without user, password and query."""
    scheme, mark, rest = url.partition("://")
    address, question, _ = rest.partition("?")
    user, at, host = address.rpartition("@")
    return f"{scheme}{mark}{'***' if user else ''}{at}{host}{question}{'***' if question else ''}"


def describe_allowed(kind: inspect.Type) -> str:
    """Allowed values of a type, in words: `a whole number, 1 or more; or none`."""
    match kind:
        case inspect.Metadata():
            return str((kind.extra_json_schema or {})["description"])
        case inspect.UnionType():
            return f"{describe_allowed(next(t for t in kind.types if not isinstance(t, inspect.NoneType)))}; or none"
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
    """Allowed range in words: `0 to 65535`, `1 or more`, `more than 0, less than 1`."""
    if kind.ge is not None:
        return f"{kind.ge:g} to {kind.le:g}" if kind.le is not None else f"{kind.ge:g} or more"
    most = f", less than {kind.lt:g}" if kind.lt is not None else ""
    most = f", up to {kind.le:g}" if kind.le is not None else most
    return (f"more than {kind.gt:g}" if kind.gt is not None else "any") + most


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
    **dict.fromkeys(("lm", "lm_name", "ngram", "language_model_name"), ("language_model",)),
    **dict.fromkeys(("lm_weight", "lm_alpha", "alpha", "language_model_alpha"), ("language_model_weight",)),
    **dict.fromkeys(("max_alternatives", "alternatives", "nbest", "num_alternatives", "max_hypotheses"), ("n_best",)),
    **dict.fromkeys(("inverse_text_normalization", "smart_format", "numerals", "format_text"), ("itn",)),
}
"""Names of options in other programs -> names of the same option here."""


def option_synonyms(came: str, names: Collection[str]) -> list[str]:
    """Names among `names` of the option that other programs call `came`."""
    meant = OPTION_SYNONYMS.get(came.strip().casefold().replace("-", "_").removesuffix("[]"), ())
    return [name for name in meant if name in names]


def suggest_name(came: object, names: Iterable[str]) -> str:
    """Suggestion like `did you mean 'port'?`, for a name with the same meaning or a similar spelling; empty where
    there is none. For a mapping, its value is shown."""
    shown = names if isinstance(names, Mapping) else {name: name for name in names}
    text = str(came)
    near = option_synonyms(text, shown) or difflib.get_close_matches(text, shown, n=1)
    return f"did you mean {shown[near[0]]!r}?" if near else ""


def unknown_name_error(what: str, came: str, allowed: tuple[str, ...] | list[str]) -> OptionError:
    """The error for a name that is not one of `allowed`, with the nearest one first."""
    return OptionError(f"unknown {what} {came!r}", f"allowed: {', '.join(allowed)}", suggest_name(came, allowed))
