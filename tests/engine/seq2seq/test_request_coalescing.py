"""Coalescing of requests for the same audio or answer: whatever becomes of the first, each is answered once."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.request import RecognitionRequest
from asr_serve.engine.seq2seq.coalescing import FETCH_TIMEOUT_S, RequestCoalescer, urgency
from asr_serve.types import Priority

PRIORITIES: tuple[Priority, ...] = ("live", "interactive", "bulk")
NOTHING = np.zeros(0, np.float32)


def answer_to(wanted: bytes) -> Recognition:
    return Recognition(tuple(wanted), 0.0, 0.0, "stop", 1.0)


class FakeEncoderCache:
    """Encoder cache without pages: the frames of a root are its own name, so that mix-ups are seen."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.answers: dict[bytes, Recognition] = {}
        self.prefix_cache: dict[bytes, bytes] = {}
        self.offloaded: dict[bytes, bytes] = {}
        self.fetches: list[tuple[bytes, Callable[[Any], None]]] = []
        self.room = True

    def lookup_audio(self, root: bytes) -> bytes | None:
        return self.prefix_cache.get(root)

    def is_offloaded(self, root: bytes) -> bool:
        return root in self.offloaded

    def fetch_offloaded(self, root: bytes, done: Callable[[Any], None]) -> None:
        self.fetches.append((root, done))

    def insert_fetched(self, root: bytes, parts: bytes | None, room: int) -> None:
        if parts is not None and self.room:
            self.prefix_cache[root] = parts

    def store_row_audio(self, row: bytes) -> None:
        if self.room:
            self.prefix_cache[row] = row

    def store_encoder_result(self, root: bytes, result: object) -> None:
        if result == "uncached":
            raise RuntimeError("the device hiccuped")
        self.store_row_audio(root)

    def store_answer(self, wanted: bytes, answer: Recognition) -> None:
        if self.room:
            self.answers[wanted] = answer


