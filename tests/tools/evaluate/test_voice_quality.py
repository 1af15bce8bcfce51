"""Measures of a voice: nothing where there is no difference, and as much as there is where one was made."""

from __future__ import annotations

import math
import wave
from pathlib import Path

import msgspec
import numpy as np
import pytest

from asr_serve.audio.resample import resample_clip
from asr_serve.errors import EmptyAudio, OptionError, WeightsMissing
from asr_serve_tools.evaluate import voice_quality
from asr_serve_tools.evaluate.voice_quality import VoiceDistance

RATE_HZ = 22_050


def sung(hz: float, seconds: float = 1.0, formants: tuple[float, ...] = (700, 1_200, 2_600)) -> np.ndarray:
    """A vowel, with a quiet begin and end."""
    time_s = np.arange(round(seconds * RATE_HZ)) / RATE_HZ
    sound = np.zeros(len(time_s))
    for number in range(1, int(8_000 / hz)):
        height = sum(1 / (1 + ((number * hz - peak) / 120) ** 2) for peak in formants)
        sound += height * np.sin(2 * np.pi * number * hz * time_s)
    fade = np.minimum(1, np.minimum(time_s, time_s[::-1]) / 0.05)
    return (0.3 * fade * sound / np.abs(sound).max()).astype(np.float32)


@pytest.fixture(scope="module")
def spoken(packaged_speech: Path) -> np.ndarray:
    with wave.open(str(packaged_speech / "beckett.wav")) as file:
        pcm = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32_768
        return resample_clip(pcm, file.getframerate(), RATE_HZ)[: 4 * RATE_HZ]


def test_audio_equals_itself(spoken: np.ndarray) -> None:
    assert voice_quality.voice_distance(spoken, spoken) == VoiceDistance(0.0, 0.0, 0.0, 0.0, 0.0)


def test_loudness_makes_no_difference(spoken: np.ndarray) -> None:
    found = voice_quality.voice_distance(spoken, 0.5 * spoken)
    assert found.mcd_db < 0.3
    assert found.mel < 0.03
    assert found.f0_cents < 5
    assert found.voicing_percent < 1


def test_the_rate_makes_no_difference(spoken: np.ndarray) -> None:
    other = resample_clip(spoken, RATE_HZ, 24_000)
    back = voice_quality.voice_distance(resample_clip(spoken, RATE_HZ, 24_000), other, 24_000)
    assert back.mcd_db == 0.0


def test_durations_make_no_difference(spoken: np.ndarray) -> None:
    short, long, another = sung(140), sung(140, 1.5), sung(140, formants=(300, 2_200, 3_000))
    assert (
        5 * voice_quality.voice_distance(short, long).mcd_db < voice_quality.voice_distance(short, another).mcd_db > 3
    )


def test_cepstra_have_the_usual_scale() -> None:
    """Of a spectrum that is a constant and one cosine, those; and the distance is that of the spectra in dB."""
    angles = (np.arange(80) + 0.5) * np.pi / 80
    found = voice_quality.mel_cepstra((2.0 + 0.7 * np.cos(3 * angles))[None])[0]
    assert found == pytest.approx(np.eye(1, 13, 0)[0] * 2.0 + np.eye(1, 13, 3)[0] * 0.7, abs=1e-9)
    apart_db = 20 / math.log(10) * math.sqrt(np.square(0.7 * np.cos(3 * angles)).mean())
    assert pytest.approx(apart_db) == voice_quality.TO_DB * 0.7


@pytest.mark.parametrize("cents", [50, 100, 200])
def test_f0_error_is_in_cents(cents: int) -> None:
    found = voice_quality.voice_distance(sung(150), sung(150 * 2 ** (cents / 1_200)))
    assert found.f0_cents == pytest.approx(cents, abs=8)
    assert found.f0_gross_percent < 2


