"""From a model's name to a loop: what an engine is made of, and how it is put together."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file

from asr_serve import devices, units
from asr_serve.config import EngineConfig
from asr_serve.devices.base import Device
from asr_serve.engine.loop import Loop
from asr_serve.engine.runner import DecodeRunner, EncodeRunner, VadRunner
from asr_serve.engine.stats import Stats
from asr_serve.errors import WeightsCorrupt
from asr_serve.models import weights as model_weights
from asr_serve.models.card import Card, card, kinds
from asr_serve.models.vad import silero
from asr_serve.models.vad.silero import Silero
from asr_serve.text import tokens


class Parts(NamedTuple):
    """What an engine is made of."""

    model: Any
    vad: Silero
    device: Device
    text: Callable[[list[int]], str]


class Checkpoint(NamedTuple):
    """A model's files, found and read as far as it goes without a tensor."""

    card: Card
    folder: Path
    kind: ModuleType
    config: Any
    text: Callable[[list[int]], str]

    @classmethod
    def find(cls, model: str, weights: str | os.PathLike[str] | None) -> Checkpoint:
        """Raises UnknownModel, WeightsMissing, WeightsCorrupt."""
        chosen = card(model)
        folder = model_weights.resolve(chosen, weights)
        kind = kinds()[chosen.kind]
        try:
            config = kind.Config.of(json.loads((folder / "config.json").read_text()))
        except json.JSONDecodeError as failure:
            raise WeightsCorrupt(f"{folder / 'config.json'} is no JSON: {failure}") from failure
        return cls(chosen, folder, kind, config, tokens.load(folder).text)

    def build(self, device: str, dtype: str) -> Parts:
        """Load and pack the weights: on the thread that is to compute (decision 0005)."""
        picked = devices.pick(device, dtype)
        try:
            tensors = load_file(self.folder / "model.safetensors")
        except SafetensorError as failure:
            raise WeightsCorrupt(f"{self.folder / 'model.safetensors'} cannot be read: {failure}") from failure
        return Parts(self.kind.Model(self.config, tensors, picked), silero.load(), picked, self.text)


def assemble(
    parts: Parts,
    chosen: Card,
    config: EngineConfig,
    on_done: Callable[[int], None],
    on_stop: Callable[[], None],
    *,
    on_start: Callable[[list[int]], None] = lambda _: None,
    stats: Stats | None = None,
    keep_states: bool = False,
) -> Loop:
    """A loop over these parts. `keep_states`: hand out each caller's state with its probabilities."""
    model, vad, device, text = parts
    longest = model.frames(units.ms_to_samples(chosen.max_segment_ms))
    return Loop(
        model,
        EncodeRunner(model, device),
        DecodeRunner(model, device, config.max_decode_rows, config.kv_bytes, longest),
        VadRunner(vad, config.max_sessions),
        config,
        text,
        chosen.tokens_per_s,
        on_done=on_done,
        on_stop=on_stop,
        on_start=on_start,
        stats=stats or Stats(),
        keep_states=keep_states,
    )
