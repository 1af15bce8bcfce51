"""Media files to mono chunks, by PyAV."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from fractions import Fraction

import av
import av.error
import numpy as np

from asr_serve.audio import container_headers
from asr_serve.audio.byte_source import ByteSource
from asr_serve.audio.pcm import to_mono
from asr_serve.audio.resample import check_rate_hz
from asr_serve.errors import AudioError, CorruptAudio, EmptyAudio, NotAudio, TruncatedAudio, UnsupportedAudio
from asr_serve.units import RATE_HZ, samples_to_s

DECODE_CHUNK_SAMPLES = 16_384
"""Least samples of a chunk, gathered from frames: a call per mp3 frame would cost more than the decoding."""

MAX_REFUSED_IN_A_ROW = 25
"""Most consecutive packets (a quarter to a whole second of speech) that the decoder may refuse."""

MAX_REFUSED_SHARE = 0.1
"""Largest share of packets that the decoder may refuse; two are always tolerated."""

GAP_S = 0.05
"""Least gap in the timestamps that is not jitter."""

EXPECTED_GAP_S = 0.002
"""Least gap after a refused packet; timestamps may be whole milliseconds."""

MAX_BACKWARD_S = 1.0
"""Largest backward step of timestamps within a file; a larger one means a joined file."""

MAX_GAP_S = 60.0
"""Longest gap that counts as lost audio; a longer one is a jump of the clock in a joined file."""

PAUSE_S = 1.0
"""Longest gap that may come from an encoder that sends next to nothing in pauses (opus: 20 ms of every 400)."""

MAX_PAUSES_SHARE = 25.0
"""Most silence for gaps up to PAUSE_S, as a share of the decoded audio."""

MAX_HOLES_SHARE = 0.1
"""Most silence for longer gaps, as a share of the decoded audio."""

FREE_HOLES_S = 60.0
"""Silence of either kind that is always allowed. Without a bound, a few wrong timestamps would make hours of it."""

MAX_CHANNELS = 64
"""Most channels, enough for microphone arrays."""

RIFF_SLACK_BYTES = 64
"""Tolerance for writers that count their headers as data."""

# Tolerated difference of decoded and announced length, by ffmpeg's container name. Other containers announce
# no exact length: raw aac, mpeg-ts and ogg have none, and that of an mp3 without a Xing header is estimated
# from its bit rate. WAV is counted in bytes.
_SHORTFALL_S = {
    "flac": 0.01,
    "aiff": 0.01,
    "au": 0.01,
    "mp3": 0.5,
    "mov,mp4,m4a,3gp,3g2,mj2": 0.5,
    "matroska,webm": 0.5,
}
# Containers whose packets have a stated size, so that a truncated packet proves a truncated file.
_SIZED_PACKETS = ("mov,mp4,m4a,3gp,3g2,mj2", "w64")


class GapDetector:
    """Finds lost audio in the timestamps, without mistaking jitter, drift or a joined file for it.

    expected    set by the caller after a refused packet: then a gap over EXPECTED_GAP_S counts, else only one over
                GAP_S
    """

    def __init__(self) -> None:
        self.expected = False
        self._heard_s = self._pauses_s = self._holes_s = 0.0
        self._end_s: float | None = None  # of the last frame, by its timestamp
        self._clock_s = 0.0  # of all audio so far, holes included, on the container's clock

    def gap_before_s(self, start_s: float | None, length_s: float) -> float:
        """Seconds missing between the last frame and this one; 0.0 if none."""
        gap_s = 0.0
        if start_s is None:
            start_s = self._clock_s
        if self._end_s is None or not -MAX_BACKWARD_S <= start_s - self._clock_s <= MAX_GAP_S:
            self._clock_s = start_s
        else:
            # The smaller of both, because a late timestamp after an early one is jitter, which must not add up.
            observed_s = min(start_s - self._end_s, start_s - self._clock_s)
            if observed_s > (EXPECTED_GAP_S if self.expected else GAP_S):
                gap_s = observed_s
        self.expected = False
        self._clock_s += gap_s + length_s
        self._end_s = start_s + length_s
        self._heard_s += length_s
        if gap_s <= PAUSE_S:
            self._pauses_s += gap_s
        else:
            self._holes_s += gap_s
        return gap_s

    def exceeds_limits(self) -> bool:
        """Returns whether more audio is missing so far than the bounds above allow."""
        return (
            self._pauses_s > FREE_HOLES_S + MAX_PAUSES_SHARE * self._heard_s
            or self._holes_s > FREE_HOLES_S + MAX_HOLES_SHARE * self._heard_s
        )


class MediaFile:
    """One opened container: its announced lengths, and its audio in order.

    hint_samples        estimated length at 16 kHz; None if unknown
    announced_samples   length at 16 kHz that the header promises; None where it promises none
    Raises              NotAudio, UnsupportedAudio, TruncatedAudio, CorruptAudio, EmptyAudio, and the errors of
                        `ByteSource`
    """

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._wav = container_headers.read_wav_header(source.head)
        if self._wav is not None:
            check_rate_hz(self._wav.rate_hz)
            if not self._wav.channels:
                raise UnsupportedAudio(
                    f"{source.label} is a WAV of 0 channels", "at least one is needed", "write the file again"
                )
        if container_headers.mp4_needs_seeking(source.head):
            source.spool()
        try:
            self._container = av.open(
                source,
                "r",
                container_options={"protocol_whitelist": "none"},  # no protocol, so playlists open nothing
                metadata_errors="replace",  # titles in latin-1 are common, and not used
            )
        except av.error.FFmpegError as error:
            source.expect_unbroken()
            raise self._unopened(error) from error
        with ExitStack() as undo:
            undo.callback(self.close)
            source.expect_unbroken()
            self._stream = self._pick()
            self.announced_samples = self._announced()
            self.hint_samples = self.announced_samples or self._guess()
            undo.pop_all()

    def close(self) -> None:
        self._container.close()

    def audio_chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Pairs of (rate_hz, mono (n,) float32) in order; the rate may change.

        A packet that the decoder refuses, and a gap of up to MAX_GAP_S in the timestamps, become silence of
        the same length, so that later audio keeps its time. Otherwise time is counted in decoded samples.
        """
        pending: list[np.ndarray] = []
        pending_samples, pending_kind, total_s = 0, _chunk_kind(0, np.zeros(0, np.float32)), Fraction(0)
        for rate_hz, planes in self._frames():
            kind = _chunk_kind(rate_hz, planes)
            if pending and (kind != pending_kind or pending_samples >= DECODE_CHUNK_SAMPLES):
                yield pending_kind[0], to_mono(np.concatenate(pending, -1), CorruptAudio)
                total_s += Fraction(pending_samples, pending_kind[0])
                pending, pending_samples = [], 0
            pending.append(planes)
            pending_kind = kind
            pending_samples += planes.shape[-1]
        if pending:
            yield pending_kind[0], to_mono(np.concatenate(pending, -1), CorruptAudio)
            total_s += Fraction(pending_samples, pending_kind[0])
        self._expect_whole(int(total_s * RATE_HZ))

    def _frames(self) -> Iterator[tuple[int, np.ndarray]]:
        """Pairs of rate_hz and samples, as `_planes` returns them; lost audio is silence in between."""
        packets = refused = refused_in_a_row = 0
        frames = 0
        gaps = GapDetector()
        for packet in self._packets():
            packets += 1
            try:
                decoded = packet.decode()
            except av.error.FFmpegError as error:
                gaps.expected = True
                refused += 1
                refused_in_a_row += 1
                if refused_in_a_row > MAX_REFUSED_IN_A_ROW:
                    raise self._corrupt(f"the decoder refused {refused_in_a_row} packets in a row") from error
                continue
            for frame in decoded:
                assert isinstance(frame, av.AudioFrame)
                if not frame.samples:
                    continue
                refused_in_a_row = 0
                rate_hz = frame.sample_rate
                gap_s = gaps.gap_before_s(frame.time, frame.samples / rate_hz)
                if gaps.exceeds_limits():
                    raise self._corrupt(
                        f"by its timestamps more is missing than may be (frame {frames} shows it)",
                        f"{FREE_HOLES_S:g} s and {MAX_HOLES_SHARE:.0%} may be, besides pauses up to {PAUSE_S:g} s",
                    )
                if gap_s:
                    yield from _silence(gap_s, rate_hz)
                frames += 1
                yield rate_hz, _planes(frame)
        if refused and (not frames or refused > max(2, MAX_REFUSED_SHARE * packets)):
            if not frames and self._source.ended and self._announced_more(0):
                return
            raise self._corrupt(f"the decoder refused {refused} of {packets} packets")
        if not frames and not self._announced_more(0):
            raise EmptyAudio(
                f"{self._source.label} holds a header and 0 samples", "audio needs some", "check the recorder"
            )

    def _packets(self) -> Iterator[av.Packet[av.AudioStream]]:
        packets = self._container.demux(self._stream)
        sized = self._container.format.name in _SIZED_PACKETS
        while True:
            try:
                packet = next(packets, None)
            except av.error.FFmpegError as error:
                self._source.expect_unbroken()
                if self._source.ended:
                    raise self._truncated("it ends in the middle of its audio") from error
                raise self._corrupt(f"its container cannot be read on: {error.strerror}") from error
            self._source.expect_unbroken()
            if packet is None:
                return
            if sized and packet.is_corrupt and self._source.ended:
                raise self._truncated("its last packet is cut short")
            yield packet

    def _pick(self) -> av.AudioStream:
        stream = self._container.streams.best("audio")
        label, kind = self._source.label, self._container.format.name
        if stream is None and self._container.streams.audio:
            raise self._truncated("it ends before the first of its audio")
        if stream is None:
            others = ", ".join(sorted({other.type for other in self._container.streams})) or "nothing"
            raise NotAudio(
                f"{label} is {kind} and holds {others} but no audio",
                "a file with an audio stream is needed",
                "send the sound track",
            )
        assert isinstance(stream, av.AudioStream)
        if stream.codec_context is None:
            raise UnsupportedAudio(
                f"{label} is {kind} with a codec that has no decoder here",
                "any codec that ffmpeg decodes is allowed",
                "convert it, for example to flac",
            )
        return stream

    def _announced(self) -> int | None:
        if self._wav is not None:
            if self._wav.data_bytes is None or not self._wav.bytes_per_s:
                return None
            return self._wav.data_bytes * RATE_HZ // self._wav.bytes_per_s
        kind = self._container.format.name
        if kind not in _SHORTFALL_S:
            return None
        if kind == "mp3":
            return container_headers.mp3_announced_samples(self._source.head)
        # Matroska announces the length of its longest stream, which need not be the audio.
        if kind == "matroska,webm" and len(self._container.streams) > 1:
            return None
        return self._guess()

    def _guess(self) -> int | None:
        stream = self._stream
        if stream.duration is not None and stream.time_base is not None:
            return max(0, int(stream.duration * stream.time_base * RATE_HZ)) or None
        if self._container.duration is not None:
            return max(0, self._container.duration * RATE_HZ // av.time_base) or None
        return None

    def _announced_more(self, samples: int) -> bool:
        if self._wav is not None:
            if self._wav.data_bytes is None:
                return False
            read_bytes = self._source.size_bytes if self._source.size_bytes is not None else self._source.read_bytes
            return read_bytes + RIFF_SLACK_BYTES < self._wav.data_start_bytes + self._wav.data_bytes
        if self.announced_samples is None:
            return False
        return samples + _SHORTFALL_S[self._container.format.name] * RATE_HZ < self.announced_samples

    def _expect_whole(self, samples: int) -> None:
        if self._announced_more(samples):
            announced_s = samples_to_s(self.announced_samples or 0)
            raise self._truncated(f"it announces {announced_s:.3f} s and {samples_to_s(samples):.3f} s came")

    def _unopened(self, error: av.error.FFmpegError) -> AudioError:
        source, kind = self._source, container_headers.container_name(self._source.head)
        if kind == "mp4":
            return self._truncated("it is an mp4 without its index (moov), which is written last")
        if kind is not None and source.ended:
            return self._truncated(f"it begins as {kind} and ends before its first audio")
        if kind is not None:
            return self._corrupt(f"it begins as {kind} and cannot be read on: {error.strerror}")
        return NotAudio(
            f"{source.label} is not a known audio container",
            "wav, flac, mp3, m4a, ogg, webm and other formats that ffmpeg reads are allowed; playlists are not",
            "check the file, or wrap raw samples in a WAV",
        )

    def _truncated(self, why: str) -> TruncatedAudio:
        return TruncatedAudio(
            f"{self._source.label} is cut off: {why}", "a whole file is needed", "copy or record it again"
        )

    def _corrupt(self, why: str, allowed: str = f"up to {MAX_REFUSED_SHARE:.0%} of its packets may be") -> CorruptAudio:
        return CorruptAudio(f"{self._source.label} is damaged: {why}", allowed, "copy or convert it again")


def _chunk_kind(rate_hz: int, planes: np.ndarray) -> tuple[int, np.dtype, tuple[int, ...]]:
    """Properties that samples must have in common to be converted together."""
    return rate_hz, planes.dtype, planes.shape[:-1]


_MONO_TYPES = {"s16": "i2", "s16p": "i2", "s32": "i4", "s32p": "i4", "flt": "f4", "fltp": "f4"}


def _planes(frame: av.AudioFrame) -> np.ndarray:
    """Samples of a frame, (channels, n) or (n,), in the decoder's own sample type."""
    channels = frame.layout.nb_channels
    if channels > MAX_CHANNELS:
        raise UnsupportedAudio(
            f"audio of {channels} channels came",
            f"at most {MAX_CHANNELS} are allowed",
            "mix it down, or send the channels that matter",
        )
    kind = _MONO_TYPES.get(frame.format.name)
    if kind is not None and channels == 1:  # a view costs half of what `to_ndarray` does
        view: np.ndarray = np.frombuffer(memoryview(frame.planes[0]), kind, frame.samples)
        return view
    try:
        samples: np.ndarray = frame.to_ndarray()
    except ValueError as error:  # PyAV has no numpy type for it; 64-bit integers are the one case known
        raise UnsupportedAudio(
            f"decoded samples of type {frame.format.name} came",
            "integers to 32 bits and floats are allowed",
            "convert the file, for example to flac",
        ) from error
    if frame.format.is_planar:
        return samples
    return samples.reshape(-1, max(1, channels)).T


def _silence(length_s: float, rate_hz: int) -> Iterator[tuple[int, np.ndarray]]:
    remaining = round(length_s * rate_hz)
    while remaining > 0:
        yield rate_hz, np.zeros(min(remaining, DECODE_CHUNK_SAMPLES), np.float32)
        remaining -= DECODE_CHUNK_SAMPLES
