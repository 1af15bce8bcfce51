"""Who hears it: a model in this process, or a server."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np

import asr_serve
from asr_serve.api.client.connection import error_from_event, websocket_url
from asr_serve.api.client.stream import ClientEvent, ConnectionLost, StreamClient
from asr_serve.api.client.transcript import SessionTranscript
from asr_serve.api.stream import StreamOptions, StreamResult, with_speaker
from asr_serve.audio.pcm import Pcm16Assembler
from asr_serve.audio.reader import open_audio
from asr_serve.errors import OptionError, OutOfTurn, Refused, ServerError, Unreachable
from asr_serve.pipelines.options import AudioChunk, SpeakOptions, SpokenWord
from asr_serve.protocols.openai.speech import PATH
from asr_serve.protocols.stream.server_events import SegmentEvent as ToldSegment
from asr_serve.protocols.stream.server_events import SessionEvent, StreamErrorEvent
from asr_serve.protocols.stream.server_events import SpeakersEvent as ToldSpeakers
from asr_serve.types import Segment, Word
from asr_serve.units import s_to_samples, samples_to_ms

Audio = str | Iterable[bytes | np.ndarray]
"""A path; or chunks, PCM16 at a rate that is told beside it, or float32 (n,)."""
Show = Callable[[StreamResult], None]
Notice = Callable[[str], None]


class LocalTranscriber:
    """A model that is loaded on entering. Raises what asr_serve.load and Model.stream do."""

    def __init__(self, model: str, options: Mapping[str, Any], **loading: Any) -> None:
        """`options`: Model.stream's. Raises OptionError, before anything is loaded."""
        self._asked = StreamOptions.of(dict(options))
        self.model, self._options, self._loading = model, options, loading
        self.language = ""
        self._exit_stack = ExitStack()

    def __enter__(self) -> Self:
        loaded = asr_serve.load(self.model, turn_model="none", **self._loading)
        self._loaded = self._exit_stack.enter_context(loaded)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit_stack.close()

    def listen(self, audio: Audio, rate_hz: int, show: Show, notice: Notice) -> None:
        rate = {} if isinstance(audio, str) else {"rate_hz": rate_hz}
        with self._loaded.stream(audio, **self._options, **rate) as stream:
            self.language = self._loaded.card.language(self._asked.listen.language)
            for result in stream:
                show(result)


class RemoteTranscriber:
    """A server, to which the connection may break. Raises Refused, Unreachable."""

    def __init__(self, server: str, api_key: str | None, query: Mapping[str, Any]) -> None:
        """Raises OptionError for an address that is none."""
        websocket_url(server, {})
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
        stream = StreamClient(self._server, api_key=self._key, encoding="s16le", rate=rate_hz, **self._query)
        self.model, self.language = stream.session.model, stream.session.language

        def read() -> StreamErrorEvent | None:
            """The last complaint, if there was one."""
            results, complaint = StreamResultBuilder(itn="itn" in self._query), None
            for event in stream:
                match event:
                    case ConnectionLost(reason):
                        notice(f"{reason}; trying again")
                    case SessionEvent(resumed=True):
                        notice("connected again: nothing is lost")
                    case StreamErrorEvent(message=message):
                        complaint = event
                        notice(f"warning: {message}")
                if (result := results.apply_event(event)) is not None:
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
                    raise error_from_event(complaint) from None
                raise
            reading.result()


class StreamResultBuilder:
    """Events to a result for each that changes the text."""

    def __init__(self, *, itn: bool = False) -> None:
        """`itn`: as Transcript's."""
        self._transcript = SessionTranscript(itn=itn)
        self._segments: tuple[Segment, ...] = ()

    def apply_event(self, event: ClientEvent) -> StreamResult | None:
        known = self._transcript
        if not known.note(event):
            return None
        if isinstance(event, ToldSegment):
            self._segments += (segment_from_event(event),)
        if isinstance(event, ToldSpeakers):
            told = [each.speaker or "" for each in known.segments]
            self._segments = tuple(map(with_speaker, self._segments, told))
        heard_ms = samples_to_ms(s_to_samples(known.heard_s))
        return StreamResult(known.text, known.certain, heard_ms, known.ended, self._segments)


def segment_from_event(told: ToldSegment) -> Segment:
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


OPEN_S, READ_S = 10.0, 120.0
"""A server that takes longer to answer, and to send the next of its sound, is none."""
MOST_EVENT_BYTES = 1 << 22
MOST_REFUSAL_BYTES = 1 << 16


