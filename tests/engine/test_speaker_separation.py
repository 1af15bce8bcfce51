"""Two who speak at once are separated by what each sounds like alone."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from asr_serve.devices import make_device
from asr_serve.diarization.overlapped_speech import SpeakerRanges
from asr_serve.engine import speaker_separation
from asr_serve.engine.speaker_separation import SeparationRequest, SeparationRunner, separate_speakers
from asr_serve.engine.stats import EngineStats
from asr_serve.errors import Cancelled, EngineClosed, StepFailed

RATE_HZ = 16_000
WAIT_S = 60


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
    found = separate_speakers(tracks.sum(0), speaker_ranges)
    both = slice(3 * RATE_HZ, 5 * RATE_HZ)
    for own, track in zip(found, tracks, strict=True):
        assert ratio_db(track[both], own[both]) > ratio_db(track[both], tracks.sum(0)[both]) + 5


def test_who_speaks_alone_is_left_as_is_and_the_other_is_silent(mixture):
    tracks, speaker_ranges = mixture
    found = separate_speakers(tracks.sum(0), speaker_ranges)
    alone = slice(RATE_HZ, 2 * RATE_HZ)
    np.testing.assert_allclose(found[0, alone], tracks[0, alone], atol=1e-5)
    assert np.abs(found[1, alone]).max() < 1e-6
    assert found.shape == tracks.shape
    assert found.dtype == np.float32


def test_the_order_of_speakers_is_that_of_their_turns(mixture):
    tracks, speaker_ranges = mixture
    swapped = separate_speakers(tracks.sum(0), speaker_ranges[::-1])
    both = slice(3 * RATE_HZ, 5 * RATE_HZ)
    assert ratio_db(tracks[1][both], swapped[0][both]) > ratio_db(tracks[0][both], swapped[0][both])


def test_the_same_audio_gives_the_same_tracks(mixture):
    tracks, speaker_ranges = mixture
    one, other = (separate_speakers(tracks.sum(0), speaker_ranges) for _ in range(2))
    np.testing.assert_array_equal(one, other)


def test_one_who_never_speaks_alone_gets_what_the_other_does_not_explain(mixture):
    tracks, _ = mixture
    pcm = tracks.sum(0)[: 5 * RATE_HZ]
    found = separate_speakers(pcm, (((0, 5 * RATE_HZ),), ((3 * RATE_HZ, 5 * RATE_HZ),)))
    both = slice(3 * RATE_HZ, 5 * RATE_HZ)
    assert ratio_db(tracks[1][both], found[1][both]) > ratio_db(tracks[1][both], pcm[both])


@pytest.mark.parametrize("samples", [1, 300, 1_023, 20_000])
@pytest.mark.parametrize("speaker_ranges", [((), ()), (((0, 500),), ((0, 500),)), (((-5, 10**6),), ((-5, 10**6),))])
def test_any_length_and_silence_are_finite(samples, speaker_ranges):
    found = separate_speakers(np.zeros(samples, np.float32), speaker_ranges)
    assert found.shape == (2, samples)
    assert np.isfinite(found).all()


class Jobs:
    """Jobs for the loop's thread, which the test is."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.runner = SeparationRunner(make_device("cpu", "fp32"), EngineStats(), self.jobs.put)

    def run_next(self) -> None:
        self.jobs.get(timeout=WAIT_S)()

    def submit(self, pcm: np.ndarray, speaker_ranges: SpeakerRanges) -> Future[np.ndarray]:
        answer: Future[np.ndarray] = Future()
        answer.set_running_or_notify_cancel()
        self.runner.submit(SeparationRequest(pcm, speaker_ranges, answer))
        return answer


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Jobs, threading.Event, list[str]]]:
    """A runner whose separations wait for the event; and the threads that they ran on."""
    go, threads = threading.Event(), list[str]()

    def separate(pcm: np.ndarray, speaker_ranges: SpeakerRanges) -> np.ndarray:
        threads.append(threading.current_thread().name)
        assert go.wait(WAIT_S)
        return separate_speakers(pcm, speaker_ranges)

    monkeypatch.setattr(speaker_separation, "separate_speakers", separate)
    jobs = Jobs()
    yield jobs, go, threads
    go.set()
    jobs.runner.close(EngineClosed("the test is over"))


def test_mixtures_are_separated_beside_the_loop_one_after_the_other(mixture, held):
    tracks, speaker_ranges = mixture
    jobs, go, threads = held
    one, bad, other = (
        jobs.submit(tracks.sum(0), each) for each in (speaker_ranges, speaker_ranges[:1], speaker_ranges)
    )
    assert jobs.runner.busy  # and the loop's thread is here, not in it
    assert not one.done()
    go.set()
    jobs.run_next()
    np.testing.assert_array_equal(one.result(0), separate_speakers(tracks.sum(0), speaker_ranges))
    jobs.run_next()
    assert isinstance(bad.exception(0), StepFailed)
    jobs.run_next()
    np.testing.assert_array_equal(other.result(0), one.result(0))
    assert not jobs.runner.busy
    assert len(threads) == 3
    assert all(name.startswith("asr-serve separation") for name in threads)


def test_a_mixture_that_nobody_waits_for_is_not_separated(mixture, held):
    tracks, speaker_ranges = mixture
    jobs, go, threads = held
    running, before, waiting = (jobs.submit(tracks.sum(0), speaker_ranges) for _ in range(3))
    jobs.runner.cancel(waiting)
    assert isinstance(waiting.exception(0), Cancelled)
    jobs.runner.cancel(running)  # it has begun
    jobs.runner.cancel(waiting)
    go.set()
    for answer in (running, before):
        jobs.run_next()
        assert answer.result(0).shape == tracks.shape
    assert len(threads) == 2


def test_what_waits_fails_when_the_engine_ends(mixture, held):
    tracks, speaker_ranges = mixture
    jobs, go, _ = held
    running, waiting = (jobs.submit(tracks.sum(0), speaker_ranges) for _ in range(2))
    go.set()
    jobs.runner.close(EngineClosed("the engine was closed"))
    assert isinstance(running.exception(0), EngineClosed)
    assert isinstance(waiting.exception(0), EngineClosed)
    jobs.run_next()  # what the thread reported meanwhile
    assert jobs.jobs.empty()
