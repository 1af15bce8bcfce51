"""Finals of one caller on /v1/stream: how long each took from the packet that decides it."""

from __future__ import annotations

import asyncio
import json
import math
import time

import live_calls
import live_speech
import numpy as np
from live_speech import RATE_HZ


async def speak(host: str, port: int, sound: np.ndarray, silence_ms: int) -> list[tuple[float, float]]:
    """Speaks in real time; returns for each final its time in ms, and when the packet was sent that decided it."""
    from websockets.asyncio.client import connect

    url = f"ws://{host}:{port}/v1/stream?silence_schedule=inf:{silence_ms}"
    finals: list[tuple[float, float]] = []
    async with connect(url, proxy=None, compression=None, ping_interval=None) as line:
        sent_s: list[float] = []

        async def read() -> None:
            async for text in line:
                event = json.loads(text)
                if event.get("type") == "segment":
                    now_s = time.monotonic()
                    decided = live_calls.endpoint(1_000 * event["start_s"], 1_000 * event["end_s"], silence_ms)
                    packet = math.ceil(decided.decided_ms / 1_000 * RATE_HZ / live_speech.PACKET_SAMPLES) - 1
                    if packet < len(sent_s):
                        finals.append((1_000 * (now_s - sent_s[packet]), sent_s[packet]))

        reading = asyncio.create_task(read())
        start_s = time.monotonic()
        for first, end in live_speech.packets(len(sound)):
            await asyncio.sleep(start_s + end / RATE_HZ - time.monotonic())
            sent_s.append(time.monotonic())
            await line.send(sound[first:end].tobytes())
        await asyncio.sleep(1.0)
        reading.cancel()
    return finals
