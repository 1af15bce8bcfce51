"""Intake of a client's messages: audio and commands into its session."""

from __future__ import annotations

from asr_serve.errors import AtCapacity, AudioTooLarge, MalformedRequest, OptionError
from asr_serve.protocols.stream.client_messages import EndCommand, FlushCommand, SilenceCommand, parse_command
from asr_serve.server.realtime.stream.connection import StreamConnection
from asr_serve.server.realtime.stream.session import StreamSession


async def take_message(
    message: bytes | str, session: StreamSession, connection: StreamConnection, frame_bytes: int
) -> None:
    """Takes a message, as there is room: bytes are audio, text is a command. Errors of one message are told as events.
    Raises AudioTooLarge to end the connection."""
    try:
        if isinstance(message, str):
            if connection.congested:
                await connection.pause_reading(connection.wait_caught_up())
            await _command(message, session, connection)
            return
        if len(message) > frame_bytes:
            raise AudioTooLarge(
                f"a frame of {len(message)} bytes came",
                f"up to {frame_bytes} are allowed; nothing of this one was taken",
                "go on with the session, and send audio in smaller frames, like 100 ms",
            )
        await session.write(connection, message)
    except (MalformedRequest, OptionError, AtCapacity) as error:
        connection.send_error(error)


async def _command(text: str, session: StreamSession, connection: StreamConnection) -> None:
    match parse_command(text):
        case SilenceCommand(samples, noise):
            await session.write_silence(connection, samples, noise=noise)
        case FlushCommand(id=name):
            session.flush(name)
        case EndCommand():
            session.end()
