"""Session descriptions as data: sections with their attributes, payload types and keys. Who uses one, a session of the
edge, SIP or WebRTC, decides what of it is usable. Source: RFC 8866, RFC 4568 for keys."""

from __future__ import annotations

import re

import msgspec

from asr_serve.edge.payload_format import (
    ENCODINGS,
    MAX_PAYLOAD_TYPE,
    SILENT_ENCODINGS,
    STATIC_FORMATS,
    PayloadFormat,
    parse_format,
)
from asr_serve.edge.srtp import SUITES, SrtpKey, parse_crypto
from asr_serve.errors import AsrServeError, OptionError

MAX_CHARACTERS = 16_384
"""Longest description, but for those of browsers."""
MAX_SECTIONS = 16
MAX_FORMATS = 64
"""Payload types, and keys, of one section that are looked at."""
RTCP_TYPES = range(64, 96)

_TOKEN = re.compile(r"[\w.+/!%*`'~#^{|}&$-]{1,256}", re.ASCII)


class MalformedSdp(AsrServeError):
    """Text that is no session description, or too large a one."""


class SdpSection(msgspec.Struct, frozen=True, kw_only=True):
    """Media section. One whose `m=` line cannot be read has no kind and no formats."""

    media: str
    """Value of its `m=` line."""
    kind: str
    port: int
    protocol: str
    formats: tuple[str, ...]
    attributes: dict[str, list[str]]
    connections: list[str]
    """Values of its `c=` lines."""

    def first(self, name: str) -> str | None:
        values = self.attributes.get(name)
        return values[0] if values else None

    @property
    def is_secure(self) -> bool:
        """Returns whether its packets are encrypted."""
        return "/SAVP" in self.protocol

    @property
    def mid(self) -> str:
        return self.first("mid") or ""

    @property
    def rejected(self) -> bool:
        """Returns whether the offerer itself does not use it."""
        return self.port == 0 and "bundle-only" not in self.attributes

    @property
    def sends(self) -> bool:
        return not ("recvonly" in self.attributes or "inactive" in self.attributes)

    @property
    def receives(self) -> bool:
        return not ("sendonly" in self.attributes or "inactive" in self.attributes)


class SessionDescription(msgspec.Struct, frozen=True):
    """Attributes and `c=` lines of all sections, and the sections."""

    attributes: dict[str, list[str]]
    connections: list[str]
    sections: tuple[SdpSection, ...]


def read_sdp(
    text: str, *, max_characters: int = MAX_CHARACTERS, max_sections: int = MAX_SECTIONS, strict: bool = False
) -> SessionDescription:
    """Reads a description. `strict`: a first line `v=0`, and no line that is none of SDP; else such lines are passed
    over, as telephones send them. Raises MalformedSdp."""
    if len(text) > max_characters:
        raise MalformedSdp(f"an SDP of {len(text)} characters", f"up to {max_characters}")
    lines = text.splitlines()
    if strict and (not lines or lines[0].strip() != "v=0"):
        raise MalformedSdp(
            "the body is no SDP" if text.strip() else "an empty body came", "an offer, whose first line is v=0"
        )
    whole = SessionDescription({}, [], ())
    sections: list[SdpSection] = []
    attributes, connections = whole.attributes, whole.connections
    for line in lines:
        kind, separator, value = line.strip().partition("=")
        if not separator or len(kind) != 1:
            if strict and line.strip():
                raise MalformedSdp(f"the SDP line {line[:60]!r}", "every line is a letter, = and a value")
        elif kind == "m":
            if len(sections) >= max_sections:
                raise MalformedSdp(f"an SDP with over {max_sections} sections", f"up to {max_sections}")
            sections.append(_read_section(value, strict))
            attributes, connections = sections[-1].attributes, sections[-1].connections
        elif kind == "c":
            connections.append(value.strip())
        elif kind == "a":
            name, _, content = value.partition(":")
            attributes.setdefault(name, []).append(content.strip())
    return msgspec.structs.replace(whole, sections=tuple(sections))


