"""Products of 8-bit weights: every instruction set this CPU has equals the reference, which is what it says."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve import kernels as native
from asr_serve.kernels import int8_reference, reference

SHAPES = [(288, 864, 7), (30, 50, 3), (1_153, 17, 13), (600, 33, 1), (288, 288, 100), (1, 1, 1), (3, 16, 200)]
"""Inputs, outputs, rows: round ones, none round, sums of more than 512 inputs, more rows than one block."""
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]


@pytest.fixture(params=["avx512_vnni", "avx512", "avx_vnni", "avx2", "neon_dot", "neon", "generic"])
def core(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The compiled module on one instruction set."""
    built = native.core()
    if built is None:
        pytest.skip("the native core is not built or not wanted: pip install -e . builds it")
    if request.param not in built.int8_isas():
        pytest.skip(f"this CPU, or what was compiled for it, has no {request.param}")
    built.choose_int8_isa(request.param)
    assert built.int8_isa() == request.param
    yield built
    built.choose_int8_isa("auto")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(20_27)


class Made:
    """A quantised weight, and x with a row of large numbers and a row of zeros."""

    def __init__(self, inputs: int, outputs: int, rows: int, dtype: torch.dtype = torch.float32) -> None:
        self.integers, self.scale = int8_reference.quantise(torch.randn(outputs, inputs))
        self.packed, self.bias, self.inputs = int8_reference.pack(self.integers), torch.randn(outputs), inputs
        self.x = torch.randn(rows, inputs)
        self.x[0] *= 1_000
        self.x[rows // 2 + 1 :][-1:] = 0
        self.x, self.add = self.x.to(dtype), torch.randn(rows, outputs).to(dtype)

    def by(self, kernels: ModuleType) -> object:
        return kernels.Int8Linear(self.packed, self.scale, self.bias, self.inputs)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtypes", DTYPES, ids=["fp32", "bf16", "bf16-fp32"])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("gelu", [False, True])
def test_every_instruction_set_equals_the_reference(core, shape, dtypes, bits, gelu):
    dtype, out_dtype = dtypes
    made, results = Made(*shape, dtype), []
    for kernels in (core, reference):
        out = torch.full((shape[2], shape[1]), torch.nan, dtype=out_dtype)
        made.by(kernels)(made.x, out, made.add, gelu, bits)
        results.append(out.float())
    # The integers are the same; what is left is the order of a few float operations, and one rounding of bf16.
    size = (made.x.float().norm(dim=1, keepdim=True) * (made.integers * made.scale[:, None]).norm(dim=1)).max()
    rtol, atol = (2e-6, 1e-6 * float(size)) if out_dtype == torch.float32 else (2**-7, 1e-5 * float(size))
    torch.testing.assert_close(*results, rtol=rtol, atol=max(atol, 1e-5))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)])
@pytest.mark.parametrize(("inputs", "shifted"), [(288, False), (30, True), (1_152, True)])
def test_a_norm_before_the_product_is_that_of_torch(core, inputs, shifted, dtypes, bits):
    """Rows far from zero too, and one whose values are all the same."""
    made, results = Made(inputs, 50, 100, dtypes[0]), []
    made.x[:50] += 20
    made.x[3] = 7
    norm = torch.rand(inputs) + 0.5, torch.randn(inputs) if shifted else None, 1e-5
    for kernels in (core, reference):
        product = kernels.Int8Linear(made.packed, made.scale, made.bias, inputs, *norm)
        out = torch.full((100, 50), torch.nan, dtype=dtypes[1])
        product(made.x, out, made.add, True, bits)
        results.append(out.float())
    # The norms differ in their last digits, so that numbers halfway between two integers may become either.
    step = 2 * float(made.scale.max()) * 127 * 8 / (127 if bits == 8 else 32_767)
    rtol, atol = 2**-7 if dtypes[1] == torch.bfloat16 else 1e-5, step + 3e-4 * inputs**0.5
    torch.testing.assert_close(*results, rtol=rtol, atol=atol)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("normed", [False, True])
def test_a_row_is_the_same_in_any_batch(core, bits, normed):
    """Bit for bit, with any neighbours, any number of them and any number of threads."""
    made = Made(288, 96, 131)
    norm = (torch.rand(288), None, 1e-5) if normed else ()
    product, whole = core.Int8Linear(made.packed, made.scale, made.bias, 288, *norm), torch.empty(131, 96)
    product(made.x, whole, None, False, bits)
    try:
        core.set_threads(2)
        for first, last in ((0, 1), (3, 10), (64, 131)):
            part = torch.empty(last - first, 96)
            product(made.x[first:last].contiguous(), part, None, False, bits)
            assert torch.equal(part, whole[first:last])
    finally:
        core.set_threads(1)


