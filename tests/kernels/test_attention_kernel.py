"""Attention within clips: the native kernel equals its reference, and a clip is the same in any batch."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from compiled_kernels import compiled
from test_kernels import NAN
from torch import Tensor
from torch.nn import functional as F

from asr_serve import kernels as native
from asr_serve.kernels import attention_reference

Angles = tuple[Tensor, Tensor] | tuple[None, None]


BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(params=[F32, BF16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    made: torch.dtype = request.param
    return made


@pytest.fixture
def core(dtype: torch.dtype) -> ModuleType:
    built = native.core()
    if built is None:
        pytest.skip("the native core is not built")
    if dtype == BF16 and not built.has_attend_clips():
        pytest.skip("this CPU, or what was compiled for it, has no products of bf16")
    return built


def angles_of(positions: int, half: int) -> Angles:
    angles = torch.rand(positions, half) * 6
    return (angles.cos(), angles.sin()) if half else (None, None)


def made(frames: list[int], heads: int, head_dim: int, padding: int = 0, dtype: torch.dtype = F32) -> Tensor:
    """Frames of clips, and NaN after them."""
    qkv = torch.full((sum(frames) + padding, 3, heads, head_dim), NAN)
    qkv[: sum(frames)] = torch.randn(sum(frames), 3, heads, head_dim)
    return qkv.to(dtype)


def test_the_reference_rotates_and_attends_as_torch_does() -> None:
    frames, head_dim = [3, 17], 12
    qkv, (cos, sin) = made(frames, 2, head_dim, 4), angles_of(17, 4)
    assert cos is not None
    assert sin is not None
    out = torch.full((len(qkv), 2 * head_dim), NAN)
    attention_reference.attend_clips(qkv, frames, cos, sin, 0.3, out)
    turned = torch.complex(cos, sin)
    for offset, count in ((0, 3), (3, 17)):
        q, k, v = qkv[offset : offset + count].unbind(1)
        q, k = (
            torch.cat([*rotated(x[..., :4], x[..., 4:8], turned[:count, None]), x[..., 8:]], dim=-1) for x in (q, k)
        )
        expected = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), scale=0.3)
        torch.testing.assert_close(out[offset : offset + count], expected.transpose(0, 1).flatten(1))
    assert torch.equal(out[20:], torch.zeros(4, 2 * head_dim))


def rotated(x: Tensor, y: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    z = torch.complex(x, y) * turned
    return z.real, z.imag


@pytest.mark.parametrize(("head_dim", "half"), [(36, 16), (52, 16), (64, 32), (65, 0), (128, 20), (1, 0), (500, 7)])
def test_it_equals_its_reference(core: ModuleType, dtype: torch.dtype, head_dim: int, half: int) -> None:
    frames = [1, 6, 70, 0, 33, 16, 600]
    qkv, angles = made(frames, 2, head_dim, padding=9, dtype=dtype), angles_of(600, half)
    ours = torch.full((len(qkv), 2 * head_dim), NAN, dtype=dtype)
    theirs, before = torch.full((len(qkv), 2 * head_dim), NAN), qkv.clone()
    core.attend_clips(qkv, frames, *angles, head_dim**-0.5, ours)
    attention_reference.attend_clips(qkv.float(), frames, *angles, head_dim**-0.5, theirs)
    assert torch.equal(qkv.nan_to_num(), before.nan_to_num())
    if dtype == F32:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
    else:  # rotated queries, keys and weights are rounded to 8 bits before they are multiplied
        torch.testing.assert_close(ours.float(), theirs, rtol=2**-7, atol=2**-5)
        assert (ours.float() - theirs).abs().mean() < 2**-9


@pytest.mark.parametrize("threads", [1, 3])
def test_a_clip_is_the_same_in_any_batch(core: ModuleType, dtype: torch.dtype, threads: int) -> None:
    frames, heads, head_dim = [40, 501, 1, 97], 3, 36
    qkv, angles = made(frames, heads, head_dim, padding=3, dtype=dtype), angles_of(501, 16)
    together = torch.full((len(qkv), heads * head_dim), NAN, dtype=dtype)
    core.set_threads(threads)
    try:
        core.attend_clips(qkv, frames, *angles, 0.2, together)
    finally:
        core.set_threads(1)
    offset = 0
    for count in frames:
        alone = torch.empty(count, heads * head_dim, dtype=dtype)
        core.attend_clips(qkv[offset : offset + count].contiguous(), [count], *angles, 0.2, alone)
        assert torch.equal(together[offset : offset + count], alone)
        offset += count


@pytest.mark.parametrize("level", [-3e4, 3e4])
def test_scores_of_any_size_make_weights(core: ModuleType, dtype: torch.dtype, level: float) -> None:
    """Far below the zeros of the last block's unused keys, and far above them."""
    qkv = made([21], 1, 16, dtype=dtype)
    qkv[:, 0, :, 0], qkv[:, 1, :, 0] = level, 1.0
    ours, theirs = torch.empty(21, 16, dtype=dtype), torch.empty(21, 16)
    core.attend_clips(qkv, [21], None, None, 0.25, ours)
    attention_reference.attend_clips(qkv.float(), [21], None, None, 0.25, theirs)
    # float32 has steps of 2e-3 at scores of 3e4, bf16 of 128.
    tolerance = {"rtol": 1e-2, "atol": 5e-3} if dtype == F32 else {"rtol": 2**-6, "atol": 2**-4}
    torch.testing.assert_close(ours.float(), theirs, **tolerance)


