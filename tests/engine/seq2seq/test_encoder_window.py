"""A model whose window is longer than its clips: how much silence is encoded, and when a request is repeated with
the whole window."""

from __future__ import annotations

import random
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_clients import spy
from test_decoder_prompts import expect_same
from tiny_moonshine import WAIT_S, clip, expect_empty, on_loop, outcome
from tiny_whisper import CLIPS, CONFIG

from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import SearchOptions
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


def answers(client: EngineClient, clips: list[np.ndarray], options: SearchOptions, priority: str = "bulk") -> list:
    tickets = [client.submit(pcm, options, priority, wait=True) for pcm in clips]
    return [outcome(ticket) for ticket in tickets]


def far(one: Recognition, other: Recognition) -> float:
    return abs(one.avg_logprob - other.avg_logprob)


def whole_windows(client: EngineClient) -> list[bool]:
    """Record, for each clip encoded from now on, whether all of its window is."""
    seen: list[bool] = []
    spy(
        client.backend.loop.executor.model, "encode", lambda batch, whole=(): seen.extend(whole or [False] * len(batch))
    )
    return seen


def test_whole_and_partial_windows_share_a_batch(begin):
    client = begin(window="packed")

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
        whole, part = (model.count_frames(len(SHORT[0]), kind) for kind in (True, False))
        assert whole == CONFIG.max_source_positions > part

    on_loop(client, look)


def test_each_setting_encodes_its_part_of_the_window(begin):
    for window, kind in (("whole", True), ("packed", False), ("checked", False)):
        client = begin(window=window)
        seen = whole_windows(client)
        assert all(isinstance(a, Recognition) for a in answers(client, SHORT, SearchOptions(**PASSES)))
        assert seen == [kind] * len(SHORT), window
        expect_empty(client)


def test_a_single_temperature_uses_the_whole_window_too(begin):
    checked, whole = begin(window="checked"), begin(window="whole")
    for ours, theirs in zip(answers(checked, SHORT, ONCE), answers(whole, SHORT, ONCE), strict=True):
        expect_same(ours, theirs)


def test_a_repeated_request_keeps_its_turn(begin):
    client, order = begin(window="checked", max_decode_rows=1), list[int]()
    tickets = [client.submit(SHORT[0], TWICE, "bulk", wait=True)]
    tickets += [client.submit(FULL, SearchOptions(**PASSES), "bulk", wait=True) for _ in range(12)]
    for i, ticket in enumerate(tickets):
        ticket.future.add_done_callback(lambda _, i=i: order.append(i))
    assert all(isinstance(outcome(ticket), Recognition) for ticket in tickets)
    assert order.index(0) < len(order) - 3


@pytest.mark.parametrize("beam", [1, 3])
def test_a_rejected_answer_is_decoded_with_the_whole_window_before_sampling(begin, beam: int):
    options = msgspec.structs.replace(TWICE, beam=beam)
    checked, whole, packed = (begin(window=window) for window in ("checked", "whole", "packed"))
    seen = whole_windows(checked)
    results, wanted = answers(checked, SHORT, options), answers(whole, SHORT, options)
    for ours, theirs in zip(results, wanted, strict=True):
        expect_same(ours, theirs)
    assert sorted(seen) == [False] * len(SHORT) + [True] * len(SHORT)
    others = answers(packed, SHORT, options)
    for ours, theirs, other in zip(results, wanted, others, strict=True):
        assert 10 * far(ours, theirs) < far(ours, other), "the answer is that of the part"
    for client in (checked, whole, packed):
        expect_empty(client)


def test_partial_results_and_full_windows_are_not_repeated(begin):
    client = begin(window="checked")
    seen = whole_windows(client)
    answers(client, SHORT, SHOWN, "live")
    answers(client, [FULL], TWICE)
    assert seen == [False] * len(SHORT) + [False]
    expect_empty(client)


def test_the_partial_window_serves_where_the_whole_never_fits(begin):
    client = begin(window="checked", kv_bytes=2 << 20)
    frames: list[int] = []

    def refuse_later(rows: int, pages: int) -> None:
        frames.append(pages)
        if len(frames) > len(SHORT):
            raise OptionError("more pages", "fewer")

    spy(client.backend.loop.executor.decode_runner, "validate_capacity", refuse_later)
    seen = whole_windows(client)
    results = answers(client, SHORT, TWICE)
    assert all(answer.temperature in TWICE.temperatures for answer in results)
    assert seen == [False] * len(SHORT)
    assert len(frames) == 2 * len(SHORT)
    expect_empty(client)


def test_a_request_cancelled_while_repeated_leaves_nothing(begin):
    client, waiting, go_on = begin(window="checked"), threading.Event(), threading.Event()

    def pause(batch: Any, whole: Any = ()) -> None:
        if any(whole):
            waiting.set()
            assert go_on.wait(WAIT_S)

    spy(client.backend.loop.executor.model, "encode", pause)
    first = client.submit(SHORT[0], TWICE, "bulk", wait=True)
    assert waiting.wait(WAIT_S)
    client.cancel(first)
    second = client.submit(SHORT[1], TWICE, "bulk", wait=True)
    go_on.set()
    assert outcome(first) is Cancelled
    assert isinstance(outcome(second), Recognition)
    expect_empty(client)


@pytest.mark.parametrize("seed", range(3))
def test_any_mix_of_requests_ends(begin, seed: int):
    chance, client = random.Random(seed), begin(window="checked", max_decode_rows=4)
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
