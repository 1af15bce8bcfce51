"""Checkpoint folders of speech LLMs as Hugging Face's hub has them: one config.json of both parts, one set of tensors.

Three layouts of names occur: that of the published files (`language_model.model.layers.0`), that of transformers'
classes (`model.language_model.layers.0`), and that of Qwen3-ASR's first release (`thinker.model.layers.0`).

Source: transformers 5.23.0, conversion_mapping and the classes GlmAsr, Voxtral and Qwen3ASR.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec
from safetensors.torch import save_file
from torch import Tensor

from asr_serve.errors import WeightsCorrupt, WeightsMissing
from asr_serve.models.asr.speech_llm import tekken
from asr_serve.models.causal_lm import CausalConfig
from asr_serve.models.checkpoints import hugging_face
from asr_serve.models.model_files import WEIGHTS, AsrModelConfig, WeightsConverter
from asr_serve.text.tokenizers import HubTokenizer, Tokenizer

TOKENIZER = "tokenizer.json"
FILES = (*("config.json", WEIGHTS, "model-*.safetensors", hugging_face.INDEXES[0]), *(TOKENIZER, tekken.NAME))
"""Patterns of the files of a hub repository that are read."""
ACTIVATION = "gelu"
"""Activation of every encoder and projector."""
_NAMES = (
    (r"^thinker\.", ""),
    (r"^model\.(audio_tower|multi_modal_projector)\.", r"\1."),
    (r"^model\.language_model\.", "model."),
    (r"^language_model\.(model|lm_head)\.", r"\1."),
    (r"^audio_tower\.proj([12])\.", r"multi_modal_projector.linear_\1."),
    (r"^audio_tower\.", "encoder."),
    (r"^multi_modal_projector\.", "projector."),
)


def rename(name: str) -> str:
    """Converts the name of a tensor in any of the layouts: `encoder.`, `projector.`, and those of a causal language
    model.

    >>> rename("language_model.model.norm.weight"), rename("model.audio_tower.conv1.bias")
    ('model.norm.weight', 'encoder.conv1.bias')
    """
    for old, new in _NAMES:
        name = re.sub(old, new, name)
    return name


class HubConfig(AsrModelConfig, frozen=True, kw_only=True):
    """Settings of both parts. A family's `Config` is a subclass that names its model_type and the defaults of
    transformers' class, which config.json may leave out."""

    MODEL_TYPE: ClassVar[str]
    AUDIO: ClassVar[Mapping[str, Any]]
    """Defaults of `audio_config`."""
    TEXT: ClassVar[Mapping[str, Any]]
    """Defaults of `text_config`."""
    EOS: ClassVar[tuple[int, ...]]
    """Tokens that end an answer, where config.json names none."""

    audio: Mapping[str, Any]
    """`audio_config`."""
    text: CausalConfig
    """The language model, of `text_config`."""
    eos_tokens: tuple[int, ...]
    tokenizer: HubTokenizer | None = None

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Self:
        settings = cls.normalized(settings)
        if settings.get("model_type") != cls.MODEL_TYPE:
            raise WeightsCorrupt(f"model_type={settings.get('model_type')!r}", f"{cls.MODEL_TYPE}: that of this family")
        audio = {**cls.AUDIO, **_part(settings, "audio_config")}
        for name in ("activation_function", "hidden_act"):
            if audio.get(name, ACTIVATION) != ACTIVATION:
                raise WeightsCorrupt(f"audio_config: {name}={audio[name]!r}", ACTIVATION)
        if settings.get("projector_hidden_act", ACTIVATION) != ACTIVATION:
            raise WeightsCorrupt(f"projector_hidden_act={settings['projector_hidden_act']!r}", ACTIVATION)
        text = CausalConfig.of({**cls.TEXT, **_part(settings, "text_config")})
        named = settings.get("eos_token_id")
        eos = text.eos_tokens if named is None else (named,) if isinstance(named, int) else tuple(named)
        return cls(audio=audio, text=text, eos_tokens=eos or cls.EOS)

    @classmethod
    def normalized(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings in the newest layout."""
        return settings

    def with_folder(self, folder: Path, tokenizer: Tokenizer) -> Self:
        if not isinstance(tokenizer, HubTokenizer):
            raise WeightsCorrupt(f"the vocabulary in {folder} is no {TOKENIZER}", "that of the language model")
        return msgspec.structs.replace(self, tokenizer=tokenizer)

    def size(self, name: str) -> int:
        """A number of 1 or more of `audio_config`. Raises WeightsCorrupt."""
        value = self.audio.get(name)
        if not isinstance(value, int) or value < 1:
            raise WeightsCorrupt(f"audio_config: {name}={value!r}", "a number of 1 or more")
        return value


def _part(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = settings.get(name) or {}
    if not isinstance(part, Mapping):
        raise WeightsCorrupt(f"{name}={part!r}", "a table of settings")
    return part


def check_shapes(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises WeightsCorrupt for a tensor that is missing or has another shape."""
    for name, shape in shapes.items():
        if name not in tensors:
            raise WeightsCorrupt(f"the checkpoint has no tensor {name}", "encoder and projector have it")
        if tensors[name].shape != shape:
            raise WeightsCorrupt(f"{name} has shape {tuple(tensors[name].shape)}", f"{shape}, by config.json")


def layer_shapes(at: str, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer of Whisper's encoder, under its names; keys have no bias that matters."""
    shapes: dict[str, tuple[int, ...]] = {f"{at}.self_attn.k_proj.weight": (width, width)}
    for name, outputs, inputs in (
        *((f"self_attn.{kind}_proj", width, width) for kind in ("q", "v", "out")),
        *(("fc1", inner, width), ("fc2", width, inner)),
    ):
        shapes |= {f"{at}.{name}.weight": (outputs, inputs), f"{at}.{name}.bias": (outputs,)}
    for name in ("self_attn_layer_norm", "final_layer_norm"):
        shapes |= norm_shapes(f"{at}.{name}", width)
    return shapes


def norm_shapes(at: str, width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer norm."""
    return {f"{at}.weight": (width,), f"{at}.bias": (width,)}


def converter(model_type: str) -> WeightsConverter:
    """Converter of folders of that model_type whose tensors lie in shards, or whose tokenizer is a tekken.json."""
    return WeightsConverter(_recognizes(model_type), convert, hugging_face.has_all_shards)


def _recognizes(model_type: str) -> Callable[[Path], bool]:
    def recognizes(path: Path) -> bool:
        try:
            settings = json.loads((path / "config.json").read_text("utf-8"))
        except (OSError, ValueError):
            return False
        weights = hugging_face.is_checkpoint_folder(path) or (path / WEIGHTS).is_file()
        return isinstance(settings, dict) and settings.get("model_type") == model_type and weights

    return recognizes


def convert(source: Path, target: Path) -> None:
    """Writes one model.safetensors and a tokenizer.json. Raises WeightsCorrupt, WeightsMissing."""
    _, tensors = hugging_face.read(source)
    if (source / TOKENIZER).is_file():
        shutil.copy(source / TOKENIZER, target / TOKENIZER)
    elif (source / tekken.NAME).is_file():
        (target / TOKENIZER).write_text(tekken.tokenizer_json(source / tekken.NAME), "utf-8")
    else:
        raise WeightsMissing(f"there is no {TOKENIZER} in {source}", f"that file or {tekken.NAME} beside the weights")
    shutil.copy(source / "config.json", target / "config.json")
    save_file(tensors, target / WEIGHTS)
