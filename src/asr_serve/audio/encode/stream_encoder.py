"""One stream of samples to the bytes of one format."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from asr_serve.audio.encode.container_writers import (
    AdtsWriter,
    FlacWriter,
    Mp3Writer,
    OggOpusWriter,
    RawWriter,
    WavWriter,
)
from asr_serve.audio.encode.packet_encoder import CODEC_SPECS, PacketEncoder
from asr_serve.audio.pcm import to_float32, to_int16
from asr_serve.audio.resample import Resampler, check_rate_hz
from asr_serve.errors import UnsupportedAudio
from asr_serve.output_file import replaced_file
from asr_serve.types import unknown_name_error
from asr_serve.units import resampled_samples

SYNTHETIC_SPEECH_COMMENT = "synthetic speech"
"""Default comment on the content of a file."""


class _EncodeFormat(msgspec.Struct, frozen=True):
    content_type: str
    framing: Callable[[str], RawWriter]


_ENCODE_FORMATS = {
    "mp3": _EncodeFormat("audio/mpeg", Mp3Writer),
    "opus": _EncodeFormat("audio/ogg", OggOpusWriter),
    "aac": _EncodeFormat("audio/aac", AdtsWriter),
    "flac": _EncodeFormat("audio/flac", FlacWriter),
    "wav": _EncodeFormat("audio/wav", WavWriter),
    "pcm": _EncodeFormat("audio/pcm", RawWriter),
}
FORMATS = tuple(_ENCODE_FORMATS)
"""Names of formats, as in OpenAI's `response_format`: `opus` in Ogg, `aac` in ADTS, `pcm` as 16-bit little-endian."""


class AudioEncoder:
    """Encoder of mono samples to a stream that can be played at once: no byte is rewritten later.

    In      (n,) int16, or float32 in -1..1, at `rate_hz`, any n
    Out     bytes; the first `encode` returns the header, even without samples. The latency is the codec's frame
            and look-ahead: wav and pcm none, opus 20 to 27 ms, flac 576 samples, mp3 3 frames (72 ms at 24 kHz),
            aac 2 frames (85 ms at 24 kHz). With another rate the resampler's filter adds about 10 ms.
    State   one codec, less than a frame of samples
    Raises  OptionError for an unknown format; UnsupportedOption for one without an encoder in this machine's
            FFmpeg; UnsupportedAudio for an unsupported rate, and for samples of another type
    """

    def __init__(
        self,
        form: str,
        rate_hz: int,
        *,
        to_hz: int | None = None,
        samples: int | None = None,
        bit_rate: int | None = None,
        mark: str = SYNTHETIC_SPEECH_COMMENT,
    ) -> None:
        """`to_hz`: the output rate, if not `rate_hz`; a codec without it uses its next higher one. `samples`:
        total input length, if known: wav and flac then announce it. `mark`: a comment on the content."""
        if form not in _ENCODE_FORMATS:
            raise unknown_name_error("format", str(form)[:20], FORMATS)
        self.form, self.content_type = form, _ENCODE_FORMATS[form].content_type
        self.rate_hz, self.to_hz = rate_hz, supported_rate_hz(form, to_hz or rate_hz)
        self._resampler = Resampler(rate_hz, self.to_hz)
        self._announced_samples = samples
        self._input_samples = 0
        self._codec = PacketEncoder(form, self.to_hz, bit_rate) if form in CODEC_SPECS else None
        self._framing = _ENCODE_FORMATS[form].framing(mark)
        self._started = self._ended = False

    def encode(self, pcm: np.ndarray) -> bytes:
        """Encode samples; return the bytes that are ready, which may be none except for the first call."""
        if pcm.ndim != 1 or pcm.dtype not in (np.int16, np.float32):
            raise UnsupportedAudio(
                f"an array of {pcm.dtype}, shape {pcm.shape}",
                "one row of int16 or float32 samples",
                "average the channels, convert the samples",
            )
        assert not self._ended, "put after the end"
        self._input_samples += len(pcm)
        return self._header() + b"".join(map(self._framing.packet, self._packets(self._resampled(pcm))))

    def finish(self) -> bytes:
        """Remaining bytes. The input must have had the announced length."""
        assert not self._ended, "it has ended"
        self._ended = True
        assert self._announced_samples in (None, self._input_samples), "another length was announced"
        packets = self._packets(to_int16(self._resampler.finish()))
        if self._codec is not None:
            packets += self._codec.flush()
        return self._header() + self._framing.end(packets, self._output_samples(self._input_samples))

    def final_header(self) -> bytes:
        """Header with the actual length, after `finish`, for a file whose start can be rewritten. Empty where the
        header would not change."""
        if self.form not in ("wav", "flac") or self._announced_samples is not None:
            return b""
        return self._framing.header(self.to_hz, self._output_samples(self._input_samples), self._extradata)

    def _header(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        samples = None if self._announced_samples is None else self._output_samples(self._announced_samples)
        return self._framing.header(self.to_hz, samples, self._extradata)

    @property
    def _extradata(self) -> bytes:
        return self._codec.extradata if self._codec is not None else b""

    def _output_samples(self, samples: int) -> int:
        """Number of output samples for `samples` of input."""
        return resampled_samples(samples, self.rate_hz, self.to_hz)

    def _resampled(self, pcm: np.ndarray) -> np.ndarray:
        if self.rate_hz == self.to_hz:
            self._resampler.resample(pcm)
            return to_int16(pcm)
        return to_int16(self._resampler.resample(to_float32(pcm)))

    def _packets(self, pcm: np.ndarray) -> list[bytes]:
        if self._codec is not None:
            return self._codec.encode(pcm)
        return [pcm.astype("<i2").tobytes()] if len(pcm) else []


def content_type(form: str) -> str:
    """Media type of a format. Raises OptionError for an unknown one."""
    if form not in _ENCODE_FORMATS:
        raise unknown_name_error("format", str(form)[:20], FORMATS)
    return _ENCODE_FORMATS[form].content_type


def supported_rate_hz(form: str, wanted_hz: int) -> int:
    """Lowest rate of a format that is at least `wanted_hz`, or its highest. Raises UnsupportedAudio."""
    check_rate_hz(wanted_hz)
    rates_hz = CODEC_SPECS[form].rates_hz if form in CODEC_SPECS else ()
    return next((rate for rate in rates_hz if rate >= wanted_hz), rates_hz[-1] if rates_hz else wanted_hz)


@contextlib.contextmanager
def encoded_file(path: Path, encoder: AudioEncoder) -> Iterator[Callable[[np.ndarray], object]]:
    """Opens a file under another name and yields the function that writes (n,) int16 into it. The file is renamed, its
    header final, when it is complete. Raises OSError."""
    with replaced_file(path) as part, part.open("wb") as file:
        yield lambda pcm: file.write(encoder.encode(pcm))
        file.write(encoder.finish())
        if header := encoder.final_header():
            file.seek(0)
            file.write(header)
