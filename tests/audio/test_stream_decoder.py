"""Live audio without I/O: any cutting, exact lengths, and the samples that a file of the same bytes gives."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import struct
import wave
from collections.abc import Iterable
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.audio import read_audio
from asr_serve.audio.ogg_opus import OggPage, OggPageReader, ogg_crc
from asr_serve.audio.opus_decoder import OpusPacketDecoder
from asr_serve.audio.pcm import Pcm16Assembler, alaw_table, decode_pcm16, mulaw_table
from asr_serve.audio.stream_decoder import ENCODINGS, create_live_decoder
from asr_serve.errors import CorruptAudio, OptionError, UnsupportedAudio
from asr_serve.units import resampled_samples

DELAY_SAMPLES = 600
"""What the resampler holds back of 48 kHz, 38 ms."""


def speech(seconds: float, rate_hz: int, channels: int = 1) -> np.ndarray:
    """(channels, n) float32: a tone that swells over noise, a click at each half second; no two alike."""
    at_s = np.arange(int(seconds * rate_hz)) / rate_hz
    noise = np.random.default_rng(7).normal(0, 0.02, len(at_s))
    one = 0.3 * np.sin(2 * np.pi * (150 + 90 * at_s) * at_s) * (0.6 + 0.4 * np.sin(5 * at_s)) + noise
    one[(at_s * rate_hz).round().astype(int) % (rate_hz // 2) == 0] = 0.8
    return np.stack([one * (1 - 0.4 * channel) for channel in range(channels)]).astype(np.float32)


@functools.cache
def encoded(
    codec: str, kind: str, rate_hz: int, seconds: float = 1.3, channels: int = 1, page_us: int = 0, **options: str
) -> bytes:
    out = io.BytesIO()
    layout = "mono" if channels == 1 else "stereo"
    paging = {"page_duration": str(page_us)} if page_us else {}
    with av.open(out, "w", format=kind, options=paging) as container:
        stream = container.add_stream(codec, rate=rate_hz, layout=layout, options=options)
        frame = av.AudioFrame.from_ndarray(speech(seconds, rate_hz, channels), format="fltp", layout=layout)
        frame.sample_rate, frame.time_base, frame.pts = rate_hz, Fraction(1, rate_hz), 0
        convert = av.AudioResampler(
            stream.codec_context.format, layout, rate_hz, frame_size=stream.codec_context.frame_size
        )
        for piece in [*convert.resample(frame), *convert.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return out.getvalue()


def opus(seconds: float = 1.3, channels: int = 1, page_us: int = 0, **options: str) -> bytes:
    return encoded("libopus", "ogg", 48_000, seconds, channels, page_us, **options)


def pages(stream: bytes) -> list[OggPage]:
    return list(OggPageReader().append_bytes(stream))


def written(page: OggPage) -> bytes:
    """The page's bytes."""
    lengths = b""
    for part, ends in page.parts:
        full, rest = divmod(len(part), 255)
        lengths += b"\xff" * full + (bytes([rest]) if ends else b"")
    head = struct.pack("<4sBBqII", b"OggS", 0, page.flags, page.position, page.stream, page.number)
    tail = bytes([len(lengths)]) + lengths + b"".join(part for part, _ in page.parts)
    return head + struct.pack("<I", ogg_crc(head + bytes(4) + tail)) + tail


def again(stream: Iterable[OggPage]) -> bytes:
    return b"".join(map(written, stream))


def changed(page: OggPage, **fields: object) -> OggPage:
    return OggPage(**({name: getattr(page, name) for name in page.__struct_fields__} | fields))  # type: ignore[arg-type]


def heard(encoding: str, rate_hz: int | None, pieces: Iterable[bytes | memoryview]) -> np.ndarray:
    ears = create_live_decoder(encoding, rate_hz)
    return np.concatenate([*map(ears.decode, pieces), ears.finish()])


def cut(data: bytes, cuts: Iterable[int]) -> list[memoryview]:
    edges = [0, *sorted(at for at in cuts if at <= len(data)), len(data)]
    return [memoryview(data)[a:b] for a, b in itertools.pairwise(edges)]


# --- 16-bit samples and the telephone's ------------------------------------------------------------------


