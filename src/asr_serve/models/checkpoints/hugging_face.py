"""Folders of Hugging Face's that hold their weights otherwise than as one model.safetensors: in shards, or as
torch's pickles, whole or in shards."""

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

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Which shard holds which tensor. Safetensors come first, as they do with their authors."""
PICKLE = "pytorch_model.bin"


def is_checkpoint_folder(folder: Path) -> bool:
    """Whether there is a config.json and such weights beside it."""
    return (folder / "config.json").is_file() and _weights(folder) is not None


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What config.json says, and every tensor by the name it has there. Of pickles nothing but tensors is loaded.

    Raises WeightsCorrupt: naming the shard that is not there, cannot be read, or has not what the index says.
    """
    found = _weights(folder)
    assert found is not None
    settings = _json(folder / "config.json")
    return settings, _file(found) if found.name == PICKLE else _sharded(found)


def _weights(folder: Path) -> Path | None:
    held = (folder / name for name in (INDEXES[0], PICKLE, INDEXES[1]))
    return next((path for path in held if path.is_file()), None)


def _sharded(index: Path) -> dict[str, Tensor]:
    places = _json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise WeightsCorrupt(f"{index} has no weight_map", "names of tensors, and of the file that holds each")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise WeightsCorrupt(f"{index} names {name!r}", "files that lie beside it")
        if not (shard := index.parent / name).is_file():
            raise WeightsCorrupt(f"{shard} is not there, and {index.name} names it", todo="get all of the shards")
        held = _file(shard)
        for key in (key for key, place in places.items() if place == name):
            if key not in held:
                raise WeightsCorrupt(f"{shard} has no {key}", f"{index.name} says so: shards of one model")
            tensors[key] = held[key]
    return tensors


UNREADABLE = (
    *(SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, TypeError),
    *(LookupError, AttributeError, AssertionError, struct.error),
)
"""What a file with any bytes in it makes the readers raise."""


def _file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        held = torch.load(path, map_location="cpu", weights_only=True)
    except UNREADABLE as failure:
        raise WeightsCorrupt(f"{path} cannot be read: {failure}") from failure
    if not isinstance(held, dict) or not all(isinstance(value, Tensor) for value in held.values()):
        raise WeightsCorrupt(f"{path} holds something else", "tensors by name, and nothing beside")
    # Some tie two names to one tensor, which safetensors would not write.
    return {str(name): value.contiguous() for name, value in held.items()}


def _json(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise WeightsCorrupt(f"{path} is no JSON: {failure}") from failure
    if not isinstance(held, dict):
        raise WeightsCorrupt(f"{path} is no table of settings", "what transformers writes")
    return held
