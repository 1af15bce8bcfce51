"""Device selection: the only place that decides on device, dtype and quantization of the networks."""

from __future__ import annotations

from typing import get_args

import torch

from asr_serve.devices.interface import Device
from asr_serve.errors import OptionError
from asr_serve.types import Quantize, unknown_name_error

QUANTIZE_MODES: dict[str, Quantize] = {way: way for way in get_args(Quantize)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_device(device: str = "auto", dtype: str = "auto", quantize: str = "none") -> Device:
    """Returns the device of that name: auto, cpu, cuda or cuda:N; dtype: auto, fp32 or bf16; quantize: none, int8 or
    dynamic. Raises OptionError for an unknown name, or for a device this machine lacks: there is no silent
    fall-back."""
    if dtype not in ("auto", *DTYPES):
        raise unknown_name_error("dtype", dtype, ["auto", *DTYPES])
    if quantize not in QUANTIZE_MODES:
        raise unknown_name_error("quantize", quantize, list(QUANTIZE_MODES))
    mode = QUANTIZE_MODES[quantize]
    kind = device.split(":")[0]
    if kind not in ("auto", "cpu", "cuda") or (kind != "cuda" and device != kind):
        raise unknown_name_error("device", device, ["auto", "cpu", "cuda", "cuda:N"])
    if kind == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"device {device!r}", "this machine has no CUDA device that torch sees", "use --device cpu")
    torch_dtype = None if dtype == "auto" else DTYPES[dtype]
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        from asr_serve.devices.cuda import CudaDevice

        return CudaDevice("cuda" if kind == "auto" else device, torch_dtype, mode)
    from asr_serve.devices.cpu import CpuDevice

    return CpuDevice(torch_dtype, mode)
