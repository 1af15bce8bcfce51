"""State of one live segment that is recognized repeatedly: hypotheses due, pending and known, and locked words.

The transcript depends on the audio alone, never on when it arrived or how busy the engine was:

anchors    hypotheses of the first so many milliseconds of the segment, at positions that voice activity fixes.
           Words on which enough anchors in a row agree are locked, and every later hypothesis starts with them.
final      the hypothesis of the whole segment: the locked words, and what the model recognizes after them.
partials   hypotheses in between, as often as the load allows. They are shown, and serve as drafts; a draft makes
           the next hypothesis cheaper and changes nothing in it.

Every anchor that can lock words and the final are made, in order. Partials are made when none of these is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import takewhile
from typing import Literal

import msgspec

from asr_serve import units
from asr_serve.decoding.hypothesis import Recognition, is_acceptable
from asr_serve.decoding.search_options import NO_DRAFT, DraftTokens
from asr_serve.pipelines.live.segment_encoder import SegmentEncoder
from asr_serve.pipelines.live.segment_state import Anchor, RepeatedSegmentState
from asr_serve.pipelines.segments import PADDING_SAMPLES, build_segment, is_speech, select_tokens
from asr_serve.pipelines.silence_tracker import SilenceTracker
from asr_serve.text.local_agreement import Text, agreed_count, merge_overlap, whole_word_tokens, word_ends, words_of
from asr_serve.types import Segment, Span

OVERLAP_MS = 1_200
"""Overlap of two segments cut apart in the middle of speech: three or four words, enough to see where one ends
and the other begins."""
OVERLAP_SAMPLES = units.ms_to_samples(OVERLAP_MS)
LOCKING = ((2, 0.7), (3, 0.6), (4, 0.4), (5, 0.0))
"""Anchors in a row that must agree on a token, and the least probability that each must give it: the surer they are,
the fewer are needed.

