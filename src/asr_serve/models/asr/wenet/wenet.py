"""Shared parts of WeNet models: weights by name, the attention decoder that rescores, and experiments on disk.

Source  arXiv:2203.15455; numbers match WeNet's modules, tests/models/generate_u2pp.py.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from asr_serve.devices.interface import Device, Linear
from asr_serve.errors import WeightsCorrupt


class WenetTensors:
    """Tensors of a checkpoint by name, laid out for the device."""

    def __init__(self, tensors: dict[str, Tensor], device: Device) -> None:
        self.tensors, self.device = tensors, device

    def get(self, name: str) -> Tensor:
        """Returns a tensor as float32, on the checkpoint's device. Raises WeightsCorrupt."""
        if name not in self.tensors:
            raise WeightsCorrupt(f"the checkpoint has no tensor {name}", "a model of WeNet with its config has it")
        return self.tensors[name].float()

    def to_device(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return tensor.to(self.device.torch_device, dtype or self.device.dtype).contiguous()

    def vector(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self.to_device(self.get(name), dtype)

    def norm(self, name: str, eps: float) -> Callable[[Tensor], Tensor]:
        weight, bias = self.vector(f"{name}.weight"), self.vector(f"{name}.bias")
        return partial(F.layer_norm, normalized_shape=weight.shape, weight=weight, bias=bias, eps=eps)

    def linear(self, *names: str) -> Linear:
        """Stacks several matrices with the same input into one linear layer."""
        weights, biases = ([self.get(f"{name}.{part}") for name in names] for part in ("weight", "bias"))
        return self.device.linear(torch.cat(weights), torch.cat(biases))


STRIDED = {4: ((3, 2), (3, 2)), 6: ((3, 2), (5, 3)), 8: ((3, 2), (3, 2), (3, 2))}
"""Subsampling -> kernel and stride of its convolutions."""


class WenetStem:
    """Subsampling: features, normalized by the training data's mean and deviation, to encoder frames."""

    def __init__(self, take: WenetTensors, subsampling: int, mels: int, width: int) -> None:
        self.strided = STRIDED[subsampling]
        self.dtype = take.device.dtype
        self.mean, self.istd = (take.vector(f"encoder.global_cmvn.{name}", torch.float32) for name in ("mean", "istd"))
        self.convs = []
        bands = mels
        for i, (kernel, stride) in enumerate(self.strided):
            weight, bias = (take.vector(f"encoder.embed.conv.{2 * i}.{name}") for name in ("weight", "bias"))
            bands = (bands - kernel) // stride + 1
            self.convs.append((weight.contiguous(memory_format=torch.channels_last), bias, stride, bands))
        name = "encoder.embed.out.0" if subsampling == 4 else "encoder.embed.linear"
        weight, bias = take.get(f"{name}.weight"), take.get(f"{name}.bias")
        # The convolutions write channels last, WeNet's linear layer reads bands last.
        weight = weight.view(-1, width, bands).transpose(1, 2).flatten(1)
        scale = math.sqrt(width)  # WeNet scales embeddings before it adds positions
        self.out = take.device.linear(weight * scale, bias * scale)

    def frames(self, features: int) -> int:
        for kernel, stride in self.strided:
            features = max(0, (features - kernel) // stride + 1)
        return features

    def features(self, frames: int) -> int:
        """Returns the feature frames that make that many encoder frames."""
        for kernel, stride in reversed(self.strided):
            frames = (frames - 1) * stride + kernel
        return frames

    def __call__(self, features: Tensor) -> Tensor:
        """Converts features (n, features, mels) to encoder frames (n, frames, width)."""
        x = ((features - self.mean) * self.istd).to(self.dtype)[:, None]
        for weight, bias, stride, bands in self.convs:
            # oneDNN's bf16 by AMX (torch 2.13) writes garbage where strided convolutions make one band: two, then.
            x = F.conv2d(F.pad(x, (0, stride)) if bands == 1 else x, weight, bias, stride)[..., :bands].relu_()
        return self.out(x.permute(0, 2, 3, 1).flatten(2))


class WenetDecoder:
    """Transformer decoder that scores several transcripts of one utterance at once.

    In      hidden (frames, width), the encoder's; sentences, without start and end
    Out     (sentences,) float32, natural log of each sentence with its end
    """

    def __init__(self, take: WenetTensors, at: str, *, layers: int, heads: int, eps: float, sos: int, eos: int) -> None:
        self.heads, self.sos, self.eos = heads, sos, eos
        self.embedding = take.vector(f"{at}.embed.0.weight")
        self.layers = [_WenetDecoderLayer(take, f"{at}.decoders.{i}", heads, eps) for i in range(layers)]
        self.after_norm = take.norm(f"{at}.after_norm", eps)
        self.head = take.linear(f"{at}.output_layer")

    def __call__(self, hidden: Tensor, sentences: Sequence[Sequence[int]]) -> Tensor:
        device, width = self.embedding.device, self.embedding.shape[1]
        longest = max(len(sentence) for sentence in sentences) + 1
        # Attention is causal, so tokens after a sentence's end change nothing before it.
        padded = [[*sentence, *[self.eos] * (longest - len(sentence))] for sentence in sentences]
        targets = torch.tensor(padded, device=device)
        inputs = F.pad(targets[:, :-1], (1, 0), value=self.sos)
        x = F.embedding(inputs, self.embedding) * math.sqrt(width) + sinusoids(longest, width).to(self.embedding)
        for layer in self.layers:
            x = layer(x, hidden)
        logits = self.head(self.after_norm(x)).float()
        logprobs = logits.gather(2, targets[:, :, None])[:, :, 0] - logits.logsumexp(dim=-1)
        ends = torch.tensor([len(sentence) for sentence in sentences], device=device)
        counts = torch.arange(longest, device=device) <= ends[:, None]
        return logprobs.masked_fill(~counts, 0.0).sum(dim=1)


class _WenetDecoderLayer:
    def __init__(self, take: WenetTensors, at: str, heads: int, eps: float) -> None:
        self.heads = heads
        self.norms = [take.norm(f"{at}.norm{i}", eps) for i in (1, 2, 3)]
        self.qkv = take.linear(*(f"{at}.self_attn.linear_{name}" for name in "qkv"))
        self.own_out = take.linear(f"{at}.self_attn.linear_out")
        self.query = take.linear(f"{at}.src_attn.linear_q")
        self.audio = take.linear(f"{at}.src_attn.linear_k", f"{at}.src_attn.linear_v")
        self.audio_out = take.linear(f"{at}.src_attn.linear_out")
        self.up, self.down = (take.linear(f"{at}.feed_forward.w_{i}") for i in (1, 2))

    def __call__(self, x: Tensor, hidden: Tensor) -> Tensor:
        own, audio, last = self.norms
        x = self.own_out(self._attend(*self.qkv(own(x)).chunk(3, dim=-1), causal=True), add=x)
        # One utterance: its keys are computed once and shared by all sentences.
        key, value = (each.expand(len(x), -1, -1) for each in self.audio(hidden)[None].chunk(2, dim=-1))
        x = self.audio_out(self._attend(self.query(audio(x)), key, value, causal=False), add=x)
        out: Tensor = self.down(self.up(last(x)).relu_(), add=x)
        return out

    def _attend(self, *qkv: Tensor, causal: bool) -> Tensor:
        q, k, v = (each.view(*each.shape[:2], self.heads, -1).transpose(1, 2) for each in qkv)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def sinusoids(positions: int, width: int) -> Tensor:
    """Returns (positions, width) float32 from position 0: sine and cosine alternate, each pair slower than the
    last.

    Source: arXiv:1706.03762, section 3.5.
    """
    speeds = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10_000.0) / width))
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * speeds
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).float()


