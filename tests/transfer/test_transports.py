"""Every transport between two real processes: every byte, credits, damage, cancelling, and the death of either side."""

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
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from children import Child
from transport_peer import bytes_of

from asr_serve.errors import (
    AsrServeError,
    Cancelled,
    ChecksumMismatch,
    OptionError,
    PeerGone,
    TransportFailed,
    TransportTimeout,
)
from asr_serve.transfer import transports
from asr_serve.transfer.checksum import checksum
from asr_serve.transfer.transports import BufferRegion, Receiver, shm, tcp
from asr_serve.transfer.transports.base import MAX_BUFFER_BYTES, ReceiverOffer, expect_address, read_offer

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
RECEIVER_BYTES = 80 << 20
SIZES = (1, 63, 64, 65, 4_097, (1 << 20) + 7, 64 << 20)
TRANSPORTS = [
    pytest.param(
        kind,
        marks=pytest.mark.skipif(
            kind not in transports.available_transports(), reason=f"no {kind} in this installation"
        ),
    )
    for kind in ("shm", "tcp", "nixl")
]
every_transport = pytest.mark.parametrize("kind", TRANSPORTS)
without_nixl = pytest.mark.parametrize("kind", TRANSPORTS[:2])
"""For what every transport has from `base`: an agent of NIXL takes a second to start and would show no more."""


class Peer:
    """The other process. `send` gives an order, `submit` waits for its result."""

    def __init__(self, *before: str) -> None:
        here, there = socket.socketpair()
        with there:
            script = Path(__file__).with_name("transport_peer.py")
            command = [*before, sys.executable, str(script), str(there.fileno())]
            env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
            self.process = Child(command, pass_fds=[there.fileno()], env=env)
        self._line = Connection(here.detach())
        assert self.receive() == "here"

    def send(self, order: str, *args: object) -> None:
        self._line.send((order, args))

    def receive(self) -> Any:
        assert self._line.poll(TIMEOUT_S * 2), "the other process says nothing"
        answer = self._line.recv()
        if isinstance(answer, AsrServeError):
            raise answer
        return answer

    def submit(self, order: str, *args: object) -> Any:
        self.send(order, *args)
        return self.receive()

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


@pytest.fixture
def land(undo: contextlib.ExitStack) -> Callable[..., Receiver]:
    """Creates receivers, which are closed at the end of the test."""

    def create(kind: str, nbytes: int = RECEIVER_BYTES) -> Receiver:
        receiver = transports.create_receiver(kind, nbytes, HOST)
        undo.callback(receiver.close)
        return receiver

    return create


@pytest.fixture
def attached(land: Callable[..., Receiver], peer: Peer) -> Callable[..., Receiver]:
    """Creates receivers to which the other process is attached."""

    def create(kind: str, nbytes: int = RECEIVER_BYTES) -> Receiver:
        receiver = land(kind, nbytes)
        peer.submit("attach", receiver.offer)
        return receiver

    return create


@pytest.fixture
def attach(undo: contextlib.ExitStack) -> Callable[[bytes], transports.TransportSender]:
    def create(offer: bytes) -> transports.TransportSender:
        sender = transports.attach_sender(offer)
        undo.callback(sender.close)
        return sender

    return create


def lease(receiver: Receiver, nbytes: int) -> BufferRegion:
    region = receiver.lease(nbytes)
    assert region is not None
    return region


def write_until_it_fails(sender: transports.TransportSender, region: BufferRegion, data: np.ndarray) -> None:
    while True:
        sender.write_region(region, data, TIMEOUT_S)


def changed_offer(offer: bytes, **fields: object) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(read_offer(offer), **fields))


def shm_path(offer: bytes) -> Path:
    return shm.FOLDER / read_offer(offer).where.decode()


# --- bytes, credits, checksums ------------------------------------------------------------------------


@every_transport
def test_every_byte_arrives(kind, peer, attached) -> None:
    receiver = attached(kind)
    regions = []
    for nbytes in SIZES:
        regions.append(lease(receiver, nbytes))
        found = peer.submit("put", regions[-1], nbytes, nbytes)
        view = receiver.received(regions[-1], nbytes, found)
        assert view.dtype == np.uint8
        assert np.array_equal(view, bytes_of(nbytes, nbytes))
        assert found == checksum(view)
    for region in regions:
        receiver.release(region)
    assert receiver.lease(RECEIVER_BYTES) == BufferRegion(0, RECEIVER_BYTES)


