"""Transports of the uplinks of all sessions: WebSockets, requests of HTTP/2, shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from asr_serve.api.client.async_connection import AsyncStreamConnection
from asr_serve.edge.edge_config import EdgeConfig
from asr_serve.edge.uplink import UplinkConnection
from asr_serve.errors import ProgramMissing
from asr_serve.protocols.stream.client_messages import NewSessionRequest


class UplinkTransport(Protocol):
    """Transport to what recognizes. Belongs to the event loop's thread."""

    async def open(self, query: Mapping[str, str]) -> UplinkConnection:
        """Opens or resumes the session of a query. Raises Refused, Unreachable."""

    def check(self, request: NewSessionRequest) -> None:
        """Raises OptionError or UnknownModel for a session that will be refused, as far as this side knows. What it
        does not know, the events of the session tell."""

    async def close(self) -> None:
        """Closes what it holds. Idempotent."""


class ServerTransport:
    """Base of transports to servers, which alone know their models."""

    def check(self, request: NewSessionRequest) -> None:
        """Refuses nothing."""


class WebSocketTransport(ServerTransport):
    """A WebSocket for each session."""

    def __init__(self, server: str, api_key: str | None) -> None:
        self._server, self._key = server, api_key

    async def open(self, query: Mapping[str, str]) -> UplinkConnection:
        return await AsyncStreamConnection.open(self._server, query, self._key)

    async def close(self) -> None:
        """Does nothing: each connection is its uplink's."""


class Http2Transport(ServerTransport):
    """Requests of HTTP/2, which share connections. Raises ProgramMissing without h2."""

    def __init__(self, server: str, api_key: str | None) -> None:
        try:
            from asr_serve.api.client.http2_connection import Http2StreamConnections
        except ImportError as error:
            raise ProgramMissing(
                "h2 is not installed", "it makes the frames of HTTP/2", "pip install 'asr-serve[edge]'"
            ) from error
        self._connections = Http2StreamConnections(server, api_key)

    async def open(self, query: Mapping[str, str]) -> UplinkConnection:
        return await self._connections.open(query)

    async def close(self) -> None:
        await self._connections.close()


def create_transport(config: EdgeConfig, api_key: str | None) -> UplinkTransport:
    """Transport of these settings. Raises ProgramMissing for HTTP/2 without h2, OptionError."""
    if config.engine is not None:
        from asr_serve.edge.engine_transport import EngineTransport  # much of the server, which others do without

        return EngineTransport(config.engine, config.max_sessions)
    if config.uplink == "websocket":
        return WebSocketTransport(config.server, api_key)
    return Http2Transport(config.server, api_key)
