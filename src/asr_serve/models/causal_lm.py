"""Causal language models of the Llama family: Llama, Qwen2, Qwen3 and Gemma 3, over pages of keys and values.

One decoder computes all of them. What differs is in `CausalConfig`: biases and norms of queries and keys, norms after
attention and feed-forward, layers that attend to a window, the activation, and the scale of the embeddings. Numbers
match transformers' LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM and Gemma3ForCausalLM.

Source: Llama, arXiv:2302.13971; grouped queries, arXiv:2305.13245; Qwen3, arXiv:2505.09388; Gemma 3, arXiv:2503.19786.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import msgspec
import torch
from torch import Tensor

from asr_serve.devices.interface import Device, GatedLinear, Linear, VocabularyMatrix
from asr_serve.devices.tensor_parallel import parallel_vocabulary, row_parallel, stack_parts
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.interfaces import PROMPT_EMBEDDING
from asr_serve.models.packing import PagedKeyValues

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers: attention to all positions before, or to the last `sliding_window` ones, its own included."""
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text")
"""Values of `model_type` in the config.json of a checkpoint that this file computes."""
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Activations of config.json -> those of `CausalConfig`."""


class RotaryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary positions of one kind of layer, under the names of a checkpoint's config.json."""

    rope_theta: float = 10_000.0
    rope_type: str = "default"
    """default, linear (all frequencies divided by `factor`) or llama3 (low frequencies divided by `factor`)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8_192

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> RotaryConfig:
        """Reads `rope_parameters` or the older `rope_scaling`. Raises WeightsCorrupt."""
        flat = {name: settings[name] for name in cls.__struct_fields__ if settings.get(name) is not None}
        flat.setdefault("rope_type", settings.get("type") or "default")
        if flat["rope_type"] not in ("default", "linear", "llama3"):
            raise WeightsCorrupt(f"rope_type={flat['rope_type']}", "default, linear or llama3")
        if settings.get("partial_rotary_factor") not in (None, 1.0):
            raise WeightsCorrupt(f"partial_rotary_factor={settings['partial_rotary_factor']}", "1: heads rotate whole")
        return cls(**flat)

    def angles(self, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines (positions, head_dim / 2) float32.

        Source: RoFormer, arXiv:2104.09864; llama3, the release of Llama 3.1.
        """
        frequencies = self.rope_theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        if self.rope_type == "linear":
            frequencies = frequencies / self.factor
        elif self.rope_type == "llama3":
            turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
            span = self.high_freq_factor - self.low_freq_factor
            kept = ((turns - self.low_freq_factor) / span).clamp(0.0, 1.0)
            frequencies = frequencies * (kept + (1 - kept) / self.factor)
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
        return angles.cos().float(), angles.sin().float()


class CausalConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and parts of a causal language model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    attention_scale: float
    activation: str = "silu"
    """Activation of the feed-forward's gate: silu or gelu_tanh."""
    input_bias: bool = False
    """Whether the products of queries, keys and values have biases."""
    output_bias: bool = False
    """Whether the product after attention has one."""
    mlp_bias: bool = False
    query_key_norm: bool = False
    """Whether each head of queries and keys is normalized before it is rotated."""
    norms_outputs: bool = False
    """Whether attention and feed-forward are normalized before they are added (Gemma)."""
    norm_offset: float = 0.0
    """Added to the weights of all norms: 1 for Gemma."""
    embedding_scale: float = 1.0
    """Factor of token embeddings; given embeddings are not scaled."""
    layer_types: tuple[str, ...]
    """FULL or SLIDING for each layer."""
    sliding_window: int = 0
    """Positions that a SLIDING layer attends to, its own included."""
    rotary: dict[str, RotaryConfig]
    """Rotary positions by kind of layer."""
    eos_tokens: tuple[int, ...] = ()
    """Tokens that end an answer, as the checkpoint names them."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> CausalConfig:
        """Reads a checkpoint's config.json, or the `text_config` of a composite one, in old style or new. Raises
        WeightsCorrupt for a model that this file does not compute."""
        if settings.get("model_type") == "gemma3" and isinstance(settings.get("text_config"), Mapping):
            settings = settings["text_config"]
        family = settings.get("model_type")
        if family not in FAMILIES:
            raise WeightsCorrupt(f"model_type={family!r}", f"a causal language model: {', '.join(FAMILIES)}")
        gemma = family == "gemma3_text"
        heads = _size(settings, "num_attention_heads", family)
        head_dim = settings.get("head_dim") or _size(settings, "hidden_size", family) // heads
        layers = _size(settings, "num_hidden_layers", family)
        activation = settings.get("hidden_activation") or settings.get("hidden_act") or "silu"
        if gemma:
            activation = settings.get("hidden_activation") or "gelu_pytorch_tanh"
        if activation not in ACTIVATIONS:
            raise WeightsCorrupt(f"hidden_act={activation!r}", f"one of {', '.join(ACTIVATIONS)}")
        for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if settings.get(name):
                raise WeightsCorrupt(f"{name}={settings[name]}", "none: Gemma 3 has no such thing")
        bias, eos = bool(settings.get("attention_bias")), settings.get("eos_token_id")
        layer_types = _layer_types(settings, family, layers)
        return cls(
            vocab_size=_size(settings, "vocab_size", family),
            hidden_size=_size(settings, "hidden_size", family),
            intermediate_size=_size(settings, "intermediate_size", family),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=settings.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            max_position_embeddings=_size(settings, "max_position_embeddings", family),
            rms_norm_eps=settings.get("rms_norm_eps") or 1e-6,
            attention_scale=(settings.get("query_pre_attn_scalar") or 256 if gemma else head_dim) ** -0.5,
            activation=ACTIVATIONS[activation],
            input_bias=bias or family == "qwen2",
            output_bias=bias and family != "qwen2",
            mlp_bias=bool(settings.get("mlp_bias")),
            query_key_norm=family in ("qwen3", "gemma3_text"),
            norms_outputs=gemma,
            norm_offset=1.0 if gemma else 0.0,
            embedding_scale=settings["hidden_size"] ** 0.5 if gemma else 1.0,
            layer_types=layer_types,
            sliding_window=(settings.get("sliding_window") or 4_096) if SLIDING in layer_types else 0,
            rotary=_rotary(settings, gemma),
            eos_tokens=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        )


def _size(settings: Mapping[str, Any], name: str, family: str) -> int:
    value = settings.get(name)
    if not isinstance(value, int) or value < 1:
        raise WeightsCorrupt(f"{name}={value!r} of a {family}", "a number of 1 or more in config.json")
    return value


def _layer_types(settings: Mapping[str, Any], family: str, layers: int) -> tuple[str, ...]:
    named = settings.get("layer_types")
    if named is not None:
        if len(named) != layers or not set(named) <= {FULL, SLIDING}:
            raise WeightsCorrupt(f"layer_types={named}", f"{FULL} or {SLIDING} for each of {layers} layers")
        return tuple(named)
    if family == "gemma3_text":
        pattern = settings.get("sliding_window_pattern") or settings.get("_sliding_window_pattern") or 6
        return tuple(SLIDING if (i + 1) % pattern else FULL for i in range(layers))
    first_sliding = settings.get("max_window_layers", 28) if settings.get("use_sliding_window") else layers
    return tuple(SLIDING if i >= first_sliding else FULL for i in range(layers))


def _rotary(settings: Mapping[str, Any], gemma: bool) -> dict[str, RotaryConfig]:
    """Rotary positions of both kinds of layers, which differ in Gemma alone."""
    new, old = settings.get("rope_parameters") or {}, settings.get("rope_scaling") or {}
    if not gemma:
        theta = settings.get("rope_theta")
        both = RotaryConfig.of({**({} if theta is None else {"rope_theta": theta}), **old, **new})
        return {FULL: both, SLIDING: both}
    whole = {"rope_theta": settings.get("rope_theta") or 1e6, **old, **(new.get(FULL) or {})}
    local = {"rope_theta": settings.get("rope_local_base_freq") or 1e4, **(new.get(SLIDING) or {})}
    return {FULL: RotaryConfig.of(whole), SLIDING: RotaryConfig.of(local)}


def is_causal_tensor(name: str) -> bool:
    """Returns whether a tensor of a speech LLM's checkpoint is one of its language model, by its name."""
    return name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight") or name.startswith(
        "model.layers."
    )


