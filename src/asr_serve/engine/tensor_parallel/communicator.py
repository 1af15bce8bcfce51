"""Collective operations between the ranks of an engine: gloo on the CPU, NCCL on CUDA devices."""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from asr_serve.devices.interface import Device

if TYPE_CHECKING:
    from torch.distributed import Work

LOOPBACK = "127.0.0.1"
"""Address on which gloo connects the ranks, all of which run on this machine."""


class _ProcessGroup(Protocol):
    """Process groups of torch.distributed, as far as they are used here."""

    def allreduce(self, tensors: list[Tensor]) -> Work: ...
    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor]) -> Work: ...
    def abort(self) -> None: ...


class _HostClock:
    """Context manager that measures collectives which the host waits for."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.spent_s += time.perf_counter() - self._began_s


MAX_PENDING_EVENTS = 1_024
"""Collectives that may be enqueued on a CUDA device beyond the last that is known to have ended; more are not
measured."""


class _CudaClock:
    """Context manager that measures collectives on a CUDA device, by events in the stream that waits for them: the host
    does not wait.

    Not yet run on a CUDA device.
    """

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._began: torch.cuda.Event | None = None

    def __enter__(self) -> None:
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            began, ended = self._pending.popleft()
            self.spent_s += began.elapsed_time(ended) / 1_000
        self._began = self._record() if len(self._pending) < MAX_PENDING_EVENTS else None

    def __exit__(self, *_: object) -> None:
        if self._began is not None:
            self._pending.append((self._began, self._record()))

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class ProcessGroupCommunicator:
    """Communicator over a process group of its own, beside any other in the process."""

    def __init__(self, store_fd: int, device: Device, timeout_s: float) -> None:
        """Connects to the other ranks of the device's group, which must do the same within `timeout_s`; so long may a
        collective take. `store_fd`: file in memory through which the ranks find each other. Raises RuntimeError."""
        self._rank, self._size, timeout = device.group.rank, device.group.size, timedelta(seconds=timeout_s)
        store = dist.FileStore(f"/proc/self/fd/{store_fd}", self._size)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        made: object
        if device.torch_device.type == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            made = dist.ProcessGroupNCCL(store, self._rank, self._size, nccl)
        else:
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = timeout
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
            made = dist.ProcessGroupGloo(store, self._rank, self._size, gloo)
        self._group: _ProcessGroup | None = cast(_ProcessGroup, made)
        self._clock = _CudaClock() if device.torch_device.type == "cuda" else _HostClock()
        # Also connects NCCL, which does so at its first collective.
        self.all_reduce(torch.zeros(1, device=device.torch_device))

    @property
    def spent_s(self) -> float:
        """Total time of collectives, waiting for other ranks included."""
        return self._clock.spent_s

    def all_reduce(self, x: Tensor) -> None:
        with self._clock:
            self._open.allreduce([x]).wait()

    def gather(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self._size)] if self._rank == 0 else []
        with self._clock:
            self._open.gather([parts] if parts else [], [x]).wait()
        return parts

    def abort(self) -> None:
        """Ends collectives that wait for a rank that is gone. May be called from any thread."""
        if (group := self._group) is not None:
            group.abort()

    def close(self) -> None:
        """Disconnects. Call it before the file of the store is closed: the store opens it once more as it goes, and
        waits, with the interpreter's lock, for one that is gone."""
        self._group = None

    @property
    def _open(self) -> _ProcessGroup:
        assert self._group is not None, "a collective of a closed group"
        return self._group
