"""Text in, sound out: in order, at the listener's pace, with the times of its words; and nothing left of it."""

from __future__ import annotations

import importlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asr_serve.audio.resample import Resampler
from asr_serve.engine.client import EngineClient
from asr_serve.errors import (
    AtCapacity,
    Cancelled,
    EmptyText,
    EngineClosed,
    MalformedSsml,
    OptionError,
    TextTooLong,
    UnknownVoice,
    UnsupportedScript,
    WrongModel,
)
from asr_serve.models.registry import tts_card
from asr_serve.pipelines.tts import speak as pipeline
from asr_serve.pipelines.tts.frontend import frontend_for
from asr_serve.pipelines.tts.sentences import SILENCE_CHUNK_SAMPLES, SilencePart, trailing_silence_samples
from asr_serve.pipelines.tts.speak import AudioChunk, SpeakCanceller, SpeakOptions, TtsSession, speak
from asr_serve.text.g2p import phoneme_alphabets
from asr_serve.text.g2p.frontend import PAUSE_MS
from asr_serve.types import Sentence

pytest.importorskip("hibari", reason="hibari-tts reads English: pip install 'asr-serve[voice]'")

WAIT_S = 60.0
ENGINE_TESTS = Path(__file__).parents[1] / "engine"
TEXT = "Hello there. It costs five dollars, they say. Goodbye!"
SENTENCES = ["Hello there.", "It costs five dollars, they say.", "Goodbye!"]
GAP_MS = PAUSE_MS["sentence"]


