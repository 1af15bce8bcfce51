"""Coalescing of requests that need the same answer or frames, of which one is computed. Pure: no tensors, and the
clock is passed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from asr_serve.decoding.hypothesis import Recognition
from asr_serve.engine.request import RecognitionRequest
from asr_serve.engine.seq2seq.scheduler import DEADLINE_MS

if TYPE_CHECKING:
    from asr_serve.engine.seq2seq.decode_batch import DecodeRow
    from asr_serve.engine.seq2seq.encoder import EncoderResult, OwnedPages
    from asr_serve.engine.seq2seq.encoder_cache import EncoderCache

PRIORITY_ORDER = list(DEADLINE_MS)
NODE_CHECK_COST = 6
FETCH_TIMEOUT_S = 0.25
"""Time after which frames that the disk has not delivered are encoded anew: it may never deliver them. A working
disk needs less than a tenth of that, and encoding takes longer."""


def urgency(each: RecognitionRequest) -> tuple[int, float]:
    """Sort key in the scheduler's order; less is sooner."""
    within_ms = DEADLINE_MS[each.priority] if each.within_ms is None else each.within_ms
    return PRIORITY_ORDER.index(each.priority), each.arrived_s * 1_000 + within_ms


class CoalescingGroups:
    """Requests by the digest of what they need: a leader, which is under way, and followers that wait for it."""

    def __init__(self) -> None:
        self._leaders: dict[bytes, RecognitionRequest] = {}
        self._followers: dict[bytes, list[RecognitionRequest]] = {}

    def __len__(self) -> int:
        """Number of followers."""
        return sum(map(len, self._followers.values()))

    @property
    def leaders(self) -> int:
        return len(self._leaders)

    def leader(self, wanted: bytes) -> RecognitionRequest | None:
        """Returns the request that is under way."""
        return self._leaders.get(wanted)

    def set_leader(self, wanted: bytes, each: RecognitionRequest) -> None:
        """Makes the request the leader; a former leader becomes a follower."""
        if (former := self._leaders.get(wanted)) is not None:
            self.add_follower(wanted, former)
        self._leaders[wanted] = each

    def add_follower(self, wanted: bytes, each: RecognitionRequest) -> None:
        assert wanted in self._leaders, "it would wait for nobody"
        self._followers.setdefault(wanted, []).append(each)

    def complete(self, wanted: bytes) -> list[RecognitionRequest]:
        """Ends a group whose leader succeeded or failed; returns its followers, the most urgent first."""
        del self._leaders[wanted]
        return sorted(self._followers.pop(wanted, []), key=urgency)

    def followers(self, wanted: bytes, each: RecognitionRequest) -> list[RecognitionRequest]:
        """Returns the followers of the request, if it is a leader."""
        return self._followers.get(wanted, []) if self._leaders.get(wanted) is each else []

    def remove_follower(self, wanted: bytes, each: RecognitionRequest) -> bool:
        """Removes a follower; returns False if the request was none."""
        others = self._followers.get(wanted, [])
        waited = any(other is each for other in others)
        if waited:
            remaining = [other for other in others if other is not each]
            self._followers.pop(wanted)
            if remaining:
                self._followers[wanted] = remaining
        return waited

    def remove(self, wanted: bytes, each: RecognitionRequest, take_over: Callable[[RecognitionRequest], None]) -> None:
        """Removes a request. If it was the leader, its most urgent follower becomes the leader, and is passed to
        `take_over`."""
        if self._leaders.get(wanted) is not each:
            self.remove_follower(wanted, each)
            return
        followers = self.complete(wanted)
        if followers:
            self._leaders[wanted] = followers[0]
            if followers[1:]:
                self._followers[wanted] = followers[1:]
            take_over(followers[0])


class PendingFetch(NamedTuple):
    """Request whose frames are being fetched from the tiered store. `due_s`: when they are late, on the clock."""

    utterance: RecognitionRequest
    due_s: float


