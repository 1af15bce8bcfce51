"""FFmpeg's encoders, by PyAV: samples to packets, without a container."""

from __future__ import annotations

from fractions import Fraction

import av
import av.error
import msgspec
import numpy as np

from asr_serve.errors import UnsupportedOption


class CodecSpec(msgspec.Struct, frozen=True):
    """Settings of one codec."""

    names: tuple[str, ...]
    """Names of FFmpeg's encoders, the best first."""
    sample: str
    """FFmpeg's name of the sample format that the encoder takes."""
    rates_hz: tuple[int, ...] = ()
    """Supported rates, ascending; empty: any."""
    low_bit_rate: int = 0
    """Bits per second below 32 kHz; 0: the codec has no bit rate."""
    bit_rate: int = 0
    options: dict[str, str] = {}


_MPEG_HZ = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
CODEC_SPECS = {
    # Without a bit reservoir each frame is complete when it is emitted.
    "mp3": CodecSpec(("libmp3lame",), "s16p", _MPEG_HZ, 64_000, 128_000, {"reservoir": "0"}),
    "opus": CodecSpec(
        ("libopus",), "s16", (8_000, 12_000, 16_000, 24_000, 48_000), 48_000, 64_000, {"frame_duration": "20"}
    ),
    "aac": CodecSpec(("aac",), "fltp", _MPEG_HZ, 64_000, 96_000),
    # Short blocks: FFmpeg's default is five times as long, and so is the latency of the first.
    "flac": CodecSpec(("flac",), "s16", (), 0, 0, {"frame_size": "576"}),
}
CALL_SPECS = {
    "g722": CodecSpec(("g722",), "s16", (16_000,)),
    # For 20 ms of speech in a packet, which its successor can restore.
    "opus_call": CodecSpec(
        ("libopus",),
        "s16",
        (8_000, 12_000, 16_000, 24_000, 48_000),
        24_000,
        32_000,
        {"frame_duration": "20", "application": "voip", "fec": "1", "packet_loss": "10"},
    ),
}
"""Codecs of telephone calls, which are no formats of files."""
_SPECS = CODEC_SPECS | CALL_SPECS


class PacketEncoder:
    """Encoder of one mono stream to packets of `frame_samples` each.

    In      (n,) int16, any n
    Out     packets in order, each as soon as its last sample has come and the encoder emits it
    Raises  UnsupportedOption where this FFmpeg has no such encoder
    """

    def __init__(self, form: str, rate_hz: int, bit_rate: int | None = None) -> None:
        self._spec = spec = _SPECS[form]
        name = _available(form)
        self.rate_hz = rate_hz
        created = av.CodecContext.create(name, "w")
        assert isinstance(created, av.AudioCodecContext)
        self._codec = created
        self._codec.sample_rate, self._codec.layout, self._codec.format = rate_hz, "mono", spec.sample
        self._codec.time_base = Fraction(1, rate_hz)
        if spec.bit_rate:
            self._codec.bit_rate = bit_rate or (spec.low_bit_rate if rate_hz < 32_000 else spec.bit_rate)
        self._codec.options = dict(spec.options)
        try:
            self._codec.open()
        except (av.error.FFmpegError, ValueError) as error:
            raise UnsupportedOption(
                f"{form} at {rate_hz} Hz, which this FFmpeg's {name} refuses: {error}",
                f"here there are: {', '.join(available_formats())}",
                "choose another format or rate",
                param="response_format",
            ) from error
        self.frame_samples: int = self._codec.frame_size
        self.extradata: bytes = self._codec.extradata or b""
        """Codec-specific header data from the encoder."""
        self._pending = np.zeros(0, np.int16)
        self._input_samples = 0

    def encode(self, pcm: np.ndarray) -> list[bytes]:
        pending = np.concatenate([self._pending, pcm]) if len(self._pending) else pcm
        packets: list[bytes] = []
        at = 0
        while len(pending) - at >= self.frame_samples:
            packets += self._encoded(pending[at : at + self.frame_samples])
            at += self.frame_samples
        self._pending = pending[at:].copy()
        return packets

    def flush(self) -> list[bytes]:
        """Remaining packets; the last is padded with silence where the codec has whole frames only."""
        packets = self._encoded(self._pending) if len(self._pending) else []
        self._pending = self._pending[:0]
        if not self._input_samples:
            return packets
        return packets + [content for packet in self._codec.encode(None) if (content := bytes(packet))]

    def _encoded(self, pcm: np.ndarray) -> list[bytes]:
        if self._spec.sample == "fltp":
            pcm = pcm * np.float32(1 / 32_768)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(pcm)[None], format=self._spec.sample, layout="mono")
        frame.sample_rate, frame.time_base = self.rate_hz, Fraction(1, self.rate_hz)
        frame.pts = self._input_samples
        self._input_samples += len(pcm)
        return [content for packet in self._codec.encode(frame) if (content := bytes(packet))]


def available_formats() -> list[str]:
    """Formats that need an encoder and have one in this FFmpeg."""
    return [form for form, coder in CODEC_SPECS.items() if any(map(_has, coder.names))]


def _available(form: str) -> str:
    for name in _SPECS[form].names:
        if _has(name):
            return name
    raise UnsupportedOption(
        f"{form}, and the FFmpeg of this machine has no {' or '.join(_SPECS[form].names)}",
        f"here there are: {', '.join(['wav', 'pcm', *available_formats()])}",
        "choose one of these, or install PyAV's own wheel",
        param="response_format",
    )


def _has(name: str) -> bool:
    try:
        av.Codec(name, "w")
    except (av.error.FFmpegError, ValueError):  # PyAV's UnknownCodecError is a ValueError
        return False
    return True
