"""Which device runs the networks, in what numbers, on how many threads. Nobody else asks."""

from __future__ import annotations

import torch

from asr_serve.config import unknown
from asr_serve.devices.base import Device
from asr_serve.errors import OptionError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def pick(device: str = "auto", dtype: str = "auto") -> Device:
    """The device of that name: auto, cpu, cuda or cuda:N; dtype: auto, fp32 or bf16.

    Raises OptionError for an unknown name, or for a device this machine lacks: never a silent fall-back.
    """
    if dtype not in ("auto", *DTYPES):
        raise unknown("dtype", dtype, ["auto", *DTYPES])
    kind = device.split(":")[0]
    if kind not in ("auto", "cpu", "cuda") or (kind != "cuda" and device != kind):
        raise unknown("device", device, ["auto", "cpu", "cuda", "cuda:N"])
    if kind == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            f"device {device!r}", "this machine has no CUDA device that torch sees", "use --device cpu"
        )
    wanted = None if dtype == "auto" else DTYPES[dtype]
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        from asr_serve.devices.cuda import CudaDevice

        return CudaDevice("cuda" if kind == "auto" else device, wanted)
    from asr_serve.devices.cpu import CpuDevice

    return CpuDevice(wanted)