# --- experiments on disk ----------------------------------------------------------------------------------

SETTINGS, CMVN = "train.yaml", "global_cmvn"
ARCHIVE = "*conformer_exp.tar.gz"
LEAST_VARIANCE = 1e-20


def rename(key: str) -> str | None:
    """Converts a tensor's name in WeNet's checkpoints to ours; None for tensors that only training needs."""
    key = key.removeprefix("module.")
    if key.endswith("num_batches_tracked") or ".concat_linear" in key or ".pos_enc." in key:
        return None
    if key.startswith("decoder.") and not key.startswith(("decoder.left_decoder.", "decoder.right_decoder.")):
        return key.replace("decoder.", "decoder.left_decoder.", 1)
    return key if key.startswith(("encoder.", "decoder.", "ctc.ctc_lo.")) else None


def is_package_folder(folder: Path) -> bool:
    """Returns whether `folder` holds an experiment, or the archive of one."""
    return bool(_archive(folder) or ((folder / SETTINGS).is_file() and _weights(folder) and _units(folder)))


def _archive(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob(ARCHIVE))), None)


def _weights(folder: Path) -> Path | None:
    averaged = sorted(folder.glob("avg_*.pt"), key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])
    return next((path for path in [folder / "final.pt", *averaged[::-1]] if path.is_file()), None)


