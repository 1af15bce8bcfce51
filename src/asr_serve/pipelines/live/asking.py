"""How live segments get their words from a model that hears whole utterances: it is asked again and again.

Of each segment its `Hypotheses` know what is owed, an anchor or the final, and what may be shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from asr_serve import units
from asr_serve.audio.buffers import Kept
from asr_serve.decoding.attention import SearchOptions
from asr_serve.engine.client import EngineClient
from asr_serve.errors import Cancelled, EngineCrashed, StepFailed
from asr_serve.pipelines.live.caller import ListenOptions
from asr_serve.pipelines.live.hearing import Growing, Question, Whole
from asr_serve.pipelines.live.hypotheses import OVERLAP_SAMPLES, TRIES, Hypotheses, Job, Kind
from asr_serve.pipelines.quiet import Quiet
from asr_serve.types import Priority, Segment, Span
from asr_serve.vad.endpoint import Endpointer

WITHIN_MS: dict[Kind, int] = {"final": 100, "anchor": 100, "partial": 2_000, "early": 2_000}
"""How soon each is to be encoded. A final may have to wait for an anchor, never for a partial: cadence keeps
the queue of those short."""
FIRST_WITHIN_MS = 200
"""The first partial of a segment: somebody has just begun to speak, and wonders whether anybody hears."""
URGENT_SAMPLES = units.ms_to_samples(800)
"""Before a pause will have been long enough, the early final is as urgent as the final."""
AHEAD_S = 5.0
"""Whoever sends so much more than has passed since it came does not speak: it sends a recording, and others do."""


class Place(NamedTuple):
    """Where a caller stands, in samples."""

    now: int
    """Windows before this have been scored."""
    known: int
    """Audio up to here may be in a segment that is closed."""
    received: int
    heard_all: bool
    """No more will come, and all of it was scored."""


class Spoken(Protocol):
    """One live segment, as the caller's pipeline sees it."""

    start: int
    told_from: int
    """Where it begins, as it is told."""
    end: int | None
    """Where it closed; None while it is open."""
    decided: int
    """Audio up to here had been heard when it closed."""
    cut_off: bool
    """It closed in the middle of speech."""

    @property
    def heard(self) -> int:
        """Audio up to here is in its text."""

    @property
    def fixed_to(self) -> int:
        """The words of its fixed text were spoken before."""

    @property
    def audio_from(self) -> int:
        """What it still needs of the audio begins there."""

    @property
    def closed(self) -> bool: ...
    @property
    def done(self) -> bool:
        """Its words are known, all of them."""

    @property
    def joined(self) -> bool:
        """Which of its first words the segment before says is known."""

    @property
    def busy(self) -> bool:
        """Something is under way for it."""

    @property
    def text_to(self) -> int:
        """There is text for all audio up to here, in a pause."""

    @property
    def fixed_text(self) -> str:
        """It does not change any more."""

    @property
    def shown_text(self) -> str:
        """It starts with `fixed_text`."""

    @property
    def heard_in(self) -> tuple[str, float]:
        """The language of its words, once it is done, empty where only one is known; and how probable it is, 0
        where the audio was not asked."""

    def grow(self, end: int, lock: int) -> None:
        """It is speech up to `end`, for sure."""

    def reach_to(self, position: int) -> None:
        """A flush: past its end it is heard up to there at most."""

    def segment(self, quiet: Quiet) -> Segment | None:
        """Once it is done; None: nothing was said."""


class Words(Protocol):
    """Where a caller's segments get their words from."""

    due_s: float | None
    """When to ask again although nothing has come; None: never. Set by `ask`."""

    def begin(self, start: int, torn: bool, before: Spoken | None) -> Spoken:
        """A segment that starts there. `torn`: in the middle of speech, where `before` was cut off."""

    def collect(self, each: Spoken) -> None:
        """What has come back. Raises an AsrServeError when the segment cannot be heard."""

    def join(self, left: Spoken, right: Spoken) -> None:
        """Neighbours, in order."""

    def ask(self, each: Spoken, at: Place) -> None:
        """For what is needed next."""

    def drop(self, each: Spoken) -> None:
        """Nobody wants it any more."""


