"""Encode replicas of a model, as the engine of a decode replica learns of them: they come, restart elsewhere and go."""

from __future__ import annotations

import contextlib
import hmac
import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from hashlib import sha256
from typing import Any, Protocol

import msgspec

from asr_serve.engine.process import messages
from asr_serve.errors import AsrServeError

log = logging.getLogger(__name__)

MAX_ENCODERS = 16
"""Encode replicas that one decode replica is connected to: it has memory for the batches of each."""
LEAVE_S = 60.0
"""Longest wait for the last batches of an encode replica that goes away; they are encoded elsewhere after that."""

_decode_address = msgspec.msgpack.Decoder(messages.EncoderAddress).decode


class DecodeEngine(Protocol):
    """Engine with the role decode, see engine/process/backend.ProcessBackend."""

    def set_peers(self, addresses: Sequence[str]) -> Future[Any]: ...


def peer_key(key: bytes) -> str:
    """Key of the engines of a cluster with that key, with which they prove to each other that they belong to it."""
    return hmac.digest(key, b"peers", "sha256").hex()


def choose_encoders(decoder: str, encoders: Iterable[str]) -> list[str]:
    """Returns the encode replicas for a decode replica, by their ids: all, or as many as it may have, so that those of
    all decode replicas are spread evenly, and few change when one comes or goes.

    Source  Thaler and Ravishankar, Using Name-Based Mappings to Increase Hit Rates (1998): rendezvous hashing
    """
    return sorted(encoders, key=lambda each: sha256(f"{decoder} {each}".encode()).digest())[:MAX_ENCODERS]


class EncodePeers:
    """Encode replicas that run, of which the engine of one decode replica is told. May be called from any thread."""

    def __init__(self, engine: DecodeEngine, own_id: str) -> None:
        self._engine, self._own_id = engine, own_id
        self._lock = threading.Lock()
        self._addresses: dict[str, str] = {}

    def on_address(self, replica_id: str, node_id: str, address: bytes) -> None:
        """Adds a replica, or moves it: its engine was restarted. `address`: encoded EncoderAddress."""
        with self._lock:
            self._addresses[replica_id] = _decode_address(address).peer
            self._tell()

    def on_gone(self, replica_id: str) -> None:
        """Removes a replica, and waits until the engine has its batches back."""
        with self._lock:
            self._addresses.pop(replica_id, None)
            left = self._tell()
        with contextlib.suppress(AsrServeError, TimeoutError):  # a new engine process has no batch there
            left.result(LEAVE_S)

    def _tell(self) -> Future[Any]:
        chosen = [self._addresses[each] for each in choose_encoders(self._own_id, self._addresses)]
        log.info("%d encode replicas, of which this one asks %s", len(self._addresses), ", ".join(chosen) or "none")
        return self._engine.set_peers(chosen)
