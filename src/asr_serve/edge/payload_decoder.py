"""Decoders of RTP payloads: one packet to samples, and samples in place of packets that were lost."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from asr_serve.audio.g722_decoder import G722Decoder
from asr_serve.audio.libopus import LibopusDecoder, opus_packet_units
from asr_serve.audio.pcm import alaw_table, mulaw_table
from asr_serve.edge.payload_format import PayloadFormat

MAX_PACKET_MS = 200
"""Longest packet: more in one datagram is no telephone's."""
FADE_S = 0.06
"""Time after which concealed sound has faded out: what is repeated longer sounds like a word that nobody said."""
PITCH_S = (0.0025, 0.015)
"""Shortest and longest period of a voice."""


class PayloadDecoder(Protocol):
    """Decoder of one stream of one format, in order."""

    def decode(self, payload: bytes) -> np.ndarray:
        """(n,) float32 at the format's `rate_hz`. Raises CorruptAudio."""

    def conceal(self, samples: int, next_payload: bytes) -> np.ndarray:
        """(samples,) float32 in place of what was lost before `next_payload`."""


def payload_units(form: PayloadFormat, payload: bytes | memoryview) -> int | None:
    """Length of a payload in ticks of its format's clock; 0 for one without samples, None for an invalid one."""
    size = len(payload)
    match form.encoding:
        case "CN" | "telephone-event":
            return 0
        case "opus":
            return opus_packet_units(payload)
        case "L16":
            units, rest = divmod(size, 2 * form.channels)
            if rest:
                return None
        case _:
            units = size
    return units if 0 < units * 1_000 <= form.clock_hz * MAX_PACKET_MS else None


def create_payload_decoder(form: PayloadFormat) -> PayloadDecoder:
    """Decoder of a format with audio. Raises ProgramMissing for Opus without libopus."""
    match form.encoding:
        case "opus":
            return OpusPayloadDecoder()
        case "G722":
            return WaveformPayloadDecoder(form.rate_hz, G722Decoder().decode)
        case "L16":
            channels = form.channels
            return WaveformPayloadDecoder(form.rate_hz, lambda payload: _decode_l16(payload, channels))
        case "PCMU":
            mulaw = mulaw_table()
            return WaveformPayloadDecoder(form.rate_hz, lambda payload: mulaw[np.frombuffer(payload, np.uint8)])
        case "PCMA":
            alaw = alaw_table()
            return WaveformPayloadDecoder(form.rate_hz, lambda payload: alaw[np.frombuffer(payload, np.uint8)])
    raise AssertionError(f"{form.encoding} carries no samples")


class _Decode(Protocol):
    def __call__(self, payload: bytes, /) -> np.ndarray: ...


class OpusPayloadDecoder:
    """Decoder of Opus: losses are concealed by libopus, by forward error correction where the packet has it."""

    def __init__(self) -> None:
        self._opus = LibopusDecoder()

    def decode(self, payload: bytes) -> np.ndarray:
        return self._opus.decode(payload)

    def conceal(self, samples: int, next_payload: bytes) -> np.ndarray:
        return self._opus.conceal(samples, next_payload)


class WaveformPayloadDecoder:
    """Decoder of formats without a concealment of their own: the last period of the voice is repeated, and fades.

    Source  the method of ITU-T G.711, appendix I, without its overlap-add
    """

    def __init__(self, rate_hz: int, decode: _Decode) -> None:
        self._rate_hz, self._decode = rate_hz, decode
        self._tail = np.zeros(0, np.float32)
        self._keep = 3 * int(PITCH_S[1] * rate_hz)

    def decode(self, payload: bytes) -> np.ndarray:
        pcm = self._decode(payload)
        self._tail = pcm[-self._keep :] if len(pcm) >= self._keep else np.concatenate([self._tail, pcm])[-self._keep :]
        return pcm

    def conceal(self, samples: int, next_payload: bytes) -> np.ndarray:
        made = np.zeros(samples, np.float32)
        audible = min(samples, int(FADE_S * self._rate_hz))
        if len(self._tail) == self._keep and audible:
            period = self._period()
            repeated = np.resize(self._tail[-period:], audible)
            made[:audible] = repeated * np.linspace(1, 0, int(FADE_S * self._rate_hz), dtype=np.float32)[:audible]
        return made

    def _period(self) -> int:
        """Period at which the last samples resemble themselves most."""
        least, most = (int(seconds * self._rate_hz) for seconds in PITCH_S)
        last = self._tail[-most:]
        lags = range(least, most + 1)
        windows = np.stack([self._tail[len(self._tail) - most - lag : len(self._tail) - lag] for lag in lags])
        norms = np.sqrt((windows**2).sum(axis=1)) + 1e-9
        return least + int(np.argmax(windows @ last / norms))


def _decode_l16(payload: bytes, channels: int) -> np.ndarray:
    pcm = np.frombuffer(payload, ">i2") * np.float32(1 / 32_768)
    return pcm if channels == 1 else pcm.reshape(-1, channels).mean(axis=1, dtype=np.float32)
