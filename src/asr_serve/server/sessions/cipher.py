"""Encryption of what leaves the server: AES-256 in Galois/counter mode, with keys that can be replaced."""

from __future__ import annotations

import binascii
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from asr_serve.errors import OptionError, UnsupportedOption

KEY_BYTES, KEY_ID_BYTES, NONCE_BYTES = 32, 4, 12


class Unreadable(Exception):
    """A record cannot be decrypted: it is of another key, or not what was written."""


class RecordCipher(Protocol):
    def seal(self, data: bytes, place: bytes) -> bytes:
        """Returns what to store at `place`, the name of the record."""

    def open(self, data: bytes, place: bytes) -> bytes:
        """Returns what was sealed for `place`. Raises Unreadable."""


class NoCipher:
    """Stores records as they are."""

    def seal(self, data: bytes, place: bytes) -> bytes:
        return bytes(KEY_ID_BYTES) + data

    def open(self, data: bytes, place: bytes) -> bytes:
        if data[:KEY_ID_BYTES] != bytes(KEY_ID_BYTES):
            raise Unreadable(f"it is encrypted, with the key {data[:KEY_ID_BYTES].hex()}")
        return data[KEY_ID_BYTES:]


class AesGcmCipher:
    """Encrypts with the first key and decrypts with all. A record is the key's id, a random nonce and the encrypted
    bytes with their tag; its place is associated data, so that no record can stand for another.

    Source: NIST SP 800-38D, 8.2.2.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        """Raises UnsupportedOption if the package cryptography is not installed."""
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise UnsupportedOption(
                "sessions.key_file, and cryptography is not installed",
                "it needs the extra encryption",
                "pip install 'asr-serve[encryption]'",
                param="sessions.key_file",
            ) from None
        self._invalid = InvalidTag
        self._ciphers = {_key_id(key): AESGCM(key) for key in keys}
        self._first = _key_id(keys[0])

    def seal(self, data: bytes, place: bytes) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return self._first + nonce + self._ciphers[self._first].encrypt(nonce, data, place)

    def open(self, data: bytes, place: bytes) -> bytes:
        key, at = data[:KEY_ID_BYTES], KEY_ID_BYTES + NONCE_BYTES
        if (cipher := self._ciphers.get(key)) is None:
            raise Unreadable(f"its key {key.hex()} is not in sessions.key_file")
        try:
            return cipher.decrypt(data[KEY_ID_BYTES:at], data[at:], place)
        except self._invalid:
            raise Unreadable("it is not what was written") from None


def _key_id(key: bytes) -> bytes:
    """Identifies a key without revealing it; never zero, which means that there is none."""
    found = hashlib.sha256(b"asr-serve session key" + key).digest()[:KEY_ID_BYTES]
    return found if any(found) else b"\1" + found[1:]


def record_cipher(key_file: str | None) -> RecordCipher:
    """Returns the cipher of a key file. Raises OptionError, which never shows the content of the file, and
    UnsupportedOption."""
    if key_file is None:
        return NoCipher()
    allowed = f"a file with one or more keys, each {KEY_BYTES} bytes in hexadecimal on its own line"
    todo = f"make one: openssl rand -hex {KEY_BYTES} > {key_file}"
    try:
        keys = [binascii.unhexlify(line) for line in Path(key_file).read_bytes().split()]
    except OSError as error:
        raise OptionError(
            f"sessions.key_file={key_file!r}: {error.strerror}", allowed, todo, param="sessions.key_file"
        ) from None
    except ValueError:
        raise OptionError(
            f"sessions.key_file={key_file!r} holds something else", allowed, todo, param="sessions.key_file"
        ) from None
    if not keys or any(len(key) != KEY_BYTES for key in keys):
        raise OptionError(
            f"sessions.key_file={key_file!r} holds keys of {[len(key) for key in keys]} bytes",
            allowed,
            todo,
            param="sessions.key_file",
        )
    return AesGcmCipher(keys)
