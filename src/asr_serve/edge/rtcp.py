"""RTCP, as far as the edge reads it: which name a sender gives its SSRC. Source: RFC 3550, sections 6.1 and 6.5."""

from __future__ import annotations

from typing import NamedTuple

SOURCE_DESCRIPTION, CNAME = 202, 1
MAX_NAMES = 4
"""Names that are read of one datagram."""


class SourceName(NamedTuple):
    """Canonical name (CNAME) of an SSRC."""

    ssrc: int
    name: bytes


def read_source_names(datagram: bytes) -> list[SourceName]:
    """First canonical names in a compound packet of any origin; what is broken ends the reading. Never raises."""
    found: list[SourceName] = []
    at = 0
    while at + 4 <= len(datagram) and datagram[at] >> 6 == 2:
        end = at + 4 * (1 + int.from_bytes(datagram[at + 2 : at + 4], "big"))
        if end > len(datagram):
            break
        if datagram[at + 1] == SOURCE_DESCRIPTION:
            _read_chunks(datagram[at + 4 : end], datagram[at] & 0x1F, found)
        at = end
    return found


def build_source_description(ssrc: int, name: bytes) -> bytes:
    """Encodes a sender's canonical name as RTCP: an empty report, as a compound packet has to begin, and the name."""
    report = b"\x80\xc9\x00\x01" + ssrc.to_bytes(4, "big")
    chunk = ssrc.to_bytes(4, "big") + bytes((CNAME, len(name))) + name
    chunk += bytes(4 - len(chunk) % 4)
    return report + bytes((0x81, SOURCE_DESCRIPTION)) + (len(chunk) // 4).to_bytes(2, "big") + chunk


def _read_chunks(body: bytes, count: int, found: list[SourceName]) -> None:
    at = 0
    for _ in range(count):
        if at + 4 > len(body):
            return
        ssrc = int.from_bytes(body[at : at + 4], "big")
        at += 4
        while at < len(body) and (kind := body[at]):
            if at + 2 > len(body) or at + 2 + body[at + 1] > len(body):
                return
            if kind == CNAME:
                if len(found) >= MAX_NAMES:
                    return
                found.append(SourceName(ssrc, body[at + 2 : at + 2 + body[at + 1]]))
            at += 2 + body[at + 1]
        at += 4 - at % 4  # the zero that ends the items, and those up to the next word
