"""Backends of `listen` and `speak`: a model in this process, or a server."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Self

import numpy as np

import asr_serve
from asr_serve.api.client.connection import error_from_event, parse_server, websocket_url
from asr_serve.api.client.stream import ClientEvent, ConnectionLost, StreamClient
from asr_serve.api.client.transcript import SessionTranscript
from asr_serve.api.stream import StreamOptions, StreamResult, with_speaker
from asr_serve.audio.pcm import Pcm16Assembler
from asr_serve.audio.reader import open_audio
from asr_serve.errors import OutOfTurn, Refused, ServerError, Unreachable, UnsupportedOption
from asr_serve.pipelines.options import AudioChunk, SpeakOptions, SpokenWord
from asr_serve.protocols.openai.speech import PATH
from asr_serve.protocols.stream.server_events import SegmentEvent as ToldSegment
from asr_serve.protocols.stream.server_events import SessionEvent, StreamErrorEvent
from asr_serve.protocols.stream.server_events import SpeakersEvent as ToldSpeakers
from asr_serve.types import Segment, Word
from asr_serve.units import s_to_samples, samples_to_ms

Audio = str | Iterable[bytes | np.ndarray]
"""Path of a file; or chunks: PCM16 at a rate passed separately, or float32 (n,)."""
Show = Callable[[StreamResult], None]
Notice = Callable[[str], None]


class LocalTranscriber:
    """Transcription by a model that is loaded on entering. Raises what asr_serve.load and Model.stream raise."""

    def __init__(self, model: str, options: Mapping[str, Any], **loading: Any) -> None:
        """`options`: those of Model.stream. Raises OptionError, before anything is loaded."""
        self._asked = StreamOptions.of(dict(options))
        self.model, self._options, self._loading = model, options, loading
        self.language = ""
        self._exit_stack = ExitStack()

    def __enter__(self) -> Self:
        loaded = asr_serve.load(self.model, turn_model="none", **self._loading)
        self._loaded = self._exit_stack.enter_context(loaded)
        return self

    def __exit__(self, *_: object) -> None:
        self._exit_stack.close()

    def listen(self, audio: Audio, rate_hz: int, show: Show, notice: Notice) -> None:
        rate = {} if isinstance(audio, str) else {"rate_hz": rate_hz}
        with self._loaded.stream(audio, **self._options, **rate) as stream:
            self.language = self._loaded.card.language(self._asked.listen.language)
            for result in stream:
                show(result)


class RemoteTranscriber:
    """Transcription by a server; a lost connection is resumed. Raises Refused, Unreachable."""

    def __init__(self, server: str, api_key: str | None, query: Mapping[str, Any]) -> None:
        """`query`: parameters of /v1/stream; `words` None requests words where the model has them. Raises OptionError
        for an invalid address."""
        websocket_url(server, {})
        self._server, self._key, self._query = server, api_key, query
        self.model = self.language = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing: a connection lasts as long as `listen`."""

    def _open(self, **audio: str | int) -> StreamClient:
        query = {**audio, **self._query}
        if "words" not in query or query["words"] is not None:
            return StreamClient(self._server, api_key=self._key, **query)
        try:
            return StreamClient(self._server, api_key=self._key, **query | {"words": "true"})
        except Refused as refused:
            if refused.code != UnsupportedOption("").code:
                raise
        del query["words"]  # if another option was refused, it is refused again
        return StreamClient(self._server, api_key=self._key, **query)

    def listen(self, audio: Audio, rate_hz: int, show: Show, notice: Notice) -> None:
        """Sends from this thread; `show` and `notice` are called by another."""
        stream = self._open(encoding="s16le", rate=rate_hz)
        self.model, self.language = stream.session.model, stream.session.language

        def read() -> StreamErrorEvent | None:
            """Shows results; returns the last error event, if there was one."""
            results, error_event = StreamResultBuilder(itn="itn" in self._query), None
            for event in stream:
                match event:
                    case ConnectionLost(reason):
                        notice(f"{reason}; trying again")
                    case SessionEvent(resumed=True):
                        notice("connected again: nothing is lost")
                    case StreamErrorEvent(message=message):
                        error_event = event
                        notice(f"warning: {message}")
                if (result := results.apply_event(event)) is not None:
                    show(result)
            return error_event

        with ThreadPoolExecutor(1) as pool, stream:
            reader = pool.submit(read)
            reader.add_done_callback(lambda _: stream.close())
            try:
                for chunk in open_audio(audio) if isinstance(audio, str) else audio:
                    stream.send(as_pcm16(chunk) if isinstance(chunk, np.ndarray) else chunk)
                stream.end()
            except (OutOfTurn, ServerError):  # the session ended early; the reader has the reason
                if (error_event := reader.result()) is not None:
                    raise error_from_event(error_event) from None
                raise
            reader.result()