@pytest.mark.parametrize("dtype", [F32], indirect=True)
def test_the_largest_score_keeps_its_weight_however_large(core: ModuleType) -> None:
    """Without a rounding of the largest score left over, which would be far above zero here."""
    qkv, ours, theirs = made([21], 1, 16), torch.empty(21, 16), torch.empty(21, 16)
    qkv[:, 0, :, 0], qkv[:, 1, :, 0] = 1e15, 1.0
    core.attend_clips(qkv, [21], None, None, 0.25, ours)
    attention_reference.attend_clips(qkv, [21], None, None, 0.25, theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=5e-3)


def test_nan_stays_in_its_clip(core: ModuleType, dtype: torch.dtype) -> None:
    qkv, out = made([20, 20], 2, 8, dtype=dtype), torch.empty(40, 16, dtype=dtype)
    qkv[3, 1, 0, 0] = NAN
    core.attend_clips(qkv, [20, 20], None, None, 1.0, out)
    assert out[:20, :8].isnan().all()
    assert out[:20, 8:].isfinite().all()
    assert out[20:].isfinite().all()


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512"])
def test_every_instruction_set_attends_as_the_reference(isa: str) -> None:
    frames, angles = [7, 130, 18], angles_of(130, 16)
    qkv = made(frames, 4, 36)
    ours, theirs = (torch.empty(len(qkv), 4 * 36) for _ in range(2))
    with compiled(isa) as built:
        built.attend_clips(qkv, frames, *angles, 0.2, ours)
    attention_reference.attend_clips(qkv, frames, *angles, 0.2, theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


QKV, OUT = torch.ones(8, 3, 2, 4), torch.empty(8, 8)
COS = torch.ones(8, 2)


@pytest.mark.parametrize(
    ("qkv", "frames", "cos", "sin", "out"),
    [
        (QKV.bfloat16(), [8], None, None, OUT),
        (QKV, [8], None, None, OUT.bfloat16()),
        (QKV.double(), [8], None, None, OUT.double()),
        (QKV, [8], None, None, OUT[:7]),
        (QKV, [5, 4], None, None, OUT),
        (QKV, [9, -1], None, None, OUT),
        (QKV, [8], COS, None, OUT),
        (QKV, [8], COS, COS[:, :1].contiguous(), OUT),
        (QKV, [8], COS[:7], COS[:7], OUT),
        (QKV, [8], torch.ones(8, 3), torch.ones(8, 3), OUT),
        (QKV[:, :2].contiguous(), [8], None, None, OUT),
        (QKV[:, :, 0], [8], None, None, OUT),
        (QKV.transpose(0, 3), [1], None, None, OUT),
        (torch.ones(1, 3, 1, 513), [1], None, None, torch.empty(1, 513)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    qkv: Tensor, frames: list[int], cos: Tensor | None, sin: Tensor | None, out: Tensor
) -> None:
    built = native.core()
    if built is None:
        pytest.skip("the native core is not built")
    with pytest.raises(ValueError):
        built.attend_clips(qkv, frames, cos, sin, 1.0, out)
