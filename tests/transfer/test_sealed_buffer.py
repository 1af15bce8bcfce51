"""Bytes that are handed over in sealed memory."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Iterator

import msgspec
import psutil
import pytest

from asr_serve.errors import ChecksumMismatch
from asr_serve.transfer import sealed_buffer as parcels
from asr_serve.transfer.sealed_buffer import SealedBuffer

pytestmark = pytest.mark.skipif(not parcels.SUPPORTED, reason="this system has no sealed memory")


@pytest.fixture
def line() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


@pytest.mark.parametrize("parts", [[b"abc"], [b"", b"x" * 5_000_001, b"", b"yz"], [b"", b""], []])
def test_packed_data_arrives_and_nothing_is_left(line, parts):
    before = psutil.Process().num_fds()
    packed = SealedBuffer.pack(parts)
    packed.send(line[0])
    packed.close()
    packed.close()
    arrived = SealedBuffer.receive(line[1], packed.label)
    assert arrived.read() == arrived.read() == parts
    arrived.close()
    # Fewer if something of an earlier test was collected meanwhile.
    assert psutil.Process().num_fds() <= before


def test_behind_bytes_that_are_read_without_it(line):
    """As behind a message in a pipe: what was read before it takes nothing of it."""
    packed = SealedBuffer.pack([b"abc"])
    for number in range(3):
        line[0].sendall(b"message %d" % number)
        packed.send(line[0])
    for number in range(3):
        assert os.read(line[1].fileno(), 9) == b"message %d" % number
        arrived = SealedBuffer.receive(line[1], packed.label)
        assert arrived.read() == [b"abc"]
        arrived.close()
    packed.close()


def test_a_sealed_buffer_cannot_be_changed():
    packed = SealedBuffer.pack([b"abc"])
    fd = packed._fd
    for change in (
        lambda: os.write(fd, b"x"),
        lambda: os.ftruncate(fd, 1),
        lambda: os.ftruncate(fd, 9),
        lambda: mmap.mmap(fd, 3),
        lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ):
        with pytest.raises(OSError, match="not permitted"):
            change()
    assert packed.read() == [b"abc"]
    packed.close()


def test_under_another_label_it_is_torn():
    packed = SealedBuffer.pack([b"abc", b"d"])
    for label in (
        msgspec.structs.replace(packed.label, checksum=packed.label.checksum ^ 1),
        msgspec.structs.replace(packed.label, lengths=(3, 2)),
        msgspec.structs.replace(packed.label, lengths=()),
    ):
        with pytest.raises(ChecksumMismatch):
            SealedBuffer(os.dup(packed._fd), label).read()
    packed.close()


def test_a_closed_connection_has_no_buffer(line):
    packed = SealedBuffer.pack([b"abc"])
    line[0].close()
    with pytest.raises(EOFError):
        SealedBuffer.receive(line[1], packed.label)
    packed.close()