class CausalTensors:
    """Tensors of a checkpoint by name, laid out for the device. Linear layers are split over the device's group."""

    def __init__(self, config: CausalConfig, tensors: Mapping[str, Tensor], device: Device) -> None:
        """`tensors`: those of transformers' class: `model.layers.0.self_attn.q_proj.weight` and so on. Without
        `lm_head.weight` the output projection is the embedding."""
        self.config, self.device, self.tensors = config, device, tensors

    def get(self, name: str, *shape: int) -> Tensor:
        """A tensor of that shape, as float32. Raises WeightsCorrupt."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise WeightsCorrupt(f"the checkpoint has no tensor {name}", "a causal language model has it")
        if tensor.shape != shape:
            raise WeightsCorrupt(f"{name} has shape {tuple(tensor.shape)}", f"{shape}, by config.json")
        return tensor.float()

    def linear(self, outputs: Mapping[str, int], inputs: int, *, bias: bool) -> Linear:
        """Stacks matrices with the same input into one linear layer, which is column-parallel. `outputs`: outputs of
        each by name, on all ranks together."""
        group = self.device.group
        weight = stack_parts(group, [self.get(f"{name}.weight", count, inputs) for name, count in outputs.items()])
        biases = [self.get(f"{name}.bias", count) for name, count in outputs.items()] if bias else None
        return self.device.decoder_linear(weight, None if biases is None else stack_parts(group, biases))

    def row_linear(self, name: str, outputs: int, inputs: int, *, bias: bool) -> Linear:
        """Returns a row-parallel linear layer; `inputs` are those of all ranks together."""
        weight = self.get(f"{name}.weight", outputs, inputs)
        biases = self.get(f"{name}.bias", outputs) if bias else None
        return row_parallel(self.device.decoder_linear, self.device.group, weight, biases)

    def gated_linear(
        self, gate: str, up: str, outputs: int, inputs: int, *, bias: bool, activation: str
    ) -> GatedLinear:
        """The gate of a feed-forward and its counterpart, by their names: column-parallel, `outputs` of all ranks
        together."""
        part = self.device.group.part(outputs)
        weights = self.get(f"{gate}.weight", outputs, inputs)[part], self.get(f"{up}.weight", outputs, inputs)[part]
        biases = (self.get(f"{gate}.bias", outputs)[part], self.get(f"{up}.bias", outputs)[part]) if bias else None
        return self.device.gated_linear(*weights, biases, activation)

    def norm(self, name: str, width: int) -> Tensor:
        """Weights of a norm, float32 on the device."""
        return (self.get(f"{name}.weight", width) + self.config.norm_offset).to(self.device.torch_device)

    def vocabulary(self) -> tuple[VocabularyMatrix, VocabularyMatrix]:
        """The embedding and the output projection: the same object where their weights are equal."""
        shape = self.config.vocab_size, self.config.hidden_size
        embedding = self.get("model.embed_tokens.weight", *shape)
        vocabulary = self._matrix(embedding)
        if "lm_head.weight" not in self.tensors:
            return vocabulary, vocabulary
        head = self.get("lm_head.weight", *shape)
        return vocabulary, vocabulary if torch.equal(embedding, head) else self._matrix(head)

    def _matrix(self, weight: Tensor) -> VocabularyMatrix:
        one_rank = self.device.group.size == 1
        return self.device.decoder_vocabulary(weight) if one_rank else parallel_vocabulary(self.device, weight)


class CausalLanguageModel:
    """Decoder that computes positions of many sequences at once, whose keys and values lie in pages that the caller
    owns and lends at every step."""

    def __init__(
        self, config: CausalConfig, tensors: Mapping[str, Tensor], device: Device, max_positions: int = 4_096
    ) -> None:
        """`max_positions`: bound of the positions of a sequence, if below that of the checkpoint. Raises
        WeightsCorrupt for tensors that do not fit the config, OptionError where the device's group does not divide
        the heads."""
        device.group.check_heads(config.num_attention_heads, config.num_key_value_heads)
        take = CausalTensors(config, tensors, device)
        self.config, self.device = config, device
        self.kv_heads = device.group.count(config.num_key_value_heads)
        """Heads of keys and values on this rank."""
        self.max_positions = min(config.max_position_embeddings, max_positions)
        self.exported: dict[str, Tensor] = {}
        """Tensors for the engine that computes the model, where the device does not: there are no layers here then."""
        if not device.language_models:
            self.exported = {name: tensor for name, tensor in tensors.items() if is_causal_tensor(name)}
            return
        self.embedding, self.head = take.vocabulary()
        # Rounded as it was in training.
        self.embedding_scale = float(torch.tensor(config.embedding_scale, dtype=device.dtype))
        self.angles = {
            kind: _on_device(config.rotary[kind].angles(config.head_dim, self.max_positions), device)
            for kind in set(config.layer_types)
        }
        self.layers = [CausalLayer(take, i) for i in range(config.num_hidden_layers)]
        self.norm = take.norm("model.norm", config.hidden_size)

    @property
    def head_weight(self) -> Tensor | None:
        """See EncoderDecoderModel."""
        return self.head.weight if self.device.language_models else None

    def embed(self, tokens: Tensor, embeddings: Tensor | None = None) -> Tensor:
        """Inputs (rows, hidden_size) of positions: tokens (rows,) int64, or `embeddings[i]` where token i is
        PROMPT_EMBEDDING; `embeddings` (rows, hidden_size) are as the first layer reads them."""
        given = tokens == PROMPT_EMBEDDING
        known = self.embedding.embed(tokens if embeddings is None else tokens.masked_fill(given, 0))
        if self.embedding_scale != 1.0:
            known = known * self.embedding_scale
        return known if embeddings is None else torch.where(given[:, None], embeddings.to(known.dtype), known)

    def decode(
        self, tokens: Tensor, own: PagedKeyValues, wanted: Tensor | None = None, embeddings: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Decode one position of each row, and write its keys and values into `own`.

        Args:
            tokens: (rows,) int64; PROMPT_EMBEDDING where `embeddings` (rows, hidden_size) has the input.
            own: pages of each row; lengths count this position. Several positions of one sequence are as many rows,
                each of which sees those before it.
            wanted: (n,) int64, rows to return logits of; None for all.

        Returns: logits (n, vocab_size), and hidden (n, hidden_size) that they were made from.
        """
        positions = own.lengths - 1
        x, last = self.embed(tokens, embeddings).contiguous(), len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            x = layer(i, x, positions, self.angles[layer.kind], own, wanted if i == last else None)
        x = rms_norm(x, self.norm, self.config.rms_norm_eps, self.device.kernels)
        return self.head(x), x


