"""Connection of one client engine: one thread reads its requests, another one sends the results."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from asr_serve.engine.remote import handshake, messages
from asr_serve.engine.remote.handshake import HandshakeSettings, PeerDescription
from asr_serve.engine.remote.messages import EncodeMessage, EncoderIdentity, PeerChannel
from asr_serve.errors import AsrServeError, MalformedRequest, PeerGone, TransportFailed
from asr_serve.transfer import transports
from asr_serve.transfer.transports import BufferRegion, TransportSender
from asr_serve.types import Priority

IDLE_TIMEOUT_S = 120.0
"""Silence after which a client counts as gone: it pings much more often."""
MAX_OFFERS = 8
"""Transports that one client may offer."""
MAX_UNSENT_BYTES = 1 << 30
"""Output that one client may wait for at once, unless one utterance takes more.
encode_worker.MAX_UNSENT_BYTES_TOTAL bounds that of all clients."""

log = logging.getLogger(__name__)


class EncodeRequest(msgspec.Struct, eq=False):
    """Utterance to encode for one client. `pcm` (n,) float32, 16 kHz."""

    client: EncodeClient
    id: int
    """Chosen by the client."""
    pcm: np.ndarray
    frames: int
    whole: bool
    priority: Priority
    within_ms: int | None
    region: BufferRegion
    arrived_s: float
    key: int = 0
    """Chosen by the worker, while the request waits to be scheduled."""
    cancelled: bool = False


class EncodeReply(NamedTuple):
    """Result of a request. `data` (nbytes,) uint8; None: it failed, because of `why`."""

    request: EncodeRequest
    data: np.ndarray | None
    why: str
    waited_s: float = 0.0
    encoded_s: float = 0.0


class EncodeService(NamedTuple):
    """Worker as its connections use it: identity, limits, and callbacks."""

    identity: EncoderIdentity
    handshake: HandshakeSettings
    limits: PeerDescription
    samples: tuple[int, int]
    """Fewest and most samples of an utterance."""
    frames: Callable[[int, bool], int]
    """Number of frames by samples and `whole`. Raises MalformedRequest for a whole window where there is none."""
    longest_frames: int
    """Most frames of one utterance."""
    frame_bytes: dict[str, int]
    """Bytes of one frame, by payload: `cross`, `hidden`."""
    timeout_s: float
    on_request: Callable[[EncodeRequest], None]
    """Called from any thread, like the next two."""
    on_cancel: Callable[[EncodeRequest], None]
    on_disconnect: Callable[[EncodeClient], None]
    on_sent: Callable[[], None]
    """Called from any thread, after each reply: memory is free again."""


class EncodeClient:
    """Connection of one client, served by `run` on a thread of its own until it ends."""

    def __init__(self, line: PeerChannel, name: str, desk: EncodeService) -> None:
        self.channel, self.name, self._service = line, name, desk
        self.payload = ""
        self.welcome = False
        """Whether the handshake has succeeded."""
        self.finished_s: dict[Priority, float] = {}
        """Used by the worker: when the requests of each priority would be done at this client's share."""
        self._lock = threading.Lock()
        self._over = False
        self._held: dict[int, EncodeRequest] = {}
        self._samples = self._bytes = 0
        self._most_bytes = 0
        """Limit of the output it may wait for at once: its receive buffer."""
        self.unsent = 0
        """Bytes encoded for it and not sent yet: memory of this process."""
        self._out: queue.SimpleQueue[EncodeReply | None] = queue.SimpleQueue()

    def run(self) -> None:
        sender_thread: threading.Thread | None = None
        sender: TransportSender | None = None
        try:
            identity = handshake.handshake_as_worker(
                self.channel, self._service.identity, self._service.handshake.keys, self._service.limits
            )
            self.welcome = True
            sender = self._attach_transport(identity)
            sender_thread = threading.Thread(target=self._send_all, args=(sender,), name="peer replies", daemon=True)
            sender_thread.start()
            log.info("%s asks this engine to encode (%s)", self.name, self.payload)
            self._receive_loop()
        except PeerGone as end:
            log.log(logging.INFO if sender_thread else logging.DEBUG, "%s has left: %s", self.name, end)
        except AsrServeError as failure:
            log.warning("%s is hung up on: %s", self.name, failure)
        except Exception:
            log.exception("%s is hung up on", self.name)
        finally:
            self._over = True
            self._service.on_disconnect(self)
            self.channel.shut_down()
            self._out.put(None)
            if sender is not None:
                sender.close()  # unblocks `write_region`
            if sender_thread is not None:
                sender_thread.join()
            self.channel.close()

    def enqueue_reply(self, reply: EncodeReply) -> None:
        """Queues a reply, from any thread, without blocking."""
        if reply.data is not None:
            with self._lock:
                self.unsent += reply.data.nbytes
        self._out.put(reply)

    # --- requests -----------------------------------------------------------------------------------------

    def _attach_transport(self, identity: EncoderIdentity) -> TransportSender:
        """Attaches the first reachable transport that the client offers. Raises TransportFailed."""
        for _ in range(MAX_OFFERS):
            offer = self.channel.expect(messages.TransportOffer)
            if offer.payload not in self._service.frame_bytes:
                raise MalformedRequest(f"carries={offer.payload[:50]!r}", ", ".join(self._service.frame_bytes))
            if offer.payload == "cross" and identity.cross != self._service.identity.cross:
                self.channel.send(
                    messages.TransportUnreachable(f"its keys and values are {self._service.identity.cross}")
                )
                continue
            try:
                sender = transports.attach_sender(offer.receiver_offer, only_at=self.channel.remote_host)
            except TransportFailed as failure:
                self.channel.send(messages.TransportUnreachable(str(failure)[:500]))
                continue
            self.payload = offer.payload
            self._most_bytes = min(sender.nbytes, max(MAX_UNSENT_BYTES, self._longest_bytes))
            self.channel.send(messages.TransportAttached())
            return sender
        raise TransportFailed(f"{MAX_OFFERS} transports were offered, and none reaches the other engine")

    @property
    def _longest_bytes(self) -> int:
        """Output bytes of the longest utterance."""
        return self._service.longest_frames * self._service.frame_bytes[self.payload]

    def _receive_loop(self) -> None:
        """Handles messages until the client is gone. Raises PeerGone, TransportFailed, MalformedRequest."""
        while True:
            match self.channel.receive(IDLE_TIMEOUT_S):
                case messages.EncodeMessage() as wanted:
                    self._accept_request(wanted)
                case messages.CancelEncode(id=number):
                    with self._lock:
                        request = self._held.get(number)
                    if request is not None:
                        request.cancelled = True
                        self._service.on_cancel(request)
                case messages.PeerPing():
                    self.channel.send(messages.PeerPong())
                case None:
                    raise PeerGone(f"nothing came for {IDLE_TIMEOUT_S:g} s")
                case other:
                    raise MalformedRequest(f"a message {type(other).__name__}", "it is not for this moment")

    def _accept_request(self, wanted: EncodeMessage) -> None:
        """Checks a request before its samples are read and memory is allocated, and submits it. Raises
        MalformedRequest."""
        service, limits = self._service, self._service.limits
        fewest, most = service.samples
        if not fewest <= wanted.length <= most:
            raise MalformedRequest(f"{wanted.length} samples", f"{fewest} to {most}")
        frames = service.frames(wanted.length, wanted.whole)
        if wanted.region.nbytes != frames * service.frame_bytes[self.payload]:
            raise MalformedRequest(f"a spot of {wanted.region.nbytes} bytes", f"{frames} frames of {self.payload}")
        with self._lock:
            if wanted.id in self._held:
                raise MalformedRequest(f"request {wanted.id} twice")
            if len(self._held) >= limits.requests or self._samples + wanted.length > limits.samples:
                raise MalformedRequest(
                    f"{len(self._held) + 1} requests with {self._samples + wanted.length} samples",
                    f"up to {limits.requests} and {limits.samples}, as this engine has said",
                )
            if self._bytes + wanted.region.nbytes > self._most_bytes:  # regions do not overlap
                raise MalformedRequest(
                    f"spots of {self._bytes + wanted.region.nbytes} bytes", f"{self._most_bytes} bytes of memory"
                )
        pcm = self.channel.receive_samples(wanted.length)
        request = EncodeRequest(
            self,
            wanted.id,
            pcm,
            frames,
            wanted.whole,
            wanted.priority,
            wanted.within_ms,
            wanted.region,
            time.monotonic(),
        )
        with self._lock:
            self._held[wanted.id] = request
            self._samples += wanted.length
            self._bytes += wanted.region.nbytes
        service.on_request(request)

    # --- replies --------------------------------------------------------------------------------------------

    def _send_all(self, sender: TransportSender) -> None:
        try:
            while self._send_next(sender):
                pass
        except (PeerGone, TransportFailed) as failure:
            if not self._over:
                log.warning("%s cannot be sent what it asked for: %s", self.name, failure)
        except Exception:
            log.exception("%s cannot be sent what it asked for", self.name)
        finally:
            self.channel.shut_down()
            sender.close()

    def _send_next(self, sender: TransportSender) -> bool:
        """Sends one reply; returns False at the end. No reference to a sent reply remains while the next is
        awaited."""
        if (reply := self._out.get()) is None:
            return False
        self._send(sender, reply)
        self._service.on_sent()
        return True

    def _send(self, sender: TransportSender, reply: EncodeReply) -> None:
        request, data = reply.request, reply.data
        checksum, started = 0, time.perf_counter()
        if data is not None and not request.cancelled:
            checksum = sender.write_region(request.region, data, self._service.timeout_s)
        transfer_s = time.perf_counter() - started
        with self._lock:  # before the reply: the client may then request as much again
            del self._held[request.id]
            self._samples -= len(request.pcm)
            self._bytes -= request.region.nbytes
            self.unsent -= 0 if data is None else data.nbytes
        if data is None or request.cancelled:
            self.channel.send(messages.EncodeFailed(request.id, reply.why or "cancelled"))
            return
        self.channel.send(
            messages.EncodeDone(
                request.id, request.frames, data.nbytes, checksum, reply.waited_s, reply.encoded_s, transfer_s
            )
        )