class RequestCoalescer:
    """Prevents computing anything twice: a request whose answer is cached is finished at once, one that needs the
    same answer as a request under way waits for that, and one whose audio is about to be encoded waits for its
    frames. If a leader leaves, the next one takes its place; a request with less time than its leader goes before
    it.

    Belongs to the loop's thread. Requests without digests (engine/cache/digest) share nothing.
    """

    def __init__(
        self,
        cache: EncoderCache | None,
        plan: Callable[[RecognitionRequest, RecognitionRequest], None],
        unplan: Callable[[RecognitionRequest], bool],
        start: Callable[[list[int]], None],
        finish: Callable[[RecognitionRequest, Recognition], None],
        room: Callable[[], int],
        call: Callable[[Callable[[], None]], None],
        now: Callable[[], float],
    ) -> None:
        """`cache`: None if requests have no digests. `plan`: queues the first request to be encoded, as urgent as
        the second; `unplan`: takes it out of the queue, False if it was not there; `start`: ids that depend on
        what is being encoded; `finish`: resolves a request; `room`: number of pages that nobody needs; `call`: has
        the loop call a function, from any thread; `now`: the clock, in seconds."""
        self.cache = cache
        self._enqueue, self._dequeue, self._start, self._finish = plan, unplan, start, finish
        self._free_pages, self._call, self._now = room, call, now
        self._answers, self._frames = CoalescingGroups(), CoalescingGroups()
        self._abandoned: dict[int, RecognitionRequest] = {}
        """Requests that left while they were encoded: others need the result."""
        self._fetching: dict[int, PendingFetch] = {}
        """Requests whose frames are fetched from the tiered store, the first that will be late first."""

    @property
    def waiting(self) -> int:
        """Number of requests that wait for others or for fetched frames."""
        return len(self._answers) + len(self._frames) + len(self._fetching)

    def check(self, *, idle: bool) -> None:
        """Asserts that nothing waits when `idle`: no request is left."""
        if idle:
            under_way = self._answers.leaders, self._frames.leaders
            assert (self.waiting, *under_way, len(self._abandoned)) == (0, 0, 0, 0), "somebody waits for nobody"

    @property
    def check_cost(self) -> int:
        """Cost of `check_cache` in pages of a pool; a node, which has one page at least, costs NODE_CHECK_COST."""
        return 0 if self.cache is None else NODE_CHECK_COST * self.cache.prefix_cache.pages

    def check_cache(self) -> None:
        """Checks the prefix cache."""
        if self.cache is not None:
            self.cache.prefix_cache.check()

    def submit(self, each: RecognitionRequest) -> None:
        if self.cache is None or not each.answer_digest:
            self.schedule(each)
            return
        if (answer := self.cache.answers.get(each.answer_digest)) is not None:
            self._finish(each, answer)
            return
        leader = self._answers.leader(each.answer_digest)
        if leader is not None and not (urgency(each) < urgency(leader) and self._demote_leader(leader)):
            self._answers.add_follower(each.answer_digest, each)
            self._inherit_start(leader, each)
            return
        self._answers.set_leader(each.answer_digest, each)
        self.request_frames(each)

    def request_frames(self, each: RecognitionRequest) -> None:
        """Gets frames for the request: cached, from its leader, fetched, or to be encoded."""
        root = each.encoder_key
        if self.cache is None or not root or root in self.cache.prefix_cache:
            self.schedule(each)
            return
        leader = self._frames.leader(root)
        if leader is not None and not (urgency(each) < urgency(leader) and self._dequeue(leader)):
            self._frames.add_follower(root, each)
            self._inherit_start(leader, each)
            return
        self._frames.set_leader(root, each)
        if self.cache.is_offloaded(root):
            number = each.id  # not the request: a disk that never answers must not hold on to its audio
            self._fetching[number] = PendingFetch(each, self._now() + FETCH_TIMEOUT_S)
            self.cache.fetch_offloaded(root, lambda parts: self._call(lambda: self._on_fetched(number, root, parts)))
        else:
            self.schedule(each)

    def _on_fetched(self, number: int, root: bytes, parts: list[memoryview] | None) -> None:
        """Caches fetched frames; None: they are lost. Schedules the request, unless it has left, or was scheduled
        when they were late."""
        assert self.cache is not None
        self.cache.insert_fetched(root, parts, self._free_pages())
        if (fetch := self._fetching.pop(number, None)) is not None:
            self.schedule(fetch.utterance)
            if root in self.cache.prefix_cache:
                self._release_followers(fetch.utterance)

    @property
    def due_s(self) -> float | None:
        """Time at which the next fetched frames are late; None: none are being fetched."""
        return next((fetch.due_s for fetch in self._fetching.values()), None)

    def schedule_overdue(self) -> None:
        """Schedules requests whose fetched frames are late."""
        while (due_s := self.due_s) is not None and due_s <= self._now():
            self.schedule(self._fetching.pop(next(iter(self._fetching))).utterance)

    def schedule(self, each: RecognitionRequest) -> None:
        """Queues the request to be encoded, as urgent as the most urgent that waits for it."""
        self._enqueue(each, min((each, *self._dependents(each)), key=urgency))

    def requeue(self, each: RecognitionRequest) -> None:
        """Moves a request whose time became shorter, or the one that it waits for, to its place in the queue. One that
        is being encoded, or was, is in none."""
        candidates = [each]
        if self.cache is not None and each.answer_digest:
            first = self._answers.leader(each.answer_digest) or each
            candidates += [first, self._frames.leader(each.encoder_key) or first]
        if (queued := next(filter(self._dequeue, candidates), None)) is not None:
            self.schedule(queued)

    def _dependents(self, each: RecognitionRequest) -> list[RecognitionRequest]:
        """Requests that wait for its result: its answer, or its frames and then answers of their own."""
        frame_followers = self._frames.followers(each.encoder_key, each)
        return [
            *frame_followers,
            *(
                other
                for request in (each, *frame_followers)
                for other in self._answers.followers(request.answer_digest, request)
            ),
        ]

    def started(self, batch: Sequence[RecognitionRequest]) -> None:
        """Reports requests that wait for a batch as started with it: should it end the process, all of them did,
        rather than each once more in its turn."""
        if self.cache is not None and (ids := [other.id for each in batch for other in self._dependents(each)]):
            self._start(ids)

    def _inherit_start(self, first: RecognitionRequest, each: RecognitionRequest) -> None:
        """Reports a new follower as started, if its leader is being encoded, or follows one that is."""
        frame_leader = self._frames.leader(first.encoder_key)
        if first.encode_start_ns or (frame_leader is not None and frame_leader.encode_start_ns):
            self._start([request.id for request in (each, *self._dependents(each))])

    def _demote_leader(self, first: RecognitionRequest) -> bool:
        """Makes a leader that is not yet encoded free to follow another; returns False if it is being encoded."""
        if self._frames.remove_follower(first.encoder_key, first):
            return True
        if not self._dequeue(first):
            return False
        self._frames.remove(first.encoder_key, first, self.schedule)
        return True

    # --- frames -------------------------------------------------------------------------------------------

    def cached_frames(self, each: RecognitionRequest) -> OwnedPages | None:
        """Returns cached frames, with references for the request's row to free; its followers go on."""
        if self.cache is None or not each.encoder_key or (pages := self.cache.lookup_audio(each.encoder_key)) is None:
            return None
        self._release_followers(each)
        return pages

    def publish_frames(self, each: RecognitionRequest, row: DecodeRow) -> None:
        """Caches the frames in the row's pages, if there is room, and releases followers."""
        if self.cache is not None and each.encoder_key:
            self.cache.store_row_audio(row)
            self._release_followers(each)

    def adopt_abandoned(self, number: int, result: EncoderResult | None) -> None:
        """Caches the result of a request that left while it was encoded; None: encoding failed."""
        if self.cache is None or (each := self._abandoned.pop(number, None)) is None:
            return
        if result is None:
            self._frames.remove(each.encoder_key, each, self.schedule)
            return
        try:
            self.cache.store_encoder_result(each.encoder_key, result)
        finally:
            self._release_followers(each)

    def _release_followers(self, each: RecognitionRequest) -> None:
        """Schedules all that waited for the request's frames: with these, or where they could not be cached, to
        encode their own."""
        if self._frames.leader(each.encoder_key) is each:
            for other in self._frames.complete(each.encoder_key):
                self.schedule(other)

    # --- endings ------------------------------------------------------------------------------------------

    def publish_answer(self, each: RecognitionRequest, answer: Recognition) -> None:
        if self.cache is None or not each.answer_digest:
            return
        self.cache.store_answer(each.answer_digest, answer)
        if self._answers.leader(each.answer_digest) is each:
            for other in self._answers.complete(each.answer_digest):
                self._finish(other, answer)

    def remove(self, each: RecognitionRequest, encoding: bool) -> bool:
        """Removes a request without an answer, which is no longer queued. `encoding`: it is being encoded. Returns
        whether others need the result."""
        if self.cache is None or not each.answer_digest:
            return False
        self._fetching.pop(each.id, None)
        wanted = encoding and self._frames.leader(each.encoder_key) is each and bool(self._dependents(each))
        if wanted:
            self._abandoned[each.id] = each
        else:
            self._frames.remove(each.encoder_key, each, self.schedule)
        self._answers.remove(each.answer_digest, each, self.request_frames)
        return wanted