def test_an_octave_is_a_gross_error() -> None:
    found = voice_quality.voice_distance(sung(120), sung(240))
    assert found.f0_gross_percent > 95
    assert math.isnan(found.f0_cents)


def test_voicing(rng: np.random.Generator) -> None:
    """Half of a vowel whispered: half of the frames differ."""
    plain = sung(150)
    whispered = plain.copy()
    half = len(plain) // 2
    whispered[half:] = 0.05 * rng.standard_normal(len(plain) - half).astype(np.float32)
    assert 25 < voice_quality.voice_distance(plain, whispered).voicing_percent < 75


def test_too_little_or_silence() -> None:
    for pcm in (np.zeros(0, np.float32), np.ones(500, np.float32), np.zeros(RATE_HZ, np.float32)):
        with pytest.raises(EmptyAudio):
            voice_quality.voice_distance(pcm, sung(150))


def test_the_mean_ignores_missing_values() -> None:
    one, other = VoiceDistance(1.0, 0.5, math.nan, 100.0, 10.0), VoiceDistance(3.0, 1.5, 20.0, 0.0, 30.0)
    assert voice_quality.mean_voice_distance([one, other]) == VoiceDistance(2.0, 1.0, 20.0, 50.0, 20.0)
    assert math.isnan(voice_quality.mean_voice_distance([one]).f0_cents)
    with pytest.raises(OptionError):
        voice_quality.mean_voice_distance([])


def test_inaudible_joins(spoken: np.ndarray) -> None:
    found = voice_quality.join_quality(spoken, spoken, range(0, len(spoken), 4_096), RATE_HZ)
    assert msgspec.structs.astuple(found)[1:] == (0.0, 0.0)
    assert found.joins == len(range(0, len(spoken), 4_096)) - 1  # before the first there is nothing


def test_a_join_that_jumps() -> None:
    """A chunk that is twice as loud as it should be: 6 dB at either end of it."""
    whole = sung(200)
    chunked = whole.copy()
    chunked[8_192:12_288] *= 2
    found = voice_quality.join_quality(chunked, whole, range(4_096, len(whole), 4_096), RATE_HZ)
    assert found.jump_db == pytest.approx(6.0, abs=1.0)
    assert found.apart == pytest.approx(np.abs(whole[8_192:12_288]).max())
    assert voice_quality.join_quality(chunked, whole, [4_096, 16_384], RATE_HZ).jump_db == 0.0


def test_joins_of_different_audio_are_refused() -> None:
    with pytest.raises(OptionError, match="10 samples in chunks, 11"):
        voice_quality.join_quality(np.zeros(10), np.zeros(11), [5], RATE_HZ)


def test_a_speaker_is_similar_to_herself(spoken: np.ndarray) -> None:
    half = len(spoken) // 2
    try:
        same = voice_quality.similarity([spoken[:half]], [spoken[half:]], RATE_HZ)
    except WeightsMissing as missing:
        pytest.skip(str(missing))
    other = voice_quality.similarity([spoken], [sung(250, 3.0)], RATE_HZ)
    assert other < same <= 1.0


def test_a_round_trip(packaged_speech: Path) -> None:
    """A recogniser of ours understands what was said, and not what was not."""
    with wave.open(str(packaged_speech / "two_cities.wav")) as file:
        pcm = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32_768
        rate_hz = file.getframerate()
    with voice_quality.EvaluationRecognizer("moonshine-tiny-en") as listener:
        heard = listener.transcribe([pcm[: 4 * rate_hz], pcm[: 4 * rate_hz]], rate_hz)
        assert heard[0] == heard[1]
        assert "best of times" in heard[0].lower()
        wrong = listener.errors(["Something else entirely was read here today"], [pcm[: 4 * rate_hz]], rate_hz)
        right = listener.errors([heard[0]], [pcm[: 4 * rate_hz]], rate_hz)
    assert right.errors == 0
    assert wrong.percent > 80
