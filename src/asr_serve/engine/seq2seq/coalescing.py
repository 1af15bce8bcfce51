"""Coalescing of requests that need the same answer or the same encoder frames: one of them is computed. Pure: no
tensors, and the clock is passed in."""

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
"""Cost of checking a node of the prefix tree, in pages of a pool."""
FETCH_TIMEOUT_S = 0.25
"""Time after which frames that the disk has not delivered are encoded: a stalled disk may never deliver them. A
working one needs less than a tenth of that, which is less than encoding takes."""


def urgency(request: RecognitionRequest) -> tuple[int, float]:
    """Sort key in the scheduler's order; less is sooner."""
    within_ms = DEADLINE_MS[request.priority] if request.within_ms is None else request.within_ms
    return PRIORITY_ORDER.index(request.priority), request.arrived_s * 1_000 + within_ms


class CoalescingGroups:
    """Groups of requests by the digest of what they need: a leader, which is under way, and followers that wait."""

    def __init__(self) -> None:
        self._leaders: dict[bytes, RecognitionRequest] = {}
        self._followers: dict[bytes, list[RecognitionRequest]] = {}

    def __len__(self) -> int:
        """Number of followers."""
        return sum(map(len, self._followers.values()))

    @property
    def leaders(self) -> int:
        return len(self._leaders)

    def leader(self, digest: bytes) -> RecognitionRequest | None:
        """Returns the request that is under way; None: there is none."""
        return self._leaders.get(digest)

    def set_leader(self, digest: bytes, request: RecognitionRequest) -> None:
        """Makes the request the leader; a former leader becomes a follower."""
        if (former := self._leaders.get(digest)) is not None:
            self.add_follower(digest, former)
        self._leaders[digest] = request

    def add_follower(self, digest: bytes, request: RecognitionRequest) -> None:
        assert digest in self._leaders, "a follower needs a leader"
        self._followers.setdefault(digest, []).append(request)

    def complete(self, digest: bytes) -> list[RecognitionRequest]:
        """Ends a group whose leader succeeded or failed; returns its followers, the most urgent first."""
        del self._leaders[digest]
        return sorted(self._followers.pop(digest, []), key=urgency)

    def followers(self, digest: bytes, request: RecognitionRequest) -> list[RecognitionRequest]:
        """Returns the followers of the request, if it is a leader."""
        return self._followers.get(digest, []) if self._leaders.get(digest) is request else []

    def remove_follower(self, digest: bytes, request: RecognitionRequest) -> bool:
        """Removes a follower; returns False if the request was none."""
        others = self._followers.get(digest, [])
        waited = any(other is request for other in others)
        if waited:
            remaining = [other for other in others if other is not request]
            self._followers.pop(digest)
            if remaining:
                self._followers[digest] = remaining
        return waited

    def remove(
        self, digest: bytes, request: RecognitionRequest, take_over: Callable[[RecognitionRequest], None]
    ) -> None:
        """Removes a request. If it was the leader, its most urgent follower becomes the leader, and is passed to
        `take_over`."""
        if self._leaders.get(digest) is not request:
            self.remove_follower(digest, request)
            return
        followers = self.complete(digest)
        if followers:
            self._leaders[digest] = followers[0]
            if followers[1:]:
                self._followers[digest] = followers[1:]
            take_over(followers[0])


class PendingFetch(NamedTuple):
    """Request whose frames are being fetched from the tiered store. `due_s`: when they are late, on the clock."""

    utterance: RecognitionRequest
    due_s: float