def _units(folder: Path) -> Path | None:
    candidates = [
        folder / "units.txt",
        *sorted(folder.glob("*units.txt")),
        folder / "lang_char.txt",
        folder / "words.txt",
    ]
    return next((path for path in candidates if path.is_file()), None)


def convert(source: Path, target: Path, extra: Mapping[str, Any]) -> None:
    """Converts an experiment into config.json (with `extra`), model.safetensors, pieces.json. Raises WeightsCorrupt."""
    with _unpacked(source, target) as folder:
        weights, units = _weights(folder), _units(folder)
        if not weights or not units or not (folder / SETTINGS).is_file():
            raise WeightsCorrupt(
                f"{source} has no {SETTINGS}, final.pt and units.txt", "all three, as WeNet writes them"
            )
        try:
            settings = msgspec.yaml.decode((folder / SETTINGS).read_bytes(), type=dict[str, Any])
        except msgspec.DecodeError as failure:
            raise WeightsCorrupt(f"{SETTINGS} cannot be read: {failure}", "settings by name") from failure
        tensors = _read(weights)
        if "encoder.global_cmvn.mean" not in tensors and (folder / CMVN).is_file():
            mean, istd = cmvn((folder / CMVN).read_text())
            tensors |= {"encoder.global_cmvn.mean": mean, "encoder.global_cmvn.istd": istd}
        pieces = _pieces(units)
    config = {**extra, **_config(settings, len(pieces))}
    _complete(tensors, config)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    (target / "pieces.json").write_text(json.dumps(pieces, ensure_ascii=False), encoding="utf-8")
    save_file(tensors, target / "model.safetensors")


@contextmanager
def _unpacked(source: Path, beside: Path) -> Iterator[Path]:
    archive = _archive(source)
    if archive is None:
        yield source
        return
    with tempfile.TemporaryDirectory(dir=beside) as name:
        names = re.compile(
            rf"({re.escape(SETTINGS)}|{CMVN}|(\w.*)?units\.txt|lang_char\.txt|words\.txt|(final|avg_\d+)\.pt)"
        )
        try:
            with tarfile.open(archive, "r:gz") as packed:
                for member in packed:
                    base = Path(member.name).name  # folders in its name are ignored
                    if names.fullmatch(base) and (file := packed.extractfile(member)):
                        with file, (Path(name) / base).open("wb") as out:
                            shutil.copyfileobj(file, out)
        except (tarfile.TarError, EOFError, OSError, KeyError) as failure:
            raise WeightsCorrupt(f"{archive} cannot be read: {failure}", todo="fetch it again") from failure
        yield Path(name)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as failure:
        raise WeightsCorrupt(f"{path} cannot be read: {failure}", "tensors by name and nothing else") from failure
    if not isinstance(loaded, dict):
        raise WeightsCorrupt(f"{path} holds a {type(loaded).__name__}", "tensors by name")
    tensors = {new: each for key, each in loaded.items() if isinstance(each, Tensor) and (new := rename(key))}
    return {name: each.float().clone(memory_format=torch.contiguous_format) for name, each in tensors.items()}


