"""docs/adding-a-model.md is true: its model file is found as the page says, and transcribes through the engine."""

from __future__ import annotations

import importlib
import logging
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
from asr_serve.models import asr
from asr_serve.models.checkpoints.config_file import read_config
from asr_serve.models.interfaces import EncoderDecoderModel, StreamingChunk
from asr_serve.models.registry import asr_card, model_modules, vocoder_cards
from asr_serve.models.tts import fastpitch
from asr_serve.models.tts.vocoders import hifigan, source_filter

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding-a-model.md"
CODE = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NAME = "tiny-letters-en"
WAIT_S = 180.0


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


def test_a_foreign_card_that_takes_a_name_is_left_out(installed: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = installed / "tiny_letters.py"
    module.write_text(module.read_text().replace(NAME, "moonshine-tiny-en"))
    sys.modules.pop("tiny_letters", None)
    importlib.invalidate_caches()
    with caplog.at_level(logging.WARNING):
        assert "tiny_letters" not in model_modules()
    assert "(tiny_letters) has a card named moonshine-tiny-en, as asr_serve.models.asr.moonshine" in caplog.text
    assert asr_card("moonshine-tiny-en").kind == "moonshine"


@pytest.mark.parametrize(
    ("file", "name", "message"),
    [
        ("moonshine", "another", r"family\.moonshine.* are model files of one name"),
        ("another", "moonshine-tiny-en", r"has a card named 'moonshine-tiny-en'.*unlike asr_serve"),
    ],
)
def test_models_of_the_package_have_names_of_their_own(
    installed: Path, monkeypatch: pytest.MonkeyPatch, file: str, name: str, message: str
) -> None:
    family = installed / "more" / "family"
    family.mkdir(parents=True)
    (family / "__init__.py").touch()
    (family / f"{file}.py").write_text((installed / "tiny_letters.py").read_text().replace(NAME, name))
    monkeypatch.setattr(asr, "__path__", [*asr.__path__, str(family.parent)])
    model_modules.cache_clear()
    importlib.invalidate_caches()
    try:
        with pytest.raises(ModelError, match=message):
            model_modules()
    finally:
        for module in [module for module in sys.modules if module.startswith(f"{asr.__name__}.family")]:
            del sys.modules[module]


def test_a_task_that_nobody_knows_is_named() -> None:
    with pytest.raises(ModelError, match=r"no task 'translation'.*asr, tts"):
        model_modules("translation")


@pytest.mark.parametrize("text", ["[1, 2]", "null", '"sizes"', "\ud800 {"])
def test_a_config_that_is_none_is_named(installed: Path, text: str) -> None:
    path = installed / "checkpoint" / "config.json"
    path.write_text(text, errors="surrogatepass")
    with pytest.raises(WeightsCorrupt, match=r"config\.json"):
        AsrCheckpoint.find(NAME, path.parent)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "holds a JSON list"),
        ("{}", "the key 'sizes' is missing"),
        ('{"sizes": 5}', "'int' object has no attribute"),
        ('{"sizes": {}}', "Missing required argument 'layers'"),
    ],
)
def test_a_config_error_names_the_file_and_the_key(tmp_path: Path, text: str, said: str) -> None:
    class Sizes(msgspec.Struct):
        layers: int

    (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightsCorrupt) as found:
        read_config(tmp_path, "tiny", lambda settings: Sizes(**dict(settings["sizes"].items())))
    assert str(tmp_path / "config.json") in str(found.value)
    assert said in str(found.value)


@pytest.mark.parametrize("load", [fastpitch.load, hifigan.load, source_filter.load])
def test_a_voice_model_whose_config_is_none_is_named(tmp_path: Path, load: Any) -> None:
    (tmp_path / "config.json").write_text("[1]")
    card = next(iter(vocoder_cards().values()))
    with pytest.raises(WeightsCorrupt, match=r"config\.json holds a JSON list"):
        load(tmp_path, card, CpuDevice())


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
