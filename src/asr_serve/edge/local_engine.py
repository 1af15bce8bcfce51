"""Engine of a server on this host, as the edge uses it: found by the server's offer, connected by shared memory."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

from asr_serve import __version__
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process.engine_process import RingSize
from asr_serve.engine.process.local_offer import EngineOffer, read_offer
from asr_serve.engine.process.messages import EngineAddress
from asr_serve.engine.replicas.backend import ReplicatedBackend, replicated_backend
from asr_serve.errors import AsrServeError, PeerRefused, Unreachable
from asr_serve.server.engine_registry import EngineParts, engine_parts

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Time between two looks at the offer."""
SILENT_S = 10.0
"""Time without a message after which an engine counts as dead, as between a server and its own."""
FIRST_MESSAGE_S = 15.0
"""Longest wait for a new connection's first message: an engine is offered once its weights are loaded."""
CONNECT_S = 5.0
"""Time for which a session waits for the connection."""
REPLICA_ID = "engine"


class _OfferedEngine:
    """Directory of one replica, the engine that is offered; and the settings of its connection."""

    def __init__(self, folder: str, offer: EngineOffer) -> None:
        self._folder, self._offer = folder, offer
        self._closed = threading.Event()

    @property
    def key(self) -> bytes:
        return self._offer.key

    digest_key = key

    @property
    def ring(self) -> RingSize:
        return self._offer.ring

    @property
    def silent_s(self) -> float:
        return SILENT_S

    def start(self, backend: ReplicatedBackend) -> None:
        threading.Thread(target=self._watch, args=(backend,), name="engine offer", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self, backend: ReplicatedBackend) -> None:
        told = ""
        while not self._closed.is_set():
            try:
                offer = read_offer(self._folder)
                if offer is not None and not self._goes_on(offer):
                    log.warning("another server offers its engine in %s: it is connected anew", self._folder)
                    backend.close()  # which ends this loop
                    return
                if offer is not None:
                    self._offer = offer
                    backend.connect(REPLICA_ID, EngineAddress(offer.path, None), same_machine=True)
                told = ""
            except (OSError, RuntimeError, AsrServeError) as failure:  # no descriptors or threads left, for a while
                if str(failure) != told:
                    log.warning("the engine offered in %s: %s", self._folder, failure)
                told = str(failure)
            self._closed.wait(POLL_S)

    def _goes_on(self, offer: EngineOffer) -> bool:
        """Returns whether a client of the engine that was offered may go on with that one."""
        return (offer.release, offer.config) == (self._offer.release, self._offer.config)


class LocalEngine:
    """Engine that is offered in a folder. It is connected when it is first asked for, and again where another model
    takes its place. Belongs to the event loop's thread."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._connecting: asyncio.Future[EngineParts] | None = None

    async def wait_connected(self) -> None:
        """Connects it, and waits for that for a while. Raises Unreachable, PeerRefused."""
        try:
            self.parts()
        except Unreachable:
            if self._connecting is None:
                raise
            await asyncio.wait({self._connecting}, timeout=CONNECT_S)

    def parts(self) -> EngineParts:
        """Client, card and tokenizer. Raises Unreachable until it is connected, PeerRefused."""
        if self._connecting is not None and self._connecting.done():
            if self._connecting.exception() is None and not self._is_over(self._connecting.result()):
                return self._connecting.result()
            failure = self._connecting.exception()
            self._forget()
            if failure is not None:
                raise Unreachable(f"the engine offered in {self._folder} cannot be used: {failure}")
        if self._connecting is None:
            offer = read_offer(self._folder)
            if offer is None:
                raise Unreachable(
                    f"no engine is offered in {self._folder}",
                    "a server of this user on this host, with that edge_folder",
                    "start it: asr-serve serve --set edge_folder=FOLDER",
                )
            if offer.release != __version__:
                raise PeerRefused(
                    f"an engine of release {offer.release}", f"release {__version__}", "the same on both sides"
                )
            connecting: asyncio.Future[EngineParts] = asyncio.get_running_loop().create_future()
            threading.Thread(
                target=_connect, args=(self._folder, offer, connecting), name="local engine", daemon=True
            ).start()
            self._connecting = connecting
        raise Unreachable(f"the engine offered in {self._folder} is being connected", "", "try again")

    async def close(self) -> None:
        """Disconnects. Idempotent."""
        self._forget()

    def _forget(self) -> None:
        connecting, self._connecting = self._connecting, None
        if connecting is None:
            return
        if connecting.done():
            if connecting.exception() is None:
                threading.Thread(target=connecting.result().client.close, daemon=True).start()
        else:
            connecting.cancel()

    @staticmethod
    def _is_over(parts: EngineParts) -> bool:
        backend = parts.client.backend
        return backend.state == "closed" or (isinstance(backend, ReplicatedBackend) and backend.outdated)


def _connect(folder: str, offer: EngineOffer, done: asyncio.Future[EngineParts]) -> None:
    """Connects to an engine, in a thread of its own: it may be long in coming."""
    engine = _OfferedEngine(folder, offer)
    parts: EngineParts | None = None
    failure: Exception | None = None
    client: EngineClient | None = None
    try:
        client = EngineClient(offer.config, replicated_backend(engine, engine, FIRST_MESSAGE_S))
        backend = client.backend
        assert isinstance(backend, ReplicatedBackend)
        backend.watch_room(client.set_room)
        parts = engine_parts(client, backend.ready, Path(backend.ready.tokenizer_folder))
    except Exception as error:  # any: the edge would wait for a future without an answer for ever
        log.warning("the engine offered in %s cannot be used: %s", folder, error, exc_info=not _is_expected(error))
        failure = error
        engine.close()
        if client is not None:
            client.close()

    def tell() -> None:
        if done.cancelled():
            if parts is not None:
                threading.Thread(target=parts.client.close, daemon=True).start()
        elif parts is not None:
            done.set_result(parts)
        elif failure is not None:
            done.set_exception(failure)

    loop = done.get_loop()
    try:
        loop.call_soon_threadsafe(tell)
    except RuntimeError:  # the edge has ended
        if parts is not None:
            parts.client.close()


def _is_expected(error: Exception) -> bool:
    return isinstance(error, AsrServeError | OSError)
