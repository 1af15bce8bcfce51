"""What is told after each chunk: the text of all audio so far, of which a growing part is fixed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from asr_serve import units
from asr_serve.audio.resample import MAX_RATE_HZ, MIN_RATE_HZ
from asr_serve.engine.client import EngineClient
from asr_serve.errors import Cancelled, OptionError
from asr_serve.pipelines.live.caller import Event, Finished, ListenOptions, Partial, SegmentDone, Speakers
from asr_serve.pipelines.live.listen import Listening
from asr_serve.pipelines.utterance import known_options
from asr_serve.text.tokens import Tokenizer
from asr_serve.types import Segment

LEAST_CHUNK_MS, MOST_CHUNK_MS = 100, 30_000


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller may choose. Raises OptionError for what cannot be."""

    chunk_ms: int = 720
    """Audio between two results."""
    rollback_chars: int = 8
    """At the end of the text, how many characters at least are not fixed before it is final."""
    rate_hz: int | None = None
    """Of the chunks. None: 16 kHz."""
    listen: ListenOptions = ListenOptions()

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("chunk_ms", self.chunk_ms, LEAST_CHUNK_MS, MOST_CHUNK_MS),
            ("rollback_chars", self.rollback_chars, 0, sys.maxsize),
            ("rate_hz", units.RATE_HZ if self.rate_hz is None else self.rate_hz, MIN_RATE_HZ, MAX_RATE_HZ),
        ):
            if not isinstance(value, int) or not least <= value <= most:
                upper = "or more" if most == sys.maxsize else f"to {most}"
                raise OptionError(f"{name}={value!r}", f"a whole number, {least} {upper}", param=name)

    @classmethod
    def of(cls, options: dict[str, Any]) -> StreamOptions:
        """From keyword arguments: the fields of this and of ListenOptions, less `partial_ms`, which follows
        from `chunk_ms`. An unknown one fails and names the nearest."""
        own = tuple(name for name in cls.__struct_fields__ if name != "listen")
        rest = tuple(name for name in ListenOptions.__struct_fields__ if name != "partial_ms")
        options = known_options(options, own + rest)
        chosen = cls(**{name: options[name] for name in own if name in options})
        # A chunk's hypothesis may be one of its anchors: then what came after that is worth a partial as well.
        partial_ms = max(LEAST_CHUNK_MS, chosen.chunk_ms // 3)
        listen = ListenOptions.of({"partial_ms": partial_ms} | {n: options[n] for n in rest if n in options})
        return msgspec.structs.replace(chosen, listen=listen)


class StreamResult(msgspec.Struct, frozen=True):
    """All that is known after a chunk. May also be read as a mapping: `result["fixed_text"]`."""

    text: str
    """Of all audio so far."""
    fixed_text: str
    """The beginning of `text`, in whole words, that no later result changes."""
    audio_duration_ms: int
    """All audio so far."""
    is_final: bool
    """The last result: no more audio will come, and all of the text is fixed."""
    segments: tuple[Segment, ...]
    """Those that are closed; `text` begins with theirs."""
    language: str = ""
    """That the last of them was heard in, as a code; empty before one is, and where the model knows only one."""
    language_prob: float = 0.0
    """How probable that is, 0 to 1; 0 where nobody asked the audio."""

    @property
    def unfixed_text(self) -> str:
        """The rest of `text`, with the space before it."""
        return self.text[len(self.fixed_text) :]

    def keys(self) -> tuple[str, ...]:
        return (*self.__struct_fields__, "unfixed_text")

    def __getitem__(self, name: str) -> Any:
        """Raises KeyError."""
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)


class Run:
    """One source on its way through the pipeline, in the turns of whoever reads."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        options: StreamOptions,
        wake: Callable[[], None],
    ) -> None:
        self._rollback, self._partial_s = options.rollback_chars, options.listen.partial_ms / 1_000
        self._itn = options.listen.itn
        self._wake, self._called = wake, False
        self._lock = threading.Lock()
        """Held while working, so that another thread may close."""
        self._closed = self._looked_again = self._finishing = self._finished = False
        self._segments: tuple[Segment, ...] = ()
        self._locked = self._fixed = ""
        self._heard_in = "", 0.0
        self._partial = Partial(0, 0)
        self._samples = 0
        self._listening = Listening(client, tokenizer, options.listen, self._woken, self._clock)

    def put(self, pcm: np.ndarray) -> None:
        self._samples += len(pcm)
        self._listening.put(pcm)
        self._looked_again = False

    def finish(self, pcm: np.ndarray) -> None:
        """With the last of the audio."""
        self.put(pcm)
        self._finishing = True
        self._listening.finish()

    def take(self) -> StreamResult | None:
        """The result, once all that was put has been heard; None: call again after `wake`.

        Raises Cancelled when it was closed, and what Listening does.
        """
        with self._lock:
            while True:
                if self._closed:
                    raise Cancelled("the stream was closed", "", "read it before it is")
                self._called = False  # before advancing: a call from now on tells of something new
                for event in self._listening.advance():
                    self._note(event)
                if self._finished:
                    return self._result(is_final=True)
                if self._called or self._finishing or not self._listening.idle:
                    return None
                if self._looked_again:
                    return self._result(is_final=False)
                self._looked_again = True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._listening.close()
        self._wake()

    def _clock(self) -> float:
        """Audio is the clock of what is asked for; a second look is for what came after an anchor."""
        heard_s = units.samples_to_s(self._samples)
        return heard_s + self._partial_s if self._looked_again else heard_s

    def _woken(self) -> None:
        if not self._called:
            self._called = True
            self._wake()

    def _note(self, event: Event) -> None:
        match event:
            case SegmentDone(segment):
                self._segments += (segment,)
                self._heard_in = event.language, event.language_prob
                self._locked = _joined(self._locked, segment.text)
            case Partial():
                self._partial = event
            case Speakers(speakers):
                self._segments = tuple(map(said_by, self._segments, speakers))
            case Finished():
                self._finished = True

    def _result(self, *, is_final: bool) -> StreamResult:
        text = _joined(self._locked, self._partial.text)
        if is_final:
            self._fixed = text
        else:
            # A number that is still being said may be written in another form once all of it is.
            certain = self._locked if self._itn else _joined(self._locked, self._partial.fixed)
            end = min(len(certain), len(text) - self._rollback)
            if end < len(text):
                end = text.rfind(" ", 0, max(0, end + 1))
            self._fixed = max(self._fixed, text[: max(0, end)], key=len)
        duration_ms = units.samples_to_ms(self._samples)
        return StreamResult(text, self._fixed, duration_ms, is_final, self._segments, *self._heard_in)


def said_by(segment: Segment, speaker: str) -> Segment:
    """The same, when all that was said shows who said it."""
    if segment.speaker == speaker:
        return segment
    words = tuple(msgspec.structs.replace(word, speaker=speaker) for word in segment.words)
    return msgspec.structs.replace(segment, speaker=speaker, words=words)


def _joined(before: str, after: str) -> str:
    return f"{before} {after}" if before and after else before + after
