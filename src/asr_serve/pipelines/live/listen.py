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
5. `Turns` tells whose turn it is. `flush` ends what is open where the audio does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from asr_serve import units
from asr_serve.audio.buffers import Kept
from asr_serve.engine.client import EngineClient
from asr_serve.errors import AtCapacity
from asr_serve.pipelines.live.asking import Asking, Place, Spoken, Words
from asr_serve.pipelines.live.caller import (
    Event,
    Finished,
    Flushed,
    ListenOptions,
    Partial,
    SegmentDone,
    endpoint_config,
)
from asr_serve.pipelines.live.carrying import Carrying
from asr_serve.pipelines.live.naming import Naming
from asr_serve.pipelines.live.scores import Scores
from asr_serve.pipelines.live.turns import Turns
from asr_serve.pipelines.live.writing import Writing
from asr_serve.pipelines.prompts import hotword_bias, prompt_tokens
from asr_serve.pipelines.quiet import Quiet
from asr_serve.pipelines.utterance import expect_speakers, language
from asr_serve.speaker.clustering import HowMany
from asr_serve.text.tokens import Tokenizer
from asr_serve.types import Segment, Span
from asr_serve.vad.endpoint import WINDOW_SAMPLES, Endpointer

MOST_AHEAD_SAMPLES = units.s_to_samples(60)
"""Audio that may be put and is not yet in a segment that is done."""
SEGMENTS_AHEAD = 4
"""Closed segments of one caller that are worked on at once."""
FLUSHES = 64
FLUSH_RETRY_MS = 1_000


