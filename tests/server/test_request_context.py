"""The client's end of a request: gone, slow, quiet; and what is told of it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import subprocess

import pytest
from children import Child
from prometheus_client import CollectorRegistry
from raw_http import FILE_END, FORM_END, Raw, field, file_head
from running_server import MODEL, eventually

from asr_serve.errors import ClientGone, OptionError
from asr_serve.metrics import ServerMetrics
from asr_serve.protocols.form_fields import FormFields
from asr_serve.server import server_sent_events
from asr_serve.server.middleware import request_context as request_context_module
from asr_serve.server.middleware.request_context import RequestContextMiddleware, request_context
from asr_serve.server.telemetry.tracing import RequestTrace, Tracer

ROUTE = "/v1/audio/transcriptions"


# --- alone ----------------------------------------------------------------------------------------------


class Client:
    """The other end of an ASGI server."""

    def __init__(self, *messages: dict[str, object]) -> None:
        self.sent: list[dict[str, object]] = []
        self.inbox: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        for message in messages:
            self.inbox.put_nowait(message)
        self.received = 0

    async def receive(self):
        self.received += 1
        return await self.inbox.get()

    async def send(self, message):
        self.sent.append(message)


def body(data: bytes, more: bool = False) -> dict[str, object]:
    return {"type": "http.request", "body": data, "more_body": more}


GONE = {"type": "http.disconnect"}


def scope(method: str = "POST") -> dict[str, object]:
    return {"type": "http", "method": method, "path": "/x", "headers": []}


def layer(app, tracer: Tracer | None = None, **options: bool) -> tuple[RequestContextMiddleware, ServerMetrics]:
    metrics = ServerMetrics("0", CollectorRegistry())
    return RequestContextMiddleware(app, metrics, tracer or Tracer(), lambda scope: "/x", **options), metrics


def counted(metrics: ServerMetrics, status: str) -> float:
    labels = {"route": "/x", "method": "POST", "status": status}
    return metrics.registry.get_sample_value("asr_serve_requests_total", labels) or 0.0


async def read_all(receive) -> None:
    while (await receive()).get("more_body"):
        pass


async def answer(send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"text"})


async def test_work_is_cancelled_when_the_client_goes():
    cleaned = []

    async def app(scope, receive, send):
        await read_all(receive)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)  # cleaning up may take its time
            cleaned.append(True)

    client = Client(body(b"abc"), GONE)
    asked = scope()
    visits_, metrics = layer(app)
    await asyncio.wait_for(visits_(asked, client.receive, client.send), 60)
    assert cleaned == [True]
    assert client.sent == []
    assert (request_context(asked).status, request_context(asked).rejection_reason) == (499, "client_gone")
    assert counted(metrics, "499") == 1
    assert asyncio.current_task().cancelling() == 0


@pytest.mark.parametrize("strict", [False, True])
async def test_unknown_fields_are_named_in_a_header_unless_the_server_is_strict(strict: bool):
    async def app(scope, receive, send):
        await asyncio.create_task(parse())  # as an upload's form, whose rest a task reads
        await answer(send)

    async def parse():
        FormFields({"user": ["me"]}, ["model"])

    client = Client(body(b""))
    middleware, _ = layer(app, strict_fields=strict)
    if strict:
        with pytest.raises(OptionError, match="unknown field 'user'"):
            await middleware(scope(), client.receive, client.send)
        assert client.sent == []
        return
    asked = scope()
    await middleware(asked, client.receive, client.send)
    assert (b"x-ignored", b"user") in client.sent[0]["headers"]
    assert str(request_context(asked).ignored) == "user"


async def test_a_shutdown_is_no_client_that_went():
    async def app(scope, receive, send):
        await read_all(receive)
        await asyncio.sleep(60)

    client = Client(body(b""))
    task = asyncio.create_task(layer(app)[0](scope(), client.receive, client.send))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_end_of_the_answer_is_no_client_that_went():
    """Servers say http.disconnect then, too."""

    async def app(scope, receive, send):
        await read_all(receive)
        await answer(send)
        client.inbox.put_nowait(GONE)
        await asyncio.sleep(0.01)

    client = Client(body(b""))
    visits_, metrics = layer(app)
    await visits_(scope(), client.receive, client.send)
    assert counted(metrics, "200") == 1


async def test_a_client_that_takes_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(request_context_module, "SEND_TIMEOUT_S", 0.02)

    async def app(scope, receive, send):
        with pytest.raises(ClientGone):
            await answer(send)
        raise ClientGone("as it was")

    async def send(message):
        await asyncio.sleep(60)

    with contextlib.suppress(ClientGone):  # Replies is not there to take it
        await layer(app)[0](scope(), Client().receive, send)


async def test_a_little_is_read_of_what_is_left(monkeypatch):
    async def refuse(scope, receive, send):
        await answer(send)

    client = Client(*[body(bytes(1 << 20), True)] * 80)
    await layer(refuse)[0](scope(), client.receive, client.send)
    assert client.received == 64  # MiB

    client = Client(body(bytes(10), True), body(b""), body(b"the next request's"))
    await layer(refuse)[0](scope(), client.receive, client.send)
    assert client.received == 2

    monkeypatch.setattr(request_context_module, "DRAIN_BODY_S", 0.02)
    client = Client()
    await asyncio.wait_for(layer(refuse)[0](scope(), client.receive, client.send), 60)
    client = Client()
    await layer(refuse)[0](scope("GET"), client.receive, client.send)
    assert client.received == 0


async def test_what_is_traced():
    class Trace(RequestTrace):
        def __init__(self) -> None:
            self.told: dict[str, object] = {}

        def set_attributes(self, **attributes):
            self.told |= attributes

        def set_response(self, route, status):
            self.told |= {"route": route, "status": status}

    class Traced(Tracer):
        def __init__(self) -> None:
            self.made = Trace()

        def start_request(self, method, headers):
            return self.made

    async def app(scope, receive, send):
        request_context(scope).audio_s, request_context(scope).model = 2.5, "tiny"
        await answer(send)

    tracer = Traced()
    asked = scope("GET") | {"headers": [(b"x-request-id", b"mine")]}
    await layer(app, tracer)[0](asked, Client().receive, Client().send)
    expected = {"request_id": "mine", "model": "tiny", "audio_ms": 2_500, "route": "/x", "status": 200}
    assert tracer.made.told == expected


# --- over the real server -----------------------------------------------------------------------------


@pytest.mark.one_server("an ingress logs in its own process")
def test_the_access_log(server, beckett, caplog):
    with caplog.at_level(logging.INFO, "asr_serve.access"):
        server.http.post(ROUTE, files={"file": beckett.read_bytes()}, headers={"X-Request-ID": "logged"})
        eventually(lambda: any(r.__dict__.get("route") == ROUTE for r in caplog.records))
    (line,) = [record.__dict__ for record in caplog.records if record.__dict__.get("route") == ROUTE]
    assert (line["method"], line["status"], line["model"], line["client"]) == ("POST", 200, MODEL, "anonymous")
    assert line["audio_ms"] == 9_963
    assert line["duration_ms"] > 0


def test_a_quiet_stream_says_so(server, beckett, monkeypatch):
    monkeypatch.setattr(server_sent_events, "KEEP_ALIVE_S", 0.1)
    with Raw(server.port) as raw:
        raw.head(ROUTE)
        raw.chunk(field("model", MODEL) + field("stream", "true") + file_head() + beckett.read_bytes()[:1_000])
        assert b" 200 " in raw.until(b"\r\n\r\n")
        for _ in range(3):
            raw.until(server_sent_events.KEEP_ALIVE)
        raw.chunk(beckett.read_bytes()[1_000:] + FILE_END + FORM_END)
        raw.end()
        assert raw.event()["delta"].startswith("Ever tried")
        assert raw.event()["type"] == "transcript.text.done"


def test_one_connection_many_requests(server, beckett):
    """Refused, answered, streamed: the connection stays good."""
    with Raw(server.port) as raw:
        for fields, status in ((b"", 200), (field("langauge", "1"), 400), (field("stream", "true"), 200)) * 2:
            raw.post(ROUTE, fields + file_head() + beckett.read_bytes() + FILE_END + FORM_END)
            got, _, answer = raw.answer()
            assert (got, b"Ever tried" in answer) == (status, status == 200)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("version", ["--http1.1", "--http2-prior-knowledge"])
def test_curl(server, cities, version):
    """Its way with fields after the file, with `Expect: 100-continue`, and over HTTP/2."""
    command = ["curl", "-sS", version, "-F", f"file=@{cities}", "-F", f"model={MODEL}"]
    url = server.url + ROUTE
    found = subprocess.run([*command, url], capture_output=True, check=True, timeout=60)
    text = json.loads(found.stdout)["text"]
    assert "best of times" in text
    found = subprocess.run([*command, "-F", "stream=true", url], capture_output=True, check=True, timeout=60)
    events = [json.loads(line[6:]) for line in found.stdout.decode().splitlines() if line.startswith("data: ")]
    assert "".join(event["delta"] for event in events[:-1]) == events[-1]["text"] == text

    slow = ["--limit-rate", "200K", "-F", "stream=true", url]  # it is seen before it is through
    leaving = Child([*command, *slow], stdout=subprocess.DEVNULL)
    eventually(lambda: server.held()["inside"])
    leaving.kill()
    leaving.wait(60)
    server.expect_empty()
