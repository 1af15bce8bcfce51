"""Shared parts of live endpoints: their dependencies, and running one conversation to its end."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from starlette.types import Receive, Send

from asr_serve.config import ServeConfig
from asr_serve.errors import AsrServeError
from asr_serve.metrics import ServerMetrics
from asr_serve.server.engine_registry import EngineRegistry
from asr_serve.server.middleware.admission import AdmissionController
from asr_serve.server.middleware.error_handlers import TOO_BIG, close_code, close_websocket, error_code
from asr_serve.server.middleware.request_context import RequestContext
from asr_serve.server.transcription_job import TranscriptionExecutor
from asr_serve.units import samples_to_s

NO_CLOSE_CODE = 1_005
"""Close code of a client that sent none; granian also reports it for a frame over its own limit."""


class LiveDependencies(NamedTuple):
    """Dependencies of live routes."""

    config: ServeConfig
    engines: EngineRegistry
    admission: AdmissionController
    executor: TranscriptionExecutor
    metrics: ServerMetrics


class Disconnected(Protocol):
    """Disconnection of a client."""

    disconnected_in_session: bool
    disconnect_code: int | None


class RunnableConversation(Disconnected, Protocol):
    """Conversation over one socket."""

    @property
    def received_samples(self) -> int: ...

    def drain(self) -> None: ...

    async def run(self) -> AsrServeError | None: ...


async def run_conversation(
    conversation: RunnableConversation,
    admission: AdmissionController,
    context: RequestContext,
    receive: Receive,
    send: Send,
) -> None:
    """Runs a conversation to its end and closes its socket; records its audio and how it ended."""
    try:
        with admission.on_drain(conversation.drain):
            error = await conversation.run()
    finally:
        context.audio_s = samples_to_s(conversation.received_samples)
    await close_conversation(conversation, error, context, receive, send)


async def close_conversation(
    conversation: Disconnected, error: AsrServeError | None, context: RequestContext, receive: Receive, send: Send
) -> None:
    """Records how a conversation ended, and closes its socket if the client is still connected."""
    if error is not None:
        context.end_reason = error_code(error)
        await close_websocket(receive, send, close_code(error))
        return
    context.end_reason = "client_gone" if conversation.disconnected_in_session else "done"
    if conversation.disconnect_code == NO_CLOSE_CODE:
        # Nothing but a close code reaches a client whose frame granian refused.
        await close_websocket(receive, send, TOO_BIG)
