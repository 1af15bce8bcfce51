"""Engine process: the loop on its main thread, the server's messages on another.

python -m asr_serve.engine.process.main PIPE BELL RING file descriptors, inherited

It ends on request, and when the server is gone, which the end of the pipe reports at once.
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

from asr_serve.decoding.hypothesis import Recognition
from asr_serve.devices.cpu import keep_memory
from asr_serve.diarization.local_speakers import LocalSpeakers
from asr_serve.engine.builder import AsrCheckpoint, build_loop, card_of_loaded, find_checkpoint
from asr_serve.engine.cache.digest import set_request_digests, set_window_digest
from asr_serve.engine.diarization_runner import DiarizationRequest, models_available
from asr_serve.engine.executor import StepGuard
from asr_serve.engine.loop import Loop
from asr_serve.engine.process import messages
from asr_serve.engine.process.engine_process import receive_buffer, send_buffer
from asr_serve.engine.process.message_sender import MessageSender, OutgoingMessage
from asr_serve.engine.request import RecognitionRequest, StreamChunk, VadChunk
from asr_serve.engine.session_snapshot import SessionSnapshot
from asr_serve.engine.stats import EngineStats
from asr_serve.engine.tts.request import TtsRequest
from asr_serve.engine.turn_runner import TurnRunner, load_turn_model
from asr_serve.errors import AsrServeError, ModelNotLoaded, OutOfStep, PeerGone
from asr_serve.metrics import EngineMetrics
from asr_serve.models.registry import AsrCard, engine_cards
from asr_serve.transfer.ring import PcmReader
from asr_serve.transfer.sealed_buffer import SUPPORTED, SealedBuffer
from asr_serve.types import SearchResult, SentenceAudio

log = logging.getLogger(__name__)

REPORT_EVERY_S = 0.5
"""Minimum age of the metrics text before it is rendered again, however often it is scraped."""


class EngineProcessServer:
    """Turns messages into jobs for the loop, and results of the loop into messages."""

    def __init__(self, pipe: Connection, ring: PcmReader) -> None:
        self._pipe, self._ring = pipe, ring
        # The number of requests limits this queue: one result for each admitted request and chunk, some seconds of
        # audio for a sentence, and callers without results send nothing more; a pong for each ping, which end when
        # the server gives this process up; and a report for each query that timed out, some KB every few seconds.
        self._sender = MessageSender("to the server", self._write)
        self._loop: Loop | None = None
        self._turns: TurnRunner | None = None
        self._metrics: EngineMetrics | None = None
        self._text, self._text_at = b"", -math.inf

    def run(self, spec: messages.EngineSpec) -> int:
        """Runs the engine and returns the exit code. All messages are sent before it returns."""
        try:
            return self._run(spec)
        finally:
            self._sender.finish()
            self._sender.join()

    def _run(self, spec: messages.EngineSpec) -> int:
        started = time.perf_counter()
        try:
            checkpoint = find_checkpoint(spec.model, spec.weights, spec.config)
            fingerprint = checkpoint.fingerprint()
            turns = load_turn_model(spec.turn_model if isinstance(checkpoint.card, AsrCard) else "none")
            keep_memory()
            config = spec.config
            parts = checkpoint.build(spec.device, spec.dtype, config.quantize, config.tensor_parallel_size)
            meeting = checkpoint.peer_identity(spec.config, spec.listen, spec.peer_keys)
            self._metrics = EngineMetrics(checkpoint.card.name)
            loop = self._loop = build_loop(
                parts,
                checkpoint.card,
                spec.config,
                on_done=lambda _: None,
                # Rejections of the ending loop are not sent: the server resubmits the requests to the next engine.
                on_stop=self._sender.finish,
                on_start=lambda ids: self._send(messages.RequestsStarted(tuple(ids))),
                stats=EngineStats(self._metrics),
                keep_states=True,
                meeting=meeting,
            )
            if turns:
                self._turns = TurnRunner(turns, parts.device, loop.stats)
        except AsrServeError as failure:
            self._send(messages.EngineLoadFailed(messages.ErrorMessage.from_error(failure)))
            return 1
        self._send(
            messages.EngineReady(
                card_of_loaded(checkpoint.card, parts),
                turns.card if turns else None,
                tuple(engine_cards().values()),
                str(checkpoint.tokenizer_folder if isinstance(checkpoint, AsrCheckpoint) else checkpoint.folder),
                fingerprint,
                parts.device.describe(),
                round(time.perf_counter() - started, 3),
                models_available(),
            )
        )
        threading.Thread(target=self._read_messages, args=(loop,), name="messages", daemon=True).start()
        loop.run()
        if self._turns is not None:
            self._turns.close()
        return 0

    # --- from the server, on a thread of its own ----------------------------------------------------------

    def _read_messages(self, loop: Loop) -> None:
        try:
            while True:
                message = messages.decode_to_engine(self._pipe.recv_bytes())
                if isinstance(message, messages.OpenStream) and message.saved is not None:
                    self._restore_stream(loop, message, receive_buffer(self._pipe, message.saved))
                else:
                    self._handle_message(loop, message)
        except (EOFError, OSError, PeerGone, OutOfStep):
            pass
        except Exception:
            log.exception("what the server said cannot be taken")
        loop.inbox.put(Loop.stop)

    def _handle_message(self, loop: Loop, message: messages.ToEngine) -> None:
        put = loop.inbox.put
        match message:
            case messages.SubmitUtterance():
                utterance = RecognitionRequest(
                    message.id,
                    self._ring.read_message(message.id, message.length),
                    message.samples,
                    message.options,
                    message.priority,
                    Future(),
                    message.draft,
                    message.within_ms,
                    message.submitted_ns,
                )
                utterance.future.add_done_callback(partial(self._on_recognized, message.id))
                if loop.uses_digests:
                    set_request_digests(utterance)
                put(lambda loop: loop.executor.submit(utterance))
            case messages.SubmitSentence(
                id=request_id, sentence=sentence, priority=priority, slack_ms=slack_ms, skip_samples=skip
            ):
                future = Future[int]()
                future.add_done_callback(partial(self._on_speech_done, request_id))
                on_sound = partial(self._on_sound, request_id)
                submitted_ns = message.submitted_ns
                request = TtsRequest(request_id, sentence, on_sound, priority, future, slack_ms, skip, submitted_ns)
                put(lambda loop: loop.tts.submit_sentence(request))
            case messages.AppendVadAudio(session=session, chunk=chunk_number, length=length):
                windows = VadChunk(session, self._ring.read_message(session, length), Future())
                windows.future.add_done_callback(partial(self._on_vad, windows, chunk_number))
                if loop.uses_digests:
                    set_window_digest(windows)
                put(lambda loop: loop.vad_scheduler.enqueue(windows))
            case messages.AppendStreamAudio(session=session, chunk=number, length=length, last=last, wanted=hypothesis):
                pcm = self._ring.read_message(session, length)
                chunk = StreamChunk(session, pcm, last, Future(), hypothesis, message.timed)
                chunk.future.add_done_callback(partial(self._on_stream_result, session, number))
                put(lambda loop: loop.streams.append_audio(chunk))
            case messages.CancelRequest(id=request_id):
                put(lambda loop: loop.executor.cancel(request_id))
            case messages.OpenVadSession(session=session, live=live, state=state):
                put(lambda loop: loop.vad_scheduler.open(session, live, state))
            case messages.OpenStream(session=session, live=live, samples=samples, words=words, bias=bias):
                chosen = message.language_model
                put(
                    lambda loop: loop.streams.open_stream(
                        session, live, samples, words=words, bias=bias, language_model=chosen
                    )
                )
            case messages.ExportStream(session=session):
                put(lambda loop: self._export_stream(loop, session))
            case messages.CloseSession(session=session):
                put(lambda loop: loop.close(session))
            case messages.TurnQuery(number=number, length=length):
                pcm, answer = self._ring.read_message(number, length), Future[float]()
                answer.add_done_callback(partial(self._on_turn, number))
                if self._turns is not None:
                    self._turns.submit(pcm, answer)
                else:  # an engine before this one had it
                    answer.set_exception(ModelNotLoaded("this engine has no turn model"))
            case messages.SpeakersQuery(number=number, length=length, budget_samples=budget, live=live):
                question = DiarizationRequest(
                    self._ring.read_message(number, length), budget, live, Future[LocalSpeakers]()
                )
                question.future.add_done_callback(partial(self._on_speakers, number))
                put(lambda loop: loop.diarization.submit(question))
            case messages.ReportQuery(number=number):
                self._send_report(number, loop)
            case messages.EnginePing():
                put(lambda _: self._send(messages.EnginePong()))
            case messages.StopEngine():
                put(Loop.stop)

    # --- streams that come from another process, and go to one; on the loop's thread ----------------------

    def _restore_stream(self, loop: Loop, message: messages.OpenStream, parcel: SealedBuffer) -> None:
        def open_saved(loop: Loop) -> None:
            opened = messages.StreamOpened(message.session)

            def fail(error: AsrServeError) -> None:
                nonlocal opened
                opened = messages.StreamOpened(message.session, messages.ErrorMessage.from_error(error))

            with contextlib.closing(parcel), StepGuard(loop.stats, "chunk", "going on with a stream", fail):
                numbers, *parts = parcel.read()
                saved = SessionSnapshot(numbers, tuple(parts))
                loop.streams.open_stream(
                    message.session,
                    message.live,
                    message.samples,
                    saved,
                    message.words,
                    message.bias,
                    message.language_model,
                )
            self._send(opened)

        loop.inbox.put(open_saved)

    def _export_stream(self, loop: Loop, session: int) -> None:
        parcel: SealedBuffer | None = None

        def fail(error: AsrServeError) -> None:
            log.warning("a stream has to be heard again from its start: %s", error)

        with StepGuard(loop.stats, "chunk", "exporting a stream", fail):
            if SUPPORTED and (saved := loop.streams.export_stream(session)) is not None:
                parcel = SealedBuffer.pack([saved.header, *saved.parts])
        self._send(messages.StreamExported(session, parcel.label if parcel else None), parcel)

    # --- to the server, mostly on the loop's thread -------------------------------------------------------

    def _on_recognized(self, request_id: int, future: Future[Recognition]) -> None:
        error = future.exception()
        if error is None:
            self._send(messages.UtteranceDone(request_id, future.result()))
        else:
            assert isinstance(error, AsrServeError)
            self._send(messages.RequestFailed(request_id, messages.ErrorMessage.from_error(error)))

    def _on_sound(self, request_id: int, sound: SentenceAudio) -> None:
        self._send(messages.SentenceSound(request_id, sound))

    def _on_speech_done(self, request_id: int, future: Future[int]) -> None:
        """Reports a failed sentence; a successful one ended with its last audio."""
        if (error := future.exception()) is not None:
            assert isinstance(error, AsrServeError)
            self._send(messages.RequestFailed(request_id, messages.ErrorMessage.from_error(error)))

    def _on_vad(self, windows: VadChunk, piece: int, future: Future[np.ndarray]) -> None:
        error = future.exception()
        if error is None:
            assert windows.state is not None
            self._send(messages.VadResult(windows.session, piece, future.result().tobytes(), windows.state))
        else:
            assert isinstance(error, AsrServeError)
            self._send(messages.RequestFailed(windows.session, messages.ErrorMessage.from_error(error), piece))

    def _on_stream_result(self, session: int, piece: int, future: Future[SearchResult | Recognition]) -> None:
        error = future.exception()
        if error is None:
            self._send(messages.StreamOutput(session, piece, future.result()))
        else:
            assert isinstance(error, AsrServeError)
            self._send(messages.RequestFailed(session, messages.ErrorMessage.from_error(error), piece))

    def _on_turn(self, number: int, answer: Future[float]) -> None:
        error = answer.exception()
        if error is None:
            self._send(messages.TurnAnswer(number, answer.result()))
        else:
            assert isinstance(error, AsrServeError)
            self._send(messages.QueryFailed(number, messages.ErrorMessage.from_error(error)))

    def _on_speakers(self, number: int, answer: Future[LocalSpeakers]) -> None:
        error = answer.exception()
        if error is None:
            self._send(messages.SpeakersAnswer(number, answer.result()))
        else:
            assert isinstance(error, AsrServeError)
            self._send(messages.QueryFailed(number, messages.ErrorMessage.from_error(error)))

    def _send_report(self, number: int, loop: Loop) -> None:
        """Sends counters and metrics from the reading thread, which reads only single numbers of the loop. The
        metrics text is cached for REPORT_EVERY_S."""
        metrics = self._metrics
        assert metrics is not None
        now = time.monotonic()
        if now - self._text_at > REPORT_EVERY_S:
            counters = loop.executor.report()
            metrics.pages.set(counters["pages"])
            metrics.pages_used.set(counters["pages_used"])
            metrics.sessions.set(loop.states.used)
            metrics.prefix_bytes.set(loop.cached_bytes)
            metrics.requests["waiting"].set(counters["waiting"])
            metrics.requests["decoding"].set(counters["decoding"])
            metrics.requests["speaking"].set(counters.get("speaking", 0))
            self._text, self._text_at = metrics.render(), now
        self._send(messages.EngineReport(number, loop.describe(), self._text))

    def _send(self, message: messages.ToServer, parcel: SealedBuffer | None = None) -> None:
        """Queues a message without blocking: the reading thread sends too, and must never wait for a writer.
        `parcel`: announced by the message, and closed here."""
        self._sender.enqueue(OutgoingMessage(messages.encode(message), parcel=parcel))

    def _write(self, letter: OutgoingMessage) -> None:
        """Writes a message. Raises OSError when the server is gone; the reading thread notices that too."""
        self._pipe.send_bytes(letter.message)
        if letter.parcel is not None:
            send_buffer(self._pipe, letter.parcel)

    def log(self, record: logging.LogRecord, text: str) -> None:
        self._send(messages.EngineLog(record.name, record.levelno, text))


class _ForwardingLogHandler(logging.Handler):
    def __init__(self, host: EngineProcessServer) -> None:
        super().__init__()
        self._server = host

    def emit(self, record: logging.LogRecord) -> None:
        self._server.log(record, self.format(record))


def main(arguments: list[str]) -> int:
    # Both signals go to the whole process group; the server decides when its engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe_fd, bell_fd, ring_fd = map(int, arguments)
    pipe = Connection(pipe_fd)
    server = EngineProcessServer(pipe, PcmReader(ring_fd, socket.socket(fileno=bell_fd)))
    logging.basicConfig(level=logging.INFO, handlers=[_ForwardingLogHandler(server)], format="%(message)s")
    try:
        spec = messages.decode_spec(pipe.recv_bytes())
    except (EOFError, OSError):
        return 0  # the server is gone
    return server.run(spec)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
