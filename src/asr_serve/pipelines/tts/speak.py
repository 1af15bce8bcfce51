"""Speech synthesis session: text in, samples out while they are made. START HERE.

Text -> clauses -> engine -> one stream of samples. Sans I/O, as `pipelines/live/live_session`: `append_text` takes
text, `take_audio` returns the audio that is ready, and `wake` is called, from any thread, when it is worth calling
again. Nothing here blocks or sleeps, so that a library's iterator and a server's socket drive it alike.

1. `TextFrontend` (`text/g2p/frontend`) makes clauses and pauses: lazily from a whole text; from a text that
   is still being written as soon as a clause is complete.
2. The engine gets the first clause, and the next one once less than TARGET_BUFFER_S of audio waits to be taken. So
   speech has no gaps, and the engine does no work for a client that takes no audio.
3. Audio is joined with the silence between clauses, resampled and watermarked if requested
   (`pipelines/tts/output`), and returned in order, with the times of its words.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial

import numpy as np

from asr_serve import units
from asr_serve.engine.client import EngineClient
from asr_serve.engine.tts.scheduler import Playback
from asr_serve.errors import AsrServeError, Cancelled, OptionError, TextTooLong
from asr_serve.pipelines.options import AudioChunk as AudioChunk
from asr_serve.pipelines.options import SpeakOptions as SpeakOptions
from asr_serve.pipelines.options import SpokenWord, check_text
from asr_serve.pipelines.tts.output import SpeechOutput
from asr_serve.pipelines.tts.sentences import (
    SentencePart,
    SilencePart,
    SpeechPart,
    sentence_request,
    trailing_silence_samples,
)
from asr_serve.pipelines.tts.text_feeder import TextFeeder
from asr_serve.text.g2p.clauses import Clause, Passage, Pause, ProsodySettings
from asr_serve.text.g2p.frontend import PAUSE_MS, StreamingTextFrontend, TextFrontend

TARGET_BUFFER_S, WHOLE_SENTENCE_BUFFER_S = 2.0, 10.0
"""Audio not yet taken below which the next sentence is submitted. The second is for voices that synthesize
whole sentences, whose first audio may take longer."""
MAX_CONCURRENT_SENTENCES = 2
"""Limit for the sentences of one session in the engine."""
FULL_PASSAGES, MAX_PASSAGES = 64, 4_096
"""Clauses of streamed text not yet in the engine: at the first number the session is `full`, at the second it
refuses."""


class TtsSession:
    """Synthesis of one text. Methods may be called from several threads, which a lock serializes; `close` at
    any time."""

    def __init__(
        self,
        client: EngineClient,
        front: TextFrontend,
        options: SpeakOptions,
        wake: Callable[[], None],
        text: str | None = None,
    ) -> None:
        """`text`: the whole text; None: `append_text` delivers it. `wake` must not block: it runs on the engine's
        thread.

        Raises TextError for a text that cannot be read, OptionError, AtCapacity, WrongModel, EngineClosed.
        `take_audio` raises UnknownVoice, which only the model can detect.
        """
        card = client.voice_card
        self._client, self._frontend, self._options, self._wake = client, front, options, wake
        self._card_hz, self.rate_hz = card.rate_hz, options.rate_hz or card.rate_hz
        self._voice = options.voice or card.voices[0]
        self._manner = ProsodySettings(options.speed, options.pitch, options.energy)
        self._ahead = units.s_to_samples(
            TARGET_BUFFER_S if card.chunk_frames else WHOLE_SENTENCE_BUFFER_S, card.rate_hz
        )
        self._outlet = SpeechOutput(card.rate_hz, self.rate_hz, mark=options.watermark)
        self._lock = threading.RLock()
        self._parts: deque[SpeechPart] = deque()
        self._submitted_clauses = 0
        """Sentences submitted to the engine."""
        self._finished_samples = 0
        """Samples taken before the current part, at the voice's rate."""
        self._part_samples = 0
        """Samples taken of the current part, at the voice's rate."""
        self._emitted_samples = self._trailing_silence_samples = 0
        """Samples returned, at the output rate; silent samples at their end, at the voice's rate."""
        self._failure: AsrServeError | None = None
        self._playback = Playback(0.0)
        """Playback clock of the audio taken."""
        self._drained = self._closed = self._flush_pause_due = False
        self._passages: deque[Passage] = deque()
        self._whole: Iterator[Passage] | None = None
        self._live: StreamingTextFrontend | None = None
        if text is None:
            if options.ssml or options.phonemes:
                raise OptionError(
                    "ssml or phonemes with a text that comes in pieces",
                    "plain text",
                    "send all of it at once",
                    param="ssml" if options.ssml else "phonemes",
                )
            self._live = front.open_stream()
            return
        self._whole = front.passages(check_text(text), ssml=options.ssml, phonemes=options.phonemes)
        with self._lock:
            self._advance()

    # --- client ----------------------------------------------------------------------------------------

    def append_text(self, text: str) -> None:
        """Appends streamed text and submits complete clauses. Raises what the constructor raises, for this text
        alone, and TextTooLong when too many clauses wait."""
        with self._lock:
            live = self._expect_live("put")
            if len(self._passages) >= MAX_PASSAGES:
                raise TextTooLong(
                    f"{len(self._passages)} clauses wait for synthesis",
                    f"up to {MAX_PASSAGES}",
                    "wait until some have been synthesized",
                    param="input",
                )
            passages = live.append_text(check_text(text))
            if passages and self._flush_pause_due:
                self._passages.append(Pause(PAUSE_MS["sentence"]))
                self._flush_pause_due = False
            self._passages += passages
            self._advance()

    def flush(self) -> None:
        """Synthesizes all text so far, including an incomplete last word; later text starts a new sentence."""
        with self._lock:
            self._passages += self._expect_live("flush").finish()
            self._flush_pause_due = bool(self._submitted_clauses or self._passages)
            self._advance()

    def end(self) -> None:
        """Ends the text."""
        with self._lock:
            if self._live is not None:
                passages, self._live = self._live.finish(), None
                self._passages += [Pause(PAUSE_MS["sentence"])] * (self._flush_pause_due and bool(passages))
                self._passages += passages
                self._advance()
            self._wake()

    @property
    def full(self) -> bool:
        """Returns whether no more text should be appended for now."""
        return len(self._passages) >= FULL_PASSAGES

    @property
    def idle(self) -> bool:
        """Returns whether all text so far has been synthesized and its audio taken."""
        with self._lock:
            return not (self._parts or self._passages)

    @property
    def done(self) -> bool:
        """Returns whether all audio has been taken."""
        return self._drained

    def take_audio(self, most: int | None = None) -> list[AudioChunk]:
        """Returns up to `most` chunks that are ready (None: all of them), possibly none. Raises the session's
        error once all audio before it was taken, and Cancelled after `close`."""
        chunks: list[AudioChunk] = []
        with self._lock:
            if self._closed and not self._drained:
                raise self._failure or Cancelled("the speech was stopped")
            try:
                while (most is None or len(chunks) < most) and self._submit_due():
                    if (chunk := self._next_chunk()) is not None:
                        chunks.append(chunk)
                    elif self._parts:  # the next chunk is not ready
                        break
            except AsrServeError as failure:
                self._failure = self._failure or failure
                self._cancel_parts()
            if not self._parts and not chunks:
                if self._failure is not None:
                    self.close()
                    raise self._failure
                if self._ended() and not self._drained:
                    self._drained = True
                    if len(rest := self._outlet.flush()):
                        chunks.append(self._audio_chunk(rest))
        if self._failure is not None or (chunks and not self._parts):
            self._wake()  # the next call returns the end, or raises the error
        return chunks

    def close(self) -> None:
        """Stops and cancels what is in the engine. Idempotent."""
        self._closed = True
        with self._lock:
            self._cancel_parts()
            self._passages.clear()
            self._whole = self._live = None
        self._wake()

    # --- inside ----------------------------------------------------------------------------------------

    def _submit_due(self) -> bool:
        """Submits what is due and returns whether any part is in progress. An error in the rest of the text is
        raised after the audio before it."""
        try:
            self._advance()
        except AsrServeError as failure:
            self._failure = failure
        return bool(self._parts)

    def _cancel_parts(self) -> None:
        for part in self._parts:
            part.cancel()
        self._parts.clear()

    def _advance(self) -> None:
        """Submits sentences until enough audio is buffered."""
        while not self._closed and self._failure is None and (remaining := self._remaining_samples()) is not None:
            if remaining >= self._ahead or sum(part.under_way for part in self._parts) >= MAX_CONCURRENT_SENTENCES:
                return
            passage = self._next_passage()
            if passage is None:
                return
            if isinstance(passage, Pause):
                ms = passage.ms if passage.is_requested else passage.ms / self._manner.speed
                self._parts.append(
                    SilencePart(units.ms_to_samples(ms, self._card_hz), is_requested=passage.is_requested)
                )
            else:
                self._submit_clause(passage, remaining)

    def _submit_clause(self, clause: Clause, left: int) -> None:
        """Submits a clause. The first one passes admission, which then holds for the whole session. The others
        are due when all audio before them has been played, counted from the first chunk."""
        options, admitted = self._options, self._submitted_clauses > 0
        request = sentence_request(clause, self._manner, self._voice, options.seed + self._submitted_clauses)
        slack_ms: int | None = None
        if admitted:
            buffered_s = self._playback.deadline_s - time.monotonic() if self._playback.started else 0.0
            slack_ms = units.samples_to_ms(max(0, left), self._card_hz) + int(1_000 * max(0.0, buffered_s))
        submit = partial(self._client.synthesize, priority=options.priority, slack_ms=slack_ms, admitted=admitted)
        self._parts.append(SentencePart(clause, request, submit, self._client.cancel, self._wake))
        self._submitted_clauses += 1

    def _remaining_samples(self) -> int | None:
        """Samples that are due and not yet taken; None while unknown."""
        remaining = 0
        for part in self._parts:
            if part.remaining_samples is None:
                return None
            remaining += part.remaining_samples
        return remaining

    def _next_passage(self) -> Passage | None:
        if self._whole is not None:
            return next(self._whole, None)
        return self._passages.popleft() if self._passages else None

    def _ended(self) -> bool:
        """Returns whether the text has ended and all of it was submitted."""
        return self._live is None and not self._passages and not self._closed

    def _next_chunk(self) -> AudioChunk | None:
        """Returns the next chunk that is ready."""
        while self._parts:
            part = self._parts[0]
            if isinstance(part, SilencePart):
                part.begin(self._trailing_silence_samples)
            if (pcm := part.take_audio()) is not None:
                quiet = trailing_silence_samples(pcm)
                self._trailing_silence_samples = quiet + (self._trailing_silence_samples if quiet == len(pcm) else 0)
                clause_words = part.words() if isinstance(part, SentencePart) else None
                self._part_samples += len(pcm)
                self._playback.add_audio(len(pcm) / self._card_hz, time.monotonic())
                words = tuple(
                    SpokenWord(word.text, self._output_position(start), self._output_position(end))
                    for word, start, end in clause_words or ()
                )
                text = " ".join(word.text for word, *_ in clause_words or ())
                return self._audio_chunk(self._outlet.convert(pcm), text, words)
            if not part.finished:
                return None
            self._parts.popleft()
            self._finished_samples += self._part_samples
            self._part_samples = 0
        return None

    def _output_position(self, samples: int) -> int:
        """Converts a position in the current part to a position in the output."""
        return (self._finished_samples + samples) * self.rate_hz // self._card_hz

    def _audio_chunk(self, pcm: np.ndarray, text: str = "", words: tuple[SpokenWord, ...] = ()) -> AudioChunk:
        chunk = AudioChunk(pcm, self.rate_hz, self._emitted_samples, text, words)
        self._emitted_samples += len(pcm)
        return chunk

    def _expect_live(self, what: str) -> StreamingTextFrontend:
        if self._closed:
            raise self._failure or Cancelled("the speech was stopped")
        assert self._live is not None, f"{what} after the end, or of a whole text"
        return self._live


