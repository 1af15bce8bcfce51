"""Segments of a streaming model say every word once, in the right one, whatever is cut, flushed, late or fails."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from streaming_tokens import SPEECH, Client, Script, Speaker, script, speak, spoken, tokens_in

from asr_serve.errors import EngineClosed
from asr_serve.pipelines.live import streaming_recognizer
from asr_serve.pipelines.options import TurnOptions
from asr_serve.units import RATE_HZ, ms_to_samples, s_to_samples

PACKETS = ([1_600], [160, 9_000, 37], [1 << 20])
TALK = ((2.0, 0.4), (3.1, 0.33), (1.2, 0.52), (14.0, 0.7), (0.5, 1.4), (2.5, 0.36), (1.0, 0.8))


def every_way(said: Script, seed: int, held: int = 0, late_ms: int = 200, **options: object) -> Speaker:
    """However it comes, the same is said. Returns one."""
    callers = [
        speak(Client(random.Random(seed), held=held, late_ms=late_ms), said, sizes, answers=answers, **options)
        for sizes in PACKETS
        for answers in (1_000, 2)
    ]
    assert all(caller.said == callers[0].said for caller in callers)
    return callers[0]


@pytest.mark.slow
@pytest.mark.parametrize("held", [0, 3])
@pytest.mark.parametrize("late_ms", [200, 900])
@pytest.mark.parametrize("schedule", ["inf:300", "inf:500", "inf:1000"])
@pytest.mark.parametrize("pad_before_ms", [250, 300])
def test_every_token_is_said_once(held: int, late_ms: int, schedule: str, pad_before_ms: int):
    said = script(*TALK, chance=random.Random(5))
    options = {"silence_schedule": schedule, "pad_before_ms": pad_before_ms, "max_segment_ms": 4_000}
    caller = every_way(said, 1, held, late_ms, **options)
    assert caller.tokens == said.tokens
    assert len(caller.segments) > 6


def test_who_speaks_again_where_a_segment_ended_is_heard():
    """It ended in a pause and was not cut: its stream hears no more."""
    for pause_ms in range(300, 620, 40):
        said = script((2.0, pause_ms / 1_000), (2.0, 1.0), chance=random.Random(pause_ms))
        options = {"silence_schedule": "inf:300", "pad_before_ms": 400}
        assert every_way(said, pause_ms, **options).tokens == said.tokens


def test_what_is_locked_stays_in_its_segment():
    """A cut falls up to 40 % of a segment's length back, among words that were said long ago."""
    said = script((10.5, 0.2), (12.0, 0.1), (11.0, 0.2), (14.0, 1.0), chance=random.Random(3))
    caller = speak(Client(random.Random(3)), said, [1_600], silence_schedule="inf:500")
    assert caller.tokens == said.tokens
    assert len(caller.segments) > 2
    assert any(partial.locked_text for partial in caller.partials)


