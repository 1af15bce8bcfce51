"""Keys, rates, room and draining: alone with a clock of their own, and over the real server."""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import ExitStack

import openai
import pytest
from raw_http import FILE_END, FORM_END, Raw, field, file_head
from running_server import MODEL, Running, eventually
from starlette.routing import Route, WebSocketRoute

from asr_serve.config import ServeConfig
from asr_serve.errors import AtCapacity, Draining, InvalidKey, NoSuchRoute, RateLimited
from asr_serve.server.middleware.admission import (
    ANONYMOUS,
    AdmissionClass,
    AdmissionController,
    AdmissionTable,
    ApiKeys,
    TokenBucket,
    admitted_as,
)
from asr_serve.server.middleware.request_context import ApiClient

ROUTE = "/v1/audio/transcriptions"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


# --- alone ----------------------------------------------------------------------------------------------


def test_each_key_has_a_caller_of_its_own():
    keys = ApiKeys(["first", "second"], ["boss"])
    found = [keys.authenticate(sent) for sent in ("Bearer first", "bearer  second ", "Bearer boss")]
    assert [(client.name, client.admin) for client in found] == [("key-1", False), ("key-2", False), ("admin-1", True)]
    assert len({client.owner for client in found}) == 3


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Bearer firs", "Bearer firstt", "Basic first", "first", "Bearer f\udcffi"]
)
def test_no_key_and_wrong_keys(header):
    keys = ApiKeys(["first"], [])
    with pytest.raises(InvalidKey) as refused:
        keys.authenticate(header.encode("utf-8", "replace").decode())
    assert "first" not in str(refused.value)


def test_without_api_keys_nobody_is_asked():
    assert ApiKeys([], []).authenticate("") == ANONYMOUS
    assert ApiKeys([], []).authenticate("Bearer whatever") == ANONYMOUS
    assert ApiKeys([], ["boss"]).authenticate("Bearer whatever") == ANONYMOUS
    assert ApiKeys([], ["boss"]).authenticate("Bearer boss").admin


def test_a_key_that_is_both_is_an_admins():
    assert ApiKeys(["same"], ["same"]).authenticate("Bearer same").admin


def test_a_bucket_fills_again():
    clock = Clock()
    bucket = TokenBucket(60, clock)
    assert [bucket.acquire() for _ in range(60)] == [0.0] * 60
    assert bucket.acquire() == pytest.approx(1.0)
    clock.now_s += 0.5
    assert bucket.acquire() == pytest.approx(0.5)
    clock.now_s += 0.5
    assert bucket.acquire() == 0.0
    assert bucket.acquire() > 0
    clock.now_s += 3_600
    assert [bucket.acquire() for _ in range(60)] == [0.0] * 60
    assert bucket.acquire() > 0


def test_rates_are_each_keys_own():
    gate = AdmissionController(ServeConfig(requests_per_minute_per_key=2), Clock())
    one, two = ApiClient("key-1"), ApiClient("key-2")
    for caller in (one, one, two):
        with gate.admit(caller, work=True):
            pass
    with pytest.raises(RateLimited) as refused, gate.admit(one, work=True):
        pass
    assert refused.value.retry_after_ms == 30_000
    with gate.admit(two, work=True), gate.admit(one, work=False):
        assert (gate.active_work, gate.in_flight_requests) == (1, 2)


def test_room_for_all_and_for_one():
    clock = Clock()
    gate = AdmissionController(ServeConfig(max_concurrent=3, concurrent_per_key=2), clock)
    one, two, three = ApiClient("key-1"), ApiClient("key-2"), ApiClient("key-3")
    with ExitStack() as inside:
        inside.enter_context(gate.admit(one, work=True))
        inside.enter_context(gate.admit(one, work=True))
        with pytest.raises(AtCapacity, match="with this key"), gate.admit(one, work=True):
            pass
        inside.enter_context(gate.admit(two, work=True))
        with pytest.raises(AtCapacity, match="3 requests") as refused, gate.admit(three, work=True):
            pass
        assert refused.value.retry_after_ms > 0
        clock.now_s += 600
    assert (gate.active_work, gate.in_flight_requests) == (0, 0)
    with gate.admit(one, work=True):
        pass


