"""Payload formats: what a payload type means, by RFC 3551's static table or by configuration; edge/sdp.py has those
of an SDP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.types import suggest_name
from asr_serve.units import RATE_HZ

Encoding = Literal["PCMU", "PCMA", "G722", "L16", "opus", "CN", "telephone-event"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
SILENT_ENCODINGS = ("CN", "telephone-event")
"""Encodings that carry no samples: comfort noise (RFC 3389), and digits (RFC 4733)."""
MAX_PAYLOAD_TYPE = 127
FIRST_DYNAMIC_TYPE = 96
MAX_PAYLOAD_TYPES = 32
L16_RATES_HZ = (8_000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
FIXED_CLOCKS_HZ = {"PCMU": (8_000,), "PCMA": (8_000,), "G722": (8_000,), "opus": (48_000,), "L16": L16_RATES_HZ}


class PayloadFormat(msgspec.Struct, frozen=True):
    """Format of a payload type. `clock_hz`: rate of its timestamps."""

    encoding: Encoding
    clock_hz: int
    channels: int = 1

    @property
    def rate_hz(self) -> int:
        """Rate of the decoded samples. G.722 has two samples for each tick of its clock, by an error of RFC 1890 that
        RFC 3551 keeps; Opus is decoded at the engine's rate."""
        return RATE_HZ if self.encoding in ("G722", "opus") else self.clock_hz

    @property
    def granule(self) -> int:
        """Fewest ticks of the clock that are whole samples."""
        return max(1, self.clock_hz // self.rate_hz)

    @property
    def is_audio(self) -> bool:
        return self.encoding not in SILENT_ENCODINGS

    def samples(self, units: int) -> int:
        """Samples in so many ticks of the clock, a multiple of `granule`."""
        return units * self.rate_hz // self.clock_hz


STATIC_FORMATS: dict[int, PayloadFormat] = {
    0: PayloadFormat("PCMU", 8_000),
    8: PayloadFormat("PCMA", 8_000),
    9: PayloadFormat("G722", 8_000),
    10: PayloadFormat("L16", 44_100, 2),
    11: PayloadFormat("L16", 44_100),
    13: PayloadFormat("CN", 8_000),
}
"""Source  RFC 3551, table 4; the audio types that this edge decodes."""


def parse_format(text: str) -> PayloadFormat:
    """Parses `opus/48000/2`, an encoding name as in an SDP's rtpmap. Raises OptionError, UnsupportedOption."""
    name, _, rest = text.strip().partition("/")
    encoding = next((known for known in ENCODINGS if known.lower() == name.lower()), None)
    if encoding is None:
        raise UnsupportedOption(
            f"payload format {text[:60]!r}", f"one of: {', '.join(ENCODINGS)}", suggest_name(name[:60], ENCODINGS)
        )
    match = re.fullmatch(r"(\d{1,6})(?:/([12]))?", rest, re.ASCII)
    if match is None:
        raise OptionError(f"payload format {text[:60]!r}", "NAME/CLOCK or NAME/CLOCK/CHANNELS", "like L16/16000")
    clock_hz, channels = int(match[1]), int(match[2] or 1)
    if encoding == "telephone-event" or encoding == "CN":
        if not 1_000 <= clock_hz <= 96_000:
            raise OptionError(f"payload format {text[:60]!r}", "a clock of 1000 to 96000 Hz")
    elif clock_hz not in FIXED_CLOCKS_HZ[encoding]:
        allowed = ", ".join(map(str, FIXED_CLOCKS_HZ[encoding]))
        raise OptionError(f"payload format {text[:60]!r}", f"{encoding} has a clock of {allowed} Hz")
    # The channels of Opus in an SDP are always 2 (RFC 7587, section 7), and say nothing; the decoder makes one of both.
    if encoding == "opus":
        channels = 1
    if channels > 1 and encoding != "L16":
        raise UnsupportedOption(f"payload format {text[:60]!r}", f"{encoding} with one channel")
    return PayloadFormat(encoding, clock_hz, channels)


def describe_format(form: PayloadFormat) -> str:
    """Formats it as `parse_format` reads it."""
    return f"{form.encoding}/{form.clock_hz}" + (f"/{form.channels}" if form.channels > 1 else "")


def parse_payload_types(table: Mapping[str, str]) -> dict[int, PayloadFormat]:
    """Parses {"96": "opus/48000/2"}, and adds the static types. Raises OptionError, UnsupportedOption."""
    if len(table) > MAX_PAYLOAD_TYPES:
        raise OptionError(f"{len(table)} payload types", f"up to {MAX_PAYLOAD_TYPES}", param="payload_types")
    formats = dict(STATIC_FORMATS)
    for key, text in table.items():
        if not re.fullmatch(r"\d{1,3}", key, re.ASCII) or int(key) > MAX_PAYLOAD_TYPE or 64 <= int(key) < 96:
            raise OptionError(
                f"payload type {key[:20]!r}",
                f"0 to 63 and {FIRST_DYNAMIC_TYPE} to {MAX_PAYLOAD_TYPE}; RTCP looks like the others",
                param="payload_types",
            )
        formats[int(key)] = parse_format(text)
    return formats
