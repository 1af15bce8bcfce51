"""The engines that encode for this one: kept connected, each by a thread of its own, and given batches."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from asr_serve.engine.remote import handshake, messages
from asr_serve.engine.remote.connection import MAX_BATCHES_IN_FLIGHT, Done, EncodeClip, PeerConnection, RemoteBatch
from asr_serve.engine.remote.handshake import HELLO_S
from asr_serve.engine.remote.messages import EncoderIdentity, PeerChannel
from asr_serve.errors import (
    AsrServeError,
    MalformedRequest,
    OptionError,
    PeerGone,
    PeerRefused,
    RoadFailed,
    RoadTimeout,
    Torn,
)
from asr_serve.metrics import PEER_STATES, EngineMetrics
from asr_serve.transfer import transports
from asr_serve.transfer.transports import Receiver
from asr_serve.types import HandoverPayload, PeerTransportName

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0
"""Before a peer that is not there is tried again, or one that was lost."""
STEADY_S = 30.0
"""One that stayed so long was lost over something new: it is tried again soon."""
REFUSED_PAUSE_S = 60.0
"""Before one that refuses, is refused or cannot encode: somebody has to change something first."""
ATTACH_S = 15.0
"""For a peer to attach what it is offered: it may have to find out that a network does not lead here."""
FAILURE_LABELS = {
    "timeout": "lost, too slow",
    "torn": "lost, what came is torn",
    "malformed": "lost, it makes no sense",
}
"""For the log: what is said of a peer for some of metrics.PEER_FAILURES."""
RECEIVE_BUFFER_BYTES = 256 << 20
"""Memory for what one peer may have under way, unless one utterance takes more."""

log = logging.getLogger(__name__)


class PeerPoolSettings(NamedTuple):
    """What every peer is asked for, and how."""

    identity: EncoderIdentity
    keys: tuple[str, ...]
    transport: PeerTransportName
    payload: HandoverPayload
    timeout_s: float
    frame_bytes: dict[str, int]
    """Of what is carried."""
    batch_frames: int
    """The most that is asked for at once, or of one utterance."""
    longest_frames: int
    longest_samples: int
    metrics: EngineMetrics | None


class PeerPool:
    """Places for batches to be encoded beside the loop. `start` and `cancel` are for the loop's thread."""

    def __init__(self, addresses: Sequence[str], asks: PeerPoolSettings) -> None:
        """Raises OptionError for a road that this installation has not."""
        have = interprocess_transports()
        if asks.transport != "auto" and asks.transport not in have:
            raise OptionError(
                f"peer_road={asks.transport}", f"here there are {', '.join(have)}", param="peer_road"
            )
        self._settings, self.identity = asks, asks.identity
        self.peers = [EncodePeer(address, asks, self._notify_change) for address in addresses]
        self._wake: Callable[[], None] = lambda: None
        self._turn = 0
        self._counting = threading.Lock()

    def connect(self, wake: Callable[[], None]) -> None:
        """Connect. `wake` is called, from any thread, when a peer has come or gone."""
        self._wake = wake
        self._notify_change()
        for peer in self.peers:
            peer.start_thread()

    @property
    def alive(self) -> bool:
        return any(peer.state == "ready" for peer in self.peers)

    @property
    def has_room(self) -> bool:
        """One of them could begin with another batch."""
        return any(peer.has_room for peer in self.peers)

    def submit_batch(self, clips: Sequence[EncodeClip], done: Done) -> tuple[PeerConnection, RemoteBatch] | None:
        """Have whoever has most room encode these, those last that failed the last they had; of equals each in
        turn. None where nobody has any more."""
        self._turn += 1
        turn = self._turn % len(self.peers)
        open_ones = [c for peer in self.peers[turn:] + self.peers[:turn] if (c := peer.connection) is not None]
        for connection in sorted(open_ones, key=lambda each: (each.failing, each.batches_in_flight)):
            if (away := connection.submit_batch(clips, done)) is not None:
                return connection, away
        return None

    def describe(self) -> dict[str, str]:
        """Address -> state."""
        return {peer.address: peer.state for peer in self.peers}

    def close(self) -> None:
        """Nobody is asked any more; what is under way is told so."""
        for peer in self.peers:
            peer.close()
        for peer in self.peers:
            peer.join()

    def _notify_change(self) -> None:
        if (metrics := self._settings.metrics) is not None:
            with self._counting:
                states = [peer.state for peer in self.peers]
                for state in PEER_STATES:
                    metrics.peers[state].set(states.count(state))
        self._wake()


