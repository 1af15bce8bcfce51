"""Live callers in the engine, and what they hear of it: any probabilities, any packets, any load, the same words.

The model is random and tiny; the probabilities of voice activity are written into the audio, so that segments
open, close and are torn apart far oftener, and more oddly, than speech does it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from math import inf

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_moonshine import CARD, WAIT_S, clip, expect_empty, held, on_loop, outcome, start, text

from asr_serve.decoding.seq2seq import DraftTokens, Recognition, SearchOptions
from asr_serve.engine import request as sessions
from asr_serve.engine.client import EngineClient
from asr_serve.engine.partial_rate import MIN_SAMPLES, OVERLOADED_MS, PartialRateController
from asr_serve.engine.seq2seq.scheduler import LIVE_RESERVE_FRACTION
from asr_serve.errors import AtCapacity, StepFailed
from asr_serve.models.auxiliary.silero import WINDOW_SAMPLES
from asr_serve.pipelines.live.listen import ListenOptions, LivePartial, LiveSegmentDone, LiveSession, SessionFinished

ONCE = SearchOptions(temperatures=(0.0,))
HANG_S = 60.0
CLIPS = [clip(seed, samples) for seed, samples in enumerate([16_000, 40_000, 64_000, 128_000])]
Said = list[tuple[int, int, str]]


class Vocabulary:
    decode = staticmethod(text)

    def encode(self, text: str) -> list[int]:
        raise AssertionError("nobody asks for words here")


VOCABULARY = Vocabulary()


@pytest.fixture
def begin() -> Iterator[Callable[..., EngineClient]]:
    started: list[EngineClient] = []

    def starting(**settings: object) -> EngineClient:
        started.append(start(**settings))
        return started[-1]

    yield starting
    for client in started:
        client.close()


def encoded(client: EngineClient) -> list[list[int]]:
    """The requests of each encode batch, from now on."""
    seen: list[list[int]] = []
    client.backend.loop.executor.requests.on_start = lambda ids: seen.append(list(ids))
    return seen


# --- who is served first --------------------------------------------------------------------------


def test_a_live_caller_passes_those_who_wait(begin):
    client = begin(max_decode_rows=1)
    with held(client):
        bulk = [client.submit(CLIPS[1], ONCE, "bulk") for _ in range(3)]
        near = [client.submit(CLIPS[1], ONCE, "interactive") for _ in range(3)]
        live = client.submit(CLIPS[1], ONCE, "live")
        seen = encoded(client)
    for ticket in (*bulk, *near, live):
        assert isinstance(outcome(ticket), Recognition)
    order = [i for batch in seen for i in batch]
    assert order[0] == live.id
    assert order.index(near[0].id) < order.index(bulk[0].id)


@pytest.mark.slow
def test_bulk_gets_its_share_while_callers_never_stop(begin):
    """A caller's next request is there before the last is answered; a file is still heard."""
    client = begin(max_decode_rows=2)
    stop, answered = threading.Event(), []

    def next_one(_: object = None) -> None:
        if not stop.is_set():
            answered.append(1)
            client.submit(CLIPS[0], ONCE, "live").future.add_done_callback(next_one)

    sessions = [client.open_vad_session(live=True) for _ in range(3)]
    for _ in range(3):
        next_one()
    files = [client.submit(CLIPS[3], ONCE, "bulk") for _ in range(3)]
    for ticket in files:
        assert isinstance(outcome(ticket), Recognition)
    stop.set()
    for session in sessions:
        session.close()
    assert len(answered) > 3
    while client.describe()["requests"]:
        threading.Event().wait(0.002)
    expect_empty(client)


def rows_of_files(client: EngineClient) -> list[int]:
    """How many rows files hold at each step, from now on."""
    decoder, seen = client.backend.loop.executor.decode_runner, []
    step = decoder.step

    def watched():
        utterances = client.backend.loop.executor.open_requests
        seen.append(sum(utterances[row.request_id].priority != "live" for row in decoder.rows))
        return step()

    decoder.step = watched
    return seen


