"""Offer of the server's engine to edges on this host."""

from __future__ import annotations

import logging
import os
import threading

import msgspec

from asr_serve import __version__
from asr_serve.config import EngineConfig
from asr_serve.engine.process.backend import ProcessBackend
from asr_serve.engine.process.engine_process import RingSize
from asr_serve.engine.process.local_offer import EngineOffer, lock_offer_folder, remove_offer, write_offer
from asr_serve.engine.process.messages import EngineAddress, EngineSpec, ListenSpec

log = logging.getLogger(__name__)

WAIT_S = 1.0
"""Longest wait of a thread for a restart, so that it ends soon after the engine."""
KEY_BYTES = 32


class EdgeOffer:
    """Offer of one engine in a folder: written anew with each of its processes, removed when it is closed."""

    def __init__(self, folder: str, sessions: int) -> None:
        """`sessions`: that edges may have together. Raises OptionError, also where another server has the folder."""
        self._lock = lock_offer_folder(folder, "edge_folder")
        self._folder, self._sessions, self._key = folder, sessions, os.urandom(KEY_BYTES)

    def close(self) -> None:
        """Leaves the folder to others. For one that is not published, or no longer."""
        self._lock.close()

    def extend(self, spec: EngineSpec) -> EngineSpec:
        """Specification of the process, which listens for edges too."""
        listen = ListenSpec(self._folder, None, self._key, self._sessions)
        return msgspec.structs.replace(spec, servers=listen)

    def publish(self, backend: ProcessBackend, ring: RingSize, config: EngineConfig) -> None:
        """Publishes where the processes of an engine listen, until it is closed."""
        config = msgspec.structs.replace(config, max_sessions=self._sessions)
        threading.Thread(target=self._watch, args=(backend, ring, config), name="edge offer", daemon=True).start()

    def _watch(self, backend: ProcessBackend, ring: RingSize, config: EngineConfig) -> None:
        known = None
        while backend.state != "closed":
            address = backend.wait_address(known, WAIT_S)
            if address == known or not isinstance(address, EngineAddress):
                continue
            try:
                write_offer(self._folder, EngineOffer(__version__, address.unix_path, self._key, ring, config))
            except OSError as failure:
                log.error("edges are not told of the engine: %s", failure)
            known = address
        remove_offer(self._folder)
        self.close()
