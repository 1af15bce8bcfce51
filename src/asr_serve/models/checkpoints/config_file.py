"""Reading of a checkpoint's config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from asr_serve.errors import WeightsCorrupt
from asr_serve.models.checkpoints.quantized_weights import refuse_quantized_settings

NAME = "config.json"

C = TypeVar("C")


def read_config(folder: Path, kind: str, parse: Callable[[dict[str, Any]], C]) -> C:
    """Reads the config of a checkpoint folder with `parse`, a model file's `Config.of`. `kind`: what it should be
    of, for messages. Raises WeightsCorrupt, which names the file and, where one is missing or wrong, the key; also
    for weights that are stored quantized."""
    path = folder / NAME
    try:
        settings = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as failure:
        raise WeightsCorrupt(f"{path} is no JSON: {failure}", f"the {NAME} that came with the weights") from failure
    if not isinstance(settings, dict):
        raise WeightsCorrupt(f"{path} holds a JSON {type(settings).__name__}", f"an object, of a {kind} model")
    refuse_quantized_settings(path, settings)
    try:
        return parse(settings)
    except (TypeError, AttributeError, KeyError, ValueError) as failure:
        why = f"the key {failure} is missing" if isinstance(failure, KeyError) else str(failure)
        raise WeightsCorrupt(
            f"{path} is none of a {kind} model: {why}", f"the {NAME} that came with the weights"
        ) from failure
