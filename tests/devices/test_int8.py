"""Quantisation is the device's: what it holds, what its products come to, and that models need not know."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve import devices
from asr_serve import kernels as native
from asr_serve.devices.cpu import CpuDevice, PlainVocabulary
from asr_serve.devices.cuda import WidenedLinear, WidenedVocabulary
from asr_serve.devices.int8 import CpuInt8Linear, Int8Vocabulary, eight_bits_are_faster, outlying
from asr_serve.devices.interface import LayerNorm
from asr_serve.devices.tensor_parallel import TensorParallelGroup
from asr_serve.errors import OptionError
from asr_serve.models.asr.moonshine import moonshine
from asr_serve.models.registry import asr_card
from asr_serve.types import Int8Calibration

MODES = ("int8", "dynamic")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


@pytest.fixture(params=["native", "reference"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "native" and native.core() is None:
        pytest.skip("the native core is not built here")
    monkeypatch.setenv("ASR_SERVE_NATIVE", "1" if request.param == "native" else "0")
    return str(request.param)


def relative(came: Tensor, expected: Tensor) -> float:
    return float((came.float() - expected).norm() / expected.norm())


def test_an_unknown_quantization_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match="auto, none, int8, dynamic"):
        devices.make_device("cpu", "auto", "int4")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_linear_is_act_of_product_plus_bias(mode: str, dtype: str, kernels: str) -> None:
    device = devices.make_device("cpu", dtype, mode)
    weight, bias, x, more = torch.randn(96, 64), torch.randn(96), torch.randn(2, 7, 64), torch.randn(2, 7, 96)
    linear = device.linear(weight, bias)
    assert isinstance(linear, CpuInt8Linear)
    x, more = x.to(device.dtype), more.to(device.dtype)
    expected = F.linear(x.float(), weight, bias)
    most = 0.02 if mode == "int8" else 0.03
    assert linear(x).dtype == device.dtype
    assert relative(linear(x), expected) < most
    assert relative(linear(x, gelu=True), F.gelu(expected)) < most
    assert relative(linear(x, add=more), expected + more.float()) < most
    assert relative(linear(x.transpose(0, 1)), expected.transpose(0, 1)) < most


@pytest.mark.parametrize("mode", ["none", *MODES])
def test_a_norm_is_part_of_its_linear(mode: str) -> None:
    device = devices.make_device("cpu", "bf16", mode)
    weight, x = torch.randn(24, 32), torch.randn(5, 32) * 3 + 2
    scale, shift = torch.rand(32).bfloat16() + 0.5, torch.randn(32).bfloat16()
    linear = device.linear(weight, norm=LayerNorm(scale, shift))
    expected = F.gelu(F.linear(F.layer_norm(x, (32,), scale.float(), shift.float()), weight))
    assert relative(linear(x.bfloat16(), gelu=True), expected) < 0.03
    assert linear.nbytes > device.linear(weight).nbytes


@pytest.mark.parametrize("mode", MODES)
def test_a_linear_whose_dtype_a_model_names_keeps_it(mode: str) -> None:
    weight, x = torch.randn(32, 16), torch.randn(5, 16)
    linear = devices.make_device("cpu", "fp32", mode).linear(weight, dtype=torch.float32)
    torch.testing.assert_close(linear(x), F.linear(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["none", *MODES])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_vocabulary_looks_up_and_multiplies(mode: str, dtype: str, kernels: str) -> None:
    device = devices.make_device("cpu", dtype, mode)
    vectors, x, tokens = torch.randn(100, 48), torch.randn(3, 48), torch.tensor([99, 0, 17, 17])
    words = device.vocabulary(vectors)
    assert len(words) == 100
    assert isinstance(words, PlainVocabulary if mode == "none" else Int8Vocabulary)
    assert words.embed(tokens).dtype == device.dtype
    assert relative(words.embed(tokens), vectors[tokens]) < 0.02
    logits = words(x.to(device.dtype))
    assert relative(logits, x @ vectors.T) < 0.03
    # Near ties want the weight, or logits that are not rounded.
    assert (logits.dtype == torch.float32) if words.weight is None else (words.weight.dtype == logits.dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_outlier_dimension_does_not_coarsen_the_others(mode: str, dtype: str, kernels: str) -> None:
    device = devices.make_device("cpu", dtype, mode)
    vectors, x = torch.randn(100, 48), torch.randn(3, 48)
    far = vectors.clone()
    far[:, 7] = 60.0 + vectors[:, 7]
    plain, words, tokens = device.vocabulary(vectors), device.vocabulary(far), torch.arange(100)
    others = torch.arange(48) != 7
    off = relative(words.embed(tokens)[:, others], far[:, others])
    assert off < 1.5 * relative(plain.embed(tokens)[:, others], vectors[:, others])
    assert relative(words.embed(tokens)[:, 7], far[:, 7]) < 0.02
    x[:, 7] = 0.1  # what a model multiplies it with is small in turn
    assert relative(words(x.to(device.dtype)), x @ far.T) < 0.03
    assert words.nbytes == plain.nbytes + 48 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cuda_vocabulary_has_outliers_apart_too(dtype: torch.dtype) -> None:
    far, x, tokens = torch.randn(100, 48), torch.randn(3, 48), torch.arange(100)
    far[:, 7] += 60.0
    x[:, 7] = 0.1
    x = x.to(dtype)
    here = Int8Vocabulary(far, native.kernels(), 16, dtype)
    there = WidenedVocabulary(far, dtype)
    torch.testing.assert_close(there.embed(tokens), here.embed(tokens), rtol=0, atol=0)
    assert there(x).dtype == torch.float32
    assert relative(there(x), here(x)) < (1e-3 if dtype == torch.float32 else 0.01)
    assert there.nbytes == here.nbytes - 48 * 12  # those are filled up to whole blocks of 16 outputs


def test_vectors_without_outliers_are_rounded_as_they_are() -> None:
    """Those of a checkpoint that was in 8 bits before keep their very numbers."""
    assert outlying(torch.randn(500, 48)) is None


class Recording(CpuDevice):
    """Remembers what it handed out, and how much that would have been in 16 bits, held once."""

    def __init__(self, quantize: Any) -> None:
        super().__init__(torch.bfloat16, quantize)
        self.held = self.in_16_bits = 0

    def linear(self, weight: Tensor, bias: Tensor | None = None, *rest: Any, **more: Any) -> Any:
        return self.count(super().linear(weight, bias, *rest, **more), weight, bias)

    def vocabulary(self, weight: Tensor) -> Any:
        return self.count(super().vocabulary(weight), weight, None)

    def count(self, made: Any, weight: Tensor, bias: Tensor | None) -> Any:
        self.held += made.nbytes
        self.in_16_bits += 2 * (weight.numel() + (0 if bias is None else bias.numel()))
        return made


def checkpoint(config: moonshine.Config) -> dict[str, Tensor]:
    """Random weights of that size, by a checkpoint's names."""
    wide, inner, taps = config.hidden_size, config.intermediate_size, {1: 127, 2: 7, 3: 3}
    sizes: dict[str, tuple[int, ...]] = {
        "model.encoder.conv1.weight": (wide, 1, taps[1]),
        "model.encoder.conv2.weight": (2 * wide, wide, taps[2]),
        "model.encoder.conv3.weight": (wide, 2 * wide, taps[3]),
        "model.encoder.conv2.bias": (2 * wide,),
        "model.encoder.conv3.bias": (wide,),
        "model.decoder.embed_tokens.weight": (config.vocab_size, wide),
        **dict.fromkeys(("model.encoder.groupnorm.weight", "model.encoder.groupnorm.bias"), (wide,)),
        **dict.fromkeys(("model.encoder.layer_norm.weight", "model.decoder.norm.weight"), (wide,)),
    }
    for side, layers, norms, attentions, up in (
        ("encoder", config.encoder_num_hidden_layers, ("input", "post_attention"), ("self_attn",), inner),
        (
            "decoder",
            config.decoder_num_hidden_layers,
            ("input", "post_attention", "final"),
            ("self_attn", "encoder_attn"),
            2 * inner,
        ),
    ):
        for i in range(layers):
            at = f"model.{side}.layers.{i}"
            sizes |= {f"{at}.{norm}_layernorm.weight": (wide,) for norm in norms}
            sizes |= {f"{at}.{name}.{part}_proj.weight": (wide, wide) for name in attentions for part in "qkvo"}
            sizes |= {f"{at}.mlp.fc1.weight": (up, wide), f"{at}.mlp.fc1.bias": (up,)}
            sizes |= {f"{at}.mlp.fc2.weight": (wide, inner), f"{at}.mlp.fc2.bias": (wide,)}
    return {name: torch.randn(*size) / size[-1] ** 0.5 for name, size in sizes.items()}


