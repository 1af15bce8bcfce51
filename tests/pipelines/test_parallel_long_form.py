"""Segments that voice activity cuts, with answers that are made up: one that ends early is heard on from there."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest

from asr_serve import units
from asr_serve.audio.endpointing import WINDOW_SAMPLES, EndpointConfig
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.models.registry import AsrCard, TimestampTokens, asr_card
from asr_serve.pipelines.offline.long_form import SegmentAnswer, SegmentRequest
from asr_serve.pipelines.offline.parallel import MAX_FOLLOW_UPS, ParallelLongForm
from asr_serve.pipelines.segments import PADDING_SAMPLES

WHISPER = msgspec.structs.replace(asr_card("whisper-tiny-en"), times=TimestampTokens(50_363, 50_256))
S = units.RATE_HZ


class Recorded:
    """A recording of noise, in chunks of a second."""

    hint_samples = None

    def __init__(self, pcm: np.ndarray) -> None:
        self.chunks = [pcm[at : at + S] for at in range(0, len(pcm), S)]
        self.ended = False

    def next_chunk(self) -> np.ndarray | None:
        self.ended = not self.chunks
        return None if self.ended else self.chunks.pop(0)

    def close(self) -> None:
        self.chunks.clear()


def text(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def time(seconds: float) -> int:
    """Of the segment, which begins behind a pause."""
    return 50_363 + round(50 * (seconds + PADDING_SAMPLES / S))


def answer(*tokens: int, **fields: Any) -> Recognition:
    fields = {"avg_logprob": -0.1, "temperature": 0.0, "finish": "stop", "compression_ratio": 1.0} | fields
    return Recognition(tokens, logprobs=tuple(-token / 1e5 for token in tokens), **fields)


class Speaking:
    """Voice activity that hears it in every window."""

    def submit_windows(self, pcm: np.ndarray) -> Future[np.ndarray]:
        future: Future[np.ndarray] = Future()
        future.set_result(np.ones(len(pcm) // WINDOW_SAMPLES))
        return future

    def close(self) -> None:
        pass


class Cut:
    """Twelve seconds, all of them speech, and what is asked of it."""

    def __init__(self, chosen: AsrCard = WHISPER, **search: Any) -> None:
        self.pcm = np.random.default_rng(1).standard_normal(12 * S).astype(np.float32)
        endpoint = EndpointConfig(max_segment_ms=20_000, min_speech_ms=0)
        self.way = ParallelLongForm(chosen, endpoint, SearchOptions(**search), Speaking(), 512, text, lambda _: None)  # type: ignore[arg-type]
        source, self.requests = Recorded(self.pcm), list[SegmentRequest]()
        while not self.way.finished:
            moved, requests = self.way.advance(source, True)
            assert moved
            self.requests += requests

    def told(self, request: SegmentRequest, heard: Recognition) -> SegmentAnswer:
        return self.way.accept_answer(request.span, heard)


def test_an_answer_that_ends_early_is_heard_on_from_there() -> None:
    cut = Cut()
    (first,) = cut.requests
    assert first.search.timestamps
    heard = cut.told(first, answer(time(0), 300, 301, time(4.5)))
    assert [(s.start_samples, s.end_samples, s.text, s.tokens) for s in heard.segments] == [
        (0, round(4.5 * S), "w300 w301", (300, 301))
    ]
    assert heard.segments[0].logprobs == (-0.003, -0.00301)
    assert heard.end_samples == round(4.5 * S)
    rest = heard.follow_up
    assert rest is not None
    assert (rest.span.start_samples, rest.span.end_samples) == (round(4.5 * S), 12 * S)
    np.testing.assert_array_equal(rest.pcm[PADDING_SAMPLES:-PADDING_SAMPLES], cut.pcm[round(4.5 * S) :])
    assert not rest.pcm[:PADDING_SAMPLES].any()
    heard = cut.told(rest, answer(time(0), 302, time(2), time(2), 303, time(7.4)))
    assert heard.follow_up is None
    assert [(s.start_samples, s.end_samples, s.text) for s in heard.segments] == [(round(4.5 * S), 12 * S, "w302 w303")]


@pytest.mark.parametrize(
    "heard",
    [
        answer(time(0), 300, time(11.2)),
        answer(time(0), 300),
        answer(time(0), 300, time(4), finish="repetition"),
        answer(time(0), 300, time(0.1)),
        answer(),
        answer(time(0), 300, time(4), avg_logprob=-1.5),
    ],
    ids=["to its end", "no end", "lost its place", "no word is so short", "silence", "invented"],
)
def test_what_tells_of_no_rest_is_all(heard: Recognition) -> None:
    cut = Cut()
    told = cut.told(cut.requests[0], heard)
    assert told.follow_up is None
    assert told.end_samples == 12 * S


def test_whatever_it_says_a_segment_ends() -> None:
    cut = Cut()
    request: SegmentRequest | None = cut.requests[0]
    asked, end = 0, 0
    while request is not None:
        assert request.span.start_samples == end
        heard = cut.told(request, answer(time(0), 300, time(0.2)))
        request, end, asked = heard.follow_up, heard.end_samples, asked + 1
    assert end == 12 * S
    assert asked == MAX_FOLLOW_UPS + 1


def test_a_model_that_does_not_say_when_is_not_asked() -> None:
    cut = Cut(asr_card("moonshine-tiny-en"))
    assert not cut.requests[0].search.timestamps
    told = cut.told(cut.requests[0], answer(300, 301))
    assert told.follow_up is None
    assert told.segments[0].tokens == (300, 301)


def test_a_translation_may_be_improbable_and_words_may_not() -> None:
    unsure = answer(time(0), 300, time(11.5), avg_logprob=-1.5)
    for cut, told in ((Cut(task="translate"), 1), (Cut(), 0)):
        assert len(cut.told(cut.requests[0], unsure).segments) == told
    silent = answer(time(0), 300, time(11.5), avg_logprob=-1.5, no_speech_prob=0.9)
    cut = Cut(task="translate")
    assert not cut.told(cut.requests[0], silent).segments


def test_the_rest_of_a_segment_is_in_its_language() -> None:
    cut = Cut()
    heard = cut.told(cut.requests[0], answer(time(0), 300, time(4.5), language="de"))
    assert heard.follow_up is not None
    assert heard.follow_up.search.language == "de"
