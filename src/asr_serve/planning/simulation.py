"""Simulation of one model's callers on its replicas, by events on a virtual clock: arrivals, routing, results.

Latency is measured from the moment at which all audio of an answer is known: the pause has lasted long enough, the
file is there, the sentence is asked for.
"""

from __future__ import annotations

import random
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from math import ceil, inf, log
from typing import Literal, NamedTuple

import numpy as np

from asr_serve.audio.endpointing import EndpointConfig
from asr_serve.audio.silence_schedule import STREAMING_SCHEDULE
from asr_serve.engine.partial_rate import PartialRateController
from asr_serve.engine.vad_scheduler import VAD_STEP_INTERVAL_S
from asr_serve.pipelines.options import ANCHOR_INTERVAL_MS, ListenOptions
from asr_serve.planning.mix import Files, LiveCallers, Mix, SynthesizedTexts
from asr_serve.planning.replicas import (
    Replica,
    SharedCores,
    SpeechReplica,
    Stream,
    StreamingReplica,
    UtteranceReplica,
    VirtualClock,
    Work,
)
from asr_serve.planning.service_times import ServiceTimes, StreamingModelTimes, UtteranceModelTimes

RequestClass = Literal["live", "files", "speech"]
CLASSES: tuple[RequestClass, ...] = ("live", "files", "speech")
CACHED_FILES = 500
"""Recordings whose answers one replica caches."""
DRAIN_FACTOR = 1.0
"""Time after the last arrival, as a share of the simulated time, after which what is not done counts as never done."""
FIRST_PARTIAL_WITHIN_MS, PARTIAL_WITHIN_MS, ANCHOR_WITHIN_MS, FINAL_WITHIN_MS = 100, 2_000, 500, 100
"""Deadlines of pipelines/live/repeated_recognizer.py."""
PAD_S = EndpointConfig().pad_after_ms / 1_000
PARTIAL_MS = float(ListenOptions().partial_ms)


class Layout(NamedTuple):
    """Replicas of one model, and how requests find them."""

    replicas: int
    """Replicas that recognize; where encoding is apart, those that decode."""
    encoders: int = 0
    """Replicas that only encode; 0: encoding is not apart."""
    prefix_affinity: bool = True
    """Whether repeated audio goes to the replica that has its answer."""
    cores: float = inf
    """Cores that all replicas share, a step of each on one; infinite: each has its own."""

    @property
    def total(self) -> int:
        return self.replicas + self.encoders


class ClassResult(NamedTuple):
    """Latency of one class of requests."""

    requests: int
    p50_ms: float
    p95_ms: float
    audio_s: float


class SimulationResult(NamedTuple):
    """Result of one run."""

    classes: dict[RequestClass, ClassResult]
    arrived: int
    ended: int
    utilisation: float
    """Busy share of the replicas that recognize or speak, on average."""
    encoder_utilisation: float
    audio_s: float
    """Audio of callers' speech, files and sentences that arrived."""
    seconds: float


def simulate(
    mix: Mix, table: ServiceTimes, layout: Layout, callers: float, seconds: float, *, seed: int = 0
) -> SimulationResult:
    """Simulates one model's part of a mix. `mix`: of one model (Mix.of_model); `callers`: of the whole mix. Raises
    NotMeasured."""
    return _Simulation(mix, table, layout, callers, seconds, seed).run()


