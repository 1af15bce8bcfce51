"""LLMASR: any audio encoder and adaptor of FunASR before any causal language model.

The checkpoint folder is one that `asr-serve models convert` writes: encoder and adaptor in model.safetensors, the
language model with a config.json of its own in `language_model`.

Source: numbers match funasr 1.4.16's LLMASR2, LLMASR3 and LLMASR4, of one clip at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
import torch
from torch import Tensor

from asr_serve.devices.interface import Device
from asr_serve.errors import UnsupportedOption, WeightsCorrupt
from asr_serve.models.asr.speech_llm import funasr_folder
from asr_serve.models.asr.speech_llm.adaptors import (
    Adaptor,
    AdaptorConfig,
    AdaptorKind,
    low_frame_rate_tokens,
    take_clips,
    truncate,
)
from asr_serve.models.asr.speech_llm.chat_prompt import LANGUAGES, ChatPrompt
from asr_serve.models.asr.speech_llm.ctc_head import CtcConfig, FunAsrCtcHead
from asr_serve.models.asr.speech_llm.funasr_folder import whisper_tensors
from asr_serve.models.asr.speech_llm.sanm_encoder import EncoderTensors, FrontendConfig, SanmConfig, SanmEncoder
from asr_serve.models.asr.speech_llm.speech_llm import SpeechLlm
from asr_serve.models.asr.speech_llm.whisper_windows import WhisperSizes, WhisperWindowsEncoder
from asr_serve.models.causal_lm import CausalConfig, CausalLanguageModel
from asr_serve.models.checkpoints.config_file import read_config
from asr_serve.models.interfaces import PromptOptions
from asr_serve.models.model_files import WEIGHTS, AsrModelConfig, WeightsConverter
from asr_serve.models.packing import PackedBatch
from asr_serve.models.registry import AsrCard
from asr_serve.text.tokenizers import Tokenizer, read_hub_tokenizer

ENCODE_CLIPS = 8
"""Most clips that go through encoder and adaptor at once."""
MAX_POSITIONS = 4_096
"""Most positions of a row: prompt, audio and answer."""
CARDS = (
    AsrCard(
        name="llm-asr",
        task="asr",
        kind="llm_asr",
        languages=tuple(LANGUAGES),
        detects=True,
        prompt_options=("hotwords", "itn"),
        parameters=0,
        licence="that of its parts",
        source="github.com/modelscope/FunASR, LLMASR",
        hub="",
        files=("config.yaml", "model.pt", "*.mvn", funasr_folder.CTC_VOCABULARY, "*/config.json", "*/tokenizer.json"),
        max_segment_ms=30_000,
        min_segment_ms=100,
        tokens_per_s=16.0,
        word_times=False,
    ),
)


class SpeechLlmEncoder(Protocol):
    """Encoder with its features."""

    frame_samples: int
    """Samples from one frame to the next."""
    width: int
    """Numbers of a frame."""

    def count_frames(self, samples: int) -> int:
        """Number of frames of a clip."""

    def __call__(self, batch: Sequence[Tensor]) -> tuple[Tensor, PackedBatch]:
        """Frames (packing.total, width) of clips (samples,), each as if it were alone, and the packing."""


class Config(AsrModelConfig, frozen=True, kw_only=True):
    """Parts and their sizes, under the names of FunASR's config.yaml."""

    audio_encoder: str = "SenseVoiceEncoderSmall"
    audio_encoder_conf: SanmConfig = SanmConfig()
    frontend_conf: FrontendConfig = FrontendConfig()
    audio_adaptor: AdaptorKind = "Transformer"
    audio_adaptor_conf: AdaptorConfig = AdaptorConfig()
    use_low_frame_rate: bool = False
    """Whether the language model reads only `low_frame_rate_tokens` of the embeddings."""
    sys_prompt: bool = True
    """Whether a system message comes first."""
    do_think: bool = True
    """False: an empty thought precedes the answer."""
    language_model: CausalConfig | None = None
    """Sizes of the language model, from the config.json in its folder."""
    tokenizer: Any = None
    """Tokenizer of the language model."""
    whisper: WhisperSizes | None = None
    """Sizes of Whisper's encoder, where that is the audio encoder."""
    ctc: CtcConfig | None = None
    """Sizes of the CTC head; None: there is none."""
    ctc_tokenizer: Any = None
    """Vocabulary of the CTC head."""

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Self:
        """Reads config.json as `funasr_folder.convert` writes it. Raises WeightsCorrupt."""
        known = {name: value for name, value in settings.items() if name in cls.__struct_fields__}
        if not {"audio_encoder", "audio_adaptor"} <= known.keys():
            raise WeightsCorrupt("config.json names no audio_encoder and audio_adaptor", "one that convert wrote")
        try:
            given = {"language_model": None, "tokenizer": None, "ctc_tokenizer": None}
            config = msgspec.convert({**known, **given}, cls)
        except msgspec.ValidationError as failure:
            raise WeightsCorrupt(f"config.json: {failure}", "one that `asr-serve models convert` wrote") from failure
        if config.audio_encoder not in funasr_folder.ENCODERS:
            allowed = f"one of: {', '.join(funasr_folder.ENCODERS)}"
            raise WeightsCorrupt(f"audio_encoder={config.audio_encoder!r}", allowed)
        if config.audio_encoder == funasr_folder.WHISPER and config.whisper is None:
            raise WeightsCorrupt("config.json has no sizes of Whisper's encoder", "one that convert wrote")
        return config

    @property
    def weight_files(self) -> tuple[str, ...]:
        return (WEIGHTS, f"{funasr_folder.LANGUAGE_MODEL}/{WEIGHTS}")

    @property
    def other_files(self) -> tuple[str, ...]:
        vocabulary = () if self.ctc is None else (funasr_folder.CTC_TOKENIZER,)
        return (f"{funasr_folder.LANGUAGE_MODEL}/config.json", *vocabulary)

    def with_folder(self, folder: Path, tokenizer: Tokenizer) -> Self:
        language_model = read_config(folder / funasr_folder.LANGUAGE_MODEL, "causal language", CausalConfig.of)
        if (width := self.audio_adaptor_conf.llm_dim) != language_model.hidden_size:
            raise WeightsCorrupt(
                f"the adaptor makes embeddings of {width} numbers",
                f"{language_model.hidden_size}, which the language model reads",
            )
        vocabulary = None if self.ctc is None else read_hub_tokenizer(folder / funasr_folder.CTC_TOKENIZER)
        return msgspec.structs.replace(
            self, language_model=language_model, tokenizer=tokenizer, ctc_tokenizer=vocabulary
        )


