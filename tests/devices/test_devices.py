"""Devices: what is chosen, what is refused, and that attention and products mean the same in every implementation."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from asr_serve import devices
from asr_serve import kernels as native
from asr_serve.config import EngineConfig
from asr_serve.devices.cpu import CpuDevice, PackedLinear, PlainLinear, bf16_supported, packed_dtypes
from asr_serve.devices.cuda import CudaDevice, Float32LogitsVocabulary, WidenedVocabulary, _flash_attention
from asr_serve.engine.stats import EngineStats
from asr_serve.engine.turn_runner import LoadedTurnModel, TurnRunner
from asr_serve.errors import OptionError
from asr_serve.kernels import reference
from asr_serve.models.packing import pack_clips


def plain_attention(qkv: torch.Tensor, offset: int, frames: int) -> torch.Tensor:
    q, k, v = (qkv[offset : offset + frames, i].float().transpose(0, 1) for i in range(3))
    weights = torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, dim=-1)
    return (weights @ v).transpose(0, 1).reshape(frames, -1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("gpu", "auto"), "cuda"),
        (("cpu", "fp16"), "bf16"),
        (("cuda:x9", "auto"), "cuda"),
        (("tpu", "auto"), "auto, cpu, cuda"),
    ],
)
def test_an_unknown_device_or_dtype_is_refused_by_name(arguments: tuple[str, str], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        devices.make_device(*arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_gpu_is_an_error_never_a_silent_cpu() -> None:
    with pytest.raises(OptionError, match="no CUDA device"):
        devices.make_device("cuda")


def test_auto_takes_bf16_only_where_the_cpu_multiplies_it() -> None:
    chosen = CpuDevice()
    assert chosen.dtype_name == ("bf16" if bf16_supported() else "fp32")
    assert chosen.describe()["dtype"] == chosen.dtype_name


@pytest.mark.parametrize(
    ("flags", "dtype", "warned"),
    [
        ({"avx2"}, torch.bfloat16, True),
        ({"avx2"}, torch.float32, False),
        ({"avx2"}, None, False),
        ({"avx512_bf16"}, torch.bfloat16, False),
        (set(), torch.bfloat16, False),
    ],
    ids=["emulated", "fp32", "auto", "multiplied", "unknown"],
)
def test_bf16_that_the_cpu_emulates_is_warned_of(
    flags: set[str], dtype: torch.dtype | None, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setattr("asr_serve.devices.cpu.cpu_flags", lambda: frozenset(flags))
    CpuDevice(dtype)
    assert ("dtype=auto chooses" in caplog.text) == warned


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kernels", ["native", "products", "reference"])
@pytest.mark.parametrize("half", [0, 5])
def test_attention_of_packed_clips_is_each_clip_alone(
    dtype: str, kernels: str, half: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`products`: of oneDNN, as on a CPU with matrix tiles."""
    if kernels != "reference" and native.core() is None:
        pytest.skip("the native core is not built here")
    monkeypatch.setenv("ASR_SERVE_NATIVE", "0" if kernels == "reference" else "1")
    device = devices.make_device("cpu", dtype)
    if kernels == "products":
        device.fused_attention = False
    torch.manual_seed(0)
    packing = pack_clips([5, 70, 1, 33], 64)
    qkv = torch.randn(packing.total, 3, 4, 12).to(device.dtype)
    angles = torch.rand(70, half) * 6
    rotated = qkv.float().clone()
    reference.rope(rotated, packing.positions(qkv.device), angles.cos(), angles.sin())
    out = device.attention(qkv, packing, (angles.cos(), angles.sin()) if half else None)
    assert out.shape == (packing.total, 48)
    assert out.isfinite().all()
    for offset, frames in zip(packing.offsets, packing.frames, strict=True):
        expected = plain_attention(rotated, offset, frames)
        torch.testing.assert_close(
            out[offset : offset + frames].float(),
            expected,
            atol=1e-5 if dtype == "fp32" else 3e-2,
            rtol=1e-5 if dtype == "fp32" else 3e-2,
        )


