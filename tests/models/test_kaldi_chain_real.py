"""Vosk's small English model in the engine: real weights, a decoding graph, and many sessions in a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import asr_serve
from asr_serve.audio.reader import read_audio
from asr_serve.config import EngineConfig
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.engine.client import EngineClient
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.errors import AsrServeError

NAME, WAIT_S = "vosk-small-en", 120.0


def recognize(config: EngineConfig, clips: list[np.ndarray]) -> list[tuple[int, ...]]:
    """Words of clips that are all sent at once."""
    found = AsrCheckpoint.find(NAME, None)
    client = EngineClient(config, thread_backend(found.card, lambda: found.build("cpu", "fp32")))
    try:
        tickets = [client.submit(clip) for clip in clips]
        return [ticket.future.result(WAIT_S).tokens for ticket in tickets]
    finally:
        client.close()


@pytest.fixture(scope="module")
def speech(packaged_speech: Path) -> np.ndarray:
    return read_audio(packaged_speech / "two_cities.wav")


def test_it_transcribes(packaged_speech: Path) -> None:
    with asr_serve.load(NAME) as model:
        [transcript] = model.transcribe(packaged_speech / "two_cities.wav")
        assert transcript.language == "en"
        assert "it was the best of times it was the worst of times" in transcript.text
        with pytest.raises(AsrServeError, match="hot"):
            model.transcribe(packaged_speech / "two_cities.wav", hotwords=["Dickens"])


def test_company_and_steps_change_no_word(speech: np.ndarray) -> None:
    clips = [speech[start : start + samples] for start, samples in ((0, 160_000), (90_001, 47_123), (200_000, 32_000))]
    together = recognize(EngineConfig(use_chunked_inference=True), clips)
    assert together == recognize(EngineConfig(), clips)
    assert together == [recognize(EngineConfig(use_chunked_inference=True), [clip])[0] for clip in clips]
    assert len(together[0]) > 15


def test_a_narrow_beam_is_another_search(speech: np.ndarray) -> None:
    clip = speech[:160_000]
    wide = recognize(EngineConfig(), [clip])[0]
    narrow = recognize(EngineConfig(graph_beam=2.0, graph_max_active=20), [clip])[0]
    assert narrow
    assert narrow != wide
