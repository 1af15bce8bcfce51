"""One live session and the real model: segments depend on the audio, not on its packets or on other sessions."""

from __future__ import annotations

import random
import threading
import tracemalloc
from difflib import SequenceMatcher
from unittest import mock

import numpy as np
import pytest
from case_tiers import exhaustive_after
from engine_clients import fail_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from live_client import (
    RATE_HZ,
    WAIT_S,
    LiveClient,
    SegmentSpans,
    fast_clock,
    packets,
    plain_words,
    run_session,
    stopped_clock,
)
from loaded_models import expect_idle, load_model

from asr_serve.api.library import Model
from asr_serve.audio import read_audio
from asr_serve.config import EngineConfig
from asr_serve.errors import AtCapacity, EngineClosed, OptionError, StepFailed
from asr_serve.pipelines.live import live_session, repeated_segment
from asr_serve.pipelines.live.live_session import LivePartial, LiveSegmentDone, SessionFinished
from asr_serve.pipelines.live.repeated_recognizer import RepeatedRecognizer
from asr_serve.pipelines.live.repeated_segment import MAX_TRIES

pytestmark = pytest.mark.usefixtures("idle_afterwards")


@pytest.fixture(scope="module")
def talk(beckett: np.ndarray, cities: np.ndarray) -> np.ndarray:
    """A sentence, a long pause, and speech that does not end, cut off in a word."""
    return np.concatenate([beckett[: 3 * RATE_HZ], silence(2.6), cities[RATE_HZ // 2 : 13 * RATE_HZ]])


@pytest.fixture(scope="module")
def spans(model: Model, talk: np.ndarray) -> SegmentSpans:
    return run_session(model, talk, clock=stopped_clock).spans


def silence(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * RATE_HZ), np.float32)


def count_differences(left: list[str], right: list[str]) -> tuple[int, int]:
    """Words changed, and words that only one of the two has."""
    changed = lone = 0
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag != "equal":
            changed += max(i2 - i1, j2 - j1)
            lone += abs((i2 - i1) - (j2 - j1))
    return changed, lone


# --- the same, however it comes -------------------------------------------------------------------

sizes = st.lists(st.sampled_from([1, 100, 512, 1_600, 7_680, 40_000, 200_000]), min_size=3, max_size=3)


@settings(max_examples=3, deadline=None)
@given(sizes, st.sampled_from([stopped_clock, None, fast_clock]), st.booleans())
def test_packets_and_partials_change_no_segment(model, talk, spans, sizes, clock, in_step):
    """Packets pushed or waited for; partials never, in real time, or whenever they may be."""
    if sum(sizes) < 5_000:
        sizes = [*sizes, 16_000]  # a million packets of a sample prove no more than thousands
    elapsed = clock() if clock is fast_clock else clock
    client = run_session(model, talk, sizes, elapsed, in_step=in_step and sum(sizes) > 5_000)
    assert client.spans == spans
    assert client.finished == SessionFinished(len(talk))


@pytest.mark.slow
@pytest.mark.parametrize("max_segment_ms", exhaustive_after(1, [3_000, 6_000]))
@pytest.mark.parametrize("lock_ms", exhaustive_after(1, [1_920, 400]))
def test_split_segments_are_the_same_too(model, talk, max_segment_ms, lock_ms):
    options = {"max_segment_ms": max_segment_ms, "lock_ms": lock_ms}
    once = run_session(model, talk, clock=stopped_clock, **options).spans
    assert len(once) > 3
    assert run_session(model, talk, [4_800], fast_clock(), in_step=True, partial_ms=200, **options).spans == once
    assert run_session(model, talk, [1_600], fast_clock(), **options).spans == once


def test_ten_thousand_tiny_packets(model, talk, spans):
    client = run_session(model, talk, [len(talk) // 10_000])
    assert client.spans == spans


@pytest.mark.slow
def test_other_sessions_change_nothing(model, beckett, talk, spans):
    """Sessions that join, leave in the middle of a word, or only push, and files between them."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def other(seed: int) -> None:
        chance = random.Random(seed)
        try:
            while not stop.is_set():
                with LiveClient(model, fast_clock()) as client:
                    for packet in packets(beckett[: 6 * RATE_HZ], [chance.choice([1_600, 16_000, 50_000])]):
                        client.write(packet)
                        if chance.random() < 0.1:
                            break
                    else:
                        client.finish()
                if chance.random() < 0.3:
                    model.transcribe(beckett[: 3 * RATE_HZ], priority="bulk")
        except BaseException as error:
            failed.append(error)

    others = [threading.Thread(target=other, args=(seed,)) for seed in range(3)]
    for thread in others:
        thread.start()
    try:
        for packet_sizes, clock in (([1_600], fast_clock()), ([1 << 40], stopped_clock)):
            assert run_session(model, talk, packet_sizes, clock).spans == spans
    finally:
        stop.set()
        for thread in others:
            thread.join(WAIT_S)
    assert not failed


@pytest.mark.slow
def test_locked_text_stays_and_comes_before_the_end(model, cities):
    """`LiveClient` checks each event; here is something for it to check."""
    client = run_session(model, cities[: 14 * RATE_HZ], [4_800], fast_clock(), in_step=True)
    locked = [p for p in client.partials if p.locked_text]
    assert len(client.partials) > 15
    assert len(locked) > 5
    assert all(
        p.tentative_text == "" or p.tentative_text[0] == " " or p.locked_text == "" or not p.tentative_text[0].isalnum()
        for p in locked
    )
    heard = [p.heard_samples for p in client.partials if p.text]
    assert heard == sorted(heard)
    longest = max(locked, key=lambda p: len(p.locked_text))
    assert plain_words(longest.locked_text) == plain_words(client.text)[: len(plain_words(longest.locked_text))]


def test_the_first_partial_comes_early(model, cities):
    with LiveClient(model, fast_clock()) as client:
        for packet in packets(cities[: 4 * RATE_HZ], [1_600]):
            client.write(packet)
            client.settle()
            if client.partials:
                break
    first = client.partials[0]
    assert client.session.received_samples < 2.2 * RATE_HZ, "it begins to speak after a second"
    assert plain_words(first.text)[0] == "it"
    assert first.start_samples > RATE_HZ // 2


# --- as a file would be ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", exhaustive_after(1, ["beckett.wav", "two_cities.wav", "endgame_nagg_nell.wav"]))
def test_live_text_is_that_of_a_file(model, packaged_speech, name):
    """But for the few words that the model gets otherwise when a segment ends elsewhere."""
    pcm = read_audio(packaged_speech / name)
    offline = plain_words(model.transcribe(pcm)[0].text)
    changed, lone = count_differences(offline, plain_words(run_session(model, pcm).text))
    assert changed <= max(1, len(offline) // 25)
    assert lone <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("max_segment_ms", "most"), [(12_000, 4), (6_000, 7)])
@pytest.mark.repeats(max_segment_ms=12_000)
def test_split_speech_loses_and_repeats_nothing(model, cities, max_segment_ms, most):
    offline = plain_words(model.transcribe(cities)[0].text)
    client = run_session(model, cities, max_segment_ms=max_segment_ms)
    assert len(client.segments) > 44_000 // max_segment_ms
    assert all(s.end_samples - s.start_samples <= max_segment_ms * 16 for s in client.segments)
    changed, lone = count_differences(offline, plain_words(client.text))
    assert changed <= most
    assert lone <= 3, "of 120 words; the model itself drops one when it hears less"


# --- edges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [0, 1, 511, 512, 513, 1_600])
def test_audio_too_short_for_speech(model, samples):
    client = run_session(model, silence(1)[:samples])
    assert (client.segments, client.partials) == ([], [])
    assert client.finished == SessionFinished(samples)


def test_empty_packets_are_nothing(model, beckett):
    with LiveClient(model) as client:
        for packet in packets(beckett, [16_000]):
            client.write(packet)
            client.write(packet[:0])
        client.finish()
    assert client.spans == run_session(model, beckett).spans


@pytest.mark.slow
def test_an_anchor_in_the_last_partial_window(model, cities):
    for windows in range(86, 96):  # one of them: anchors are less than ten windows apart
        client = run_session(model, cities[: windows * 512 + 100], lock_ms=200, clock=stopped_clock)
        assert client.text


def test_a_word_cut_off_by_the_end_is_in_the_text(model, beckett):
    """Finished in mid-word: the last segment reaches the last sample."""
    client = run_session(model, beckett[: int(2.3 * RATE_HZ)], [1_600])
    assert client.segments[-1].end_samples == int(2.3 * RATE_HZ)
    assert plain_words(client.text)[:2] == ["ever", "tried"]


@pytest.mark.slow
def test_silence_has_no_text_and_is_freed(model):
    with LiveClient(model) as client:
        for packet in packets(silence(30), [RATE_HZ]):
            client.write(packet)
            client.settle()
            assert client.session.open_samples < RATE_HZ
            assert sum(map(len, client.session._audio.chunks)) <= 3 * RATE_HZ
        client.finish()
    assert (client.segments, client.partials) == ([], [])


def test_the_first_word_after_a_long_silence_is_whole(model, beckett):
    client = run_session(model, np.concatenate([silence(200), beckett[: 3 * RATE_HZ]]), [16_000])
    begun = 200 * RATE_HZ
    assert plain_words(client.text) == plain_words(run_session(model, beckett[: 3 * RATE_HZ]).text)
    assert begun - RATE_HZ // 2 < client.segments[0].start_samples < begun + RATE_HZ // 2


def test_a_partial_without_a_segment_is_withdrawn(model, beckett, monkeypatch):
    """A partial that no segment follows ends with an empty one."""
    monkeypatch.setattr(repeated_segment, "build_segment", lambda *closed: None)
    with LiveClient(model, fast_clock()) as client:
        client.write(beckett[: int(1.1 * RATE_HZ)])
        client.settle()
        client.write(silence(3))
        client.settle()
        assert len(client.partials) > 1
        assert client.partials[0].text
        assert (client.partials[-1].locked_text, client.partials[-1].tentative_text) == ("", "")
        client.finish()
    assert client.segments == []


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"partial_ms": 99}, "partial_ms"),
        ({"partial_ms": "often"}, "partial_ms"),
        ({"lock_ms": 0}, "lock_ms"),
        ({"lockms": 500}, "did you mean 'lock_ms'"),
        ({"language": "fr"}, "unknown language"),
        ({"max_segment_ms": 60_000}, "takes up to 28000 ms"),
        ({"max_segment_ms": 10}, "max_segment_ms"),
        ({"max_segment_ms": 0}, "max_segment_ms"),
        ({"threshold": 2.0}, "threshold"),
        ({"silence_schedule": [(None, 200)]}, "silence schedule"),
    ],
)
def test_invalid_options_take_no_session(model, options, match):
    with pytest.raises(OptionError, match=match):
        LiveClient(model, **options).session.close()


# --- leaving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_leaving_at_any_moment_frees_everything(model, talk, seed):
    chance = random.Random(seed)
    for _ in range(8):
        client = LiveClient(model, fast_clock())
        stop = chance.randrange(1, len(talk))
        for packet in packets(talk[:stop], [chance.choice([1_600, 8_000, 1 << 30])]):
            client.write(packet)
        if chance.random() < 0.3:
            client.session.finish()
            client.advance()
        client.session.close()
        client.session.close()
        assert client.session.advance() == []
        expect_idle(model._client)


def test_many_sessions_closed_at_once(model, beckett):
    callers = [LiveClient(model, fast_clock()) for _ in range(32)]
    for client in callers:
        client.write(beckett[: 2 * RATE_HZ])
    for client in callers:
        client.session.close()
    expect_idle(model._client)


def test_sessions_are_bounded(beckett):
    with load_model(engine=EngineConfig(prefix_bytes=0, max_sessions=1)) as small:
        first = LiveClient(small)
        with pytest.raises(AtCapacity):
            LiveClient(small)
        first.session.close()
        assert run_session(small, beckett[: 3 * RATE_HZ]).segments
        expect_idle(small._client)


def test_a_closed_engine_ends_its_sessions(beckett):
    with load_model() as short:
        client = LiveClient(short)
        client.write(beckett[: 2 * RATE_HZ])
        short._client.close()

        def send_on() -> None:
            while True:
                client.write(beckett[:1_600])
                client.answer()

        with pytest.raises(EngineClosed):
            send_on()
        client.session.close()


# --- much at once ------------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_minutes_at_once_are_read_as_they_are_processed(model, beckett):
    """One array, mostly pauses; then some of it in packets, as fast as they are let in. Beside the
    array itself little is held, and `full` holds the client back."""
    long = np.tile(np.concatenate([beckett[: 3 * RATE_HZ], silence(57)]), 10)
    packet_samples = 3 * 60 * RATE_HZ
    tracemalloc.start()
    try:
        with LiveClient(model) as client:
            client.write(long)
            assert client.session.full
            client.finish()
        _, once_bytes = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        most = 0
        with LiveClient(model) as packeted:
            for packet in packets(long[:packet_samples], [RATE_HZ]):
                packeted.write(packet)
                most = max(most, packeted.session.open_samples)
            packeted.finish()
        _, packets_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(client.segments) >= 10
    assert once_bytes < 16 << 20
    assert live_session.MAX_OPEN_SAMPLES - 2 * RATE_HZ < most <= live_session.MAX_OPEN_SAMPLES + RATE_HZ
    assert packets_bytes < 16 << 20
    assert packeted.spans == [s for s in client.spans if s[1] <= packet_samples]


@pytest.mark.slow
def test_a_pushed_recording_has_no_live_priority(model, cities):
    with mock.patch.object(model._client.backend, "submit", wraps=model._client.backend.submit) as submit:
        run_session(model, cities[: 9 * RATE_HZ], clock=stopped_clock)
        assert {call.args[0].priority for call in submit.call_args_list} == {"interactive"}
        submit.reset_mock()
        run_session(model, cities[: 4 * RATE_HZ], [1_600], fast_clock(), in_step=True)
        assert {call.args[0].priority for call in submit.call_args_list} == {"live"}


# --- steps that fail ------------------------------------------------------------------------------


class FailingEncoder:
    """Makes the encoder fail for requests of one kind, so many times."""

    def __init__(self, client: LiveClient, kind: str, times: int) -> None:
        self.words = client.session._recognizer
        assert isinstance(self.words, RepeatedRecognizer)
        self.client = self.words._client
        self.caller, self.kind, self.left, self.failed = client, kind, times, 0
        self.ours: dict[int, str] = {}

    def __enter__(self) -> FailingEncoder:
        loop = self.client.backend.loop
        self.encode = loop.executor.encode_runner.encode
        submit = self.words._submit

        def record(each, kind, span, tries=1, urgent=False):
            submit(each, kind, span, tries, urgent)
            (ticket,) = each.job.cancel.args  # the client's `cancel`, of this ticket
            self.ours[ticket.id] = kind

        def run(batch, *rest):
            for number, utterance in list(loop.executor.open_requests.items()):
                if any(pcm is utterance.pcm for pcm in batch) and self.left:
                    # the caller's thread may not have written it down yet
                    while number not in self.ours:
                        threading.Event().wait(0.001)
                    if self.ours[number] == self.kind:
                        self.left -= 1
                        self.failed += 1
                        raise RuntimeError("the device hiccuped")
            return self.encode(batch, *rest)

        self.words._submit = record
        loop.executor.encode_runner.encode = run
        return self

    def __exit__(self, *_: object) -> None:
        self.client.backend.loop.executor.encode_runner.encode = self.encode


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["partial", "anchor", "early", "final"])
@pytest.mark.parametrize("times", exhaustive_after(1, [MAX_TRIES - 1, 1]))
def test_a_failed_step_costs_no_word(model, beckett, kind, times):
    pcm = np.concatenate([beckett[: 3 * RATE_HZ], silence(2.5), beckett[3 * RATE_HZ : 6 * RATE_HZ]])
    expected = run_session(model, pcm).spans
    clock = stopped_clock if kind == "final" else fast_clock()  # while nobody waits for partials, no final is early
    with LiveClient(model, clock) as client, FailingEncoder(client, kind, times) as failing:
        for packet in packets(pcm, [1 << 30 if kind == "final" else 4_800]):
            client.write(packet)
            client.settle()
        client.finish()
    assert client.spans == expected
    assert failing.failed == times


@pytest.mark.parametrize("kind", ["anchor", "final"])
def test_repeated_failures_end_the_session(model, beckett, kind):
    def speak(client: LiveClient) -> None:
        for packet in packets(beckett[: 5 * RATE_HZ], [4_800]):  # with time for anchors, before they are void
            client.write(packet)
            client.settle()
        client.finish()

    with LiveClient(model, stopped_clock) as client, FailingEncoder(client, kind, 1_000) as failing:
        with pytest.raises(StepFailed, match="encoding failed"):
            speak(client)
        assert failing.failed >= MAX_TRIES


def test_a_failed_vad_step_loses_no_words(model, beckett, monkeypatch):
    """The state of the session has not moved: the same windows can be computed again."""
    expected = run_session(model, beckett).spans
    runner = model._client.backend.loop.vad_runner
    fail_calls(runner, "step", 1, patch=monkeypatch)
    assert run_session(model, beckett, [8_000], in_step=True).spans == expected


def test_segments_have_tokens_and_logprobs(model, beckett):
    with LiveClient(model) as client:
        client.write(beckett)
        client.finish()
    assert isinstance(client.finished, SessionFinished)
    for segment in client.segments:
        assert LiveSegmentDone(segment, 0).segment.tokens
        assert len(segment.logprobs) == len(segment.tokens)
    assert LivePartial(0, 512, "It was", " the").text == "It was the"