def test_rows_are_kept_for_callers_while_any_is_on_line(begin):
    client = begin(max_decode_rows=8)
    caller = client.open_vad_session(live=True)
    with held(client):
        live = [client.submit(CLIPS[1], ONCE, "live")]
        files = [client.submit(CLIPS[1], ONCE, "bulk") for _ in range(20)]
        seen = rows_of_files(client)
    for ticket in (*live, *files):
        assert isinstance(outcome(ticket), Recognition)
    reserve = 8 // LIVE_RESERVE_FRACTION
    assert 0 < max(seen) <= 8, "an engine that does nothing else may be filled"
    caller.close()
    with held(client):
        files = [client.submit(CLIPS[1], ONCE, "bulk") for _ in range(20)]
        seen = rows_of_files(client)
    for ticket in files:
        outcome(ticket)
    assert max(seen) > 8 - reserve, "with nobody on line nothing is kept"
    expect_empty(client)


def test_a_file_that_needs_every_page_is_heard_beside_an_idle_caller(begin):
    """What is kept for callers does not keep an idle engine from working."""
    client = begin(kv_bytes=1)
    caller = client.open_vad_session(live=True)
    for priority in ("bulk", "interactive", "live"):
        assert isinstance(outcome(client.submit(CLIPS[3], ONCE, priority)), Recognition)
    caller.close()
    expect_empty(client)


def test_callers_find_room_in_a_full_engine(begin):
    client = begin(max_requests=2)
    with held(client):
        full = [client.submit(CLIPS[0], ONCE, "bulk") for _ in range(2)]
        with pytest.raises(AtCapacity):
            client.submit(CLIPS[0], ONCE, "interactive")
        live = [client.submit(CLIPS[0], ONCE, "live", admitted=True) for _ in range(3)]
    for ticket in (*full, *live):
        assert isinstance(outcome(ticket), Recognition)
    expect_empty(client)


def test_all_callers_windows_are_heard_in_one_step(begin):
    client = begin(max_sessions=24)
    sessions = [client.open_vad_session(live=True) for _ in range(24)]
    batches: list[int] = []
    run = client.backend.loop.vad_runner.step

    def watched(batch):
        batches.append(len(batch))
        return run(batch)

    client.backend.loop.vad_runner.step = watched
    with held(client):
        futures = [session.submit_windows(np.zeros(WINDOW_SAMPLES, np.float32)) for session in sessions]
    assert [len(future.result(WAIT_S)) for future in futures] == [1] * 24
    assert batches == [24]
    lone = sessions[0].submit_windows(np.zeros(WINDOW_SAMPLES, np.float32))
    assert len(lone.result(WAIT_S)) == 1, "few windows wait a moment, not for ever"
    for session in sessions:
        session.close()
    expect_empty(client)


def test_windows_that_wait_for_others_go_with_their_session(begin):
    client = begin()
    session, other = client.open_vad_session(live=True), client.open_vad_session(live=True)
    session.submit_windows(np.zeros(WINDOW_SAMPLES, np.float32)).result(WAIT_S)
    with held(client):
        session.submit_windows(np.zeros(WINDOW_SAMPLES, np.float32))
        session.close()
    assert len(other.submit_windows(np.zeros(WINDOW_SAMPLES, np.float32)).result(WAIT_S)) == 1
    other.close()
    assert on_loop(client, lambda loop: loop.vad_scheduler.queued_windows) == 0
    expect_empty(client)


# --- overload ---------------------------------------------------------------------------------------


def test_only_callers_answers_count_and_overload_refuses_callers_only(begin):
    client = begin()
    outcome(client.submit(CLIPS[0], ONCE, "interactive"))
    assert client.partial_rate.turnaround_ms == 0
    outcome(client.submit(CLIPS[0], ONCE, "live"))
    assert client.partial_rate.turnaround_ms > 0
    with held(client):
        taken_back = client.submit(CLIPS[0], ONCE, "live")
        client.cancel(taken_back)
    before = client.partial_rate.turnaround_ms
    outcome(taken_back)
    assert client.partial_rate.turnaround_ms == before
    for _ in range(MIN_SAMPLES):
        client.partial_rate.record_turnaround(20 * OVERLOADED_MS, 1_000 * time.monotonic())
    on_line = client.open_vad_session(live=True)  # the only one: nobody waits
    with pytest.raises(AtCapacity, match=r"\d+ ms.*try again in \d+ ms") as refused:
        client.open_vad_session(live=True)
    assert refused.value.retry_after_ms > 0
    assert client.describe()["sessions"] == 1
    client.open_vad_session().close()  # a file's
    on_line.close()
    client.open_vad_session(live=True).close()
    assert client.describe()["sessions"] == 0


