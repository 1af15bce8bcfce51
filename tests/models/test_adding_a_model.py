"""docs/adding-a-model.md is true: its model file is found as the page says, and transcribes through the engine."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asr_serve.audio.reader import read_audio
from asr_serve.config import EngineConfig
from asr_serve.devices.cpu import CpuDevice
from asr_serve.engine.builder import AsrCheckpoint, validate_card
from asr_serve.engine.client import EngineClient
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.errors import ModelError, WeightsCorrupt
from asr_serve.models.interfaces import EncoderDecoderModel, StreamingChunk
from asr_serve.models.registry import asr_card, model_modules

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding-a-model.md"
CODE = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NAME = "tiny-letters-en"
WAIT_S = 60.0


def blocks(wanted: str) -> list[str]:
    return [code for language, code in CODE.findall(PAGE.read_text()) if language == wanted]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path with the page's package, as an installer leaves it, and the checkpoint."""
    (model, checkpoint, _), (project,) = blocks("python"), blocks("toml")
    (tmp_path / "tiny_letters.py").write_text(model)
    about = tomllib.loads(project)["project"]
    info = tmp_path / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n")
    lines = [
        line
        for group, entries in about["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model_modules.cache_clear()
    exec(compile(checkpoint, str(PAGE), "exec"), {"__name__": "checkpoint"})
    yield tmp_path
    model_modules.cache_clear()
    sys.modules.pop("tiny_letters", None)


@torch.inference_mode()
def direct(found: AsrCheckpoint, pcm: np.ndarray) -> tuple[int, ...]:
    """Tokens of the likeliest path through one step of the whole clip, without the engine."""
    model: Any = found.file.Model(found.config, load_file(found.folder / "model.safetensors"), CpuDevice())
    frames = model.count_frames(len(pcm))
    padded = torch.zeros(1, model.audio_window(frames).samples)
    padded[0, : len(pcm)] = torch.from_numpy(pcm)
    row = torch.zeros(1, dtype=torch.int64)
    chunk = StreamingChunk(padded, row, row, row + frames, row + len(pcm))
    state = {name: torch.zeros(2, *spec.shape) for name, spec in model.state_specs(frames).items()}
    best = model.ctc_logprobs(model.step(chunk, state))[0].argmax(-1).tolist()
    return tuple(each for each, before in zip(best, [-1, *best], strict=False) if each not in (before, model.blank_id))


def test_the_engine_computes_what_the_model_does(installed: Path, packaged_speech: Path) -> None:
    pcm = read_audio(packaged_speech / "two_cities.wav")
    clips = [pcm[start : start + samples] for start, samples in ((0, 160_000), (90_001, 47_123), (200_000, 3_200))]
    found = AsrCheckpoint.find(NAME, installed / "checkpoint")
    config = EngineConfig(use_chunked_inference=True)
    client = EngineClient(config, thread_backend(found.card, lambda: found.build("cpu", "fp32")))
    try:
        tickets = [client.submit(clip) for clip in clips]
        heard = [ticket.future.result(WAIT_S).tokens for ticket in tickets]
    finally:
        client.close()
    assert heard == [direct(found, clip) for clip in clips]
    assert len(heard[0]) > 50
    assert len(set(heard[0])) > 5


def test_the_page_transcribes(installed: Path, packaged_speech: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(packaged_speech / "two_cities.wav", installed)
    exec(compile(blocks("python")[-1], str(PAGE), "exec"), {"__name__": "transcription"})
    assert re.fullmatch(r"[a-z ]{100,}\n", capsys.readouterr().out)


def test_another_process_finds_it(installed: Path) -> None:
    """A server's engine is one."""
    paths = os.pathsep.join([str(installed), *sys.path])
    listing = [sys.executable, "-c", "from asr_serve.api.cli import main; main()", "models", "show", NAME]
    done = subprocess.run(
        listing, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=120, check=True
    )
    assert "tiny_letters" in done.stdout


def test_a_kind_is_one_file(installed: Path) -> None:
    (info,) = installed.glob("*.dist-info")
    (info / "entry_points.txt").write_text("[asr_serve.models]\none = tiny_letters\ntwo = tiny_letters\n")
    with pytest.raises(ModelError, match=r"'tiny_letters'.*unlike tiny_letters"):
        model_modules()


def test_a_card_has_a_name_of_its_own(installed: Path) -> None:
    module = installed / "tiny_letters.py"
    module.write_text(module.read_text().replace(NAME, "moonshine-tiny-en"))
    sys.modules.pop("tiny_letters", None)
    importlib.invalidate_caches()
    with pytest.raises(ModelError, match=r"tiny_letters has a card named 'moonshine-tiny-en'.*moonshine"):
        model_modules()


def test_a_task_that_nobody_knows_is_named() -> None:
    with pytest.raises(ModelError, match=r"no task 'translation'.*asr, tts"):
        model_modules("translation")


@pytest.mark.parametrize("text", ["[1, 2]", "null", '"sizes"', "\ud800 {"])
def test_a_config_that_is_none_is_named(installed: Path, text: str) -> None:
    path = installed / "checkpoint" / "config.json"
    path.write_text(text, errors="surrogatepass")
    with pytest.raises(WeightsCorrupt, match=r"config\.json"):
        AsrCheckpoint.find(NAME, path.parent)


def test_a_card_declares_what_its_model_is(installed: Path) -> None:
    found = AsrCheckpoint.find(NAME, installed / "checkpoint")
    model = found.build("cpu", "fp32").model
    validate_card(asr_card(NAME), model)
    with pytest.raises(ModelError, match=r"tiny_letters\.Model is no EncoderDecoderModel"):
        validate_card(msgspec.structs.replace(asr_card(NAME), heads=(), chunk=0), model)


def test_a_model_that_lacks_a_method_cannot_be_built() -> None:
    class Lacking(EncoderDecoderModel):
        eos = 0

    with pytest.raises(TypeError, match=r"align.*count_frames.*cross_keys_values.*decode"):
        Lacking()
