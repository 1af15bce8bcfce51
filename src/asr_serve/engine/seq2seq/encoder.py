"""Utterances through a model's encoder, and what it hands to the decoder.

`EncodeRunner` and `runner.DecodeRunner` meet only in `EncoderResult`, so that they may live in different
processes.
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
from torch import Tensor

from asr_serve.devices.interface import Device
from asr_serve.engine.remote.connection import EncodeClip, EncodedBatch, PeerConnection, RemoteBatch
from asr_serve.engine.remote.peer_pool import PeerPool
from asr_serve.errors import AsrServeError, PeerGone, RoadTimeout, Torn
from asr_serve.models.interfaces import EncoderDecoderModel
from asr_serve.models.packing import PackedBatch
from asr_serve.types import Priority


class EncoderResult(NamedTuple):
    """All a decoder needs of one utterance: cross-attention keys and values, (frames, layers, 2, width)."""

    cross_kv: Tensor

    @property
    def frames(self) -> int:
        return self.cross_kv.shape[0]


class BorrowedPages(NamedTuple):
    """Cross-attention keys and values that lie in pages already. Whoever lends them keeps them until the row has
    left."""

    pages: list[int]
    frames: int


class OwnedPages(NamedTuple):
    """The same in pages that the row gives back: they are its own as much as anybody's."""

    pages: list[int]
    frames: int


class EncodeRunner:
    """Utterances to EncoderResults, in one batch."""

    def __init__(self, model: EncoderDecoderModel, device: Device) -> None:
        self.model, self.device = model, device

    @torch.inference_mode()
    def encode(self, batch: Sequence[np.ndarray], whole: Sequence[bool] = ()) -> list[EncoderResult]:
        """`whole`: of which all of the window is encoded, where the model has one; without, of none."""
        hidden, packing = self.encode_hidden(batch, whole)
        cross = self.model.cross_keys_values(hidden)
        return [
            EncoderResult(cross[offset : offset + frames])
            for offset, frames in zip(packing.offsets, packing.frames, strict=True)
        ]

    @torch.inference_mode()
    def encode_hidden(self, batch: Sequence[np.ndarray], whole: Sequence[bool] = ()) -> tuple[Tensor, PackedBatch]:
        """The encoder's frames alone, clips end to end: what `cross` makes the rest from, here or elsewhere."""
        clips = [tensor_from_array(pcm) for pcm in batch]
        return self.model.encode(clips, whole)


