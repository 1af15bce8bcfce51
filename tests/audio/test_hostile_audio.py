"""Inputs that ask for much more work than their bytes, and streams that finish or break off while being read."""

from __future__ import annotations

import io
import struct
import tempfile
import threading
import tracemalloc
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING

import av
import numpy as np
import psutil
import pytest

from asr_serve import errors
from asr_serve.audio import AudioLimits, open_audio, read_audio
from asr_serve.server.uploads.spool import Spool, SpoolReader

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


def encode(seconds: float, rate_hz: int, codec: str, kind: str, *, every_s: float = 0.0, level: float = 0.0) -> bytes:
    """A mono file of noise at `level`; with `every_s`, each packet's timestamp is that far from the one before."""
    out = io.BytesIO()
    noise = np.random.default_rng(5)
    with av.open(out, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate_hz, layout="mono")
        context = stream.codec_context
        size = context.frame_size or 1_024
        convert = av.AudioResampler(format=context.format.name, layout="mono", rate=rate_hz)
        packets = []
        for at in range(0, round(seconds * rate_hz), size):
            samples = (level * noise.standard_normal((1, size))).astype(np.float32)
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
            frame.sample_rate, frame.time_base, frame.pts = rate_hz, Fraction(1, rate_hz), at
            for piece in convert.resample(frame):
                packets += stream.encode(piece)
        packets += stream.encode(None)
        for index, packet in enumerate(packets):
            if every_s:
                packet.pts = packet.dts = round(index * every_s / packet.time_base)
            container.mux(packet)
    return out.getvalue()


def listen(source: object, max_duration_s: float | None = None) -> tuple[float, errors.AudioError | None]:
    """Seconds that came, and what ended them."""
    samples = 0
    try:
        for chunk in open_audio(source, limits=AudioLimits(max_duration_s=max_duration_s)):
            samples += len(chunk)
    except errors.AudioError as error:
        return samples / 16_000, error
    return samples / 16_000, None


# --- amplification ---


def test_timestamps_cannot_ask_for_hours_of_silence():
    bomb = encode(20.0, 48_000, "libopus", "matroska", every_s=59.0)
    assert len(bomb) < 100_000
    seconds, error = listen(bomb)
    assert isinstance(error, errors.CorruptAudio)
    assert "by its timestamps more is missing" in str(error)
    assert seconds < 61
    short = encode(10.0, 48_000, "libopus", "matroska", every_s=0.99)  # as pauses, 48 times what is there
    seconds, error = listen(short)
    assert isinstance(error, errors.CorruptAudio)
    assert seconds < 130


def test_pauses_that_an_encoder_did_not_send_are_no_damage():
    """Opus with DTX from a call, recorded as it came: 20 ms of every 400, for longer than any forgiven loss."""
    assert listen(encode(20.0, 48_000, "libopus", "matroska", every_s=0.4)) == (pytest.approx(400, rel=0.01), None)


