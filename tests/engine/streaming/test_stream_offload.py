"""Offload of idle streams: they give up their slots, and their results stay what they would have been.

On a clock that is set by hand, with poison in every unused row.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_offload import ClipStream, Clock, ExecutorBench, FakeLoop, FakeOffloadStore, clock
from tiny_streaming import clips

from asr_serve.decoding.attention_rescoring import AttentionRescoringSearch
from asr_serve.decoding.ctc import CtcPrefixBeam
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.request import RecognitionRequest, StreamChunk
from asr_serve.engine.session_snapshot import SessionSnapshot, SessionSnapshotView
from asr_serve.engine.streaming import executor, offload, request
from asr_serve.engine.streaming.offload import MAX_OFFLOADS_PER_STEP, StreamOffloader
from asr_serve.errors import AtCapacity, Cancelled, EngineClosed, StepFailed

CASES = [
    ("fastconformer 8,1", "ctc"),
    ("fastconformer 8,1", "ctc beam"),
    ("fastconformer 8,1", "ctc batched"),
    ("tdt 8,1", "rnnt"),
    ("fastconformer 8,3", "rnnt beam"),
    ("u2pp 2", "rescored"),
    ("deepspeech", "ctc"),
]
PCM = np.concatenate(clips(3))[:48_000]
RESIDENT: dict[tuple[Any, ...], ClipStream] = {}
"""Streams that are never offloaded, by their audio and pieces: computed once."""
WAIT_S = 180.0


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def now() -> Iterator[Clock]:
    with clock() as made:
        yield made


def bench(now: Clock, name: str = "deepspeech", search: str = "ctc", **options: Any) -> ExecutorBench:
    if search == "rescored":
        options["make"] = lambda network: AttentionRescoringSearch(CtcPrefixBeam(network, 4), network)
    return ExecutorBench(now, name, search, **options)


def resident(name: str, search: str, pcm: np.ndarray, cuts: list[int], **options: Any) -> ClipStream:
    """The same pieces, never offloaded."""
    known = (name, search, pcm.tobytes(), *cuts, *options.items())
    if known not in RESIDENT:
        with clock() as now:
            made = bench(now, name, search, slots=1, **options)
            caller = RESIDENT[known] = ClipStream(made, 0, pcm)
            for cut in cuts:
                caller.send(cut)
            made.expect_empty()
    return RESIDENT[known]


# --- parity ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["memory", "disk", "lost"])
@pytest.mark.parametrize(("name", "search"), CASES)
@pytest.mark.repeats(how={"memory", "lost"}, search={"ctc", "ctc batched", "rnnt", "rnnt beam"})
def test_offloaded_streams_equal_resident_ones_to_the_bit(now: Clock, name: str, search: str, how: str) -> None:
    token_count = 0
    for seed in range(2):
        chance = random.Random(seed)
        pcm, shelf = clips(seed)[4 * seed][:24_000], FakeOffloadStore(disk=how != "memory")
        here = bench(now, name, search, slots=1, tiers=shelf, replay=how == "lost")
        there = bench(now, name, search, slots=1)
        offloaded_stream, resident_stream = ClipStream(here, 7, pcm), ClipStream(there, 7, pcm)
        while not offloaded_stream.finished:
            cut = chance.choice((1, 700, 5_120, 9_000))
            for made, caller in ((here, offloaded_stream), (there, resident_stream)):
                caller.send(cut)
                while shelf.read():
                    made.settle()
                assert caller.answered
            if not offloaded_stream.finished and chance.random() < 0.7:
                here.idle(10.0)
                assert here.asleep == {7}
                assert here.wrapper.free_sessions == 1, "a sleeper holds no slot"
                if how == "lost":
                    shelf.lost = set(shelf.held)
        assert offloaded_stream.tokens() == resident_stream.tokens()
        assert offloaded_stream.tails() == resident_stream.tails()
        token_count += len(offloaded_stream.tokens())
        here.expect_empty()
    assert token_count > 0


@pytest.mark.parametrize(("name", "search"), CASES)
def test_the_state_after_offload_is_that_of_a_resident_stream(now: Clock, name: str, search: str) -> None:
    shelf = FakeOffloadStore()
    here, there = bench(now, name, search, tiers=shelf), bench(now, name, search)
    offloaded_stream, resident_stream = ClipStream(here, 0, PCM), ClipStream(there, 0, PCM)
    for cut in (8_000, 5_001, 12_345):
        for caller in (offloaded_stream, resident_stream):
            caller.send(cut)
        here.idle(10.0)
        assert here.asleep == {0}
        other = ClipStream(here, 1, PCM)  # it has the row meanwhile, and spoils it
        other.send(20_000)
        here.streams.close_stream(1)
    offloaded_stream.send(3_000)
    resident_stream.send(3_000)
    ours, theirs = here.streams.export_stream(0), there.streams.export_stream(0)
    assert ours is not None
    assert ours == theirs
    here.expect_empty()


Op = tuple[str, int, int]


@st.composite
def schedules(draw: Any) -> tuple[int, int, list[Op]]:
    callers = draw(st.integers(2, 6))
    slots = draw(st.integers(2, 3))
    op = st.one_of(
        st.tuples(st.just("put"), st.integers(0, callers - 1), st.sampled_from((1, 640, 2_561, 8_000))),
        st.tuples(st.just("idle"), st.just(0), st.sampled_from((0, 1, 11))),
        st.tuples(st.just("turn"), st.just(0), st.just(0)),
        st.tuples(st.just("read"), st.just(0), st.just(0)),
        st.tuples(st.just("close"), st.integers(0, callers - 1), st.just(0)),
        st.tuples(st.just("lose"), st.integers(0, callers - 1), st.just(0)),
        st.tuples(st.just("move"), st.integers(0, callers - 1), st.just(0)),
    )
    return callers, slots, draw(st.lists(op, min_size=10, max_size=40))


@pytest.mark.slow
@pytest.mark.parametrize("search", ["ctc", "ctc beam"])
@pytest.mark.parametrize("disk", [False, True])
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=schedules(), room=st.sampled_from((1 << 30, 60_000, 0)), kept=st.sampled_from((1 << 30, 4 * 15_000)))
@pytest.mark.repeats(search="ctc", disk=True)
@pytest.mark.repeats(search="ctc beam", disk=False)
def test_any_schedule_gives_the_results_of_streams_alone(
    search: str, disk: bool, schedule: tuple[int, int, list[Op]], room: int, kept: int
) -> None:
    callers, slots, ops = schedule
    with clock() as now, mock.patch.object(request, "MAX_REPLAY_BYTES", kept):
        shelf = FakeOffloadStore(room, disk=disk)
        made = bench(now, "deepspeech", search, slots=slots, tiers=shelf, replay=disk, chunked=True)
        pcm = {number: clips(number)[2][:20_000] for number in range(callers)}
        streams_by_number = {number: ClipStream(made, number, pcm[number]) for number in range(callers)}
        cuts: dict[int, list[int]] = {number: [] for number in range(callers)}
        gone: set[int] = set()
        for op, number, much in ops:
            if op == "put" and number not in gone and not streams_by_number[number].finished:
                streams_by_number[number].write(much)
                cuts[number].append(much)
            elif op == "idle":
                now.now_s += much
                made.step()
            elif op == "turn":
                made.step()
            elif op == "read":
                shelf.read()
            elif op == "close":
                made.streams.close_stream(number)
                gone.add(number)
            elif op == "lose" and disk:
                shelf.lost.add(b"stream %d" % number)
            elif (
                op == "move"
                and number not in gone
                and streams_by_number[number].answered
                and not streams_by_number[number].finished
            ):
                if number in refused(streams_by_number):
                    continue
                if b"stream %d" % number in shelf.held and disk:
                    continue  # it would wait for a disk that nobody turns
                saved = made.streams.export_stream(number)
                made.streams.open_stream(number, True, saved=saved)
            made.streams.check()
        for number, caller in streams_by_number.items():
            if number not in gone | refused(streams_by_number) and not caller.finished:
                caller.write(len(caller.pcm))
                cuts[number].append(len(caller.pcm))
            made.read_all()
            now.now_s += offload.IDLE_UNDER_PRESSURE_S
        while not all(caller.answered for caller in streams_by_number.values()):
            made.read_all()
            due_s = made.streams.due_s
            assert due_s is not None, "somebody waits for ever"
            now.now_s = max(now.now_s, due_s)
        assert kept < 1 << 30 or not refused(streams_by_number, StepFailed), "its audio was kept"
        for number in set(streams_by_number) - gone - refused(streams_by_number):
            want = resident("deepspeech", search, pcm[number], cuts[number], chunked=True)
            assert streams_by_number[number].tokens() == want.tokens(), (number, cuts[number])
            assert streams_by_number[number].tails() == want.tails()
        made.expect_empty()


def refused(streams_by_number: dict[int, ClipStream], *why: type[Exception]) -> set[int]:
    """Streams that found no slot, or whose audio is lost."""
    found = set()
    for number, caller in streams_by_number.items():
        errors = [future.exception() for _, future in caller.results if future.done()]
        if any(isinstance(error, why or (AtCapacity, StepFailed)) for error in errors):
            found.add(number)
    return found


# --- which are offloaded, and when -------------------------------------------------------------------------------


def test_a_stream_idle_for_long_is_offloaded_without_pressure(now: Clock) -> None:
    shelf = FakeOffloadStore()
    made = bench(now, tiers=shelf, after_s=10.0)
    caller = ClipStream(made, 0, PCM)
    caller.send(8_000)
    assert made.streams.due_s == now.now_s + 10.0, "the loop wakes by itself"
    made.idle(9.9)
    assert (made.asleep, made.wrapper.free_sessions) == (set(), 1)
    caller.send(800)
    made.idle(9.9)
    assert made.asleep == set(), "it counts from what came last"
    made.idle(0.2)
    assert (made.asleep, made.wrapper.free_sessions) == ({0}, 2)
    assert made.streams.due_s is None, "nothing is due: the loop sleeps"
    assert made.metric("asr_serve_streams_offloaded") == 1
    assert made.metric("asr_serve_stream_offloads_total") == 1
    assert made.streams.describe()["streams_offloaded"] == 1
    made.close(0)


def test_under_pressure_the_longest_idle_go_first_and_no_more_than_needed(now: Clock) -> None:
    shelf = FakeOffloadStore()
    made = bench(now, slots=3, tiers=shelf)
    callers = [ClipStream(made, number, PCM) for number in range(5)]
    for number in (2, 0, 1):
        callers[number].send(8_000)
        now.now_s += 0.2
    callers[3].send(8_000)
    assert not callers[3].answered, "nobody was quiet for long enough"
    assert made.streams.due_s == pytest.approx(now.now_s - 0.6 + offload.IDLE_UNDER_PRESSURE_S)
    made.idle(offload.IDLE_UNDER_PRESSURE_S - 0.6)
    assert callers[3].answered
    assert made.asleep == {2}
    now.now_s += 0.05
    made.settle()
    assert made.asleep == {2}, "nobody waits any more"
    for number in (0, 1, 3):
        made.streams.close_stream(number)
    callers[2].send(100)
    assert callers[2].answered
    made.close(2, 4)


@pytest.mark.parametrize("recording", [False, True])
def test_a_stream_waiting_for_its_biasing_list_wants_no_slot(now: Clock, recording: bool) -> None:
    go = threading.Event()
    made = bench(now, slots=3, tiers=FakeOffloadStore(), spell=lambda bias: go.wait(WAIT_S))
    caller = ClipStream(made, 0, PCM)
    caller.send(8_000)
    if recording:
        options = SearchOptions(bias="ab\t1")
        made.streams.submit(RecognitionRequest(1, PCM, len(PCM), options, "bulk", Future()))
    else:
        made.streams.open_stream(1, True, bias="ab\t1")
        made.streams.append_audio(StreamChunk(1, PCM[:800], False, Future()))
    made.idle(2 * offload.IDLE_UNDER_PRESSURE_S)
    assert (made.asleep, made.wrapper.free_sessions) == (set(), 2)
    made.streams.cancel(1)
    made.idle(2 * offload.IDLE_UNDER_PRESSURE_S)
    go.set()
    made.close(0)
    made.streams.shutdown(EngineClosed("the test is over"))


def test_recordings_offload_streams_and_are_never_offloaded(now: Clock) -> None:
    shelf = FakeOffloadStore()
    made = bench(now, slots=1, tiers=shelf)
    made.context.live_sessions = 0
    caller = ClipStream(made, 0, PCM)
    caller.send(8_000)
    future: Any = Future()
    made.streams.submit(RecognitionRequest(9, PCM[:16_000], 16_000, SearchOptions(), "bulk", future))
    made.settle()
    assert not future.done()
    made.idle(offload.IDLE_UNDER_PRESSURE_S)
    assert future.done()
    assert made.asleep == {0}
    caller.send(len(PCM))
    assert caller.tokens() == resident("deepspeech", "ctc", PCM, [8_000, len(PCM)]).tokens()
    made.expect_empty()


def test_more_streams_than_slots(now: Clock) -> None:
    shelf = FakeOffloadStore()
    made = bench(now, slots=2, tiers=shelf)
    callers = [ClipStream(made, number, PCM[: 16_000 + 700 * number]) for number in range(8)]
    assert made.wrapper.free_sessions == 2, "who has not said anything has no slot"
    for turn in range(3):
        for first in range(0, 8, 2):
            for caller in callers[first : first + 2]:
                caller.send(5_000 + turn)
            now.now_s += offload.IDLE_UNDER_PRESSURE_S
    for caller in callers:
        caller.send(len(PCM))
        now.now_s += offload.IDLE_UNDER_PRESSURE_S
    for caller in callers:
        cuts = [5_000, 5_001, 5_002, len(PCM)]
        assert caller.tokens() == resident("deepspeech", "ctc", caller.pcm, cuts).tokens()
    assert made.metric("asr_serve_stream_restore_seconds_count") >= 20
    made.expect_empty()


def test_without_a_store_nothing_is_offloaded(now: Clock) -> None:
    made = bench(now, slots=1)
    first, second = ClipStream(made, 0, PCM), ClipStream(made, 1, PCM)
    made.settle()
    second.write(100)
    first.send(8_000)
    assert first.answered, "who came first has the slot, before any audio"
    made.idle(executor.MAX_WAIT_S)
    with pytest.raises(AtCapacity):
        second.results[0][1].result(0)
    made.idle(100.0)
    assert made.wrapper.free_sessions == 0
    assert made.streams.due_s is None
    made.close(0)


def test_a_full_store_is_retried_later(now: Clock) -> None:
    shelf = FakeOffloadStore(0)
    made = bench(now, slots=2, tiers=shelf)
    callers = [ClipStream(made, number, PCM) for number in range(3)]
    for caller in callers[:2]:
        caller.send(8_000)
    callers[2].write(8_000)
    made.idle(offload.IDLE_UNDER_PRESSURE_S)
    assert made.asleep == set()
    due_s = made.streams.due_s
    assert due_s is not None
    assert due_s >= now.now_s + offload.STORE_FULL_RETRY_S, "it is tried again later"
    shelf.most_bytes = 1 << 30
    made.idle(offload.IDLE_UNDER_PRESSURE_S + offload.STORE_FULL_RETRY_S)
    assert callers[2].answered, "there was room again"
    made.close(0, 1, 2)


def test_a_stream_without_audio_stores_nothing(now: Clock) -> None:
    shelf = FakeOffloadStore()
    made = bench(now, slots=1, tiers=shelf)
    silent, other = ClipStream(made, 0, PCM), ClipStream(made, 1, PCM)
    silent.send(0)
    assert silent.answered
    assert made.wrapper.free_sessions == 0
    other.write(8_000)
    made.idle(offload.IDLE_UNDER_PRESSURE_S)
    assert other.answered
    assert not shelf.held
    assert made.streams.export_stream(0) is None
    made.close(1)


def test_offloads_per_step_are_bounded(now: Clock) -> None:
    shelf = FakeOffloadStore()
    made = bench(now, slots=10, tiers=shelf)
    for number in range(10):
        ClipStream(made, number, PCM).send(2_000)
    now.now_s += 11.0
    assert made.step()
    assert len(made.asleep) == MAX_OFFLOADS_PER_STEP
    made.settle()
    assert len(made.asleep) == 10
    made.streams.shutdown(EngineClosed("closed"))
    made.expect_empty()


# --- waking ---------------------------------------------------------------------------------------------


def offloaded_streams(made: ExecutorBench, *numbers: int) -> list[ClipStream]:
    """Streams that are offloaded."""
    callers = [ClipStream(made, number, PCM) for number in numbers]
    for caller in callers:
        caller.send(8_000)
        made.idle(offload.IDLE_UNDER_PRESSURE_S)
    made.idle(11.0)
    assert made.asleep == set(numbers)
    return callers


def test_a_read_starts_at_once_and_holds_no_slot(now: Clock) -> None:
    shelf = FakeOffloadStore(disk=True)
    made = bench(now, slots=1, tiers=shelf)
    (offloaded,) = offloaded_streams(made, 0)
    other = ClipStream(made, 1, PCM)
    offloaded.write(8_000)
    assert len(shelf._reading) == 1, "before any turn of the loop"
    other.send(8_000)
    assert other.answered, "a slot is not held for what the disk has not read"
    assert not offloaded.answered
    now.now_s += 0.5
    assert shelf.read()
    made.settle()
    assert not offloaded.answered, "now it waits for a slot like anybody"
    made.idle(0.5)
    assert offloaded.answered, "and others sleep for it"
    assert made.asleep == {1}
    assert made.metric("asr_serve_stream_restore_seconds_count") == 1
    assert made.metric("asr_serve_stream_restore_seconds_sum") == 1.0
    made.close(0, 1)


def test_a_fetched_stream_without_a_slot_is_refused(now: Clock) -> None:
    shelf = FakeOffloadStore()
    made = bench(now, slots=1, tiers=shelf)
    (offloaded,) = offloaded_streams(made, 0)
    shelf.most_bytes = 0
    busy = ClipStream(made, 1, PCM)
    busy.send(8_000)
    futures = [offloaded.write(800), offloaded.write(800)]
    made.idle(executor.MAX_WAIT_S)
    for future in futures:
        with pytest.raises(AtCapacity, match="wait for one of 1 slots"):
            future.result(0)
    assert not shelf.held
    made.close(1)


@pytest.mark.parametrize("name", ["deepspeech", "u2pp 2"])
def test_streams_swap_places_when_the_store_is_full(now: Clock, name: str) -> None:
    """One slot, room to offload one stream, and two streams in turn."""
    shelf = FakeOffloadStore()
    made = bench(now, name, slots=1, tiers=shelf)
    cuts = [16_000, 9_000, 12_000, len(PCM)]
    callers = [ClipStream(made, number, PCM) for number in range(2)]
    for caller in callers:
        caller.write(cuts[0])
        made.idle(11.0)
    assert made.asleep == {0}
    (parts,) = shelf.held.values()
    one = sum(map(len, parts))
    shelf.most_bytes = one + one // 2
    for cut in cuts[1:]:
        for caller in callers:
            caller.write(cut)
            for _ in range(3):
                made.idle(executor.MAX_WAIT_S / 4)
            assert caller.answered, "who has the slot waits for room, and who has room for the slot"
    want = resident(name, "ctc", PCM, cuts)
    for caller in callers:
        assert caller.tokens() == want.tokens()
    made.expect_empty()


def test_waiting_offloaded_streams_are_bounded(now: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "MAX_WAITING", 2)
    shelf = FakeOffloadStore()
    made = bench(now, slots=1, tiers=shelf)
    streams = offloaded_streams(made, 0, 1, 2)
    ClipStream(made, 3, PCM).send(8_000)
    futures = [caller.write(800) for caller in streams]
    with pytest.raises(AtCapacity):
        futures[2].result(0)
    assert set(shelf.held) == {b"stream 0", b"stream 1"}
    made.close(*range(4))


@pytest.mark.parametrize("when", ["asleep", "reading", "read", "waiting"])
def test_closing_an_offloaded_stream_leaves_nothing(now: Clock, when: str) -> None:
    shelf = FakeOffloadStore(disk=True)
    made = bench(now, slots=1, tiers=shelf)
    (offloaded,) = offloaded_streams(made, 0)
    ClipStream(made, 1, PCM).send(8_000)
    if when != "asleep":
        future = offloaded.write(800)
    if when in ("read", "waiting"):
        shelf.read()
    if when == "waiting":
        made.settle()
    made.streams.close_stream(0)
    made.streams.close_stream(0)
    while shelf.read():
        pass
    made.settle()
    if when != "asleep":
        with pytest.raises(Cancelled):
            future.result(0)
    assert not shelf.held
    made.close(1)


def test_shutdown_ends_offloaded_streams(now: Clock) -> None:
    shelf = FakeOffloadStore(disk=True)
    made = bench(now, slots=1, tiers=shelf)
    first, _ = offloaded_streams(made, 0, 1)
    future = first.write(800)
    made.streams.shutdown(EngineClosed("closed"))
    with pytest.raises(EngineClosed):
        future.result(0)
    shelf.read()
    made.expect_empty()


# --- what is lost ---------------------------------------------------------------------------------------


def test_replay_repeats_no_result(now: Clock) -> None:
    shelf = FakeOffloadStore(disk=True)
    made = bench(now, "u2pp 2", "ctc", tiers=shelf, replay=True)
    caller = ClipStream(made, 0, PCM)
    cuts = [24_000, 12_001, len(PCM)]
    for cut in cuts:
        caller.send(cut)
        while shelf.read():
            made.settle()
        if not caller.finished:
            made.idle(11.0)
            shelf.lost = set(shelf.held)
            assert shelf.lost
    want = resident("u2pp 2", "ctc", PCM, cuts)
    assert len(want.results[0][1].result(0).fixed_tokens) > 2, "nothing was told before it slept"
    assert caller.tokens() == want.tokens()
    assert made.metric("asr_serve_recomputed_streams_total") == 2
    made.expect_empty()


def test_replay_audio_is_kept_where_needed_and_bounded(now: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench(now, tiers=FakeOffloadStore())
    caller = ClipStream(made, 0, PCM)
    caller.send(8_000)
    assert made.streams._streams[0].replay_audio is None
    monkeypatch.setattr(request, "MAX_REPLAY_SAMPLES", 10_000)
    shelf = FakeOffloadStore(disk=True)
    made = bench(now, tiers=shelf, replay=True)
    (caller,) = offloaded_streams(made, 0)
    caller.write(1_000)
    made.read_all()
    kept = made.streams._streams[0].replay_audio
    assert kept is not None
    assert sum(map(len, kept)) == 9_000
    caller.send(5_000)
    made.idle(11.0)
    assert made.asleep == {0}
    assert made.streams._streams[0].replay_audio is None
    shelf.lost = set(shelf.held)
    future = caller.write(800)
    made.read_all()
    with pytest.raises(StepFailed, match="lost"):
        future.result(0)
    made.expect_empty()


def test_a_damaged_snapshot_is_replayed(now: Clock) -> None:
    shelf = FakeOffloadStore()
    made = bench(now, tiers=shelf, replay=True)
    (caller,) = offloaded_streams(made, 0)
    (name,) = shelf.held
    shelf.held[name][1] = shelf.held[name][1][:-4]
    caller.send(len(PCM))
    assert caller.tokens() == resident("deepspeech", "ctc", PCM, [8_000, len(PCM)]).tokens()
    assert made.metric("asr_serve_recomputed_streams_total") == 1
    made.expect_empty()


@pytest.mark.parametrize("live", [True, False])
def test_a_stalled_read_is_replayed(now: Clock, live: bool) -> None:
    """The disk stalls: it neither answers nor fails. What it brings later is dropped."""
    shelf = FakeOffloadStore(disk=True)
    made = bench(now, tiers=shelf, replay=True)
    caller = ClipStream(made, 0, PCM, live=live)
    caller.send(8_000)
    made.idle(11.0)
    future = caller.write(9_000)
    made.idle(offload.READ_TIMEOUT_S / 2)
    assert not future.done()
    assert made.streams.due_s == now.now_s + offload.READ_TIMEOUT_S / 2, "the loop wakes by itself"
    made.idle(offload.READ_TIMEOUT_S / 2)
    assert future.done()
    made.idle(11.0)
    assert made.asleep == {0}
    caller.write(len(PCM))
    shelf.lost = {b"stream 0"}
    assert shelf.read(), "that from before, which is lost, while the next one is under way"
    made.settle()
    shelf.lost = set()
    assert shelf.read()
    made.settle()
    want = resident("deepspeech", "ctc", PCM, [8_000, 9_000, len(PCM)])
    assert caller.tokens() == want.tokens()
    assert caller.tails() == want.tails()
    assert made.metric("asr_serve_recomputed_streams_total") == 1
    made.expect_empty()


def test_a_read_timeout_fails_its_own_stream_without_replay_audio(now: Clock) -> None:
    shelf = FakeOffloadStore(disk=True)
    made = bench(now, slots=3, tiers=shelf)
    first, second = offloaded_streams(made, 0, 1)
    late = first.write(8_000)
    made.idle(offload.READ_TIMEOUT_S - 0.5)
    second.write(8_000)
    made.idle(0.5)
    with pytest.raises(StepFailed, match="lost"):
        late.result(0)
    assert set(shelf.held) == {b"stream 1"}
    assert not second.answered
    while shelf.read():
        made.settle()
    second.send(len(PCM))
    assert second.tokens() == resident("deepspeech", "ctc", PCM, [8_000, 8_000, len(PCM)]).tokens()
    assert made.metric("asr_serve_recomputed_streams_total") == 1
    made.expect_empty()


class SlowStore(FakeOffloadStore):
    """A disk on which every read takes a while, or stalls for ever."""

    stalls = False

    def get(self, name: bytes, done: Any) -> None:
        super().get(name, done)
        if not self.stalls:
            threading.Timer(0.05, self.read).start()
        else:
            self._reading.clear()


def test_one_slow_read_does_not_fail_later_ones(now: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocking reads, as for streams that move to another engine."""
    shelf, snapshot = SlowStore(disk=True), SessionSnapshotView(b"numbers", (b"part",))
    made = StreamOffloader(shelf, 10.0)
    made.attach(FakeLoop())
    for number in range(5):
        assert made.offload(number, snapshot)

    def read(number: int, *, stalls: bool, whole_s: float, haste_s: float) -> bool:
        monkeypatch.setattr(offload, "READ_TIMEOUT_S", whole_s)
        monkeypatch.setattr(offload, "SHORT_READ_TIMEOUT_S", haste_s)
        shelf.stalls = stalls
        return made.read_blocking(number) is not None

    assert not read(0, stalls=True, whole_s=0.01, haste_s=WAIT_S)
    now.now_s += 1.0
    assert read(1, stalls=False, whole_s=WAIT_S, haste_s=WAIT_S), "the disk is asked again, and waited for"
    assert not read(2, stalls=True, whole_s=WAIT_S, haste_s=0.01), "not for long, within so long"
    now.now_s += WAIT_S - 1.0
    assert read(3, stalls=False, whole_s=WAIT_S, haste_s=0.0), "what was not waited for for long says nothing"
    assert read(4, stalls=False, whole_s=WAIT_S, haste_s=0.0)


