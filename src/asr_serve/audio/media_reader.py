"""Media files to mono pieces, by PyAV."""

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
"""Frames are gathered to about this many samples: a call per mp3 frame would cost more than the decoding."""

MAX_REFUSED_IN_A_ROW = 25
"""Packets (a quarter to a whole second of speech) the decoder may refuse one after another."""

MAX_REFUSED_SHARE = 0.1
"""Share of all packets the decoder may refuse; two are always forgiven."""

GAP_S = 0.05
"""A hole in the timestamps that is no jitter."""

EXPECTED_GAP_S = 0.002
"""The same where a packet was refused; timestamps may be whole milliseconds."""

MAX_BACKWARD_S = 1.0
"""Timestamps that go back further than this belong to a joined file."""

MAX_GAP_S = 60.0
"""A hole beyond this is a jump of the clock (a joined file), not lost audio."""

PAUSE_S = 1.0
"""A hole up to this may be an encoder that sends next to nothing in pauses (opus: 20 ms of every 400)."""

MAX_PAUSES_SHARE = 25.0
"""Silence for such holes, as a share of the decoded audio."""

MAX_HOLES_SHARE = 0.1
"""Silence for longer holes, as a share of the decoded audio."""

FREE_HOLES_S = 60.0
"""This much of either is always forgiven. Without a bound, a few packets with wild timestamps last for hours."""

MAX_CHANNELS = 64
"""Microphone arrays have as many."""

RIFF_SLACK_BYTES = 64
"""Some writers count their headers as data."""

# How far the decoded length may fall short of the announced one, by ffmpeg's container name. A container
# that is not here announces nothing exact: raw aac, mpeg-ts and ogg know only what came, and an mp3
# without a Xing header is guessed from its bit rate. WAV is counted in bytes.
_SHORTFALL_S = {
    "flac": 0.01,
    "aiff": 0.01,
    "au": 0.01,
    "mp3": 0.5,
    "mov,mp4,m4a,3gp,3g2,mj2": 0.5,
    "matroska,webm": 0.5,
}
# Containers whose packets have a stated size, so that one cut short proves that the file was.
_SIZED_PACKETS = ("mov,mp4,m4a,3gp,3g2,mj2", "w64")


class GapDetector:
    """Finds lost audio in the timestamps, without mistaking jitter, drift or a joined file for it.

    expected    set it when a packet was refused: then the shortest hole counts, else only one over GAP_S
    """

    def __init__(self) -> None:
        self.expected = False
        self._heard_s = self._pauses_s = self._holes_s = 0.0
        self._end_s: float | None = None  # of the last frame, by its timestamp
        self._clock_s = 0.0  # of all audio so far, holes included, on the container's clock

    def gap_before_s(self, start_s: float | None, length_s: float) -> float:
        """Seconds missing between the last frame and this one; 0.0 where none are."""
        hole_s = 0.0
        if start_s is None:
            start_s = self._clock_s
        if self._end_s is None or not -MAX_BACKWARD_S <= start_s - self._clock_s <= MAX_GAP_S:
            self._clock_s = start_s
        else:
            # The smaller of both: a late timestamp after an early one is jitter, and must not add up.
            seen_s = min(start_s - self._end_s, start_s - self._clock_s)
            if seen_s > (EXPECTED_GAP_S if self.expected else GAP_S):
                hole_s = seen_s
        self.expected = False
        self._clock_s += hole_s + length_s
        self._end_s = start_s + length_s
        self._heard_s += length_s
        if hole_s <= PAUSE_S:
            self._pauses_s += hole_s
        else:
            self._holes_s += hole_s
        return hole_s

    def exceeds_limits(self) -> bool:
        """Whether more was missing so far than the bounds above allow."""
        return (
            self._pauses_s > FREE_HOLES_S + MAX_PAUSES_SHARE * self._heard_s
            or self._holes_s > FREE_HOLES_S + MAX_HOLES_SHARE * self._heard_s
        )