class Pace:
    """How fast a caller's audio comes."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def priority(self, received: int) -> Priority:
        ahead_s = units.samples_to_s(received) - (time.monotonic() - self._began_s)
        return "live" if ahead_s < AHEAD_S else "interactive"


class Asking:
    """See Words."""

    def __init__(
        self,
        client: EngineClient,
        text: Callable[[list[int]], str],
        options: ListenOptions,
        prompt: tuple[int, ...],
        bias: str,
        endpointer: Endpointer,
        kept: Kept,
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """`prompt`: tokens that the model reads before it hears each segment; `bias`: hot words."""
        self._client, self._text, self._options = client, text, options
        self._endpointer, self._kept, self._wake, self._clock = endpointer, kept, wake, clock
        self._partial = units.ms_to_samples(options.partial_ms)
        self._thorough = SearchOptions(
            language=client.card.language(options.language), prompt=prompt, bias=bias, hurried=True
        )
        self._quick = msgspec.structs.replace(self._thorough, temperatures=(0.0,))
        """For what is shown for a moment."""
        self._thorough = msgspec.structs.replace(self._thorough, words=options.words or options.speakers)
        card, chunk = client.card, client.config.chunk_frames or client.card.chunk
        limit_ms = endpointer.config.max_segment_ms or card.max_segment_ms
        self._longest = units.ms_to_samples(limit_ms) + 2 * OVERLAP_SAMPLES
        self._lag = card.lag_samples(chunk) if card.grows else 0
        """So much audio after a word until all of it is in a hypothesis."""
        self._pad_after = units.ms_to_samples(endpointer.config.pad_after_ms)
        self.due_s: float | None = None
        self._asked_s, self._pace = -1e9, Pace()
        self._at = Place(0, 0, 0, False)

    def begin(self, start: int, torn: bool, before: Spoken | None) -> Hypotheses:
        hearing = (
            Growing(self._client, self._kept, self._longest) if self._lag else Whole(self._client, self._kept)
        )
        return Hypotheses(start, torn, self._text, hearing, start if before is None else before.start)

    def collect(self, each: Spoken) -> None:
        assert isinstance(each, Hypotheses)
        job = each.job
        if job is None or not job.answer.done():
            return
        each.job = None
        try:
            each.take(job, job.answer.result())
        except (StepFailed, EngineCrashed, Cancelled) as failure:
            each.hearing.close()
            if job.kind in ("anchor", "final"):
                if job.tries == TRIES or isinstance(failure, EngineCrashed):
                    raise
                self._submit(each, job.kind, job.span, tries=job.tries + 1)

    def join(self, left: Spoken, right: Spoken) -> None:
        assert isinstance(left, Hypotheses)
        assert isinstance(right, Hypotheses)
        if right.waits_for_seam and left.done:
            left.join(right)

    def ask(self, each: Spoken, at: Place) -> None:
        """For what is owed; else for what may be shown."""
        assert isinstance(each, Hypotheses)
        job, self._at = each.job, at
        if job is not None and job.kind in ("anchor", "final"):
            return
        if each.owed and not each.waits_for_seam:
            end = each.owed.popleft()
            self._submit(each, "anchor", Span(each.audio_from, end))
        elif each.closed and each.final is None and not each.waits_for_seam:
            self._ask_final(each, job)
        elif job is None and not each.closed and not each.waits_for_seam:
            self._ask_partial(each)

    def drop(self, each: Spoken) -> None:
        assert isinstance(each, Hypotheses)
        self._forget(each)
        each.hearing.close()

    @staticmethod
    def _forget(each: Hypotheses) -> None:
        if each.job is not None:
            each.job.cancel()
            each.job = None

    def _ask_final(self, each: Hypotheses, job: Job | None) -> None:
        span = each.final_span(self._at.known, all_known=self._at.heard_all)
        if span is None or (job is not None and job.kind == "early" and job.span == span):
            return
        if each.early is not None and each.early[0] == span:
            each.final = each.early[1]
            self._wake()
        else:
            self._submit(each, "final", span)

    def _ask_partial(self, each: Hypotheses) -> None:
        now, pause = self._at.now, self._endpointer.pause_from_samples
        quiet_from = now if pause is None else pause + self._pad_after + self._lag
        end = min(now, quiet_from)
        closes_at = self._endpointer.closes_at_samples
        early = closes_at is not None and now >= quiet_from and each.joined
        urgent = False
        if early:
            if each.early is not None and each.early[0].end_samples == end:
                return
            urgent = closes_at is not None and closes_at - now <= URGENT_SAMPLES
        elif pause is not None or end - each.heard < self._partial:
            return
        wait_ms = self._client.partial_interval_ms(self._options.partial_ms)
        due_s = self._asked_s + wait_ms / 1_000
        if not each.asked or urgent or self._clock() >= due_s:
            self._submit(each, "early" if early else "partial", Span(each.audio_from, end), urgent=urgent)
        else:
            self.due_s = due_s

    def _submit(self, each: Hypotheses, kind: Kind, span: Span, tries: int = 1, urgent: bool = False) -> None:
        self._forget(each)
        if not each.closed:
            self._asked_s = self._clock()  # whatever it is for, it will be shown
        first, each.asked = not each.asked, True
        options = self._thorough if kind in ("final", "early") else self._quick
        if language := each.language_for(kind):
            options = msgspec.structs.replace(options, language=language)
        question = Question(
            span,
            options,
            self._pace.priority(self._at.received),
            each.draft,
            FIRST_WITHIN_MS if first and kind == "partial" else WITHIN_MS["final" if urgent else kind],
            each.decided if kind == "final" else None,
        )
        answer, cancel = each.hearing.ask(question)
        each.job = Job(kind, span, answer, cancel, tries)
        answer.add_done_callback(lambda _: self._wake())
