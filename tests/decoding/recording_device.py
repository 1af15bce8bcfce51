"""What a CUDA graph asks of a captured function, on the CPU: a device that records operations and replays them, and a
mode that refuses what a recording cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from asr_serve.devices.cpu import CpuDevice
from asr_serve.devices.cuda import CudaDevice

SYNCHRONISING = {
    "_local_scalar_dense",
    "item",
    "equal",
    "is_nonzero",
    "nonzero",
    "argwhere",
    "masked_select",
    "unique_dim",
    "unique_consecutive",
    "_unique",
    "_unique2",
    "bincount",
    "histc",
    "repeat_interleave",
    "allclose",
}
"""Operations whose result, or its shape, the host has to wait for."""


class RefuseSynchronisation(TorchDispatchMode):
    """Raises AssertionError for operations that a CUDA graph cannot record: those that read a value back or whose shape
    depends on values, an index of booleans, and copies from the host. Counts the others, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _name(func)
        assert name not in SYNCHRONISING, f"{func} waits for the device"
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            kinds = [each.dtype for each in args[1] if each is not None]
            assert not {torch.bool, torch.uint8} & set(kinds), f"{func} with an index of {kinds}"
        assert name not in ("_to_copy", "copy_") or not _moves(args, kwargs or {}), f"{func} between devices"
        found = func(*args, **(kwargs or {}))
        self.operations += not func.is_view and name != "_unsafe_view"
        return found


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


def _moves(args: Any, kwargs: Any) -> bool:
    devices = {each.device for each in args if isinstance(each, Tensor)}
    return len(devices | ({torch.device(kwargs["device"])} if kwargs.get("device") else set())) > 1


class _Recording:
    """A function of tensors as devices/cuda.CudaGraphFunction has it: run twice for each new shape, recorded without
    running, and replayed from then on with arguments that are copied in and results that the next call overwrites."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function = function
        self.graphs: dict[Any, tuple[Any, tuple[Tensor, ...], list[Tensor]]] = {}

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        key = tuple((each.shape, each.dtype) for each in arguments)
        if key not in self.graphs:
            inputs = tuple(each.clone() for each in arguments)
            for _ in range(2):
                with RefuseSynchronisation():
                    self.function(*inputs)
            # With tensors that have no values: a branch on one is an error, and a list of items is seen.
            graph = make_fx(self.function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
            called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
            assert not SYNCHRONISING & {_name(each) for each in called if hasattr(each, "_schema")}
            self.graphs[key] = graph, inputs, []
        graph, inputs, outputs = self.graphs[key]
        for target, argument in zip(inputs, arguments, strict=True):
            target.copy_(argument)
        found = graph(*inputs)
        outputs[:] = outputs or [torch.empty_like(each) for each in found]
        for target, each in zip(outputs, found, strict=True):
            target.copy_(each)
        return tuple(outputs)


class RecordingDevice(CpuDevice):
    """The CPU with the recordings and the row counts of a CUDA device."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.recordings: list[_Recording] = []

    def capture(self, function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        self.recordings.append(_Recording(function))
        return self.recordings[-1]

    def padded_rows(self, live: int) -> int:
        return CudaDevice.padded_rows(self, live)  # type: ignore[arg-type]  # it reads no field
