"""A live caller of a model whose encoder carries state: what is said depends on the audio alone, nothing is
encoded twice, and a stream that is lost is heard again."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from case_tiers import exhaustive_after
from live_client import (
    RATE_HZ,
    LiveClient,
    SegmentSpans,
    expect_streaming_idle,
    fast_clock,
    packets,
    run_session,
    stopped_clock,
)
from loaded_models import load_model
from streaming_moonshine import MODEL, write
from tiny_moonshine import on_loop

from asr_serve.api.library import Model
from asr_serve.errors import StepFailed
from asr_serve.pipelines import segments
from asr_serve.pipelines.live.repeated_segment import MAX_TRIES

MIXED, LONG, WINDOWS = [1_600, 100, 40_000], [200_000, 7_680], [512]
PACKETS = [
    (MIXED, fast_clock, True),
    (LONG, None, True),
    (MIXED, None, False),
    (WINDOWS, fast_clock, False),
    # the same again
    (MIXED, fast_clock, False),
    (MIXED, None, True),
    (LONG, fast_clock, True),
    (LONG, fast_clock, False),
    (LONG, None, False),
    (WINDOWS, fast_clock, True),
    (WINDOWS, None, True),
    (WINDOWS, None, False),
]
"""Sizes of packets, a clock, and whether each packet waits until all before it is answered."""


@pytest.fixture(scope="module", autouse=True)
def anything_is_believed() -> Iterator[None]:
    """Random weights are never sure of what they say."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "HALLUCINATION_LOGPROB", float("-inf"))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with load_model(MODEL, weights=write(tmp_path_factory.mktemp("moonshine-streaming"))) as model:
        yield model


@pytest.fixture(autouse=True)
def idle_afterwards(model: Model) -> Iterator[None]:
    yield
    expect_streaming_idle(model._client)


@pytest.fixture(scope="module")
def talk(beckett: np.ndarray, cities: np.ndarray) -> np.ndarray:
    """Sentences with pauses between them, and speech that is split for its length."""
    quiet = np.zeros(RATE_HZ, np.float32)
    return np.concatenate([beckett[: 3 * RATE_HZ], quiet, cities[RATE_HZ // 2 : 7 * RATE_HZ]])


@pytest.fixture(scope="module")
def said(model: Model, talk: np.ndarray) -> SegmentSpans:
    found = run_session(model, talk, clock=stopped_clock).spans
    assert len(found) > 3
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "clock", "in_step"), exhaustive_after(4, PACKETS))
def test_any_packets_any_partials(model, talk, said, sizes, clock, in_step):
    caller = run_session(model, talk, sizes, clock() if clock else None, in_step=in_step)
    assert caller.spans == said


@pytest.mark.slow
def test_partials_come_while_somebody_speaks(model, talk, said):
    caller = run_session(model, talk, [1_600], fast_clock(), in_step=True, partial_ms=200)
    assert caller.spans == said
    assert len({partial.text for partial in caller.partials}) > len(said)


def test_company_changes_nothing(model, talk, said):
    callers = [LiveClient(model, fast_clock()) for _ in range(5)]
    order = [index for index in range(5) for _ in packets(talk, [3_200])]
    random.Random(2).shuffle(order)
    left = [packets(talk, [3_200]) for _ in callers]
    for index in order:
        callers[index].write(next(left[index]))
    for caller in callers:
        with caller:
            caller.finish()
            assert caller.spans == said


@pytest.mark.slow
def test_no_frame_is_encoded_twice(model, talk, monkeypatch):
    """Whatever is asked: an encoder that hears each segment once hears little more than all of them together."""
    encoder = on_loop(model._client, lambda loop: loop.executor.model_runner.model)
    heard: list[int] = []
    step = encoder.step

    def counting(chunk, state):
        heard.append(int(chunk.frames.sum()))
        return step(chunk, state)

    def never(*_: object) -> None:
        raise AssertionError("an utterance was encoded as a whole")

    monkeypatch.setattr(encoder, "step", counting)
    monkeypatch.setattr(encoder, "encode_clips", never)
    caller = run_session(model, talk, [1_600], fast_clock(), in_step=True, partial_ms=200)
    spoken = sum(end - start for start, end, _ in caller.spans)
    # Where a segment is cut for its length, the next one begins 1.2 s before.
    most = spoken + len(caller.spans) * 4 * RATE_HZ
    assert spoken < sum(heard) * encoder.frame_samples < most
    assert len(caller.partials) > 20


@pytest.mark.slow
def test_a_stream_that_fails_is_heard_again(model, talk, said, monkeypatch):
    encoder = on_loop(model._client, lambda loop: loop.executor.model_runner.model)
    step, count = encoder.step, [0]

    def breaking(chunk, state):
        count[0] += 1
        if count[0] % 40 == 7:
            raise RuntimeError("on purpose")
        return step(chunk, state)

    monkeypatch.setattr(encoder, "step", breaking)
    caller = run_session(model, talk, [4_800], fast_clock(), in_step=True)
    assert caller.spans == said
    assert count[0] > 40


def test_one_that_always_fails_is_given_up(model, talk, monkeypatch):
    encoder, count = on_loop(model._client, lambda loop: loop.executor.model_runner.model), [0]

    def broken(chunk, state):
        count[0] += 1
        raise RuntimeError("on purpose")

    monkeypatch.setattr(encoder, "step", broken)
    with pytest.raises(StepFailed, match="on purpose"):
        run_session(model, talk, clock=stopped_clock)
    assert count[0] >= MAX_TRIES


def test_flushes_and_leaving(model, talk):
    with LiveClient(model, fast_clock()) as caller:
        for number, packet in enumerate(packets(talk, [8_000])):
            caller.write(packet)
            if number % 5 == 3:
                caller.flush(f"at {number}")
        caller.finish()
        assert len(caller.flushed) > 2
    with LiveClient(model) as caller:
        caller.write(talk[: 2 * RATE_HZ])
        caller.settle()
