"""A model whose window is longer than its clips: what is encoded of the silence, and when an answer is asked for
again with all of it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from test_decoder_prompts import expect_same
from tiny_moonshine import WAIT_S, clip, expect_empty, on_loop, outcome
from tiny_whisper import CLIPS, CONFIG, start

from asr_serve.decoding.seq2seq import Recognition, SearchOptions
from asr_serve.engine.client import EngineClient
from asr_serve.errors import Cancelled, OptionError

PASSES: dict[str, Any] = {"min_avg_logprob": -1e9, "max_compression_ratio": 1e9}
FAILS: dict[str, Any] = {"min_avg_logprob": 0.0, "max_no_speech": 1.0, "seed": 5}
"""No answer is as sure as that."""
TWICE = SearchOptions(language="en", temperatures=(0.0, 0.8), **FAILS)
ONCE = SearchOptions(language="en", temperatures=(0.0,), **FAILS)
SHOWN = msgspec.structs.replace(ONCE, hurried=True)
SHORT = [clip(50 + seed, samples) for seed, samples in enumerate([4_000, 9_000, 6_500])]
"""Each leaves out some of its window."""
FULL = max(CLIPS, key=len)


@pytest.fixture
def begin() -> Iterator:
    started: list[EngineClient] = []

    def starting(window: str, **settings: Any) -> EngineClient:
        started.append(start(window=window, **settings))
        return started[-1]

    yield starting
    for each in started:
        each.close()


def answers(client: EngineClient, clips: list[np.ndarray], options: SearchOptions, priority: str = "bulk") -> list:
    tickets = [client.submit(pcm, options, priority, wait=True) for pcm in clips]
    return [outcome(ticket) for ticket in tickets]


def far(one: Recognition, other: Recognition) -> float:
    return abs(one.avg_logprob - other.avg_logprob)


def asked(client: EngineClient) -> list[bool]:
    """Of each clip that is encoded from now on, whether all of its window is."""
    seen: list[bool] = []

    def watch(loop: Any) -> None:
        model = loop.executor.model
        encode = model.encode

        def spy(batch: Any, whole: Any = ()) -> Any:
            seen.extend(whole or [False] * len(batch))
            return encode(batch, whole)

        model.encode = spy

    on_loop(client, watch)
    return seen


def test_both_kinds_in_one_batch_are_as_alone(begin):
    client = begin("packed")

    def look(loop: Any) -> None:
        model, clips = loop.executor.model, [torch.from_numpy(clip) for clip in SHORT]
        kinds = [True, False, True]
        with torch.inference_mode():
            hidden, packing = model.encode(clips, kinds)
            for i, (pcm, whole) in enumerate(zip(clips, kinds, strict=True)):
                alone, one = model.encode([pcm], [whole])
                assert packing.frames[i] == one.frames[0] == model.count_frames(len(pcm), whole)
                ours = hidden[packing.offsets[i] :][: packing.frames[i]]
                assert torch.allclose(ours, alone[: one.frames[0]], atol=1e-5)
        assert (
            model.count_frames(len(SHORT[0]), True)
            == CONFIG.max_source_positions
            > model.count_frames(len(SHORT[0]))
        )

    on_loop(client, look)


def test_whole_encodes_all_and_packed_a_part(begin):
    for window, kind in (("whole", True), ("packed", False), ("checked", False)):
        client = begin(window)
        seen = asked(client)
        assert all(isinstance(a, Recognition) for a in answers(client, SHORT, SearchOptions(**PASSES)))
        assert seen == [kind] * len(SHORT), window
        expect_empty(client)


def test_one_try_is_made_with_the_whole_window_too(begin):
    checked, whole = begin("checked"), begin("whole")
    for ours, theirs in zip(answers(checked, SHORT, ONCE), answers(whole, SHORT, ONCE), strict=True):
        expect_same(ours, theirs)


def test_it_keeps_its_turn(begin):
    client, order = begin("checked", max_decode_rows=1), list[int]()
    tickets = [client.submit(SHORT[0], TWICE, "bulk", wait=True)]
    tickets += [client.submit(FULL, SearchOptions(**PASSES), "bulk", wait=True) for _ in range(12)]
    for i, ticket in enumerate(tickets):
        ticket.future.add_done_callback(lambda _, i=i: order.append(i))
    assert all(isinstance(outcome(ticket), Recognition) for ticket in tickets)
    assert order.index(0) < len(order) - 3


@pytest.mark.parametrize("beam", [1, 3])
def test_what_does_not_pass_is_heard_with_the_whole_window_before_it_is_sampled(begin, beam: int):
    options = msgspec.structs.replace(TWICE, beam=beam)
    checked, whole, packed = (begin(window) for window in ("checked", "whole", "packed"))
    seen = asked(checked)
    came, wanted = answers(checked, SHORT, options), answers(whole, SHORT, options)
    for ours, theirs in zip(came, wanted, strict=True):
        expect_same(ours, theirs)
    assert sorted(seen) == [False] * len(SHORT) + [True] * len(SHORT)
    others = answers(packed, SHORT, options)
    for ours, theirs, other in zip(came, wanted, others, strict=True):
        assert 10 * far(ours, theirs) < far(ours, other), "the answer is that of the part"
    for client in (checked, whole, packed):
        expect_empty(client)


def test_nothing_is_asked_again_that_is_shown_for_a_moment_or_had_all(begin):
    client = begin("checked")
    seen = asked(client)
    answers(client, SHORT, SHOWN, "live")
    answers(client, [FULL], TWICE)
    assert seen == [False] * len(SHORT) + [False]
    expect_empty(client)


def test_where_the_whole_window_never_fits_the_part_must_do(begin):
    client = begin("checked", kv_bytes=2 << 20)
    frames = []

    def tight(loop: Any) -> None:
        runner = loop.executor.decode_runner
        expect = runner.validate_capacity

        def refuse(rows: int, pages: int) -> None:
            frames.append(pages)
            if len(frames) > len(SHORT):
                raise OptionError("more pages", "fewer")
            expect(rows, pages)

        runner.validate_capacity = refuse

    on_loop(client, tight)
    seen = asked(client)
    came = answers(client, SHORT, TWICE)
    assert all(answer.temperature in TWICE.temperatures for answer in came)
    assert seen == [False] * len(SHORT)
    assert len(frames) == 2 * len(SHORT)
    expect_empty(client)


def test_who_goes_while_it_waits_again_leaves_nothing(begin):
    client, waiting, go_on = begin("checked"), threading.Event(), threading.Event()

    def stop_there(loop: Any) -> None:
        encode = loop.executor.model.encode

        def slow(batch: Any, whole: Any = ()) -> Any:
            if any(whole):
                waiting.set()
                assert go_on.wait(WAIT_S)
            return encode(batch, whole)

        loop.executor.model.encode = slow

    on_loop(client, stop_there)
    first = client.submit(SHORT[0], TWICE, "bulk", wait=True)
    assert waiting.wait(WAIT_S)
    client.cancel(first)
    second = client.submit(SHORT[1], TWICE, "bulk", wait=True)
    go_on.set()
    assert outcome(first) is Cancelled
    assert isinstance(outcome(second), Recognition)
    expect_empty(client)


@pytest.mark.parametrize("seed", range(3))
def test_any_mix_comes_to_an_end(begin, seed: int):
    chance, client = random.Random(seed), begin("checked", max_decode_rows=4)
    tickets = []
    for _ in range(40):
        options = msgspec.structs.replace(chance.choice([TWICE, ONCE, SHOWN]), beam=chance.choice([1, 1, 2]))
        priority = chance.choice(["bulk", "interactive", "live"])
        tickets.append((client.submit(chance.choice(CLIPS), options, priority, wait=True), chance.random() < 0.3))
    for ticket, leaves in tickets:
        if leaves:
            client.cancel(ticket)
    for ticket, leaves in tickets:
        assert isinstance(outcome(ticket), Recognition) or leaves
    expect_empty(client)
