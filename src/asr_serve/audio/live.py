"""Audio while it is spoken, without I/O: bytes of a stated encoding in, samples out, each piece at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from asr_serve.audio.ogg import OggOpus, Pages
from asr_serve.audio.opus import OPUS_RATE_HZ, OpusPackets
from asr_serve.audio.pcm import Pcm16, alaw_table, clipped, mulaw_table, samples
from asr_serve.audio.resample import Resampler
from asr_serve.errors import OptionError
from asr_serve.units import RATE_HZ
from asr_serve.values import nearest

MIN_RATE_HZ, MAX_RATE_HZ = 8_000, 48_000
DEFAULT_RATES_HZ = {"s16le": RATE_HZ, "mulaw": 8_000, "alaw": 8_000}
"""Of the encodings that do not tell it themselves."""
ENCODINGS = (*DEFAULT_RATES_HZ, "opus", "ogg")


class Decoder:
    """Bytes of one caller, in order.

    Out     (n,) float32, mono, 16 kHz, -1..1; n may be 0. After `finish` all together ceil(n * 16000 / rate_hz)
            samples, bit for bit the same however the bytes were cut
    Raises  CorruptAudio, UnsupportedAudio; nothing may be put afterwards
    """

    def __init__(
        self,
        rate_hz: int,
        read: Callable[[bytes | memoryview], Iterable[np.ndarray]],
        *,
        rest: Callable[[], np.ndarray] | None = None,
        left: Callable[[], bool] = lambda: False,
    ) -> None:
        """`read`: bytes to samples at `rate_hz`, which do not share memory with them; `rest`: what it still holds
        at the end; `left`: whether it waits for more bytes."""
        self.rate_hz = rate_hz
        """What the bytes decode to, before it becomes 16 kHz."""
        self._read, self._rest, self._left, self._resampler = read, rest, left, Resampler(rate_hz)

    @property
    def left(self) -> bool:
        """Some of the bytes wait for more: half a sample, part of a page. At the end they are dropped."""
        return self._left()

    def put(self, data: bytes | memoryview) -> np.ndarray:
        """Cut anywhere; `opus`: one packet. What is returned never shares memory with `data`."""
        return _joined([self._resampler.put(pcm) for pcm in self._read(data)])

    def drain(self) -> np.ndarray:
        """What the resampler still holds: all that was put is out, as if silence followed. More may be put."""
        return clipped(self._resampler.finish())

    def finish(self) -> np.ndarray:
        """What resampler and codec still hold."""
        return self.drain() if self._rest is None else _joined([self._resampler.put(self._rest()), self.drain()])


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    if len(parts) == 1:
        return clipped(parts[0])
    return clipped(np.concatenate(parts)) if parts else np.zeros(0, np.float32)


def decoder(encoding: str, rate_hz: int | None = None) -> Decoder:
    """For one of ENCODINGS: `opus` is one RFC 6716 packet a call, `ogg` a stream with Opus in it.

    `rate_hz` is of the other three; None: 16 kHz, for telephones' mulaw and alaw 8 kHz. Raises OptionError.
    """
    if encoding not in ENCODINGS:
        raise OptionError(
            f"encoding={encoding[:60]!r}",
            f"one of: {', '.join(ENCODINGS)}",
            nearest(encoding[:60], ENCODINGS),
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


def _linear(rate_hz: int) -> Decoder:
    """16-bit little-endian samples."""
    pcm = Pcm16()
    return Decoder(rate_hz, lambda data: (samples(pcm.whole(data)),), left=lambda: pcm.left)


def _companded(encoding: str, rate_hz: int) -> Decoder:
    """A sample a byte, which a table tells."""
    table = mulaw_table() if encoding == "mulaw" else alaw_table()
    return Decoder(rate_hz, lambda data: (table[np.frombuffer(data, np.uint8)],))


def _opus() -> Decoder:
    """One packet a call."""
    packets = OpusPackets()
    return Decoder(OPUS_RATE_HZ, lambda data: (packets.put(bytes(data)),), rest=packets.finish)


def _ogg() -> Decoder:
    """Opus in Ogg; one stream may follow another."""
    pages, opus = Pages(), OggOpus()
    return Decoder(
        OPUS_RATE_HZ,
        lambda data: (opus.put(page) for page in pages.put(data)),
        rest=opus.finish,
        left=lambda: pages.left or opus.left,
    )
