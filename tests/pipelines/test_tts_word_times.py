"""Words of real speech, by models of every kind: they say the text, in order, and none lies in silence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from case_tiers import exhaustive_after
from live_client import run_session
from loaded_models import load_model

from asr_serve.api.library import Model
from asr_serve.models.registry import asr_card
from asr_serve.text.word_timing import locate_words
from asr_serve.types import Segment, Span
from asr_serve.units import ms_to_samples, s_to_samples

EDGE_SAMPLES = ms_to_samples(160)
"""So far into silence a word may reach: voice activity holds on for two or three windows of 32 ms."""


@pytest.fixture(scope="module", params=["moonshine-tiny-en", "whisper-tiny-en", "armspeech-hy"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    with load_model(request.param) as model:
        yield model


def pauses(speech: np.ndarray, pause_s: float) -> tuple[np.ndarray, list[Span]]:
    """Sentences with silence around each; and where that is."""
    parts, silent, at = [], [], 0
    for start_s, end_s in ((1.0, 2.8), (2.95, 4.6), (5.0, 6.55)):
        silence = np.zeros(s_to_samples(pause_s), np.float32)
        silent.append(Span(at, at + len(silence)))
        parts += [silence, speech[s_to_samples(start_s) : s_to_samples(end_s)]]
        at += len(parts[-1]) + len(silence)
    parts.append(np.zeros(s_to_samples(pause_s), np.float32))
    silent.append(Span(at, at + len(parts[-1])))
    return np.concatenate(parts), silent


def expect_words(segments: Sequence[Segment], silent: Sequence[Span] = ()) -> None:
    at = 0
    for segment in segments:
        assert segment.start_samples >= at
        at = segment.start_samples
        where = locate_words(segment.text, segment.words)
        assert "".join(word.text for word in segment.words) == segment.text.replace(" ", "")
        assert [segment.text[first:behind] for first, behind in where] == [word.text for word in segment.words]
        for word in segment.words:
            assert at <= word.start_samples < word.end_samples <= segment.end_samples
            assert 0 < word.confidence <= 1
            at = word.end_samples
            for each in silent:
                inside = min(word.end_samples, each.end_samples) - max(word.start_samples, each.start_samples)
                assert inside <= EDGE_SAMPLES, (word, each)


def times(segments: Sequence[Segment]) -> list[tuple[str, int, int]]:
    return [(word.text, word.start_samples, word.end_samples) for segment in segments for word in segment.words]


@pytest.mark.slow
@pytest.mark.parametrize("pause_s", exhaustive_after(1, [0.4, 3.0]))
@pytest.mark.parametrize("vad", [True, False])
@pytest.mark.repeats(model="armspeech-hy", vad=False)
def test_words_are_in_order_and_not_in_pauses(model: Model, cities: np.ndarray, vad: bool, pause_s: float) -> None:
    pcm, silent = pauses(cities, pause_s)
    (found,) = model.transcribe(pcm, words=True, vad=vad)
    assert sum(len(segment.words) for segment in found.segments) > 2
    expect_words(found.segments, silent)
    (plain,) = model.transcribe(pcm, vad=vad)
    assert plain.text == found.text
    assert not any(segment.words for segment in plain.segments)
    assert [(s.start_samples, s.end_samples) for s in plain.segments] == [
        (s.start_samples, s.end_samples) for s in found.segments
    ]


@pytest.mark.slow
@pytest.mark.parametrize("pause_s", exhaustive_after(1, [0.4, 3.0]))
@pytest.mark.repeats(model="whisper-tiny-en")
def test_live_words_do_not_depend_on_how_the_audio_comes(model: Model, cities: np.ndarray, pause_s: float) -> None:
    pcm, silent = pauses(cities, pause_s)
    want = run_session(model, pcm, [len(pcm)], words=True).segments
    expect_words(want, silent)
    assert want
    for sizes in ([1_600], [511, 7_001]):
        found = run_session(model, pcm, sizes, words=True).segments
        assert times(found) == times(want)


@pytest.mark.slow
@pytest.mark.repeats(model="whisper-tiny-en")
def test_live_words_where_a_segment_is_cut_in_speech(model: Model, cities: np.ndarray) -> None:
    """Twelve seconds of which little is a pause, cut every few."""
    cities = cities[: s_to_samples(12.0)]
    caller = run_session(model, cities, [4_000], words=True, max_segment_ms=4_000)
    assert len(caller.segments) > 2
    expect_words(caller.segments)
    plain = run_session(model, cities, [4_000], max_segment_ms=4_000)
    assert [segment.text for segment in plain.segments] == [segment.text for segment in caller.segments]


def test_windows_have_words_too(model: Model, cities: np.ndarray) -> None:
    if asr_card(model.card.name).kind != "whisper":
        pytest.skip("one that says when something was said")
    pcm, silent = pauses(cities, 3.0)
    for vad in (True, False):
        (found,) = model.transcribe(pcm, words=True, long_form="sequential", vad=vad)
        assert sum(len(segment.words) for segment in found.segments) > 8
        expect_words(found.segments, silent)


@pytest.mark.slow
@pytest.mark.parametrize("kind", exhaustive_after(2, ["noise", "a second", "silence", "hum"]))
@pytest.mark.repeats(kind="a second", model={"whisper-tiny-en", "armspeech-hy"})
def test_what_is_no_speech_has_no_words_to_place(
    model: Model, cities: np.ndarray, kind: str, rng: np.random.Generator
) -> None:
    seconds = np.arange(4 * 16_000) / 16_000
    pcm = {
        "silence": np.zeros(len(seconds)),
        "noise": 0.05 * rng.standard_normal(len(seconds)),
        "hum": 0.2 * np.sin(2 * np.pi * 110 * seconds),
        "a second": cities[18_000:34_000],
    }[kind].astype(np.float32)
    for vad in (True, False):
        (found,) = model.transcribe(pcm, words=True, vad=vad)
        expect_words(found.segments)
    expect_words(run_session(model, pcm, [1_600], words=True).segments)
