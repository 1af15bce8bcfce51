"""One live segment on its way from sound to locked words: what is owed to it, what is under way, what is known.

What ends up in the transcript depends on the audio alone, never on when it came or how busy the engine was:

anchors    hypotheses of the segment's first so many milliseconds, at places that voice activity fixes. Words that
           three anchors in a row agree on are locked, and every later hypothesis starts with them.
final      the hypothesis of the whole segment. It says the locked words, and what the model hears after them.
partials   hypotheses in between, as often as the load allows. They are shown, and serve as drafts; a draft makes
           the next hypothesis cheaper and changes nothing in it.

Anchors and the final are owed: each is made, in order. Partials are made when nothing is owed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

import msgspec

from asr_serve import units
from asr_serve.decoding.seq2seq import NO_DRAFT, DraftTokens, Recognition, is_acceptable
from asr_serve.pipelines.live.segment_encoder import SegmentEncoder
from asr_serve.pipelines.segments import PADDING_SAMPLES, build_segment, is_speech, select_tokens
from asr_serve.pipelines.silence import SilenceTracker
from asr_serve.text.hypothesis_agreement import Text, agreed_prefix_tokens, merge_overlap, word_ends
from asr_serve.types import Segment, Span

OVERLAP_MS = 1_200
"""How far two segments that were cut apart in the middle of speech reach into each other: three or four words,
enough to see where one ends and the other begins."""
OVERLAP_SAMPLES = units.ms_to_samples(OVERLAP_MS)
AGREEING_ANCHORS = 3
"""Anchors in a row that lock what they agree on. Chosen on untranscribed LibriSpeech training speech: with two,
clearly more words of the transcripts were others than without locking."""
MAX_TRIES = 3
"""For what is owed, when the engine fails a step."""

HypothesisKind = Literal["partial", "anchor", "early", "final"]
"""`early`: the final, made as soon as its audio is known, while the pause may still turn out too short."""


class PendingHypothesis(msgspec.Struct, frozen=True):
    """A hypothesis under way, of the audio of `span`."""

    kind: HypothesisKind
    span: Span
    answer: Future[Recognition]
    cancel: Callable[[], None]
    tries: int = 1


class RepeatedSegment:
    """What is known of one segment."""

    def __init__(
        self, start: int, starts_mid_speech: bool, text: Text, encoder: SegmentEncoder, earliest: int = 0
    ) -> None:
        """`starts_mid_speech`: it begins in the middle of speech, where the segment before was cut off.
        `earliest`: of the audio that segment is heard in."""
        self.start, self.starts_mid_speech = start, starts_mid_speech
        self._text, self.encoder = text, encoder
        self.audio_from = max(earliest, start - OVERLAP_SAMPLES) if starts_mid_speech else start
        self.end: int | None = None
        """Where it closed; None while it is open."""
        self.decided_samples = 0
        """Audio up to here had been heard when it closed."""
        self.cut_off = False
        """It closed in the middle of speech."""
        self.reach = OVERLAP_SAMPLES
        """How far past its end a segment that was cut off is heard."""
        self.due_anchors: deque[int] = deque()
        """Ends of anchors yet to be made."""
        self.anchored = start
        self.job: PendingHypothesis | None = None
        self.submitted = False
        """Some hypothesis was, at least."""
        self.tokens: tuple[int, ...] = ()
        """The newest hypothesis."""
        self._shown: tuple[int, ...] = ()
        """The newest one that is to be believed. It starts with what is fixed."""
        self.language = ""
        """What the newest anchor was heard in: the language of what is fixed."""
        self._language_probs: dict[str, float] = {}
        """How probable each language was where the audio was asked last."""
        self.recognized_to = start
        """Audio up to here is in it."""
        self.final: Recognition | None = None
        self.early: tuple[Span, Recognition] | None = None
        self.output_from = start
        """Where it begins, as it is told: with words, where the last one of the segment before ends."""
        self.output_to: int | None = None
        """The same of its end; None: where it closed."""
        self.start_resolved = not starts_mid_speech
        """Which of its first words the segment before says is known."""
        self.skipped_tokens = 0
        """Tokens that the segment before says."""
        self.locked_tokens = 0
        """Tokens that will not change any more, those to skip among them."""
        self.locked_to = start
        """The words of these were spoken before: the first of the anchors that agree on them ended here."""
        self._head: int | None = None
        """Of a torn segment: the end of the anchor that shows how it begins."""
        self._anchors: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=AGREEING_ANCHORS - 1)
        """The last ones: where each ended, and its tokens."""

    # --- what is owed ----------------------------------------------------------------------------------

    def extend_speech(self, end: int, lock: int) -> None:
        """It is speech up to `end`: an anchor is owed if the last one was `lock` before, or longer ago."""
        first = max(lock, OVERLAP_SAMPLES) if self.starts_mid_speech and self.anchored == self.start else lock
        if end - self.anchored >= first:
            self.due_anchors.append(end)
            self.anchored = end

    @property
    def closed(self) -> bool:
        return self.end is not None

    @property
    def finished(self) -> bool:
        """Its words are known, all of them."""
        return self.final is not None and self.start_resolved

    @property
    def waits_for_seam(self) -> bool:
        """Enough is known to see where it meets the segment before; nothing else is owed until that is done."""
        return not self.start_resolved and (bool(self._anchors) or self.final is not None)

    def final_span(self, known: int, *, all_known: bool) -> Span | None:
        """The audio of the final; None while not all of it is there."""
        assert self.end is not None
        end = self.end + (self.reach if self.cut_off else 0)
        if all_known:
            end = min(end, known)
        return Span(self.audio_from, end) if end <= known else None

    @property
    def draft(self) -> DraftTokens:
        return DraftTokens(self.tokens, self.locked_tokens) if self.tokens else NO_DRAFT

    def language_for(self, kind: HypothesisKind) -> str:
        """In which it is to be heard; empty: in whichever the audio is. Of all hypotheses the final hears most of
        it; but no answer changes its language after words that are fixed."""
        return self.language if self.locked_tokens or kind == "partial" else ""

    @property
    def busy(self) -> bool:
        return self.job is not None

    @property
    def text_to(self) -> int:
        return self.early[0].end_samples if self.early else 0

    def limit_overlap(self, position: int) -> None:
        """A flush: past its end it is heard up to there at most, and waits for no audio that may never come."""
        if self.end is not None:
            self.reach = min(self.reach, max(0, position - self.end))

    # --- what comes back -------------------------------------------------------------------------------

    def accept_result(self, job: PendingHypothesis, heard: Recognition) -> None:
        self.recognized_to = min(job.span.end_samples, self.end or job.span.end_samples)
        self.tokens = heard.tokens
        if heard.language_prob:
            self._language_probs[heard.language] = heard.language_prob
        if job.kind == "final" or is_speech(heard):
            self._shown = heard.tokens
        match job.kind:
            case "anchor":
                self._accept_anchor(job, heard)
            case "early":
                self.early = (job.span, heard)
            case "final":
                self.final = heard

    def _accept_anchor(self, job: PendingHypothesis, heard: Recognition) -> None:
        if not (is_acceptable(heard) and is_speech(heard)):
            return  # what a decoder says that has lost its place, or where nobody speaks, locks nothing
        self.language = heard.language
        if self.start_resolved and len(self._anchors) == AGREEING_ANCHORS - 1:
            agreed = min(agreed_prefix_tokens(each, heard.tokens, self._text) for _, each in self._anchors)
            if agreed > self.locked_tokens:
                self.locked_tokens, self.locked_to = agreed, self._anchors[0][0]
        self._anchors.append((job.span.end_samples, heard.tokens))
        self._head = self._head or job.span.end_samples

    # --- where it meets its neighbour ------------------------------------------------------------------

    def join_next(self, after: RepeatedSegment) -> None:
        """This one was cut off and has its final; `after` goes on from there and shows how it begins.

        They keep the words up to the seam and from there on. Where they have no words in common, both are heard
        again as they were cut, without overlap: so nothing is lost, and at worst a torn word is odd.
        """
        assert self.final is not None
        assert after.waits_for_seam
        beginning = after.final.tokens if after.final is not None else after._anchors[0][1]
        ours, theirs = word_ends(self.final.tokens, self._text), word_ends(beginning, self._text)
        after.start_resolved = True
        found = merge_overlap(self._words(self.final.tokens), self._words(beginning))
        if found is None:
            self.reach, self.final = 0, None
            after._begin_at_cut()
            return
        kept = max(found[0], sum(end <= self.locked_tokens for end in ours))
        self.final = select_tokens(self.final, range(ours[kept - 1] if kept else 0))
        if self.final.times:
            self._align_with_next(after)
        after.skipped_tokens = after.locked_tokens = theirs[found[1] - 1] if found[1] else 0

    def _align_with_next(self, after: RepeatedSegment) -> None:
        """They are told to meet where the last word does that this one keeps, which may be on either side of the
        cut: else words would lie outside of their segment."""
        assert self.final is not None
        assert self.end is not None
        latest = self.end + OVERLAP_SAMPLES * 3 // 4  # of one that has an anchor: it is longer than that
        if after.final is not None:
            assert after.end is not None
            latest = min(latest, (self.end + after.end) // 2)
        end = self._recognized_from + self.final.times[-1][1]
        self.output_to = after.output_from = max((self.output_from + self.end) // 2, min(end, latest))

    def _begin_at_cut(self) -> None:
        """Hear the beginning again, without what lies before the cut."""
        self.audio_from, self.final, self._shown = self.start, None, ()
        self._anchors.clear()
        if self._head is not None:
            self.due_anchors.appendleft(self._head)

    def _words(self, tokens: tuple[int, ...]) -> list[str]:
        return self._text(list(tokens)).split()

    # --- what is shown ---------------------------------------------------------------------------------

    @property
    def locked_text(self) -> str:
        return self._text(list(self.tokens[self.skipped_tokens : self.locked_tokens]))

    @property
    def shown_text(self) -> str:
        """It starts with `fixed_text`."""
        return self._text(list(self._shown[self.skipped_tokens :]))

    @property
    def language_and_prob(self) -> tuple[str, float]:
        assert self.final is not None
        language = self.final.language
        return language, self._language_probs.get(language, 0.0)

    def own(self) -> Recognition:
        """The final, without what the segment before says."""
        assert self.final is not None
        return select_tokens(self.final, range(self.skipped_tokens, len(self.final.tokens)))

    @property
    def _recognized_from(self) -> int:
        """Where the audio of its hypotheses begins."""
        return self.audio_from - PADDING_SAMPLES

    def build_segment(self, quiet: SilenceTracker) -> Segment | None:
        heard = self.own()
        assert self.end is not None
        if not (self.locked_tokens or self.skipped_tokens or self.cut_off) and not is_speech(heard):
            return None
        span = Span(self.output_from, self.end if self.output_to is None else self.output_to)
        return build_segment(span, heard, self._text, self._recognized_from, quiet.silences_in(span))
