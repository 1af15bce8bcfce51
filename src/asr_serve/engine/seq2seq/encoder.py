"""Encoder of encoder-decoder models, on this engine's threads or at peers.

`EncodeRunner` and `decoder.DecodeRunner` share only `EncoderResult`, so that they may run in different processes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr_serve import units
from asr_serve.cores import CoreContention
from asr_serve.devices.interface import Device
from asr_serve.engine.remote.connection import EncodeClip, EncodedBatch, PeerConnection, RemoteBatch
from asr_serve.engine.remote.peer_pool import PeerPool
from asr_serve.errors import AsrServeError, ChecksumMismatch, PeerGone, TransportTimeout
from asr_serve.models.interfaces import EncoderDecoderModel, SpeechLanguageModel
from asr_serve.models.packing import PackedBatch
from asr_serve.types import PeerTimings, Priority


class EncoderResult(NamedTuple):
    """Result of the encoder for one utterance: all that a decoder needs."""

    decoder_input: Tensor
    """Cross-attention keys and values (frames, layers, 2, width); of a SpeechLanguageModel embeddings (frames,
    width); for a decoder that is split over ranks the encoder frames (frames, width)."""
    ctc_frames: Tensor | None = None
    """Frames (n, width) of a SpeechLanguageModel's CTC head, from which times of tokens come; None: none are wanted."""
    timings: PeerTimings | None = None
    """Times of a result that a peer computed."""

    @property
    def frames(self) -> int:
        return self.decoder_input.shape[0]


class BorrowedPages(NamedTuple):
    """Pages with cross-attention keys and values that their lender holds until the row has left."""

    pages: list[int]
    frames: int


class OwnedPages(NamedTuple):
    """Pages with cross-attention keys and values of which the row has a reference, and frees it."""

    pages: list[int]
    frames: int