def test_a_refusal_costs_no_token():
    gate = AdmissionController(ServeConfig(max_concurrent=1, requests_per_minute_per_key=2), Clock())
    caller = ApiClient("key-1")
    with gate.admit(caller, work=True):
        for _ in range(5):
            with pytest.raises(AtCapacity), gate.admit(caller, work=True):
                pass
    with gate.admit(caller, work=True):
        pass
    with pytest.raises(RateLimited), gate.admit(caller, work=True):
        pass


async def test_draining_lets_those_inside_finish():
    gate = AdmissionController(ServeConfig())
    await asyncio.wait_for(gate.wait_idle(), 60)
    with gate.admit(ANONYMOUS, work=True):
        gate.drain()
        with pytest.raises(Draining), gate.admit(ANONYMOUS, work=False):
            pass
        waiting = asyncio.create_task(gate.wait_idle())
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 60)


# --- live sessions ----------------------------------------------------------------------------------------


def test_seats_are_counted_apart_from_work_and_share_a_keys_limit():
    gate = AdmissionController(ServeConfig(max_concurrent=2, max_live_sessions=2, concurrent_per_key=2), Clock())
    one, two, three = ApiClient("key-1"), ApiClient("key-2"), ApiClient("key-3")
    with ExitStack() as inside:
        inside.enter_context(gate.admit(one, live=True))
        inside.enter_context(gate.admit(one, work=True))
        with pytest.raises(AtCapacity, match="with this key"), gate.admit(one, live=True):
            pass
        inside.enter_context(gate.admit(two, live=True))
        with pytest.raises(AtCapacity, match="2 live sessions are open"), gate.admit(three, live=True):
            pass
        inside.enter_context(gate.reserve_work())
        assert (gate.active_work, gate.live_sessions, gate.in_flight_requests) == (2, 2, 3)
        with pytest.raises(AtCapacity, match="2 requests"), gate.reserve_work():
            pass
    assert (gate.active_work, gate.live_sessions, gate.in_flight_requests) == (0, 0, 0)


def test_who_wants_to_know_of_the_drain_is_told_even_if_late():
    gate, told = AdmissionController(ServeConfig(), Clock()), []
    with gate.on_drain(lambda: told.append("one")):
        with gate.on_drain(lambda: told.append("gone")):
            pass
        gate.drain()
        with gate.on_drain(lambda: told.append("late")):
            assert told == ["one", "late"]


# --- over the real server -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked(serve):
    return serve(api_keys=("secret-one", "secret-two"), admin_keys=("secret-boss",))


@pytest.mark.parametrize("key", ["secret-one", "secret-two", "secret-boss"])
def test_a_good_key(locked, beckett, key):
    assert locked.openai(key).audio.transcriptions.create(model=MODEL, file=beckett).text


def test_a_wrong_key(locked, beckett):
    with pytest.raises(openai.AuthenticationError) as refused:
        locked.openai("secret-three").audio.transcriptions.create(model=MODEL, file=beckett)
    assert refused.value.code == "invalid_api_key"
    assert refused.value.response.headers["www-authenticate"] == "Bearer"
    assert "secret" not in refused.value.message
    for path in ("/v1/models", "/metrics", "/nowhere"):
        assert locked.http.get(path).status_code == 401
    assert locked.http.get("/metrics", headers={"Authorization": "Bearer secret-one"}).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/docs", "/openapi.json"])
def test_open_to_everybody(locked, path):
    assert locked.http.get(path).status_code == 200


def test_a_wrong_key_is_refused_before_the_body(locked):
    with Raw(locked.port) as raw:
        raw.head(ROUTE, 500_000_000)
        status, headers, _ = raw.answer()
    assert (status, headers["x-request-id"][:4]) == (401, "req_")