class _Simulation:
    def __init__(
        self, mix: Mix, table: ServiceTimes, layout: Layout, callers: float, seconds: float, seed: int
    ) -> None:
        (model,) = mix.models
        self.clock, self.seconds, self.layout, self.mix, self.table = VirtualClock(), seconds, layout, mix, table
        self.times = table.model(model)
        self.warm_s = seconds / 6
        self.path_s = table.server.live_path_s
        seeds = seed, zlib.crc32(model.encode())
        self.random = np.random.default_rng(seeds)
        self.choice = random.Random(repr(seeds))
        self.latencies: dict[RequestClass, list[float]] = {name: [] for name in CLASSES}
        self.audio: dict[RequestClass, float] = dict.fromkeys(CLASSES, 0.0)
        self.arrived = self.ended = 0
        self.encoders: list[UtteranceReplica] = []
        self.replicas: list[Replica] = []
        self.machine = SharedCores(layout.cores)
        match self.times:
            case StreamingModelTimes() as streaming:
                self.replicas += [StreamingReplica(self.clock, self.machine, streaming) for _ in range(layout.replicas)]
            case UtteranceModelTimes() as utterance:
                self.replicas += self._utterance_replicas(utterance)
            case speech:
                self.replicas += [SpeechReplica(self.clock, self.machine, speech) for _ in range(layout.replicas)]
        self.router = _Router(self.entries, layout.prefix_affinity, self.choice)
        self.callers = callers
        self._partial_rates: dict[int, PartialRateController] = {}

    def _utterance_replicas(self, times: UtteranceModelTimes) -> list[UtteranceReplica]:
        if not self.layout.encoders:
            return [UtteranceReplica(self.clock, self.machine, times) for _ in range(self.layout.replicas)]
        decoders = [UtteranceReplica(self.clock, self.machine, times) for _ in range(self.layout.replicas)]

        def deliver(work: Work) -> None:
            best = min(decoders, key=lambda replica: replica.queued_audio_s)
            handover_s = times.handover.seconds(1, work.audio_s)
            self.clock.at(self.clock.now_s + handover_s, lambda: best.submit_encoded(work))

        encoders = range(self.layout.encoders)
        self.encoders = [UtteranceReplica(self.clock, self.machine, times, deliver) for _ in encoders]
        return decoders

    def partial_rate(self, replica: Replica) -> PartialRateController:
        """Measured turnaround of a replica's live requests."""
        return self._partial_rates.setdefault(id(replica), PartialRateController())

    @property
    def entries(self) -> Sequence[Replica]:
        """Replicas to which requests are sent first."""
        return self.encoders or self.replicas

    def run(self) -> SimulationResult:
        for entry in self.mix.live:
            self._open_live(entry)
        for files in self.mix.files:
            self._arrive_files(files)
        for speech in self.mix.speech:
            self._arrive_speech(speech)
        self.clock.run(self.seconds)
        used = [self._utilisation(group) for group in (self.replicas, self.encoders)]
        self.clock.run(self.seconds * (1 + DRAIN_FACTOR))
        classes = {name: self._class_result(name) for name in CLASSES if self.audio[name] or self.latencies[name]}
        return SimulationResult(
            classes, self.arrived, self.ended, used[0], used[1], sum(self.audio.values()), self.seconds
        )

    def _utilisation(self, group: Sequence[Replica]) -> float:
        """Cores in use of a replica."""
        if not group:
            return 0.0
        return float(np.mean([each.work_s / self.seconds + each.background for each in group]))

    def _class_result(self, name: RequestClass) -> ClassResult:
        found = 1_000 * np.array(self.latencies[name]) if self.latencies[name] else np.zeros(0)
        if not len(found):
            return ClassResult(0, 0.0, 0.0, self.audio[name])
        # inverted_cdf: an order statistic, so that what never ended (infinite) is not averaged with the rest
        p50, p95 = np.quantile(found, [0.5, 0.95], method="inverted_cdf")
        return ClassResult(len(found), float(p50), float(p95), self.audio[name])

    # --- bookkeeping -----------------------------------------------------------------------------------

    def begin(self, name: RequestClass, audio_s: float) -> Callable[[], None]:
        """Counts an arrival; returns what is to be called with its result."""
        began_s = self.clock.now_s
        counted = self.warm_s <= began_s
        self.arrived += 1
        self.audio[name] += audio_s
        index = len(self.latencies[name])
        if counted:
            self.latencies[name].append(inf)

        def done() -> None:
            self.ended += 1
            if counted:
                self.latencies[name][index] = self.clock.now_s - began_s

        return done

    def lengths(self, mean: float, spread: float, count: int) -> list[float]:
        """Log-normal lengths."""
        drawn = self.random.standard_normal(count)
        return np.exp(log(mean) - spread**2 / 2 + spread * drawn).tolist()  # type: ignore[no-any-return]

    # --- live callers ----------------------------------------------------------------------------------

    def _open_live(self, entry: LiveCallers) -> None:
        """Callers stay with the replica that they were given: the one with fewer callers of two."""
        server = self.table.server
        packets = server.live_packet_s / server.packet_s
        for number in range(ceil(entry.share * self.callers - 1e-9)):
            replica = self.router.least_callers(self.replicas)
            replica.live_callers += 1
            replica.add_background(packets)
            first_s = float(self.random.uniform(0, entry.segment_s + entry.pause_s))
            for encoder in self.encoders:
                encoder.live_callers = 1
            caller: _StreamingCaller | _UtteranceCaller
            if isinstance(replica, StreamingReplica):
                caller = _StreamingCaller(self, entry, replica, number)
            else:
                assert isinstance(replica, UtteranceReplica)
                caller = _UtteranceCaller(self, entry, replica, number)
            self.clock.at(first_s, caller.open_segment)

    # --- files and sentences ---------------------------------------------------------------------------

    def _arrivals(self, per_caller_per_hour: float) -> list[float]:
        """Times of a Poisson process."""
        rate = self.callers * per_caller_per_hour / 3_600
        count = int(self.random.poisson(rate * self.seconds))
        return sorted(self.random.uniform(0, self.seconds, count).tolist())

    def _arrive_files(self, entry: Files) -> None:
        times_s = self._arrivals(entry.per_caller_per_hour)
        lengths = [
            min(entry.max_length_s, each) for each in self.lengths(entry.length_s, entry.length_spread, len(times_s))
        ]
        repeats = (self.random.uniform(size=len(times_s)) < entry.repeated).tolist()
        weights = 1 / np.arange(1, entry.distinct + 1)
        known = self.random.choice(entry.distinct, size=len(times_s), p=weights / weights.sum()).tolist()
        # a repeated recording has one length
        fixed = [
            min(entry.max_length_s, each) for each in self.lengths(entry.length_s, entry.length_spread, entry.distinct)
        ]
        for at_s, length_s, repeated, number in zip(times_s, lengths, repeats, known, strict=True):
            key = number if repeated else None
            self.clock.at(at_s, self._file(entry, fixed[number] if repeated else length_s, key))

    def _file(self, entry: Files, length_s: float, key: int | None) -> Callable[[], None]:
        server = self.table.server

        def arrive() -> None:
            done = self.begin("files", length_s)
            replica, cached = self.router.route(length_s, key)
            replica.add_server_work(server.file_s + server.file_audio_factor * length_s)
            if cached:
                self._answer_cached(replica, done)
                return
            if isinstance(replica, StreamingReplica):
                replica.submit(Work(length_s, done))
                return
            count = max(1, round(length_s / entry.segment_s))
            left = [count]

            def part_done() -> None:
                left[0] -= 1
                if not left[0]:
                    done()

            for number in range(count):
                # the first segment is interactive, later ones are bulk (pipelines/offline/transcribe.py)
                replica.submit(Work(length_s / count, part_done, "interactive" if not number else "bulk"))

        return arrive

    def _answer_cached(self, replica: Replica, done: Callable[[], None]) -> None:
        """Answers from the cache once the step that runs is over and the server has read the file."""
        server_s = replica.take_server_work()
        self.clock.at(max(self.clock.now_s, replica.step_end_s) + server_s, done)

    def _arrive_speech(self, entry: SynthesizedTexts) -> None:
        times_s = self._arrivals(entry.per_caller_per_hour)
        for at_s, length_s in zip(
            times_s, self.lengths(entry.length_s, entry.length_spread, len(times_s)), strict=True
        ):
            self.clock.at(at_s, self._sentence(length_s))

    def _sentence(self, length_s: float) -> Callable[[], None]:
        def arrive() -> None:
            done = self.begin("speech", length_s)
            replica, _ = self.router.route(length_s, None)
            replica.add_server_work(self.table.server.file_s)
            replica.submit(Work(length_s, done))

        return arrive


