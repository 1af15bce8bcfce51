"""Base of all speech LLMs: a causal language model that reads a prompt with audio in it."""

from __future__ import annotations

from torch import Tensor

from asr_serve.models.causal_lm import CausalLanguageModel
from asr_serve.models.interfaces import SpeechLanguageModel
from asr_serve.models.packing import PagedKeyValues


class SpeechLlm(SpeechLanguageModel):
    """Speech LLM around a causal language model. A family adds the audio encoder with its adaptor (`encode`,
    `count_frames`, `frame_samples`) and the prompt (`prompt_tokens`); it may leave the encoder out on ranks of the
    device's group other than 0, which only decode."""

    tensor_parallel = True

    def __init__(self, language_model: CausalLanguageModel, eos: int, stop_tokens: tuple[int, ...] = ()) -> None:
        """`eos`, `stop_tokens`: tokens that end an answer."""
        config = language_model.config
        self.language_model = language_model
        self.vocab_size, self.width = config.vocab_size, config.hidden_size
        self.bos, self.eos, self.stop_tokens = 0, eos, stop_tokens  # any token fills the rows that nobody uses
        self.max_tokens = language_model.max_positions
        self.layers, self.heads, self.head_dim = config.num_hidden_layers, language_model.kv_heads, config.head_dim
        self.attention_scale = config.attention_scale
        self.head_weight = language_model.head_weight

    def decode(
        self,
        tokens: Tensor,
        own: PagedKeyValues,
        audio: PagedKeyValues,
        wanted: Tensor | None = None,
        embeddings: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        return self.language_model.decode(tokens, own, wanted, embeddings)
