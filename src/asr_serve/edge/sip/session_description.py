"""Offer and answer of one audio stream in SDP. Source: RFC 8866, RFC 3264, RFC 4733 for digits."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from asr_serve.edge.payload_format import PayloadFormat
from asr_serve.edge.sdp import MalformedSdp, SdpSection, read_formats, read_key, read_sdp
from asr_serve.edge.srtp import SrtpKey
from asr_serve.errors import AsrServeError

Direction = Literal["sendrecv", "sendonly", "recvonly", "inactive"]
CallEncoding = Literal["opus", "G722", "PCMA", "PCMU"]
CALL_ENCODINGS: tuple[CallEncoding, ...] = get_args(CallEncoding)
"""Encodings of calls, the best first: those that are sent as well as heard."""
OFFERED_TYPES = {"opus": 96, "G722": 9, "PCMA": 8, "PCMU": 0}
OFFERED_DIGITS = {8_000: 101, 48_000: 102}
"""Payload types of digits in offers of ours, by their clock."""
PROTOCOLS = ("RTP/AVP", "RTP/AVPF")
SECURE_PROTOCOLS = ("RTP/SAVP", "RTP/SAVPF")
MAX_SECTIONS = 8
_MIRRORED: dict[Direction, Direction] = dict(
    zip(get_args(Direction), ("sendrecv", "recvonly", "sendonly", "inactive"), strict=True)
)


class UnusableSdp(AsrServeError):
    """A session description without audio that can be heard here."""


class AudioDescription(NamedTuple):
    """First usable audio section of a description, and what an answer has to repeat of the others."""

    host: str
    port: int
    formats: dict[int, PayloadFormat]
    """Payload types that are known here, in the order of preference."""
    direction: Direction
    ptime_ms: int
    mux: bool
    sections: tuple[str, ...]
    """Values of all `m=` lines."""
    section: int
    """Place of this section among them."""
    key: SrtpKey | None = None
    """Key of its packets; None: they are not encrypted."""
    key_tag: str = ""
    """Number of that key in the description, which the answer repeats."""

    @property
    def is_held(self) -> bool:
        """Returns whether the other side does not listen: the call is on hold. Its music may come all the same."""
        return self.direction in ("sendonly", "inactive") or self.is_unspecified

    @property
    def is_unspecified(self) -> bool:
        """Returns whether it names no address (RFC 3264, section 8.4): that of this machine to a socket."""
        return ipaddress.ip_address(self.host).is_unspecified


class ChosenFormat(NamedTuple):
    """Format that both sides use."""

    payload_type: int
    form: PayloadFormat
    digits_type: int | None
    """Payload type of digits; None where the other side sends none."""


def parse_audio(text: str) -> AudioDescription:
    """Parses a description. Raises UnusableSdp."""
    try:
        whole = read_sdp(text, max_sections=MAX_SECTIONS)
    except MalformedSdp as error:
        raise _unusable(error.came) from error
    medias = tuple(section.media for section in whole.sections)
    for index, section in enumerate(whole.sections):
        if section.kind != "audio" or section.protocol not in PROTOCOLS + SECURE_PROTOCOLS or not section.port:
            continue
        key = read_key(section) if section.is_secure else None
        if section.is_secure and key is None:
            continue
        formats = read_formats(section)
        host = _read_host(section.connections) or _read_host(whole.connections)
        if host and any(form.encoding in CALL_ENCODINGS for form in formats.values()):
            return AudioDescription(
                host,
                section.port,
                formats,
                _read_direction(section.attributes) or _read_direction(whole.attributes) or "sendrecv",
                _read_ptime(section),
                "rtcp-mux" in section.attributes,
                medias,
                index,
                *(key or ()),
            )
    raise _unusable(f"a session description with {', '.join(medias)[:120] or 'no section'}")


def choose_format(audio: AudioDescription, allowed: Sequence[CallEncoding] = CALL_ENCODINGS) -> ChosenFormat:
    """The best format of an offer, by our order. Raises UnusableSdp."""
    for encoding in allowed:
        for kind, form in audio.formats.items():
            if form.encoding == encoding:
                digits = {
                    each.clock_hz: number
                    for number, each in reversed(audio.formats.items())
                    if each.encoding == "telephone-event"
                }
                return ChosenFormat(kind, form, digits.get(form.clock_hz, digits.get(8_000)))
    offered = ", ".join(form.encoding for form in audio.formats.values())
    raise UnusableSdp(f"an offer of {offered[:120]}", f"one of: {', '.join(allowed)}")


def build_answer(
    offer: AudioDescription,
    chosen: ChosenFormat,
    host: str,
    port: int,
    *,
    session: int,
    version: int,
    key: SrtpKey | None = None,
) -> str:
    """Answer that takes one format, and refuses every other section. `key`: of our packets, where the offer has one."""
    lines = _head(host, session, version)
    for index, media in enumerate(offer.sections):
        if index != offer.section:
            kind, _, protocol, *types = [*media.split(), "audio", "0", "RTP/AVP", "0"][:4]
            lines.append(f"m={kind} 0 {protocol} {' '.join(types)}")
            continue
        table = {chosen.payload_type: chosen.form}
        if chosen.digits_type is not None:
            table[chosen.digits_type] = offer.formats[chosen.digits_type]
        protocol = media.split()[2]
        lines += _audio_section(table, port, protocol, _MIRRORED[offer.direction], mux=offer.mux)
        if offer.key is not None and key is not None:
            lines.append(f"a=crypto:{offer.key_tag} {key.suite} inline:{key.key}")
    return "\r\n".join(lines) + "\r\n"


def build_offer(
    host: str,
    port: int,
    allowed: Sequence[CallEncoding] = CALL_ENCODINGS,
    *,
    session: int,
    version: int,
    key: SrtpKey | None = None,
) -> str:
    """Offer of these encodings, in this order, and of digits. `key`: of our packets; None offers plain RTP."""
    table, protocol = offered_formats(allowed), "RTP/AVP" if key is None else "RTP/SAVP"
    lines = [*_head(host, session, version), *_audio_section(table, port, protocol, "sendrecv", mux=False)]
    if key is not None:
        lines.append(f"a=crypto:1 {key.suite} inline:{key.key}")
    return "\r\n".join(lines) + "\r\n"


def offered_formats(allowed: Sequence[CallEncoding] = CALL_ENCODINGS) -> dict[int, PayloadFormat]:
    """Payload types of `build_offer`."""
    table: dict[int, PayloadFormat] = {}
    clocks: list[int] = []
    for encoding in allowed:
        form = PayloadFormat(encoding, 48_000 if encoding == "opus" else 8_000)
        table[OFFERED_TYPES[encoding]] = form
        if form.clock_hz not in clocks:
            clocks.append(form.clock_hz)
    return table | {OFFERED_DIGITS[clock_hz]: PayloadFormat("telephone-event", clock_hz) for clock_hz in clocks}


def _head(host: str, session: int, version: int) -> list[str]:
    family = "IP6" if ":" in host else "IP4"
    return ["v=0", f"o=asr-serve {session} {version} IN {family} {host}", "s=-", f"c=IN {family} {host}", "t=0 0"]


def _audio_section(
    table: Mapping[int, PayloadFormat], port: int, protocol: str, direction: Direction, *, mux: bool
) -> list[str]:
    lines = [f"m=audio {port} {protocol} {' '.join(map(str, table))}"]
    for kind, form in table.items():
        channels = "/2" if form.encoding == "opus" else ""
        lines.append(f"a=rtpmap:{kind} {form.encoding}/{form.clock_hz}{channels}")
        if form.encoding == "opus":
            lines.append(f"a=fmtp:{kind} useinbandfec=1")
        elif form.encoding == "telephone-event":
            lines.append(f"a=fmtp:{kind} 0-15")
    lines += ["a=ptime:20", f"a={direction}"]
    return [*lines, "a=rtcp-mux"] if mux else lines


def _read_host(connections: list[str]) -> str:
    for value in connections:
        if match := re.fullmatch(r"IN IP[46] ([0-9A-Fa-f:.]{2,45})(?:/[\d/]*)?", value, re.ASCII):
            try:
                address = ipaddress.ip_address(match[1])
            except ValueError:
                return ""
            address = getattr(address, "ipv4_mapped", None) or address
            return "" if address.is_multicast else str(address)
    return ""


def _read_direction(attributes: Mapping[str, list[str]]) -> Direction | None:
    known: tuple[Direction, ...] = get_args(Direction)
    return next((each for name in attributes for each in known if name == each), None)


def _read_ptime(section: SdpSection) -> int:
    values = section.attributes.get("ptime", ())
    return next((int(value) for value in values if re.fullmatch(r"\d{1,3}", value, re.ASCII)), 20)


def _unusable(came: str) -> UnusableSdp:
    return UnusableSdp(
        came, f"an m=audio section of RTP, or of SRTP with a=crypto, with one of: {', '.join(CALL_ENCODINGS)}"
    )
