"""One live caller: samples in as they are spoken, words out while they are.

Sans I/O: `put` takes samples, `advance` returns what has come of them, and `wake` is called, from any thread,
when it is worth calling again. Nothing here blocks, sleeps or starts a thread; a library's iterator and a
server's socket drive it alike. Positions are samples since the caller's start.

1. Whole windows go to voice activity, one piece at a time: what comes meanwhile is the next piece.
   The engine's loop takes the pieces of all callers in one step.
2. `vad/endpoint.Endpointer` opens and closes segments, by the streaming schedule.
3. Each segment has its `Hypotheses`: anchors and a final, which are owed, and partials as often as
   `engine/cadence` allows. In a pause the final is made early: it is there when the pause has been long enough.
4. `SegmentDone` comes in order and is for ever; `Partial` tells what is known of the rest.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from asr_serve import units
from asr_serve.audio.buffers import Kept, Piece
from asr_serve.decoding.attention import SearchOptions
from asr_serve.engine.client import EngineClient
from asr_serve.errors import EngineCrashed, StepFailed
from asr_serve.pipelines.caller import LIVE_SEGMENT_MS, Event, Finished, ListenOptions, Partial, SegmentDone
from asr_serve.pipelines.hypotheses import OVERLAP_MS, OVERLAP_SAMPLES, TRIES, Hypotheses, Job, Kind
from asr_serve.pipelines.utterance import (
    CONTEXT_MS,
    endpoint_settings,
    in_context,
    language,
    segment,
    segment_limit_ms,
    speech,
)
from asr_serve.types import Priority, Segment, Span
from asr_serve.vad.endpoint import LOOK_BACK, WINDOW_SAMPLES, EndpointConfig, Endpointer
from asr_serve.vad.schedule import STREAMING

MOST_AHEAD_SAMPLES = units.s_to_samples(60)
"""Audio that may be put and is not yet in a segment that is done."""
SEGMENTS_AHEAD = 4
"""Closed segments of one caller that are worked on at once."""
WITHIN_MS: dict[Kind, int] = {"final": 100, "anchor": 100, "partial": 2_000, "early": 2_000}
"""How soon each is to be encoded. A final may have to wait for an anchor, never for a partial: cadence keeps
the queue of those short."""
FIRST_WITHIN_MS = 200
"""The first partial of a segment: somebody has just begun to speak, and wonders whether anybody hears."""
URGENT_SAMPLES = units.ms_to_samples(800)
"""Before a pause will have been long enough, the early final is as urgent as the final."""
AHEAD_S = 5.0
"""Whoever sends so much more than has passed since it came does not speak: it sends a recording, and others do."""
QUICK = SearchOptions(temperatures=(0.0,))
"""For what is shown for a moment."""


class Listening:
    """Call from one thread at a time."""

    def __init__(
        self,
        client: EngineClient,
        text: Callable[[list[int]], str],
        options: ListenOptions,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: what partials are spaced by. Raises OptionError, AtCapacity (no session is free, or those on
        line wait long already), EngineClosed."""
        self.language = language(client, options.language)
        self._client, self._text, self._options = client, text, options
        self._wake, self._clock = wake, clock
        limit_ms = _limit_ms(client, options)
        self._endpointer = Endpointer(
            EndpointConfig(
                max_segment_ms=limit_ms,
                schedule=options.silence_schedule or STREAMING,
                **endpoint_settings(options.threshold, options.pad_before_ms),
            )
        )
        self._settled = units.ms_to_samples(limit_ms * (1 - LOOK_BACK))
        self._lock = units.ms_to_samples(options.lock_ms)
        self._partial = units.ms_to_samples(options.partial_ms)
        self._pad_after = units.ms_to_samples(self._endpointer.config.pad_after_ms)
        self._most_windows = client.config.vad_windows - 32
        self.received_samples = 0
        self._piece, self._kept = Piece(), Kept()
        self._now = 0
        """Windows before this have been scored."""
        self._hearing: tuple[np.ndarray, Future[np.ndarray]] | None = None
        self._hear_tries = 0
        self._segments: deque[Hypotheses] = deque()
        self._shown = Partial(0, 0)
        self.due_s: float | None = None
        """When to call `advance` although nothing has woken it, on `clock`; None: never. A partial may be put
        off."""
        self._began_s, self._asked_s = time.monotonic(), -1e9
        self._finishing = self._heard_all = self._over = False
        self._session = client.session(live=True)

    # --- the caller's side -----------------------------------------------------------------------------

    def put(self, pcm: np.ndarray) -> None:
        """`pcm` (n,) float32 at 16 kHz, any n."""
        assert not self._finishing, "put after finish"
        if len(pcm):
            self._piece.add(pcm)
            self.received_samples += len(pcm)

    def finish(self) -> None:
        """No more will come; `Finished` follows."""
        self._finishing = True

    @property
    def full(self) -> bool:
        """Put no more for now: `advance` has yet to catch up."""
        return self.open_samples > MOST_AHEAD_SAMPLES

    @property
    def open_samples(self) -> int:
        """Audio that was put and is neither in a segment that is done nor known to be silence."""
        done = self._segments[0].start if self._segments else self._now
        return max(0, self.received_samples - done)

    @property
    def idle(self) -> bool:
        """Nothing is under way: there is no news before more is put."""
        return self._hearing is None and all(each.job is None for each in self._segments)

    def advance(self) -> list[Event]:
        """Take what the engine has answered, ask for what is next; returns what is new.

        Raises an AsrServeError when this caller cannot be heard any more.
        """
        if self._over:
            return []
        self.due_s = None
        self._hear()
        for each in self._segments:
            self._collect(each)
        for left, right in zip(self._segments, list(self._segments)[1:], strict=False):
            if right.waits_for_seam and left.done:
                left.join(right)
        events: list[Event] = []
        while self._segments and self._done(0):
            done = self._segments.popleft()
            if found := self._segment(done):
                events.append(SegmentDone(found, done.decided))
        for index, each in enumerate(self._segments):
            if index < SEGMENTS_AHEAD or not each.closed:
                self._ask(each)
        self._let_go()
        shown = self._partial_now()
        if events or (shown.fixed, shown.unfixed) != (self._shown.fixed, self._shown.unfixed):
            if shown.text or self._shown.text:
                events.append(shown)
            self._shown = shown
        if self._heard_all and not self._segments:
            self._over = True
            self._session.close()
            events.append(Finished(self.received_samples))
        return events

    def close(self) -> None:
        """At any time: cancel what is under way, and free the session."""
        self._over = True
        for each in self._segments:
            self._drop_job(each)
        self._session.close()

    # --- voice activity --------------------------------------------------------------------------------

    def _hear(self) -> None:
        while self._hearing is not None and self._hearing[1].done():
            (pcm, future), self._hearing = self._hearing, None
            try:
                probabilities = future.result()
            except StepFailed:
                self._hear_tries += 1
                if self._hear_tries == TRIES:
                    raise
                self._put_piece(pcm)  # the caller's state has not moved
                continue
            self._hear_tries = 0
            self._kept.add(pcm)
            for probability in probabilities:
                spans = self._endpointer.push(probability[None])
                self._now += WINDOW_SAMPLES
                self._follow(spans)
            self._put_windows()
        self._put_windows()
        if self._finishing and not self._heard_all and self._hearing is None and not self._piece.samples:
            self._heard_all = True
            self._follow(self._endpointer.finish(self.received_samples))

    def _put_windows(self) -> None:
        """Hand on what has come, unless a piece is under way."""
        whole = self._piece.samples // WINDOW_SAMPLES
        if self._hearing is not None or not (whole or (self._finishing and self._piece.samples)):
            return
        last = self._finishing and whole < self._most_windows
        pcm = self._piece.take(min(whole, self._most_windows) * WINDOW_SAMPLES, WINDOW_SAMPLES, last=last)
        self._put_piece(pcm)

    def _put_piece(self, pcm: np.ndarray) -> None:
        future = self._session.put(pcm)
        self._hearing = pcm, future
        future.add_done_callback(lambda _: self._wake())

    def _follow(self, closed: list[Span]) -> None:
        """One window further: segments that closed, one that opened, an anchor that is due."""
        endpointer = self._endpointer
        starts = [span.start_samples for span in closed[1:]]  # what was cut off may end in the same window
        for span, after in zip(closed, [*starts, endpointer.open_from_samples], strict=False):
            each = self._at(span.start_samples)
            each.end, each.decided = span.end_samples, min(self._now, self.received_samples)
            each.cut_off = after == span.end_samples and endpointer.torn
        start = endpointer.open_from_samples
        last = self._segments[-1] if self._segments else None
        if last is not None and not last.closed and last.start != start:
            self._drop_job(self._segments.pop())  # it was no speech after all
        if start is None:
            return
        each = self._at(start)
        far = self._now - each.start <= self._settled
        first = max(self._lock, OVERLAP_SAMPLES) if each.torn and each.anchored == each.start else self._lock
        if (
            endpointer.sure
            and endpointer.pause_from_samples is None
            and far
            and self._now - each.anchored >= first
        ):
            each.owe_anchor(self._now)

    def _at(self, start: int) -> Hypotheses:
        """The segment that starts there: the last one, or a new one."""
        if not self._segments or self._segments[-1].start != start:
            earliest = self._segments[-1].start if self._segments else start
            self._segments.append(Hypotheses(start, self._endpointer.torn, self._text, earliest))
        return self._segments[-1]

    def _let_go(self) -> None:
        """Of audio that nothing can need any more."""
        oldest = min((each.audio_from for each in self._segments), default=self._now)
        self._kept.drop_before(min(oldest, self._endpointer.keep_from_samples))

    # --- hypotheses ------------------------------------------------------------------------------------

    def _collect(self, each: Hypotheses) -> None:
        job = each.job
        if job is None or not job.ticket.future.done():
            return
        each.job = None
        try:
            each.take(job, job.ticket.future.result())
        except (StepFailed, EngineCrashed) as failure:
            if job.kind in ("anchor", "final"):
                if job.tries == TRIES or isinstance(failure, EngineCrashed):
                    raise
                self._submit(each, job.kind, job.span, job.tries + 1)

    def _ask(self, each: Hypotheses) -> None:
        """For what is owed; else for what may be shown."""
        job = each.job
        if job is not None and job.kind in ("anchor", "final"):
            return
        if each.owed and not each.waits_for_seam:
            end = each.owed.popleft()
            self._submit(each, "anchor", Span(each.audio_from, end))
        elif each.closed and each.final is None and not each.waits_for_seam:
            self._ask_final(each, job)
        elif job is None and not each.closed and not each.waits_for_seam:
            self._ask_partial(each)

    def _ask_final(self, each: Hypotheses, job: Job | None) -> None:
        known = min(self._now, self.received_samples)
        span = each.final_span(known, all_known=self._heard_all)
        if span is None or (job is not None and job.kind == "early" and job.span == span):
            return
        if each.early is not None and each.early[0] == span:
            each.final = each.early[1]
            self._wake()
        else:
            self._submit(each, "final", span)

    def _ask_partial(self, each: Hypotheses) -> None:
        pause = self._endpointer.pause_from_samples
        quiet_from = self._now if pause is None else pause + self._pad_after
        end = min(self._now, quiet_from)
        closes_at = self._endpointer.closes_at_samples
        early = closes_at is not None and self._now >= quiet_from and each.joined
        urgent = False
        if early:
            if each.early is not None and each.early[0].end_samples == end:
                return
            urgent = closes_at is not None and closes_at - self._now <= URGENT_SAMPLES
        elif pause is not None or end - each.heard < self._partial:
            return
        wait_ms = self._client.partial_interval_ms(self._options.partial_ms)
        due_s = self._asked_s + wait_ms / 1_000
        if not each.asked or urgent or self._clock() >= due_s:
            self._submit(each, "early" if early else "partial", Span(each.audio_from, end), urgent=urgent)
        else:
            self.due_s = due_s

    def _submit(self, each: Hypotheses, kind: Kind, span: Span, tries: int = 1, urgent: bool = False) -> None:
        self._drop_job(each)
        if not each.closed:
            self._asked_s = self._clock()  # whatever it is for, it will be shown
        first, each.asked = not each.asked, True
        ticket = self._client.submit(
            in_context(self._kept.cut(span)),
            SearchOptions() if kind in ("final", "early") else QUICK,
            self._priority(),
            admitted=True,
            draft=each.draft,
            within_ms=FIRST_WITHIN_MS if first and kind == "partial" else WITHIN_MS["final" if urgent else kind],
        )
        each.job = Job(kind, span, ticket, tries)
        ticket.future.add_done_callback(lambda _: self._wake())

    def _priority(self) -> Priority:
        ahead_s = units.samples_to_s(self.received_samples) - (time.monotonic() - self._began_s)
        return "live" if ahead_s < AHEAD_S else "interactive"

    def _drop_job(self, each: Hypotheses) -> None:
        if each.job is not None:
            self._client.cancel(each.job.ticket)
            each.job = None

    # --- what is told ----------------------------------------------------------------------------------

    def _done(self, index: int) -> bool:
        each = self._segments[index]
        if not each.done:
            return False
        return not each.cut_off or (len(self._segments) > index + 1 and self._segments[index + 1].joined)

    def _segment(self, done: Hypotheses) -> Segment | None:
        heard, end = done.own(), done.end
        assert end is not None
        if not (done.fixed or done.skip or done.cut_off) and not speech(heard):
            return None
        return segment(Span(done.start, end), heard, self._text)

    def _partial_now(self) -> Partial:
        if not self._segments:
            heard = min(self._now, self.received_samples)
            return Partial(heard, heard)
        first, texts = self._segments[0], []
        heard = first.heard
        for each in self._segments:
            if not each.joined or each.heard == each.start:  # what comes after it would seem to follow at once
                break
            texts.append(each.shown_text)
            heard = each.heard
        words, fixed = " ".join(text for text in texts if text), first.fixed_text
        return Partial(first.start, min(heard, self.received_samples), fixed, words[len(fixed) :])


def _limit_ms(client: EngineClient, options: ListenOptions) -> int:
    """Segments that are cut off are heard past both ends."""
    limit_ms = segment_limit_ms(client, options.max_segment_ms)
    if options.max_segment_ms is None:
        limit_ms = min(limit_ms, LIVE_SEGMENT_MS)
    return min(limit_ms, client.card.max_segment_ms - 2 * CONTEXT_MS - 2 * OVERLAP_MS)
