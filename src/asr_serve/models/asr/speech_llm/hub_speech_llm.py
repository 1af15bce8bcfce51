"""Bases of speech LLMs from hub folders: an audio encoder, a projector of two layers, and a language model whose prompt
is text around the audio."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from asr_serve.devices.interface import Device
from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.models.asr.speech_llm.hub_folder import HubConfig, check_shapes, layer_shapes, norm_shapes, rename
from asr_serve.models.asr.speech_llm.speech_llm import SpeechLlm
from asr_serve.models.asr.whisper.encoder import WhisperEncoder, WhisperEncoderConfig, WhisperTensors
from asr_serve.models.asr.whisper.encoder_window import POSITION_SAMPLES
from asr_serve.models.causal_lm import CausalLanguageModel
from asr_serve.models.interfaces import PromptOptions
from asr_serve.models.packing import PackedBatch, pack_clips

MAX_POSITIONS = 4_096
"""Most positions of a row: prompt, audio and answer."""
MAX_SEGMENT_MS = 120_000
"""Longest utterance: 1560 positions of audio at most, so that there is room for an answer of 20 tokens a second."""
STACKED_POSITIONS = 4
"""Encoder positions of 20 ms that one embedding is made of."""
ENCODE_WINDOWS = 8
"""Most windows that go through the encoder at once."""


class Projector:
    """Two linear layers with a GELU between them, from encoder frames to embeddings."""

    def __init__(self, tensors: Mapping[str, Tensor], device: Device) -> None:
        """`tensors`: `projector.linear_1.weight` and so on; there may be no biases."""
        biases = {name: tensor.float() for name, tensor in tensors.items() if name.endswith(".bias")}
        self.first, self.second = (
            device.linear(tensors[f"projector.linear_{i}.weight"].float(), biases.get(f"projector.linear_{i}.bias"))
            for i in (1, 2)
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self.second(self.first(x, gelu=True))


class HubSpeechLlm(SpeechLlm):
    """Language model and prompt. A family adds the encoder, which it makes in `load_audio`."""

    LANGUAGES: ClassVar[Sequence[str]]
    """Codes of the languages that a request may name."""
    SPECIAL_TOKENS: ClassVar[Sequence[str]]
    """Special tokens of its prompt, whose ids `special` has by name."""

    def __init__(self, config: HubConfig, tensors: Mapping[str, Tensor], device: Device) -> None:
        """Raises WeightsCorrupt for tensors that do not fit the config."""
        assert config.tokenizer is not None, "a config without its folder"
        self.config, self.device = config, device
        self.encode_text, self.decode_text = config.tokenizer.encode, config.tokenizer.decode
        self.special = {name: config.tokenizer.special_token(name) for name in self.SPECIAL_TOKENS}
        named = {rename(name): tensor for name, tensor in tensors.items()}
        audio = {name: tensor for name, tensor in named.items() if name.startswith(("encoder.", "projector."))}
        language_model = CausalLanguageModel(
            config.text, {name: named[name] for name in named.keys() - audio.keys()}, device, MAX_POSITIONS
        )
        eos, *stop_tokens = config.eos_tokens
        super().__init__(language_model, eos, tuple(stop_tokens))
        self.load_audio(audio)

    @abstractmethod
    def load_audio(self, tensors: Mapping[str, Tensor]) -> None:
        """Makes encoder and projector of their tensors, by the names of hub_folder.rename. Raises WeightsCorrupt."""

    @abstractmethod
    def instruction(self, options: PromptOptions) -> tuple[int, ...]:
        """The prompt of a request that `prompt_tokens` has checked."""

    def prompt_tokens(self, options: PromptOptions) -> tuple[int, ...]:
        if options.task != "transcribe":
            raise UnsupportedOption(f"task={options.task}", "this model can only transcribe", param="task")
        if options.prompt:
            raise UnsupportedOption("a prompt", "this model reads no earlier text", "leave it out", param="prompt")
        if options.language and options.language not in self.LANGUAGES:
            allowed = f"one of: {', '.join(self.LANGUAGES)}"
            raise OptionError(f"language={options.language!r}", allowed, param="language")
        return self.instruction(options)


class WhisperLlm(HubSpeechLlm):
    """Speech LLM with Whisper's encoder over whole windows of 30 s, four positions of which are one embedding. Longer
    audio is several windows."""

    frame_samples = STACKED_POSITIONS * POSITION_SAMPLES
    RENAMED: ClassVar[Mapping[str, str]] = {}
    """Parts of names in the checkpoint -> in Whisper's."""

    @abstractmethod
    def encoder_config(self) -> WhisperEncoderConfig:
        """Sizes of the encoder, from the config. Raises WeightsCorrupt."""

    @abstractmethod
    def window_frames(self, samples: int) -> list[int]:
        """Embeddings that are read of each window of a clip."""

    @abstractmethod
    def mels(self, pcm: Tensor) -> Sequence[Tensor]:
        """Log-mel frames (2 * window_positions, mel_bins) of each window of a clip."""

    def load_audio(self, tensors: Mapping[str, Tensor]) -> None:
        config = self.encoder_config()
        for old, new in self.RENAMED.items():
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        check_shapes(tensors, self.shapes(config))
        self.encoder = WhisperEncoder(config, WhisperTensors(tensors, self.device, weighted=False))
        self.projector = Projector(tensors, self.device)
        self.window_samples = config.window_positions * POSITION_SAMPLES

    def shapes(self, config: WhisperEncoderConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of encoder and projector, by Whisper's names."""
        width, inner = self.config.size("hidden_size"), self.config.size("intermediate_size")
        shapes: dict[str, tuple[int, ...]] = {
            "encoder.conv1.weight": (width, config.mel_bins, 3),
            "encoder.conv1.bias": (width,),
            "encoder.conv2.weight": (width, width, 3),
            "encoder.conv2.bias": (width,),
            **norm_shapes("encoder.layer_norm", width),
        }
        if config.rotary is None:
            shapes["encoder.embed_positions.weight"] = (config.window_positions, width)
        for i in range(config.layers):
            shapes |= layer_shapes(f"encoder.layers.{i}", width, inner)
        return shapes

    def count_frames(self, samples: int, whole: bool = False) -> int:
        return sum(self.window_frames(samples))

    def encode(self, batch: Sequence[Tensor], whole: Sequence[bool] = ()) -> tuple[Tensor, PackedBatch]:
        clips = [self.window_frames(len(pcm)) for pcm in batch]
        counts = [count for clip in clips for count in clip]
        windows, parts = (mel for pcm in batch for mel in self.mels(pcm)), []
        for first in range(0, len(counts), ENCODE_WINDOWS):
            some = counts[first : first + ENCODE_WINDOWS]
            x, packing = self.encoder.encode_windows([next(windows) for _ in some])
            stacked = x[: sum(packing.frames)].view(len(some), -1, STACKED_POSITIONS * x.shape[1])
            parts += [window[:count] for window, count in zip(stacked, some, strict=True)]
        packing = pack_clips([sum(clip) for clip in clips], self.device.frame_block)
        filler = parts[0].new_zeros(packing.total - sum(counts), parts[0].shape[1])
        return self.projector(torch.cat([*parts, filler])), packing

    def pieces(self, pcm: Tensor) -> Iterator[Tensor]:
        """A clip in pieces of one window each; the last may be shorter."""
        yield from torch.split(pcm, self.window_samples)