class CausalLayer:
    """Self-attention and feed-forward for one position of each row."""

    def __init__(self, take: CausalTensors, index: int) -> None:
        config, at = take.config, f"model.layers.{index}"
        self.config, self.kernels, self.kind = config, take.device.kernels, config.layer_types[index]
        self.window = config.sliding_window if self.kind == SLIDING else 0
        group, self.head_dim = take.device.group, config.head_dim
        self.heads, self.kv_heads = group.count(config.num_attention_heads), group.count(config.num_key_value_heads)
        width, inner = config.hidden_size, config.num_attention_heads * self.head_dim
        kv = config.num_key_value_heads * self.head_dim
        self.qkv = take.linear(
            {f"{at}.self_attn.{kind}_proj": inner if kind == "q" else kv for kind in "qkv"},
            width,
            bias=config.input_bias,
        )
        self.out = take.row_linear(f"{at}.self_attn.o_proj", width, inner, bias=config.output_bias)
        hidden = config.intermediate_size
        self.gate_up = take.gated_linear(
            f"{at}.mlp.gate_proj",
            f"{at}.mlp.up_proj",
            hidden,
            width,
            bias=config.mlp_bias,
            activation=config.activation,
        )
        self.down = take.row_linear(f"{at}.mlp.down_proj", width, hidden, bias=config.mlp_bias)
        self.input_norm = take.norm(f"{at}.input_layernorm", width)
        before_mlp = "pre_feedforward_layernorm" if config.norms_outputs else "post_attention_layernorm"
        self.mlp_norm = take.norm(f"{at}.{before_mlp}", width)
        self.output_norms: tuple[Tensor, Tensor] | None = None
        """Norms of what attention and feed-forward add, where the model has any."""
        if config.norms_outputs:
            self.output_norms = (
                take.norm(f"{at}.post_attention_layernorm", width),
                take.norm(f"{at}.post_feedforward_layernorm", width),
            )
        self.head_norms: Tensor | None = None
        """(heads + kv_heads, head_dim): norm of each head of queries and of keys."""
        if config.query_key_norm:
            query, key = (take.norm(f"{at}.self_attn.{kind}_norm", self.head_dim) for kind in "qk")
            self.head_norms = torch.cat([query.expand(self.heads, -1), key.expand(self.kv_heads, -1)])

    def __call__(
        self,
        index: int,
        x: Tensor,
        positions: Tensor,
        angles: tuple[Tensor, Tensor],
        own: PagedKeyValues,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """`angles`: cosines and sines (max_positions, head_dim / 2). `wanted`: rows to compute to the end; None: all.
        Keys and values of the others are written too."""
        kernels, config = self.kernels, self.config
        qkv = self.qkv(self._norm(x, self.input_norm))
        kernels.rotate_append(
            own.pool, index, qkv, self.head_norms, config.rms_norm_eps, *angles, positions, own.block_tables
        )
        query, tables, lengths = qkv[:, : self.heads * self.head_dim], own.block_tables, own.lengths
        if wanted is not None:
            x, query, tables, lengths = x[wanted], query[wanted], tables[wanted], lengths[wanted]
        mixed = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        kernels.attend(own.pool, index, query, mixed, tables, lengths, config.attention_scale, self.window)
        x = self._add(x, self.out, mixed, 0)
        return self._add(x, self.down, self.gate_up(self._norm(x, self.mlp_norm)), 1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps, self.kernels)

    def _add(self, x: Tensor, product: Linear, y: Tensor, which: int) -> Tensor:
        """x + norm(product(y))."""
        if self.output_norms is None:
            return product(y, add=x)
        return x + self._norm(product(y), self.output_norms[which])


def rms_norm(x: Tensor, weight: Tensor, eps: float, kernels: ModuleType) -> Tensor:
    """x / rms(x) * weight over the last axis of x (rows, width)."""
    out = torch.empty_like(x)
    kernels.rms_norm(x, weight, out, eps)
    return out


def _on_device(angles: tuple[Tensor, Tensor], device: Device) -> tuple[Tensor, Tensor]:
    cos, sin = angles
    return cos.to(device.torch_device), sin.to(device.torch_device)
