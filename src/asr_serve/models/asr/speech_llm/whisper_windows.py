"""Whisper's encoder before an adaptor: whole windows of 30 s, of which the positions of the clip are kept.

Source: arXiv:2212.04356; numbers match transformers 5.23.0's WhisperEncoder and WhisperFeatureExtractor, of one clip at
a time. FunASR pads clips in the same way (`do_pad_trim`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.audio.features.whisper_log_mel import HOP_SAMPLES
from asr_serve.devices.interface import Device
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.asr.speech_llm.hub_folder import check_shapes, layer_shapes, norm_shapes
from asr_serve.models.asr.whisper.encoder import WhisperEncoder, WhisperEncoderConfig, WhisperTensors
from asr_serve.models.asr.whisper.encoder_window import POSITION_SAMPLES
from asr_serve.models.packing import PackedBatch, pack_clips

HEAD_DIM = 64
"""Numbers of an attention head of every published Whisper."""
ENCODE_WINDOWS = 8
"""Most windows that go through the encoder at once."""


class WhisperSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the encoder, as `funasr_folder.convert` reads them off its tensors."""

    mel_bins: int
    width: int
    layers: int
    heads: int
    inner: int
    window_positions: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], heads: int | None) -> WhisperSizes:
        """Sizes of tensors `encoder.conv1.weight` and so on. `heads` None: of HEAD_DIM numbers each. Raises
        WeightsCorrupt."""
        needed = "encoder.conv1.weight", "encoder.embed_positions.weight", "encoder.layers.0.fc1.weight"
        if missing := [name for name in needed if name not in tensors]:
            raise WeightsCorrupt(f"the checkpoint has no tensor {missing[0]}", "an encoder of Whisper has it")
        width, mel_bins, _ = tensors[needed[0]].shape
        heads = max(1, width // HEAD_DIM) if heads is None else heads
        if heads < 1 or width % heads:
            raise WeightsCorrupt(f"{heads} attention heads", f"a divisor of {width}, the width")
        layers = sum(name.endswith(".fc1.weight") for name in tensors)
        return cls(
            mel_bins=mel_bins,
            width=width,
            layers=layers,
            heads=heads,
            inner=len(tensors[needed[2]]),
            window_positions=len(tensors[needed[1]]),
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors by name."""
        shapes: dict[str, tuple[int, ...]] = {
            "encoder.conv1.weight": (self.width, self.mel_bins, 3),
            "encoder.conv1.bias": (self.width,),
            "encoder.conv2.weight": (self.width, self.width, 3),
            "encoder.conv2.bias": (self.width,),
            "encoder.embed_positions.weight": (self.window_positions, self.width),
            **norm_shapes("encoder.layer_norm", self.width),
        }
        for layer in range(self.layers):
            shapes |= layer_shapes(f"encoder.layers.{layer}", self.width, self.inner)
        return shapes


class WhisperWindowsEncoder:
    """SpeechLlmEncoder over windows of Whisper. Clips of more than a window are several."""

    frame_samples = POSITION_SAMPLES

    def __init__(self, tensors: Mapping[str, Tensor], sizes: WhisperSizes, device: Device) -> None:
        """`tensors`: `encoder.conv1.weight` and so on. Raises WeightsCorrupt."""
        check_shapes(tensors, sizes.shapes())
        self.device, self.width = device, sizes.width
        config = WhisperEncoderConfig(
            mel_bins=sizes.mel_bins, layers=sizes.layers, heads=sizes.heads, window_positions=sizes.window_positions
        )
        self.encoder = WhisperEncoder(config, WhisperTensors(tensors, device, weighted=False))
        self.window_samples = sizes.window_positions * POSITION_SAMPLES

    def count_frames(self, samples: int) -> int:
        return max(1, -(-samples // POSITION_SAMPLES))

    def __call__(self, batch: Sequence[Tensor]) -> tuple[Tensor, PackedBatch]:
        pieces = [piece for pcm in batch for piece in torch.split(pcm, self.window_samples)]
        kept = list[Tensor]()
        for first in range(0, len(pieces), ENCODE_WINDOWS):
            some = pieces[first : first + ENCODE_WINDOWS]
            frames = [self.window_samples // HOP_SAMPLES] * len(some)
            x, packing = self.encoder.encode_windows(torch.split(self.encoder.stem.mel(some, frames), frames))
            kept += [
                x[offset : offset + self.count_frames(len(piece))]
                for offset, piece in zip(packing.offsets, some, strict=True)
            ]
        packing = pack_clips([self.count_frames(len(pcm)) for pcm in batch], self.device.frame_block)
        x = torch.cat(kept)
        return F.pad(x, (0, 0, 0, packing.total - len(x))), packing