def tensors_of(thing: Any, seen: set[int]) -> list[Tensor]:
    """Every tensor that a model's own objects hold, once."""
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, list | tuple):
        return [t for item in thing for t in tensors_of(item, seen)]
    ours = type(thing).__module__.startswith("asr_serve") and not isinstance(thing, CpuDevice)
    held = getattr(thing, "__dict__", {}) if ours else {}
    return [t for item in held.values() for t in tensors_of(item, seen)]


@pytest.mark.parametrize("mode", MODES)
def test_an_int8_model_takes_at_most_55_percent_of_the_bytes(mode: str) -> None:
    """Moonshine tiny as published, scales, biases and what stays in 16 bits included; held once."""
    if native.core() is None:
        pytest.skip("the native core is not built here")
    config = moonshine.Config()
    device = Recording(mode)
    model = moonshine.Model(config, checkpoint(config), device)
    assert device.in_16_bits > 50e6
    assert device.held <= 0.55 * device.in_16_bits
    beside = [t for t in tensors_of(model, set()) if t.numel() >= config.vocab_size * config.hidden_size]
    assert all(t.dtype == torch.int8 for t in beside), "a copy of the vocabulary beside its 8 bits"


@pytest.mark.parametrize(
    ("dots", "dtype", "bf16_matrices", "faster"),
    [
        (True, torch.bfloat16, False, True),  # AVX512-VNNI beside AVX512-BF16
        (True, torch.float32, False, True),
        (True, torch.bfloat16, True, False),  # AMX, Arm's BF16
        (True, torch.float32, True, True),
        (False, torch.bfloat16, False, False),
        (False, torch.float32, False, False),
    ],
)
def test_the_processor_alone_decides_whether_8_bits_are_faster(
    dots: bool, dtype: torch.dtype, bf16_matrices: bool, faster: bool
) -> None:
    kernels: Any = SimpleNamespace(int8_dots=lambda: dots)
    assert eight_bits_are_faster(kernels, dtype, bf16_matrices) == faster


