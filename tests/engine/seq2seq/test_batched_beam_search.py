"""Beam search in the engine is beam search written out plainly, whatever else is in the batch; no page is lost."""

from __future__ import annotations

import random
from functools import cache
from typing import NamedTuple

import pytest
import tiny_moonshine
import torch
from engine_clients import fail_calls, poison_free_pages
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoder_prompts import ONCE, allowed_logits, expect_same, expected, initial_tokens
from tiny_moonshine import WAIT_S, expect_empty, held, outcome
from tiny_whisper import CLIPS, CONFIG, SPECIAL, limit
from tiny_whisper import decoder as whisper_decoder

from asr_serve.config import EngineConfig
from asr_serve.decoding.beam_search import BeamSearch, top_tokens
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import DraftTokens, SearchOptions
from asr_serve.engine.seq2seq.decode_batch import BeamGroup, pages_for
from asr_serve.engine.seq2seq.scheduler import ScheduledRequest, Seq2SeqScheduler
from asr_serve.errors import Cancelled, OptionError, StepFailed
from asr_serve.kernels import PAGE


@cache
class Path(NamedTuple):
    """A path that was searched."""

    tokens: tuple[int, ...]
    total: float
    mean: float
    """Of the log-probabilities, with that of the end."""
    finish: str


def searched(index: int, options: SearchOptions) -> list[Path]:
    """Decoding as openai-whisper does it, without its state: every path that goes on from the best few, all of the
    vocabulary tried. The paths that are left, the best first."""
    _, start = initial_tokens(index, options)
    fixed = list(options.prefix)
    most = min(limit(index), CONFIG.max_target_positions - len(start))
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for _ in range(most - len(fixed)):
        paths = []
        for total, said in live:
            logits = whisper_decoder(index).logits((*start, *fixed, *said))
            scores = allowed_logits(logits, start, fixed + said, options).log_softmax(0)
            paths += [(total + float(scores[t]), [*said, t]) for t in range(len(scores)) if scores[t] > -torch.inf]
        paths.sort(key=lambda path: -path[0])
        live = []
        for total, said in paths:
            if said[-1] == SPECIAL.eot:
                if len(ended) < options.beam:
                    ended.append((total, said[:-1]))
            else:
                live.append((total, said))
                if len(live) == options.beam:
                    break
        if len(ended) == options.beam:
            break
    closed = len(ended)
    ended += sorted(live, key=lambda path: -path[0])[: options.beam - closed]
    order = sorted(range(len(ended)), key=lambda i: -ended[i][0] / max(1, len(ended[i][1])))
    return [
        Path((*fixed, *said), total, total / (len(said) + (i < closed)), "stop" if i < closed else "length")
        for i, (total, said) in ((i, ended[i]) for i in order)
    ]


def expect_searched(result: object, index: int, options: SearchOptions) -> None:
    paths = searched(index, options)
    best = paths[0]
    assert isinstance(result, Recognition), result
    assert (result.tokens, result.finish) == (best.tokens, best.finish)
    assert result.avg_logprob == pytest.approx(best.mean, abs=1e-4)
    assert len(result.logprobs) == len(best.tokens)
    listed = paths[: options.hypotheses] if options.hypotheses > 1 else []
    assert [each.tokens for each in result.hypotheses] == [path.tokens for path in listed]
    assert [each.logprob for each in result.hypotheses] == pytest.approx([path.total for path in listed], abs=1e-3)
    assert all(len(each.logprobs) == len(each.tokens) for each in result.hypotheses)
    if listed:
        assert result.hypotheses[0].logprobs == result.logprobs


requests = st.tuples(
    st.integers(0, len(CLIPS) - 1),
    st.builds(
        SearchOptions,
        language=st.sampled_from(["", "en"]),
        timestamps=st.booleans(),
        prompt=st.sampled_from([(), (4, 9, 4), tuple(range(20))]),
        prefix=st.sampled_from([(), (8,), (8, 3, 5)]),
        beam=st.sampled_from([3, 5]),
        hypotheses=st.sampled_from([1, 2, 3]),
        **{name: st.just(value) for name, value in ONCE.items()},
    ),
)


# --- what is found --------------------------------------------------------------------------------