@pytest.mark.parametrize("kind", [PackedLinear, PlainLinear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_act_of_product_plus_bias(kind: type, dtype: torch.dtype) -> None:
    if kind is PackedLinear and dtype not in packed_dtypes():
        pytest.skip("this CPU, or what was compiled for it, has no packed product of this type")
    torch.manual_seed(1)
    weight, bias, x, more = torch.randn(24, 16), torch.randn(24), torch.randn(7, 16), torch.randn(7, 24)
    linear = kind(weight.to(dtype), bias.to(dtype))
    expected = F.linear(x, weight, bias)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.15, "rtol": 3e-2}
    x, more = x.to(dtype), more.to(dtype)
    torch.testing.assert_close(linear(x).float(), expected, **close)
    torch.testing.assert_close(linear(x, gelu=True).float(), F.gelu(expected), **close)
    torch.testing.assert_close(linear(x, add=more).float(), expected + more.float(), **close)


def test_steps_are_padded_to_few_sizes() -> None:
    device = devices.make_device("cpu", "fp32")
    sizes = {device.padded_rows(live) for live in range(1, 65)}
    assert all(device.padded_rows(live) >= live for live in range(1, 65))
    assert len(sizes) <= 12


@pytest.mark.parametrize("kind", [CpuDevice, CudaDevice])
def test_a_turn_model_answers_on_one_thread(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another thread takes more before it has computed anything."""
    before = torch.get_num_threads()
    device = object.__new__(kind)  # what it does to threads needs no device to be there
    device.threads, device.torch_device = 8, torch.device("cuda", 0)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    found: list[int] = []

    def finished(pcm: np.ndarray) -> float:
        found.append(torch.get_num_threads())
        return 0.5

    torch.set_num_threads(4)
    turns = TurnRunner(LoadedTurnModel(None, SimpleNamespace(finished=finished)), device, EngineStats())  # type: ignore[arg-type]
    try:
        answers: list[Future[float]] = [Future() for _ in range(4)]
        for answer in answers:
            turns.submit(np.zeros(1, np.float32), answer)
        assert [answer.result(60) for answer in answers] == [0.5] * 4
        assert found == [1] * 4
        assert torch.get_num_threads() == 4, "it is the loop's"
    finally:
        turns.close()
        torch.set_num_threads(before)


@pytest.mark.parametrize("head_dim", [36, 72])
@pytest.mark.parametrize("causal", [False, True])
def test_operators_of_a_gpu_take_these_arguments(head_dim: int, causal: bool) -> None:
    """On tensors without values, which any machine has: shapes and types follow from those of the arguments."""
    packing = pack_clips([100, 37], 256)
    qkv = torch.empty(packing.total, 3, 8, head_dim, dtype=torch.bfloat16, device="meta")
    mixed = _flash_attention(qkv, packing, 0.1 if causal else None, causal)
    assert (mixed.shape, mixed.dtype) == ((packing.total, 8 * head_dim), torch.bfloat16)
    vocabulary = Float32LogitsVocabulary(torch.empty(1_000, head_dim, dtype=torch.bfloat16, device="meta"))
    logits = vocabulary(torch.empty(3, head_dim, dtype=torch.bfloat16, device="meta"))
    assert (logits.shape, logits.dtype) == ((3, 1_000), torch.float32)


@pytest.mark.parametrize(("frames", "boundaries"), [([3, 5], [0, 3, 8, 16]), ([16], [0, 16]), ([9, 7], [0, 9, 16])])
def test_padding_is_a_clip_of_its_own(frames: list[int], boundaries: list[int]) -> None:
    assert pack_clips(frames, 16).boundaries(torch.device("cpu")).tolist() == boundaries


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("head_dim", [36, 72])
def test_flash_attention_equals_the_reference(head_dim: int) -> None:
    packing = pack_clips([100, 37], 256)
    qkv = torch.randn(packing.total, 3, 8, head_dim, device="cuda").to(torch.bfloat16)
    for causal in (False, True):
        ours = _flash_attention(qkv, packing, None, causal)
        for offset, count in zip(packing.offsets, packing.frames, strict=True):
            q, k, v = qkv[offset : offset + count].float().permute(1, 2, 0, 3)
            theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
            assert torch.allclose(ours[offset : offset + count].float(), theirs.transpose(0, 1).flatten(1), atol=2e-2)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_logits_of_16_bit_weights_are_float32() -> None:
    weight = torch.randn(1_000, 64, device="cuda")
    x = torch.randn(3, 64, device="cuda").to(torch.bfloat16)
    ours = Float32LogitsVocabulary(weight.to(torch.bfloat16))(x)
    assert torch.allclose(ours, x.float() @ weight.to(torch.bfloat16).float().t(), atol=1e-3)
    widened = WidenedVocabulary(weight, torch.bfloat16)(x)
    assert torch.corrcoef(torch.stack([widened.flatten(), ours.flatten()]))[0, 1] > 0.999


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cuda_graphs_give_the_words_of_the_cpu(packaged_speech: object) -> None:
    import asr_serve

    clip = f"{packaged_speech}/two_cities.wav"
    with (
        asr_serve.load(device="cpu", dtype="fp32", engine=EngineConfig(prefix_bytes=0)) as cpu,
        asr_serve.load(device="cuda", dtype="fp32", engine=EngineConfig(prefix_bytes=0)) as gpu,
    ):
        assert [t.text for t in gpu.transcribe([clip] * 5)] == [t.text for t in cpu.transcribe([clip] * 5)]
