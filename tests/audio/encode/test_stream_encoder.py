"""Encoders: what they write is read again by our own door, in length and in sound, and begins at once."""

from __future__ import annotations

import io
import struct

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.audio.container_headers import read_wav_header
from asr_serve.audio.encode import FORMATS, SYNTHETIC_SPEECH_COMMENT, AudioEncoder, content_type, packet_encoder
from asr_serve.audio.reader import read_audio
from asr_serve.errors import OptionError, UnsupportedAudio, UnsupportedOption

LEAD_SAMPLES = {"mp3": 529, "aac": 1_024}
"""Silence before the sound that a format has no word for, at its own rate; of mp3 from 32 kHz on it is 1105."""
FRAMES_BEHIND = {"mp3": 3, "aac": 2, "opus": 1, "flac": 1, "wav": 0, "pcm": 0}


def sweep(rate_hz: int, seconds: float = 1.5) -> np.ndarray:
    """100 Hz to 3 kHz, without a click at either end."""
    t = np.arange(int(rate_hz * seconds)) / rate_hz
    tone = np.sin(2 * np.pi * (100 * t + (3_000 - 100) / (2 * seconds) * t**2))
    return (0.5 * tone * np.minimum(1, 20 * np.minimum(t, seconds - t))).astype(np.float32)


def encode(form: str, pcm: np.ndarray, rate_hz: int, cut: int = 441, **options) -> tuple[bytes, AudioEncoder]:
    encoder = AudioEncoder(form, rate_hz, **options)
    parts = [encoder.encode(pcm[at : at + cut]) for at in range(0, len(pcm), cut)]
    return b"".join([*parts, encoder.finish()]), encoder


def decode(data: bytes, encoder: AudioEncoder) -> np.ndarray:
    """(n,) at 16 kHz."""
    if encoder.form == "pcm":
        return read_audio((np.frombuffer(data, "<i2"), encoder.to_hz))
    return read_audio(data)


@pytest.mark.parametrize("rate_hz", [8_000, 22_050, 24_000, 48_000])
@pytest.mark.parametrize("form", FORMATS)
def test_encoded_audio_decodes_to_the_input(form: str, rate_hz: int) -> None:
    pcm = sweep(rate_hz)
    data, encoder = encode(form, pcm, rate_hz)
    lead = np.zeros(1_105 if (form, rate_hz) == ("mp3", 48_000) else LEAD_SAMPLES.get(form, 0), np.float32)
    heard, expected = decode(data, encoder), read_audio((np.concatenate([lead, pcm]), rate_hz))
    if form in LEAD_SAMPLES:  # it ends with a whole frame
        assert len(expected) <= len(heard)
    else:
        assert abs(len(heard) - len(expected)) <= 1
    n = min(len(heard), len(expected))
    # The codecs take away what lies above their band; a sweep to 3 kHz they keep.
    assert np.corrcoef(heard[:n], expected[:n])[0, 1] > 0.98


@pytest.mark.parametrize("form", ["wav", "flac", "pcm"])
def test_lossless_formats_are_exact(form: str) -> None:
    pcm = np.random.default_rng(1).integers(-32_768, 32_768, 12_345).astype(np.int16)
    data, _ = encode(form, pcm, 24_000)
    if form == "pcm":
        assert data == pcm.astype("<i2").tobytes()
        return
    with av.open(io.BytesIO(data)) as container:
        heard = np.concatenate([frame.to_ndarray().ravel() for frame in container.decode(audio=0)])
    assert np.array_equal(heard, pcm)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(FORMATS), st.lists(st.integers(0, 3_000), max_size=6))
def test_chunks_change_no_byte(form: str, lengths: list[int]) -> None:
    pcm = np.random.default_rng(2).integers(-9_000, 9_000, sum(lengths)).astype(np.int16)
    encoder = AudioEncoder(form, 22_050, to_hz=24_000)
    parts, at = [], 0
    for length in lengths:
        parts.append(encoder.encode(pcm[at : at + length]))
        at += length
    whole = AudioEncoder(form, 22_050, to_hz=24_000)
    assert b"".join(parts) + encoder.finish() == whole.encode(pcm) + whole.finish()


