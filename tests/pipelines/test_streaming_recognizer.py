"""A live session of a streaming model: segments depend on the audio alone, and audio is encoded once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_clients import NEMO, NEMO_MODEL, fail_calls
from live_client import LiveClient, run_session
from tiny_moonshine import on_loop

from asr_serve.api import library
from asr_serve.api.library import Model
from asr_serve.audio import read_audio
from asr_serve.config import EngineConfig
from asr_serve.engine import vad_scheduler
from asr_serve.engine.streaming import executor
from asr_serve.errors import AtCapacity, UnsupportedOption
from asr_serve.units import RATE_HZ, s_to_samples


@pytest.fixture(scope="module", params=[1, 4], ids=["greedy", "beam"])
def model(request: pytest.FixtureRequest, packaged_speech: Path) -> Iterator[Model]:
    """Random weights: they babble, whatever the audio."""
    config = EngineConfig(use_chunked_inference=True, max_sessions=8, chunk_wait_ms=1.0, beam=request.param)
    with Model.load(NEMO_MODEL, weights=NEMO, device="cpu", dtype="fp32", turn_model="none", engine=config) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def speech(packaged_speech: Path) -> np.ndarray:
    """Three stretches of speech with pauses between."""
    found = read_audio(packaged_speech / "two_cities.wav")
    pause = np.zeros(s_to_samples(1.2), np.float32)
    return np.concatenate([found[: 4 * RATE_HZ], pause, found[6 * RATE_HZ : 9 * RATE_HZ], pause, found[: 2 * RATE_HZ]])


@pytest.fixture(autouse=True)
def idle_afterwards(model: Model) -> Iterator[None]:
    yield

    def look(loop) -> None:
        loop.check()
        assert (len(loop.streams._streams), len(loop.vad_scheduler)) == (0, 0)

    on_loop(model._client, look)
    stats = model._client.describe()
    assert (stats["sessions"], stats["slots_used"], stats["sessions_used"]) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.repeats(model=1)
def test_packets_change_no_segment(model: Model, speech: np.ndarray):
    want = run_session(model, speech)
    assert len(want.segments) >= 2
    assert len(want.text.split()) > 5
    chance = random.Random(3)
    for sizes in ([512], [160, 4_000, 37], [chance.randrange(1, 9_000) for _ in range(50)]):
        assert run_session(model, speech, sizes).spans == want.spans
    slowly = run_session(model, speech, [1_600], in_step=True)
    assert slowly.spans == want.spans
    assert any(partial.locked_text for partial in slowly.partials), "nothing was locked before its end"
    assert len(slowly.partials) > 10


def test_a_file_starts_its_segments_where_a_session_does(model: Model, speech: np.ndarray):
    """The recording is cut at the same pauses; what is heard after them differs by a little silence."""
    transcript = model.transcribe(speech)[0]
    assert transcript.text
    assert transcript.segments[0].start_samples == run_session(model, speech).segments[0].start_samples


def test_unsupported_options_are_refused(model: Model, speech: np.ndarray):
    """Rather than taken for nothing."""
    for options, param, match in (
        ({"temperatures": (0.4,)}, "temperature", r"temperature=0\.4.*has no decoder to sample from"),
        ({"repetition_penalty": 1.5}, "repetition_penalty", r"has no decoder whose answer could repeat"),
        ({"max_new_tokens": 5}, "max_new_tokens", r"max_new_tokens=5\..* has no decoder"),
        ({"beam": 5}, "beam", r"beam=5\..*engine\.beam"),
    ):
        with pytest.raises(UnsupportedOption, match=match) as refused:
            model.transcribe(speech, **options)
        assert refused.value.param == param
    assert model.transcribe(speech[:RATE_HZ], temperatures=(0.0,)) == model.transcribe(speech[:RATE_HZ])


def test_a_session_without_a_slot_is_refused(model: Model, speech: np.ndarray, monkeypatch: pytest.MonkeyPatch):
    client = model._client
    monkeypatch.setattr(executor, "MAX_WAIT_S", 0.0)
    others = [client.open_stream(live=True) for _ in range(client.config.max_sessions)]
    heard = [other.submit_audio(speech[:100]) for other in others]
    on_loop(client, lambda loop: loop.executor.step())
    with pytest.raises(AtCapacity, match="wait for one of 8 slots") as refused:
        run_session(model, speech[: 2 * RATE_HZ])
    assert refused.value.retry_after_ms > 0
    for other in others:
        other.close()
    assert len(heard) == 8
    assert run_session(model, speech[: 2 * RATE_HZ]).spans == run_session(model, speech[: 2 * RATE_HZ]).spans


def test_a_flush_ends_the_open_segment(model: Model, speech: np.ndarray):
    with LiveClient(model) as caller:
        for number, at in enumerate(range(0, 4 * RATE_HZ, 24_000)):
            caller.write(speech[at : at + 24_000])
            caller.flush(str(number))
        caller.finish()
    assert len(caller.flushed) == 3
    assert len(caller.segments) >= 2


def streamed_samples(model: Model) -> int:
    """Audio that the sessions of all streams have received."""
    found: list[int] = []
    on_loop(
        model._client, lambda loop: found.extend(s.audio_buffer.samples for s in loop.streams.model_runner._sessions)
    )
    return sum(found)


def test_words_do_not_wait_for_voice_activity(model: Model, speech: np.ndarray, monkeypatch: pytest.MonkeyPatch):
    """Once a segment is open, audio is recognized as it comes, as much as is recognized of any pause."""
    with LiveClient(model) as caller:
        for at in range(0, 2 * RATE_HZ, 1_600):
            caller.write(speech[at : at + 1_600])
            caller.settle()
        before = streamed_samples(model)
        with monkeypatch.context() as stopped:
            stopped.setattr(vad_scheduler, "VAD_STEP_INTERVAL_S", 3_600.0)
            for at in range(2 * RATE_HZ, 3 * RATE_HZ, 1_600):
                caller.write(speech[at : at + 1_600])
            while streamed_samples(model) < before + 0.15 * RATE_HZ:
                caller.answer()
        on_loop(model._client, lambda loop: None)  # it sleeps until the step that was put off
        caller.finish()
    assert caller.spans == run_session(model, speech[: 3 * RATE_HZ]).spans


def test_of_a_pause_only_its_beginning_is_recognized(model: Model, speech: np.ndarray):
    """A long silence costs no more than a short one; speech that resumes in the same segment is recognized with the
    silence before it."""
    pause = np.zeros(s_to_samples(1.2), np.float32)
    spoken = np.concatenate([speech[: 2 * RATE_HZ], pause])
    with LiveClient(model, silence_schedule="inf:4000") as caller:
        counts = []
        for at in range(0, len(spoken), 1_600):
            caller.write(spoken[at : at + 1_600])
            caller.settle()
            counts.append(streamed_samples(model))
        assert counts[-1] == counts[-5] < len(spoken) - 0.4 * RATE_HZ, "the pause was recognized"
        for at in range(0, 2 * RATE_HZ, 1_600):
            caller.write(speech[at : at + 1_600])
            caller.settle()
        assert streamed_samples(model) > counts[-1] + len(pause)
        caller.finish()
    resumed = np.concatenate([spoken, speech[: 2 * RATE_HZ]])
    assert caller.spans == run_session(model, resumed, silence_schedule="inf:4000").spans


@pytest.mark.slow
@pytest.mark.repeats(model=1)
def test_split_speech_repeats_no_token(model: Model, packaged_speech: Path):
    """The stream goes on over the cuts: together the segments say what the stream says."""
    pcm = read_audio(packaged_speech / "two_cities.wav")[: 14 * RATE_HZ]
    options = {"max_segment_ms": 3_000, "silence_schedule": "inf:2000"}
    whole = run_session(model, pcm, silence_schedule="inf:2000")
    cut = run_session(model, pcm, [3_000], **options)
    assert len(cut.segments) >= 4
    assert len(whole.segments) < len(cut.segments)
    assert cut.spans == run_session(model, pcm, [700, 9_000], **options).spans
    if len(whole.segments) == 1:
        tokens = [token for segment in cut.segments for token in segment.tokens]
        assert tokens == list(whole.segments[0].tokens)


@pytest.mark.slow
@pytest.mark.repeats(model=4)
def test_sessions_at_once_do_not_mix(model: Model, speech: np.ndarray):
    cuts = [speech[RATE_HZ * k // 2 :] for k in range(6)]
    want = [run_session(model, cut).spans for cut in cuts]
    callers = [LiveClient(model) for _ in cuts]
    for at in itertools.count(0, 2_560):
        for caller, cut in zip(callers, cuts, strict=True):
            if at < len(cut):
                caller.write(cut[at : at + 2_560])
        if at >= max(map(len, cuts)):
            break
    for caller in callers:
        caller.finish()
    assert [caller.spans for caller in callers] == want


def test_a_closed_session_leaves_nothing(model: Model, speech: np.ndarray):
    for seconds in (0.3, 1.0, 3.1, 5.5):
        with LiveClient(model) as caller:
            caller.write(speech[: s_to_samples(seconds)])


@pytest.mark.repeats(model=1)
def test_a_failed_step_is_repeated(model: Model, speech: np.ndarray, monkeypatch: pytest.MonkeyPatch):
    want = run_session(model, speech)
    fail_calls(model._client.backend.loop.streams.model_runner, "step", 4, 10, patch=monkeypatch)
    assert run_session(model, speech, [1_600], in_step=True).spans == want.spans


def test_the_library_loads_a_streaming_model_as_any_other(model: Model):
    assert isinstance(model, library.Model)
    assert model._client.card.streaming
