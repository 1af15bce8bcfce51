"""NeMo archives: tar files of model_config.yaml, model_weights.ckpt and a tokenizer's files."""

from __future__ import annotations

import pickle
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import IO, Any

import torch
import yaml
from torch import Tensor

from asr_serve.errors import WeightsCorrupt
from asr_serve.models.asr.nemo.lstm_transducer import ACTIVATIONS

SETTINGS, WEIGHTS = "model_config.yaml", "model_weights.ckpt"
_VOCABULARIES = (("joint", "vocabulary"), ("labels",), ("decoder", "vocabulary"))
"""Paths of the vocabulary in the settings, by kind of model."""
BROKEN = (tarfile.TarError, EOFError, OSError, zlib.error)
"""Errors of reading a damaged archive."""
_UNSPOKEN = {"<unk>", "<pad>", "<s>", "</s>"}


def find_archive(path: Path) -> Path | None:
    """Returns the archive at `path`: the file itself, or the only one in a folder."""
    if path.is_dir():
        archives = sorted(path.glob("*.nemo"))
        return archives[0] if len(archives) == 1 else None
    return path if path.suffix == ".nemo" and path.is_file() else None


def settings(archive: Path) -> dict[str, Any]:
    """Returns the content of model_config.yaml. Raises WeightsCorrupt."""
    with _member(archive, SETTINGS) as file:
        try:
            loaded = yaml.safe_load(file)
        except yaml.YAMLError as broken:
            raise _corrupt(archive, f"its {SETTINGS} is no YAML: {broken}") from broken
    if not isinstance(loaded, dict):
        raise _corrupt(archive, f"its {SETTINGS} holds a {type(loaded).__name__}")
    return loaded


def tensors(archive: Path, room: Path) -> dict[str, Tensor]:
    """Returns the weights by name, read through a temporary file in `room`. Raises WeightsCorrupt."""
    with _member(archive, WEIGHTS) as file, tempfile.TemporaryDirectory(dir=room) as folder:
        copy = Path(folder) / WEIGHTS
        with copy.open("wb") as into:
            shutil.copyfileobj(file, into)
        try:
            loaded = torch.load(copy, map_location="cpu", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError) as broken:
            raise _corrupt(archive, f"its {WEIGHTS} holds no tensors: {str(broken).splitlines()[0]}") from broken
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise _corrupt(archive, f"its {WEIGHTS} is no mapping of names to tensors")
    return loaded


def pieces(settings: dict[str, Any]) -> list[str]:
    """Returns the vocabulary by id, without the blank; special tokens are empty. Raises WeightsCorrupt."""
    for path in _VOCABULARIES:
        node: Any = settings
        for key in path:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, list) and node:
            return ["" if piece in _UNSPOKEN else str(piece) for piece in node]
    raise WeightsCorrupt(
        f"the settings in {SETTINGS} have no vocabulary", f"one at {', '.join('.'.join(p) for p in _VOCABULARIES)}"
    )


_REQUIRED: dict[str, tuple[Any, ...]] = {
    "subsampling": ("dw_striding",),
    "subsampling_factor": (8, 4),
    "causal_downsampling": (True,),
    "self_attention_model": ("rel_pos",),
    "att_context_style": ("chunked_limited",),
    "conv_context_size": ("causal",),
    "conv_norm_type": ("layer_norm", "batch_norm"),
}
"""Encoder settings of a streaming checkpoint."""
_OPTIONAL: dict[str, tuple[Any, ...]] = {"reduction": (None,), "conv_context_style": ("regular",)}


def flatten_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Flattens the settings of a streaming FastConformer to the field names of its Config, among others. Raises
    WeightsCorrupt for another kind of encoder."""
    encoder = settings["encoder"]
    for name, allowed in (_REQUIRED | _OPTIONAL).items():
        actual = encoder.get(name, None if name in _REQUIRED else allowed[0])
        if actual not in allowed:
            raise WeightsCorrupt(f"encoder.{name}={actual!r}", f"one of {', '.join(map(repr, allowed))}")
    width, channels = encoder.get("d_model"), encoder.get("subsampling_conv_channels", -1)
    if encoder.get("feat_out", -1) not in (-1, None, width):
        raise WeightsCorrupt(f"encoder.feat_out={encoder['feat_out']}", f"-1 or d_model, {width}")
    contexts = encoder.get("att_context_size") or []
    joint = settings.get("joint") or {}
    predictor = (settings.get("decoder") or {}).get("prednet") or {}
    flat = {
        **encoder,
        "subsampling_conv_channels": width if channels == -1 else channels,
        "att_context_size": [contexts] if contexts and isinstance(contexts[0], int) else contexts,
        "vocab_size": len(pieces(settings)),
        "heads": ("ctc",),
    }
    if joint:
        durations = _durations(settings)
        flat |= {
            "heads": ("tdt" if durations else "rnnt", *(("ctc",) if settings.get("aux_ctc") else ())),
            "durations": durations,
            "pred_hidden": predictor.get("pred_hidden"),
            "pred_rnn_layers": predictor.get("pred_rnn_layers"),
            "joint_hidden": joint["jointnet"].get("joint_hidden"),
            "joint_activation": joint["jointnet"].get("activation"),
        }
        if flat["joint_activation"] not in ACTIVATIONS:
            raise WeightsCorrupt(f"joint.jointnet.activation={flat['joint_activation']!r}", ", ".join(ACTIVATIONS))
    return flat


def _durations(settings: dict[str, Any]) -> list[int]:
    loss, decoding = settings.get("loss") or {}, settings.get("decoding") or {}
    if decoding.get("big_blank_durations"):
        raise WeightsCorrupt("decoding.big_blank_durations is set", "rnnt or tdt: not multi-blank transducers")
    kwargs = loss.get("tdt_kwargs") or {} if loss.get("loss_name") in ("tdt", "tdt_pytorch") else {}
    return list(kwargs.get("durations") or decoding.get("durations") or ())


class _member:
    """File inside the archive, open for reading."""

    def __init__(self, archive: Path, name: str) -> None:
        self.archive, self.name = archive, name

    def __enter__(self) -> IO[bytes]:
        try:
            self.tar = tarfile.open(self.archive)  # compressed or not
        except BROKEN as broken:
            raise _corrupt(self.archive, f"it is no tar file: {broken}") from broken
        try:
            members = self.tar.getmembers()
        except BROKEN as broken:
            self.tar.close()
            raise _corrupt(self.archive, f"it breaks off: {broken}") from broken
        # Some archives hold the name as ./name.
        member = next((m for m in members if Path(m.name).name == self.name and m.isfile()), None)
        file = self.tar.extractfile(member) if member else None
        if file is None:
            self.tar.close()
            raise _corrupt(self.archive, f"it holds no {self.name}")
        return file

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.tar.close()
        if isinstance(error, BROKEN):
            raise _corrupt(self.archive, f"its {self.name} breaks off: {error}") from error


def _corrupt(archive: Path, why: str) -> WeightsCorrupt:
    return WeightsCorrupt(f"{archive} is no checkpoint of NeMo: {why}", f"a tar file with {SETTINGS} and {WEIGHTS}")
