"""Routes of calls over WebRTC: OpenAI Realtime's `/v1/realtime/calls`, and WHIP's `/v1/whip` (RFC 9725)."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from asr_serve.errors import (
    MalformedRequest,
    PreconditionFailed,
    PreconditionRequired,
    Unprocessable,
    UnsupportedMediaType,
    UnsupportedOption,
)
from asr_serve.protocols.form_fields import FormFields
from asr_serve.protocols.json_members import decode_json
from asr_serve.protocols.openai.realtime_client_events import PATH as REALTIME_PATH
from asr_serve.protocols.openai.realtime_client_events import (
    TRANSCRIPTION_ONLY,
    RealtimeSettings,
    UpdateSession,
    apply_update,
)
from asr_serve.protocols.openai.realtime_server_events import ServerEventEncoder
from asr_serve.protocols.stream import client_messages as stream_messages
from asr_serve.protocols.stream.client_messages import NewSessionRequest
from asr_serve.server.middleware.error_handlers import live_error_event, realtime_problem
from asr_serve.server.middleware.request_context import RequestContext, request_context
from asr_serve.server.realtime.endpoint import LiveDependencies
from asr_serve.server.realtime.openai.conversation import OpenAiConversation
from asr_serve.server.realtime.openai.endpoint import EngineRealtimeSessionFactory
from asr_serve.server.realtime.outbox import OUTBOX_SEND_TIMEOUT_S, Outbox
from asr_serve.server.realtime.stream.session_manager import StreamSessionManager
from asr_serve.server.realtime.webrtc.call import Call
from asr_serve.server.realtime.webrtc.call_manager import CallManager
from asr_serve.server.realtime.webrtc.stream_conversation import StreamCallConversation
from asr_serve.server.server_sent_events import EVENT_STREAM, stream_log
from asr_serve.server.uploads.multipart_form import FormLimits, MultipartForm
from asr_serve.server.uploads.request_body import read_body
from asr_serve.server.uploads.spool import Spool

CALLS_PATH, WHIP_PATH = f"{REALTIME_PATH}/calls", "/v1/whip"
CALLS_QUERY = ("model", "intent", "partials")
NOT_OF_CALLS = ("encoding", "rate", "session", "after", "start", "durable")
"""Fields of the query of `/v1/stream` that mean nothing for a call."""
SDP, TRICKLE, MULTIPART = "application/sdp", "application/trickle-ice-sdpfrag", "multipart/form-data"
EVENTS_LABEL = "oai-events"
MAX_BODY_BYTES = 256 << 10
BODY_TIMEOUT_S = 10.0
SESSION_EXAMPLE = '{"type":"transcription"}'
FORM_LIMITS = FormLimits(max_fields=4, max_field_bytes=MAX_BODY_BYTES)
CALL_HEADERS = ("location", "etag", "link")
"""Headers of answers, beside the usual ones, that pages of other origins read."""


class CallRoutes:
    """Handlers of the routes of one server."""

    def __init__(self, dependencies: LiveDependencies, calls: CallManager, streams: StreamSessionManager) -> None:
        self._dependencies, self._calls, self._streams = dependencies, calls, streams
        self._meter = dependencies.metrics.live_route(CALLS_PATH)
        dependencies.metrics.live_route(WHIP_PATH)

    # --- OpenAI ----------------------------------------------------------------------------------------

    async def create_call(self, request: Request) -> Response:
        """Answers an offer, in a body of its own or in the field `sdp` of a form beside `session`."""
        fields = _query(request, CALLS_QUERY)
        if (intent := fields.text("intent")) not in (None, "transcription"):
            raise UnsupportedOption(
                f"intent={intent} is not supported", TRANSCRIPTION_ONLY, "ask for transcription", param="intent"
            )
        settings = RealtimeSettings.initial(fields.text("model"))
        offer, session = await _read_call(request)
        if session is not None:
            settings = apply_update(settings, UpdateSession(session, beta=False))
        answered = await self._calls.create(
            request_context(request.scope),
            CALLS_PATH,
            offer,
            partial(self._start_conversation, settings, fields.flag("partials") or False),
            channel_label=EVENTS_LABEL,
            needs_channel=True,
            keeps_events=False,
            error_path=REALTIME_PATH,
        )
        return _created(answered.sdp, f"{CALLS_PATH}/{answered.call.id}", {})

    async def hang_up(self, request: Request) -> Response:
        """Ends a call: the rest of its text follows on the data channel, which closes then."""
        self._get(request).hang_up()
        return Response(status_code=200)

    # --- WHIP ------------------------------------------------------------------------------------------

    async def create_whip(self, request: Request) -> Response:
        """Answers an offer. The query is that of `/v1/stream`, and so are the events."""
        query = parse_qs(request.url.query, keep_blank_values=True)
        for name in NOT_OF_CALLS:
            FormFields(query, stream_messages.QUERY).reject_unsupported(name, "a call has a track, and is new")
        _expect_type(request, SDP)
        session_request = stream_messages.parse_query(query, packets=True)
        assert isinstance(session_request, NewSessionRequest), "a session that goes on was refused"
        answered = await self._calls.create(
            request_context(request.scope),
            WHIP_PATH,
            _decode(await _read_body(request)),
            partial(self._start_stream, session_request),
            channel_label=None,
            needs_channel=False,
            keeps_events=True,
            error_path=stream_messages.PATH,
        )
        location = f"{WHIP_PATH}/{answered.call.id}"
        headers = {
            "ETag": _etag(answered.call),
            "Accept-Patch": TRICKLE,
            "Link": f'<{location}/events>; rel="monitor"; type="{EVENT_STREAM}"',
        }
        return _created(answered.sdp, location, headers)

    async def end_whip(self, request: Request) -> Response:
        self._get(request).hang_up()
        return Response(status_code=200)

    async def patch_whip(self, request: Request) -> Response:
        """Takes the client's candidates, which an ICE-lite agent does not need: it answers checks from anywhere."""
        call = self._get(request)
        _expect_type(request, TRICKLE)
        expected = request.headers.get("if-match")
        if expected is None:
            raise PreconditionRequired("a PATCH without If-Match", "the ETag of the session", "send If-Match")
        if expected.strip() == "*":
            raise Unprocessable("an ICE restart", "trickled candidates alone", "begin a new session")
        if expected.strip() != _etag(call):
            raise PreconditionFailed(f"If-Match: {expected[:60]}", f"the session's ETag is {_etag(call)}")
        fragment = _decode(await _read_body(request, "a fragment of an SDP"))
        named = [line.strip() for line in fragment.splitlines()]
        if f"a=ice-ufrag:{call.offer.ice_ufrag}" not in named or f"a=ice-pwd:{call.offer.ice_pwd}" not in named:
            if any(line.startswith("a=ice-ufrag:") for line in named):
                raise Unprocessable("an ICE restart", "the credentials of the offer", "begin a new session")
            raise MalformedRequest("a fragment without ICE credentials", "a=ice-ufrag and a=ice-pwd (RFC 8840)")
        return Response(status_code=204)

    async def describe_whip(self, request: Request) -> Response:
        return Response(status_code=204, headers={"Accept-Post": SDP})

    async def whip_events(self, request: Request) -> Response:
        """Events of a session, those from before included, as server-sent events."""
        log = self._calls.events(request_context(request.scope).client, request.path_params["call_id"])
        return stream_log(request, log, "events of a call")

    # --- both ------------------------------------------------------------------------------------------

    def _get(self, request: Request) -> Call:
        return self._calls.get(request_context(request.scope).client, request.path_params["call_id"])

    async def _start_conversation(
        self, settings: RealtimeSettings, partials: bool, call: Call, context: RequestContext, resources: AsyncExitStack
    ) -> OpenAiConversation:
        """Makes the conversation of a call of OpenAI's. Raises as `RealtimeSessionFactory.validate`."""
        resources.enter_context(self._dependencies.admission.admit(call.owner, live=True))
        factory = EngineRealtimeSessionFactory(self._dependencies.engines, context, self._meter)
        if settings.format != RealtimeSettings().format:
            raise UnsupportedOption(
                f"the format {settings.format} for a call",
                "its track has the one that the offer and the answer agree on",
                "leave the member out",
                param="session.audio.input.format",
            )
        factory.validate(settings)
        return OpenAiConversation(
            call.inbox.receive,
            Outbox(call.send, OUTBOX_SEND_TIMEOUT_S),
            factory,
            self._calls.limits,
            partial(realtime_problem, request_id=context.request_id),
            ServerEventEncoder(beta=False),
            settings,
            partials=partials,
            has_track=True,
        )

    async def _start_stream(
        self, request: NewSessionRequest, call: Call, context: RequestContext, resources: AsyncExitStack
    ) -> StreamCallConversation:
        """Makes the conversation of a call of WHIP's. Raises as `StreamSessionManager.connect`."""
        resources.enter_context(self._dependencies.admission.admit(call.owner))  # the session reserves its place itself
        format_error = partial(live_error_event, request_id=context.request_id, path=stream_messages.PATH)
        session, connection = await resources.enter_async_context(
            self._streams.connect(call.owner, request, format_error, context)
        )
        conversation = StreamCallConversation(self._streams, session, connection, call.inbox, call.send)
        resources.push_async_callback(conversation.close)
        context.model = session.model
        return conversation