class Voice:
    """The small random voice of the engine's tests, and all that was asked of it."""

    def __init__(self, made: Any, on_loop: Callable[..., Any], **settings: Any) -> None:
        self.made, self._on_loop = made, on_loop
        self.client: EngineClient = made.start(made.parts, **settings)
        self.card, self.rate_hz = made.CARD, made.RATE_HZ
        self.front = frontend_for(self.card)
        self.asked: list[Sentence] = []
        self.within: list[int | None] = []
        say = self.client.synthesize

        def asking(sentence: Sentence, hear: Any, **more: Any) -> Any:
            ticket = say(sentence, hear, **more)
            self.asked.append(sentence)
            self.within.append(more.get("within_ms"))
            return ticket

        self.client.synthesize = asking  # type: ignore[method-assign]

    def speak(self, text: Any, stop: SpeakCanceller | None = None, **options: Any) -> Iterator[AudioChunk]:
        return speak(self.client, self.front, text, SpeakOptions(**options), stop)

    def expected(self) -> np.ndarray:
        """Every sentence that was asked for, each said as a whole, and the silence between, of which what is quiet
        at a sentence's end is a part."""
        parts = []
        for sentence in self.asked:
            said = self.made.expected(sentence)
            parts += [said, np.zeros(GAP_MS * self.rate_hz // 1_000 - trailing_silence_samples(said), np.int16)]
        return np.concatenate(parts[:-1])

    def expect_empty(self) -> None:
        def look(loop: Any) -> None:
            loop.check()
            assert loop.tts.runner.used == 0

        self._on_loop(self.client, look)
        assert self.client.describe()["requests"] == 0


@pytest.fixture(scope="module")
def begin() -> Iterator[Callable[..., Voice]]:
    """Voices that know all phonemes."""
    begun: list[Voice] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ENGINE_TESTS)
        made = importlib.import_module("tiny_voice")
        on_loop = importlib.import_module("tiny_moonshine").on_loop
        patch.setattr(made, "ALPHABET", "".join(sorted(phoneme_alphabets.alphabet_letters("misaki"))))

        def make(**settings: Any) -> Voice:
            begun.append(Voice(made, on_loop, **settings))
            return begun[-1]

        yield make
        for voice in begun:
            voice.client.close()


@pytest.fixture
def voice(begin: Callable[..., Voice]) -> Iterator[Voice]:
    made = begin()
    yield made
    made.expect_empty()
    made.client.close()


def joined(pieces: list[AudioChunk]) -> np.ndarray:
    """All samples; and no piece is missing, comes twice or tells a wrong place."""
    at = 0
    for piece in pieces:
        assert piece.start_samples == at
        assert piece.pcm.dtype == np.int16
        at += len(piece.pcm)
    return np.concatenate([piece.pcm for piece in pieces])


class Driver:
    """Takes as a server does: when it is woken."""

    def __init__(self, voice: Voice, text: str | None = None, **options: Any) -> None:
        self.awake = threading.Event()
        self.speaking = TtsSession(voice.client, voice.front, SpeakOptions(**options), self.awake.set, text)
        self.pieces: list[AudioChunk] = []

    def until(self, enough: Callable[[], bool]) -> None:
        while not enough():
            self.awake.clear()
            taken = self.speaking.take_audio()
            self.pieces += taken
            if not taken and not enough():
                assert self.awake.wait(WAIT_S)

    def finish(self) -> list[AudioChunk]:
        self.until(lambda: self.speaking.done)
        return self.pieces


# --- what comes -------------------------------------------------------------------------------------------


def test_sentences_come_in_order_with_silence_between(voice: Voice) -> None:
    pieces = list(voice.speak(TEXT))
    assert [piece.sentence for piece in pieces if piece.sentence] == SENTENCES
    assert np.array_equal(joined(pieces), voice.expected())


def test_words_lie_in_their_sentence(voice: Voice) -> None:
    pieces = list(voice.speak(TEXT))
    total = len(joined(pieces))
    begins = [piece.start_samples for piece in pieces if piece.sentence]
    words = [word for piece in pieces for word in piece.words]
    assert " ".join(word.text for word in words) == TEXT
    for begin, end, piece in zip(begins, [*begins[1:], total], [p for p in pieces if p.words], strict=True):
        assert begin == piece.words[0].start_samples
        assert piece.words[-1].end_samples <= end
    for word, after in itertools.pairwise(words):
        assert word.start_samples < word.end_samples <= after.start_samples


def test_a_paragraph_and_a_break_are_as_long_as_they_should_be(voice: Voice) -> None:
    pieces = list(voice.speak("One.\n\nTwo."))
    first, second = (len(voice.made.expected(sentence)) for sentence in voice.asked)
    assert len(joined(pieces)) == first + second + PAUSE_MS["paragraph"] * voice.rate_hz // 1_000
    voice.asked.clear()
    pieces = list(voice.speak('<speak>One.<break time="2s"/>Two.</speak>', ssml=True))
    first, second = (len(voice.made.expected(sentence)) for sentence in voice.asked)
    assert len(joined(pieces)) == first + second + 2 * voice.rate_hz
    assert max(len(piece.pcm) for piece in pieces if not piece.pcm.any()) <= SILENCE_CHUNK_SAMPLES


@pytest.mark.parametrize("speed", [0.5, 4.0])
def test_silence_between_sentences_goes_with_the_speed_unless_it_was_asked_for(voice: Voice, speed: float) -> None:
    text = '<speak><p>One.</p><p>Two.</p><break time="1s"/>Three.</speak>'
    length = len(joined(list(voice.speak(text, ssml=True, speed=speed))))
    said = sum(len(voice.made.expected(sentence)) for sentence in voice.asked)
    assert length - said == int(PAUSE_MS["paragraph"] / speed + 1_000) * voice.rate_hz // 1_000


def test_phonemes_are_said_as_they_are(voice: Voice) -> None:
    list(voice.speak("həlˈO wˈɜɹld.", phonemes=True))
    assert [sentence.phonemes.strip() for sentence in voice.asked] == ["həlˈO wˈɜɹld."]


def test_manners_of_the_caller_and_of_the_text_add_up(voice: Voice) -> None:
    text = '<speak><prosody rate="200%" pitch="+2st">Fast.</prosody></speak>'
    list(voice.speak(text, ssml=True, speed=1.5, pitch=1, energy=-3, voice="high"))
    [sentence] = voice.asked
    assert sentence.voice == "high"
    [stretch] = sentence.spans
    assert (stretch.speed, stretch.pitch, stretch.energy) == (3.0, 3.0, -3.0)
    voice.asked.clear()
    list(voice.speak(text, ssml=True, speed=4, pitch=12))
    assert (voice.asked[0].spans[0].speed, voice.asked[0].spans[0].pitch) == (4.0, 12.0)


def test_a_seed_repeats_itself_and_no_sentence_repeats_another(voice: Voice) -> None:
    once, again = (joined(list(voice.speak("Yes. Yes.", seed=7))) for _ in range(2))
    other = joined(list(voice.speak("Yes. Yes.", seed=8)))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, other)
    assert len({sentence.seed for sentence in voice.asked[:2]}) == 2


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 22_050])
def test_another_rate_is_that_of_one_stream(voice: Voice, rate_hz: int) -> None:
    pieces = list(voice.speak(TEXT, rate_hz=rate_hz))
    whole = voice.expected()
    resampler = Resampler(voice.rate_hz, rate_hz)
    expected = np.concatenate([resampler.resample(whole / np.float32(32_768)), resampler.finish()])
    found = joined(pieces)
    assert len(found) == len(expected)
    assert np.abs(found / 32_768 - np.clip(expected, -1, 32_767 / 32_768)).max() < 1 / 32_000
    words = [word for piece in pieces for word in piece.words]
    assert words[-1].end_samples <= len(found)
    assert words[-1].end_samples > 0.9 * len(found)


