"""`model.speak` with real voices: what is said is heard again, as pieces, files and words; and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

import asr_serve
from asr_serve.api.library import Model
from asr_serve.api.speech import SUFFIXES
from asr_serve.audio import read_audio
from asr_serve.audio.container_headers import read_wav_header
from asr_serve.audio.watermark import detect_watermark
from asr_serve.errors import Cancelled, EmptyText, EngineClosed, OptionError, UnknownVoice, WrongModel
from asr_serve.models.checkpoints.store import locate
from asr_serve.models.registry import tts_card, vocoder_card

TEXT = "The quick brown fox jumps over the lazy dog. It was a bright cold day in April, and the clocks were striking."
WAIT_S = 60.0
WORDS = re.sub(r"[^a-z ]", "", TEXT.lower()).split()


@contextlib.contextmanager
def loaded(name: str) -> Iterator[Model]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASR_SERVE_THREADS", "1")  # threads that wait for each other crawl on a busy machine
        model = asr_serve.load(name, dtype="fp32")
    with model:
        yield model


def present(name: str) -> str:
    card = tts_card(name)
    for each in (card, *((vocoder_card(card.vocoder),) if card.vocoder else ())):
        if locate(each) is None:
            pytest.skip(f"the weights of {each.name} are not on this machine: asr-serve models fetch {each.name}")
    return name


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with loaded(present("hibari")) as model:
        yield model


@pytest.fixture(scope="module")
def ears(packaged_speech: Path) -> Iterator[Model]:
    with loaded("moonshine-tiny-en") as model:
        yield model


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "model" in request.fixturenames:
        model = request.getfixturevalue("model")
        checked = threading.Event()
        model._client.backend.call(lambda _: checked.set())  # behind what was cancelled
        assert checked.wait(WAIT_S)
        told = model.describe()["engine"]
        assert (told["requests"], told["rows_used"], told["sentences_waiting"]) == (0, 0, 0)


@pytest.mark.parametrize("name", ["hibari", "fastpitch-en"])
def test_speech_is_transcribed_to_its_text(name: str, ears: Model) -> None:
    with loaded(present(name)) as model:
        speech = model.speak(TEXT, rate_hz=16_000)
        pcm = speech.read()
    [transcript] = ears.transcribe(pcm.astype(np.float32) / 32_768)
    heard = re.sub(r"[^a-z ]", "", transcript.text.lower()).split()
    wrong = sum(word not in heard for word in WORDS)
    assert wrong <= 2, transcript.text
    assert [word.text for word in speech.words] == TEXT.split()
    # A word is as loud as speech is, where it is said to be.
    level = np.sqrt(np.square(pcm / 32_768).mean())
    for word in speech.words:
        said = pcm[word.start_samples : word.end_samples] / 32_768
        assert np.sqrt(np.square(said).mean()) > 0.1 * level, word


@pytest.mark.parametrize("suffix", sorted(SUFFIXES))
def test_a_file_of_every_format_holds_all_of_it(model: Model, tmp_path: Path, suffix: str) -> None:
    path = model.speak("Hello there. Goodbye.", seed=3).save(tmp_path / f"hello{suffix}")
    whole = model.speak("Hello there. Goodbye.", seed=3).read()
    expected = read_audio((whole, 24_000))
    if SUFFIXES[suffix] == "pcm":
        assert np.array_equal(np.frombuffer(path.read_bytes(), "<i2"), whole)
    else:
        assert abs(len(read_audio(path)) - len(expected)) < 0.15 * 16_000
    assert os.listdir(tmp_path) == [path.name]
    if SUFFIXES[suffix] == "wav":
        header = read_wav_header(path.read_bytes())
        assert header is not None
        assert header.data_bytes == 2 * len(whole)


def test_bytes_are_returned_during_synthesis(model: Model) -> None:
    speech = model.speak(TEXT)
    data = speech.encoded("mp3", to_hz=16_000, bit_rate=48_000)
    first = next(data)
    assert first.startswith(b"ID3")
    assert len(speech.words) < len(TEXT.split())  # the second sentence has yet to begin
    whole = first + b"".join(data)
    assert len(speech.words) == len(TEXT.split())
    assert len(read_audio(whole)) > 4 * 16_000


def test_the_watermark_is_detected(model: Model, tmp_path: Path) -> None:
    for mark in (True, False):
        path = model.speak(TEXT, watermark=mark).save(tmp_path / "speech.mp3")
        assert detect_watermark(read_audio(path), 16_000).is_marked == mark


def test_the_seed_decides_all_randomness(model: Model) -> None:
    def said(seed: int) -> np.ndarray:
        return model.speak("Hello there.", seed=seed).read()

    assert np.array_equal(said(1), said(1))
    assert not np.array_equal(said(1), said(2))


def test_speed_changes_the_length(model: Model) -> None:
    slow, plain, fast = (len(model.speak(TEXT, speed=speed).read()) for speed in (0.5, 1.0, 2.0))
    assert 1.6 < slow / plain < 2.2
    assert 1.5 < plain / fast < 2.2


def test_a_lexicon_changes_the_pronunciation(model: Model) -> None:
    plain = model.speak("Nguyen.").read()
    assert not np.array_equal(plain, model.speak("Nguyen.", lexicon={"Nguyen": "nwˈɪn"}).read())
    with pytest.raises(OptionError, match="unknown language"):
        model.speak("Hello.", language="fr")


async def test_all_of_it_on_an_event_loop(model: Model) -> None:
    async def text() -> AsyncIterator[str]:
        for word in TEXT.split(" "):
            await asyncio.sleep(0)
            yield f"{word} "

    live = model.speak(text())
    pieces = [piece async for piece in live]
    assert [word.text for word in live.words] == TEXT.split()
    assert sum(len(piece.pcm) for piece in pieces) > 4 * 24_000
    whole, threaded = await asyncio.gather(
        model.speak(TEXT).aread(), model.speak(f"{word} " for word in TEXT.split(" ")).aread()
    )
    assert len(whole) > 4 * 24_000
    assert len(threaded) > 4 * 24_000


async def test_cancelling_a_task_cancels_the_work(model: Model) -> None:
    begun = asyncio.Event()

    async def listen() -> None:
        async for _ in model.speak("Hello there, my friend. " * 200):
            begun.set()
            await asyncio.sleep(0.01)

    task = asyncio.create_task(listen())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_an_asynchronous_text_raises_is_raised(model: Model) -> None:
    async def text() -> AsyncIterator[str]:
        yield "Hello there. "
        raise ConnectionError("the model went away")

    with pytest.raises(ConnectionError, match="went away"):
        await model.speak(text()).aread()
    with pytest.raises(OptionError, match="use `async for`"):
        model.speak(text()).read()


def test_close_wakes_the_reader(model: Model) -> None:
    speech = model.speak("Hello there, my friend. " * 200)
    pieces = iter(speech)
    next(pieces)
    thread = threading.Thread(target=speech.close)
    thread.start()
    thread.join(WAIT_S)
    with pytest.raises(Cancelled):
        list(pieces)
    with model.speak(TEXT) as other:
        pass
    with pytest.raises(Cancelled):
        other.read()


def test_a_synthesis_can_be_read_once(model: Model) -> None:
    speech = model.speak("Hello.")
    speech.read()
    with pytest.raises(OptionError, match="read again"):
        speech.read()


def test_a_failed_synthesis_leaves_no_file(model: Model, tmp_path: Path) -> None:
    with pytest.raises(UnknownVoice, match="voices: heart"):
        model.speak("Hello.", voice="nobody").save(tmp_path / "hello.wav")
    with pytest.raises(OptionError, match="suffix names no format"):
        model.speak("Hello.").save(tmp_path / "hello.mp4")
    with pytest.raises(OSError):
        model.speak("Hello.").save(tmp_path / "nowhere" / "hello.wav")
    assert not os.listdir(tmp_path)


def test_invalid_text_is_refused(model: Model) -> None:
    with pytest.raises(EmptyText):
        model.speak("").read()
    with pytest.raises(OptionError, match="a int to speak"):
        model.speak(3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="did you mean 'pitch'"):
        model.speak("Hello.", pich=1)


def test_asr_models_do_not_synthesize_and_tts_models_do_not_transcribe(model: Model, ears: Model) -> None:
    with pytest.raises(WrongModel, match="does not synthesize"):
        ears.speak("Hello.")
    with pytest.raises(WrongModel, match="does not recognize"):
        model.transcribe(np.zeros(16_000, np.float32))
    with pytest.raises(WrongModel, match="does not recognize"):
        model.stream(np.zeros(16_000, np.float32))
    with pytest.raises(WrongModel, match="does not recognize"):
        asyncio.run(model.atranscribe(np.zeros(16_000, np.float32)))


def test_a_closed_model_refuses_to_synthesize() -> None:
    with loaded(present("hibari")) as model:
        speech = model.speak("Hello.")
    with pytest.raises(EngineClosed):
        speech.read()