def test_what_was_promised_a_caller_who_was_refused_is_nothing(begin):
    client = begin(max_sessions=1)
    first = client.open_vad_session(live=True)
    with pytest.raises(AtCapacity):
        LiveSession(client, VOCABULARY, ListenOptions(max_segment_ms=3_000), lambda: None)
    first.close()
    LiveSession(client, VOCABULARY, ListenOptions(max_segment_ms=3_000), lambda: None).close()
    expect_empty(client)


# --- failures ---------------------------------------------------------------------------------------


def failing_once(function):
    failed = threading.Event()

    def wrapper(*arguments):
        if not failed.is_set():
            failed.set()
            raise RuntimeError("the device hiccuped")
        return function(*arguments)

    return wrapper


def test_a_verification_that_fails_fails_its_drafts_only(begin):
    client = begin()
    plain = [client.submit(pcm, ONCE).future.result(WAIT_S) for pcm in CLIPS]
    decoder = client.backend.loop.executor.decode_runner
    with held(client):
        drafted = [client.submit(CLIPS[1], ONCE, "live", draft=DraftTokens(plain[1].tokens)) for _ in range(2)]
        near = [client.submit(CLIPS[1], ONCE, "live"), client.submit(CLIPS[3], ONCE)]
        decoder.prefill_and_verify = failing_once(decoder.prefill_and_verify)
    assert [outcome(ticket) for ticket in drafted] == [StepFailed, StepFailed]
    assert outcome(near[0]).tokens == plain[1].tokens
    assert outcome(near[1]).tokens == plain[3].tokens
    again = client.submit(CLIPS[1], ONCE, "live", draft=DraftTokens(plain[1].tokens))
    assert outcome(again).tokens == plain[1].tokens
    expect_empty(client)


# --- listening, with probabilities to order -----------------------------------------------------------


@pytest.fixture(scope="module")
def scripted() -> Iterator[EngineClient]:
    """Voice activity reads each window's probability from its first sample."""

    def read(batch):
        return [np.ascontiguousarray(pcm.reshape(-1, WINDOW_SAMPLES)[:, 0]) for _, pcm in batch]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "VAD_STEP_INTERVAL_S", 0.0)
        client = start(max_sessions=4)
        client.backend.loop.vad_runner.step = read
        yield client
    expect_empty(client)
    client.close()


def sound(probabilities: list[float], missing: int = 0, seed: int = 1) -> np.ndarray:
    pcm = clip(seed, len(probabilities) * WINDOW_SAMPLES)
    pcm[::WINDOW_SAMPLES] = probabilities
    return pcm[: len(pcm) - missing]


def hurried() -> Callable[[], float]:
    """A minute passes between two looks at it."""
    return map(float, itertools.count(0, 60)).__next__


def still() -> float:
    return 0.0


def hear(
    client: EngineClient,
    pcm: np.ndarray,
    options: dict[str, object],
    sizes: list[int],
    clock: Callable[[], float],
    *,
    in_step: bool,
) -> Said:
    """`in_step`: whatever the engine has to say to a packet is heard before the next one is put."""
    client.partial_rate = PartialRateController()
    bell, said, locked, at, ended = threading.Event(), [], "", 0, False
    listening = LiveSession(client, VOCABULARY, ListenOptions.of(options), bell.set, clock)
    next_size = itertools.cycle(sizes).__next__

    def take() -> bool:
        nonlocal locked
        bell.clear()
        done = False
        for event in listening.advance():
            assert not done
            match event:
                case LiveSegmentDone(segment=segment):
                    assert segment.text.startswith(locked), (locked, segment.text)
                    assert not said or said[-1][1] <= segment.start_samples
                    assert segment.start_samples < segment.end_samples <= listening.received_samples
                    said.append((segment.start_samples, segment.end_samples, segment.text))
                    locked = ""
                case LivePartial():
                    assert event.locked_text.startswith(locked), (locked, event.locked_text)
                    assert not said or event.start_samples >= said[-1][1]
                    assert event.start_samples <= event.heard_samples <= listening.received_samples
                    locked = event.locked_text
                case SessionFinished():
                    done = True
        return done

    try:
        while True:
            if at < len(pcm) and not listening.full:
                size = next_size()
                listening.append_audio(pcm[at : at + size])
                at += size
            elif at >= len(pcm) and not ended:
                listening.finish()
                ended = True
            else:
                assert bell.wait(HANG_S), "nothing is under way, and it is not finished"
            done = take()
            while not done and in_step and not listening.idle:
                assert bell.wait(HANG_S)
                done = take()
            if done:
                assert listening.advance() == []
                return said
    finally:
        listening.close()