@given(st.binary(max_size=200), st.lists(st.integers(0, 200)))
def test_frames_may_be_cut_anywhere(data, cuts):
    pcm, parts, at = Pcm16Assembler(), [], 0
    for end in [*sorted(end for end in cuts if end <= len(data)), len(data)]:
        parts.append(bytes(pcm.take_whole_samples(data[at:end])))
        assert len(parts[-1]) % 2 == 0
        at = end
    assert b"".join(parts) == data[: len(data) // 2 * 2]
    assert pcm.has_pending_byte == bool(len(data) % 2)


def test_samples_are_little_endian_and_full_scale_is_one():
    got = decode_pcm16(b"\x00\x80\xff\x7f\x00\x00\x00\x40")
    assert got.dtype == np.float32
    assert got.tolist() == [-1.0, 32_767 / 32_768, 0.0, 0.5]


@pytest.mark.parametrize(("name", "table"), [("pcm_mulaw", mulaw_table()), ("pcm_alaw", alaw_table())])
def test_all_codes_of_g711_are_those_of_ffmpeg(name, table):
    codec = av.CodecContext.create(name, "r")
    codec.sample_rate, codec.layout = 8_000, "mono"
    (frame,) = codec.decode(av.Packet(bytes(range(256))))
    assert table.dtype == np.float32
    np.testing.assert_array_equal(table, frame.to_ndarray().ravel() / np.float32(32_768))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([("s16le", 2), ("mulaw", 1), ("alaw", 1)]),
    st.sampled_from([8_000, 11_025, 16_000, 22_050, 24_000, 44_100, 48_000]),
    st.binary(max_size=4_000),
    st.lists(st.integers(0, 4_000), max_size=12),
)
def test_chunks_change_no_sample_and_their_number_is_exact(kind, rate_hz, data, cuts):
    encoding, sample_bytes = kind
    whole = heard(encoding, rate_hz, [data])
    assert whole.dtype == np.float32
    assert len(whole) == resampled_samples(len(data) // sample_bytes, rate_hz)
    assert np.abs(whole).max(initial=0) <= 1
    np.testing.assert_array_equal(heard(encoding, rate_hz, cut(data, cuts)), whole)


@pytest.mark.parametrize(("encoding", "codec"), [("s16le", "pcm_s16le"), ("mulaw", "pcm_mulaw"), ("alaw", "pcm_alaw")])
@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 44_100])
def test_a_wav_of_the_same_bytes_gives_the_same_samples(encoding, codec, rate_hz):
    file = encoded(codec, "wav", rate_hz)
    raw = file[file.index(b"data") + 8 :]
    np.testing.assert_array_equal(heard(encoding, rate_hz, [raw]), read_audio(file))


def test_the_input_buffer_may_be_overwritten():
    for encoding in ("s16le", "mulaw"):
        buffer = bytearray(b"\1\2" * 100)
        got = create_live_decoder(encoding, 16_000).decode(memoryview(buffer))
        before = got.copy()
        buffer[:] = bytes(200)
        np.testing.assert_array_equal(got, before)


def test_rates_that_nobody_told():
    assert [create_live_decoder(encoding).rate_hz for encoding in ENCODINGS] == [16_000, 8_000, 8_000, 48_000, 48_000]


@pytest.mark.parametrize(
    ("encoding", "rate_hz", "param", "says"),
    [
        ("s16", None, "encoding", "did you mean 's16le'"),
        ("ulaw", None, "encoding", "did you mean 'mulaw'"),
        ("", None, "encoding", "one of: s16le, mulaw, alaw, opus, ogg"),
        ("x" * 10_000, None, "encoding", "one of"),
        ("s16le", 7_999, "rate", "8000 to 48000"),
        ("mulaw", 48_001, "rate", "8000 to 48000"),
        ("opus", 48_000, "rate", "leave it out"),
        ("ogg", 16_000, "rate", "leave it out"),
    ],
)
def test_invalid_options_are_refused(encoding, rate_hz, param, says):
    with pytest.raises(OptionError, match=says) as refused:
        create_live_decoder(encoding, rate_hz)
    assert refused.value.param == param
    assert len(str(refused.value)) < 300


# --- Opus, a packet a call -------------------------------------------------------------------------------


def packets(stream: bytes) -> list[bytes]:
    return [part for page in pages(stream)[2:] for part, _ in page.parts]


@pytest.mark.parametrize("duration", ["2.5", "10", "20", "60"])
@pytest.mark.parametrize("channels", [1, 2])
def test_each_packet_gives_its_samples_at_once(duration, channels):
    ears = create_live_decoder("opus")
    sent = packets(opus(channels=channels, frame_duration=duration, application="audio"))
    came = [len(ears.decode(packet)) for packet in sent]
    total = sum(came) + len(ears.finish())
    assert total == resampled_samples(int(float(duration) * 48) * len(sent), 48_000)
    assert max(came) <= float(duration) * 16 + DELAY_SAMPLES


