"""Arguments with which FunASR loads a model, as those of this engine: names of hubs, GPUs and their memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

import asr_serve
from asr_serve.config import EngineConfig
from asr_serve.devices import check_device
from asr_serve.errors import OptionError
from asr_serve.types import unknown_name_error

if TYPE_CHECKING:
    from asr_serve.api.library import Model

DEFAULT_MODEL = "FunAudioLLM/Fun-ASR-Nano-2512"
HUBS = {"ms": "ModelScope", "modelscope": "ModelScope", "hf": "Hugging Face", "huggingface": "Hugging Face"}
OWNERS = {"ZhipuAI": "zai-org"}
"""Owners of repositories on ModelScope -> their names on Hugging Face, where these differ."""
DTYPES = {"auto": "auto", "bf16": "bf16", "bfloat16": "bf16", "fp16": "bf16", "float16": "bf16", "fp32": "fp32"}
"""Names of data types -> this engine's. Half precision is bf16 here, which has the range of fp32."""
DEFAULT_UTILIZATION = 0.8
"""Default of `gpu_memory_utilization`."""
MAX_MODEL_LEN = 4_096
"""Longest sequence of a speech LLM here: tokens of prompt, audio and answer."""
MIN_CACHE_BYTES = 64 << 20
"""Least memory for keys and values on a GPU."""
WITHOUT_EFFECT = (
    *("enforce_eager", "revision", "trust_remote_code", "disable_update", "disable_pbar", "log_level", "ncpu"),
    *("vad_model", "vad_kwargs", "punc_model", "vllm_kwargs"),
)
"""Arguments of FunASR's constructors that change nothing here: voice activity detection is built in."""

log = logging.getLogger(__name__)


