"""The work of a streaming model: callers' streams, piece by piece; and utterances, which are there at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from asr_serve.decoding.hotwords import StreamWords
from asr_serve.engine.chunked.queue import LIVE_RESERVE, LONGEST_WAIT_S, MOST_WAITING, Queue
from asr_serve.engine.chunked.sleepers import SLEEPS_AT_ONCE, Sleepers, Tiers
from asr_serve.engine.chunked.spelling import Spelling
from asr_serve.engine.chunked.stream import Kept, Stream, lost, recognition
from asr_serve.engine.chunked.wrapper import ChunkedInferenceWrapper, Progress, Session
from asr_serve.engine.saved import Held, Saved
from asr_serve.engine.session import Piece, Utterance, reject, resolve
from asr_serve.engine.work import Attempt, Keeper, Seldom
from asr_serve.errors import Cancelled
from asr_serve.types import Found, Priority


class Streams:
    """Owns the wrapper and everything that goes through it. See engine/work.Work."""

    def __init__(
        self,
        wrapper: ChunkedInferenceWrapper,
        shares: Mapping[Priority, float],
        on_done: Callable[[int], None],
        on_start: Callable[[list[int]], None],
        *,
        tiers: Tiers | None = None,
        sleep_after_s: float = 10.0,
        hears_again: bool = False,
        spell: Callable[[str], StreamWords] | None = None,
    ) -> None:
        """`shares`: of the slots that are given while others wait too, by class. `tiers`: where callers' streams
        sleep when nothing comes for `sleep_after_s`; None: they never do. `hears_again`: the tiers may lose one;
        then it is heard again, from audio that is kept. `spell`: hot words as searches read them."""
        self.wrapper, self.device = wrapper, wrapper.device
        self._sleepers, self._hears_again = Sleepers(tiers, sleep_after_s), hears_again
        self._on_done, self._on_start = on_done, on_start
        self._streams: dict[int, Stream] = {}
        self._kept = Kept(self._streams, self._sleepers.asleep)
        self._of: dict[Session, int] = {}
        self._waiting = Queue(shares)
        """Those without a slot that have something to hear; where nobody sleeps, all without one."""
        self._recordings = 0
        """Utterances that have one."""
        self._spelling = Spelling(spell, self._drop)
        self._look_through = Seldom()

    def begin(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._sleepers.begin(keeper)
        self._spelling.begin(keeper)

    @property
    def due_s(self) -> float | None:
        due_ms, longest = self.wrapper.due_ms, self._waiting.longest
        due_s = [
            None if due_ms is None else due_ms / 1_000,
            None if longest is None else longest[1] + LONGEST_WAIT_S,
            self._sleepers.due_s(self._pressed),
        ]
        return min((due for due in due_s if due is not None), default=None)

    @property
    def idle(self) -> bool:
        return True

    def check(self) -> None:
        states = self.wrapper.states
        assert states.used == len(self._of), "a slot was lost"
        if not self._look_through(states.slots + len(self._streams)):
            return
        states.check()
        seated, waiting = set(self._of.values()), set(self._waiting)
        assert len(seated) == len(self._of), "two slots for one"
        assert seated.isdisjoint(waiting), "somebody with a slot waits for one"
        busy = {number for number, stream in self._streams.items() if stream.utterance or stream.pieces}
        silent = self._streams.keys() - busy
        assert busy <= seated | waiting <= self._streams.keys(), "somebody is forgotten"
        self._sleepers.check(silent & seated, silent - seated - waiting)
        self._kept.check()

    def end(self, error: Exception) -> None:
        left = list(self._streams.values())
        try:
            for number in list(self._streams):
                self._leave(number)
        finally:
            for stream in left:
                self._reject(stream, error)
            self._spelling.close()

    def report(self) -> dict[str, int]:
        states = self.wrapper.states
        pages = {"pages": states.slots, "pages_used": states.used}
        return {"waiting": len(self._waiting), "decoding": len(self._of), **pages}

    def describe(self) -> dict[str, Any]:
        held = {"slots": self.wrapper.states.slots, "slots_used": self.wrapper.states.used}
        return held | {"streams_asleep": len(self._sleepers.asleep)}

    # --- utterances --------------------------------------------------------------------------------------

    def submit(self, utterance: Utterance) -> None:
        stream = Stream(utterance.priority, utterance.priority == "live", utterance)
        self._streams[utterance.id] = stream
        self._waiting.add(utterance.id, stream.priority)
        self._spelling.spell(utterance.id, stream)

    def cancel(self, request_id: int) -> None:
        self._drop(request_id, Cancelled("the request was cancelled"))

    # --- streams -----------------------------------------------------------------------------------------

    def open(
        self,
        number: int,
        live: bool,
        samples: int | None = None,
        saved: Saved | None = None,
        words: bool = False,
        bias: str = "",
    ) -> None:
        """Of a caller. `samples`: the most that will come. `saved`: where it stood, here or in another engine of
        the same model. `words`: pieces may be timed. `bias`: hot words, as SearchOptions has them. Raises
        ValueError for one that cannot be gone on with."""
        stream = Stream("live", live, samples=samples, keeps=self._hears_again, words=words, bias=bias)
        if saved is not None and (held := stream.load(saved)) is not None:
            self._expect(stream, held)
            if self._sleepers.possible and self._sleepers.put(number, held):
                stream.held = None  # as many may come as sleep elsewhere
        self._streams[number] = stream
        self._kept.add(stream)
        if not self._sleepers.possible:  # then who comes first keeps a slot from here on
            self._waiting.add(number, "live")
        self._spelling.spell(number, stream)

    def export(self, number: int) -> Saved | None:
        """The stream leaves this engine; all its pieces have been answered. None: it has to be heard from its
        start, which may be nothing so far: it knows nothing, or what it knew was lost."""
        held = (stream := self._streams[number]).held
        assert not stream.pieces, "a stream that is busy"
        if stream.session is not None and stream.session.audio.samples:
            held = self._hold(number, stream.session)
        elif number in self._sleepers.asleep:
            held = self._sleepers.read(number)
        saved = stream.saved(held) if held is not None or stream.heard else None
        self._leave(number)
        return saved

    def put(self, piece: Piece) -> None:
        stream = self._streams.get(piece.session)
        if stream is None:
            reject(piece.future, Cancelled("the stream was closed"))
            return
        stream.pieces.append(piece)
        if stream.session is not None:
            self._sleepers.loud(piece.session)
            self._go_on(piece.session)
        elif len(stream.pieces) == 1:
            self._wait(piece.session, stream)

    def close(self, number: int) -> None:
        """At any moment. Idempotent."""
        self._drop(number, Cancelled("the stream was closed"))

    # --- a turn ------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Slots for those who wait; and a chunk of everybody who is ready, if it is due."""
        self._sleepers.give_up()
        self._seat()
        slept = self._put_to_sleep()
        self._refuse()
        started, wrapper = time.perf_counter(), self.wrapper
        if not (running := wrapper.next(1_000 * time.monotonic())):
            return slept

        def fail(error: Exception) -> None:
            for session in running:
                self._drop(self._of[session], error)

        done: list[Progress] = []
        with Attempt(self._keeper.stats, "chunk", "a chunk", fail):
            done = wrapper.step(running, 1_000 * time.monotonic())
        for session, found in done:
            number = self._of[session]
            self._streams[number].hears(found)
            self._go_on(number)
        rows = len(running)
        self._keeper.stats.step("chunk", time.perf_counter() - started, rows, rows / wrapper.max_rows)
        return True

    def _seat(self) -> None:
        """Give slots to those who wait. More recordings than share a step would only keep each other, and callers,
        waiting."""
        kept = self.wrapper.states.slots // LIVE_RESERVE if self._keeper.listeners.live else 0
        while len(self._waiting) and (free := self._free):
            crowded = self._recordings >= self.wrapper.max_rows or free <= kept
            allowed: tuple[Priority, ...] = ("live",) if crowded else ("live", "interactive", "bulk")
            number = self._waiting.take(allowed, self._sleepers.coming.keys() | self._spelling.waiting)
            if number is None:
                return
            stream = self._streams[number]
            session = stream.session = self._open(number, stream)
            self._of[session] = number
            if stream.utterance is not None:
                self._recordings += 1
                self._start(session, stream.utterance)
            else:
                self._resume(number, stream, session)
            self._go_on(number)

    def _resume(self, number: int, stream: Stream, session: Session) -> None:
        """It goes on where it stood, if it has had a session before."""
        held, stream.held = stream.held, None
        with self._attempt(number):
            if held is not None:
                self._take_up(number, session, held)
            elif stream.spent:
                self._drop(number, lost())
            else:
                for pcm in stream.begin_again():
                    self._put(session, pcm, last=False)
        if number in self._streams:
            self._sleepers.wake(number)

    def _wait(self, number: int, stream: Stream) -> None:
        """Its audio does, from now on, for a slot; and if it slept, for what it knew."""
        self._waiting.add(number, "live", time.monotonic() if stream.live else None)
        if self._waiting.count("live") > MOST_WAITING:
            self._drop(number, self._waiting.full(self.wrapper.states.slots))
        elif number in self._sleepers.asleep:
            self._sleepers.call(number, self._came)

    def _came(self, number: int, held: Held | None) -> None:
        """What a stream knew that was called; None: it is lost."""
        stream = self._streams[number]
        with contextlib.suppress(ValueError):  # nobody but us wrote it: whatever holds it is broken
            if held is not None:
                self._expect(stream, held)
                stream.held = held
        if stream.held is None:
            self._keeper.stats.lost()
            if not stream.heard:
                self._drop(number, lost())

    def _refuse(self) -> None:
        """Those for whom there is no slot, and whose words would come too late."""
        while (longest := self._waiting.longest) and longest[1] + LONGEST_WAIT_S <= time.monotonic():
            self._drop(longest[0], self._waiting.full(self.wrapper.states.slots))

    def _start(self, session: Session, utterance: Utterance) -> None:
        assert utterance.pcm is not None
        utterance.encode_start_ns = time.time_ns()
        waited_s = max(0, utterance.encode_start_ns - utterance.submitted_ns) / 1e9
        self._keeper.stats.queued(utterance.priority, waited_s)
        self._on_start([utterance.id])
        with self._attempt(utterance.id):
            self._put(session, utterance.pcm, last=True)
            utterance.pcm = None

    def _put(self, session: Session, pcm: np.ndarray, last: bool) -> None:
        now_ms = 1_000 * time.monotonic()
        self.wrapper.put(session, pcm, now_ms)
        if last:
            self.wrapper.finish(session, now_ms)

    def _go_on(self, number: int) -> None:
        """What can be told; and the next piece, when the session has taken all of the first that it can."""
        if (stream := self._streams.get(number)) is None or (session := stream.session) is None:
            return
        with self._attempt(number):
            while stream.pieces and session.ready_ms is None and not stream.asked:
                if not stream.begun:
                    self._kept.put(stream, stream.pieces[0].pcm)
                    self._put(session, stream.pieces[0].pcm, stream.pieces[0].last)
                    stream.begun = True
                    continue
                stream.asked = True
                self._ask(number, stream, session)
                if number not in self._streams:
                    return
            if stream.utterance is not None and session.over:
                self._recognised(number, stream.utterance, stream.told(session, timed=True))

    def _ask(self, number: int, stream: Stream, session: Session) -> None:
        """For the answer to its first piece, all of which was heard."""
        found = stream.told(session, stream.pieces[0].timed)
        if session.over:
            self._keeper.stats.recognised(session.audio.samples, stream.said)
        self._answer(number, stream, session, found)

    def _answer(self, number: int, stream: Stream, session: Session, found: Any) -> None:
        stream.begun = stream.asked = False
        piece = stream.pieces.popleft()
        if session.over:
            self._leave(number)
        elif not stream.pieces:
            self._sleepers.quiet(number)
        resolve(piece.future, found)

    def _attempt(self, number: int) -> Attempt:
        """What may fail one of them."""
        return Attempt(self._keeper.stats, "chunk", "hearing", lambda error: self._drop(number, error))

    def _recognised(self, number: int, utterance: Utterance, found: Found) -> None:
        answer = recognition(utterance, found, self.wrapper.model.frame_samples)
        self._leave(number)
        self._on_done(utterance.samples)
        self._keeper.stats.recognised(utterance.samples, len(answer.tokens))
        resolve(utterance.future, answer)

    # --- sleep -------------------------------------------------------------------------------------------

    @property
    def _pressed(self) -> bool:
        """Somebody waits for a slot, and could be given one."""
        wants = self._waiting.wants(self._sleepers.coming.keys() | self._spelling.waiting)
        return "live" in wants or (bool(wants) and self._recordings < self.wrapper.max_rows)

    def _put_to_sleep(self) -> bool:
        """Those who are quiet, a few at once; the slots are for those who wait."""
        slept = False
        for _ in range(SLEEPS_AT_ONCE):
            if (number := self._sleepers.next(self._pressed)) is None:
                break
            slept |= self._sleep(number)
            self._seat()
        return slept

    def _sleep(self, number: int) -> bool:
        """False: there is no room for it."""
        session = (stream := self._streams[number]).session
        assert session is not None
        waiting = ((each, self._streams[each]) for each in self._waiting)
        if session.audio.samples and not self._sleepers.put(number, self._hold(number, session), waiting):
            return False
        self._rise(number, stream, session)
        return True

    def _hold(self, number: int, session: Session) -> Held:
        """What a session knows, where it lies."""
        return self.wrapper.held(session)

    def _expect(self, stream: Stream, held: Held) -> None:
        """Raises ValueError for what its session cannot go on from."""
        self.wrapper.expect(held)

    def _take_up(self, number: int, session: Session, held: Held) -> None:
        self.wrapper.resume(session, held, 1_000 * time.monotonic())

    # --- endings -----------------------------------------------------------------------------------------

    @property
    def _free(self) -> int:
        """Slots that may be given."""
        return self.wrapper.free

    def _open(self, number: int, stream: Stream) -> Session:
        return self.wrapper.open(live=stream.live, words=stream.words, hot=stream.hot)

    def _leave(self, number: int) -> Stream:
        """Nothing is held for it any more, wherever it was."""
        stream = self._streams.pop(number)
        self._kept.remove(stream)
        self._waiting.remove(number, stream.priority)
        if stream.session is not None:
            self._rise(number, stream, stream.session)
        self._sleepers.forget(number)
        self._spelling.leave(number)
        return stream

    def _rise(self, number: int, stream: Stream, session: Session) -> None:
        """Its slot is free."""
        self._sleepers.loud(number)
        self._recordings -= stream.utterance is not None
        stream.session = None
        del self._of[session]
        self.wrapper.close(session)

    def _drop(self, number: int, error: Exception) -> None:
        """If it is still here."""
        if number in self._streams:
            self._reject(self._leave(number), error)

    def _reject(self, stream: Stream, error: Exception) -> None:
        if stream.utterance is not None:
            self._on_done(stream.utterance.samples)
            reject(stream.utterance.future, error)
        while stream.pieces:
            reject(stream.pieces.popleft().future, error)
