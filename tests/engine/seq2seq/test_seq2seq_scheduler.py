"""The planner against a virtual clock: nobody starves, every batch is within its bounds, shares are fair."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.config import EngineConfig
from asr_serve.engine.seq2seq.scheduler import DEADLINE_MS, ScheduledRequest, Seq2SeqScheduler

ROWS, PAGES, FRAMES = 16, 200, 1_280


def planner(frames: int = FRAMES, packed: bool = False, **settings) -> Seq2SeqScheduler:
    return Seq2SeqScheduler(EngineConfig(**{"max_decode_rows": ROWS, **settings}), frames, packed=packed)


def waiting(
    number: int, frames: int = 100, priority: str = "bulk", at: float = 0.0, pages: int = 0
) -> ScheduledRequest:
    return ScheduledRequest(number, frames, pages or -(-frames // 16) + 4, priority, at)


requests = st.builds(
    lambda frames, interactive, gap: (frames, "interactive" if interactive else "bulk", gap),
    st.integers(1, 1_160),
    st.booleans(),
    st.integers(0, 500),
)


class Machine:
    """A device that decodes: rows come with a plan and go after a random time, pages with them."""

    def __init__(self, seed: int, packed: bool) -> None:
        self.plans, self.packed, self.random = planner(packed=packed), packed, random.Random(seed)
        self.running: list[ScheduledRequest] = []
        self.known: dict[int, ScheduledRequest] = {}
        self.order: list[int] = []
        self.removed: set[int] = set()

    def add(self, request: ScheduledRequest) -> None:
        self.known[request.id] = request
        self.plans.enqueue(request)

    @property
    def free_rows(self) -> int:
        return self.plans.config.max_decode_rows - len(self.running)

    @property
    def free_pages(self) -> int:
        return PAGES - sum(r.pages for r in self.running)

    def step(self, leave: float = 0.3) -> list[int]:
        rows, pages = self.free_rows, self.free_pages
        before = len(self.plans)
        ids = self.plans.schedule(rows, pages)
        batch = [self.known[i] for i in ids]
        assert len(self.plans) == before - len(ids)
        waiting_ids = self.known.keys() - set(self.order) - set(ids) - self.removed
        assert self.plans.waiting_frames == sum(self.known[i].frames for i in waiting_ids)
        assert len(set(ids)) == len(ids)
        assert not set(ids) & set(self.order), "planned twice"
        if batch:
            expect_bounds(self.plans, batch, rows, pages, self.packed)
        self.order += ids
        self.running += batch
        # What runs ends; at least one row when nothing joined, for a row's tokens are bounded.
        gone = [r for r in self.running if self.random.random() < leave]
        if self.running and not gone and not batch:
            gone = self.running[:1]
        self.running = [r for r in self.running if r not in gone]
        return ids


def expect_bounds(plans: Seq2SeqScheduler, batch: list[ScheduledRequest], rows: int, pages: int, packed: bool) -> None:
    frames = [r.frames for r in batch]
    assert len(batch) <= rows
    assert sum(r.pages for r in batch) <= pages
    assert frames == sorted(frames)
    if packed:
        assert len(batch) == 1 or sum(frames) <= plans.encode_frames
        return
    padded = max(frames) * len(frames)
    assert 1 - sum(frames) / padded <= plans.config.encode_padding + 1e-9
    assert len(batch) == 1 or padded <= plans.encode_frames


@settings(max_examples=80, deadline=None)
@given(st.lists(requests, max_size=60), st.integers(0, 2**32), st.booleans())
def test_everybody_is_planned_once_within_every_bound(arrivals, seed, packed):
    machine, now = Machine(seed, packed), 0.0
    for number, (frames, priority, gap) in enumerate(arrivals):
        now += gap
        machine.add(waiting(number, frames, priority, now))
        if gap % 3 == 0:
            machine.step()
    for _ in range(40 * len(arrivals)):
        if not len(machine.plans):
            break
        machine.step()
    assert sorted(machine.order) == list(range(len(arrivals)))
    assert machine.plans.schedule(ROWS, PAGES) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(requests, min_size=1, max_size=40), st.lists(st.integers(0, 39)), st.integers(0, 2**32), st.booleans())
def test_a_request_can_be_taken_back_at_any_time(arrivals, cancels, seed, packed):
    machine, cancels = Machine(seed, packed), list(cancels)
    gone = machine.removed
    for number, (frames, priority, gap) in enumerate(arrivals):
        machine.add(waiting(number, frames, priority, float(number)))
        if cancels and gap % 2:
            chosen = cancels.pop()
            was_waiting = chosen <= number and chosen not in gone and chosen not in machine.order
            assert machine.plans.remove(chosen) is was_waiting
            gone |= {chosen} if was_waiting else set()
        if gap % 3 == 0:
            machine.step()
    for _ in range(40 * len(arrivals)):
        machine.step()
    assert len(machine.plans) == 0
    assert sorted([*machine.order, *gone]) == list(range(len(arrivals)))
    assert machine.plans.remove(0) is False


@settings(max_examples=60, deadline=None)
@given(st.lists(requests, min_size=1, max_size=40))
def test_the_nearest_deadline_of_the_class_that_is_due_is_in_the_batch(arrivals):
    plans = planner()
    known = {n: waiting(n, f, p, float(gap)) for n, (f, p, gap) in enumerate(arrivals)}
    for request in known.values():
        plans.enqueue(request)
    due = {
        p: min((r for r in known.values() if r.priority == p), key=lambda r: (r.deadline_ms, r.id), default=None)
        for p in DEADLINE_MS
    }
    first = plans.schedule(ROWS, 10_000)
    assert (due["interactive"] or due["bulk"]).id in first, "interactive goes first when neither was served"


def test_one_class_is_served_in_the_order_of_its_arrival():
    plans = planner(max_decode_rows=1)
    for number, at in enumerate([30.0, 10.0, 20.0]):
        plans.enqueue(waiting(number, at=at))
    assert [plans.schedule(1, PAGES) for _ in range(3)] == [[1], [2], [0]]


def test_a_batch_holds_neighbours_in_length():
    plans = planner()
    for number, frames in enumerate([100, 1_000, 98, 400, 102, 95]):
        plans.enqueue(waiting(number, frames))
    assert plans.schedule(ROWS, PAGES) == [5, 2, 0, 4]


def test_a_packed_batch_takes_any_lengths_up_to_its_frames():
    plans = planner(packed=True)
    for number, frames in enumerate([100, 1_000, 98, 400, 102, 95]):
        plans.enqueue(waiting(number, frames))
    assert plans.schedule(ROWS, PAGES) == [5, 2, 0, 4, 3], "all but the one with which they were over 1,280"
    assert plans.schedule(ROWS, PAGES) == [1]


def test_a_packed_batch_takes_a_shorter_one_where_the_next_in_length_is_too_long():
    plans = planner(packed=True)
    for number, frames in enumerate([900, 500, 400, 300, 80]):
        plans.enqueue(waiting(number, frames, at=float(number)))
    assert plans.schedule(ROWS, PAGES) == [4, 3, 0], "900, 300 and 80 frames"
    assert plans.schedule(ROWS, PAGES) == [2, 1]


def test_who_does_not_fit_is_waited_for_and_not_passed_for_ever():
    plans = planner()
    plans.enqueue(waiting(0, pages=60))
    plans.enqueue(waiting(1, pages=2, at=1.0))
    assert plans.schedule(ROWS, free_pages=59) == []
    assert 0 in plans.schedule(ROWS, free_pages=60)


def test_without_rows_or_requests_there_is_no_plan():
    plans = planner()
    assert plans.schedule(ROWS, PAGES) == []
    plans.enqueue(waiting(0))
    assert plans.schedule(0, PAGES) == []
    assert plans.schedule(1, PAGES) == [0]


def test_bulk_waits_for_a_worthwhile_batch_and_interactive_does_not():
    plans = planner()
    for number in range(8):
        plans.enqueue(waiting(number))
    assert plans.schedule(ROWS // 4 - 1, PAGES) == []
    plans.enqueue(waiting(8, priority="interactive"))
    assert 8 in plans.schedule(1, PAGES)


# --- fair shares ----------------------------------------------------------------------------------


def saturated(share: float, rows_per_step: int, queued: tuple[int, int], steps: int = 400) -> float:
    """Interactive's share of frames while `queued` requests of each class wait at all times."""
    plans, luck = planner(interactive_share=share), random.Random(7)
    counts, served, number, known = [0, 0], [0, 0], 0, {}
    for step in range(steps):
        for kind, priority in enumerate(("interactive", "bulk")):
            while counts[kind] < queued[kind]:
                number += 1
                known[number] = waiting(number, luck.randint(40, 400), priority, float(step))
                plans.enqueue(known[number])
                counts[kind] += 1
        for i in plans.schedule(rows_per_step, 10_000):
            kind = known[i].priority == "bulk"
            counts[kind] -= 1
            served[kind] += known[i].frames
    return served[0] / sum(served)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.9])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("queued", [(60, 60), (60, 600)])
