"""Qwen3-ASR: convolutions over seconds of log-mel frames, Whisper's encoder layers over windows of eight seconds, a
projector, and Qwen3.

Source: arXiv:2601.21337; numbers match transformers 5.23.0's Qwen3ASRForConditionalGeneration, of one clip at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.audio.features.whisper_log_mel import HOP_SAMPLES, LogMel
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.asr.speech_llm import hub_folder
from asr_serve.models.asr.speech_llm.hub_folder import check_shapes, layer_shapes, norm_shapes
from asr_serve.models.asr.speech_llm.hub_speech_llm import MAX_SEGMENT_MS, HubSpeechLlm, Projector
from asr_serve.models.asr.whisper.encoder import WhisperEncoderLayer, WhisperTensors
from asr_serve.models.interfaces import NO_HEADER, PROMPT_EMBEDDING, AnswerHeader, PromptOptions
from asr_serve.models.packing import PackedBatch, pack_clips
from asr_serve.models.registry import AsrCard

LANGUAGES = {
    "en": "English",
    "zh": "Chinese",
    "yue": "Cantonese",
    "ar": "Arabic",
    "cs": "Czech",
    "da": "Danish",
    "de": "German",
    "el": "Greek",
    "es": "Spanish",
    "fa": "Persian",
    "fi": "Finnish",
    "fil": "Filipino",
    "fr": "French",
    "hi": "Hindi",
    "hu": "Hungarian",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "mk": "Macedonian",
    "ms": "Malay",
    "nl": "Dutch",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "sv": "Swedish",
    "th": "Thai",
    "tr": "Turkish",
    "vi": "Vietnamese",
}
"""Language codes -> names in the prompt."""
CODES = {name.casefold(): code for code, name in LANGUAGES.items()}
"""Names in an answer, in lower case -> language codes."""
MIN_SAMPLES = 8_000
"""Shorter clips are filled with silence."""
CONVOLUTIONS = 3
"""Convolutions, each of which halves time and frequency."""
ENCODE_CHUNKS = 32
"""Most chunks that go through the convolutions at once."""


def _card(size: str, parameters: int) -> AsrCard:
    return AsrCard(
        name=f"qwen3-asr-{size.lower()}",
        task="asr",
        kind="qwen3_asr",
        languages=tuple(LANGUAGES),
        detects=True,
        prompt_options=("hotwords",),
        parameters=parameters,
        licence="Apache-2.0",
        source="arXiv:2601.21337",
        hub=f"Qwen/Qwen3-ASR-{size}-hf",
        files=hub_folder.FILES,
        max_segment_ms=MAX_SEGMENT_MS,
        min_segment_ms=100,
        tokens_per_s=16.0,
        word_times=False,
    )


CARDS = (_card("0.6B", 783_000_000), _card("1.7B", 2_038_000_000))


class Config(hub_folder.HubConfig, frozen=True, kw_only=True):
    """Settings, under the names of config.json."""

    MODEL_TYPE = "qwen3_asr"
    AUDIO: ClassVar[Mapping[str, Any]] = {
        "num_mel_bins": 128,
        "encoder_layers": 24,
        "encoder_attention_heads": 16,
        "encoder_ffn_dim": 4_096,
        "d_model": 1_024,
        "n_window": 50,
        "n_window_infer": 800,
        "output_dim": 3_584,
        "downsample_hidden_size": 480,
    }
    TEXT: ClassVar[Mapping[str, Any]] = {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 2_048,
        "intermediate_size": 6_144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 65_536,
    }
    EOS = (151_645, 151_643)

    @classmethod
    def normalized(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """The first release nests both parts in `thinker_config`, and has another name for the language model."""
        thinker = settings.get("thinker_config")
        if not isinstance(thinker, Mapping):
            return settings
        text = {**thinker.get("text_config", {}), "model_type": "qwen3"}
        return {**settings, "audio_config": thinker.get("audio_config"), "text_config": text}

    @property
    def chunk_frames(self) -> int:
        """Log-mel frames that are convolved together: 100."""
        return 2 * self.size("n_window")

    @property
    def window_chunks(self) -> int:
        """Chunks whose frames attend to each other: 8. Raises WeightsCorrupt."""
        chunks, rest = divmod(self.size("n_window_infer"), self.chunk_frames)
        if rest or not chunks:
            raise WeightsCorrupt(
                f"n_window_infer={self.audio['n_window_infer']}", f"a multiple of {self.chunk_frames}, 2 * n_window"
            )
        return chunks


def convolved(size: int) -> int:
    """Numbers that the convolutions leave of so many."""
    for _ in range(CONVOLUTIONS):
        size = -(-size // 2)
    return size


class Model(HubSpeechLlm):
    """Encoder, projector and language model."""

    LANGUAGES = tuple(LANGUAGES)
    SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", "<asr_text>")
    max_header_tokens = 16
    config: Config

    def load_audio(self, tensors: Mapping[str, Tensor]) -> None:
        size, device = self.config.size, self.device
        width, channels, bins = size("d_model"), size("downsample_hidden_size"), size("num_mel_bins")
        shapes: dict[str, tuple[int, ...]] = {
            "encoder.conv_out.weight": (width, channels * convolved(bins)),
            **norm_shapes("encoder.ln_post", width),
            "projector.linear_1.weight": (width, width),
            "projector.linear_1.bias": (width,),
            "projector.linear_2.weight": (self.width, width),
            "projector.linear_2.bias": (self.width,),
        }
        for i in range(CONVOLUTIONS):
            shapes[f"encoder.conv2d{i + 1}.weight"] = (channels, channels if i else 1, 3, 3)
            shapes[f"encoder.conv2d{i + 1}.bias"] = (channels,)
        for i in range(size("encoder_layers")):
            shapes |= layer_shapes(f"encoder.layers.{i}", width, size("encoder_ffn_dim"))
        check_shapes(tensors, shapes)
        take = WhisperTensors(tensors, device, weighted=False)
        self.mel = LogMel(bins).to(device.torch_device)
        self.convolutions = [
            (take.vector(f"encoder.conv2d{i + 1}.weight"), take.vector(f"encoder.conv2d{i + 1}.bias"))
            for i in range(CONVOLUTIONS)
        ]
        self.project_bins = device.linear(take.get("encoder.conv_out.weight"))
        self.chunk_frames, self.chunk_positions = self.config.chunk_frames, convolved(self.config.chunk_frames)
        self.window_positions = self.config.window_chunks * self.chunk_positions
        self.positions = _sinusoids(self.chunk_positions, width).to(device.torch_device, device.dtype)
        self.encoder = [
            WhisperEncoderLayer(take, f"encoder.layers.{i}", size("encoder_attention_heads"))
            for i in range(size("encoder_layers"))
        ]
        self.encoder_norm = take.norm("encoder.ln_post")
        self.projector = Projector(tensors, device)
        self.frame_samples = self.chunk_frames * HOP_SAMPLES // self.chunk_positions

    def count_frames(self, samples: int, whole: bool = False) -> int:
        chunks, rest = divmod(max(samples, MIN_SAMPLES) // HOP_SAMPLES, self.chunk_frames)
        return chunks * self.chunk_positions + convolved(rest)

    def encode(self, batch: Sequence[Tensor], whole: Sequence[bool] = ()) -> tuple[Tensor, PackedBatch]:
        counts = [self.count_frames(len(pcm)) for pcm in batch]
        chunks = torch.cat([self._chunks(pcm) for pcm in batch])
        x = torch.cat([self._convolved(some) for some in torch.split(chunks, ENCODE_CHUNKS)])
        kept, first = [], 0
        for count in counts:  # positions of the last chunk that are past its frames are left out
            kept.append(x[first : first + count])
            first += -(-count // self.chunk_positions) * self.chunk_positions
        windows = [
            min(self.window_positions, count - start)
            for count in counts
            for start in range(0, count, self.window_positions)
        ]
        packing = pack_clips(windows, self.device.frame_block)
        x = F.pad(torch.cat(kept), (0, 0, 0, packing.total - sum(counts)))
        for layer in self.encoder:
            x = layer(x, None, packing, self.device)
        x = F.layer_norm(x, x.shape[-1:], *self.encoder_norm)
        return self.projector(x), PackedBatch(counts, packing.total)

    def _chunks(self, pcm: Tensor) -> Tensor:
        """Log-mel frames (chunks, mel_bins, chunk_frames) of a clip; zeros after its end."""
        pcm = F.pad(pcm, (0, max(0, MIN_SAMPLES - len(pcm))))
        mel = self.mel(pcm[None].to(self.device.torch_device))[0]
        mel = F.pad(mel, (0, -mel.shape[1] % self.chunk_frames))
        return mel.view(len(mel), -1, self.chunk_frames).transpose(0, 1)

    def _convolved(self, chunks: Tensor) -> Tensor:
        """Positions (chunks * chunk_positions, width) of all frames of chunks."""
        x = chunks[:, None].to(self.device.dtype)
        for weight, bias in self.convolutions:
            x = F.gelu(F.conv2d(x, weight, bias, stride=2, padding=1))
        x = self.project_bins(x.permute(0, 3, 1, 2).flatten(2).flatten(0, 1))
        return x + self.positions.repeat(len(chunks), 1)

    def instruction(self, options: PromptOptions) -> tuple[int, ...]:
        start, end = (self.special[name] for name in ("<|im_start|>", "<|im_end|>"))
        audio = self.special["<|audio_start|>"], PROMPT_EMBEDDING, self.special["<|audio_end|>"]
        newline, context = self.encode_text("\n"), self.encode_text(f"system\n{', '.join(options.hotwords)}")
        tag = self.special["<asr_text>"]
        context = [token for token in context if token != tag]  # some tokenizers have it as text
        # Without a language the model begins its answer with one, and the tag.
        language = (*self.encode_text(f"language {LANGUAGES[options.language]}"), tag) if options.language else ()
        return (
            *(start, *context, end, *newline),
            *(start, *self.encode_text("user\n"), *audio, end, *newline),
            *(start, *self.encode_text("assistant\n"), *language),
        )

    def read_header(self, tokens: Sequence[int]) -> AnswerHeader:
        tag = self.special["<asr_text>"]
        if tag not in (leading := [*tokens[: self.max_header_tokens]]):
            return NO_HEADER
        at = leading.index(tag)
        name = self.decode_text(leading[:at]).strip().removeprefix("language").strip().casefold()
        return AnswerHeader(CODES.get(name, ""), at + 1)


def _sinusoids(positions: int, width: int) -> Tensor:
    """Sines, then cosines, of positions (positions, width)."""
    frequencies = torch.exp(-math.log(10_000) / (width // 2 - 1) * torch.arange(width // 2).float())
    angles = torch.arange(positions).float()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)


CONVERTER = hub_folder.converter(Config.MODEL_TYPE)
