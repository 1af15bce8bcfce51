"""A recording through pipecat's OpenAI realtime STT, or its Deepgram STT, in a pipeline of its own; prints what it
tells, a JSON object a line. Runs in the environment of `make clients`.

    pipecat_stt.py URL WAV MODEL server|local     who says when a turn is over: the server, or Silero here
    pipecat_stt.py URL WAV MODEL deepgram         by Deepgram's protocol, where pauses end a turn
"""

from __future__ import annotations

import asyncio
import json
import sys
import wave
from collections.abc import Iterator
from typing import Any

from pipecat.audio.vad.silero import SileroVADAnalyzer
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    InterimTranscriptionFrame,
    ProposedUserStartedSpeakingFrame,
    ProposedUserStoppedSpeakingFrame,
    TranscriptionFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.audio.vad_processor import VADProcessor
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.deepgram.stt import DeepgramSTTService
from pipecat.services.openai.stt import OpenAIRealtimeSTTService
from pipecat.services.stt_service import STTService
from pipecat.workers.runner import WorkerRunner

QUIET_S = 5.0
FRAME_MS, FASTER = 20, 2
RATE_HZ = 16_000
TOLD = (
    InterimTranscriptionFrame,
    TranscriptionFrame,
    ProposedUserStartedSpeakingFrame,
    ProposedUserStoppedSpeakingFrame,
)


class Listener(FrameProcessor):
    """The end of the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.heard_s = 0.0

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TOLD):
            self.heard_s = asyncio.get_running_loop().time()
            told = {"event": type(frame).__name__, "text": getattr(frame, "text", None)}
            print(json.dumps(told), flush=True)
        await self.push_frame(frame, direction)


def frames(path: str) -> Iterator[InputAudioRawFrame]:
    """The recording and two seconds of silence."""
    with wave.open(path) as wav:
        assert wav.getframerate() == RATE_HZ
        pcm = wav.readframes(wav.getnframes()) + bytes(4 * RATE_HZ)
    step = 2 * RATE_HZ * FRAME_MS // 1_000
    for at in range(0, len(pcm), step):
        yield InputAudioRawFrame(pcm[at : at + step], RATE_HZ, 1)


async def main(url: str, path: str, model: str, turns: str) -> None:
    stt: STTService
    if turns == "deepgram":
        settings = DeepgramSTTService.Settings(model=model)
        stt = DeepgramSTTService(api_key="none", base_url=url, settings=settings)
    else:
        stt = OpenAIRealtimeSTTService(
            api_key="none",
            base_url=url,
            turn_detection={"type": "server_vad"} if turns == "server" else False,
            settings=OpenAIRealtimeSTTService.Settings(model=model),
        )
    listener = Listener()
    before = [] if turns != "local" else [VADProcessor(vad_analyzer=SileroVADAnalyzer())]
    worker = PipelineWorker(
        Pipeline([*before, stt, listener]),
        params=PipelineParams(audio_in_sample_rate=RATE_HZ),
        cancel_on_idle_timeout=False,
    )
    started = asyncio.Event()

    @worker.event_handler("on_pipeline_started")
    async def _started(*_: Any) -> None:
        started.set()

    @worker.event_handler("on_pipeline_error")
    async def _failed(_: Any, frame: ErrorFrame) -> None:
        print(json.dumps({"event": "error", "text": frame.error}), flush=True)

    async def speak() -> None:
        loop = asyncio.get_running_loop()
        await started.wait()
        for frame in frames(path):
            await worker.queue_frame(frame)
            await asyncio.sleep(FRAME_MS / 1_000 / FASTER)
        listener.heard_s = max(listener.heard_s, loop.time())
        while loop.time() - listener.heard_s < QUIET_S:
            await asyncio.sleep(0.1)
        await worker.queue_frame(EndFrame())

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    await asyncio.gather(runner.run(), speak())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
