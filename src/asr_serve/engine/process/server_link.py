"""Connection of an engine process to one server: messages become jobs for the loop, and results become messages."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from asr_serve import units
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.diarization.local_speakers import LocalSpeakers
from asr_serve.engine.cache.digest import set_chunk_digest, set_request_digests
from asr_serve.engine.diarization_runner import DiarizationRequest
from asr_serve.engine.executor import StepGuard
from asr_serve.engine.loop import Loop
from asr_serve.engine.process import messages
from asr_serve.engine.process.connection import PcmSource, receive_buffer, send_buffer
from asr_serve.engine.process.load_window import LoadTotals, LoadWindow
from asr_serve.engine.process.message_sender import MessageSender, OutgoingMessage
from asr_serve.engine.process.server_handshake import HANDSHAKE_S
from asr_serve.engine.request import RecognitionRequest, StreamChunk, VadAnswer, VadChunk
from asr_serve.engine.session_snapshot import SessionSnapshot
from asr_serve.engine.speaker_separation import SeparationRequest
from asr_serve.engine.streaming.executor import StreamingExecutor
from asr_serve.engine.tts.executor import TtsExecutor
from asr_serve.engine.tts.request import TtsRequest
from asr_serve.engine.turn_runner import TurnRunner
from asr_serve.errors import AsrServeError, AtCapacity, ModelNotLoaded, OutOfStep, PeerGone
from asr_serve.metrics import EngineMetrics
from asr_serve.transfer.sealed_buffer import SUPPORTED, SealedBuffer
from asr_serve.types import SearchResult, SentenceAudio

log = logging.getLogger(__name__)

REPORT_EVERY_S = 0.5
"""Minimum age of the metrics text before it is rendered again, however often it is scraped."""
MAX_QUEUED_MESSAGES, MAX_QUEUED_BYTES = 1 << 16, 64 << 20
"""Messages that may wait for a server that did not start the engine. One that takes no more is disconnected: it
connects again, and submits its work again."""
SHARED_RETRY_MS = 1_000
STREAMS_A_SESSION = 2
"""Streams of a streaming model for each session of voice activity: one may end while the next one has begun."""
SERVER_BITS = 40
"""Bits of a request's number in the loop that its server chose; the bits above are the server's own number."""


class ServerQueue(NamedTuple):
    """Work of a server as it reported it last."""

    backlog_samples: int
    """Audio for this engine that is not answered."""
    fill: float
    """Used share, 0..1, of its queue."""
    sessions: int = 0
    """Sessions and streams that it has open here."""


class ServerPlaces:
    """Places of the sessions and streams that servers have which did not start the engine, all of them together.
    Changed on the loop's thread, where sessions are opened and closed; any thread may read how many there are."""

    def __init__(self, most: int | None = None) -> None:
        """`most`: sessions that they may have; None: as there is room."""
        self.most = most
        self._sessions: set[int] = set()
        self._streams: set[int] = set()

    @property
    def sessions(self) -> int:
        """Sessions of voice activity that are open."""
        return len(self._sessions)

    def check_session(self) -> None:
        """Raises AtCapacity where there is no room for one more session."""
        _check_room(len(self._sessions), self.most, "sessions")

    def check_stream(self) -> None:
        """Raises AtCapacity where there is no room for one more stream."""
        most = None if self.most is None else STREAMS_A_SESSION * self.most
        _check_room(len(self._streams), most, "streams")

    def add_session(self, number: int) -> None:
        self._sessions.add(number)

    def add_stream(self, number: int) -> None:
        self._streams.add(number)

    def discard(self, number: int) -> None:
        """Frees the place of a session or stream. Idempotent."""
        self._sessions.discard(number)
        self._streams.discard(number)


def _check_room(count: int, most: int | None, what: str) -> None:
    if most is not None and count >= most:
        raise AtCapacity(f"{count} {what} of other servers are open", f"{most} of them all", SHARED_RETRY_MS)


