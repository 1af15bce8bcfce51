"""Encoding beside the loop, while somebody speaks: a batch to a thread, a thread to a core.

Alone on its machine a batch is encoded fastest by all cores together: they meet after every product. But callers
come with company, their own sockets for one, and whoever takes a core for a moment then stops all of them. So
while callers are on line each batch has one thread, which waits for nobody, and the loop goes on decoding
meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from asr_serve.devices.base import Device
from asr_serve.engine.runner import EncoderResult, EncodeRunner

BEHIND = 5
"""How much nicer than the loop encoders are: under Linux they get a third of its share where both want a core."""


class Batch(NamedTuple):
    """Under way: these requests will need so many pages, and a row each."""

    ids: list[int]
    pages: int


class Encoders:
    """Belongs to the loop's thread; `deliver` is called on an encoding one, with what was encoded and how long
    that took."""

    def __init__(
        self, runner: EncodeRunner, deliver: Callable[[Batch, Future[list[EncoderResult]], float], None]
    ) -> None:
        self._runner, self._deliver = runner, deliver
        self.count = runner.device.encoders
        self._threads = ThreadPoolExecutor(
            max(1, self.count), "asr-serve encoder", initializer=_settle, initargs=(runner.device,)
        )
        self.under_way: list[Batch] = []
        self._beside = False

    def beside(self, live: bool) -> bool:
        """Whether batches are encoded beside the loop. The cores are shared out anew when callers come or have
        gone, as soon as nothing is under way."""
        wanted = live and self.count > 0
        if wanted != self._beside and not self.under_way:
            self._beside = wanted
            device = self._runner.device
            device.share(device.decode_threads(wanted))
        return self._beside

    @property
    def free(self) -> bool:
        return len(self.under_way) < self.count

    @property
    def rows(self) -> int:
        """Rows that what is under way will take."""
        return sum(len(batch.ids) for batch in self.under_way)

    @property
    def pages(self) -> int:
        return sum(batch.pages for batch in self.under_way)

    def start(self, batch: Batch, clips: Sequence[np.ndarray]) -> None:
        self.under_way.append(batch)
        begun_s: list[float] = []

        def encode() -> list[EncoderResult]:
            begun_s.append(time.perf_counter())
            return self._runner.run(clips)

        def over(encoded: Future[list[EncoderResult]]) -> None:
            seconds = time.perf_counter() - begun_s[0] if begun_s else 0.0
            self._deliver(batch, encoded, seconds)

        self._threads.submit(encode).add_done_callback(over)

    def close(self) -> None:
        """Wait for what is under way."""
        self._threads.shutdown(wait=True)


def _settle(device: Device) -> None:
    """The calling thread alone, and behind whoever else wants its core: the loop's steps are short and many wait
    for them."""
    device.share(1)
    with contextlib.suppress(OSError, AttributeError):  # a courtesy, not worth a batch
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + BEHIND)
