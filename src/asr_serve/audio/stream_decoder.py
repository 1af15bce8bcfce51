"""Decoding of live audio, sans-I/O: bytes of a stated encoding in, samples out without delay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec
import numpy as np

from asr_serve.audio.comfort_noise import ComfortNoise, ComfortNoiseState
from asr_serve.audio.ogg_opus import OggOpusDecoder, OggOpusDecoderState, OggPageReader, OggPageReaderState
from asr_serve.audio.opus_decoder import OPUS_RATE_HZ, OpusDecoderState, OpusPacketDecoder
from asr_serve.audio.pcm import Pcm16Assembler, alaw_table, clipped, decode_pcm16, mulaw_table
from asr_serve.audio.resample import Resampler, ResamplerState
from asr_serve.errors import OptionError
from asr_serve.types import suggest_name
from asr_serve.units import RATE_HZ

MIN_RATE_HZ, MAX_RATE_HZ = 8_000, 48_000
DEFAULT_RATES_HZ = {"s16le": RATE_HZ, "mulaw": 8_000, "alaw": 8_000}
"""Default rate of each encoding that does not carry its rate."""
ENCODINGS = (*DEFAULT_RATES_HZ, "opus", "ogg")
MAX_SILENT_SAMPLES = MAX_RATE_HZ
"""Samples that `decode_silence` takes at once."""


class OggState(msgspec.Struct, frozen=True):
    """State of the decoder of `ogg`."""

    pages: OggPageReaderState
    opus: OggOpusDecoderState


class CodecState(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of what makes samples of bytes: the field of the decoder's encoding is set."""

    pending_byte: bytes = b""
    """First half of a sample, of `s16le`."""
    opus: OpusDecoderState | None = None
    ogg: OggState | None = None


class LiveDecoderState(msgspec.Struct, frozen=True):
    """State of a decoder between two calls, from which another one of the same encoding and rate continues."""

    codec: CodecState
    resampler: ResamplerState
    noise: ComfortNoiseState = ComfortNoiseState()


class Codec(Protocol):
    """Bytes of one encoding to samples, at a rate of its own."""

    @property
    def sample_bytes(self) -> int | None:
        """Bytes of a sample, in encodings where all have the same size."""

    def read(self, data: bytes | memoryview) -> Iterable[np.ndarray]:
        """Samples (n,) float32 of all bytes so far that were not returned; they do not share memory with `data`.
        Raises CorruptAudio, UnsupportedAudio."""

    def rest(self) -> np.ndarray | None:
        """Returns the samples that it still buffers at the end; None: it never buffers any."""

    @property
    def has_pending_bytes(self) -> bool:
        """Returns whether it waits for more bytes."""

    def export_state(self) -> CodecState: ...

    def import_state(self, state: CodecState) -> None:
        """Continues there. Call before the first bytes. Raises ValueError for a state of another codec."""


class LiveAudioDecoder:
    """Bytes of one caller, in order, to samples.

    Out     (n,) float32, mono, 16 kHz, -1..1; n may be 0. After `finish` ceil(n * 16000 / rate_hz) samples in all,
            bit for bit the same however the bytes were cut
    Raises  CorruptAudio, UnsupportedAudio; it must not be used afterwards
    """

    def __init__(self, rate_hz: int, codec: Codec) -> None:
        """`rate_hz`: rate of the codec's samples."""
        self.rate_hz = rate_hz
        """Rate of the decoded samples, before they are resampled to 16 kHz."""
        self._codec, self._resampler = codec, Resampler(rate_hz, exports_state=True)
        self._noise = ComfortNoise(rate_hz)
        self.is_pcm16 = rate_hz == RATE_HZ
        """Whether all samples are 16-bit integers over 32768: no codec at 16 kHz has others."""

    def export_state(self) -> LiveDecoderState:
        return LiveDecoderState(self._codec.export_state(), self._resampler.export_state(), self._noise.export_state())

    def import_state(self, state: LiveDecoderState) -> None:
        """Continues there. Call before the first bytes. Raises CorruptAudio, and ValueError for a state of another
        encoding."""
        self._codec.import_state(state.codec)
        self._resampler.import_state(state.resampler)
        self._noise.import_state(state.noise)

    @property
    def has_pending_bytes(self) -> bool:
        """Returns whether some bytes wait for more: half a sample, part of a page. At the end they are dropped."""
        return self._codec.has_pending_bytes

    def decode(self, data: bytes | memoryview) -> np.ndarray:
        """Decode bytes, cut anywhere; `opus`: one packet. The samples never share memory with `data`."""
        parts = list(self._codec.read(data))
        if self.sample_bytes is not None:  # else no silence is told
            for pcm in parts:
                self._noise.hear(pcm)
        return _joined([self._resampler.resample(pcm) for pcm in parts])

    @property
    def sample_bytes(self) -> int | None:
        """Bytes of a sample. None: `decode_silence` cannot be used, since the codec has its own silence."""
        return self._codec.sample_bytes

    def decode_silence(self, samples: int, *, noise: bool = False) -> np.ndarray:
        """Decode so many samples of silence at `rate_hz`, as `decode` would their bytes. Call where no bytes are
        pending, with at most MAX_SILENT_SAMPLES. `noise`: the noise of the audio before it goes on, instead of zeros.
        """
        assert self.sample_bytes is not None
        assert not self.has_pending_bytes
        if noise:
            return clipped(self._resampler.resample(self._noise.make(samples)))
        self._noise.skip(samples)
        return clipped(self._resampler.resample(np.zeros(samples, np.float32)))

    def drain_resampler(self) -> np.ndarray:
        """Remaining samples of the resampler for all bytes so far, as if silence followed. More bytes may follow."""
        return clipped(self._resampler.finish())

    def finish(self) -> np.ndarray:
        """Remaining samples of resampler and codec."""
        rest = self._codec.rest()
        if rest is None:
            return self.drain_resampler()
        return _joined([self._resampler.resample(rest), self.drain_resampler()])


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    if len(parts) == 1:
        return clipped(parts[0])
    return clipped(np.concatenate(parts)) if parts else np.zeros(0, np.float32)


