"""Streams of an engine on a thread and in a process: waiting for slots, failed steps, killed processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from engine_clients import NEMO, NEMO_MODEL, backend_of, engine_pid, fail_calls, start_engine
from tiny_moonshine import WAIT_S, clip, held, on_loop

from asr_serve.config import EngineConfig
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process.in_flight import MAX_DEATHS
from asr_serve.engine.process.messages import ErrorMessage, RequestFailed
from asr_serve.engine.streaming import executor, slot_queue
from asr_serve.errors import (
    AtCapacity,
    Cancelled,
    EngineClosed,
    EngineCrashed,
    OptionError,
    StepFailed,
    UnsupportedOption,
)
from asr_serve.text.tokenizers import SentencePieceTokenizer
from asr_serve.text.word_timing import token_times_from_frames
from asr_serve.types import LanguageModelChoice, SearchResult

CONFIG = {"use_chunked_inference": True, "max_sessions": 6, "chunk_wait_ms": 1.0}
CLIPS = [clip(seed, 12_000 + 9_001 * seed) for seed in range(6)]
Begin = Callable[..., EngineClient]


@pytest.fixture(scope="module")
def kept() -> Iterator[dict[str, EngineClient]]:
    """Engines in processes, by their settings, that one test leaves to the next: a start takes longer than a test."""
    engines: dict[str, EngineClient] = {}
    yield engines
    for client in engines.values():
        client.close()


@pytest.fixture
def on_process(kept: dict[str, EngineClient]) -> Iterator[Begin]:
    """An engine in a process; it stays for the next test if it is as it was."""
    used: list[str] = []

    def start(**settings: Any) -> EngineClient:
        used.append(str(settings))
        if used[-1] not in kept:
            kept[used[-1]] = start_engine(NEMO_MODEL, NEMO, EngineConfig(**(CONFIG | settings)), process=True)
        return kept[used[-1]]

    yield start
    for name in used:
        client = kept[name]
        busy = client.state != "ready" or not backend_of(client)._current.idle or client.describe()["slots_used"]
        if busy or backend_of(client).restarts:
            kept.pop(name).close()


@pytest.fixture
def on_thread(close_later: Any) -> Begin:
    return lambda **settings: close_later(start_engine(NEMO_MODEL, NEMO, EngineConfig(**(CONFIG | settings))))


@pytest.fixture(params=["thread", pytest.param("process", marks=pytest.mark.slow)])
def begin(request: pytest.FixtureRequest) -> Begin:
    found: Begin = request.getfixturevalue(f"on_{request.param}")
    return found


@pytest.fixture(scope="module")
def want() -> list[tuple[int, ...]]:
    """Tokens of each clip, decoded one after another."""
    client = start_engine(NEMO_MODEL, NEMO)
    answers = [client.submit(pcm).future.result(WAIT_S).tokens for pcm in CLIPS]
    client.close()
    assert sum(map(len, answers)) > 10
    return answers


def fixed_ids(found: list[SearchResult]) -> tuple[int, ...]:
    return tuple(token.id for each in found for token in each.fixed_tokens)


def pieces(pcm: np.ndarray, size: int) -> list[np.ndarray]:
    return [pcm[at : at + size] for at in range(0, len(pcm), size)]


@pytest.mark.slow
def test_streams_have_the_tokens_of_utterances(begin: Begin, want: list[tuple[int, ...]]):
    client = begin()
    assert client.card.frame_samples == 1_280
    streams = [client.open_stream(live=number % 2 == 0) for number in range(len(CLIPS))]
    futures: list[list[Future[SearchResult]]] = []
    for stream, pcm in zip(streams, CLIPS, strict=True):
        futures.append([stream.submit_audio(piece) for piece in pieces(pcm, 2_000)])
    for stream, own in zip(streams, futures, strict=True):
        own.append(stream.submit_audio(np.zeros(0, np.float32), last=True))
    tickets = [client.submit(pcm) for pcm in CLIPS]
    found = [[each.result(WAIT_S) for each in own] for own in futures]
    assert [fixed_ids(each) for each in found] == want
    assert [ticket.future.result(WAIT_S).tokens for ticket in tickets] == want
    frames = [token.frame for each in found[4] for token in each.fixed_tokens]
    assert frames == sorted(frames)
    assert max(frames) <= len(CLIPS[4]) // 1_280 + 1
    assert client.describe()["slots_used"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("head", ["rnnt", "ctc"])
@pytest.mark.repeats(begin="thread", head="rnnt")
@pytest.mark.repeats(begin="process", head="ctc")
def test_hot_words_change_their_own_streams_only(begin: Begin, head: str) -> None:
    """A stream and an utterance give the same tokens with them; others give those without."""
    client = begin(head=head)
    options = SearchOptions(bias="ab bag\t10\nmad\t10\ndew\t10")
    alone = [client.submit(pcm).future.result(WAIT_S).tokens for pcm in CLIPS[:4]]
    streams = [client.open_stream(live=True, bias=options.bias if number % 2 else "") for number in range(4)]
    futures = [
        [stream.submit_audio(part) for part in pieces(pcm, 4_000)] for stream, pcm in zip(streams, CLIPS, strict=False)
    ]
    for stream, own in zip(streams, futures, strict=True):
        own.append(stream.submit_audio(np.zeros(0, np.float32), last=True))
    found = [fixed_ids([each.result(WAIT_S) for each in own]) for own in futures]
    assert found[0::2] == alone[0::2]
    whole = [client.submit(pcm, options).future.result(WAIT_S).tokens for pcm in CLIPS[:4]]
    assert found[1::2] == whole[1::2]
    assert whole != alone, "they are heard"
    assert client.describe()["slots_used"] == 0


def test_hot_words_that_cannot_be_spelt_fail_their_own_stream(on_thread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SentencePieceTokenizer, "encode", lambda *_: 1 / 0)
    client = on_thread()
    other = client.open_stream(live=True)
    with pytest.raises(StepFailed, match="compiling hotwords failed: ZeroDivisionError"):
        client.submit(CLIPS[0], SearchOptions(bias="bad\t1")).future.result(WAIT_S)
    other.submit_audio(CLIPS[0], last=True).result(WAIT_S)
    assert client.describe()["slots_used"] == 0


def test_hot_words_that_were_not_spelt_before_the_first_piece_fail_it(on_thread, monkeypatch) -> None:
    monkeypatch.setattr(SentencePieceTokenizer, "encode", lambda *_: 1 / 0)
    client = on_thread()
    stream = client.open_stream(live=True, bias="bad\t1")
    until = time.monotonic() + WAIT_S
    while on_loop(client, lambda loop: bool(loop.streams._streams)) and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(StepFailed, match="compiling hotwords failed: ZeroDivisionError"):
        stream.submit_audio(CLIPS[0]).result(WAIT_S)
    with pytest.raises(Cancelled):
        stream.submit_audio(CLIPS[0]).result(WAIT_S)


@pytest.mark.parametrize("settings", [{}, {"host_bytes": 0}])
def test_the_first_piece_has_the_error_of_a_language_model_that_is_not_loaded(on_thread, settings) -> None:
    client = on_thread(**settings)
    chosen = LanguageModelChoice("absent", 0.5)
    stream = client.open_stream(live=True, language_model=chosen)
    with pytest.raises(UnsupportedOption, match="language_model=absent"):
        stream.submit_audio(CLIPS[0][:8_000]).result(WAIT_S)
    with pytest.raises(Cancelled):
        stream.submit_audio(CLIPS[0]).result(WAIT_S)
    with pytest.raises(UnsupportedOption, match="language_model=absent"):
        client.submit(CLIPS[0], SearchOptions(language_model=chosen)).future.result(WAIT_S)
    closed = client.open_stream(live=True, language_model=chosen)
    closed.close()
    assert not on_loop(client, lambda loop: loop.streams._failures), "of a closed stream nothing is kept"
    on_loop(client, lambda loop: loop.check())


def test_a_stream_does_not_move_to_an_engine_without_its_language_model(on_thread) -> None:
    client = on_thread()
    stream = client.open_stream(live=True)
    stream.submit_audio(CLIPS[0][:8_000]).result(WAIT_S)

    def move(loop: Any) -> None:
        saved = loop.streams.export_stream(stream._number)
        assert saved is not None
        with pytest.raises(UnsupportedOption, match="language_model=absent"):
            loop.streams.open_stream(1_000, True, saved=saved, language_model=LanguageModelChoice("absent", 0.5))
        assert not loop.streams._streams
        loop.check()

    on_loop(client, move)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["rnnt", "ctc"])
@pytest.mark.repeats(begin="thread", head="rnnt")
@pytest.mark.repeats(begin="process", head="ctc")
def test_a_stream_has_a_time_for_each_token(begin: Begin, head: str) -> None:
    """Whenever it is asked; and an utterance has the times of the stream."""
    client = begin(head=head)
    pcm, options = CLIPS[5], SearchOptions(words=True)
    stream = client.open_stream(live=True, words=True)
    parts = pieces(pcm, 9_000)
    found = [stream.submit_audio(part, timed=number == 2).result(WAIT_S) for number, part in enumerate(parts)]
    found.append(stream.submit_audio(np.zeros(0, np.float32), last=True, timed=True).result(WAIT_S))
    runs = [run for each in found for run in each.token_runs]
    assert len(runs) == len(fixed_ids(found)) > (3 if head == "rnnt" else 0)
    assert [bool(each.token_runs) for each in found[:2]] == [False, False]
    assert len(found[2].token_runs) == len(fixed_ids(found[:3])), "all that had been fixed_ids by then"
    assert all(0 <= first < behind <= len(pcm) // 1_280 + 2 for first, behind in runs)
    assert runs == sorted(runs)
    whole = client.submit(pcm, options).future.result(WAIT_S)
    assert whole.tokens == fixed_ids(found)
    starts = [start for start, _ in token_times_from_frames(runs, 1_280, len(pcm))]
    assert [start for start, _ in whole.times] == starts, "early times may grow, but not move"
    assert client.submit(pcm).future.result(WAIT_S).times == ()


@pytest.mark.repeats(begin="process")
def test_more_streams_than_slots_wait(begin: Begin, want: list[tuple[int, ...]]):
    client = begin(max_sessions=2)
    tickets = [client.submit(pcm) for pcm in CLIPS]
    stream = client.open_stream(live=True)
    heard = stream.submit_audio(CLIPS[2], last=True)
    assert fixed_ids([heard.result(WAIT_S)]) == want[2]
    assert [ticket.future.result(WAIT_S).tokens for ticket in tickets] == want


def test_closed_and_cancelled_requests_free_their_slot(begin: Begin, want: list[tuple[int, ...]]):
    client = begin(max_sessions=1)
    first, second = client.open_stream(live=True), client.open_stream(live=True)
    answered = first.submit_audio(CLIPS[3][:8_000])
    answered.result(WAIT_S)
    waiting = second.submit_audio(CLIPS[3])
    second.close()
    with pytest.raises(Cancelled):
        waiting.result(WAIT_S)
    ticket = client.submit(CLIPS[1])
    client.cancel(ticket)
    with pytest.raises(Cancelled):
        ticket.future.result(WAIT_S)
    first.close()
    first.close()
    assert client.submit(CLIPS[1]).future.result(WAIT_S).tokens == want[1]
    assert client.describe()["slots_used"] == 0


def test_a_closing_engine_leaves_nobody_waiting(begin: Begin):
    client = begin(max_sessions=1)
    stream, late = client.open_stream(live=True), client.open_stream(live=True)
    stream.submit_audio(CLIPS[0]).result(WAIT_S)
    waiting = late.submit_audio(CLIPS[1])
    client.close()
    with pytest.raises(EngineClosed):
        waiting.result(WAIT_S)
    with pytest.raises(EngineClosed):
        client.open_stream(live=True)


@pytest.mark.repeats(begin="process")
def test_any_number_of_pieces_may_wait(begin: Begin, want: list[tuple[int, ...]]):
    client = begin(max_sessions=1)
    first, second = client.open_stream(live=True), client.open_stream(live=True)
    first.submit_audio(CLIPS[0][:8_000]).result(WAIT_S)
    futures = [second.submit_audio(piece) for piece in pieces(CLIPS[1], 10)]
    futures += [second.submit_audio(np.zeros(0, np.float32)) for _ in range(1_500)]
    futures.append(second.submit_audio(np.zeros(0, np.float32), last=True))
    empty = [client.open_stream(live=True) for _ in range(400)]
    futures += [each.submit_audio(np.zeros(0, np.float32), last=True) for each in empty]
    first.close()
    assert fixed_ids([each.result(WAIT_S) for each in futures]) == want[1]
    assert client.describe()["slots_used"] == 0


def test_one_stream_more_than_may_wait_is_refused(begin: Begin, want: list[tuple[int, ...]]):
    client = begin(max_sessions=1)
    first = client.open_stream(live=True)
    first.submit_audio(CLIPS[0][:8_000]).result(WAIT_S)
    waiting = [client.open_stream(live=True) for _ in range(executor.MAX_WAITING)]
    futures = [stream.submit_audio(CLIPS[0][:100]) for stream in waiting]
    late = client.open_stream(live=False)
    with pytest.raises(AtCapacity, match="513 callers wait for one of 1 slots") as refused:
        late.submit_audio(CLIPS[1]).result(WAIT_S)
    assert refused.value.retry_after_ms == slot_queue.RETRY_MS
    assert not any(future.done() for future in futures), "those who were there before wait on"
    for stream in waiting[1:]:
        stream.close()
    first.close()
    futures[0].result(WAIT_S)
    waiting[0].close()
    again = client.open_stream(live=True).submit_audio(CLIPS[1], last=True)
    assert fixed_ids([again.result(WAIT_S)]) == want[1], "there is room again"


def test_a_live_stream_is_refused_when_no_slot_comes_free(
    on_thread, want: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(executor, "MAX_WAIT_S", 0.05)
    client = on_thread(max_sessions=1)
    first, unheard, hasty = (client.open_stream(live=live) for live in (True, True, False))
    first.submit_audio(CLIPS[0][:8_000]).result(WAIT_S)
    recording, sent = client.submit(CLIPS[2]), hasty.submit_audio(CLIPS[1], last=True)
    pieces_of = [unheard.submit_audio(CLIPS[3][:4_000]), unheard.submit_audio(CLIPS[3][4_000:])]
    for future in pieces_of:  # all of them: no audio is lost without a word
        with pytest.raises(AtCapacity, match="wait for one of 1 slots"):
            future.result(WAIT_S)
    with pytest.raises(Cancelled):
        unheard.submit_audio(CLIPS[3]).result(WAIT_S)
    assert not sent.done()
    assert first.submit_audio(CLIPS[0][8_000:], last=True).result(WAIT_S), "who has a slot keeps it, however long"
    assert fixed_ids([sent.result(WAIT_S)]) == want[1], "who is not in real time waits as a recording does"
    assert recording.future.result(WAIT_S).tokens == want[2]
    on_loop(client, lambda loop: loop.check())


def test_a_stream_waits_for_a_slot_from_its_first_piece_on(on_thread, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(executor, "MAX_WAIT_S", WAIT_S)
    client = on_thread(max_sessions=1, host_bytes=0)
    first, silent = client.open_stream(live=True), client.open_stream(live=True)
    first.submit_audio(CLIPS[0][:8_000]).result(WAIT_S)
    on_loop(client, lambda loop: loop.executor.step())
    assert on_loop(client, lambda loop: loop.executor.due_s) is None, "nobody waits, nothing is due"
    refused = silent.submit_audio(CLIPS[1])
    assert on_loop(client, lambda loop: loop.executor.due_s) is not None, "it is refused without anybody calling"
    monkeypatch.setattr(executor, "MAX_WAIT_S", 0.0)
    on_loop(client, lambda loop: loop.executor.step())  # it sleeps until what was due before
    with pytest.raises(AtCapacity):
        refused.result(WAIT_S)
    assert on_loop(client, lambda loop: loop.executor.due_s) is None


@pytest.mark.parametrize("live", [True, False])
def test_streams_do_not_wait_for_recordings_to_end(on_thread, want: list[tuple[int, ...]], live: bool):
    client = on_thread(max_sessions=6, max_decode_rows=3)
    ended: list[str] = []
    with held(client):
        tickets = [client.submit(pcm) for pcm in CLIPS for _ in range(2)]
        for ticket in tickets:
            ticket.future.add_done_callback(lambda _: ended.append("recording"))
        # They have taken what slots they may before the caller comes.
        client.backend.call(lambda loop: loop.executor.step())
        stream = client.open_stream(live=live)
        heard = stream.submit_audio(CLIPS[0][:8_000])
        heard.add_done_callback(lambda _: ended.append("caller"))
    heard.result(WAIT_S)
    assert [ticket.future.result(WAIT_S).tokens for ticket in tickets] == [w for w in want for _ in range(2)]
    assert ended.index("caller") <= (0 if live else 6)
    stream.close()


@pytest.mark.parametrize("slots", [1, 6])
def test_interactive_requests_go_before_earlier_bulk_ones(on_thread, want: list[tuple[int, ...]], slots: int):
    client = on_thread(max_sessions=slots, use_chunked_inference=False)
    ended: list[str] = []
    with held(client):
        for priority, count in (("bulk", 8), ("interactive", 3), ("bulk", 2)):
            for _ in range(count):
                future = client.submit(CLIPS[0], priority=priority).future
                future.add_done_callback(lambda _, priority=priority: ended.append(priority))
    assert client.submit(CLIPS[1], priority="bulk").future.result(WAIT_S).tokens == want[1]
    client.close()
    assert ended[:4].count("interactive") == 3
    assert len(ended) == 13, "and nobody waits for ever"


def test_a_failed_end_of_search_fails_its_own_stream(on_thread, want: list[tuple[int, ...]]):
    client = on_thread()
    fail_calls(client.backend.loop.executor.model_runner.search, "finish", 1, 2)
    empty = client.open_stream(live=True).submit_audio(np.zeros(0, np.float32), last=True)
    for future in (empty, client.submit(CLIPS[2]).future):
        with pytest.raises(StepFailed, match="hiccuped"):
            future.result(WAIT_S)
    assert client.submit(CLIPS[2]).future.result(WAIT_S).tokens == want[2]
    on_loop(client, lambda loop: loop.check())


def test_an_engine_that_fails_while_stopping_leaves_nobody_waiting(on_thread):
    client = on_thread(max_sessions=2)
    streams = [client.open_stream(live=True) for _ in range(3)]
    futures = [stream.submit_audio(CLIPS[0][:100]) for stream in streams]
    with held(client):
        fail_calls(client.backend.loop.executor.model_runner, "close_session", *range(1, 9))
        futures += [stream.submit_audio(CLIPS[5]) for stream in streams]
        client.backend.loop.inbox.put(lambda loop: loop.stop())
    assert [type(future.exception(WAIT_S)) for future in futures[3:]] == [EngineClosed] * 3


@pytest.fixture
def in_process(on_process: Begin) -> EngineClient:
    return on_process()


def test_nothing_is_held_for_a_finished_stream(in_process: EngineClient, want: list[tuple[int, ...]]):
    link = backend_of(in_process)
    stream = in_process.open_stream(live=True)
    found = [stream.submit_audio(piece).result(WAIT_S) for piece in pieces(CLIPS[2], 4_000)]
    assert len(link._current.sessions) == 1
    found.append(stream.submit_audio(np.zeros(0, np.float32), last=True).result(WAIT_S))
    assert fixed_ids(found) == want[2]
    assert link._current.sessions == {}
    stream.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a step failed", "a step failed when it was heard again", "it kills engines"])
def test_a_lost_stream_fails_every_later_piece(in_process: EngineClient, how: str):
    """Audio after a gap would be decoded as if nothing were missing."""
    link = backend_of(in_process)
    stream, other = in_process.open_stream(live=True), in_process.open_stream(live=True)
    stream.submit_audio(CLIPS[0][:4_000]).result(WAIT_S)
    os.kill(link._current.process.pid, signal.SIGSTOP)
    (number, _) = link._current.sessions
    waiting = [stream.submit_audio(CLIPS[0]), stream.submit_audio(CLIPS[0])]
    error: type[Exception] = StepFailed
    if how == "it kills engines":
        error = EngineCrashed
        for _ in range(MAX_DEATHS):
            link._deliver(link._current.record_death("on purpose"))
    else:
        failure = ErrorMessage.from_error(StepFailed("on purpose"))
        link._deliver(link._current.handle_message(RequestFailed(number, failure, 1 if how == "a step failed" else 0)))
    for future in waiting:
        with pytest.raises(error):
            future.result(WAIT_S)
    os.kill(link._current.process.pid, signal.SIGCONT)
    with pytest.raises(Cancelled):
        stream.submit_audio(CLIPS[0]).result(WAIT_S)
    assert len(link._current.sessions) == 1, "the other one's"
    assert other.submit_audio(CLIPS[1], last=True).result(WAIT_S).fixed_tokens
    assert link._current.sessions == {}


@pytest.mark.slow
def test_a_stream_survives_the_death_of_its_process(in_process, want: list[tuple[int, ...]]):
    stream, found = in_process.open_stream(live=True), []
    cut = pieces(CLIPS[5], 4_000)
    for number, piece in enumerate(cut):
        if number in (3, 9):
            os.kill(engine_pid(in_process), signal.SIGKILL)
        found.append(stream.submit_audio(piece, last=number == len(cut) - 1).result(WAIT_S))
    assert fixed_ids(found) == want[5]
    assert backend_of(in_process).restarts == 2


def test_a_failed_step_fails_its_own_stream(on_thread, want: list[tuple[int, ...]]):
    client = on_thread()
    fail_calls(client.backend.loop.executor.model_runner, "step", 1)
    stream = client.open_stream(live=True)
    for error in (StepFailed, Cancelled):
        with pytest.raises(error):
            stream.submit_audio(CLIPS[3]).result(WAIT_S)
    assert client.submit(CLIPS[3]).future.result(WAIT_S).tokens == want[3]
    on_loop(client, lambda loop: loop.check())


def test_chunks_look_ahead_and_head_are_the_models(on_thread):
    for wrong, match in (
        ({"chunk_frames": 3}, "chunk_frames=3"),
        ({"lookahead_frames": 11}, "lookahead_frames=11"),
        ({"chunk_frames": 100_000}, "up to 4000 ms"),
        ({"head": "tdt"}, "head=tdt"),
    ):
        with pytest.raises(OptionError, match=match):
            on_thread(**wrong)
    ctc, rnnt = (on_thread(head=head).submit(CLIPS[3]).future.result(WAIT_S) for head in ("ctc", "rnnt"))
    assert ctc.tokens != rnnt.tokens
    right = on_thread(lookahead_frames=3, chunk_frames=8)
    assert right.backend.loop.executor.model_runner.model.frame_block == 4


def test_utterances_have_nbest_lists_where_requested(begin: Begin):
    client = begin(head="rnnt", beam=4)
    plain = [client.submit(pcm).future.result(WAIT_S) for pcm in CLIPS[2:4]]
    listed = [client.submit(pcm, SearchOptions(hypotheses=3, words=True)).future.result(WAIT_S) for pcm in CLIPS[2:4]]
    assert [answer.tokens for answer in listed] == [answer.tokens for answer in plain]
    assert [answer.hypotheses for answer in plain] == [(), ()]
    for answer in listed:
        best, *others = answer.hypotheses
        assert (best.tokens, best.logprobs, best.times) == (answer.tokens, answer.logprobs, answer.times)
        assert 1 <= len(others) <= 2
        assert len({each.tokens for each in answer.hypotheses}) == len(answer.hypotheses)
        logprobs = [each.logprob for each in answer.hypotheses]
        assert logprobs == sorted(logprobs, reverse=True)
        for each in others:
            assert len(each.tokens) == len(each.logprobs) == len(each.times)
            assert all(0 <= start <= end for start, end in each.times)
