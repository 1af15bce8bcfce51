"""Who hears it: a model in this process, or a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import numpy as np

import asr_serve
from asr_serve.audio.io import open_audio
from asr_serve.client.line import address, refusal
from asr_serve.client.stream import Event, Lost, Stream
from asr_serve.client.transcript import Transcript
from asr_serve.errors import OutOfTurn, ServerError
from asr_serve.protocols.stream_events import Error, Session
from asr_serve.protocols.stream_events import Segment as ToldSegment
from asr_serve.protocols.stream_events import Speakers as ToldSpeakers
from asr_serve.streaming.results import StreamOptions, StreamResult, said_by
from asr_serve.types import Segment, Word
from asr_serve.units import s_to_samples, samples_to_ms

Audio = str | Iterable[bytes | np.ndarray]
"""A path; or chunks, PCM16 at a rate that is told beside it, or float32 (n,)."""
Show = Callable[[StreamResult], None]
Notice = Callable[[str], None]


class Here:
    """A model that is loaded on entering. Raises what asr_serve.load and Model.stream do."""

    def __init__(self, model: str, options: Mapping[str, Any], **loading: Any) -> None:
        """`options`: Model.stream's. Raises OptionError, before anything is loaded."""
        self._asked = StreamOptions.of(dict(options))
        self.model, self._options, self._loading = model, options, loading
        self.language = ""
        self._held = ExitStack()

    def __enter__(self) -> Self:
        loaded = asr_serve.load(self.model, turn_model="none", **self._loading)
        self._loaded = self._held.enter_context(loaded)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def listen(self, audio: Audio, rate_hz: int, show: Show, notice: Notice) -> None:
        rate = {} if isinstance(audio, str) else {"rate_hz": rate_hz}
        with self._loaded.stream(audio, **self._options, **rate) as stream:
            self.language = self._loaded.card.language(self._asked.listen.language)
            for result in stream:
                show(result)


class There:
    """A server, to which the connection may break. Raises Refused, Unreachable."""

    def __init__(self, server: str, api_key: str | None, query: Mapping[str, Any]) -> None:
        """Raises OptionError for an address that is none."""
        address(server, {})
        self._server, self._key, self._query = server, api_key, query
        self.model = self.language = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A connection lasts as long as `listen`."""

    def listen(self, audio: Audio, rate_hz: int, show: Show, notice: Notice) -> None:
        """Sends from this thread; `show` and `notice` are called by another."""
        stream = Stream(self._server, api_key=self._key, encoding="s16le", rate=rate_hz, **self._query)
        self.model, self.language = stream.session.model, stream.session.language

        def read() -> Error | None:
            """The last complaint, if there was one."""
            results, complaint = Results(itn="itn" in self._query), None
            for event in stream:
                match event:
                    case Lost(reason):
                        notice(f"{reason}; trying again")
                    case Session(resumed=True):
                        notice("connected again: nothing is lost")
                    case Error(message=message):
                        complaint = event
                        notice(f"warning: {message}")
                if (result := results.note(event)) is not None:
                    show(result)
            return complaint

        with ThreadPoolExecutor(1) as pool, stream:
            reading = pool.submit(read)
            reading.add_done_callback(lambda _: stream.close())
            try:
                for chunk in open_audio(audio) if isinstance(audio, str) else audio:
                    stream.send(as_pcm16(chunk) if isinstance(chunk, np.ndarray) else chunk)
                stream.end()
            except (OutOfTurn, ServerError):  # it is over before its time: why, the other thread was told
                if (complaint := reading.result()) is not None:
                    raise refusal(complaint) from None
                raise
            reading.result()


class Results:
    """Events to a result for each that changes the text."""

    def __init__(self, *, itn: bool = False) -> None:
        """`itn`: as Transcript's."""
        self._transcript = Transcript(itn=itn)
        self._segments: tuple[Segment, ...] = ()

    def note(self, event: Event) -> StreamResult | None:
        known = self._transcript
        if not known.note(event):
            return None
        if isinstance(event, ToldSegment):
            self._segments += (as_segment(event),)
        if isinstance(event, ToldSpeakers):
            told = [each.speaker or "" for each in known.segments]
            self._segments = tuple(map(said_by, self._segments, told))
        heard_ms = samples_to_ms(s_to_samples(known.heard_s))
        return StreamResult(known.text, known.certain, heard_ms, known.ended, self._segments)


def as_segment(told: ToldSegment) -> Segment:
    """As a model in this process has it."""
    speaker = told.speaker or ""
    words = tuple(
        Word(
            each.text,
            s_to_samples(each.start_s),
            s_to_samples(each.end_s),
            each.confidence,
            each.speaker or speaker,
            each.spoken or "",
        )
        for each in told.words or ()
    )
    start, end = s_to_samples(told.start_s), s_to_samples(told.end_s)
    return Segment(start, end, told.text, words=words, speaker=speaker, spoken=told.spoken or "")


def as_pcm16(pcm: np.ndarray) -> bytes:
    """(n,) float32 to 16-bit little-endian: what came from 16 bits is what it was."""
    return np.clip(np.round(pcm * 32_768), -32_768, 32_767).astype("<i2").tobytes()
