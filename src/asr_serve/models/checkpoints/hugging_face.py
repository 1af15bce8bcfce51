"""Checkpoint folders of Hugging Face that do not hold one model.safetensors: safetensors in shards, or torch
pickles, whole or in shards."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from asr_serve.errors import WeightsCorrupt
from asr_serve.models.checkpoints.quantized_weights import refuse_quantized_settings, refuse_quantized_tensors

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Index files: tensor name -> shard. Safetensors come first, as in transformers."""
PICKLE = "pytorch_model.bin"


def is_checkpoint_folder(folder: Path) -> bool:
    """Returns whether a folder holds config.json and weights in one of these forms."""
    return (folder / "config.json").is_file() and _weights(folder) is not None


def has_all_shards(folder: Path) -> bool:
    """Returns whether every file that a folder's index names is there; true without an index."""
    index = _weights(folder)
    if index is None or index.name == PICKLE:
        return True
    weight_map = _json(index).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    return all((folder / str(name)).is_file() for name in set(map(str, names)))


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the settings of config.json, and every tensor by its name in the checkpoint. Nothing but tensors is
    unpickled. Raises WeightsCorrupt: names the shard that is missing, cannot be read, or lacks what the index lists;
    also for quantized weights."""
    path = _weights(folder)
    assert path is not None
    settings = _json(folder / "config.json")
    refuse_quantized_settings(folder / "config.json", settings)
    tensors = _file(path) if path.name == PICKLE else _sharded(path)
    refuse_quantized_tensors(path, tensors)
    return settings, tensors


def _weights(folder: Path) -> Path | None:
    candidates = (folder / name for name in (INDEXES[0], PICKLE, INDEXES[1]))
    return next((path for path in candidates if path.is_file()), None)


def _sharded(index: Path) -> dict[str, Tensor]:
    weight_map = _json(index).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise WeightsCorrupt(f"{index} has no weight_map", "names of tensors, and of the file that holds each")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise WeightsCorrupt(f"{index} names {name!r}", "files that lie beside it")
        if not (shard := index.parent / name).is_file():
            raise WeightsCorrupt(f"{shard} is not there, and {index.name} names it", todo="get all of the shards")
        shard_tensors = _file(shard)
        for key in (key for key, file_name in weight_map.items() if file_name == name):
            if key not in shard_tensors:
                raise WeightsCorrupt(f"{shard} has no {key}", f"{index.name} says so: shards of one model")
            tensors[key] = shard_tensors[key]
    return tensors


UNREADABLE = (
    *(SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, TypeError),
    *(LookupError, AttributeError, AssertionError, struct.error),
)
"""Errors that the readers raise for a file with arbitrary bytes."""


def _file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except UNREADABLE as failure:
        raise WeightsCorrupt(f"{path} cannot be read: {failure}") from failure
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise WeightsCorrupt(f"{path} holds something else", "tensors by name, and nothing beside")
    # Some checkpoints tie two names to one tensor, which safetensors would not write.
    return {str(name): value.contiguous() for name, value in tensors.items()}


def _json(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise WeightsCorrupt(f"{path} is no JSON: {failure}") from failure
    if not isinstance(settings, dict):
        raise WeightsCorrupt(f"{path} is no table of settings", "what transformers writes")
    return settings