@without_nixl
def test_the_other_process_receives(kind, peer, attach) -> None:
    sender = attach(peer.submit("land", kind, 1 << 20))
    region = peer.submit("lend", 1 << 20)
    for nbytes in (1 << 20, 5):  # less than the spot is fine
        found = sender.write_region(region, bytes_of(nbytes, nbytes), TIMEOUT_S)
        if nbytes == 5:
            assert peer.submit("arrived", region, nbytes, found, nbytes)


@every_transport
def test_concurrent_writes_do_not_mix(kind, peer, attached) -> None:
    receiver = attached(kind)
    sizes = [1 + 7_919 * number for number in range(64)]
    regions = [lease(receiver, nbytes) for nbytes in sizes]
    orders = [(region, region.nbytes, number) for number, region in enumerate(regions)]
    for (region, nbytes, seed), found in zip(orders, peer.submit("put_many", orders, 4), strict=True):
        assert np.array_equal(receiver.received(region, nbytes, found), bytes_of(nbytes, seed))


@without_nixl
def test_a_full_receiver_leases_nothing_and_loses_nothing(kind, peer, attached) -> None:
    receiver = attached(kind, 4 * 4_096)
    regions = [lease(receiver, 4_096) for _ in range(4)]
    assert receiver.lease(1) is None
    views = [receiver.received(region, 4_096, peer.submit("put", region, 4_096, region.at)) for region in regions]
    receiver.release(regions[2])
    again = lease(receiver, 4_000)
    assert again.at == regions[2].at
    assert receiver.lease(4_096) is None
    receiver.received(again, 4_000, peer.submit("put", again, 4_000, 99))
    for number in (0, 1, 3):
        assert np.array_equal(views[number], bytes_of(4_096, regions[number].at))


@without_nixl
def test_changed_memory_is_torn(kind, peer, attached) -> None:
    receiver = attached(kind, 1 << 16)
    region = lease(receiver, 1 << 16)
    found = peer.submit("put", region, 1 << 16, 1)
    receiver._memory[40_000] ^= 1
    with pytest.raises(ChecksumMismatch, match="another checksum"):
        receiver.received(region, 1 << 16, found)
    receiver.release(region)  # answered it is, so the memory is free
    assert receiver.lease(1 << 16) == region


@without_nixl
def test_fewer_bytes_than_sent_are_torn(kind, peer, attached) -> None:
    receiver = attached(kind, 1 << 16)
    region = lease(receiver, 1 << 16)
    with pytest.raises(ChecksumMismatch):
        receiver.received(region, 100, peer.submit("put", region, 101, 1))


@without_nixl
def test_a_region_is_written_part_by_part(kind, peer, attached) -> None:
    receiver = attached(kind, 1 << 16)
    lease(receiver, 64)
    region = lease(receiver, 3_000)
    for layer in range(3):
        part = region.subregion(1_000 * layer, 1_000)
        view = receiver.received(part, 1_000, peer.submit("put", part, 1_000, layer))
        assert np.array_equal(view, bytes_of(1_000, layer))
    receiver.release(region)
    with pytest.raises(Cancelled):
        receiver.received(region.subregion(0, 10), 10, 0)
    rest = receiver._allocator.free_bytes
    receiver.sender_done(region)
    assert receiver._allocator.free_bytes == rest + 3_008
    with pytest.raises(TransportFailed):
        receiver.sender_done(region)


@without_nixl
def test_a_session_snapshot_in_one_region(kind, peer, attach) -> None:
    """The snapshot of a stream: parts of any length, empty ones included."""
    sender = attach(peer.submit("land", kind, 1 << 20))
    parts = [secrets.token_bytes(nbytes) for nbytes in (211, 70_001, 1)]
    parts[2] = b""
    lengths = [len(part) for part in parts]
    region = peer.submit("lend", sum(lengths))
    at, sums = 0, []
    for part in filter(None, parts):
        sums.append(sender.write_region(region.subregion(at, len(part)), np.frombuffer(part, np.uint8), TIMEOUT_S))
        at += len(part)
    assert sums == [checksum(part) for part in parts if part]
    whole = np.frombuffer(b"".join(parts), np.uint8)
    assert sender.write_region(region, whole, TIMEOUT_S) == checksum(whole)


# --- cancellation ---------------------------------------------------------------------------------------