# --- audio kept for replay -----------------------------------------------------------------------------


def kept(made: ExecutorBench) -> set[int]:
    """Streams whose audio is kept for replay."""
    return {number for number, each in made.streams._streams.items() if each.replay_audio}


def test_the_replay_budget_drops_the_longest_offloaded_then_the_longest(
    now: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "MAX_REPLAY_BYTES", 4 * 20_000)
    shelf = FakeOffloadStore(disk=True)
    made = bench(now, slots=3, tiers=shelf, replay=True)
    cuts = {number: [8_000] for number in (2, 0, 1)}
    callers = {number: ClipStream(made, number, PCM[:16_000]) for number in cuts}

    def write(number: int, samples: int) -> Any:
        cuts[number].append(samples)
        future = callers[number].write(samples)
        made.read_all()
        made.settle()
        return future

    for number in (2, 0):
        callers[number].send(8_000)
        made.idle(11.0)
    assert made.asleep == {0, 2}
    assert (kept(made), made.kept_bytes) == ({0, 2}, 4 * 16_000)
    callers[1].send(8_000)
    assert (kept(made), made.kept_bytes) == ({0, 1}, 4 * 16_000), "the longest asleep gave way"
    shelf.lost = set(shelf.held)
    with pytest.raises(StepFailed, match="lost"):
        write(2, 800).result(0)
    write(0, 100)
    assert made.metric("asr_serve_recomputed_streams_total") == 2
    write(1, 100)
    assert made.kept_bytes == 4 * 16_200
    write(1, 4_000)
    assert made.asleep == set()
    assert (kept(made), made.kept_bytes) == ({0}, 4 * 8_100), "nobody sleeps: that with the most did"
    shelf.lost = set()
    made.idle(11.0)
    assert made.asleep == {0, 1}
    for number in (0, 1):
        write(number, 16_000)
        assert callers[number].tokens() == resident("deepspeech", "ctc", PCM[:16_000], cuts[number]).tokens()
    made.expect_empty()


