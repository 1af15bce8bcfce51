"""Runs tests of the CPU on a GPU: devices that they name cpu are CUDA ones.

    PYTHONPATH=tests python -m pytest -p on_cuda -o filterwarnings=default tests/engine/seq2seq tests/engine/streaming

Tests that make tensors of the CPU themselves and hand them to a model fail then; those of engines must not.
"""

from __future__ import annotations

from typing import Any

import torch

from asr_serve import devices
from asr_serve.devices.interface import Device

torch.backends.cuda.matmul.allow_tf32 = False  # the tests compare float32
_make_device = devices.make_device


def _make_cuda_device(device: str = "auto", *rest: Any, **more: Any) -> Device:
    """Makes the device that a test asks for, or CUDA's in place of the CPU."""
    only_cpu = "dynamic" in (*rest, more.get("quantize"))
    return _make_device("cuda" if device == "cpu" and not only_cpu else device, *rest, **more)


devices.make_device = _make_cuda_device
