"""START HERE: text in, sound out while it is made. text -> clauses -> engine -> one stream of samples.

Sans I/O, as pipelines/live/listen: `put` takes text, `take` returns what has come, and `wake` is called, from
any thread, when it is worth calling again. Nothing here blocks or sleeps: a library's iterator and a server's
socket drive it alike.

1. `text/spoken.Front` makes clauses and pauses of the text: of a whole text lazily, of a text that is still being
   written as soon as a clause is safe.
2. The engine has the clause that sounds, and the next one once less than AHEAD_S of sound is left untaken. So a
   speech has no gaps, and for whoever does not take the engine does not work.
3. What comes is joined with the silence between, resampled and marked where that was asked for
   (`pipelines/tts/output`), and goes out in order, with the times of its words.
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
from asr_serve.text.g2p.frontend import PAUSE_MS, StreamingTextFrontend, TextFrontend
from asr_serve.text.g2p.passages import Clause, Passage, Pause, ProsodySettings

TARGET_BUFFER_S, WHOLE_SENTENCE_BUFFER_S = 2.0, 10.0
"""Sound left untaken below which the next sentence goes in; the latter of a voice that says sentences as a
whole, and so may take longer for the first of its sound."""
MAX_CONCURRENT_SENTENCES = 2
"""Of one speech, in the engine at once."""
FULL_PASSAGES, MAX_PASSAGES = 64, 4_096
"""Of live text, not yet in the engine: then `full`; then refused."""


class TtsSession:
    """One speech. May be called from several threads, one at a time inside; `close` from any, at any time."""

    def __init__(
        self,
        client: EngineClient,
        front: TextFrontend,
        options: SpeakOptions,
        wake: Callable[[], None],
        text: str | None = None,
    ) -> None:
        """`text`: all of it; None: it comes by `put`. `wake` must not wait: it is called on the engine's thread.

        Raises TextError for a text that cannot be read, OptionError, AtCapacity, WrongModel, EngineClosed.
        UnknownVoice comes out of `take`: only the model can tell.
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
        """Sentences that went into the engine."""
        self._finished_samples = 0
        """Of the voice's own, before the part that sounds."""
        self._part_samples = 0
        """Of that part, taken."""
        self._emitted_samples = self._trailing_silence_samples = 0
        """What went out; what of the voice's own was silent, last."""
        self._failure: AsrServeError | None = None
        self._playback = Playback(0.0)
        """Of what was taken."""
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

    # --- the caller's side -----------------------------------------------------------------------------

    def append_text(self, text: str) -> None:
        """More of a live text. Clauses that are complete go on at once. Raises what the constructor does, for this
        piece alone; TextTooLong where far too much waits to be said."""
        with self._lock:
            live = self._expect_live("put")
            if len(self._passages) >= MAX_PASSAGES:
                raise TextTooLong(
                    f"{len(self._passages)} clauses wait to be said",
                    f"up to {MAX_PASSAGES}",
                    "wait until some were heard",
                    param="input",
                )
            passages = live.append_text(check_text(text))
            if passages and self._flush_pause_due:
                self._passages.append(Pause(PAUSE_MS["sentence"]))
                self._flush_pause_due = False
            self._passages += passages
            self._advance()

    def flush(self) -> None:
        """Say what was put, to its last word; more may follow, as a new sentence."""
        with self._lock:
            self._passages += self._expect_live("flush").finish()
            self._flush_pause_due = bool(self._submitted_clauses or self._passages)
            self._advance()

    def end(self) -> None:
        """No more text will come."""
        with self._lock:
            if self._live is not None:
                passages, self._live = self._live.finish(), None
                self._passages += [Pause(PAUSE_MS["sentence"])] * (self._flush_pause_due and bool(passages))
                self._passages += passages
                self._advance()
            self._wake()

    @property
    def full(self) -> bool:
        """Put no more for now."""
        return len(self._passages) >= FULL_PASSAGES

    @property
    def idle(self) -> bool:
        """Everything that was put has been said and taken."""
        with self._lock:
            return not (self._parts or self._passages)

    @property
    def done(self) -> bool:
        """There is no more to take."""
        return self._drained

    def take_audio(self, most: int | None = None) -> list[AudioChunk]:
        """What has come since, which may be nothing: `most` pieces, or all. Raises what went wrong once everything
        before it was taken, Cancelled after `close`."""
        found: list[AudioChunk] = []
        with self._lock:
            if self._closed and not self._drained:
                raise self._failure or Cancelled("the speech was stopped")
            try:
                while (most is None or len(found) < most) and self._submit_due():
                    if (spoken := self._next_chunk()) is not None:
                        found.append(spoken)
                    elif self._parts:  # it has yet to come
                        break
            except AsrServeError as failure:
                self._failure = self._failure or failure
                self._cancel_parts()
            if not self._parts and not found:
                if self._failure is not None:
                    self.close()
                    raise self._failure
                if self._ended() and not self._drained:
                    self._drained = True
                    if len(rest := self._outlet.flush()):
                        found.append(self._audio_chunk(rest))
        if self._failure is not None or (found and not self._parts):
            self._wake()  # there is an end to be had, of one kind or the other
        return found

    def close(self) -> None:
        """Stop: what is in the engine leaves it. Idempotent."""
        self._closed = True
        with self._lock:
            self._cancel_parts()
            self._passages.clear()
            self._whole = self._live = None
        self._wake()

    # --- inside ----------------------------------------------------------------------------------------

    def _submit_due(self) -> bool:
        """Whether anything is under way; what can go in goes in. A text that cannot be read on is told of after
        what was said of it."""
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
        """Have the next sentence said, if it is time."""
        while not self._closed and self._failure is None and (left := self._remaining_samples()) is not None:
            if left >= self._ahead or sum(part.under_way for part in self._parts) >= MAX_CONCURRENT_SENTENCES:
                return
            passage = self._next_passage()
            if passage is None:
                return
            if isinstance(passage, Pause):
                ms = passage.ms if passage.is_requested else passage.ms / self._manner.speed
                self._parts.append(SilencePart(units.ms_to_samples(ms, self._card_hz), asked=passage.is_requested))
            else:
                self._submit_clause(passage, left)

    def _submit_clause(self, clause: Clause, left: int) -> None:
        """The first sentence asks whether there is room; then the speech is let in. The others are wanted when all
        before them has been played, as if that began with its first piece."""
        options, begun = self._options, self._submitted_clauses > 0
        wanted = sentence_request(clause, self._manner, self._voice, options.seed + self._submitted_clauses)
        within_ms: int | None = None
        if begun:
            held_s = self._playback.deadline_s - time.monotonic() if self._playback.started else 0.0
            within_ms = units.samples_to_ms(max(0, left), self._card_hz) + int(1_000 * max(0.0, held_s))
        say = partial(self._client.synthesize, priority=options.priority, within_ms=within_ms, admitted=begun)
        self._parts.append(SentencePart(clause, wanted, say, self._client.cancel, self._wake))
        self._submitted_clauses += 1

    def _remaining_samples(self) -> int | None:
        """Sound that is to come and was not taken; None: nobody knows yet."""
        left = 0
        for part in self._parts:
            if part.remaining_samples is None:
                return None
            left += part.remaining_samples
        return left

    def _next_passage(self) -> Passage | None:
        if self._whole is not None:
            return next(self._whole, None)
        return self._passages.popleft() if self._passages else None

    def _ended(self) -> bool:
        """No more text, and all of it was said."""
        return self._live is None and not self._passages and not self._closed

    def _next_chunk(self) -> AudioChunk | None:
        """The next piece that is there."""
        while self._parts:
            part = self._parts[0]
            if isinstance(part, SilencePart):
                part.begin(self._trailing_silence_samples)
            if (pcm := part.take_audio()) is not None:
                quiet = trailing_silence_samples(pcm)
                self._trailing_silence_samples = quiet + (
                    self._trailing_silence_samples if quiet == len(pcm) else 0
                )
                told = part.words() if isinstance(part, SentencePart) else None
                self._part_samples += len(pcm)
                self._playback.add_audio(len(pcm) / self._card_hz, time.monotonic())
                words = tuple(
                    SpokenWord(word.text, self._output_position(start), self._output_position(end))
                    for word, start, end in told or ()
                )
                text = " ".join(word.text for word, *_ in told or ())
                return self._audio_chunk(self._outlet.convert(pcm), text, words)
            if not part.finished:
                return None
            self._parts.popleft()
            self._finished_samples += self._part_samples
            self._part_samples = 0
        return None

    def _output_position(self, samples: int) -> int:
        """Where that sample of the part that sounds is, in what goes out."""
        return (self._finished_samples + samples) * self.rate_hz // self._card_hz

    def _audio_chunk(self, pcm: np.ndarray, text: str = "", words: tuple[SpokenWord, ...] = ()) -> AudioChunk:
        spoken = AudioChunk(pcm, self.rate_hz, self._emitted_samples, text, words)
        self._emitted_samples += len(pcm)
        return spoken

    def _expect_live(self, what: str) -> StreamingTextFrontend:
        if self._closed:
            raise self._failure or Cancelled("the speech was stopped")
        assert self._live is not None, f"{what} after the end, or of a whole text"
        return self._live


