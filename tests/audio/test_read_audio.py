"""Any audio in: every container, every kind of source, every way to be bad. Media is written with PyAV."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import threading
import tracemalloc
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve import errors
from asr_serve.audio import CHUNK_SAMPLES, AudioLimits, Resampler, open_audio, read_audio
from asr_serve.audio.media_reader import GapDetector
from asr_serve.units import resampled_samples

LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1"}


def write(
    path: Path, samples: np.ndarray, rate_hz: int, codec: str, kind: str, options: dict[str, str] | None = None
) -> bytes:
    """Encode (channels, n) float32 and return the file."""
    layout = LAYOUTS[len(samples)]
    with av.open(str(path), "w", format=kind, container_options=options or {}) as container:
        stream = container.add_stream(codec, rate=rate_hz, layout=layout)
        context = stream.codec_context
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=layout)
        frame.sample_rate, frame.time_base, frame.pts = rate_hz, Fraction(1, rate_hz), 0
        convert = av.AudioResampler(format=context.format.name, layout=layout, rate=rate_hz, frame_size=1_024)
        fifo = av.AudioFifo()
        for piece in [*convert.resample(frame), *convert.resample(None)]:
            fifo.write(piece)
        size = context.frame_size or 1_024
        while (piece := fifo.read(size, partial=True)) is not None:
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return path.read_bytes()


def tone(seconds: float, rate_hz: int, channels: int = 1, click_s: float | None = None) -> np.ndarray:
    """A quiet 300 Hz sine, a loud click on it if wanted, a little different in each channel."""
    n = round(seconds * rate_hz)
    one = 0.1 * np.sin(2 * np.pi * 300 * np.arange(n) / rate_hz)
    if click_s is not None:
        one[round(click_s * rate_hz)] += 0.8
    return np.stack([one * (1 - 0.1 * c) for c in range(channels)]).astype(np.float32)


def wav(seconds: float = 1.0, rate_hz: int = 16_000, *, announced: int | None = None, extra: bytes = b"") -> bytes:
    """A 16-bit mono WAV made by hand, its data size as `announced`."""
    body = (tone(seconds, rate_hz)[0] * 32_767).astype("<i2").tobytes()
    size = len(body) if announced is None else announced
    fmt = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate_hz, 2 * rate_hz, 2, 16)
    head = struct.pack("<4sI4s", b"RIFF", (size + 36) & 0xFFFFFFFF, b"WAVE")
    return head + fmt + extra + struct.pack("<4sI", b"data", size) + body


class Pipe(io.RawIOBase):
    """A stream that cannot seek and gives short reads, and counts what was taken."""

    def __init__(self, data: bytes, endless: bool = False) -> None:
        self._data, self._endless, self.taken = io.BytesIO(data), endless, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def seek(self, *_: object) -> int:
        raise io.UnsupportedOperation("seek")

    tell = seek

    def read(self, size: int = -1) -> bytes:
        piece = self._data.read(min(size, 5_000))
        if not piece and self._endless:
            piece = bytes(min(size, 5_000))
        self.taken += len(piece)
        return piece


def expected(samples: np.ndarray, rate_hz: int) -> np.ndarray:
    resampler = Resampler(rate_hz)
    return np.concatenate([resampler.resample(samples.mean(axis=0, dtype=np.float32)), resampler.finish()])


# --- round trips ---

LOSSLESS = {
    "wav-u8": ("wav", "pcm_u8", 1 / 120),
    "wav-s16": ("wav", "pcm_s16le", 1e-4),
    "wav-s24": ("wav", "pcm_s24le", 1e-5),
    "wav-s32": ("wav", "pcm_s32le", 1e-5),
    "wav-f32": ("wav", "pcm_f32le", 1e-6),
    "wav-f64": ("wav", "pcm_f64le", 1e-6),
    "flac": ("flac", "flac", 1e-4),
    "alac": ("ipod", "alac", 1e-4),
    "aiff": ("aiff", "pcm_s16be", 1e-4),
    "mka-flac": ("matroska", "flac", 1e-4),
}
LOSSY = {
    "mp3": ("mp3", "libmp3lame", 44_100),
    "mp3-22k": ("mp3", "libmp3lame", 22_050),
    "m4a": ("ipod", "aac", 44_100),
    "m4a-faststart": ("mp4", "aac", 16_000),
    "ogg-opus": ("ogg", "libopus", 48_000),
    "webm-opus": ("webm", "libopus", 48_000),
}


@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_containers_are_decoded_exactly(tmp_path, name, channels):
    kind, codec, tolerance = LOSSLESS[name]
    samples = tone(1.3, 22_050, channels, click_s=0.7)
    out = read_audio(write(tmp_path / "x", samples, 22_050, codec, kind))
    np.testing.assert_allclose(out, expected(samples, 22_050), atol=tolerance)


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000])
@pytest.mark.parametrize("name", ["wav-s16", "flac"])
def test_every_rate_keeps_length_and_place(tmp_path, name, rate_hz):
    kind, codec, _ = LOSSLESS[name]
    samples = tone(1.2345, rate_hz, 2, click_s=0.9)
    out = read_audio(write(tmp_path / "x", samples, rate_hz, codec, kind))
    assert len(out) == resampled_samples(samples.shape[1], rate_hz)
    assert abs(int(out.argmax()) - 0.9 * 16_000) <= 1


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("name", LOSSY)
def test_lossy_containers_keep_length_and_place(tmp_path, name, channels):
    kind, codec, rate_hz = LOSSY[name]
    options = {"movflags": "faststart"} if "faststart" in name else {}
    data = write(tmp_path / "x", tone(2.0, rate_hz, channels, click_s=1.25), rate_hz, codec, kind, options)
    for source in (data, Pipe(data)):
        with open_audio(source) as stream:
            hint, out = stream.duration_hint_samples, np.concatenate(list(stream))
        # The last frame of an encoder is padded; not every container says by how much.
        assert 2.0 * 16_000 <= len(out) <= 2.0 * 16_000 + 2_048 * 16_000 / rate_hz
        assert abs(int(np.abs(out).argmax()) - 1.25 * 16_000) <= 32
        assert np.sqrt(np.mean(out[4_000:16_000] ** 2)) == pytest.approx(
            np.sqrt(np.mean(tone(2, 16_000, channels).mean(axis=0) ** 2)), rel=0.1
        )
        assert hint is None or abs(hint - 32_000) < 2_000


def test_the_sample_count_is_the_decoders(tmp_path):
    data = write(tmp_path / "x", tone(3.1, 44_100), 44_100, "libmp3lame", "mp3")
    with av.open(io.BytesIO(data)) as container:
        decoded = sum(frame.samples for frame in container.decode(audio=0))
    assert len(read_audio(data)) == resampled_samples(decoded, 44_100)


def test_every_kind_of_source_gives_the_same_samples(tmp_path, packaged_speech):
    path = packaged_speech / "beckett.wav"
    data = path.read_bytes()
    whole = read_audio(path)
    assert np.abs(whole).max() > 0.05
    with open(path, "rb") as file:
        sources = [str(path), data, bytearray(data), memoryview(data), io.BytesIO(data), file, Pipe(data)]
        for source in sources:
            np.testing.assert_array_equal(read_audio(source), whole)
        assert not file.closed
    np.testing.assert_array_equal(read_audio(whole), whole)
    flac = write(tmp_path / "x.flac", whole[None, :], 16_000, "flac", "flac")
    np.testing.assert_allclose(read_audio(flac), whole, atol=1e-4)


def test_a_stream_is_read_from_its_position():
    file = io.BytesIO(b"a preface" + wav())
    file.seek(len(b"a preface"))
    assert len(read_audio(file)) == 16_000


def test_an_m4a_with_its_index_last_is_read_from_a_pipe(tmp_path):
    data = write(tmp_path / "x", tone(2, 16_000), 16_000, "aac", "ipod")
    assert data.index(b"mdat") < data.index(b"moov")
    np.testing.assert_array_equal(read_audio(Pipe(data)), read_audio(data))
    with pytest.raises(errors.AudioTooLarge):
        read_audio(Pipe(data), limits=AudioLimits(max_bytes=len(data) - 1))


def test_a_named_pipe_is_a_path(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_bytes, args=(wav(2.0),))
    writer.start()
    assert len(read_audio(fifo)) == 32_000
    writer.join(60)


def test_audio_of_a_video_file(tmp_path):
    path = tmp_path / "film.mkv"
    with av.open(str(path), "w") as container:
        video = container.add_stream("mpeg4", rate=10, width=32, height=32, pix_fmt="yuv420p")
        audio = container.add_stream("pcm_s16le", rate=16_000, layout="mono")
        for _ in range(30):
            container.mux(video.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8))))
        container.mux(video.encode(None))
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), np.int16), format="s16", layout="mono")
        frame.sample_rate = 16_000
        container.mux(audio.encode(frame))
    assert len(read_audio(path)) == 16_000  # shorter than the picture, and whole all the same


@pytest.mark.parametrize("size", [0, 2**32 - 1, 2**32 - 37, 2**31, 2**31 - 1, 2**31 - 37, 0x7FFFF000])
def test_a_wav_without_a_length(size):
    data = wav(1.5, announced=size)
    for source in (data, Pipe(data)):
        assert len(read_audio(source, limits=AudioLimits(max_duration_s=2))) == 24_000


@pytest.mark.parametrize("announced", [32_000, 90_000])
def test_an_rf64_wav_has_its_length_in_ds64(announced):
    fmt = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, 16_000, 32_000, 2, 16)
    ds64 = struct.pack("<4sIQQQI", b"ds64", 28, announced + 72, announced, announced // 2, 0)
    data = b"RF64\xff\xff\xff\xffWAVE" + ds64 + fmt + b"data\xff\xff\xff\xff" + bytes(32_000)
    with contextlib.nullcontext() if announced == 32_000 else pytest.raises(errors.TruncatedAudio):
        assert len(read_audio(data)) == 16_000


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"LIST\x05\0\0\0hello\0", b"LIST\x04\0\0\0tail"), (b"LIST\x12\0\0\0INFOINAM\x05\0\0\0caf\xe9\0\0", b"")],
    ids=["chunks before and after", "a title in Latin-1"],
)
def test_a_wav_with_other_chunks(before: bytes, after: bytes):
    assert len(read_audio(wav(extra=before) + after)) == 16_000


def test_rate_and_channels_may_change_in_a_file(tmp_path):
    first = write(tmp_path / "a", tone(1.0, 44_100, 2), 44_100, "aac", "adts")
    second = write(tmp_path / "b", tone(1.0, 16_000, 1, click_s=0.5), 16_000, "aac", "adts")
    out = read_audio(first + second)
    counts = [sum(f.samples for f in av.open(io.BytesIO(part)).decode(audio=0)) for part in (first, second)]
    exact = Fraction(counts[0] * 16_000, 44_100) + counts[1]
    assert abs(len(out) - exact) <= 1_100  # the decoder may lose one frame where the stream changes
    assert int(np.abs(out).argmax()) == pytest.approx(counts[0] * 16_000 / 44_100 + 8_000 + 1_024, abs=1_100)


def test_joined_opus_files(tmp_path):
    part = write(tmp_path / "a", tone(2.0, 48_000), 48_000, "libopus", "ogg")
    assert len(read_audio(part + part)) == pytest.approx(64_000, abs=700)


# --- arrays ---


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([8_000, 11_025, 16_000, 48_000]),
    st.lists(st.integers(-32_768, 32_767), min_size=1, max_size=300),
    st.integers(1, 4),
)
def test_array_types_and_shapes_agree(rate_hz, values, channels):
    ints = np.array(values, np.int16)
    floats = (ints / 32_768).astype(np.float32)
    want = read_audio((floats, rate_hz))
    assert len(want) == resampled_samples(len(ints), rate_hz)
    assert want.dtype == np.float32
    same = [ints, floats.astype(np.float64), ints.astype(np.int32) << 16, ints.astype(">i2"), floats[::-1][::-1]]
    if len(ints) > 8:
        wide = np.repeat(ints[:, None], channels, axis=1)
        same += [wide, wide.T, np.asfortranarray(wide)]
    for array in same:
        np.testing.assert_allclose(read_audio((array, rate_hz)), want, atol=1e-6)


def test_uint8_is_centred_on_128():
    np.testing.assert_array_equal(read_audio(np.array([0, 128, 255], np.uint8)), np.float32([-1, 0, 127 / 128]))


def test_channels_are_averaged():
    np.testing.assert_allclose(read_audio(np.tile(np.float32([[0.5, -0.1]]), (100, 1))), np.full(100, 0.2), atol=1e-7)


def test_a_16_khz_mono_array_is_returned_as_views(rng):
    samples = rng.uniform(-1, 1, 3 * CHUNK_SAMPLES + 7).astype(np.float32)
    chunks = list(open_audio(samples))
    assert [len(chunk) for chunk in chunks] == [CHUNK_SAMPLES] * 3 + [7]
    assert all(np.shares_memory(chunk, samples) for chunk in chunks)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60_000), st.sampled_from([8_000, 16_000, 44_100]))
def test_chunks_are_even_contiguous_and_never_empty(samples, rate_hz):
    chunks = list(open_audio((np.zeros(samples, np.int16), rate_hz)))
    assert all(len(chunk) == CHUNK_SAMPLES for chunk in chunks[:-1])
    assert 0 < len(chunks[-1]) <= CHUNK_SAMPLES
    assert all(c.flags.c_contiguous and c.dtype == np.float32 and c.ndim == 1 for c in chunks)
    assert sum(map(len, chunks)) == resampled_samples(samples, rate_hz)


def test_values_a_little_over_full_scale_are_clipped():
    loud = np.float32([1.5, -1.5, 0.5])
    np.testing.assert_array_equal(read_audio(loud), np.float32([1, -1, 0.5]))
    np.testing.assert_array_equal(loud, np.float32([1.5, -1.5, 0.5]))
    square = np.where(np.arange(8_000) % 100 < 50, 1.0, -1.0).astype(np.float32)  # overshoots when resampled
    assert np.abs(read_audio((square, 8_000))).max() == 1.0


BAD_ARRAYS = {
    "nan": (np.float32([0, np.nan]), errors.UnsupportedAudio, "nan"),
    "infinite": (np.float32([0, np.inf]), errors.UnsupportedAudio, "inf"),
    "beyond float32": (np.array([0, 1e300]), errors.UnsupportedAudio, "inf"),
    "integers in floats": (np.float32([0, 20_000]), errors.UnsupportedAudio, "32768"),
    "late nan": (np.append(np.zeros(50_000, np.float32), np.nan), errors.UnsupportedAudio, "nan"),
    "no samples": (np.zeros(0, np.float32), errors.EmptyAudio, "0 samples"),
    "no samples, two channels": (np.zeros((0, 2), np.float32), errors.EmptyAudio, "0 samples"),
    "no channels": (np.zeros((1_000, 0), np.float32), errors.UnsupportedAudio, "0 channels"),
    "square": (np.zeros((4, 4), np.float32), errors.UnsupportedAudio, "two ways"),
    "two long axes": (np.zeros((100, 100), np.float32), errors.UnsupportedAudio, "two ways"),
    "three axes": (np.zeros((2, 2, 2), np.float32), errors.UnsupportedAudio, "shape"),
    "no axis": (np.zeros((), np.float32), errors.UnsupportedAudio, "shape"),
    "int64": (np.zeros(10, np.int64), errors.UnsupportedAudio, "int64"),
    "bool": (np.zeros(10, bool), errors.UnsupportedAudio, "bool"),
    "complex": (np.zeros(10, np.complex64), errors.UnsupportedAudio, "complex"),
    "objects": (np.array([None, None]), errors.UnsupportedAudio, "object"),
    "rate 0": ((np.zeros(10, np.float32), 0), errors.UnsupportedAudio, "0 Hz"),
    "negative rate": ((np.zeros(10, np.float32), -16_000), errors.UnsupportedAudio, "Hz"),
    "rate as text": ((np.zeros(10, np.float32), "16000"), errors.UnsupportedAudio, "tuple"),
    "rate as float": ((np.zeros(10, np.float32), 16e3), errors.UnsupportedAudio, "tuple"),
    "swapped": ((16_000, np.zeros(10, np.float32)), errors.UnsupportedAudio, "tuple"),
    "list": ([0.0, 0.1], errors.UnsupportedAudio, "list"),
    "none": (None, errors.UnsupportedAudio, "NoneType"),
    "number": (7, errors.UnsupportedAudio, "int"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_bad_arrays(name):
    source, kind, match = BAD_ARRAYS[name]
    with pytest.raises(kind, match=match) as refused:
        read_audio(source)
    assert type(refused.value) is kind
    assert refused.value.allowed
    assert refused.value.todo


# --- bad files ---


def _encoded(tmp: Path, codec: str, kind: str, rate_hz: int = 16_000, **options: str) -> bytes:
    return write(tmp / "good", tone(3.0, rate_hz), rate_hz, codec, kind, options)


def _picture(tmp: Path, codec: str, kind: str) -> bytes:
    with av.open(str(tmp / "picture"), "w", format=kind) as container:
        stream = container.add_stream(codec, rate=10, width=32, height=32)
        stream.pix_fmt = "rgb24" if codec == "png" else "yuv420p"
        for _ in range(1 if codec == "png" else 20):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8))))
        container.mux(stream.encode(None))
    return (tmp / "picture").read_bytes()


def _at(data: bytes, offset: int, piece: bytes) -> bytes:
    return data[:offset] + piece + data[offset + len(piece) :]


def _flac_header(data: bytes) -> bytes:
    """Its first block alone, marked as the last, announcing no number of samples."""
    return _at(_at(data, 4, b"\x80"), 22, bytes(4))[:42]


def _cut(data: bytes, share: float = 0.6) -> bytes:
    return data[: int(len(data) * share)]


def _noise(n: int) -> bytes:
    return np.random.default_rng(3).bytes(n)


WAV_TAG, WAV_CHANNELS, WAV_RATE = 20, 22, 24
BAD_FILES = {
    "0 bytes": (lambda t: b"", errors.EmptyAudio),
    "wav of 0 samples": (lambda t: wav(0), errors.EmptyAudio),
    "flac of 0 samples": (lambda t: _flac_header(_encoded(t, "flac", "flac")), errors.EmptyAudio),
    "random bytes": (lambda t: _noise(100_000), errors.NotAudio),
    "one byte": (lambda t: b"x", errors.NotAudio),
    "zeros": (lambda t: bytes(100_000), errors.NotAudio),
    "text": (lambda t: b"it was a dark and stormy night\n" * 50, errors.NotAudio),
    "json": (lambda t: b'{"error": "not found"}', errors.NotAudio),
    "html": (lambda t: b"<!doctype html><html><body>404</body></html>", errors.NotAudio),
    "subtitles": (lambda t: b"1\n00:00:01,000 --> 00:00:02,000\nhello\n\n" * 9, errors.NotAudio),
    "an image": (lambda t: _picture(t, "png", "image2pipe"), errors.NotAudio),
    "a film without sound": (lambda t: _picture(t, "mpeg4", "matroska"), errors.NotAudio),
    "wav of an unknown codec": (lambda t: _at(wav(), WAV_TAG, b"\x34\x12"), errors.UnsupportedAudio),
    "wav of 0 channels": (lambda t: _at(wav(), WAV_CHANNELS, b"\0\0"), errors.UnsupportedAudio),
    "wav at 0 Hz": (lambda t: _at(wav(), WAV_RATE, bytes(4)), errors.UnsupportedAudio),
    "wav at 4 GHz": (lambda t: _at(wav(), WAV_RATE, b"\xff" * 4), errors.UnsupportedAudio),
    "wav of 64-bit integers": (lambda t: _at(_at(wav(), 32, b"\x08"), 34, b"\x40"), errors.UnsupportedAudio),
    "cut wav": (lambda t: _cut(wav()), errors.TruncatedAudio),
    "cut wav header": (lambda t: wav()[:30], errors.TruncatedAudio),
    "wav of 25 h": (lambda t: wav(announced=25 * 3_600 * 32_000), errors.TruncatedAudio),
    "cut flac": (lambda t: _cut(_encoded(t, "flac", "flac")), errors.TruncatedAudio),
    "cut flac header": (lambda t: _encoded(t, "flac", "flac")[:20], errors.TruncatedAudio),
    "cut aiff": (lambda t: _cut(_encoded(t, "pcm_s16be", "aiff")), errors.TruncatedAudio),
    "cut mp3": (lambda t: _cut(_encoded(t, "libmp3lame", "mp3")), errors.TruncatedAudio),
    "cut webm": (lambda t: _cut(_encoded(t, "libopus", "webm", 48_000)), errors.TruncatedAudio),
    "cut ogg header": (lambda t: _encoded(t, "libopus", "ogg", 48_000)[:60], errors.TruncatedAudio),
    "m4a without moov": (lambda t: _cut(_encoded(t, "aac", "ipod")), errors.TruncatedAudio),
    "m4a cut in mdat": (lambda t: _cut(_encoded(t, "aac", "ipod", movflags="faststart"), 0.7), errors.TruncatedAudio),
    "flac with every frame wrong": (lambda t: _wreck(_encoded(t, "flac", "flac"), 9_000, 60), errors.AudioError),
    "mp3 with most frames wrong": (lambda t: _wreck(_encoded(t, "libmp3lame", "mp3"), 600, 25), errors.AudioError),
    "m4a with most packets wrong": (lambda t: _wreck(_encoded(t, "aac", "ipod"), 600, 20, 0.9), errors.CorruptAudio),
    "wav of nan": (lambda t: _at(_encoded(t, "pcm_f32le", "wav"), 5_002, b"\xff" * 8), errors.CorruptAudio),
}


def _wreck(data: bytes, start: int, step: int, until: float = 1.0) -> bytes:
    bad = bytearray(data)
    for at in range(start, int(len(bad) * until), step):
        bad[at] ^= 0x5A
    return bytes(bad)


@pytest.mark.parametrize("source", ["bytes", "path", "pipe"])
@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(tmp_path, capfd, name, source):
    make, kind = BAD_FILES[name]
    data = make(tmp_path)
    path = tmp_path / "bad"
    path.write_bytes(data)
    with pytest.raises(kind) as refused:
        read_audio({"bytes": data, "path": path, "pipe": Pipe(data)}[source])
    assert kind is errors.AudioError or type(refused.value) is kind
    assert refused.value.came
    assert refused.value.allowed
    assert refused.value.todo
    assert capfd.readouterr() == ("", "")


BAD_PATHS = {
    "missing": "no/such/file.wav",
    "empty": "",
    "folder": ".",
    "null byte": "a\0b.wav",
    "too long": "x" * 5_000,
    "http": "http://127.0.0.1:9/x.wav",
    "https": "https://example.com/x.mp3",
    "file url": "file:///etc/hostname",
    "concat": "concat:a.wav|b.wav",
    "pipe": "pipe:0",
    "device": "lavfi:sine",
    "file of a path": "file:{path}",
    "concat of a path": "concat:{path}",
    "subfile of a path": "subfile,,start,0,end,0,,:{path}",
    "cache of a path": "cache:{path}",
}


@pytest.mark.parametrize("name", BAD_PATHS)
def test_bad_paths(tmp_path, name):
    """Protocols in a path do not reach ffmpeg, before an existing file neither."""
    path = tmp_path / "x.wav"
    path.write_bytes(wav())
    with pytest.raises(errors.SourceNotFound):
        open_audio(BAD_PATHS[name].format(path=path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path):
    path = tmp_path / "x.wav"
    path.write_bytes(wav())
    path.chmod(0)
    with pytest.raises(errors.SourceNotFound, match="may not be read"):
        open_audio(path)


@pytest.mark.parametrize("kind", ["concat", "hls", "hls-data", "sdp", "dash"])
def test_playlists_open_nothing(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    Path("x.wav").write_bytes(wav())
    Path("x.ts").write_bytes(_encoded(tmp_path, "aac", "mpegts", 44_100))
    text = {
        "concat": "ffconcat version 1.0\nfile x.wav\n",
        "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:3,\nx.ts\n#EXT-X-ENDLIST\n",
        "hls-data": f"#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:3,\nfile://{tmp_path}/x.ts\n#EXT-X-ENDLIST\n",
        "sdp": "v=0\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\nm=audio 5004 RTP/AVP 0\r\n",
        "dash": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><Period><AdaptationSet>'
        "<Representation><BaseURL>x.wav</BaseURL></Representation></AdaptationSet></Period></MPD>",
    }[kind]
    name = {"hls": "x.m3u8", "hls-data": "x.m3u8", "sdp": "x.sdp", "dash": "x.mpd"}.get(kind, "x.txt")
    Path(name).write_text(text)
    for source in (text.encode(), Path(name)):
        with pytest.raises(errors.NotAudio):
            read_audio(source)


class BreakingStream(io.RawIOBase):
    """A stream that fails after its first 70 000 bytes."""

    def __init__(self) -> None:
        self._pipe = Pipe(wav(10.0))

    def read(self, size: int = -1) -> bytes:
        if self._pipe.taken >= 70_000:
            raise ConnectionResetError("peer went away")
        return self._pipe.read(size)


BAD_STREAMS = {
    "text": (lambda: io.StringIO("RIFF"), errors.UnsupportedAudio, "binary mode"),
    "would block": (lambda: SimpleNamespace(read=lambda n: None), errors.UnsupportedAudio, "blocking"),
    "empty": (lambda: Pipe(b""), errors.EmptyAudio, "0 bytes"),
    "breaks": (BreakingStream, errors.SourceNotFound, "peer went away"),
}


@pytest.mark.parametrize("name", BAD_STREAMS)
def test_bad_streams(name):
    make, kind, match = BAD_STREAMS[name]
    with pytest.raises(kind, match=match):
        read_audio(make())


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_bytes_raise_only_audio_errors(damaged, data):
    good = damaged[data.draw(st.sampled_from(sorted(damaged)))]
    bad = bytearray(good[: data.draw(st.integers(1, len(good)))])
    for _ in range(data.draw(st.integers(0, 8))):
        piece = data.draw(st.binary(min_size=1, max_size=8))
        # Headers break in more ways than bodies: half of the damage goes there.
        reach = min(len(bad), 200) if data.draw(st.booleans()) else len(bad)
        at = data.draw(st.integers(0, reach - 1))
        bad[at : at + len(piece)] = piece
    with contextlib.suppress(errors.AudioError):
        for chunk in open_audio(bytes(bad), limits=AudioLimits(max_duration_s=60)):
            assert 0 < len(chunk) <= CHUNK_SAMPLES
            assert np.abs(chunk).max() <= 1


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("fuzz") / "x"
    forms = [("pcm_s16le", "wav"), ("flac", "flac"), ("libmp3lame", "mp3"), ("aac", "ipod"), ("libopus", "ogg")]
    forms += [("libopus", "webm"), ("pcm_s16be", "aiff"), ("pcm_s16be", "au"), ("pcm_s16le", "caf")]
    return {kind: write(path, tone(0.6, 48_000, 2), 48_000, codec, kind) for codec, kind in forms}


# --- damage that is forgiven ---


@pytest.mark.parametrize(
    ("codec", "kind"), [("aac", "ipod"), ("libopus", "webm"), ("libopus", "ogg"), ("flac", "flac")]
)
def test_a_few_bad_bytes_are_tolerated(tmp_path, codec, kind):
    rate_hz = 48_000
    samples = tone(8.0, rate_hz, click_s=7.0)
    good = write(tmp_path / "x", samples, rate_hz, codec, kind)
    whole = read_audio(good)
    out = read_audio(_at(good, len(good) // 4, b"\xff\x00\xff\x00" * 4))
    assert len(out) == pytest.approx(len(whole), abs=700)
    tail = slice(-32_000, None)
    assert abs(int(np.abs(out[tail]).argmax()) + len(out) - int(np.abs(whole[tail]).argmax()) - len(whole)) <= 32


def test_gaps_are_distinguished_from_jitter_drift_and_joins():
    gaps = GapDetector()
    assert gaps.gap_before_s(100.0, 0.02) == 0  # wherever the clock starts
    assert gaps.gap_before_s(100.02, 0.02) == 0
    assert gaps.gap_before_s(100.05, 0.02) == 0  # jitter
    assert gaps.gap_before_s(100.06, 0.02) == 0
    assert gaps.gap_before_s(100.18, 0.02) == pytest.approx(0.1)  # loss
    gaps.expected = True
    assert gaps.gap_before_s(100.22, 0.02) == pytest.approx(0.02)  # a refused packet
    assert gaps.gap_before_s(None, 0.02) == 0
    assert gaps.gap_before_s(5_000.0, 0.02) == 0  # a join forwards
    assert gaps.gap_before_s(5_000.02, 0.02) == 0
    assert gaps.gap_before_s(0.0, 0.02) == 0  # and one back
    assert gaps.gap_before_s(0.32, 0.02) == pytest.approx(0.3)
    total = sum(gaps.gap_before_s(0.34 + 0.02 * n + 0.06 * (n % 2), 0.02) for n in range(100))
    assert total <= 0.07  # jitter does not add up


# --- limits ---


def test_a_header_beyond_the_limit_is_refused_at_open():
    pipe = Pipe(wav(0.1, announced=25 * 3_600 * 32_000))
    with pytest.raises(errors.AudioTooLong, match="90000"):
        open_audio(pipe, limits=AudioLimits(max_duration_s=4 * 3_600))


@pytest.mark.parametrize(("codec", "kind"), [("flac", "flac"), ("libmp3lame", "mp3"), ("aac", "ipod")])
def test_duration_limit_by_container_header(tmp_path, codec, kind):
    data = write(tmp_path / "x", tone(5.0, 16_000), 16_000, codec, kind)
    with pytest.raises(errors.AudioTooLong):
        open_audio(data, limits=AudioLimits(max_duration_s=4))
    assert len(read_audio(data, limits=AudioLimits(max_duration_s=5.2))) >= 80_000


def test_the_duration_limit_is_exact():
    for source in (wav(1.0), np.zeros(16_000, np.float32), (np.zeros(8_000, np.int16), 8_000)):
        assert len(read_audio(source, limits=AudioLimits(max_duration_s=1.0))) == 16_000
        with pytest.raises(errors.AudioTooLong):
            read_audio(source, limits=AudioLimits(max_duration_s=0.9999))


def test_an_endless_stream_ends_at_the_limit():
    pipe = Pipe(wav(1.0, announced=0), endless=True)
    with open_audio(pipe, limits=AudioLimits(max_duration_s=10)) as stream, pytest.raises(errors.AudioTooLong):
        list(stream)
    assert pipe.taken < 15 * 32_000
    pipe = Pipe(wav(1.0, announced=0), endless=True)
    with pytest.raises(errors.AudioTooLarge):
        read_audio(pipe, limits=AudioLimits(max_bytes=200_000))
    assert pipe.taken == 200_001


def test_byte_limit_before_anything_is_decoded(tmp_path):
    data = wav(1.0)
    path = tmp_path / "x.wav"
    path.write_bytes(data)
    for source in (data, path, io.BytesIO(data), Pipe(data)):
        with pytest.raises(errors.AudioTooLarge, match=str(len(data) - 1)):
            open_audio(source, limits=AudioLimits(max_bytes=len(data) - 1))
    for source in (data, path, io.BytesIO(data), Pipe(data)):
        assert len(read_audio(source, limits=AudioLimits(max_bytes=len(data)))) == 16_000


# --- life of a stream ---


@pytest.mark.slow
def test_an_hour_streams_in_bounded_memory(tmp_path):
    path = tmp_path / "hour.wav"
    head = wav(0, 8_000, announced=3_600 * 16_000)
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(len(head) + 3_600 * 16_000)
    resident = psutil.Process().memory_info().rss
    tracemalloc.start()
    samples, most = 0, 0
    with open_audio(path) as stream:
        assert stream.duration_hint_samples == 3_600 * 16_000
        for chunk in stream:
            samples += len(chunk)
            if samples % (600 * 16_000) == 0:
                most = max(most, psutil.Process().memory_info().rss - resident)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert samples == 3_600 * 16_000
    assert peak < 4e6
    assert most < 50e6


def test_a_stream_is_single_pass_and_closes(tmp_path):
    path = tmp_path / "x.wav"
    path.write_bytes(wav(3.0))
    with open_audio(path) as stream:
        assert len(next(iter(stream))) == CHUNK_SAMPLES
        assert len(list(stream)) == 2
        assert list(stream) == []
    stream.close()
    with pytest.raises(errors.AudioError, match="closed"):
        next(iter(stream))


def test_files_are_closed_whatever_happens(tmp_path):
    good, bad, cut = tmp_path / "good", tmp_path / "bad", tmp_path / "cut"
    good.write_bytes(wav(3.0))
    bad.write_bytes(b"x" * 1_000)
    cut.write_bytes(wav(3.0)[:-1_000])
    before = psutil.Process().num_fds()
    open_audio(good).close()
    list(open_audio(good))
    with open_audio(good) as stream:
        next(iter(stream))
    with pytest.raises(errors.NotAudio):
        open_audio(bad)
    with pytest.raises(errors.TruncatedAudio):
        list(open_audio(cut))
    assert psutil.Process().num_fds() == before


def test_the_good_part_of_a_truncated_file_comes_first():
    with open_audio(wav(3.0)[:-2_000]) as stream:
        assert [len(next(stream)) for _ in range(2)] == [CHUNK_SAMPLES] * 2
        with pytest.raises(errors.TruncatedAudio, match=r"3\.000 s"):
            list(stream)


def test_two_threads_decode_two_files(tmp_path):
    forms = [("libmp3lame", "mp3", 44_100), ("flac", "flac", 48_000), ("aac", "ipod", 16_000)]
    files = [write(tmp_path / kind, tone(4.0, hz, 2), hz, codec, kind) for codec, kind, hz in forms] * 2
    alone = [read_audio(data) for data in files]
    together: dict[int, np.ndarray] = {}

    def decode(index: int) -> None:
        together[index] = read_audio(files[index])

    threads = [threading.Thread(target=decode, args=(index,)) for index in range(len(files))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for index, want in enumerate(alone):
        np.testing.assert_array_equal(together[index], want)
