"""LLMASR with Whisper's encoder: frames are those of transformers' class, in any company, from a folder of FunASR."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from fun_asr_folders import clips, weights, write_folder
from safetensors.torch import load_file
from torch import Tensor

import asr_serve
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.asr.speech_llm import funasr_folder, llm_asr
from asr_serve.models.asr.speech_llm.whisper_windows import WhisperSizes

FIXTURE = Path(__file__).parent / "fixtures" / "llm_asr_whisper.safetensors"
WIDTH, DOWNSAMPLE = 32, 5
OPENAI = (
    (r"^layers\.", "blocks."),
    (r"\.self_attn_layer_norm\.", ".attn_ln."),
    (r"\.self_attn\.out_proj\.", ".attn.out."),
    (r"\.self_attn\.q_proj\.", ".attn.query."),
    (r"\.self_attn\.k_proj\.", ".attn.key."),
    (r"\.self_attn\.v_proj\.", ".attn.value."),
    (r"\.final_layer_norm\.", ".mlp_ln."),
    (r"\.fc1\.", ".mlp.0."),
    (r"\.fc2\.", ".mlp.2."),
    (r"^layer_norm\.", "ln_post."),
    (r"^embed_positions\.weight$", "positional_embedding"),
)
"""Names of transformers -> of OpenAI."""


def openai(name: str) -> str:
    for old, new in OPENAI:
        name = re.sub(old, new, name)
    return name


NAMES: dict[str, Callable[[str], str]] = {
    "openai": openai,
    "wrapped": lambda name: f"encoders.{openai(name)}",
    "transformers": lambda name: name,
}


@cache
def stored() -> dict[str, Tensor]:
    return load_file(FIXTURE)


def samples() -> list[np.ndarray]:
    return [clips()[0], clips()[2], np.tile(clips()[0], 3)]


def write_whisper(folder: Path, names: str = "openai", **changes: Any) -> Path:
    """Writes the folder of the fixture's LLMASR with Whisper's encoder in place of its own."""
    write_folder("llmasr", folder)
    settings = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))
    settings |= {
        "audio_encoder": "iic/Whisper-tiny",
        "audio_encoder_conf": {"hub": "ms", "n_audio_head": 2},
        "frontend": "WhisperFrontend",
        "frontend_conf": {"fs": 16_000, "whisper_model": "tiny", "n_mels": 80, "do_pad_trim": True},
        "audio_adaptor": "Linear",
        "audio_adaptor_conf": {"downsample_rate": DOWNSAMPLE, "ffn_dim": 16, "llm_dim": 24, "encoder_dim": WIDTH},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | changes), "utf-8")
    chance = torch.Generator().manual_seed(3)
    adaptor = {
        "linear1.weight": torch.randn(16, WIDTH * DOWNSAMPLE, generator=chance) * 0.1,
        "linear1.bias": torch.randn(16, generator=chance) * 0.1,
        "linear2.weight": torch.randn(24, 16, generator=chance) * 0.3,
        "linear2.bias": torch.randn(24, generator=chance) * 0.1,
    }
    state = {name: tensor for name, tensor in weights("llmasr").items() if name.startswith("llm.")}
    state |= {f"audio_adaptor.{name}": tensor for name, tensor in adaptor.items()}
    state |= {
        f"audio_encoder.{NAMES[names](name.removeprefix('weights.'))}": tensor.float()
        for name, tensor in stored().items()
        if name.startswith("weights.")
    }
    torch.save(state, folder / "model.pt")
    return folder


def convert(source: Path, target: Path) -> Path:
    target.mkdir()
    funasr_folder.convert(source, target)
    return target


def load(folder: Path) -> llm_asr.Model:
    made: Any = AsrCheckpoint.find("llm-asr", folder).build("cpu", "fp32").model
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("whisper")
    return convert(write_whisper(place / "source"), place / "converted")


@pytest.fixture(scope="module")
def model(folder: Path) -> llm_asr.Model:
    return load(folder)


@pytest.mark.parametrize("batch", [[0], [1], [2], [0, 1, 2], [2, 1], [2, 2, 2, 0, 1, 2, 2, 1]], ids=str)
def test_frames_are_those_of_transformers_in_any_company(model: llm_asr.Model, batch: list[int]) -> None:
    with torch.inference_mode():
        frames, packing = model.encoder([torch.from_numpy(samples()[i]) for i in batch])
    assert packing.total == len(frames)
    for i, offset, count in zip(batch, packing.offsets, packing.frames, strict=True):
        expected = stored()[f"frames.{i}"]
        assert count == model.encoder.count_frames(len(samples()[i])) == len(expected)
        torch.testing.assert_close(frames[offset : offset + count], expected, atol=1e-4, rtol=0)


def test_the_adaptor_reads_them(model: llm_asr.Model) -> None:
    assert model.frame_samples == 320 * DOWNSAMPLE
    with torch.inference_mode():
        embeddings, packing = model.encode([torch.from_numpy(pcm) for pcm in samples()])
    assert packing.frames == [model.count_frames(len(pcm)) for pcm in samples()] == [10, 3, 30]
    assert embeddings.shape == (43, 24)


@pytest.mark.parametrize("names", ["wrapped", "transformers"])
def test_other_names_of_its_tensors_are_read(tmp_path: Path, model: llm_asr.Model, names: str) -> None:
    other = load(convert(write_whisper(tmp_path / "source", names), tmp_path / "target"))
    pcm = [torch.from_numpy(samples()[0])]
    with torch.inference_mode():
        assert torch.equal(other.encode(pcm)[0], model.encode(pcm)[0])


def test_a_converted_folder_answers(folder: Path) -> None:
    with asr_serve.load(str(folder), device="cpu", dtype="fp32", turn_model="none") as loaded:
        assert loaded.card.name == "llm-asr"
        (found,) = loaded.transcribe([samples()[2]], vad=False)
        assert isinstance(found.text, str)


def test_heads_of_the_published_sizes_have_64_numbers() -> None:
    for width, heads in ((384, 6), (1_280, 20)):
        tensors = {
            "encoder.conv1.weight": torch.empty(width, 80, 3),
            "encoder.embed_positions.weight": torch.empty(1_500, width),
            "encoder.layers.0.fc1.weight": torch.empty(4 * width, width),
        }
        sizes = WhisperSizes.of(tensors, None)
        assert (sizes.heads, sizes.layers, sizes.inner, sizes.window_positions) == (heads, 1, 4 * width, 1_500)


FRONTEND = {"fs": 16_000, "whisper_model": "tiny", "n_mels": 80}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frontend": "WavFrontend"}, "frontend"),
        ({"frontend_conf": FRONTEND | {"do_pad_trim": False}}, "do_pad_trim"),
        ({"frontend_conf": FRONTEND | {"n_mels": 128}}, "128 mel bins"),
        ({"frontend_conf": FRONTEND | {"whisper_model": "large-v3"}}, "128 mel bins"),
        ({"audio_encoder_conf": {"n_audio_head": 3}}, "3 attention heads"),
        ({"audio_encoder_conf": {"n_audio_head": "two"}}, "n_audio_head"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsCorrupt, match=message):
        convert(write_whisper(tmp_path / "source", **changes), tmp_path / "target")


@pytest.mark.parametrize("part", ["blocks.1.attn.out.bias", "positional_embedding", "ln_post.weight", "conv1.weight"])
def test_an_encoder_that_lacks_a_tensor_is_refused(tmp_path: Path, part: str) -> None:
    source = write_whisper(tmp_path / "source")
    state = torch.load(source / "model.pt")
    del state[f"audio_encoder.{part}"]
    torch.save(state, source / "model.pt")
    with pytest.raises(WeightsCorrupt, match="no tensor"):
        load(convert(source, tmp_path / "target"))