def test_under_load_the_share_of_frames_is_the_one_asked_for(share, rows, queued):
    assert saturated(share, rows, queued) == pytest.approx(share, abs=0.03)


def test_what_one_class_leaves_the_other_takes():
    plans = planner(interactive_share=0.9)
    for number in range(6):
        plans.enqueue(waiting(number, priority="interactive" if number == 0 else "bulk"))
    assert sorted(plans.schedule(ROWS, PAGES)) == [0, 1, 2, 3, 4, 5], "an empty row helps nobody"


def serve(plans: Seq2SeqScheduler, known: dict[int, ScheduledRequest], steps: int) -> list[str]:
    return [known[i].priority for _ in range(steps) for i in plans.schedule(1, PAGES)]


@pytest.mark.parametrize("idle", ["interactive", "bulk"])
@pytest.mark.parametrize("drained", [False, True])
def test_a_class_that_was_idle_has_saved_nothing_up(idle, drained):
    """Returns whether or not the busy class's queue happens to be empty when the idle one comes back."""
    busy = "bulk" if idle == "interactive" else "interactive"
    plans, known = planner(max_decode_rows=1, interactive_share=0.5), {}

    def add(count: int, priority: str) -> None:
        for _ in range(count):
            request = waiting(len(known), priority=priority, at=float(len(known)))
            known[request.id] = request
            plans.enqueue(request)

    add(200, busy)
    serve(plans, known, 200 if drained else 150)
    add(50, idle)
    if drained:
        add(50, busy)
    assert 8 <= serve(plans, known, 20).count(idle) <= 12