class MediaFile:
    """One opened container: its announced lengths, and its audio in order.

    hint_samples        at 16 kHz; the best guess, None where there is none
    announced_samples   at 16 kHz; what the header promises, None where it promises nothing
    Raises              NotAudio, UnsupportedAudio, TruncatedAudio, CorruptAudio, EmptyAudio, and what
                        `ByteSource` raises
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
                container_options={"protocol_whitelist": "none"},  # no protocol's name: playlists open nothing
                metadata_errors="replace",  # titles in latin-1 are common, and none of our business
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
        """(rate_hz, mono (n,) float32) in order; the rate may change on the way.

        A packet the decoder refuses, and a hole of up to MAX_GAP_S in the timestamps, become silence of
        the same length, so that what follows keeps its time. Otherwise time is counted in decoded samples.
        """
        held: list[np.ndarray] = []
        held_samples, held_hz, total_s = 0, 0, Fraction(0)
        for rate_hz, mono in self._frames():
            if held and (rate_hz != held_hz or held_samples >= DECODE_CHUNK_SAMPLES):
                yield held_hz, np.concatenate(held)
                total_s += Fraction(held_samples, held_hz)
                held, held_samples = [], 0
            held.append(mono)
            held_hz = rate_hz
            held_samples += len(mono)
        if held:
            yield held_hz, np.concatenate(held)
            total_s += Fraction(held_samples, held_hz)
        self._expect_whole(int(total_s * RATE_HZ))

    def _frames(self) -> Iterator[tuple[int, np.ndarray]]:
        packets = refused = refused_in_a_row = 0
        frames = 0
        holes = GapDetector()
        for packet in self._packets():
            packets += 1
            try:
                decoded = packet.decode()
            except av.error.FFmpegError as error:
                holes.expected = True
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
                hole_s = holes.gap_before_s(frame.time, frame.samples / rate_hz)
                if holes.exceeds_limits():
                    raise self._corrupt(
                        f"by its timestamps more is missing than may be (frame {frames} shows it)",
                        f"{FREE_HOLES_S:g} s and {MAX_HOLES_SHARE:.0%} may be, besides pauses up to {PAUSE_S:g} s",
                    )
                yield from _silence(hole_s, rate_hz)
                frames += 1
                yield rate_hz, to_mono(_planes(frame), CorruptAudio)
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
        # Matroska announces the longest of its streams, which need not be the audio.
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
            came = self._source.size_bytes if self._source.size_bytes is not None else self._source.read_bytes
            return came + RIFF_SLACK_BYTES < self._wav.data_start_bytes + self._wav.data_bytes
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
            f"{source.label} is no audio container that is known",
            "wav, flac, mp3, m4a, ogg, webm and whatever else ffmpeg reads is allowed, playlists are not",
            "check the file, or wrap raw samples in a WAV",
        )

    def _truncated(self, why: str) -> TruncatedAudio:
        return TruncatedAudio(
            f"{self._source.label} is cut off: {why}", "a whole file is needed", "copy or record it again"
        )

    def _corrupt(
        self, why: str, allowed: str = f"up to {MAX_REFUSED_SHARE:.0%} of its packets may be"
    ) -> CorruptAudio:
        return CorruptAudio(f"{self._source.label} is damaged: {why}", allowed, "copy or convert it again")


_MONO_TYPES = {"s16": "i2", "s16p": "i2", "s32": "i4", "s32p": "i4", "flt": "f4", "fltp": "f4"}


def _planes(frame: av.AudioFrame) -> np.ndarray:
    """(channels, n) or (n,), in the decoder's own sample type."""
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
    left = round(length_s * rate_hz)
    while left > 0:
        yield rate_hz, np.zeros(min(left, DECODE_CHUNK_SAMPLES), np.float32)
        left -= DECODE_CHUNK_SAMPLES