class SpeakCanceller:
    """Ends one call of `speak` from any thread: its generator cancels what it has in the engine and raises
    Cancelled."""

    def __init__(self) -> None:
        self._cancelled = False
        self._session: TtsSession | None = None

    def cancel(self) -> None:
        self._cancelled = True
        if self._session is not None:
            self._session.close()

    def attach(self, speaking: TtsSession) -> None:
        """What it stops."""
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
    """The pieces of a speech, as they come: of a text, or of pieces of text as a language model writes them, which
    a thread reads. Closing the generator stops the work.

    Raises, at the first piece, what Speaking does; what `text` raises, after what was said before; Cancelled after
    `stop`.
    """
    awake = threading.Event()
    whole = text if isinstance(text, str) else None
    speaking = TtsSession(client, front, options or SpeakOptions(), awake.set, whole)
    (stop or SpeakCanceller()).attach(speaking)
    feeder = None if isinstance(text, str) else TextFeeder(speaking, text, awake.set)
    try:
        while not speaking.done:
            awake.clear()
            pieces = speaking.take_audio(1)
            yield from pieces
            if feeder is not None:
                feeder.raise_failure()
            if not pieces and not speaking.done:
                awake.wait()
    finally:
        speaking.close()
        if feeder is not None:
            feeder.close()
