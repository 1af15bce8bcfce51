"""Scheduler of encoder-decoder models: which requests are encoded next. Pure: no tensors, no clock of its own.

Every request has work that arrived (frames to encode, then tokens to decode) and work done; a schedule closes the
gap: first the priority class furthest below its share, in it the nearest deadline; then the batch is filled with
requests of about that length. Decoding rows run at every step; the schedule decides which requests are encoded, and
so which join them.
"""

from __future__ import annotations

import bisect

import msgspec

from asr_serve.config import EngineConfig
from asr_serve.types import Priority

DEADLINE_MS: dict[Priority, int] = {"live": 100, "interactive": 500, "bulk": 60_000}
"""Time after arrival within which a request should be encoded, unless it sets its own. Only the order of deadlines
matters, within a class; between classes, shares decide."""
LIVE_RESERVE_FRACTION = 4
"""Divisor of decoding rows and pages that gives how many are reserved for live requests while there are live
sessions: a file holds its rows and pages for seconds."""


class ScheduledRequest(msgspec.Struct, frozen=True):
    """Request that is yet to be encoded."""

    id: int
    frames: int
    pages: int
    priority: Priority
    arrived_ms: float
    within_ms: int | None = None
    rows: int = 1
    """Decoding rows: one, or as many as it has beams."""
    urgent: bool = False
    """Whether a caller waits for it now."""

    @property
    def deadline_ms(self) -> float:
        within_ms = DEADLINE_MS[self.priority] if self.within_ms is None else self.within_ms
        return self.arrived_ms + within_ms