def cmvn(text: str) -> tuple[Tensor, Tensor]:
    """Reads mean and inverse deviation of each feature, float32, from a global_cmvn: WeNet's JSON, or Kaldi's text
    of sums, their count, and sums of squares. Raises WeightsCorrupt."""
    try:
        if text.lstrip().startswith("{"):
            stats = json.loads(text)
            sums, squares, count = stats["mean_stat"], stats["var_stat"], stats["frame_num"]
        else:
            numbers = [float(word) for word in text.split() if word not in "[]"]
            half = len(numbers) // 2
            sums, count, squares = numbers[: half - 1], numbers[half - 1], numbers[half : 2 * half - 1]
        mean = torch.tensor(sums, dtype=torch.float64) / count
        variance = torch.tensor(squares, dtype=torch.float64) / count - mean.square()
    except (ValueError, KeyError, IndexError, TypeError, RuntimeError) as failure:
        raise WeightsCorrupt(f"{CMVN} cannot be read: {failure}", "WeNet's JSON or Kaldi's text") from failure
    if not len(mean) or not variance.isfinite().all():
        raise WeightsCorrupt(f"{CMVN} is about {len(mean)} features and {count} frames", "some of each")
    return mean.float(), variance.clamp(min=LEAST_VARIANCE).rsqrt().float()


def _pieces(units: Path) -> list[str]:
    """Reads the text of each id; pieces in angle brackets are special tokens without text, but for <space>."""
    pieces: dict[int, str] = {}
    for line in units.read_text(encoding="utf-8").split("\n"):
        if line.strip():
            piece, _, number = line.rstrip().rpartition(" ")
            if not number.isdecimal():
                raise WeightsCorrupt(f"{units} has the line {line!r}", "a piece, a space, its number")
            special = len(piece) > 2 and piece.startswith("<") and piece.endswith(">")
            pieces[int(number)] = ("\u2581" if piece == "<space>" else "") if special else piece
    return [pieces.get(i, "") for i in range(max(pieces, default=-1) + 1)]


KNOWN: dict[str, dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "encoder_conf": {
        "pos_enc_layer_type": ("rel_pos", ("rel_pos",)),
        "selfattention_layer_type": ("rel_selfattn", ("rel_selfattn",)),
        "activation_type": ("swish", ("swish",)),
        "normalize_before": (True, (True,)),
        "macaron_style": (True, (True,)),
        "use_cnn_module": (True, (True,)),
        "causal": (False, (True,)),
        "concat_after": (False, (False,)),
        "layer_norm_type": ("layer_norm", ("layer_norm",)),
        "mlp_type": ("position_wise_feed_forward", ("position_wise_feed_forward",)),
        "n_kv_head": (None, (None,)),
    },
    "decoder_conf": {
        "input_layer": ("embed", ("embed",)),
        "activation_type": ("relu", ("relu",)),
        "normalize_before": (True, (True,)),
        "concat_after": (False, (False,)),
        "use_output_layer": (True, (True,)),
        "src_attention": (True, (True,)),
        "layer_norm_type": ("layer_norm", ("layer_norm",)),
        "mlp_type": ("position_wise_feed_forward", ("position_wise_feed_forward",)),
        "n_kv_head": (None, (None,)),
    },
}
"""Settings of train.yaml that change the computation: the default of WeNet's code, and the supported values."""
INPUT_LAYERS = {"conv2d": 4, "conv2d6": 6, "conv2d8": 8}
CHUNK, LEFT_CHUNKS = 16, 4
"""Defaults for models that were trained for any chunk: 0.64 s, and 2.56 s before it."""


