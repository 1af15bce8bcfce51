"""What an engine that asks and one that encodes say to each other: msgspec structs, each behind its length, over
TCP.

The samples that an Encode announces follow it. What comes back goes by a road of its own (transfer/roads); the
message Encoded says that it is there. Nothing here is trusted before it was looked at: a message is as long as may
be or refused, and what is no message ends the connection and nothing else.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from asr_serve.errors import MalformedRequest, PeerGone, RoadTimeout
from asr_serve.transfer.tcp_options import configure_connection, set_timeout
from asr_serve.transfer.transports import BufferRegion
from asr_serve.types import Priority

VERSION = 2
"""Of what is said here. Two of different versions do not work together."""
MAX_MESSAGE_BYTES = 1 << 20
"""Of a message, its samples apart."""
MESSAGE_S = 10.0
"""A message that has begun is over by then."""
SEND_S = 30.0
"""For the other side to read something of what it is sent: one that does not is gone."""
MAX_WITHIN_MS = 600_000
MAX_QUOTED_CHARS = 200
"""Characters of the other side's own words, in an error or the log."""
_LENGTH = struct.Struct("<I")


class EncoderIdentity(msgspec.Struct, frozen=True):
    """What must be the same on both sides, or the text would be another."""

    model: str
    weights: str
    """Digest of the checkpoint: its configuration and tensors."""
    dtype: str
    quantize: str
    hidden: tuple[int, ...]
    """Shape of one encoded frame."""
    cross: tuple[int, ...]
    """Shape of its keys and values: it depends on the device too, and matters where these are carried."""


# --- both ways ----------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First. `keyed`: whether a proof is asked for and given."""

    version: int
    nonce: bytes
    keyed: bool


# --- to the engine that encodes -----------------------------------------------------------------------


class ClientTerms(msgspec.Struct, frozen=True, tag=True):
    """Who asks. `proof`: that it knows the key (meeting.proof); empty where there is none."""

    identity: EncoderIdentity
    proof: bytes


class TransportOffer(msgspec.Struct, frozen=True, tag=True):
    """Where what is encoded may be put, and whether that is to be `cross` or `hidden`."""

    transport: str
    receiver_offer: bytes
    payload: str


class EncodeMessage(msgspec.Struct, frozen=True, tag=True):
    """`length` samples of float32 follow. `whole`: with all of the window. What comes of it is put into `spot`,
    which is just as large."""

    id: int
    length: int
    whole: bool
    priority: Priority
    within_ms: Annotated[int, Meta(ge=0, le=MAX_WITHIN_MS)] | None
    region: BufferRegion


class CancelEncode(msgspec.Struct, frozen=True, tag=True):
    """Nobody wants that one any more. It is answered nevertheless: by Encoded, or by Failed when nothing was
    put."""

    id: int


class PeerPing(msgspec.Struct, frozen=True, tag=True):
    """Answered by a Pong."""


# --- to the engine that asks --------------------------------------------------------------------------


class WorkerWelcome(msgspec.Struct, frozen=True, tag=True):
    """Who encodes, and how much one asker may have under way there."""

    identity: EncoderIdentity
    transports: tuple[str, ...]
    requests: int
    samples: int
    proof: bytes


class HandshakeRefused(msgspec.Struct, frozen=True, tag=True):
    """And why: what differs, or what is wanted. The connection ends."""

    why: str


class TransportAttached(msgspec.Struct, frozen=True, tag=True):
    """The road is open."""


class TransportUnreachable(msgspec.Struct, frozen=True, tag=True):
    """It leads nowhere from there: another may be offered."""

    why: str


class EncodeDone(msgspec.Struct, frozen=True, tag=True):
    """It is in its spot. Seconds: how long it waited there, was encoded with its batch, was on the road."""

    id: int
    frames: int
    nbytes: int
    checksum: int
    waited_s: float
    encoded_s: float
    transfer_s: float


class EncodeFailed(msgspec.Struct, frozen=True, tag=True):
    """Nothing was put: its step failed, or it was cancelled."""

    id: int
    why: str


class PeerPong(msgspec.Struct, frozen=True, tag=True):
    pass


ToWorker = Hello | ClientTerms | TransportOffer | EncodeMessage | CancelEncode | PeerPing
ToClient = (
    Hello
    | WorkerWelcome
    | HandshakeRefused
    | TransportAttached
    | TransportUnreachable
    | EncodeDone
    | EncodeFailed
    | PeerPong
)
Message = ToWorker | ToClient
M = TypeVar("M", bound=Message)

_encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker)
decode_to_client = msgspec.msgpack.Decoder(ToClient)


class PeerChannel:
    """One end of the connection. `send` may be called from any thread; one thread receives."""

    def __init__(self, end: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        configure_connection(end)
        set_timeout(end, socket.SO_SNDTIMEO, SEND_S)
        self._end, self._decoder = end, decoder
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    @property
    def local_host(self) -> str:
        """The address at which the other side reaches this one."""
        return str(self._end.getsockname()[0])

    @property
    def remote_host(self) -> str:
        """The address from which the other side speaks. Raises PeerGone."""
        try:
            return str(self._end.getpeername()[0])
        except OSError as failure:
            raise PeerGone(f"the other engine has hung up: {failure}") from failure

    def send(self, message: Message, samples: np.ndarray | None = None) -> None:
        """Waits while the other side does not read, SEND_S at most without a byte. Raises PeerGone."""
        data = _encode(message)
        assert len(data) <= MAX_MESSAGE_BYTES
        try:
            with self._sending:
                self._end.sendall(_LENGTH.pack(len(data)) + data)
                if samples is not None:
                    self._end.sendall(samples.data.cast("B"))
        except BlockingIOError:  # the socket's own word for time that is over
            self.shut_down()  # half a message may be out: nothing can follow it
            raise PeerGone(f"the other engine has read nothing for {SEND_S:g} s") from None
        except (OSError, ValueError) as failure:
            raise PeerGone(f"the other engine has hung up: {failure}") from failure

    def receive(self, wait_s: float) -> Any:
        """The next message; None when none has begun by then. Raises PeerGone, RoadTimeout when it stops in the
        middle, MalformedRequest for what is none."""
        if not self._ready(wait_s):
            return None
        end_s = time.monotonic() + MESSAGE_S
        (length,) = _LENGTH.unpack(self._receive_exactly(bytearray(_LENGTH.size), end_s))
        if length > MAX_MESSAGE_BYTES:
            raise MalformedRequest(f"a message of {length} bytes", f"up to {MAX_MESSAGE_BYTES}")
        data = self._receive_exactly(bytearray(length), end_s)
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, RecursionError) as failure:
            raise MalformedRequest(f"{length} bytes that are no message: {quoted(failure)}") from failure

    def expect(self, kind: type[M], wait_s: float = MESSAGE_S) -> M:
        """A message of that kind and no other. Raises as `receive`, and RoadTimeout where none comes."""
        message = self.receive(wait_s)
        if message is None:
            raise RoadTimeout(f"no {kind.__name__} came in {wait_s:g} s")
        if not isinstance(message, kind):
            raise MalformedRequest(f"a message {type(message).__name__}", f"{kind.__name__} was to come")
        return message

    def receive_samples(self, count: int) -> np.ndarray:
        """What an Encode announced. Raises PeerGone, RoadTimeout."""
        pcm = np.empty(count, np.float32)
        self._receive_exactly(pcm.data.cast("B"), time.monotonic() + MESSAGE_S)
        return pcm

    def shut_down(self) -> None:
        """Whoever waits here, in any thread, wakes up with PeerGone. `close` is still to come."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut_down()
        self._end.close()

    def _ready(self, wait_s: float) -> bool:
        try:
            return bool(self._poll.poll(max(0.0, wait_s) * 1_000))
        except (OSError, ValueError) as failure:
            raise PeerGone(f"the connection is closed: {failure}") from failure

    def _receive_exactly(self, into: bytearray | memoryview, end_s: float) -> bytearray | memoryview:
        view, at = memoryview(into), 0
        while at < len(view):
            if not self._ready(end_s - time.monotonic()):
                raise RoadTimeout(f"a message stopped after {at} of {len(view)} bytes")
            try:
                got = self._end.recv_into(view[at:])
            except OSError as failure:
                raise PeerGone(f"the connection broke: {failure}") from failure
            if not got:
                raise PeerGone("the other engine has hung up")
            at += got
        return into


def quoted(theirs: object) -> str:
    """What the other side said in its own words, as it may go into an error or the log: short, and on one line."""
    return repr(str(theirs)[:MAX_QUOTED_CHARS])