class Seq2SeqScheduler:
    """Scheduler of waiting requests into encode batches."""

    def __init__(self, config: EngineConfig, encode_frames: int, *, packed: bool = False) -> None:
        """`packed`: requests of a batch cost their own frames, whatever the length of the others. False: each costs as
        many as the longest."""
        self.config, self.encode_frames, self._packed = config, encode_frames, packed
        self.waiting_frames = 0
        """Frames of all requests that wait."""
        self._queue: dict[int, ScheduledRequest] = {}
        # (frames, id) and (deadline_ms, id), sorted
        self._by_length: dict[Priority, list[tuple[int, int]]] = {p: [] for p in DEADLINE_MS}
        self._by_deadline: dict[Priority, list[tuple[float, int]]] = {p: [] for p in DEADLINE_MS}
        # Frames encoded divided by the share, per class; the class with the least is due. The system's virtual
        # time is that of the class served last. Source: start-time fair queueing, Goyal et al., SIGCOMM 1996.
        self._virtual_time: dict[Priority, float] = dict.fromkeys(DEADLINE_MS, 0.0)
        self._system_virtual_time = 0.0
        self._shares = config.shares

    def __len__(self) -> int:
        return len(self._queue)

    def enqueue(self, request: ScheduledRequest) -> None:
        if not self._by_deadline[request.priority]:
            # A class that was idle does not save up service for later.
            self._virtual_time[request.priority] = max(self._virtual_time[request.priority], self._system_virtual_time)
        self._queue[request.id] = request
        self.waiting_frames += request.frames
        bisect.insort(self._by_length[request.priority], (request.frames, request.id))
        bisect.insort(self._by_deadline[request.priority], (request.deadline_ms, request.id))

    def remove(self, request_id: int) -> bool:
        """Removes a request; returns False if it is not waiting here."""
        request = self._queue.pop(request_id, None)
        if request is None:
            return False
        self.waiting_frames -= request.frames
        for order, key in (
            (self._by_length[request.priority], (request.frames, request.id)),
            (self._by_deadline[request.priority], (request.deadline_ms, request.id)),
        ):
            del order[bisect.bisect_left(order, key)]
        return True

    def schedule(
        self,
        free_rows: int,
        free_pages: int,
        *,
        reserved: tuple[int, int] = (0, 0),
        frames: int | None = None,
        urgent: bool = False,
    ) -> list[int]:
        """Returns ids to encode now, in order of length; they are no longer waiting.

        free_rows, free_pages: decoding rows and pages that nobody holds; reserved: how many of both are reserved for
        live requests; frames: bound of this batch, if lower than the usual one; urgent: of live requests, those that a
        caller waits for, alone. Empty when decoding should go on alone: nothing waits, nothing fits, or too few bulk
        requests would join to be worth it.
        """
        if urgent:
            return self._schedule_urgent(free_rows, free_pages, frames or self.encode_frames)
        room = {
            p: (free_rows, free_pages) if p == "live" else _subtract_reserve(free_rows, free_pages, reserved)
            for p in DEADLINE_MS
        }
        waiting = [p for p, order in self._by_deadline.items() if order and room[p][0] > 0]
        if not waiting or not self._worth_encoding(free_rows):
            return []
        # The nearest deadline of the class that has had less than its share.
        chosen = min(waiting, key=lambda p: self._virtual_time[p])
        head = self._queue[self._by_deadline[chosen][0][1]]
        if not _fits(head, room[chosen]):
            # Wait for it rather than let shorter ones pass it for ever; but live requests do not wait for a file.
            if chosen == "live" or "live" not in waiting:
                return []
            chosen, room = "live", {p: room[p] if p == "live" else (0, 0) for p in DEADLINE_MS}
            head = self._queue[self._by_deadline[chosen][0][1]]
            if not _fits(head, room[chosen]):
                return []
        self._system_virtual_time = self._virtual_time[chosen]
        return self._take(self._fill(head, room, min(frames or self.encode_frames, self.encode_frames)))

    def _schedule_urgent(self, free_rows: int, free_pages: int, most_frames: int) -> list[int]:
        """Returns ids of urgent requests as `schedule` does, nearest deadline first. Padding is ignored."""
        batch: list[ScheduledRequest] = []
        frames = 0
        for _, request_id in self._by_deadline["live"]:
            each = self._queue[request_id]
            if not each.urgent or each.rows > free_rows or each.pages > free_pages:
                continue
            if batch and frames + each.frames > most_frames:
                break
            free_rows, free_pages, frames = free_rows - each.rows, free_pages - each.pages, frames + each.frames
            batch.append(each)
        if batch:  # counts as service, so that classes that are idle now do not save any up
            self._system_virtual_time = max(self._system_virtual_time, self._virtual_time["live"])
        return self._take(batch)

    def _take(self, batch: list[ScheduledRequest]) -> list[int]:
        """Takes a batch out of the queue; returns its ids in order of length."""
        for request in batch:
            self._virtual_time[request.priority] += request.frames / self._shares[request.priority]
            self.remove(request.id)
        return [request.id for request in sorted(batch, key=lambda r: (r.frames, r.id))]

    def _worth_encoding(self, free_rows: int) -> bool:
        rows = self.config.max_decode_rows
        enough = free_rows >= min(len(self._queue), max(1, rows // 4))
        return enough or bool(self._by_deadline["live"] or self._by_deadline["interactive"])

    def _fill(
        self, head: ScheduledRequest, room: dict[Priority, tuple[int, int]], most_frames: int
    ) -> list[ScheduledRequest]:
        """Returns `head` and its neighbours in length, while the batch is within every bound and, unless it is packed,
        stays dense.

        Other classes get only the room that is left: mixing all classes by length would undo the shares.
        """
        batch, rows, pages, frames, longest = [head], head.rows, head.pages, head.frames, head.frames
        for priority in sorted(self._by_length, key=lambda p: p != head.priority):
            free_rows, free_pages = room[priority]
            order = self._by_length[priority]
            above = bisect.bisect_left(order, (head.frames, head.id))
            below = above - 1
            above += priority == head.priority  # past the head itself
            while rows < free_rows and (below >= 0 or above < len(order)):
                take_below = above >= len(order) or (
                    below >= 0 and head.frames - order[below][0] <= order[above][0] - head.frames
                )
                candidate = self._queue[order[below if take_below else above][1]]
                below, above = (below - 1, above) if take_below else (below, above + 1)
                together = frames + candidate.frames
                padded = together if self._packed else (len(batch) + 1) * max(longest, candidate.frames)
                if padded > most_frames or 1 - together / padded > self.config.encode_padding:
                    if not take_below:
                        above = len(order)
                    elif self._packed:
                        below = bisect.bisect_left(order, (most_frames - frames + 1, 0), 0, below + 1) - 1
                    else:
                        below = -1  # even shorter ones would pad more
                    continue
                if not _fits(candidate, (free_rows - rows, free_pages - pages)):
                    continue
                batch.append(candidate)
                rows, pages, frames = rows + candidate.rows, pages + candidate.pages, frames + candidate.frames
                longest = max(longest, candidate.frames)
        return batch


def _fits(request: ScheduledRequest, room: tuple[int, int]) -> bool:
    return request.rows <= room[0] and request.pages <= room[1]


def _subtract_reserve(free_rows: int, free_pages: int, reserved: tuple[int, int]) -> tuple[int, int]:
    return max(0, free_rows - reserved[0]), max(0, free_pages - reserved[1])
