"""Integrity of chunks in the file: a checksum, or with a key, authenticated encryption.

A `ChunkTag` is kept in memory, never in the file: a chunk is as long in the file as in memory, and a stale chunk
with the right number in the right place is detected too.
"""

from __future__ import annotations

import binascii
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.transfer.checksum import checksum

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.algorithms import AES256

KEY_BYTES = 32
PREFIX_BYTES, COUNTER_BYTES = 8, 4
"""Parts of a nonce: random bytes, by which two processes with one key differ, and a counter of this process."""

ChunkTag = bytes


class ChunkIntegrity(Protocol):
    needs_staging: bool
    """Whether the bytes in the file differ from those in memory, and need a buffer of their own."""

    def seal_chunk(self, name: bytes, number: int, data: memoryview, into: memoryview) -> ChunkTag:
        """Returns the tag of chunk `number` of an entry, which is about to be written. `into`, as long as `data`,
        receives the bytes to write if `needs_staging`."""

    def open_chunk(self, name: bytes, number: int, data: memoryview, mark: ChunkTag) -> bool:
        """Verifies a chunk that was read, and decrypts it in place. False: it is not what was written, and `data`
        is useless."""


class ChecksumIntegrity:
    """Checksum of 64 bits: detects torn files and failing disks, not deliberate changes."""

    needs_staging = False

    def seal_chunk(self, name: bytes, number: int, data: memoryview, into: memoryview) -> ChunkTag:
        return self._sum(data)

    def open_chunk(self, name: bytes, number: int, data: memoryview, mark: ChunkTag) -> bool:
        return self._sum(data) == mark

    @staticmethod
    def _sum(data: memoryview) -> ChunkTag:
        return checksum(data).to_bytes(8, "big")


class AesGcmIntegrity:
    """AES-256 in Galois/counter mode; its tag is the check. The entry's name and the chunk's number are associated
    data. A nonce never repeats under one key: see PREFIX_BYTES.

    Source: NIST SP 800-38D, 8.2.1.
    """

    needs_staging = True

    def __init__(self, key: bytes) -> None:
        """Raises UnsupportedOption if the package cryptography is not installed."""
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError:
            raise UnsupportedOption(
                "disk_key_file, and cryptography is not installed",
                "it needs the extra encryption",
                "pip install 'asr-serve[encryption]'",
                param="disk_key_file",
            ) from None
        assert len(key) == KEY_BYTES
        self._cipher, self._gcm, self._invalid = Cipher, modes.GCM, InvalidTag
        self._aes: AES256 = algorithms.AES256(key)
        self._prefix, self._count = os.urandom(PREFIX_BYTES), 0

    def seal_chunk(self, name: bytes, number: int, data: memoryview, into: memoryview) -> ChunkTag:
        nonce = self._nonce()
        encryptor = self._cipher(self._aes, self._gcm(nonce)).encryptor()
        encryptor.authenticate_additional_data(_associated_data(name, number))
        encryptor.update_into(data, into)
        encryptor.finalize()
        return nonce + encryptor.tag

    def open_chunk(self, name: bytes, number: int, data: memoryview, mark: ChunkTag) -> bool:
        nonce, tag = mark[: PREFIX_BYTES + COUNTER_BYTES], mark[PREFIX_BYTES + COUNTER_BYTES :]
        decryptor = self._cipher(self._aes, self._gcm(nonce, tag)).decryptor()
        decryptor.authenticate_additional_data(_associated_data(name, number))
        decryptor.update_into(data, data)
        try:
            decryptor.finalize()
        except self._invalid:
            return False
        return True

    def _nonce(self) -> bytes:
        if self._count == 1 << 8 * COUNTER_BYTES:
            self._prefix, self._count = os.urandom(PREFIX_BYTES), 0
        self._count += 1
        return self._prefix + (self._count - 1).to_bytes(COUNTER_BYTES, "big")


def chunk_integrity(key: bytes | None) -> ChunkIntegrity:
    return ChecksumIntegrity() if key is None else AesGcmIntegrity(key)


def read_key(path: str) -> bytes:
    """Reads a key of KEY_BYTES. Raises OptionError, which never shows the content of the file."""
    allowed = f"a file with {KEY_BYTES} bytes in hexadecimal, which is {2 * KEY_BYTES} digits"
    todo = f"make one: openssl rand -hex {KEY_BYTES} > {path}"
    try:
        key = binascii.unhexlify(Path(path).read_bytes().strip())
    except OSError as error:
        raise OptionError(f"disk_key_file={path!r}: {error.strerror}", allowed, todo, param="disk_key_file") from None
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES:
        raise OptionError(f"what lies in disk_key_file={path!r}", allowed, todo, param="disk_key_file")
    return key


def _associated_data(name: bytes, number: int) -> bytes:
    """Associated data of a chunk; the number has a fixed length, so no two chunks have the same."""
    return name + struct.pack(">Q", number)
