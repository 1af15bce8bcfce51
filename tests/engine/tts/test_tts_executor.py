"""Sentences through the engine's door, chunk by chunk: the same in any company, and nothing left of those who
go."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_moonshine import held, on_loop
from tiny_moonshine import start as start_hearing
from tiny_voice import (
    ALPHABET,
    CARD,
    CHUNK,
    DELAY,
    HOP,
    LEAD,
    WAIT_S,
    Codec,
    Heard,
    Voice,
    expected,
    parts,
    result,
    say,
    sentence,
    start,
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

LONG = (
    "the long one".replace("t", "a").replace("h", "b").replace("e", "c").replace("l", "d").replace("n", "m") * 16
)


def made_up(chance: random.Random) -> Sentence:
    stretches = tuple(
        PhonemeSpan("".join(chance.choices(ALPHABET, k=chance.randint(1, 30))), chance.choice((0.5, 1.0, 2.0)))
        for _ in range(chance.randint(1, 3))
    )
    return Sentence(stretches, chance.choice(CARD.voices), chance.randint(0, 9))


@pytest.fixture
def client() -> Iterator[EngineClient]:
    made = start()
    yield made
    made.close()


def expect_empty(client: EngineClient) -> None:
    def look(loop: Any) -> None:
        loop.check()
        assert loop.tts.runner.used == 0
        assert not loop.tts._requests

    on_loop(client, look)
    assert client.describe()["requests"] == 0
    assert client._samples == 0


def voice(client: EngineClient) -> Voice:
    found: Voice = client.backend.loop.tts.runner._model
    return found


# --- what is said ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_in_company_everybody_sounds_as_alone(seed):
    chance = random.Random(seed)
    sentences = [made_up(chance) for _ in range(24)]
    client = start(max_speaking_rows=6, max_decode_rows=chance.randint(1, 6))
    spoken = [say(client, each) for each in sentences]
    for said, (ticket, heard) in zip(sentences, spoken, strict=True):
        want = expected(said)
        assert result(ticket) == len(want) == len(heard.pcm)
        np.testing.assert_allclose(heard.pcm.astype(int), want.astype(int), atol=1)
    assert max(len(step) for step in voice(client).steps) == client.backend.loop.executor.runner.step_rows
    expect_empty(client)
    client.close()


def test_a_sentence_of_any_length_ends_where_it_ends():
    """Frames and chunks, with what the codec hears ahead: every way in which they may not fit."""
    runner = ChunkedTtsRunner(
        Voice(),
        Codec(),
        CustomVoiceLoader(Voice(), CARD, Path()),
        devices.make_device("cpu", "fp32"),
        rows=3,
        step_rows=3,
        poison=True,
    )
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
    model, device = Voice(), devices.make_device("cpu", "fp32")
    runner = ChunkedTtsRunner(
        model, Codec(), CustomVoiceLoader(model, CARD, Path()), device, rows=4, step_rows=4, poison=True
    )
    chance = random.Random(5)
    waiting = [made_up(chance) for _ in range(20)]
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


def test_the_first_piece_tells_where_phonemes_end_and_the_last_one_that_it_is(client):
    said = sentence("abc de.")
    ticket, heard = say(client, said)
    total = result(ticket)
    assert len(heard.pieces) > 3
    assert [bool(piece.phoneme_ends) for piece in heard.pieces] == [True] + [False] * (len(heard.pieces) - 1)
    assert [piece.is_last for piece in heard.pieces] == [False] * (len(heard.pieces) - 1) + [True]
    ends = heard.pieces[0].phoneme_ends
    assert len(ends) == len(said.phonemes)
    assert ends[-1] == total
    assert list(ends) == sorted(set(ends))


def test_the_same_seed_gives_the_same_samples_and_another_others(client):
    first, again, other = (say(client, sentence("abcdef", seed=seed)) for seed in (3, 3, 4))
    for ticket, _ in (first, again, other):
        result(ticket)
    np.testing.assert_array_equal(first[1].pcm, again[1].pcm)
    assert (first[1].pcm != other[1].pcm).any()


# --- whose turn it is ------------------------------------------------------------------------------------


def steps_since(client: EngineClient, seen: int) -> list[list[str]]:
    return [[each.phonemes for each in step] for step in voice(client).steps[seen:]]


def test_who_comes_while_others_speak_sounds_next(client):
    long = [say(client, sentence(LONG, seed=number)) for number in range(4)]
    for _, heard in long:
        assert heard.begun.wait(WAIT_S)
    with held(client):
        seen = len(voice(client).steps)
        short = say(client, sentence("abc"))
    result(short[0])
    assert "abc" in steps_since(client, seen)[0]
    for ticket, _ in long:
        result(ticket)


def test_first_chunks_come_in_the_order_of_coming_and_before_all_others():
    client = start(max_decode_rows=1)
    with held(client):
        spoken = [say(client, sentence(text)) for text in ("aaaaaa", "bbbbbb", "cccccc")]
    for ticket, _ in spoken:
        result(ticket)
    # The first chunk is all lead and delay: there is something to hear from the second on.
    assert steps_since(client, 0)[:6] == [["aaaaaa"]] * 2 + [["bbbbbb"]] * 2 + [["cccccc"]] * 2
    client.close()


def test_what_is_wanted_later_waits_for_what_is_wanted_now():
    client = start(max_speaking_rows=1)
    with held(client):
        bulk = say(client, sentence("aaaa"), priority="bulk")
        later = say(client, sentence("bbbb"), slack_ms=5_000)
        now = say(client, sentence("cccc"))
    for ticket, _ in (bulk, later, now):
        result(ticket)
    assert [each[0].phonemes for each in voice(client).encodes] == ["cccc", "bbbb", "aaaa"]
    client.close()


def test_bulk_leaves_rows_for_those_who_wait():
    client = start(max_speaking_rows=4)
    bulk = [say(client, sentence(LONG, seed=number), priority="bulk") for number in range(8)]
    assert bulk[2][1].begun.wait(WAIT_S)
    rows = on_loop(client, lambda loop: (loop.tts.runner.used, len(loop.tts._waiting)))
    assert rows[0] <= 3
    with held(client):
        seen = len(voice(client).steps)
        now = say(client, sentence("abc"))
    result(now[0])
    assert steps_since(client, seen)[0] == ["abc"]  # and nobody of them with it
    for ticket, heard in bulk:
        assert result(ticket) == len(heard.pcm)
    expect_empty(client)
    client.close()


def test_sentences_that_wait_are_encoded_together(client):
    with held(client):
        spoken = [say(client, sentence("ab" * (1 + number))) for number in range(12)]
    for ticket, _ in spoken:
        result(ticket)
    sizes = [len(batch) for batch in voice(client).encodes]
    assert sum(sizes) == 12
    assert sizes[0] > 1
    assert max(sizes) <= 8  # as many as there are rows


# --- who goes, and what goes wrong -----------------------------------------------------------------------


def test_cancelled_speech_frees_its_row_before_the_next_step(client):
    stayed = say(client, sentence(LONG, seed=1))
    gone = say(client, sentence(LONG, seed=2))
    waiting = [say(client, sentence("abc", seed=number)) for number in range(20)]
    assert gone[1].begun.wait(WAIT_S)
    client.cancel(gone[0])
    with pytest.raises(Cancelled):
        result(gone[0])
    told = len(gone[1].pieces)
    client.cancel(waiting[-1][0])
    for ticket, heard in waiting[:-1]:
        assert result(ticket) == len(heard.pcm)
    with pytest.raises(Cancelled):
        result(waiting[-1][0])
    result(stayed[0])
    np.testing.assert_allclose(stayed[1].pcm.astype(int), expected(sentence(LONG, seed=1)).astype(int), atol=1)
    assert len(gone[1].pieces) == told
    assert not gone[1].pieces[-1].is_last
    expect_empty(client)


def test_cancelled_at_any_moment_nothing_is_left(client):
    chance = random.Random(9)
    spoken = []
    for _ in range(60):
        spoken.append(say(client, made_up(chance)))
        if chance.random() < 0.5:
            client.cancel(chance.choice(spoken)[0])
    wait([ticket.future for ticket, _ in spoken], WAIT_S)
    for ticket, heard in spoken:
        if ticket.future.exception() is None:
            assert heard.pieces[-1].is_last
        else:
            assert isinstance(ticket.future.exception(), Cancelled)
    expect_empty(client)


def test_what_cannot_be_said_is_refused_and_the_rest_goes_on(client):
    with held(client):
        good = say(client, sentence("abc"))
        strange = say(client, sentence("abc§ƙ"))
        nobody = say(client, sentence("abc", voice="lo"))
        other = say(client, sentence("cba"))
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
def test_what_nobody_can_say_is_refused_at_once(client, said, what):
    with pytest.raises(OptionError, match=what):
        client.synthesize(said, Heard())
    expect_empty(client)


def test_a_step_that_fails_fails_those_in_it_and_nobody_else(client):
    model = voice(client)
    step = model.step

    def failing(encoded: Any, *rest: Any) -> Any:
        if any(model.of[id(each)].phonemes == "ccc" for each in encoded):
            raise ValueError("a broken step")
        return step(encoded, *rest)

    model.step = failing
    with held(client):
        bad = [say(client, sentence(text)) for text in ("abc", "ccc")]
    for ticket, _ in bad:
        with pytest.raises(StepFailed, match="a broken step"):
            result(ticket)
    assert result(say(client, sentence("abc"))[0])
    expect_empty(client)


def test_an_encoding_that_fails_fails_nobody_else_in_its_batch(client):
    model = voice(client)
    encode = model.encode

    def failing(sentences: Any) -> Any:
        if any(each.phonemes == "ccc" for each in sentences):
            raise ValueError("a broken batch")
        return encode(sentences)

    model.encode = failing
    with held(client):
        spoken = [say(client, sentence(text)) for text in ("abc", "ccc", "cba")]
    with pytest.raises(StepFailed, match="a broken batch"):
        result(spoken[1][0])
    for (ticket, heard), text in ((spoken[0], "abc"), (spoken[2], "cba")):
        assert result(ticket) == len(heard.pcm)
        np.testing.assert_allclose(heard.pcm.astype(int), expected(sentence(text)).astype(int), atol=1)
    expect_empty(client)


def test_sound_that_is_no_number_is_nobodys_but_its_own(client):
    codec = client.backend.loop.tts.runner._codec
    step = codec.step

    def failing(frames: Any, rows: Any, seen: Any, ends: Any, seeds: Any, state: Any) -> Any:
        sound = step(frames, rows, seen, ends, seeds, state)
        sound[seeds == 7] = float("nan")
        return sound

    codec.step = failing
    with held(client):
        spoken = [say(client, sentence(LONG, seed=seed)) for seed in (1, 7, 2)]
    with pytest.raises(StepFailed, match="no numbers"):
        result(spoken[1][0])
    assert spoken[1][1].pieces == []
    for (ticket, heard), seed in ((spoken[0], 1), (spoken[2], 2)):
        assert result(ticket) == len(heard.pcm)
        want = expected(sentence(LONG, seed=seed))
        np.testing.assert_allclose(heard.pcm.astype(int), want.astype(int), atol=1)
    expect_empty(client)


def test_whatever_comes_and_goes_nobody_is_left_asleep(client):
    """An engine that sleeps has nothing to do: of all that was let in while it worked, went to sleep and woke,
    everything is answered. With a wake-up lost the last one would wait for ever."""
    chance = random.Random(11)
    for _ in range(60):
        with contextlib.ExitStack() as together:
            if chance.random() < 0.3:
                together.enter_context(held(client))
            spoken = [
                say(client, sentence("ab" * chance.randint(1, 6)), priority=chance.choice(("interactive", "bulk")))
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


def test_who_waited_in_an_engine_that_is_gone_has_waited(client):
    """A sentence that comes again of one that died counts from when it was submitted, and so does `slack_ms`."""
    order: list[str] = []

    def saying(number: int, text: str, ago_s: float, slack_ms: int | None = None) -> TtsRequest:
        future: Future[int] = Future()
        future.add_done_callback(lambda _: order.append(text))
        since_ns = time.time_ns() - int(ago_s * 1e9)
        said = sentence(text)
        return TtsRequest(number, said, lambda _: None, "interactive", future, slack_ms, submitted_ns=since_ns)

    sayings = [saying(901, "aaaa", 0.0), saying(902, "bbbb", 9.0, 5_000), saying(903, "cccc", 1.0, 5_000)]
    on_loop(client, lambda loop: [loop.tts.submit_sentence(each) for each in sayings])
    for each in sayings:
        each.future.result(WAIT_S)
    assert [each.phonemes for each in voice(client).encodes[0]] == ["bbbb", "aaaa", "cccc"]


def test_who_hears_and_fails_hurts_nobody_else(client, caplog):
    def fails(sound: SentenceAudio) -> None:
        raise KeyError("the caller's own")

    other = say(client, sentence(LONG))
    ticket = client.synthesize(sentence(LONG), fails)
    with pytest.raises(StepFailed, match="who hears the sentence failed: KeyError"):
        ticket.future.result(WAIT_S)
    assert result(other[0]) == len(expected(sentence(LONG)))
    expect_empty(client)
    assert "who hears a sentence failed" in caplog.text


def test_full_is_said_or_waited_for():
    client = start(max_requests=2)
    with held(client):
        first, second = say(client, sentence("abc")), say(client, sentence("abc"))
        with pytest.raises(AtCapacity, match="2 requests") as full:
            client.synthesize(sentence("abc"), Heard())
        assert full.value.retry_after_ms > 0
        third: list[Any] = []
        waiter = threading.Thread(target=lambda: third.append(say(client, sentence("abc"), wait=True)))
        waiter.start()
    waiter.join(WAIT_S)
    for ticket, heard in (first, second, *third):
        assert result(ticket) == len(heard.pcm)
    expect_empty(client)
    client.close()


def test_closed_with_sentences_under_way():
    client = start(max_speaking_rows=2)
    spoken = [say(client, sentence(LONG, seed=number)) for number in range(5)]
    assert spoken[0][1].begun.wait(WAIT_S)
    client.close()
    for ticket, _ in spoken:
        if ticket.future.exception(WAIT_S) is not None:
            assert isinstance(ticket.future.exception(), EngineClosed)
    assert isinstance(spoken[-1][0].future.exception(WAIT_S), EngineClosed)
    with pytest.raises(EngineClosed):
        client.synthesize(sentence("abc"), Heard())
    assert client._requests == 0


def test_a_model_is_asked_for_what_it_does(client):
    pcm = np.zeros(16_000, np.float32)
    stream = partial(client.open_stream, live=True)
    for ask in (lambda: client.submit(pcm), client.open_vad_session, lambda: client.card, stream):
        with pytest.raises(WrongModel, match="tiny-voice speaks"):
            ask()
    hearing = start_hearing()
    for ask in (lambda: hearing.synthesize(sentence("abc"), Heard()), lambda: hearing.voice_card):
        with pytest.raises(WrongModel, match="tiny-random hears"):
            ask()
    hearing.close()
    expect_empty(client)


# --- cloned voices ---------------------------------------------------------------------------------------


def test_a_cloned_voice_is_there_with_its_file(tmp_path):
    client = start(voices_dir=str(tmp_path))
    with pytest.raises(UnknownVoice, match="low, high"):
        result(say(client, sentence("abc", voice="mine"))[0])
    (tmp_path / "mine.safetensors").write_bytes(b"\x32")
    first, plain = say(client, sentence("abc", voice="mine")), say(client, sentence("abc"))
    result(first[0])
    result(plain[0])
    assert (first[1].pcm != plain[1].pcm).any()
    (tmp_path / "mine.safetensors").write_bytes(b"\x64")
    taught_anew = say(client, sentence("abc", voice="mine"))
    result(taught_anew[0])
    assert (taught_anew[1].pcm != first[1].pcm).any()
    (tmp_path / "mine.safetensors").unlink()
    (tmp_path / "min.safetensors").write_bytes(b"")
    with pytest.raises(UnknownVoice, match=r"voices: low, high, min.*did you mean 'min'"):
        result(say(client, sentence("abc", voice="mine"))[0])
    client.close()


def test_a_voice_that_is_gone_before_its_turn_is_refused_and_nobody_else(tmp_path):
    client = start(voices_dir=str(tmp_path))
    for name in ("gone", "bad"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"\x32")
    with held(client):
        spoken = {name: say(client, sentence("abc", voice=name)) for name in ("low", "gone", "bad", "high")}
        unlink = (tmp_path / "gone.safetensors").unlink
        client.backend.loop.call(unlink)  # after they were let in, before they are encoded
        client.backend.loop.call(lambda: voice(client).broken.add("bad"))
    with pytest.raises(UnknownVoice, match="no voice 'gone'"):
        result(spoken["gone"][0])
    with pytest.raises(WeightsCorrupt, match="bad"):
        result(spoken["bad"][0])
    for name in ("low", "high"):
        assert result(spoken[name][0]) == len(spoken[name][1].pcm)
    client.close()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "", ".", "x" * 200, "mine\0"])
def test_a_voice_is_no_path(tmp_path, name):
    (tmp_path / "secret.safetensors").write_bytes(b"\x32")
    (tmp_path / "voices").mkdir()
    client = start(voices_dir=str(tmp_path / "voices"))
    with pytest.raises(UnknownVoice):
        result(say(client, sentence("abc", voice=name))[0])
    assert voice(client).cloned == {}
    client.close()


def test_memory_bounds_how_many_are_said_at_once():
    made = parts()
    one = 4 * (24 + 3 * 81)
    client = start(lambda: made, kv_bytes=3 * one + 1, max_speaking_rows=64)
    assert client.describe()["rows"] == 3
    for ticket, heard in [say(client, sentence("abc")) for _ in range(9)]:
        assert result(ticket) == len(heard.pcm)
    client.close()