@without_nixl
@pytest.mark.parametrize("how", ["arrived", "answered"])
def test_a_cancelled_region_is_free_after_its_sender_has_answered(kind, how, peer, attached) -> None:
    receiver = attached(kind, 4_096)
    region = lease(receiver, 4_096)
    receiver.release(region)  # cancelled
    assert receiver.lease(1) is None, "its sender may still write"
    found = peer.submit("put", region, 4_096, 1)  # and it did
    assert receiver.lease(1) is None
    if how == "arrived":
        with pytest.raises(Cancelled):
            receiver.received(region, 4_096, found)
    else:
        receiver.sender_done(region)
    assert receiver.lease(4_096) == region


def test_invalid_regions_and_double_releases(land) -> None:
    receiver = land("tcp", 4_096)
    region, other = lease(receiver, 100), lease(receiver, 100)
    receiver.received(region, 100, checksum(receiver._memory[:100]))
    for wrong_region in (
        region,
        BufferRegion(4_000, 10),
        BufferRegion(50, 100),  # in two of them
        BufferRegion(MAX_BUFFER_BYTES, 1),
        BufferRegion(other.at, 101),
    ):
        with pytest.raises(TransportFailed, match="no such spot is lent"):
            receiver.received(wrong_region, 1, 0)
    for nbytes in (0, 101, -1):
        with pytest.raises(TransportFailed):
            receiver.received(other, nbytes, 0)
    receiver.release(region)
    with pytest.raises(AssertionError):
        receiver.release(region)
    receiver.release(other)
    with pytest.raises(AssertionError, match="twice"):
        receiver.release(other)
    with pytest.raises(TransportFailed, match="for a landing memory of"):
        receiver.lease(4_097)


# --- lost peers --------------------------------------------------------------


@every_transport
def test_the_sender_is_killed_in_mid_write(kind, peer, attached) -> None:
    receiver = attached(kind)
    region = lease(receiver, 64 << 20)
    peer.send("put_again_and_again", region)
    assert peer.receive() == "going"
    peer.signal(signal.SIGKILL)
    receiver.release(region)
    assert receiver.lease(64 << 20) is None, "it did not answer: nobody knows that it is gone, but its control line"
    receiver.close()
    receiver.close()
    with pytest.raises(PeerGone):
        receiver.lease(1)
    with pytest.raises(PeerGone):
        receiver.received(region, 1, 0)
    receiver.sender_done(region)
    receiver.release(region)


@every_transport
def test_the_receiver_is_killed_in_mid_write(kind, peer, attach) -> None:
    sender = attach(peer.submit("land", kind, 64 << 20))
    region, data = peer.submit("lend", 64 << 20), bytes_of(64 << 20, 1)
    sender.write_region(region, data, TIMEOUT_S)
    killer = Child(["sh", "-c", f"sleep 0.05; kill -KILL {peer.process.pid}"])
    with pytest.raises(PeerGone):
        write_until_it_fails(sender, region, data)
    assert killer.wait(TIMEOUT_S) == 0
    with pytest.raises(PeerGone):
        sender.write_region(region, data[:1], TIMEOUT_S)
    sender.close()


@pytest.mark.parametrize("kind", [each for each in TRANSPORTS if each.values[0] != "shm"])
def test_a_hanging_receiver_is_a_timeout(kind, peer, attach) -> None:
    sender = attach(peer.submit("land", kind, 64 << 20))
    region, data = peer.submit("lend", 64 << 20), bytes_of(64 << 20, 1)
    sender.write_region(region, data, TIMEOUT_S)
    peer.signal(signal.SIGSTOP)
    with pytest.raises(TransportTimeout):
        sender.write_region(region, data, 0.5)
    with pytest.raises(PeerGone):
        sender.write_region(region, data[:1], TIMEOUT_S)


@pytest.mark.skipif("shm" not in transports.available_transports(), reason="no shm in this installation")
def test_shared_memory_is_written_while_the_receiver_hangs(peer, attach) -> None:
    sender = attach(peer.submit("land", "shm", 4_096))
    region = peer.submit("lend", 4_096)
    peer.signal(signal.SIGSTOP)
    found = sender.write_region(region, bytes_of(4_096, 7), 0.5)
    peer.signal(signal.SIGCONT)
    assert peer.submit("arrived", region, 4_096, found, 7)


