"""A recording through livekit-agents' OpenAI plugin, or its Deepgram plugin, as an agent would use it; prints what its
STT tells, a JSON object a line. Runs in the environment of `make clients`.

    livekit_stt.py URL WAV MODEL     a model nova-...: by the Deepgram plugin
"""

from __future__ import annotations

import asyncio
import json
import sys
import wave

from livekit import rtc
from livekit.agents import stt, utils
from livekit.plugins import deepgram, openai

QUIET_S = 5.0
"""Nothing new for so long: all has been told."""
FRAME_MS, FASTER = 50, 4


def frames(path: str) -> list[rtc.AudioFrame]:
    """The recording and two seconds of silence."""
    with wave.open(path) as wav:
        rate_hz = wav.getframerate()
        pcm = wav.readframes(wav.getnframes()) + bytes(4 * rate_hz)
    step = 2 * rate_hz * FRAME_MS // 1_000
    cut = (pcm[at : at + step] for at in range(0, len(pcm), step))
    return [rtc.AudioFrame(data, rate_hz, 1, len(data) // 2) for data in cut]


async def main(url: str, path: str, model: str) -> None:
    async with utils.http_context.open():
        ears: stt.STT
        if model.startswith("nova"):
            ears = deepgram.STT(base_url=f"{url}/listen", api_key="none", model=model, language="en")
        else:
            ears = openai.STT(base_url=url, api_key="none", model=model, language="en", use_realtime=True)
        stream = ears.stream()

        async def speak() -> None:
            for frame in frames(path):
                stream.push_frame(frame)
                await asyncio.sleep(FRAME_MS / 1_000 / FASTER)

        speaking = asyncio.create_task(speak())
        while True:
            try:
                event: stt.SpeechEvent = await asyncio.wait_for(anext(stream), QUIET_S)
            except TimeoutError:
                if speaking.done():
                    break
                continue
            text = event.alternatives[0].text if event.alternatives else None
            print(json.dumps({"event": event.type.value, "text": text}), flush=True)
        await speaking
        await stream.aclose()
        await ears.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
