"""WebSocket connection to /v1/stream for one event loop that serves many sessions. `connection` is the one for
threads; both have the same messages and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Self

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from asr_serve.api.client.connection import (
    CLOSE_S,
    OPEN_S,
    PING_S,
    POLICY_VIOLATION_CODE,
    PONG_S,
    SILENT_LOGGER,
    ServerEvent,
    error_for_refusal,
    error_from_event,
    lost_connection,
    no_server,
    split_query,
    websocket_url,
)
from asr_serve.errors import Refused, Unreachable
from asr_serve.protocols.stream.client_messages import PATH, START
from asr_serve.protocols.stream.server_events import SessionEvent, StreamErrorEvent


class AsyncStreamConnection:
    """Connection whose first event, `session`, has arrived. One task may send while another receives.

    Raises, as all its methods do, Unreachable; opening it, Refused too
    """

    def __init__(self, socket: ClientConnection, session: SessionEvent) -> None:
        self._socket, self.session = socket, session

    @classmethod
    async def open(cls, server: str, query: Mapping[str, str], api_key: str | None = None) -> Self:
        """Connects. Values too long for an address are sent in the first message."""
        query, long = split_query(query)
        try:
            socket = await connect(
                websocket_url(server, query),
                additional_headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                compression=None,
                open_timeout=OPEN_S,
                close_timeout=CLOSE_S,
                ping_interval=PING_S,
                ping_timeout=PONG_S,
                proxy=None,
                logger=SILENT_LOGGER,
            )
        except InvalidStatus as error:
            raise error_for_refusal(error) from None
        except (OSError, EOFError, WebSocketException) as error:
            raise no_server(server, error) from None
        try:
            if long:
                await socket.send(msgspec.json.encode({"type": START, **long}).decode())
            async with asyncio.timeout(OPEN_S):
                first = await _receive(socket)
        except (ConnectionClosed, TimeoutError, Unreachable) as error:
            await socket.close()
            lost = error if isinstance(error, Unreachable) else lost_connection(error)
            if lost.close_code == POLICY_VIOLATION_CODE:  # from a server without this protocol
                raise Refused(f"nothing at {server} knows {PATH}; check the address.", "no_such_route") from None
            raise lost from None
        except asyncio.CancelledError:
            await socket.close()
            raise
        match first:
            case SessionEvent() as session:
                return cls(socket, session)
            case StreamErrorEvent() as refusal:
                await socket.close()
                raise error_from_event(refusal)
        await socket.close()
        raise Unreachable(f"the server began with {first!r}", "it begins with its session", "update it")

    async def send(self, message: bytes | str) -> None:
        """Sends a message; waits while the network takes no more."""
        try:
            await self._socket.send(message)
        except ConnectionClosed as closed:
            raise lost_connection(closed) from None

    async def receive(self) -> ServerEvent:
        """Returns the next event; skips event types of later versions."""
        return await _receive(self._socket)

    async def close(self) -> None:
        """Closes the connection. Idempotent."""
        await self._socket.close()


async def _receive(socket: ClientConnection) -> ServerEvent:
    while True:
        try:
            event: ServerEvent = msgspec.json.decode(await socket.recv(decode=False), type=ServerEvent)
        except msgspec.ValidationError:
            continue
        except msgspec.DecodeError:
            raise Unreachable("the server's message is not JSON", "asr-serve sends JSON", "check the address") from None
        except ConnectionClosed as closed:
            raise lost_connection(closed) from None
        return event
