"""A live caller of a streaming model: heard once, and what is said depends on the audio alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from listen_caller import Caller, hear, on_loop

from asr_serve.api import library
from asr_serve.api.library import Model
from asr_serve.audio import read_audio
from asr_serve.config import EngineConfig
from asr_serve.engine.streaming import executor
from asr_serve.errors import AtCapacity, UnsupportedOption
from asr_serve.units import RATE_HZ, s_to_samples

NEMO = Path(__file__).parents[1] / "models" / "fixtures" / "fastconformer_hybrid.nemo"


@pytest.fixture(scope="module", params=[1, 4], ids=["greedy", "beam"])
def model(request: pytest.FixtureRequest, packaged_speech: Path) -> Iterator[Model]:
    """Random weights: they babble, whatever they hear."""
    config = EngineConfig(use_chunked_inference=True, max_sessions=8, chunk_wait_ms=1.0, beam=request.param)
    with Model.load(
        "fastconformer-streaming-medium-en",
        weights=NEMO,
        device="cpu",
        dtype="fp32",
        turn_model="none",
        engine=config,
    ) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def speech(packaged_speech: Path) -> np.ndarray:
    """Three stretches of speech with pauses between."""
    found = read_audio(packaged_speech / "two_cities.wav")
    pause = np.zeros(s_to_samples(1.2), np.float32)
    return np.concatenate(
        [found[: 4 * RATE_HZ], pause, found[6 * RATE_HZ : 9 * RATE_HZ], pause, found[: 2 * RATE_HZ]]
    )


def expect_empty(model: Model) -> None:
    def look(loop) -> None:
        loop.check()
        assert (len(loop.streams._streams), len(loop.vad_scheduler)) == (0, 0)

    on_loop(model._client, look)
    told = model._client.describe()
    assert (told["sessions"], told["slots_used"], told["sessions_used"]) == (0, 0, 0)


@pytest.mark.slow
def test_the_text_does_not_depend_on_how_it_comes(model: Model, speech: np.ndarray):
    want = hear(model, speech)
    assert len(want.segments) >= 2
    assert len(want.text.split()) > 5
    chance = random.Random(3)
    for sizes in ([512], [160, 4_000, 37], [chance.randrange(1, 9_000) for _ in range(50)]):
        assert hear(model, speech, sizes).said == want.said
    slowly = hear(model, speech, [1_600], in_step=True)
    assert slowly.said == want.said
    assert any(partial.locked_text for partial in slowly.partials), "nothing was locked before its end"
    assert len(slowly.partials) > 10
    expect_empty(model)


def test_a_file_says_the_same_words_where_it_is_cut_alike(model: Model, speech: np.ndarray):
    """The recording is cut at the same pauses; what is heard after them differs by a little silence."""
    transcript = model.transcribe(speech)[0]
    assert transcript.text
    assert transcript.segments[0].start_samples == hear(model, speech).segments[0].start_samples
    expect_empty(model)


def test_what_it_cannot_do_is_refused(model: Model, speech: np.ndarray):
    """Rather than taken for nothing."""
    with pytest.raises(UnsupportedOption, match=r"temperature=0\.4.*has no decoder to sample from") as refused:
        model.transcribe(speech, temperatures=(0.4,))
    assert refused.value.param == "temperature"
    with pytest.raises(UnsupportedOption, match=r"beam=5\..*engine\.beam") as refused:
        model.transcribe(speech, beam=5)
    assert refused.value.param == "beam"
    assert model.transcribe(speech[:RATE_HZ], temperatures=(0.0,)) == model.transcribe(speech[:RATE_HZ])
    expect_empty(model)


def test_a_caller_for_whom_there_is_no_slot_is_told(
    model: Model, speech: np.ndarray, monkeypatch: pytest.MonkeyPatch
):
    client = model._client
    monkeypatch.setattr(executor, "MAX_WAIT_S", 0.0)
    others = [client.open_stream(live=True) for _ in range(client.config.max_sessions)]
    heard = [other.submit_audio(speech[:100]) for other in others]
    on_loop(client, lambda loop: loop.executor.step())
    with pytest.raises(AtCapacity, match="wait for one of 8 slots") as refused:
        hear(model, speech[: 2 * RATE_HZ])
    assert refused.value.retry_after_ms > 0
    for other in others:
        other.close()
    assert len(heard) == 8
    assert hear(model, speech[: 2 * RATE_HZ]).said == hear(model, speech[: 2 * RATE_HZ]).said
    expect_empty(model)


def test_a_flush_ends_what_is_open(model: Model, speech: np.ndarray):
    with Caller(model) as caller:
        for number, at in enumerate(range(0, 4 * RATE_HZ, 24_000)):
            caller.write(speech[at : at + 24_000])
            caller.flush(str(number))
        caller.finish()
    assert len(caller.flushed) == 3
    assert len(caller.segments) >= 2
    expect_empty(model)


@pytest.mark.slow
def test_speech_without_a_pause_is_cut_and_nothing_is_said_twice(model: Model, packaged_speech: Path):
    """The stream goes on over the cuts: together the segments say what the stream says."""
    pcm = read_audio(packaged_speech / "two_cities.wav")[: 14 * RATE_HZ]
    options = {"max_segment_ms": 3_000, "silence_schedule": "inf:2000"}
    whole = hear(model, pcm, silence_schedule="inf:2000")
    cut = hear(model, pcm, [3_000], **options)
    assert len(cut.segments) >= 4
    assert len(whole.segments) < len(cut.segments)
    assert cut.said == hear(model, pcm, [700, 9_000], **options).said
    if len(whole.segments) == 1:
        tokens = [token for segment in cut.segments for token in segment.tokens]
        assert tokens == list(whole.segments[0].tokens)
    expect_empty(model)


@pytest.mark.slow
def test_many_at_once_hear_only_themselves(model: Model, speech: np.ndarray):
    cuts = [speech[RATE_HZ * k // 2 :] for k in range(6)]
    want = [hear(model, cut).said for cut in cuts]
    callers = [Caller(model) for _ in cuts]
    for at in itertools.count(0, 2_560):
        for caller, cut in zip(callers, cuts, strict=True):
            if at < len(cut):
                caller.write(cut[at : at + 2_560])
        if at >= max(map(len, cuts)):
            break
    for caller in callers:
        caller.finish()
    assert [caller.said for caller in callers] == want
    expect_empty(model)


def test_who_hangs_up_leaves_nothing(model: Model, speech: np.ndarray):
    for seconds in (0.3, 1.0, 3.1, 5.5):
        with Caller(model) as caller:
            caller.write(speech[: s_to_samples(seconds)])
    expect_empty(model)


def test_a_failed_step_is_made_good(model: Model, speech: np.ndarray):
    want = hear(model, speech)
    loop = model._client.backend.loop
    wrapper, count = loop.streams.model_runner, itertools.count()
    step = wrapper.step

    def failing(sessions, now_ms):
        if next(count) in (3, 9):
            raise RuntimeError("on purpose")
        return step(sessions, now_ms)

    wrapper.step = failing
    try:
        got = hear(model, speech, [1_600], in_step=True)
    finally:
        wrapper.step = step
    assert got.said == want.said
    expect_empty(model)


def test_the_library_offers_it_as_any_other(model: Model):
    assert isinstance(model, library.Model)
    assert model._client.card.streaming
