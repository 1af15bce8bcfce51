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
from asr_serve.engine.parts import as_built, assemble, find
from asr_serve.engine.prefix.names import name, name_windows
from asr_serve.engine.process import wire
from asr_serve.engine.process.child import pass_on, passed
from asr_serve.engine.process.sending import Letter, Sender
from asr_serve.engine.saved import Saved
from asr_serve.engine.session import Piece, Utterance, Windows
from asr_serve.engine.speakers.hearing import on_this_machine
from asr_serve.engine.speakers.runner import Question
from asr_serve.engine.speaking.saying import Saying
from asr_serve.engine.stats import Stats
from asr_serve.engine.turns.runner import TurnRunner, load
from asr_serve.engine.work import Attempt
from asr_serve.errors import AsrServeError, ModelNotLoaded, OutOfStep, PeerGone
from asr_serve.metrics import EngineMetrics
from asr_serve.models.card import Card, engine_cards
from asr_serve.speaker.local import LocalVoices
from asr_serve.transfer.parcel import POSSIBLE, Parcel
from asr_serve.transfer.ring import PcmReader
from asr_serve.types import Found, Sound

log = logging.getLogger(__name__)

REPORT_EVERY_S = 0.5
"""However often somebody scrapes."""


class Host:
    """Turns messages into jobs for the loop, and what the loop answers into messages."""

    def __init__(self, pipe: Connection, ring: PcmReader) -> None:
        self._pipe, self._ring = pipe, ring
        # What waits there is bounded by what was asked: one answer for each request and piece that the server let
        # in, of a sentence its sound, some seconds of it; and callers who get none put nothing more; a pong for
        # each ping, which stop coming when the server gives us up; a report for each that somebody waited for in
        # vain, some KB every few seconds.
        self._sender = Sender("to the server", self._write)
        self._loop: Loop | None = None
        self._turns: TurnRunner | None = None
        self._metrics: EngineMetrics | None = None
        self._text, self._text_at = b"", -math.inf

    def run(self, spec: wire.EngineSpec) -> int:
        """Its exit code. What was to be said by then has been."""
        try:
            return self._run(spec)
        finally:
            self._sender.end()
            self._sender.join()

    def _run(self, spec: wire.EngineSpec) -> int:
        started = time.perf_counter()
        try:
            checkpoint = find(spec.model, spec.weights, spec.config)
            fingerprint = checkpoint.fingerprint()
            turns = load(spec.turn_model if isinstance(checkpoint.card, Card) else "none")
            keep_memory()
            parts = checkpoint.build(spec.device, spec.dtype, spec.config.quantize)
            meeting = checkpoint.meeting(spec.config, spec.listen, spec.peer_keys)
            self._metrics = EngineMetrics(checkpoint.card.name)
            loop = self._loop = assemble(
                parts,
                checkpoint.card,
                spec.config,
                on_done=lambda _: None,
                # What the ending loop rejects is not for the callers: the server gives it to the next engine.
                on_stop=self._sender.end,
                on_start=lambda ids: self._send(wire.Started(tuple(ids))),
                stats=Stats(self._metrics),
                keep_states=True,
                meeting=meeting,
            )
            if turns:
                self._turns = TurnRunner(turns, parts.device, loop.stats)
        except AsrServeError as failure:
            self._send(wire.Broken(wire.Failure.of(failure)))
            return 1
        self._send(
            wire.Ready(
                as_built(checkpoint.card, parts.model),
                turns.card if turns else None,
                tuple(engine_cards().values()),
                str(checkpoint.folder),
                fingerprint,
                parts.device.describe(),
                round(time.perf_counter() - started, 3),
                on_this_machine(),
            )
        )
        threading.Thread(target=self._read, args=(loop,), name="messages", daemon=True).start()
        loop.run()
        if self._turns is not None:
            self._turns.close()
        return 0

    # --- from the server, on a thread of its own ----------------------------------------------------------

    def _read(self, loop: Loop) -> None:
        try:
            while True:
                message = wire.decode_to_engine(self._pipe.recv_bytes())
                if isinstance(message, wire.OpenStream) and message.saved is not None:
                    self._go_on(loop, message, passed(self._pipe, message.saved))
                else:
                    self._take(loop, message)
        except (EOFError, OSError, PeerGone, OutOfStep):
            pass
        except Exception:
            log.exception("what the server said cannot be taken")
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
                if loop.names:
                    name(utterance)
                put(lambda loop: loop.work.submit(utterance))
            case wire.Say(id=request_id, sentence=sentence, priority=priority, within_ms=within_ms, skip=skip):
                future = Future[int]()
                future.add_done_callback(partial(self._unsaid, request_id))
                hear = partial(self._sounded, request_id)
                submitted_ns = message.submitted_ns
                saying = Saying(request_id, sentence, hear, priority, future, within_ms, skip, submitted_ns)
                put(lambda loop: loop.speaking.say(saying))
            case wire.Put(session=session, piece=piece, length=length):
                windows = Windows(session, self._ring.take(session, length), Future())
                windows.future.add_done_callback(partial(self._heard, windows, piece))
                if loop.names:
                    name_windows(windows)
                put(lambda loop: loop.listeners.put(windows))
            case wire.PutPiece(session=session, piece=number, length=length, last=last, wanted=wanted):
                pcm = self._ring.take(session, length)
                spoken = Piece(session, pcm, last, Future(), wanted, message.timed)
                spoken.future.add_done_callback(partial(self._said, session, number))
                put(lambda loop: loop.streams.put(spoken))
            case wire.Cancel(id=request_id):
                put(lambda loop: loop.work.cancel(request_id))
            case wire.OpenSession(session=session, live=live, state=state):
                put(lambda loop: loop.listeners.open(session, live, state))
            case wire.OpenStream(session=session, live=live, samples=samples, words=words, bias=bias):
                put(lambda loop: loop.streams.open(session, live, samples, words=words, bias=bias))
            case wire.Export(session=session):
                put(lambda loop: self._export(loop, session))
            case wire.CloseSession(session=session):
                put(lambda loop: loop.close(session))
            case wire.AskTurn(number=number, length=length):
                pcm, answer = self._ring.take(number, length), Future[float]()
                answer.add_done_callback(partial(self._turn, number))
                if self._turns is not None:
                    self._turns.ask(pcm, answer)
                else:  # the engine before this one had it
                    answer.set_exception(ModelNotLoaded("this engine has no turn model"))
            case wire.AskVoices(number=number, length=length, budget_samples=budget, live=live):
                question = Question(self._ring.take(number, length), budget, live, Future[LocalVoices]())
                question.answer.add_done_callback(partial(self._voices, number))
                put(lambda loop: loop.voices.ask(question))
            case wire.Ask(number=number):
                self._report(number, loop)
            case wire.Ping():
                put(lambda _: self._send(wire.Pong()))
            case wire.Stop():
                put(Loop.stop)

    # --- streams that come from another process, and go to one; on the loop's thread ----------------------

    def _go_on(self, loop: Loop, message: wire.OpenStream, parcel: Parcel) -> None:
        def open_saved(loop: Loop) -> None:
            opened = wire.Opened(message.session)

            def fail(error: AsrServeError) -> None:
                nonlocal opened
                opened = wire.Opened(message.session, wire.Failure.of(error))

            with contextlib.closing(parcel), Attempt(loop.stats, "chunk", "going on with a stream", fail):
                numbers, *parts = parcel.open()
                saved = Saved(numbers, tuple(parts))
                words, bias = message.words, message.bias
                loop.streams.open(message.session, message.live, message.samples, saved, words, bias)
            self._send(opened)

        loop.inbox.put(open_saved)

    def _export(self, loop: Loop, session: int) -> None:
        parcel: Parcel | None = None

        def fail(error: AsrServeError) -> None:
            log.warning("a stream has to be heard again from its start: %s", error)

        with Attempt(loop.stats, "chunk", "exporting a stream", fail):
            if POSSIBLE and (saved := loop.streams.export(session)) is not None:
                parcel = Parcel.pack([saved.numbers, *saved.parts])
        self._send(wire.Exported(session, parcel.label if parcel else None), parcel)

    # --- to the server, mostly on the loop's thread -------------------------------------------------------

    def _done(self, request_id: int, future: Future[Recognition]) -> None:
        error = future.exception()
        if error is None:
            self._send(wire.Done(request_id, future.result()))
        else:
            assert isinstance(error, AsrServeError)
            self._send(wire.Failed(request_id, wire.Failure.of(error)))

    def _sounded(self, request_id: int, sound: Sound) -> None:
        self._send(wire.Sounded(request_id, sound))

    def _unsaid(self, request_id: int, future: Future[int]) -> None:
        """The last sound was its answer, unless it failed."""
        if (error := future.exception()) is not None:
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

    def _said(self, session: int, piece: int, future: Future[Found | Recognition]) -> None:
        error = future.exception()
        if error is None:
            self._send(wire.Said(session, piece, future.result()))
        else:
            assert isinstance(error, AsrServeError)
            self._send(wire.Failed(session, wire.Failure.of(error), piece))

    def _turn(self, number: int, answer: Future[float]) -> None:
        error = answer.exception()
        if error is None:
            self._send(wire.Turn(number, answer.result()))
        else:
            assert isinstance(error, AsrServeError)
            self._send(wire.Unanswered(number, wire.Failure.of(error)))

    def _voices(self, number: int, answer: Future[LocalVoices]) -> None:
        error = answer.exception()
        if error is None:
            self._send(wire.VoicesHeard(number, answer.result()))
        else:
            assert isinstance(error, AsrServeError)
            self._send(wire.Unanswered(number, wire.Failure.of(error)))

    def _report(self, number: int, loop: Loop) -> None:
        """On the reading thread: what is read of the loop are single numbers. The text is not made anew for
        everybody who asks."""
        metrics = self._metrics
        assert metrics is not None
        now = time.monotonic()
        if now - self._text_at > REPORT_EVERY_S:
            found = loop.work.report()
            metrics.pages.set(found["pages"])
            metrics.pages_used.set(found["pages_used"])
            metrics.sessions.set(loop.states.used)
            metrics.prefix_bytes.set(loop.kept_bytes)
            metrics.requests["waiting"].set(found["waiting"])
            metrics.requests["decoding"].set(found["decoding"])
            metrics.requests["speaking"].set(found.get("speaking", 0))
            self._text, self._text_at = metrics.text(), now
        self._send(wire.Report(number, loop.describe(), self._text))

    def _send(self, message: wire.ToServer, parcel: Parcel | None = None) -> None:
        """Waits for nobody: the reading thread answers too, and who reads must never wait for who writes.
        `parcel`: that the message announces; it is closed."""
        self._sender.send(Letter(wire.encode(message), parcel=parcel))

    def _write(self, letter: Letter) -> None:
        """Raises OSError when the server is gone: the reading thread sees it too."""
        self._pipe.send_bytes(letter.message)
        if letter.parcel is not None:
            pass_on(self._pipe, letter.parcel)

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
