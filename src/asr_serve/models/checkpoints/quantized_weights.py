"""Refusal of checkpoints whose weights others have stored quantized, as NVFP4 or FP8, with scales beside them.

Packed weights have a shape and a dtype like any others, so that a model could load them and compute nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from asr_serve.errors import WeightsCorrupt

SCALES = ("weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale", "weight_scales")
"""Last parts of the names of scales, as ModelOpt, compressed-tensors and the published FP8 checkpoints write them."""
NVFP4_SCALES = {"weight_scale_2", "weight_global_scale"}
"""Names of the scale of a whole tensor, which NVFP4 has above the scales of 16 values."""
PACKED = ("weight_packed", "qweight")
"""Last parts of the names of packed weights that are not called `weight`."""
SMALL_FLOATS = ("torch.float8_", "torch.float4_")
ALLOWED = "weights in FP32, FP16 or BF16; engine.quantize=int8 makes 8-bit ones of them when they are loaded"
TODO = "take the checkpoint that these were quantized from, or have the program that quantized them expand them"


def refuse_quantized_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises WeightsCorrupt if a config.json, or a part of it, says that the weights are quantized."""
    for place, part in (("", settings), *((f"{name}.", each) for name, each in settings.items())):
        quantization = part.get("quantization_config") if isinstance(part, Mapping) else None
        if quantization is None:
            continue
        key = f"{place}quantization_config"
        if isinstance(quantization, Mapping):
            stated = {name: quantization.get(name) for name in ("quant_algo", "format", "quant_method")}
            known = ", ".join(f"{name}={value!r}" for name, value in stated.items() if value is not None)
            key = f"{key} ({known})" if known else key
        raise WeightsCorrupt(f"{path} has {key}: its weights are quantized", ALLOWED, TODO)


def refuse_quantized_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises WeightsCorrupt if tensors of a file are quantized; it names one, and the layout where it is known."""
    scales: list[str] = []
    for name in tensors:
        base, dot, last = name.rpartition(".")
        scales = [scale for scale in SCALES if f"{base}{dot}{scale}" in tensors]
        if (last == "weight" and scales) or last in PACKED:
            break
    else:
        small = (name for name, tensor in tensors.items() if str(tensor.dtype).startswith(SMALL_FLOATS))
        if (name := next(small, "")) == "":
            return
    kind = str(tensors[name].dtype).removeprefix("torch.")
    what = "NVFP4" if kind == "uint8" and not NVFP4_SCALES.isdisjoint(scales) else "quantized"
    beside = f" beside {' and '.join(scales)}" if scales else ""
    raise WeightsCorrupt(f"{path} has {what} weights: {name} is {kind}{beside}", ALLOWED, TODO)
