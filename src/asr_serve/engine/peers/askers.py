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

from asr_serve.engine.peers import meeting, said
from asr_serve.engine.peers.meeting import Meeting, Met
from asr_serve.engine.peers.said import Encode, Identity, Line
from asr_serve.errors import AsrServeError, MalformedRequest, PeerGone, RoadFailed
from asr_serve.transfer import roads
from asr_serve.transfer.roads import Sender, Spot
from asr_serve.types import Priority

SILENT_S = 120.0
"""An asker that says nothing for so long is gone: it pings much more often."""
MOST_OFFERS = 8
"""Roads that one asker may offer."""
MOST_BYTES = 1 << 30
"""That one asker may wait for at once, unless one utterance takes more. worker.MOST_UNSENT bounds all of them."""

log = logging.getLogger(__name__)


class Request(msgspec.Struct, eq=False):
    """An utterance to encode, of one asker. `pcm` (n,) float32, 16 kHz."""

    asker: Asker
    id: int
    """The asker's."""
    pcm: np.ndarray
    frames: int
    whole: bool
    priority: Priority
    within_ms: int | None
    spot: Spot
    arrived_s: float
    key: int = 0
    """The worker's, while it waits to be planned."""
    cancelled: bool = False


class Reply(NamedTuple):
    """`data` (nbytes,) uint8; None: it failed, and `why`."""

    request: Request
    data: np.ndarray | None
    why: str
    waited_s: float = 0.0
    encoded_s: float = 0.0


class Desk(NamedTuple):
    """What askers meet: who encodes here, how much one may ask for, and who does it."""

    identity: Identity
    meeting: Meeting
    bounds: Met
    samples: tuple[int, int]
    """The fewest and the most of an utterance."""
    frames: Callable[[int, bool], int]
    """Raises MalformedRequest for all of a window where there is none."""
    longest_frames: int
    """Of one utterance."""
    frame_bytes: dict[str, int]
    """Of what is carried: `cross`, `hidden`."""
    timeout_s: float
    wanted: Callable[[Request], None]
    """This and the next two from any thread."""
    unwanted: Callable[[Request], None]
    gone: Callable[[Asker], None]
    sent: Callable[[], None]
    """From any thread, after each reply: memory is free again."""