class StreamResultBuilder:
    """Converts events to results, one for each event that changes the text."""

    def __init__(self, *, itn: bool = False) -> None:
        """`itn`: as in SessionTranscript."""
        self._transcript = SessionTranscript(itn=itn)
        self._segments: tuple[Segment, ...] = ()

    def apply_event(self, event: ClientEvent) -> StreamResult | None:
        transcript = self._transcript
        if not transcript.note(event):
            return None
        if isinstance(event, ToldSegment):
            self._segments += (segment_from_event(event),)
        if isinstance(event, ToldSpeakers):
            speakers = [segment.speaker or "" for segment in transcript.segments]
            self._segments = tuple(map(with_speaker, self._segments, speakers))
        duration_ms = samples_to_ms(s_to_samples(transcript.heard_s))
        return StreamResult(transcript.text, transcript.certain, duration_ms, transcript.ended, self._segments)


def segment_from_event(told: ToldSegment) -> Segment:
    """Converts a segment event to a Segment, as a model in this process returns it."""
    speaker = told.speaker or ""
    words = tuple(
        Word(
            word.text,
            s_to_samples(word.start_s),
            s_to_samples(word.end_s),
            word.confidence,
            word.speaker or speaker,
            word.spoken or "",
        )
        for word in told.words or ()
    )
    start, end = s_to_samples(told.start_s), s_to_samples(told.end_s)
    return Segment(start, end, told.text, words=words, speaker=speaker, spoken=told.spoken or "")


def as_pcm16(pcm: np.ndarray) -> bytes:
    """Converts (n,) float32 to 16-bit little-endian; exact for samples that came from 16 bits."""
    return np.clip(np.round(pcm * 32_768), -32_768, 32_767).astype("<i2").tobytes()


OPEN_S, READ_S = 10.0, 120.0
"""Time for a server to answer, and to send the next chunk of audio."""
MOST_EVENT_BYTES = 1 << 22
MOST_REFUSAL_BYTES = 1 << 16


class LocalSynthesizer:
    """Synthesis by a model that is loaded on entering. Raises what asr_serve.load and Model.speak raise."""

    def __init__(self, model: str, options: Mapping[str, Any], speech: Mapping[str, Any], **loading: Any) -> None:
        """`options`: those of SpeakOptions; `speech`: the other arguments of Model.speak. Raises OptionError,
        before anything is loaded."""
        SpeakOptions.of(dict(options))
        self._model, self._options, self._loading = model, {**options, **speech}, loading
        self._exit_stack = ExitStack()

    def __enter__(self) -> Self:
        self._loaded = self._exit_stack.enter_context(asr_serve.load(self._model, turn_model="none", **self._loading))
        return self

    def __exit__(self, *_: object) -> None:
        self._exit_stack.close()

    @property
    def model(self) -> str:
        return self._loaded.card.name

    def speak(self, text: str | Iterable[str]) -> Generator[AudioChunk, None, None]:
        with self._loaded.speak(text, **self._options) as speech:
            yield from speech


