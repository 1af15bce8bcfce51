"""A text through livekit-agents' Deepgram plugin, as an agent would have it spoken; writes a WAV for each way and
prints its name, a JSON object a line. Runs in the environment of `make clients`.

    livekit_tts.py URL FOLDER TEXT
"""

from __future__ import annotations

import asyncio
import json
import sys
import wave
from pathlib import Path

from livekit import rtc
from livekit.agents import tts, utils
from livekit.plugins import deepgram

WAIT_S = 120.0


async def spoken(pieces: tts.ChunkedStream | tts.SynthesizeStream) -> rtc.AudioFrame:
    return rtc.combine_audio_frames([piece.frame async for piece in pieces])


def write(folder: str, way: str, frame: rtc.AudioFrame) -> None:
    path = Path(folder) / f"livekit-{way}.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((frame.num_channels, 2, frame.sample_rate, 0, "NONE", ""))
        file.writeframes(bytes(frame.data))
    print(json.dumps({"event": way, "text": str(path)}), flush=True)


async def main(url: str, folder: str, text: str) -> None:
    async with utils.http_context.open():
        voice = deepgram.TTS(base_url=f"{url}/speak", api_key="none")
        write(folder, "http", await asyncio.wait_for(spoken(voice.synthesize(text)), WAIT_S))
        for way in ("socket", "socket-again"):  # the second has the first one's connection
            stream = voice.stream()
            for word in text.split(" "):
                stream.push_text(f"{word} ")
            stream.end_input()
            write(folder, way, await asyncio.wait_for(spoken(stream), WAIT_S))
            await stream.aclose()
        await voice.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
