"""The engine process: the loop on its main thread, the server's messages on another.

    python -m asr_serve.engine.process.host PIPE BELL RING      file descriptors, inherited

It ends when told to, and when the server is gone: the pipe's end says so at once.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection

import numpy as np

from asr_serve.decoding.attention import Recognition
from asr_serve.devices.cpu import keep_memory
from asr_serve.engine.loop import Loop
from asr_serve.engine.parts import Checkpoint, assemble
from asr_serve.engine.process import wire
from asr_serve.engine.session import Utterance, Windows
from asr_serve.engine.stats import Stats
from asr_serve.errors import AsrServeError, OutOfStep, PeerGone
from asr_serve.metrics import EngineMetrics
from asr_serve.models.card import cards
from asr_serve.transfer.ring import PcmReader

REPORT_EVERY_S = 0.5
"""However often somebody scrapes."""


class Host:
    """Turns messages into jobs for the loop, and what the loop answers into messages."""

    def __init__(self, pipe: Connection, ring: PcmReader) -> None:
        self._pipe, self._ring = pipe, ring
        self._sending = threading.Lock()
        self._stopped = False
        self._loop: Loop | None = None
        self._metrics: EngineMetrics | None = None
        self._text, self._text_at = b"", -math.inf

    def run(self, spec: wire.EngineSpec) -> int:
        started = time.perf_counter()
        try:
            checkpoint = Checkpoint.find(spec.model, spec.weights)
            keep_memory()
            parts = checkpoint.build(spec.device, spec.dtype)
            self._metrics = EngineMetrics(checkpoint.card.name)
            loop = self._loop = assemble(
                parts,
                checkpoint.card,
                spec.config,
                on_done=lambda _: None,
                on_stop=self._stop_sending,
                on_start=lambda ids: self._send(wire.Started(tuple(ids))),
                stats=Stats(self._metrics),
                keep_states=True,
            )
        except AsrServeError as failure:
            self._send(wire.Broken(wire.Failure.of(failure)))
            return 1
        self._send(
            wire.Ready(
                checkpoint.card,
                tuple(cards().values()),
                str(checkpoint.folder),
                parts.device.describe(),
                round(time.perf_counter() - started, 3),
            )
        )
        threading.Thread(target=self._read, args=(loop,), name="messages", daemon=True).start()
        loop.run()
        return 0

    # --- from the server, on a thread of its own ----------------------------------------------------------

    def _read(self, loop: Loop) -> None:
        try:
            while True:
                self._take(loop, wire.decode_to_engine(self._pipe.recv_bytes()))
        except (EOFError, OSError, PeerGone, OutOfStep):
            loop.inbox.put(Loop.stop)

    def _take(self, loop: Loop, message: wire.ToEngine) -> None:
        put = loop.inbox.put
        match message:
            case wire.Submit():
                utterance = Utterance(
                    message.id,
                    self._ring.take(message.id, message.length),
                    message.samples,
                    message.options,
                    message.priority,
                    Future(),
                    message.draft,
                    message.within_ms,
                    message.submitted_ns,
                )
                utterance.future.add_done_callback(partial(self._done, message.id))
                put(lambda loop: loop.submit(utterance))
            case wire.Put(session=session, piece=piece, length=length):
                windows = Windows(session, self._ring.take(session, length), Future())
                windows.future.add_done_callback(partial(self._heard, windows, piece))
                put(lambda loop: loop.listeners.put(windows))
            case wire.Cancel(id=request_id):
                put(lambda loop: loop.cancel(request_id))
            case wire.OpenSession(session=session, live=live, state=state):
                put(lambda loop: loop.listeners.open(session, live, state))
            case wire.CloseSession(session=session):
                put(lambda loop: loop.listeners.close(session))
            case wire.Ask(number=number):
                self._report(number, loop)
            case wire.Ping():
                put(lambda _: self._send(wire.Pong()))
            case wire.Stop():
                put(Loop.stop)

    # --- to the server, mostly on the loop's thread -------------------------------------------------------

    def _done(self, request_id: int, future: Future[Recognition]) -> None:
        error = future.exception()
        if error is None:
            self._send(wire.Done(request_id, future.result()))
        else:
            assert isinstance(error, AsrServeError)
            self._send(wire.Failed(request_id, wire.Failure.of(error)))

    def _heard(self, windows: Windows, piece: int, future: Future[np.ndarray]) -> None:
        error = future.exception()
        if error is None:
            assert windows.state is not None
            self._send(wire.Heard(windows.session, piece, future.result().tobytes(), windows.state))
        else:
            assert isinstance(error, AsrServeError)
            self._send(wire.Failed(windows.session, wire.Failure.of(error), piece))

    def _report(self, number: int, loop: Loop) -> None:
        """On the reading thread: what is read of the loop are single numbers. The text is not made anew for
        everybody who asks."""
        metrics = self._metrics
        assert metrics is not None
        now = time.monotonic()
        if now - self._text_at > REPORT_EVERY_S:
            metrics.pages.set(loop.decode_runner.pages.pages)
            metrics.pages_used.set(loop.decode_runner.pages.used)
            metrics.sessions.set(loop.vad_runner.states.used)
            metrics.requests["waiting"].set(len(loop.planner))
            metrics.requests["decoding"].set(len(loop.decode_runner.rows))
            self._text, self._text_at = metrics.text(), now
        self._send(wire.Report(number, loop.describe(), self._text))

    def _send(self, message: wire.ToServer) -> None:
        with self._sending:
            if not self._stopped:
                with contextlib.suppress(OSError):  # the server is gone: the reading thread sees it too
                    self._pipe.send_bytes(wire.encode(message))

    def _stop_sending(self) -> None:
        """What the ending loop rejects is not for the callers: the server gives it to the next engine."""
        with self._sending:
            self._stopped = True

    def log(self, record: logging.LogRecord, text: str) -> None:
        self._send(wire.Log(record.name, record.levelno, text))


class _ToServer(logging.Handler):
    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host

    def emit(self, record: logging.LogRecord) -> None:
        self._host.log(record, self.format(record))


def main(arguments: list[str]) -> int:
    # Both come to the whole process group; the server decides when its engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe_fd, bell_fd, ring_fd = map(int, arguments)
    pipe = Connection(pipe_fd)
    host = Host(pipe, PcmReader(ring_fd, socket.socket(fileno=bell_fd)))
    logging.basicConfig(level=logging.INFO, handlers=[_ToServer(host)], format="%(message)s")
    try:
        spec = wire.decode_spec(pipe.recv_bytes())
    except (EOFError, OSError):
        return 0  # the server went away first
    return host.run(spec)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
