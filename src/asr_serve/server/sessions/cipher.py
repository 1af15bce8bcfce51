"""Encryption of what leaves the server: AES-256 in Galois/counter mode, with keys that can be replaced."""

from __future__ import annotations

import binascii
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from asr_serve.errors import OptionError, UnsupportedOption

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES, KEY_ID_BYTES, NONCE_BYTES = 32, 4, 12


class Unreadable(Exception):
    """A record cannot be decrypted: it is of another key, or not what was written."""


class RecordCipher(Protocol):
    """Cipher of the records of one session."""

    def seal(self, data: bytes, place: bytes) -> bytes:
        """Returns what to store at `place`, the name of the record."""

    def open(self, data: bytes, place: bytes) -> bytes:
        """Returns what was sealed for `place`. Raises Unreadable."""


class SessionCipher(Protocol):
    """Cipher of stored sessions."""

    def of_session(self, session_id: str) -> RecordCipher:
        """Returns the cipher of a session's records."""


class NoCipher:
    """Stores records as they are."""

    def of_session(self, session_id: str) -> RecordCipher:
        return self

    def seal(self, data: bytes, place: bytes) -> bytes:
        return bytes(KEY_ID_BYTES) + data

    def open(self, data: bytes, place: bytes) -> bytes:
        if data[:KEY_ID_BYTES] != bytes(KEY_ID_BYTES):
            raise Unreadable(f"it is encrypted, with the key {data[:KEY_ID_BYTES].hex()}")
        return data[KEY_ID_BYTES:]


class AesGcmCipher:
    """Encrypts with the first key and decrypts with all. Each session has keys of its own, derived from these, so that
    the random nonces of one key are few.

    Source: NIST SP 800-38D, 8.2.2 and 8.3; RFC 5869.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        """Raises UnsupportedOption if the package cryptography is not installed."""
        try:
            import cryptography  # noqa: F401
        except ImportError:
            raise UnsupportedOption(
                "sessions.key_file, and cryptography is not installed",
                "it needs the extra encryption",
                "pip install 'asr-serve[encryption]'",
                param="sessions.key_file",
            ) from None
        self._keys = {_key_id(key): key for key in keys}

    def of_session(self, session_id: str) -> RecordCipher:
        return _AesGcmRecordCipher(self._keys, session_id)


class _AesGcmRecordCipher:
    """Cipher of one session. A record is the key's id, a random nonce and the encrypted bytes with their tag; its place
    is associated data, so that no record can stand for another."""

    def __init__(self, keys: Mapping[bytes, bytes], session_id: str) -> None:
        """`keys`: by id; the first encrypts."""
        self._keys, self._info = keys, b"asr-serve session " + session_id.encode()
        self._first = next(iter(keys))
        self._ciphers: dict[bytes, AESGCM] = {}

    def seal(self, data: bytes, place: bytes) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return self._first + nonce + self._cipher(self._first).encrypt(nonce, data, place)

    def open(self, data: bytes, place: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        key, at = data[:KEY_ID_BYTES], KEY_ID_BYTES + NONCE_BYTES
        if key not in self._keys:
            raise Unreadable(f"its key {key.hex()} is not in sessions.key_file")
        try:
            return self._cipher(key).decrypt(data[KEY_ID_BYTES:at], data[at:], place)
        except InvalidTag:
            raise Unreadable("it is not what was written") from None

    def _cipher(self, key: bytes) -> AESGCM:
        if key not in self._ciphers:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF

            derived = HKDF(SHA256(), KEY_BYTES, salt=None, info=self._info).derive(self._keys[key])
            self._ciphers[key] = AESGCM(derived)
        return self._ciphers[key]


def _key_id(key: bytes) -> bytes:
    """Identifies a key without revealing it; never zero, which means that there is none."""
    found = hashlib.sha256(b"asr-serve session key" + key).digest()[:KEY_ID_BYTES]
    return found if any(found) else b"\1" + found[1:]


def session_cipher(key_file: str | None) -> SessionCipher:
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