@st.composite
def callers(draw: st.DrawFn) -> tuple[np.ndarray, dict[str, object], list[int]]:
    level = st.sampled_from([0.0, 0.0, 0.1, 0.34, 0.4, 0.5, 0.9, 1.0])
    stretch = st.tuples(level, st.integers(1, 5) | st.integers(5, 90))
    stretches = draw(st.lists(stretch, min_size=1, max_size=9))
    probabilities = [p for p, count in stretches for _ in range(count)]
    schedules = [None, [(inf, 0)], [(inf, 30)], [(inf, 100)], [(2_000, 800), (inf, 200)]]
    options = {
        "max_segment_ms": draw(st.sampled_from([1_000, 1_500, 2_000, 3_000, 5_000])),
        "lock_ms": draw(st.sampled_from([200, 500, 1_920])),
        "partial_ms": draw(st.sampled_from([100, 480])),
        "silence_schedule": draw(st.sampled_from(schedules)),
    }
    pcm = sound(probabilities, draw(st.sampled_from([0, 1, 100, 511])), draw(st.integers(0, 50)))
    return pcm, options, draw(st.lists(st.sampled_from([1, 100, 512, 1_600, 5_000]), min_size=5, max_size=5))


AT_ONCE, SOON = [(inf, 0)], [(inf, 30)]
TORN = {"lock_ms": 1_920, "partial_ms": 480}


@settings(max_examples=25, deadline=None)
@given(callers())
@example((sound([0.0] * 100 + [0.9] * 200), {**TORN, "max_segment_ms": 1_000}, [1_600]))
@example(
    (
        sound([0.9] * 31 + [0.0] * 2 + [0.9] * 40),
        {**TORN, "max_segment_ms": 1_000, "silence_schedule": SOON},
        [512],
    )
)
@example(
    (sound([0.9] * 62 + [0.0] + [0.9] * 9), {**TORN, "max_segment_ms": 2_000, "silence_schedule": AT_ONCE}, [512])
)
@example((sound([1.0] + [0.4] * 200 + [0.0] * 90), {"lock_ms": 200, "max_segment_ms": 5_000}, [512]))
def test_words_and_times_depend_on_the_audio_alone(scripted, case):
    """However it comes, however often partials are asked for, and whatever is torn apart in it."""
    pcm, options, sizes = case
    said = hear(scripted, pcm, options, [1 << 40], still, in_step=False)
    assert hear(scripted, pcm, options, sizes * 40, hurried(), in_step=True) == said
    assert hear(scripted, pcm, options, [1_600], hurried(), in_step=False) == said
    assert scripted.describe()["sessions"] == 0


@settings(max_examples=40, deadline=None)
@given(callers(), st.integers(0, 400))
def test_closing_at_any_moment_gives_everything_back(scripted, case, after):
    pcm, options, sizes = case
    scripted.partial_rate = PartialRateController()
    bell = threading.Event()
    listening = LiveSession(scripted, VOCABULARY, ListenOptions.of(options), bell.set, hurried())
    at, next_size = 0, itertools.cycle(sizes).__next__
    for turn in range(after):
        if at < len(pcm):
            size = next_size()
            listening.append_audio(pcm[at : at + size])
            at += size
        elif at < 1 << 40:
            listening.finish()
            at = 1 << 40
        if turn % 3 == 0:
            bell.wait(0.002)
        listening.advance()
    listening.close()
    listening.close()
    assert listening.advance() == []
    expect_empty(scripted)
    assert scripted.describe()["sessions"] == 0
    assert scripted.describe()["sessions_used"] == 0


def test_a_model_that_hears_little_at_once_can_be_listened_to(scripted):
    """It is cut at its own limit, which is shorter than what live segments are usually cut at."""
    assert CARD.max_segment_ms < 16_000
    said = hear(scripted, sound([0.9] * 400), {}, [1 << 40], still, in_step=False)
    assert len(said) > 1
    assert all(end - begun < 8 * 16_000 for begun, end, _ in said)