class Engine:
    """Use of the coalescer as by engine/seq2seq/executor, without a model."""

    def __init__(self, seed: int, offloaded: bool = False) -> None:
        self.chance = random.Random(seed)
        self.cache = FakeEncoderCache(self.chance)
        if offloaded:
            self.cache.offloaded[b"clip0"] = b"clip0"
        self.open: dict[int, RecognitionRequest] = {}
        self.planned: dict[int, RecognitionRequest] = {}
        self.encoding: list[list[RecognitionRequest]] = []
        self.rows: list[RecognitionRequest] = []
        self.started: set[int] = set()
        self.outcomes: dict[int, object] = {}
        self.encodes: list[bytes] = []
        self.inbox: list[Callable[[], None]] = []
        self.now_s = 0.0
        self.sharing = RequestCoalescer(
            cast("Any", self.cache),
            self.plan,
            lambda each: self.planned.pop(each.id, None) is not None,
            self.started.update,
            self.finish,
            lambda: 100,
            self.inbox.append,
            lambda: self.now_s,
        )

    def plan(self, each: RecognitionRequest, like: RecognitionRequest) -> None:
        assert each.id in self.open
        assert each.id not in self.planned, "it waits twice"
        assert each not in self.rows
        assert not any(each in batch for batch in self.encoding), "it is encoded, and waits for that"
        self.planned[each.id] = like

    def finish(self, each: RecognitionRequest, answer: Recognition) -> None:
        assert self.open.pop(each.id) is each
        assert each.id not in self.planned
        assert answer == answer_to(each.answer_digest)
        assert each.id not in self.outcomes, "answered twice"
        self.outcomes[each.id] = answer

    def submit(self, clip: int, options: int, priority: Priority, within_ms: int | None) -> RecognitionRequest:
        each = RecognitionRequest(len(self.outcomes) + len(self.open), NOTHING, 1, SearchOptions(), priority, Future())
        each.within_ms, each.arrived_s = within_ms, self.now_s
        each.audio_digest, each.answer_digest = b"clip%d" % clip, b"clip%d options%d" % (clip, options)
        self.now_s += 0.01
        self.open[each.id] = each
        self.sharing.submit(each)
        return each

    def cancel(self, each: RecognitionRequest, why: str = "gone") -> None:
        if each.id not in self.open:
            return
        self.planned.pop(each.id, None)
        self.rows = [row for row in self.rows if row is not each]
        del self.open[each.id]
        self.outcomes[each.id] = why
        self.sharing.remove(each, any(each in batch for batch in self.encoding))

    def expedite(self, each: RecognitionRequest) -> None:
        each.within_ms = 0
        self.sharing.requeue(each)
        if (like := self.planned.get(each.id)) is not None:
            assert urgency(like) <= urgency(each), "its place in the queue is the old one"

    def step(self, count: int, beside: bool) -> None:
        batch = sorted(self.planned, key=lambda number: urgency(self.planned[number]))[:count]
        batch_requests = []
        for number in batch:
            del self.planned[number]
            batch_requests.append(self.open[number])
            batch_requests[-1].encode_start_ns = 1
        self.started.update(batch)
        self.sharing.started(batch_requests)
        left = [each for each in batch_requests if not self.join_cached(each)]
        self.encodes += [each.encoder_key for each in left]
        if beside and left:
            self.encoding.append(left)
        else:
            self.join(left)

    def join_cached(self, each: RecognitionRequest) -> bool:
        held: Any = self.sharing.cached_frames(each)
        assert held in (None, each.encoder_key), "frames of something else"
        if held is not None:
            self.rows.append(each)
        return held is not None

    def join(self, batch: list[RecognitionRequest]) -> None:
        for each in batch:
            self.rows.append(each)
            self.sharing.publish_frames(each, cast("Any", each.encoder_key))

    def deliver(self, how: str) -> None:
        if not self.encoding:
            return
        batch = self.encoding.pop(self.chance.randrange(len(self.encoding)))
        here = [each for each in batch if each.id in self.open]
        if how == "lost":
            for each in here:
                self.sharing.schedule(each)
        elif how == "failed":
            for each in here:
                self.cancel(each, "failed")
        else:
            self.join(here)
        for each in batch:
            with contextlib.suppress(RuntimeError):
                self.sharing.adopt_abandoned(each.id, cast("Any", None if how in ("lost", "failed") else how))

    def finalize(self, again: bool) -> None:
        if not self.rows:
            return
        each = self.rows.pop(self.chance.randrange(len(self.rows)))
        if again and not each.full_window:
            each.full_window = True
            self.sharing.request_frames(each)
            return
        answer = answer_to(each.answer_digest)
        self.finish(each, answer)
        self.sharing.publish_answer(each, answer)

    def finish_fetch(self, lost: bool) -> None:
        if self.cache.fetches:
            root, done = self.cache.fetches.pop(self.chance.randrange(len(self.cache.fetches)))
            done(None if lost else self.cache.offloaded.get(root))
        while self.inbox:
            self.inbox.pop(0)()

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        late = {id(each) for each, due_s in self.sharing._fetching.values() if due_s <= self.now_s}
        self.sharing.schedule_overdue()
        assert self.sharing.due_s is None or self.sharing.due_s > self.now_s, "the loop would spin"
        planned = {id(each) for each in self.open.values() if each.id in self.planned}
        assert planned >= late, "late, and not planned"

    def evict(self, offload: bool) -> None:
        if self.cache.prefix_cache:
            root = self.chance.choice(sorted(self.cache.prefix_cache))
            found = self.cache.prefix_cache.pop(root)
            if offload:
                self.cache.offloaded[root] = found

    def drop_answer(self) -> None:
        if self.cache.answers:
            del self.cache.answers[self.chance.choice(sorted(self.cache.answers))]

    def random_event(self) -> None:
        """Anything that may happen."""
        chance = self.chance
        match chance.choices(range(11), weights=[8, 3, 5, 4, 5, 3, 2, 1, 1, 2, 3])[0]:
            case 0:
                within_ms = chance.choice([None, None, 0, 10_000])
                self.submit(chance.randrange(3), chance.randrange(3), chance.choice(PRIORITIES), within_ms)
            case 1 if self.open:
                self.cancel(self.open[chance.choice(sorted(self.open))])
            case 2:
                self.step(chance.randrange(1, 4), chance.random() < 0.6)
            case 3:
                self.deliver(chance.choice(["cached", "cached", "uncached", "lost", "failed"]))
            case 4:
                self.finalize(chance.random() < 0.2)
            case 5:
                self.finish_fetch(chance.random() < 0.3)
            case 6:
                self.evict(chance.random() < 0.6)
            case 7:
                self.drop_answer()
            case 8:
                self.cache.room = not self.cache.room
            case 9:
                self.wait(chance.choice([FETCH_TIMEOUT_S / 3, FETCH_TIMEOUT_S]))
            case 10 if self.open:
                self.expedite(self.open[chance.choice(sorted(self.open))])
        self.expect_order()

    def expect_order(self) -> None:
        """Whoever waits is where it counts; and nobody waits behind one that is less urgent and only waits too."""
        sharing, found = self.sharing, 0
        for flights in (sharing._answers, sharing._frames):
            for wanted, others in flights._followers.items():
                first = flights._leaders[wanted]
                assert others, "an empty list"
                found += len(others)
                for other in others:
                    assert self.open[other.id] is other, "who left still waits"
                    if (like := self.planned.get(first.id)) is not None:
                        assert urgency(like) <= urgency(other), "it waits behind one that is less urgent"
                    if self.worked_on(first):
                        assert other.id in self.started, "it depends on what is worked on"
        encoded = sum(each.id in self.open for batch in self.encoding for each in batch)
        assert found + len(self.planned) + len(sharing._fetching) + len(self.rows) + encoded == len(self.open)

    def worked_on(self, each: RecognitionRequest) -> bool:
        """Itself, or what it waits for. Who was encoded in vain and waits once more is not."""
        busy = [*self.rows, *(one for batch in self.encoding for one in batch)]
        audio = self.sharing._frames
        waits = any(other is each for other in audio._followers.get(each.encoder_key, []))
        return any(one is each or (waits and one is audio.leader(each.encoder_key)) for one in busy)

    def end(self, *, disk: bool = True) -> None:
        """Nothing more comes: everybody is answered. Without `disk` nothing comes from there either, until nobody
        needs it any more."""
        for _ in range(200):
            if not self.open and not self.encoding:
                break
            if disk:
                self.finish_fetch(lost=False)
            self.wait(FETCH_TIMEOUT_S / 2)
            self.deliver("cached")
            self.step(8, beside=False)
            self.finalize(again=False)
            self.expect_order()
        assert not self.open, "somebody waits for ever"
        self.sharing.check(idle=True)
        while self.cache.fetches:
            self.finish_fetch(lost=False)
        self.sharing.check(idle=True)
        assert not self.planned, "what came late was planned once more"


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 40))
def test_every_request_is_answered_once_whatever_happens(seed: int) -> None:
    engine = Engine(seed)
    for _ in range(80):
        engine.random_event()
    engine.end(disk=engine.chance.random() < 0.5)
    asked = len(engine.outcomes)
    assert asked == len(set(engine.outcomes))


