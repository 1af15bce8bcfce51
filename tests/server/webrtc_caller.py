"""Caller over WebRTC as OpenAI documents it, by aiortc's RTCPeerConnection: a client that is not ours."""

from __future__ import annotations

import asyncio
import fractions
import json
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from av import AudioFrame
from running_server import WAIT_S, Running

CALLS, WHIP = "/v1/realtime/calls", "/v1/whip"
RATE_HZ, FRAME = 48_000, 960
TRANSCRIPTION = "conversation.item.input_audio_transcription"
SPEED = 8
"""Times as fast as speech is spoken: packets in sequence need no clock."""


class SpeechTrack(MediaStreamTrack):
    """Track that says `pcm`, (n,) float32 at 48 kHz, and then nothing: without digital zeros, as a microphone."""

    kind = "audio"

    def __init__(self, pcm: np.ndarray, speed: float = SPEED) -> None:
        super().__init__()
        self._pcm = (np.clip(pcm, -1, 1) * 32_767).astype(np.int16)
        self._speed, self._at, self._due_s = speed, 0, 0.0
        self.muted = asyncio.Event()
        """Set: no frame comes any more."""
        self.said = asyncio.Event()

    async def recv(self) -> AudioFrame:
        loop = asyncio.get_running_loop()
        if self.muted.is_set():
            await asyncio.sleep(WAIT_S)
        if self.readyState != "live":
            raise MediaStreamError
        self._due_s = max(self._due_s + FRAME / RATE_HZ / self._speed, loop.time() - 0.2)
        await asyncio.sleep(self._due_s - loop.time())
        samples = self._pcm[self._at : self._at + FRAME]
        if len(samples) < FRAME:
            self.said.set()
            noise = np.random.default_rng(self._at).integers(-3, 4, FRAME - len(samples)).astype(np.int16)
            samples = np.concatenate([samples, noise])
        frame = AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = RATE_HZ, self._at, fractions.Fraction(1, RATE_HZ)
        self._at += FRAME
        return frame


class Caller:
    """One call. `with`: from the connection to its end; nothing of it stays open here."""

    def __init__(self, server: Running, pcm: np.ndarray, *, key: str = "", speed: float = SPEED) -> None:
        self._server, self._headers = server, {"Authorization": f"Bearer {key}"} if key else {}
        self.peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.track = SpeechTrack(pcm, speed)
        self.channel = self.peer.createDataChannel("oai-events")
        self.events: list[dict[str, Any]] = []
        self._changed = asyncio.Event()
        self.closed = asyncio.Event()
        self.location = ""
        self.answer: httpx.Response

        @self.channel.on("message")
        def on_message(message: str) -> None:
            self.events.append(json.loads(message))
            self._changed.set()

        @self.channel.on("close")
        def on_close() -> None:
            self.closed.set()
            self._changed.set()

    async def offer(self) -> str:
        if not self.peer.getSenders():
            self.peer.addTrack(self.track)
        await self.peer.setLocalDescription(await self.peer.createOffer())
        return self.peer.localDescription.sdp

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = self._headers | options.pop("headers", {})
        async with httpx.AsyncClient(base_url=self._server.url, timeout=WAIT_S) as http:
            return await http.request(method, path, headers=headers, **options)

    async def call(self, path: str = CALLS, session: dict[str, Any] | None = None, query: str = "") -> Self:
        """The documented exchange; with a session, as a form."""
        sdp = await self.offer()
        if session is None:
            options: dict[str, Any] = {"content": sdp, "headers": {"content-type": "application/sdp"}}
        else:
            fields = {"sdp": (None, sdp, "application/sdp"), "session": (None, json.dumps(session), "application/json")}
            options = {"files": fields}
        self.answer = await self.request("POST", path + query, **options)
        assert self.answer.status_code == 201, self.answer.text
        assert self.answer.headers["content-type"] == "application/sdp"
        self.location = self.answer.headers["location"]
        await self.peer.setRemoteDescription(RTCSessionDescription(self.answer.text, "answer"))
        return self

    async def until(self, done: Callable[[dict[str, Any]], object] | str, seen: int = 0) -> dict[str, Any]:
        """The first event from `seen` on that is meant."""
        meant = (lambda event: event["type"] == done) if isinstance(done, str) else done
        async with asyncio.timeout(WAIT_S):
            while True:
                for event in self.events[seen:]:
                    if meant(event):
                        return event
                seen = len(self.events)
                assert not self.closed.is_set(), self.kinds
                self._changed.clear()
                await self._changed.wait()

    def send(self, **event: Any) -> None:
        self.channel.send(json.dumps(event))

    @property
    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events]

    @property
    def text(self) -> str:
        done = [event["transcript"] for event in self.events if event["type"] == f"{TRANSCRIPTION}.completed"]
        return " ".join(done)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.peer.close()
