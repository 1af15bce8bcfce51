"""Backend over several replicas of an engine, each in a process that others started.

A request goes to who has its audio cached, or to the shorter of two queues, in audio; a session and a stream stay on
one replica. Everything is retained here until it is answered, as with one engine process (engine/process/backend). If a
connection is lost, its work goes to the other replicas: utterances from their start, sessions from their last state,
streams by replay. A replica that is drained gets no new work, and its streams move with their state; while replicas are
replaced by others with other weights, they end where they are. Without any replica, work waits for the next one.
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any, Protocol

import msgspec
import numpy as np

from asr_serve import units
from asr_serve.config import EngineConfig
from asr_serve.diarization.local_speakers import LocalSpeakers
from asr_serve.diarization.overlapped_speech import SpeakerRanges
from asr_serve.engine.cache.digest import audio_digest, keyed
from asr_serve.engine.client import Connect
from asr_serve.engine.process import messages
from asr_serve.engine.process.connection import EngineConnection, ExportedStream
from asr_serve.engine.process.engine_process import RingSize, restart_pause_s
from asr_serve.engine.process.handover import Handover, HandoverResult
from asr_serve.engine.process.in_flight import (
    InFlight,
    InFlightRequests,
    InFlightSession,
    InFlightSessions,
    InFlightSpeech,
    InFlightStream,
    InFlightUtterance,
    PendingAnswer,
    QueueState,
    SoundAnswer,
    queue_state,
    reject_chunks,
    unanswered_query,
)
from asr_serve.engine.replicas.remote_engine import RemoteEngine
from asr_serve.engine.replicas.routing import AudioIndex, ReplicaLoad, choose, choose_for_audio
from asr_serve.engine.request import RecognitionRequest, StreamChunk, VadChunk, reject
from asr_serve.engine.tts.request import TtsRequest
from asr_serve.errors import AsrServeError, Cancelled, EngineClosed, NotAllowed
from asr_serve.types import LanguageModelChoice

log = logging.getLogger(__name__)

DEFAULT_CONFIG = EngineConfig()
REPORT_TIMEOUT_S = 5.0
FIRST_REPLICA_S = 1_800.0
"""Longest wait for the first replica: weights may come over a slow connection."""
NO_REPLICA_S = 60.0
"""Time without a replica after which waiting requests are rejected and new ones refused, until one is there."""


class ReplicaSettings(Protocol):
    """Settings of the connections to replicas."""

    @property
    def key(self) -> bytes:
        """Key that replicas know."""

    @property
    def digest_key(self) -> bytes:
        """Key of the replicas' digests of audio."""

    @property
    def ring(self) -> RingSize:
        """Size of the ring to a replica on this machine."""

    @property
    def silent_s(self) -> float:
        """Time without a message after which a replica counts as dead."""


class ReplicaDirectory(Protocol):
    """Source of the replicas of a model."""

    def start(self, backend: ReplicatedBackend) -> None:
        """Begins to call `connect` and `drain` of the backend, from threads of its own."""

    def close(self) -> None:
        """Makes no further call. Idempotent."""


class ConnectedReplica:
    """Replica as its server sees it. Protected by the lock of its backend."""

    def __init__(self, replica_id: str) -> None:
        self.id = replica_id
        self.in_flight = InFlight()
        self.address: messages.EngineAddress | None = None
        """Address of its current engine process."""
        self.draining = False
        self.differs = False
        """Whether it was refused because its card or its tokenizer is another than this backend's."""
        self.places = 0
        """Voice-activity sessions of this server for which there is room, open ones included, as it reported last."""
        self.free_places = 0
        """Sessions for which there was room when it reported last, less those that were opened since."""
        self.new_live_callers = 0
        """Live callers who may be new with it, as it reported, for all its servers together."""
        self.servers = 1
        """Servers that are connected to it, this one included, as it reported last."""
        self.others_samples = self.others_sessions = 0
        """Unanswered samples and open sessions of the other servers, as it reported them last."""
        self.suspects: list[InFlightUtterance | InFlightSpeech | InFlightSession] = []
        """Work that was in progress when the connection was lost. It counts as a death once it is known that the engine
        process has ended: a lost connection is none."""

    @property
    def takes_work(self) -> bool:
        return self.in_flight.process_ready and not self.draining

    @property
    def load(self) -> ReplicaLoad:
        own = self.in_flight
        return ReplicaLoad(own.requests.samples, len(own.sessions), self.others_samples, self.others_sessions)


