"""Windows that wait to be heard for speakers: how many go in a step, and what they hear of each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from asr_serve.audio.reader import read_audio
from asr_serve.devices import make_device
from asr_serve.diarization.local_speakers import BUDGET_SAMPLES, LocalSpeakers
from asr_serve.engine import diarization_runner
from asr_serve.engine.diarization_runner import (
    LIVE_STEP_WINDOWS,
    MAX_STEP_WINDOWS,
    DiarizationRequest,
    DiarizationRunner,
    WindowDiarizer,
    models_available,
)
from asr_serve.engine.stats import EngineStats
from asr_serve.errors import EngineClosed, StepFailed

WINDOW = np.zeros(16_000, np.float32)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[DiarizationRunner, list[int]]]:
    """A queue, and how many windows each of its steps took."""
    taken: list[int] = []

    class Counting(WindowDiarizer):
        def diarize(self, asked):
            taken.append(len(asked))
            return [LocalSpeakers(0, 270, 3, b"")] * len(asked)

    monkeypatch.setattr(
        diarization_runner.WindowDiarizer, "load", classmethod(lambda cls, device: Counting(None, None, device))
    )
    voices = DiarizationRunner(make_device("cpu", "fp32"), EngineStats())
    yield voices, taken
    voices.close(EngineClosed("the test is over"))


def ask(
    voices: DiarizationRunner, windows: int, budget: int = BUDGET_SAMPLES, live: bool = False
) -> list[Future[LocalSpeakers]]:
    answers = [Future[LocalSpeakers]() for _ in range(windows)]
    for answer in answers:
        voices.submit(DiarizationRequest(WINDOW, budget, live, answer))
    return answers


def test_steps_are_short_while_a_live_session_is_open(steps):
    voices, taken = steps
    answers = ask(voices, 2 * MAX_STEP_WINDOWS)
    while voices.step(live=True, idle=False):
        pass
    assert taken == [LIVE_STEP_WINDOWS] * (2 * MAX_STEP_WINDOWS // LIVE_STEP_WINDOWS)
    assert LIVE_STEP_WINDOWS == 1
    assert all(answer.done() for answer in answers)


@pytest.mark.parametrize("on_line", [True, False])
def test_live_windows_go_before_those_of_recordings(steps, on_line):
    voices, _ = steps
    recordings = ask(voices, MAX_STEP_WINDOWS)
    (mine,) = ask(voices, 1, live=True)
    assert voices.step(live=on_line, idle=False)
    assert mine.done()
    assert not any(answer.done() for answer in recordings)


def test_live_windows_do_not_wait_for_a_batch(steps):
    voices, taken = steps
    ask(voices, 1, live=True)
    assert voices.step(live=False, idle=False)
    assert taken == [1]


def test_windows_are_batched_beside_other_work(steps):
    voices, taken = steps
    ask(voices, MAX_STEP_WINDOWS - 1)
    assert not voices.step(live=False, idle=False)
    ask(voices, 2)
    assert voices.step(live=False, idle=False)
    assert not voices.step(live=False, idle=False)
    assert taken == [MAX_STEP_WINDOWS]


def test_expensive_windows_make_smaller_steps(steps):
    voices, taken = steps
    each = diarization_runner.STEP_BUDGET_SAMPLES // 3
    ask(voices, MAX_STEP_WINDOWS, each)
    while voices.step(live=False, idle=True):
        pass
    assert taken == [3] * (MAX_STEP_WINDOWS // 3) + [MAX_STEP_WINDOWS % 3]
    ask(voices, 1, 2 * diarization_runner.STEP_BUDGET_SAMPLES)
    assert voices.step(live=False, idle=True)


def test_windows_do_not_wait_in_an_idle_engine(steps):
    voices, taken = steps
    assert not voices.step(live=False, idle=True)
    (answer,) = ask(voices, 1)
    assert voices.step(live=False, idle=True)
    assert taken == [1]
    assert answer.done()


def test_the_wait_beside_constant_work_is_bounded(steps, monkeypatch):
    voices, taken = steps
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    ask(voices, 1)
    assert not voices.step(live=False, idle=False)
    now += diarization_runner.MAX_WAIT_S
    assert voices.step(live=False, idle=False)
    assert taken == [1]


@pytest.fixture(scope="module")
def hearing() -> WindowDiarizer:
    if not models_available():
        pytest.skip("the models are not installed: make setup")
    return WindowDiarizer.load(make_device("cpu", "fp32"))


@pytest.fixture(scope="module")
def windows(packaged_speech: Path) -> list[np.ndarray]:
    one, other = (read_audio(packaged_speech / name) for name in ("two_cities.wav", "beckett.wav"))
    return [one[:80_000], other[:80_000], one[40_000:120_000], other[:48_000], np.zeros(80_000, np.float32)]


@pytest.mark.slow
def test_windows_of_a_batch_do_not_affect_each_other(hearing, windows):
    together = hearing.diarize([(each, BUDGET_SAMPLES) for each in windows])
    for pcm, found in zip(windows, together, strict=True):
        (alone,) = hearing.diarize([(pcm, BUDGET_SAMPLES)])
        assert (alone.who, alone.clean_samples) == (found.who, found.clean_samples)
        assert np.abs(alone.likely.astype(int) - found.likely).max(initial=0) <= 1
        np.testing.assert_allclose(alone.embeddings, found.embeddings, atol=1e-3)


def test_activity_without_embeddings(hearing, windows):
    heard, silent = hearing.diarize([(windows[0], BUDGET_SAMPLES), (windows[0], 0)])
    assert heard.who
    assert (silent.who, silent.voices) == ((), b"")
    assert silent.chances == heard.chances


def test_a_model_that_cannot_be_loaded_fails_its_requests_only(steps, monkeypatch):
    voices, taken = steps
    counting = diarization_runner.WindowDiarizer.load

    def broken(device):
        raise RuntimeError("no memory")

    monkeypatch.setattr(diarization_runner.WindowDiarizer, "load", broken)
    (answer,) = ask(voices, 1)
    assert voices.step(live=True, idle=False)
    with pytest.raises(StepFailed, match="no memory"):
        answer.result(0)
    monkeypatch.setattr(diarization_runner.WindowDiarizer, "load", counting)
    (answer,) = ask(voices, 1)
    assert voices.step(live=True, idle=False)
    assert answer.result(0).speakers == 3
    assert taken == [1]
