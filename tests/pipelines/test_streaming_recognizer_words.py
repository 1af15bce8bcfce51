"""Segments of a streaming model hold every token once, whatever is split, flushed, late or fails."""

from __future__ import annotations

import contextlib
import random
from itertools import pairwise

import numpy as np
import pytest
from case_tiers import exhaustive_after
from live_client import packets
from streaming_tokens import SPEECH, FakeClient, Script, ScriptedSession, run_script, sample_of, script, tokens_in

from asr_serve.errors import EngineClosed
from asr_serve.pipelines.live import streaming_recognizer
from asr_serve.pipelines.options import TurnOptions
from asr_serve.units import RATE_HZ, ms_to_samples, s_to_samples

PACKETS = ([1_600], [160, 9_000, 37], [1 << 20])
STRETCHES = ((2.0, 0.4), (3.1, 0.33), (1.2, 0.52), (14.0, 0.7), (0.5, 1.4), (2.5, 0.36), (1.0, 0.8))


def write_and_work(session: ScriptedSession, pcm: np.ndarray) -> None:
    """Send a packet, and have every pending request answered."""
    session.write(pcm)
    while session.client.work():
        session.advance()


def run_all_ways(content: Script, seed: int, held: int = 0, late_ms: int = 200, **options: object) -> ScriptedSession:
    """Run a script in every way of packets and answers: all give the same segments, out of streams that hear the same.
    Returns one session."""
    sessions = [
        run_script(
            FakeClient(random.Random(seed), held=held, late_ms=late_ms), content, sizes, answers=answers, **options
        )
        for sizes in PACKETS
        for answers in (1_000, 2)
    ]
    assert all(run.spans == sessions[0].spans for run in sessions)
    assert all(sorted(run.client.heard_samples) == sorted(sessions[0].client.heard_samples) for run in sessions)
    return sessions[0]


@pytest.mark.slow
@pytest.mark.parametrize("held", [0, 3])
@pytest.mark.parametrize("late_ms", exhaustive_after(1, [900, 200]))
@pytest.mark.parametrize("schedule", exhaustive_after(2, ["inf:300", "inf:1000", "inf:500"]))
@pytest.mark.parametrize("pad_before_ms", exhaustive_after(1, [300, 250]))
def test_every_token_is_in_one_segment(held: int, late_ms: int, schedule: str, pad_before_ms: int):
    content = script(*STRETCHES, chance=random.Random(5))
    options = {"silence_schedule": schedule, "pad_before_ms": pad_before_ms, "max_segment_ms": 4_000}
    run = run_all_ways(content, 1, held, late_ms, **options)
    assert run.tokens == content.tokens
    assert len(run.segments) > 6


def test_speech_right_after_a_segment_end():
    """It ended in a pause and was not cut: its stream hears no more."""
    for pause_ms in range(300, 620, 40):
        content = script((2.0, pause_ms / 1_000), (2.0, 1.0), chance=random.Random(pause_ms))
        options = {"silence_schedule": "inf:300", "pad_before_ms": 400}
        assert run_all_ways(content, pause_ms, **options).tokens == content.tokens


def test_of_pauses_the_same_is_heard_however_audio_comes():
    content = script((2.0, 2.5), (2.0, 0.9), (1.0, 2.5), chance=random.Random(4))
    run = run_all_ways(content, 5, silence_schedule="inf:1500")
    assert run.tokens == content.tokens
    assert len(run.client.heard_samples) == 2
    assert sum(run.client.heard_samples) < len(content.pcm) - s_to_samples(2)


def test_locked_text_stays_in_its_segment():
    """A cut falls up to 40 % of a segment's length back, among words that were said long ago."""
    content = script((10.5, 0.2), (12.0, 0.1), (11.0, 0.2), (14.0, 1.0), chance=random.Random(3))
    run = run_script(FakeClient(random.Random(3)), content, [1_600], silence_schedule="inf:500")
    assert run.tokens == content.tokens
    assert len(run.segments) > 2
    assert any(partial.locked_text for partial in run.partials)


