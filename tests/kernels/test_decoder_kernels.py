"""Kernels of causal language models: each equals its reference, and a row is the same in any company."""

from __future__ import annotations

import pytest
import torch
from test_kernels import HEADS, LAYERS, NAN, expect_close, filled, normal, poisoned_pool, tables_of
from torch import Tensor

from asr_serve import kernels as native
from asr_serve.kernels import bf16_reference, reference

EPS = 1e-6


@pytest.mark.parametrize(("rows", "width"), [(1, 24), (3, 1_024), (70, 640), (2, 1)])
def test_rms_norm(core, dtype, rows, width):
    x, weight = normal(rows, width, dtype=dtype), torch.randn(width)
    ours, theirs = torch.empty_like(x), torch.empty_like(x)
    core.rms_norm(x, weight, ours, EPS)
    reference.rms_norm(x, weight, theirs, EPS)
    expect_close(ours, theirs, dtype, fp32=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (9, 96), (80, 640)])
def test_gate(core, dtype, rows, width, activation):
    both = normal(rows, 2 * width, dtype=dtype) * 8
    both[0, 0], both[-1, width - 1] = -100, 100
    ours, theirs = (both.new_empty(rows, width) for _ in range(2))
    core.gate(both, ours, activation)
    reference.gate(both, theirs, activation)
    # Of large negative numbers torch's gelu is 0, and its exact value is not.
    expect_close(ours, theirs, dtype, fp32=5e-6)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("head_dim", "group", "rows"), [(8, 1, 3), (20, 2, 5), (128, 2, 9), (256, 4, 6)])
def test_rotate_append(core, dtype, head_dim, group, rows, normed):
    lengths = torch.randint(1, 33, (rows,)).tolist()
    tables, heads = tables_of(lengths), group * HEADS
    qkv, angles = normal(rows, (heads + 2 * HEADS) * head_dim, dtype=dtype), torch.rand(64, head_dim // 2) * 6
    norms = torch.randn(heads + HEADS, head_dim) if normed else None
    made = []
    for kernels in (core, reference):
        pool, turned = poisoned_pool(head_dim, dtype), qkv.clone()
        positions = torch.tensor(lengths) - 1
        kernels.rotate_append(pool, 1, turned, norms, EPS, angles.cos(), angles.sin(), positions, tables)
        made.append((turned[:, : heads * head_dim], pool))
    (ours, our_pool), (theirs, their_pool) = made
    expect_close(ours, theirs, dtype, fp32=2e-5)
    assert torch.equal(our_pool.isnan(), their_pool.isnan())
    expect_close(our_pool.nan_to_num(), their_pool.nan_to_num(), dtype, fp32=2e-5)


@pytest.mark.parametrize("head_dim", [20, 32, 128, 256])
@pytest.mark.parametrize(("group", "window"), [(2, 0), (2, 20), (3, 0), (4, 7)])
def test_positions_of_a_sequence_are_attended_together(core, dtype, head_dim, group, window):
    """Prompts in one pass, beside rows that decode: equal to the reference, and to each row alone to the last bit."""
    pool, tables, _ = filled(head_dim, dtype, [70, 41, 16])
    spans = [(0, 1, 41), (1, 30, 42), (2, 16, 17), (0, 69, 71)]
    lengths = [length for _, start, end in spans for length in range(start, end)]
    rows = tables[[row for row, start, end in spans for _ in range(start, end)]]
    q = normal(len(lengths), group * HEADS * head_dim, dtype=dtype)
    ours, theirs, alone = (torch.full_like(q, NAN) for _ in range(3))
    scale = head_dim**-0.5
    core.attend(pool, 1, q, ours, rows, torch.tensor(lengths), scale, window)
    reference.attend(pool, 1, q, theirs, rows, torch.tensor(lengths), scale, window)
    for row, length in enumerate(lengths):
        part = slice(row, row + 1)
        core.attend(pool, 1, q[part], alone[part], rows[part], torch.tensor([length]), scale, window)
    expect_close(ours, theirs, dtype, fp32=1e-5)
    assert torch.equal(ours, alone)


def test_sequences_that_part_are_not_one(core, dtype):
    """Rows of consecutive lengths whose last page, or one before, differs."""
    pool, tables, _ = filled(32, dtype, [42, 42, 42])
    tables[1, :2] = tables[0, :2]
    tables[2, 1:] = tables[1, 1:]
    q = normal(3, 2 * HEADS * 32, dtype=dtype)
    ours, theirs = torch.full_like(q, NAN), torch.full_like(q, NAN)
    for kernels, out in ((core, ours), (reference, theirs)):
        kernels.attend(pool, LAYERS - 1, q, out, tables, torch.tensor([40, 41, 42]), 0.2)
    expect_close(ours, theirs, dtype, fp32=1e-5)


# --- products ---------------------------------------------------------------------------------------------


@pytest.fixture
def products() -> type:
    built = native.core()
    if built is None or not built.bf16_products():
        pytest.skip("this CPU, or what was compiled for it, has no products of bf16")
    return built.Bf16Linear


def made(inputs: int, outputs: int, biased: bool, activation: str) -> tuple[Tensor, Tensor | None]:
    matrices = [torch.randn(outputs, inputs) / inputs**0.5 for _ in range(2)]
    packed = bf16_reference.pack_gates(*matrices) if activation else bf16_reference.pack(matrices[0])
    bias = torch.randn(len(packed) * bf16_reference.OUTPUTS) if biased else None
    return packed.view(torch.int16), bias


@pytest.mark.parametrize("activation", ["", "silu", "gelu_tanh"])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (2, 1), (30, 83), (1_024, 512)])
@pytest.mark.parametrize("rows", [1, 7, 8, 21, 50])
def test_bf16_products(products, inputs, outputs, rows, activation):
    """Equal to the reference; a row is the same to the last bit in any batch."""
    for biased, added, out_dtype in ((True, True, torch.bfloat16), (False, False, torch.float32)):
        packed, bias = made(inputs, outputs, biased, activation)
        x, add = normal(rows, inputs, dtype=torch.bfloat16), normal(rows, outputs, dtype=torch.bfloat16)
        ours, theirs, alone = (torch.full((rows, outputs), NAN, dtype=out_dtype) for _ in range(3))
        product = products(packed, bias, outputs, activation)
        oracle = bf16_reference.Bf16Linear(packed, bias, outputs, activation)
        product(x, ours, add if added else None)
        oracle(x, theirs, add if added else None)
        for row in range(rows):
            part = slice(row, row + 1)
            product(x[part], alone[part], add[part] if added else None)
        expect_close(ours, theirs, out_dtype, fp32=1e-5)
        assert torch.equal(ours, alone)


