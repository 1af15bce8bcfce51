"""Fixtures of the generators: tensors of a safetensors file, and facts in JSON in its metadata."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor


@cache
def facts_of(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        return dict(json.loads(file.metadata()["facts"]))


@cache
def tensors_of(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