class RemoteSynthesizer:
    """Synthesis by a server. Raises Refused, Unreachable."""

    def __init__(self, server: str, api_key: str | None, asked: Mapping[str, Any]) -> None:
        """`asked`: members of the request. Raises OptionError for an invalid address."""
        parse_server(server)
        self._server, self._api_key, self._asked = server, api_key, asked
        self.model = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing: a connection lasts as long as `speak`."""

    def speak(self, text: str | Iterable[str]) -> Generator[AudioChunk, None, None]:
        joined = text if isinstance(text, str) else "".join(text)
        body = {"input": joined, "response_format": "pcm", "stream_format": "sse", "words": True, **self._asked}
        with self._answer("POST", PATH, json.dumps(body).encode()) as answer:
            self.model = answer.headers.get("x-model", "")
            rate_hz = int(answer.headers.get("x-sample-rate", "24000"))
            yield from _chunks_from_events(_server_sent_events(answer), rate_hz)

    def voices(self) -> list[dict[str, Any]]:
        """Returns the voices that GET /v1/audio/voices lists."""
        with self._answer("GET", "/v1/audio/voices", None) as answer:
            voices: list[dict[str, Any]] = json.loads(answer.read())["voices"]
            return voices

    def _answer(
        self, method: str, path: str, body: bytes | None
    ) -> contextlib.AbstractContextManager[http.client.HTTPResponse]:
        return server_answer(self._server, self._api_key, method, path, body)


@contextlib.contextmanager
def server_answer(
    server: str,
    api_key: str | None,
    method: str,
    path: str,
    body: bytes | Iterable[bytes] | None,
    headers: Mapping[str, str] | None = None,
) -> Iterator[http.client.HTTPResponse]:
    """Context manager around a server's answer to a request, in JSON unless `headers` say otherwise; they give the
    Content-Length of a body in parts. Raises Refused, Unreachable, OptionError for an invalid address."""
    parts = parse_server(server)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=OPEN_S)
    route = parts.path.rstrip("/").removesuffix("/v1") + path
    sent = {"Content-Type": "application/json", "Accept": "text/event-stream, */*", **(headers or {})}
    if api_key:
        sent["Authorization"] = f"Bearer {api_key}"
    try:
        connection.connect()
        connection.sock.settimeout(READ_S)
        connection.request(method, route, body, sent)
        with contextlib.closing(connection.getresponse()) as answer:
            if answer.status != 200:
                raise _refusal(answer, server, path)
            yield answer
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(
            f"no server answers at {server}: {error or type(error).__name__}",
            "a running asr-serve is needed",
            "check the address, or start one: asr-serve serve",
        ) from None
    finally:
        connection.close()


def _chunks_from_events(events: Iterator[dict[str, Any]], rate_hz: int) -> Generator[AudioChunk, None, None]:
    pcm16, emitted_samples = Pcm16Assembler(), 0
    words: tuple[SpokenWord, ...] = ()
    for event in events:
        match event.get("type"):
            case "speech.audio.words":
                words = tuple(
                    SpokenWord(word["word"], s_to_samples(word["start"], rate_hz), s_to_samples(word["end"], rate_hz))
                    for word in event["words"]
                )
            case "speech.audio.delta":
                pcm = np.frombuffer(pcm16.take_whole_samples(base64.b64decode(event["audio"])), "<i2").astype(np.int16)
                yield AudioChunk(pcm, rate_hz, emitted_samples, " ".join(word.text for word in words), words)
                words = ()
                emitted_samples += len(pcm)
            case "speech.audio.done":
                return
            case "error":
                raise _refused(event.get("error") or event)
    raise Unreachable("the server closed the connection before the end of the audio", "", "try again")


def _server_sent_events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of server-sent events, each on one line."""
    while line := answer.readline(MOST_EVENT_BYTES):
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if isinstance(event, dict):
                yield event


def _refusal(answer: http.client.HTTPResponse, server: str, path: str) -> Refused | Unreachable:
    body = answer.read(MOST_REFUSAL_BYTES)
    try:
        return _refused(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return Unreachable(f"{server} answers with {answer.status}, and is no asr-serve that has {path}")


def _refused(error: Mapping[str, Any]) -> Refused:
    return Refused(str(error.get("message", "the server refused")), str(error.get("code", "refused")))
