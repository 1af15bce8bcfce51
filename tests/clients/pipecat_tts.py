"""A text through pipecat's Deepgram TTS services, in a pipeline of their own; writes a WAV and prints its name and what
the pipeline tells, a JSON object a line. Runs in the environment of `make clients`.

    pipecat_tts.py URL FOLDER TEXT socket|http
    pipecat_tts.py URL FOLDER TEXT interrupted     over the socket; the caller interrupts the first sentence: only the
                                                   text after it is written
"""

from __future__ import annotations

import asyncio
import json
import sys
import wave
from pathlib import Path
from typing import Any

import aiohttp
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    TextFrame,
    TTSAudioRawFrame,
    TTSStartedFrame,
    TTSStoppedFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.deepgram.tts import DeepgramHttpTTSService, DeepgramTTSService
from pipecat.services.tts_service import TTSService
from pipecat.workers.runner import WorkerRunner

WAIT_S = 120.0
RATE_HZ = 24_000
LONG = "This is a long sentence that nobody waits for, since the caller speaks before it is over. " * 4


def tell(event: str, text: str | None = None) -> None:
    print(json.dumps({"event": event, "text": text}), flush=True)


class Listener(FrameProcessor):
    """The end of the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.audio = bytearray()
        self.heard, self.stopped = asyncio.Event(), asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            assert frame.sample_rate == RATE_HZ
            self.audio += frame.audio
            self.heard.set()
        elif isinstance(frame, (TTSStartedFrame, TTSStoppedFrame)):
            tell(type(frame).__name__)
            if isinstance(frame, TTSStoppedFrame):
                self.stopped.set()
        await self.push_frame(frame, direction)


async def main(url: str, folder: str, text: str, way: str) -> None:
    async with aiohttp.ClientSession() as session:
        voice: TTSService
        if way == "http":
            voice = DeepgramHttpTTSService(api_key="none", base_url=url, aiohttp_session=session)
        else:
            voice = DeepgramTTSService(api_key="none", base_url=url.replace("http", "ws", 1))
        listener = Listener()
        worker = PipelineWorker(
            Pipeline([voice, listener]),
            params=PipelineParams(audio_out_sample_rate=RATE_HZ),
            cancel_on_idle_timeout=False,
        )
        started = asyncio.Event()

        @worker.event_handler("on_pipeline_started")
        async def _started(*_: Any) -> None:
            started.set()

        @worker.event_handler("on_pipeline_error")
        async def _failed(_: Any, frame: ErrorFrame) -> None:
            tell("error", frame.error)

        async def answer(words: str) -> None:
            """An answer as a language model writes it."""
            await worker.queue_frame(LLMFullResponseStartFrame())
            for word in words.split(" "):
                await worker.queue_frame(TextFrame(f"{word} "))
            await worker.queue_frame(LLMFullResponseEndFrame())

        async def talk() -> None:
            await started.wait()
            if way == "interrupted":
                await answer(LONG)
                await asyncio.wait_for(listener.heard.wait(), WAIT_S)
                await worker.queue_frame(InterruptionFrame())
                await asyncio.sleep(0.5)  # what was on its way arrives
                listener.audio.clear()
                listener.stopped.clear()
            await answer(text)
            await asyncio.wait_for(listener.stopped.wait(), WAIT_S)
            await worker.queue_frame(EndFrame())

        runner = WorkerRunner(handle_sigint=False)
        await runner.add_workers(worker)
        await asyncio.gather(runner.run(), talk())
    path = Path(folder) / f"pipecat-{way}.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        file.writeframes(bytes(listener.audio))
    tell(way, str(path))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
