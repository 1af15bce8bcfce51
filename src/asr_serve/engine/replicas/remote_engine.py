"""Connection to the engine process of a replica, which another process started."""

from __future__ import annotations

import contextlib
import os
import socket
from multiprocessing.connection import Connection

from asr_serve.engine.process import messages
from asr_serve.engine.process.connection import EngineConnection
from asr_serve.engine.process.engine_process import RingSize
from asr_serve.engine.process.server_handshake import HANDSHAKE_S, greet_engine
from asr_serve.errors import PeerGone, PeerRefused
from asr_serve.transfer import ring
from asr_serve.transfer.ring import PcmWriter
from asr_serve.transfer.tcp_options import configure_connection


class RemoteEngine(EngineConnection):
    """Connection to a replica's engine process. Made by `connect`."""

    def __init__(self, pipe: Connection, writer: PcmWriter | None, name: str) -> None:
        self._line = socket.socket(fileno=os.dup(pipe.fileno()))
        super().__init__(pipe, writer, f"asr-serve to {name}", lost=self.kill)

    @classmethod
    def connect(
        cls, address: messages.EngineAddress, key: bytes, size: RingSize, *, same_machine: bool, name: str
    ) -> RemoteEngine:
        """Connects, with samples in a ring of `size` within a machine. Raises PeerGone, PeerRefused."""
        try:
            if same_machine:
                return cls._connect_locally(address.unix_path, key, size, name)
            if address.tcp is None:
                raise PeerRefused(f"{name} is on another machine and listens on its own only", todo="set its host")
            line = socket.create_connection(address.tcp, HANDSHAKE_S)
            with contextlib.ExitStack() as undo:
                undo.callback(line.close)
                configure_connection(line)
                greet_engine(line, key, None)
                undo.pop_all()
            return cls(Connection(line.detach()), None, name)
        except (OSError, ValueError) as failure:
            raise PeerGone(f"{name} cannot be reached: {failure}") from failure

    @classmethod
    def _connect_locally(cls, path: str, key: bytes, size: RingSize, name: str) -> RemoteEngine:
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:
            line = socket.socket(socket.AF_UNIX)
            undo.callback(line.close)
            line.settimeout(HANDSHAKE_S)
            line.connect(path)
            bell, their_bell = socket.socketpair()
            undo.callback(bell.close)
            theirs.callback(their_bell.close)
            memory, _ = ring.create(size.slots, size.payload_bytes)
            theirs.callback(os.close, memory)
            greet_engine(line, key, (their_bell.fileno(), memory))
            writer = PcmWriter(memory, bell)
            undo.pop_all()
        return cls(Connection(line.detach()), writer, name)

    def wait_ready(self) -> messages.EngineReady:
        """Waits for the first message. Raises PeerGone."""
        message = self.receive()
        if not isinstance(message, messages.EngineReady):
            raise PeerGone("the engine hung up before its first message")
        return message

    @property
    def unresponsive(self) -> bool:
        return self.silent_s > self.hang_timeout_s

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def join_or_kill(self) -> str:
        self.kill()
        return "connection lost"

    def close(self) -> None:
        self.kill()
        super().close()
        self._line.close()
