"""Encoders of RTP payloads: 20 ms of samples to one packet, for audio that is sent to a caller."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from asr_serve.audio.encode.packet_encoder import PacketEncoder
from asr_serve.audio.pcm import alaw_table, companding_codes, mulaw_table
from asr_serve.edge.payload_format import PayloadFormat
from asr_serve.units import ms_to_samples

PACKET_MS = 20
OPUS_RATE_HZ = 24_000
"""Rate of voices; Opus codes no more of them."""


class PayloadEncoder(Protocol):
    """Encoder of one stream of one format, in order."""

    rate_hz: int
    """Rate of the samples that it takes."""

    def encode(self, pcm: NDArray[np.int16]) -> bytes:
        """Encodes PACKET_MS of samples (n,)."""


def create_payload_encoder(form: PayloadFormat) -> PayloadEncoder:
    """Encoder of a format of calls. Raises UnsupportedOption for Opus or G.722 where FFmpeg has no such encoder."""
    match form.encoding:
        case "PCMU":
            return CompandingEncoder(companding_codes(mulaw_table()))
        case "PCMA":
            return CompandingEncoder(companding_codes(alaw_table()))
        case "G722":
            return FramePayloadEncoder(PacketEncoder("g722", form.rate_hz))
        case "opus":
            return FramePayloadEncoder(PacketEncoder("opus_call", OPUS_RATE_HZ))
    raise AssertionError(f"{form.encoding} is no format of calls")


class CompandingEncoder:
    """Encoder of G.711."""

    rate_hz = 8_000

    def __init__(self, codes: np.ndarray) -> None:
        self._codes = codes

    def encode(self, pcm: NDArray[np.int16]) -> bytes:
        return self._codes[pcm.view(np.uint16)].tobytes()


class FramePayloadEncoder:
    """Encoder of FFmpeg's whose frames are packets."""

    def __init__(self, encoder: PacketEncoder) -> None:
        self._encoder = encoder
        self.rate_hz = encoder.rate_hz
        assert encoder.frame_samples == ms_to_samples(PACKET_MS, self.rate_hz), encoder.frame_samples

    def encode(self, pcm: NDArray[np.int16]) -> bytes:
        return b"".join(self._encoder.encode(pcm))