@pytest.mark.parametrize("mode", ["auto", "dynamic"])
def test_engines_with_other_numbers_of_threads_choose_and_compute_the_same(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = torch.randn(96, 64), torch.randn(200, 64)
    made = []
    for threads in ("1", "2"):
        monkeypatch.setenv("ASR_SERVE_THREADS", threads)
        device = devices.make_device("cpu", quantize=mode, calibration=EVERYTHING)
        linear = device.linear(weight, layer=ENCODER_FC1)
        made.append((type(linear), device.describe()["products"], linear(x.to(device.dtype))))
    assert made[0][:2] == made[1][:2]
    torch.testing.assert_close(made[0][2], made[1][2], rtol=0, atol=0)


EVERYTHING = Int8Calibration()
ENCODER_FC1, DECODER_FC2 = "encoder.layers.0.mlp.fc1", "decoder.layers.0.mlp.fc2"


@pytest.fixture
def needs_fast_8_bits() -> None:
    if devices.make_device("cpu", quantize="auto", calibration=EVERYTHING).quantize == "none":
        pytest.skip("this CPU, or what was compiled for it, has no fast 8-bit products")


@pytest.mark.parametrize(
    ("options", "resolved"),
    [
        ({"calibration": EVERYTHING}, "auto"),
        ({}, "none"),  # nobody has measured what 8 bits do to that model
        ({"calibration": EVERYTHING, "dtype": "bf16"}, "none"),  # the user has chosen
        ({"calibration": EVERYTHING, "dtype": "fp32"}, "none"),
        ({"calibration": EVERYTHING, "group": TensorParallelGroup(0, 2)}, "none"),
    ],
)
@pytest.mark.usefixtures("needs_fast_8_bits")
def test_auto_is_for_calibrated_models_whose_dtype_nobody_chose(options: dict[str, Any], resolved: str) -> None:
    assert devices.make_device("cpu", quantize="auto", **options).quantize == resolved


@pytest.mark.usefixtures("needs_fast_8_bits")
def test_auto_quantizes_layers_that_a_calibration_can_name() -> None:
    weight = torch.randn(96, 64)
    device = devices.make_device("cpu", quantize="auto", calibration=EVERYTHING)
    chosen = device.linear(weight, layer=DECODER_FC2)
    assert isinstance(chosen, CpuInt8Linear)
    assert chosen.bits == 8
    assert (
        device.describe()["products"]
        == f"8-bit weights, 8-bit activations; {device.dtype_name} in the layers that need it"
    )
    # Layers without a name, those with a dtype of their own, and the first and last: the device's.
    assert not isinstance(device.linear(weight), CpuInt8Linear)
    assert not isinstance(device.linear(weight, dtype=torch.float32, layer=DECODER_FC2), CpuInt8Linear)
    assert isinstance(device.vocabulary(weight), PlainVocabulary)


@pytest.mark.parametrize("mode", ["none", "int8", "dynamic"])
def test_a_chosen_quantization_is_that_of_the_layers(mode: str) -> None:
    assert devices.make_device("cpu", "fp32", mode).quantize == mode


@pytest.mark.usefixtures("needs_fast_8_bits")
def test_auto_leaves_sensitive_layers_alone() -> None:
    kept = Int8Calibration(("encoder.layers.0.*", "*.fc2"))
    device, weight = devices.make_device("cpu", quantize="auto", calibration=kept), torch.randn(96, 64)
    for layer in (ENCODER_FC1, DECODER_FC2):
        assert not isinstance(device.linear(weight, layer=layer), CpuInt8Linear)
    assert isinstance(device.linear(weight, layer="encoder.layers.1.mlp.fc1"), CpuInt8Linear)


@pytest.mark.usefixtures("needs_fast_8_bits")
def test_an_auto_model_holds_less_and_a_row_is_the_same_in_any_batch() -> None:
    config = moonshine.Config(encoder_num_hidden_layers=1, decoder_num_hidden_layers=1, vocab_size=512)
    weights = checkpoint(config)
    plain = moonshine.Model(config, weights, devices.make_device("cpu"))
    device = devices.make_device("cpu", quantize="auto", calibration=EVERYTHING)
    model = moonshine.Model(config, weights, device)
    held, plainly = (sum(each.nbytes for each in linears_of(net)) for net in (model, plain))
    assert held < 0.7 * plainly
    layer, x = model.encoder[0], torch.randn(256, config.hidden_size).to(device.dtype)
    for linear in (layer.qkv, layer.up):
        whole = linear(x)
        for rows in (1, 7, 96, 100):
            torch.testing.assert_close(linear(x[:rows]), whole[:rows], rtol=0, atol=0)
    clip = torch.randn(16_000) * 0.1
    first, again = model.encode([clip])[0], model.encode([clip])[0]
    torch.testing.assert_close(first, again, rtol=0, atol=0)


def linears_of(model: moonshine.Model) -> list[Any]:
    owners = [*model.encoder, *model.decoder, model]
    found = {
        id(part): part for owner in owners for part in vars(owner).values() if type(part).__name__.endswith("Linear")
    }
    return [*found.values()]


def test_evaluations_of_models_that_auto_leaves_alone_are_those_of_none() -> None:
    calibrated, other = asr_card("moonshine-tiny-en"), asr_card("moonshine-base-en")
    assert [calibrated.quantization(mode) for mode in ("auto", "none", "int8")] == ["auto", "none", "int8"]
    assert [other.quantization(mode) for mode in ("auto", "none", "int8")] == ["none", "none", "int8"]


def test_patterns_on_cards_are_of_layers_that_models_have() -> None:
    """A pattern of no layer would keep nothing, silently."""

    class Named(CpuDevice):
        def linear(self, *args: Any, layer: str | None = None, **more: Any) -> Any:
            names.append(layer or "")
            return super().linear(*args, **more)

    names: list[str] = []
    moonshine.Model(moonshine.Config(vocab_size=512), checkpoint(moonshine.Config(vocab_size=512)), Named())
    assert {"encoder.layers.5.mlp.fc2", "decoder.layers.0.encoder_attn.k_proj", "decoder.layers.5.mlp.fc1"} <= {*names}
    for card in moonshine.CARDS:
        for pattern in card.int8.kept if card.int8 else ():
            assert fnmatch.filter(names, pattern), f"{card.name}: {pattern}"


def test_without_int8_instructions_auto_quantizes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASR_SERVE_NATIVE", "0")
    device = devices.make_device("cpu", quantize="auto", calibration=EVERYTHING)
    assert not isinstance(device.linear(torch.randn(96, 64), layer=ENCODER_FC1), CpuInt8Linear)
    assert device.quantize == "none"
    assert device.describe()["products"] == device.dtype_name


def test_without_int8_instructions_nothing_is_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASR_SERVE_NATIVE", "0")
    linear = devices.make_device("cpu", "fp32", "dynamic").linear(torch.randn(96, 64))
    assert isinstance(linear, CpuInt8Linear)
    assert linear.bits == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_cuda_multiplies_with_on_the_cpu_s_tensors(dtype: torch.dtype) -> None:
    """No CUDA device is needed for its arithmetic: 8-bit weights widened slab by slab."""
    weight, bias, x, more = torch.randn(96, 64), torch.randn(96), torch.randn(7, 64), torch.randn(7, 96)
    linear = WidenedLinear(weight, bias, dtype)
    x, more = x.to(dtype), more.to(dtype)
    expected = F.linear(x.float(), weight, bias)
    assert linear(x).dtype == dtype
    assert relative(linear(x), expected) < 0.02
    assert relative(linear(x, gelu=True), F.gelu(expected)) < 0.02
    assert relative(linear(x, add=more), expected + more.float()) < 0.02
    words = WidenedVocabulary(weight, dtype)
    assert relative(words.embed(torch.tensor([5, 95])), weight[[5, 95]]) < 0.02
    assert words(x).dtype == torch.float32
    assert linear.nbytes < 0.75 * 2 * weight.numel()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cuda_products_are_those_of_the_cpu() -> None:
    weight, x = torch.randn(96, 64), torch.randn(7, 64)
    device = devices.make_device("cuda", "fp32", "int8")
    came = device.linear(weight)(x.cuda()).cpu()
    torch.testing.assert_close(came, devices.make_device("cpu", "fp32", "int8").linear(weight)(x), rtol=1e-3, atol=1e-3)
    with pytest.raises(OptionError, match="none or int8"):
        devices.make_device("cuda", "fp32", "dynamic")


@pytest.mark.slow
def test_int8_has_about_the_word_errors_of_bf16(packaged_speech: Path, speech_data: Path) -> None:
    """On real speech, error rates over 50 clips: weight-only is bf16's to a few words, dynamic to a dozen.

    Bounds in percent of 1,253 words; where AMX adds bf16 up in another order, dynamic is ten words away.
    """
    import asr_serve
    from asr_serve.config import EngineConfig
    from asr_serve_tools.evaluate.wer import normalize, wer

    folder = speech_data / "librispeech-test-other"
    if not (folder / "transcripts.tsv").is_file():
        pytest.skip(f"no librispeech-test-other in {speech_data}")
    pairs = [line.split("\t") for line in (folder / "transcripts.tsv").read_text().splitlines()]
    paths, said = [str(folder / path) for path, _ in pairs], [normalize(text) for _, text in pairs]
    rates = {}
    for mode in ("none", *MODES):
        with asr_serve.load(engine=EngineConfig(quantize=mode), turn_model="none") as model:
            assert model.describe()["quantize"] == mode
            rates[mode] = wer(said, [normalize(t.text) for t in model.transcribe(paths, vad=False)]).percent
    assert abs(rates["int8"] - rates["none"]) < 0.35
    assert abs(rates["dynamic"] - rates["none"]) < 1.2