@every_transport
def test_what_comes_late_finds_nothing(kind, peer, land, attached) -> None:
    receiver = attached(kind, 64 << 20)
    region = lease(receiver, 64 << 20)
    peer.send("put_again_and_again", region)
    assert peer.receive() == "going"
    peer.signal(signal.SIGSTOP)
    receiver.close()
    fresh = land(kind, 64 << 20)
    fresh._memory[:] = 0
    peer.signal(signal.SIGCONT)
    with pytest.raises(PeerGone):
        peer.receive()
    assert not fresh._memory.any()


@every_transport
def test_a_closed_sender_refuses_to_send(kind, land, attach) -> None:
    receiver = land(kind, 4_096)
    sender = attach(receiver.offer)
    region = lease(receiver, 4_096)
    sender.close()
    sender.close()
    with pytest.raises(PeerGone):
        sender.write_region(region, bytes_of(4_096, 1), TIMEOUT_S)


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
        msgspec.msgpack.encode(ReceiverOffer("shm", 1, b"t" * 32, b"asr-serve-transport-" + b"0" * 32)),
        msgspec.msgpack.encode(ReceiverOffer("nixl", 1, b"t" * 32, b"no msgpack")),
        msgspec.msgpack.encode(
            ReceiverOffer("nixl", 1, b"t" * 32, msgspec.msgpack.encode((b"no metadata" * 9, 1, HOST)))
        ),
    ],
)
def test_invalid_offers(offer) -> None:
    with pytest.raises(TransportFailed):
        transports.attach_sender(offer)


@pytest.mark.parametrize("kind", ["local", *TRANSPORTS])
def test_regions_outside_the_receiver_memory(kind, land, attach) -> None:
    receiver = land(kind, 4_096)
    sender = attach(receiver.offer)
    lease(receiver, 4_096)
    wrong = ((0, 4_097, 1), (1, 4_096, 1), (4_096, 1, 1), (-1, 2, 1), (0, 10, 11), (0, 10, 0))
    for at, size, nbytes in wrong:
        with pytest.raises(TransportFailed, match="in a spot that is large enough"):
            sender.write_region(BufferRegion(at, size), np.zeros(nbytes, np.uint8), TIMEOUT_S)


@pytest.mark.parametrize("kind", ["local", *TRANSPORTS[:2]])
def test_a_receiver_has_one_sender(kind, land, attach) -> None:
    receiver = land(kind, 4_096)
    sender = attach(receiver.offer)
    with pytest.raises(TransportFailed):
        transports.attach_sender(receiver.offer)
    region = lease(receiver, 9)
    found = receiver.received(region, 9, sender.write_region(region, bytes_of(9, 1), TIMEOUT_S))
    assert found.tolist() == bytes_of(9, 1).tolist()


@pytest.mark.parametrize("kind", TRANSPORTS[:2])
def test_a_wrong_token_is_refused_and_the_right_one_still_taken(kind, land, attach) -> None:
    receiver = land(kind, 4_096)
    with pytest.raises(TransportFailed):
        transports.attach_sender(changed_offer(receiver.offer, token=b"t" * 32))
    attach(receiver.offer)


def test_an_offer_does_not_choose_the_address_of_the_connection(land, undo) -> None:
    victim = undo.enter_context(socket.create_server(("127.0.0.2", 0)))
    receiver = land("tcp", 4_096)
    elsewhere = changed_offer(receiver.offer, where=msgspec.msgpack.encode(victim.getsockname()[:2]))
    with pytest.raises(TransportFailed, match=r"'127\.0\.0\.2' is offered from 127\.0\.0\.1"):
        transports.attach_sender(elsewhere, only_at=HOST)
    victim.setblocking(False)
    with pytest.raises(BlockingIOError):
        victim.accept()
    for nonsense in ("localhost", "127.1", "", "\x1b[2J"):
        with pytest.raises(TransportFailed, match="an IPv4 or IPv6 address in numbers"):
            transports.attach_sender(
                changed_offer(receiver.offer, where=msgspec.msgpack.encode((nonsense, 1))), only_at=HOST
            )
    # The same address, as a socket for both families calls it.
    sender = transports.attach_sender(receiver.offer, only_at=f"::ffff:{HOST}")
    undo.callback(sender.close)
    region = lease(receiver, 5)
    receiver.received(region, 5, sender.write_region(region, bytes_of(5, 1), TIMEOUT_S))