class RequestCoalescer:
    """Coalescer of requests, so that nothing is computed twice.

    A request whose answer is cached is finished at once; one that needs the same answer as a request under way waits
    for it; and one whose audio is about to be encoded for another waits for the frames. If a leader leaves, its most
    urgent follower takes its place; a request that is more urgent than a waiting leader becomes the leader.

    Belongs to the loop's thread. Requests without digests (engine/cache/digest) share nothing.
    """

    def __init__(
        self,
        cache: EncoderCache | None,
        enqueue: Callable[[RecognitionRequest, RecognitionRequest], None],
        dequeue: Callable[[RecognitionRequest], bool],
        start: Callable[[list[int]], None],
        finish: Callable[[RecognitionRequest, Recognition], None],
        free_pages: Callable[[], int],
        call: Callable[[Callable[[], None]], None],
        now: Callable[[], float],
    ) -> None:
        """`cache`: None if requests have no digests. `enqueue`: queues the first request to be encoded, as urgent as
        the second; `dequeue`: takes it out of the queue, False if it was not there; `start`: called with ids that
        depend on what is being encoded; `finish`: resolves a request; `free_pages`: number of pages that no request
        needs; `call`: LoopContext.call; `now`: the clock, in seconds."""
        self.cache = cache
        self._enqueue, self._dequeue, self._start, self._finish = enqueue, dequeue, start, finish
        self._free_pages, self._call, self._now = free_pages, call, now
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
            assert (self.waiting, *under_way, len(self._abandoned)) == (0, 0, 0, 0), (
                "an engine without requests has some that wait for others"
            )

    @property
    def check_cost(self) -> int:
        """Cost of `check_cache` in pages of a pool; a node, which has one page at least, costs NODE_CHECK_COST."""
        return 0 if self.cache is None else NODE_CHECK_COST * self.cache.prefix_cache.pages

    def check_cache(self) -> None:
        """Checks the prefix cache."""
        if self.cache is not None:
            self.cache.prefix_cache.check()

    def submit(self, request: RecognitionRequest) -> None:
        if self.cache is None or not request.answer_digest:
            self.schedule(request)
            return
        if (answer := self.cache.answers.get(request.answer_digest)) is not None:
            self._finish(request, answer)
            return
        leader = self._answers.leader(request.answer_digest)
        if leader is not None and not (urgency(request) < urgency(leader) and self._demote_leader(leader)):
            self._answers.add_follower(request.answer_digest, request)
            self._inherit_start(leader, request)
            return
        self._answers.set_leader(request.answer_digest, request)
        self.request_frames(request)

    def request_frames(self, request: RecognitionRequest) -> None:
        """Gets frames for the request: cached, from its leader, fetched, or to be encoded."""
        root = request.encoder_key
        if self.cache is None or not root or root in self.cache.prefix_cache:
            self.schedule(request)
            return
        leader = self._frames.leader(root)
        if leader is not None and not (urgency(request) < urgency(leader) and self._dequeue(leader)):
            self._frames.add_follower(root, request)
            self._inherit_start(leader, request)
            return
        self._frames.set_leader(root, request)
        if self.cache.is_offloaded(root):
            request_id = request.id  # not the request: a disk that never answers must not hold on to its audio
            self._fetching[request_id] = PendingFetch(request, self._now() + FETCH_TIMEOUT_S)
            self.cache.fetch_offloaded(
                root, lambda parts: self._call(lambda: self._on_fetched(request_id, root, parts))
            )
        else:
            self.schedule(request)

    def _on_fetched(self, request_id: int, root: bytes, parts: list[memoryview] | None) -> None:
        """Caches fetched frames; None: they are lost. Schedules the request, unless it has left, or was scheduled
        when they were late."""
        assert self.cache is not None
        self.cache.insert_fetched(root, parts, self._free_pages())
        if (fetch := self._fetching.pop(request_id, None)) is not None:
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

    def schedule(self, request: RecognitionRequest) -> None:
        """Queues the request to be encoded, as urgent as the most urgent that waits for it."""
        self._enqueue(request, min((request, *self._dependents(request)), key=urgency))

    def requeue(self, request: RecognitionRequest) -> None:
        """Moves a request that became more urgent, or the one that it waits for, to its new place in the queue, if it
        is still there."""
        candidates = [request]
        if self.cache is not None and request.answer_digest:
            first = self._answers.leader(request.answer_digest) or request
            candidates += [first, self._frames.leader(request.encoder_key) or first]
        if (queued := next(filter(self._dequeue, candidates), None)) is not None:
            self.schedule(queued)

    def _dependents(self, request: RecognitionRequest) -> list[RecognitionRequest]:
        """Requests that wait for its result: its answer, or its frames and then answers of their own."""
        frame_followers = self._frames.followers(request.encoder_key, request)
        return [
            *frame_followers,
            *(
                other
                for leader in (request, *frame_followers)
                for other in self._answers.followers(leader.answer_digest, leader)
            ),
        ]

    def started(self, batch: Sequence[RecognitionRequest]) -> None:
        """Reports requests that wait for a batch as started with it: if it kills the process, that counts for all of
        them, and each does not kill another one in its turn."""
        if self.cache is not None and (ids := [other.id for request in batch for other in self._dependents(request)]):
            self._start(ids)

    def _inherit_start(self, leader: RecognitionRequest, request: RecognitionRequest) -> None:
        """Reports a new follower as started, if its leader is being encoded, or follows one that is."""
        frame_leader = self._frames.leader(leader.encoder_key)
        if leader.encode_start_ns or (frame_leader is not None and frame_leader.encode_start_ns):
            self._start([other.id for other in (request, *self._dependents(request))])

    def _demote_leader(self, leader: RecognitionRequest) -> bool:
        """Stops work on a leader, so that it can follow another request; returns False if it is being encoded."""
        if self._frames.remove_follower(leader.encoder_key, leader):
            return True
        if not self._dequeue(leader):
            return False
        self._frames.remove(leader.encoder_key, leader, self.schedule)
        return True

    # --- frames -------------------------------------------------------------------------------------------

    def cached_frames(self, request: RecognitionRequest) -> OwnedPages | None:
        """Returns cached frames, with references for the request's row to free, and releases followers."""
        if (
            self.cache is None
            or not request.encoder_key
            or (pages := self.cache.lookup_audio(request.encoder_key)) is None
        ):
            return None
        self._release_followers(request)
        return pages

    def publish_frames(self, request: RecognitionRequest, row: DecodeRow) -> None:
        """Caches the frames in the row's pages, if there is room, and releases followers."""
        if self.cache is not None and request.encoder_key:
            self.cache.store_row_audio(row)
            self._release_followers(request)

    def adopt_abandoned(self, request_id: int, result: EncoderResult | None) -> None:
        """Caches the result of a request that left while it was encoded; None: encoding failed."""
        if self.cache is None or (request := self._abandoned.pop(request_id, None)) is None:
            return
        if result is None:
            self._frames.remove(request.encoder_key, request, self.schedule)
            return
        try:
            self.cache.store_encoder_result(request.encoder_key, result)
        finally:
            self._release_followers(request)

    def _release_followers(self, request: RecognitionRequest) -> None:
        """Schedules the requests that waited for these frames. They find them in the cache, or where there was no room,
        are encoded themselves."""
        if self._frames.leader(request.encoder_key) is request:
            for other in self._frames.complete(request.encoder_key):
                self.schedule(other)

    # --- endings ------------------------------------------------------------------------------------------

    def publish_answer(self, request: RecognitionRequest, answer: Recognition) -> None:
        if self.cache is None or not request.answer_digest:
            return
        self.cache.store_answer(request.answer_digest, answer)
        if self._answers.leader(request.answer_digest) is request:
            for other in self._answers.complete(request.answer_digest):
                self._finish(other, answer)

    def remove(self, request: RecognitionRequest, encoding: bool) -> bool:
        """Removes a request without an answer, which is no longer queued. `encoding`: it is being encoded. Returns
        whether others need the result."""
        if self.cache is None or not request.answer_digest:
            return False
        self._fetching.pop(request.id, None)
        leads = self._frames.leader(request.encoder_key) is request
        needed = encoding and leads and bool(self._dependents(request))
        if needed:
            self._abandoned[request.id] = request
        else:
            self._frames.remove(request.encoder_key, request, self.schedule)
        self._answers.remove(request.answer_digest, request, self.request_frames)
        return needed
