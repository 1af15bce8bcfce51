"""Who waits for whom: requests that want the same, of which one is on its way. Pure: no tensors, and
whose clock it is it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from asr_serve.decoding.seq2seq import Recognition
from asr_serve.engine.request import RecognitionRequest
from asr_serve.engine.seq2seq.scheduler import DEADLINE_MS

if TYPE_CHECKING:
    from asr_serve.engine.seq2seq.decode_batch import DecodeRow
    from asr_serve.engine.seq2seq.encoder import EncoderResult, OwnedPages
    from asr_serve.engine.seq2seq.encoder_cache import EncoderCache

PRIORITY_ORDER = list(DEADLINE_MS)
NODE_CHECK_COST = 6
FETCH_TIMEOUT_S = 0.25
"""Frames that a disk has not brought in this time are made anew: it may never bring them. A disk that works needs
less than a tenth of that, and to encode takes longer."""


def urgency(each: RecognitionRequest) -> tuple[int, float]:
    """Less is sooner: the planner's order."""
    within_ms = DEADLINE_MS[each.priority] if each.within_ms is None else each.within_ms
    return PRIORITY_ORDER.index(each.priority), each.arrived_s * 1_000 + within_ms


class CoalescingGroups:
    """By what they want: the one that is on its way, and those that wait for what it brings."""

    def __init__(self) -> None:
        self._leaders: dict[bytes, RecognitionRequest] = {}
        self._followers: dict[bytes, list[RecognitionRequest]] = {}

    def __len__(self) -> int:
        """Those that wait."""
        return sum(map(len, self._followers.values()))

    @property
    def leaders(self) -> int:
        return len(self._leaders)

    def leader(self, wanted: bytes) -> RecognitionRequest | None:
        """Whoever is on its way for that."""
        return self._leaders.get(wanted)

    def set_leader(self, wanted: bytes, each: RecognitionRequest) -> None:
        """It is on its way from here on; whoever was waits with the others."""
        if (before := self._leaders.get(wanted)) is not None:
            self.add_follower(wanted, before)
        self._leaders[wanted] = each

    def add_follower(self, wanted: bytes, each: RecognitionRequest) -> None:
        assert wanted in self._leaders, "it would wait for nobody"
        self._followers.setdefault(wanted, []).append(each)

    def complete(self, wanted: bytes) -> list[RecognitionRequest]:
        """It is there, or will never be: whoever waited for it, the most urgent first."""
        del self._leaders[wanted]
        return sorted(self._followers.pop(wanted, []), key=urgency)

    def followers(self, wanted: bytes, each: RecognitionRequest) -> list[RecognitionRequest]:
        """Those that wait for what it brings."""
        return self._followers.get(wanted, []) if self._leaders.get(wanted) is each else []

    def remove_follower(self, wanted: bytes, each: RecognitionRequest) -> bool:
        """It waits no more; False where it did not wait."""
        others = self._followers.get(wanted, [])
        waited = any(other is each for other in others)
        if waited:
            left = [other for other in others if other is not each]
            self._followers.pop(wanted)
            if left:
                self._followers[wanted] = left
        return waited

    def remove(
        self, wanted: bytes, each: RecognitionRequest, take_over: Callable[[RecognitionRequest], None]
    ) -> None:
        """It wants nothing any more. Where it was on its way, the most urgent of the others goes in its place."""
        if self._leaders.get(wanted) is not each:
            self.remove_follower(wanted, each)
            return
        others = self.complete(wanted)
        if others:
            self._leaders[wanted] = others[0]
            if others[1:]:
                self._followers[wanted] = others[1:]
            take_over(others[0])


class PendingFetch(NamedTuple):
    """Its frames are on their way from the tiers. `due_s`: when they are late, on the clock."""

    utterance: RecognitionRequest
    due_s: float


