"""Transports of the uplinks of all sessions: WebSockets, requests of HTTP/2, shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from asr_serve.api.client.async_connection import AsyncStreamConnection
from asr_serve.edge.edge_config import EdgeConfig
from asr_serve.edge.uplink import UplinkConnection
from asr_serve.errors import ProgramMissing


class UplinkTransport(Protocol):
    """Transport to what recognizes. Belongs to the event loop's thread."""

    async def open(self, query: Mapping[str, str]) -> UplinkConnection:
        """Opens or resumes the session of a query. Raises Refused, Unreachable."""

    async def close(self) -> None:
        """Closes what it holds. Idempotent."""


class WebSocketTransport:
    """A WebSocket for each session."""

    def __init__(self, server: str, api_key: str | None) -> None:
        self._server, self._key = server, api_key

    async def open(self, query: Mapping[str, str]) -> UplinkConnection:
        return await AsyncStreamConnection.open(self._server, query, self._key)

    async def close(self) -> None:
        """Does nothing: each connection is its uplink's."""


def create_transport(config: EdgeConfig, api_key: str | None) -> UplinkTransport:
    """Transport of these settings. Raises ProgramMissing for HTTP/2 without h2, OptionError."""
    if config.engine is not None:
        from asr_serve.edge.engine_transport import EngineTransport  # much of the server, which others do without

        return EngineTransport(config.engine, config.max_sessions)
    if config.uplink == "websocket":
        return WebSocketTransport(config.server, api_key)
    try:
        from asr_serve.api.client.http2_connection import Http2StreamConnections
    except ImportError as error:
        raise ProgramMissing(
            "h2 is not installed", "it makes the frames of HTTP/2", "pip install 'asr-serve[edge]'"
        ) from error
    return Http2StreamConnections(config.server, api_key)
