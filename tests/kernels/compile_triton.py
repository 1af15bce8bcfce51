"""Compiles the Triton kernels for an H100, without a GPU, and prints of each how many of its loads are 16 bytes wide.

Run as a program of its own: a process in which Triton interprets cannot compile.
"""

from __future__ import annotations

import json
import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from asr_serve.kernels import triton_kernels as kernels

HOPPER = GPUTarget("cuda", 90, 32)
STRIDES = {
    *("q_stride", "out_stride", "page_stride", "layer_stride", "values_offset"),
    *("row_stride", "kind_stride", "frame_stride", "kv_layer_stride"),
}
"""Arguments that are multiples of 16, which Triton finds out itself when it is given them."""


def wide_loads(kernel: Any, pointers: dict[str, str], constants: dict[str, int], warps: int = 4) -> int:
    """Compiles a kernel with `pointers` of those types and integers otherwise; returns the number of wide loads."""
    names = kernel.arg_names
    types = {name: pointers.get(name, "fp32" if name == "scale" else "i32") for name in names}
    aligned = [name for name in names if name in pointers or name in STRIDES]
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else types[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": warps})
    return len(re.findall(r"ld\.global[.\w:]*\.v4", compiled.asm["ptx"]))


def main() -> None:
    pages = {"q": "*bf16", "keys": "*bf16", "tables": "*i32", "lengths": "*i64", "out": "*bf16", "partial": "*fp32"}
    sizes = {"HEAD_DIM": 72, "DIM_TILE": 128}
    tile = {**sizes, "GROUP": 1, "WINDOW": 0, "PAGE_SIZE": 16, "PAGES": kernels.TILE // (128 * 16)}
    warps = kernels._warps(2 * kernels.TILE)
    appended = {"keys": "*bf16", "qkv": "*bf16", "tables": "*i32", "positions": "*i64"}
    stored = {"pool": "*bf16", "kv": "*bf16", "table": "*i32"}
    rotated = {"qkv": "*bf16", "positions": "*i64", "cos": "*fp32", "sin": "*fp32"}
    heads = {"HEADS": 8, "HEAD_DIM": 36, "HALF": 16, "HEAD_TILE": 8, "HALF_TILE": 16}
    found = {
        "attend": wide_loads(kernels._attend_kernel, pages, {**tile, "PARTS": 1}, warps),
        "attend, split": wide_loads(kernels._attend_kernel, pages, {**tile, "PARTS": 8}, warps),
        "attend, window": wide_loads(kernels._attend_kernel, pages, {**tile, "WINDOW": 20, "PARTS": 1}, warps),
        "combine": wide_loads(kernels._combine_kernel, {"partial": "*fp32", "out": "*bf16"}, {**sizes, "PARTS": 8}),
        "append": wide_loads(kernels._append_kernel, appended, {**sizes, "PAGE_SIZE": 16}),
        "store": wide_loads(kernels._store_kernel, stored, {**sizes, "PAGE_SIZE": 16}),
        "rope": wide_loads(kernels._rope_kernel, rotated, heads),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
