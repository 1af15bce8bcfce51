"""One engine that asks this one to encode: a thread that reads what it wants, and one that sends back what came of
it."""

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
from asr_serve.errors import AsrServeError, MalformedRequest, PeerGone, RoadFailed
from asr_serve.transfer import transports
from asr_serve.transfer.transports import BufferRegion, TransportSender
from asr_serve.types import Priority

IDLE_TIMEOUT_S = 120.0
"""An asker that says nothing for so long is gone: it pings much more often."""
MAX_OFFERS = 8
"""Roads that one asker may offer."""
MAX_UNSENT_BYTES = 1 << 30
"""That one asker may wait for at once, unless one utterance takes more. worker.MOST_UNSENT bounds all of them."""

log = logging.getLogger(__name__)


class EncodeRequest(msgspec.Struct, eq=False):
    """An utterance to encode, of one asker. `pcm` (n,) float32, 16 kHz."""

    client: EncodeClient
    id: int
    """The asker's."""
    pcm: np.ndarray
    frames: int
    whole: bool
    priority: Priority
    within_ms: int | None
    region: BufferRegion
    arrived_s: float
    key: int = 0
    """The worker's, while it waits to be planned."""
    cancelled: bool = False


class EncodeReply(NamedTuple):
    """`data` (nbytes,) uint8; None: it failed, and `why`."""

    request: EncodeRequest
    data: np.ndarray | None
    why: str
    waited_s: float = 0.0
    encoded_s: float = 0.0


class EncodeService(NamedTuple):
    """What askers meet: who encodes here, how much one may ask for, and who does it."""

    identity: EncoderIdentity
    handshake: HandshakeSettings
    limits: PeerDescription
    samples: tuple[int, int]
    """The fewest and the most of an utterance."""
    frames: Callable[[int, bool], int]
    """Raises MalformedRequest for all of a window where there is none."""
    longest_frames: int
    """Of one utterance."""
    frame_bytes: dict[str, int]
    """Of what is carried: `cross`, `hidden`."""
    timeout_s: float
    on_request: Callable[[EncodeRequest], None]
    """This and the next two from any thread."""
    on_cancel: Callable[[EncodeRequest], None]
    on_disconnect: Callable[[EncodeClient], None]
    on_sent: Callable[[], None]
    """From any thread, after each reply: memory is free again."""


class EncodeClient:
    """Lives on a thread of its own, `run`, until the connection ends."""

    def __init__(self, line: PeerChannel, name: str, desk: EncodeService) -> None:
        self.channel, self.name, self._service = line, name, desk
        self.payload = ""
        self.welcome = False
        """It has said who it is, and proved it."""
        self.finished_s: dict[Priority, float] = {}
        """The worker's: when, by its share, what it has asked for in each class will be done."""
        self._lock = threading.Lock()
        self._over = False
        self._held: dict[int, EncodeRequest] = {}
        self._samples = self._bytes = 0
        self._most_bytes = 0
        """Of what it may wait for at once: what its landing memory holds."""
        self.unsent = 0
        """Bytes that are encoded for it and not there yet: memory of this process."""
        self._out: queue.SimpleQueue[EncodeReply | None] = queue.SimpleQueue()

    def run(self) -> None:
        sending: threading.Thread | None = None
        sender: TransportSender | None = None
        try:
            identity = handshake.handshake_as_worker(
                self.channel, self._service.identity, self._service.handshake.keys, self._service.limits
            )
            self.welcome = True
            sender = self._attach_transport(identity)
            sending = threading.Thread(target=self._send_all, args=(sender,), name="peer replies", daemon=True)
            sending.start()
            log.info("%s asks this engine to encode (%s)", self.name, self.payload)
            self._receive_loop()
        except PeerGone as end:
            log.log(logging.INFO if sending else logging.DEBUG, "%s has left: %s", self.name, end)
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
                sender.close()  # whoever is in its `put` waits no longer
            if sending is not None:
                sending.join()
            self.channel.close()

    def enqueue_reply(self, reply: EncodeReply) -> None:
        """From any thread. Nobody waits for it here."""
        if reply.data is not None:
            with self._lock:
                self.unsent += reply.data.nbytes
        self._out.put(reply)

    # --- what it wants ------------------------------------------------------------------------------------

    def _attach_transport(self, identity: EncoderIdentity) -> TransportSender:
        """A road that the asker offers and that leads there. Raises RoadFailed."""
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
            except RoadFailed as failure:
                self.channel.send(messages.TransportUnreachable(str(failure)[:500]))
                continue
            self.payload = offer.payload
            self._most_bytes = min(sender.nbytes, max(MAX_UNSENT_BYTES, self._longest_bytes))
            self.channel.send(messages.TransportAttached())
            return sender
        raise RoadFailed(f"{MAX_OFFERS} roads were offered, and none leads there")

    @property
    def _longest_bytes(self) -> int:
        """Of one utterance."""
        return self._service.longest_frames * self._service.frame_bytes[self.payload]

    def _receive_loop(self) -> None:
        """Until the asker is gone. Raises PeerGone, RoadFailed, MalformedRequest."""
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
        """Nothing is read, and no memory taken, for what may not be asked. Raises MalformedRequest."""
        desk, bounds = self._service, self._service.limits
        fewest, most = desk.samples
        if not fewest <= wanted.length <= most:
            raise MalformedRequest(f"{wanted.length} samples", f"{fewest} to {most}")
        frames = desk.frames(wanted.length, wanted.whole)
        if wanted.region.nbytes != frames * desk.frame_bytes[self.payload]:
            raise MalformedRequest(f"a spot of {wanted.region.nbytes} bytes", f"{frames} frames of {self.payload}")
        with self._lock:
            if wanted.id in self._held:
                raise MalformedRequest(f"request {wanted.id} twice")
            if len(self._held) >= bounds.requests or self._samples + wanted.length > bounds.samples:
                raise MalformedRequest(
                    f"{len(self._held) + 1} requests with {self._samples + wanted.length} samples",
                    f"up to {bounds.requests} and {bounds.samples}, as this engine has said",
                )
            if self._bytes + wanted.region.nbytes > self._most_bytes:  # nobody lends the same spot twice
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
        desk.on_request(request)

    # --- what came of it ------------------------------------------------------------------------------------

    def _send_all(self, sender: TransportSender) -> None:
        try:
            while self._send_next(sender):
                pass
        except (PeerGone, RoadFailed) as failure:
            if not self._over:
                log.warning("%s cannot be sent what it asked for: %s", self.name, failure)
        except Exception:
            log.exception("%s cannot be sent what it asked for", self.name)
        finally:
            self.channel.shut_down()
            sender.close()

    def _send_next(self, sender: TransportSender) -> bool:
        """False at the end. What was sent is held by nobody while the next is waited for."""
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
        road_s = time.perf_counter() - started
        with self._lock:  # before the asker is told, who may then ask for as much again
            del self._held[request.id]
            self._samples -= len(request.pcm)
            self._bytes -= request.region.nbytes
            self.unsent -= 0 if data is None else data.nbytes
        if data is None or request.cancelled:
            self.channel.send(messages.EncodeFailed(request.id, reply.why or "cancelled"))
            return
        self.channel.send(
            messages.EncodeDone(
                request.id, request.frames, data.nbytes, checksum, reply.waited_s, reply.encoded_s, road_s
            )
        )