def test_beam_search_finds_other_answers_than_greedy():
    found = [searched(i, SearchOptions(beam=5, timestamps=t, **ONCE)) for i in range(len(CLIPS)) for t in (0, 1)]
    plain = [expected(i, SearchOptions(timestamps=t, **ONCE)) for i in range(len(CLIPS)) for t in (0, 1)]
    assert sum(paths[0].tokens != greedy.tokens for paths, greedy in zip(found, plain, strict=True)) > 3
    assert {paths[0].finish for paths in found} == {"stop", "length"}


def test_alone_a_beam_search_equals_the_reference(begin):
    client = begin()
    for beam in (2, 5):
        for i in range(len(CLIPS)):
            options = SearchOptions(beam=beam, hypotheses=beam - i % 2, timestamps=i % 2 == 0, **ONCE)
            expect_searched(client.submit(CLIPS[i], options).future.result(WAIT_S), i, options)
            expect_empty(client)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.lists(requests, min_size=1, max_size=6), st.integers(0, 2**32))
def test_in_any_batch_a_beam_search_equals_the_reference(client, wanted, seed):
    """Greedy rows, rows that sample and rows with drafts beside them, more than have room at once; some are taken
    back."""
    chance = random.Random(seed)
    sampled = [{"temperatures": (0.9,)}, {"temperatures": (0.0, 0.7), "min_avg_logprob": 0.0}]
    kinds = [{}, {"timestamps": True}, *sampled]
    tickets, others = [], []
    with held(client):
        for i, options in wanted:
            tickets.append((i, options, client.submit(CLIPS[i], options)))
            j, extra = chance.randrange(len(CLIPS)), ONCE | chance.choice(kinds) | {"max_no_speech": 1.0}
            draft = DraftTokens(expected(j, SearchOptions(**ONCE)).tokens) if chance.random() < 0.5 else DraftTokens()
            others.append((j, extra, client.submit(CLIPS[j], SearchOptions(**extra), "live", draft=draft)))
    gone = {n for n in range(len(tickets)) if chance.random() < 0.2}
    if gone:
        outcome(others[0][2])  # some way into it
    for n in gone:
        client.cancel(tickets[n][2])
    for i, options, ticket in tickets:
        if (result := outcome(ticket)) is not Cancelled:
            expect_searched(result, i, options)
    for j, extra, ticket in others:
        if extra["temperatures"] == (0.0,):
            plain = SearchOptions(timestamps=extra.get("timestamps", False), **ONCE)
            expect_same(outcome(ticket), expected(j, plain))
        else:
            assert isinstance(outcome(ticket), Recognition)
    expect_empty(client)


def test_words_of_every_hypothesis_have_times(close_later):
    client = close_later(tiny_moonshine.start())
    options = SearchOptions(beam=4, hypotheses=3, words=True, **ONCE)
    found = client.submit(tiny_moonshine.clip(3, 64_000), options).future.result(WAIT_S)
    assert len({each.tokens for each in found.hypotheses}) == len(found.hypotheses) == 3
    best, *others = found.hypotheses
    assert (best.tokens, best.logprobs, best.times) == (found.tokens, found.logprobs, found.times)
    for each in others:
        assert len(each.times) == len(each.tokens)
        assert all(0 <= start <= end <= 64_000 for start, end in each.times)
        assert [start for start, _ in each.times] == sorted(start for start, _ in each.times)
    with pytest.raises(OptionError, match=r"hypotheses=5. up to 4, the beam"):
        client.submit(CLIPS[0], SearchOptions(beam=4, hypotheses=5, **ONCE)).future.result(WAIT_S)
    expect_empty(client)


def test_any_model_can_be_decoded_by_beam_search(close_later):
    client = close_later(tiny_moonshine.start())
    pcm = tiny_moonshine.clip(3, 64_000)
    plain, found = (client.submit(pcm, SearchOptions(beam=beam, **ONCE)).future.result(WAIT_S) for beam in (1, 5))
    assert found.avg_logprob > plain.avg_logprob
    expect_empty(client)


# --- tries ----------------------------------------------------------------------------------------


