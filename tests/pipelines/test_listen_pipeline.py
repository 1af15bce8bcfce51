"""One live caller and the real model: the words depend on what was said, not on how it came or who was there."""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from listen_caller import RATE_HZ, WAIT_S, Caller, Said, expect_empty, hear, hurried, on_loop, packets, plain, still

import asr_serve
from asr_serve.api.library import Model
from asr_serve.audio import read_audio
from asr_serve.config import EngineConfig
from asr_serve.errors import AtCapacity, EngineClosed, OptionError, StepFailed
from asr_serve.pipelines.live import listen, segment_hypotheses
from asr_serve.pipelines.live.listen import LivePartial, LiveSegmentDone, SessionFinished
from asr_serve.pipelines.live.repeated_recognizer import RepeatedRecognizer
from asr_serve.pipelines.live.segment_hypotheses import MAX_TRIES


@pytest.fixture(scope="module")
def model(packaged_speech: Path) -> Iterator[Model]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASR_SERVE_THREADS", "1")
        loaded = asr_serve.load("moonshine-tiny-en", dtype="fp32", engine=EngineConfig(prefix_bytes=0))
    with loaded:
        yield loaded


@pytest.fixture(autouse=True)
def everything_comes_back(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "model" in request.fixturenames:
        expect_empty(request.getfixturevalue("model")._client)


@pytest.fixture(scope="module")
def beckett(packaged_speech: Path) -> np.ndarray:
    """Ten seconds, six sentences, a pause after each."""
    return read_audio(packaged_speech / "beckett.wav")


@pytest.fixture(scope="module")
def cities(packaged_speech: Path) -> np.ndarray:
    """Forty-four seconds nearly without a pause."""
    return read_audio(packaged_speech / "two_cities.wav")


@pytest.fixture(scope="module")
def talk(beckett: np.ndarray, cities: np.ndarray) -> np.ndarray:
    """A sentence, a long pause, and speech that does not end, cut off in a word."""
    return np.concatenate([beckett[: 3 * RATE_HZ], silence(2.6), cities[RATE_HZ // 2 : 13 * RATE_HZ]])


@pytest.fixture(scope="module")
def said(model: Model, talk: np.ndarray) -> Said:
    return hear(model, talk, clock=still).said


def silence(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * RATE_HZ), np.float32)


def differing(left: list[str], right: list[str]) -> tuple[int, int]:
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
@given(sizes, st.sampled_from([still, None, hurried]), st.booleans())
def test_any_packets_any_pauses_any_partials(model, talk, said, sizes, clock, in_step):
    """Packets pushed or waited for; partials never, in real time, or whenever they may be."""
    if sum(sizes) < 5_000:
        sizes = [*sizes, 16_000]  # a million packets of a sample prove no more than thousands
    elapsed = clock() if clock is hurried else clock
    caller = hear(model, talk, sizes, elapsed, in_step=in_step and sum(sizes) > 5_000)
    assert caller.said == said
    assert caller.finished == SessionFinished(len(talk))


@pytest.mark.slow
@pytest.mark.parametrize("max_segment_ms", [3_000, 6_000])
@pytest.mark.parametrize("lock_ms", [400, 1_920])
def test_what_is_torn_apart_is_the_same_too(model, talk, max_segment_ms, lock_ms):
    options = {"max_segment_ms": max_segment_ms, "lock_ms": lock_ms}
    once = hear(model, talk, clock=still, **options).said
    assert len(once) > 3
    assert hear(model, talk, [4_800], hurried(), in_step=True, partial_ms=200, **options).said == once
    assert hear(model, talk, [1_600], hurried(), **options).said == once


def test_ten_thousand_tiny_packets(model, talk, said):
    caller = hear(model, talk, [len(talk) // 10_000])
    assert caller.said == said


@pytest.mark.slow
def test_others_come_and_go(model, beckett, talk, said):
    """Callers who join, leave in the middle of a word, or only push, and files between them."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def other(seed: int) -> None:
        chance = random.Random(seed)
        try:
            while not stop.is_set():
                with Caller(model, hurried()) as caller:
                    for packet in packets(beckett[: 6 * RATE_HZ], [chance.choice([1_600, 16_000, 50_000])]):
                        caller.write(packet)
                        if chance.random() < 0.1:
                            break
                    else:
                        caller.finish()
                if chance.random() < 0.3:
                    model.transcribe(beckett[: 3 * RATE_HZ], priority="bulk")
        except BaseException as error:
            failed.append(error)

    others = [threading.Thread(target=other, args=(seed,)) for seed in range(3)]
    for thread in others:
        thread.start()
    try:
        for packet_sizes, clock in (([1_600], hurried()), ([1 << 40], still)):
            assert hear(model, talk, packet_sizes, clock).said == said
    finally:
        stop.set()
        for thread in others:
            thread.join(WAIT_S)
    assert not failed


@pytest.mark.slow
def test_what_was_locked_stays_and_comes_before_the_end(model, cities):
    """`Caller` checks each event; here is something for it to check."""
    caller = hear(model, cities[: 14 * RATE_HZ], [4_800], hurried(), in_step=True)
    locked = [p for p in caller.partials if p.locked_text]
    assert len(caller.partials) > 15
    assert len(locked) > 5
    assert all(
        p.tentative_text == ""
        or p.tentative_text[0] == " "
        or p.locked_text == ""
        or not p.tentative_text[0].isalnum()
        for p in locked
    )
    heard = [p.heard_samples for p in caller.partials if p.text]
    assert heard == sorted(heard)
    longest = max(locked, key=lambda p: len(p.locked_text))
    assert plain(longest.locked_text) == plain(caller.text)[: len(plain(longest.locked_text))]


def test_the_first_words_come_while_they_are_spoken(model, cities):
    with Caller(model, hurried()) as caller:
        for packet in packets(cities[: 4 * RATE_HZ], [1_600]):
            caller.write(packet)
            caller.settle()
            if caller.partials:
                break
    first = caller.partials[0]
    assert caller.listening.received_samples < 2.2 * RATE_HZ, "it begins to speak after a second"
    assert plain(first.text)[0] == "it"
    assert first.start_samples > RATE_HZ // 2


# --- as a file would be ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["beckett.wav", "two_cities.wav", "endgame_nagg_nell.wav"])
def test_live_says_what_a_file_says(model, packaged_speech, name):
    """But for the few words that the model hears otherwise when a segment ends elsewhere."""
    pcm = read_audio(packaged_speech / name)
    offline = plain(model.transcribe(pcm)[0].text)
    changed, lone = differing(offline, plain(hear(model, pcm).text))
    assert changed <= max(1, len(offline) // 25)
    assert lone <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("max_segment_ms", "most"), [(12_000, 4), (6_000, 7)])
def test_speech_torn_apart_loses_and_doubles_nothing(model, cities, max_segment_ms, most):
    offline = plain(model.transcribe(cities)[0].text)
    caller = hear(model, cities, max_segment_ms=max_segment_ms)
    assert len(caller.segments) > 44_000 // max_segment_ms
    assert all(s.end_samples - s.start_samples <= max_segment_ms * 16 for s in caller.segments)
    changed, lone = differing(offline, plain(caller.text))
    assert changed <= most
    assert lone <= 3, "of 120 words; the model itself drops one when it hears less"


# --- edges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [0, 1, 511, 512, 513, 1_600])
def test_too_short_to_say_anything(model, samples):
    caller = hear(model, silence(1)[:samples])
    assert (caller.segments, caller.partials) == ([], [])
    assert caller.finished == SessionFinished(samples)


def test_empty_packets_are_nothing(model, beckett):
    with Caller(model) as caller:
        for packet in packets(beckett, [16_000]):
            caller.write(packet)
            caller.write(packet[:0])
        caller.finish()
    assert caller.said == hear(model, beckett).said


@pytest.mark.slow
def test_an_anchor_may_be_due_in_a_last_window_that_is_not_whole(model, cities):
    for windows in range(86, 96):  # one of them: anchors are less than ten windows apart
        caller = hear(model, cities[: windows * 512 + 100], lock_ms=200, clock=still)
        assert caller.text


def test_a_word_that_is_cut_off_by_the_end_is_heard(model, beckett):
    """Finished in mid-word: the last segment reaches the last sample."""
    caller = hear(model, beckett[: int(2.3 * RATE_HZ)], [1_600])
    assert caller.segments[-1].end_samples == int(2.3 * RATE_HZ)
    assert plain(caller.text)[:2] == ["ever", "tried"]


@pytest.mark.slow
def test_silence_says_nothing_and_is_let_go(model):
    with Caller(model) as caller:
        for packet in packets(silence(120), [RATE_HZ]):
            caller.write(packet)
            caller.settle()
            assert caller.listening.open_samples < RATE_HZ
            assert sum(map(len, caller.listening._audio.chunks)) <= 3 * RATE_HZ
        caller.finish()
    assert (caller.segments, caller.partials) == ([], [])


def test_the_first_word_after_a_long_silence_is_whole(model, beckett):
    caller = hear(model, np.concatenate([silence(200), beckett[: 3 * RATE_HZ]]), [16_000])
    begun = 200 * RATE_HZ
    assert plain(caller.text) == plain(hear(model, beckett[: 3 * RATE_HZ]).text)
    assert begun - RATE_HZ // 2 < caller.segments[0].start_samples < begun + RATE_HZ // 2


def test_what_opened_on_noise_and_came_to_nothing_is_taken_back(model, beckett, monkeypatch):
    """A partial that no segment follows ends with an empty one."""
    monkeypatch.setattr(segment_hypotheses, "build_segment", lambda *closed: None)
    with Caller(model, hurried()) as caller:
        caller.write(beckett[: int(1.1 * RATE_HZ)])
        caller.settle()
        caller.write(silence(3))
        caller.settle()
        assert len(caller.partials) > 1
        assert caller.partials[0].text
        assert (caller.partials[-1].locked_text, caller.partials[-1].tentative_text) == ("", "")
        caller.finish()
    assert caller.segments == []


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"partial_ms": 99}, "partial_ms"),
        ({"partial_ms": "often"}, "partial_ms"),
        ({"lock_ms": 0}, "lock_ms"),
        ({"lockms": 500}, "did you mean 'lock_ms'"),
        ({"language": "fr"}, "unknown language"),
        ({"max_segment_ms": 60_000}, "hears up to 28000 ms"),
        ({"max_segment_ms": 10}, "max_segment_ms"),
        ({"max_segment_ms": 0}, "max_segment_ms"),
        ({"threshold": 2.0}, "threshold"),
        ({"silence_schedule": [(None, 200)]}, "silence schedule"),
    ],
)
def test_options_that_cannot_be_take_no_session(model, options, match):
    with pytest.raises(OptionError, match=match):
        Caller(model, **options).listening.close()


# --- leaving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_leaving_at_any_moment_frees_everything(model, talk, seed):
    chance = random.Random(seed)
    for _ in range(8):
        caller = Caller(model, hurried())
        stop = chance.randrange(1, len(talk))
        for packet in packets(talk[:stop], [chance.choice([1_600, 8_000, 1 << 30])]):
            caller.write(packet)
        if chance.random() < 0.3:
            caller.listening.finish()
            caller.advance()
        caller.listening.close()
        caller.listening.close()
        assert caller.listening.advance() == []
        expect_empty(model._client)


def test_abrupt_leaving_of_many_at_once(model, beckett):
    callers = [Caller(model, hurried()) for _ in range(32)]
    for caller in callers:
        caller.write(beckett[: 2 * RATE_HZ])
    for caller in callers:
        caller.listening.close()
    expect_empty(model._client)


def test_sessions_are_bounded(beckett):
    with asr_serve.load(
        "moonshine-tiny-en", dtype="fp32", engine=EngineConfig(prefix_bytes=0, max_sessions=1)
    ) as small:
        first = Caller(small)
        with pytest.raises(AtCapacity):
            Caller(small)
        first.listening.close()
        assert hear(small, beckett[: 3 * RATE_HZ]).segments
        expect_empty(small._client)


def test_an_engine_that_closes_says_so(beckett):
    with asr_serve.load("moonshine-tiny-en", dtype="fp32", engine=EngineConfig(prefix_bytes=0)) as short:
        caller = Caller(short)
        caller.write(beckett[: 2 * RATE_HZ])
        short._client.close()

        def go_on() -> None:
            while True:
                caller.write(beckett[:1_600])
                caller.answer()

        with pytest.raises(EngineClosed):
            go_on()
        caller.listening.close()


# --- an hour at once ------------------------------------------------------------------------------


@pytest.mark.slow
def test_twenty_minutes_at_once_are_taken_as_they_are_heard(model, beckett):
    """One array, mostly pauses; then some of it in packets, as fast as they are let in. Beside the
    caller's own array little is held, and `full` holds the caller back."""
    long = np.tile(np.concatenate([beckett[: 3 * RATE_HZ], silence(57)]), 20)
    packet_samples = 8 * 60 * RATE_HZ
    tracemalloc.start()
    try:
        with Caller(model) as caller:
            caller.write(long)
            assert caller.listening.full
            caller.finish()
        _, once_bytes = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        most = 0
        with Caller(model) as packeted:
            for packet in packets(long[:packet_samples], [RATE_HZ]):
                packeted.write(packet)
                most = max(most, packeted.listening.open_samples)
            packeted.finish()
        _, packets_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(caller.segments) >= 20
    assert once_bytes < 32 << 20
    assert listen.MAX_OPEN_SAMPLES - 2 * RATE_HZ < most <= listen.MAX_OPEN_SAMPLES + RATE_HZ
    assert packets_bytes < 32 << 20
    assert packeted.said == [s for s in caller.said if s[1] <= packet_samples]


@pytest.mark.slow
def test_who_pushes_a_recording_does_not_go_before_those_who_speak(model, cities):
    seen: list[str] = []
    submit = model._client.backend.submit

    def watched(utterance):
        seen.append(utterance.priority)
        submit(utterance)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model._client.backend, "submit", watched)
        hear(model, cities[: 20 * RATE_HZ], clock=still)
        assert set(seen) == {"interactive"}
        seen.clear()
        hear(model, cities[: 8 * RATE_HZ], [1_600], hurried(), in_step=True)
        assert set(seen) == {"live"}


# --- steps that fail ------------------------------------------------------------------------------


class Failing:
    """The encoder fails for requests of one kind, so many times."""

    def __init__(self, caller: Caller, kind: str, times: int) -> None:
        self.words = caller.listening._recognizer
        assert isinstance(self.words, RepeatedRecognizer)
        self.client = self.words._client
        self.caller, self.kind, self.left, self.failed = caller, kind, times, 0
        self.ours: dict[int, str] = {}

    def __enter__(self) -> Failing:
        loop = self.client.backend.loop
        self.encode = loop.executor.encode_runner.encode
        submit = self.words._submit

        def watched(each, kind, span, tries=1, urgent=False):
            submit(each, kind, span, tries, urgent)
            (ticket,) = each.job.cancel.args  # the client's `cancel`, of this ticket
            self.ours[ticket.id] = kind

        def run(batch, whole=()):
            for number, utterance in list(loop.executor.open_requests.items()):
                if any(pcm is utterance.pcm for pcm in batch) and self.left:
                    # the caller's thread may not have written it down yet
                    while number not in self.ours:
                        threading.Event().wait(0.001)
                    if self.ours[number] == self.kind:
                        self.left -= 1
                        self.failed += 1
                        raise RuntimeError("the device hiccuped")
            return self.encode(batch, whole)

        self.words._submit = watched
        loop.executor.encode_runner.encode = run
        return self

    def __exit__(self, *_: object) -> None:
        self.client.backend.loop.executor.encode_runner.encode = self.encode


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["partial", "anchor", "early", "final"])
@pytest.mark.parametrize("times", [1, MAX_TRIES - 1])
def test_a_step_that_fails_costs_no_word(model, beckett, kind, times):
    pcm = np.concatenate([beckett[: 3 * RATE_HZ], silence(2.5), beckett[3 * RATE_HZ : 6 * RATE_HZ]])
    expected = hear(model, pcm).said
    clock = still if kind == "final" else hurried()  # while nobody waits for partials, no final is early
    with Caller(model, clock) as caller, Failing(caller, kind, times) as failing:
        for packet in packets(pcm, [1 << 30 if kind == "final" else 4_800]):
            caller.write(packet)
            caller.settle()
        caller.finish()
    assert caller.said == expected
    assert failing.failed == times


@pytest.mark.parametrize("kind", ["anchor", "final"])
def test_what_is_owed_and_fails_again_and_again_is_told(model, beckett, kind):
    with Caller(model, still) as caller, Failing(caller, kind, 1_000) as failing:
        caller.listening.append_audio(beckett[: 5 * RATE_HZ])
        with pytest.raises(StepFailed, match="encoding failed"):
            caller.finish()
    assert failing.failed >= MAX_TRIES


def test_a_voice_activity_step_that_fails_loses_no_words(model, beckett):
    """The caller's state has not moved: the same windows can be heard again."""
    expected = hear(model, beckett).said
    loop = model._client.backend.loop
    run, failures = loop.vad_runner.step, iter([True])

    def failing(batch):
        if next(failures, False):
            raise RuntimeError("the device hiccuped")
        return run(batch)

    loop.vad_runner.step = failing
    try:
        assert hear(model, beckett, [8_000], in_step=True).said == expected
    finally:
        loop.vad_runner.step = run


def test_events_are_what_they_say(model, beckett):
    with Caller(model) as caller:
        caller.write(beckett)
        caller.finish()
    assert isinstance(caller.finished, SessionFinished)
    for segment in caller.segments:
        assert LiveSegmentDone(segment, 0).segment.tokens
        assert len(segment.logprobs) == len(segment.tokens)
    assert LivePartial(0, 512, "It was", " the").text == "It was the"
    on_loop(model._client, lambda loop: loop.check())
