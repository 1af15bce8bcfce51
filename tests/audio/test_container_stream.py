"""Live streams in a container, by their first bytes: cut anywhere, they give the samples of the whole."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from asr_serve.audio.container_stream import MAX_HEADER_BYTES, ContainerStreamDecoder
from asr_serve.audio.encode.companded_encoder import create_audio_encoder
from asr_serve.audio.encode.stream_encoder import AudioEncoder
from asr_serve.audio.pcm import alaw_table, mulaw_table
from asr_serve.audio.stream_decoder import create_live_decoder
from asr_serve.errors import UnsupportedAudio

TONE = (np.sin(np.arange(8_000) / 9) * 12_000).astype(np.int16)


def wav(
    tag: int = 1, channels: int = 1, rate_hz: int = 16_000, bits: int = 16, extra: bytes = b"", data: bytes = b""
) -> bytes:
    size = bits // 8 * channels
    fmt = struct.pack("<HHIIHH", tag, channels, rate_hz, rate_hz * size, size, bits)
    chunks = b"fmt " + struct.pack("<I", len(fmt)) + fmt + extra + b"data" + struct.pack("<I", 0xFFFFFFFF) + data
    return b"RIFF" + struct.pack("<I", 0xFFFFFFFF) + b"WAVE" + chunks


def decoded(stream: bytes, step: int) -> np.ndarray:
    decoder = ContainerStreamDecoder()
    parts = [decoder.decode(stream[at : at + step]) for at in range(0, len(stream), step)]
    return np.concatenate([*parts, decoder.finish()])


@pytest.mark.parametrize("step", [1, 7, 1_000, 1 << 20])
@pytest.mark.parametrize("encoding", ["s16le", "mulaw", "alaw"])
def test_a_wav_stream_is_its_samples(encoding, step):
    tag, bits = {"s16le": (1, 16), "mulaw": (7, 8), "alaw": (6, 8)}[encoding]
    rate_hz = 16_000 if encoding == "s16le" else 8_000
    form = "pcm" if encoding == "s16le" else encoding
    encoder = create_audio_encoder(form, rate_hz)
    data = encoder.encode(TONE) + encoder.finish()
    plain = create_live_decoder(encoding, rate_hz)
    expected = np.concatenate([plain.decode(data), plain.finish()])
    odd = b"LIST" + struct.pack("<I", 3) + b"abc\0"
    assert np.array_equal(decoded(wav(tag, 1, rate_hz, bits, odd, data), step), expected)


@pytest.mark.parametrize("step", [100, 1 << 20])
def test_an_ogg_stream(step):
    encoder = AudioEncoder("opus", 24_000)
    stream = encoder.encode(TONE) + encoder.finish()
    plain = create_live_decoder("ogg")
    assert np.array_equal(decoded(stream, step), np.concatenate([plain.decode(stream), plain.finish()]))


@pytest.mark.parametrize(
    "stream",
    [
        b"ID3\x03",
        b"R\0",
        wav(channels=2),
        wav(tag=3, bits=32),
        wav(rate_hz=96_000),
        wav()[:12] + b"data\0\0\0\0",
        wav(extra=b"junk" + struct.pack("<I", MAX_HEADER_BYTES) + bytes(MAX_HEADER_BYTES))[:-9] + bytes(100),
    ],
)
def test_what_is_no_such_stream_is_refused_with_what_is(stream):
    with pytest.raises(UnsupportedAudio, match=r"WAV|header"):
        decoded(stream, 64)


def test_companding_keeps_samples_to_the_precision_of_g711():
    for form, table in (("mulaw", mulaw_table()), ("alaw", alaw_table())):
        encoder = create_audio_encoder(form, 8_000)
        coded = encoder.encode(TONE) + encoder.finish()
        assert len(coded) == len(TONE)
        heard = table[np.frombuffer(coded, np.uint8)]
        assert np.max(np.abs(heard * 32_768 - TONE)) < 600
