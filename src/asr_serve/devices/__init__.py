"""Device selection: the only place that decides on device, dtype and quantization of the networks."""

from __future__ import annotations

import re
from typing import get_args

import torch

from asr_serve.devices.interface import Device
from asr_serve.devices.tensor_parallel import SINGLE_RANK, TensorParallelGroup
from asr_serve.errors import OptionError
from asr_serve.types import Int8Calibration, Quantize, unknown_name_error

QUANTIZE_MODES: dict[str, Quantize] = {way: way for way in get_args(Quantize)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def check_device(device: str) -> None:
    """Raises OptionError for an unknown device, or one that this machine lacks."""
    kind, _, number = device.partition(":")
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) is None:
        raise unknown_name_error("device", device, ["auto", "cpu", "cuda", "cuda:N"])
    if kind != "cuda":
        return
    if not torch.cuda.is_available():
        raise OptionError(
            f"device {device!r}", "this machine has no CUDA device that torch sees", "use --device cpu", param="device"
        )
    if number and int(number) >= torch.cuda.device_count():
        raise OptionError(
            f"device {device!r}", f"this machine has cuda:0 to cuda:{torch.cuda.device_count() - 1}", param="device"
        )


def rank_device(device: str, group: TensorParallelGroup) -> str:
    """Returns the name of this rank's CUDA device: the ranks of a group have consecutive ones, the first of which is
    `device`. Raises OptionError where there are too few."""
    first, there = int(device.partition(":")[2] or 0), torch.cuda.device_count()
    if first + group.size > there:
        raise OptionError(
            f"tensor_parallel_size={group.size} from cuda:{first} on",
            f"this machine has {there} CUDA devices, one for each rank: up to {max(0, there - first)}",
            param="tensor_parallel_size",
        )
    return f"cuda:{first + group.rank}"


def make_device(
    device: str = "auto",
    dtype: str = "auto",
    quantize: str = "none",
    group: TensorParallelGroup = SINGLE_RANK,
    calibration: Int8Calibration | None = None,
) -> Device:
    """Returns the device of that name: auto, cpu, cuda or cuda:N; dtype: auto, fp32 or bf16; quantize: auto, none,
    int8 or dynamic; group: ranks among which the decoder is split, each with a CUDA device or its share of the cores;
    calibration: layers that quantize=auto may quantize: on a CPU, in one process, where no dtype is chosen. Raises
    OptionError for an unknown name, or for a device this machine lacks: there is no silent fall-back."""
    if dtype not in ("auto", *DTYPES):
        raise unknown_name_error("dtype", dtype, ["auto", *DTYPES])
    if quantize not in QUANTIZE_MODES:
        raise unknown_name_error("quantize", quantize, list(QUANTIZE_MODES))
    mode = QUANTIZE_MODES[quantize]
    if mode == "auto" and (calibration is None or dtype != "auto" or group.size > 1):
        mode = "none"
    check_device(device)
    kind = device.split(":")[0]
    torch_dtype = None if dtype == "auto" else DTYPES[dtype]
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        from asr_serve.devices.cuda import CudaDevice

        name = "cuda" if kind == "auto" else device
        mode = "none" if mode == "auto" else mode
        return CudaDevice(name if group.size == 1 else rank_device(name, group), torch_dtype, mode, group)
    from asr_serve.devices.cpu import CpuDevice

    return CpuDevice(torch_dtype, mode, group, calibration)