def test_planning_needs_no_torch():
    code = "import sys, asr_serve.engine.seq2seq.scheduler; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- callers on line ------------------------------------------------------------------------------


def test_live_goes_before_interactive_before_bulk():
    plans = planner(max_decode_rows=1)
    for number, priority in enumerate(("bulk", "interactive", "live")):
        plans.enqueue(waiting(number, priority=priority, at=float(number)))
    assert [plans.schedule(1, PAGES) for _ in range(3)] == [[2], [1], [0]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 400), st.floats(0, 5_000), st.none() | st.integers(0, 4_000)), min_size=1))
def test_live_requests_go_by_how_soon_they_are_wanted(asked):
    plans = planner(max_decode_rows=1)
    known = [
        ScheduledRequest(number, frames, 4, "live", at, within_ms)
        for number, (frames, at, within_ms) in enumerate(asked)
    ]
    for request in known:
        plans.enqueue(request)
    order = [i for _ in known for i in plans.schedule(1, PAGES)]
    assert order == [r.id for r in sorted(known, key=lambda r: (r.deadline_ms, r.id))]


def test_a_request_that_says_nothing_is_wanted_as_its_class_is():
    assert waiting(0, priority="live", at=7.0).deadline_ms == 7.0 + DEADLINE_MS["live"]
    assert ScheduledRequest(0, 1, 1, "live", 7.0, 0).deadline_ms == 7.0
    assert list(DEADLINE_MS) == ["live", "interactive", "bulk"], "the most urgent first"
    assert list(DEADLINE_MS.values()) == sorted(DEADLINE_MS.values())


def test_urgent_live_requests_alone_are_scheduled_for_their_thread():
    """Nearest deadline first, whatever else waits, within rows, pages and frames; one that is larger goes alone."""
    plans = planner()
    plans.enqueue(waiting(0, priority="interactive"))
    plans.enqueue(ScheduledRequest(1, 100, 10, "live", 0.0, 10))
    assert plans.schedule(ROWS, PAGES, urgent=True) == [], "near is not urgent"
    for number, frames, at in ((2, 100, 30.0), (3, 400, 20.0), (4, 200, 10.0), (5, 50, 40.0)):
        plans.enqueue(ScheduledRequest(number, frames, 10, "live", at, 100, urgent=True))
    assert plans.schedule(0, PAGES, urgent=True) == plans.schedule(ROWS, 9, urgent=True) == []
    assert plans.schedule(ROWS, PAGES, frames=100, urgent=True) == [4]
    assert plans.schedule(ROWS, PAGES, frames=500, urgent=True) == [2, 3]
    assert plans.schedule(1, PAGES, urgent=True) == [5]
    assert plans.schedule(ROWS, PAGES, urgent=True) == []
    assert sorted(plans.schedule(ROWS, PAGES)) == [0, 1]


def test_urgent_requests_that_fit_pass_one_that_does_not():
    plans = planner()
    plans.enqueue(ScheduledRequest(0, 100, 10, "live", 0.0, 100, rows=5, urgent=True))
    plans.enqueue(ScheduledRequest(1, 100, 10, "live", 1.0, 100, urgent=True))
    assert plans.schedule(4, PAGES, urgent=True) == [1]
    assert plans.schedule(5, PAGES, urgent=True) == [0]