class Gpu(NamedTuple):
    """CUDA device that the model runs on."""

    total_bytes: int
    """Memory of the device."""
    devices: int
    """Number of devices from this one on."""


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of FunASR's constructors, with its defaults; `device` and `dtype` are chosen for this machine. Raises
    OptionError for values out of range."""

    hub: str = "ms"
    """Hub of the model. Either stands for Hugging Face, which has the same models."""
    device: str = "auto"
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    """GPUs over which the language model is split."""
    gpu_memory_utilization: float = DEFAULT_UTILIZATION
    """Share of a GPU's memory for weights, keys and values."""
    max_model_len: int = MAX_MODEL_LEN
    max_num_seqs: int | None = None
    """Utterances that are decoded at once, vLLM's name. None: the engine's default."""
    vllm_python: str | None = None
    """Python interpreter of an environment that has vLLM, which then decodes. None: this engine decodes."""

    def __post_init__(self) -> None:
        for name, known in (("hub", HUBS), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise OptionError(f"{name}={getattr(self, name)!r}", f"one of: {', '.join(known)}", param=name)
        fraction = self.gpu_memory_utilization
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            came = f"gpu_memory_utilization={fraction!r}"
            raise OptionError(came, "a number above 0, at most 1", param="gpu_memory_utilization")
        for name in ("max_model_len", "max_num_seqs", "tensor_parallel_size"):
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and not (name == "max_num_seqs" and value is None):
                raise OptionError(f"{name}={value!r}", "a whole number, 1 or more", param=name)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> LoadOptions:
        """Builds options from keyword arguments. Raises OptionError for a name that FunASR does not have."""
        known = cls.__struct_fields__
        for name in arguments:
            if name not in known and name not in WITHOUT_EFFECT:
                raise unknown_name_error("argument", name, (*known, *WITHOUT_EFFECT))
        return cls(**{name: value for name, value in arguments.items() if name in known})


def load_model(model: str, options: LoadOptions) -> Model:
    """Loads a model; what needs a GPU that is not there is left out with a warning.

    Raises OptionError, UnknownModel, WeightsMissing, WeightsCorrupt.
    """
    name, folder = find_model(model, options.hub)
    return asr_serve.load(
        name,
        device=options.device,
        dtype=DTYPES[options.dtype],
        weights=folder,
        engine=engine_config(name, folder, options),
    )


def find_model(model: str, hub: str) -> tuple[str, Path | None]:
    """Finds a model by FunASR's name for it: returns the name of its card and its folder, None for that of the card.
    A folder's family is the `model` of its config.yaml, or the `model_type` of its config.json; a name is that of a
    repository of a hub, which is fetched where it is missing, or one of `asr-serve models list`.

    Raises UnknownModel, WeightsMissing.
    """
    from asr_serve.models.checkpoints import store
    from asr_serve.models.registry import REPOSITORY_PREFIX, asr_card, hub_repository

    if (folder := Path(model).expanduser()).is_dir():  # also where a card has its name
        return store.model_of_folder(folder), folder.resolve()
    if (repository := hub_repository(model)) is not None:
        owner, _, name = repository.partition("/")
        repository = f"{OWNERS.get(owner, owner)}/{name}"
        log.info("hub=%s: %s is looked for in the cache of Hugging Face's client, and there", hub, repository)
        model = f"{REPOSITORY_PREFIX}{repository}"
    name, found = store.find_model(model)
    return asr_card(name).name, found


def engine_config(name: str, folder: Path | None, options: LoadOptions) -> EngineConfig:
    """Settings of the engine. Raises OptionError for a device that is not there, and where the weights leave no memory
    for keys and values."""
    check_device(options.device)
    gpu = chosen_gpu(options.device)
    size = parallel_size(options.tensor_parallel_size, options.device, gpu)
    settings: dict[str, Any] = {"tensor_parallel_size": size}
    if options.vllm_python is not None:
        settings |= {"backend": "vllm", "vllm_python": options.vllm_python}
    if options.max_num_seqs is not None:
        settings["max_decode_rows"] = options.max_num_seqs
    if options.max_model_len > MAX_MODEL_LEN:
        log.warning("max_model_len=%d: sequences have %d tokens at most here", options.max_model_len, MAX_MODEL_LEN)
    if gpu is not None:
        settings["kv_bytes"] = cache_bytes(
            gpu.total_bytes, options.gpu_memory_utilization, _weights(name, folder) // size
        )
    elif options.gpu_memory_utilization != DEFAULT_UTILIZATION:
        log.warning(
            "gpu_memory_utilization=%g has no effect: the model runs on the CPU", options.gpu_memory_utilization
        )
    return EngineConfig(**settings)


def chosen_gpu(device: str) -> Gpu | None:
    """Returns the CUDA device that `device` stands for; None: the CPU."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return None
    index = int(device.partition(":")[2] or 0) if device.startswith("cuda") else 0
    if index >= torch.cuda.device_count():
        return None  # the engine refuses it
    return Gpu(torch.cuda.get_device_properties(index).total_memory, torch.cuda.device_count() - index)


def parallel_size(wanted: int, device: str, gpu: Gpu | None) -> int:
    """Returns the number of processes over which the language model is split: `wanted` if there are as many GPUs, or
    where the CPU was asked for by name; else 1, with a warning."""
    gpus = 0 if gpu is None else gpu.devices
    if wanted == 1 or device == "cpu" or wanted <= gpus:
        return wanted
    log.warning("tensor_parallel_size=%d, and %d GPUs: the language model is not split", wanted, gpus)
    return 1


def cache_bytes(total_bytes: int, utilization: float, weights_bytes: int) -> int:
    """Memory for keys and values, of a GPU's share that also holds the weights. Raises OptionError for too little.

    >>> cache_bytes(80 << 30, 0.5, 2 << 30) >> 30
    38
    """
    left = int(total_bytes * utilization) - weights_bytes
    if left < MIN_CACHE_BYTES:
        raise OptionError(
            f"gpu_memory_utilization={utilization:g} of {total_bytes >> 20} MiB with weights of {weights_bytes >> 20}",
            f"{(weights_bytes + MIN_CACHE_BYTES) / total_bytes:.2f} or more",
            param="gpu_memory_utilization",
        )
    return left


def _weights(name: str, folder: Path | None) -> int:
    """Bytes of a model's weights on disk."""
    from asr_serve.engine.builder import AsrCheckpoint

    found = AsrCheckpoint.find(name, folder)
    return sum((found.folder / file).stat().st_size for file in found.config.weight_files)
