"""Python library: one thread-safe object, sync and async."""

from __future__ import annotations

import contextlib
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping
from typing import Any, Self

import msgspec

from asr_serve.api.reading import read_in_threads
from asr_serve.api.speech import Speech, Text
from asr_serve.api.stream import Chunks, StreamOptions, TranscriptStream, is_single_source
from asr_serve.audio.input_manifest import InputItem, expand_inputs
from asr_serve.audio.reader import Source
from asr_serve.config import EngineConfig
from asr_serve.devices.cpu import keep_memory
from asr_serve.engine import turn_runner as turns
from asr_serve.engine.builder import AsrCheckpoint, find_checkpoint
from asr_serve.engine.client import EngineClient
from asr_serve.engine.thread_backend import ThreadBackend, thread_backend
from asr_serve.models.registry import TtsCard
from asr_serve.pipelines.offline.transcribe import Event, FileDone, FileFailed, events
from asr_serve.pipelines.options import SpeakOptions, TranscribeOptions
from asr_serve.pipelines.tts.frontend import frontend_for
from asr_serve.text.tokenizers import Tokenizer
from asr_serve.types import Transcript


class FileTranscriber(ABC):
    """Transcriber of files: a model, or a pipeline of stages."""

    @abstractmethod
    def events(
        self, items: Iterable[InputItem], options: TranscribeOptions | None = None
    ) -> Generator[Event, None, None]:
        """Yields SegmentDone, FileDone, FileFailed and Progress events as they happen, files in order.

        Lazy, with a bounded look-ahead over `items`; closing the generator cancels what is pending.
        """

    def transcribe(self, inputs: Source | Iterable[Source], **options: Any) -> list[Transcript]:
        """Returns the transcripts of `inputs`, in their order: paths, bytes, binary streams, arrays at 16 kHz or
        (array, rate_hz).

        options: the fields of TranscribeOptions. Raises OptionError, and the error of the first input that fails.
        """
        transcripts: list[Transcript] = []
        with contextlib.closing(self.events(_items(inputs), TranscribeOptions.of(options))) as stream:
            for event in stream:
                _collect(event, transcripts)
        return transcripts

    async def atranscribe(self, inputs: Source | Iterable[Source], **options: Any) -> list[Transcript]:
        """Transcribes like `transcribe`, without blocking the event loop. Cancelling the task cancels the work."""
        transcripts: list[Transcript] = []
        stream = self.events(_items(inputs), TranscribeOptions.of(options))
        async with contextlib.aclosing(read_in_threads(stream)) as events_read:
            async for event in events_read:
                _collect(event, transcripts)
        return transcripts

    def _held(self, stream: Generator[Event, None, None]) -> Generator[Event, None, None]:
        """Yields the same events and keeps `self` alive while they are read."""
        yield from stream