class EncodeRunner:
    """Encodes utterances in one batch."""

    def __init__(self, model: EncoderDecoderModel, device: Device) -> None:
        self.model, self.device = model, device
        self.stores_hidden = isinstance(model, SpeechLanguageModel) or device.group.size > 1
        """Whether the decoder is given encoder frames, and not their keys and values."""

    @torch.inference_mode()
    def encode(
        self, batch: Sequence[np.ndarray], whole: Sequence[bool] = (), timed: Sequence[bool] = ()
    ) -> list[EncoderResult]:
        """Returns one result for each array of samples, float32 at 16 kHz. `whole`: whether all of its window is
        encoded, for models with one; `timed`: whether times of its tokens are wanted; empty: for none."""
        ctc_frames: list[Tensor | None] = [None] * len(batch)
        if any(timed) and isinstance(self.model, SpeechLanguageModel):
            clips = [tensor_from_array(pcm) for pcm in batch]
            hidden, packing, ctc_frames = self.model.encode_timed(clips, timed)
        else:
            hidden, packing = self.encode_hidden(batch, whole)
        decoder_input = hidden if self.stores_hidden else self.model.cross_keys_values(hidden)
        return [
            EncoderResult(decoder_input[offset : offset + frames], timed_frames)
            for offset, frames, timed_frames in zip(packing.offsets, packing.frames, ctc_frames, strict=True)
        ]

    @torch.inference_mode()
    def encode_hidden(self, batch: Sequence[np.ndarray], whole: Sequence[bool] = ()) -> tuple[Tensor, PackedBatch]:
        """Returns the hidden frames alone, clips end to end, from which `model.cross_keys_values` makes the rest,
        here or in another engine."""
        clips = [tensor_from_array(pcm) for pcm in batch]
        return self.model.encode(clips, whole)

    def measure_speed(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Measures how many seconds of audio are encoded per second, by as many threads as encode live callers' audio,
        with a clip each. `clock`: in seconds. Call it on the thread that will compute."""
        device = self.device
        clip = np.random.default_rng(0).standard_normal(units.s_to_samples(MEASURED_S)).astype(np.float32) / 32
        clips = [clip] * max(1, device.encoder_threads)
        with contextlib.ExitStack() as stack:
            run_all: Callable[..., Iterable[None]] = map
            if device.encoder_threads:
                initial = (device.set_threads, (1,))
                run_all = stack.enter_context(ThreadPoolExecutor(len(clips), "asr-serve measuring", *initial)).map
            times_s: list[float] = []
            for _ in range(MEASURED_RUNS):
                started_s = clock()
                list(run_all(self._encode_clip, clips))
                times_s.append(clock() - started_s)
                if device.computes_on_host and times_s[-1] > SLOW_RUN_S:
                    break
        return len(clips) * MEASURED_S / min(times_s)

    def _encode_clip(self, clip: np.ndarray) -> None:
        self.encode([clip])[0].decoder_input.sum().item()  # waits for the device


MEASURED_S = 4.0
"""Duration of the clip of which the encoder's speed is measured."""
MEASURED_RUNS = 3
"""Runs, of which the fastest counts: the first one prepares memory, and compiles on a GPU."""
SLOW_RUN_S = 2.0
"""Duration of a run on a CPU after which there are no more."""


def tensor_from_array(array: np.ndarray) -> Tensor:
    """Tensor that shares the array's memory; a copy if it is read-only, which torch does not know."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


ENCODER_NICENESS = 5
"""Niceness of encoder threads above the loop's: under Linux they get a third of its share where both want a
core. The thread for urgent batches has the loop's: a sentence that has ended does not wait for the partials of others,
neither in the queue nor for a core. While other processes keep the cores busy, all have the loop's: else they would
get a third of a neighbour's share, too."""
MAX_LOST_PEERS = 2
"""Peers that may be lost over one request; then it is encoded here, where it may be given up
(engine/process/backend)."""
PEER_LOST_ERRORS = (PeerGone, TransportTimeout, ChecksumMismatch)
"""Errors of a peer's batch that did not arrive: it is encoded again."""
MAX_TRACKED_REQUESTS = 4_096
"""Requests whose lost peers are counted; of more, the oldest are forgotten."""


class EncodeBatch(NamedTuple):
    """Requests that are being encoded, and the rows and pages that they will need. `classes`: priority and
    `within_ms` of each, for peers that encode for other engines too."""

    ids: list[int]
    rows: int
    pages: int
    classes: Sequence[tuple[Priority, int | None]] = ()
    timed: Sequence[bool] = ()
    """Whether times of each one's tokens are wanted."""
    urgent: bool = False
    """Whether it runs on the thread for urgent batches."""


OnEncoded = Callable[[EncodeBatch, Future[list[EncoderResult]], float], None]


class EncoderPool:
    """Encoder threads and peers; belongs to the loop's thread. `deliver` is called on another thread, with the
    results and the seconds that they took. A batch whose peer was lost is delivered with one of PEER_LOST_ERRORS,
    to be encoded again. Whoever receives a batch calls `complete`. `wake`: called when a peer connects or is
    lost."""

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
        self._contended_threads = ThreadPoolExecutor(
            max(1, self.threads), "asr-serve encoder in contention", runner.device.set_threads, (1,)
        )
        self._urgent_thread = ThreadPoolExecutor(1, "asr-serve urgent encoder", runner.device.set_threads, (1,))
        self._contention = CoreContention()
        self.in_flight: list[EncodeBatch] = []
        self._remote: list[tuple[EncodeBatch, PeerConnection, RemoteBatch]] = []
        self._lost_peers: Counter[int] = Counter()
        """Number of peers lost over each request, latest last."""
        self._lock = threading.Lock()
        self._concurrent = False
        self._loop_threads = runner.device.threads
        if peers is not None:
            peers.connect(wake)

    def set_concurrent(self, wanted: bool) -> bool:
        """Sets whether batches are encoded beside the loop; returns whether they are. The cores are redistributed
        when that changes, as soon as nothing is under way here."""
        wanted = wanted and self.threads > 0
        if wanted != self._concurrent and not self._local_batches:
            self._concurrent = wanted
            self._set_loop_threads(self._runner.device.decode_threads(wanted))
        return self._concurrent

    def share_threads(self, *, live: bool) -> None:
        """Sets the loop's threads beside encoders: a fixed share with live requests, whose encoders may start at any
        moment; without them also those of encoders that are idle."""
        device = self._runner.device
        fixed = device.decode_threads(True)
        self._set_loop_threads(fixed if live else max(fixed, device.threads - self._local_batches))

    def _set_loop_threads(self, threads: int) -> None:
        if threads != self._loop_threads:
            self._loop_threads = threads
            self._runner.device.set_threads(threads)

    @property
    def thread_available(self) -> bool:
        """Returns whether a thread of this engine is free, other than that for urgent batches."""
        return self.free_threads > 0

    @property
    def free_threads(self) -> int:
        """Threads of this engine without a batch, other than that for urgent ones."""
        return self.threads - (self._local_batches - self._urgent_batches)

    @property
    def shares_cores(self) -> bool:
        """Returns whether decoding takes a core from encoders that are all busy, as with two or three cores."""
        device = self._runner.device
        return self.threads + device.decode_threads(True) > device.threads

    @property
    def urgent_thread_available(self) -> bool:
        """Returns whether the thread for urgent batches is free."""
        return self.threads > 0 and not self._urgent_batches

    @property
    def _local_batches(self) -> int:
        """Batches under way on threads of this engine."""
        return len(self.in_flight) - len(self._remote)

    @property
    def _urgent_batches(self) -> int:
        return sum(batch.urgent for batch in self.in_flight)

    @property
    def peer_available(self) -> bool:
        """Returns whether a peer is connected and has room for a batch."""
        return self._peers is not None and self._peers.has_room

    @property
    def encodes_locally(self) -> bool:
        """Returns whether this engine encodes what peers do not: one that only decodes does while no peer is
        connected."""
        return self._always_local or self._peers is None or not self._peers.alive

    @property
    def reserved_rows(self) -> int:
        """Rows that requests under way will take."""
        return sum(batch.rows for batch in self.in_flight)

    @property
    def reserved_pages(self) -> int:
        return sum(batch.pages for batch in self.in_flight)

    def submit(
        self, batch: EncodeBatch, clips: Sequence[np.ndarray], whole: Sequence[bool] = (), *, away: bool = False
    ) -> None:
        """Starts a batch. `away`: at a peer, unless none has room any more or MAX_LOST_PEERS were lost over one of
        its requests."""
        self.in_flight.append(batch)
        if not away or not self._submit_to_peer(batch, clips, whole):
            self._run(batch, lambda: self._runner.encode(clips, whole, batch.timed))

    def complete(self, batch: EncodeBatch) -> None:
        """Forgets a delivered batch, so that its audio and a peer's results are freed."""
        self.in_flight = [other for other in self.in_flight if other is not batch]
        self._remote = [other for other in self._remote if other[0] is not batch]

    def check(self) -> None:
        under_way = {id(batch) for batch in self.in_flight}
        assert all(id(remote[0]) in under_way for remote in self._remote), "a batch is kept that is over"

    def cancel(self, request_id: int) -> None:
        """Cancels a request. A peer that has not begun it does not encode it; batches of this engine go on."""
        with self._lock:
            self._lost_peers.pop(request_id, None)
        for batch, connection, remote in self._remote:
            if request_id in batch.ids:
                connection.cancel_clip(remote, batch.ids.index(request_id))

    def close(self) -> None:
        """Waits for batches of this engine; those at peers are abandoned."""
        if self._peers is not None:
            self._peers.close()
        self._threads.shutdown(wait=True)
        self._contended_threads.shutdown(wait=True)
        self._urgent_thread.shutdown(wait=True)

    # --- threads of this engine ---------------------------------------------------------------------------

    def _run(self, batch: EncodeBatch, work: Callable[[], list[EncoderResult]], spent_s: float = 0.0) -> None:
        """Runs `work` on an encoder thread. `spent_s`: seconds that a peer has spent before."""
        begun_s: list[float] = []
        contended = self._contention.contended()
        threads = self._urgent_thread if batch.urgent else self._contended_threads if contended else self._threads

        def encode() -> list[EncoderResult]:
            begun_s.append(time.perf_counter())
            return work()

        def deliver(encoded: Future[list[EncoderResult]]) -> None:
            seconds = time.perf_counter() - begun_s[0] if begun_s else 0.0
            self._deliver(batch, encoded, spent_s + seconds)

        try:
            threads.submit(encode).add_done_callback(deliver)
        except RuntimeError as failure:  # no thread can be started, or a peer's result came after `close`
            failed: Future[list[EncoderResult]] = Future()
            failed.set_exception(failure)
            self._deliver(batch, failed, spent_s)

    # --- peers --------------------------------------------------------------------------------------------

    def _submit_to_peer(self, batch: EncodeBatch, pcm: Sequence[np.ndarray], whole: Sequence[bool]) -> bool:
        if self._peers is None:
            return False
        if any(self._lost_peers[request_id] >= MAX_LOST_PEERS for request_id in batch.ids):
            self._clear_losses(batch)
            return False
        model = self._runner.model
        full_windows = whole or [False] * len(pcm)
        classes = batch.classes or [("interactive", None)] * len(pcm)
        clips = [
            EncodeClip(samples, model.count_frames(len(samples), full_window), full_window, priority, within_ms)
            for samples, full_window, (priority, within_ms) in zip(pcm, full_windows, classes, strict=True)
        ]
        started = self._peers.submit_batch(clips, lambda came: self._on_peer_result(batch, came))
        if started is not None:
            self._remote.append((batch, *started))
        return started is not None

    def _on_peer_result(self, batch: EncodeBatch, came: EncodedBatch | AsrServeError) -> None:
        """Handles the result of a batch, on a peer's thread or the loop's."""
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
        """Makes results of a peer's frames; hidden frames become keys and values in one product for the batch."""
        assert self._peers is not None
        device, identity = self._runner.device, self._peers.identity
        shape = identity.cross if came.payload == "cross" else identity.hidden
        empty = torch.empty(0, *shape, dtype=device.dtype)  # of a cancelled clip: an empty array cannot be viewed
        tensors = [
            torch.from_numpy(data).view(device.dtype).view(-1, *shape) if data.nbytes else empty for data in came.data
        ]
        packed = torch.cat(tensors).to(device.torch_device)
        if came.payload == "hidden":
            filler = -len(packed) % device.frame_block
            hidden = torch.cat([packed, packed.new_zeros(filler, *shape)])
            cross = self._runner.model.cross_keys_values
            packed = cross(hidden) if len(hidden) else hidden.new_empty(0, *identity.cross)
        offsets = [0, *itertools.accumulate(map(len, tensors))]
        return [
            EncoderResult(packed[start:end], timings=timings)
            for (start, end), timings in zip(itertools.pairwise(offsets), came.timings, strict=True)
        ]


def _init_encoder_thread(device: Device) -> None:
    """Limits the calling thread to one core, with lower priority: the loop's steps are short and many wait for
    them."""
    device.set_threads(1)
    with contextlib.suppress(OSError, AttributeError):  # a courtesy, not worth a batch
        os.setpriority(
            os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + ENCODER_NICENESS
        )
