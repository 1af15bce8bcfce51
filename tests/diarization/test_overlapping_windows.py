"""Windows that overlap: one answer out of several, and how closely a recording is listened to."""

from __future__ import annotations

from concurrent.futures import Future

import msgspec
import numpy as np
import pytest
from synthetic_windows import FIRST_SAMPLES, STEP_SAMPLES, Said, direction, unlistened, windows

from asr_serve.diarization.diarize import SPEAKS, diarize, turns_of
from asr_serve.diarization.local_speakers import WINDOW_SAMPLES, LocalSpeakers
from asr_serve.diarization.speaker_groups import (
    ALIKE,
    DiarizationWindow,
    WindowSpeaker,
    clustering_threshold,
    voices_of,
)
from asr_serve.diarization.windowing import CLOSE_SAMPLES, DENSE, SPARSE, plan_windows
from asr_serve.pipelines.offline.file_diarizer import FileDiarizer, KnownSpeakerVoices
from asr_serve.pipelines.options import TranscribeOptions

TALK: list[Said] = [("ann", 0.5, 6), ("bob", 6.5, 13), ("ann", 13.2, 24), ("bob", 23, 29), ("cat", 30, 38.5)]


def heard(turns) -> list[tuple[str, float, float]]:
    return [(t.speaker, round(t.start_samples / 16_000, 1), round(t.end_samples / 16_000, 1)) for t in turns]