@pytest.mark.parametrize("channels", [1, 2])
def test_packets_are_the_file_with_the_encoders_delay_before_it(channels):
    stream = opus(channels=channels, application="audio")
    skip_samples = int.from_bytes(pages(stream)[0].parts[0][0][10:12], "little")
    ears = OpusPacketDecoder()
    mono = np.concatenate([*map(ears.decode, packets(stream)), ears.finish()])
    ours = read_audio((mono[skip_samples : skip_samples + int(1.3 * 48_000)], 48_000))
    np.testing.assert_allclose(ours, read_audio(stream), atol=1e-6)


@pytest.mark.parametrize("packet", [b"", b"\xff", b"\x03\x00", bytes(61_299)])
def test_invalid_packets_are_refused(packet):
    ears = create_live_decoder("opus")
    ears.decode(packets(opus())[0])
    with pytest.raises(CorruptAudio, match="Opus packet 2"):
        ears.decode(packet)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=120), max_size=20))
def test_noise_for_packets_is_decoded_or_refused(noise):
    ears = create_live_decoder("opus")
    for packet in noise:
        try:
            out = ears.decode(packet)
        except CorruptAudio:
            return
        assert len(out) <= 16_000 * 0.12 + DELAY_SAMPLES
        assert np.isfinite(out).all()
    ears.finish()


# --- Opus in Ogg -----------------------------------------------------------------------------------------

FORMS = {
    "speech": {},
    "stereo": {"channels": 2, "application": "audio"},
    "2.5 ms": {"frame_duration": "2.5", "application": "lowdelay"},
    "60 ms": {"frame_duration": "60"},
    "shorter than a packet": {"seconds": 0.005},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_the_same_bytes_gives_the_same_samples(form):
    stream = opus(**FORMS[form])
    ours = heard("ogg", None, [stream])
    assert len(ours) == FORMS[form].get("seconds", 1.3) * 16_000
    np.testing.assert_array_equal(ours, read_audio(stream))


def test_audio_keeps_its_position():
    ours = heard("ogg", None, [opus(application="audio", b="128k")])
    want = read_audio((speech(1.3, 48_000), 48_000))
    lag = int(np.correlate(ours, want, "full").argmax()) - (len(want) - 1)
    assert lag == 0


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(FORMS)), st.lists(st.integers(0, 12_000), max_size=30))
def test_pages_may_be_cut_anywhere(form, cuts):
    stream = opus(**FORMS[form])
    np.testing.assert_array_equal(heard("ogg", None, cut(stream, cuts)), heard("ogg", None, [stream]))


def test_byte_by_byte():
    stream = opus()
    np.testing.assert_array_equal(heard("ogg", None, cut(stream, range(len(stream)))), read_audio(stream))


def test_a_page_is_decoded_before_the_next_arrives():
    ears = create_live_decoder("ogg")
    stream = pages(opus(page_us=20_000))
    came = [len(ears.decode(written(page))) for page in stream]
    assert len(stream) > 60
    for at in range(2, len(came) + 1):
        assert sum(came[:at]) >= (at - 2) * 320 - 104 - DELAY_SAMPLES
    assert not ears.has_pending_bytes


def test_pages_are_read_and_written_back():
    stream = opus()
    assert again(pages(stream)) == stream


def test_packets_may_continue_in_the_next_page():
    stream = pages(opus(frame_duration="60", b="128k", application="audio"))
    *before, page = stream[:3]
    long = max(len(part) for part, _ in page.parts)
    assert long > 510
    torn: list[OggPage] = []
    for part, ends in page.parts:
        at = 0
        while len(part) - at > 255:
            torn.append(changed(page, parts=((part[at : at + 255], False),), position=-1, flags=bool(at)))
            at += 255
        torn.append(changed(page, parts=((part[at:], ends),), flags=bool(at)))
    torn = [*before, *torn]
    want = heard("ogg", None, [again(stream[:3])])
    np.testing.assert_array_equal(
        heard("ogg", None, [again(changed(each, number=at) for at, each in enumerate(torn))]), want
    )


def test_gain_is_applied():
    head, *rest = pages(opus())
    found = bytearray(head.parts[0][0])
    found[16:18] = (-6 * 256).to_bytes(2, "little", signed=True)
    quieter = again([changed(head, parts=((bytes(found), True),)), *rest])
    ours = heard("ogg", None, [quieter])
    np.testing.assert_array_equal(ours, read_audio(quieter))
    np.testing.assert_allclose(ours, heard("ogg", None, [opus()]) * 10 ** (-6 / 20), atol=2e-3)


