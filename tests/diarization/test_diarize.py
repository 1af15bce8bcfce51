"""Windows to who speaks when."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from synthetic_windows import Said, direction, window, windows

from asr_serve.diarization import speaker_groups
from asr_serve.diarization.clustering import ANY, SpeakerCount
from asr_serve.diarization.diarize import diarize
from asr_serve.diarization.local_speakers import WINDOW_SAMPLES, LocalSpeakers
from asr_serve.diarization.online import OnlineDiarizer
from asr_serve.diarization.speaker_groups import DiarizationWindow
from asr_serve.diarization.windowing import DENSE, SPARSE, window_starts

TALK: list[Said] = [("ann", 0.5, 6), ("bob", 6.5, 13), ("ann", 13.2, 24), ("bob", 23, 29), ("cat", 30, 38.5)]

THREE: list[Said] = [("ann", 0, 9), ("bob", 10.5, 19), ("cat", 20.5, 29)]


def heard(turns) -> list[tuple[str, float, float]]:
    return [(t.speaker, t.start_samples / 16_000, t.end_samples / 16_000) for t in turns]


def expect(turns, said: list[Said], within_s: float = 0.05) -> None:
    names = {name: f"SPEAKER_{place:02d}" for place, name in enumerate(dict.fromkeys(each for each, *_ in said))}
    assert [who for who, *_ in heard(turns)] == [names[name] for name, *_ in said]
    for (_, start, end), (_, at, to) in zip(heard(turns), said, strict=True):
        assert (start, end) == (pytest.approx(at, abs=within_s), pytest.approx(to, abs=within_s))


def test_three_speakers_in_windows_with_other_orders():
    found = diarize(windows(TALK, 40))
    expect(found.turns, TALK)
    assert set(found.voices) == {"SPEAKER_00", "SPEAKER_01", "SPEAKER_02"}


def test_overlapping_speakers_are_both_found():
    overlap = [turn for turn in heard(diarize(windows(TALK, 40)).turns) if turn[1] < 23.5 < turn[2]]
    assert {who for who, *_ in overlap} == {"SPEAKER_00", "SPEAKER_01"}


def test_a_speaker_who_is_never_alone_is_found():
    said: list[Said] = [("ann", 0, 16), ("bob", 5, 12)]
    expect(diarize(windows(said, 16)).turns, said)


@pytest.mark.parametrize(
    ("spoken", "count", "speakers"),
    [
        (THREE, SpeakerCount(1, 1), 1),
        (THREE, SpeakerCount(2, 2), 2),
        (THREE, SpeakerCount(1, 2), 2),
        ([("ann", 0, 9)], SpeakerCount(6, 6), 1),
        ([("ann", 0, 9), ("bob", 10.1, 10.3), ("ann", 12, 19)], ANY, 1),
    ],
    ids=["one", "two", "one or two", "more than there are", "a word too short to tell a voice"],
)
def test_number_of_speakers(spoken, count, speakers):
    assert len({t.speaker for t in diarize(windows(spoken, 30), count).turns}) == speakers


def test_silence_has_no_speaker():
    assert diarize(windows([], 25)).turns == ()
    assert diarize([]).turns == ()
    nothing = LocalSpeakers(first_samples=360, step_samples=270, speakers=3, chances=b"")
    assert diarize([DiarizationWindow(0, 500, nothing)]).turns == ()


@pytest.mark.parametrize("step", [SPARSE.step_samples, DENSE.step_samples])
def test_windows_cover_everything(step):
    for samples in (1, 500, WINDOW_SAMPLES, WINDOW_SAMPLES + 1, 5 * WINDOW_SAMPLES + 777):
        starts = window_starts(samples, step)
        assert starts[0] == 0
        assert starts[-1] == max(0, samples - WINDOW_SAMPLES)
        assert all(b - a <= WINDOW_SAMPLES for a, b in itertools.pairwise(starts))
    assert window_starts(0, step) == []


def test_clusters_are_joined_beyond_the_limit_of_one_clustering(monkeypatch):
    said: list[Said] = [(("ann", "bob")[at // 5 % 2], at, at + 4.5) for at in range(0, 400, 5)]
    whole = diarize(windows(said, 400))
    monkeypatch.setattr(speaker_groups, "MOST_VOICES", 16)
    assert diarize(windows(said, 400)).turns == whole.turns
    assert len(whole.voices) == 2


def test_live_names_stay_and_are_corrected_at_the_end():
    following = OnlineDiarizer()
    told = [
        following.append_windows([window(TALK, start, round(length * 16_000), seed)])
        for seed, (start, length) in enumerate([(0.3, 6), (6.3, 7), (13, 9.5), (23.2, 6), (29.8, 9)])
    ]
    assert [turns[0].speaker for turns in told] == [
        "SPEAKER_00", "SPEAKER_01", "SPEAKER_00", "SPEAKER_01", "SPEAKER_02",
    ]  # fmt: skip
    settled = following.finalize()
    assert settled.turns[0].speaker == "SPEAKER_00"
    assert set(settled.voices) == {"SPEAKER_00", "SPEAKER_01", "SPEAKER_02"}


def test_a_speaker_whose_first_segment_was_too_short_is_recognized_later():
    following = OnlineDiarizer()
    (sound,) = following.append_windows([window([("ann", 0.2, 0.4)], 0, 16_000)])
    (spoken,) = following.append_windows([window([("ann", 2, 6)], 2, 64_000)])
    (again,) = following.append_windows([window([("bob", 8, 12)], 8, 64_000)])
    assert (sound.speaker, spoken.speaker, again.speaker) == ("SPEAKER_00", "SPEAKER_00", "SPEAKER_01")


def test_the_final_speakers_keep_their_live_names():
    """The first voice is misheard as another's: then the rest of what was told keeps its names."""
    following = OnlineDiarizer()
    for seed, (name, start) in enumerate([("bob", 0), ("ann", 5), ("ann", 10), ("bob", 15), ("cat", 20)]):
        following.append_windows([window([(name, start, start + 4)], start, 64_000, seed)])
    names = {round(t.start_samples / 16_000): t.speaker for t in following.finalize().turns}
    assert names == {0: "SPEAKER_00", 5: "SPEAKER_01", 10: "SPEAKER_01", 15: "SPEAKER_00", 20: "SPEAKER_02"}


