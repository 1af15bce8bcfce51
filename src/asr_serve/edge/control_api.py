"""Control API of the edge: sessions are created, shown and ended over HTTP; results are server-sent events, or messages
of a WebSocket."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from asr_serve.edge import event_socket
from asr_serve.edge.edge_service import EdgeService, EdgeSessionRequest
from asr_serve.edge.event_log import EdgeEventLog, parse_event_id
from asr_serve.edge.telephone import CallRequest, Telephone
from asr_serve.errors import AsrServeError, ClientGone, InvalidKey, MalformedRequest, NoSuchRoute, UnsupportedMediaType
from asr_serve.metrics import CONTENT_TYPE
from asr_serve.server.middleware.error_handlers import JSON, error_response
from asr_serve.server.server_sent_events import stream_log
from asr_serve.server.uploads.request_body import read_body

MAX_BODY_BYTES = 1 << 16
BODY_TIMEOUT_S = 10.0
PATH = "/v1/edge/sessions"
CALLS_PATH = "/v1/edge/calls"
PLAY_RATE_HZ = 24_000
"""Rate of audio to be played, where none is named: that of /v1/audio/speech."""

Handler = Callable[[Request], Awaitable[Response]]


def create_control_api(service: EdgeService, telephone: Telephone | None = None) -> Starlette:
    """Application of the control API. `telephone`: whose calls are told, placed and spoken to."""
    keys = [key.encode() for key in service.config.api_keys]

    def checked(handle: Handler, *, public: bool = False) -> Handler:
        """Wraps a handler: checks the key, and answers errors."""

        async def answer(request: Request) -> Response:
            try:
                if keys and not public:
                    _check_key(request.headers.get("authorization", ""), keys)
                return await handle(request)
            except AsrServeError as error:
                return error_response(error, secrets.token_hex(8))

        return answer

    def events_socket(find: Callable[[WebSocket], EdgeEventLog]) -> Callable[[WebSocket], Awaitable[None]]:
        """Endpoint that tells the events of a log. All are accepted: a browser hides why a handshake was refused."""

        async def serve(websocket: WebSocket) -> None:
            await websocket.accept()
            try:
                event_socket.check_origin(websocket)
                query = websocket.query_params
                if keys:  # a browser's WebSocket has no header for it
                    bearer = f"Bearer {query['api_key']}" if "api_key" in query else ""
                    _check_key(websocket.headers.get("authorization", bearer), keys)
                log = find(websocket)
                position = parse_event_id(query.get("after", "0"))
                with log.place():
                    await event_socket.send_events(websocket, log, position)
            except AsrServeError as error:
                await event_socket.refuse(websocket, error)

        return serve

    async def create(request: Request) -> Response:
        body = await _read_json(request)
        try:
            asked = msgspec.json.decode(body or b"{}", type=EdgeSessionRequest)
        except msgspec.DecodeError as error:
            raise MalformedRequest(
                f"a session was requested that cannot be read: {error}",
                f"JSON with any of: {', '.join(EdgeSessionRequest.__struct_fields__)}",
                'like {"payload_types":{"96":"opus/48000/2"},"options":{"language":"en"}}',
            ) from None
        return _json(service.create(asked), 201)

    async def list_all(request: Request) -> Response:
        return _json({"sessions": service.describe_all()})

    async def describe(request: Request) -> Response:
        return _json(service.describe(request.path_params["id"]))

    async def end(request: Request) -> Response:
        service.end(request.path_params["id"])
        return Response(status_code=204)

    async def events(request: Request) -> Response:
        log = service.events(request.path_params["id"])
        return stream_log(request, log, "events of an edge session")

    def line() -> Telephone:
        if telephone is None:
            raise NoSuchRoute("this edge has no telephone", "one with sip settings", "start it with --sip HOST:PORT")
        return telephone

    async def place_call(request: Request) -> Response:
        body = await _read_json(request)
        try:
            asked = msgspec.json.decode(body, type=CallRequest)
        except msgspec.DecodeError as error:
            raise MalformedRequest(f"a call was requested that cannot be read: {error}", 'like {"to":"7001"}') from None
        return _json(await line().place_call(asked), 201)

    async def call_events(request: Request) -> Response:
        return stream_log(request, line().events, "events of calls")

    async def play(request: Request) -> Response:
        rate = request.query_params.get("rate", str(PLAY_RATE_HZ))
        if not (rate.isascii() and rate.isdigit() and len(rate) <= 6):
            raise MalformedRequest(f"rate={rate[:20]!r}", "samples per second of the body, 16-bit little-endian")
        try:
            return _json(await line().play(request.path_params["id"], request.stream(), int(rate)))
        except ClientDisconnect:
            raise ClientGone("the connection that sent audio was lost", "what was not played is dropped") from None

    async def stop_playing(request: Request) -> Response:
        line().stop_playing(request.path_params["id"])
        return Response(status_code=204)

    async def metrics(request: Request) -> Response:
        if telephone is not None:
            telephone.note_metrics()
        return Response(service.render_metrics(), media_type=CONTENT_TYPE)

    async def health(request: Request) -> Response:
        return _json({"status": "ok"})

    async def missing(request: Request) -> Response:
        raise NoSuchRoute(f"{request.method} {request.url.path[:200]} is no route", f"see {PATH} in docs/edge.md")

    one = f"{PATH}/{{id}}"
    return Starlette(
        routes=[
            Route(PATH, checked(create), methods=["POST"]),
            Route(PATH, checked(list_all), methods=["GET"]),
            Route(one, checked(describe), methods=["GET"]),
            Route(one, checked(end), methods=["DELETE"]),
            Route(f"{one}/events", checked(events), methods=["GET"]),
            WebSocketRoute(f"{one}/events", events_socket(lambda each: service.events(each.path_params["id"]))),
            Route(f"{one}/audio", checked(play), methods=["POST"]),
            Route(f"{one}/audio", checked(stop_playing), methods=["DELETE"]),
            Route(CALLS_PATH, checked(place_call), methods=["POST"]),
            Route(f"{CALLS_PATH}/events", checked(call_events), methods=["GET"]),
            WebSocketRoute(f"{CALLS_PATH}/events", events_socket(lambda _: line().events)),
            Route("/metrics", checked(metrics), methods=["GET"]),
            Route("/health", checked(health, public=True), methods=["GET"]),
            Route("/{path:path}", checked(missing), methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
        ]
    )


def _check_key(authorization: str, keys: list[bytes]) -> None:
    """Raises InvalidKey."""
    scheme, _, key = authorization.partition(" ")
    came = key.strip().encode("utf-8", "replace")
    fits = [hmac.compare_digest(came, known) for known in keys]  # all of them: time tells nothing
    if scheme.lower() != "bearer" or not any(fits):
        raise InvalidKey("no key of this edge came", "Authorization: Bearer KEY", "see api_keys of the edge")


async def _read_json(request: Request) -> bytes:
    """Body of a request in JSON. It has to say so: a page of another origin cannot, without being asked first."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != JSON:
        raise UnsupportedMediaType(f"Content-Type: {kind[:60]}", JSON, f'send -H "Content-Type: {JSON}"')
    return await read_body(request, "a request in JSON", max_bytes=MAX_BODY_BYTES, timeout_s=BODY_TIMEOUT_S)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)
