"""SDP offers of callers, and the answers to them. Pure: text in, text out.

An answer takes one audio section and one data channel section, on one transport; every other section is rejected.

Source  RFC 8866 (SDP), RFC 8829 (offers and answers of browsers), RFC 8839 (ICE), RFC 8841 (data channels), RFC 9143
        (BUNDLE)
"""

from __future__ import annotations

import ipaddress
import re
from typing import Literal

import msgspec

from asr_serve.edge.payload_format import PayloadFormat
from asr_serve.edge.sdp import MAX_SECTIONS, MalformedSdp, SdpSection, read_formats, read_rtpmaps, read_sdp
from asr_serve.errors import MalformedRequest, OptionError, UnsupportedOption

MAX_OFFER_CHARACTERS = 65_536
DIGESTS = ("sha-256", "sha-384", "sha-512")
AUDIO_PROTOCOLS = ("UDP/TLS/RTP/SAVPF", "UDP/TLS/RTP/SAVP")
CHANNEL_PROTOCOL = "UDP/DTLS/SCTP"
PREFERRED = ("opus", "G722", "PCMU", "PCMA")
"""Encodings that are decoded, the best first."""
MAX_MESSAGE_BYTES = 65_536
"""Longest message that is taken from a data channel."""
DEFAULT_MESSAGE_BYTES = 65_536
"""Longest message of a peer that tells none (RFC 8841, section 6)."""
SCTP_PORT = 5_000
HOST_PREFERENCE = 126
"""Type preference of host candidates (RFC 8445, section 5.1.2.2)."""
OPUS_PARAMETERS = "minptime=10;useinbandfec=1"
"""The sender may add forward error correction, which the decoder uses."""

_ICE = re.compile(r"[A-Za-z0-9+/=-]{4,256}", re.ASCII)
"""RFC 8839 allows letters, digits, + and /; some senders write - and = too."""

Setup = Literal["active", "passive", "actpass"]


class Fingerprint(msgspec.Struct, frozen=True):
    """Fingerprint of a certificate: `value` is hexadecimal, with colons."""

    algorithm: str
    value: str


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Offer of which an audio section, and perhaps a data channel section, is taken."""

    sections: tuple[SdpSection, ...]
    audio: int
    """Index of the audio section."""
    channel: int | None
    """Index of the data channel section."""
    payload_type: int
    format: PayloadFormat
    """Format of that payload type, the one chosen."""
    ice_ufrag: str
    ice_pwd: str
    fingerprints: tuple[Fingerprint, ...]
    setup: Setup
    receives_audio: bool
    """Whether the offerer takes audio."""
    sctp_port: int
    max_message_bytes: int
    """Longest message that the offerer takes; 0: any."""


class Candidate(msgspec.Struct, frozen=True):
    """Address at which the answerer is reached."""

    address: str
    port: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of an answer that do not follow from its offer."""

    session_id: int
    candidates: tuple[Candidate, ...]
    ice_ufrag: str
    ice_pwd: str
    fingerprints: tuple[Fingerprint, ...]
    ssrc: int | None
    """SSRC of the audio that is sent; None: none is."""
    cname: str


