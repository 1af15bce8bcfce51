"""Whose chunk is next, and who is encoded: deadlines, without a clock."""

from __future__ import annotations

import random

import pytest

from asr_serve.engine.tts.scheduler import (
    MAX_AHEAD_S,
    Playback,
    StepBudget,
    TtsDeadline,
    TtsWaitingQueue,
    first_deadline_s,
    select_for_step,
)


def test_the_nearest_deadline_comes_first():
    turns = [TtsDeadline(5.0, 1), TtsDeadline(3.0, 2), TtsDeadline(4.0, 3)]
    assert select_for_step(turns, 2, now_s=2.9) == [2, 3]
    assert select_for_step(turns, 9, now_s=2.9) == [2, 3, 1]
    assert select_for_step([], 9, now_s=0.0) == []


def test_a_first_chunk_comes_before_later_ones_that_still_play():
    playing = Playback(first_deadline_s(0.0, "interactive", None))
    playing.add_audio(0.5, now_s=1.0)
    new = first_deadline_s(1.2, "interactive", None)
    assert select_for_step([TtsDeadline(playing.deadline_s, 1), TtsDeadline(new, 2)], 1, now_s=1.2) == [2]


def test_who_would_run_dry_comes_before_a_first_chunk_that_is_wanted_later():
    playing = Playback(0.0)
    playing.add_audio(0.1, now_s=1.0)
    assert select_for_step(
        [TtsDeadline(playing.deadline_s, 1), TtsDeadline(first_deadline_s(1.0, "bulk", None), 2)], 1, 1.0
    ) == [1]
    assert select_for_step(
        [TtsDeadline(playing.deadline_s, 1), TtsDeadline(first_deadline_s(1.0, "interactive", 2_000), 2)], 1, 1.0
    ) == [1]


def test_who_came_first_is_in_the_next_step_however_many_have_run_dry():
    dry = [TtsDeadline(1.0 + number, number, True) for number in range(6)]
    new = [TtsDeadline(9.0 + number / 10, 10 + number) for number in range(6)]
    assert select_for_step([*dry, *new], 4, now_s=10.0) == [0, 1, 10, 11]
    assert select_for_step([*dry, *new], 1, now_s=10.0) == [10]
    assert select_for_step([*dry[:1], *new], 4, now_s=10.0) == [0, 10, 11, 12]
    assert select_for_step([*dry, *new[:1]], 4, now_s=10.0) == [0, 1, 2, 10]
    assert select_for_step([*dry, *new], 4, now_s=8.0) == [0, 1, 2, 3]  # no first sound is wanted yet


def test_who_is_far_ahead_waits_while_others_are_there():
    far, near = TtsDeadline(100.0 + MAX_AHEAD_S + 0.1, 1), TtsDeadline(100.0 + MAX_AHEAD_S - 0.1, 2)
    assert select_for_step([far, near], 2, now_s=100.0) == [2]
    assert select_for_step([far], 2, now_s=100.0) == [1]


def test_a_playback_that_ran_dry_goes_on_from_there():
    playing = Playback(3.0)
    assert (playing.deadline_s, playing.started) == (3.0, False)
    playing.add_audio(1.0, now_s=5.0)
    assert playing.deadline_s == 6.0
    playing.add_audio(1.0, now_s=5.2)
    assert playing.deadline_s == 7.0
    playing.add_audio(1.0, now_s=9.0)  # 2 s of silence lie behind
    assert playing.deadline_s == 10.0


def test_nobody_waits_for_ever():
    """With steps of two rows and eight playbacks that last as long as four steps each, all go on in turn."""
    chance, now_s = random.Random(1), 0.0
    playbacks = {number: Playback(chance.random()) for number in range(8)}
    given = dict.fromkeys(playbacks, 0)
    for _ in range(400):
        for number in select_for_step([TtsDeadline(p.deadline_s, n) for n, p in playbacks.items()], 2, now_s):
            playbacks[number].add_audio(0.4, now_s)
            given[number] += 1
        now_s += 0.1
    assert min(given.values()) >= 95