class SpeakCanceller:
    """Cancels one call of `speak` from any thread: its generator cancels its work in the engine and raises
    Cancelled."""

    def __init__(self) -> None:
        self._cancelled = False
        self._session: TtsSession | None = None

    def cancel(self) -> None:
        self._cancelled = True
        if self._session is not None:
            self._session.close()

    def attach(self, speaking: TtsSession) -> None:
        """Sets the session to stop, and stops it if `cancel` was called before."""
        self._session = speaking
        if self._cancelled:
            speaking.close()


def speak(
    client: EngineClient,
    front: TextFrontend,
    text: str | Iterable[str],
    options: SpeakOptions | None = None,
    stop: SpeakCanceller | None = None,
) -> Generator[AudioChunk, None, None]:
    """Yields the audio of a text as it is made. A text may come in pieces, as a language model writes them; a
    thread reads them. Closing the generator stops the work.

    Raises, at the first chunk, what TtsSession raises; what the iterable `text` raises, after the audio before it;
    Cancelled after `stop.cancel()`.
    """
    wake = threading.Event()
    full_text = text if isinstance(text, str) else None
    session = TtsSession(client, front, options or SpeakOptions(), wake.set, full_text)
    (stop or SpeakCanceller()).attach(session)
    feeder = None if isinstance(text, str) else TextFeeder(session, text, wake.set)
    try:
        while not session.done:
            wake.clear()
            chunks = session.take_audio(1)
            yield from chunks
            if feeder is not None:
                feeder.raise_failure()
            if not chunks and not session.done:
                wake.wait()
    finally:
        session.close()
        if feeder is not None:
            feeder.close()
