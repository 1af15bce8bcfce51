"""Fun-ASR-Nano: SenseVoice's encoder, a Transformer adaptor and Qwen3.

Source: arXiv:2509.12508; numbers match funasr 1.4.16's FunASRNano, of one clip at a time.
"""

from __future__ import annotations

import msgspec

from asr_serve.models.asr.speech_llm import funasr_folder, llm_asr
from asr_serve.models.model_files import WeightsConverter
from asr_serve.models.registry import AsrCard

_NANO = AsrCard(
    name="fun-asr-nano",
    task="asr",
    kind="fun_asr_nano",
    languages=("zh", "en", "ja"),
    detects=True,
    prompt_options=("hotwords", "itn"),
    parameters=985_000_000,
    licence="Apache-2.0",
    source="arXiv:2509.12508",
    hub="FunAudioLLM/Fun-ASR-Nano-2512",
    files=llm_asr.CARDS[0].files,
    max_segment_ms=60_000,
    min_segment_ms=100,
    tokens_per_s=16.0,
)
CARDS = (
    _NANO,
    msgspec.structs.replace(
        _NANO, name="fun-asr-mlt-nano", languages=llm_asr.CARDS[0].languages, hub="FunAudioLLM/Fun-ASR-MLT-Nano-2512"
    ),
)


class Config(llm_asr.Config, frozen=True, kw_only=True):
    """Parts and their sizes, under the names of FunASR's config.yaml."""


class Model(llm_asr.Model):
    """Encoder, adaptor and language model."""


CONVERTER = WeightsConverter(funasr_folder.holds("FunASRNano"), funasr_folder.convert, funasr_folder.is_complete)
