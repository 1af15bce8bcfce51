"""Listener of an engine process for servers that did not start it: those of a cluster, on this machine or others."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
from collections import Counter
from functools import partial
from multiprocessing.connection import Connection

import msgspec

from asr_serve.engine.process import messages
from asr_serve.engine.process.connection import PcmSource, PipePcmReader
from asr_serve.engine.process.server_handshake import MAX_GREETINGS, MAX_SERVERS, greet_server
from asr_serve.engine.process.server_link import EngineFacts, ServerLink, ServerQueue
from asr_serve.errors import AsrServeError, OptionError, PeerRefused
from asr_serve.transfer.ring import PcmReader
from asr_serve.transfer.tcp_options import configure_connection

log = logging.getLogger(__name__)

BACKLOG = 16
WATCH_S = 0.5
"""Time between two looks at which servers are silent."""
ACCEPT_AGAIN_S = 0.2
"""Pause after a connection that could not be accepted, as where there are no descriptors left."""


class ServerListener:
    """Accepts servers, each with a thread that reads its messages."""

    def __init__(self, spec: messages.ListenSpec) -> None:
        """Binds the sockets; `start` accepts. Raises OptionError where they cannot be bound."""
        self._key, self._max_sessions = spec.key, spec.max_sessions
        path = os.path.join(spec.folder, f"{os.getpid()}.sock")
        self.address = messages.EngineAddress(path, None)
        self._sockets: list[socket.socket] = []
        self._closed = threading.Event()
        try:
            local = socket.socket(socket.AF_UNIX)
            self._sockets.append(local)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # of an earlier process with this number
            local.bind(path)
            port = 0
            if spec.host is not None:
                family, kind, protocol, _, address = socket.getaddrinfo(spec.host, 0, type=socket.SOCK_STREAM)[0]
                remote = socket.socket(family, kind, protocol)
                self._sockets.append(remote)
                remote.bind(address)
                port = int(remote.getsockname()[1])
            for listener in self._sockets:
                listener.listen(BACKLOG)
        except OSError as failure:
            self.close()
            raise OptionError(
                f"servers cannot connect to this engine at {path} and {spec.host}: {failure}",
                "addresses of its machine",
            ) from failure
        if spec.host is not None:
            self.address = messages.EngineAddress(path, (spec.host, port))
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._links: dict[int, ServerLink] = {}
        self._reserved = 0
        """Places of servers that are about to be connected: of this machine from their first byte, since only its user
        can reach them; of others once they have proved that they know the key."""
        self._greetings: dict[socket.socket, str] = {}
        """Connections over the network without that proof, the oldest first, with their hosts."""

    def start(self, facts: EngineFacts, ready: messages.EngineReady) -> None:
        """Accepts servers from now on. `ready`: their first message."""
        facts.server_queues, facts.places.most = self._queues, self._max_sessions
        for listener in self._sockets:
            threading.Thread(target=self._accept, args=(listener, facts, ready), name="servers", daemon=True).start()
        threading.Thread(target=self._watch, name="servers watch", daemon=True).start()

    def link(self, number: int) -> ServerLink | None:
        """Connection of that number, while it is open."""
        return self._links.get(number)

    def _queues(self) -> list[ServerQueue]:
        """Work of all connected servers."""
        with self._lock:
            return [link.queue for link in self._links.values()]

    def audio_changed(self, digest: bytes, cached: bool) -> None:
        """Tells all servers that audio is cached, or no longer. On the loop's thread."""
        change = messages.AudioCached((digest,)) if cached else messages.AudioCached((), (digest,))
        with self._lock:
            links = tuple(self._links.values())
        if not links:
            return
        encoded = messages.encode(change)
        for link in links:
            link.send_encoded(encoded)

    def finish(self) -> None:
        """Sends nothing after what is queued."""
        with self._lock:
            links = tuple(self._links.values())
        for link in links:
            link.finish()

    def close(self) -> None:
        """Accepts no more servers; connections end with the process."""
        self._closed.set()
        for listener in self._sockets:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # unblocks `accept`
            listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self.address.unix_path)

    def _accept(self, listener: socket.socket, facts: EngineFacts, ready: messages.EngineReady) -> None:
        while True:
            try:
                line, peer = listener.accept()
            except OSError as failure:
                if self._closed.is_set():
                    return
                log.warning("a server could not be accepted: %s", failure)
                if self._closed.wait(ACCEPT_AGAIN_S):
                    return
                continue
            if line.family != socket.AF_UNIX:
                self._admit_greeting(line, str(peer[0]))
            elif not self._reserve():
                log.warning("a server was turned away: %d are connected", MAX_SERVERS)
                line.close()
                continue
            threading.Thread(target=self._serve, args=(line, facts, ready), name="server", daemon=True).start()

    def _reserve(self) -> bool:
        """Reserves a server's place, if there is one."""
        with self._lock:
            free = len(self._links) + self._reserved < MAX_SERVERS
            self._reserved += free
        return free

    def _admit_greeting(self, line: socket.socket, host: str) -> None:
        """Lets a connection over the network greet. Where there are too many, the oldest one of the host that has most
        of them is ended: a host that sends nothing keeps none but itself out."""
        with self._lock:
            self._greetings[line] = host
            if len(self._greetings) <= MAX_GREETINGS:
                return
            [(crowded, _)] = Counter(self._greetings.values()).most_common(1)
            oldest = next(each for each, of in self._greetings.items() if of == crowded)
            del self._greetings[oldest]
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def _serve(self, line: socket.socket, facts: EngineFacts, ready: messages.EngineReady) -> None:
        link: ServerLink | None = None
        reserved = line.family == socket.AF_UNIX  # by `_accept`
        try:
            with line:
                descriptors = self._greet(line)
                reserved = reserved or self._reserve()
                if not reserved:
                    raise PeerRefused("one more server", f"{MAX_SERVERS} connected servers")
                link = self._open(line, descriptors)
        except (AsrServeError, OSError, ValueError) as failure:
            log.warning("a server could not connect: %s", failure)
        if link is None:
            with self._lock:
                self._reserved -= reserved
            return
        # It is the first message, so that it is sent before any other thread knows the link.
        servers = len(self._links) + 1
        link.send(msgspec.structs.replace(ready, free_sessions=facts.free_sessions, servers=servers))
        with self._lock:
            self._reserved -= 1
            self._links[link.number] = link
            facts.servers = len(self._links)
        try:
            facts.loop.call(partial(_tell_cached_audio, link, facts))  # changes from now on follow it
            link.read_messages(facts)
        finally:
            with self._lock:
                del self._links[link.number]
                facts.servers = len(self._links)
            link.close()

    def _watch(self) -> None:
        """Disconnects servers that are silent: what they have here would stay for ever."""
        while not self._closed.wait(WATCH_S):
            with self._lock:
                silent = [link for link in self._links.values() if link.silent]
            for link in silent:
                log.warning("server %d was silent for too long: it is disconnected", link.number)
                link.drop()

    def _greet(self, line: socket.socket) -> tuple[int, int] | None:
        """Greets a server; returns the descriptors of its ring. Raises PeerRefused, PeerGone, OSError."""
        try:
            if line.family != socket.AF_UNIX:
                configure_connection(line)
            return greet_server(line, self._key)
        finally:
            with self._lock:
                self._greetings.pop(line, None)

    def _open(self, line: socket.socket, descriptors: tuple[int, int] | None) -> ServerLink:
        """Makes the link to a server that was greeted. Raises OSError, ValueError for a file that is no ring."""
        number = next(self._numbers)
        with contextlib.ExitStack() as undo:
            pcm: PcmSource | None = None
            if descriptors is not None:
                bell, memory = descriptors
                end = socket.socket(fileno=bell)
                undo.callback(end.close)
                try:
                    pcm = PcmReader(memory, end)
                finally:
                    os.close(memory)
            pipe = Connection(line.detach())
            undo.pop_all()
        return ServerLink(pipe, pcm or PipePcmReader(pipe), number, f"to server {number}")


def _tell_cached_audio(link: ServerLink, facts: EngineFacts) -> None:
    if cached := facts.loop.executor.cached_audio():
        link.send(messages.AudioCached(tuple(cached)))