class Model(SpeechLlm):
    """Encoder, adaptor and language model."""

    encoder: SpeechLlmEncoder

    def __init__(self, config: Config, tensors: Mapping[str, Tensor], device: Device) -> None:
        """Raises WeightsCorrupt for tensors that do not fit the config."""
        assert config.language_model is not None, "a config without its folder"
        self.config, self.device = config, device
        self.prompt = ChatPrompt(config.tokenizer, system=config.sys_prompt, think=config.do_think)
        language_model = CausalLanguageModel(config.language_model, dict(tensors), device, MAX_POSITIONS)
        super().__init__(language_model, self.prompt.end, config.language_model.eos_tokens)
        take = EncoderTensors(tensors, device)
        if config.whisper is not None:
            self.encoder = WhisperWindowsEncoder(whisper_tensors(tensors), config.whisper, device)
        else:
            self.encoder = SanmEncoder(take, "audio_encoder.", config.audio_encoder_conf, config.frontend_conf)
        if (width := config.audio_adaptor_conf.encoder_dim) != self.encoder.width:
            raise WeightsCorrupt(f"the adaptor reads {width} numbers", f"{self.encoder.width}, which the encoder makes")
        self.adaptor = Adaptor(take, "audio_adaptor.", config.audio_adaptor, config.audio_adaptor_conf)
        self.frame_samples = self.encoder.frame_samples * config.audio_adaptor_conf.downsample_rate
        self.ctc_head: FunAsrCtcHead | None = None
        if config.ctc is not None and device.group.rank == 0:  # other ranks only decode
            if (width := config.ctc.decoder_conf.encoder_dim) != self.encoder.width:
                raise WeightsCorrupt(f"the CTC decoder reads {width} numbers", f"{self.encoder.width} of the encoder")
            self.ctc_head = FunAsrCtcHead(take, config.ctc, config.ctc_tokenizer, self.encoder.frame_samples)

    def prompt_tokens(self, options: PromptOptions) -> tuple[int, ...]:
        if options.task != "transcribe":
            raise UnsupportedOption(f"task={options.task}", "this model can only transcribe", param="task")
        if options.prompt:
            raise UnsupportedOption("a prompt", "this model's prompt takes hotwords", "name them", param="prompt")
        return self.prompt.tokens(options)

    def count_frames(self, samples: int, whole: bool = False) -> int:
        return self._kept(self.encoder.count_frames(samples))

    def _kept(self, frames: int) -> int:
        """Embeddings that the language model reads of so many encoder frames."""
        made = self.adaptor.count(frames)
        return min(made, low_frame_rate_tokens(frames)) if self.config.use_low_frame_rate else made

    def encode(self, batch: Sequence[Tensor], whole: Sequence[bool] = ()) -> tuple[Tensor, PackedBatch]:
        return self.encode_timed(batch, [False] * len(batch))[:2]

    def encode_timed(
        self, batch: Sequence[Tensor], timed: Sequence[bool]
    ) -> tuple[Tensor, PackedBatch, list[Tensor | None]]:
        parts, counts = list[Tensor](), list[int]()
        ctc_frames: list[Tensor | None] = []
        for first in range(0, len(batch), ENCODE_CLIPS):
            frames, packing = self.encoder(batch[first : first + ENCODE_CLIPS])
            ctc_frames += self._ctc_frames(frames, packing, timed[first : first + ENCODE_CLIPS])
            kept = [self._kept(count) for count in packing.frames]
            embeddings, packing = truncate(*self.adaptor(frames, packing), kept, 1)
            parts.append(embeddings)
            counts += kept
        return torch.cat(parts), PackedBatch(counts, sum(counts)), ctc_frames

    def _ctc_frames(self, frames: Tensor, packing: PackedBatch, timed: Sequence[bool]) -> list[Tensor | None]:
        """Frames of the CTC decoder, of those clips alone that are `timed`."""
        made: list[Tensor | None] = [None] * len(timed)
        chosen = [clip for clip, wanted in enumerate(timed) if wanted]
        if not chosen:
            return made
        assert self.ctc_head is not None, "only a model with a CTC head is asked for times"
        ctc_frames, packing = self.ctc_head.decode_frames(*take_clips(frames, packing, chosen, self.device.frame_block))
        for clip, offset, count in zip(chosen, packing.offsets, packing.frames, strict=True):
            made[clip] = ctc_frames[offset : offset + count].clone()  # of its own: rows leave one by one
        return made


CONVERTER = WeightsConverter(
    funasr_folder.holds("LLMASR", "LLMASR2", "LLMASR3", "LLMASR4"), funasr_folder.convert, funasr_folder.is_complete
)
