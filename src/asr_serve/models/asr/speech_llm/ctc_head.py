"""CTC head of Fun-ASR-Nano, which says when the words of an answer were spoken.

It reads the audio encoder's frames beside the adaptor: a decoder, which has the form of an adaptor, and one linear
layer over a vocabulary of its own.

Source: numbers match funasr 1.4.16's FunASRNano (`ctc_decoder`, `ctc.ctc_lo`), of one clip at a time.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from asr_serve.errors import WeightsCorrupt
from asr_serve.models.asr.speech_llm.adaptors import Adaptor, AdaptorConfig, AdaptorKind
from asr_serve.models.asr.speech_llm.sanm_encoder import EncoderTensors
from asr_serve.models.packing import PackedBatch
from asr_serve.text.tokenizers import HubTokenizer


class CtcConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the head, as `funasr_folder.convert` writes them."""

    decoder: AdaptorKind = "Transformer"
    decoder_conf: AdaptorConfig = AdaptorConfig()
    vocab_size: int = 60_515
    """Outputs of the linear layer, the blank included."""
    blank_id: int = 60_514


class FunAsrCtcHead:
    """CtcHead of Fun-ASR-Nano. See models/interfaces.CtcHead."""

    def __init__(self, take: EncoderTensors, config: CtcConfig, tokenizer: HubTokenizer, frame_samples: int) -> None:
        """`frame_samples`: samples from one encoder frame to the next. Raises WeightsCorrupt."""
        if not 0 <= config.blank_id < config.vocab_size:
            raise WeightsCorrupt(f"the blank is {config.blank_id}", f"one of {config.vocab_size} outputs")
        self.blank_id, self.tokenizer = config.blank_id, tokenizer
        self.decoder = Adaptor(take, "ctc_decoder.", config.decoder, config.decoder_conf)
        width, device = config.decoder_conf.llm_dim, take.device
        self.weight = take.get("ctc.ctc_lo.weight", config.vocab_size, width).to(device.torch_device, device.dtype)
        self.bias = take.get("ctc.ctc_lo.bias", config.vocab_size).to(device.torch_device)
        self.frame_samples = frame_samples * config.decoder_conf.downsample_rate
        self._outputs = config.vocab_size

    def encode(self, text: str) -> list[int]:
        tokens = self.tokenizer.encode(text)
        usable = all(token < self._outputs and token != self.blank_id for token in tokens)
        return tokens if usable else []

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens)

    def decode_frames(self, hidden: Tensor, packing: PackedBatch) -> tuple[Tensor, PackedBatch]:
        """Frames of the decoder (packing.total, width) from those of the audio encoder, and their packing."""
        return self.decoder(hidden, packing)

    def scores(self, frames: Tensor, tokens: list[int]) -> Tensor:
        index = torch.tensor(tokens, device=self.weight.device)
        return torch.addmm(self.bias[index], frames.float(), self.weight[index].float().T)