def test_packed_rows_are_looked_up() -> None:
    weight = torch.randn(50, 6).bfloat16()
    rows = torch.tensor([49, 0, 16, 15, 16])
    assert torch.equal(bf16_reference.rows_of(bf16_reference.pack(weight), rows), weight[rows])


PACKED = bf16_reference.pack(torch.ones(20, 4)).view(torch.int16)
X, OUT = torch.ones(3, 4, dtype=torch.bfloat16), torch.empty(3, 20, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("packed", "bias", "outputs", "activation"),
    [
        (PACKED, None, 40, ""),
        (PACKED, None, 0, ""),
        (PACKED, None, 20, "silu"),
        (PACKED, None, 20, "relu"),
        (PACKED, torch.ones(20), 20, ""),
        (PACKED[:, :, :8].contiguous(), None, 20, ""),
    ],
)
def test_weights_that_do_not_fit_are_refused(products, packed, bias, outputs, activation):
    with pytest.raises(ValueError):
        products(packed, bias, outputs, activation)


@pytest.mark.parametrize(
    ("x", "out", "add"),
    [
        (X.float(), OUT, None),
        (X[:, :2].contiguous(), OUT, None),
        (X, OUT[:2], None),
        (X, OUT.double(), None),
        (X, OUT, OUT[:1]),
        (X, OUT, OUT.float()),
        (X.T.contiguous().T, OUT, None),
    ],
)
def test_rows_that_do_not_fit_are_refused(products, x, out, add):
    with pytest.raises(ValueError):
        products(PACKED, None, 20)(x, out, add)


POOL, TABLES, POSITIONS = torch.zeros(3, 2, 2, 1, 8 * 16), torch.ones(1, 2, dtype=torch.int32), torch.tensor([17])
QKV, ANGLES, NORMS = torch.zeros(1, 4 * 8), torch.zeros(40, 4), torch.ones(3, 8)


def rotation(**changes: object) -> tuple[object, ...]:
    given: dict[str, object] = {"pool": POOL, "layer": 0, "qkv": QKV, "norms": NORMS, "eps": EPS, "cos": ANGLES}
    given |= {"sin": changes.get("cos", ANGLES), "positions": POSITIONS, "tables": TABLES}
    return ("rotate_append", *(given | changes).values())


BAD = {
    "rms_norm: another width": ("rms_norm", QKV, torch.ones(8), QKV.clone(), EPS),
    "rms_norm: out of another dtype": ("rms_norm", QKV, torch.ones(32), QKV.bfloat16(), EPS),
    "gate: another activation": ("gate", QKV, torch.zeros(1, 16), "relu"),
    "gate: of another width": ("gate", QKV, torch.zeros(1, 15), "silu"),
    "rotate_append: layer": rotation(layer=2),
    "rotate_append: no query": rotation(qkv=QKV[:, :16].clone(), norms=None),
    "rotate_append: norms": rotation(norms=NORMS[:2]),
    "rotate_append: angles": rotation(cos=ANGLES[:, :3].clone()),
    "rotate_append: past the angles": rotation(cos=ANGLES[:9]),
    "rotate_append: past the table": rotation(positions=POSITIONS + 16),
    "rotate_append: past the pool": rotation(tables=TABLES + 2),
    "rotate_append: two rows": rotation(qkv=QKV.repeat(2, 1)),
    "rotate_append: bf16": rotation(qkv=QKV.bfloat16()),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(core, name):
    call, *arguments = BAD[name]
    with pytest.raises(ValueError):
        getattr(core, call)(*arguments)