def test_chained_streams_are_decoded():
    first, second = opus(0.5), again(changed(page, stream=77) for page in pages(opus(0.25, channels=2)))
    ours = heard("ogg", None, [first + second])
    assert len(ours) == 12_000
    np.testing.assert_allclose(ours[:7_900], read_audio(first)[:7_900], atol=1e-6)
    np.testing.assert_allclose(ours[8_100:], read_audio(second)[100:], atol=1e-3)
    unended = again(changed(page, flags=page.flags & ~4) for page in pages(first))
    assert len(heard("ogg", None, [unended + second])) > 12_000, "nothing says what to cut off"


def test_a_stream_may_begin_in_the_middle():
    """A radio sends the heads, then whatever page comes next."""
    head, tags, *audio = pages(opus(page_us=20_000))
    late = heard("ogg", None, [again([head, tags, *audio[30:]])])
    whole = heard("ogg", None, [opus(page_us=20_000)])
    assert len(late) == len(whole) + 104 - 30 * 320 - 104
    np.testing.assert_allclose(late[3_000:], whole[-len(late) + 3_000 :], atol=0.02)


def test_long_tags_are_not_kept():
    head, tags, *audio = pages(opus())
    picture = [changed(tags, parts=((tags.parts[0][0].ljust(65_025, b"p"), False),), position=-1)]
    picture += [changed(picture[0], flags=1, parts=((b"p" * 65_025, False),)) for _ in range(50)]
    picture.append(changed(tags, flags=1, parts=((b"p", True),)))
    stream = again(changed(each, number=at) for at, each in enumerate([head, *picture, *audio]))
    ears = create_live_decoder("ogg")
    assert len(ears.decode(stream[:2_000_000])) == 0
    np.testing.assert_array_equal(np.concatenate([ears.decode(stream[2_000_000:]), ears.finish()]), read_audio(opus()))


def test_a_stream_truncated_anywhere_has_the_samples_up_to_there():
    stream = opus(page_us=20_000)
    whole = read_audio(stream)
    for end in range(0, len(stream), 311):
        ears = create_live_decoder("ogg")
        ours = np.concatenate([ears.decode(stream[:end]), ears.finish()])
        assert ears.has_pending_bytes == (
            end not in itertools.accumulate(len(written(page)) for page in pages(stream)) and end > 0
        )
        known = max(0, len(ours) - DELAY_SAMPLES)
        np.testing.assert_allclose(ours[:known], whole[:known], atol=1e-6)


def _file(rate_hz: int = 16_000) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, rate_hz, 0, "NONE", ""))
        file.writeframes(bytes(1_000))
    return out.getvalue()


OTHERS = {
    "wav": (lambda: _file(), "wav came"),
    "webm": (lambda: encoded("libopus", "webm", 48_000), "webm/matroska came"),
    "flac in ogg": (lambda: encoded("flac", "ogg", 16_000), "FLAC"),
    "speex in ogg": (lambda: written(OggPage(2, 0, 1, 0, ((b"Speex   1.2".ljust(80), True),))), "Speex"),
    "vorbis in ogg": (lambda: written(OggPage(2, 0, 1, 0, ((b"\x01vorbis".ljust(30), True),))), "Vorbis"),
    "unknown in ogg": (lambda: written(OggPage(2, 0, 1, 0, ())), "something unknown"),
    "text": (lambda: b"hello " * 20, "something unknown came"),
    "later ogg": (lambda: b"OggS\1".ljust(100), "version 1"),
    "six channels": (lambda: _head(channels=6, mapping=1), "6 channels"),
    "later opus": (lambda: _head(version=16), "version 16"),
    "two streams": (lambda: _head() + again([changed(pages(opus())[0], stream=9)]), "several streams"),
}


def _head(channels: int = 1, mapping: int = 0, version: int = 1) -> bytes:
    head = struct.pack("<8sBBHIhB", b"OpusHead", version, channels, 312, 48_000, 0, mapping)
    return written(OggPage(2, 0, 1, 0, ((head, True),)))


@pytest.mark.parametrize("name", OTHERS)
def test_other_content_of_ogg_is_named_in_the_error(name):
    make, says = OTHERS[name]
    with pytest.raises(UnsupportedAudio, match=says):
        heard("ogg", None, [make()])
    with pytest.raises(UnsupportedAudio, match=says):
        heard("ogg", None, cut(make(), range(1_000)))