@pytest.mark.parametrize(("offered", "seen"), [("::ffff:127.0.0.1", HOST), ("fe80::1%eth0", "fe80::1%eth7")])
def test_one_address_in_two_spellings(offered, seen) -> None:
    expect_address(offered, seen)
    expect_address(offered, None)
    with pytest.raises(TransportFailed):
        expect_address(offered, "192.0.2.1")


def test_a_nixl_offer_names_no_other_address() -> None:
    """Checked before NIXL is started: it need not be installed."""
    where = msgspec.msgpack.encode((b"metadata", 1, "192.0.2.1"))
    with pytest.raises(TransportFailed, match=r"'192\.0\.2\.1' is offered from 127\.0\.0\.1"):
        transports.attach_sender(msgspec.msgpack.encode(ReceiverOffer("nixl", 1, b"t" * 32, where)), only_at=HOST)


def test_silent_connections_do_not_keep_the_sender_out(land, attach, undo) -> None:
    receiver = land("tcp", 4_096)
    address = msgspec.msgpack.decode(read_offer(receiver.offer).where, type=tuple[str, int])
    for _ in range(3 * tcp.STRANGERS):
        undo.enter_context(socket.create_connection(address))
    region, sender = lease(receiver, 5), attach(receiver.offer)
    receiver.received(region, 5, sender.write_region(region, bytes_of(5, 1), TIMEOUT_S))


def test_a_receiver_without_a_sender_is_closed(land, undo) -> None:
    receiver = land("tcp", 4_096)
    address = msgspec.msgpack.decode(read_offer(receiver.offer).where, type=tuple[str, int])
    undo.enter_context(socket.create_connection(address))
    receiver.close()
    with pytest.raises(TransportFailed):
        transports.attach_sender(receiver.offer)


@pytest.mark.parametrize(("at", "nbytes"), [(64, 64), (0, 65), (0, 0), (2**63, 2**63), (2**64 - 1, 2)])
def test_a_sender_that_writes_outside_its_lease_is_cut(at, nbytes, land) -> None:
    receiver = land("tcp", 4_096)
    receiver._memory[:] = 0
    lease(receiver, 64)
    offer = read_offer(receiver.offer)
    with socket.create_connection(msgspec.msgpack.decode(offer.where, type=tuple[str, int])) as line:
        line.sendall(tcp.HELLO + offer.token)
        assert line.recv(1) == tcp.TAKEN
        line.sendall(struct.pack("!QQ", at, nbytes) + b"x")
        assert line.recv(1) == tcp.REFUSED
        with contextlib.suppress(ConnectionError):
            assert line.recv(1) == b""
    assert not receiver._memory.any()


def test_tcp_refuses_a_region_that_is_not_leased(land, attach) -> None:
    receiver = land("tcp", 4_096)
    sender = attach(receiver.offer)
    with pytest.raises((TransportFailed, PeerGone)):
        sender.write_region(BufferRegion(0, 64), bytes_of(64, 1), TIMEOUT_S)


# --- this installation --------------------------------------------------------------------------------


def test_available_transports() -> None:
    assert transports.available_transports()[0] == "local"
    assert "tcp" in transports.available_transports()
    with pytest.raises(OptionError, match="did you mean 'tcp'"):
        transports.create_receiver("tpc", 1, HOST)
    with pytest.raises(OptionError, match="a landing memory of 0 bytes"):
        transports.create_receiver("tcp", 0, HOST)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "::ffff:192.0.2.1"])
def test_an_address_of_another_machine(host) -> None:
    with pytest.raises(OptionError, match="an address of this machine"):
        transports.create_receiver("tcp", 4_096, host)


def test_locally_read_only_memory_is_not_copied(land, attach) -> None:
    receiver = land("local", 1 << 20)
    sender = attach(receiver.offer)
    region, data = lease(receiver, 1_000), bytes_of(1_000, 1)
    found = sender.write_region(region, data, TIMEOUT_S)
    view = receiver.received(region, 1_000, found)
    assert not np.shares_memory(view, data)
    assert np.array_equal(view, data)
    receiver.release(region)
    region = lease(receiver, 1_000)
    data.flags.writeable = False
    view = receiver.received(region, 900, sender.write_region(region, data, TIMEOUT_S))
    assert np.shares_memory(view, data)
    assert np.array_equal(view, data[:900])
    receiver.release(region)
    region = lease(receiver, 1_000)
    sender.write_region(region, data, TIMEOUT_S)
    sender.write_region(region.subregion(0, 10), data[10:20], TIMEOUT_S)
    assert np.array_equal(receiver.received(region, 10, 0), data[10:20]), "the last that was put there"
    with pytest.raises(TransportFailed):
        sender.write_region(BufferRegion(region.at + 1_024, 8), data[:8], TIMEOUT_S)
    receiver.close()
    with pytest.raises(PeerGone):
        sender.write_region(region, data, TIMEOUT_S)