def create_live_decoder(encoding: str, rate_hz: int | None = None) -> LiveAudioDecoder:
    """Decoder for one of ENCODINGS: `opus` is one RFC 6716 packet a call, `ogg` an Ogg stream of Opus. `rate_hz` is for
    the other three; None: 16 kHz, and 8 kHz for telephony's mulaw and alaw. Raises OptionError."""
    if encoding not in ENCODINGS:
        raise OptionError(
            f"encoding={encoding[:60]!r}",
            f"one of: {', '.join(ENCODINGS)}",
            suggest_name(encoding[:60], ENCODINGS),
            param="encoding",
        )
    if encoding in DEFAULT_RATES_HZ:
        rate_hz = DEFAULT_RATES_HZ[encoding] if rate_hz is None else rate_hz
        if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
            raise OptionError(f"rate={rate_hz}", f"a whole number, {MIN_RATE_HZ} to {MAX_RATE_HZ}", param="rate")
        linear = encoding == "s16le"
        return LiveAudioDecoder(rate_hz, LinearCodec() if linear else CompandedCodec(encoding))
    if rate_hz is not None:
        raise OptionError(
            f"rate={rate_hz} with encoding={encoding}", "Opus tells its rate itself", "leave it out", param="rate"
        )
    return LiveAudioDecoder(OPUS_RATE_HZ, OpusCodec() if encoding == "opus" else OggCodec())


class LinearCodec:
    """16-bit little-endian samples."""

    sample_bytes = 2

    def __init__(self) -> None:
        self._pcm = Pcm16Assembler()

    def read(self, data: bytes | memoryview) -> Iterable[np.ndarray]:
        return (decode_pcm16(self._pcm.take_whole_samples(data)),)

    def rest(self) -> None:
        return None

    @property
    def has_pending_bytes(self) -> bool:
        return self._pcm.has_pending_byte

    def export_state(self) -> CodecState:
        return CodecState(pending_byte=self._pcm.pending_byte)

    def import_state(self, state: CodecState) -> None:
        self._pcm.pending_byte = state.pending_byte


class CompandedCodec:
    """G.711: one byte per sample, by table."""

    sample_bytes = 1
    has_pending_bytes = False

    def __init__(self, encoding: str) -> None:
        self._table = mulaw_table() if encoding == "mulaw" else alaw_table()

    def read(self, data: bytes | memoryview) -> Iterable[np.ndarray]:
        return (self._table[np.frombuffer(data, np.uint8)],)

    def rest(self) -> None:
        return None

    def export_state(self) -> CodecState:
        return CodecState()

    def import_state(self, state: CodecState) -> None:
        """Does nothing: there is no state."""


class OpusCodec:
    """One Opus packet a call."""

    sample_bytes = None
    has_pending_bytes = False

    def __init__(self) -> None:
        self._packets = OpusPacketDecoder()

    def read(self, data: bytes | memoryview) -> Iterable[np.ndarray]:
        return (self._packets.decode(bytes(data)),)

    def rest(self) -> np.ndarray:
        return self._packets.finish()

    def export_state(self) -> CodecState:
        return CodecState(opus=self._packets.export_state())

    def import_state(self, state: CodecState) -> None:
        if state.opus is None:
            raise ValueError("the state is of another encoding than opus")
        self._packets = OpusPacketDecoder.of(state.opus)


class OggCodec:
    """Opus in Ogg; one stream may follow another."""

    sample_bytes = None

    def __init__(self) -> None:
        self._pages, self._opus = OggPageReader(), OggOpusDecoder()

    def read(self, data: bytes | memoryview) -> Iterable[np.ndarray]:
        return (self._opus.decode_page(page) for page in self._pages.append_bytes(data))

    def rest(self) -> np.ndarray:
        return self._opus.finish()

    @property
    def has_pending_bytes(self) -> bool:
        return self._pages.has_pending_bytes or self._opus.has_pending_packet

    def export_state(self) -> CodecState:
        return CodecState(ogg=OggState(self._pages.export_state(), self._opus.export_state()))

    def import_state(self, state: CodecState) -> None:
        if state.ogg is None:
            raise ValueError("the state is of another encoding than ogg")
        self._pages.import_state(state.ogg.pages)
        self._opus.import_state(state.ogg.opus)
