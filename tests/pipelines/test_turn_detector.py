"""Flushes and turns of one live session, with the real model. `LiveClient` checks the order of events."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from case_tiers import exhaustive_after
from hypothesis import given, settings
from hypothesis import strategies as st
from live_client import RATE_HZ, LiveClient, packets, plain_words, run_session, stopped_clock
from loaded_models import expect_idle

from asr_serve.api.library import Model
from asr_serve.audio import read_audio
from asr_serve.audio.silence_schedule import SilenceSchedule
from asr_serve.errors import AtCapacity, ModelNotLoaded, OptionError
from asr_serve.pipelines.live.live_session import MAX_PENDING_FLUSHES
from asr_serve.pipelines.options import TurnOptions

COMMANDS = {"silence_schedule": SilenceSchedule.from_text("inf:400")}


@pytest.fixture(scope="module")
def cities(packaged_speech: Path) -> np.ndarray:
    """Twelve seconds nearly without a pause."""
    return read_audio(packaged_speech / "two_cities.wav")[: 12 * RATE_HZ]


@pytest.fixture(autouse=True, scope="module")
def idle_at_the_end(model: Model) -> Iterator[None]:
    yield
    expect_idle(model._client)


def flushing(model: Model, pcm: np.ndarray, at: list[int], sizes: list[int], **options: object) -> LiveClient:
    """Put it all in packets of these sizes, and flush at these positions."""
    with LiveClient(model, stopped_clock, **options) as caller:
        done = 0
        for position in at:
            for packet in packets(pcm[done:position], sizes):
                caller.write(packet)
            done = position
            caller.flush(f"at {position}")
        for packet in packets(pcm[done:], sizes):
            caller.write(packet)
        caller.finish()
    return caller


positions = st.lists(st.integers(0, 12 * RATE_HZ), max_size=5).map(sorted)
sizes = st.lists(st.sampled_from([160, 512, 1_601, 7_680, 200_000]), min_size=1, max_size=3)


@pytest.mark.slow
@settings(max_examples=2, deadline=None)
@given(positions, sizes)
def test_flushed_anywhere_it_is_the_same_however_it_comes(model, cities, at, sizes):
    once = flushing(model, cities, at, [200_000])
    again = flushing(model, cities, at, sizes)
    assert again.spans == once.spans
    assert [f.position_samples for f in again.flushed] == at
    assert [(t.state, t.position_samples) for t in again.turns if t.state != "ended"] == [
        (t.state, t.position_samples) for t in once.turns if t.state != "ended"
    ]


def test_a_flush_brings_every_word_before_it_and_loses_none_after_it(model, beckett):
    whole = plain_words(run_session(model, beckett, clock=stopped_clock, **COMMANDS).text)
    pause = next(s.end_samples for s in run_session(model, beckett, clock=stopped_clock, **COMMANDS).segments) - 1_000
    with LiveClient(model, stopped_clock, **COMMANDS) as caller:  # the pause has not been long enough yet
        caller.write(beckett[:pause])
        caller.flush("now")
        while not caller.flushed:
            caller.answer()
        before = plain_words(caller.text)
        assert before
        assert before == whole[: len(before)]
        caller.write(beckett[pause:])
        caller.finish()
    assert plain_words(caller.text) == whole


def test_the_last_samples_are_heard_though_they_fill_no_window(model, beckett):
    at = 7 * 512 * 10 + 511
    caller = flushing(model, beckett, [at], [at])
    assert caller.segments[0].end_samples == at


def test_what_follows_a_flush_in_mid_word_is_no_word(model, cities):
    """Voice activity goes on for some windows when speech is cut off."""
    for at in range(2 * RATE_HZ, 6 * RATE_HZ, 7_777):
        caller = flushing(model, np.concatenate([cities[:at], np.zeros(3 * RATE_HZ, np.float32)]), [at], [1_600])
        assert [s.end_samples for s in caller.segments][-1] <= at, caller.spans


@pytest.mark.slow
@pytest.mark.parametrize("later", exhaustive_after(2, [6_000, 17_000, 10_000]))
def test_a_flush_behind_a_tear_waits_for_no_more_audio(model, cities, later):
    """What was cut off in the middle of speech is heard past its end, as far as there is anything to hear."""
    torn = {"max_segment_ms": 1_000, "clock": stopped_clock}
    with LiveClient(model, **torn) as caller:
        for packet in packets(cities, [512]):
            caller.write(packet)
            caller.settle()
            if caller.session._segments and caller.session._segments[0].cut_off:
                break
    cut = caller.session._segments[0].end
    at = cut + later
    with LiveClient(model, **torn) as caller:
        for packet in packets(cities[:at], [1_600]):
            caller.write(packet)
        caller.settle()
        caller.flush("now")
        while not caller.flushed:
            caller.answer()
        assert caller.spans == run_session(model, cities[:at], **torn).spans
        caller.write(cities[at:])
        caller.finish()
    assert caller.spans == flushing(model, cities, [at], [200_000], max_segment_ms=1_000).spans


def test_what_is_shown_after_a_flush_does_not_lie_before_it(model, cities):
    """A flush need not be where a window ends."""
    caller = flushing(model, cities[: 6 * RATE_HZ], [87_144], [1_600])
    assert caller.flushed[0].position_samples == 87_144


def test_a_flush_of_silence_is_answered(model):
    with LiveClient(model, stopped_clock) as caller:
        caller.flush("nothing yet")
        assert [f.name for f in caller.flushed] == ["nothing yet"]
        caller.write(np.zeros(RATE_HZ, np.float32))
        caller.flush("silence")
        caller.finish()
    assert [f.position_samples for f in caller.flushed] == [0, RATE_HZ]
    assert not caller.turns


def test_flushes_are_bounded(model, cities):
    with LiveClient(model, stopped_clock) as caller:
        caller.session.append_audio(cities)
        for number in range(MAX_PENDING_FLUSHES):
            caller.session.flush(str(number))
        with pytest.raises(AtCapacity):
            caller.session.flush("one more")


@pytest.mark.slow
def test_turns_by_silence_are_the_segments_between_pauses(model, beckett):
    caller = run_session(model, beckett, [1_600], clock=stopped_clock, in_step=True, **COMMANDS)
    started = [t.position_samples for t in caller.turns if t.state == "started"]
    ended = [t.position_samples for t in caller.turns if t.state == "ended"]
    assert len(started) > 2
    assert [(s, e) for s, e, _ in caller.spans] == list(zip(started, ended, strict=True))
    assert all(t.by == "silence" for t in caller.turns)


def test_a_turn_goes_on_where_a_segment_was_cut_for_its_length(model, cities):
    caller = run_session(model, cities, clock=stopped_clock, max_segment_ms=3_000)
    assert len(caller.segments) > 3
    assert caller.count("started") == 1


@pytest.mark.slow
def test_eager_ends_come_with_the_text_and_are_taken_back(model, beckett):
    """Half of the pause that would be asked for ends it eagerly: some pauses are shorter than the whole."""
    pause = np.zeros(int(0.8 * RATE_HZ), np.float32)
    twice = np.concatenate([beckett[: 2 * RATE_HZ], pause, beckett[: 2 * RATE_HZ], pause, pause])
    options = {"silence_schedule": SilenceSchedule.from_text("inf:1200")}
    with LiveClient(model, **options, turn=TurnOptions(eager_threshold=0.4)) as caller:
        shown = ""
        for packet in packets(twice, [1_600]):
            caller.write(packet)
            caller.settle()
            if caller.count("eager_end") == 1 and not shown:
                shown = caller.partials[-1].text
        caller.finish()
    states = [t.state for t in caller.turns]
    assert states[:3] == ["started", "eager_end", "resumed"]
    assert states[-3:] == ["eager_end", "stopped", "ended"]
    assert caller.count("stopped") == 1
    first = plain_words(shown)
    assert first
    assert plain_words(caller.text)[: len(first)] == first
    assert all(0.4 <= t.probability <= 1 for t in caller.turns if t.state == "eager_end")


@pytest.mark.parametrize("options", [{"threshold": 0}, {"threshold": 1.1}, {"eager_threshold": True}])
def test_thresholds_are_probabilities(options):
    with pytest.raises(OptionError, match="threshold"):
        TurnOptions(**options)


def test_a_turn_model_that_is_not_there_is_refused(model):
    with pytest.raises(ModelNotLoaded, match="no-such"):
        LiveClient(model, turn=TurnOptions(model="no-such"))


# --- the model ------------------------------------------------------------------------------------

needs_turn_model = pytest.mark.skipif(
    find_spec("pipecat") is None, reason="smart-turn's weights come with pipecat-ai, which is not installed"
)
LONG_PAUSE = {"silence_schedule": SilenceSchedule.from_text("inf:3000")}


@pytest.fixture(scope="module")
def sentence(packaged_speech: Path) -> np.ndarray:
    """A sentence that ends like one, and three seconds of silence."""
    spoken = read_audio(packaged_speech / "beckett.wav")
    return np.concatenate([spoken[: 91 * RATE_HZ // 10], np.zeros(3 * RATE_HZ, np.float32)])


@pytest.mark.slow
@needs_turn_model
def test_a_turn_model_ends_a_turn_long_before_the_pause_does(model, sentence):
    assert model._client.turn_model == "smart-turn"
    turn = TurnOptions(model="smart-turn", threshold=0.5)
    caller = run_session(model, sentence, [1_600], clock=stopped_clock, in_step=True, turn=turn, **LONG_PAUSE)
    silent = run_session(model, sentence, [1_600], clock=stopped_clock, in_step=True, **LONG_PAUSE)
    last = [t for t in caller.turns if t.state == "ended"][-1]
    assert last.by == "smart-turn"
    assert last.probability >= 0.5
    assert [t.by for t in silent.turns if t.state == "ended"] == ["silence"]
    assert plain_words(caller.text) == plain_words(silent.text) or len(caller.segments) > len(silent.segments)


@pytest.mark.slow
@needs_turn_model
@pytest.mark.parametrize("sizes", exhaustive_after(1, [[1_601, 200_000, 7_680], [1_601], [7_680]]))
def test_what_a_turn_model_decides_does_not_depend_on_packets(model, sentence, sizes):
    turn = TurnOptions(model="smart-turn", threshold=0.5)
    once = run_session(model, sentence, clock=stopped_clock, turn=turn, **LONG_PAUSE)
    again = run_session(model, sentence, sizes, clock=stopped_clock, in_step=True, turn=turn, **LONG_PAUSE)
    assert again.spans == once.spans

    def decided(caller: LiveClient) -> list[object]:
        return [t for t in caller.turns if t.state == "ended"]

    assert decided(again) == decided(once)


@pytest.mark.slow
@needs_turn_model
def test_a_model_that_is_not_sure_leaves_it_to_the_pause(model, sentence):
    turn = TurnOptions(model="smart-turn", threshold=1.0, eager_threshold=0.01)
    with LiveClient(model, turn=turn, silence_schedule=SilenceSchedule.from_text("inf:1500")) as caller:
        for packet in packets(sentence, [1_600]):
            caller.write(packet)
            caller.settle()
        caller.finish()
    last = [t for t in caller.turns if t.state == "ended"][-1]
    assert last.by == "silence"
    assert 0 < last.probability < 1
    assert caller.count("eager_end") >= 1