def test_a_batch_is_bounded_by_sentences_and_by_phonemes():
    waiting = TtsWaitingQueue()
    for number, (phonemes, deadline_s) in enumerate([(50, 3.0), (60, 1.0), (40, 2.0), (10, 4.0)]):
        waiting.enqueue(number, phonemes, deadline_s)
    assert waiting.pop_batch(8, 100, 8) == [1, 2]  # the next has no room, and nobody goes past it
    assert waiting.pop_batch(1, 100, 8) == [0]
    assert (len(waiting), 3 in waiting, 1 in waiting) == (1, True, False)
    assert waiting.pop_batch(8, 5, 8) == [3]  # the first one, however long
    assert waiting.pop_batch(8, 5, 8) == []


def test_of_bulk_only_so_many_are_taken_and_others_go_past():
    waiting = TtsWaitingQueue()
    for number, bulk in enumerate((True, True, False, True)):
        waiting.enqueue(number, 10, float(number), bulk=bulk)
    assert waiting.pop_batch(8, 1_000, 1) == [0, 2]
    assert waiting.pop_batch(8, 1_000, 0) == []
    assert (len(waiting), 1 in waiting, 3 in waiting) == (2, True, True)
    assert waiting.pop_batch(8, 1_000, 8) == [1, 3]


def test_nobody_plays_bulk_while_others_wait():
    bulk, playing = Playback(60.0, later_s=60.0), Playback(0.0)
    for each in (bulk, playing):
        each.add_audio(1.0, now_s=5.0)
    assert (bulk.deadline_s, playing.deadline_s) == (66.0, 6.0)
    assert select_for_step([TtsDeadline(bulk.deadline_s, 1), TtsDeadline(playing.deadline_s, 2)], 2, now_s=5.0) == [2]
    playing.add_audio(20.0, now_s=5.0)  # then there is time
    assert select_for_step([TtsDeadline(bulk.deadline_s, 1), TtsDeadline(playing.deadline_s, 2)], 2, now_s=5.0) == [
        2,
        1,
    ]


def test_bulk_is_no_nearer_for_saying_when_it_would_run_dry():
    later = first_deadline_s(5.0, "bulk", 2_000)
    assert later > first_deadline_s(5.0, "bulk", None) > first_deadline_s(5.0, "interactive", 2_000) == 7.0
    assert first_deadline_s(5.0, "interactive", -40) == 5.0


def test_what_comes_before_it_is_wanted_is_played_when_it_is():
    """A sentence whose caller has 6 s of sound before it is not wanted again a second after its first second."""
    early = Playback(first_deadline_s(5.0, "interactive", 6_000))
    early.add_audio(1.0, now_s=5.0)
    assert early.deadline_s == 12.0
    early.add_audio(1.0, now_s=6.0)
    assert early.deadline_s == 13.0


def test_those_who_went_are_forgotten_however_far_off_they_were():
    waiting = TtsWaitingQueue()
    for number in range(10_000):
        waiting.enqueue(number, 10, 100.0 + number, bulk=number % 2 == 0)
        if number > 2:
            assert waiting.remove(number)
    assert sum(map(len, waiting._turns.values())) < 200
    assert waiting.pop_batch(8, 1_000, 8) == [0, 1, 2]


def test_who_was_taken_back_is_not_encoded():
    waiting = TtsWaitingQueue()
    for number in range(4):
        waiting.enqueue(number, 10, float(number))
    assert waiting.remove(0)
    assert waiting.remove(2)
    assert not waiting.remove(2)
    assert waiting.pop_batch(8, 1_000, 8) == [1, 3]
    assert len(waiting) == 0


@pytest.mark.parametrize(("each_s", "room"), [(0.01, 5), (0.001, 50), (0.0001, 64), (0.5, 2)])
def test_a_step_takes_as_many_as_fit(each_s, room):
    pace = StepBudget(0.05, 2, 64)
    assert pace.max_count == 2
    for _ in range(40):
        pace.record_step(each_s * pace.max_count, pace.max_count)
    assert pace.max_count in (room - 1, room)


def test_a_step_of_few_does_not_keep_steps_small():
    """Where a step costs as much for one as for many, as on an accelerator, room grows."""
    pace = StepBudget(0.05, 2, 64)
    for _ in range(40):
        pace.record_step(0.006, min(pace.max_count, 64))
    assert pace.max_count == 64
