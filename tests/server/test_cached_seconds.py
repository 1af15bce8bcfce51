"""What was heard before is told beside the seconds of an answer; OpenAI's own client takes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import openai
import pytest
from running_server import MODEL, Running

from asr_serve.config import ServeConfig
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.protocols.openai.transcription_form import TranscriptionRequest
from asr_serve.protocols.openai.transcription_response import Usage, render_transcription
from asr_serve.server.engine_registry import open_engine
from asr_serve.types import Segment, Transcript


@pytest.fixture
def server() -> Iterator[Running]:
    """With an engine of its own, which remembers."""
    parts = open_engine(MODEL, ServeConfig(engine_threads=1))
    running = Running(ServeConfig(voice="none"), lambda name, config: parts)
    yield running
    running.stop()
    parts.client.close()


def test_the_same_file_again_says_the_same_and_tells(server: Running, beckett: Path) -> None:
    create = server.openai().audio.transcriptions.create
    first = create(model=MODEL, file=beckett)
    for again in (create(model=MODEL, file=beckett), create(model=MODEL, file=beckett, response_format="verbose_json")):
        assert again.text == first.text
        usage = again.usage
        assert usage is not None
        assert usage.seconds == 10
        told = (usage.model_extra or {})["cached_seconds"]
        assert 5 <= told <= 10, "all that is said, and not the silence around it"
    metrics = server.http.get("/metrics").text
    assert 'asr_serve_prefix_requests_total{found="answer",model="moonshine-tiny-en"} ' in metrics


def test_what_is_new_does_not_speak_of_it() -> None:
    segment = Segment(0, 32_000, "Good day.")
    new = Transcript("a", "Good day.", "en", 40_000, (segment,))
    known = msgspec.structs.replace(new, cached_samples=32_000)
    asked = TranscriptionRequest(None, TranscribeOptions())
    bodies = [json.loads(render_transcription(each, asked, lambda _: "")) for each in (new, known)]
    assert [body["usage"] for body in bodies] == [
        {"type": "duration", "seconds": 3},
        {"type": "duration", "seconds": 3, "cached_seconds": 2},
    ]
    for body in bodies:
        heard = openai.types.audio.Transcription.model_validate(body)
        assert heard.usage is not None
        assert heard.usage.type == "duration"
    assert msgspec.json.decode(msgspec.json.encode(Usage(3)), type=Usage) == Usage(3)