def _config(settings: dict[str, Any], pieces: int) -> dict[str, Any]:
    encoder, decoder, model = (settings.get(f"{part}_conf") or {} for part in ("encoder", "decoder", "model"))
    checks = [
        ("encoder", settings.get("encoder", "conformer"), ("conformer",)),
        ("decoder", settings.get("decoder", "bitransformer"), ("transformer", "bitransformer")),
        ("encoder_conf.input_layer", encoder.get("input_layer", "conv2d"), tuple(INPUT_LAYERS)),
    ]
    for part, table in KNOWN.items():
        conf = settings.get(part) or {}
        checks += [(f"{part}.{name}", conf.get(name, usual), allowed) for name, (usual, allowed) in table.items()]
    for name, value, allowed in checks:
        if value not in allowed:
            raise WeightsCorrupt(f"{SETTINGS} says {name}={value}", f"one of {allowed}")
    static = 0 if encoder.get("use_dynamic_chunk") else encoder.get("static_chunk_size", 0)
    if not static and not encoder.get("use_dynamic_chunk"):
        raise WeightsCorrupt("the model was trained on whole utterances", "use_dynamic_chunk: true, or a static chunk")
    fbank = (settings.get("dataset_conf") or {}).get("fbank_conf") or {}
    special = (settings.get("tokenizer_conf") or {}).get("special_tokens") or {}
    return {
        "vocab": pieces,
        "blank": (settings.get("ctc_conf") or {}).get("ctc_blank_id", 0),
        "sos": special.get("<sos>", pieces - 1),
        "eos": special.get("<eos>", pieces - 1),
        "mels": fbank.get("num_mel_bins", settings.get("input_dim") or 80),
        "width": encoder.get("output_size", 256),
        "heads": encoder.get("attention_heads", 4),
        "inner": encoder.get("linear_units", 2_048),
        "layers": encoder.get("num_blocks", 6),
        "kernel": encoder.get("cnn_module_kernel", 15),
        "conv_norm": encoder.get("cnn_module_norm", "batch_norm"),
        "subsampling": INPUT_LAYERS[encoder.get("input_layer", "conv2d")],
        "norm_eps": encoder.get("norm_eps", 1e-5),
        "decoder_heads": decoder.get("attention_heads", 4),
        "decoder_inner": decoder.get("linear_units", 2_048),
        "decoder_layers": decoder.get("num_blocks", 6),
        "reverse_layers": decoder.get("r_num_blocks", 0)
        if settings.get("decoder", "bitransformer") == "bitransformer"
        else 0,
        "decoder_norm_eps": decoder.get("norm_eps", 1e-5),
        "chunk": static or CHUNK,
        "left_chunks": LEFT_CHUNKS,
        "ctc_weight": model.get("ctc_weight", 0.5),
        "reverse_weight": model.get("reverse_weight", 0.0),
    }


def _complete(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Checks that tensors and settings belong to one model. Raises WeightsCorrupt."""
    mels, vocab = config["mels"], config["vocab"]
    if "encoder.global_cmvn.mean" not in tensors:  # a model may have been trained without
        tensors["encoder.global_cmvn.mean"] = torch.zeros(mels)
        tensors["encoder.global_cmvn.istd"] = torch.ones(mels)
    last = config["layers"] - 1
    for name, shape in {
        "encoder.global_cmvn.mean": (mels,),
        "ctc.ctc_lo.weight": (vocab, config["width"]),
        f"encoder.encoders.{last}.feed_forward.w_1.weight": (config["inner"], config["width"]),
        "decoder.left_decoder.decoders.0.feed_forward.w_1.weight": (config["decoder_inner"], config["width"]),
    }.items():
        actual = tuple(tensors[name].shape) if name in tensors else None
        if actual != shape:
            raise WeightsCorrupt(f"{name} has the shape {actual}", f"{shape}, by {SETTINGS} and units.txt")
