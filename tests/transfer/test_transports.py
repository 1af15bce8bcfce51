"""Every road between two real processes: every byte, credits, damage, cancelling, and the death of either side."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from children import Child
from transport_peer import bytes_of

from asr_serve.errors import AsrServeError, Cancelled, OptionError, PeerGone, RoadFailed, RoadTimeout, Torn
from asr_serve.transfer import transports
from asr_serve.transfer.checksum import checksum
from asr_serve.transfer.transports import BufferRegion, Receiver, shm, tcp
from asr_serve.transfer.transports.base import MAX_BUFFER_BYTES, ReceiverOffer, expect_address, read_offer

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
LANDING_BYTES = 80 << 20
SIZES = (1, 63, 64, 65, 4_097, (1 << 20) + 7, 64 << 20)
BETWEEN = [
    pytest.param(
        kind,
        marks=pytest.mark.skipif(
            kind not in transports.available_transports(), reason=f"no {kind} in this installation"
        ),
    )
    for kind in ("shm", "tcp", "nixl")
]
between = pytest.mark.parametrize("kind", BETWEEN)
here_and_there = pytest.mark.parametrize("kind", BETWEEN[:2])
"""What every road has from `base`: an agent of NIXL takes a second to start, and would show nothing else."""


class Peer:
    """The other process. `tell` gives an order, `ask` waits for what came of it."""

    def __init__(self, *before: str) -> None:
        here, there = socket.socketpair()
        with there:
            script = Path(__file__).with_name("transport_peer.py")
            command = [*before, sys.executable, str(script), str(there.fileno())]
            env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
            self.process = Child(command, pass_fds=[there.fileno()], env=env)
        self._line = Connection(here.detach())
        assert self.heard() == "here"

    def tell(self, order: str, *args: object) -> None:
        self._line.send((order, args))

    def heard(self) -> Any:
        assert self._line.poll(TIMEOUT_S * 2), "the other process says nothing"
        said = self._line.recv()
        if isinstance(said, AsrServeError):
            raise said
        return said

    def submit(self, order: str, *args: object) -> Any:
        self.tell(order, *args)
        return self.heard()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait(TIMEOUT_S)
        elif number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)
        self._line.close()


@pytest.fixture
def undo() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def peer(undo: contextlib.ExitStack) -> Peer:
    peer = Peer()
    undo.callback(peer.close)
    return peer


def land(kind: str, undo: contextlib.ExitStack, nbytes: int = LANDING_BYTES) -> Receiver:
    landing = transports.create_receiver(kind, nbytes, HOST)
    undo.callback(landing.close)
    return landing


def attach(offer: bytes, undo: contextlib.ExitStack) -> transports.TransportSender:
    sender = transports.attach_sender(offer)
    undo.callback(sender.close)
    return sender


def lent(landing: Receiver, nbytes: int) -> BufferRegion:
    spot = landing.lease(nbytes)
    assert spot is not None
    return spot


def put_until_it_fails(sender: transports.TransportSender, spot: BufferRegion, data: np.ndarray) -> None:
    while True:
        sender.write_region(spot, data, TIMEOUT_S)


def changed(offer: bytes, **fields: object) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(read_offer(offer), **fields))


def name_of(offer: bytes) -> Path:
    return shm.FOLDER / read_offer(offer).where.decode()


# --- bytes, credits, checksums ------------------------------------------------------------------------


@between
def test_every_byte_arrives(kind: str, peer: Peer, undo: contextlib.ExitStack) -> None:
    landing = land(kind, undo)
    peer.submit("attach", landing.offer)
    spots = []
    for nbytes in SIZES:
        spots.append(lent(landing, nbytes))
        found = peer.submit("put", spots[-1], nbytes, nbytes)
        view = landing.received(spots[-1], nbytes, found)
        assert view.dtype == np.uint8
        assert np.array_equal(view, bytes_of(nbytes, nbytes))
        assert found == checksum(view)
    for spot in spots:
        landing.release(spot)
    assert landing.lease(LANDING_BYTES) == BufferRegion(0, LANDING_BYTES)


@here_and_there
def test_this_process_may_send_and_the_other_one_receive(
    kind: str, peer: Peer, undo: contextlib.ExitStack
) -> None:
    sender = attach(peer.submit("land", kind, 1 << 20), undo)
    spot = peer.submit("lend", 1 << 20)
    for nbytes in (1 << 20, 5):  # less than the spot is fine
        found = sender.write_region(spot, bytes_of(nbytes, nbytes), TIMEOUT_S)
        if nbytes == 5:
            assert peer.submit("arrived", spot, nbytes, found, nbytes)


@between
def test_many_at_once_do_not_mix(kind: str, peer: Peer, undo: contextlib.ExitStack) -> None:
    landing = land(kind, undo)
    peer.submit("attach", landing.offer)
    sizes = [1 + 7_919 * number for number in range(64)]
    spots = [lent(landing, nbytes) for nbytes in sizes]
    orders = [(spot, spot.nbytes, number) for number, spot in enumerate(spots)]
    for (spot, nbytes, seed), found in zip(orders, peer.submit("put_many", orders, 4), strict=True):
        assert np.array_equal(landing.received(spot, nbytes, found), bytes_of(nbytes, seed))


@here_and_there
def test_without_a_credit_nothing_is_lent_and_nothing_lost(
    kind: str, peer: Peer, undo: contextlib.ExitStack
) -> None:
    landing = land(kind, undo, 4 * 4_096)
    peer.submit("attach", landing.offer)
    spots = [lent(landing, 4_096) for _ in range(4)]
    assert landing.lease(1) is None
    views = [landing.received(spot, 4_096, peer.submit("put", spot, 4_096, spot.at)) for spot in spots]
    landing.release(spots[2])
    again = lent(landing, 4_000)
    assert again.at == spots[2].at
    assert landing.lease(4_096) is None
    landing.received(again, 4_000, peer.submit("put", again, 4_000, 99))
    for number in (0, 1, 3):
        assert np.array_equal(views[number], bytes_of(4_096, spots[number].at))


@here_and_there
def test_memory_that_was_changed_behind_its_back_is_torn(
    kind: str, peer: Peer, undo: contextlib.ExitStack
) -> None:
    landing = land(kind, undo, 1 << 16)
    peer.submit("attach", landing.offer)
    spot = lent(landing, 1 << 16)
    found = peer.submit("put", spot, 1 << 16, 1)
    landing._memory[40_000] ^= 1
    with pytest.raises(Torn, match="another checksum"):
        landing.received(spot, 1 << 16, found)
    landing.release(spot)  # answered it is, so the memory is free
    assert landing.lease(1 << 16) == spot


@here_and_there
def test_less_than_was_sent_is_torn(kind: str, peer: Peer, undo: contextlib.ExitStack) -> None:
    landing = land(kind, undo, 1 << 16)
    peer.submit("attach", landing.offer)
    spot = lent(landing, 1 << 16)
    with pytest.raises(Torn):
        landing.received(spot, 100, peer.submit("put", spot, 101, 1))


@here_and_there
def test_part_by_part(kind: str, peer: Peer, undo: contextlib.ExitStack) -> None:
    landing = land(kind, undo, 1 << 16)
    peer.submit("attach", landing.offer)
    lent(landing, 64)
    spot = lent(landing, 3_000)
    for layer in range(3):
        part = spot.subregion(1_000 * layer, 1_000)
        view = landing.received(part, 1_000, peer.submit("put", part, 1_000, layer))
        assert np.array_equal(view, bytes_of(1_000, layer))
    landing.release(spot)
    with pytest.raises(Cancelled):
        landing.received(spot.subregion(0, 10), 10, 0)
    rest = landing._allocator.free_bytes
    landing.sender_done(spot)
    assert landing._allocator.free_bytes == rest + 3_008
    with pytest.raises(RoadFailed):
        landing.sender_done(spot)


@here_and_there
def test_a_session_that_moves_is_bytes_in_a_spot(kind: str, peer: Peer, undo: contextlib.ExitStack) -> None:
    """What `engine/session_snapshot` makes of a stream: numbers, and parts of any length, none included."""
    sender = attach(peer.submit("land", kind, 1 << 20), undo)
    parts = [secrets.token_bytes(nbytes) for nbytes in (211, 70_001, 1)]
    parts[2] = b""
    lengths = [len(part) for part in parts]
    spot = peer.submit("lend", sum(lengths))
    at, sums = 0, []
    for part in filter(None, parts):
        sums.append(sender.write_region(spot.subregion(at, len(part)), np.frombuffer(part, np.uint8), TIMEOUT_S))
        at += len(part)
    assert sums == [checksum(part) for part in parts if part]
    whole = np.frombuffer(b"".join(parts), np.uint8)
    assert sender.write_region(spot, whole, TIMEOUT_S) == checksum(whole)


# --- cancelling ---------------------------------------------------------------------------------------


@here_and_there
@pytest.mark.parametrize("how", ["arrived", "answered"])
def test_a_spot_is_lent_again_only_when_its_sender_has_answered(
    kind: str, how: str, peer: Peer, undo: contextlib.ExitStack
) -> None:
    landing = land(kind, undo, 4_096)
    peer.submit("attach", landing.offer)
    spot = lent(landing, 4_096)
    landing.release(spot)  # cancelled
    assert landing.lease(1) is None, "its sender may still write"
    found = peer.submit("put", spot, 4_096, 1)  # and it did
    assert landing.lease(1) is None
    if how == "arrived":
        with pytest.raises(Cancelled):
            landing.received(spot, 4_096, found)
    else:
        landing.sender_done(spot)
    assert landing.lease(4_096) == spot


def test_what_must_not_happen_twice(undo: contextlib.ExitStack) -> None:
    landing = land("tcp", undo, 4_096)
    spot, other = lent(landing, 100), lent(landing, 100)
    landing.received(spot, 100, checksum(landing._memory[:100]))
    for came in (
        spot,
        BufferRegion(4_000, 10),
        BufferRegion(50, 100),  # in two of them
        BufferRegion(MAX_BUFFER_BYTES, 1),
        BufferRegion(other.at, 101),
    ):
        with pytest.raises(RoadFailed, match="no such spot is lent"):
            landing.received(came, 1, 0)
    for nbytes in (0, 101, -1):
        with pytest.raises(RoadFailed):
            landing.received(other, nbytes, 0)
    landing.release(spot)
    with pytest.raises(AssertionError):
        landing.release(spot)
    landing.release(other)
    with pytest.raises(AssertionError, match="twice"):
        landing.release(other)
    with pytest.raises(RoadFailed, match="for a landing memory of"):
        landing.lease(4_097)


# --- death, silence, and what comes late --------------------------------------------------------------


@between
def test_the_sender_is_killed_in_the_middle_of_a_put(kind: str, peer: Peer, undo: contextlib.ExitStack) -> None:
    landing = land(kind, undo)
    peer.submit("attach", landing.offer)
    spot = lent(landing, 64 << 20)
    peer.tell("put_again_and_again", spot)
    assert peer.heard() == "going"
    peer.signal(signal.SIGKILL)
    landing.release(spot)
    assert landing.lease(64 << 20) is None, "it did not answer: nobody knows that it is gone, but its control line"
    landing.close()
    landing.close()
    with pytest.raises(PeerGone):
        landing.lease(1)
    with pytest.raises(PeerGone):
        landing.received(spot, 1, 0)
    landing.sender_done(spot)
    landing.release(spot)


@between
def test_the_receiver_is_killed_in_the_middle_of_a_put(kind: str, peer: Peer, undo: contextlib.ExitStack) -> None:
    sender = attach(peer.submit("land", kind, 64 << 20), undo)
    spot, data = peer.submit("lend", 64 << 20), bytes_of(64 << 20, 1)
    sender.write_region(spot, data, TIMEOUT_S)
    killer = Child(["sh", "-c", f"sleep 0.05; kill -KILL {peer.process.pid}"])
    with pytest.raises(PeerGone):
        put_until_it_fails(sender, spot, data)
    assert killer.wait(TIMEOUT_S) == 0
    with pytest.raises(PeerGone):
        sender.write_region(spot, data[:1], TIMEOUT_S)
    sender.close()


@pytest.mark.parametrize("kind", [each for each in BETWEEN if each.values[0] != "shm"])
def test_a_receiver_that_stands_still_is_a_timeout(kind: str, peer: Peer, undo: contextlib.ExitStack) -> None:
    sender = attach(peer.submit("land", kind, 64 << 20), undo)
    spot, data = peer.submit("lend", 64 << 20), bytes_of(64 << 20, 1)
    sender.write_region(spot, data, TIMEOUT_S)
    peer.signal(signal.SIGSTOP)
    with pytest.raises(RoadTimeout):
        sender.write_region(spot, data, 0.5)
    with pytest.raises(PeerGone):
        sender.write_region(spot, data[:1], TIMEOUT_S)


@pytest.mark.skipif("shm" not in transports.available_transports(), reason="no shm in this installation")
def test_over_shared_memory_the_receiver_may_stand_still(peer: Peer, undo: contextlib.ExitStack) -> None:
    sender = attach(peer.submit("land", "shm", 4_096), undo)
    spot = peer.submit("lend", 4_096)
    peer.signal(signal.SIGSTOP)
    found = sender.write_region(spot, bytes_of(4_096, 7), 0.5)
    peer.signal(signal.SIGCONT)
    assert peer.submit("arrived", spot, 4_096, found, 7)


@between
def test_what_comes_late_finds_nothing(kind: str, peer: Peer, undo: contextlib.ExitStack) -> None:
    landing = land(kind, undo, 64 << 20)
    peer.submit("attach", landing.offer)
    spot = lent(landing, 64 << 20)
    peer.tell("put_again_and_again", spot)
    assert peer.heard() == "going"
    peer.signal(signal.SIGSTOP)
    landing.close()
    fresh = land(kind, undo, 64 << 20)
    fresh._memory[:] = 0
    peer.signal(signal.SIGCONT)
    with pytest.raises(PeerGone):
        peer.heard()
    assert not fresh._memory.any()


@between
def test_a_sender_that_is_closed_sends_no_more(kind: str, undo: contextlib.ExitStack) -> None:
    landing = land(kind, undo, 4_096)
    sender = attach(landing.offer, undo)
    spot = lent(landing, 4_096)
    sender.close()
    sender.close()
    with pytest.raises(PeerGone):
        sender.write_region(spot, bytes_of(4_096, 1), TIMEOUT_S)


# --- who is let in ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "offer",
    [
        b"",
        b"\xff" * 100,
        b"\x91" * 100_000,
        msgspec.msgpack.encode({"kind": "tcp"}),
        msgspec.msgpack.encode(ReceiverOffer("pigeon", 1, b"t" * 32, b"")),  # type: ignore[arg-type]
        msgspec.msgpack.encode(ReceiverOffer("tcp", 0, b"t" * 32, b"")),
        msgspec.msgpack.encode(ReceiverOffer("tcp", MAX_BUFFER_BYTES + 1, b"t" * 32, b"")),
        msgspec.msgpack.encode(ReceiverOffer("tcp", 1, b"", b"")),
        msgspec.msgpack.encode(ReceiverOffer("tcp", 1, b"t" * 32, b"x" * 70_000)),
        msgspec.msgpack.encode(ReceiverOffer("tcp", 1, b"t" * 32, b"no msgpack")),
        msgspec.msgpack.encode(ReceiverOffer("tcp", 1, b"t" * 32, msgspec.msgpack.encode(("localhost", 1)))),
        msgspec.msgpack.encode(ReceiverOffer("tcp", 1, b"t" * 32, msgspec.msgpack.encode((HOST, 70_000)))),
        msgspec.msgpack.encode(ReceiverOffer("tcp", 1, b"t" * 32, msgspec.msgpack.encode((HOST + "\0", 1)))),
        msgspec.msgpack.encode(ReceiverOffer("local", 1, b"t" * 32, b"")),
        msgspec.msgpack.encode(ReceiverOffer("shm", 1, b"t" * 32, b"/../../etc/passwd")),
        msgspec.msgpack.encode(ReceiverOffer("shm", 1, b"t" * 32, b"asr-serve-road-" + b"0" * 32)),
        msgspec.msgpack.encode(ReceiverOffer("nixl", 1, b"t" * 32, b"no msgpack")),
        msgspec.msgpack.encode(
            ReceiverOffer("nixl", 1, b"t" * 32, msgspec.msgpack.encode((b"no metadata" * 9, 1, HOST)))
        ),
    ],
)
def test_offers_that_lead_nowhere(offer: bytes) -> None:
    with pytest.raises(RoadFailed):
        transports.attach_sender(offer)


@pytest.mark.parametrize("kind", ["local", *BETWEEN])
def test_spots_that_are_not_in_the_landing_memory(kind: str, undo: contextlib.ExitStack) -> None:
    landing = land(kind, undo, 4_096)
    sender = attach(landing.offer, undo)
    lent(landing, 4_096)
    for spot, nbytes in (
        (BufferRegion(0, 4_097), 1),
        (BufferRegion(1, 4_096), 1),
        (BufferRegion(4_096, 1), 1),
        (BufferRegion(-1, 2), 1),
        (BufferRegion(0, 10), 11),
        (BufferRegion(0, 10), 0),
    ):
        with pytest.raises(RoadFailed, match="in a spot that is large enough"):
            sender.write_region(spot, np.zeros(nbytes, np.uint8), TIMEOUT_S)


@pytest.mark.parametrize("kind", ["local", *BETWEEN[:2]])
def test_one_landing_has_one_sender(kind: str, undo: contextlib.ExitStack) -> None:
    landing = land(kind, undo, 4_096)
    sender = attach(landing.offer, undo)
    with pytest.raises(RoadFailed):
        transports.attach_sender(landing.offer)
    spot = lent(landing, 9)
    assert (
        landing.received(spot, 9, sender.write_region(spot, bytes_of(9, 1), TIMEOUT_S)).tolist()
        == bytes_of(9, 1).tolist()
    )


@pytest.mark.parametrize("kind", BETWEEN[:2])
def test_a_wrong_token_is_refused_and_the_right_one_still_taken(kind: str, undo: contextlib.ExitStack) -> None:
    landing = land(kind, undo, 4_096)
    with pytest.raises(RoadFailed):
        transports.attach_sender(changed(landing.offer, token=b"t" * 32))
    attach(landing.offer, undo)


def test_who_offers_does_not_choose_whom_we_connect_to(undo: contextlib.ExitStack) -> None:
    victim = undo.enter_context(socket.create_server(("127.0.0.2", 0)))
    landing = land("tcp", undo, 4_096)
    elsewhere = changed(landing.offer, where=msgspec.msgpack.encode(victim.getsockname()[:2]))
    with pytest.raises(RoadFailed, match=r"'127\.0\.0\.2' is offered from 127\.0\.0\.1"):
        transports.attach_sender(elsewhere, only_at=HOST)
    victim.setblocking(False)
    with pytest.raises(BlockingIOError):
        victim.accept()
    for nonsense in ("localhost", "127.1", "", "\x1b[2J"):
        with pytest.raises(RoadFailed, match="an IPv4 or IPv6 address in numbers"):
            transports.attach_sender(
                changed(landing.offer, where=msgspec.msgpack.encode((nonsense, 1))), only_at=HOST
            )
    sender = transports.attach_sender(
        landing.offer, only_at=f"::ffff:{HOST}"
    )  # the same, as a socket for both calls it
    undo.callback(sender.close)
    spot = lent(landing, 5)
    landing.received(spot, 5, sender.write_region(spot, bytes_of(5, 1), TIMEOUT_S))


@pytest.mark.parametrize(("offered", "seen"), [("::ffff:127.0.0.1", HOST), ("fe80::1%eth0", "fe80::1%eth7")])
def test_one_address_in_two_spellings(offered: str, seen: str) -> None:
    expect_address(offered, seen)
    expect_address(offered, None)
    with pytest.raises(RoadFailed):
        expect_address(offered, "192.0.2.1")


def test_what_nixl_offers_names_no_other_address_in_our_own_words() -> None:
    """Looked at before anything of NIXL is started: it need not be here."""
    where = msgspec.msgpack.encode((b"metadata", 1, "192.0.2.1"))
    with pytest.raises(RoadFailed, match=r"'192\.0\.2\.1' is offered from 127\.0\.0\.1"):
        transports.attach_sender(msgspec.msgpack.encode(ReceiverOffer("nixl", 1, b"t" * 32, where)), only_at=HOST)


def test_strangers_who_say_nothing_do_not_keep_the_sender_out(undo: contextlib.ExitStack) -> None:
    landing = land("tcp", undo, 4_096)
    address = msgspec.msgpack.decode(read_offer(landing.offer).where, type=tuple[str, int])
    for _ in range(3 * tcp.STRANGERS):
        undo.enter_context(socket.create_connection(address))
    spot, sender = lent(landing, 5), attach(landing.offer, undo)
    landing.received(spot, 5, sender.write_region(spot, bytes_of(5, 1), TIMEOUT_S))


def test_a_landing_nobody_came_to_is_closed(undo: contextlib.ExitStack) -> None:
    landing = land("tcp", undo, 4_096)
    address = msgspec.msgpack.decode(read_offer(landing.offer).where, type=tuple[str, int])
    undo.enter_context(socket.create_connection(address))
    landing.close()
    with pytest.raises(RoadFailed):
        transports.attach_sender(landing.offer)


@pytest.mark.parametrize(
    "spot",
    [
        BufferRegion(64, 64),
        BufferRegion(0, 65),
        BufferRegion(0, 0),
        BufferRegion(2**63, 2**63),
        BufferRegion(2**64 - 1, 2),
    ],
)
def test_a_sender_that_writes_where_nothing_was_lent_is_cut(
    spot: BufferRegion, undo: contextlib.ExitStack
) -> None:
    landing = land("tcp", undo, 4_096)
    landing._memory[:] = 0
    lent(landing, 64)
    offer = read_offer(landing.offer)
    with socket.create_connection(msgspec.msgpack.decode(offer.where, type=tuple[str, int])) as line:
        line.sendall(tcp.HELLO + offer.token)
        assert line.recv(1) == tcp.TAKEN
        line.sendall(struct.pack("!QQ", spot.at, spot.nbytes) + b"x")
        assert line.recv(1) == tcp.REFUSED
        with contextlib.suppress(ConnectionError):
            assert line.recv(1) == b""
    assert not landing._memory.any()


def test_a_spot_that_is_not_lent_is_refused_by_tcp(undo: contextlib.ExitStack) -> None:
    landing = land("tcp", undo, 4_096)
    sender = attach(landing.offer, undo)
    with pytest.raises((RoadFailed, PeerGone)):
        sender.write_region(BufferRegion(0, 64), bytes_of(64, 1), TIMEOUT_S)


# --- this installation --------------------------------------------------------------------------------


def test_kinds() -> None:
    assert transports.available_transports()[0] == "local"
    assert "tcp" in transports.available_transports()
    with pytest.raises(OptionError, match="did you mean 'tcp'"):
        transports.create_receiver("tpc", 1, HOST)
    with pytest.raises(OptionError, match="a landing memory of 0 bytes"):
        transports.create_receiver("tcp", 0, HOST)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "::ffff:192.0.2.1"])
def test_an_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(OptionError, match="an address of this machine"):
        transports.create_receiver("tcp", 4_096, host)


def test_locally_what_nobody_may_change_is_handed_over(undo: contextlib.ExitStack) -> None:
    landing = land("local", undo, 1 << 20)
    sender = attach(landing.offer, undo)
    spot, data = lent(landing, 1_000), bytes_of(1_000, 1)
    found = sender.write_region(spot, data, TIMEOUT_S)
    view = landing.received(spot, 1_000, found)
    assert not np.shares_memory(view, data)
    assert np.array_equal(view, data)
    landing.release(spot)
    spot = lent(landing, 1_000)
    data.flags.writeable = False
    view = landing.received(spot, 900, sender.write_region(spot, data, TIMEOUT_S))
    assert np.shares_memory(view, data)
    assert np.array_equal(view, data[:900])
    landing.release(spot)
    spot = lent(landing, 1_000)
    sender.write_region(spot, data, TIMEOUT_S)
    sender.write_region(spot.subregion(0, 10), data[10:20], TIMEOUT_S)
    assert np.array_equal(landing.received(spot, 10, 0), data[10:20]), "the last that was put there"
    with pytest.raises(RoadFailed):
        sender.write_region(BufferRegion(spot.at + 1_024, 8), data[:8], TIMEOUT_S)
    landing.close()
    with pytest.raises(PeerGone):
        sender.write_region(spot, data, TIMEOUT_S)


# --- /dev/shm -----------------------------------------------------------------------------------------

needs_shm = pytest.mark.skipif(
    "shm" not in transports.available_transports(), reason="no shm in this installation"
)


@needs_shm
def test_a_name_lives_until_the_other_side_has_attached(peer: Peer, undo: contextlib.ExitStack) -> None:
    landing = land("shm", undo, 4_096)
    assert name_of(landing.offer).stat().st_mode & 0o777 == 0o600
    peer.submit("attach", landing.offer)
    assert not name_of(landing.offer).exists()
    unmet = land("shm", undo, 4_096)
    unmet.close()
    assert not name_of(unmet.offer).exists()


@needs_shm
def test_what_a_killed_process_left_is_removed_by_the_next_landing(peer: Peer, undo: contextlib.ExitStack) -> None:
    offer = peer.submit("land", "shm", 4_096)
    land("shm", undo, 4_096)
    assert name_of(offer).exists(), "a landing that lives keeps its name"
    peer.signal(signal.SIGKILL)
    assert name_of(offer).exists()
    land("shm", undo, 4_096)
    assert not name_of(offer).exists()


@needs_shm
def test_other_files_are_never_taken_for_the_one_that_was_offered(undo: contextlib.ExitStack) -> None:
    landing = land("shm", undo, 4_096)
    path = name_of(landing.offer)
    other = path.with_name(path.name[:-32] + secrets.token_hex(16))
    undo.callback(other.unlink, missing_ok=True)
    offer = changed(landing.offer, where=other.name.encode())
    other.symlink_to(path)
    with pytest.raises(RoadFailed):
        transports.attach_sender(offer)
    other.unlink()
    whole = path.read_bytes()
    other.touch(0o600)
    with pytest.raises(RoadFailed):
        transports.attach_sender(offer)  # of no bytes
    other.write_bytes(whole)
    other.chmod(0o644)
    with pytest.raises(RoadFailed):
        transports.attach_sender(offer)  # open to others
    other.chmod(0o600)
    other.write_bytes(bytes(len(whole)))
    with pytest.raises(RoadFailed, match="not the one"):
        transports.attach_sender(offer)
    other.unlink()
    os.mkfifo(other, 0o600)
    with pytest.raises(RoadFailed):
        transports.attach_sender(offer)


@needs_shm
def test_shared_memory_that_is_too_small_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undo: contextlib.ExitStack
) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    undo.callback(subprocess.run, ["umount", "-l", str(tmp_path)], check=True)
    monkeypatch.setattr(shm, "FOLDER", tmp_path)
    with pytest.raises(OptionError, match="--shm-size"):
        transports.create_receiver("shm", 8 << 20, HOST)
    assert not list(tmp_path.iterdir())
    land("shm", undo, 1 << 19)


# --- two networks -------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(undo: contextlib.ExitStack) -> tuple[list[str], str]:
    """What runs a command in another network namespace, and our address as one sees it there."""

    def ip(*args: str) -> None:
        done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no network of its own here: ip {' '.join(args)}: {done.stderr.strip()}")

    if shutil.which("ip") is None:
        pytest.skip("no network of its own here: there is no `ip`")
    mark = secrets.token_hex(3)
    space, here, there = f"road{mark}", f"ra{mark}", f"rb{mark}"
    net = f"10.{203 + secrets.randbelow(40)}.{secrets.randbelow(256)}"
    ip("netns", "add", space)
    undo.callback(subprocess.run, ["ip", "netns", "del", space], check=False)
    ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", space)
    ip("addr", "add", f"{net}.1/30", "dev", here)
    ip("link", "set", here, "up")
    ip("-n", space, "addr", "add", f"{net}.2/30", "dev", there)
    ip("-n", space, "link", "set", there, "up")
    ip("-n", space, "link", "set", "lo", "up")
    return ["ip", "netns", "exec", space], f"{net}.1"


@pytest.mark.parametrize("kind", BETWEEN[1:])
def test_between_two_networks(kind: str, elsewhere: tuple[list[str], str], undo: contextlib.ExitStack) -> None:
    before, host = elsewhere
    sender, receiver = Peer(*before), Peer()  # both new: UCX reads a machine's routes once a process
    undo.callback(sender.close)
    undo.callback(receiver.close)
    sender.submit("attach", receiver.submit("land", kind, 16 << 20, host))
    for nbytes in (1, 8 << 20):
        spot = receiver.submit("lend", nbytes)
        assert receiver.submit("arrived", spot, nbytes, sender.submit("put", spot, nbytes, nbytes), nbytes)