class Listening:
    """Call from one thread at a time."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        options: ListenOptions,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: what partials are spaced by. Raises OptionError, WeightsMissing, AtCapacity (no session is
        free, or those on line wait long already), EngineClosed."""
        self.language = language(client, options.language)
        self._writing = Writing(self.language, wake) if options.itn else None
        how_many = HowMany.of(options.num_speakers, options.min_speakers, options.max_speakers)
        if options.speakers:
            expect_speakers(client)
        self._naming = Naming(client, options.words, how_many, wake) if options.speakers else None
        words = options.words or options.speakers  # a segment is cut between them where the speaker changes
        prompt = prompt_tokens(client, tokenizer, options.prompt)
        bias = hotword_bias(client, tokenizer, options.hotwords)
        self._endpointer = Endpointer(endpoint_config(client, options))
        self._lock = units.ms_to_samples(options.lock_ms)
        self.received_samples = 0
        self._kept = Kept()
        if client.card.streaming:
            self._words: Words = Carrying(client, tokenizer.text, self._kept, words, wake, bias)
        else:
            self._words = Asking(
                client, tokenizer.text, options, prompt, bias, self._endpointer, self._kept, wake, clock
            )
        self._quiet = Quiet(self._endpointer.config.neg_threshold)
        self._now = 0
        """Windows before this have been scored."""
        self._segments: deque[Spoken] = deque()
        self._turns = Turns(options.turn, client, wake)
        self._flushes: deque[Flushed] = deque()
        """To be done when all windows before their position have been scored."""
        self._flushed = 0
        """Where the last one ended a segment; audio up to here is known, whatever its window's score."""
        self._news: list[Event] = []
        self._marks: deque[tuple[int, Event]] = deque()
        """Events that follow the segments before their position."""
        self._shown = Partial(0, 0)
        self._finishing = self._heard_all = self._over = False
        self._session = client.session(live=True)
        self._scores = Scores(self._session, client.config.vad_windows - 32, wake)

    # --- the caller's side -----------------------------------------------------------------------------

    def put(self, pcm: np.ndarray) -> None:
        """`pcm` (n,) float32 at 16 kHz, any n."""
        assert not self._finishing, "put after finish"
        if len(pcm):
            self._scores.put(pcm)
            self._kept.add(pcm)
            self.received_samples += len(pcm)

    def flush(self, name: str) -> None:
        """What was put so far is to be final now: what is open ends here. `Flushed` follows, by that name. Raises
        AtCapacity when FLUSHES of them are under way."""
        assert not self._finishing, "flush after finish"
        if len(self._flushes) + len(self._marks) >= FLUSHES:
            raise AtCapacity(f"{FLUSHES} flushes are under way", "no more at once", FLUSH_RETRY_MS)
        self._flushes.append(Flushed(name, self.received_samples))

    def finish(self) -> None:
        """No more will come; `Finished` follows."""
        self._finishing = True
        self._scores.finish()

    @property
    def full(self) -> bool:
        """Put no more for now: `advance` has yet to catch up."""
        unwritten = self._writing is not None and self._writing.full
        return unwritten or self.open_samples > MOST_AHEAD_SAMPLES

    @property
    def open_samples(self) -> int:
        """Audio that was put and is neither in a segment that is done nor known to be silence."""
        done = self._segments[0].start if self._segments else self._now
        return max(0, self.received_samples - done)

    @property
    def due_s(self) -> float | None:
        """When to call `advance` although nothing has woken it, on `clock`; None: never. A partial may be put
        off."""
        return self._words.due_s

    @property
    def idle(self) -> bool:
        """Nothing is under way: there is no news before more is put."""
        held = any(each is not None and each.busy for each in (self._naming, self._writing))
        waits = held or self._turns.waiting or any(each.busy for each in self._segments)
        return self._scores.idle and not waits

    def advance(self) -> list[Event]:
        """Take what the engine has answered, ask for what is next; returns what is new.

        Raises an AsrServeError when this caller cannot be heard any more.
        """
        if self._over:
            return self._finished([])
        self._words.due_s = None
        self._hear()
        for each in self._segments:
            self._words.collect(each)
        for left, right in zip(self._segments, list(self._segments)[1:], strict=False):
            self._words.join(left, right)
        events, self._news = self._news, []
        events += self._segments_done()
        for index, each in enumerate(self._segments):
            if index < SEGMENTS_AHEAD or not each.closed:
                self._words.ask(each, self._place)
        self._let_go()
        known = self._segments[-1].text_to if self._segments else 0
        events += self._turns.eager_end(self._endpointer, self._now, known)
        shown = self._partial_now()
        if events or (shown.fixed, shown.unfixed) != (self._shown.fixed, self._shown.unfixed):
            if shown.text or self._shown.text:
                events.append(shown)
            self._shown = shown
        if self._heard_all and not self._segments:
            self._over = True
            self._session.close()
            events.append(Finished(self.received_samples))
        return self._finished(events)

    def close(self) -> None:
        """At any time: cancel what is under way, and free the session."""
        self._over = True
        for each in self._segments:
            self._words.drop(each)
        for stage in (self._naming, self._writing):
            if stage is not None:
                stage.close()
        self._session.close()

    # --- voice activity --------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Window by window, as far as the turn model has answered; flushes where they belong between them."""
        self._scores.advance()
        while not self._turns.waiting:
            if self._turns.over() and self._now <= self.received_samples:
                self._flush(self._now)
            while self._flushes and self._flushes[0].position_samples < self._now + WINDOW_SAMPLES:
                flushed = self._flushes.popleft()
                self._flush(flushed.position_samples)
                self._marks.append((flushed.position_samples, flushed))
            if (score := self._scores.take()) is None:
                break
            spans = self._endpointer.push(score)
            self._quiet.add(score)
            self._now += WINDOW_SAMPLES
            self._follow(spans)
            if span := self._turns.to_hear(self._endpointer, min(self._now, self.received_samples)):
                self._turns.ask(self._endpointer, self._kept.cut(span))
        if self._scores.over and not (self._heard_all or self._turns.waiting):
            self._heard_all = True
            self._follow(self._endpointer.finish(self.received_samples))

    def _flush(self, position: int) -> None:
        self._flushed = max(self._flushed, min(position, self.received_samples))
        self._follow(self._endpointer.flush(position))
        for each in self._segments:
            each.reach_to(self._flushed)

    def _follow(self, closed: list[Span]) -> None:
        """One window further: segments that closed, one that opened, an anchor that is due."""
        endpointer = self._endpointer
        self._tell_turns(closed)
        starts = [span.start_samples for span in closed[1:]]  # what was cut off may end in the same window
        for span, after in zip(closed, [*starts, endpointer.open_from_samples], strict=False):
            each = self._at(span.start_samples, closed)
            each.end, each.decided = span.end_samples, self._known
            each.cut_off = after == span.end_samples and endpointer.torn
        start = endpointer.open_from_samples
        last = self._segments[-1] if self._segments else None
        if last is not None and not last.closed and last.start != start:
            self._words.drop(self._segments.pop())  # it was no speech after all
        if start is None:
            return
        each = self._at(start, closed)
        far = self._now - each.start <= endpointer.settled_samples
        if endpointer.sure and endpointer.pause_from_samples is None and far:
            each.grow(min(self._now, self.received_samples), self._lock)

    def _tell_turns(self, closed: list[Span]) -> None:
        for turn in self._turns.follow(self._endpointer, self._known, closed):
            if turn.state == "ended":
                self._marks.append((turn.position_samples, turn))
            else:
                self._news.append(turn)

    @property
    def _known(self) -> int:
        """Audio up to here may be in a segment that is closed."""
        return max(self._flushed, min(self._now, self.received_samples))

    @property
    def _place(self) -> Place:
        return Place(self._now, self._known, self.received_samples, self._heard_all)

    def _at(self, start: int, closed: list[Span]) -> Spoken:
        """The segment that starts there: the last one, or a new one. `closed`: those that did in this window. One
        ends where another starts only if it was cut; one that closed before has had its pause."""
        if not self._segments or self._segments[-1].start != start:
            cut = any(span.end_samples == start for span in closed)
            before = self._segments[-1] if cut else None
            self._segments.append(self._words.begin(start, self._endpointer.torn, before))
        return self._segments[-1]

    def _let_go(self) -> None:
        """Of audio that nothing can need any more."""
        oldest = min((each.audio_from for each in self._segments), default=self._now)
        oldest = min(oldest, self._endpointer.keep_from_samples)
        self._kept.drop_before(oldest)
        self._quiet.forget_before(oldest)

    # --- what is told ----------------------------------------------------------------------------------

    def _segments_done(self) -> list[Event]:
        """What is final, in order, and what was to follow it."""
        events: list[Event] = []
        while self._segments and self._done(0):
            done = self._segments.popleft()
            if found := done.segment(self._quiet):
                events.append(self._told(done, found))
            events += self._marks_due()
        return events + self._marks_due()

    def _told(self, done: Spoken, found: Segment) -> SegmentDone:
        told = SegmentDone(found, done.decided, *done.heard_in)
        if self._naming is not None:
            assert done.end is not None
            heard = Span(done.start, min(done.end, self.received_samples))
            self._naming.hear(told, heard, self._kept.cut(heard))
        return told

    def _finished(self, events: list[Event]) -> list[Event]:
        """What of these, and of those before, can be told: by whom it was said, then as one writes it."""
        for stage in (self._naming, self._writing):
            if stage is not None:
                stage.hold(events)
                events = stage.take()
        return events

    def _marks_due(self) -> list[Event]:
        first = self._segments[0] if self._segments else None
        due: list[Event] = []
        while self._marks and (first is None or not first.closed or first.start >= self._marks[0][0]):
            due.append(self._marks.popleft()[1])
        return due

    def _done(self, index: int) -> bool:
        each = self._segments[index]
        if not each.done:
            return False
        return not each.cut_off or (len(self._segments) > index + 1 and self._segments[index + 1].joined)

    def _partial_now(self) -> Partial:
        if not self._segments:
            return Partial(self._known, self._known)
        first, texts = self._segments[0], []
        heard = first.heard
        for each in self._segments:
            if not each.joined or each.heard == each.start:  # what comes after it would seem to follow at once
                break
            texts.append(each.shown_text)
            heard = each.heard
        words, fixed = " ".join(text for text in texts if text), first.fixed_text
        heard = min(heard, self.received_samples)
        return Partial(first.told_from, heard, fixed, words[len(fixed) :], first.fixed_to)
