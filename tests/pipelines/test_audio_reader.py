"""Slow inputs: their text comes while they still come, and nobody waits with them."""

from __future__ import annotations

import io
import os
import threading
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import asr_serve
from asr_serve.api.library import Model
from asr_serve.audio.input_manifest import InputItem
from asr_serve.audio.reader import AudioLimits, read_audio
from asr_serve.config import EngineConfig
from asr_serve.errors import CorruptAudio, EmptyAudio, NotAudio
from asr_serve.pipelines.offline.audio_reader import DirectReader, ThreadedReader, open_reader
from asr_serve.pipelines.offline.transcribe import FileDone, FileFailed, SegmentDone
from asr_serve.pipelines.options import TranscribeOptions

WAIT_S = 60.0


@pytest.fixture(scope="module")
def model() -> Model:
    with asr_serve.load(engine=EngineConfig(prefix_bytes=0)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def speech(packaged_speech: Path) -> np.ndarray:
    return read_audio(packaged_speech / "two_cities.wav")


def wav(pcm: np.ndarray) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        out.writeframes((np.clip(pcm, -1, 1) * 32_767).astype(np.int16).tobytes())
    return file.getvalue()


class Pipe:
    """What a sender writes and a reader waits for."""

    def __init__(self) -> None:
        there, here = os.pipe()
        self.reader = os.fdopen(there, "rb", buffering=0)
        self._writer = os.fdopen(here, "wb", buffering=0)

    def send(self, data: bytes) -> None:
        threading.Thread(target=self._writer.write, args=(data,), daemon=True).start()

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def close(self) -> None:
        """The sender's side: the reader sees the end."""
        self._writer.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()
    for thread in threading.enumerate():
        if thread.name == "slow audio":
            thread.join(WAIT_S)
    made.reader.close()


def test_streams_that_cannot_seek_are_read_on_a_thread(pipe, speech):
    data = wav(speech[:16_000])
    assert isinstance(open_reader(pipe.reader, AudioLimits(), lambda: None), ThreadedReader)
    pipe.close()
    for source in (data, io.BytesIO(data), speech[:16_000]):
        straight = open_reader(source, AudioLimits(), lambda: None)
        assert isinstance(straight, DirectReader)
        straight.close()


def test_text_comes_while_the_rest_is_still_to_come(pipe, model, speech):
    data = wav(speech)
    pipe.send(data[: len(data) * 3 // 4])
    events = model.events([InputItem("slow", pipe.reader)])
    first = next(event for event in events if isinstance(event, SegmentDone))
    assert first.segment.text  # and nothing more was sent meanwhile: this line could not be reached
    done = threading.Thread(target=lambda: (pipe.write(data[len(data) * 3 // 4 :]), pipe.close()))
    done.start()
    transcript = next(event for event in events if isinstance(event, FileDone)).transcript
    done.join(WAIT_S)
    [whole] = model.transcribe(data)
    assert transcript.text == whole.text
    spans = [(s.start_samples, s.end_samples, s.text) for s in transcript.segments]
    assert spans == [(s.start_samples, s.end_samples, s.text) for s in whole.segments]


def test_a_file_beside_a_slow_one_does_not_wait_for_it(pipe, model, speech):
    data = wav(speech[: 16_000 * 12])
    events = model.events([InputItem("fast", data), InputItem("slow", pipe.reader)])
    fast = next(event for event in events if isinstance(event, FileDone))
    assert fast.key == "fast"
    events.close()
    pipe.close()


@pytest.mark.parametrize(
    ("data", "error"), [(b"", EmptyAudio), (b"no audio at all" * 99, NotAudio)], ids=["empty", "garbage"]
)
def test_what_is_wrong_with_a_slow_input_is_told(pipe, model, data, error):
    pipe.send(data)
    threading.Timer(0.05, pipe.close).start()
    failed = next(event for event in model.events([InputItem("slow", pipe.reader)]) if isinstance(event, FileFailed))
    assert isinstance(failed.error, error)


def test_a_reader_that_breaks_is_no_end_of_the_audio(speech, monkeypatch):
    class Broken(io.RawIOBase):
        def __init__(self) -> None:
            self.data = io.BytesIO(wav(speech[: 16_000 * 4]))

        def read(self, size: int = -1) -> bytes:
            if self.data.tell() > 70_000:
                raise RuntimeError("a bug of the caller's")
            return self.data.read(size)

    woken = threading.Event()
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    ahead = ThreadedReader(Broken(), AudioLimits(), woken.set)
    taken: list[int] = []

    def drain() -> None:
        while not ahead.ended:
            assert woken.wait(WAIT_S)
            woken.clear()
            while (chunk := ahead.next_chunk()) is not None:
                taken.append(len(chunk))

    with pytest.raises(CorruptAudio):
        drain()
    for thread in threading.enumerate():
        if thread.name == "slow audio":
            thread.join(WAIT_S)
    assert len(told) == 1, "the bug itself is reported"
    assert sum(taken) < 16_000 * 4


def test_an_option_changes_nothing_about_it(pipe, model, speech):
    data = wav(speech[: 16_000 * 10])
    pipe.send(data)
    threading.Timer(0.5, pipe.close).start()
    options = TranscribeOptions(vad=False)
    [slow] = [e.transcript for e in model.events([InputItem("slow", pipe.reader)], options) if isinstance(e, FileDone)]
    [fast] = model.transcribe(data, vad=False)
    assert slow.text == fast.text
