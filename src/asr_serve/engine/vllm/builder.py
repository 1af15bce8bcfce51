"""Builds the executor of a speech LLM whose language model vLLM computes."""

from __future__ import annotations

from collections.abc import Callable

from asr_serve.config import EngineConfig
from asr_serve.engine.executor import EngineComponents
from asr_serve.engine.seq2seq.encoder import EncodeRunner
from asr_serve.engine.vllm.executor import VllmExecutor
from asr_serve.engine.vllm.worker_process import WorkerSettings
from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.models.asr.speech_llm.speech_llm import SpeechLlm
from asr_serve.models.checkpoints.causal_lm_folder import cached_causal_lm
from asr_serve.models.interfaces import EncoderDecoderModel
from asr_serve.models.registry import AnyCard, AsrCard

PAGE_POSITIONS = 256
"""Positions by which vLLM may round the memory of a sequence up."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def require_language_model(chosen: AnyCard, has_one: bool) -> None:
    """Raises OptionError for a model without a language model of its own."""
    if not has_one:
        raise OptionError(
            f"backend=vllm for {chosen.name}",
            "speech LLMs: vLLM computes their language model, and other models have none",
            "leave it out, or take such a model",
            param="backend",
        )


def build_vllm_executor(
    model: EncoderDecoderModel,
    parts: EngineComponents,
    chosen: AsrCard,
    config: EngineConfig,
    on_done: Callable[[int], None],
    on_start: Callable[[list[int]], None],
) -> VllmExecutor:
    """Writes the language model where vLLM finds it, and starts vLLM. Raises OptionError, ModelError, ProgramMissing,
    ProgramFailed."""
    require_language_model(chosen, isinstance(model, SpeechLlm))
    assert isinstance(model, SpeechLlm)
    if config.quantize not in ("auto", "none"):
        raise UnsupportedOption(
            f"quantize={config.quantize} with backend=vllm",
            "none: vLLM computes the language model in the dtype of the engine",
            "leave one of them out",
            param="quantize",
        )
    device, language_model = parts.device, model.language_model
    assert not device.language_models, "the device computes the language model too"
    folder = cached_causal_lm(language_model.config, language_model.exported)
    language_model.exported.clear()
    engine = {
        "model": str(folder),
        "dtype": DTYPES[device.dtype_name],
        "max_positions": model.max_tokens,
        "max_rows": config.max_decode_rows,
        "kv_bytes": max(config.kv_bytes, _kv_bytes(model, device.dtype.itemsize)),
    }
    assert config.vllm_python is not None, "the config demands it"
    settings = WorkerSettings(config.vllm_python, device.threads, engine)
    encode = EncodeRunner(model, device)
    return VllmExecutor(model, encode, settings, config, parts.decode_text, chosen.tokens_per_s, on_done, on_start)


def _kv_bytes(model: SpeechLlm, itemsize: int) -> int:
    """Memory of the keys and values of one sequence of the greatest length."""
    positions = model.max_tokens + 2 * PAGE_POSITIONS
    return 2 * positions * model.layers * model.heads * model.head_dim * itemsize
