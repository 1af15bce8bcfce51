"""What a live caller asks an endpointer besides spans: what is open, since when it pauses, whether it was torn."""

from __future__ import annotations

from math import inf

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.audio.endpointing import CALM_MS, WINDOW_SAMPLES, EndpointConfig, Endpointer
from asr_serve.audio.silence_schedule import SilenceSchedule
from asr_serve.types import Span
from asr_serve.units import ms_to_samples

SHORT_PAUSE = SilenceSchedule.parse([(inf, 200)])


def at(window: float) -> int:
    return int(window * WINDOW_SAMPLES)


def push(endpointer: Endpointer, *probabilities: float) -> list[Span]:
    return endpointer.append_probabilities(np.array(probabilities, dtype=np.float32))


def test_open_from_the_first_word_until_it_closes():
    endpointer = Endpointer(EndpointConfig(schedule=SHORT_PAUSE))
    push(endpointer, *[0.0] * 20)
    assert endpointer.open_from_samples is None
    push(endpointer, 1.0)
    assert endpointer.open_from_samples == at(20) - ms_to_samples(250)
    push(endpointer, *[1.0] * 9, *[0.0] * 6)
    assert endpointer.open_from_samples == at(20) - ms_to_samples(250)
    (span,) = push(endpointer, 0.0)
    assert span.start_samples == at(20) - ms_to_samples(250)
    assert endpointer.open_from_samples is None


def test_a_pause_counts_from_its_first_quiet_window_and_doubt_goes_on_with_it():
    endpointer = Endpointer(EndpointConfig())
    assert endpointer.pause_from_samples is None
    push(endpointer, 1.0, 1.0, 0.4)
    assert endpointer.pause_from_samples is None, "a word fades"
    push(endpointer, 0.1)
    assert endpointer.pause_from_samples == at(3)
    push(endpointer, 0.4, 0.0)
    assert endpointer.pause_from_samples == at(3)
    push(endpointer, 0.9)
    assert endpointer.pause_from_samples is None
    push(endpointer, *[0.0] * 200)
    assert endpointer.pause_from_samples is None, "it closed"


def test_a_lone_blip_closes_without_a_span():
    endpointer = Endpointer(EndpointConfig())
    push(endpointer, *[0.0] * 20, 1.0)
    assert endpointer.open_from_samples is not None
    assert push(endpointer, *[0.0] * 100) == []
    assert endpointer.open_from_samples is None


def cut_with_pause(windows: int) -> Endpointer:
    """Speech for twice the limit, with one pause where it is cut."""
    endpointer = Endpointer(EndpointConfig(max_segment_ms=5_000))
    push(endpointer, *[1.0] * 110, *[0.0] * windows, *[1.0] * (60 - windows))
    assert endpointer.open_from_samples is not None
    assert endpointer.open_from_samples > 0
    return endpointer


def test_cut_where_no_pause_is_long_enough_to_lie_between_words():
    calm = ms_to_samples(CALM_MS) // WINDOW_SAMPLES
    assert cut_with_pause(0).split_mid_speech
    assert cut_with_pause(calm - 1).split_mid_speech
    assert not cut_with_pause(calm).split_mid_speech
    assert not cut_with_pause(30).split_mid_speech


def test_the_next_segment_after_a_pause_is_not_cut():
    endpointer = cut_with_pause(0)
    push(endpointer, *[0.0] * 100)
    assert endpointer.open_from_samples is None
    assert endpointer.split_mid_speech, "the last one was"
    push(endpointer, 1.0)
    assert not endpointer.split_mid_speech


@st.composite
def streams(draw: st.DrawFn) -> tuple[np.ndarray, EndpointConfig, list[int]]:
    level = st.sampled_from([0.0, 0.1, 0.34, 0.4, 0.5, 0.9, 1.0])
    stretches = draw(st.lists(st.tuples(level, st.integers(1, 5) | st.integers(5, 90)), max_size=20))
    probabilities = np.array([p for p, count in stretches for _ in range(count)], dtype=np.float32)
    config = EndpointConfig(
        max_segment_ms=draw(st.none() | st.integers(1_000, 6_000)),
        schedule=SilenceSchedule.parse([(inf, draw(st.integers(0, 2_000)))]),
    )
    return probabilities, config, draw(st.lists(st.integers(1, 60), max_size=10))


@settings(max_examples=200, deadline=None)
@given(streams())
def test_events_between_windows_fit_the_spans(stream):
    probabilities, config, _ = stream
    endpointer = Endpointer(config)
    opened: int | None = None
    for number, probability in enumerate(probabilities):
        closed = push(endpointer, probability)
        now, start = at(number + 1), endpointer.open_from_samples
        for span in closed:
            if opened is not None:
                assert span.start_samples == opened, "what was open is what closed"
            opened = span.end_samples if endpointer.split_mid_speech else None
        if start is not None:
            assert endpointer.keep_from_samples <= start < now
            assert not closed or start >= closed[-1].end_samples
        if (pause := endpointer.pause_from_samples) is not None:
            assert start is not None
            assert start <= pause < now or closed, "a pause begins inside its segment"
            assert probabilities[pause // WINDOW_SAMPLES] < config.neg_threshold
            assert (probabilities[pause // WINDOW_SAMPLES : number + 1] < config.threshold).all()
        elif start is not None:
            assert probability >= config.neg_threshold
        opened = start


@settings(max_examples=100, deadline=None)
@given(streams())
def test_window_by_window_equals_all_at_once(stream):
    probabilities, config, cuts = stream
    pieces, single = Endpointer(config), Endpointer(config)
    for part in np.split(probabilities, np.minimum(np.cumsum(cuts), len(probabilities))):
        several = pieces.append_probabilities(part)
        assert several == [span for p in part for span in push(single, p)]
        assert pieces.open_from_samples == single.open_from_samples
        assert pieces.pause_from_samples == single.pause_from_samples
        assert pieces.split_mid_speech == single.split_mid_speech


@settings(max_examples=200, deadline=None)
@given(streams())
def test_pieces_meet_where_they_were_cut(stream):
    """A torn segment begins exactly where the one before it ended: a live caller joins the two there."""
    probabilities, config, _ = stream
    endpointer = Endpointer(config)
    ends: set[int] = set()
    for probability in probabilities:
        ends |= {span.end_samples for span in push(endpointer, probability)}
        if endpointer.open_from_samples is not None and endpointer.split_mid_speech:
            assert config.max_segment_ms is not None
            assert endpointer.open_from_samples in ends
