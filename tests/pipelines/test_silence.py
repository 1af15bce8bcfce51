"""Where nobody speaks: of probabilities, window by window, and of how loud it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr_serve.audio import read_audio
from asr_serve.audio.endpointing import WINDOW_SAMPLES as W
from asr_serve.pipelines.silence_tracker import (
    MIN_SILENCE_WINDOWS,
    ONSET_SAMPLES,
    SILENCE_THRESHOLD,
    SilenceTracker,
    silences_by_level,
)
from asr_serve.types import Span

ALL = Span(0, 1_000 * W)


def told(*probabilities: float, threshold: float = 1.0) -> SilenceTracker:
    quiet = SilenceTracker(threshold)
    quiet.append_scores(np.array(probabilities))
    return quiet


def test_a_pause_ends_where_a_word_may_begin() -> None:
    quiet = told(*[0.9] * 5, *[0.01] * 8, *[0.9] * 5)
    assert quiet.silences_in(Span(0, 18 * W)) == (Span(5 * W, 13 * W - ONSET_SAMPLES),)


def test_what_is_short_may_be_within_a_word() -> None:
    assert told(0.9, *[0.01] * (MIN_SILENCE_WINDOWS - 1), 0.9).silences_in(Span(0, (MIN_SILENCE_WINDOWS + 1) * W)) == ()


def test_the_ends_of_a_segment_are_no_words() -> None:
    quiet = told(0.01, 0.01, 0.9, 0.9, 0.01)
    assert quiet.silences_in(Span(100, 4 * W + 10)) == (Span(100, 2 * W - ONSET_SAMPLES), Span(4 * W, 4 * W + 10))


def test_a_threshold_below_is_believed() -> None:
    heard = [0.9, *[SILENCE_THRESHOLD / 2] * 9, 0.9]
    assert told(*heard).silences_in(ALL)
    assert not told(*heard, threshold=SILENCE_THRESHOLD / 3).silences_in(ALL)


@given(st.lists(st.floats(0, 1), max_size=60), st.integers(0, 60 * W), st.integers(1, 60 * W), st.integers(0, 30 * W))
def test_stretches_are_in_order_inside_and_quiet(heard: list[float], start: int, samples: int, forget: int) -> None:
    span, quiet = Span(start, start + samples), SilenceTracker()
    for at in range(0, len(heard), 7):  # pieces of any size
        quiet.append_scores(np.array(heard[at : at + 7]))
    found = quiet.silences_in(span)
    at = start
    for each in found:
        assert at <= each.start_samples < each.end_samples <= span.end_samples
        windows = heard[each.start_samples // W : -(-each.end_samples // W)]
        assert windows
        assert max(windows) < SILENCE_THRESHOLD
        at = each.end_samples
    if forget <= start:
        quiet.forget_before(forget)
        assert quiet.silences_in(span) == found


def test_silence_between_words_is_quiet_by_its_level(packaged_speech: Path) -> None:
    speech = read_audio(packaged_speech / "two_cities.wav")[16_000:64_000]
    hum = 0.003 * np.sin(np.arange(32_000) / 30).astype(np.float32)
    pcm = np.concatenate([speech, hum, speech]).astype(np.float32)
    found = silences_by_level(pcm, Span(1_000, 1_000 + len(pcm)))
    inside = [each for each in found if each.end_samples > 50_000 and each.start_samples < 80_000]
    assert any(each.samples > 24_000 for each in inside)
    spoken = sum(each.samples for each in found if each.end_samples < 49_000)
    assert spoken < 0.5 * len(speech)


@pytest.mark.parametrize("level", [0.0, 0.1])
def test_what_is_all_alike_is_told_by_no_level(level: float, rng: np.random.Generator) -> None:
    pcm = (level * rng.standard_normal(64_000)).astype(np.float32)
    found = silences_by_level(pcm, Span(0, len(pcm)))
    assert found == ((Span(0, len(pcm)),) if level == 0 else ())
    assert silences_by_level(pcm[:100], Span(0, 100)) == ()