# --- /dev/shm -----------------------------------------------------------------------------------------

needs_shm = pytest.mark.skipif("shm" not in transports.available_transports(), reason="no shm in this installation")


@needs_shm
def test_a_shm_file_lives_until_the_sender_has_attached(peer, land) -> None:
    receiver = land("shm", 4_096)
    assert shm_path(receiver.offer).stat().st_mode & 0o777 == 0o600
    peer.submit("attach", receiver.offer)
    assert not shm_path(receiver.offer).exists()
    unmet = land("shm", 4_096)
    unmet.close()
    assert not shm_path(unmet.offer).exists()


@needs_shm
def test_shm_files_of_killed_processes_are_removed(peer, land) -> None:
    offer = peer.submit("land", "shm", 4_096)
    land("shm", 4_096)
    assert shm_path(offer).exists(), "a landing that lives keeps its name"
    peer.signal(signal.SIGKILL)
    assert shm_path(offer).exists()
    land("shm", 4_096)
    assert not shm_path(offer).exists()


@needs_shm
def test_other_files_are_never_taken_for_the_offered_one(land, undo) -> None:
    receiver = land("shm", 4_096)
    path = shm_path(receiver.offer)
    other = path.with_name(path.name[:-32] + secrets.token_hex(16))
    undo.callback(other.unlink, missing_ok=True)
    offer = changed_offer(receiver.offer, where=other.name.encode())
    other.symlink_to(path)
    with pytest.raises(TransportFailed):
        transports.attach_sender(offer)
    other.unlink()
    whole = path.read_bytes()
    other.touch(0o600)
    with pytest.raises(TransportFailed):
        transports.attach_sender(offer)  # of no bytes
    other.write_bytes(whole)
    other.chmod(0o644)
    with pytest.raises(TransportFailed):
        transports.attach_sender(offer)  # open to others
    other.chmod(0o600)
    other.write_bytes(bytes(len(whole)))
    with pytest.raises(TransportFailed, match="not the one"):
        transports.attach_sender(offer)
    other.unlink()
    os.mkfifo(other, 0o600)
    with pytest.raises(TransportFailed):
        transports.attach_sender(offer)


@needs_shm
def test_too_small_shared_memory_is_an_error_at_once(land, undo, tmp_path, monkeypatch) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    undo.callback(subprocess.run, ["umount", "-l", str(tmp_path)], check=True)
    monkeypatch.setattr(shm, "FOLDER", tmp_path)
    with pytest.raises(OptionError, match="--shm-size"):
        transports.create_receiver("shm", 8 << 20, HOST)
    assert not list(tmp_path.iterdir())
    land("shm", 1 << 19)


# --- two networks -------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(undo: contextlib.ExitStack) -> tuple[list[str], str]:
    """A prefix that runs a command in another network namespace, and our address as seen from there."""

    def ip(*args: str) -> None:
        done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no network of its own here: ip {' '.join(args)}: {done.stderr.strip()}")

    if shutil.which("ip") is None:
        pytest.skip("no network of its own here: there is no `ip`")
    mark = secrets.token_hex(3)
    space, here, there = f"tr{mark}", f"ra{mark}", f"rb{mark}"
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


@pytest.mark.parametrize("kind", TRANSPORTS[1:])
def test_between_two_networks(kind, undo, elsewhere) -> None:
    before, host = elsewhere
    sender, receiver = Peer(*before), Peer()  # both new: UCX reads a machine's routes once a process
    undo.callback(sender.close)
    undo.callback(receiver.close)
    sender.submit("attach", receiver.submit("land", kind, 16 << 20, host))
    for nbytes in (1, 8 << 20):
        region = receiver.submit("lend", nbytes)
        assert receiver.submit("arrived", region, nbytes, sender.submit("put", region, nbytes, nbytes), nbytes)
