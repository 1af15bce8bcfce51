"""Causal language models compute what transformers' do, in whatever parts and company their positions are fed."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from asr_serve import devices
from asr_serve import kernels as native
from asr_serve.devices.tensor_parallel import TensorParallelGroup
from asr_serve.errors import OptionError, WeightsCorrupt
from asr_serve.kernels import PAGE
from asr_serve.models.causal_lm import FULL, SLIDING, CausalConfig, CausalLanguageModel, RotaryConfig
from asr_serve.models.interfaces import PROMPT_EMBEDDING
from asr_serve.models.packing import PagedKeyValues

FIXTURE = Path(__file__).parent / "fixtures" / "causal_lm.safetensors"
NAMES = ("qwen3", "qwen3 with a window", "qwen2", "llama", "llama 3", "gemma 3")
TOLERANCE = 1e-4


class Reference(NamedTuple):
    """What transformers computed: logits (positions, vocabulary) of the prompt and the greedy answer after it."""

    settings: dict[str, Any]
    weights: dict[str, Tensor]
    tokens: list[int]
    embeddings: Tensor
    logits: Tensor
    answer: list[int]


@cache
def reference(name: str) -> Reference:
    with safe_open(FIXTURE, "pt") as file:
        facts = json.loads(file.metadata()["facts"])[name]
        start = f"{name}.weights."
        weights = {key[len(start) :]: file.get_tensor(key) for key in file.keys() if key.startswith(start)}  # noqa: SIM118
        embeddings, logits = file.get_tensor(f"{name}.embeddings"), file.get_tensor(f"{name}.logits")
    tokens = [*facts["prompt"], *facts["answer"]]
    return Reference(facts["config"], weights, tokens, embeddings, logits, facts["answer"])


@pytest.fixture(params=["native", "reference"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASR_SERVE_NATIVE", "1" if request.param == "native" else "0")


def load(name: str, **options: Any) -> CausalLanguageModel:
    known = reference(name)
    device = devices.make_device("cpu", options.pop("dtype", "fp32"), options.pop("quantize", "none"))
    return CausalLanguageModel(CausalConfig.of(known.settings), known.weights, device, **options)


class Sequences:
    """Sequences of up to `most` positions in pages that hold NaN until they are written, in no order."""

    def __init__(self, model: CausalLanguageModel, count: int, most: int) -> None:
        self.model, config, width = model, model.config, -(-most // PAGE)
        shape = (1 + count * width, len(model.layers), 2, model.kv_heads, config.head_dim * PAGE)
        self.pool = torch.full(shape, float("nan"), dtype=model.device.dtype)
        order = torch.randperm(count * width, generator=torch.Generator().manual_seed(5)) + 1
        self.tables = order.view(count, width).int()

    def feed(self, parts: list[tuple[int, int, list[int], Tensor]], wanted: list[int] | None = None) -> Tensor:
        """Logits of one pass over parts (sequence, first position, tokens, embeddings of those that are none)."""
        rows = torch.tensor([sequence for sequence, _, tokens, _ in parts for _ in tokens])
        lengths = torch.cat([torch.arange(len(tokens)) + first + 1 for _, first, tokens, _ in parts])
        tokens = torch.tensor([token for _, _, fed, _ in parts for token in fed])
        embeddings = torch.full((len(tokens), self.model.config.hidden_size), float("nan"))
        embeddings[tokens == PROMPT_EMBEDDING] = torch.cat([given for *_, given in parts])
        own = PagedKeyValues(self.pool, self.tables[rows], lengths)
        selected = None if wanted is None else torch.tensor(wanted)
        with torch.inference_mode():
            return self.model.decode(tokens, own, selected, embeddings)[0]


def cut(known: Reference, start: int, end: int) -> tuple[list[int], Tensor]:
    """Tokens of some positions, and the embeddings among them."""
    before, within = known.tokens[:start].count(PROMPT_EMBEDDING), known.tokens[start:end].count(PROMPT_EMBEDDING)
    return known.tokens[start:end], known.embeddings[before : before + within]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str) -> None:
    known = reference(name)
    sequences = Sequences(load(name), 1, len(known.tokens))
    logits = sequences.feed([(0, 0, *cut(known, 0, len(known.tokens)))])
    torch.testing.assert_close(logits, known.logits, atol=TOLERANCE, rtol=0)
    first = len(known.tokens) - len(known.answer)
    assert logits[first - 1 : -1].argmax(1).tolist() == known.answer


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", NAMES)
def test_parts_and_company_change_nothing(name: str) -> None:
    """Three copies of a sequence, fed in parts of any size that share passes, and one of them position by position."""
    known, chance = reference(name), random.Random(name)
    sequences = Sequences(load(name), 3, len(known.tokens))
    found = [torch.empty(0, known.logits.shape[1]) for _ in range(3)]
    while any(len(logits) < len(known.tokens) for logits in found):
        parts = []
        for sequence, logits in enumerate(found):
            size = 1 if sequence == 0 else chance.choice([0, 1, 3, PAGE, 23])
            end = min(len(logits) + size, len(known.tokens))
            if end > len(logits):
                parts.append((sequence, len(logits), *cut(known, len(logits), end)))
        if not parts:
            continue
        made = sequences.feed(parts).split([len(tokens) for _, _, tokens, _ in parts])
        for (sequence, *_), logits in zip(parts, made, strict=True):
            found[sequence] = torch.cat([found[sequence], logits])
    for logits in found:
        torch.testing.assert_close(logits, known.logits, atol=TOLERANCE, rtol=0)


class ThreadCommunicator:
    """Collectives of ranks that are threads of this process."""

    def __init__(self, rank: int, parts: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.parts, self.barrier = rank, parts, barrier

    def gather(self, x: Tensor) -> list[Tensor]:
        self.parts[self.rank] = x.clone()
        self.barrier.wait(60)
        found = [part for part in self.parts if part is not None]
        self.barrier.wait(60)
        return found if self.rank == 0 else []

    def all_reduce(self, x: Tensor) -> None:
        self.parts[self.rank] = x.clone()
        self.barrier.wait(60)
        x.copy_(torch.stack([part for part in self.parts if part is not None]).sum(0))
        self.barrier.wait(60)


def split_logits(name: str, size: int, **options: Any) -> Tensor:
    """Logits of rank 0 of a model that is split over `size` ranks."""
    known, parts, barrier = reference(name), [None] * size, threading.Barrier(size)

    def run(rank: int) -> Tensor:
        group = TensorParallelGroup(rank, size)
        group.connect(ThreadCommunicator(rank, parts, barrier))
        device = devices.make_device("cpu", options.get("dtype", "fp32"), options.get("quantize", "none"), group)
        model = CausalLanguageModel(CausalConfig.of(known.settings), known.weights, device)
        return Sequences(model, 1, len(known.tokens)).feed([(0, 0, *cut(known, 0, len(known.tokens)))])

    with ThreadPoolExecutor(size) as threads:
        return next(iter(threads.map(run, range(size))))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in NAMES if name != "gemma 3"), ("llama", 4)])
def test_ranks_together_compute_what_one_does(name: str, size: int) -> None:
    """61 tokens of a vocabulary and 40 columns are split unevenly or evenly, heads evenly."""
    torch.testing.assert_close(split_logits(name, size), reference(name).logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"quantize": "int8"}])
def test_ranks_together_are_near_in_less_precision(options: dict[str, str]) -> None:
    known = reference("qwen3")
    whole = Sequences(load("qwen3", **options), 1, len(known.tokens))
    wanted = whole.feed([(0, 0, *cut(known, 0, len(known.tokens)))]).float()
    difference = (split_logits("qwen3", 2, **options).float() - wanted).abs().mean()
    assert difference < 0.05 * wanted.abs().mean()


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(OptionError, match=r"tensor_parallel_size=2 for a decoder of 4 and 1 heads.*values: 1"):
        split_logits("gemma 3", 2)


def test_only_wanted_rows_have_logits() -> None:
    known = reference("qwen3")
    logits = Sequences(load("qwen3"), 1, len(known.tokens)).feed([(0, 0, *cut(known, 0, 30))], wanted=[29, 4])
    torch.testing.assert_close(logits, known.logits[[29, 4]], atol=TOLERANCE, rtol=0)


def test_tokens_alone_need_no_embeddings() -> None:
    known, model = reference("gemma 3"), load("gemma 3")
    sequences = Sequences(model, 2, PAGE)
    own = PagedKeyValues(sequences.pool, sequences.tables[[0] * 5], torch.arange(5) + 1)
    with torch.inference_mode():
        alone, _ = model.decode(torch.tensor(known.tokens[:5]), own)
    torch.testing.assert_close(alone, known.logits[:5], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("options", "error"), [({"dtype": "bf16"}, 0.15), ({"quantize": "int8"}, 0.15)])
def test_lower_precision_is_near(name: str, options: dict[str, Any], error: float) -> None:
    """Root-mean-square error of the logits, as a share of their spread."""
    known = reference(name)
    logits = Sequences(load(name, **options), 1, len(known.tokens)).feed([(0, 0, *cut(known, 0, len(known.tokens)))])
    assert (logits.float() - known.logits).square().mean().sqrt() < error * known.logits.std()


@pytest.mark.parametrize("name", NAMES)
def test_bf16_logits_are_the_same_in_any_company(name: str) -> None:
    """To the last bit: a prompt in one pass, and position by position beside another sequence."""
    core = native.core()
    if core is None or not core.bf16_products():
        pytest.skip("this CPU, or what was compiled for it, has no products of bf16")
    known, model = reference(name), load(name, dtype="bf16")
    whole = Sequences(model, 1, len(known.tokens)).feed([(0, 0, *cut(known, 0, len(known.tokens)))])
    sequences, found = Sequences(model, 2, len(known.tokens)), []
    for at in range(len(known.tokens)):
        parts = [(0, at, *cut(known, at, at + 1))]
        if at % 3 == 0 and at + 3 <= len(known.tokens):
            parts.append((1, at, *cut(known, at, at + 3)))
        found.append(sequences.feed(parts)[0])
    assert torch.equal(torch.stack(found), whole)


# --- configs ----------------------------------------------------------------------------------------------


def test_old_configs_are_the_same_model() -> None:
    """Before transformers 5, rotary positions stood at the top, and Gemma had a pattern instead of a list."""
    llama = dict(reference("llama 3").settings)
    rope = dict(llama.pop("rope_parameters"))
    old = {**llama, "rope_theta": rope.pop("rope_theta"), "rope_scaling": {**rope, "type": rope.pop("rope_type")}}
    assert CausalConfig.of(old) == CausalConfig.of(reference("llama 3").settings)
    gemma = dict(reference("gemma 3").settings, layer_types=None)
    gemma.pop("rope_parameters")
    old = {
        **gemma,
        "sliding_window_pattern": 2,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    assert CausalConfig.of(old) == CausalConfig.of(reference("gemma 3").settings)
    assert CausalConfig.of({"model_type": "gemma3", "text_config": old}) == CausalConfig.of(old)


def test_what_a_config_leaves_out() -> None:
    llama = {
        name: value
        for name, value in reference("llama").settings.items()
        if name not in ("head_dim", "num_key_value_heads", "rope_parameters", "eos_token_id")
    }
    config = CausalConfig.of({**llama, "eos_token_id": [7, 9]})
    assert (config.head_dim, config.num_key_value_heads, config.eos_tokens) == (6, 4, (7, 9))
    assert config.rotary[FULL] == RotaryConfig()
    gemma = {k: v for k, v in reference("gemma 3").settings.items() if k not in ("layer_types", "rope_parameters")}
    config = CausalConfig.of({**gemma, "num_hidden_layers": 12})
    assert [i for i, kind in enumerate(config.layer_types) if kind == FULL] == [5, 11]
    assert (config.rotary[FULL].rope_theta, config.rotary[SLIDING].rope_theta) == (1e6, 1e4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_act": "relu"}, "relu"),
        ({"layer_types": [FULL]}, "layer_types"),
        ({"layer_types": [FULL, FULL, "chunked_attention"]}, "chunked_attention"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
)
def test_configs_of_other_models_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(WeightsCorrupt, match=named):
        CausalConfig.of({**reference("qwen3").settings, **changes})


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("model.layers.1.self_attn.k_proj.weight", None), ("model.layers.0.mlp.up_proj.weight", torch.zeros(39, 24))],
)
def test_tensors_that_do_not_fit_are_refused(name: str, tensor: Tensor | None) -> None:
    known = reference("qwen3")
    weights = {key: value for key, value in known.weights.items() if key != name}
    with pytest.raises(WeightsCorrupt, match=name):
        CausalLanguageModel(
            CausalConfig.of(known.settings),
            weights if tensor is None else {**weights, name: tensor},
            devices.make_device("cpu", "fp32"),
        )


def test_positions_are_bounded() -> None:
    model = load("qwen3", max_positions=50)
    assert (model.max_positions, model.angles[FULL][0].shape[0]) == (50, 50)
    assert load("qwen3").max_positions == 128
