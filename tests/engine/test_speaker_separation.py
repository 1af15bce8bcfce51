"""Two who speak at once are separated by what each sounds like alone."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest
import torch

from asr_serve.devices import make_device
from asr_serve.engine.diarization_runner import DiarizationRunner, SeparationRequest
from asr_serve.engine.speaker_separation import separate_speakers
from asr_serve.engine.stats import EngineStats
from asr_serve.errors import EngineClosed, StepFailed

RATE_HZ = 16_000
CPU = torch.device("cpu")


def voice(seconds: float, pitches: tuple[float, float], seed: int) -> np.ndarray:
    """A buzz whose pitch and loudness change."""
    chance = np.random.default_rng(seed)
    count = int(seconds * RATE_HZ)
    steps = -(-count // 3_200)
    pitch = np.interp(np.arange(count), np.arange(steps) * 3_200, chance.uniform(*pitches, steps))
    phase = 2 * np.pi * np.cumsum(pitch) / RATE_HZ
    loud = np.interp(np.arange(count), np.arange(steps) * 3_200, chance.uniform(0.3, 1, steps))
    return (0.05 * loud * sum(np.sin(each * phase) / each for each in range(1, 12))).astype(np.float32)


def ratio_db(wanted: np.ndarray, found: np.ndarray) -> float:
    return float(10 * np.log10(np.square(wanted).sum() / np.square(wanted - found).sum()))


@pytest.fixture(scope="module")
def mixture() -> tuple[np.ndarray, tuple[tuple[tuple[int, int], ...], ...]]:
    """(2, samples): one speaks from 0 to 5 s, the other from 3 to 8 s."""
    tracks = np.zeros((2, 8 * RATE_HZ), np.float32)
    tracks[0, : 5 * RATE_HZ] = voice(5, (95, 110), 1)
    tracks[1, 3 * RATE_HZ :] = voice(5, (215, 240), 2)
    return tracks, (((0, 5 * RATE_HZ),), ((3 * RATE_HZ, 8 * RATE_HZ),))


def test_each_is_clearer_where_both_speak(mixture):
    tracks, speaker_ranges = mixture
    found = separate_speakers(tracks.sum(0), speaker_ranges, CPU)
    both = slice(3 * RATE_HZ, 5 * RATE_HZ)
    for own, track in zip(found, tracks, strict=True):
        assert ratio_db(track[both], own[both]) > ratio_db(track[both], tracks.sum(0)[both]) + 5


def test_who_speaks_alone_is_left_as_is_and_the_other_is_silent(mixture):
    tracks, speaker_ranges = mixture
    found = separate_speakers(tracks.sum(0), speaker_ranges, CPU)
    alone = slice(RATE_HZ, 2 * RATE_HZ)
    np.testing.assert_allclose(found[0, alone], tracks[0, alone], atol=1e-5)
    assert np.abs(found[1, alone]).max() < 1e-6
    assert found.shape == tracks.shape
    assert found.dtype == np.float32


def test_the_order_of_speakers_is_that_of_their_turns(mixture):
    tracks, speaker_ranges = mixture
    swapped = separate_speakers(tracks.sum(0), speaker_ranges[::-1], CPU)
    both = slice(3 * RATE_HZ, 5 * RATE_HZ)
    assert ratio_db(tracks[1][both], swapped[0][both]) > ratio_db(tracks[0][both], swapped[0][both])


def test_the_same_audio_gives_the_same_tracks(mixture):
    tracks, speaker_ranges = mixture
    one, other = (separate_speakers(tracks.sum(0), speaker_ranges, CPU) for _ in range(2))
    np.testing.assert_array_equal(one, other)


def test_one_who_never_speaks_alone_gets_what_the_other_does_not_explain(mixture):
    tracks, _ = mixture
    pcm = tracks.sum(0)[: 5 * RATE_HZ]
    found = separate_speakers(pcm, (((0, 5 * RATE_HZ),), ((3 * RATE_HZ, 5 * RATE_HZ),)), CPU)
    both = slice(3 * RATE_HZ, 5 * RATE_HZ)
    assert ratio_db(tracks[1][both], found[1][both]) > ratio_db(tracks[1][both], pcm[both])


@pytest.mark.parametrize("samples", [1, 300, 1_023, 20_000])
@pytest.mark.parametrize("speaker_ranges", [((), ()), (((0, 500),), ((0, 500),)), (((-5, 10**6),), ((-5, 10**6),))])
def test_any_length_and_silence_are_finite(samples, speaker_ranges):
    found = separate_speakers(np.zeros(samples, np.float32), speaker_ranges, CPU)
    assert found.shape == (2, samples)
    assert np.isfinite(found).all()


def test_the_loop_separates_between_windows_and_fails_what_waits_when_it_ends(mixture):
    tracks, speaker_ranges = mixture
    runner = DiarizationRunner(make_device("cpu", "fp32"), EngineStats())
    done, bad, late = (Future[np.ndarray]() for _ in range(3))
    runner.submit_separation(SeparationRequest(tracks.sum(0), speaker_ranges, done))
    runner.submit_separation(SeparationRequest(tracks.sum(0), speaker_ranges[:1], bad))
    assert runner.step(live=False, idle=False)
    assert done.result().shape == tracks.shape
    assert runner.step(live=False, idle=False)
    assert isinstance(bad.exception(), StepFailed)
    assert not runner.step(live=False, idle=False)
    runner.submit_separation(SeparationRequest(tracks.sum(0), speaker_ranges, late))
    assert not runner.step(live=True, idle=False)
    runner.close(EngineClosed("the test is over"))
    assert isinstance(late.exception(), EngineClosed)


def test_a_mixture_waits_for_other_work_while_live_callers_are_connected_up_to_a_limit(mixture, monkeypatch):
    tracks, speaker_ranges = mixture
    runner = DiarizationRunner(make_device("cpu", "fp32"), EngineStats())
    idle, overdue = Future[np.ndarray](), Future[np.ndarray]()
    runner.submit_separation(SeparationRequest(tracks.sum(0), speaker_ranges, idle))
    assert not runner.step(live=True, idle=False)
    assert runner.step(live=True, idle=True)
    assert idle.result().shape == tracks.shape
    monkeypatch.setattr("asr_serve.engine.diarization_runner.MAX_SEPARATION_WAIT_S", 0.0)
    runner.submit_separation(SeparationRequest(tracks.sum(0), speaker_ranges, overdue))
    assert runner.step(live=True, idle=False)
    assert overdue.result().shape == tracks.shape
