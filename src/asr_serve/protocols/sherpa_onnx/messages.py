"""Messages of sherpa-onnx's WebSocket servers: floating point samples to audio, segments to answers. No sockets here.

Streaming: samples at 16 kHz in binary frames, the text `Done` behind them; an answer for each change, and `Done!`.
Offline: a header of eight bytes, rate and number of bytes as 32-bit integers, and so many bytes of samples;
one answer for each recording, and `Done` behind the last.

Source  sherpa-onnx's python-api-examples, csrc/online-websocket-server-impl.cc, csrc/offline-websocket-server-impl.cc
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from asr_serve.errors import AudioTooLarge, AudioTooLong, MalformedRequest, UnsupportedAudio
from asr_serve.types import Segment, Transcript

DONE, DONE_ANSWER = "Done", "Done!"
HEADER_BYTES = 8
SAMPLE_BYTES = 4
RATES_HZ = (8_000, 192_000)
USUAL_RATES_HZ = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000, 192_000)
"""Rates by which the header of a first recording is known."""
LEAST, MOST = 1e-8, 4.0
"""Magnitudes of samples in floating point: none is greater, and few are smaller, as resampling leaves them in silence.
Integers, read as floating point, are smaller where they are quiet, and greater or no numbers otherwise."""


def guess_protocol(frame: bytes) -> Literal["sherpa_online", "sherpa_offline", "silence"] | None:
    """Protocol of the first frame of a connection. `silence`: all zeros, as more than one protocol has; None: it is of
    no client of sherpa-onnx."""
    if len(frame) >= HEADER_BYTES:
        rate_hz, size = struct.unpack_from("<ii", frame)
        if rate_hz in USUAL_RATES_HZ and size >= 0 and size % SAMPLE_BYTES == 0:
            return "sherpa_offline"  # as a sample, such a number would be smaller than any that a device makes
    if not frame or len(frame) % SAMPLE_BYTES:
        return None
    magnitudes = np.abs(np.frombuffer(frame, "<f4"))
    sounding = magnitudes[magnitudes != 0]
    if not len(sounding):
        return "silence"
    if not np.all(sounding <= MOST):  # NaN is not
        return None
    return "sherpa_online" if 2 * np.count_nonzero(sounding >= LEAST) > len(sounding) else None


def decode_samples(frame: bytes | memoryview) -> np.ndarray:
    """Samples of a frame, (n,) float32 in -1..1. Raises MalformedRequest."""
    allowed = "whole samples in 32-bit floating point, -1 to 1"
    if len(frame) % SAMPLE_BYTES:
        raise MalformedRequest(f"a frame of {len(frame)} bytes came", allowed)
    samples = np.frombuffer(frame, "<f4")
    if not np.all(np.isfinite(samples)):
        raise MalformedRequest("a frame with samples that are no numbers came", allowed)
    clipped: np.ndarray = np.clip(samples, -1, 1)
    return clipped


class RecordingHeader(msgspec.Struct, frozen=True):
    """Header of an offline recording."""

    rate_hz: int
    size_bytes: int


def parse_header(header: bytes, max_duration_s: float, max_bytes: int) -> RecordingHeader:
    """Parses HEADER_BYTES. Raises UnsupportedAudio, AudioTooLong, AudioTooLarge."""
    rate_hz, size = struct.unpack("<ii", header)
    if not RATES_HZ[0] <= rate_hz <= RATES_HZ[1] or size < 0 or size % SAMPLE_BYTES:
        raise UnsupportedAudio(
            f"a header of a rate of {rate_hz} Hz and {size} bytes came",
            f"{RATES_HZ[0]} to {RATES_HZ[1]} Hz, and four bytes for each sample",
            "send the rate, the number of bytes and the samples",
        )
    if size > max_duration_s * rate_hz * SAMPLE_BYTES:
        raise AudioTooLong(
            f"a recording of {size / SAMPLE_BYTES / rate_hz:g} s was announced", f"up to {max_duration_s:g} s"
        )
    if size > max_bytes:
        raise AudioTooLarge(
            f"a recording of {size} bytes was announced", f"up to {max_bytes}", "send it in parts, or at 16000 Hz"
        )
    return RecordingHeader(rate_hz, size)


# --- answers ----------------------------------------------------------------------------------------------


class OnlineAnswer(msgspec.Struct, frozen=True):
    """Text of the open segment, or of one that is final. Times in seconds."""

    text: str
    tokens: list[str]
    """Words, with `timestamps` of their starts since `start_time`; only when the segment is final."""
    timestamps: list[float]
    segment: int
    start_time: float
    is_final: bool
    is_eof: bool = False
    """Whether it is the last."""


class OfflineAnswer(msgspec.Struct, frozen=True):
    """Text of a recording. Times in seconds."""

    text: str
    lang: str
    tokens: list[str]
    timestamps: list[float]
    durations: list[float]
    emotion: str = ""
    event: str = ""


class OnlineAnswers:
    """Answers of one streaming session."""

    def __init__(self) -> None:
        self._segment = 0
        self._last: OnlineAnswer | None = None

    def partial(self, text: str, start_s: float) -> str:
        return _json(OnlineAnswer(text, [], [], self._segment, start_s, is_final=False))

    def segment(self, segment: Segment) -> str:
        words = segment.words
        answer = self._last = OnlineAnswer(
            segment.text,
            [word.text for word in words],
            [round(word.start_s - segment.start_s, 2) for word in words],
            self._segment,
            round(segment.start_s, 2),
            is_final=True,
        )
        self._segment += 1
        return _json(answer)

    def end(self) -> str:
        """Last answer: the last segment once more, since clients show no other."""
        last = self._last or OnlineAnswer("", [], [], 0, 0.0, is_final=True)
        return _json(msgspec.structs.replace(last, is_eof=True))


def offline_answer(transcript: Transcript | None) -> str:
    """Answer about a recording; None: it was empty."""
    if transcript is None:
        return _json(OfflineAnswer("", "", [], [], []))
    words: Sequence[tuple[str, float, float]] = [
        (word.text, word.start_s, word.end_s) for segment in transcript.segments for word in segment.words
    ]
    return _json(
        OfflineAnswer(
            transcript.text,
            transcript.language,
            [text for text, _, _ in words],
            [round(start_s, 2) for _, start_s, _ in words],
            [round(end_s - start_s, 2) for _, start_s, end_s in words],
        )
    )


def _json(answer: OnlineAnswer | OfflineAnswer) -> str:
    return msgspec.json.encode(answer).decode()
