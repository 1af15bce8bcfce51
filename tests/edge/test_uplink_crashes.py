"""Uplink over a server whose engine dies of the audio: it is sent twice, and not a third time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
from running_server import WAIT_S

from asr_serve.api.client.connection import ServerEvent
from asr_serve.edge.audio_spool import AudioSpool
from asr_serve.edge.edge_events import AudioDiscarded, EdgeEvent, SessionFailed
from asr_serve.edge.speech_gate import GatedSpeech
from asr_serve.edge.uplink import END_MESSAGE, Uplink
from asr_serve.errors import Unreachable
from asr_serve.protocols.stream.server_events import EndEvent, SessionEvent, StreamErrorEvent
from asr_serve.units import RATE_HZ


class DyingConnection:
    """Connection to a session whose engine dies of any audio; with silence alone it ends as it should."""

    def __init__(self, number: int) -> None:
        self.session = SessionEvent(f"session-{number}", False, "model", "en", "s16le", RATE_HZ, 0, 0, 30.0)
        self.audio_bytes = 0
        self._told: asyncio.Queue[ServerEvent | None] = asyncio.Queue()

    async def send(self, message: bytes | str) -> None:
        if isinstance(message, bytes):
            if not self.audio_bytes:
                self._told.put_nowait(StreamErrorEvent("engine_crashed", "the engine died three times"))
                self._told.put_nowait(None)
            self.audio_bytes += len(message)
        elif message == END_MESSAGE:
            self._told.put_nowait(EndEvent(seq=1, duration_s=WAIT_S, segments=0))

    async def receive(self) -> ServerEvent:
        if (event := await self._told.get()) is None:
            raise Unreachable("it was closed")
        return event

    async def close(self) -> None:
        pass


def test_audio_that_kills_engines_is_given_up() -> None:
    opened: list[DyingConnection] = []
    events: list[EdgeEvent] = []

    async def connect(query: Mapping[str, str]) -> DyingConnection:
        opened.append(DyingConnection(len(opened)))
        return opened[-1]

    async def run() -> None:
        spool = AudioSpool(60 * RATE_HZ)
        spool.append(GatedSpeech(np.ones(2 * RATE_HZ, np.int16)))
        spool.close()
        async with asyncio.timeout(WAIT_S):
            await Uplink(connect, {}, spool, events.append).run()

    asyncio.run(run())
    assert [bool(each.audio_bytes) for each in opened] == [True, True, False]
    assert [(each.start_s, each.end_s) for each in events if isinstance(each, AudioDiscarded)] == [(0.0, 2.0)]
    assert not any(isinstance(each, SessionFailed) for each in events)