@pytest.mark.parametrize("seconds", [9.0, 10.0, 15.1, 40.0, 41.234])
@pytest.mark.parametrize("step", [SPARSE.step_samples, DENSE.step_samples, DENSE.step_samples // 2])
def test_the_overlap_of_windows_does_not_change_speakers(seconds, step):
    said = [(who, start, min(end, seconds)) for who, start, end in TALK if start < seconds]
    names = {who: f"SPEAKER_{n:02d}" for n, who in enumerate(dict.fromkeys(who for who, *_ in said))}
    found = heard(diarize(windows(said, seconds, step)).turns)
    assert [who for who, *_ in found] == [names[who] for who, *_ in said]
    for (_, start, end), (_, at, to) in zip(found, said, strict=True):
        assert (start, end) == (pytest.approx(at, abs=0.1), pytest.approx(to, abs=0.1))


def test_windows_without_embeddings_follow_their_neighbours():
    all_of_them = windows(TALK, 40, DENSE.step_samples)
    every_second = [each if number % 2 == 0 else unlistened(each) for number, each in enumerate(all_of_them)]
    assert heard(diarize(every_second).turns) == heard(diarize(all_of_them).turns)


def random_windows(seed: int, step: int, seconds: float) -> tuple[list[DiarizationWindow], list[WindowSpeaker]]:
    """Of any chances, with voices in groups at random."""
    chance = np.random.default_rng(seed)
    made = []
    for one in windows([("ann", 0, seconds)], seconds, step):
        chances = chance.integers(0, 256, (len(one.local_speakers.likely), 3), np.uint8)
        smooth = np.repeat(chances[::25], 25, 0)[: len(chances)]
        made.append(one._replace(local_speakers=msgspec.structs.replace(one.local_speakers, chances=smooth.tobytes())))
    voices = voices_of(made)
    for each in voices:
        each.group = int(chance.integers(-1, 4))
    return made, voices


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("step", [DENSE.step_samples, DENSE.step_samples // 4])
def test_parts_equal_the_whole(seed, step):
    made, voices = random_windows(seed, step, 33.0)
    frames = max(round(each.start_samples / STEP_SAMPLES) + len(each.local_speakers.likely) for each in made)
    sums, weights = np.zeros((frames, 4)), np.zeros(frames)
    for number, one in enumerate(made):
        count, at = len(one.local_speakers.likely), round(one.start_samples / STEP_SAMPLES)
        weight = np.minimum(np.arange(count) + 0.5, count - np.arange(count) - 0.5) / count
        weights[at : at + count] += weight
        for who in range(4):
            locals_ = [each.local for each in voices if each.window == number and each.group == who]
            if locals_:
                sums[at : at + count, who] += weight * one.local_speakers.likely[:, locals_].max(1) / 255
    likely = sums / weights[:, None]
    speaks = likely >= SPEAKS
    for frame in np.flatnonzero(np.floor(likely.sum(1) + 0.5) > speaks.sum(1)):
        count = int(np.floor(likely[frame].sum() + 0.5))
        speaks[frame, np.argsort(-likely[frame], kind="stable")[:count]] = True
    said = np.zeros((frames, 4), bool)
    for who, start, end in turns_of(made, voices):
        first, last = (max(0, round((each - FIRST_SAMPLES) / STEP_SAMPLES)) for each in (start, end))
        said[first:last, who] = True
    told = speaks[:-3] & (likely[:-3] > 0.1)
    assert not (told & ~said[:-3]).sum() > 9 * 4 * 5  # turns of less than 150 ms are none
    joined = said[:-3] & ~told
    assert joined.sum() < 0.2 * told.sum()  # pauses of less than 300 ms are spoken over
    assert not said[:-3][likely[:-3].max(1) < 0.02].any()


def test_where_windows_disagree_one_speaker_is_chosen():
    """The same speech is 80 % ann's in one window and 80 % bob's in the next, by the same weights."""
    frames = 589

    def one(who: int) -> LocalSpeakers:
        chances = np.full((frames, 3), 10, np.uint8)
        chances[:, who] = 200
        return LocalSpeakers(FIRST_SAMPLES, STEP_SAMPLES, 3, chances.tobytes())

    made = [DiarizationWindow(0, WINDOW_SAMPLES, one(0)), DiarizationWindow(270, WINDOW_SAMPLES, one(1))]
    voices = voices_of(made)
    for each in voices:
        each.group = each.local
    turns = turns_of(made, voices)
    assert turns
    assert max(end for _, _, end in turns) - min(start for _, start, _ in turns) > 9.5 * 16_000


def test_short_embeddings_need_less_similarity():
    def voices(samples: int) -> list[WindowSpeaker]:
        return [WindowSpeaker(0, 0, samples, samples, samples, direction("ann"))]

    assert clustering_threshold(voices(4_000)) == clustering_threshold(voices(16_000)) == pytest.approx(ALIKE[0])
    assert clustering_threshold(voices(64_000)) == clustering_threshold(voices(80_000)) == pytest.approx(ALIKE[1])
    assert ALIKE[0] < clustering_threshold(voices(32_000)) < ALIKE[1]
    assert clustering_threshold([]) == pytest.approx(ALIKE[0])


def test_short_recordings_have_windows_closer_together():
    assert plan_windows(0, 16_000) == plan_windows(0, CLOSE_SAMPLES) == DENSE
    assert plan_windows(0, CLOSE_SAMPLES + 1) == SPARSE
    assert plan_windows(0, None) == DENSE
    assert plan_windows(CLOSE_SAMPLES + 1, None) == SPARSE
    assert plan_windows(CLOSE_SAMPLES + 1, 16_000) == SPARSE, "a header that says too little"


class Recorder:
    """What is asked of an engine."""

    def __init__(self) -> None:
        self.asked: list[tuple[np.ndarray, int]] = []

    def diarize_window(
        self, pcm: np.ndarray, *, budget_samples: int, wait: bool, check: object
    ) -> Future[LocalSpeakers]:
        self.asked.append((pcm, budget_samples))
        answer = Future[LocalSpeakers]()
        answer.set_result(LocalSpeakers(FIRST_SAMPLES, STEP_SAMPLES, 3, b""))
        return answer


@pytest.mark.parametrize("chunk", [700, 16_000, 400_000])
@pytest.mark.parametrize(
    ("seconds", "told"), [(3, True), (10, True), (33.3, True), (33.3, False), (310, True), (310, False)]
)
def test_windows_cover_a_file(chunk, seconds, told):
    engine = Recorder()
    samples = round(seconds * 16_000)
    pcm = np.arange(samples, dtype=np.float32)
    known = KnownSpeakerVoices(engine, (), lambda _: None, lambda: None)  # type: ignore[arg-type]
    file = FileDiarizer(engine, TranscribeOptions(speakers=True), known, lambda _: None, lambda: None)  # type: ignore[arg-type]
    file.set_duration(samples if told else None)
    for at in range(0, samples, chunk):
        file.append_audio(pcm[at : at + chunk])
        while file.advance():
            pass
    file.finish()
    while file.advance():
        pass
    assert file.finished
    assert file.turns() == ()
    starts = [int(part[0]) for part, _ in engine.asked]
    for part, _ in engine.asked:
        assert (np.diff(part) == 1).all()
        assert len(part) == min(samples, WINDOW_SAMPLES)
    assert starts[0] == 0
    assert engine.asked[-1][0][-1] == samples - 1
    close = (told and samples <= CLOSE_SAMPLES) or not told
    assert (starts[1:2] or [DENSE.step_samples])[0] in (
        DENSE.step_samples if close else SPARSE.step_samples,
        max(0, samples - WINDOW_SAMPLES),
    )
    assert engine.asked[0][1] == (DENSE if close else SPARSE).budget_samples
    if not told and samples > CLOSE_SAMPLES:
        assert engine.asked[-1][1] == (DENSE if starts[-1] <= CLOSE_SAMPLES else SPARSE).budget_samples


def test_memory_of_an_hour():
    """Two voices a window: 1.4 MB at most."""
    one = windows([("ann", 0, 4), ("bob", 5, 9)], 10)[0].local_speakers
    voices = np.zeros((2, 192), np.float32).tobytes()
    kept = len(msgspec.msgpack.encode(msgspec.structs.replace(one, voices=voices)))
    assert kept * 3_600 * 16_000 / SPARSE.step_samples < 1_400_000