@pytest.mark.parametrize("bits", [8, 16])
def test_the_largest_sums_fit(core, bits):
    """Every weight 127 and every activation the largest: 32-bit sums must not wrap."""
    inputs = 5_120
    product = core.Int8Linear(
        int8_reference.pack(torch.full((17, inputs), 127, dtype=torch.int8)), torch.ones(17), None, inputs
    )
    x, out = torch.ones(2, inputs), torch.empty(2, 17)
    x[1] = -1
    product(x, out, None, False, bits)
    expected = torch.tensor([[127.0 * inputs], [-127.0 * inputs]]).expand(2, 17)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_stay_in_their_row(core, bits, bad):
    made = Made(40, 20, 4)
    made.x[1, 7] = bad
    for kernels in (core, reference):
        out = torch.zeros(4, 20)
        made.by(kernels)(made.x, out, None, False, bits)
        assert out[1].isnan().all()
        assert out[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize(("bits", "most"), [(16, 0.012), (8, 0.03)])
def test_distance_from_the_float_product(bits, most):
    """The relative error over random weights and rows: of 8-bit weights alone, and of 8-bit rows as well."""
    weight, x = torch.randn(864, 288), torch.randn(64, 288)
    integers, scale = int8_reference.quantise(weight)
    out, expected = torch.empty(64, 864), F.linear(x, weight)
    reference.Int8Linear(int8_reference.pack(integers), scale, None, 288)(x, out, None, False, bits)
    assert float((out - expected).norm() / expected.norm()) < most
    # Against the weights as they are held, 16-bit rows lose next to nothing: less than bf16 would.
    held, exact = F.linear(x, integers * scale[:, None]), 1e-4 if bits == 16 else most
    assert float((out - held).norm() / held.norm()) < exact


def test_quantise_is_symmetric_and_off_by_half_a_step():
    weight = torch.randn(50, 70)
    weight[3] = 0
    integers, scale = int8_reference.quantise(weight)
    assert integers.dtype == torch.int8
    assert int(integers.abs().max()) == 127
    assert int(integers[3].abs().max()) == 0
    assert ((integers * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all()


@pytest.mark.parametrize("highest", [1, 20, 63, 64, 90, 127])
def test_quantised_weights_are_kept_exactly(highest):
    """A step of its own in each row, as in a checkpoint that another quantiser made."""
    levels = torch.randint(-highest, highest + 1, (40, 96))
    levels[:, 5] = highest
    weight = levels * torch.rand(40, 1)
    integers, scale = int8_reference.quantise(weight)
    torch.testing.assert_close(integers * scale[:, None], weight, rtol=2e-6, atol=0)


def test_packed_rows_are_unpacked_exactly():
    integers = torch.randint(-127, 128, (37, 30), dtype=torch.int8)
    rows = torch.tensor([0, 36, 16, 15, 15])
    assert torch.equal(int8_reference.rows_of(int8_reference.pack(integers), 30, rows), integers[rows])


@pytest.mark.parametrize(
    "case", ["x too narrow", "out too narrow", "rows", "bits", "strided", "add dtype", "integers", "bf16 from fp32"]
)
def test_invalid_shapes_are_refused(core, case):
    made = Made(30, 50, 3)
    product, out = made.by(core), torch.empty(3, 50)
    arguments: dict[str, tuple[Tensor, Tensor, Tensor | None, bool, int]] = {
        "x too narrow": (made.x[:, :20].contiguous(), out, None, False, 8),
        "out too narrow": (made.x, out[:, :40].contiguous(), None, False, 8),
        "rows": (made.x, torch.empty(4, 50), None, False, 8),
        "bits": (made.x, out, None, False, 4),
        "strided": (torch.empty(30, 3).T, out, None, False, 8),
        "add dtype": (made.x, out, made.add.bfloat16(), False, 8),
        "integers": (made.x.to(torch.int32), out, None, False, 8),
        "bf16 from fp32": (made.x, out.bfloat16(), None, False, 8),
    }
    with pytest.raises(ValueError):
        product(*arguments[case])


def test_a_weight_that_is_packed_otherwise_is_refused(core):
    made = Made(30, 50, 3)
    with pytest.raises(ValueError):
        core.Int8Linear(made.packed, made.scale, made.bias, 40)
    with pytest.raises(ValueError):
        core.Int8Linear(made.packed, made.scale[:10].contiguous(), None, 30)
    for norm in ((torch.ones(29), None), (torch.ones(30), torch.ones(29)), (None, torch.ones(30))):
        with pytest.raises(ValueError):
            core.Int8Linear(made.packed, made.scale, None, 30, *norm, 1e-5)


def test_float_logits_are_picked_from_without_a_weight(core):
    logits = torch.randn(5, 96)
    for kernels in (core, reference):
        tokens, logprobs = torch.empty(5, dtype=torch.int64), torch.empty(5)
        kernels.pick(logits, torch.randn(5, 8).bfloat16(), None, tokens, logprobs)
        assert torch.equal(tokens, logits.argmax(-1))
        expected = torch.log_softmax(logits, -1).amax(-1)
        torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