def test_a_stream_waiting_for_replay_keeps_its_audio_longest(now: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = FakeOffloadStore()
    made = bench(now, slots=1, tiers=shelf, replay=True)
    (offloaded,) = offloaded_streams(made, 0)
    other = ClipStream(made, 1, PCM)
    other.send(4_000)
    shelf.lost = set(shelf.held)
    future = offloaded.send(800)
    assert not future.done(), "it waits for a slot"
    monkeypatch.setattr(request, "MAX_REPLAY_BYTES", 4 * 11_000)
    other.send(4_000)
    assert kept(made) == {0}, "though it has no less"
    monkeypatch.setattr(request, "MAX_REPLAY_BYTES", 4 * 7_000)
    ClipStream(made, 2, PCM)
    assert kept(made) == set()
    assert not future.done(), "it still waits for a slot"
    made.streams.close_stream(1)
    made.settle()
    with pytest.raises(StepFailed, match="lost"):
        future.result(0)
    made.close(2)


def test_replay_audio_from_another_engine_is_counted(now: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    here = bench(now, tiers=FakeOffloadStore(), replay=True)
    there = bench(now, tiers=FakeOffloadStore(), replay=True)
    monkeypatch.setattr(request, "MAX_REPLAY_BYTES", 4 * 20_000)
    for number in range(3):
        caller = ClipStream(here, number, PCM)
        caller.send(9_000)
        saved = here.streams.export_stream(number)
        assert saved is not None
        there.streams.open_stream(number, True, saved=saved)
        assert there.kept_bytes == 4 * 9_000 * min(2, number + 1)
    here.expect_empty()
    assert kept(there) == {1, 2}
    there.close(*range(3))


# --- to another engine ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("state", ["awake", "asleep", "never begun there", "lost"])
@pytest.mark.parametrize(("name", "search"), CASES)
@pytest.mark.repeats(state={"awake", "never begun there", "lost"}, search={"ctc", "ctc batched", "rnnt", "rnnt beam"})
def test_a_stream_moves_to_another_engine(now: Clock, name: str, search: str, state: str) -> None:
    shelf, other = FakeOffloadStore(), FakeOffloadStore()
    here = bench(now, name, search, tiers=shelf, replay=True)
    there = bench(now, name, search, tiers=other, replay=True)
    caller = ClipStream(here, 3, PCM)
    cuts = [20_000, 15_001, len(PCM)]
    for cut in cuts[:2]:
        caller.send(cut)
    if state in ("asleep", "lost"):
        here.idle(11.0)
        assert here.asleep == {3}
    if state == "lost":
        shelf.lost = set(shelf.held)
    saved = here.streams.export_stream(3)
    assert saved is not None
    here.expect_empty()
    there.streams.open_stream(3, True, saved=saved)
    assert there.asleep == ({3} if state != "lost" else set()), "as many may come as sleep elsewhere"
    if state == "never begun there":
        there.settle()
        assert there.wrapper.free_sessions == there.wrapper.states.slots, "it takes no slot before anything comes"
        again = there.streams.export_stream(3)
        assert again == saved
        there.streams.open_stream(3, True, saved=again)
    caller._bench = there
    caller.send(cuts[2])
    want = resident(name, search, PCM, cuts)
    assert caller.tokens() == want.tokens()
    assert caller.tails() == want.tails()
    there.expect_empty()


def test_invalid_snapshots_are_refused(now: Clock) -> None:
    here, there = bench(now), bench(now, "fastconformer 8,1", "ctc")
    caller = ClipStream(here, 3, PCM)
    caller.send(20_000)
    saved = here.streams.export_stream(3)
    assert saved is not None
    broken = [
        SessionSnapshot(b"", saved.parts),
        SessionSnapshot(saved.header, ()),
        SessionSnapshot(saved.header, (b"x", *saved.parts[1:])),
        SessionSnapshot(saved.header, saved.parts[:-1]),
        SessionSnapshot(saved.header, (*saved.parts, b"")),
    ]
    for each in broken:
        with pytest.raises(ValueError, match=r"saved|snapshot|session"):
            here.streams.open_stream(3, True, saved=each)
    with pytest.raises(ValueError, match="another model"):
        there.streams.open_stream(3, True, saved=saved)
    here.expect_empty()
    there.expect_empty()


def test_a_busy_stream_cannot_be_exported(now: Clock) -> None:
    made = bench(now)
    ClipStream(made, 0, PCM).write(8_000)
    with pytest.raises(AssertionError, match="while it has chunks"):
        made.streams.export_stream(0)
    made.streams.append_audio(StreamChunk(5, PCM, True, Future()))  # of nobody
    made.close(0)