class EngineFacts:
    """Parts of the engine that every connection uses, its load, and its metrics as text."""

    def __init__(
        self,
        loop: Loop,
        turns: TurnRunner | None,
        metrics: EngineMetrics,
        collectives_s: Callable[[], float] | None = None,
    ) -> None:
        """`collectives_s`: total time of collectives, for a decoder that is split over processes."""
        self.loop, self.turns, self._metrics, self._collectives_s = loop, turns, metrics, collectives_s
        self._text, self._rendered_s = b"", -math.inf
        self.servers = 0
        """Servers that did not start the engine and are connected to it."""
        self._window = LoadWindow()
        self._lock = threading.Lock()
        """Lock of the window and of the counters: every connection has a thread."""
        self._exported = LoadTotals(0.0, 0.0, 0)
        """Totals that the counters of the metrics have."""
        self.server_queues: Callable[[], list[ServerQueue]] = list
        """Returns the work of the servers that did not start this engine."""
        self.places = ServerPlaces()
        """Places of the servers that did not start this engine."""

    @property
    def free_sessions(self) -> int:
        """Voice-activity sessions for which servers that did not start the engine have room. Reads single numbers of
        the loop, from any thread."""
        free = self.loop.states.slots - self.loop.states.used
        if self.places.most is not None:
            free = min(free, self.places.most - self.places.sessions)
        return max(0, free)

    @property
    def _totals(self) -> LoadTotals:
        stats = self.loop.stats
        occupied_s = stats.worked_s if self.loop.executor.device.rows_cost_time else stats.filled_s
        collectives_s = None if self._collectives_s is None else self._collectives_s()
        return LoadTotals(occupied_s, stats.waited_s, stats.waited, collectives_s)

    def sample_load(self) -> None:
        """Samples the load. Called with every ping: rates are over the last seconds."""
        with self._lock:
            self._window.sample(time.monotonic(), self._totals)

    def load(self) -> messages.EngineLoad:
        """Load over the last seconds. Reads only single numbers of the loop, from any thread."""
        counters, states = self.loop.executor.report(), self.loop.states
        with self._lock:
            now_s, totals = time.monotonic(), self._totals
            rates = self._window.rates(now_s, totals, counters["waiting"])
            self._window.sample(now_s, totals)
        servers = self.server_queues()
        places = [(states.used, states.slots)]
        if isinstance(self.loop.executor, StreamingExecutor | TtsExecutor):
            places.append((counters["pages_used"], counters["pages"]))
        shares = [used / total for used, total in places if total]
        return messages.EngineLoad(
            occupancy=None if rates is None else rates.occupancy,
            queue_s=None if rates is None else rates.queue_s,
            backlog_s=units.samples_to_s(sum(each.backlog_samples for each in servers)) if servers else None,
            ingress_queue=max(each.fill for each in servers) if servers else None,
            sessions=max(shares) if shares else None,
            accelerator=self.loop.executor.device.utilization(),
            collectives=None if rates is None else rates.collectives,
        )

    def _export_load(self) -> None:
        """Updates the metrics of the load. What is not measured has no sample."""
        with self._lock:
            before, now = self._exported, self._totals
            self._exported = now
        self._metrics.occupied_seconds.inc(max(0.0, now.occupied_s - before.occupied_s))
        if now.collectives_s is not None:
            self._metrics.add_collectives(now.collectives_s - (before.collectives_s or 0.0))
        if (utilization := self.loop.executor.device.utilization()) is not None:
            self._metrics.set_accelerator(utilization)

    def metrics_text(self) -> bytes:
        """Metrics as Prometheus text, cached for REPORT_EVERY_S. Reads only single numbers of the loop, from any
        thread."""
        metrics, loop, now = self._metrics, self.loop, time.monotonic()
        if now - self._rendered_s > REPORT_EVERY_S:
            counters = loop.executor.report()
            metrics.pages.set(counters["pages"])
            metrics.pages_used.set(counters["pages_used"])
            metrics.sessions.set(loop.states.used)
            metrics.prefix_bytes.set(loop.cached_bytes)
            metrics.requests["waiting"].set(counters["waiting"])
            metrics.requests["decoding"].set(counters["decoding"])
            metrics.requests["speaking"].set(counters.get("speaking", 0))
            self._export_load()
            self._text, self._rendered_s = metrics.render(), now
        return self._text


