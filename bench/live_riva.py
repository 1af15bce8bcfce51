"""Riva's StreamingRecognize, for the callers of live_load.py: a call of gRPC as they know a WebSocket, with the
messages of nvidia-riva-client.

A module for the process of the callers: nothing of asr-serve is imported.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import live_speech
import numpy as np
from live_speech import RATE_HZ
from riva.client.proto import riva_asr_pb2, riva_asr_pb2_grpc, riva_audio_pb2

WINDOW_MS, PAD_MS = 32, 250
"""Windows of voice activity, and the sound behind a sentence that is part of it: as live_calls.py has them."""
REFUSED_S = 0.25
"""A server that refuses says so in this time: it answers nothing else before there are words."""
CODES = {grpc.StatusCode.RESOURCE_EXHAUSTED: "at_capacity"}

Message = dict[str, Any]


class Riva:
    """PCM in messages, interim and final results. With times of words: nothing else tells where a sentence begins."""

    path = ""
    hello: str | None = None
    goodbye = "half-close"

    def __init__(self, silence_ms: int | None) -> None:
        assert silence_ms is not None, "a result tells when it was decided, and not where its sentence ends"
        self._silence_ms = math.ceil(silence_ms / WINDOW_MS) * WINDOW_MS
        config = riva_asr_pb2.StreamingRecognitionConfig(interim_results=True)
        config.config.encoding, config.config.sample_rate_hertz = riva_audio_pb2.LINEAR_PCM, RATE_HZ
        config.config.enable_automatic_punctuation = config.config.enable_word_time_offsets = True
        config.config.endpointing_config.stop_history = silence_ms
        self.config = riva_asr_pb2.StreamingRecognizeRequest(streaming_config=config)

    def packets(self, pcm: np.ndarray) -> list[Any]:
        cuts = live_speech.packets(len(pcm))
        return [riva_asr_pb2.StreamingRecognizeRequest(audio_content=pcm[start:end].tobytes()) for start, end in cuts]

    def ready(self, answer: Message) -> bool:
        return answer.get("type") == "ready"

    def ended(self, text: str, *, parting: bool) -> bool:
        return text.startswith(('{"type": "ended"', '{"type": "error"'))

    def heard(self, answers: Iterable[tuple[float, Message]]) -> Iterator[tuple[float, Message]]:
        for when, answer in answers:
            if answer["type"] == "interim":
                yield when, {"sentences": [], "partial": answer["text"]}
            elif answer["type"] == "final":
                end_ms = answer["decided_ms"] - self._silence_ms + PAD_MS
                said = {"text": answer["text"], "start": answer["start_ms"], "end": end_ms}
                yield when, {"sentences": [said], "partial": ""}


class RivaLine:
    """A call. Results come as JSON."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.transport = self

    async def send(self, message: Any) -> None:
        """Raises OSError where the call has ended."""
        try:
            await (self._call.done_writing() if message == Riva.goodbye else self._call.write(message))
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise ConnectionError("the call has ended") from error

    async def recv(self) -> str:
        """Tells whether the call was refused."""
        code = asyncio.ensure_future(self._call.code())
        if (await asyncio.wait({code}, timeout=REFUSED_S))[0]:
            return await self._error()
        return json.dumps({"type": "ready"})

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            async for response in self._call:
                for result in response.results:
                    yield json.dumps(_message(result))
        except grpc.RpcError:
            yield await self._error()
            return
        yield json.dumps({"type": "ended"})

    def abort(self) -> None:
        self._call.cancel()

    async def _error(self) -> str:
        code = await self._call.code()
        trailers = dict(await self._call.trailing_metadata() or ())
        retry_ms = trailers.get("retry-after-ms")
        retry = {} if retry_ms is None else {"retry_after_ms": int(retry_ms)}
        return json.dumps({"type": "error", "code": CODES.get(code, code.name.lower()), **retry})


def _message(result: Any) -> Message:
    [alternative] = result.alternatives
    text = alternative.transcript.strip()
    if not result.is_final:
        return {"type": "interim", "text": text}
    start_ms = alternative.words[0].start_time if alternative.words else 0
    return {"type": "final", "text": text, "start_ms": start_ms, "decided_ms": 1_000 * result.audio_processed}


@asynccontextmanager
async def dial(address: str, protocol: Any) -> AsyncIterator[RivaLine]:
    """Opens a connection of its own for a call of a `Riva`, as other callers have one."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = riva_asr_pb2_grpc.RivaSpeechRecognitionStub(channel).StreamingRecognize()
        line = RivaLine(call)
        await line.send(protocol.config)
        try:
            yield line
        finally:
            call.cancel()
