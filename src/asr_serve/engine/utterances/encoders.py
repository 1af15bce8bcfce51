"""Encoding beside the loop: on threads of its own while somebody speaks, and by peers where there are any.

Alone on its machine a batch is encoded fastest by all cores together: they meet after every product. But callers
come with company, their own sockets for one, and whoever takes a core for a moment then stops all of them. So
while callers are on line each batch has one thread, which waits for nobody, and the loop goes on decoding
meanwhile. A peer is another engine that encodes (engine/peers): what it sends is made into the same
EncoderResults.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from asr_serve.devices.base import Device
from asr_serve.engine.peers.asking import Peers
from asr_serve.engine.peers.peer import Away, Clip, Connection, Parcel
from asr_serve.engine.utterances.encode import EncoderResult, EncodeRunner
from asr_serve.errors import AsrServeError, PeerGone, RoadTimeout, Torn
from asr_serve.types import Priority

BEHIND = 5
"""How much nicer than the loop encoders are: under Linux they get a third of its share where both want a core."""
MOST_LOST = 2
"""Peers that may be lost over one request; then it is encoded here, where it may be given up (process/link)."""
LOST = (PeerGone, RoadTimeout, Torn)
"""What a peer encoded did not come: it is encoded again."""
MOST_REMEMBERED = 4_096
"""Requests of which it is known how many; of more, the first are forgotten."""


class Batch(NamedTuple):
    """Under way: these requests will need so many rows and pages. `classes`: of each its priority, and how soon it
    should be encoded, for peers that encode for others too."""

    ids: list[int]
    rows: int
    pages: int
    classes: Sequence[tuple[Priority, int | None]] = ()


Deliver = Callable[[Batch, Future[list[EncoderResult]], float], None]


class Encoders:
    """Belongs to the loop's thread; `deliver` is called on another one, with what was encoded and how long that
    took. A batch whose peer was lost is delivered with one of LOST: it wants to be encoded again. Whoever is
    delivered to says when it is `over`. `wake`: called when a peer has come or gone."""

    def __init__(
        self,
        runner: EncodeRunner,
        deliver: Deliver,
        peers: Peers | None = None,
        wake: Callable[[], None] = lambda: None,
        *,
        alone: bool = True,
    ) -> None:
        """`alone`: this engine encodes too, however many peers there are."""
        self._runner, self._deliver, self._peers, self._alone = runner, deliver, peers, alone
        self.count = runner.device.encoders
        self._threads = ThreadPoolExecutor(
            max(1, self.count), "asr-serve encoder", initializer=_settle, initargs=(runner.device,)
        )
        self.under_way: list[Batch] = []
        self._away: list[tuple[Batch, Connection, Away]] = []
        self._lost: Counter[int] = Counter()
        """Peers lost over a request, those with the latest last."""
        self._counting = threading.Lock()
        self._beside = False
        if peers is not None:
            peers.begin(wake)

    def beside(self, live: bool) -> bool:
        """Whether batches are encoded beside the loop. The cores are shared out anew when callers come or have
        gone, as soon as nothing is under way."""
        wanted = live and self.count > 0
        if wanted != self._beside and not self._here:
            self._beside = wanted
            device = self._runner.device
            device.share(device.decode_threads(wanted))
        return self._beside

    @property
    def free(self) -> bool:
        """A thread of this engine's has nothing to do."""
        return self._here < self.count

    @property
    def _here(self) -> int:
        """Batches under way on this engine's own threads."""
        return len(self.under_way) - len(self._away)

    @property
    def away(self) -> bool:
        """A peer is there and has room for a batch."""
        return self._peers is not None and self._peers.room

    @property
    def here(self) -> bool:
        """Whether this engine is to encode what is not away: one that only decodes does while no peer is there."""
        return self._alone or self._peers is None or not self._peers.alive

    @property
    def rows(self) -> int:
        """Rows that what is under way will take."""
        return sum(batch.rows for batch in self.under_way)

    @property
    def pages(self) -> int:
        return sum(batch.pages for batch in self.under_way)

    def start(
        self, batch: Batch, clips: Sequence[np.ndarray], whole: Sequence[bool] = (), *, away: bool = False
    ) -> None:
        """`away`: by a peer, unless none has room any more or two were lost over one of these."""
        self.under_way.append(batch)
        if not away or not self._send(batch, clips, whole):
            self._run(batch, lambda: self._runner.run(clips, whole))

    def over(self, batch: Batch) -> None:
        """It was delivered: nothing of it is kept, its audio and what a peer made of it least of all."""
        self.under_way = [each for each in self.under_way if each is not batch]
        self._away = [each for each in self._away if each[0] is not batch]

    def check(self) -> None:
        under_way = {id(batch) for batch in self.under_way}
        assert all(id(each[0]) in under_way for each in self._away), "a batch is kept that is over"

    def drop(self, request_id: int) -> None:
        """Nobody wants that request any more. A peer that has it does not encode it, if it has not begun; this
        engine's own batches go on."""
        with self._counting:
            self._lost.pop(request_id, None)
        for batch, connection, away in self._away:
            if request_id in batch.ids:
                connection.cancel(away, batch.ids.index(request_id))

    def close(self) -> None:
        """Wait for what is under way here; what is away is given up."""
        if self._peers is not None:
            self._peers.close()
        self._threads.shutdown(wait=True)

    # --- by threads of this engine ------------------------------------------------------------------------

    def _run(self, batch: Batch, work: Callable[[], list[EncoderResult]], spent_s: float = 0.0) -> None:
        """`spent_s`: by others, before."""
        begun_s: list[float] = []

        def encode() -> list[EncoderResult]:
            begun_s.append(time.perf_counter())
            return work()

        def over(encoded: Future[list[EncoderResult]]) -> None:
            seconds = time.perf_counter() - begun_s[0] if begun_s else 0.0
            self._deliver(batch, encoded, spent_s + seconds)

        try:
            self._threads.submit(encode).add_done_callback(over)
        except RuntimeError as failure:  # no thread is to be had; or it came from a peer while this was closed
            lost: Future[list[EncoderResult]] = Future()
            lost.set_exception(failure)
            self._deliver(batch, lost, spent_s)

    # --- by peers -----------------------------------------------------------------------------------------

    def _send(self, batch: Batch, pcm: Sequence[np.ndarray], whole: Sequence[bool]) -> bool:
        if self._peers is None:
            return False
        if any(self._lost[request_id] >= MOST_LOST for request_id in batch.ids):
            self._found(batch)
            return False
        model = self._runner.model
        all_of_it = whole or [False] * len(pcm)
        classes = batch.classes or [("interactive", None)] * len(pcm)
        clips = [
            Clip(each, model.frames(len(each), *[True] * of_it), of_it, priority, within_ms)
            for each, of_it, (priority, within_ms) in zip(pcm, all_of_it, classes, strict=True)
        ]
        started = self._peers.start(clips, lambda came: self._came(batch, came))
        if started is not None:
            self._away.append((batch, *started))
        return started is not None

    def _came(self, batch: Batch, came: Parcel | AsrServeError) -> None:
        """On a peer's thread, or the loop's."""
        if isinstance(came, Parcel):
            self._found(batch)
            # Not on the loop's thread, which goes on decoding meanwhile.
            self._run(batch, lambda: self._results(came), came.seconds)
            return
        if isinstance(came, LOST):
            with self._counting:
                for request_id in batch.ids:
                    self._lost[request_id] = self._lost.pop(request_id, 0) + 1
                for request_id in list(self._lost)[:-MOST_REMEMBERED]:  # they were encoded elsewhere
                    del self._lost[request_id]
        failed: Future[list[EncoderResult]] = Future()
        failed.set_exception(came)
        self._deliver(batch, failed, 0.0)

    def _found(self, batch: Batch) -> None:
        with self._counting:
            for request_id in batch.ids:
                self._lost.pop(request_id, None)

    @torch.inference_mode()
    def _results(self, came: Parcel) -> list[EncoderResult]:
        """Of hidden frames this engine makes the keys and values: of all of a batch in one product."""
        assert self._peers is not None
        device, identity = self._runner.device, self._peers.identity
        shape = identity.cross if came.carries == "cross" else identity.hidden
        none = torch.empty(0, *shape, dtype=device.dtype)  # of who was cancelled: no bytes cannot be viewed
        tensors = [
            torch.from_numpy(data).view(device.dtype).view(-1, *shape) if data.nbytes else none
            for data in came.data
        ]
        together = torch.cat(tensors).to(device.torch_device)
        if came.carries == "hidden":
            filler = -len(together) % device.frame_block
            hidden = torch.cat([together, together.new_zeros(filler, *shape)])
            together = self._runner.model.cross(hidden) if len(hidden) else hidden.new_empty(0, *identity.cross)
        offsets = [0, *itertools.accumulate(map(len, tensors))]
        return [EncoderResult(together[start:end]) for start, end in itertools.pairwise(offsets)]


def _settle(device: Device) -> None:
    """The calling thread alone, and behind whoever else wants its core: the loop's steps are short and many wait
    for them."""
    device.share(1)
    with contextlib.suppress(OSError, AttributeError):  # a courtesy, not worth a batch
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + BEHIND)
