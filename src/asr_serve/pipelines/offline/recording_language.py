"""Language of a recording, identified from its first seconds of speech before it is transcribed."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from asr_serve import units
from asr_serve.audio.audio_buffers import WindowAlignedBuffer
from asr_serve.audio.endpointing import WINDOW_SAMPLES, EndpointConfig
from asr_serve.audio.reader import AudioLimits, Source
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.engine.client import EngineClient
from asr_serve.errors import AsrServeError
from asr_serve.pipelines.language_identification import (
    MIN_PIECE_SAMPLES,
    PIECE_SAMPLES,
    Outcome,
    believed_language,
    submit_piece,
)
from asr_serve.pipelines.offline.audio_reader import AudioReader, open_reader
from asr_serve.pipelines.offline.transcribe import TranscribeCanceller
from asr_serve.types import Priority

MAX_SEARCH_SAMPLES = units.s_to_samples(60)
"""Beginning of a recording in which speech is looked for; it is kept until it is transcribed."""
ANSWER_TIMEOUT_S = 30.0
"""Longest time for the engine's work, the waiting included; not for an upload in progress, and not for bulk work, which
waits until those who come first are served."""
SPEECH_THRESHOLD = EndpointConfig().threshold
LEAD_SAMPLES = units.ms_to_samples(300)
"""Audio before the first window of speech that belongs to the piece."""
MIN_SPEECH_WINDOWS = 5
"""Fewest windows of speech, 160 ms, in a piece that is asked about: less is a click or a breath."""

T = TypeVar("T")


class PeekedReader:
    """AudioReader whose first chunks can be looked at before they are read."""

    def __init__(self, source: Source, limits: AudioLimits, wake: Callable[[], None]) -> None:
        """`wake`: called whenever there is more of a slow input."""
        self._peeked: deque[np.ndarray] = deque()
        self._reader: AudioReader | None = None
        self._error: AsrServeError | None = None
        """Error of the source, raised when it is read that far."""
        self.hint_samples: int | None = None
        try:
            self._reader = open_reader(source, limits, wake)
            self.hint_samples = self._reader.hint_samples
        except AsrServeError as error:
            self._error = error

    @property
    def ended(self) -> bool:
        return not self._peeked and self._reader is not None and self._error is None and self._reader.ended

    @property
    def exhausted(self) -> bool:
        """Returns whether there is no more to look at: the audio has ended, or cannot be read any further."""
        return self._reader is None or self._error is not None or self._reader.ended

    def peek_next(self) -> np.ndarray | None:
        """Returns the first chunk that was not looked at; None if there is none now. Errors of the source are raised
        when it is read."""
        if self._reader is None or self._error is not None:
            return None
        try:
            chunk = self._reader.next_chunk()
        except AsrServeError as error:
            self._error = error
            return None
        if chunk is not None:
            self._peeked.append(chunk)
        return chunk

    def next_chunk(self) -> np.ndarray | None:
        if self._peeked:
            return self._peeked.popleft()
        if self._error is not None:
            raise self._error
        return None if self._reader is None else self._reader.next_chunk()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


class _NotIdentified(Exception):
    """End of the identification, without a language."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class RecordingLanguage:
    """Identification of one recording's language. Runs on the thread of its transcription."""

    def __init__(
        self, client: EngineClient, reader: PeekedReader, stop: TranscribeCanceller, priority: Priority
    ) -> None:
        """`client`: of the identifying model. `reader` was opened with a `wake` that puts to `stop.awake`. `priority`:
        of the recording's requests."""
        self._client, self._reader, self._stop, self._priority = client, reader, stop, priority
        self._left_s: float | None = None if priority == "bulk" else ANSWER_TIMEOUT_S
        """Rest of the time for the engine's work; None: without a limit."""

    def identify(self) -> tuple[Outcome, str, float]:
        """Returns what came of it, the language and its probability. Blocks. Raises Cancelled after `stop.cancel()`."""
        if self._client.state != "ready":
            return "unavailable", "", 0.0
        try:
            piece = self._first_speech()
            answer = self._ask(piece)
        except _NotIdentified as reason:
            return reason.outcome, "", 0.0
        language = believed_language(answer, len(piece))
        return ("unsure", "", 0.0) if language is None else ("identified", language, answer.language_prob)

    def _first_speech(self) -> np.ndarray:
        """The first piece with speech, (n,). Raises _NotIdentified, Cancelled."""
        stop = self._stop
        try:
            session = self._client.open_vad_session()
        except AsrServeError as error:
            stop.check()
            raise _NotIdentified("unavailable") from error
        most_samples = (self._client.config.vad_windows - 32) * WINDOW_SAMPLES
        chunks: list[np.ndarray] = []
        unscored, speech = WindowAlignedBuffer(), list[bool]()
        read_samples = 0
        try:
            while True:
                chunk = self._reader.peek_next()
                if chunk is not None:
                    chunks.append(chunk)
                    unscored.append(chunk)
                    read_samples += len(chunk)
                    if unscored.samples < min(PIECE_SAMPLES, most_samples):
                        continue  # one step for a piece costs as much as one for a chunk
                last, scored = self._reader.exhausted, len(speech)
                while unscored.samples >= WINDOW_SAMPLES or (last and unscored.samples):
                    whole = min(unscored.samples, most_samples) // WINDOW_SAMPLES * WINDOW_SAMPLES
                    pcm = unscored.take_windows(whole, WINDOW_SAMPLES, last=not whole)
                    speech += (self._wait(session.submit_windows(pcm)) >= SPEECH_THRESHOLD).tolist()
                first = next((index for index, each in enumerate(speech) if each), None)
                start = read_samples if first is None else max(0, first * WINDOW_SAMPLES - LEAD_SAMPLES)
                if last or read_samples - start >= PIECE_SAMPLES or read_samples >= MAX_SEARCH_SAMPLES:
                    break
                if chunk is None and len(speech) == scored:  # a wait for scores takes the reader's notices, too
                    stop.awake.get()
                    stop.check()
        except AsrServeError as error:
            stop.check()
            raise _NotIdentified("unavailable") from error
        finally:
            session.close()
        piece = np.concatenate(chunks)[start : start + PIECE_SAMPLES] if chunks else np.zeros(0, np.float32)
        windows = speech[start // WINDOW_SAMPLES : (start + PIECE_SAMPLES) // WINDOW_SAMPLES]
        if sum(windows) < MIN_SPEECH_WINDOWS or len(piece) < MIN_PIECE_SAMPLES:
            raise _NotIdentified("no_speech")
        return piece

    def _ask(self, piece: np.ndarray) -> Recognition:
        """Raises _NotIdentified, Cancelled."""
        try:
            ticket = submit_piece(self._client, piece, self._priority)
            try:
                answer: Recognition = self._wait(ticket.future)
            finally:
                if not ticket.future.done():
                    self._client.cancel(ticket)
        except AsrServeError as error:
            self._stop.check()
            raise _NotIdentified("unavailable") from error
        return answer

    def _wait(self, future: Future[Any]) -> Any:
        """Waits for the engine. Raises its errors, _NotIdentified, Cancelled."""
        future.add_done_callback(lambda _: self._stop.awake.put(None))
        started_s = time.monotonic()
        while not future.done():
            self._stop.check()
            left_s = None if self._left_s is None else self._left_s - (time.monotonic() - started_s)
            if left_s is not None and left_s <= 0:
                raise _NotIdentified("timeout")
            try:
                self._stop.awake.get(timeout=left_s)
            except queue.Empty:
                continue
        if self._left_s is not None:
            self._left_s -= time.monotonic() - started_s
        return future.result()