class _Segments:
    """Segments of one live caller: when each begins, and how long it is."""

    def __init__(self, simulation: _Simulation, entry: LiveCallers, number: int) -> None:
        self.simulation, self.entry, self.clock = simulation, entry, simulation.clock
        count = max(8, ceil(2 * simulation.seconds / (entry.segment_s + entry.pause_s)))
        self._lengths = simulation.lengths(entry.segment_s, entry.segment_spread, count)
        self._pauses = simulation.random.exponential(entry.pause_s, count).tolist()
        # Between turns, somebody else has the floor.
        listening_s = (entry.segment_s + entry.pause_s) * (1 / entry.duty - 1)
        self._listens = simulation.random.exponential(listening_s, count).tolist() if listening_s else [0.0] * count
        self._delays: list[float] = simulation.random.uniform(0, VAD_STEP_INTERVAL_S, count).tolist()
        self._at = -1
        self.speech_end_s = self.close_s = 0.0

    def next(self) -> float:
        """Begins the next segment now; returns its length. `close_s`: when its pause has lasted long enough."""
        self._at = (self._at + 1) % len(self._lengths)
        length_s = min(60.0, max(0.3, self._lengths[self._at]))
        silence_ms = self.entry.silence_ms
        if silence_ms is None:
            silence_ms = STREAMING_SCHEDULE.silence_ms(1_000 * length_s)
        self.speech_end_s = self.clock.now_s + length_s
        self.close_s = self.speech_end_s + silence_ms / 1_000
        return length_s

    @property
    def next_s(self) -> float:
        """Begin of the segment after this one."""
        pause_s: float = self._pauses[self._at]
        listens_s: float = self._listens[self._at]
        return max(self.close_s, self.speech_end_s + pause_s) + listens_s

    @property
    def delay_s(self) -> float:
        """Time until the voice activity of the last packet is computed, in a step of its own."""
        delay_s: float = self._delays[self._at]
        return delay_s