def tensor_from_array(array: np.ndarray) -> Tensor:
    """Without a copy, unless the array is read-only, which torch has no notion of."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


ENCODER_NICENESS = 5
"""How much nicer than the loop encoders are: under Linux they get a third of its share where both want a core."""
MAX_LOST_PEERS = 2
"""Peers that may be lost over one request; then it is encoded here, where it may be given up
(engine/process/client)."""
PEER_LOST_ERRORS = (PeerGone, RoadTimeout, Torn)
"""What a peer encoded did not come: it is encoded again."""
MAX_TRACKED_REQUESTS = 4_096
"""Requests of which it is known how many; of more, the first are forgotten."""


class EncodeBatch(NamedTuple):
    """Under way: these requests will need so many rows and pages. `classes`: of each its priority, and how soon it
    should be encoded, for peers that encode for others too."""

    ids: list[int]
    rows: int
    pages: int
    classes: Sequence[tuple[Priority, int | None]] = ()


OnEncoded = Callable[[EncodeBatch, Future[list[EncoderResult]], float], None]


class EncoderPool:
    """Belongs to the loop's thread; `deliver` is called on another one, with what was encoded and how long that
    took. A batch whose peer was lost is delivered with one of LOST: it wants to be encoded again. Whoever is
    delivered to says when it is `over`. `wake`: called when a peer has come or gone."""

    def __init__(
        self,
        runner: EncodeRunner,
        deliver: OnEncoded,
        peers: PeerPool | None = None,
        wake: Callable[[], None] = lambda: None,
        *,
        alone: bool = True,
    ) -> None:
        """`alone`: this engine encodes too, however many peers there are."""
        self._runner, self._deliver, self._peers, self._always_local = runner, deliver, peers, alone
        self.threads = runner.device.encoder_threads
        self._threads = ThreadPoolExecutor(
            max(1, self.threads), "asr-serve encoder", initializer=_init_encoder_thread, initargs=(runner.device,)
        )
        self.in_flight: list[EncodeBatch] = []
        self._remote: list[tuple[EncodeBatch, PeerConnection, RemoteBatch]] = []
        self._lost_peers: Counter[int] = Counter()
        """Peers lost over a request, those with the latest last."""
        self._lock = threading.Lock()
        self._concurrent = False
        if peers is not None:
            peers.connect(wake)

    def set_concurrent(self, live: bool) -> bool:
        """Whether batches are encoded beside the loop. The cores are shared out anew when callers come or have
        gone, as soon as nothing is under way."""
        wanted = live and self.threads > 0
        if wanted != self._concurrent and not self._local_batches:
            self._concurrent = wanted
            device = self._runner.device
            device.set_threads(device.decode_threads(wanted))
        return self._concurrent

    @property
    def thread_available(self) -> bool:
        """A thread of this engine's has nothing to do."""
        return self._local_batches < self.threads

    @property
    def _local_batches(self) -> int:
        """Batches under way on this engine's own threads."""
        return len(self.in_flight) - len(self._remote)

    @property
    def peer_available(self) -> bool:
        """A peer is there and has room for a batch."""
        return self._peers is not None and self._peers.has_room

    @property
    def encodes_locally(self) -> bool:
        """Whether this engine is to encode what is not away: one that only decodes does while no peer is there."""
        return self._always_local or self._peers is None or not self._peers.alive

    @property
    def reserved_rows(self) -> int:
        """Rows that what is under way will take."""
        return sum(batch.rows for batch in self.in_flight)

    @property
    def reserved_pages(self) -> int:
        return sum(batch.pages for batch in self.in_flight)

    def submit(
        self, batch: EncodeBatch, clips: Sequence[np.ndarray], whole: Sequence[bool] = (), *, away: bool = False
    ) -> None:
        """`away`: by a peer, unless none has room any more or two were lost over one of these."""
        self.in_flight.append(batch)
        if not away or not self._submit_to_peer(batch, clips, whole):
            self._run(batch, lambda: self._runner.encode(clips, whole))

    def complete(self, batch: EncodeBatch) -> None:
        """It was delivered: nothing of it is kept, its audio and what a peer made of it least of all."""
        self.in_flight = [each for each in self.in_flight if each is not batch]
        self._remote = [each for each in self._remote if each[0] is not batch]

    def check(self) -> None:
        under_way = {id(batch) for batch in self.in_flight}
        assert all(id(each[0]) in under_way for each in self._remote), "a batch is kept that is over"

    def cancel(self, request_id: int) -> None:
        """Nobody wants that request any more. A peer that has it does not encode it, if it has not begun; this
        engine's own batches go on."""
        with self._lock:
            self._lost_peers.pop(request_id, None)
        for batch, connection, away in self._remote:
            if request_id in batch.ids:
                connection.cancel_clip(away, batch.ids.index(request_id))

    def close(self) -> None:
        """Wait for what is under way here; what is away is given up."""
        if self._peers is not None:
            self._peers.close()
        self._threads.shutdown(wait=True)

    # --- by threads of this engine ------------------------------------------------------------------------

    def _run(self, batch: EncodeBatch, work: Callable[[], list[EncoderResult]], spent_s: float = 0.0) -> None:
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

    def _submit_to_peer(self, batch: EncodeBatch, pcm: Sequence[np.ndarray], whole: Sequence[bool]) -> bool:
        if self._peers is None:
            return False
        if any(self._lost_peers[request_id] >= MAX_LOST_PEERS for request_id in batch.ids):
            self._clear_losses(batch)
            return False
        model = self._runner.model
        all_of_it = whole or [False] * len(pcm)
        classes = batch.classes or [("interactive", None)] * len(pcm)
        clips = [
            EncodeClip(each, model.count_frames(len(each), of_it), of_it, priority, within_ms)
            for each, of_it, (priority, within_ms) in zip(pcm, all_of_it, classes, strict=True)
        ]
        started = self._peers.submit_batch(clips, lambda came: self._on_peer_result(batch, came))
        if started is not None:
            self._remote.append((batch, *started))
        return started is not None

    def _on_peer_result(self, batch: EncodeBatch, came: EncodedBatch | AsrServeError) -> None:
        """On a peer's thread, or the loop's."""
        if isinstance(came, EncodedBatch):
            self._clear_losses(batch)
            # Not on the loop's thread, which goes on decoding meanwhile.
            self._run(batch, lambda: self._unpack_peer_result(came), came.seconds)
            return
        if isinstance(came, PEER_LOST_ERRORS):
            with self._lock:
                for request_id in batch.ids:
                    self._lost_peers[request_id] = self._lost_peers.pop(request_id, 0) + 1
                for request_id in list(self._lost_peers)[:-MAX_TRACKED_REQUESTS]:  # they were encoded elsewhere
                    del self._lost_peers[request_id]
        failed: Future[list[EncoderResult]] = Future()
        failed.set_exception(came)
        self._deliver(batch, failed, 0.0)

    def _clear_losses(self, batch: EncodeBatch) -> None:
        with self._lock:
            for request_id in batch.ids:
                self._lost_peers.pop(request_id, None)

    @torch.inference_mode()
    def _unpack_peer_result(self, came: EncodedBatch) -> list[EncoderResult]:
        """Of hidden frames this engine makes the keys and values: of all of a batch in one product."""
        assert self._peers is not None
        device, identity = self._runner.device, self._peers.identity
        shape = identity.cross if came.payload == "cross" else identity.hidden
        none = torch.empty(0, *shape, dtype=device.dtype)  # of who was cancelled: no bytes cannot be viewed
        tensors = [
            torch.from_numpy(data).view(device.dtype).view(-1, *shape) if data.nbytes else none
            for data in came.data
        ]
        together = torch.cat(tensors).to(device.torch_device)
        if came.payload == "hidden":
            filler = -len(together) % device.frame_block
            hidden = torch.cat([together, together.new_zeros(filler, *shape)])
            cross = self._runner.model.cross_keys_values
            together = cross(hidden) if len(hidden) else hidden.new_empty(0, *identity.cross)
        offsets = [0, *itertools.accumulate(map(len, tensors))]
        return [EncoderResult(together[start:end]) for start, end in itertools.pairwise(offsets)]


def _init_encoder_thread(device: Device) -> None:
    """The calling thread alone, and behind whoever else wants its core: the loop's steps are short and many wait
    for them."""
    device.set_threads(1)
    with contextlib.suppress(OSError, AttributeError):  # a courtesy, not worth a batch
        os.setpriority(
            os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + ENCODER_NICENESS
        )