def test_full_is_429_before_the_body_and_free_again(serve, beckett):
    server = serve(max_concurrent=1)
    with Raw(server.port) as busy, Raw(server.port) as second:
        busy.head(ROUTE)
        busy.chunk(field("model", MODEL) + file_head() + beckett.read_bytes())
        eventually(lambda: server.gate.active_work == 1)
        second.head(ROUTE, 500_000_000)
        status, headers, body = second.answer()
        assert (status, json.loads(body)["error"]["code"]) == (429, "at_capacity")
        assert int(headers["retry-after"]) >= 1
        assert int(headers["retry-after"]) == math.ceil(int(headers["retry-after-ms"]) / 1_000)
        assert server.http.get("/v1/models").status_code == 200  # no work
        with pytest.raises(openai.RateLimitError):
            server.openai().audio.transcriptions.create(model=MODEL, file=beckett)
    server.expect_empty()
    assert server.openai().audio.transcriptions.create(model=MODEL, file=beckett).text


def test_the_clients_own_retries_get_through(serve, beckett):
    """The openai package waits as long as it is told and asks again."""
    server = serve(requests_per_minute_per_key=60)
    for _ in range(60):
        server.http.post(ROUTE)
    client = server.openai(max_retries=5)
    assert client.audio.transcriptions.create(model=MODEL, file=beckett).text
    assert server.counted("asr_serve_rejections_total", reason="rate_limit_exceeded") >= 1


def test_draining(serve, beckett):
    server = serve()
    with Raw(server.port) as raw:
        raw.head(ROUTE)
        raw.chunk(field("model", MODEL) + file_head() + beckett.read_bytes())
        eventually(lambda: server.gate.active_work == 1)
        server.loop.call_soon_threadsafe(server.gate.drain)
        eventually(lambda: server.gate.draining)
        with pytest.raises(openai.InternalServerError) as refused:
            server.openai().audio.transcriptions.create(model=MODEL, file=beckett)
        assert refused.value.status_code == 503
        assert refused.value.code == "draining"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        ready = server.http.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        assert "retry-after" in ready.headers
        assert server.http.get("/health").status_code == 200
        raw.chunk(FILE_END + FORM_END)
        raw.end()
        status, _, body = raw.answer()  # who was inside is answered
    assert (status, json.loads(body).keys()) == (200, {"text", "usage"})
    server.call(asyncio.wait_for(server.gate.wait_idle(), 60))


def test_no_other_site_may_call_unless_told(server, serve):
    asked = {"Origin": "https://app.example.org", "Access-Control-Request-Method": "POST"}
    refused = server.http.options(ROUTE, headers=asked)
    assert refused.status_code == 405
    assert "access-control-allow-origin" not in server.http.get("/health", headers=asked).headers

    told = serve(cors_origins=("https://app.example.org",), api_keys=("secret",))
    asked["Access-Control-Request-Headers"] = "authorization,x-stainless-lang,x-stainless-retry-count"
    allowed = told.http.options(ROUTE, headers=asked)  # browsers send no key with this
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.example.org"
    assert "x-stainless-lang" in allowed.headers["access-control-allow-headers"]
    answer = told.http.get("/v1/models", headers={"Origin": "https://app.example.org"})
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == "https://app.example.org"  # or nobody could read it
    other = told.http.options(ROUTE, headers=asked | {"Origin": "https://other.example.org"})
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("route", [ROUTE, "/asr", "/v1/stream", "/v1/stream/0/end"])
def test_forms_that_other_sites_post_are_refused_before_the_body(server, serve, route):
    """Browsers post them unasked; a page that cannot read the answer could still keep the server busy."""
    told = server.http.post(
        route, headers={"Origin": "https://evil.example", "Content-Type": "text/plain"}, content=b""
    )
    assert (told.status_code, told.json()["error"]["code"]) == (403, "not_allowed")
    assert "cors_origins" in told.json()["error"]["message"]
    for origin in (server.url, None):
        own = server.http.post(route, headers={"Origin": origin} if origin else {}, content=b"")
        assert own.status_code != 403, own.text
    good = serve(cors_origins=("https://good.example",))
    assert good.http.post(route, headers={"Origin": "https://good.example"}, content=b"").status_code != 403
    assert good.http.post(route, headers={"Origin": "null"}, content=b"").status_code == 403