def tilted(name: str, by: float) -> np.ndarray:
    """An embedding of `name` mixed with another: 0.65 of it is left."""
    own, other = direction(name), direction("zoe")
    other = other - (other @ own) * own
    return np.float32(0.65) * own + np.float32(by * (1 - 0.65**2) ** 0.5) * other / np.linalg.norm(other)


def voiced(one: DiarizationWindow, *voices: np.ndarray) -> DiarizationWindow:
    """The same window with these speaker embeddings."""
    return one._replace(
        local_speakers=msgspec.structs.replace(one.local_speakers, voices=b"".join(v.tobytes() for v in voices))
    )


def test_two_embeddings_of_an_enrolled_voice_are_one_live_speaker():
    """Each is like the voice that is known and the two are not like each other: nobody new has come."""
    following = OnlineDiarizer()
    following.append_windows([voiced(window([("ann", 0, 10)], 0), direction("ann"))])
    said: list[Said] = [("ann", 10, 30)]
    high, low = (voiced(window(said, at), tilted("ann", by)) for at, by in ((10, 1), (20, -1)))
    assert float(tilted("ann", 1) @ tilted("ann", -1)) < 0.2 < 0.6 < float(tilted("ann", 1) @ direction("ann"))
    assert len({t.speaker for t in diarize([high, low]).turns}) == 2  # by themselves, they are two
    assert {t.speaker for t in following.append_windows([high, low])} == {"SPEAKER_00"}


def test_two_voices_of_one_window_are_never_one_live_speaker():
    following = OnlineDiarizer()
    following.append_windows([voiced(window([("ann", 0, 10)], 0), direction("ann"))])
    both = window([("ann", 10, 15), ("bob", 15, 20)], 10)
    turns = following.append_windows([voiced(both, tilted("ann", 1), tilted("ann", -1))])
    assert {t.speaker for t in turns} == {"SPEAKER_00", "SPEAKER_01"}


def test_a_window_survives_serialization():
    one = windows(TALK, 40)[1].local_speakers
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=LocalSpeakers)
    assert (again.active == one.active).all()
    np.testing.assert_array_equal(again.embeddings, one.embeddings)