def _broken() -> dict[str, bytes]:
    stream = opus(page_us=100_000)
    head, tags, *audio = pages(stream)
    at = len(again([head, tags, audio[0]]))
    flipped = bytearray(stream)
    flipped[at + 60] ^= 1
    return {
        "a bit": bytes(flipped),
        "a byte is missing": stream[: at + 60] + stream[at + 61 :],
        "a page is missing": again([head, tags, audio[0], *audio[2:]]),
        "a page came twice": again([head, tags, audio[0], *audio]),
        "another stream's page": again([head, tags, changed(audio[0], stream=5)]),
        "no tags": again([head, changed(audio[0], number=1)]),
        "no head": again([tags, *audio]),
        "after the end": again([head, tags, *audio, changed(audio[-1], number=audio[-1].number + 1)]),
        "an empty head": again([changed(head, parts=((b"OpusHead", True),)), tags, *audio]),
        "a packet without its end": again([head, tags, audio[0], changed(audio[1], flags=1)]),
        "a packet that is none": again([head, tags, changed(audio[0], parts=((b"\xff", True),))]),
        "a packet without end": again(
            [head, tags]
            + [changed(audio[0], number=2 + n, flags=bool(n), parts=((bytes(65_025), False),)) for n in range(3)]
        ),
    }


@pytest.mark.parametrize("name", sorted(_broken()))
def test_broken_streams(name):
    broken = _broken()[name]
    with pytest.raises(CorruptAudio):
        heard("ogg", None, [broken])
    with pytest.raises(CorruptAudio):
        heard("ogg", None, cut(broken, range(0, len(broken), 7)))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=40), st.lists(st.integers(0, 12_000), max_size=5))
def test_damaged_bytes_are_refused_or_decoded(at, piece, cuts):
    stream = opus()
    at %= len(stream)
    damaged = stream[:at] + piece + stream[at + len(piece) :]
    with contextlib.suppress(CorruptAudio, UnsupportedAudio):
        assert len(heard("ogg", None, cut(damaged, cuts))) <= 16_000 * 1.4


def test_memory_is_bounded_by_half_a_page():
    ears = OggPageReader()
    big = written(OggPage(0, -1, 1, 0, ((bytes(65_025), False),)))
    assert len(big) == 65_307
    assert list(ears.append_bytes(big[:-1])) == []
    assert len(ears._buffer) == 65_306
    assert len(list(ears.append_bytes(big[-1:] + big))) == 2
    assert not ears.has_pending_bytes


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([("s16le", 8_000), ("s16le", 24_000), ("s16le", 44_100), ("mulaw", 8_000), ("s16le", 16_000)]),
    st.lists(st.integers(1, 5_000), min_size=1, max_size=6),
)
def test_drain_anywhere_returns_all_samples_and_adds_none(kind, sizes):
    encoding, rate_hz = kind
    width = 2 if encoding == "s16le" else 1
    decoding, taken, given = create_live_decoder(encoding, rate_hz), 0, 0
    tone = np.sin(2 * np.pi * 300 * np.arange(sum(sizes)) / rate_hz)
    data = (20_000 * tone).astype("<i2").tobytes() if width == 2 else bytes(np.full(len(tone), 0xFF, np.uint8))
    for size in sizes:
        given += len(decoding.decode(data[width * taken : width * (taken + size)])) + len(decoding.drain_resampler())
        taken += size
        assert given == -(-taken * 16_000 // rate_hz)
    assert len(decoding.finish()) == 0


@pytest.mark.parametrize(("encoding", "rate_hz"), [("s16le", 16_000), ("s16le", 44_100), ("alaw", 8_000)])
@settings(max_examples=25, deadline=None)
@given(parts=st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 3_000)), max_size=6))
def test_silence_is_what_its_samples_would_be(encoding: str, rate_hz: int, parts: list[tuple[int, int]]) -> None:
    told, sent = create_live_decoder(encoding, rate_hz), create_live_decoder(encoding, rate_hz)
    assert told.sample_bytes
    rng = np.random.default_rng(3)
    zeros = np.zeros(3_000, np.int16).tobytes()
    ours, theirs = [], []
    for speech_samples, silent in parts:
        audio = rng.bytes(speech_samples * told.sample_bytes)
        ours += [told.decode(audio), told.decode_silence(silent)]
        theirs += [sent.decode(audio)]
        if encoding == "s16le":
            theirs += [sent.decode(zeros[: 2 * silent])]
    ours.append(told.finish())
    theirs.append(sent.finish())
    lengths = sum(speech_samples + silent for speech_samples, silent in parts)
    assert len(np.concatenate(ours)) == resampled_samples(lengths, rate_hz)
    if encoding == "s16le":
        assert np.array_equal(np.concatenate(ours), np.concatenate(theirs))