def test_a_mark_changes_the_sound_and_not_its_length(voice: Voice) -> None:
    plain, marked = (joined(list(voice.speak(TEXT, watermark=mark))) for mark in (False, True))
    assert len(plain) == len(marked)
    assert not np.array_equal(plain, marked)
    assert 20 * np.log10(plain.std() / (marked.astype(float) - plain).std()) > 20


# --- pace -------------------------------------------------------------------------------------------------


def test_the_next_sentence_goes_in_when_little_is_left(voice: Voice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "TARGET_BUFFER_S", 0.1)
    driver = Driver(voice, "Hello there, my friend. " * 6)
    taken, begun = 0, 0
    length = len(voice.made.expected(voice.asked[0]))
    while not driver.speaking.done:
        driver.awake.clear()
        pieces = driver.speaking.take_audio(1)
        if not pieces and not driver.speaking.done:
            assert driver.awake.wait(WAIT_S)
        for piece in pieces:
            taken += len(piece.pcm)
            begun += bool(piece.sentence)
        # The one that sounds, and one more.
        assert len(voice.asked) <= begun + 1
        if len(voice.asked) == begun + 1 and begun == 1:
            assert taken > length - 0.1 * voice.rate_hz - 1
    assert len(voice.asked) == 6
    assert voice.within[0] is None


def test_who_took_much_is_not_owed_the_next_sentence_at_once(voice: Voice) -> None:
    """Sound that was taken is played, not thrown away: a text that is read as fast as it comes leaves the engine
    to those who hear nothing yet."""
    began_s = time.monotonic()
    pieces = Driver(voice, "Hello there, my friend. " * 6).finish()
    spent_ms = 1_000 * (time.monotonic() - began_s)
    starts_ms = [1_000 * piece.start_samples / voice.rate_hz for piece in pieces if piece.sentence]
    assert voice.within[0] is None
    for within, start_ms in zip(voice.within[1:], starts_ms[1:], strict=True):
        assert within is not None
        assert start_ms - GAP_MS - spent_ms - 1 <= within <= start_ms + 1


def test_who_does_not_take_keeps_nobody_busy(voice: Voice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "TARGET_BUFFER_S", 0.1)
    driver = Driver(voice, TEXT)
    driver.speaking.take_audio(1)
    # The first sentence is made to its end, and there it rests.
    while voice.client.describe()["requests"]:
        driver.awake.wait(0.01)
    assert len(voice.asked) == 1
    driver.finish()
    assert len(voice.asked) == 3


def test_silence_counts_as_sound_that_is_left(voice: Voice) -> None:
    driver = Driver(voice, '<speak>One.<break time="5s"/>Two.</speak>', ssml=True)
    taken = 0
    while len(voice.asked) < 2:
        driver.awake.clear()
        pieces = driver.speaking.take_audio(1)
        taken += sum(len(piece.pcm) for piece in pieces)
        if not pieces:
            assert driver.awake.wait(WAIT_S)
    first = len(voice.made.expected(voice.asked[0]))
    assert taken >= first + (5 - pipeline.TARGET_BUFFER_S) * voice.rate_hz - SILENCE_CHUNK_SAMPLES
    driver.finish()


def test_a_speech_that_was_let_in_goes_on_where_the_engine_is_full(begin: Callable[..., Voice]) -> None:
    voice = begin(max_requests=1)
    first = Driver(voice, "Hello there, my friend. " * 6)
    with pytest.raises(AtCapacity):
        TtsSession(voice.client, voice.front, SpeakOptions(), lambda: None, TEXT)
    assert np.array_equal(joined(first.finish()), voice.expected())
    assert len(voice.asked) == 6
    voice.expect_empty()


# --- text that comes --------------------------------------------------------------------------------------