class ReplicatedBackend:
    """Connections to the replicas of a model. Raises EngineClosed where no replica comes."""

    def __init__(
        self,
        directory: ReplicaDirectory,
        settings: ReplicaSettings,
        on_done: Callable[[int], None],
        on_stop: Callable[[], None],
        config: EngineConfig = DEFAULT_CONFIG,
        first_replica_s: float = FIRST_REPLICA_S,
    ) -> None:
        """`config`: limits of the queue, of which replicas are told the used share. `first_replica_s`: longest wait for
        the first replica."""
        self._directory, self._settings, self._config = directory, settings, config
        self._on_done, self._on_stop = on_done, on_stop
        self.ring = settings.ring
        self._lock = threading.Lock()
        """Lock of all that follows and of the order of messages. No thread may wait for a replica while it holds it."""
        self._changed = threading.Condition(self._lock)
        self._replicas: dict[str, ConnectedReplica] = {}
        self._waiting = InFlight()
        """Work without a replica."""
        self._handovers: dict[ConnectedReplica, Handover] = {}
        self._threads: set[threading.Thread] = set()
        self._closing = threading.Event()
        self._alone_since_s: float | None = time.monotonic()
        self._failed = False
        self._draw = random.Random()
        self._mac = keyed(settings.digest_key)
        self._audio = AudioIndex()
        self._owners: dict[int, InFlight] = {}
        """Replica that had each session when it was looked up last."""
        self._refused: dict[int, AsrServeError] = {}
        """Open sessions for which no replica has room."""
        self._on_room: Callable[[int, float], None] = lambda places, new_callers: None
        """See `watch_room`. Called without the lock."""
        self.audio_hits = 0
        """Requests that went to a replica that had their audio."""
        self.restarts = 0
        """Connections that were lost."""
        self.moved: Counter[tuple[str, str]] = Counter()
        """Number of sessions and streams that moved between replicas, by kind and mode."""
        self.moved_s = 0.0
        """Total time that audio of moving streams waited."""
        self._first: Future[messages.EngineReady] = Future()
        self.first_replica = ""
        """Replica that `ready` is from."""
        self.first_on_this_machine = False
        threading.Thread(target=self._watch, name="asr-serve replicas", daemon=True).start()
        try:
            directory.start(self)
            self.ready = self._first.result(first_replica_s)
        except TimeoutError:
            self.close()
            raise EngineClosed(
                f"no replica came within {first_replica_s:g} s", todo="see the log of the replicas"
            ) from None
        except BaseException:
            self.close()
            raise
        self.card, self.turn_card = self.ready.card, self.ready.turn_card
        self.speakers = self.ready.speakers

    @property
    def state(self) -> str:
        if self._closing.is_set():
            return "closed"
        if self._failed:
            return "failed"
        return "ready" if any(replica.takes_work for replica in tuple(self._replicas.values())) else "restarting"

    @property
    def ring_depth(self) -> int:
        """Slots in use of all rings."""
        return sum(writer.depth for writer in self._ring_writers())

    @property
    def ring_full_waits(self) -> int:
        return sum(writer.full_waits for writer in self._ring_writers())

    def _ring_writers(self) -> Iterator[Any]:
        for replica in tuple(self._replicas.values()):
            process = replica.in_flight.process
            if replica.in_flight.process_ready and process is not None and process.ring_writer is not None:
                yield process.ring_writer

    @property
    def loads(self) -> dict[str, ReplicaLoad]:
        """Load of each connected replica, by its id."""
        with self._lock:
            return {replica.id: replica.load for replica in self._replicas.values() if replica.in_flight.process_ready}

    @property
    def outdated(self) -> bool:
        """Returns whether only replicas with another card or tokenizer are left to take work: what this backend told
        its callers of the model is wrong for them, so its server has to be replaced."""
        with self._lock:
            others = any(replica.differs and not replica.draining for replica in self._replicas.values())
            return others and not self._takers

    @property
    def queue_state(self) -> QueueState:
        """Work that is not answered."""
        with self._lock:
            return queue_state(self._in_flights)

    @property
    def new_live_callers(self) -> float:
        """Live callers who may be new with all replicas that take work; of one that other servers use too, a part."""
        with self._lock:
            return self._count_new_callers()

    def _count_new_callers(self) -> float:
        """`new_live_callers`, with the lock held."""
        return sum(replica.new_live_callers / replica.servers for replica in self._takers)

    def watch_room(self, on_room: Callable[[int, float], None]) -> None:
        """Calls `on_room` now and whenever a replica reports: with the number of voice-activity sessions for which all
        replicas together have room, open ones of this server included; and with `new_live_callers`."""
        self._on_room = on_room
        self._report_room()

    # --- replicas, called by the directory -----------------------------------------------------------------

    def connect(self, replica_id: str, address: messages.EngineAddress, *, same_machine: bool) -> None:
        """Connects to the engine process of a replica, which is new or was restarted. Returns at once."""
        answers: list[PendingAnswer] = []
        with self._lock:
            if self._closing.is_set():
                return
            replica = self._replicas.setdefault(replica_id, ConnectedReplica(replica_id))
            if replica.address == address:
                return
            previous, replica.address = replica.in_flight.process, address
            replica.differs = False
            if previous is not None:
                answers = self._disconnect(replica, previous)
            answers += self._count_deaths(replica)
            name = f"asr-serve from {replica_id}"
            thread = threading.Thread(target=self._run, args=(replica, address, same_machine), name=name, daemon=True)
            self._threads.add(thread)
            thread.start()
            self._changed.notify_all()
        if previous is not None:
            previous.kill()  # of a process before this one
        self._deliver(answers)

    def drain(self, replica_id: str, timeout_s: float) -> None:
        """Moves the work of a replica that will go to others, and disconnects. Its requests have `timeout_s` to finish;
        blocks meanwhile. While there is no other replica, it goes on with all of its work. Nothing happens for an
        unknown one."""
        end_s = time.monotonic() + timeout_s
        with self._lock:
            replica = self._replicas.get(replica_id)
            if replica is None or replica.draining:
                return
            replica.draining = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._takers or not replica.in_flight.process_ready or self._closing.is_set(), timeout_s
            )
            moved: Mapping[Any, int] = {}
            if replica.in_flight.process_ready and not self._closing.is_set():
                target = self._target(replica)
                stay = target.weights is not None and target.weights != replica.in_flight.weights
                handover = self._handovers[replica] = Handover(replica.in_flight, target, streams_stay=stay)
                handover.start()
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: handover.finished or self._closing.is_set() or replica not in self._handovers,
                    max(0.0, end_s - time.monotonic()),
                )
                if self._handovers.pop(replica, None) is not None:
                    if not self._closing.is_set():
                        handover.transfer_remaining()
                    self._record(handover)
                moved = handover.moved
            self._replicas.pop(replica_id, None)
            answers = self._count_deaths(replica)
            self._changed.notify_all()
            process = replica.in_flight.process
        if process is not None:
            process.kill()
        self._deliver(answers)
        log.info("replica %s was drained: %s", replica_id, {" by ".join(labels): n for labels, n in moved.items()})

    def _target(self, leaving: ConnectedReplica) -> InFlight:
        """Work of the replica that takes over from one that goes: of one with equal weights, where there is any."""
        others = [replica for replica in self._takers if replica is not leaving]
        others = [other for other in others if other.in_flight.weights == leaving.in_flight.weights] or others
        return min(others, key=lambda replica: replica.load.for_session).in_flight if others else self._waiting

    def _record(self, handover: Handover) -> None:
        self.moved += handover.moved
        self.moved_s += handover.waited_s

    # --- requests ---------------------------------------------------------------------------------------

    def submit(self, utterance: RecognitionRequest) -> None:
        assert utterance.pcm is not None
        # The lock is not held while the audio is read. Without any cached audio it need not be, and a live caller's
        # audio has not come before.
        cacheable = bool(self._audio) and utterance.priority != "live"
        digest = audio_digest(utterance.pcm, mac=self._mac) if cacheable else b""
        with self._lock:
            self._expect_open()
            self._for_audio(digest, utterance.samples).submit(InFlightUtterance(utterance))

    def synthesize(self, saying: TtsRequest) -> None:
        with self._lock:
            self._expect_open()
            self._for_request().submit(InFlightSpeech(saying))

    def cancel(self, request_id: int) -> None:
        with self._lock:
            work = next((work for each in self._in_flights if (work := each.cancel(request_id))), None)
            self._changed.notify_all()
        if work is not None:
            self._deliver([work.answer(Cancelled("the request was cancelled"))])

    def expedite(self, request_id: int, within_ms: int) -> None:
        with self._lock:
            for in_flight in self._in_flights:
                in_flight.expedite(request_id, within_ms)

    def open_vad_session(self, session: int, live: bool, state: bytes | None = None) -> None:
        self._open(session, InFlightSession(live, state))

    def open_stream(
        self,
        stream: int,
        live: bool,
        samples: int | None,
        words: bool,
        bias: str,
        language_model: LanguageModelChoice | None,
    ) -> None:
        self._open(stream, InFlightStream(live, samples, words, bias, language_model))

    def _open(self, number: int, session: InFlightSession) -> None:
        with self._lock:
            self._expect_open()
            self._place(number, session)

    def submit_vad_chunk(self, chunk: VadChunk | StreamChunk) -> None:
        with self._lock:
            self._expect_open()
            owner = self._owner(chunk.session)
            if owner is not None:
                owner.append_audio(chunk)
                if isinstance(chunk, StreamChunk) and chunk.last:
                    self._owners.pop(chunk.session, None)
            refusal = self._refused.get(chunk.session)
        if owner is None:
            reject(chunk.future, refusal or Cancelled("the session was closed"))

    submit_stream_chunk = submit_vad_chunk

    def close_session(self, session: int) -> None:
        with self._lock:
            owner = self._owner(session)
            closed = owner.close(session) if owner is not None else None
            self._owners.pop(session, None)
            self._refused.pop(session, None)
            for handover in self._handovers.values():
                handover.on_closed(session)
            self._changed.notify_all()
        for chunk in closed.fail_pending() if closed else ():
            reject(chunk.future, Cancelled("the session was closed"))

    close_stream = close_session

    def predict_turn_end(self, pcm: np.ndarray, answer: Future[float]) -> None:
        with self._lock:
            self._expect_open()
            if (in_flight := self._for_request()) is not self._waiting:
                in_flight.request_turn(pcm, answer)
        if in_flight is self._waiting:
            answer.set_exception(unanswered_query("is being started again"))

    def diarize_window(self, pcm: np.ndarray, budget_samples: int, live: bool, answer: Future[LocalSpeakers]) -> None:
        with self._lock:
            self._expect_open()
            if (in_flight := self._for_request()) is not self._waiting:
                in_flight.request_speakers(pcm, budget_samples, live, answer)
        if in_flight is self._waiting:
            answer.set_exception(unanswered_query("is being started again"))

    def separate_speakers(self, pcm: np.ndarray, speaker_ranges: SpeakerRanges, answer: Future[np.ndarray]) -> None:
        with self._lock:
            self._expect_open()
            if (in_flight := self._for_request()) is not self._waiting:
                in_flight.request_separation(pcm, speaker_ranges, answer)
        if in_flight is self._waiting:
            answer.set_exception(unanswered_query("is being started again"))

    def cancel_separation(self, answer: Future[np.ndarray]) -> None:
        with self._lock:
            self._expect_open()
            for in_flight in self._in_flights:
                in_flight.cancel_separation(answer)

    def request_reports(self) -> dict[str, Future[messages.EngineReport]]:
        """Requests a report of each connected replica; returns the answers that will come, by their ids."""
        answers: dict[str, Future[messages.EngineReport]] = {}
        with self._lock:
            for replica in self._replicas.values():
                if replica.in_flight.process_ready:
                    answer = answers[replica.id] = Future()
                    replica.in_flight.request_report(answer)
        return answers

    def report(self, timeout_s: float = REPORT_TIMEOUT_S) -> messages.EngineReport | None:
        """Report of all replicas as one: counters are sums, and metrics have the label `replica`."""
        answers = self.request_reports()
        wait(answers.values(), timeout_s)
        reports = answered(answers)
        totals: Counter[str] = Counter()
        for report in reports.values():
            totals.update({name: value for name, value in report.describe.items() if isinstance(value, int)})
        described = {**totals, "replicas": {name: report.describe for name, report in reports.items()}}
        return messages.EngineReport(0, described, merge_metrics({name: r.metrics for name, r in reports.items()}))

    def describe(self) -> dict[str, Any]:
        report = self.report()
        found = {"state": self.state, "restarts": self.restarts, "audio_hits": self.audio_hits}
        return {**found, **(report.describe if report else {})}

    def renew(self, timeout_s: float = 0.0) -> HandoverResult:
        """Raises NotAllowed: the replicas are renewed by who started them."""
        raise NotAllowed(
            "a renewal of an engine with replicas", "an engine of this server alone", "run: asr-serve cluster upgrade"
        )

    def close(self) -> None:
        self._closing.set()
        self._directory.close()
        with self._lock:
            for replica in self._replicas.values():
                if replica.in_flight.process is not None:
                    replica.in_flight.process.kill()
            self._changed.notify_all()
            threads = tuple(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
        with self._lock:
            answers: list[PendingAnswer] = []
            for in_flight in self._in_flights:
                answers += in_flight.fail_all(EngineClosed("the engine was closed"))
        self._on_stop()
        self._deliver(answers)

    # --- choices, with the lock -------------------------------------------------------------------------

    @property
    def _in_flights(self) -> Iterable[InFlight]:
        yield from (replica.in_flight for replica in self._replicas.values())
        yield self._waiting

    @property
    def _takers(self) -> list[ConnectedReplica]:
        return [replica for replica in self._replicas.values() if replica.takes_work]

    @property
    def _candidates(self) -> list[ConnectedReplica]:
        """Replicas for new work: those that stay; where there are none, those that go."""
        return self._takers or [replica for replica in self._replicas.values() if replica.in_flight.process_ready]

    def _for_request(self) -> InFlight:
        if not (replicas := self._candidates):
            return self._waiting
        return choose(replicas, lambda replica: replica.load.for_request, self._draw).in_flight

    def _for_audio(self, digest: bytes, samples: int) -> InFlight:
        if not (replicas := self._candidates):
            return self._waiting
        names = self._audio.holders(digest)
        holders = [replica for replica in replicas if replica.id in names]
        chosen = choose_for_audio(replicas, holders, samples, lambda replica: replica.load, self._draw)
        self.audio_hits += chosen in holders
        return chosen.in_flight

    def _for_session(self, session: InFlightSession) -> InFlight:
        if not (replicas := self._candidates):
            return self._waiting
        if isinstance(session, InFlightStream):  # streams wait for their slots in the engine
            if session.weights is not None:
                replicas = [each for each in replicas if each.in_flight.weights == session.weights] or replicas
            return choose(replicas, lambda replica: replica.load.for_session, self._draw).in_flight
        replicas = [replica for replica in replicas if replica.free_places > 0] or replicas
        chosen = choose(replicas, lambda replica: replica.load.for_session, self._draw)
        chosen.free_places -= 1
        return chosen.in_flight

    def _place(self, number: int, session: InFlightSession) -> None:
        """Opens a session at a replica."""
        owner = self._owners[number] = self._for_session(session)
        owner.open(number, session)

    def _owner(self, number: int) -> InFlight | None:
        """Replica that has a session; None where none has it. Sessions move, so that what was found last is checked."""
        owner = self._owners.get(number)
        if owner is None or number not in owner.sessions:
            owner = next((each for each in self._in_flights if number in each.sessions), None)
            if owner is None:
                self._owners.pop(number, None)
            else:
                self._owners[number] = owner
        return owner

    def _on_refused(self, replica: ConnectedReplica, message: messages.SessionRefused) -> list[PendingAnswer]:
        """Opens a session for which a replica had no room at another, or rejects it where none has."""
        replica.free_places = 0
        number = message.session
        if (session := replica.in_flight.close(number)) is None:
            return []
        session.refused_by.add(replica.id)
        others = [other for other in self._takers if other.id not in session.refused_by]
        if others:
            chosen = choose(others, lambda other: (-other.free_places, len(other.in_flight.sessions)), self._draw)
            chosen.in_flight.open(number, session)
            return []
        error = self._refused[number] = message.failure.to_error()
        return reject_chunks(session.fail_pending(), error)

    def _expect_open(self) -> None:
        if self._closing.is_set():
            raise EngineClosed("the engine is closed", todo="load the model again")
        if self._failed:
            raise EngineClosed("no replica of the engine is running at the moment", todo="try again later")

    def _move_work(self, source: InFlight, target: InFlight | None = None) -> None:
        """Moves everything to other replicas, or to `target`."""
        sessions, source.sessions = source.sessions, InFlightSessions()
        for number, session in sessions.items():
            if isinstance(session, InFlightStream):
                session.leaving = session.restoring = False
            if target is None:
                self._place(number, session)
            else:
                target.open(number, session)
        requests, source.requests = source.requests, InFlightRequests()
        for work in requests.values():
            work.started = False
            (target or self._for_request()).submit(work)

    # --- a connection's life, on a thread of its own ------------------------------------------------------

    def _run(self, replica: ConnectedReplica, address: messages.EngineAddress, same_machine: bool) -> None:
        """Connects again and again, until the replica has another address or goes."""
        settings, failures = self._settings, 0
        try:
            while self._wanted(replica, address, restart_pause_s(failures)):
                try:
                    process = RemoteEngine.connect(
                        address, settings.key, settings.ring, same_machine=same_machine, name=replica.id
                    )
                    try:
                        self._serve(replica, address, process, same_machine)
                        failures = 0
                    finally:
                        process.close()
                except AsrServeError as failure:
                    if not failures:
                        log.warning("replica %s: %s", replica.id, failure)
                except Exception:
                    log.exception("what replica %s said cannot be taken: it is connected to again", replica.id)
                failures += 1
        finally:
            with self._lock:
                if replica.address == address:
                    replica.address = None  # so that the directory may name it again
                self._threads.discard(threading.current_thread())

    def _wanted(self, replica: ConnectedReplica, address: messages.EngineAddress, after_s: float) -> bool:
        """Returns whether a connection to that address is wanted, after a wait of up to `after_s`."""

        def unwanted() -> bool:
            current = self._replicas.get(replica.id) is replica and replica.address == address
            return self._closing.is_set() or not current or replica.draining

        with self._changed:
            return not self._changed.wait_for(unwanted, after_s)

    def _serve(
        self, replica: ConnectedReplica, address: messages.EngineAddress, process: RemoteEngine, same_machine: bool
    ) -> None:
        """Gives the replica work until its connection ends, and then its work to others. Raises PeerGone,
        NotAllowed."""
        process.hang_timeout_s = self._settings.silent_s
        with self._lock:
            if self._closing.is_set() or replica.draining or replica.address != address:
                return
            # From here on `_watch`, `drain` and `close` end it, also while it has sent nothing.
            replica.in_flight.process = process
        try:
            ready = process.wait_ready()
            with self._lock:
                if self._closing.is_set() or replica.draining or replica.in_flight.process is not process:
                    return
                self._attach(replica, ready, same_machine)
            self._report_room()
            log.info("replica %s is connected", replica.id)
            while (message := process.receive()) is not None:
                self._handle_message(replica, process, message)
        finally:
            self._on_lost(replica, process)

    def _attach(self, replica: ConnectedReplica, ready: messages.EngineReady, same_machine: bool) -> None:
        """Gives a connected replica the work that waits. Raises NotAllowed for one whose card or tokenizer is not that
        of the first: this server could not read its tokens. Weights may be others, while an upgrade replaces them."""
        first = self._first.result() if self._first.done() else ready
        replica.differs = (ready.card, ready.tokenizer_checksum) != (first.card, first.tokenizer_checksum)
        if replica.differs:
            self._changed.notify_all()
            raise NotAllowed("a replica with another card or tokenizer", "those that this server began with")
        if not self._first.done():
            self.first_replica, self.first_on_this_machine = replica.id, same_machine
            self._first.set_result(ready)
        in_flight, replica.suspects = replica.in_flight, []
        in_flight.weights = ready.fingerprint
        replica.places = replica.free_places = ready.free_sessions
        replica.servers = max(1, ready.servers)
        replica.new_live_callers = self._config.new_live_callers or ready.new_live_callers
        replica.others_samples = replica.others_sessions = 0  # until its first pong
        in_flight.replay_all()
        self._move_work(self._waiting, in_flight)
        self._redirect(self._waiting, in_flight)
        self._alone_since_s, self._failed = None, False
        self._changed.notify_all()

    def _handle_message(
        self, replica: ConnectedReplica, process: RemoteEngine, message: messages.ToServer | ExportedStream
    ) -> None:
        with self._lock:
            if replica.in_flight.process is not process:  # replaced: its work is done elsewhere
                if isinstance(message, ExportedStream) and message.saved is not None:
                    message.saved.close()
                return
            if isinstance(message, messages.AudioCached):
                self._audio.update(replica.id, message.inserted, message.evicted)
                return
            if isinstance(message, messages.EnginePong):
                sessions = replica.in_flight.sessions.values()
                own = sum(not isinstance(session, InFlightStream) for session in sessions)
                replica.places, replica.free_places = own + message.free_sessions, message.free_sessions
                replica.servers = max(1, message.servers)
                replica.others_samples, replica.others_sessions = message.others_samples, message.others_sessions
            if isinstance(message, messages.SessionRefused):
                answers: Iterable[PendingAnswer | SoundAnswer] = self._on_refused(replica, message)
            else:
                if isinstance(message, messages.UtteranceDone):
                    message = _with_replica(message, replica.id)
                answers = replica.in_flight.handle_message(message)
            for handover in self._handovers.values():
                handover.on_message(replica.in_flight, message)
            self._changed.notify_all()
        self._deliver(answers)
        if isinstance(message, messages.EnginePong):
            self._report_room()

    def _report_room(self) -> None:
        """Reports what there is room for. Without a replica it stays: work waits for one."""
        with self._lock:
            places, new_callers = [replica.places for replica in self._takers], self._count_new_callers()
        if places:
            self._on_room(sum(places), new_callers)

    def _on_lost(self, replica: ConnectedReplica, process: RemoteEngine) -> None:
        """Gives the work of a lost connection to the other replicas."""
        with self._lock:
            answers = self._disconnect(replica, process) if replica.in_flight.process is process else []
            self._changed.notify_all()
        self._deliver(answers)

    def _disconnect(self, replica: ConnectedReplica, process: EngineConnection) -> list[PendingAnswer]:
        """Ends the connection that a replica has, with the lock."""
        in_flight = replica.in_flight
        connected, in_flight.process_ready, in_flight.process = in_flight.process_ready, False, None
        self._audio.drop(replica.id)
        if self._closing.is_set() or not connected:
            return []
        if in_flight.requests or in_flight.sessions or in_flight.queries:
            log.warning("replica %s is gone: its work goes to others", replica.id)
        self.restarts += not replica.draining
        replica.suspects, answers = in_flight.record_loss("was lost: its connection ended")
        if (handover := self._handovers.pop(replica, None)) is not None:
            handover.transfer_remaining()
            self._record(handover)
        target = self._target(replica)
        if self._redirect(in_flight, target):
            self._move_work(in_flight, target)
        else:
            self._move_work(in_flight)
        if not self._candidates:
            self._alone_since_s = time.monotonic()
        return answers

    def _count_deaths(self, replica: ConnectedReplica) -> list[PendingAnswer]:
        """Counts the death of a replica's engine process against the work that it had then, with the lock. Returns the
        rejections of work that had too many."""
        suspects, replica.suspects = replica.suspects, []
        for work in suspects:
            work.deaths += 1
        if not suspects:
            return []
        return [answer for each in self._in_flights for answer in each.reject_repeated("its connection was lost")]

    def _redirect(self, gone: InFlight, target: InFlight) -> bool:
        """Redirects handovers to a replica that is gone; returns whether there were any."""
        redirected = False
        for handover in self._handovers.values():
            if handover.new is gone:
                redirected = True
                if gone.sessions or gone.requests:
                    self._move_work(gone, target)
                handover.new = target
                handover.on_new_process_restarted()
        return redirected

    def _watch(self) -> None:
        """Pings all replicas, ends silent connections, and rejects work that no replica will do."""
        while not self._closing.wait(min(1.0, self._settings.silent_s / 5)):
            answers: list[PendingAnswer] = []
            max_samples = units.s_to_samples(self._config.max_audio_s)
            with self._lock:
                fill = queue_state(self._in_flights).fill(self._config.max_requests, max_samples)
                for replica in self._replicas.values():
                    in_flight = replica.in_flight
                    in_flight.send(
                        messages.EnginePing(
                            self._settings.silent_s, in_flight.backlog_samples, fill, len(in_flight.sessions)
                        )
                    )
                    if in_flight.process is not None and in_flight.process.unresponsive:
                        log.error("replica %s was silent for %g s", replica.id, in_flight.process.hang_timeout_s)
                        in_flight.process.kill()
                alone_s = self._alone_since_s
                if alone_s is not None and time.monotonic() - alone_s > NO_REPLICA_S and not self._failed:
                    self._failed = True
                    answers = self._waiting.fail_all(
                        EngineClosed("no replica of the engine is running at the moment", todo="try again later")
                    )
            self._deliver(answers)

    def _deliver(self, answers: Iterable[PendingAnswer | SoundAnswer]) -> None:
        for answer in answers:
            if answer.samples is not None:
                self._on_done(answer.samples)
            answer.deliver()


def answered(answers: Mapping[str, Future[messages.EngineReport]]) -> dict[str, messages.EngineReport]:
    """Reports that have come, by the ids of their replicas."""
    return {name: answer.result() for name, answer in answers.items() if answer.done() and answer.exception() is None}


_SAMPLE = re.compile(rb"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (.*)$", re.DOTALL)


def _with_replica(message: messages.UtteranceDone, replica: str) -> messages.UtteranceDone:
    """Returns the message with the name of the replica that answered, for the request's trace."""
    if (phases := message.recognition.phases) is None:
        return message
    recognition = msgspec.structs.replace(message.recognition, phases=msgspec.structs.replace(phases, replica=replica))
    return messages.UtteranceDone(message.id, recognition)


def merge_metrics(texts: dict[str, bytes]) -> bytes:
    """Merges Prometheus texts of equal replicas into one, with the label `replica` in each sample."""
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}
    for replica_id, text in texts.items():
        label = b'replica="%s"' % replica_id.replace("\\", "\\\\").replace('"', '\\"').encode()
        family = b""
        for line in text.splitlines():
            if line.startswith((b"# HELP ", b"# TYPE ")):
                family = line.split(b" ", 3)[2]
                heads, _ = families.setdefault(family, ([], []))
                if line not in heads:
                    heads.append(line)
            elif found := _SAMPLE.match(line):
                name, labels, value = found.groups()
                labels = label + (b"," + labels if labels else b"")
                families.setdefault(family, ([], []))[1].append(b"%s{%s} %s" % (name, labels, value))
    return b"".join(line + b"\n" for heads, samples in families.values() for line in (*heads, *samples))


def replicated_backend(
    directory: ReplicaDirectory, settings: ReplicaSettings, first_replica_s: float = FIRST_REPLICA_S
) -> Connect:
    """`Connect` of EngineClient: the replicas of a directory."""

    def connect(config: EngineConfig, on_done: Callable[[int], None], on_stop: Callable[[], None]) -> ReplicatedBackend:
        return ReplicatedBackend(directory, settings, on_done, on_stop, config, first_replica_s)

    return connect