def test_a_rejected_answer_is_sampled_by_one_row(begin):
    """The same as if the first try had been greedy: what is sampled depends on the start and the seed alone."""
    client = begin()
    runner = client.backend.loop.executor.decode_runner
    seen: list[tuple[int, int]] = []
    again = runner.restart_row

    def watched(row):
        again(row)
        seen.append((len(runner.rows), runner.page_pool.used_count))

    runner.restart_row = watched
    hard = {"temperatures": (0.0, 0.8), "min_avg_logprob": 0.0, "max_no_speech": 1.0}
    for i in range(len(CLIPS)):
        for extra in ({"prefix": (8, 3, 5)}, {"timestamps": True, "prompt": tuple(range(20))}):
            result = client.submit(CLIPS[i], SearchOptions(beam=4, hypotheses=4, **hard, **extra)).future.result(WAIT_S)
            sampled = SearchOptions(**ONCE | {"temperatures": (0.8,)} | extra)
            other = client.submit(CLIPS[i], sampled).future.result(WAIT_S)
            if result.temperature == 0.8:
                assert result.tokens == other.tokens
                assert result.hypotheses == ()
    assert {rows for rows, _ in seen} == {1}, "one row is left"
    assert max(used for _, used in seen) < 4 * pages_for(CONFIG.max_target_positions), "and one row's pages"
    expect_empty(client)


# --- rows and pages -------------------------------------------------------------------------------