def test_one_lost_minute_is_tolerated_and_two_in_a_short_file_are_not():
    def lost(count: int) -> errors.AudioError | None:
        data = io.BytesIO()
        with (
            av.open(io.BytesIO(encode(20.0, 48_000, "libopus", "matroska"))) as good,
            av.open(data, "w", format="matroska") as out,
        ):
            stream = out.add_stream_from_template(good.streams.audio[0])
            for index, packet in enumerate(good.demux(audio=0)):
                if packet.dts is not None:
                    packet.pts += round(min(index // 100, count) * 30 / packet.time_base)
                    packet.dts, packet.stream = packet.pts, stream
                    out.mux(packet)
        return listen(data.getvalue())[1]

    assert lost(2) is None
    assert isinstance(lost(4), errors.CorruptAudio)


@pytest.mark.parametrize(("codec", "kind"), [("flac", "flac"), ("libopus", "ogg")])
def test_silence_in_a_few_bytes_stops_at_the_limit_in_bounded_memory(codec, kind):
    """Twenty minutes that the header does not announce; the limit is one."""
    rate_hz = 48_000
    if kind == "flac":
        data = bytearray(encode(1_200.0, rate_hz, codec, kind))
        data[21] &= 0xF0  # the number of samples, 36 bits
        data[22:26] = bytes(4)
    else:
        data = bytearray(encode(60.0, rate_hz, codec, kind) * 20)
    assert len(data) < 1_200 * 1_000
    process = psutil.Process()
    resident = process.memory_info().rss
    tracemalloc.start()
    seconds, error = listen(bytes(data), 60.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(error, errors.AudioTooLong)
    assert 58 <= seconds <= 60
    assert peak < 5e6
    assert process.memory_info().rss - resident < 50e6


def wav(channels: int, rate_hz: int, seconds: float) -> bytes:
    body = bytes(2 * channels * round(rate_hz * seconds))
    fmt = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, channels, rate_hz, 2 * channels * rate_hz, 2 * channels, 16)
    return (
        struct.pack("<4sI4s", b"RIFF", len(body) + 36, b"WAVE") + fmt + struct.pack("<4sI", b"data", len(body)) + body
    )


def test_too_many_channels_and_too_high_rates_are_refused():
    assert len(read_audio(wav(64, 16_000, 0.1))) == 1_600
    with pytest.raises(errors.UnsupportedAudio, match="65 channels came"):
        read_audio(wav(65, 16_000, 0.1))
    for rate_hz in (192_000, 384_000):
        assert len(read_audio(wav(1, rate_hz, 0.1))) == 1_600
    with pytest.raises(errors.UnsupportedAudio, match="384001 Hz"):
        read_audio(wav(1, 384_001, 0.1))
    flac = encode(0.1, 655_350, "flac", "flac")
    with pytest.raises(errors.UnsupportedAudio, match="655350 Hz"):
        read_audio(flac)


# --- uploads under way ---


class Upload(SpoolReader):
    """A server's spool, read while it fills. `drained` is set when a read finds it past its first 64 KiB."""

    seekable_when_read = True

    def __init__(self, spool: Spool) -> None:
        super().__init__(spool)
        self.drained = threading.Event()

    def readinto(self, buffer: WriteableBuffer) -> int:
        if self.tell() > 65_536 - 5_000:
            self.drained.set()
        return super().readinto(buffer)


class Pipe(io.RawIOBase):
    """Cannot seek, ever; breaks off after `breaks_at` bytes if wanted."""

    def __init__(self, data: bytes, breaks_at: int | None = None) -> None:
        self._data, self._breaks_at = io.BytesIO(data), breaks_at

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if self._breaks_at is not None and self._data.tell() >= self._breaks_at:
            raise ConnectionResetError("peer went away")
        return self._data.read(min(size, 5_000))


@pytest.fixture
def m4a() -> bytes:
    """Its index is last, and its first 64 KiB are not all of it."""
    data = encode(20.0, 44_100, "aac", "ipod", level=0.1)
    assert data.index(b"mdat") < data.index(b"moov")
    assert len(data) > 150_000
    return data


@pytest.fixture
def copies(monkeypatch) -> Iterator[list[object]]:
    """The temporary files that were opened."""
    opened: list[object] = []
    real = tempfile.TemporaryFile

    def counted(*args: object, **options: object) -> object:
        opened.append(real(*args, **options))
        return opened[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", counted)
    yield opened
    for file in opened:
        file.close()


def arriving(data: bytes, reader: Upload, *, breaks: bool = False) -> threading.Thread:
    """Send `data` from another thread, what is behind 70 000 bytes only when the reader waits for it."""
    spool = reader._spool

    def send() -> None:
        for at in range(0, len(data), 10_000):
            if at == 70_000:
                assert reader.drained.wait(120)
            spool.append(memoryview(data)[at : at + 10_000])
        if breaks:
            spool.fail("the upload broke off")
        else:
            spool.end()

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_an_upload_in_progress_is_not_copied_for_a_seek(m4a, copies):
    want = read_audio(m4a)
    reader = Upload(Spool(len(m4a)))
    assert not reader.seekable()
    sender = arriving(m4a, reader)
    np.testing.assert_array_equal(read_audio(reader), want)
    sender.join(60)
    assert not copies
    np.testing.assert_array_equal(read_audio(Pipe(m4a)), want)
    assert len(copies) == 1, "what will never seek is copied"


def test_an_upload_is_read_from_its_position(m4a, copies):
    spool = Spool(len(m4a) + 9)
    reader = Upload(spool)
    spool.append(memoryview(b"a preface"))
    assert reader.read(9) == b"a preface"
    sender = arriving(m4a, reader)
    np.testing.assert_array_equal(read_audio(reader), read_audio(m4a))
    sender.join(60)
    assert not copies


def test_waiting_for_the_end_keeps_the_byte_limit(m4a, copies):
    for source in (Upload(Spool(len(m4a))), Pipe(m4a)):
        sender = arriving(m4a, source) if isinstance(source, Upload) else None
        with pytest.raises(errors.AudioTooLarge):
            read_audio(source, limits=AudioLimits(max_bytes=len(m4a) - 1))
        if sender:
            sender.join(60)
    reader = Upload(Spool(len(m4a)))
    sender = arriving(m4a, reader)
    assert len(read_audio(reader, limits=AudioLimits(max_bytes=len(m4a))))
    sender.join(60)


def test_the_error_of_an_upload_truncated_before_its_index(m4a):
    reader = Upload(Spool(len(m4a)))
    sender = arriving(m4a[:100_000], reader, breaks=True)
    with pytest.raises(errors.SourceNotFound, match="the upload broke off"):
        read_audio(reader)
    sender.join(60)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.95])
@pytest.mark.parametrize(
    ("codec", "kind"),
    [("pcm_s16le", "wav"), ("flac", "flac"), ("libmp3lame", "mp3"), ("libopus", "ogg"), ("libopus", "webm")],
)
@pytest.mark.repeats(share={0.2, 0.95}, codec={"pcm_s16le", "libmp3lame", "libopus"})
def test_a_truncated_stream_is_an_error_and_prints_nothing(capfd, codec, kind, share):
    data = encode(30.0, 48_000, codec, kind, level=0.1)
    seconds, error = listen(Pipe(data, round(share * len(data))))
    assert isinstance(error, errors.SourceNotFound)
    assert "peer went away" in str(error)
    assert seconds >= max(0.0, 30 * share - 10)
    assert len(read_audio(data)) >= 30 * 16_000, "the next input on this thread hears nothing of it"
    assert capfd.readouterr() == ("", "")


def test_the_error_of_a_file_closed_while_it_is_read(capfd):
    source = io.BytesIO(encode(30.0, 44_100, "aac", "ipod", level=0.1))
    with open_audio(source) as stream:
        next(stream)
        source.close()
        with pytest.raises(errors.SourceNotFound, match="stopped being readable"):
            list(stream)
    assert capfd.readouterr() == ("", "")
