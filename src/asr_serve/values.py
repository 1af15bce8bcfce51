"""What a setting may hold, and how that is told: `port=70000`; allowed: 0 to 65535."""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, inspect

from asr_serve.errors import OptionError

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, lt=1)]
Name = Annotated[str, Meta(pattern=r"\A[^\s,=]+\Z", description="a name without spaces, commas or =")]
Text = Annotated[str, Meta(min_length=1)]
Host = Annotated[
    str,
    Meta(
        pattern=r"\A([\w.-]+|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[\w:.%]*)\Z",
        description="a host name or an IP address, without port or scheme",
    ),
]
Key = Annotated[
    str, Meta(pattern=r"\A[!-+\--~]+\Z", description="a key of visible ASCII, without spaces or commas")
]
PeerKey = Annotated[
    str,
    Meta(pattern=r"\A[!-+\--~]{16,}\Z", description="16 or more of visible ASCII, without spaces or commas"),
]
Quantize = Literal["none", "int8", "dynamic"]
Window = Literal["packed", "checked", "whole"]
Role = Literal["both", "encode", "decode"]
DiskRoad = Literal["auto", "uring", "threads", "nixl", "gds"]
PeerRoad = Literal["auto", "shm", "nixl", "tcp"]
Carried = Literal["auto", "cross", "hidden"]
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


def loopback(host: str) -> bool:
    """Whether a host is this machine, and nothing that is sent there leaves it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def settle(config: msgspec.Struct) -> None:
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
            near = nearest(value, map(str, kind.values)) if isinstance(kind, inspect.LiteralType) else ""
            raise OptionError(f"{field.name}={shown}", allowed(kind), near, param=field.name) from None


def allowed(kind: inspect.Type) -> str:
    """What a type takes, in words: `a whole number, 1 or more; or none`."""
    match kind:
        case inspect.Metadata():
            return str((kind.extra_json_schema or {})["description"])
        case inspect.UnionType():
            return f"{allowed(next(t for t in kind.types if not isinstance(t, inspect.NoneType)))}; or none"
        case inspect.IntType():
            return f"a whole number, {span(kind)}"
        case inspect.FloatType():
            return f"a number, {span(kind)}"
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "text"
        case inspect.LiteralType():
            return ", ".join(map(str, kind.values))
        case inspect.VarTupleType():
            return f"a list; each one {allowed(kind.item_type)}"
        case inspect.DictType():
            return "pairs name=model"
        case _:
            return "a table of settings"


def span(kind: inspect.IntType | inspect.FloatType) -> str:
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
SYNONYMS: dict[str, tuple[str, ...]] = {
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


def nearest(came: object, names: Iterable[str]) -> str:
    """`did you mean 'port'?`, or nothing where no name is near: the one that means the same, or is spelt about the
    same. Of a mapping, the value is what is shown."""
    shown = names if isinstance(names, Mapping) else {name: name for name in names}
    text = str(came)
    meant = SYNONYMS.get(text.strip().casefold().replace("-", "_").removesuffix("[]"), ())
    near = [name for name in meant if name in shown] or difflib.get_close_matches(text, shown, n=1)
    return f"did you mean {shown[near[0]]!r}?" if near else ""


def unknown(what: str, came: str, allowed: tuple[str, ...] | list[str]) -> OptionError:
    """The error for a name that is not one of `allowed`, with the nearest one first."""
    return OptionError(f"unknown {what} {came!r}", f"allowed: {', '.join(allowed)}", nearest(came, allowed))
