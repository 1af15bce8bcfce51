"""The mark: found through codecs, other rates and cuts; in nothing that was not marked; and below the sound."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from case_tiers import exhaustive_after

from asr_serve.audio.encode import AudioEncoder
from asr_serve.audio.reader import read_audio
from asr_serve.audio.resample import Resampler
from asr_serve.audio.watermark import (
    DETECTION_SCORE,
    SILENT,
    WatermarkDetection,
    WatermarkEmbedder,
    detect_watermark,
    embed_watermark,
)

CLIPS = ("beckett.wav", pytest.param("two_cities.wav", marks=pytest.mark.exhaustive))
SECONDS = 8


@pytest.fixture(scope="module", params=CLIPS)
def speech(request: pytest.FixtureRequest, packaged_speech: Path) -> np.ndarray:
    """Somebody who reads aloud: (n,) float32 at 16 kHz, and no louder than half."""
    pcm = read_audio(str(packaged_speech / request.param))[: SECONDS * 16_000]
    return 0.5 * pcm / np.abs(pcm).max()


@pytest.fixture(scope="module")
def marked(speech: np.ndarray) -> np.ndarray:
    return embed_watermark(speech, 16_000)


def at(rate_hz: int, pcm: np.ndarray) -> np.ndarray:
    resampler = Resampler(16_000, rate_hz)
    return np.concatenate([resampler.resample(pcm), resampler.finish()])


def coded(form: str, pcm: np.ndarray, rate_hz: int = 16_000, bit_rate: int = 64_000) -> np.ndarray:
    encoder = AudioEncoder(form, rate_hz, bit_rate=bit_rate)
    return read_audio(encoder.encode(pcm) + encoder.finish())


def test_the_mark_is_far_below_the_signal(speech: np.ndarray, marked: np.ndarray) -> None:
    added = marked - speech
    ratio_db = 10 * np.log10(np.square(speech).sum() / np.square(added).sum())
    assert ratio_db > 36
    # Where nothing is said, nothing is added.
    quiet = np.sqrt(np.square(speech[: len(speech) // 640 * 640].reshape(-1, 640)).mean(1)) < SILENT
    assert not added[: len(quiet) * 640].reshape(-1, 640)[quiet].any()


def test_marked_audio_is_detected(speech: np.ndarray, marked: np.ndarray) -> None:
    assert detect_watermark(marked, 16_000).is_marked
    assert detect_watermark(marked, 16_000).score > 50
    assert not detect_watermark(speech, 16_000).is_marked


@pytest.mark.slow
@pytest.mark.parametrize(("form", "bit_rate"), [("mp3", 64_000), ("opus", 64_000), ("aac", 96_000), ("flac", 0)])
@pytest.mark.parametrize("rate_hz", exhaustive_after(1, [16_000, 24_000]))
def test_the_mark_survives_codecs(speech: np.ndarray, form: str, bit_rate: int, rate_hz: int) -> None:
    marked = embed_watermark(at(rate_hz, speech), rate_hz)
    assert detect_watermark(coded(form, marked, rate_hz, bit_rate), 16_000).is_marked
    assert not detect_watermark(coded(form, at(rate_hz, speech), rate_hz, bit_rate), 16_000).is_marked


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_the_mark_survives_resampling(marked: np.ndarray, rate_hz: int) -> None:
    assert detect_watermark(at(rate_hz, marked), rate_hz).is_marked


@pytest.mark.parametrize("rate_hz", [8_000, 22_050, 24_000, 48_000])
def test_any_rate_can_be_marked(speech: np.ndarray, rate_hz: int) -> None:
    pcm = at(rate_hz, speech)
    marked = embed_watermark(pcm, rate_hz)
    assert len(marked) == len(pcm)
    assert detect_watermark(marked, rate_hz).is_marked


def test_the_mark_survives_cuts_gain_and_sixteen_bits(marked: np.ndarray) -> None:
    assert detect_watermark(marked[12_345 : 12_345 + 3 * 16_000], 16_000).is_marked
    assert detect_watermark(0.2 * marked, 16_000).is_marked
    assert detect_watermark(np.rint(marked * 32_767).astype(np.int16), 16_000).is_marked
    noise = np.random.default_rng(5).normal(0, 0.3, 40 * 16_000).astype(np.float32)
    assert detect_watermark(np.concatenate([noise, marked]), 16_000).is_marked


def test_the_mark_survives_a_gentle_equaliser(marked: np.ndarray) -> None:
    tilted = np.empty_like(marked)  # 4 kHz is 3.5 dB louder than 300 Hz
    tilted[0], tilted[1:] = marked[0], marked[1:] - 0.3 * marked[:-1]
    assert detect_watermark(tilted, 16_000).is_marked


def test_chunks_change_nothing(speech: np.ndarray, marked: np.ndarray) -> None:
    mark = WatermarkEmbedder(16_000)
    cuts = np.random.default_rng(6).integers(0, len(speech), 50)
    parts = [mark.embed(part) for part in np.split(speech, np.sort(cuts))]
    assert np.array_equal(np.concatenate([*parts, mark.flush()]), marked)


def test_output_lags_by_a_block(speech: np.ndarray) -> None:
    mark, given = WatermarkEmbedder(16_000), 0
    for start in range(0, 16_000, 160):
        given += len(mark.embed(speech[start : start + 160]))
        assert start + 160 - given < 640


@pytest.mark.slow
def test_another_key_finds_nothing(marked: np.ndarray) -> None:
    """And so is what chance does: of 24 keys none comes near."""
    assert max(detect_watermark(marked, 16_000, b"key %d" % number).score for number in range(24)) < 4


@pytest.mark.parametrize("kind", ["tone", "hum", "noise", "clicks", "silence", "constant"])
def test_other_audio_is_not_detected_as_marked(kind: str) -> None:
    t = np.arange(15 * 16_000) / 16_000
    sounds = {
        "tone": 0.3 * np.sin(2 * np.pi * 440 * t),
        "hum": 0.2 * np.sign(np.sin(2 * np.pi * 100 * t)),
        "noise": np.random.default_rng(7).normal(0, 0.1, len(t)),
        "clicks": 0.9 * (np.arange(len(t)) % 640 == 0),
        "silence": np.zeros(len(t)),
        "constant": np.full(len(t), 0.5),
    }
    assert not detect_watermark(sounds[kind].astype(np.float32), 16_000).is_marked


def test_too_short_audio_has_no_result() -> None:
    assert detect_watermark(np.zeros(0, np.float32), 16_000) == WatermarkDetection(0.0)
    assert detect_watermark(np.ones(100, np.float32), 16_000) == WatermarkDetection(0.0)
    assert DETECTION_SCORE == 6
