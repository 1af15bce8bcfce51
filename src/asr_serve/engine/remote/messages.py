"""Messages between an engine that requests encoding (client) and one that encodes (worker): length-prefixed
msgspec structs over TCP.

The samples that an EncodeMessage announces follow it. Encoder output goes over a transport of its own
(transfer/transports); EncodeDone reports that it has been written. No received message is trusted: one that is too
long is refused, and an invalid one ends the connection and nothing else.
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

from asr_serve.errors import MalformedRequest, PeerGone, TransportTimeout
from asr_serve.transfer.tcp_options import configure_connection, set_timeout
from asr_serve.transfer.transports import BufferRegion
from asr_serve.types import Priority

VERSION = 3
"""Protocol version. Engines of different versions do not work together."""
MAX_MESSAGE_BYTES = 1 << 20
"""Limit of a message without its samples."""
MESSAGE_S = 10.0
"""Time limit of a message that has begun."""
SEND_S = 30.0
"""Time in which the other side must read some of what it is sent, or count as gone."""
MAX_WITHIN_MS = 600_000
MAX_QUOTED_CHARS = 200
"""Limit of the other side's text in an error or the log."""
_LENGTH = struct.Struct("<I")


class EncoderIdentity(msgspec.Struct, frozen=True):
    """Properties that must be equal on both sides, or the text would differ."""

    model: str
    weights: str
    """Digest of the checkpoint: its configuration and tensors."""
    dtype: str
    quantize: str
    hidden: tuple[int, ...]
    """Shape of one encoded frame."""
    cross: tuple[int, ...]
    """Shape of its cross-attention keys and values; depends on the device too, and must match where these are
    sent."""


# --- both ways ----------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message. `keyed`: whether a proof is required and given."""

    version: int
    nonce: bytes
    keyed: bool


# --- to the worker ------------------------------------------------------------------------------------


class ClientTerms(msgspec.Struct, frozen=True, tag=True):
    """Identity of the client. `proof`: that it knows the key (handshake.proof); empty without a key."""

    identity: EncoderIdentity
    proof: bytes


class TransportOffer(msgspec.Struct, frozen=True, tag=True):
    """Receiver for encoder output. `payload`: `cross` or `hidden`."""

    transport: str
    receiver_offer: bytes
    payload: str


class EncodeMessage(msgspec.Struct, frozen=True, tag=True):
    """Encode request, followed by `length` samples of float32. `whole`: with all of the window. The output is
    written to `region`, which has exactly its size."""

    id: int
    length: int
    whole: bool
    priority: Priority
    within_ms: Annotated[int, Meta(ge=0, le=MAX_WITHIN_MS)] | None
    region: BufferRegion


class CancelEncode(msgspec.Struct, frozen=True, tag=True):
    """Cancellation of a request. It is answered nevertheless: by EncodeDone, or by EncodeFailed when nothing was
    written."""

    id: int


class PeerPing(msgspec.Struct, frozen=True, tag=True):
    """Liveness probe, answered by PeerPong."""


# --- to the client ------------------------------------------------------------------------------------


class WorkerWelcome(msgspec.Struct, frozen=True, tag=True):
    """Identity of the worker, and the limits of what one client may have in flight there."""

    identity: EncoderIdentity
    transports: tuple[str, ...]
    requests: int
    samples: int
    proof: bytes


class HandshakeRefused(msgspec.Struct, frozen=True, tag=True):
    """Refusal, and why: what differs, or what is required. The connection ends."""

    why: str


class TransportAttached(msgspec.Struct, frozen=True, tag=True):
    """Acceptance of the offered transport."""


class TransportUnreachable(msgspec.Struct, frozen=True, tag=True):
    """Failure to reach the offered receiver; the client may offer another."""

    why: str


class EncodeDone(msgspec.Struct, frozen=True, tag=True):
    """Completion: the output is in its region. Seconds: waiting, encoding with its batch, transfer."""

    id: int
    frames: int
    nbytes: int
    checksum: int
    waited_s: float
    encoded_s: float
    transfer_s: float


class EncodeFailed(msgspec.Struct, frozen=True, tag=True):
    """Failure: nothing was written, because its step failed or it was cancelled."""

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
    """One end of a connection. `send` may be called from any thread; one thread receives."""

    def __init__(self, end: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        configure_connection(end)
        set_timeout(end, socket.SO_SNDTIMEO, SEND_S)
        self._end, self._decoder = end, decoder
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    @property
    def local_host(self) -> str:
        """Address at which the other side reaches this one."""
        return str(self._end.getsockname()[0])

    @property
    def remote_host(self) -> str:
        """Address of the other side. Raises PeerGone."""
        try:
            return str(self._end.getpeername()[0])
        except OSError as failure:
            raise PeerGone(f"the other engine has hung up: {failure}") from failure

    def send(self, message: Message, samples: np.ndarray | None = None) -> None:
        """Sends a message. Blocks while the other side does not read, at most SEND_S without a byte. Raises
        PeerGone."""
        data = _encode(message)
        assert len(data) <= MAX_MESSAGE_BYTES
        try:
            with self._sending:
                self._end.sendall(_LENGTH.pack(len(data)) + data)
                if samples is not None:
                    self._end.sendall(samples.data.cast("B"))
        except BlockingIOError:  # the send timeout
            self.shut_down()  # half a message may be out: nothing can follow it
            raise PeerGone(f"the other engine has read nothing for {SEND_S:g} s") from None
        except (OSError, ValueError) as failure:
            raise PeerGone(f"the other engine has hung up: {failure}") from failure

    def receive(self, wait_s: float) -> Any:
        """Returns the next message; None when none has begun within `wait_s`. Raises PeerGone, TransportTimeout when it
        stops in the middle, MalformedRequest for an invalid one."""
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
        """Returns the next message, which must be of that kind. Raises as `receive`, and TransportTimeout where none
        comes."""
        message = self.receive(wait_s)
        if message is None:
            raise TransportTimeout(f"no {kind.__name__} came in {wait_s:g} s")
        if not isinstance(message, kind):
            raise MalformedRequest(f"a message {type(message).__name__}", f"{kind.__name__} was to come")
        return message

    def receive_samples(self, count: int) -> np.ndarray:
        """Returns the samples that an EncodeMessage announced. Raises PeerGone, TransportTimeout."""
        pcm = np.empty(count, np.float32)
        self._receive_exactly(pcm.data.cast("B"), time.monotonic() + MESSAGE_S)
        return pcm

    def shut_down(self) -> None:
        """Ends the connection: threads blocked on it raise PeerGone. `close` must still follow."""
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
                raise TransportTimeout(f"a message stopped after {at} of {len(view)} bytes")
            try:
                count = self._end.recv_into(view[at:])
            except OSError as failure:
                raise PeerGone(f"the connection broke: {failure}") from failure
            if not count:
                raise PeerGone("the other engine has hung up")
            at += count
        return into


def quoted(theirs: object) -> str:
    """Quotes the other side's text for an error or the log: short, and on one line."""
    return repr(str(theirs)[:MAX_QUOTED_CHARS])