def test_files_that_come_after_urgent_requests_have_not_saved_up_service():
    plans = planner()
    for number in range(1_000):
        plans.enqueue(ScheduledRequest(number, 400, 10, "live", float(number), 100, urgent=True))
        assert plans.schedule(ROWS, PAGES, urgent=True) == [number]
    for number in range(1_000, 1_020):
        plans.enqueue(waiting(number, 400, "bulk", 100.0))
        plans.enqueue(waiting(number + 1_000, 400, "live", 100.0))
    first = [plans.schedule(ROWS, PAGES, frames=400) for _ in range(10)]
    assert sum(ids[0] >= 2_000 for ids in first) >= 5, first


@pytest.mark.parametrize("rows", [1, 8])
def test_three_classes_get_their_shares(rows):
    plans, luck = planner(live_share=0.8, interactive_share=0.75), random.Random(3)
    known: dict[int, ScheduledRequest] = {}
    served = dict.fromkeys(DEADLINE_MS, 0)
    counts = dict.fromkeys(DEADLINE_MS, 0)
    for step in range(1_500):
        for priority in DEADLINE_MS:
            while counts[priority] < 30:
                known[len(known)] = waiting(len(known), luck.randint(40, 400), priority, float(step))
                plans.enqueue(known[len(known) - 1])
                counts[priority] += 1
        for i in plans.schedule(rows, 10_000):
            counts[known[i].priority] -= 1
            served[known[i].priority] += known[i].frames
    shares = {p: served[p] / sum(served.values()) for p in served}
    assert shares == pytest.approx({"live": 0.8, "interactive": 0.15, "bulk": 0.05}, abs=0.03)


def test_callers_who_never_stop_starve_nobody():
    """There is always a live request more; the others are through within their shares."""
    plans, known = planner(max_decode_rows=1), {}

    def add(priority: str) -> None:
        known[len(known)] = waiting(len(known), priority=priority, at=float(len(known)))
        plans.enqueue(known[len(known) - 1])

    for priority in ("bulk", "interactive"):
        add(priority)
    order = []
    for _ in range(120):
        add("live")
        order += [known[i].priority for i in plans.schedule(1, PAGES)]
    assert order.index("interactive") < 15
    assert order.index("bulk") < 60
    assert order.count("live") == 118


def test_what_is_kept_is_for_live_requests_alone():
    plans = planner()
    for number in range(12):
        plans.enqueue(waiting(number, pages=5))
    assert len(plans.schedule(ROWS, PAGES, reserved=(ROWS // 4, 0))) == ROWS - ROWS // 4
    assert len(plans) == 0
    for number in range(20, 30):
        plans.enqueue(waiting(number, priority="interactive", pages=5))
    assert len(plans.schedule(ROWS, 40, reserved=(0, 20))) == 4
    assert plans.schedule(2, 40, reserved=(2, 0)) == []
    for number in range(40, 50):
        plans.enqueue(waiting(number, priority="live", pages=5))
    batch = plans.schedule(2, 40, reserved=(2, 40))
    assert len(batch) == 2
    assert all(i >= 40 for i in batch)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 400), st.sampled_from(list(DEADLINE_MS)), st.integers(1, 40)), max_size=40),
    st.integers(0, ROWS),
    st.integers(0, PAGES),
    st.integers(0, ROWS),
    st.integers(0, PAGES),
)
def test_files_never_take_what_is_kept(asked, rows, pages, kept_rows, kept_pages):
    plans = planner()
    known = {n: waiting(n, frames, p, float(n), pages=need) for n, (frames, p, need) in enumerate(asked)}
    for request in known.values():
        plans.enqueue(request)
    for _ in range(len(asked) + 1):
        batch = [known[i] for i in plans.schedule(rows, pages, reserved=(kept_rows, kept_pages))]
        assert len(batch) <= rows
        assert sum(r.pages for r in batch) <= pages
        files = [r for r in batch if r.priority != "live"]
        assert not files or len(files) <= rows - kept_rows
        assert not files or sum(r.pages for r in files) <= pages - kept_pages


@pytest.mark.parametrize("kept", [(0, 0), (4, 20)])
def test_a_file_that_has_no_room_yet_does_not_hold_callers_up(kept):
    plans = planner()
    plans.enqueue(waiting(0, priority="live", pages=4))
    assert plans.schedule(ROWS, PAGES) == [0]
    plans.enqueue(waiting(1, pages=100))  # due, for bulk has had nothing
    plans.enqueue(waiting(2, priority="live", pages=4))
    assert plans.schedule(ROWS, 60, reserved=kept) == [2]
    assert plans.schedule(ROWS, 120, reserved=kept) == [1], "and is served when there is"