def parse_offer(text: str) -> Offer:
    """Parses an offer. Raises MalformedRequest for what is no SDP, OptionError and UnsupportedOption for one that
    cannot be answered."""
    try:
        whole = read_sdp(text, max_characters=MAX_OFFER_CHARACTERS, strict=True)
    except MalformedSdp as error:
        raise MalformedRequest(error.came, error.allowed, "send RTCPeerConnection.localDescription.sdp") from error
    session, sections = whole.attributes, whole.sections
    audio = next((index for index, each in enumerate(sections) if each.kind == "audio" and not each.rejected), None)
    if audio is None:
        kinds = ", ".join(dict.fromkeys(each.kind for each in sections)) or "no section at all"
        raise OptionError(
            f"the offer has {kinds}", "an m=audio section is needed", "add the microphone's track first", param="sdp"
        )
    chosen = sections[audio]
    if chosen.protocol not in AUDIO_PROTOCOLS:
        raise UnsupportedOption(
            f"audio over {chosen.protocol[:40]!r}", f"one of: {', '.join(AUDIO_PROTOCOLS)}", param="sdp"
        )
    if not chosen.sends:
        raise OptionError(
            "the offer's audio section sends nothing", "sendrecv or sendonly", "add the microphone's track", param="sdp"
        )
    if "rtcp-mux" not in chosen.attributes:
        raise UnsupportedOption("the offer has RTCP on a port of its own", "a=rtcp-mux", param="sdp")
    channel = next((i for i, each in enumerate(sections) if each.kind == "application" and _is_channel(each)), None)
    bundle = _bundle(session)
    taken = [audio] if channel is None else sorted((audio, channel))
    if channel is not None and not {sections[index].mid for index in taken} <= set(bundle):
        raise UnsupportedOption(
            "the offer has a transport for each section", "a=group:BUNDLE with audio and data channel", param="sdp"
        )
    # The transport is that of the first section of the bundle that is taken (RFC 9143, section 7.3).
    first = min(taken, key=lambda index: bundle.index(sections[index].mid) if sections[index].mid in bundle else 0)
    payload_type, form = _choose_format(chosen)
    port, most = SCTP_PORT, DEFAULT_MESSAGE_BYTES
    if channel is not None:
        port = _number(sections[channel].first("sctp-port") or str(SCTP_PORT), 65_535)
        most = _number(sections[channel].first("max-message-size") or str(DEFAULT_MESSAGE_BYTES), 1 << 40)
    ice_ufrag, ice_pwd = _ice(session, sections[first])
    return Offer(
        sections=sections,
        audio=audio,
        channel=channel,
        payload_type=payload_type,
        format=form,
        ice_ufrag=ice_ufrag,
        ice_pwd=ice_pwd,
        fingerprints=_fingerprints(session, sections[first]),
        setup=_setup(session, sections[first]),
        receives_audio=chosen.receives,
        sctp_port=port,
        max_message_bytes=most,
    )


def write_answer(offer: Offer, answer: Answer) -> str:
    """Writes the answer: ICE-lite, all that is taken in one bundle."""
    taken = [index for index in range(len(offer.sections)) if index in (offer.audio, offer.channel)]
    bundle = " ".join(offer.sections[index].mid for index in taken)
    lines = [
        "v=0",
        f"o=- {answer.session_id} 1 IN IP4 127.0.0.1",
        "s=-",
        "t=0 0",
        *([f"a=group:BUNDLE {bundle}"] if bundle.strip() else []),
        "a=ice-lite",
        "a=msid-semantic:WMS *",
    ]
    for index, section in enumerate(offer.sections):
        lines += _taken(offer, answer, index) if index in taken else _rejected(section)
    return "\r\n".join(lines) + "\r\n"


# --- offers ------------------------------------------------------------------------------------------------


def _is_channel(section: SdpSection) -> bool:
    return section.protocol == CHANNEL_PROTOCOL and not section.rejected


def _bundle(session: dict[str, list[str]]) -> list[str]:
    for group in session.get("group", ()):
        semantics, *mids = group.split()[: MAX_SECTIONS + 1] or [""]
        if semantics == "BUNDLE":
            return mids
    return []


def _choose_format(section: SdpSection) -> tuple[int, PayloadFormat]:
    """Payload type and format that is decoded best. Raises UnsupportedOption."""
    formats = read_formats(section)
    for encoding in PREFERRED:
        for number, form in formats.items():
            if form.encoding == encoding:
                return number, form
    maps = read_rtpmaps(section)
    offered = ", ".join(dict.fromkeys(maps.get(int(each), each) for each in section.formats[:8] if each.isdigit()))
    raise UnsupportedOption(
        f"audio as {offered[:120] or 'nothing'} is offered", f"one of: {', '.join(PREFERRED)}", param="sdp"
    )


def _either(session: dict[str, list[str]], section: SdpSection, name: str) -> list[str]:
    """Values of an attribute, which a section has of its own or from the session."""
    return section.attributes.get(name) or session.get(name, [])