class RequestCoalescer:
    """Nothing is computed twice: who asks what was answered has the answer at once, who asks what somebody else
    asks just now waits for that, and who brings audio that is about to be encoded waits for its frames. Whoever
    goes first and leaves is followed by the next; whoever has less time than the first goes before it.

    Belongs to the loop's thread. Requests without a name (engine/cache/digest) share nothing.
    """

    def __init__(
        self,
        kept: EncoderCache | None,
        plan: Callable[[RecognitionRequest, RecognitionRequest], None],
        unplan: Callable[[RecognitionRequest], bool],
        start: Callable[[list[int]], None],
        finish: Callable[[RecognitionRequest, Recognition], None],
        room: Callable[[], int],
        call: Callable[[Callable[[], None]], None],
        now: Callable[[], float],
    ) -> None:
        """`kept`: None where requests have no names. `plan`: it waits for its turn to be encoded, as soon as the
        second; `unplan`: it does so no more, False where it did not; `start`: these depend on what is worked on;
        `finish`: it has its answer; `room`: pages that nobody needs; `call`: have the loop do something, from any
        thread; `now`: the clock, in seconds."""
        self.cache = kept
        self._enqueue, self._dequeue, self._start, self._finish = plan, unplan, start, finish
        self._free_pages, self._call, self._now = room, call, now
        self._answers, self._frames = CoalescingGroups(), CoalescingGroups()
        self._abandoned: dict[int, RecognitionRequest] = {}
        """Those that left while they were encoded: what comes of it is for others."""
        self._fetching: dict[int, PendingFetch] = {}
        """Those whose frames lie in the tiers, and are on their way from there: who is late first comes first."""

    @property
    def waiting(self) -> int:
        """Requests that wait for others."""
        return len(self._answers) + len(self._frames) + len(self._fetching)

    def check(self, *, idle: bool) -> None:
        """`idle`: no request is left."""
        if idle:
            under_way = self._answers.leaders, self._frames.leaders
            assert (self.waiting, *under_way, len(self._abandoned)) == (0, 0, 0, 0), "somebody waits for nobody"

    @property
    def check_cost(self) -> int:
        """That there are to look through, in pages: a node, which has one at least, takes as long as NODE."""
        return 0 if self.cache is None else NODE_CHECK_COST * self.cache.prefix_cache.pages

    def check_cache(self) -> None:
        """All that is kept."""
        if self.cache is not None:
            self.cache.prefix_cache.check()

    def submit(self, each: RecognitionRequest) -> None:
        if self.cache is None or not each.answer_digest:
            self.schedule(each)
            return
        if (answer := self.cache.answers.get(each.answer_digest)) is not None:
            self._finish(each, answer)
            return
        first = self._answers.leader(each.answer_digest)
        if first is not None and not (urgency(each) < urgency(first) and self._demote_leader(first)):
            self._answers.add_follower(each.answer_digest, each)
            self._inherit_start(first, each)
            return
        self._answers.set_leader(each.answer_digest, each)
        self.request_frames(each)

    def request_frames(self, each: RecognitionRequest) -> None:
        """For its frames: they are kept, under way, or to be made."""
        root = each.encoder_key
        if self.cache is None or not root or root in self.cache.prefix_cache:
            self.schedule(each)
            return
        first = self._frames.leader(root)
        if first is not None and not (urgency(each) < urgency(first) and self._dequeue(first)):
            self._frames.add_follower(root, each)
            self._inherit_start(first, each)
            return
        self._frames.set_leader(root, each)
        if self.cache.is_offloaded(root):
            number = each.id  # a disk that never answers must not hold on to its audio
            self._fetching[number] = PendingFetch(each, self._now() + FETCH_TIMEOUT_S)
            self.cache.fetch_offloaded(
                root, lambda parts: self._call(lambda: self._on_fetched(number, root, parts))
            )
        else:
            self.schedule(each)

    def _on_fetched(self, number: int, root: bytes, parts: list[memoryview] | None) -> None:
        """From the tiers, or lost; whoever wanted it may have left, or been planned since it was late."""
        assert self.cache is not None
        self.cache.insert_fetched(root, parts, self._free_pages())
        if (coming := self._fetching.pop(number, None)) is not None:
            self.schedule(coming.utterance)
            if root in self.cache.prefix_cache:
                self._release_followers(coming.utterance)

    @property
    def due_s(self) -> float | None:
        """When the next of those that wait for the tiers is late; None: nobody waits for them."""
        return next((coming.due_s for coming in self._fetching.values()), None)

    def schedule_overdue(self) -> None:
        """Whoever has waited too long for the tiers waits for its turn to be encoded."""
        while (due_s := self.due_s) is not None and due_s <= self._now():
            self.schedule(self._fetching.pop(next(iter(self._fetching))).utterance)

    def schedule(self, each: RecognitionRequest) -> None:
        """It waits for its turn, and is as urgent as whoever waits for it."""
        self._enqueue(each, min((each, *self._dependents(each)), key=urgency))

    def _dependents(self, each: RecognitionRequest) -> list[RecognitionRequest]:
        """Those that wait for what it brings: its answer, or its frames and then an answer of their own."""
        heard = self._frames.followers(each.encoder_key, each)
        return [
            *heard,
            *(other for one in (each, *heard) for other in self._answers.followers(one.answer_digest, one)),
        ]

    def started(self, batch: Sequence[RecognitionRequest]) -> None:
        """These are worked on, and with them whatever waits for them: should they end the process, all of these
        did, and not each once more when its turn has come."""
        if self.cache is not None and (ids := [other.id for each in batch for other in self._dependents(each)]):
            self._start(ids)

    def _inherit_start(self, first: RecognitionRequest, each: RecognitionRequest) -> None:
        """It waits for that one, which may be worked on, or wait for one that is."""
        heard = self._frames.leader(first.encoder_key)
        if first.encode_start_ns or (heard is not None and heard.encode_start_ns):
            self._start([one.id for one in (each, *self._dependents(each))])

    def _demote_leader(self, first: RecognitionRequest) -> bool:
        """It waits, and may as well wait for somebody else; False where it is worked on."""
        if self._frames.remove_follower(first.encoder_key, first):
            return True
        if not self._dequeue(first):
            return False
        self._frames.remove(first.encoder_key, first, self.schedule)
        return True

    # --- frames -------------------------------------------------------------------------------------------

    def cached_frames(self, each: RecognitionRequest) -> OwnedPages | None:
        """Those that are kept, for its row to give back. Whoever waited for them goes on."""
        if (
            self.cache is None
            or not each.encoder_key
            or (held := self.cache.lookup_audio(each.encoder_key)) is None
        ):
            return None
        self._release_followers(each)
        return held

    def publish_frames(self, each: RecognitionRequest, row: DecodeRow) -> None:
        """Its frames are in the row's pages, which are kept if there is room."""
        if self.cache is not None and each.encoder_key:
            self.cache.store_row_audio(row)
            self._release_followers(each)

    def adopt_abandoned(self, number: int, result: EncoderResult | None) -> None:
        """What became of one that left meanwhile; None: nothing did."""
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
        """Whoever waited for these frames goes on: with them, or where they could not be kept, all of them by
        themselves at once."""
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
        """Without an answer, and planned no more. `encoding`: it is under way. Whether others want what comes of
        that."""
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
