"""TCP connection for bytes alone: from the sender's memory straight into the region.

    sender                                            receiver
    HELLO, the token of the offer                     -> b"+", or it hangs up
    HEAD (at, nbytes), the bytes                      -> b"+" when they are in the region
                                                      -> b"-" where no such region is leased; it hangs up

The checksum goes with the answer on the control connection, as with every transport. The receiver listens on the
address at which its peer reaches it, for one connection that knows the token; then it stops listening. A sender
learns of the receiver's death at once, or by its timeout where a machine or a network vanishes. Socket buffers
keep the system's automatic size: an explicit one is capped by net.core.wmem_max, which is lower. Nothing is
encrypted: it is for a trusted network.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import struct
import threading
import time

import msgspec
import numpy as np

from asr_serve.errors import OptionError, PeerGone, TransportFailed, TransportTimeout
from asr_serve.transfer.checksum import checksum
from asr_serve.transfer.tcp_options import configure_connection, set_timeout
from asr_serve.transfer.transports import base
from asr_serve.transfer.transports.base import BufferRegion, ReceiverOffer

HELLO = b"asr-serve transport 1"
HEAD = struct.Struct("!QQ")
TAKEN, REFUSED = b"+", b"-"
CALL_BYTES = 64 << 20
"""Bytes of one system call, which returns early, with what it has, at a timeout or when the other side is gone."""
HELLO_S, ATTACH_S = 5.0, 5.0
STALL_S = 60.0
"""Seconds without a byte within a message after which the sender counts as dead."""
STRANGERS = 16
"""Limit of connections that have not sent the token yet; above it the oldest is closed."""


def is_available() -> bool:
    return True


def create_receiver(nbytes: int, host: str) -> TcpReceiver:
    return TcpReceiver(nbytes, host)


def attach_sender(offer: ReceiverOffer, only_at: str | None) -> TcpSender:
    return TcpSender(offer, only_at)


class TcpReceiver(base.Receiver):
    """Receiver whose thread waits for the sender, and then for its messages."""

    def __init__(self, nbytes: int, host: str) -> None:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.socket(family, kind, protocol)
        except OSError as error:
            raise OptionError(f"host={host!r} ({error})", "an address of this machine", param="host") from error
        try:
            listener.bind(address)
            listener.listen(STRANGERS)
        except OSError as error:
            listener.close()
            raise OptionError(f"host={host!r} ({error})", "an address of this machine", param="host") from error
        location = msgspec.msgpack.encode(listener.getsockname()[:2])
        offer = ReceiverOffer("tcp", nbytes, base.new_token(), location)
        super().__init__(offer, np.empty(nbytes, np.uint8))
        self._token = offer.token
        self._closing, self._wake = socket.socketpair()
        self._sender: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, args=(listener,), name="tcp transport", daemon=True)
        self._thread.start()

    def _close_transport(self) -> None:
        self._wake.close()
        with self._lock:
            if self._sender is not None:
                with contextlib.suppress(OSError):
                    self._sender.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _serve(self, listener: socket.socket) -> None:
        with self._closing:
            with listener:
                sender = self._accept_sender(listener)
            if sender is None:
                return
            with sender, contextlib.suppress(OSError):
                with self._lock:
                    if self._closed:
                        return
                    self._sender = sender
                configure_connection(sender)
                sender.sendall(TAKEN)
                while self._receive_message(sender):
                    pass
            with self._lock:
                self._sender = None

    def _accept_sender(self, listener: socket.socket) -> socket.socket | None:
        """Accepts the first connection that sends the token; None when the receiver is closed before."""
        with contextlib.ExitStack() as undo, selectors.DefaultSelector() as selector:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
            selector.register(self._closing, selectors.EVENT_READ)
            strangers: dict[socket.socket, tuple[float, bytes]] = {}  # deadline, and bytes received

            def cut_all() -> None:
                for stranger_socket in strangers:
                    stranger_socket.close()

            undo.callback(cut_all)

            def cut(stranger: socket.socket) -> None:
                del strangers[stranger]
                selector.unregister(stranger)
                stranger.close()

            while True:
                soonest = min((deadline for deadline, _ in strangers.values()), default=None)
                ready = selector.select(None if soonest is None else max(0.0, soonest - time.monotonic()))
                for key, _ in ready:
                    ready_socket = key.fileobj
                    assert isinstance(ready_socket, socket.socket)
                    if ready_socket is self._closing:
                        return None
                    if ready_socket is listener:
                        with contextlib.suppress(OSError):
                            stranger, _ = listener.accept()
                            stranger.setblocking(False)
                            strangers[stranger] = time.monotonic() + HELLO_S, b""
                            selector.register(stranger, selectors.EVENT_READ)
                    elif ready_socket in strangers:
                        greeting = _read_hello(ready_socket, strangers[ready_socket][1])
                        if greeting is None or (len(greeting) == _HELLO_BYTES and not self._is_authorized(greeting)):
                            cut(ready_socket)
                        elif len(greeting) == _HELLO_BYTES:
                            del strangers[ready_socket]
                            return ready_socket
                        else:
                            strangers[ready_socket] = strangers[ready_socket][0], greeting
                while len(strangers) > STRANGERS:
                    cut(next(iter(strangers)))
                for stranger in [each for each, (deadline, _) in strangers.items() if deadline <= time.monotonic()]:
                    cut(stranger)

    def _is_authorized(self, said: bytes) -> bool:
        return hmac.compare_digest(said, HELLO + self._token)

    def _receive_message(self, sender: socket.socket) -> bool:
        """Receives one message into its region. False when no other can follow."""
        head = bytearray(HEAD.size)
        if not _receive_into(sender, memoryview(head), None):
            return False
        region = BufferRegion(*HEAD.unpack(head))
        with self._lock:
            lease = None if self._closed else self._leased_region(region)
        if lease is None or lease.sender_done:
            sender.sendall(REFUSED)
            return False
        memory = self._memory[region.at : region.at + region.nbytes].data
        if not _receive_into(sender, memory, STALL_S):
            return False
        sender.sendall(TAKEN)
        return True


class TcpSender(base.TransportSender):
    def __init__(self, offer: ReceiverOffer, only_at: str | None = None) -> None:
        super().__init__(offer)
        self._lock = threading.Lock()
        try:
            host, port = msgspec.msgpack.decode(offer.where, type=tuple[str, int])
            base.expect_address(host, only_at)
            self._line = _connected(only_at or host, port)
        except (msgspec.DecodeError, OSError, OverflowError, ValueError) as error:
            raise TransportFailed(
                f"a tcp transport was offered that cannot be reached ({error})", todo="take another"
            ) from error
        try:
            configure_connection(self._line)
            self._line.sendall(HELLO + offer.token)
            set_timeout(self._line, socket.SO_RCVTIMEO, ATTACH_S)
            welcome = self._line.recv(1)
        except OSError as error:
            self._line.close()
            raise TransportFailed(
                f"a tcp transport was offered, but nothing answers there ({error})", todo="take another"
            ) from error
        if welcome != TAKEN:
            self._line.close()
            raise TransportFailed("a tcp transport was offered, but its token is unknown there, or was used already")

    def write_region(self, spot: BufferRegion, data: np.ndarray, timeout_s: float) -> int:
        self._validate(spot, data)
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise TransportTimeout(f"the tcp transport was busy for {timeout_s:g} s")
        try:
            self._send([memoryview(HEAD.pack(spot.at, data.nbytes)), data.data], deadline)
            digest = checksum(data)  # while the last bytes are in flight
            answer = self._answer(deadline)
        except BlockingIOError:  # the socket's error for a timeout
            self._hang_up()
            raise TransportTimeout(f"{data.nbytes} bytes were not there by tcp in {timeout_s:g} s") from None
        except OSError as error:
            self._hang_up()
            raise PeerGone(f"the other end of a tcp transport is gone ({error})", todo="ask another engine") from error
        finally:
            self._lock.release()
        if answer == TAKEN:
            return digest
        self._hang_up()
        if answer == REFUSED:
            raise TransportFailed(f"{data.nbytes} bytes for {spot}, which was refused: it is not lent")
        raise PeerGone("the other end of a tcp transport hung up", todo="ask another engine")

    def close(self) -> None:
        self._hang_up()
        with self._lock:  # no `write_region` is running any more
            self._line.close()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def _send(self, parts: list[memoryview], until: float) -> None:
        while parts:
            set_timeout(self._line, socket.SO_SNDTIMEO, _left(until))
            sent = self._line.sendmsg([part[:CALL_BYTES] for part in parts], (), _NO_SIGNAL)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]

    def _answer(self, until: float) -> bytes:
        set_timeout(self._line, socket.SO_RCVTIMEO, _left(until))
        return self._line.recv(1)


_HELLO_BYTES = len(HELLO) + base.TOKEN_BYTES
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


def _left(until: float) -> float:
    """Returns the seconds until a deadline. Raises BlockingIOError when it has passed, as the socket does."""
    remaining_s = until - time.monotonic()
    if remaining_s <= 0:
        raise BlockingIOError
    return remaining_s


def _connected(host: str, port: int) -> socket.socket:
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    family, kind, protocol, _, address = addresses[0]
    line = socket.socket(family, kind, protocol)
    try:
        line.settimeout(ATTACH_S)
        line.connect(address)
    except OSError:
        line.close()
        raise
    return line


def _read_hello(stranger: socket.socket, said: bytes) -> bytes | None:
    """Returns the bytes of a greeting received so far; None when the connection ended."""
    try:
        received = stranger.recv(_HELLO_BYTES - len(said))
    except BlockingIOError:
        return said
    except OSError:
        return None
    return said + received if received else None


def _receive_into(line: socket.socket, memory: memoryview, stall_s: float | None) -> bool:
    """Fills memory from a connection. False when that ended, or (with `stall_s`) nothing arrived for that long."""
    set_timeout(line, socket.SO_RCVTIMEO, stall_s or 0.0)
    offset = 0
    while offset < len(memory):
        received = line.recv_into(memory[offset:], min(CALL_BYTES, len(memory) - offset), socket.MSG_WAITALL)
        if not received:
            return False
        offset += received
    return True
