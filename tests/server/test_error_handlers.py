"""Every failure in OpenAI's shape, each with its status; nothing of ours leaks."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest
from running_server import eventually
from starlette.requests import Request

from asr_serve import errors
from asr_serve.errors import AsrServeError
from asr_serve.server.middleware.error_handlers import ErrorMiddleware, error_response, problem_for
from asr_serve.server.middleware.request_context import RequestContext, request_context
from asr_serve.server.server_sent_events import with_error_event
from asr_serve.server.telemetry.tracing import RequestTrace

ROUTE = "/v1/audio/transcriptions"
STATUS: dict[type[AsrServeError], int] = {
    errors.SourceNotFound: 400,
    errors.EmptyAudio: 400,
    errors.NotAudio: 400,
    errors.UnsupportedAudio: 400,
    errors.TruncatedAudio: 400,
    errors.CorruptAudio: 400,
    errors.AudioTooLong: 400,
    errors.TooFewClips: 400,
    errors.AudioTooLarge: 413,
    errors.OptionError: 400,
    errors.UnknownOption: 400,
    errors.MissingOption: 400,
    errors.UnsupportedOption: 400,
    errors.TextTooLong: 400,
    errors.NotMeasured: 400,
    errors.UnknownVoice: 400,
    errors.NoSuchVoice: 404,
    errors.EmptyText: 400,
    errors.UnsupportedScript: 400,
    errors.MalformedSsml: 400,
    errors.UnknownPhoneme: 400,
    errors.ProgramMissing: 404,
    errors.CacheNotWritable: 503,
    errors.ProgramFailed: 500,
    errors.MalformedRequest: 400,
    errors.RequestTimeout: 408,
    errors.IdleTimeout: 408,
    errors.UnknownCommand: 400,
    errors.OutOfTurn: 400,
    errors.UnsupportedProtocol: 400,
    errors.InvalidKey: 401,
    errors.NotAllowed: 403,
    errors.NoSuchRoute: 404,
    errors.ClientGone: 499,
    errors.UnknownModel: 404,
    errors.ModelNotLoaded: 404,
    errors.WrongModel: 400,
    errors.PromotionRefused: 409,
    errors.UnknownRoute: 404,
    errors.NoEvaluations: 404,
    errors.UnknownEvaluation: 404,
    errors.ClipAudioMissing: 404,
    errors.EvaluationsUnreadable: 503,
    errors.AuditLogCorrupt: 500,
    errors.AuditLogInUse: 500,
    errors.WeightsMissing: 404,
    errors.NoCheckpoint: 404,
    errors.WeightsCorrupt: 500,
    errors.UnknownJob: 404,
    errors.UnknownCall: 404,
    errors.UnknownFile: 404,
    errors.UnknownBatch: 404,
    errors.FileInUse: 409,
    errors.BatchEnded: 409,
    errors.QuotaExceeded: 413,
    errors.UnsupportedMediaType: 415,
    errors.PreconditionRequired: 428,
    errors.PreconditionFailed: 412,
    errors.Unprocessable: 422,
    errors.SessionExpired: 410,
    errors.UnknownSession: 404,
    errors.EventsExpired: 410,
    errors.TakenOver: 409,
    errors.AtCapacity: 429,
    errors.StoreUnavailable: 503,
    errors.ModelUnavailable: 503,
    errors.RateLimited: 429,
    errors.Draining: 503,
    errors.EngineClosed: 503,
    errors.EngineCrashed: 500,
    errors.StepFailed: 500,
    errors.StaleBuild: 500,
    errors.RankLost: 500,
    errors.PeerGone: 500,
    errors.PeerRefused: 500,
    errors.OutOfStep: 500,
    errors.TransportFailed: 500,
    errors.TransportTimeout: 500,
    errors.ChecksumMismatch: 500,
    errors.DiskFailed: 500,
    errors.DiskFull: 500,
    errors.Cancelled: 500,
}


def leaves(kind: type[AsrServeError] = AsrServeError) -> set[type[AsrServeError]]:
    below = set().union(*map(leaves, kind.__subclasses__()))
    return below or {kind}


def make(kind: type[AsrServeError]) -> AsrServeError:
    return kind("it came", "that is allowed", 1_500) if issubclass(kind, errors.AtCapacity) else kind("it came")


def scope() -> dict[str, object]:
    visit = RequestContext(request_id="req_1", route="/x", method="GET", trace=RequestTrace())
    return {"type": "http", "method": "GET", "path": "/x", "headers": [], "asr_serve.visit": visit}


def test_the_table_is_whole():
    # Those of a client, and of other processes than the server, are never answers of it.
    ours = {each for each in leaves() - leaves(errors.ServerError) if each.__module__ == errors.__name__}
    assert ours <= set(STATUS)


@pytest.mark.parametrize("kind", STATUS, ids=lambda kind: kind.__name__)
def test_status_and_headers(kind):
    answer = error_response(make(kind), "req_1")
    assert answer.status_code == STATUS[kind]
    assert ("retry-after" in answer.headers) == (answer.status_code in (429, 503))
    assert ("www-authenticate" in answer.headers) == (answer.status_code == 401)
    told = problem_for(make(kind), "req_1")
    # The one failure of ours that a client must not try again, and conflicts that OpenAI's clients would.
    final = kind in (errors.EngineCrashed, errors.FileInUse, errors.BatchEnded)
    assert (answer.headers.get("x-should-retry") == "false") == final
    if answer.status_code == 500 and not final:
        assert "it came" not in told.message
        assert "req_1" in told.message
    else:
        assert "it came" in told.message
    assert told.code


def test_retry_times_are_rounded_up():
    answer = error_response(errors.AtCapacity("full", "10", 1_001), "")
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("2", "1001")
    assert error_response(errors.RateLimited("full", "10", 1), "").headers["retry-after"] == "1"


def test_a_param_is_named():
    told = problem_for(errors.UnsupportedOption("spk=true", param="spk"), "")
    assert (told.param, told.code, told.type) == ("spk", "unsupported_option", "invalid_request_error")


async def test_what_nobody_foresaw(caplog):
    async def breaks(scope, receive, send):
        raise KeyError("a secret of the inside")

    sent = []

    async def send(message):
        sent.append(message)

    with caplog.at_level(logging.ERROR):
        await ErrorMiddleware(breaks)(scope(), None, send)
    assert sent[0]["status"] == 500
    assert b"secret" not in sent[1]["body"]
    assert b"req_1" in sent[1]["body"]
    assert "a secret of the inside" in caplog.text


async def test_an_answer_that_has_begun_is_cut_off():
    async def breaks(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise KeyError("too late")

    sent = []

    async def send(message):
        sent.append(message)

    with pytest.raises(KeyError):
        await ErrorMiddleware(breaks)(scope(), None, send)
    assert len(sent) == 1


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_has_gone_may_still_listen(begun):
    async def leaves_alone(scope, receive, send):
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise errors.ClientGone("gone")

    sent = []

    async def send(message):
        sent.append(message.get("status"))

    asked = scope()
    await ErrorMiddleware(leaves_alone)(asked, None, send)
    assert (request_context(asked).status, request_context(asked).rejection_reason) == (499, "client_gone")
    assert sent == ([200] if begun else [400, None])


async def test_a_stream_ends_in_an_event():
    async def events():
        yield b"data: 1\n\n"
        raise errors.CorruptAudio("the decoder gave up")

    asked = scope()
    found = [piece async for piece in with_error_event(events(), asked)]
    assert found[0] == b"data: 1\n\n"
    assert found[1].startswith(b'event: error\ndata: {"type":"error","error":{"message":"the decoder gave up.')
    assert found[1].endswith(b"\n\n")
    assert request_context(asked).rejection_reason == "corrupt_audio"


@pytest.mark.parametrize("left_early", [False, True])
async def test_what_makes_a_streams_events_is_closed_with_it(left_early: bool) -> None:
    closed = asyncio.Event()

    async def events():
        try:
            yield b"data: 1\n\n"
            yield b"data: 2\n\n"
        finally:
            closed.set()

    stream = with_error_event(events(), scope())
    assert await anext(stream) == b"data: 1\n\n"
    if not left_early:
        assert [piece async for piece in stream] == [b"data: 2\n\n"]
    await stream.aclose()
    assert closed.is_set()


# --- over the real server -----------------------------------------------------------------------------


def error_of(answer: httpx.Response) -> dict[str, object]:
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    return dict(error)


def test_no_such_route(server):
    answer = server.http.get("/v2/nothing")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "no_such_route")
    assert server.http.get("/v1/models/").status_code == 404  # no redirects


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [("GET", ROUTE, "POST"), ("PUT", "/asr", "POST"), ("DELETE", "/v1/models", "GET"), ("POST", "/health", "GET")],
)
def test_no_such_method(server, method, path, allow):
    answer = server.http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    assert error_of(answer)["code"] == "no_such_route"


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/json"},
        {"Content-Type": "multipart/form-data"},
        {"Content-Type": "multipart/form-data; boundary="},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {},
    ],
)
def test_bodies_that_are_no_form(server, headers):
    answer = server.http.post(ROUTE, content=b'{"file": "x"}', headers=headers)
    assert (answer.status_code, error_of(answer)["code"]) == (400, "malformed_request")


@pytest.mark.parametrize("sent", ["abc-123", "trace:7/9=x+y.z_", "a" * 128])
def test_a_clients_own_request_id(server, sent):
    assert server.http.get("/health", headers={"X-Request-ID": sent}).headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", ["", "a b", "a" * 129, "{x}", 'a"b'])
def test_a_request_id_that_is_not_sane(server, sent):
    got = server.http.get("/health", headers={"X-Request-ID": sent}).headers["x-request-id"]
    assert got.startswith("req_")
    assert len(got) == 36


def test_requests_are_counted_by_route_not_by_path(server):
    for path in ("/one", "/two", "/three"):
        server.http.get(path)
    server.http.request("BREW", "/health")
    assert server.counted("asr_serve_requests_total", route="unmatched", method="GET", status="404") >= 3
    other = {"route": "/health", "method": "other", "status": "405"}
    eventually(lambda: server.counted("asr_serve_requests_total", **other) == 1)  # counted when the answer is sent
    assert server.counted("asr_serve_requests_in_flight", route="unmatched") == 0
    assert server.counted("asr_serve_rejections_total", reason="no_such_route") >= 4


def test_a_failure_inside_over_http(serve, beckett, caplog, monkeypatch):
    """The engine's tokenizer breaks: on the job's thread, far from any route."""
    server = serve()

    def broken(tokens):
        raise ZeroDivisionError("a secret of the inside")

    # The servers of one process share a checkpoint, and with it its tokenizer.
    monkeypatch.setattr(server.engines.get().tokenizer, "decode", broken)
    answer = server.http.post(ROUTE, files={"file": beckett.read_bytes()}, headers={"X-Request-ID": "mine"})
    error = error_of(answer)
    assert (answer.status_code, error["type"], error["code"]) == (500, "server_error", "internal_error")
    assert "mine" in str(error["message"])
    assert "secret" not in answer.text
    assert "a secret of the inside" in caplog.text
    server.expect_empty()


def test_starlette_request_is_what_routes_see():
    assert Request(scope()).method == "GET"