def test_beams_have_a_row_each_and_share_full_pages(begin):
    client = begin(max_decode_rows=6)
    runner = client.backend.loop.executor.decode_runner
    step, seen = runner.step, []

    def watched():
        groups = {row.beams for row in runner.rows if row.beams is not None}
        for beams in groups:
            tables = [beams.block_table(lane) for lane in range(len(beams.rows))]
            position = beams.rows[0].length - 1
            assert all(len(table) == position // PAGE + 1 for table in tables)
            lasts = [table[-1] for table in tables]
            assert len(set(lasts)) == len(lasts), "a page is written to by two"
            held = {page for table in tables for page in table}
            seen.append((len(tables), len(held), sum(map(len, tables))))
        ended = step()
        assert len(runner.rows) <= 6
        assert runner.free_rows >= 0
        return ended

    runner.step = watched
    wanted = [(i, SearchOptions(beam=b, prompt=tuple(range(20)), **ONCE)) for i in range(4) for b in (1, 5, 6)]
    with held(client):
        tickets = [client.submit(CLIPS[i], options) for i, options in wanted]
    for (i, options), ticket in zip(wanted, tickets, strict=True):
        if options.beam > 1:
            expect_searched(outcome(ticket), i, options)
        else:
            expect_same(outcome(ticket), expected(i, options))
    assert {rows for rows, _, _ in seen} >= {5, 6}
    assert any(pages < places for _, pages, places in seen), "whole pages are shared"
    expect_empty(client)


def test_poison_in_free_pages_changes_nothing(begin):
    client = begin()
    runner = client.backend.loop.executor.decode_runner
    poison_free_pages(runner)
    for _ in range(2):
        wanted = [(i, SearchOptions(beam=3, timestamps=i % 2 == 0, **ONCE)) for i in range(len(CLIPS))]
        with held(client):
            tickets = [client.submit(CLIPS[i], options) for i, options in wanted]
        for (i, options), ticket in zip(wanted, tickets, strict=True):
            expect_searched(outcome(ticket), i, options)
    assert runner.kv_cache.isnan().any()
    expect_empty(client)


def test_few_pages_are_waited_for_and_too_few_are_refused(begin):
    client = begin(kv_bytes=1)
    pages = client.backend.loop.executor.decode_runner.page_pool.pages
    options = SearchOptions(beam=3, **ONCE)
    tickets = [client.submit(CLIPS[i], options) for i in (2, 4, 2, 4)]
    for i, ticket in zip((2, 4, 2, 4), tickets, strict=True):
        expect_searched(outcome(ticket), i, options)
    with pytest.raises(OptionError, match=rf"beam=12 needs \d+ pages.*up to {pages - 1}.*kv_bytes"):
        client.submit(CLIPS[0], SearchOptions(beam=12, **ONCE)).future.result(WAIT_S)
    expect_empty(client)


@pytest.mark.parametrize("on_call", [1, 2, 9])
def test_a_failed_step_loses_no_page(begin, on_call):
    client = begin()
    runner = client.backend.loop.executor.decode_runner
    options = SearchOptions(beam=3, **ONCE)
    with held(client):
        fail_calls(runner, "_advance_beams", on_call)
        tickets = [client.submit(CLIPS[i], options) for i in (0, 3)]
    assert StepFailed in {outcome(ticket) for ticket in tickets}
    expect_empty(client)
    expect_searched(client.submit(CLIPS[0], options).future.result(WAIT_S), 0, options)
    expect_empty(client)


@pytest.mark.parametrize(("free", "joined"), [(4, []), (5, [1]), (6, [1, 2]), (11, [1, 2, 3]), (12, [1, 2, 3, 4])])
def test_the_scheduler_counts_a_row_for_every_beam(free, joined):
    planner = Seq2SeqScheduler(EngineConfig(max_decode_rows=16), 10_000)
    for number, rows in ((1, 5), (2, 1), (3, 5), (4, 1)):
        planner.enqueue(ScheduledRequest(number, 100, 1, "interactive", float(number), rows=rows))
    assert planner.schedule(free, 100) == joined
    assert len(planner) == 4 - len(joined)


# --- by themselves --------------------------------------------------------------------------------


def test_top_tokens_leave_out_masked_ones():
    logits = torch.tensor([[0.0, 3.0, -torch.inf, 1.0], [-torch.inf, 2.0, -torch.inf, -torch.inf]])
    result = top_tokens(logits, torch.zeros(2, 8), torch.zeros(4, 8), 3)
    assert [[t for t, _ in row] for row in result] == [[1, 3, 0], [1]]
    wanted = logits.log_softmax(1)
    assert result[0] == [(t, pytest.approx(float(wanted[0, t]))) for t in (1, 3, 0)]
    assert result[1] == [(1, 0.0)]


def test_top_tokens_are_exact_in_bf16():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(6, 64, generator=generator).bfloat16()
    weight = torch.randn(2_000, 64, generator=generator).bfloat16()
    exact = hidden.float() @ weight.float().T
    logits = exact.bfloat16()
    logits[:, ::7] = exact[:, ::7] = -torch.inf
    for row, order in zip(top_tokens(logits, hidden, weight, 6), exact.topk(6).indices.tolist(), strict=True):
        assert [token for token, _ in row] == order


def test_a_search_without_live_beams_ends():
    search = BeamSearch(3, eos=2, max_tokens=9)
    assert search.advance([[(5, -0.5), (2, -1.0)]]) == [0]
    assert search.advance([[(2, -0.1)]]) == []
    ranked, finish = search.n_best()
    assert [(each.tokens, each.logprobs) for each in ranked] == [((5,), (-0.5, -0.1)), ((), (-1.0,))]
    assert finish == "stop"


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_pages_of_beams_hold_what_each_path_wrote(data):
    """Against tables that share nothing: a path reads at each position what it, or the path it came from,
    wrote there; and pages last for the longest answer."""
    width, begun, most = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 40)), data.draw(st.integers(1, 50))
    own = -(-(begun + most) // PAGE)

    class Only:
        beam, eos, max_tokens, fixed, draft = width, 2, most, 0, DraftTokens()
        hotwords = language_model = words_below = None
        stop_tokens: tuple[int, ...] = ()

    class First:
        hypothesis, length, beams, pages = Only, begun, None, None

    row = First()
    beams = BeamGroup(row, begun, list(range(1, 1 + width * own)), [], torch.device("cpu"))
    memory: dict[tuple[int, int], object] = {}
    paths: list[list[object]] = [[("start", at) for at in range(begun)]]
    for at in range(begun):
        memory[beams.block_table(0)[at // PAGE], at % PAGE] = ("start", at)
    for step in range(most):
        count = data.draw(st.integers(1, width))
        sources = [data.draw(st.integers(0, len(paths) - 1)) for _ in range(count)]
        row.length = begun + step + 1
        for old, new in beams.fork(sources):
            for slot in range(PAGE):
                memory[new, slot] = memory.get((old, slot))
        paths = [[*paths[source], (step, lane)] for lane, source in enumerate(sources)]
        for lane in range(count):
            memory[beams.block_table(lane)[(row.length - 1) // PAGE], (row.length - 1) % PAGE] = (step, lane)
        for lane, path in enumerate(paths):
            table = beams.block_table(lane)
            assert [memory[table[at // PAGE], at % PAGE] for at in range(len(path))] == path