def _read_section(value: str, strict: bool) -> SdpSection:
    parts = value.split()
    port = re.fullmatch(r"(\d{1,5})(?:/\d{1,5})?", parts[1], re.ASCII) if len(parts) > 3 else None
    if port is None or int(port[1]) > 65_535:
        if strict:
            raise MalformedSdp(f"the SDP line {f'm={value}'[:60]!r}", "m=KIND PORT PROTOCOL FORMATS")
        return SdpSection(media=value, kind="", port=0, protocol="", formats=(), attributes={}, connections=[])
    if strict and not all(_TOKEN.fullmatch(part) for part in (parts[0], *parts[2:])):
        raise MalformedSdp(f"the SDP line {f'm={value}'[:60]!r}", "kind, protocol and formats are tokens")
    return SdpSection(
        media=value,
        kind=parts[0],
        port=int(port[1]),
        protocol=parts[2],
        formats=tuple(parts[3:]),
        attributes={},
        connections=[],
    )


def read_rtpmaps(section: SdpSection) -> dict[int, str]:
    """Names of a section's payload types, like `opus/48000/2`."""
    found = (re.fullmatch(r"(\d{1,3})[ \t]+(\S+)", value, re.ASCII) for value in section.attributes.get("rtpmap", ()))
    return {int(match[1]): match[2] for match in found if match is not None}


def read_formats(section: SdpSection) -> dict[int, PayloadFormat]:
    """Payload types of a section that are known here, in its order of preference."""
    maps = read_rtpmaps(section)
    known: dict[int, PayloadFormat] = {}
    for each in section.formats[:MAX_FORMATS]:
        if not (each.isascii() and each.isdigit() and len(each) <= 3):
            continue
        number = int(each)
        if number > MAX_PAYLOAD_TYPE or number in RTCP_TYPES:
            continue
        form = _find_format(number, maps.get(number))
        if form is not None:
            known[number] = form
    return known


def _find_format(number: int, name: str | None) -> PayloadFormat | None:
    static = STATIC_FORMATS.get(number)
    if name is None:
        return static
    try:
        return parse_format(name)
    except OptionError:  # an offer lists more than anybody decodes; some senders name the rate of a static type wrongly
        encoding = name.partition("/")[0].lower()
        return static if static is not None and static.encoding.lower() == encoding else None


def read_key(section: SdpSection) -> tuple[SrtpKey, str] | None:
    """First key of a section that is supported here, and its number."""
    for value in section.attributes.get("crypto", [])[:MAX_FORMATS]:
        if (key := parse_crypto(f"a=crypto:{value}")) is not None:
            return key, value.partition(" ")[0]
    return None


def first_audio(text: str) -> SdpSection:
    """First audio section of a description that a session is created with. Raises OptionError."""
    try:
        sections = read_sdp(text).sections
    except MalformedSdp as error:
        raise OptionError(error.came, error.allowed, param="sdp") from error
    found = next((section for section in sections if section.kind == "audio"), None)
    if found is None:
        raise OptionError("an SDP without an m=audio section", f"one with any of: {_audio_encodings()}", param="sdp")
    return found


def parse_sdp(text: str) -> dict[int, PayloadFormat]:
    """Payload types of an SDP's first audio section that this edge decodes, and the static ones among them. Raises
    OptionError where there is none."""
    formats = read_formats(first_audio(text))
    if not any(form.is_audio for form in formats.values()):
        raise OptionError(
            "an SDP without a format that can be decoded here",
            f"an m=audio section with one of: {_audio_encodings()}",
            param="sdp",
        )
    return formats


def parse_sdp_key(text: str) -> SrtpKey | None:
    """First key of an SDP's first audio section that is supported here; None for plain RTP. Raises OptionError for
    encrypted audio without such a key."""
    section = first_audio(text)
    found = read_key(section)
    if found is None and (section.is_secure or "crypto" in section.attributes):
        raise OptionError(
            "an SDP of encrypted audio without a key that is supported here",
            f"a=crypto with one of: {', '.join(SUITES)}, one key, no MKI, no session parameters",
            param="sdp",
        )
    return None if found is None else found[0]


def _audio_encodings() -> str:
    return ", ".join(each for each in ENCODINGS if each not in SILENT_ENCODINGS)