def test_live_text_sounds_before_it_ends(voice: Voice) -> None:
    driver = Driver(voice)
    for letter in "Hello there. It costs":
        driver.speaking.append_text(letter)
    driver.until(lambda: any(piece.sentence for piece in driver.pieces))
    assert not driver.speaking.done
    for letter in " five dollars. ":
        driver.speaking.append_text(letter)
    driver.speaking.end()
    driver.speaking.end()  # idempotent
    pieces = driver.finish()
    said = " ".join(piece.sentence for piece in pieces if piece.sentence)
    assert said == "Hello there. It costs five dollars."
    assert driver.speaking.take_audio() == []


def test_an_iterator_is_read_while_it_is_spoken(voice: Voice) -> None:
    heard = threading.Event()

    def model() -> Iterator[str]:
        yield from ("Hel", "lo ", "there. ", "And ")
        assert heard.wait(WAIT_S)  # what was written so far sounds before the rest is
        yield from ("goodbye", ".")

    said = []
    for piece in voice.speak(model()):
        heard.set()
        said.append(piece.sentence)
    assert " ".join(filter(None, said)) == "Hello there. And goodbye."


def test_flush_says_what_is_there_and_more_may_follow(voice: Voice) -> None:
    driver = Driver(voice)
    driver.speaking.append_text("Wait a moment")
    driver.until(lambda: driver.speaking.idle or bool(driver.pieces))
    assert not voice.asked
    driver.speaking.flush()
    driver.until(lambda: driver.speaking.idle)
    assert [sentence.phonemes for sentence in voice.asked]
    assert joined(driver.pieces).any()
    before = len(joined(driver.pieces))
    driver.speaking.append_text("Here it is.")
    driver.speaking.end()
    pieces = driver.finish()
    assert [piece.sentence for piece in pieces if piece.sentence] == ["Wait a moment", "Here it is."]
    second = next(piece.start_samples for piece in pieces if piece.sentence == "Here it is.")
    assert second == before + GAP_MS * voice.rate_hz // 1_000


def test_live_text_of_nothing_is_no_speech(voice: Voice) -> None:
    driver = Driver(voice)
    driver.speaking.append_text("  \n ")
    driver.speaking.end()
    assert driver.finish() == []


def test_an_endless_text_is_read_no_faster_than_it_is_spoken(voice: Voice) -> None:
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield "Hello there. "

    pieces = voice.speak(endless())
    for _ in range(5):
        next(pieces)
    assert read <= 2 * pipeline.FULL_PASSAGES
    pieces.close()  # type: ignore[attr-defined]


def test_what_the_text_raises_comes_after_what_was_said(voice: Voice) -> None:
    class Broken(Exception):
        pass

    def text() -> Iterator[str]:
        yield "Hello there. "
        yield "More. "
        raise Broken("the model went away")

    said: list[str] = []
    with pytest.raises(Broken, match="went away"):
        said.extend(piece.sentence for piece in voice.speak(text()))
    assert " ".join(filter(None, said)) == "Hello there. More."


def test_a_piece_that_cannot_be_read_is_refused_and_the_rest_goes_on(voice: Voice) -> None:
    driver = Driver(voice)
    driver.speaking.append_text("Hello there. ")
    with pytest.raises(UnsupportedScript):
        driver.speaking.append_text("日本 ")
    driver.speaking.append_text("Goodbye. ")
    driver.speaking.end()
    assert " ".join(filter(None, (piece.sentence for piece in driver.finish()))) == "Hello there. Goodbye."


