"""Triton kernels against the reference, on a GPU, or by Triton's interpreter on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asr_serve.devices.cuda import CudaGraphFunction
from asr_serve.kernels import PAGE, reference

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are declared
pytest.importorskip("triton")
from asr_serve.kernels import triton_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, LAYERS = 3, 2
DTYPES = [torch.float32, torch.bfloat16]


def paged(lengths: list[int], head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A pool with rows of `lengths` in scattered pages; whatever is in no row is no number."""
    torch.manual_seed(0)
    width = max(-(-length // PAGE) for length in lengths)
    pages = 1 + len(lengths) * width
    pool = torch.full((pages, LAYERS, 2, HEADS, head_dim * PAGE), torch.nan, dtype=dtype)
    order = iter((torch.randperm(pages - 1) + 1).tolist())
    tables = torch.full((len(lengths), width), 2**30, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for entry in range(-(-length // PAGE)):
            tables[row, entry] = next(order)
        kv = torch.randn(length, LAYERS, 2, HEADS * head_dim).to(dtype)
        reference.store(pool, kv, tables[row])
    return pool.to(DEVICE), tables.to(DEVICE), torch.tensor(lengths, device=DEVICE)


def near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = 2e-5 if theirs.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group", "window"), [(36, 1, 0), (72, 1, 0), (64, 2, 0), (64, 4, 20), (8, 3, 33)])
def test_attend_equals_the_reference(dtype, head_dim, group, window):
    """Rows of one position, of whole pages, and of so many that several programs share them."""
    pool, tables, lengths = paged([1, 16, 17, 700], head_dim, dtype)
    q, ours, theirs = torch.randn(3, 4, 2, group * HEADS * head_dim, device=DEVICE).to(dtype)[:, :, 0]  # inside of more
    triton_kernels.attend(pool, 1, q, ours, tables, lengths, head_dim**-0.5, window)
    reference.attend(pool, 1, q, theirs, tables, lengths, head_dim**-0.5, window)
    near(ours, theirs)


def test_attend_in_float32_over_pages_of_16_bits():
    pool, tables, lengths = paged([40, 3], 36, torch.bfloat16)
    q = torch.randn(2, HEADS * 36, device=DEVICE)
    ours, theirs = torch.empty_like(q), torch.empty_like(q)
    triton_kernels.attend(pool, 0, q, ours, tables, lengths, 0.2)
    reference.attend(pool, 0, q, theirs, tables, lengths, 0.2)
    near(ours, theirs)


@pytest.mark.slow
def test_attend_with_rows_enough_for_one_part():
    pool, tables, lengths = paged([300] * 4, 32, torch.float32)
    q = torch.randn(4, 3 * 32, device=DEVICE)
    rows = torch.arange(4, device=DEVICE).repeat(100)
    ours, theirs = torch.empty(400, 96, device=DEVICE), torch.empty(4, 96, device=DEVICE)
    assert triton_kernels._parts(400 * HEADS, tables.shape[1], 8) == 1 < triton_kernels._parts(1, tables.shape[1], 2)
    triton_kernels.attend(pool, 0, q[rows], ours, tables[rows].contiguous(), lengths[rows], 0.2)
    reference.attend(pool, 0, q, theirs, tables, lengths, 0.2)
    near(ours, theirs[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [36, 64])
def test_append_equals_the_reference(dtype, head_dim):
    ours, tables, lengths = paged([5, 16, 33], head_dim, dtype)
    theirs = ours.clone()
    qkv = torch.randn(3, 2, 4, HEADS * head_dim, device=DEVICE).to(dtype)[:, 1, :3]  # inside of more
    triton_kernels.append(ours, 1, qkv, tables, lengths - 1)
    reference.append(theirs, 1, qkv, tables, lengths - 1)
    assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("frames", "head_dim"), [(1, 36), (32, 64), (41, 36)])
def test_store_equals_the_reference(dtype, frames, head_dim):
    """Whole pages and parts of one; frames are a slice of a batch's."""
    theirs, tables, _ = paged([48, 48], head_dim, dtype)
    ours = theirs.clone()
    kv = torch.randn(100, LAYERS, 2, HEADS * head_dim, device=DEVICE).to(dtype)[7 : 7 + frames]
    triton_kernels.store(ours, kv, tables[1])
    reference.store(theirs, kv, tables[1])
    assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim", "half"), [(8, 36, 16), (5, 64, 32)])
def test_rope_equals_the_reference(dtype, heads, head_dim, half):
    torch.manual_seed(1)
    ours = torch.randn(7, 3, heads, head_dim, device=DEVICE).to(dtype)
    theirs = ours.clone()
    angles = torch.rand(50, half, device=DEVICE)
    positions = torch.tensor([0, 1, 2, 49, 3, 7, 20], device=DEVICE)
    triton_kernels.rope(ours, positions, angles.cos(), angles.sin())
    reference.rope(theirs, positions, angles.cos(), angles.sin())
    near(ours, theirs)


def test_names_are_those_of_the_reference():
    kernels = {
        name
        for name, value in vars(reference).items()
        if getattr(value, "__module__", "").startswith("asr_serve.kernels.")
        and "paging" not in value.__module__
        and not name.startswith("_")
    }
    assert {"attend", "append", "store", "pick", "rotate_append"} < kernels
    assert {*kernels, "FrameLayers", "DecoderLayers"} <= set(vars(triton_kernels))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_can_record_the_kernels():
    pool, tables, lengths = paged([1, 700], 64, torch.bfloat16)
    q = torch.randn(2, HEADS * 64, device=DEVICE).to(torch.bfloat16)

    def step(query: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = torch.empty_like(query)
        triton_kernels.attend(pool, 0, query, out, tables, at, 0.2)
        return (out,)

    recorded = CudaGraphFunction(step)
    for scale in (1.0, 2.0):
        theirs = torch.empty_like(q)
        reference.attend(pool, 0, q * scale, theirs, tables, lengths, 0.2)
        near(recorded(q * scale, lengths)[0], theirs)


def test_kernels_compile_for_a_gpu_and_read_16_bytes_at_a_time(tmp_path):
    command = [sys.executable, str(Path(__file__).with_name("compile_triton.py"))]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    wide = json.loads(done.stdout)
    assert set(wide) == {"attend", "attend, split", "attend, window", "combine", "append", "store", "rope"}
    assert all(wide[name] >= 8 for name in wide if name.startswith("attend")), wide
