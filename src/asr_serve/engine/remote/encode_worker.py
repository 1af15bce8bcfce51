"""Worker engine: listens for other engines, and encodes the requests of all of them in batches.

It is a ModelExecutor of an ordinary loop, so the supervisor of an engine process, its liveness checks and its
metrics need no special case. Threads beside the loop read requests of clients and send the results; scheduling and
encoding happen in the loop.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from asr_serve.config import EngineConfig
from asr_serve.engine.executor import LoopContext, StepGuard
from asr_serve.engine.remote.encode_client import EncodeClient, EncodeReply, EncodeRequest, EncodeService
from asr_serve.engine.remote.handshake import MAX_CLIENTS, HandshakeSettings, PeerDescription, reject_client
from asr_serve.engine.remote.messages import EncoderIdentity, PeerChannel, decode_to_worker
from asr_serve.engine.request import RecognitionRequest, reject
from asr_serve.engine.seq2seq.encoder import EncodeRunner
from asr_serve.engine.seq2seq.scheduler import ScheduledRequest, Seq2SeqScheduler
from asr_serve.errors import AsrServeError, MalformedRequest, OptionError
from asr_serve.transfer import transports

MAX_REJECTING = 4
"""Surplus clients that are refused with a message at once; further ones are disconnected."""
MAX_REQUESTS = 256
"""Requests that one client may have in flight."""
MAX_REQUEST_SAMPLES = 16 << 20
"""Samples that one client may have in flight: 64 MiB of audio, or one utterance where that is longer."""
MAX_UNSENT_BYTES_TOTAL = 2 << 30
"""Output of all clients that may be encoded and not sent yet: beyond it nothing more is encoded. A batch may
exceed it. A client that does not receive is disconnected after `peer_timeout_s`."""
ROOM = 1 << 30
"""Rows and pages for the scheduler: the engine that decodes has counted them."""
AGAIN_S = 1.0
"""Pause before accepting again when the system has no descriptor left."""

log = logging.getLogger(__name__)


class EncodeWorker:
    """Executor of an engine that encodes for others. See engine/executor.ModelExecutor. `samples`: fewest and most
    of an utterance."""

    def __init__(
        self,
        runner: EncodeRunner,
        config: EngineConfig,
        identity: EncoderIdentity,
        meeting: HandshakeSettings,
        samples: tuple[int, int],
        frame_bytes: dict[str, int],
    ) -> None:
        """Raises OptionError where the address cannot be listened at."""
        self.runner, self.device = runner, runner.device
        self.scheduler = Seq2SeqScheduler(
            config, config.encode_frames or runner.device.encode_frames, packed=runner.device.packs_clips
        )
        self._identity, self._handshake, self._timeout_s = identity, meeting, config.peer_timeout_s
        self._samples, self._frame_bytes = samples, frame_bytes
        self._waiting: dict[int, EncodeRequest] = {}
        self._keys = itertools.count()
        self._frame_s = 0.0
        """Time per frame, averaged over the last batches."""
        self._lock = threading.Lock()
        self._clients: dict[EncodeClient, None] = {}
        """Connected clients, oldest first."""
        self._turning_away = threading.Semaphore(MAX_REJECTING)
        self._held_back = False
        """Whether no batch was begun because too much output is unsent."""
        self._closing = threading.Event()
        self._listener = _listen(*meeting.listen_address)
        self.port: int = self._listener.getsockname()[1]
        self.batches = self.encoded = 0

    def attach(self, context: LoopContext) -> None:
        self.context = context
        most = max(MAX_REQUEST_SAMPLES, self._samples[1])
        limits = PeerDescription(self._identity, transports.available_transports(), MAX_REQUESTS, most)
        model = self.runner.model

        def frames(length: int, whole: bool) -> int:
            if whole and not model.pads_to_window:
                raise MalformedRequest("an utterance with all of its window", "this model has none")
            return model.count_frames(length, whole)

        service = EncodeService(
            self._identity,
            self._handshake,
            limits,
            self._samples,
            frames,
            max(frames(self._samples[1], whole) for whole in {False, model.pads_to_window}),
            self._frame_bytes,
            self._timeout_s,
            on_request=lambda request: context.call(lambda: self._on_request(request)),
            on_cancel=lambda request: context.call(lambda: self._on_cancel(request)),
            on_disconnect=lambda client: context.call(lambda: self._on_disconnect(client)),
            on_sent=self._on_sent,
        )
        threading.Thread(target=self._accept, args=(service,), name="peer door", daemon=True).start()
        log.info("this engine encodes %s for others on port %d", self._identity.model, self.port)

    # --- clients, on the accepting thread -----------------------------------------------------------------

    def _accept(self, desk: EncodeService) -> None:
        while not self._closing.is_set():
            try:
                end, address = self._listener.accept()
            except OSError as failure:
                if not self._closing.wait(AGAIN_S):
                    log.warning("nobody can be let in: %s", failure)
                continue
            name = f"{address[0]}:{address[1]}"
            try:
                self._admit(EncodeClient(PeerChannel(end, decode_to_worker), name, desk))
            except (OSError, RuntimeError) as failure:  # it has disconnected, or no thread can be started
                log.warning("%s cannot be let in: %s", name, failure)
                end.close()

    def _admit(self, client: EncodeClient) -> None:
        with self._lock:
            evicted = self._choose_evicted(client)
            if evicted is not client:
                self._clients[client] = None
        if evicted is not None:
            log.warning("%s is hung up on: %d connections are open already", evicted.name, MAX_CLIENTS)
        if evicted is client:
            self._reject(client.channel)
            return
        if evicted is not None:
            evicted.channel.shut_down()
        with contextlib.ExitStack() as undo:
            undo.callback(self._remove_client, client)
            threading.Thread(target=self._serve_client, args=(client,), name="peer asks", daemon=True).start()
            undo.pop_all()

    def _reject(self, line: PeerChannel) -> None:
        """Refuses a client on a thread of its own, since the accepting thread must not block. It is told why, or
        it would try again and again."""

        def send_rejection() -> None:
            try:
                with contextlib.suppress(AsrServeError):  # it is gone, or silent
                    reject_client(line, f"{MAX_CLIENTS} askers are here already; ask another engine")
            finally:
                line.close()
                self._turning_away.release()

        with contextlib.ExitStack() as undo:
            undo.callback(line.close)
            if self._closing.is_set() or not self._turning_away.acquire(blocking=False):
                return
            undo.callback(self._turning_away.release)
            threading.Thread(target=send_rejection, name="peer turned away", daemon=True).start()
            undo.pop_all()

    def _choose_evicted(self, new: EncodeClient) -> EncodeClient | None:
        """Returns the client to disconnect, if there are too many: the oldest that has not finished its handshake,
        or the new one."""
        if self._closing.is_set():
            return new
        if len(self._clients) < MAX_CLIENTS:
            return None
        for client in self._clients:
            if not client.welcome:
                del self._clients[client]
                return client
        return new

    def _serve_client(self, client: EncodeClient) -> None:
        try:
            client.run()
        finally:
            self._remove_client(client)

    def _remove_client(self, client: EncodeClient) -> None:
        with self._lock:
            self._clients.pop(client, None)
        self._on_sent()  # its output no longer counts as unsent

    def _on_sent(self) -> None:
        if self._held_back:
            self.context.call(lambda: None)

    # --- on the loop's thread -----------------------------------------------------------------------------

    def _on_request(self, request: EncodeRequest) -> None:
        """Enqueues a request. Those of one client count as arriving one after the other, as if it had the engine
        to itself: a client with many requests delays its own last ones, not those of others."""
        request.key = next(self._keys)
        self._waiting[request.key] = request
        client, now_s = request.client, time.monotonic()
        begins_s = max(now_s, client.finished_s.get(request.priority, 0.0))
        client.finished_s[request.priority] = begins_s + request.frames * self._frame_s
        self.scheduler.enqueue(
            ScheduledRequest(request.key, request.frames, 1, request.priority, begins_s * 1_000, request.within_ms)
        )

    def _on_cancel(self, request: EncodeRequest) -> None:
        if self._waiting.get(request.key) is request:
            self._schedule_request(request)
            request.client.enqueue_reply(EncodeReply(request, None, "cancelled"))

    def _on_disconnect(self, client: EncodeClient) -> None:
        for request in [request for request in self._waiting.values() if request.client is client]:
            self._schedule_request(request)

    def _schedule_request(self, request: EncodeRequest) -> None:
        self.scheduler.remove(request.key)
        del self._waiting[request.key]
        if all(other.client is not request.client for other in self._waiting.values()):
            request.client.finished_s.clear()  # an unused share is not saved up

    def _output_full(self) -> bool:
        """Returns whether clients must receive output before more is encoded."""
        self._held_back = True  # set before counting: replies sent from here on wake this loop
        with self._lock:
            unsent = sum(client.unsent for client in self._clients)
        self._held_back = unsent >= MAX_UNSENT_BYTES_TOTAL
        return self._held_back

    def step(self) -> bool:
        if self._waiting and self._output_full():
            return False
        batch = [self._waiting[key] for key in self.scheduler.schedule(ROOM, ROOM)]
        for request in batch:
            self._schedule_request(request)
        if not batch:
            return False
        started_s, started = time.monotonic(), time.perf_counter()
        for request in batch:
            self.context.stats.record_queue_time(request.priority, started_s - request.arrived_s)

        def fail(error: AsrServeError) -> None:
            for request in batch:
                request.client.enqueue_reply(EncodeReply(request, None, str(error)))

        encoded: list[Tensor] = []
        with StepGuard(self.context.stats, "encode", "encoding", fail):
            encoded = self._encode(batch)
        if not encoded:
            return True
        seconds, frames = time.perf_counter() - started, sum(request.frames for request in batch)
        self._frame_s = (self._frame_s + seconds / frames) / 2
        for request, tensor in zip(batch, encoded, strict=True):
            data = tensor.view(torch.uint8).numpy().reshape(-1)
            request.client.enqueue_reply(EncodeReply(request, data, "", started_s - request.arrived_s, seconds))
        self.batches, self.encoded = self.batches + 1, self.encoded + len(batch)
        self.context.stats.record_step("encode", seconds, len(batch), min(1.0, frames / self.scheduler.encode_frames))
        return True

    @torch.inference_mode()
    def _encode(self, batch: list[EncodeRequest]) -> list[Tensor]:
        """Returns the output of each request in its client's payload, (frames, ...), contiguous in host memory."""
        hidden, packing = self.runner.encode_hidden([r.pcm for r in batch], [r.whole for r in batch])
        payloads = {"hidden": hidden}
        if any(request.client.payload == "cross" for request in batch):
            payloads["cross"] = self.runner.model.cross_keys_values(hidden)
        return [
            _own_copy(payloads[request.client.payload][offset : offset + frames])
            for request, offset, frames in zip(batch, packing.offsets, packing.frames, strict=True)
        ]

    # --- the rest of engine/executor.ModelExecutor ----------------------------------------------------------

    def submit(self, utterance: RecognitionRequest) -> None:
        reject(utterance.future, OptionError("this engine encodes for others", "it answers nobody itself"))

    def cancel(self, request_id: int) -> None:
        """Does nothing: no such request is ever accepted."""

    def expedite(self, request_id: int, within_ms: int) -> None:
        """Does nothing, like `cancel`."""

    @property
    def due_s(self) -> float | None:
        return None

    @property
    def idle(self) -> bool:
        return not self._waiting

    def check(self) -> None:
        assert len(self.scheduler) == len(self._waiting) == 0, "a request was lost"

    def shutdown(self, error: Exception) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # unblocks `accept`
        self._listener.close()
        with self._lock:
            for client in self._clients:
                client.channel.shut_down()

    def cached_audio(self) -> list[bytes]:
        return []

    def watch_audio(self, on_change: Callable[[bytes, bool], None]) -> None:
        """Does nothing: no audio is cached."""

    def report(self) -> dict[str, int]:
        return {"waiting": len(self._waiting), "decoding": 0, "pages": 0, "pages_used": 0}

    def describe(self) -> dict[str, Any]:
        with self._lock:
            clients = len(self._clients)
        return {
            "pages": 0,
            "pages_used": 0,
            "askers": clients,
            "peer_batches": self.batches,
            "peer_requests": self.encoded,
        }


def _own_copy(frames: Tensor) -> Tensor:
    """Returns the frames in host memory, contiguous, and not as a view: a slow client holds its own clip, not the
    whole batch."""
    copied = frames.contiguous().cpu()
    return copied.clone() if copied.untyped_storage().nbytes() > copied.nbytes else copied


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(MAX_CLIENTS)
        except OSError:
            listener.close()
            raise
    except OSError as failure:
        raise OptionError(
            f"{host}:{port} cannot be listened at for peers: {failure.strerror or failure}",
            "an address of this machine and a free port",
            "choose another with --encode-port",
            param="encode_port",
        ) from failure
    return listener
