"""sherpa-onnx's protocols without a server: which one a first frame is of, samples, headers, answers."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr_serve.errors import AudioTooLarge, AudioTooLong, MalformedRequest, UnsupportedAudio
from asr_serve.protocols.sherpa_onnx.messages import (
    OnlineAnswers,
    decode_samples,
    guess_protocol,
    offline_answer,
    parse_header,
)
from asr_serve.types import Segment, Transcript, Word

S = 16_000


@given(st.lists(st.integers(-32_768, 32_767), min_size=1, max_size=50))
def test_floats_made_of_integers_are_known_as_floats(samples):
    frame = (np.array(samples, np.float32) / 32_768).tobytes()
    assert guess_protocol(frame) == ("sherpa_online" if any(samples) else "silence")


@given(st.lists(st.sampled_from([-300, -7, -1, 0, 1, 3, 40, 2_000]), min_size=2, max_size=50))
def test_integers_are_never_taken_for_floats(samples):
    """Quiet speech in 16 bits: as floating point, pairs are no numbers, or too small ones."""
    frame = np.array(samples, np.int16).tobytes()
    assert guess_protocol(frame) in ((None,) if any(samples) else ("silence", None))


def test_traces_that_resampling_leaves_in_silence_make_no_other_protocol():
    speech = np.sin(np.arange(1_600, dtype=np.float32) / 9) / 2
    speech[:300] = 1e-12
    assert guess_protocol(speech.tobytes()) == "sherpa_online"
    assert guess_protocol(np.array([0.1, 0.2, 9.0], np.float32).tobytes()) is None


def test_headers_are_told_from_samples():
    assert guess_protocol(struct.pack("<ii", 16_000, 4) + bytes(4)) == "sherpa_offline"
    assert guess_protocol(struct.pack("<ii", 44_100, 4_000_000)) == "sherpa_offline"
    for frame in (b"", b"\0", bytes(3), struct.pack("<ff", 0.5, float("nan")), struct.pack("<ff", 9.0, 0.1)):
        assert guess_protocol(frame) is None


def test_samples():
    assert decode_samples(struct.pack("<ff", 0.5, -2.0)).tolist() == [0.5, -1.0]
    for frame in (b"abc", struct.pack("<f", float("inf"))):
        with pytest.raises(MalformedRequest):
            decode_samples(frame)


def test_headers():
    header = parse_header(struct.pack("<ii", 48_000, 400), 60, 10_000_000)
    assert (header.rate_hz, header.size_bytes) == (48_000, 400)
    for rate, size, error in (
        (1, 4, UnsupportedAudio),
        (-16_000, 4, UnsupportedAudio),
        (192_001, 4, UnsupportedAudio),
        (16_000, 3, UnsupportedAudio),
        (16_000, -4, UnsupportedAudio),
        (16_000, 61 * 64_000, AudioTooLong),
        (192_000, 59 * 4 * 192_000, AudioTooLarge),
    ):
        with pytest.raises(error):
            parse_header(struct.pack("<ii", rate, size), 60, 10_000_000)


def test_answers():
    answers = OnlineAnswers()
    segment = Segment(S, 2 * S, "Ever tried.", words=(Word("Ever", S, S + 800), Word("tried.", S + 1_600, 2 * S)))
    assert json.loads(answers.partial("Ever", 1.0)) == {
        "text": "Ever",
        "tokens": [],
        "timestamps": [],
        "segment": 0,
        "start_time": 1.0,
        "is_final": False,
        "is_eof": False,
    }
    final = json.loads(answers.segment(segment))
    assert (final["tokens"], final["timestamps"], final["segment"]) == (["Ever", "tried."], [0.0, 0.1], 0)
    assert json.loads(answers.partial("Ever", 3.0))["segment"] == 1
    assert json.loads(answers.end()) == final | {"is_eof": True}
    assert json.loads(OnlineAnswers().end())["text"] == ""
    whole = json.loads(offline_answer(Transcript("a", "Ever tried.", "en", 2 * S, (segment,))))
    assert (whole["text"], whole["lang"], whole["timestamps"], whole["durations"]) == (
        "Ever tried.",
        "en",
        [1.0, 1.1],
        [0.05, 0.9],
    )
    assert json.loads(offline_answer(None))["text"] == ""
