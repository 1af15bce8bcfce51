"""Sentences through a whole engine, chunk by chunk: the same in any batch, and nothing left of cancelled ones."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_clients import spy
from tiny_moonshine import held, on_loop
from tiny_moonshine import start as start_recognizer
from tiny_voice import (
    ALPHABET,
    CARD,
    CHUNK,
    DELAY,
    HOP,
    LEAD,
    WAIT_S,
    SentenceOutput,
    TinyVocoder,
    Voice,
    expect_pcm,
    expect_pieces,
    expected,
    parts,
    result,
    sentence,
    start,
    synthesize,
)

from asr_serve import devices
from asr_serve.engine.client import EngineClient
from asr_serve.engine.tts.chunked_runner import ChunkedTtsRunner, ChunkedTtsSequence
from asr_serve.engine.tts.custom_voices import CustomVoiceLoader
from asr_serve.engine.tts.request import TtsRequest
from asr_serve.errors import (
    AtCapacity,
    Cancelled,
    EngineClosed,
    OptionError,
    StepFailed,
    UnknownVoice,
    WeightsCorrupt,
    WrongModel,
)
from asr_serve.types import PhonemeSpan, Sentence, SentenceAudio

LONG = "abc domg omc" * 16


def random_sentence(chance: random.Random) -> Sentence:
    stretches = tuple(
        PhonemeSpan("".join(chance.choices(ALPHABET, k=chance.randint(1, 30))), chance.choice((0.5, 1.0, 2.0)))
        for _ in range(chance.randint(1, 3))
    )
    return Sentence(stretches, chance.choice(CARD.voices), chance.randint(0, 9))


@pytest.fixture
def launch(close_later: Any) -> Callable[..., EngineClient]:
    return lambda *build, **settings: close_later(start(*build, **settings))


@pytest.fixture
def client(launch: Callable[..., EngineClient]) -> EngineClient:
    return launch()


def expect_empty(client: EngineClient) -> None:
    def look(loop: Any) -> None:
        loop.check()
        assert loop.tts.runner.used == 0
        assert not loop.tts._requests

    on_loop(client, look)
    assert client.describe()["requests"] == 0
    assert client._samples == 0


def tts_runner(model: Voice, rows: int) -> ChunkedTtsRunner:
    """A runner whose unused rows hold poison."""
    loader, device = CustomVoiceLoader(model, CARD, Path()), devices.make_device("cpu", "fp32")
    return ChunkedTtsRunner(model, TinyVocoder(), loader, device, rows=rows, step_rows=rows, poison=True)


def voice(client: EngineClient) -> Voice:
    found: Voice = client.backend.loop.tts.runner._model
    return found


# --- what is said ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_in_any_batch_a_sentence_sounds_as_alone(launch, seed):
    chance = random.Random(seed)
    sentences = [random_sentence(chance) for _ in range(24)]
    client = launch(max_speaking_rows=6, max_decode_rows=chance.randint(1, 6))
    spoken = [synthesize(client, each) for each in sentences]
    for said, (ticket, heard) in zip(sentences, spoken, strict=True):
        expect_pcm(ticket, heard, expected(said))
    assert max(len(step) for step in voice(client).steps) == client.backend.loop.executor.runner.step_rows
    expect_empty(client)


def test_a_sentence_of_any_length_has_all_its_frames():
    """Frames and chunks, with what the vocoder hears ahead: every way in which they may not fit."""
    runner = tts_runner(Voice(), 3)
    for count in range(1, 14):
        said = sentence("a" * count, speed=2.0)  # a frame each
        [row] = runner.start_sequences([said])
        pieces = []
        while not pieces or not pieces[-1].finished:
            pieces += runner.step([row])
        assert len(pieces) == -(-(LEAD + count + DELAY) // CHUNK)
        assert len(np.concatenate([piece.pcm for piece in pieces])) == count * HOP
        assert row.ends == tuple(HOP * (at + 1) for at in range(count))
        runner.check_invariants()
        runner.free_sequence(row)
    assert runner.used == 0


def test_rows_do_not_touch_each_other():
    """Rows that come, stay and go, in memory that holds poison where nobody may read."""
    model, chance = Voice(), random.Random(5)
    runner = tts_runner(model, 4)
    waiting = [random_sentence(chance) for _ in range(20)]
    on: dict[ChunkedTtsSequence, Sentence] = {}
    came: dict[ChunkedTtsSequence, list[np.ndarray]] = {}
    while waiting or on:
        while waiting and runner.used < runner.rows and chance.random() < 0.6:
            said = waiting.pop()
            [row] = runner.start_sequences([said])
            on[row], came[row] = said, []
        rows = [row for row in on if chance.random() < 0.7]
        if not rows:
            continue
        for row, piece in zip(rows, runner.step(rows), strict=True):
            came[row].append(piece.pcm)
            if piece.finished or chance.random() < 0.05:
                runner.free_sequence(row)
                said, sound = on.pop(row), np.concatenate(came.pop(row))
                want = expected(said, model)[: len(sound)] / 32_767
                np.testing.assert_allclose(sound, want, atol=2e-5)
        runner.check_invariants()


def test_the_first_piece_has_phoneme_ends_and_the_last_is_marked(client):
    said = sentence("abc de.")
    ticket, heard = synthesize(client, said)
    total = result(ticket)
    assert len(heard.pieces) > 3
    expect_pieces(heard)
    ends = heard.pieces[0].phoneme_ends
    assert len(ends) == len(said.phonemes)
    assert ends[-1] == total
    assert list(ends) == sorted(set(ends))


def test_the_same_seed_gives_the_same_samples_and_another_others(client):
    first, again, other = (synthesize(client, sentence("abcdef", seed=seed)) for seed in (3, 3, 4))
    for ticket, _ in (first, again, other):
        result(ticket)
    np.testing.assert_array_equal(first[1].pcm, again[1].pcm)
    assert (first[1].pcm != other[1].pcm).any()


# --- whose turn it is ------------------------------------------------------------------------------------


def steps_since(client: EngineClient, seen: int) -> list[list[str]]:
    return [[each.phonemes for each in step] for step in voice(client).steps[seen:]]


def test_a_new_sentence_is_in_the_next_step(client):
    long = [synthesize(client, sentence(LONG, seed=number)) for number in range(4)]
    for _, heard in long:
        assert heard.begun.wait(WAIT_S)
    with held(client):
        seen = len(voice(client).steps)
        short = synthesize(client, sentence("abc"))
    result(short[0])
    assert "abc" in steps_since(client, seen)[0]
    for ticket, _ in long:
        result(ticket)


def test_first_chunks_come_in_arrival_order_before_all_others(launch):
    client = launch(max_decode_rows=1)
    with held(client):
        spoken = [synthesize(client, sentence(text)) for text in ("aaaaaa", "bbbbbb", "cccccc")]
    for ticket, _ in spoken:
        result(ticket)
    # The first chunk is all lead and delay: there is something to hear from the second on.
    assert steps_since(client, 0)[:6] == [["aaaaaa"]] * 2 + [["bbbbbb"]] * 2 + [["cccccc"]] * 2


def test_urgent_sentences_go_first(launch):
    client = launch(max_speaking_rows=1)
    with held(client):
        bulk = synthesize(client, sentence("aaaa"), priority="bulk")
        later = synthesize(client, sentence("bbbb"), slack_ms=5_000)
        now = synthesize(client, sentence("cccc"))
    for ticket, _ in (bulk, later, now):
        result(ticket)
    assert [each[0].phonemes for each in voice(client).encodes] == ["cccc", "bbbb", "aaaa"]


def test_bulk_leaves_rows_for_interactive_sentences(launch):
    client = launch(max_speaking_rows=4)
    bulk = [synthesize(client, sentence(LONG, seed=number), priority="bulk") for number in range(8)]
    assert bulk[2][1].begun.wait(WAIT_S)
    rows = on_loop(client, lambda loop: (loop.tts.runner.used, len(loop.tts._waiting)))
    assert rows[0] <= 3
    with held(client):
        seen = len(voice(client).steps)
        now = synthesize(client, sentence("abc"))
    result(now[0])
    assert steps_since(client, seen)[0] == ["abc"]  # and nobody of them with it
    for ticket, heard in bulk:
        assert result(ticket) == len(heard.pcm)
    expect_empty(client)


def test_waiting_sentences_are_encoded_together(client):
    with held(client):
        spoken = [synthesize(client, sentence("ab" * (1 + number))) for number in range(12)]
    for ticket, _ in spoken:
        result(ticket)
    sizes = [len(batch) for batch in voice(client).encodes]
    assert sum(sizes) == 12
    assert sizes[0] > 1
    assert max(sizes) <= 8  # as many as there are rows


# --- who goes, and what goes wrong -----------------------------------------------------------------------


def test_cancelled_speech_frees_its_row_before_the_next_step(client):
    stayed = synthesize(client, sentence(LONG, seed=1))
    gone = synthesize(client, sentence(LONG, seed=2))
    waiting = [synthesize(client, sentence("abc", seed=number)) for number in range(20)]
    assert gone[1].begun.wait(WAIT_S)
    client.cancel(gone[0])
    with pytest.raises(Cancelled):
        result(gone[0])
    count = len(gone[1].pieces)
    client.cancel(waiting[-1][0])
    for ticket, heard in waiting[:-1]:
        assert result(ticket) == len(heard.pcm)
    with pytest.raises(Cancelled):
        result(waiting[-1][0])
    expect_pcm(*stayed, expected(sentence(LONG, seed=1)))
    assert len(gone[1].pieces) == count
    assert not gone[1].pieces[-1].is_last
    expect_empty(client)


def test_cancelling_at_any_moment_leaves_nothing(client):
    chance = random.Random(9)
    spoken = []
    for _ in range(60):
        spoken.append(synthesize(client, random_sentence(chance)))
        if chance.random() < 0.5:
            client.cancel(chance.choice(spoken)[0])
    wait([ticket.future for ticket, _ in spoken], WAIT_S)
    for ticket, heard in spoken:
        if ticket.future.exception() is None:
            assert heard.pieces[-1].is_last
        else:
            assert isinstance(ticket.future.exception(), Cancelled)
    expect_empty(client)


def test_impossible_sentences_are_refused_and_others_go_on(client):
    with held(client):
        good = synthesize(client, sentence("abc"))
        strange = synthesize(client, sentence("abc§ƙ"))
        nobody = synthesize(client, sentence("abc", voice="lo"))
        other = synthesize(client, sentence("cba"))
    with pytest.raises(OptionError, match=r"'§' \(U\+00A7\) 'ƙ' \(U\+0199\)"):
        result(strange[0])
    with pytest.raises(UnknownVoice, match=r"voices: low, high.*did you mean 'low'"):
        result(nobody[0])
    assert result(good[0])
    assert result(other[0])
    assert [each.phonemes for batch in voice(client).encodes for each in batch] == ["abc", "cba"]
    expect_empty(client)


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (sentence(""), "without a phoneme"),
        (Sentence((), "low"), "without a phoneme"),
        (sentence("a" * 201), "up to 200"),
        (sentence("a", speed=0.1), r"speed=0\.1"),
        (sentence("a", speed=float("nan")), "speed=nan"),
        (sentence("a", pitch=12.5), "pitch"),
        (sentence("a", energy=-20.0), "energy"),
        (sentence("a", seed=-1), "seed"),
        (sentence("a", seed=1 << 64), "seed"),
    ],
)
def test_invalid_sentences_are_refused_at_once(client, said, what):
    with pytest.raises(OptionError, match=what):
        client.synthesize(said, SentenceOutput())
    expect_empty(client)


def test_a_failed_step_fails_the_sentences_in_it_only(client):
    model = voice(client)

    def fail(encoded: Any, *_: Any) -> None:
        if any(model.of[id(each)].phonemes == "ccc" for each in encoded):
            raise ValueError("a broken step")

    spy(model, "step", fail)
    with held(client):
        bad = [synthesize(client, sentence(text)) for text in ("abc", "ccc")]
    for ticket, _ in bad:
        with pytest.raises(StepFailed, match="a broken step"):
            result(ticket)
    assert result(synthesize(client, sentence("abc"))[0])
    expect_empty(client)


def test_a_failed_encoding_fails_its_own_sentence_only(client):
    def fail(sentences: Any) -> None:
        if any(each.phonemes == "ccc" for each in sentences):
            raise ValueError("a broken batch")

    spy(voice(client), "encode", fail)
    with held(client):
        spoken = [synthesize(client, sentence(text)) for text in ("abc", "ccc", "cba")]
    with pytest.raises(StepFailed, match="a broken batch"):
        result(spoken[1][0])
    for (ticket, heard), text in ((spoken[0], "abc"), (spoken[2], "cba")):
        expect_pcm(ticket, heard, expected(sentence(text)))
    expect_empty(client)


def test_nan_samples_fail_their_own_sentence_only(client):
    vocoder = client.backend.loop.tts.runner._vocoder
    step = vocoder.step

    def failing(frames: Any, rows: Any, seen: Any, ends: Any, seeds: Any, state: Any) -> Any:
        sound = step(frames, rows, seen, ends, seeds, state)
        sound[seeds == 7] = float("nan")
        return sound

    vocoder.step = failing
    with held(client):
        spoken = [synthesize(client, sentence(LONG, seed=seed)) for seed in (1, 7, 2)]
    with pytest.raises(StepFailed, match="no numbers"):
        result(spoken[1][0])
    assert spoken[1][1].pieces == []
    for (ticket, heard), seed in ((spoken[0], 1), (spoken[2], 2)):
        expect_pcm(ticket, heard, expected(sentence(LONG, seed=seed)))
    expect_empty(client)


def test_no_wake_up_is_lost(client):
    """An engine that sleeps has nothing to do: of all that was let in while it worked, went to sleep and woke,
    everything is answered. With a wake-up lost the last one would wait for ever."""
    chance = random.Random(11)
    for _ in range(60):
        with contextlib.ExitStack() as together:
            if chance.random() < 0.3:
                together.enter_context(held(client))
            spoken = [
                synthesize(
                    client, sentence("ab" * chance.randint(1, 6)), priority=chance.choice(("interactive", "bulk"))
                )
                for _ in range(chance.randint(1, 12))
            ]
            gone = [ticket for ticket, _ in spoken if chance.random() < 0.4]
            if chance.random() < 0.5:
                time.sleep(chance.random() / 500)  # anywhere in its work
            for ticket in gone:
                client.cancel(ticket)
        done, late = wait([ticket.future for ticket, _ in spoken], WAIT_S)
        assert not late
        assert len(done) == len(spoken)
        on_loop(client, lambda loop: loop.check())
    expect_empty(client)


def test_waiting_time_counts_across_a_restart(client):
    """A sentence that comes again of one that died counts from when it was submitted, and so does `slack_ms`."""
    order: list[str] = []

    def queued_sentence(number: int, text: str, ago_s: float, slack_ms: int | None = None) -> TtsRequest:
        future: Future[int] = Future()
        future.add_done_callback(lambda _: order.append(text))
        since_ns = time.time_ns() - int(ago_s * 1e9)
        said = sentence(text)
        return TtsRequest(number, said, lambda _: None, "interactive", future, slack_ms, submitted_ns=since_ns)

    requests = [
        queued_sentence(number, *of)
        for number, of in enumerate([("aaaa", 0.0), ("bbbb", 9.0, 5_000), ("cccc", 1.0, 5_000)], 901)
    ]
    on_loop(client, lambda loop: [loop.tts.submit_sentence(each) for each in requests])
    for each in requests:
        each.future.result(WAIT_S)
    assert [each.phonemes for each in voice(client).encodes[0]] == ["bbbb", "aaaa", "cccc"]


def test_a_failing_callback_fails_its_own_sentence_only(client, caplog):
    def fails(sound: SentenceAudio) -> None:
        raise KeyError("the caller's own")

    other = synthesize(client, sentence(LONG))
    ticket = client.synthesize(sentence(LONG), fails)
    with pytest.raises(StepFailed, match="who hears the sentence failed: KeyError"):
        ticket.future.result(WAIT_S)
    assert result(other[0]) == len(expected(sentence(LONG)))
    expect_empty(client)
    assert "who hears a sentence failed" in caplog.text


def test_a_full_engine_refuses_with_a_retry_time_or_waits(launch):
    client = launch(max_requests=2)
    with held(client):
        first, second = synthesize(client, sentence("abc")), synthesize(client, sentence("abc"))
        with pytest.raises(AtCapacity, match="2 requests") as full:
            client.synthesize(sentence("abc"), SentenceOutput())
        assert full.value.retry_after_ms > 0
        third: list[Any] = []
        waiter = threading.Thread(target=lambda: third.append(synthesize(client, sentence("abc"), wait=True)))
        waiter.start()
    waiter.join(WAIT_S)
    for ticket, heard in (first, second, *third):
        assert result(ticket) == len(heard.pcm)
    expect_empty(client)


def test_closing_fails_unfinished_sentences(launch):
    client = launch(max_speaking_rows=2)
    spoken = [synthesize(client, sentence(LONG, seed=number)) for number in range(5)]
    assert spoken[0][1].begun.wait(WAIT_S)
    client.close()
    for ticket, _ in spoken:
        if ticket.future.exception(WAIT_S) is not None:
            assert isinstance(ticket.future.exception(), EngineClosed)
    assert isinstance(spoken[-1][0].future.exception(WAIT_S), EngineClosed)
    with pytest.raises(EngineClosed):
        client.synthesize(sentence("abc"), SentenceOutput())
    assert client._requests == 0


def test_recognition_and_synthesis_refuse_each_others_requests(client):
    pcm = np.zeros(16_000, np.float32)
    stream = partial(client.open_stream, live=True)
    for ask in (lambda: client.submit(pcm), client.open_vad_session, lambda: client.card, stream):
        with pytest.raises(WrongModel, match="tiny-voice synthesizes speech"):
            ask()
    recognizer = start_recognizer()
    for ask in (lambda: recognizer.synthesize(sentence("abc"), SentenceOutput()), lambda: recognizer.voice_card):
        with pytest.raises(WrongModel, match="tiny-random recognizes speech"):
            ask()
    recognizer.close()
    expect_empty(client)


# --- cloned voices ---------------------------------------------------------------------------------------


def test_a_cloned_voice_comes_changes_and_goes_with_its_file(launch, tmp_path):
    client = launch(voices_dir=str(tmp_path))
    with pytest.raises(UnknownVoice, match="low, high"):
        result(synthesize(client, sentence("abc", voice="mine"))[0])
    (tmp_path / "mine.safetensors").write_bytes(b"\x32")
    first, plain = synthesize(client, sentence("abc", voice="mine")), synthesize(client, sentence("abc"))
    result(first[0])
    result(plain[0])
    assert (first[1].pcm != plain[1].pcm).any()
    (tmp_path / "mine.safetensors").write_bytes(b"\x64")
    retrained = synthesize(client, sentence("abc", voice="mine"))
    result(retrained[0])
    assert (retrained[1].pcm != first[1].pcm).any()
    (tmp_path / "mine.safetensors").unlink()
    (tmp_path / "min.safetensors").write_bytes(b"")
    with pytest.raises(UnknownVoice, match=r"voices: low, high, min.*did you mean 'min'"):
        result(synthesize(client, sentence("abc", voice="mine"))[0])


def test_a_voice_deleted_before_its_turn_fails_its_own_sentence(launch, tmp_path):
    client = launch(voices_dir=str(tmp_path))
    for name in ("gone", "bad"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"\x32")
    with held(client):
        spoken = {name: synthesize(client, sentence("abc", voice=name)) for name in ("low", "gone", "bad", "high")}
        unlink = (tmp_path / "gone.safetensors").unlink
        client.backend.loop.call(unlink)  # after they were let in, before they are encoded
        client.backend.loop.call(lambda: voice(client).broken.add("bad"))
    with pytest.raises(UnknownVoice, match="no voice 'gone'"):
        result(spoken["gone"][0])
    with pytest.raises(WeightsCorrupt, match="bad"):
        result(spoken["bad"][0])
    for name in ("low", "high"):
        assert result(spoken[name][0]) == len(spoken[name][1].pcm)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "", ".", "x" * 200, "mine\0"])
def test_a_voice_name_is_no_path(launch, tmp_path, name):
    (tmp_path / "secret.safetensors").write_bytes(b"\x32")
    (tmp_path / "voices").mkdir()
    client = launch(voices_dir=str(tmp_path / "voices"))
    with pytest.raises(UnknownVoice):
        result(synthesize(client, sentence("abc", voice=name))[0])
    assert voice(client).cloned == {}


def test_memory_bounds_the_rows(launch):
    made = parts()
    one = 4 * (24 + 3 * 81)
    client = launch(lambda: made, kv_bytes=3 * one + 1, max_speaking_rows=64)
    assert client.describe()["rows"] == 3
    for ticket, heard in [synthesize(client, sentence("abc")) for _ in range(9)]:
        assert result(ticket) == len(heard.pcm)