class LocalSynthesizer:
    """A model that is loaded on entering. Raises what asr_serve.load and Model.speak do."""

    def __init__(self, model: str, options: Mapping[str, Any], speech: Mapping[str, Any], **loading: Any) -> None:
        """`options`: SpeakOptions's; `speech`: what else Model.speak takes. Raises OptionError, before anything is
        loaded."""
        SpeakOptions.of(dict(options))
        self._model, self._options, self._loading = model, {**options, **speech}, loading
        self._exit_stack = ExitStack()

    def __enter__(self) -> Self:
        self._loaded = self._exit_stack.enter_context(
            asr_serve.load(self._model, turn_model="none", **self._loading)
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit_stack.close()

    @property
    def model(self) -> str:
        return self._loaded.card.name

    def speak(self, text: str | Iterable[str]) -> Generator[AudioChunk, None, None]:
        with self._loaded.speak(text, **self._options) as speech:
            yield from speech


class RemoteSynthesizer:
    """A server. Raises Refused, Unreachable."""

    def __init__(self, server: str, api_key: str | None, asked: Mapping[str, Any]) -> None:
        """`asked`: members of the request. Raises OptionError for an address that is none."""
        parts = urlsplit(server if "://" in server else f"http://{server}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise OptionError(
                f"server={server!r}", "a URL, http:// or https://, without a query", "like http://127.0.0.1:8000"
            )
        self._server, self._parts, self._asked = server, parts, asked
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.model = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A connection lasts as long as `speak`."""

    def speak(self, text: str | Iterable[str]) -> Generator[AudioChunk, None, None]:
        whole = text if isinstance(text, str) else "".join(text)
        asked = {"input": whole, "response_format": "pcm", "stream_format": "sse", "words": True, **self._asked}
        with self._answer("POST", PATH, json.dumps(asked).encode()) as answer:
            self.model = answer.headers.get("x-model", "")
            rate_hz = int(answer.headers.get("x-sample-rate", "24000"))
            yield from _chunks_from_events(_server_sent_events(answer), rate_hz)

    def voices(self) -> list[dict[str, Any]]:
        """As GET /v1/audio/voices lists them."""
        with self._answer("GET", "/v1/audio/voices", None) as answer:
            found: list[dict[str, Any]] = json.loads(answer.read())["voices"]
            return found

    @contextlib.contextmanager
    def _answer(self, method: str, path: str, body: bytes | None) -> Iterator[http.client.HTTPResponse]:
        parts = self._parts
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=OPEN_S)
        route = parts.path.rstrip("/").removesuffix("/v1") + path
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream, */*", **self._headers}
        try:
            connection.connect()
            connection.sock.settimeout(READ_S)
            connection.request(method, route, body, headers)
            with contextlib.closing(connection.getresponse()) as answer:
                if answer.status != 200:
                    raise _refusal(answer, self._server)
                yield answer
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(
                f"no server answers at {self._server}, or not any more: {error or type(error).__name__}",
                "an asr-serve that is running is needed",
                "check the address, or start one: asr-serve serve",
            ) from None
        finally:
            connection.close()


def _chunks_from_events(events: Iterator[dict[str, Any]], rate_hz: int) -> Generator[AudioChunk, None, None]:
    pcm16, given = Pcm16Assembler(), 0
    words: tuple[SpokenWord, ...] = ()
    for told in events:
        match told.get("type"):
            case "speech.audio.words":
                words = tuple(
                    SpokenWord(
                        each["word"], s_to_samples(each["start"], rate_hz), s_to_samples(each["end"], rate_hz)
                    )
                    for each in told["words"]
                )
            case "speech.audio.delta":
                pcm = np.frombuffer(pcm16.take_whole_samples(base64.b64decode(told["audio"])), "<i2").astype(
                    np.int16
                )
                yield AudioChunk(pcm, rate_hz, given, " ".join(word.text for word in words), words)
                words = ()
                given += len(pcm)
            case "speech.audio.done":
                return
            case "error":
                raise _refused(told.get("error") or told)
    raise Unreachable("the server ended in the middle of its speech", "all of it is needed", "try again")


def _server_sent_events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Server-sent events, each with its JSON on one line."""
    while line := answer.readline(MOST_EVENT_BYTES):
        if line.startswith(b"data: "):
            told = json.loads(line[6:])
            if isinstance(told, dict):
                yield told


def _refusal(answer: http.client.HTTPResponse, server: str) -> Refused | Unreachable:
    body = answer.read(MOST_REFUSAL_BYTES)
    try:
        return _refused(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return Unreachable(f"{server} answers with {answer.status}, and is no asr-serve that speaks")


def _refused(error: Mapping[str, Any]) -> Refused:
    return Refused(str(error.get("message", "the server refused")), str(error.get("code", "refused")))
