"""Who speaks it: a model in this process, or a server."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np

import asr_serve
from asr_serve.audio.pcm import Pcm16
from asr_serve.errors import OptionError, Refused, Unreachable
from asr_serve.pipelines.speaking.options import SpeakOptions, Spoken, SpokenWord
from asr_serve.protocols.speech.openai import PATH
from asr_serve.units import s_to_samples

OPEN_S, READ_S = 10.0, 120.0
"""A server that takes longer to answer, and to send the next of its sound, is none."""
MOST_EVENT_BYTES = 1 << 22
MOST_REFUSAL_BYTES = 1 << 16


class Here:
    """A model that is loaded on entering. Raises what asr_serve.load and Model.speak do."""

    def __init__(self, model: str, options: Mapping[str, Any], speech: Mapping[str, Any], **loading: Any) -> None:
        """`options`: SpeakOptions's; `speech`: what else Model.speak takes. Raises OptionError, before anything is
        loaded."""
        SpeakOptions.of(dict(options))
        self._model, self._options, self._loading = model, {**options, **speech}, loading
        self._held = ExitStack()

    def __enter__(self) -> Self:
        self._loaded = self._held.enter_context(asr_serve.load(self._model, turn_model="none", **self._loading))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    @property
    def model(self) -> str:
        return self._loaded.card.name

    def speak(self, text: str | Iterable[str]) -> Generator[Spoken, None, None]:
        with self._loaded.speak(text, **self._options) as speech:
            yield from speech


class There:
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

    def speak(self, text: str | Iterable[str]) -> Generator[Spoken, None, None]:
        whole = text if isinstance(text, str) else "".join(text)
        asked = {"input": whole, "response_format": "pcm", "stream_format": "sse", "words": True, **self._asked}
        with self._answer("POST", PATH, json.dumps(asked).encode()) as answer:
            self.model = answer.headers.get("x-model", "")
            rate_hz = int(answer.headers.get("x-sample-rate", "24000"))
            yield from _spoken(_events(answer), rate_hz)

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


def _spoken(events: Iterator[dict[str, Any]], rate_hz: int) -> Generator[Spoken, None, None]:
    pcm16, given = Pcm16(), 0
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
                pcm = np.frombuffer(pcm16.whole(base64.b64decode(told["audio"])), "<i2").astype(np.int16)
                yield Spoken(pcm, rate_hz, given, " ".join(word.text for word in words), words)
                words = ()
                given += len(pcm)
            case "speech.audio.done":
                return
            case "error":
                raise _refused(told.get("error") or told)
    raise Unreachable("the server ended in the middle of its speech", "all of it is needed", "try again")


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
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
