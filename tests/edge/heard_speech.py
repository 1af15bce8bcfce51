"""Speech, and the words that a server hears in it over a WebSocket."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from running_edge import OPTIONS
from running_server import Running

from asr_serve.api.client.stream import StreamClient
from asr_serve.api.client.transcript import SessionTranscript
from asr_serve.audio import read_audio

SECONDS = 9


@pytest.fixture(scope="module")
def speech(cities: Path) -> np.ndarray:
    return read_audio(cities)[: SECONDS * 16_000]


@pytest.fixture(scope="module")
def expected(shared_server: Running, speech: np.ndarray) -> str:
    """The words of the file, by our client."""
    with StreamClient(shared_server.url, **OPTIONS) as stream:
        stream.send(np.rint(speech * 32_767).astype("<i2").tobytes())
        stream.end()
        transcript = SessionTranscript()
        for event in stream:
            transcript.note(event)
    assert len(transcript.final) > 40
    return transcript.final
