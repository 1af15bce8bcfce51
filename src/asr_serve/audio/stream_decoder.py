"""Decoding of live audio, sans-I/O: bytes of a stated encoding in, samples out without delay."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from asr_serve.audio.ogg_opus import OggOpusDecoder, OggPageReader
from asr_serve.audio.opus_decoder import OPUS_RATE_HZ, OpusPacketDecoder
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
STATEFUL_ENCODINGS = ("opus", "ogg")
"""Encodings whose decoders have a state that cannot be exported."""


class LiveDecoderState(msgspec.Struct, frozen=True):
    """State of a decoder between two calls, from which another one of the same encoding and rate continues."""

    pending_byte: bytes
    resampler: ResamplerState


class LiveAudioDecoder:
    """Bytes of one caller, in order, to samples.

    Out     (n,) float32, mono, 16 kHz, -1..1; n may be 0. After `finish` ceil(n * 16000 / rate_hz) samples in all,
            bit for bit the same however the bytes were cut
    Raises  CorruptAudio, UnsupportedAudio; it must not be used afterwards
    """

    def __init__(
        self,
        rate_hz: int,
        read: Callable[[bytes | memoryview], Iterable[np.ndarray]],
        *,
        rest: Callable[[], np.ndarray] | None = None,
        has_pending_bytes: Callable[[], bool] = lambda: False,
        assembler: Pcm16Assembler | None = None,
        exports_state: bool = False,
        sample_bytes: int | None = None,
    ) -> None:
        """`read`: bytes to samples at `rate_hz`, which do not share memory with them; `rest`: the samples it still
        buffers at the end; `has_pending_bytes`: whether it waits for more bytes; `assembler`: what buffers half a
        sample; `exports_state`: whether `read` and `assembler` have no other state; `sample_bytes`: bytes of a
        sample, in encodings where all have the same size."""
        self.sample_bytes = sample_bytes
        """Bytes of a sample. None: `decode_silence` cannot be used, since the codec has its own silence."""
        self.rate_hz = rate_hz
        """Rate of the decoded samples, before they are resampled to 16 kHz."""
        self._read, self._flush, self._has_pending, self._resampler = (
            read,
            rest,
            has_pending_bytes,
            Resampler(rate_hz, exports_state=exports_state),
        )
        self._assembler = assembler
        self.is_pcm16 = exports_state and rate_hz == RATE_HZ
        """Whether all samples are 16-bit integers over 32768."""

    def export_state(self) -> LiveDecoderState:
        """Returns the state; not for STATEFUL_ENCODINGS."""
        pending = b"" if self._assembler is None else self._assembler.pending_byte
        return LiveDecoderState(pending, self._resampler.export_state())

    def import_state(self, state: LiveDecoderState) -> None:
        """Continues there. Call before the first bytes."""
        if self._assembler is not None:
            self._assembler.pending_byte = state.pending_byte
        self._resampler.import_state(state.resampler)

    @property
    def has_pending_bytes(self) -> bool:
        """Whether some bytes wait for more: half a sample, part of a page. At the end they are dropped."""
        return self._has_pending()

    def decode(self, data: bytes | memoryview) -> np.ndarray:
        """Decode bytes, cut anywhere; `opus`: one packet. The samples never share memory with `data`."""
        return _joined([self._resampler.resample(pcm) for pcm in self._read(data)])

    def decode_silence(self, samples: int) -> np.ndarray:
        """Decode so many samples of silence at `rate_hz`, as `decode` would their bytes. Call where no bytes are
        pending, with at most MAX_SILENT_SAMPLES."""
        assert self.sample_bytes is not None
        assert not self.has_pending_bytes
        return clipped(self._resampler.resample(np.zeros(samples, np.float32)))

    def drain_resampler(self) -> np.ndarray:
        """Remaining samples of the resampler for all bytes so far, as if silence followed. More bytes may follow."""
        return clipped(self._resampler.finish())

    def finish(self) -> np.ndarray:
        """Remaining samples of resampler and codec."""
        return (
            self.drain_resampler()
            if self._flush is None
            else _joined([self._resampler.resample(self._flush()), self.drain_resampler()])
        )


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
        return _linear(rate_hz) if encoding == "s16le" else _companded(encoding, rate_hz)
    if rate_hz is not None:
        raise OptionError(
            f"rate={rate_hz} with encoding={encoding}", "Opus tells its rate itself", "leave it out", param="rate"
        )
    return _opus() if encoding == "opus" else _ogg()


def _linear(rate_hz: int) -> LiveAudioDecoder:
    """Decoder of 16-bit little-endian samples."""
    pcm = Pcm16Assembler()
    return LiveAudioDecoder(
        rate_hz,
        lambda data: (decode_pcm16(pcm.take_whole_samples(data)),),
        has_pending_bytes=lambda: pcm.has_pending_byte,
        assembler=pcm,
        exports_state=True,
        sample_bytes=2,
    )


def _companded(encoding: str, rate_hz: int) -> LiveAudioDecoder:
    """Decoder of G.711: one byte per sample, by table."""
    table = mulaw_table() if encoding == "mulaw" else alaw_table()
    return LiveAudioDecoder(
        rate_hz, lambda data: (table[np.frombuffer(data, np.uint8)],), exports_state=True, sample_bytes=1
    )


def _opus() -> LiveAudioDecoder:
    """Decoder of one Opus packet a call."""
    packets = OpusPacketDecoder()
    return LiveAudioDecoder(OPUS_RATE_HZ, lambda data: (packets.decode(bytes(data)),), rest=packets.finish)


def _ogg() -> LiveAudioDecoder:
    """Decoder of Opus in Ogg; one stream may follow another."""
    pages, opus = OggPageReader(), OggOpusDecoder()
    return LiveAudioDecoder(
        OPUS_RATE_HZ,
        lambda data: (opus.decode_page(page) for page in pages.append_bytes(data)),
        rest=opus.finish,
        has_pending_bytes=lambda: pages.has_pending_bytes or opus.has_pending_packet,
    )