def test_text_without_spaces_is_locked_and_split():
    content = script((25.0, 1.0), chance=random.Random(3), unspaced=True)
    run = run_all_ways(content, 4, silence_schedule="inf:500", max_segment_ms=5_000)
    assert run.tokens == content.tokens
    slow = run_script(FakeClient(random.Random(4)), content, [1_600], silence_schedule="inf:500", max_segment_ms=5_000)
    assert sum(bool(partial.locked_text) for partial in slow.partials) > 10
    places = {token: at for at, token in tokens_in(content.pcm)}
    for segment in slow.segments:
        assert all(segment.start_samples <= places[t] + RATE_HZ // 10 for t in segment.tokens)
        assert all(places[t] <= segment.end_samples + RATE_HZ // 10 for t in segment.tokens)


def test_a_word_before_a_split_that_nothing_follows():
    """Noise, which says nothing: the words before the cut are final all the same, however they came."""
    content = script((2.5, 0.0), chance=random.Random(9))
    noise = np.full(s_to_samples(66), 0.2, np.float32)
    long = Script(np.concatenate([content.pcm, noise]), content.pieces)
    run = run_all_ways(long, 6, silence_schedule="inf:500", max_segment_ms=3_000)
    assert run.tokens == content.tokens


def test_a_word_longer_than_a_segment():
    """It is parted at the same token, however the audio came."""
    pcm = np.full(s_to_samples(9), SPEECH, np.float32)
    pieces = ["▁so", *("o" for _ in range(28))]
    pcm[s_to_samples(0.2) :: ms_to_samples(300)][: len(pieces)] = [sample_of(k) for k in range(len(pieces))]
    content = Script(np.concatenate([pcm, np.zeros(RATE_HZ, np.float32)]), pieces)
    run = run_all_ways(content, 7, silence_schedule="inf:500", max_segment_ms=4_000)
    assert run.tokens == content.tokens
    assert len(run.segments) > 1


def test_flushes_lose_only_trailing_tokens():
    chance = random.Random(11)
    content = script(*STRETCHES, chance=chance)
    for _ in range(8):
        flushes = tuple(sorted(chance.sample(range(1_000, len(content.pcm)), 9)))
        options = {"silence_schedule": "inf:400", "max_segment_ms": 3_000, "flushes": flushes}
        run = run_all_ways(content, 2, **options)
        assert [int(flushed.name) for flushed in run.flushed] == list(flushes)
        assert run.tokens == sorted(set(run.tokens))
        lost = {at for at, token in tokens_in(content.pcm) if token not in run.tokens}
        assert all(any(0 <= at - flush <= 5 * 512 for flush in flushes) for at in lost)


def test_a_flush_right_after_a_split():
    content = script((12.0, 0.5), (4.0, 1.0), chance=random.Random(8))
    for at in range(s_to_samples(2.9), s_to_samples(4.5), 2_900):
        options = {"silence_schedule": "inf:400", "max_segment_ms": 3_000, "flushes": (at,)}
        run = run_all_ways(content, 3, late_ms=900, **options)
        assert run.tokens == sorted(set(run.tokens))
        lost = {place for place, token in tokens_in(content.pcm) if token not in run.tokens}
        assert all(0 <= place - at <= 5 * 512 for place in lost)


def test_failed_steps_are_repeated_and_leave_nothing_open():
    content = script(*STRETCHES, chance=random.Random(5))
    options = {"silence_schedule": "inf:400", "max_segment_ms": 3_000}
    for seed in range(20):
        client = FakeClient(random.Random(seed), failures=2)
        run = run_script(client, content, [1_600], answers=3, **options)
        assert client.failures == 0
        assert run.tokens == content.tokens


def test_clicks_and_early_closes_leave_nothing_open():
    chance = random.Random(1)
    for _ in range(60):
        content = script(*((chance.choice([0.03, 0.04, 0.5, 6.0]), chance.random()) for _ in range(6)), chance=chance)
        client = FakeClient(chance, failures=chance.randrange(3))
        with ScriptedSession(client, content, max_segment_ms=2_000, silence_schedule="inf:300") as run:
            for at in range(0, chance.randrange(len(content.pcm)), 1_600):
                run.write(content.pcm[at : at + 1_600])
                while chance.random() < 0.9 and client.work():
                    run.advance()
        assert not client.streams | client.sessions


def test_a_failure_right_after_a_split_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch):
    content = script(*[(1.5, 0.25)] * 5, chance=random.Random(2))
    for refused in range(1, 130):
        client = FakeClient(random.Random(2))
        run = ScriptedSession(client, content, max_segment_ms=2_000)
        puts = iter(range(1 << 30))
        put = streaming_recognizer._TokenStream.send_audio

        def feed(self, *given, puts=puts, put=put, refused=refused, **options):
            if next(puts) == refused:
                raise EngineClosed("on purpose")
            return put(self, *given, **options)

        with monkeypatch.context() as patched:
            patched.setattr(streaming_recognizer._TokenStream, "send_audio", feed)
            with contextlib.suppress(EngineClosed):
                for packet in packets(content.pcm, [1_600]):
                    write_and_work(run, packet)
            run.session.close()
        assert not client.streams | client.sessions


def test_an_eager_end_comes_with_all_words():
    for late_ms in (200, 500):
        content = script((2.0, 2.0), (1.7, 2.0), chance=random.Random(7))
        client = FakeClient(random.Random(7), late_ms=late_ms)
        turn = TurnOptions(eager_threshold=0.1)
        with ScriptedSession(client, content, silence_schedule="inf:1500", turn=turn) as run:
            shown: list[str] = []
            for packet in packets(content.pcm, [320]):
                write_and_work(run, packet)
                if run.count("eager_end") > len(shown):
                    shown.append(run.partials[-1].text)
            run.finish()
        assert shown == [segment.text for segment in run.segments]


def test_streams_of_long_sessions_are_renewed():
    """Streams are begun anew at calm places, and no word is lost there, nor said twice."""
    stretches = [(3.0, 0.25)] * 60
    content = script(*stretches, chance=random.Random(12))
    client = FakeClient(random.Random(12), drift_ms=200)
    run = run_script(client, content, [3_200], silence_schedule="inf:900")
    assert run.tokens == content.tokens
    assert len(run.segments) > 10
    assert all(before.end_samples <= after.start_samples for before, after in pairwise(run.segments))


def test_text_is_decoded_only_when_it_changes():
    content = script((12.0, 0.8), chance=random.Random(12))
    client, made = FakeClient(random.Random(12)), 0
    with ScriptedSession(client, content) as run:
        text = run.decode

        def counting(tokens: list[int]) -> str:
            nonlocal made
            made += len(tokens)
            return text(tokens)

        run.session._recognizer._text = counting
        for packet in packets(content.pcm, [160]):
            write_and_work(run, packet)
        run.finish()
    assert made < 60 * len(content.tokens)
