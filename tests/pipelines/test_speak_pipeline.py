"""Text in, audio out: in order, at the listener's pace, with word times; and nothing left in the engine."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tiny_moonshine
import tiny_voice
from tiny_moonshine import on_loop

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

pytest.importorskip("hibari", reason="hibari-tts reads English: pip install 'hibari-tts[fast]'")

WAIT_S = 60.0
TEXT = "Hello there. It costs five dollars, they say. Goodbye!"
SENTENCES = ["Hello there.", "It costs five dollars, they say.", "Goodbye!"]
GAP_MS = PAUSE_MS["sentence"]


class RecordedVoice:
    """The small random voice of the engine's tests, and the sentences submitted to it."""

    def __init__(self, **settings: Any) -> None:
        self.client: EngineClient = tiny_voice.start(**settings)
        self.card, self.rate_hz = tiny_voice.CARD, tiny_voice.RATE_HZ
        self.front = frontend_for(self.card)
        self.sentences: list[Sentence] = []
        self.within: list[int | None] = []

        submit = self.client.synthesize

        def record(sentence: Sentence, receive: Any, **more: Any) -> Any:
            ticket = submit(sentence, receive, **more)  # a sentence that is refused is not recorded
            self.sentences.append(sentence)
            self.within.append(more.get("slack_ms"))
            return ticket

        self.client.synthesize = record  # type: ignore[method-assign]

    def speak(self, text: Any, stop: SpeakCanceller | None = None, **options: Any) -> Iterator[AudioChunk]:
        return speak(self.client, self.front, text, SpeakOptions(**options), stop)

    def expected(self) -> np.ndarray:
        """Every sentence that was submitted, each synthesized as a whole, and the silence between, of which the
        quiet end of a sentence is a part."""
        parts = []
        for sentence in self.sentences:
            pcm = tiny_voice.expected(sentence)
            parts += [pcm, np.zeros(GAP_MS * self.rate_hz // 1_000 - trailing_silence_samples(pcm), np.int16)]
        return np.concatenate(parts[:-1])

    def expect_empty(self) -> None:
        def look(loop: Any) -> None:
            loop.check()
            assert loop.tts.runner.used == 0

        on_loop(self.client, look)
        assert self.client.describe()["requests"] == 0


@pytest.fixture(scope="module")
def begin() -> Iterator[Callable[..., RecordedVoice]]:
    """Starts voices that know all phonemes."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as started:
        patch.setattr(tiny_voice, "ALPHABET", "".join(sorted(phoneme_alphabets.alphabet_letters("misaki"))))

        def start(**settings: Any) -> RecordedVoice:
            voice = RecordedVoice(**settings)
            started.callback(voice.client.close)
            return voice

        yield start


@pytest.fixture
def voice(begin: Callable[..., RecordedVoice]) -> Iterator[RecordedVoice]:
    made = begin()
    yield made
    made.expect_empty()
    made.client.close()


def joined(pieces: list[AudioChunk]) -> np.ndarray:
    """All samples; no piece is missing, repeated or out of place."""
    at = 0
    for piece in pieces:
        assert piece.start_samples == at
        assert piece.pcm.dtype == np.int16
        at += len(piece.pcm)
    return np.concatenate([piece.pcm for piece in pieces])


class SessionDriver:
    """Takes audio as a server does: when it is woken."""

    def __init__(self, voice: RecordedVoice, text: str | None = None, **options: Any) -> None:
        self.awake = threading.Event()
        self.session = TtsSession(voice.client, voice.front, SpeakOptions(**options), self.awake.set, text)
        self.pieces: list[AudioChunk] = []

    def until(self, enough: Callable[[], bool]) -> None:
        while not enough():
            self.awake.clear()
            taken = self.session.take_audio()
            self.pieces += taken
            if not taken and not enough():
                assert self.awake.wait(WAIT_S)

    def finish(self) -> list[AudioChunk]:
        self.until(lambda: self.session.done)
        return self.pieces


# --- audio -------------------------------------------------------------------------------------------


def test_sentences_come_in_order_with_silence_between(voice: RecordedVoice) -> None:
    pieces = list(voice.speak(TEXT))
    assert [piece.sentence for piece in pieces if piece.sentence] == SENTENCES
    assert np.array_equal(joined(pieces), voice.expected())


def test_word_times_lie_in_their_sentence(voice: RecordedVoice) -> None:
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


def test_a_paragraph_and_a_break_are_as_long_as_they_should_be(voice: RecordedVoice) -> None:
    ssml = '<speak>One.<break time="2s"/>Two.</speak>'
    for text, is_ssml, pause_ms in (("One.\n\nTwo.", False, PAUSE_MS["paragraph"]), (ssml, True, 2_000)):
        voice.sentences.clear()
        pieces = list(voice.speak(text, ssml=is_ssml))
        first, second = (len(tiny_voice.expected(sentence)) for sentence in voice.sentences)
        assert len(joined(pieces)) == first + second + pause_ms * voice.rate_hz // 1_000
    assert max(len(piece.pcm) for piece in pieces if not piece.pcm.any()) <= SILENCE_CHUNK_SAMPLES


@pytest.mark.parametrize("speed", [0.5, 4.0])
def test_pauses_scale_with_the_speed_unless_requested(voice: RecordedVoice, speed: float) -> None:
    text = '<speak><p>One.</p><p>Two.</p><break time="1s"/>Three.</speak>'
    length = len(joined(list(voice.speak(text, ssml=True, speed=speed))))
    text_so_far = sum(len(tiny_voice.expected(sentence)) for sentence in voice.sentences)
    assert length - text_so_far == int(PAUSE_MS["paragraph"] / speed + 1_000) * voice.rate_hz // 1_000


def test_phonemes_are_taken_as_they_are(voice: RecordedVoice) -> None:
    list(voice.speak("həlˈO wˈɜɹld.", phonemes=True))
    assert [sentence.phonemes.strip() for sentence in voice.sentences] == ["həlˈO wˈɜɹld."]


def test_prosody_of_options_and_ssml_adds_up(voice: RecordedVoice) -> None:
    text = '<speak><prosody rate="200%" pitch="+2st">Fast.</prosody></speak>'
    list(voice.speak(text, ssml=True, speed=1.5, pitch=1, energy=-3, voice="high"))
    [sentence] = voice.sentences
    assert sentence.voice == "high"
    [stretch] = sentence.spans
    assert (stretch.speed, stretch.pitch, stretch.energy) == (3.0, 3.0, -3.0)
    voice.sentences.clear()
    list(voice.speak(text, ssml=True, speed=4, pitch=12))
    assert (voice.sentences[0].spans[0].speed, voice.sentences[0].spans[0].pitch) == (4.0, 12.0)


def test_a_seed_repeats_its_audio(voice: RecordedVoice) -> None:
    once, again = (joined(list(voice.speak("Yes. Yes.", seed=7))) for _ in range(2))
    other = joined(list(voice.speak("Yes. Yes.", seed=8)))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, other)
    assert len({sentence.seed for sentence in voice.sentences[:2]}) == 2


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 22_050])
def test_resampling_is_that_of_one_stream(voice: RecordedVoice, rate_hz: int) -> None:
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


def test_a_watermark_keeps_the_length(voice: RecordedVoice) -> None:
    plain, marked = (joined(list(voice.speak(TEXT, watermark=mark))) for mark in (False, True))
    assert len(plain) == len(marked)
    assert not np.array_equal(plain, marked)
    assert 20 * np.log10(plain.std() / (marked.astype(float) - plain).std()) > 20


# --- pace -------------------------------------------------------------------------------------------------


def test_the_next_sentence_is_submitted_when_little_is_buffered(
    voice: RecordedVoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "TARGET_BUFFER_S", 0.1)
    driver = SessionDriver(voice, "Hello there, my friend. " * 6)
    taken, begun = 0, 0
    length = len(tiny_voice.expected(voice.sentences[0]))
    while not driver.session.done:
        driver.awake.clear()
        pieces = driver.session.take_audio(1)
        if not pieces and not driver.session.done:
            assert driver.awake.wait(WAIT_S)
        for piece in pieces:
            taken += len(piece.pcm)
            begun += bool(piece.sentence)
        # The one that sounds, and one more.
        assert len(voice.sentences) <= begun + 1
        if len(voice.sentences) == begun + 1 and begun == 1:
            assert taken > length - 0.1 * voice.rate_hz - 1
    assert len(voice.sentences) == 6
    assert voice.within[0] is None


def test_the_deadline_of_a_sentence_follows_what_was_taken(voice: RecordedVoice) -> None:
    """Sound that was taken is played, not thrown away: a text that is read as fast as it comes leaves the engine
    to those who hear nothing yet."""
    began_s = time.monotonic()
    pieces = SessionDriver(voice, "Hello there, my friend. " * 6).finish()
    spent_ms = 1_000 * (time.monotonic() - began_s)
    starts_ms = [1_000 * piece.start_samples / voice.rate_hz for piece in pieces if piece.sentence]
    assert voice.within[0] is None
    for within, start_ms in zip(voice.within[1:], starts_ms[1:], strict=True):
        assert within is not None
        assert start_ms - GAP_MS - spent_ms - 1 <= within <= start_ms + 1


def test_nothing_is_synthesized_while_nothing_is_taken(voice: RecordedVoice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "TARGET_BUFFER_S", 0.1)
    driver = SessionDriver(voice, TEXT)
    driver.session.take_audio(1)
    # The first sentence is made to its end, and there it rests.
    while voice.client.describe()["requests"]:
        driver.awake.wait(0.01)
    assert len(voice.sentences) == 1
    driver.finish()
    assert len(voice.sentences) == 3


def test_silence_counts_as_buffered_audio(voice: RecordedVoice) -> None:
    driver = SessionDriver(voice, '<speak>One.<break time="5s"/>Two.</speak>', ssml=True)
    taken = 0
    while len(voice.sentences) < 2:
        driver.awake.clear()
        pieces = driver.session.take_audio(1)
        taken += sum(len(piece.pcm) for piece in pieces)
        if not pieces:
            assert driver.awake.wait(WAIT_S)
    first = len(tiny_voice.expected(voice.sentences[0]))
    assert taken >= first + (5 - pipeline.TARGET_BUFFER_S) * voice.rate_hz - SILENCE_CHUNK_SAMPLES
    driver.finish()


def test_an_admitted_session_goes_on_in_a_full_engine(begin: Callable[..., RecordedVoice]) -> None:
    voice = begin(max_requests=1)
    first = SessionDriver(voice, "Hello there, my friend. " * 6)
    with pytest.raises(AtCapacity):
        TtsSession(voice.client, voice.front, SpeakOptions(), lambda: None, TEXT)
    assert np.array_equal(joined(first.finish()), voice.expected())
    assert len(voice.sentences) == 6
    voice.expect_empty()


# --- live text --------------------------------------------------------------------------------------


def test_live_text_is_spoken_before_it_ends(voice: RecordedVoice) -> None:
    driver = SessionDriver(voice)
    for letter in "Hello there. It costs":
        driver.session.append_text(letter)
    driver.until(lambda: any(piece.sentence for piece in driver.pieces))
    assert not driver.session.done
    for letter in " five dollars. ":
        driver.session.append_text(letter)
    driver.session.end()
    driver.session.end()  # idempotent
    pieces = driver.finish()
    text_so_far = " ".join(piece.sentence for piece in pieces if piece.sentence)
    assert text_so_far == "Hello there. It costs five dollars."
    assert driver.session.take_audio() == []


def test_an_iterator_is_read_while_it_is_spoken(voice: RecordedVoice) -> None:
    received = threading.Event()

    def model() -> Iterator[str]:
        yield from ("Hel", "lo ", "there. ", "And ")
        assert received.wait(WAIT_S)  # what was written so far sounds before the rest is
        yield from ("goodbye", ".")

    sentences = []
    for piece in voice.speak(model()):
        received.set()
        sentences.append(piece.sentence)
    assert " ".join(filter(None, sentences)) == "Hello there. And goodbye."


def test_flush_speaks_what_is_there(voice: RecordedVoice) -> None:
    driver = SessionDriver(voice)
    driver.session.append_text("Wait a moment")
    driver.until(lambda: driver.session.idle or bool(driver.pieces))
    assert not voice.sentences
    driver.session.flush()
    driver.until(lambda: driver.session.idle)
    assert [sentence.phonemes for sentence in voice.sentences]
    assert joined(driver.pieces).any()
    before = len(joined(driver.pieces))
    driver.session.append_text("Here it is.")
    driver.session.end()
    pieces = driver.finish()
    assert [piece.sentence for piece in pieces if piece.sentence] == ["Wait a moment", "Here it is."]
    second = next(piece.start_samples for piece in pieces if piece.sentence == "Here it is.")
    assert second == before + GAP_MS * voice.rate_hz // 1_000


def test_blank_live_text_gives_no_audio(voice: RecordedVoice) -> None:
    driver = SessionDriver(voice)
    driver.session.append_text("  \n ")
    driver.session.end()
    assert driver.finish() == []


def test_an_endless_text_is_read_no_faster_than_it_is_spoken(voice: RecordedVoice) -> None:
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


def test_an_error_of_the_text_iterator_comes_after_its_audio(voice: RecordedVoice) -> None:
    class Broken(Exception):
        pass

    def text() -> Iterator[str]:
        yield "Hello there. "
        yield "More. "
        raise Broken("the model went away")

    text_so_far: list[str] = []
    with pytest.raises(Broken, match="went away"):
        text_so_far.extend(piece.sentence for piece in voice.speak(text()))
    assert " ".join(filter(None, text_so_far)) == "Hello there. More."


def test_unreadable_live_text_is_refused_and_the_rest_goes_on(voice: RecordedVoice) -> None:
    driver = SessionDriver(voice)
    driver.session.append_text("Hello there. ")
    with pytest.raises(UnsupportedScript):
        driver.session.append_text("日本 ")
    driver.session.append_text("Goodbye. ")
    driver.session.end()
    assert " ".join(filter(None, (piece.sentence for piece in driver.finish()))) == "Hello there. Goodbye."


def test_too_much_waiting_text_is_refused(voice: RecordedVoice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MAX_PASSAGES", 4)
    monkeypatch.setattr(pipeline, "FULL_PASSAGES", 2)
    driver = SessionDriver(voice)
    driver.session.append_text("Hello there, this is quite a long sentence. " * 20)
    assert driver.session.full
    with pytest.raises(TextTooLong, match="wait for synthesis"):
        driver.session.append_text("More. ")
    driver.session.close()


# --- the end ----------------------------------------------------------------------------------------------


def test_closing_the_generator_leaves_nothing(voice: RecordedVoice) -> None:
    pieces = voice.speak("Hello there, my friend. " * 50)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    voice.expect_empty()


def test_cancel_ends_a_waiting_reader(voice: RecordedVoice) -> None:
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


def test_close_from_another_thread_and_twice(voice: RecordedVoice) -> None:
    driver = SessionDriver(voice, "Hello there, my friend. " * 50)
    driver.until(lambda: bool(driver.pieces))
    thread = threading.Thread(target=driver.session.close)
    thread.start()
    thread.join(WAIT_S)
    driver.session.close()
    with pytest.raises(Cancelled):
        driver.session.take_audio()
    with pytest.raises(Cancelled):
        driver.session.append_text("more")
    voice.expect_empty()


def test_a_closed_engine_ends_the_session(begin: Callable[..., RecordedVoice]) -> None:
    voice = begin()
    driver = SessionDriver(voice, "Hello there, my friend. " * 50)
    driver.until(lambda: bool(driver.pieces))
    voice.client.close()
    with pytest.raises(EngineClosed):
        driver.finish()
    with pytest.raises(EngineClosed):
        list(voice.speak(TEXT))


# --- errors ---------------------------------------------------------------------------------------


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
def test_invalid_text(voice: RecordedVoice, text: str, options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        list(voice.speak(text, **options))


def test_an_unreadable_later_paragraph_is_refused_at_once(voice: RecordedVoice) -> None:
    with pytest.raises(UnsupportedScript):
        SessionDriver(voice, "Hello there. " * 200 + "日本")
    assert not voice.sentences


@pytest.mark.parametrize(
    ("options", "match"),
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
def test_invalid_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        SpeakOptions.of(options)


def test_live_text_is_plain(voice: RecordedVoice) -> None:
    with pytest.raises(OptionError, match="plain text"):
        SessionDriver(voice, ssml=True)


def test_a_recognition_model_does_not_speak(begin: Callable[..., RecordedVoice]) -> None:
    voice = begin()
    with contextlib.closing(tiny_moonshine.start()) as recognizer, pytest.raises(WrongModel):
        list(speak(recognizer, voice.front, TEXT))


def test_language_of_a_voice() -> None:
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


def test_silence_includes_the_quiet_before_it() -> None:
    loud, quiet = np.array([0, 900, -64, 3], np.int16), np.array([1, -64], np.int16)
    assert [trailing_silence_samples(each) for each in (loud, quiet, loud[:0])] == [2, 2, 0]
    between, requested, shorter = SilencePart(10), SilencePart(10, is_requested=True), SilencePart(10)
    for silence, before in ((between, 4), (requested, 4), (shorter, 40)):
        silence.begin(before)
        silence.begin(before)
    assert (between.remaining_samples, requested.remaining_samples, shorter.finished) == (6, 10, True)
