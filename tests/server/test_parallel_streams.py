"""Twenty streams at once through one of OpenAI's asynchronous clients."""

from __future__ import annotations

import asyncio
import difflib
import io
import wave
from pathlib import Path

import openai
import pytest
from running_server import MODEL, WAIT_S


@pytest.fixture(scope="module")
def clips(cities: Path) -> list[bytes]:
    """Ten of 2 to 3.8 s, from different places of one recording."""
    made = []
    with wave.open(str(cities)) as whole:
        for number in range(10):
            whole.setpos(int(3.6 * number * whole.getframerate()))
            out = io.BytesIO()
            with wave.open(out, "wb") as part:
                part.setparams(whole.getparams())
                part.writeframes(whole.readframes(int((2 + number / 5) * whole.getframerate())))
            made.append(out.getvalue())
    return made


async def test_each_gets_its_own(shared_server, clips):
    async with openai.AsyncOpenAI(
        base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S
    ) as client:

        async def hear(clip: bytes) -> str:
            events = [
                event
                async for event in await client.audio.transcriptions.create(
                    model=MODEL, file=("clip.wav", clip), stream=True
                )
            ]
            assert [event.type for event in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
            assert "".join(event.delta for event in events[:-1]) == events[-1].text
            return events[-1].text

        alone = [await hear(clip) for clip in clips]
        assert len(set(alone)) == len(clips)
        together = await asyncio.gather(*(hear(clip) for clip in clips * 2))
    for text, own in zip(together, alone * 2, strict=True):
        # In a batch a bfloat16 may round otherwise, and a comma come out as none.
        assert difflib.SequenceMatcher(None, text, own).ratio() > 0.9
    shared_server.expect_empty()
