"""Folders whose weights others have stored quantized are refused, whether config.json says so or the tensors do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_speech_llm_folders import CARDS, weights, write_folder, write_shards
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.checkpoints import store

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of FP4."""
FAMILY = "qwen3"
GROUP = 16
"""Values that share a scale."""
LAYER = "layers.0.mlp.down_proj"
"""A product of the language model."""
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {}, "ignore": ["lm_head"]}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(store, "package_folders", lambda _: [])
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path / "cache"))


def nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of FP4 values in bytes (outputs, inputs / 2), FP8 scales of groups, FP32 scale."""
    groups = F.pad(weight.float(), (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(2)
    whole = largest.max() / (448 * E2M1[-1])
    scales = (largest / E2M1[-1] / whole).to(torch.float8_e4m3fn)
    scaled = groups / (scales.float() * whole).clamp(min=1e-12)[..., None]
    codes = (scaled.abs()[..., None] - torch.tensor(E2M1)).abs().argmin(-1) + 8 * (scaled < 0)
    codes = codes.flatten(1).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales, whole.reshape(())


def layer_name(tensors: Mapping[str, Tensor]) -> str:
    return next(name for name in sorted(tensors) if name.endswith(f"{LAYER}.weight"))


def quantize(tensors: dict[str, Tensor], layout: str) -> tuple[dict[str, Tensor], str]:
    """The tensors with one weight as that layout has it, and the name that the layout gives it."""
    name = layer_name(tensors)
    base = name.removesuffix("weight")
    packed, scales, whole = nvfp4(tensors[name])
    kept = {each: tensor for each, tensor in tensors.items() if each != name}
    if layout == "modelopt":
        return kept | {name: packed, f"{base}weight_scale": scales, f"{base}weight_scale_2": whole}, name
    if layout == "compressed":
        found = {f"{base}weight_packed": packed, f"{base}weight_scale": scales, f"{base}weight_global_scale": 1 / whole}
        return kept | found, f"{base}weight_packed"
    return kept | {name: tensors[name].to(torch.float8_e4m3fn)}, name


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("modelopt", "has NVFP4 weights: {} is uint8 beside weight_scale and weight_scale_2."),
        ("compressed", "has NVFP4 weights: {} is uint8 beside weight_scale and weight_global_scale."),
        ("fp8", "has quantized weights: {} is float8_e4m3fn."),
    ],
)
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
def test_packed_tensors_are_refused(layout: str, said: str, sharded: bool, tmp_path: Path) -> None:
    folder = (write_shards if sharded else write_folder)(FAMILY, tmp_path / "source")
    tensors, name = quantize(weights(FAMILY), layout)
    if sharded:
        for shard in folder.glob("model-*"):
            shard.unlink()
        save_file(tensors, folder / "model-00001-of-00001.safetensors")
        mapping = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))
    else:
        save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsCorrupt) as refused:
        AsrCheckpoint.find(CARDS[FAMILY], folder).build("cpu", "fp32")
    assert said.format(name) in str(refused.value)
    assert "weights in FP32, FP16 or BF16; engine.quantize=int8" in refused.value.allowed
    assert "checkpoint that these were quantized from" in refused.value.todo


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quantization_config": MODELOPT}, "quantization_config (quant_algo='NVFP4', quant_method='modelopt')"),
        (
            {"quantization_config": COMPRESSED},
            "quantization_config (format='nvfp4-pack-quantized', quant_method='compressed-tensors')",
        ),
        ({"text_config": {"quantization_config": MODELOPT}}, "text_config.quantization_config (quant_algo='NVFP4'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config (quant_method='fp8')"),
        ({"quantization_config": "NVFP4"}, "quantization_config: its weights are quantized"),
    ],
    ids=["modelopt", "compressed-tensors", "part", "fp8", "odd"],
)
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
def test_settings_that_say_so_are_refused(settings: dict[str, Any], said: str, sharded: bool, tmp_path: Path) -> None:
    """Before a tensor is read: these are plain."""
    folder = (write_shards if sharded else write_folder)(FAMILY, tmp_path / "source")
    file = folder / "config.json"
    known = json.loads(file.read_text())
    merged = {name: known[name] | value if name == "text_config" else value for name, value in settings.items()}
    file.write_text(json.dumps(known | merged))
    with pytest.raises(WeightsCorrupt, match="weights in FP32, FP16 or BF16") as refused:
        AsrCheckpoint.find(CARDS[FAMILY], folder)
    assert f"{file} has {said}" in str(refused.value)


def test_no_quantization_is_no_reason(tmp_path: Path) -> None:
    """Some programs write the key with null."""
    folder = write_folder(FAMILY, tmp_path / "source", quantization_config=None)
    AsrCheckpoint.find(CARDS[FAMILY], folder).build("cpu", "fp32")