@pytest.mark.parametrize("form", FORMATS)
def test_the_header_comes_before_any_sound_and_sound_as_soon_as_it_can(form: str) -> None:
    encoder = AudioEncoder(form, 24_000)
    header = encoder.encode(np.zeros(0, np.int16))
    assert bool(header) == (form not in ("pcm", "aac"))  # which have none
    frame = packet_encoder.PacketEncoder(form, 24_000).frame_samples if form in packet_encoder.CODEC_SPECS else 1
    pcm = (sweep(24_000) * 32_767).astype(np.int16)
    put = 0
    while not encoder.encode(pcm[put : put + frame]):
        put += frame
    assert put <= FRAMES_BEHIND[form] * frame


@pytest.mark.parametrize("form", FORMATS)
def test_a_stream_without_samples_is_valid(form: str) -> None:
    data, _ = encode(form, np.zeros(0, np.int16), 24_000)
    assert bool(data) == (form not in ("pcm", "aac"))


def test_the_header_of_a_wav_has_its_length_where_it_is_known() -> None:
    pcm = np.zeros(1_001, np.int16)
    known, _ = encode("wav", pcm, 24_000, samples=1_001)
    header = read_wav_header(known)
    assert header is not None
    assert header.data_bytes == 2_002
    assert struct.unpack_from("<I", known, 4)[0] == len(known) - 8
    open_ended, _ = encode("wav", pcm, 24_000)
    header = read_wav_header(open_ended)
    assert header is not None
    assert header.data_bytes is None
    assert len(open_ended) == len(known)


def test_the_header_has_the_length_at_the_output_rate() -> None:
    data, _ = encode("flac", np.zeros(22_050, np.int16), 22_050, to_hz=24_000, samples=22_050)
    with av.open(io.BytesIO(data)) as container:
        assert container.streams.audio[0].duration == 24_000


@pytest.mark.parametrize("form", [form for form in FORMATS if form not in ("pcm", "aac")])
def test_files_say_what_is_in_them(form: str) -> None:
    data, _ = encode(form, np.zeros(4_800, np.int16), 24_000)
    with av.open(io.BytesIO(data)) as container:
        told = container.metadata | container.streams.audio[0].metadata
    assert SYNTHETIC_SPEECH_COMMENT in told.values()


def test_opus_is_resampled_to_a_rate_it_has() -> None:
    data, encoder = encode("opus", sweep(22_050), 22_050)
    assert encoder.to_hz == 24_000
    assert data.startswith(b"OggS")


def test_a_long_opus_packet_needs_more_than_one_segment() -> None:
    noise = np.random.default_rng(3).uniform(-1, 1, 48_000).astype(np.float32)
    data, encoder = encode("opus", noise, 48_000, bit_rate=256_000)
    assert len(data) > 20_000
    assert len(decode(data, encoder)) == 16_000


def test_float_samples_over_full_scale_are_clipped() -> None:
    data, _ = encode("pcm", np.array([2.0, -2.0, 0.5], np.float32), 24_000)
    assert np.frombuffer(data, "<i2").tolist() == [32_767, -32_768, 16_384]


def test_unknown_formats_and_rates() -> None:
    with pytest.raises(OptionError, match=r"unknown format 'mp4'.*mp3, opus, aac, flac, wav, pcm"):
        AudioEncoder("mp4", 24_000)
    with pytest.raises(OptionError, match="unknown format"):
        content_type("ogg")
    with pytest.raises(UnsupportedAudio, match="sample rate of 10 Hz"):
        AudioEncoder("wav", 10)
    with pytest.raises(UnsupportedAudio, match="one row of int16 or float32"):
        AudioEncoder("wav", 24_000).encode(np.zeros((2, 2), np.int16))


def test_a_codec_missing_in_ffmpeg_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packet_encoder, "_has", lambda name: name != "libmp3lame")
    with pytest.raises(UnsupportedOption, match=r"no libmp3lame.*wav, pcm, opus, aac, flac"):
        AudioEncoder("mp3", 24_000)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_has_a_media_type(form: str) -> None:
    assert content_type(form) == AudioEncoder(form, 24_000).content_type
    assert content_type(form).startswith("audio/")
