"""Speech gate: every sample comes out once and in order, in whatever packets it came, and no word edge is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.edge.speech_gate import WINDOW_SAMPLES, GateConfig, GatedSpeech, GateOutput, SpeechGate
from asr_serve.errors import OptionError
from asr_serve.units import ms_to_samples

CONFIGS = st.builds(
    GateConfig,
    threshold=st.sampled_from([0.3, 0.5]),
    neg_threshold=st.sampled_from([0.2, 0.3]),
    pre_roll_ms=st.sampled_from([0, 20, 320, 1_000]),
    hangover_ms=st.sampled_from([0, 10, 480, 1_000]),
    lead_ms=st.sampled_from([0, 50, 512]),
)


def numbered(samples: int) -> np.ndarray:
    """Samples that tell their position, modulo 2^16."""
    return (np.arange(samples) & 0xFFFF).astype(np.uint16).view(np.int16)


def drive(
    gate: SpeechGate, pcm: np.ndarray, scores: list[float], packets: list[int], flushes: tuple[int, ...] = ()
) -> list[list[GateOutput]]:
    """Outputs of each packet; packets of the given sizes come in turn. `flushes`: numbers of packets after which all
    is given out."""
    outputs, at, number, window = [], 0, 0, 0
    while at < len(pcm):
        rest = pcm[at : at + packets[number % len(packets)]]
        at += len(rest)
        while len(rest):
            rest = rest[gate.append(rest) :]
            while gate.window() is not None:
                gate.apply_probability(scores[window])
                window += 1
        if number in flushes:
            gate.flush()
        outputs.append(gate.take())
        number += 1
    gate.finish(scores[window] if gate.tail() is not None else None)
    return [*outputs, gate.take()]


def merged(outputs: list[list[GateOutput]]) -> list[tuple[bool, int]]:
    """(whether speech, length) of each run."""
    runs: list[tuple[bool, int]] = []
    for output in (output for packet in outputs for output in packet):
        speech = isinstance(output, GatedSpeech)
        length = len(output.samples) if isinstance(output, GatedSpeech) else output.count
        if runs and runs[-1][0] == speech:
            runs[-1] = speech, runs[-1][1] + length
        else:
            runs.append((speech, length))
    return runs


def assert_all_there(outputs: list[list[GateOutput]], pcm: np.ndarray) -> None:
    at = 0
    for output in (output for packet in outputs for output in packet):
        if isinstance(output, GatedSpeech):
            assert len(output.samples)
            assert np.array_equal(output.samples, pcm[at : at + len(output.samples)])
            at += len(output.samples)
        else:
            assert output.count > 0
            at += output.count
    assert at == len(pcm)


def scores_of(draw: st.DataObject, samples: int) -> list[float]:
    windows = -(-samples // WINDOW_SAMPLES)
    score = st.sampled_from([0.0, 0.1, 0.25, 0.4, 0.9])
    return draw.draw(st.lists(score, min_size=windows, max_size=windows))


@settings(max_examples=150, deadline=None)
@given(st.data(), CONFIGS, st.integers(0, 40 * WINDOW_SAMPLES), st.lists(st.integers(1, 3_000), min_size=1, max_size=5))
def test_every_sample_once_and_packets_do_not_matter(
    draw: st.DataObject, config: GateConfig, samples: int, packets: list[int]
) -> None:
    pcm, scores = numbered(samples), scores_of(draw, samples)
    whole = drive(SpeechGate(config), pcm, scores, [max(1, samples)])
    gate = SpeechGate(config)
    parts = drive(gate, pcm, scores, packets)
    assert_all_there(whole, pcm)
    assert_all_there(parts, pcm)
    assert merged(parts) == merged(whole)
    assert gate.held_samples == 0


@settings(max_examples=100, deadline=None)
@given(st.data(), CONFIGS, st.integers(1, 40 * WINDOW_SAMPLES), st.sets(st.integers(0, 60), max_size=8))
def test_a_flush_gives_out_all(draw: st.DataObject, config: GateConfig, samples: int, flushes: set[int]) -> None:
    pcm, scores = numbered(samples), scores_of(draw, samples)
    outputs = drive(SpeechGate(config), pcm, scores, [320], tuple(flushes))
    assert_all_there(outputs, pcm)
    for number in flushes:
        if number < len(outputs) - 1:
            sent = sum(length for _, length in merged(outputs[: number + 1]))
            assert sent == min(samples, (number + 1) * 320)
    # What was speech without flushes is speech with them.
    assert speech_of(drive(SpeechGate(config), pcm, scores, [320]), samples) <= speech_of(outputs, samples)


def speech_of(outputs: list[list[GateOutput]], samples: int) -> set[int]:
    """Positions that came out as audio."""
    found: set[int] = set()
    at = 0
    for speech, length in merged(outputs):
        if speech:
            found.update(range(at, at + length))
        at += length
    assert at == samples
    return found


@settings(max_examples=100, deadline=None)
@given(st.data(), CONFIGS, st.integers(1, 40 * WINDOW_SAMPLES))
def test_speech_has_its_margins_and_silence_none_of_it(draw: st.DataObject, config: GateConfig, samples: int) -> None:
    """The gate as a definition: windows that are speech, each with its margins."""
    pcm, scores = numbered(samples), scores_of(draw, samples)
    pre_roll, hangover = ms_to_samples(config.pre_roll_ms), ms_to_samples(config.hangover_ms)
    expected = set(range(min(samples, ms_to_samples(config.lead_ms))))
    until = 0
    for number, score in enumerate(scores):
        begin, end = number * WINDOW_SAMPLES, min(samples, (number + 1) * WINDOW_SAMPLES)
        if score >= (config.neg_threshold if 0 < begin <= until else config.threshold):
            expected.update(range(max(0, begin - pre_roll), min(samples, end + hangover)))
            until = end + hangover
    assert speech_of(drive(SpeechGate(config), pcm, scores, [160]), samples) == expected


def test_memory_is_bounded() -> None:
    gate, config = SpeechGate(), GateConfig()
    pcm, size = np.zeros(999, np.int16), gate._buffer.nbytes
    for _ in range(2_000):
        rest = pcm
        while len(rest):
            rest = rest[gate.append(rest) :]
            while gate.window() is not None:
                gate.apply_probability(0.0)
        kinds = [type(output) for output in gate.take()]
        assert GatedSpeech not in kinds or gate.received_samples < ms_to_samples(config.lead_ms) + 999
        assert len(kinds) < 3
        assert gate.held_samples < ms_to_samples(config.pre_roll_ms) + WINDOW_SAMPLES
    assert gate._buffer.nbytes == size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.0}, "threshold is 0.0. it must be above 0"),
        ({"threshold": 0.3, "neg_threshold": 0.4}, "at most threshold, 0.3"),
        ({"pre_roll_ms": -1}, "pre_roll_ms is -1. it must be from 0 to 10000"),
        ({"hangover_ms": 10_001}, "hangover_ms is 10001"),
        ({"lead_ms": -1}, "lead_ms is -1"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        GateConfig(**options)