Chosen on 51 minutes of LibriSpeech training speech, by bench/live_text.py: 0.24 % of words differ from transcripts
without locking, and words are locked 4.6 s after they were spoken at the median and 9.8 s at the tenth decile. With
three anchors of any probability: 0.47 %, 5.0 s and 8.3 s.
"""
MAX_TRIES = 3
"""Attempts for anchors and finals when a step of the engine fails."""

HypothesisKind = Literal["partial", "anchor", "early", "final"]
"""`early`: the final, made as soon as its audio is known, while the pause may still turn out too short."""


class PendingHypothesis(msgspec.Struct, frozen=True):
    """Pending hypothesis of the audio of `span`."""

    kind: HypothesisKind
    span: Span
    answer: Future[Recognition]
    cancel: Callable[[], None]
    tries: int = 1
    urgent: bool = False
    """Whether the caller waits for it."""
    expedite: Callable[[int], None] | None = None
    """See SubmittedHypothesis."""


class RepeatedSegment:
    """Segment recognized by repeated hypotheses. See LiveSegment."""

    def __init__(
        self,
        start: int,
        starts_mid_speech: bool,
        text: Text,
        encoder: SegmentEncoder,
        earliest: int = 0,
        max_new_tokens: int | None = None,
    ) -> None:
        """`starts_mid_speech`: it begins in the middle of speech, where the segment before was cut off.
        `earliest`: first sample of audio that this segment may use. `max_new_tokens`: limit of each hypothesis, whose
        last token is never locked: every pass decodes one."""
        self._max_new_tokens = max_new_tokens
        self.start, self.starts_mid_speech = start, starts_mid_speech
        self._text, self.encoder = text, encoder
        self.audio_from = max(earliest, start - OVERLAP_SAMPLES) if starts_mid_speech else start
        self.end: int | None = None
        """End of the segment; None while it is open."""
        self.decided_samples = 0
        """End of the audio known when it closed."""
        self.cut_off = False
        """Whether it closed in the middle of speech."""
        self.reach = OVERLAP_SAMPLES
        """Audio past its end that is recognized if it was cut off."""
        self.due_anchors: deque[int] = deque()
        """Ends of anchors to be made."""
        self.anchored = start
        self.job: PendingHypothesis | None = None
        self.submitted = False
        """Whether any hypothesis was submitted."""
        self.tokens: tuple[int, ...] = ()
        """Tokens of the newest hypothesis."""
        self._shown: tuple[int, ...] = ()
        """Tokens of the newest hypothesis that counts as speech. They start with the locked ones."""
        self.language = ""
        """Language of the newest anchor: that of the locked tokens."""
        self._language_probs: dict[str, float] = {}
        """Probability of each language when it was last detected."""
        self.recognized_to = start
        """End of the audio in the newest hypothesis."""
        self.final: Recognition | None = None
        self.early: tuple[Span, Recognition] | None = None
        self.output_from = start
        """Reported start: with word times, where the last word of the segment before ends."""
        self.output_to: int | None = None
        """Reported end; None: where it closed."""
        self.start_resolved = not starts_mid_speech
        """Whether it is known which of its first words belong to the segment before."""
        self.skipped_tokens = 0
        """Tokens that belong to the segment before."""
        self.locked_tokens = 0
        """Tokens that will not change any more, including those to skip."""
        self.locked_to = start
        """End of the first of the anchors that agree on the locked tokens: their words were spoken before."""
        self._head: int | None = None
        """End of the anchor that shows how a segment begins that starts in the middle of speech."""
        self._anchors: deque[Anchor] = deque(maxlen=LOCKING[-1][0])
        """Last anchors, the newest last."""

    # --- state ----------------------------------------------------------------------------------------

    def export_state(self) -> RepeatedSegmentState:
        """Returns the state without the hypothesis in flight. An early final is not part of it: it is made again."""
        pending = [self.job.span.end_samples] if self.job is not None and self.job.kind == "anchor" else []
        return RepeatedSegmentState(
            start=self.start,
            starts_mid_speech=self.starts_mid_speech,
            audio_from=self.audio_from,
            end=self.end,
            decided_samples=self.decided_samples,
            cut_off=self.cut_off,
            reach=self.reach,
            due_anchors=[*pending, *self.due_anchors],
            anchored=self.anchored,
            submitted=self.submitted,
            tokens=self.tokens,
            shown=self._shown,
            language=self.language,
            language_probs=dict(self._language_probs),
            recognized_to=self.recognized_to,
            final=self.final,
            output_from=self.output_from,
            output_to=self.output_to,
            start_resolved=self.start_resolved,
            skipped_tokens=self.skipped_tokens,
            locked_tokens=self.locked_tokens,
            locked_to=self.locked_to,
            head=self._head,
            anchors=list(self._anchors),
        )

    @classmethod
    def from_state(
        cls, state: RepeatedSegmentState, text: Text, encoder: SegmentEncoder, max_new_tokens: int | None = None
    ) -> RepeatedSegment:
        segment = cls(state.start, state.starts_mid_speech, text, encoder, max_new_tokens=max_new_tokens)
        segment.audio_from, segment.end, segment.decided_samples = state.audio_from, state.end, state.decided_samples
        segment.cut_off, segment.reach = state.cut_off, state.reach
        segment.due_anchors, segment.anchored = deque(state.due_anchors), state.anchored
        segment.submitted, segment.tokens, segment._shown = state.submitted, state.tokens, state.shown
        segment.language, segment._language_probs = state.language, dict(state.language_probs)
        segment.recognized_to, segment.final = state.recognized_to, state.final
        segment.output_from, segment.output_to = state.output_from, state.output_to
        segment.start_resolved, segment.skipped_tokens = state.start_resolved, state.skipped_tokens
        segment.locked_tokens, segment.locked_to, segment._head = state.locked_tokens, state.locked_to, state.head
        segment._anchors.extend(state.anchors)
        return segment

    # --- due ------------------------------------------------------------------------------------------

    def extend_speech(self, end: int, lock: int) -> None:
        """Reports that audio up to `end` is speech: an anchor is due if the last one was `lock` samples before,
        or more."""
        first = max(lock, OVERLAP_SAMPLES) if self.starts_mid_speech and self.anchored == self.start else lock
        if end - self.anchored >= first:
            self.due_anchors.append(end)
            self.anchored = end

    def drop_void_anchors(self) -> bool:
        """Drops the due anchors of a closed segment if they and the pending one can lock nothing, because the segment
        has too few in all; returns whether the pending one is void. The first anchor of a segment that starts in the
        middle of speech is needed to join it to the one before."""
        pending = self.job is not None and self.job.kind == "anchor"
        anchors = len(self._anchors) + pending + len(self.due_anchors)
        if not self.closed or self.starts_mid_speech or anchors >= LOCKING[0][0]:
            return False
        self.due_anchors.clear()
        return pending

    @property
    def closed(self) -> bool:
        return self.end is not None

    @property
    def finished(self) -> bool:
        """Returns whether all its words are known."""
        return self.final is not None and self.start_resolved

    @property
    def waits_for_seam(self) -> bool:
        """Returns whether enough is known to join it to the segment before; nothing else is due until that is done."""
        return not self.start_resolved and (bool(self._anchors) or self.final is not None)

    def final_span(self, known: int, *, all_known: bool) -> Span | None:
        """Returns the audio of the final; None while not all of it is available."""
        assert self.end is not None
        end = self.end + (self.reach if self.cut_off else 0)
        if all_known:
            end = min(end, known)
        return Span(self.audio_from, end) if end <= known else None

    @property
    def draft(self) -> DraftTokens:
        return DraftTokens(self.tokens, self.locked_tokens) if self.tokens else NO_DRAFT

    def language_for(self, kind: HypothesisKind) -> str:
        """Language to decode in; empty: detect it. The final detects it anew, because it covers most audio, but
        no hypothesis changes the language after locked words."""
        return self.language if self.locked_tokens or kind == "partial" else ""

    @property
    def busy(self) -> bool:
        return self.job is not None

    @property
    def text_to(self) -> int:
        return self.early[0].end_samples if self.early else 0

    def limit_overlap(self, position: int) -> None:
        """Handles a flush: audio past the segment's end is used up to `position` at most, since more may never
        arrive."""
        if self.end is not None:
            self.reach = min(self.reach, max(0, position - self.end))

    # --- results --------------------------------------------------------------------------------------

    def accept_result(self, job: PendingHypothesis, result: Recognition) -> None:
        self.recognized_to = min(job.span.end_samples, self.end or job.span.end_samples)
        self.tokens = result.tokens
        if result.language_prob:
            self._language_probs[result.language] = result.language_prob
        if job.kind == "final" or is_speech(result):
            self._shown = result.tokens
        match job.kind:
            case "anchor":
                self._accept_anchor(job, result)
            case "early":
                self.early = (job.span, result)
            case "final":
                self.final = result

    def _accept_anchor(self, job: PendingHypothesis, result: Recognition) -> None:
        if not (is_acceptable(result) and is_speech(result)):
            return  # a hypothesis that lost its place, or is of no speech, locks nothing
        self.language = result.language
        self._anchors.append(Anchor(job.span.end_samples, result.language, result.tokens, result.logprobs))
        self._head = self._head or job.span.end_samples
        if not self.start_resolved:
            return
        agreed = self._lockable_tokens()
        if agreed > self.locked_tokens:
            locked = result.tokens[:agreed]
            agreeing = takewhile(lambda each: each.tokens[:agreed] == locked, reversed(self._anchors))
            self.locked_tokens, self.locked_to = agreed, min(each.end for each in agreeing)

    def _lockable_tokens(self) -> int:
        """Number of tokens in whole words at the start of the newest anchor that LOCKING accepts."""
        newest, known = self._anchors[-1], list(self._anchors)
        entries = []
        for count, probability in LOCKING:
            agreeing = known[-count:]
            if len(agreeing) == count and all(each.language == newest.language for each in agreeing):
                same = min(agreed_count(each.tokens, newest.tokens) for each in agreeing)
                entries.append((same, agreeing, probability))
        accepted = self.locked_tokens
        while any(
            accepted < same and min(each.probability(accepted) for each in agreeing) >= probability
            for same, agreeing, probability in entries
        ):
            accepted += 1
        if self._max_new_tokens is not None:
            accepted = min(accepted, self._max_new_tokens - 1)
        return whole_word_tokens(newest.tokens, accepted, self._text)

    # --- joining the next segment ---------------------------------------------------------------------

    def join_next(self, after: RepeatedSegment) -> None:
        """Joins this segment, which was cut off and has its final, to `after`, which continues it and shows how it
        begins.

        Words before the seam belong to this segment, those after it to the next. Where they have no words in
        common, both are recognized again from the cut, without overlap: so nothing is lost, and at worst a word at
        the cut is wrong.
        """
        assert self.final is not None
        assert after.waits_for_seam
        next_tokens = after.final.tokens if after.final is not None else after._anchors[0].tokens
        ends, next_ends = word_ends(self.final.tokens, self._text), word_ends(next_tokens, self._text)
        after.start_resolved = True
        seam = merge_overlap(self._words(self.final.tokens), self._words(next_tokens))
        if seam is None:
            self.reach, self.final = 0, None
            after._begin_at_cut()
            return
        left_words = max(seam[0], sum(end <= self.locked_tokens for end in ends))
        self.final = select_tokens(self.final, range(ends[left_words - 1] if left_words else 0))
        if self.final.times:
            self._align_with_next(after)
        after.skipped_tokens = after.locked_tokens = next_ends[seam[1] - 1] if seam[1] else 0

    def _align_with_next(self, after: RepeatedSegment) -> None:
        """Sets the common boundary to the end of this segment's last word, which may lie on either side of the
        cut: otherwise words would lie outside their segment."""
        assert self.final is not None
        assert self.end is not None
        latest = self.end + OVERLAP_SAMPLES * 3 // 4  # a segment with an anchor is longer than that
        if after.final is not None:
            assert after.end is not None
            latest = min(latest, (self.end + after.end) // 2)
        end = self._recognized_from + self.final.times[-1][1]
        self.output_to = after.output_from = max((self.output_from + self.end) // 2, min(end, latest))

    def _begin_at_cut(self) -> None:
        """Makes the first hypothesis again, without the audio before the cut."""
        self.audio_from, self.final, self._shown = self.start, None, ()
        self._anchors.clear()
        if self._head is not None:
            self.due_anchors.appendleft(self._head)

    def _words(self, tokens: tuple[int, ...]) -> list[str]:
        return words_of(self._text(list(tokens)))

    # --- text -----------------------------------------------------------------------------------------

    @property
    def locked_text(self) -> str:
        return self._text(list(self.tokens[self.skipped_tokens : self.locked_tokens]))

    @property
    def shown_text(self) -> str:
        """Text of the newest hypothesis; starts with `locked_text`."""
        return self._text(list(self._shown[self.skipped_tokens :]))

    @property
    def language_and_prob(self) -> tuple[str, float]:
        assert self.final is not None
        language = self.final.language
        return language, self._language_probs.get(language, 0.0)

    def own(self) -> Recognition:
        """Returns the final without the tokens of the segment before."""
        assert self.final is not None
        return select_tokens(self.final, range(self.skipped_tokens, len(self.final.tokens)))

    @property
    def _recognized_from(self) -> int:
        """Position of the first sample of a hypothesis's input."""
        return self.audio_from - PADDING_SAMPLES

    def build_segment(self, quiet: SilenceTracker) -> Segment | None:
        recognition = self.own()
        assert self.end is not None
        if not (self.locked_tokens or self.skipped_tokens or self.cut_off) and not is_speech(recognition):
            return None
        span = Span(self.output_from, self.end if self.output_to is None else self.output_to)
        return build_segment(span, recognition, self._text, self._recognized_from, quiet.silences_in(span))