def test_too_much_that_waits_is_refused(voice: Voice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MAX_PASSAGES", 4)
    monkeypatch.setattr(pipeline, "FULL_PASSAGES", 2)
    driver = Driver(voice)
    driver.speaking.append_text("Hello there, this is quite a long sentence. " * 20)
    assert driver.speaking.full
    with pytest.raises(TextTooLong, match="wait to be said"):
        driver.speaking.append_text("More. ")
    driver.speaking.close()


# --- its end ----------------------------------------------------------------------------------------------


def test_closing_the_generator_leaves_nothing(voice: Voice) -> None:
    pieces = voice.speak("Hello there, my friend. " * 50)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    voice.expect_empty()


def test_stop_ends_whoever_waits(voice: Voice) -> None:
    waiting, over = threading.Event(), threading.Event()

    def silent() -> Iterator[str]:
        waiting.set()
        over.wait(WAIT_S)
        yield ""

    stop = SpeakCanceller()
    threading.Thread(target=lambda: (waiting.wait(WAIT_S), stop.cancel()), daemon=True).start()
    with pytest.raises(Cancelled):
        list(voice.speak(silent(), stop))
    over.set()
    with pytest.raises(Cancelled):
        list(voice.speak(TEXT, stop))


def test_close_from_another_thread_and_twice(voice: Voice) -> None:
    driver = Driver(voice, "Hello there, my friend. " * 50)
    driver.until(lambda: bool(driver.pieces))
    thread = threading.Thread(target=driver.speaking.close)
    thread.start()
    thread.join(WAIT_S)
    driver.speaking.close()
    with pytest.raises(Cancelled):
        driver.speaking.take_audio()
    with pytest.raises(Cancelled):
        driver.speaking.append_text("more")
    voice.expect_empty()


def test_an_engine_that_closes_ends_the_speech(begin: Callable[..., Voice]) -> None:
    voice = begin()
    driver = Driver(voice, "Hello there, my friend. " * 50)
    driver.until(lambda: bool(driver.pieces))
    voice.client.close()
    with pytest.raises(EngineClosed):
        driver.finish()
    with pytest.raises(EngineClosed):
        list(voice.speak(TEXT))


# --- what cannot be ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options", "error"),
    [
        ("", {}, EmptyText),
        ("  \n", {}, EmptyText),
        ("🎉🎉", {}, EmptyText),
        ("Привет", {}, UnsupportedScript),
        ("x" * 100_001, {}, TextTooLong),
        ("<speak>One", {"ssml": True}, MalformedSsml),
        ("<speak><dance>One</dance></speak>", {"ssml": True}, MalformedSsml),
        ("Hello", {"voice": "nobody"}, UnknownVoice),
    ],
)
def test_what_cannot_be_said(voice: Voice, text: str, options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        list(voice.speak(text, **options))


def test_a_later_paragraph_that_cannot_be_read_is_told_before_anything_sounds(voice: Voice) -> None:
    with pytest.raises(UnsupportedScript):
        Driver(voice, "Hello there. " * 200 + "日本")
    assert not voice.asked


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"speed": 5}, "speed=5.*0.25 to 4"),
        ({"speed": float("nan")}, "speed=nan"),
        ({"pitch": -13}, "pitch"),
        ({"energy": "loud"}, "energy=loud"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"rate_hz": 10}, "rate_hz=10"),
        ({"priority": "now"}, "unknown priority"),
        ({"ssml": True, "phonemes": True}, "one of them"),
        ({"sped": 1}, "did you mean 'speed'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        SpeakOptions.of(options)


def test_live_text_is_plain(voice: Voice) -> None:
    with pytest.raises(OptionError, match="plain text"):
        Driver(voice, ssml=True)


def test_a_model_that_hears_does_not_speak(begin: Callable[..., Voice]) -> None:
    voice = begin()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ENGINE_TESTS)
        hearing = importlib.import_module("tiny_moonshine").start()
    with pytest.raises(WrongModel):
        list(speak(hearing, voice.front, TEXT))
    hearing.close()


def test_which_language_a_voice_reads() -> None:
    ours, kokoro = tts_card("fastpitch-en"), tts_card("kokoro")
    assert [ours.language(name) for name in (None, "heart", "emma", "my-voice")] == ["en"] * 4
    assert [kokoro.language(name) for name in ("bf_emma", "af_heart", "bm_lewis")] == ["en-gb", "en", "en-gb"]
    assert {name[3:] for name in kokoro.british} < set(ours.voices)
    assert frontend_for(kokoro, "bf_emma").british
    assert not frontend_for(kokoro, "bf_emma", "en").british
    assert frontend_for(kokoro, "af_heart", "en-gb").british
    assert not frontend_for(ours, "emma").british, "which was taught by a British voice, in American phonemes"
    with pytest.raises(OptionError, match="unknown language 'en-gb'"):
        frontend_for(ours, "emma", "en-gb")


def test_silence_counts_what_was_quiet_before_it() -> None:
    loud, quiet = np.array([0, 900, -64, 3], np.int16), np.array([1, -64], np.int16)
    assert [trailing_silence_samples(each) for each in (loud, quiet, loud[:0])] == [2, 2, 0]
    between, asked, shorter = SilencePart(10), SilencePart(10, asked=True), SilencePart(10)
    for silence, before in ((between, 4), (asked, 4), (shorter, 40)):
        silence.begin(before)
        silence.begin(before)
    assert (between.remaining_samples, asked.remaining_samples, shorter.finished) == (6, 10, True)
