"""Pool of engines that encode for this one: each is connected by a thread of its own, and gets batches."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from asr_serve.engine.remote import handshake, messages
from asr_serve.engine.remote.connection import MAX_BATCHES_IN_FLIGHT, Done, EncodeClip, PeerConnection, RemoteBatch
from asr_serve.engine.remote.handshake import HELLO_S
from asr_serve.engine.remote.messages import EncoderIdentity, PeerChannel
from asr_serve.errors import (
    AsrServeError,
    ChecksumMismatch,
    MalformedRequest,
    OptionError,
    PeerGone,
    PeerRefused,
    TransportFailed,
    TransportTimeout,
)
from asr_serve.metrics import PEER_STATES, EngineMetrics
from asr_serve.transfer import transports
from asr_serve.transfer.transports import Receiver
from asr_serve.types import HandoverPayload, PeerTransportName

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0
"""Pause before an unreachable or lost peer is connected to again."""
STEADY_S = 30.0
"""Connection time after which a loss has a new cause: the peer is tried again soon."""
REFUSED_PAUSE_S = 60.0
"""Pause after a peer has refused, was refused or cannot encode: somebody has to change something first."""
ATTACH_S = 15.0
"""Time limit for a peer to attach an offered transport: it may have to find out that the network does not lead
here."""
FAILURE_LABELS = {
    "timeout": "lost, too slow",
    "corrupted": "lost, the result arrived corrupted",
    "malformed": "lost, it makes no sense",
}
"""Log texts for some of metrics.PEER_FAILURES."""
RECEIVE_BUFFER_BYTES = 256 << 20
"""Receive memory for the batches in flight at one peer, unless one utterance takes more."""

log = logging.getLogger(__name__)


class PeerPoolSettings(NamedTuple):
    """Settings of the requests to all peers."""

    identity: EncoderIdentity
    keys: tuple[str, ...]
    transport: PeerTransportName
    payload: HandoverPayload
    timeout_s: float
    frame_bytes: dict[str, int]
    """Bytes of one frame, by payload."""
    batch_frames: int
    """Most frames requested at once, or of one utterance."""
    longest_frames: int
    longest_samples: int
    metrics: EngineMetrics | None


class PeerPool:
    """Pool of peers that encode batches beside the loop. `submit_batch` is for the loop's thread."""

    def __init__(self, addresses: Sequence[str], settings: PeerPoolSettings) -> None:
        """Raises OptionError for a transport that this installation lacks."""
        available = interprocess_transports()
        if settings.transport != "auto" and settings.transport not in available:
            raise OptionError(
                f"peer_transport={settings.transport}", f"here there are {', '.join(available)}", param="peer_transport"
            )
        self._settings, self.identity = settings, settings.identity
        self._wake: Callable[[], None] = lambda: None
        self.peers = [self._make_peer(address) for address in addresses]
        """Peers that get batches. The list is replaced and never changed: other threads read it."""
        self._leaving: set[EncodePeer] = set()
        """Peers that finish their batches."""
        self._turn = 0
        self._lock = threading.Lock()  # guards `_leaving` and the counters of states

    def connect(self, wake: Callable[[], None]) -> None:
        """Connects to the peers. `wake` is called, from any thread, when a peer was connected or lost."""
        self._wake = wake
        self._notify_change()
        for peer in self.peers:
            peer.start_thread()

    def set_addresses(self, addresses: Sequence[str], on_left: Callable[[], None]) -> None:
        """Connects to peers at other addresses. Those that are not among them get no more batches, and are left once
        they have answered those in flight; then `on_left` is called, from any thread. Called by the loop's thread."""
        wanted = dict.fromkeys(addresses)
        stay = [peer for peer in self.peers if peer.address in wanted]
        leaving = [peer for peer in self.peers if peer.address not in wanted]
        come = [self._make_peer(address) for address in wanted.keys() - {peer.address for peer in stay}]
        self.peers = stay + come
        with self._lock:
            self._leaving.update(leaving)
        remaining = set(leaving)

        def left(peer: EncodePeer) -> None:
            with self._lock:
                self._leaving.discard(peer)
                remaining.discard(peer)
                last = not remaining
            if last:
                on_left()

        for peer in leaving:
            peer.leave(partial(left, peer))
        for peer in come:
            peer.start_thread()
        self._notify_change()
        if not leaving:
            on_left()

    def _make_peer(self, address: str) -> EncodePeer:
        return EncodePeer(address, self._settings, self._notify_change)

    @property
    def alive(self) -> bool:
        return any(peer.state == "ready" for peer in self.peers)

    @property
    def has_room(self) -> bool:
        """Returns whether a peer can take another batch."""
        return any(peer.has_room for peer in self.peers)

    def submit_batch(self, clips: Sequence[EncodeClip], done: Done) -> tuple[PeerConnection, RemoteBatch] | None:
        """Submits a batch to the peer with the fewest in flight, peers that failed their last batch last, ties in
        turn. Returns None where none has room."""
        self._turn += 1
        turn = self._turn % max(1, len(self.peers))
        connections = [c for peer in self.peers[turn:] + self.peers[:turn] if (c := peer.connection) is not None]
        for connection in sorted(connections, key=lambda c: (c.failing, c.batches_in_flight)):
            if (batch := connection.submit_batch(clips, done)) is not None:
                return connection, batch
        return None

    def describe(self) -> dict[str, str]:
        """Returns the state of each peer, by address."""
        return {peer.address: peer.state for peer in self.peers}

    def close(self) -> None:
        """Closes all connections; batches in flight fail."""
        with self._lock:
            peers = [*self.peers, *self._leaving]
        for peer in peers:
            peer.close()
        for peer in peers:
            peer.join()

    def _notify_change(self) -> None:
        if (metrics := self._settings.metrics) is not None:
            with self._lock:
                states = [peer.state for peer in self.peers]
                for state in PEER_STATES:
                    metrics.peers[state].set(states.count(state))
        self._wake()