# --- admission classes ------------------------------------------------------------------------------


def test_every_route_has_the_class_that_its_endpoint_declares(server: Running) -> None:
    table = AdmissionTable(server.app.state.routes)
    for method, path, kind in (
        ("GET", "/health", AdmissionClass.PUBLIC),
        ("POST", "/ready", AdmissionClass.PUBLIC),
        ("GET", "/openapi.json", AdmissionClass.PUBLIC),
        ("GET", "/assets/index.js", AdmissionClass.PUBLIC),
        ("GET", "/assets/a/b", AdmissionClass.KEY),
        ("GET", "/metrics", AdmissionClass.KEY),
        ("GET", "/v1/models", AdmissionClass.KEY),
        ("GET", "/no/such/path", AdmissionClass.KEY),
        ("POST", "/v1/audio/transcriptions", AdmissionClass.WORK),
        ("POST", "/v1/audio/translations", AdmissionClass.WORK),
        ("POST", "/asr", AdmissionClass.WORK),
        ("POST", "/v1/audio/speech", AdmissionClass.WORK),
        ("POST", "/v1/listen", AdmissionClass.WORK),
        ("POST", "/v1/speak", AdmissionClass.WORK),
        ("GET", "/v1/audio/speech", AdmissionClass.KEY),
        ("GET", "/v1/audio/voices", AdmissionClass.KEY),
        ("POST", "/v1/stream", AdmissionClass.KEY),
    ):
        assert table.http(method, path) is kind, path
    for path in ("/", "/ws", "/v1/realtime", "/v1/audio/speech/stream", "/v1/listen", "/v1/speak"):
        assert table.socket(path) is AdmissionClass.LIVE
    assert table.socket("/v1/stream") is AdmissionClass.RESERVES_ITSELF
    with pytest.raises(NoSuchRoute, match="WebSockets: /, /v1/audio/speech/stream, /v1/listen, /v1/realtime, "):
        table.socket("/v2")


@pytest.mark.parametrize(
    ("kind", "is_socket"),
    [
        (None, True),
        (AdmissionClass.PUBLIC, True),
        (AdmissionClass.WORK, True),
        (AdmissionClass.LIVE, False),
        (AdmissionClass.RESERVES_ITSELF, False),
    ],
)
def test_a_route_without_the_limit_that_it_needs_is_refused(kind: AdmissionClass | None, is_socket: bool) -> None:
    @admitted_as(AdmissionClass.LIVE)
    async def limited(_: object) -> None: ...

    async def wrong(_: object) -> None: ...

    if kind is not None:
        admitted_as(kind)(wrong)
    routes = [Route("/a", lambda _: None), WebSocketRoute("/b", limited)]
    assert AdmissionTable(routes).socket_paths == {"/b"}
    with pytest.raises(TypeError, match="/c declares"):
        AdmissionTable([*routes, WebSocketRoute("/c", wrong) if is_socket else Route("/c", wrong)])


@pytest.mark.parametrize("kind", [None, AdmissionClass.KEY, AdmissionClass.WORK])
@pytest.mark.parametrize("public_first", [False, True])
def test_a_public_route_has_its_path_for_itself(kind: AdmissionClass | None, public_first: bool) -> None:
    """It is public whatever the method: a POST that needs a key would need none."""

    @admitted_as(AdmissionClass.PUBLIC)
    async def state(_: object) -> None: ...

    async def change(_: object) -> None: ...

    if kind is not None:
        admitted_as(kind)(change)
    routes = [Route("/state", state), Route("/state", change, methods=["POST"])]
    assert AdmissionTable(routes[:1]).public_paths == {"/state"}
    with pytest.raises(TypeError, match="/state is public"):
        AdmissionTable(routes if public_first else routes[::-1])
