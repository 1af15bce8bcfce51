"""The real service of the edge on a real port, and the way into it from a test's thread."""

from __future__ import annotations

import asyncio
import difflib
import json
import threading
from collections.abc import Callable
from typing import Any

from running_server import WAIT_S, eventually

from asr_serve.edge.edge_config import EdgeConfig
from asr_serve.edge.edge_service import EdgeService, EdgeSessionCreated, EdgeSessionRequest
from asr_serve.edge.edge_session import EdgeSessionState
from asr_serve.edge.gate_worker import GateWorker
from asr_serve.edge.packet_driver import PacketDriver, RecvmmsgDriver
from asr_serve.edge.sip_config import SipConfig
from asr_serve.edge.telephone import Telephone
from asr_serve.edge.uplink_transport import create_transport
from asr_serve.edge.voice_activity import VoiceActivityPool
from asr_serve.metrics import EdgeMetrics

OPTIONS: dict[str, Any] = {"silence_schedule": "inf:300", "partial_ms": 500}


class RunningEdge:
    """An edge that sends to `server`. Its rates allow senders faster than speech. `driver`: None is recvmmsg on
    loopback."""

    def __init__(
        self, server: str, driver: PacketDriver | None = None, *, sip: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        """`sip`: settings of a telephone on a free port, without TCP unless they want it."""
        fast = {"packets_per_s": 10_000, "options": OPTIONS, "drift": False}
        telephone = None if sip is None else SipConfig(**{"port": 0, "tcp": False, **sip})
        self.config = EdgeConfig(**{"server": server, "port": 0, "sip": telephone, **fast, **settings})
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.driver = RecvmmsgDriver("127.0.0.1", 0) if driver is None else driver
        self.telephone: Telephone | None = None
        self.service: EdgeService = self.call(self._start)

    async def _start(self) -> EdgeService:
        # On a clock that stands still, all audio is gated, however slow the machine is.
        gates = GateWorker(VoiceActivityPool(), clock=lambda: 0.0) if self.config.voice_activity else None
        transport = create_transport(self.config, None)
        service = EdgeService(self.config, self.driver, EdgeMetrics("0"), transport, gates=gates)
        if self.config.sip is not None:
            self.telephone = Telephone(service, self.config.sip, service._metrics)
            await self.telephone.start()
        return service

    def call(self, work: Callable[..., Any], *args: Any) -> Any:
        """Calls a function, or awaits one, on the edge's loop."""

        async def run() -> Any:
            result = work(*args)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(WAIT_S)

    def create(self, **fields: Any) -> EdgeSessionCreated:
        return self.call(self.service.create, EdgeSessionRequest(**fields))

    def describe(self, session_id: str) -> EdgeSessionState:
        return self.call(self.service.describe, session_id)

    def events(self, session_id: str) -> list[dict[str, Any]]:
        """Events so far."""
        log = self.call(self.service.events, session_id)
        return [json.loads(event.json) for event in list(log._events)]

    def end(self, session_id: str) -> list[dict[str, Any]]:
        """Ends a session and returns all its events, the last one included."""
        self.call(self.service.end, session_id)
        log = self.call(self.service.events, session_id)
        eventually(lambda: log.ended, lambda: f"never ended: {self.events(session_id)}")
        return self.events(session_id)

    def taken(self, session_id: str, packets: int) -> None:
        """Waits until a session has that many packets."""
        eventually(
            lambda: self.describe(session_id).packets >= packets, lambda: f"{packets}: {self.describe(session_id)}"
        )

    def call_notes(self, kind: str) -> list[dict[str, Any]]:
        """Events of calls so far, of one type."""
        assert self.telephone is not None
        notes = [json.loads(event.json) for event in list(self.telephone.events._events)]
        return [note for note in notes if note["type"] == kind]

    def metric(self, name: str, **labels: str) -> float:
        if self.telephone is not None:
            self.call(self.telephone.note_metrics)
        self.call(self.service.render_metrics)
        return self.service._metrics.registry.get_sample_value(name, labels) or 0.0

    def close(self) -> None:
        if self.telephone is not None:
            self.call(self.telephone.close)
        self.call(self.service.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


def words(text: str) -> list[str]:
    return "".join(letter for letter in text.lower() if letter.isalnum() or letter == " ").split()


def expect_words(text: str, expected: str) -> None:
    """Expects all words, but for two at the seams: where a session begins anew inside a sentence, or where an open
    sentence is cut, a model may hear a word differently, also in another batch."""
    got, wanted = words(text), words(expected)
    found = difflib.SequenceMatcher(None, got, wanted, autojunk=False).get_matching_blocks()
    assert sum(block.size for block in found) >= len(wanted) - 2, text
    assert len(got) <= len(wanted) + 2, text


def text_of(events: list[dict[str, Any]]) -> str:
    """Text of all final segments."""
    return " ".join(event["text"] for event in events if event["type"] == "segment")