class Model(FileTranscriber):
    """Loaded model with its engine. Any number of threads and tasks may share one."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None) -> None:
        """`tokenizer`: None for a speech synthesis model."""
        assert isinstance(client.backend, ThreadBackend)
        self.card, self.device = client.backend.card, client.backend.device
        self._client, self._words = client, tokenizer
        # Also at exit: a thread inside torch while the interpreter is torn down ends in a crash.
        self._finalizer = weakref.finalize(self, client.close)

    @property
    def client(self) -> EngineClient:
        """Client of its engine."""
        return self._client

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of a recognition model. Raises WrongModel for a speech synthesis model."""
        _ = self._client.card
        assert self._words is not None
        return self._words

    @classmethod
    def load(
        cls,
        model: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        weights: str | os.PathLike[str] | None = None,
        turn_model: str = "auto",
        tensor_parallel_size: int | None = None,
        engine: EngineConfig | None = None,
    ) -> Model:
        """See asr_serve.load."""
        config = engine or EngineConfig()
        if tensor_parallel_size is not None:
            config = msgspec.structs.replace(config, tensor_parallel_size=tensor_parallel_size)
        checkpoint = find_checkpoint(model, weights, config)
        turn = turns.load_turn_model(turn_model) if isinstance(checkpoint, AsrCheckpoint) else None
        if isinstance(checkpoint.card, TtsCard):
            # Loads the resources of the text front end, before the first text.
            next(frontend_for(checkpoint.card).passages("One."))
        keep_memory()
        link = thread_backend(
            checkpoint.card, lambda: checkpoint.build(device, dtype, config.quantize, config.tensor_parallel_size), turn
        )
        return cls(EngineClient(config, link), checkpoint.tokenizer if isinstance(checkpoint, AsrCheckpoint) else None)

    def stream(self, source: Source | Chunks, **options: Any) -> TranscriptStream:
        """Streams text while audio arrives: a StreamResult for every `chunk_ms` of it, and a final one. Read it
        with `for` or `async for`; nothing happens before.

        source: one input as for `transcribe`; or its chunks, from a plain or an asynchronous iterable: (n,) int16
        or float arrays at `rate_hz` (16 kHz), or bytes of PCM16. options: the fields of StreamOptions and of
        ListenOptions. The final text depends on the audio and ListenOptions, not on how the audio was cut.

        Raises OptionError, UnsupportedAudio; reading it raises AtCapacity, EngineClosed, and the source's errors.
        """
        return TranscriptStream(self._client, self.tokenizer, source, StreamOptions.of(options), self)

    def events(
        self, items: Iterable[InputItem], options: TranscribeOptions | None = None
    ) -> Generator[Event, None, None]:
        return self._held(events(self._client, self.tokenizer, items, options or TranscribeOptions()))

    def speak(
        self, text: Text, *, language: str | None = None, lexicon: Mapping[str, str] | None = None, **options: Any
    ) -> Speech:
        """Synthesizes `text`, with a speech synthesis model. Read it with `for` or `async for`, each chunk as soon
        as it is made, or all of it at once. Nothing happens before.

            model = asr_serve.load("fastpitch-en")
            model.speak("Hello there.").save("hello.mp3")              # or .wav .opus .flac .aac .pcm
            samples = model.speak("Hello there.", seed=7).read()       # (n,) int16, at model.card.rate_hz
            for piece in model.speak("A long story.", speed=1.2):      # while it is made
                play(piece.pcm, piece.rate_hz)
                show(piece.words)                                      # at the start of a sentence, all its words
            for piece in model.speak(language_model.stream()):         # begins with the first clause
                play(piece.pcm, piece.rate_hz)

        text: the whole text; or its pieces, from a plain or an asynchronous iterable, as a language model writes
        them. language: en or en-gb, if the model supports it; None: the voice's own. lexicon: words and their
        phonemes. options: the fields of SpeakOptions: voice, speed, pitch, energy, ssml, phonemes, seed, rate_hz,
        watermark, priority.

        Raises OptionError, WrongModel for a recognition model; reading it raises TextError (empty, too long,
        another script, malformed SSML), UnknownVoice, AtCapacity, EngineClosed, and the text's own errors.
        """
        chosen = SpeakOptions.of(options)
        card = self._client.voice_card
        front = frontend_for(card, chosen.voice, language, lexicon)
        return Speech(self._client, front, text, chosen, self)

    def describe(self) -> dict[str, Any]:
        """Returns model, device and statistics of the engine."""
        return {"model": self.card.name, **self.device.describe(), "engine": self._client.describe()}

    def close(self) -> None:
        """Stops the engine; requests still in it raise EngineClosed."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _collect(event: Event, transcripts: list[Transcript]) -> None:
    """Adds a finished file's transcript. Raises the error of a failed one."""
    if isinstance(event, FileFailed):
        raise event.error
    if isinstance(event, FileDone):
        transcripts.append(event.transcript)


def _items(inputs: Source | Iterable[Source]) -> Iterable[InputItem]:
    """Expands one source or several."""
    several = isinstance(inputs, Iterable) and not is_single_source(inputs)
    return expand_inputs(inputs if several else [inputs])  # type: ignore[arg-type,list-item]