class _StreamingCaller:
    """Live caller of a streaming model: a stream for each segment, a chunk at a time."""

    def __init__(self, simulation: _Simulation, entry: LiveCallers, replica: StreamingReplica, number: int) -> None:
        self._simulation, self._replica, self._clock = simulation, replica, simulation.clock
        assert isinstance(simulation.times, StreamingModelTimes)
        self._times = simulation.times
        self._segments = _Segments(simulation, entry, number)

    def open_segment(self) -> None:
        if self._clock.now_s >= self._simulation.seconds:
            return
        self._length_s = self._segments.next()
        stream: list[Stream] = [self._replica.open_stream(lambda: None)]
        self._clock.at(self._clock.now_s + self._times.lag_s + self._times.chunk_s, lambda: self._chunk(stream[0]))
        self._clock.at(self._segments.close_s, lambda: self._close(stream[0]))

    def _chunk(self, stream: Stream) -> None:
        if stream.ended:
            return
        self._replica.append_chunk(stream)
        self._clock.at(self._clock.now_s + self._times.chunk_s, lambda: self._chunk(stream))

    def _close(self, stream: Stream) -> None:
        """The pause has lasted long enough: what remains is one chunk more, once voice activity has told so."""
        clock, segments = self._clock, self._segments
        stream.on_done = self._simulation.begin("live", self._length_s)
        told_s = max(clock.now_s + segments.delay_s, self._replica.step_end_s) + self._simulation.path_s
        clock.at(told_s, lambda: self._replica.append_chunk(stream, last=True))
        clock.at(segments.next_s, self.open_segment)