def routes(dependencies: LiveDependencies, calls: CallManager, streams: StreamSessionManager) -> list[BaseRoute]:
    handlers = CallRoutes(dependencies, calls, streams)
    one = f"{WHIP_PATH}/{{call_id}}"
    return [
        Route(CALLS_PATH, handlers.create_call, methods=["POST"]),
        Route(f"{CALLS_PATH}/{{call_id}}/hangup", handlers.hang_up, methods=["POST"]),
        Route(WHIP_PATH, handlers.create_whip, methods=["POST"]),
        Route(WHIP_PATH, handlers.describe_whip, methods=["OPTIONS"]),
        Route(one, handlers.end_whip, methods=["DELETE"]),
        Route(one, handlers.patch_whip, methods=["PATCH"]),
        Route(f"{one}/events", handlers.whip_events, methods=["GET"]),
    ]


def _query(request: Request, known: tuple[str, ...]) -> FormFields:
    return FormFields(parse_qs(request.url.query, keep_blank_values=True), known)


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _expect_type(request: Request, expected: str) -> None:
    if (kind := _media_type(request)) != expected:
        raise UnsupportedMediaType(
            f"a body of type {kind[:80]!r} came" if kind else "a body without a Content-Type came", expected
        )


async def _read_call(request: Request) -> tuple[str, dict[str, Any] | None]:
    """Offer and session of a request. Raises MalformedRequest, UnsupportedMediaType."""
    kind = _media_type(request)
    if kind == SDP:
        return _decode(await _read_body(request)), None
    if kind != MULTIPART:
        raise UnsupportedMediaType(
            f"a body of type {kind[:80]!r} came" if kind else "a body without a Content-Type came",
            f"{SDP}, or {MULTIPART} with the fields sdp and session",
        )
    spool = Spool(0)
    form = MultipartForm(request.headers["content-type"], spool, FORM_LIMITS)
    form.write(await _read_body(request, "a form"))
    spool.end()
    FormFields(form.fields, ("sdp", "session"))  # raises for other names
    if form.has_file or not form.ended:
        raise MalformedRequest(
            "a file came" if form.has_file else "the form broke off", "the fields sdp and session, as text"
        )
    offer, session = (form.fields.get(name, [""])[0] for name in ("sdp", "session"))
    if not session:
        return offer, None
    example = f"a JSON object like {SESSION_EXAMPLE}"
    members: object = decode_json(session, object, "a session came that cannot be read as JSON", example)
    if not isinstance(members, dict):
        raise MalformedRequest("the session is no JSON object", example)
    return offer, members


def _decode(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise MalformedRequest("the body is not UTF-8", "SDP is text") from None


async def _read_body(request: Request, about: str = "an SDP") -> bytes:
    return await read_body(request, about, max_bytes=MAX_BODY_BYTES, timeout_s=BODY_TIMEOUT_S)


def _created(sdp: str, location: str, headers: dict[str, str]) -> Response:
    return Response(sdp, 201, {"Location": location, "Cache-Control": "no-store", **headers}, SDP)


def _etag(call: Call) -> str:
    """Entity tag of the ICE session, which never changes: a lite agent is not restarted."""
    return f'"{call.id}"'
