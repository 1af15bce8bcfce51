"""Contracts of model files: what a module that holds a model defines, and how its weights come to it.

Modules are found by `models/registry.py`: in the folders below `models`, and in installed packages by the entry
point group `asr_serve.models`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import msgspec
from torch import Tensor

from asr_serve.devices.interface import Device
from asr_serve.errors import OptionError
from asr_serve.models.interfaces import (
    EncoderDecoderModel,
    StreamingModel,
    StreamingTtsModel,
    TurnModel,
    Vocoder,
    WholeSentenceTtsModel,
)
from asr_serve.models.registry import AsrCard, ModelCard, TtsCard, TurnCard, VocoderCard
from asr_serve.text.tokenizers import Tokenizer

WEIGHTS = "model.safetensors"
AsrModel = EncoderDecoderModel | StreamingModel
SpeechModel = WholeSentenceTtsModel | StreamingTtsModel[Any]


class AsrModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a recogniser. A model file's `Config` is a subclass whose fields are named as in config.json."""

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Self:
        """Config from a checkpoint's config.json; keys that are not fields are skipped. Raises WeightsCorrupt for
        a model that the file does not compute."""
        return cls(**{name: settings[name] for name in cls.__struct_fields__ if settings.get(name) is not None})

    @property
    def ctc_blank_id(self) -> int | None:
        """Token that the head ctc emits for none; None for a model without that head."""
        return None

    @property
    def weight_files(self) -> tuple[str, ...]:
        """Files of a checkpoint folder that hold the tensors, by their names below it."""
        return (WEIGHTS,)

    @property
    def other_files(self) -> tuple[str, ...]:
        """Further files of a checkpoint folder that `with_folder` reads, by their names below it."""
        return ()

    def with_folder(self, folder: Path, tokenizer: Tokenizer) -> Self:
        """Config with what other files of the checkpoint folder say: a speech LLM's has a language model with a
        config.json of its own, and reads its prompts with the tokenizer. Raises WeightsMissing, WeightsCorrupt."""
        return self

    def with_right_context(self, right: int) -> Self:
        """Config with another look-ahead, in encoder frames, that the model was trained for. Raises OptionError."""
        raise OptionError(f"lookahead_frames={right}", "this model has no choice of them", param="lookahead_frames")


class WeightsConverter(NamedTuple):
    """Conversion of weights, in the form that their authors publish, into a checkpoint folder."""

    recognizes: Callable[[Path], bool]
    """Whether a folder or file holds weights in that form."""
    convert: Callable[[Path, Path], None]
    """Write config.json, model.safetensors and a tokenizer from a path into a folder. Raises WeightsCorrupt."""
    complete: Callable[[Path], bool] = lambda _: True
    """Whether a folder that is recognized has every file that its own config or index names."""


class AsrModelFile(Protocol):
    """Module that holds a recogniser; `Model` is an EncoderDecoderModel, an IncrementalEncoderDecoderModel or a
    StreamingModel, as the cards say."""

    CARDS: Sequence[AsrCard]
    Config: type[AsrModelConfig]
    Model: Callable[[Any, dict[str, Tensor], Device], AsrModel]
    """Model(config, tensors, device): `config` is the module's own Config, `tensors` are those of its
    `weight_files`, on the host."""
    CONVERTER: WeightsConverter | None
    """None where weights are published as checkpoint folders only."""


class TtsModelFile(Protocol):
    """Module that holds a speech-synthesis model."""

    CARDS: Sequence[TtsCard]

    def load(self, folder: Path, card: TtsCard, device: Device) -> SpeechModel:
        """Model from its files as they are published. Raises WeightsMissing, WeightsCorrupt."""


class VocoderFile(Protocol):
    """Module that holds a vocoder."""

    CARDS: Sequence[VocoderCard]

    def load(self, folder: Path, card: VocoderCard, device: Device) -> Vocoder:
        """Vocoder from its files as they are published. Raises WeightsCorrupt."""


class TurnModelFile(Protocol):
    """Module that holds a turn model."""

    CARDS: Sequence[TurnCard]
    Model: Callable[[Path], TurnModel]
    """Model(folder): from its files as they are published. Raises WeightsMissing, WeightsCorrupt."""


class GatheredModelFile(Protocol):
    """Module whose card names neither a package nor a shipped folder: the module itself collects the files."""

    CARDS: Sequence[ModelCard]

    def complete(self, folder: Path) -> bool:
        """Returns whether a folder holds all files."""

    def gather(self, into: Path, progress: Callable[[str], None]) -> None:
        """Collect the files from package registries into a new folder. Raises WeightsMissing."""
