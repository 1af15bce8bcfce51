"""Who waits for whom: requests that want the same, of which one is on its way. Pure: no tensors, and
whose clock it is it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from asr_serve.decoding.attention import Recognition
from asr_serve.engine.session import Utterance
from asr_serve.engine.utterances.planner import DEADLINE_MS

if TYPE_CHECKING:
    from asr_serve.engine.utterances.encode import EncoderResult, Held
    from asr_serve.engine.utterances.kept import Kept
    from asr_serve.engine.utterances.rows import Row

CLASSES = list(DEADLINE_MS)
NODE = 6
LATE_S = 0.25
"""Frames that a disk has not brought in this time are made anew: it may never bring them. A disk that works needs
less than a tenth of that, and to encode takes longer."""


def urgency(each: Utterance) -> tuple[int, float]:
    """Less is sooner: the planner's order."""
    within_ms = DEADLINE_MS[each.priority] if each.within_ms is None else each.within_ms
    return CLASSES.index(each.priority), each.arrived_s * 1_000 + within_ms


class Flights:
    """By what they want: the one that is on its way, and those that wait for what it brings."""

    def __init__(self) -> None:
        self._first: dict[bytes, Utterance] = {}
        self._others: dict[bytes, list[Utterance]] = {}

    def __len__(self) -> int:
        """Those that wait."""
        return sum(map(len, self._others.values()))

    @property
    def under_way(self) -> int:
        return len(self._first)

    def first(self, wanted: bytes) -> Utterance | None:
        """Whoever is on its way for that."""
        return self._first.get(wanted)

    def lead(self, wanted: bytes, each: Utterance) -> None:
        """It is on its way from here on; whoever was waits with the others."""
        if (before := self._first.get(wanted)) is not None:
            self.follow(wanted, before)
        self._first[wanted] = each

    def follow(self, wanted: bytes, each: Utterance) -> None:
        assert wanted in self._first, "it would wait for nobody"
        self._others.setdefault(wanted, []).append(each)

    def land(self, wanted: bytes) -> list[Utterance]:
        """It is there, or will never be: whoever waited for it, the most urgent first."""
        del self._first[wanted]
        return sorted(self._others.pop(wanted, []), key=urgency)

    def behind(self, wanted: bytes, each: Utterance) -> list[Utterance]:
        """Those that wait for what it brings."""
        return self._others.get(wanted, []) if self._first.get(wanted) is each else []

    def desert(self, wanted: bytes, each: Utterance) -> bool:
        """It waits no more; False where it did not wait."""
        others = self._others.get(wanted, [])
        waited = any(other is each for other in others)
        if waited:
            left = [other for other in others if other is not each]
            self._others.pop(wanted)
            if left:
                self._others[wanted] = left
        return waited

    def leave(self, wanted: bytes, each: Utterance, take_over: Callable[[Utterance], None]) -> None:
        """It wants nothing any more. Where it was on its way, the most urgent of the others goes in its place."""
        if self._first.get(wanted) is not each:
            self.desert(wanted, each)
            return
        others = self.land(wanted)
        if others:
            self._first[wanted] = others[0]
            if others[1:]:
                self._others[wanted] = others[1:]
            take_over(others[0])


class Coming(NamedTuple):
    """Its frames are on their way from the tiers. `due_s`: when they are late, on the clock."""

    utterance: Utterance
    due_s: float