class EncodePeer:
    """One address, and the thread that keeps a connection to it."""

    def __init__(self, address: str, asks: PeerPoolSettings, changed: Callable[[], None]) -> None:
        self.address, self.state = address, "connecting"
        self.connection: PeerConnection | None = None
        self._settings, self._changed = asks, changed
        self._closing = threading.Event()
        self._lock = threading.Lock()  # of `_line` against `close`
        self._channel: PeerChannel | None = None
        self._last_logged = ""
        self._thread = threading.Thread(target=self._reconnect_loop, name=f"peer {address}", daemon=True)

    @property
    def has_room(self) -> bool:
        connection = self.connection
        return connection is not None and connection.has_room

    def start_thread(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            if self._channel is not None:
                self._channel.shut_down()

    def join(self) -> None:
        if self._thread.is_alive():
            self._thread.join()

    def _reconnect_loop(self) -> None:
        """Whatever goes wrong, ours included: it is tried again."""
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
            self._last_logged, met_s = "", time.monotonic()
            fit = self._serve_connection()
            if time.monotonic() - met_s > STEADY_S:
                pause_s, failures = FIRST_PAUSE_S, 0
            if not fit:
                pause_s = REFUSED_PAUSE_S

    def _serve_connection(self) -> bool:
        """Until it is over, however that comes about: what was under way is told. False for a peer that cannot
        encode. Nothing holds the connection afterwards: its landing memory is as large as what it brought."""
        connection = self.connection
        assert connection is not None
        log.info(
            "peer %s encodes for this engine (%s by %s)",
            self.address,
            connection.payload,
            connection.receiver.kind,
        )
        self._set_state("ready")
        fit = True
        error: AsrServeError = PeerGone(f"peer {self.address}: the connection has ended")
        try:
            connection.run()
        except Exception as failure:
            what = f"peer {self.address}: {failure}"
            error = type(failure)(what) if isinstance(failure, (RoadTimeout, Torn)) else PeerGone(what)
            fit = not isinstance(failure, PeerRefused)
            if not self._closing.is_set():
                self._record_failure(_reason(failure), failure)
        self.connection = None
        lost = connection.fail_pending(error)
        try:
            connection.close()
        except Exception:
            log.exception("what was lent to peer %s cannot be closed", self.address)
        self._set_state("connecting" if fit else "refused")
        for away in lost:
            away.on_done(error)
        return fit

    def _set_state(self, state: str) -> None:
        self.state = state
        self._changed()

    def _record_failure(self, reason: str, failure: Exception) -> None:
        """Counted each time, and said when it is new."""
        if (metrics := self._settings.metrics) is not None:
            metrics.peer_failures[reason].inc()
        if (text := f"{FAILURE_LABELS.get(reason, reason)}: {failure}") != self._last_logged:
            self._last_logged = text
            ours = None if isinstance(failure, (AsrServeError, OSError, UnicodeError)) else failure
            log.error("peer %s is %s", self.address, text, exc_info=ours)

    # --- meeting it ---------------------------------------------------------------------------------------------

    def _connect(self) -> PeerConnection:
        """Raises PeerRefused, PeerGone, RoadFailed, MalformedRequest, OSError; UnicodeError for a name that is
        none."""
        host, _, port = self.address.rpartition(":")
        line = PeerChannel(
            socket.create_connection((host.strip("[]"), int(port)), HELLO_S), messages.decode_to_client
        )
        with contextlib.ExitStack() as undo:
            undo.callback(line.close)
            with self._lock:
                self._channel = line
            if self._closing.is_set():
                raise PeerGone("this engine is closed")
            connection = self._negotiate_transport(line)
            undo.pop_all()
        return connection

    def _negotiate_transport(self, line: PeerChannel) -> PeerConnection:
        asks = self._settings
        met = handshake.handshake_as_client(line, asks.identity, asks.keys)
        if met.samples < asks.longest_samples:
            raise PeerRefused(
                f"it takes {met.samples} samples", f"{asks.longest_samples} are the longest utterance"
            )
        whys = []
        for road in interprocess_transports() if asks.transport == "auto" else (asks.transport,):
            if road not in met.transports:
                whys.append(f"{road}: it has not")
                continue
            carries = self._choose_payload(road, met.identity)
            try:
                landing = transports.create_receiver(road, self._receive_buffer_bytes(carries), line.local_host)
            except (RoadFailed, OptionError) as failure:
                whys.append(f"{road}: {failure}")
                continue
            with contextlib.ExitStack() as undo:
                undo.callback(landing.close)
                line.send(messages.TransportOffer(road, landing.offer, carries))
                answer = line.receive(ATTACH_S)
                if isinstance(answer, messages.TransportAttached):
                    undo.pop_all()
                    return self._open_connection(line, landing, carries, met)
            if answer is None:
                raise RoadTimeout(f"no answer to an offer of {road} came in {ATTACH_S:g} s")
            if not isinstance(answer, messages.TransportUnreachable):
                raise MalformedRequest(f"a message {type(answer).__name__}", "Attached or NotAttached was to come")
            whys.append(f"{road}: {messages.quoted(answer.why)}")
        raise PeerRefused(
            f"no road leads from it to here ({'; '.join(whys)})",
            f"by tcp and nixl it connects to this engine at {line.local_host}, to a port that the system "
            "chooses: no NAT, container bridge or firewall may be between the two",
            "give this engine an address that the peer reaches (in a container: the host's network)",
        )

    def _open_connection(
        self, line: PeerChannel, landing: Receiver, carries: str, met: handshake.PeerDescription
    ) -> PeerConnection:
        asks = self._settings
        return PeerConnection(line, landing, carries, asks.frame_bytes[carries], met, asks.timeout_s, asks.metrics)

    def _choose_payload(self, road: str, theirs: EncoderIdentity) -> str:
        """Within a machine keys and values, which this engine then need not make; over a network what is
        smaller."""
        same = theirs.cross == self._settings.identity.cross
        if self._settings.payload == "cross" and not same:
            raise PeerRefused(
                f"keys and values: {self._settings.identity.cross} here, {theirs.cross} there",
                "peer_carries=hidden",
            )
        if self._settings.payload != "auto":
            return self._settings.payload
        return "cross" if same and road == "shm" else "hidden"

    def _receive_buffer_bytes(self, carries: str) -> int:
        frame_bytes = self._settings.frame_bytes[carries]
        wanted = min(MAX_BATCHES_IN_FLIGHT * self._settings.batch_frames * frame_bytes, RECEIVE_BUFFER_BYTES)
        return max(wanted, self._settings.longest_frames * frame_bytes)


def interprocess_transports() -> tuple[str, ...]:
    """The roads of this installation that lead to another one, the best first."""
    return tuple(kind for kind in transports.available_transports() if kind != "local")


def _reason(failure: Exception) -> str:
    match failure:
        case RoadTimeout():
            return "timeout"
        case Torn():
            return "torn"
        case MalformedRequest():
            return "malformed"
        case PeerRefused():
            return "refused"
        case _:
            return "gone"
