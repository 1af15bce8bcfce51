"""Transport of uplinks to the engine of a server on this host: sessions of /v1/stream that live in this process, and
hand their audio to the engine through shared memory.

A session is the server's own class, without its sockets: what it makes of audio, and its events, are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

import msgspec

from asr_serve import __version__
from asr_serve.api.client.connection import ServerEvent, error_from_event
from asr_serve.config import ServeConfig
from asr_serve.edge.local_engine import LocalEngine
from asr_serve.edge.uplink import UplinkConnection
from asr_serve.errors import AsrServeError, PeerRefused, SessionExpired, UnknownModel, Unreachable
from asr_serve.metrics import ServerMetrics
from asr_serve.models.registry import AsrCard
from asr_serve.pipelines.live.events import LiveEvent
from asr_serve.pipelines.live.session_state import SavedLiveSession
from asr_serve.pipelines.segments import check_language, requests_words
from asr_serve.protocols.stream.client_messages import PATH, NewSessionRequest, parse_query
from asr_serve.protocols.stream.server_events import EncodedEvent, SessionEvent, StreamErrorEvent
from asr_serve.server.middleware.error_handlers import live_error_event
from asr_serve.server.realtime.async_listener import AsyncListener
from asr_serve.server.realtime.lifecycle import SessionLimits
from asr_serve.server.realtime.stream.connection import StreamConnection
from asr_serve.server.realtime.stream.message_intake import take_message
from asr_serve.server.realtime.stream.session import StartListener, StreamSession
from asr_serve.server.realtime.stream.session_manager import SessionOwner, StreamSessionManager

OWNER = "edge"
LIMITS = SessionLimits(ServeConfig().session_idle_s, ServeConfig().max_session_s, ServeConfig().max_frame_bytes)
"""Limits of a session, those of a server with its defaults."""

_DECODER = msgspec.json.Decoder(ServerEvent)


def _decode(event: bytes) -> ServerEvent:
    decoded: ServerEvent = _DECODER.decode(event)
    return decoded


def _error_json(error: Exception) -> str:
    return live_error_event(error, "", PATH)


class EngineTransport:
    """Transport whose sessions are in this process. Belongs to the event loop's thread."""

    def __init__(self, folder: str, max_sessions: int) -> None:
        """`folder`: in which the engine is offered."""
        self._engine = LocalEngine(folder)
        self._metrics = ServerMetrics(__version__)
        self._sessions = StreamSessionManager(LIMITS, 0.0, max_sessions, self._metrics, self._begin)

    async def open(self, query: Mapping[str, str]) -> UplinkConnection:
        """Opens a session. One that was lost is not resumed: it was in this process. Raises Refused, Unreachable."""
        try:
            request = parse_query({name: [value] for name, value in query.items()}, packets=True)
            if not isinstance(request, NewSessionRequest):
                raise SessionExpired("a session that has failed here", "a new one", "begin a new one")
            await self._engine.wait_connected()
            with contextlib.ExitStack() as undo:
                stack = contextlib.AsyncExitStack()
                session, connection = await stack.enter_async_context(
                    self._sessions.connect(OWNER, request, _error_json)
                )
                undo.callback(self._sessions.abort, session, "was not opened")
                events = connection.events()
                first = await anext(events)
                assert first is not None
                opened = _decode(first.json)
                assert isinstance(opened, SessionEvent)
                undo.pop_all()
        except Unreachable:
            raise
        except AsrServeError as error:
            told = _decode(_error_json(error).encode())
            assert isinstance(told, StreamErrorEvent)
            raise error_from_event(told) from error
        return LocalSessionConnection(opened, self._sessions, session, connection, events, stack)

    def check(self, request: NewSessionRequest) -> None:
        """Raises OptionError or UnknownModel for what the engine does not have, once it is connected."""
        try:
            card = self._engine.parts().card
        except (Unreachable, PeerRefused):
            return
        assert isinstance(card, AsrCard)
        _check_model(request, card)
        check_language(card, request.options.language)
        requests_words([card], request.options.words, speakers=request.options.speakers)

    async def close(self) -> None:
        await self._sessions.close()
        await self._engine.close()

    def _begin(
        self, owner: SessionOwner, request: NewSessionRequest, reserved: contextlib.ExitStack, context: object
    ) -> tuple[str, StartListener]:
        card, client, tokenizer, *_ = self._engine.parts()
        assert isinstance(card, AsrCard)
        _check_model(request, card)
        assert tokenizer is not None

        def start(on_events: Callable[[list[LiveEvent]], None], saved: SavedLiveSession | None) -> AsyncListener:
            meter, lease = self._metrics.live_route(PATH), contextlib.nullcontext()
            return AsyncListener(client, tokenizer, request.options, meter, lease, on_events, saved=saved)

        return card.name, start


def _check_model(request: NewSessionRequest, card: AsrCard) -> None:
    """Raises UnknownModel for a model that is not the engine's."""
    if request.model not in (None, card.name):
        raise UnknownModel(
            f"the model {str(request.model)[:100]!r} is not offered here", card.name, "leave it out, or use a server"
        )


class LocalSessionConnection:
    """Connection to a session in this process, as UplinkConnection says."""

    def __init__(
        self,
        opened: SessionEvent,
        sessions: StreamSessionManager,
        session: StreamSession,
        connection: StreamConnection,
        events: AsyncIterator[EncodedEvent | None],
        stack: contextlib.AsyncExitStack,
    ) -> None:
        """`stack`: detaches the connection."""
        self.session = opened
        self._sessions, self._session, self._connection = sessions, session, connection
        self._events, self._stack = events, stack

    async def send(self, message: bytes | str) -> None:
        """Sends a message; waits while the engine is behind."""
        await take_message(message, self._session, self._connection, LIMITS.frame_bytes)

    async def receive(self) -> ServerEvent:
        """Returns the next event; what ends the session is one, as a server tells it. Raises Unreachable after the
        last."""
        try:
            event = await anext(self._events)
        except StopAsyncIteration:
            raise Unreachable("the session has ended") from None
        except Exception as error:
            return _decode(_error_json(error).encode())
        assert event is not None
        return _decode(event.json)

    async def close(self) -> None:
        """Ends the session. Idempotent."""
        self._sessions.abort(self._session, "was closed")
        await self._stack.aclose()