def test_text_without_spaces_is_locked_and_cut_alike():
    said = script((25.0, 1.0), chance=random.Random(3), unspaced=True)
    caller = every_way(said, 4, silence_schedule="inf:500", max_segment_ms=5_000)
    assert caller.tokens == said.tokens
    slow = speak(Client(random.Random(4)), said, [1_600], silence_schedule="inf:500", max_segment_ms=5_000)
    assert sum(bool(partial.locked_text) for partial in slow.partials) > 10
    places = {token: at for at, token in tokens_in(said.pcm)}
    for segment in slow.segments:
        assert all(segment.start_samples <= places[t] + RATE_HZ // 10 for t in segment.tokens)
        assert all(places[t] <= segment.end_samples + RATE_HZ // 10 for t in segment.tokens)


def test_a_word_before_a_cut_that_nothing_follows():
    """Noise, which says nothing: the words before the cut are final all the same, however they came."""
    said = script((2.5, 0.0), chance=random.Random(9))
    noise = np.full(s_to_samples(66), 0.2, np.float32)
    long = Script(np.concatenate([said.pcm, noise]), said.pieces)
    caller = every_way(long, 6, silence_schedule="inf:500", max_segment_ms=3_000)
    assert caller.tokens == said.tokens


def test_a_word_that_goes_on_and_on_over_a_cut():
    """It is parted at the same token, however the audio came."""
    pcm = np.full(s_to_samples(9), SPEECH, np.float32)
    pieces = ["▁so", *("o" for _ in range(28))]
    pcm[s_to_samples(0.2) :: ms_to_samples(300)][: len(pieces)] = [spoken(k) for k in range(len(pieces))]
    said = Script(np.concatenate([pcm, np.zeros(RATE_HZ, np.float32)]), pieces)
    caller = every_way(said, 7, silence_schedule="inf:500", max_segment_ms=4_000)
    assert caller.tokens == said.tokens
    assert len(caller.segments) > 1


def test_flushes_lose_only_what_dies_away():
    chance = random.Random(11)
    said = script(*TALK, chance=chance)
    for _ in range(8):
        flushes = tuple(sorted(chance.sample(range(1_000, len(said.pcm)), 9)))
        options = {"silence_schedule": "inf:400", "max_segment_ms": 3_000, "flushes": flushes}
        caller = every_way(said, 2, **options)
        assert [int(flushed.name) for flushed in caller.flushed] == list(flushes)
        assert caller.tokens == sorted(set(caller.tokens))
        lost = {at for at, token in tokens_in(said.pcm) if token not in caller.tokens}
        assert all(any(0 <= at - flush <= 5 * 512 for flush in flushes) for at in lost)


def test_a_flush_right_after_a_cut():
    said = script((12.0, 0.5), (4.0, 1.0), chance=random.Random(8))
    for at in range(s_to_samples(2.9), s_to_samples(4.5), 2_900):
        options = {"silence_schedule": "inf:400", "max_segment_ms": 3_000, "flushes": (at,)}
        caller = every_way(said, 3, late_ms=900, **options)
        assert caller.tokens == sorted(set(caller.tokens))
        lost = {place for place, token in tokens_in(said.pcm) if token not in caller.tokens}
        assert all(0 <= place - at <= 5 * 512 for place in lost)


def test_failed_steps_are_made_good_and_leave_nothing_open():
    said = script(*TALK, chance=random.Random(5))
    options = {"silence_schedule": "inf:400", "max_segment_ms": 3_000}
    for seed in range(20):
        client = Client(random.Random(seed), failures=2)
        caller = speak(client, said, [1_600], answers=3, **options)
        assert client.failures == 0
        assert caller.tokens == said.tokens


def test_clicks_and_hang_ups_leave_nothing_open():
    chance = random.Random(1)
    for _ in range(60):
        said = script(*((chance.choice([0.03, 0.04, 0.5, 6.0]), chance.random()) for _ in range(6)), chance=chance)
        client = Client(chance, failures=chance.randrange(3))
        with Speaker(client, said, max_segment_ms=2_000, silence_schedule="inf:300") as caller:
            for at in range(0, chance.randrange(len(said.pcm)), 1_600):
                caller.write(said.pcm[at : at + 1_600])
                while chance.random() < 0.9 and client.work():
                    caller.advance()
        assert not client.streams | client.sessions


def test_what_fails_right_after_a_cut_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch):
    said = script(*[(1.5, 0.25)] * 5, chance=random.Random(2))
    for refused in range(1, 130):
        client = Client(random.Random(2))
        caller = Speaker(client, said, max_segment_ms=2_000)
        puts = iter(range(1 << 30))
        put = streaming_recognizer._TokenStream.send_audio

        def feed(self, *given, puts=puts, put=put, refused=refused, **options):
            if next(puts) == refused:
                raise EngineClosed("on purpose")
            return put(self, *given, **options)

        with monkeypatch.context() as patched:
            patched.setattr(streaming_recognizer._TokenStream, "send_audio", feed)
            try:
                for at in range(0, len(said.pcm), 1_600):
                    caller.write(said.pcm[at : at + 1_600])
                    while client.work():
                        caller.advance()
            except EngineClosed:
                pass
            caller.listening.close()
        assert not client.streams | client.sessions


def test_an_eager_end_comes_with_all_the_words():
    for late_ms in (200, 500):
        said = script((2.0, 2.0), (1.7, 2.0), chance=random.Random(7))
        client = Client(random.Random(7), late_ms=late_ms)
        turn = TurnOptions(eager_threshold=0.1)
        with Speaker(client, said, silence_schedule="inf:1500", turn=turn) as caller:
            shown: list[str] = []
            for at in range(0, len(said.pcm), 320):
                caller.write(said.pcm[at : at + 320])
                while client.work():
                    caller.advance()
                if caller.count("eager_end") > len(shown):
                    shown.append(caller.partials[-1].text)
            caller.finish()
        assert shown == [segment.text for segment in caller.segments]


def test_a_long_talk_is_not_kept_for_ever():
    """Streams are begun anew at calm places, and no word is lost there, nor said twice."""
    stretches = [(3.0, 0.25)] * 60
    said = script(*stretches, chance=random.Random(12))
    client = Client(random.Random(12), drift_ms=200)
    caller = speak(client, said, [3_200], silence_schedule="inf:900")
    assert caller.tokens == said.tokens
    assert len(caller.segments) > 10
    assert all(before.end_samples <= after.start_samples for before, after in pairwise(caller.segments))


def test_the_text_of_a_segment_is_made_when_it_changes():
    said = script((12.0, 0.8), chance=random.Random(12))
    client, made = Client(random.Random(12)), 0
    with Speaker(client, said) as caller:
        text = caller.decode

        def counting(tokens: list[int]) -> str:
            nonlocal made
            made += len(tokens)
            return text(tokens)

        caller.listening._recognizer._text = counting
        for at in range(0, len(said.pcm), 160):
            caller.write(said.pcm[at : at + 160])
            while client.work():
                caller.advance()
        caller.finish()
    assert made < 60 * len(said.tokens)