def test_uncached_frames_do_not_serialize_requests() -> None:
    engine = Engine(0)
    engine.cache.room = False
    for options in range(6):
        engine.submit(0, options, "bulk", None)
    assert len(engine.planned) == 1, "they wait for one"
    engine.step(8, beside=False)
    assert len(engine.planned) == 5, "which was in vain: all of them go at once"
    engine.step(8, beside=False)
    assert len(engine.rows) == 6
    engine.end()


@pytest.mark.parametrize("options", [0, 1])
def test_a_live_request_for_lost_audio_takes_the_lead(options: int) -> None:
    """A file's audio comes from the tiers, and is lost there; a caller wants the same. Or a peer loses it."""
    engine = Engine(0, offloaded=True)
    engine.submit(0, 0, "bulk", None)
    caller = engine.submit(0, options, "live", None)
    engine.finish_fetch(lost=True)
    assert [like.id for like in engine.planned.values()] == [caller.id]
    engine.step(1, beside=True)
    engine.deliver("lost")
    assert [like.id for like in engine.planned.values()] == [caller.id]
    engine.end()


def test_followers_of_uncached_frames_are_scheduled() -> None:
    engine = Engine(0)
    first = engine.submit(0, 0, "live", None)
    engine.step(1, beside=True)
    other = engine.submit(0, 1, "live", None)
    engine.cancel(first)
    engine.deliver("uncached")
    assert other.id in engine.planned
    engine.end()


def test_a_follower_adopts_frames_of_a_cancelled_leader() -> None:
    engine = Engine(0)
    first = engine.submit(0, 0, "live", None)
    engine.step(1, beside=True)
    engine.submit(0, 0, "live", None)
    engine.cancel(first)
    engine.end()
    assert engine.encodes == [b"clip0"]


def test_a_fetch_that_never_ends_times_out() -> None:
    engine = Engine(0, offloaded=True)
    first = engine.submit(0, 0, "live", None)
    for options in (0, 1):
        engine.submit(0, options, "live", None)
    engine.wait(FETCH_TIMEOUT_S - engine.now_s)
    assert not engine.planned, "it may still come"
    engine.wait(0.05)
    assert [*engine.planned] == [first.id], "and whoever wants the same waits for that one"
    assert engine.sharing.due_s is None
    engine.end(disk=False)
    assert engine.encodes == [b"clip0"]


@pytest.mark.parametrize("when", ["planned", "encoding"])
def test_a_late_fetch_is_used_and_schedules_nothing_twice(when: str) -> None:
    engine = Engine(0, offloaded=True)
    first = engine.submit(0, 0, "live", None)
    engine.submit(0, 1, "live", None)
    engine.wait(FETCH_TIMEOUT_S)
    if when == "encoding":
        engine.step(1, beside=True)
    engine.finish_fetch(lost=False)
    assert [*engine.planned] == ([first.id] if when == "planned" else [])
    assert b"clip0" in engine.cache.prefix_cache
    engine.end()
    assert engine.encodes == ([] if when == "planned" else [b"clip0"])
