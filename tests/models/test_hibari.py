"""hibari through our model file, beside the package's own samples."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from asr_serve import devices
from asr_serve.errors import OptionError, UnknownVoice, WeightsCorrupt, WeightsMissing
from asr_serve.models.checkpoints import store
from asr_serve.models.checkpoints.onnx_session import OnnxSession
from asr_serve.models.interfaces import SynthesizedSentence
from asr_serve.models.registry import tts_card
from asr_serve.models.tts import hibari, prosody
from asr_serve.types import PhonemeSpan, Sentence

CARD = tts_card("hibari")
HELLO = "həlˈO ðˈɛɹ, hˌW ɑɹ ju dˈuɪŋ tədˈA?"
RATE_HZ = 24_000


@cache
def model() -> hibari.Model:
    try:
        folder = store.verified_published_folder(CARD)
    except WeightsMissing as missing:
        pytest.skip(str(missing))
    return hibari.load(folder, CARD, devices.make_device("cpu", "fp32"))


def say(*stretches: PhonemeSpan, seed: int = 0) -> SynthesizedSentence:
    said = Sentence(stretches, "heart", seed)
    model().validate(said)
    return model().synthesize(said)


def pitch_hz(pcm: np.ndarray) -> float:
    """Of what is voiced, the median: where each 50 ms looks most like itself."""
    found = []
    for at in range(0, len(pcm) - 1_200, 600):
        window = pcm[at : at + 1_200] - pcm[at : at + 1_200].mean()
        if np.abs(window).max() < 0.03:
            continue
        likeness = np.correlate(window, window, "full")[1_199:]
        lag = 60 + int(likeness[60:300].argmax())
        if likeness[lag] > 0.5 * likeness[0]:
            found.append(RATE_HZ / lag)
    return float(np.median(found))


@pytest.mark.parametrize("speed", [1.0, 1.3])
def test_the_same_samples_as_the_package_makes_but_for_the_silence_at_the_ends(speed):
    ours = say(PhonemeSpan(HELLO, speed=speed), seed=7)
    package: Any = pytest.importorskip("hibari").Hibari(threads=1)
    theirs = package.from_phonemes(HELLO, speed=speed, seed=7)
    starts = [
        at
        for at in range(len(theirs) - len(ours.pcm) + 1)
        if np.allclose(theirs[at : at + 64], ours.pcm[:64], atol=1e-6)
    ]
    assert starts
    np.testing.assert_allclose(theirs[starts[0] : starts[0] + len(ours.pcm)], ours.pcm, atol=1e-6)
    assert np.abs(theirs[: starts[0]]).max() <= prosody.QUIET
    assert np.abs(theirs[starts[0] + len(ours.pcm) :]).max(initial=0) <= prosody.QUIET


def test_phonemes_end_in_order_and_the_last_one_with_the_sound():
    spoken = say(PhonemeSpan(HELLO))
    assert len(spoken.phoneme_ends_samples) == len(HELLO)
    assert list(spoken.phoneme_ends_samples) == sorted(spoken.phoneme_ends_samples)
    assert spoken.phoneme_ends_samples[-1] == len(spoken.pcm)
    assert 1.5 < len(spoken.pcm) / RATE_HZ < 3


def test_a_stretch_has_a_speed_of_its_own():
    half = HELLO.index(",")
    plain = say(PhonemeSpan(HELLO))
    slow = say(PhonemeSpan(HELLO[:half]), PhonemeSpan(HELLO[half:], speed=0.5))
    first, second = plain.phoneme_ends_samples[half - 2], len(plain.pcm) - plain.phoneme_ends_samples[half - 2]
    assert abs(slow.phoneme_ends_samples[half - 2] - first) <= 1_200
    assert len(slow.pcm) - slow.phoneme_ends_samples[half - 2] == pytest.approx(2 * second, rel=0.15)


@pytest.mark.parametrize("semitones", [-7.0, 5.0])
def test_pitch_is_moved_by_semitones(semitones):
    plain, moved = say(PhonemeSpan(HELLO)), say(PhonemeSpan(HELLO, pitch=semitones))
    assert len(moved.pcm) == pytest.approx(len(plain.pcm), abs=2_400)
    assert pitch_hz(moved.pcm) / pitch_hz(plain.pcm) == pytest.approx(2 ** (semitones / 12), rel=0.06)


def test_energy_is_loudness():
    plain, loud = say(PhonemeSpan(HELLO)), say(PhonemeSpan(HELLO, energy=6.0))
    start = max(0, len(loud.pcm) - len(plain.pcm))
    ratio = np.sqrt((loud.pcm[start:] ** 2).mean() / (plain.pcm**2).mean())
    assert 20 * np.log10(ratio) == pytest.approx(6, abs=0.3)
    half = HELLO.index(",")
    partly = say(PhonemeSpan(HELLO[:half], energy=-12.0), PhonemeSpan(HELLO[half:]))
    assert np.abs(np.diff(partly.pcm)).max() < 1.5 * np.abs(np.diff(plain.pcm)).max()  # no click between


def test_a_seed_decides_what_is_random():
    first, again, other = (
        say(PhonemeSpan(HELLO), seed=1),
        say(PhonemeSpan(HELLO), seed=1),
        say(PhonemeSpan(HELLO), seed=2),
    )
    np.testing.assert_array_equal(first.pcm, again.pcm)
    assert first.pcm.shape != other.pcm.shape or (first.pcm != other.pcm).any()


@pytest.mark.parametrize("text", ["A", ".", " ", "ˈ" * 400])
def test_odd_sentences_are_said(text):
    spoken = say(PhonemeSpan(text))
    assert len(spoken.phoneme_ends_samples) == len(text)
    assert np.isfinite(spoken.pcm).all()
    assert spoken.phoneme_ends_samples[-1] == len(spoken.pcm) > 0


def test_what_it_cannot_say():
    with pytest.raises(OptionError, match=r"'漢' \(U\+6F22\)"):
        say(PhonemeSpan("a漢"))
    with pytest.raises(UnknownVoice, match="voices: heart"):
        model().validate(Sentence((PhonemeSpan("a"),), "emma"))


def test_what_is_no_graph_is_corrupt(tmp_path):
    (tmp_path / "broken.onnx").write_bytes(b"no graph at all")
    with pytest.raises(WeightsCorrupt, match=r"broken\.onnx"):
        OnnxSession(tmp_path / "broken.onnx")
    with pytest.raises(WeightsCorrupt, match=r"broken\.onnx"):
        OnnxSession(tmp_path / "broken.onnx", ("inside",))