class ServerLink:
    """Connection to one server. Numbers that it chose for requests and sessions are its own: in the loop they begin
    with the number of the connection, so that those of two servers are never the same."""

    def __init__(self, pipe: Connection, pcm: PcmSource, number: int, name: str) -> None:
        """`pcm`: source of the samples that messages announce. `number`: of this connection, 0 for the process that
        started the engine. `name`: of its thread."""
        self._pipe, self._pcm, self.number = pipe, pcm, number
        self._base = number << SERVER_BITS
        # The number of requests limits the queue to the process that started the engine: one result for each admitted
        # request and chunk, some seconds of audio for a sentence, and callers without results send nothing more; a pong
        # for each ping, which end when the server gives this process up; and a report for each query that timed out,
        # some KB every few seconds. Other servers are told of cached audio too, so that their queues have a limit.
        limits = (MAX_QUEUED_MESSAGES, MAX_QUEUED_BYTES) if number else (None, None)
        self._sender = MessageSender(name, self._write, max_messages=limits[0], max_bytes=limits[1])
        self._line = socket.socket(fileno=os.dup(pipe.fileno())) if number else None
        self._last_message_s, self._silent_s = time.monotonic(), HANDSHAKE_S
        self.queue = ServerQueue(0, 0.0)
        """Work of the server as it reported it last."""
        self._requests: set[int] = set()
        """Requests in the loop, by the loop's numbers."""
        self._sessions: set[int] = set()
        """Open sessions and streams, by the loop's numbers."""
        self._mixtures: dict[int, Future[np.ndarray]] = {}
        """Separations in the loop, by the server's numbers."""

    @property
    def owns_engine(self) -> bool:
        """Returns whether its server started the engine: the engine ends with it."""
        return self.number == 0

    def finish(self) -> None:
        """Sends what is queued, and nothing more."""
        self._sender.finish()

    def join(self) -> None:
        self._sender.join()

    @property
    def silent(self) -> bool:
        """Returns whether a server that did not start the engine has sent nothing for as long as it said."""
        return not self.owns_engine and time.monotonic() - self._last_message_s > self._silent_s

    def drop(self) -> None:
        """Ends the connection to a server that did not start the engine: `read_messages` returns."""
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.shutdown(socket.SHUT_RDWR)
            self._pcm.close()

    def close(self) -> None:
        """Drops what is not sent, and closes the connection."""
        self._sender.discard()
        self.drop()
        self._pcm.close()
        self._sender.join()
        self._pipe.close()
        if self._line is not None:
            self._line.close()

    def requests_started(self, ids: tuple[int, ...]) -> None:
        self.send(messages.RequestsStarted(ids))

    # --- from the server, on a thread of its own ----------------------------------------------------------

    def read_messages(self, facts: EngineFacts) -> None:
        """Reads messages until the server is gone, and then withdraws what it requested; the engine stops with the
        server that started it."""
        try:
            while True:
                message = messages.decode_to_engine(self._pipe.recv_bytes())
                self._last_message_s = time.monotonic()
                if isinstance(message, messages.OpenStream) and message.saved is not None:
                    self._restore_stream(facts, message, receive_buffer(self._pipe, message.saved))
                elif isinstance(message, messages.StopEngine) and not self.owns_engine:
                    break
                else:
                    self._handle_message(facts, message)
        except (EOFError, OSError, PeerGone, OutOfStep):
            pass
        except Exception:
            log.exception("what the server said cannot be taken")
        if self.owns_engine:
            facts.loop.inbox.put(Loop.stop)
        else:
            self._withdraw_all(facts)

    def _withdraw_all(self, facts: EngineFacts) -> None:
        """Ends everything that the server has in the loop."""
        for request_id in tuple(self._requests):
            facts.loop.inbox.put(partial(_cancel, request_id))
        for session in tuple(self._sessions):
            facts.loop.inbox.put(partial(_close, session, facts.places))
        for answer in tuple(self._mixtures.values()):
            facts.loop.inbox.put(partial(_cancel_separation, answer))

    def _submitted(self, request_id: int, future: Future[Any]) -> None:
        """Registers a request until it is answered."""
        self._requests.add(request_id)
        future.add_done_callback(lambda _: self._requests.discard(request_id))

    def _handle_message(self, facts: EngineFacts, message: messages.ToEngine) -> None:
        loop, base = facts.loop, self._base
        put = loop.inbox.put
        match message:
            case messages.SubmitUtterance():
                utterance = RecognitionRequest(
                    base + message.id,
                    self._pcm.read_message(message.id, message.length),
                    message.samples,
                    message.options,
                    message.priority,
                    Future(),
                    message.draft,
                    message.within_ms,
                    message.submitted_ns,
                )
                utterance.future.add_done_callback(partial(self._on_recognized, message.id))
                self._submitted(utterance.id, utterance.future)
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
                request = TtsRequest(
                    base + request_id, sentence, on_sound, priority, future, slack_ms, skip, submitted_ns
                )
                self._submitted(request.id, future)
                put(lambda loop: loop.tts.submit_sentence(request))
            case messages.AppendVadAudio(session=session, chunk=chunk_number, length=length):
                vad_chunk = VadChunk(base + session, self._pcm.read_message(session, length), VadAnswer())
                vad_chunk.future.add_done_callback(partial(self._on_vad, session, chunk_number))
                if loop.uses_digests:
                    set_chunk_digest(vad_chunk)
                put(lambda loop: loop.vad_scheduler.enqueue(vad_chunk))
            case messages.AppendStreamAudio(session=session, chunk=number, length=length, last=last, wanted=hypothesis):
                pcm = self._pcm.read_message(session, length)
                chunk = StreamChunk(base + session, pcm, last, Future(), hypothesis, message.timed)
                if last:
                    self._sessions.discard(chunk.session)
                    chunk.future.add_done_callback(partial(_discard_place, facts.places, chunk.session))
                chunk.future.add_done_callback(partial(self._on_stream_result, session, number))
                put(lambda loop: loop.streams.append_audio(chunk))
            case messages.CancelRequest(id=request_id):
                put(partial(_cancel, base + request_id))
            case messages.ExpediteRequest(id=request_id, within_ms=within_ms):
                put(partial(_expedite, base + request_id, within_ms))
            case messages.OpenVadSession(session=session, live=live, state=state):
                self._sessions.add(base + session)
                put(partial(self._open_vad_session, facts, session, live, state))
            case messages.OpenStream(session=session):
                self._sessions.add(base + session)
                put(partial(self._open_stream, facts.places, message))
            case messages.ExportStream(session=session):
                put(partial(self._export_stream, facts.places, session))
            case messages.CloseSession(session=session):
                self._sessions.discard(base + session)
                put(partial(_close, base + session, facts.places))
            case messages.TurnQuery(number=number, length=length):
                pcm, answer = self._pcm.read_message(number, length), Future[float]()
                answer.add_done_callback(partial(self._on_turn, number))
                if facts.turns is not None:
                    facts.turns.submit(pcm, answer)
                else:  # an engine before this one had it
                    answer.set_exception(ModelNotLoaded("this engine has no turn model"))
            case messages.SpeakersQuery(number=number, length=length, budget_samples=budget, live=live):
                question = DiarizationRequest(
                    self._pcm.read_message(number, length), budget, live, Future[LocalSpeakers]()
                )
                question.future.add_done_callback(partial(self._on_speakers, number))
                put(lambda loop: loop.diarization.submit(question))
            case messages.SeparationQuery(number=number, length=length, speaker_ranges=speaker_ranges):
                mixture = SeparationRequest(
                    self._pcm.read_message(number, length), speaker_ranges, Future[np.ndarray]()
                )
                mixture.future.add_done_callback(partial(self._on_separated, number))
                self._mixtures[number] = mixture.future
                put(lambda loop: loop.separation.submit(mixture))
            case messages.CancelSeparation(number=number):
                if (abandoned := self._mixtures.get(number)) is not None:
                    put(partial(_cancel_separation, abandoned))
            case messages.ReportQuery(number=number):
                self.send(messages.EngineReport(number, loop.describe(), facts.metrics_text(), facts.load()))
            case messages.SetPeers(number=number, addresses=addresses):
                if not self.owns_engine:
                    raise OutOfStep("peers", "from who started the engine alone")
                put(lambda loop: loop.peers.set_addresses(addresses, lambda: self.send(messages.PeersSet(number))))
            case messages.EnginePing(silent_s=silent_s):
                self.queue = ServerQueue(message.backlog_samples, message.queue_fill, message.sessions)
                facts.sample_load()
                if self.owns_engine:  # which kills it where the loop hangs
                    put(lambda _: self.send(self._pong(facts)))
                else:  # a long step is no lost connection
                    self._silent_s = self._silent_s if silent_s is None else silent_s
                    self.send(self._pong(facts))
            case messages.StopEngine():
                put(Loop.stop)

    def _pong(self, facts: EngineFacts) -> messages.EnginePong:
        others = [each for each in facts.server_queues() if each is not self.queue]
        return messages.EnginePong(
            facts.free_sessions,
            facts.servers,
            sum(each.backlog_samples for each in others),
            sum(each.sessions for each in others),
        )

    def _open_vad_session(self, facts: EngineFacts, session: int, live: bool, state: bytes | None, loop: Loop) -> None:
        """Opens a session on the loop's thread. Where several servers together have more than there is room for, the
        server is told, and tries another engine."""
        number, places = self._base + session, facts.places
        try:
            if not self.owns_engine:
                places.check_session()
            loop.vad_scheduler.open(number, live, state)
            if not self.owns_engine:
                places.add_session(number)
        except AtCapacity as full:
            self._refuse(session, full)

    def _open_stream(self, places: ServerPlaces, message: messages.OpenStream, loop: Loop) -> None:
        """Opens a stream on the loop's thread, as `_open_vad_session` opens a session."""
        number = self._base + message.session
        if not self.owns_engine:
            try:
                places.check_stream()
            except AtCapacity as full:
                self._refuse(message.session, full)
                return
            places.add_stream(number)
        loop.streams.open_stream(
            number,
            message.live,
            message.samples,
            words=message.words,
            bias=message.bias,
            language_model=message.language_model,
        )

    def _refuse(self, session: int, full: AtCapacity) -> None:
        self._sessions.discard(self._base + session)
        self.send(messages.SessionRefused(session, messages.ErrorMessage.from_error(full)))

    # --- streams that come from another process, and go to one; on the loop's thread ----------------------

    def _restore_stream(self, facts: EngineFacts, message: messages.OpenStream, parcel: SealedBuffer) -> None:
        number, places = self._base + message.session, facts.places

        def open_saved(loop: Loop) -> None:
            opened = messages.StreamOpened(message.session)

            def fail(error: AsrServeError) -> None:
                nonlocal opened
                opened = messages.StreamOpened(message.session, messages.ErrorMessage.from_error(error))

            with contextlib.closing(parcel), StepGuard(loop.stats, "chunk", "going on with a stream", fail):
                numbers, *parts = parcel.read()
                saved = SessionSnapshot(numbers, tuple(parts))
                loop.streams.open_stream(
                    number, message.live, message.samples, saved, message.words, message.bias, message.language_model
                )
                if not self.owns_engine:
                    places.add_stream(number)
            self.send(opened)

        self._sessions.add(number)
        facts.loop.inbox.put(open_saved)

    def _export_stream(self, places: ServerPlaces, session: int, loop: Loop) -> None:
        parcel: SealedBuffer | None = None

        def fail(error: AsrServeError) -> None:
            log.warning("a stream has to be heard again from its start: %s", error)

        with StepGuard(loop.stats, "chunk", "exporting a stream", fail):
            if SUPPORTED and (saved := loop.streams.export_stream(self._base + session)) is not None:
                parcel = SealedBuffer.pack([saved.header, *saved.parts])
        places.discard(self._base + session)
        self.send(messages.StreamExported(session, parcel.label if parcel else None), parcel)

    # --- to the server, mostly on the loop's thread -------------------------------------------------------

    def _on_recognized(self, request_id: int, future: Future[Recognition]) -> None:
        error = future.exception()
        if error is None:
            self.send(messages.UtteranceDone(request_id, future.result()))
        else:
            assert isinstance(error, AsrServeError)
            self.send(messages.RequestFailed(request_id, messages.ErrorMessage.from_error(error)))

    def _on_sound(self, request_id: int, sound: SentenceAudio) -> None:
        self.send(messages.SentenceSound(request_id, sound))

    def _on_speech_done(self, request_id: int, future: Future[int]) -> None:
        """Reports a failed sentence; a successful one ended with its last audio."""
        if (error := future.exception()) is not None:
            assert isinstance(error, AsrServeError)
            self.send(messages.RequestFailed(request_id, messages.ErrorMessage.from_error(error)))

    def _on_vad(self, session: int, piece: int, future: Future[np.ndarray]) -> None:
        error = future.exception()
        if error is None:
            assert isinstance(future, VadAnswer)
            assert future.state is not None
            self.send(messages.VadResult(session, piece, future.result().tobytes(), future.state))
        else:
            assert isinstance(error, AsrServeError)
            self.send(messages.RequestFailed(session, messages.ErrorMessage.from_error(error), piece))

    def _on_stream_result(self, session: int, piece: int, future: Future[SearchResult | Recognition]) -> None:
        error = future.exception()
        if error is None:
            self.send(messages.StreamOutput(session, piece, future.result()))
        else:
            assert isinstance(error, AsrServeError)
            self.send(messages.RequestFailed(session, messages.ErrorMessage.from_error(error), piece))

    def _on_turn(self, number: int, answer: Future[float]) -> None:
        error = answer.exception()
        if error is None:
            self.send(messages.TurnAnswer(number, answer.result()))
        else:
            assert isinstance(error, AsrServeError)
            self.send(messages.QueryFailed(number, messages.ErrorMessage.from_error(error)))

    def _on_speakers(self, number: int, answer: Future[LocalSpeakers]) -> None:
        error = answer.exception()
        if error is None:
            self.send(messages.SpeakersAnswer(number, answer.result()))
        else:
            assert isinstance(error, AsrServeError)
            self.send(messages.QueryFailed(number, messages.ErrorMessage.from_error(error)))

    def _on_separated(self, number: int, answer: Future[np.ndarray]) -> None:
        self._mixtures.pop(number, None)
        error = answer.exception()
        if error is None:
            self.send(messages.SeparatedSpeech(number, answer.result().tobytes()))
        else:
            assert isinstance(error, AsrServeError)
            self.send(messages.QueryFailed(number, messages.ErrorMessage.from_error(error)))

    def send(self, message: messages.ToServer, parcel: SealedBuffer | None = None) -> None:
        """Queues a message without blocking: the reading thread sends too, and must never wait for a writer.
        `parcel`: announced by the message, and closed here."""
        self.send_encoded(messages.encode(message), parcel)

    def send_encoded(self, message: bytes, parcel: SealedBuffer | None = None) -> None:
        """Queues an encoded message, as `send`."""
        if not self._sender.enqueue(OutgoingMessage(message, parcel=parcel)):
            log.warning("server %d takes no messages: it is disconnected", self.number)
            self.drop()

    def _write(self, letter: OutgoingMessage) -> None:
        """Writes a message. Raises OSError when the server is gone; the reading thread notices that too."""
        self._pipe.send_bytes(letter.message)
        if letter.parcel is not None:
            send_buffer(self._pipe, letter.parcel)


def _cancel(request_id: int, loop: Loop) -> None:
    loop.executor.cancel(request_id)


def _expedite(request_id: int, within_ms: int, loop: Loop) -> None:
    loop.executor.expedite(request_id, within_ms)


def _cancel_separation(answer: Future[np.ndarray], loop: Loop) -> None:
    loop.separation.cancel(answer)


def _discard_place(places: ServerPlaces, number: int, _: Future[Any]) -> None:
    places.discard(number)


def _close(session: int, places: ServerPlaces, loop: Loop) -> None:
    loop.close(session)
    places.discard(session)
