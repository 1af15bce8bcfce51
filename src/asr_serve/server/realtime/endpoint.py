"""What every live endpoint shares: its dependencies, and running one conversation to its end."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from starlette.types import Receive, Send

from asr_serve.config import ServeConfig
from asr_serve.errors import AsrServeError
from asr_serve.metrics import ServerMetrics
from asr_serve.server.engine_registry import EngineRegistry
from asr_serve.server.middleware.admission import AdmissionController
from asr_serve.server.middleware.error_handlers import (
    TOO_BIG,
    close_code,
    close_websocket,
    error_code,
)
from asr_serve.server.middleware.request_context import RequestContext
from asr_serve.server.transcription_job import TranscriptionExecutor
from asr_serve.units import samples_to_s

NO_CLOSE_CODE = 1_005
"""A client that says nothing as it closes; and granian's word for a frame over its own limit."""


class LiveDependencies(NamedTuple):
    """What these routes work with."""

    config: ServeConfig
    engines: EngineRegistry
    admission: AdmissionController
    executor: TranscriptionExecutor
    metrics: ServerMetrics


class Disconnected(Protocol):
    """How a client left."""

    disconnected_in_session: bool
    disconnect_code: int | None


class RunnableConversation(Disconnected, Protocol):
    """What is said over one socket."""

    @property
    def received_samples(self) -> int: ...

    def drain(self) -> None: ...

    async def run(self) -> AsrServeError | None: ...


async def run_conversation(
    talk: RunnableConversation, gate: AdmissionController, visit: RequestContext, receive: Receive, send: Send
) -> None:
    """To its end, of which the visit and the client are told."""
    try:
        with gate.on_drain(talk.drain):
            told = await talk.run()
    finally:
        visit.audio_s = samples_to_s(talk.received_samples)
    await close_conversation(talk, told, visit, receive, send)


async def close_conversation(
    talk: Disconnected, told: AsrServeError | None, visit: RequestContext, receive: Receive, send: Send
) -> None:
    """From a client: the visit learns how its conversation ended, and the client, if it is still there."""
    if told is not None:
        visit.end_reason = error_code(told)
        await close_websocket(receive, send, close_code(told))
        return
    visit.end_reason = "client_gone" if talk.disconnected_in_session else "done"
    if talk.disconnect_code == NO_CLOSE_CODE:
        # The only word that reaches a client whose frame granian refused.
        await close_websocket(receive, send, TOO_BIG)
