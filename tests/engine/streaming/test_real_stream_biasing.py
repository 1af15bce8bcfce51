"""Hotwords with real weights on real sound: names that a model misses are found, and nothing is said of silence
and noise. Of RN-T there are weights on few machines."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from case_tiers import exhaustive_after

import asr_serve
from asr_serve.api.library import Model
from asr_serve.audio import read_audio
from asr_serve.config import EngineConfig
from asr_serve.decoding.biasing_graph import BiasingPhrase, pack_phrases
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.models.checkpoints.store import locate
from asr_serve.models.registry import asr_card

CTC, RNNT = "armspeech-hy", "fastconformer-streaming-medium-en"
NAMES = ["հովհաննես", "արտաշես", "գրիգոր", "սամվել", "տիգրան", "շուշանիկ", "գյումրի", "վանաձոր"]
WAIT_S = 120


@pytest.fixture(scope="module", params=[CTC, RNNT])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    if locate(asr_card(request.param)) is None:
        pytest.skip(f"no weights of {request.param}")
    with asr_serve.load(request.param, device="cpu", turn_model="none", engine=EngineConfig()) as made:
        yield made


def said(model: Model, pcm: np.ndarray, bias: str = "") -> str:
    heard = model._client.submit(pcm, SearchOptions(bias=bias), "bulk", wait=True).future.result(WAIT_S)
    return model.tokenizer.decode(heard.tokens)


@pytest.mark.slow
def test_names_that_were_missed_are_found(model: Model, tmp_path: Path, packaged_speech: Path):
    if model._client.card.name == CTC:
        if shutil.which("espeak-ng") is None:
            pytest.skip("no espeak-ng, which speaks Armenian")
        names, clips = NAMES, []
        for name in names:
            subprocess.run(
                ["espeak-ng", "-v", "hy", "-s", "140", "-w", tmp_path / "a.wav", f"երեկ մենք տեսանք {name} տանը"]
            )
            clips.append(np.pad(read_audio(tmp_path / "a.wav"), 4_000))
    else:
        names, clips = ["nagg", "nell"], [read_audio(packaged_speech / "endgame_nagg_nell.wav")] * 2
    bias = pack_phrases([BiasingPhrase(name) for name in names])
    plain = [name in said(model, clip).split() for name, clip in zip(names, clips, strict=True)]
    found = [name in said(model, clip, bias).split() for name, clip in zip(names, clips, strict=True)]
    assert sum(found) > sum(plain), "of what was missed some is found"
    assert not any(before and not after for before, after in zip(plain, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("loud", exhaustive_after(2, [0.0, 0.1, 0.005]))
def test_nothing_is_said_of_silence_and_noise(model: Model, loud: float):
    noise = np.random.default_rng(1).normal(0, loud, 48_000).astype(np.float32)
    words = NAMES if model._client.card.name == CTC else ["nagg", "nell", "hamm"]
    assert said(model, noise, pack_phrases([BiasingPhrase(word) for word in words])) == said(model, noise) == ""
    heaviest = said(model, noise, pack_phrases([BiasingPhrase(word, 10.0) for word in words])).replace(" ", "")
    assert not any(word in heaviest for word in words)
    assert len(heaviest) <= 1, "a letter at most, of the loudest"
