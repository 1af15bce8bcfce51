"""Payload decoders against ffmpeg's encoders and decoders, and what replaces packets that were lost."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from asr_serve.audio import read_audio
from asr_serve.audio.libopus import LibopusDecoder, opus_packet_units
from asr_serve.edge.payload_decoder import create_payload_decoder, payload_units
from asr_serve.edge.payload_format import PayloadFormat, parse_format
from asr_serve.errors import CorruptAudio

CODECS = {
    "PCMU/8000": ("pcm_mulaw", 8_000),
    "PCMA/8000": ("pcm_alaw", 8_000),
    "G722/8000": ("g722", 16_000),
    "L16/16000": ("pcm_s16be", 16_000),
    "L16/44100/2": ("pcm_s16be", 44_100),
    "opus/48000/2": ("libopus", 48_000),
}


@pytest.fixture(scope="module")
def speech(packaged_speech: Path) -> np.ndarray:
    """Four seconds at 16 kHz."""
    return read_audio(packaged_speech / "beckett.wav")[: 4 * 16_000]


def encode(speech: np.ndarray, text: str, options: dict[str, str] | None = None) -> tuple[PayloadFormat, list[bytes]]:
    """Packets of 20 ms by ffmpeg's encoder."""
    form, (codec, rate_hz) = parse_format(text), CODECS[text]
    context = av.CodecContext.create(codec, "w")
    context.sample_rate, context.format = rate_hz, "s16"
    context.layout = "stereo" if form.channels == 2 else "mono"
    context.time_base = Fraction(1, rate_hz)
    context.options = options or {}
    resampler = av.AudioResampler(format="s16", layout=context.layout, rate=rate_hz, frame_size=rate_hz // 50)
    frame = av.AudioFrame.from_ndarray((speech * 32_767).astype(np.int16)[None], format="s16", layout="mono")
    frame.sample_rate = 16_000
    frames = [*resampler.resample(frame), *resampler.resample(None)]
    return form, [bytes(packet) for each in [*frames, None] for packet in context.encode(each)]


@pytest.mark.parametrize("text", CODECS)
def test_a_payload_decodes_to_its_length_and_sounds_as_it_was(text: str, speech: np.ndarray) -> None:
    form, packets = encode(speech, text)
    decoder, made = create_payload_decoder(form), []
    for payload in packets:
        units = payload_units(form, payload)
        assert units is not None
        pcm = decoder.decode(payload)
        assert pcm.dtype == np.float32
        assert len(pcm) == form.samples(units)
        made.append(pcm)
    whole = np.concatenate(made)
    assert abs(len(whole) / form.rate_hz - 4) < 0.05
    assert correlation(whole, resample(speech, form.rate_hz)) > 0.9


def resample(pcm: np.ndarray, rate_hz: int) -> np.ndarray:
    at = np.arange(len(pcm) * rate_hz // 16_000) * 16_000 / rate_hz
    return np.interp(at, np.arange(len(pcm)), pcm)


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Best over shifts: codecs delay."""
    count = 2 * max(len(one), len(other))
    crossed = np.fft.irfft(np.fft.rfft(one, count) * np.conj(np.fft.rfft(other, count)))
    return float(crossed.max() / np.sqrt((one @ one) * (other @ other)))


@pytest.mark.parametrize("text", CODECS)
def test_a_loss_becomes_as_many_samples(text: str, speech: np.ndarray) -> None:
    form, packets = encode(speech, text)
    decoder = create_payload_decoder(form)
    for payload in packets[:50]:
        decoder.decode(payload)
    for lost in (0, 40, 333, 20_000):
        assert decoder.conceal(lost, packets[51]).shape == (lost,)
    assert len(decoder.decode(packets[52])) == form.samples(payload_units(form, packets[52]) or 0)


def test_a_concealed_voice_goes_on_and_fades(speech: np.ndarray) -> None:
    """A steady tone of the pitch range: the repetition must continue it, and end in silence."""
    form = parse_format("L16/16000")
    tone = np.sin(2 * np.pi * 200 * np.arange(3_200) / 16_000) * 0.5
    decoder = create_payload_decoder(form)
    decoder.decode((tone[:1_600] * 32_767).astype(">i2").tobytes())
    made = decoder.conceal(1_600, b"")
    expected = tone[1_600:1_760]
    assert float(np.abs(made[:160] - expected).max()) < 0.15
    assert not made[960:].any()


def test_forward_error_correction_brings_a_lost_packet_back(speech: np.ndarray) -> None:
    _, packets = encode(speech, "opus/48000/2", {"fec": "1", "packet_loss": "30", "b": "32000", "application": "voip"})
    usual = LibopusDecoder()
    reference = [usual.decode(packet) for packet in packets]
    errors = {}
    for with_fec in (True, False):
        decoder, difference = LibopusDecoder(), []
        for number, packet in enumerate(packets):
            if number % 10 == 5:
                made = decoder.conceal(320, packets[number + 1] if with_fec else None)
                difference.append(np.abs(made - reference[number]).mean())
            else:
                decoder.decode(packet)
        errors[with_fec] = float(np.mean(difference))
    assert errors[True] < 0.6 * errors[False]


@pytest.mark.parametrize("payload", [b"", b"\x03", b"\x03\x00", b"\x1b\x3f", bytes(70_000)], ids=len)
def test_bytes_that_are_no_opus_have_no_length(payload: bytes) -> None:
    assert opus_packet_units(payload) is None
    with pytest.raises(CorruptAudio):
        LibopusDecoder().decode(payload)


@pytest.mark.parametrize("text", CODECS)
def test_hostile_payloads_decode_or_raise_their_error(text: str, rng: np.random.Generator) -> None:
    form = parse_format(text)
    decoder = create_payload_decoder(form)
    for _ in range(300):
        payload = rng.integers(0, 256, rng.integers(0, 1_500), dtype=np.uint8).tobytes()
        units = payload_units(form, payload)
        if units:
            try:
                assert len(decoder.decode(payload)) == form.samples(units)
            except CorruptAudio:
                assert text.startswith("opus")


def test_payloads_of_impossible_length_have_none() -> None:
    assert payload_units(parse_format("L16/16000"), b"abc") is None
    assert payload_units(parse_format("L16/44100/2"), b"abcdef") is None
    assert payload_units(parse_format("PCMU/8000"), bytes(1_601)) is None
    assert payload_units(parse_format("PCMU/8000"), b"") is None
    assert payload_units(parse_format("CN/8000"), b"\x40") == 0
