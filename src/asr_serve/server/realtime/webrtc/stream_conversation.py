"""Session of `/v1/stream` whose audio comes by a call's track: as of a WebSocket, with other bytes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.types import Send

from asr_serve.errors import AsrServeError, AtCapacity, MalformedRequest, OptionError, UnsupportedOption
from asr_serve.protocols.stream.client_messages import EndCommand, FlushCommand, SilenceCommand, parse_command
from asr_serve.server.realtime.openai.conversation import TrackMessage
from asr_serve.server.realtime.stream.connection import StreamConnection
from asr_serve.server.realtime.stream.session import StreamSession
from asr_serve.server.realtime.stream.session_manager import StreamSessionManager
from asr_serve.server.realtime.webrtc.call_inbox import CallInbox
from asr_serve.units import samples_to_s


class LossEvent(msgspec.Struct, frozen=True, tag_field="type", tag="loss"):
    """Packets that did not arrive, and whose time was concealed. Not numbered."""

    start_s: float
    end_s: float
    packets: int


class StreamCallConversation:
    """Conversation of one call in our own protocol. Belongs to the event loop's thread."""

    def __init__(
        self,
        sessions: StreamSessionManager,
        session: StreamSession,
        connection: StreamConnection,
        inbox: CallInbox,
        send: Send,
    ) -> None:
        """`connection` is the session's, and is released by its owner."""
        self._sessions, self._session, self._connection = sessions, session, connection
        self._inbox, self._send = inbox, send
        self.disconnected_in_session = False

    @property
    def received_samples(self) -> int:
        return self._session.received_samples

    def drain(self) -> None:
        """Does nothing: the manager ends all its sessions."""

    def end(self, error: AsrServeError) -> None:
        """Ends the audio because of an error, which is sent before the rest of the text."""
        self._connection.send_error(error)
        self._session.end()

    def send_error(self, error: AsrServeError) -> None:
        self._connection.send_error(error)

    async def run(self) -> AsrServeError | None:
        """Runs until the session's end, and returns the error for which the server ended it, if so. Raises what ends
        the connection."""
        reader = asyncio.create_task(self._read())
        reader.add_done_callback(self._connection.stop_if_failed)
        try:
            async for event in self._connection.events():
                assert event is not None
                await self._send({"type": "websocket.send", "text": event.json.decode()})
        finally:
            reader.cancel()
            await asyncio.wait({reader})
        return self._session.ending

    async def close(self) -> None:
        """Ends the session, if it has not ended: a call does not come back. Idempotent."""
        if not self._session.closed:
            self._sessions.abort(self._session, "was a call, which has ended")

    async def _read(self) -> None:
        while True:
            message = await self._inbox.receive()
            match message["type"]:
                case TrackMessage.AUDIO:
                    await self._session.write(self._connection, message["audio"])
                case TrackMessage.LOSS:
                    await self._tell_loss(message)
                case TrackMessage.ENDED:
                    self._session.end()
                    return
                case "websocket.disconnect":
                    self.disconnected_in_session = not self._session.closed
                    self._connection.stop()
                    return
                case _:
                    if self._connection.congested:
                        await self._connection.pause_reading(self._connection.wait_caught_up())
                    self._command(message.get("text"))

    def _command(self, text: str | None) -> None:
        try:
            if text is None:
                raise MalformedRequest("a binary message came", "commands are texts; audio comes by the track")
            match parse_command(text):
                case SilenceCommand():
                    raise UnsupportedOption("a silence came", "this call's audio comes by its track", "send none")
                case FlushCommand(id=name):
                    self._session.flush(name)
                case EndCommand():
                    self._session.end()
        except (MalformedRequest, OptionError, AtCapacity) as error:
            self._connection.send_error(error)

    async def _tell_loss(self, loss: Any) -> None:
        start_s, end_s = samples_to_s(loss["start_samples"]), samples_to_s(loss["end_samples"])
        event = LossEvent(round(start_s, 3), round(end_s, 3), loss["packets"])
        await self._send({"type": "websocket.send", "text": msgspec.json.encode(event).decode()})