class EncodePeer:
    """Peer at one address, and the thread that keeps a connection to it."""

    def __init__(self, address: str, settings: PeerPoolSettings, changed: Callable[[], None]) -> None:
        self.address, self.state = address, "connecting"
        self.connection: PeerConnection | None = None
        self._settings, self._changed = settings, changed
        self._closing = threading.Event()
        self._lock = threading.Lock()  # guards `_channel` against `close`
        self._channel: PeerChannel | None = None
        self._last_logged = ""
        self._on_left: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._reconnect_loop, name=f"peer {address}", daemon=True)

    @property
    def has_room(self) -> bool:
        connection = self.connection
        return connection is not None and connection.has_room

    def start_thread(self) -> None:
        self._thread.start()

    def leave(self, on_left: Callable[[], None]) -> None:
        """Ends the connection once its batches are answered. `on_left`: called at the end, on the peer's thread."""
        self._on_left = on_left
        self._closing.set()
        if (connection := self.connection) is not None:
            connection.finish()
        else:
            self.close()

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            if self._channel is not None:
                self._channel.shut_down()

    def join(self) -> None:
        if self._thread.is_alive():
            self._thread.join()

    def _reconnect_loop(self) -> None:
        try:
            self._keep_connected()
        finally:
            self._on_left()

    def _keep_connected(self) -> None:
        """Connects again after any failure, errors of this engine included."""
        pause_s, failures = 0.0, 0
        while not self._closing.wait(pause_s):
            failures += 1
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures, 10))
            try:
                self.connection = self._connect()
            except Exception as failure:
                refused = isinstance(failure, PeerRefused)
                pause_s = REFUSED_PAUSE_S if refused else pause_s
                self._record_failure("refused" if refused else "unreachable", failure)
                self._set_state("refused" if refused else "connecting")
                continue
            self._last_logged, connected_s = "", time.monotonic()
            usable = self._serve_connection()
            if time.monotonic() - connected_s > STEADY_S:
                pause_s, failures = FIRST_PAUSE_S, 0
            if not usable:
                pause_s = REFUSED_PAUSE_S

    def _serve_connection(self) -> bool:
        """Serves the connection until it ends, in whatever way, and fails its batches in flight. Returns False for
        a peer that cannot encode. No reference to the connection remains: its receive buffer is large."""
        connection = self.connection
        assert connection is not None
        log.info(
            "peer %s encodes for this engine (%s by %s)", self.address, connection.payload, connection.receiver.kind
        )
        self._set_state("ready")
        usable = True
        error: AsrServeError = PeerGone(f"peer {self.address}: the connection has ended")
        try:
            connection.run()
        except Exception as failure:
            text = f"peer {self.address}: {failure}"
            error = type(failure)(text) if isinstance(failure, (TransportTimeout, ChecksumMismatch)) else PeerGone(text)
            usable = not isinstance(failure, PeerRefused)
            if not self._closing.is_set():
                self._record_failure(_reason(failure), failure)
        self.connection = None
        lost = connection.fail_pending(error)
        try:
            connection.close()
        except Exception:
            log.exception("what was lent to peer %s cannot be closed", self.address)
        self._set_state("connecting" if usable else "refused")
        for batch in lost:
            batch.on_done(error)
        return usable

    def _set_state(self, state: str) -> None:
        self.state = state
        self._changed()

    def _record_failure(self, reason: str, failure: Exception) -> None:
        """Counts a failure, and logs it when it is new."""
        if (metrics := self._settings.metrics) is not None:
            metrics.peer_failures[reason].inc()
        if (text := f"{FAILURE_LABELS.get(reason, reason)}: {failure}") != self._last_logged:
            self._last_logged = text
            unexpected = None if isinstance(failure, (AsrServeError, OSError, UnicodeError)) else failure
            log.error("peer %s is %s", self.address, text, exc_info=unexpected)

    # --- connecting ---------------------------------------------------------------------------------------------

    def _connect(self) -> PeerConnection:
        """Connects and negotiates. Raises PeerRefused, PeerGone, TransportFailed, MalformedRequest, OSError;
        UnicodeError for an invalid host name."""
        host, _, port = self.address.rpartition(":")
        channel = PeerChannel(
            socket.create_connection((host.strip("[]"), int(port)), HELLO_S), messages.decode_to_client
        )
        with contextlib.ExitStack() as undo:
            undo.callback(channel.close)
            with self._lock:
                self._channel = channel
            if self._closing.is_set():
                raise PeerGone("this engine is closed")
            connection = self._negotiate_transport(channel)
            undo.pop_all()
        return connection

    def _negotiate_transport(self, line: PeerChannel) -> PeerConnection:
        settings = self._settings
        peer = handshake.handshake_as_client(line, settings.identity, settings.keys)
        if peer.samples < settings.longest_samples:
            raise PeerRefused(
                f"it takes {peer.samples} samples", f"{settings.longest_samples} are the longest utterance"
            )
        reasons = []
        for transport in interprocess_transports() if settings.transport == "auto" else (settings.transport,):
            if transport not in peer.transports:
                reasons.append(f"{transport}: it has not")
                continue
            payload = self._choose_payload(transport, peer.identity)
            try:
                receiver = transports.create_receiver(transport, self._receive_buffer_bytes(payload), line.local_host)
            except (TransportFailed, OptionError) as failure:
                reasons.append(f"{transport}: {failure}")
                continue
            with contextlib.ExitStack() as undo:
                undo.callback(receiver.close)
                line.send(messages.TransportOffer(transport, receiver.offer, payload))
                answer = line.receive(ATTACH_S)
                if isinstance(answer, messages.TransportAttached):
                    undo.pop_all()
                    return self._open_connection(line, receiver, payload, peer)
            if answer is None:
                raise TransportTimeout(f"no answer to an offer of {transport} came in {ATTACH_S:g} s")
            if not isinstance(answer, messages.TransportUnreachable):
                raise MalformedRequest(f"a message {type(answer).__name__}", "Attached or NotAttached was to come")
            reasons.append(f"{transport}: {messages.quoted(answer.why)}")
        raise PeerRefused(
            f"no transport reaches this engine from it ({'; '.join(reasons)})",
            f"by tcp and nixl it connects to this engine at {line.local_host}, to a port that the system "
            "chooses: no NAT, container bridge or firewall may be between the two",
            "give this engine an address that the peer reaches (in a container: the host's network)",
        )

    def _open_connection(
        self, line: PeerChannel, landing: Receiver, carries: str, met: handshake.PeerDescription
    ) -> PeerConnection:
        settings, frame_bytes = self._settings, self._settings.frame_bytes[carries]
        return PeerConnection(
            line, landing, carries, frame_bytes, met, settings.timeout_s, settings.metrics, self.address
        )

    def _choose_payload(self, transport: str, theirs: EncoderIdentity) -> str:
        """Returns the payload: within a machine keys and values, which this engine then need not compute; over a
        network hidden states, which are smaller."""
        compatible = theirs.cross == self._settings.identity.cross
        if self._settings.payload == "cross" and not compatible:
            raise PeerRefused(
                f"keys and values: {self._settings.identity.cross} here, {theirs.cross} there", "peer_carries=hidden"
            )
        if self._settings.payload != "auto":
            return self._settings.payload
        return "cross" if compatible and transport == "shm" else "hidden"

    def _receive_buffer_bytes(self, carries: str) -> int:
        frame_bytes = self._settings.frame_bytes[carries]
        in_flight_bytes = min(MAX_BATCHES_IN_FLIGHT * self._settings.batch_frames * frame_bytes, RECEIVE_BUFFER_BYTES)
        return max(in_flight_bytes, self._settings.longest_frames * frame_bytes)


def interprocess_transports() -> tuple[str, ...]:
    """Returns the transports of this installation that connect engines, best first."""
    return tuple(kind for kind in transports.available_transports() if kind != "local")


def _reason(failure: Exception) -> str:
    match failure:
        case TransportTimeout():
            return "timeout"
        case ChecksumMismatch():
            return "corrupted"
        case MalformedRequest():
            return "malformed"
        case PeerRefused():
            return "refused"
        case _:
            return "gone"