class Asker:
    """Lives on a thread of its own, `run`, until the connection ends."""

    def __init__(self, line: Line, name: str, desk: Desk) -> None:
        self.line, self.name, self._desk = line, name, desk
        self.carries = ""
        self.welcome = False
        """It has said who it is, and proved it."""
        self.finished_s: dict[Priority, float] = {}
        """The worker's: when, by its share, what it has asked for in each class will be done."""
        self._lock = threading.Lock()
        self._over = False
        self._held: dict[int, Request] = {}
        self._samples = self._bytes = 0
        self._most_bytes = 0
        """Of what it may wait for at once: what its landing memory holds."""
        self.unsent = 0
        """Bytes that are encoded for it and not there yet: memory of this process."""
        self._out: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()

    def run(self) -> None:
        sending: threading.Thread | None = None
        sender: Sender | None = None
        try:
            identity = meeting.welcome(self.line, self._desk.identity, self._desk.meeting.keys, self._desk.bounds)
            self.welcome = True
            sender = self._attach(identity)
            sending = threading.Thread(target=self._send_all, args=(sender,), name="peer replies", daemon=True)
            sending.start()
            log.info("%s asks this engine to encode (%s)", self.name, self.carries)
            self._listen()
        except PeerGone as end:
            log.log(logging.INFO if sending else logging.DEBUG, "%s has left: %s", self.name, end)
        except AsrServeError as failure:
            log.warning("%s is hung up on: %s", self.name, failure)
        except Exception:
            log.exception("%s is hung up on", self.name)
        finally:
            self._over = True
            self._desk.gone(self)
            self.line.hang_up()
            self._out.put(None)
            if sender is not None:
                sender.close()  # whoever is in its `put` waits no longer
            if sending is not None:
                sending.join()
            self.line.close()

    def answer(self, reply: Reply) -> None:
        """From any thread. Nobody waits for it here."""
        if reply.data is not None:
            with self._lock:
                self.unsent += reply.data.nbytes
        self._out.put(reply)

    # --- what it wants ------------------------------------------------------------------------------------

    def _attach(self, identity: Identity) -> Sender:
        """A road that the asker offers and that leads there. Raises RoadFailed."""
        for _ in range(MOST_OFFERS):
            offer = self.line.expect(said.Offer)
            if offer.carries not in self._desk.frame_bytes:
                raise MalformedRequest(f"carries={offer.carries[:50]!r}", ", ".join(self._desk.frame_bytes))
            if offer.carries == "cross" and identity.cross != self._desk.identity.cross:
                self.line.send(said.NotAttached(f"its keys and values are {self._desk.identity.cross}"))
                continue
            try:
                sender = roads.attach(offer.landing, only_at=self.line.there)
            except RoadFailed as failure:
                self.line.send(said.NotAttached(str(failure)[:500]))
                continue
            self.carries = offer.carries
            self._most_bytes = min(sender.nbytes, max(MOST_BYTES, self._longest_bytes))
            self.line.send(said.Attached())
            return sender
        raise RoadFailed(f"{MOST_OFFERS} roads were offered, and none leads there")

    @property
    def _longest_bytes(self) -> int:
        """Of one utterance."""
        return self._desk.longest_frames * self._desk.frame_bytes[self.carries]

    def _listen(self) -> None:
        """Until the asker is gone. Raises PeerGone, RoadFailed, MalformedRequest."""
        while True:
            match self.line.receive(SILENT_S):
                case said.Encode() as wanted:
                    self._take(wanted)
                case said.Cancel(id=number):
                    with self._lock:
                        request = self._held.get(number)
                    if request is not None:
                        request.cancelled = True
                        self._desk.unwanted(request)
                case said.Ping():
                    self.line.send(said.Pong())
                case None:
                    raise PeerGone(f"nothing came for {SILENT_S:g} s")
                case other:
                    raise MalformedRequest(f"a message {type(other).__name__}", "it is not for this moment")

    def _take(self, wanted: Encode) -> None:
        """Nothing is read, and no memory taken, for what may not be asked. Raises MalformedRequest."""
        desk, bounds = self._desk, self._desk.bounds
        fewest, most = desk.samples
        if not fewest <= wanted.length <= most:
            raise MalformedRequest(f"{wanted.length} samples", f"{fewest} to {most}")
        frames = desk.frames(wanted.length, wanted.whole)
        if wanted.spot.nbytes != frames * desk.frame_bytes[self.carries]:
            raise MalformedRequest(f"a spot of {wanted.spot.nbytes} bytes", f"{frames} frames of {self.carries}")
        with self._lock:
            if wanted.id in self._held:
                raise MalformedRequest(f"request {wanted.id} twice")
            if len(self._held) >= bounds.requests or self._samples + wanted.length > bounds.samples:
                raise MalformedRequest(
                    f"{len(self._held) + 1} requests with {self._samples + wanted.length} samples",
                    f"up to {bounds.requests} and {bounds.samples}, as this engine has said",
                )
            if self._bytes + wanted.spot.nbytes > self._most_bytes:  # nobody lends the same spot twice
                raise MalformedRequest(
                    f"spots of {self._bytes + wanted.spot.nbytes} bytes", f"{self._most_bytes} bytes of memory"
                )
        pcm = self.line.samples(wanted.length)
        request = Request(
            self,
            wanted.id,
            pcm,
            frames,
            wanted.whole,
            wanted.priority,
            wanted.within_ms,
            wanted.spot,
            time.monotonic(),
        )
        with self._lock:
            self._held[wanted.id] = request
            self._samples += wanted.length
            self._bytes += wanted.spot.nbytes
        desk.wanted(request)

    # --- what came of it ------------------------------------------------------------------------------------

    def _send_all(self, sender: Sender) -> None:
        try:
            while self._send_next(sender):
                pass
        except (PeerGone, RoadFailed) as failure:
            if not self._over:
                log.warning("%s cannot be sent what it asked for: %s", self.name, failure)
        except Exception:
            log.exception("%s cannot be sent what it asked for", self.name)
        finally:
            self.line.hang_up()
            sender.close()

    def _send_next(self, sender: Sender) -> bool:
        """False at the end. What was sent is held by nobody while the next is waited for."""
        if (reply := self._out.get()) is None:
            return False
        self._send(sender, reply)
        self._desk.sent()
        return True

    def _send(self, sender: Sender, reply: Reply) -> None:
        request, data = reply.request, reply.data
        checksum, started = 0, time.perf_counter()
        if data is not None and not request.cancelled:
            checksum = sender.put(request.spot, data, self._desk.timeout_s)
        road_s = time.perf_counter() - started
        with self._lock:  # before the asker is told, who may then ask for as much again
            del self._held[request.id]
            self._samples -= len(request.pcm)
            self._bytes -= request.spot.nbytes
            self.unsent -= 0 if data is None else data.nbytes
        if data is None or request.cancelled:
            self.line.send(said.Failed(request.id, reply.why or "cancelled"))
            return
        self.line.send(
            said.Encoded(
                request.id, request.frames, data.nbytes, checksum, reply.waited_s, reply.encoded_s, road_s
            )
        )