def _ice(session: dict[str, list[str]], section: SdpSection) -> tuple[str, str]:
    if "ice-lite" in session:
        raise UnsupportedOption(
            "the offer is of an ICE-lite agent", "a full one: this server is lite, and one side must check", param="sdp"
        )
    values = [(_either(session, section, name) or [""])[0] for name in ("ice-ufrag", "ice-pwd")]
    if not all(_ICE.fullmatch(value) for value in values) or len(values[1]) < 22:
        raise OptionError("the offer has no ICE credentials", "a=ice-ufrag and a=ice-pwd are needed", param="sdp")
    return values[0], values[1]


def _fingerprints(session: dict[str, list[str]], section: SdpSection) -> tuple[Fingerprint, ...]:
    found = []
    for value in _either(session, section, "fingerprint")[:8]:
        algorithm, _, digest = value.partition(" ")
        if algorithm.lower() in DIGESTS and re.fullmatch(r"[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2})+", digest):
            found.append(Fingerprint(algorithm.lower(), digest))
    if not found:
        raise OptionError(
            "the offer has no fingerprint of a certificate", f"a=fingerprint with {', '.join(DIGESTS)}", param="sdp"
        )
    return tuple(found)


def _setup(session: dict[str, list[str]], section: SdpSection) -> Setup:
    match (_either(session, section, "setup") or ["actpass"])[0]:
        case "active":
            return "active"
        case "passive":
            return "passive"
        case "actpass":
            return "actpass"
        case other:
            raise OptionError(f"a=setup:{other[:40]}", "actpass, active or passive", param="sdp")


def _number(text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= most):
        raise OptionError(f"the number {text[:40]!r} in the offer", f"0 to {most}", param="sdp")
    return int(text)


# --- answers -----------------------------------------------------------------------------------------------


def _taken(offer: Offer, answer: Answer, index: int) -> list[str]:
    section, default = offer.sections[index], answer.candidates[0]
    is_audio = index == offer.audio
    formats = str(offer.payload_type) if is_audio else " ".join(section.formats)
    version = ipaddress.ip_address(default.address).version
    lines = [f"m={section.kind} {default.port} {section.protocol} {formats}", f"c=IN IP{version} {default.address}"]
    if section.mid:
        lines.append(f"a=mid:{section.mid}")
    for number, candidate in enumerate(answer.candidates, 1):
        priority = HOST_PREFERENCE << 24 | (65_536 - number) << 8 | 255
        lines.append(f"a=candidate:{number} 1 udp {priority} {candidate.address} {candidate.port} typ host")
    lines += ["a=end-of-candidates", f"a=ice-ufrag:{answer.ice_ufrag}", f"a=ice-pwd:{answer.ice_pwd}"]
    lines += [f"a=fingerprint:{each.algorithm} {each.value}" for each in answer.fingerprints]
    lines.append(f"a=setup:{'active' if offer.setup == 'passive' else 'passive'}")
    if not is_audio:
        return [*lines, f"a=sctp-port:{SCTP_PORT}", f"a=max-message-size:{MAX_MESSAGE_BYTES}"]
    form = offer.format
    if form.encoding == "opus":
        lines += [f"a=rtpmap:{offer.payload_type} opus/48000/2", f"a=fmtp:{offer.payload_type} {OPUS_PARAMETERS}"]
    else:
        lines.append(f"a=rtpmap:{offer.payload_type} {form.encoding}/{form.clock_hz}")
    lines += ["a=rtcp-mux", "a=recvonly" if answer.ssrc is None else "a=sendrecv"]
    if answer.ssrc is not None:
        lines += [f"a=msid:{answer.cname} {answer.cname}", f"a=ssrc:{answer.ssrc} cname:{answer.cname}"]
    return lines


def _rejected(section: SdpSection) -> list[str]:
    lines = [f"m={section.kind} 0 {section.protocol} {' '.join(section.formats)}", "c=IN IP4 0.0.0.0"]
    return [*lines, *([f"a=mid:{section.mid}"] if section.mid else []), "a=inactive"]