class _UtteranceCaller:
    """Live caller of a model of whole utterances: hypotheses of a growing segment, as
    pipelines/live/repeated_recognizer.py submits them."""

    def __init__(self, simulation: _Simulation, entry: LiveCallers, replica: UtteranceReplica, number: int) -> None:
        self._simulation, self._replica, self._clock = simulation, replica, simulation.clock
        assert isinstance(simulation.times, UtteranceModelTimes)
        self._times = simulation.times
        # Audio comes in packets, and counts once voice activity has seen it.
        packet_s = simulation.table.server.packet_s
        self._partial_s = packet_s * ceil(PARTIAL_MS / 1_000 / packet_s - 1e-9) + VAD_STEP_INTERVAL_S / 2
        self._rates = simulation.partial_rate(replica)
        self._entry_replica = simulation.router.shorter_queue(simulation.encoders) if simulation.encoders else replica
        self._segments = _Segments(simulation, entry, number)
        self._job: Work | None = None
        self._kind = ""
        self._final: Callable[[], None] | None = None
        """Function that is called with the segment's final, once it is closed."""
        self._generation = 0
        """Number of the segment: events of earlier ones are void."""

    def open_segment(self) -> None:
        if self._clock.now_s >= self._simulation.seconds:
            return
        clock = self._clock
        self._start_s, self._length_s = clock.now_s, self._segments.next()
        self._pause_s = self._segments.speech_end_s + PAD_S
        self._known_s, self._early = 0.0, False
        self._final = None
        self._submitted = False
        self._submit_s = -inf
        self._generation += 1
        number = self._generation
        clock.at(self._start_s + self._partial_s, lambda: self._partial(number))
        anchor_s = self._start_s + ANCHOR_INTERVAL_MS / 1_000
        while anchor_s < self._segments.speech_end_s:
            clock.at(anchor_s, lambda: self._anchor(number))
            anchor_s += ANCHOR_INTERVAL_MS / 1_000
        clock.at(self._pause_s, lambda: self._pause(number))
        clock.at(self._segments.close_s, lambda: self._close(number))

    def _void(self, number: int) -> bool:
        return number != self._generation or self._final is not None

    def _partial(self, number: int) -> None:
        if self._void(number) or self._job is not None or self._clock.now_s >= self._segments.speech_end_s:
            return
        now_s = self._clock.now_s
        audio_due_s = self._start_s + self._known_s + self._partial_s
        interval_s = self._rates.interval_ms(PARTIAL_MS, 1_000 * now_s) / 1_000
        due_s = max(audio_due_s, self._submit_s + interval_s)
        if self._submitted and due_s > now_s + 1e-9:
            self._clock.at(due_s, lambda: self._partial(number))
            return
        within_ms = PARTIAL_WITHIN_MS if self._submitted else FIRST_PARTIAL_WITHIN_MS
        self._submit("partial", now_s - self._start_s, within_ms)

    def _anchor(self, number: int) -> None:
        if not self._void(number) and (self._job is None or self._kind == "partial"):
            self._submit("anchor", self._clock.now_s - self._start_s, ANCHOR_WITHIN_MS)

    def _pause(self, number: int) -> None:
        """The hypothesis of the whole segment, while the pause may still turn out too short."""
        if not self._void(number) and self._job is None and not self._early:
            self._submit("early", self._length_s + PAD_S, PARTIAL_WITHIN_MS)

    def _close(self, number: int) -> None:
        self._final = self._simulation.begin("live", self._length_s)
        told_s = max(self._clock.now_s + self._segments.delay_s, self._replica.step_end_s) + self._simulation.path_s
        self._clock.at(told_s, self._finish)
        self._clock.at(max(self._segments.next_s, told_s), self._reopen)

    def _finish(self) -> None:
        assert self._final is not None
        if self._early:
            self._final()
        elif self._job is None or self._kind == "partial":
            self._submit("final", self._length_s + PAD_S, FINAL_WITHIN_MS)

    def _reopen(self) -> None:
        if self._job is not None:  # its final is late: the next segment waits for it here
            self._clock.at(self._clock.now_s + PARTIAL_MS / 1_000, self._reopen)
        else:
            self.open_segment()

    def _submit(self, kind: str, audio_s: float, within_ms: int) -> None:
        if self._job is not None:
            self._entry_replica.cancel(self._job)
        number, now_s = self._generation, self._clock.now_s
        draft = self._times.tokens_fixed + self._times.tokens_per_s * self._known_s if self._submitted else 0.0
        self._submitted, self._submit_s, self._kind = True, now_s, kind

        def done() -> None:
            self._rates.record_turnaround(1_000 * (self._clock.now_s - now_s), 1_000 * self._clock.now_s)
            self._job = None
            self._known_s = audio_s
            self._answered(kind, number)

        self._job = Work(audio_s, done, "live", within_ms, draft)
        self._entry_replica.submit(self._job)

    def _answered(self, kind: str, number: int) -> None:
        if kind == "early":
            self._early = True
        if self._final is not None:
            if kind in ("early", "final"):
                self._final()
            else:
                self._submit("final", self._length_s + PAD_S, FINAL_WITHIN_MS)
        elif self._clock.now_s >= self._pause_s:
            self._pause(number)
        else:
            self._partial(number)


class _Router:
    """Router: shortest queue in audio seconds of two replicas chosen at random, unless another has the answer."""

    def __init__(self, replicas: Sequence[Replica], affinity: bool, choice: random.Random) -> None:
        self._replicas, self._affinity, self._choice = replicas, affinity, choice
        self._holders: dict[int, list[Replica]] = {}
        self._cached: dict[int, OrderedDict[int, None]] = {id(replica): OrderedDict() for replica in replicas}

    def route(self, audio_s: float, key: int | None) -> tuple[Replica, bool]:
        """Returns the replica of a request, and whether its answer is there already."""
        replica = self.shorter_queue(self._replicas)
        if key is None:
            return replica, False
        if self._affinity and (holders := self._holders.get(key)):
            holder = min(holders, key=lambda each: each.queued_audio_s)
            # its queue may be longer by no more than what would be computed again
            if holder.queued_audio_s - replica.queued_audio_s <= audio_s:
                replica = holder
        cache = self._cached[id(replica)]
        if key in cache:
            cache.move_to_end(key)
            return replica, True
        cache[key] = None
        self._holders.setdefault(key, []).append(replica)
        if len(cache) > CACHED_FILES:
            evicted, _ = cache.popitem(last=False)
            self._holders[evicted].remove(replica)
        return replica, False

    def shorter_queue(self, replicas: Sequence[Replica]) -> Replica:
        return min(self._two(replicas), key=lambda each: each.queued_audio_s)

    def least_callers(self, replicas: Sequence[Replica]) -> Replica:
        return min(self._two(replicas), key=lambda each: each.live_callers)

    def _two(self, replicas: Sequence[Replica]) -> Iterable[Replica]:
        if len(replicas) <= 2:
            return replicas
        return self._choice.sample(replicas, 2)