class Sharing:
    """Nothing is computed twice: who asks what was answered has the answer at once, who asks what somebody else
    asks just now waits for that, and who brings audio that is about to be encoded waits for its frames. Whoever
    goes first and leaves is followed by the next; whoever has less time than the first goes before it.

    Belongs to the loop's thread. Requests without a name (engine/prefix/names) share nothing.
    """

    def __init__(
        self,
        kept: Kept | None,
        plan: Callable[[Utterance, Utterance], None],
        unplan: Callable[[Utterance], bool],
        start: Callable[[list[int]], None],
        finish: Callable[[Utterance, Recognition], None],
        room: Callable[[], int],
        call: Callable[[Callable[[], None]], None],
        now: Callable[[], float],
    ) -> None:
        """`kept`: None where requests have no names. `plan`: it waits for its turn to be encoded, as soon as the
        second; `unplan`: it does so no more, False where it did not; `start`: these depend on what is worked on;
        `finish`: it has its answer; `room`: pages that nobody needs; `call`: have the loop do something, from any
        thread; `now`: the clock, in seconds."""
        self.kept = kept
        self._plan, self._unplan, self._start, self._finish = plan, unplan, start, finish
        self._room, self._call, self._now = room, call, now
        self._answers, self._audio = Flights(), Flights()
        self._abandoned: dict[int, Utterance] = {}
        """Those that left while they were encoded: what comes of it is for others."""
        self._coming: dict[int, Coming] = {}
        """Those whose frames lie in the tiers, and are on their way from there: who is late first comes first."""

    @property
    def waiting(self) -> int:
        """Requests that wait for others."""
        return len(self._answers) + len(self._audio) + len(self._coming)

    def check(self, *, idle: bool) -> None:
        """`idle`: no request is left."""
        if idle:
            under_way = self._answers.under_way, self._audio.under_way
            assert (self.waiting, *under_way, len(self._abandoned)) == (0, 0, 0, 0), "somebody waits for nobody"

    @property
    def things(self) -> int:
        """That there are to look through, in pages: a node, which has one at least, takes as long as NODE."""
        return 0 if self.kept is None else NODE * self.kept.tree.pages

    def look_through(self) -> None:
        """All that is kept."""
        if self.kept is not None:
            self.kept.tree.check()

    def enter(self, each: Utterance) -> None:
        if self.kept is None or not each.wanted:
            self.plan(each)
            return
        if (answer := self.kept.answers.get(each.wanted)) is not None:
            self._finish(each, answer)
            return
        first = self._answers.first(each.wanted)
        if first is not None and not (urgency(each) < urgency(first) and self._call_back(first)):
            self._answers.follow(each.wanted, each)
            self._after(first, each)
            return
        self._answers.lead(each.wanted, each)
        self.seek(each)

    def seek(self, each: Utterance) -> None:
        """For its frames: they are kept, under way, or to be made."""
        root = each.root
        if self.kept is None or not root or root in self.kept.tree:
            self.plan(each)
            return
        first = self._audio.first(root)
        if first is not None and not (urgency(each) < urgency(first) and self._unplan(first)):
            self._audio.follow(root, each)
            self._after(first, each)
            return
        self._audio.lead(root, each)
        if self.kept.below(root):
            number = each.id  # a disk that never answers must not hold on to its audio
            self._coming[number] = Coming(each, self._now() + LATE_S)
            self.kept.fetch(root, lambda parts: self._call(lambda: self._came(number, root, parts)))
        else:
            self.plan(each)

    def _came(self, number: int, root: bytes, parts: list[memoryview] | None) -> None:
        """From the tiers, or lost; whoever wanted it may have left, or been planned since it was late."""
        assert self.kept is not None
        self.kept.restore(root, parts, self._room())
        if (coming := self._coming.pop(number, None)) is not None:
            self.plan(coming.utterance)
            if root in self.kept.tree:
                self._arrived(coming.utterance)

    @property
    def due_s(self) -> float | None:
        """When the next of those that wait for the tiers is late; None: nobody waits for them."""
        return next((coming.due_s for coming in self._coming.values()), None)

    def overdue(self) -> None:
        """Whoever has waited too long for the tiers waits for its turn to be encoded."""
        while (due_s := self.due_s) is not None and due_s <= self._now():
            self.plan(self._coming.pop(next(iter(self._coming))).utterance)

    def plan(self, each: Utterance) -> None:
        """It waits for its turn, and is as urgent as whoever waits for it."""
        self._plan(each, min((each, *self._behind(each)), key=urgency))

    def _behind(self, each: Utterance) -> list[Utterance]:
        """Those that wait for what it brings: its answer, or its frames and then an answer of their own."""
        heard = self._audio.behind(each.root, each)
        return [*heard, *(other for one in (each, *heard) for other in self._answers.behind(one.wanted, one))]

    def started(self, batch: Sequence[Utterance]) -> None:
        """These are worked on, and with them whatever waits for them: should they end the process, all of these
        did, and not each once more when its turn has come."""
        if self.kept is not None and (ids := [other.id for each in batch for other in self._behind(each)]):
            self._start(ids)

    def _after(self, first: Utterance, each: Utterance) -> None:
        """It waits for that one, which may be worked on, or wait for one that is."""
        heard = self._audio.first(first.root)
        if first.encode_start_ns or (heard is not None and heard.encode_start_ns):
            self._start([one.id for one in (each, *self._behind(each))])

    def _call_back(self, first: Utterance) -> bool:
        """It waits, and may as well wait for somebody else; False where it is worked on."""
        if self._audio.desert(first.root, first):
            return True
        if not self._unplan(first):
            return False
        self._audio.leave(first.root, first, self.plan)
        return True

    # --- frames -------------------------------------------------------------------------------------------

    def frames(self, each: Utterance) -> Held | None:
        """Those that are kept, for its row to give back. Whoever waited for them goes on."""
        if self.kept is None or not each.root or (held := self.kept.audio(each.root)) is None:
            return None
        self._arrived(each)
        return held

    def encoded(self, each: Utterance, row: Row) -> None:
        """Its frames are in the row's pages, which are kept if there is room."""
        if self.kept is not None and each.root:
            self.kept.heard(row)
            self._arrived(each)

    def adopt(self, number: int, result: EncoderResult | None) -> None:
        """What became of one that left meanwhile; None: nothing did."""
        if self.kept is None or (each := self._abandoned.pop(number, None)) is None:
            return
        if result is None:
            self._audio.leave(each.root, each, self.plan)
            return
        try:
            self.kept.encoded(each.root, result)
        finally:
            self._arrived(each)

    def _arrived(self, each: Utterance) -> None:
        """Whoever waited for these frames goes on: with them, or where they could not be kept, all of them by
        themselves at once."""
        if self._audio.first(each.root) is each:
            for other in self._audio.land(each.root):
                self.plan(other)

    # --- endings ------------------------------------------------------------------------------------------

    def answered(self, each: Utterance, answer: Recognition) -> None:
        if self.kept is None or not each.wanted:
            return
        self.kept.answered(each.wanted, answer)
        if self._answers.first(each.wanted) is each:
            for other in self._answers.land(each.wanted):
                self._finish(other, answer)

    def leave(self, each: Utterance, encoding: bool) -> bool:
        """Without an answer, and planned no more. `encoding`: it is under way. Whether others want what comes of
        that."""
        if self.kept is None or not each.wanted:
            return False
        self._coming.pop(each.id, None)
        wanted = encoding and self._audio.first(each.root) is each and bool(self._behind(each))
        if wanted:
            self._abandoned[each.id] = each
        else:
            self._audio.leave(each.root, each, self.plan)
        self._answers.leave(each.wanted, each, self.seek)
        return wanted
