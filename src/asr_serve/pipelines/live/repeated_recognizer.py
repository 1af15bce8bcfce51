"""Recognition of live segments by a model of whole utterances, which decodes a growing segment again and again.

The `RepeatedSegment` of each segment knows which hypothesis is due, an anchor or the final, and what may be shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from asr_serve import units
from asr_serve.audio.audio_buffers import AudioHistory
from asr_serve.audio.endpointing import Endpointer
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.client import EngineClient
from asr_serve.errors import Cancelled, EngineCrashed, StepFailed
from asr_serve.pipelines.live.recognizer import AudioPosition, LiveSegment, PaceEstimator
from asr_serve.pipelines.live.repeated_segment import (
    MAX_TRIES,
    OVERLAP_SAMPLES,
    HypothesisKind,
    PendingHypothesis,
    RepeatedSegment,
)
from asr_serve.pipelines.live.segment_encoder import (
    HypothesisInput,
    IncrementalSegmentEncoder,
    SegmentEncoder,
    WholeSegmentEncoder,
)
from asr_serve.pipelines.live.segment_state import LiveSegmentStates
from asr_serve.pipelines.options import ListenOptions
from asr_serve.pipelines.prompting import prompt_hotwords, prompt_itn
from asr_serve.types import Span

DEADLINE_MS: dict[HypothesisKind, int] = {"anchor": 500, "partial": 2_000, "early": 2_000}
"""Time until a hypothesis that is not urgent is to be encoded."""
URGENT_MS = 100
"""Time for a hypothesis that the caller waits for: a final, whatever a final has to wait for, and the first
hypothesis of a segment, because a speaker who has just begun waits for a sign of recognition."""
URGENT_SAMPLES = units.ms_to_samples(800)
"""Time before a pause is long enough from which the early final, or an anchor before it, is as urgent as the final."""


class RepeatedRecognizer:
    """LiveRecognizer for models of whole utterances."""

    def __init__(
        self,
        client: EngineClient,
        text: Callable[[list[int]], str],
        options: ListenOptions,
        prompt: tuple[int, ...],
        bias: str,
        endpointer: Endpointer,
        audio: AudioHistory,
        wake: Callable[[], None],
        clock: Callable[[], float],
        *,
        words: bool,
    ) -> None:
        """`prompt`: tokens that the model reads before each segment; `bias`: hotwords; `words`: whether times of words
        are requested."""
        self._client, self._text, self._options = client, text, options
        self._endpointer, self._audio, self._wake, self._clock = endpointer, audio, wake, clock
        self._partial = units.ms_to_samples(options.partial_ms)
        self._final_options = SearchOptions(
            language=client.card.language(options.language),
            prompt=prompt,
            bias=bias,
            hotwords=prompt_hotwords(client.card, options.hotwords),
            itn=prompt_itn(client.card, options.itn),
            temperatures=tuple(options.temperatures),
            top_k=options.top_k,
            top_p=options.top_p,
            repetition_penalty=options.repetition_penalty,
            max_new_tokens=options.max_new_tokens,
            hurried=True,
        )
        self._greedy_options = msgspec.structs.replace(self._final_options, temperatures=(0.0,))
        """Search options of hypotheses that are shown and replaced."""
        self._final_options = msgspec.structs.replace(self._final_options, words=words)
        card, chunk = client.card, client.config.chunk_frames or client.card.chunk
        limit_ms = endpointer.config.max_segment_ms or card.max_segment_ms
        self._longest = units.ms_to_samples(limit_ms) + 2 * OVERLAP_SAMPLES
        self._lag = card.lag_samples(chunk) if card.incremental_encoder else 0
        """Audio after a word until a hypothesis contains all of it."""
        self._pad_after = units.ms_to_samples(endpointer.config.pad_after_ms)
        self.due_s: float | None = None
        self._last_submit_s, self._pace = -1e9, PaceEstimator()
        self._position = AudioPosition(0, 0, 0, 0, None, False)

    def open_segment(self, start: int, starts_mid_speech: bool, before: LiveSegment | None) -> RepeatedSegment:
        earliest = start if before is None else before.start
        return RepeatedSegment(
            start, starts_mid_speech, self._text, self._encoder(), earliest, self._options.max_new_tokens
        )

    def _encoder(self) -> SegmentEncoder:
        if self._lag:
            return IncrementalSegmentEncoder(self._client, self._audio, self._longest)
        return WholeSegmentEncoder(self._client, self._audio)

    def export_segments(self, segments: Sequence[LiveSegment]) -> LiveSegmentStates:
        states = []
        for segment in segments:
            assert isinstance(segment, RepeatedSegment)
            states.append(segment.export_state())
        return LiveSegmentStates(repeated=states)

    def import_segments(self, states: LiveSegmentStates, received: int) -> list[LiveSegment]:
        self._pace = PaceEstimator(received)
        limit = self._options.max_new_tokens
        return [RepeatedSegment.from_state(state, self._text, self._encoder(), limit) for state in states.repeated]

    def collect_results(self, each: LiveSegment) -> None:
        assert isinstance(each, RepeatedSegment)
        job = each.job
        if job is None or not job.answer.done():
            return
        each.job = None
        try:
            each.accept_result(job, job.answer.result())
        except (StepFailed, EngineCrashed, Cancelled) as failure:
            each.encoder.close()
            if job.kind in ("anchor", "final"):
                if job.tries == MAX_TRIES or isinstance(failure, EngineCrashed):
                    raise
                self._submit(each, job.kind, job.span, tries=job.tries + 1)

    def join_segments(self, left: LiveSegment, right: LiveSegment) -> None:
        assert isinstance(left, RepeatedSegment)
        assert isinstance(right, RepeatedSegment)
        if right.waits_for_seam and left.finished:
            left.join_next(right)

    def schedule(self, each: LiveSegment, at: AudioPosition) -> None:
        """Submits an anchor or the final if one is due; else a partial if it is time."""
        assert isinstance(each, RepeatedSegment)
        self._position = at
        if each.drop_void_anchors():
            self._cancel_job(each)
        self._expedite_pending(each)
        job = each.job
        if job is not None and job.kind in ("anchor", "final"):
            return
        if each.due_anchors and not each.waits_for_seam:
            end = each.due_anchors.popleft()
            self._submit(each, "anchor", Span(each.audio_from, end))
        elif each.closed and each.final is None and not each.waits_for_seam:
            self._schedule_final(each, job)
        elif job is None and not each.closed and not each.waits_for_seam:
            self._schedule_partial(each)

    def discard(self, each: LiveSegment) -> None:
        assert isinstance(each, RepeatedSegment)
        self._cancel_job(each)
        each.encoder.close()

    def _expedite_pending(self, each: RepeatedSegment) -> None:
        """Makes a pending anchor or early final urgent when the segment's end waits for it."""
        job = each.job
        kinds: tuple[HypothesisKind, ...] = ("anchor",) if each.closed else ("anchor", "early")
        if job is not None and job.kind in kinds and (each.closed or self._closes_soon):
            self._expedite(each, job)

    @staticmethod
    def _expedite(each: RepeatedSegment, job: PendingHypothesis) -> None:
        if job.expedite is not None and not job.urgent:
            job.expedite(URGENT_MS)
            each.job = msgspec.structs.replace(job, urgent=True)

    @property
    def _closes_soon(self) -> bool:
        """Returns whether the pause of the open segment is nearly long enough."""
        closes_at = self._endpointer.closes_at_samples
        return closes_at is not None and closes_at - self._position.scored_samples <= URGENT_SAMPLES

    @staticmethod
    def _cancel_job(each: RepeatedSegment) -> None:
        if each.job is not None:
            each.job.cancel()
            each.job = None

    def _schedule_final(self, each: RepeatedSegment, job: PendingHypothesis | None) -> None:
        span = each.final_span(self._position.decided_samples, all_known=self._position.input_ended)
        if span is None:
            return
        if job is not None and job.kind == "early" and job.span == span:  # it is the final
            self._expedite(each, job)
            return
        if each.early is not None and each.early[0] == span:
            each.final = each.early[1]
            self._wake()
        else:
            self._submit(each, "final", span)

    def _schedule_partial(self, each: RepeatedSegment) -> None:
        now, pause = self._position.scored_samples, self._endpointer.pause_from_samples
        quiet_from = now if pause is None else pause + self._pad_after + self._lag
        end = min(now, quiet_from)
        closes_at = self._endpointer.closes_at_samples
        early = closes_at is not None and now >= quiet_from and each.start_resolved
        urgent = False
        if early:
            if each.early is not None and each.early[0].end_samples == end:
                return
            urgent = self._closes_soon
        elif pause is not None or end - each.recognized_to < self._partial:
            return
        wait_ms = self._client.partial_interval_ms(self._options.partial_ms)
        due_s = self._last_submit_s + wait_ms / 1_000
        if not each.submitted or urgent or self._clock() >= due_s:
            self._submit(each, "early" if early else "partial", Span(each.audio_from, end), urgent=urgent)
        else:
            self.due_s = due_s

    def _submit(
        self, each: RepeatedSegment, kind: HypothesisKind, span: Span, tries: int = 1, urgent: bool = False
    ) -> None:
        before = each.job
        if not each.closed:
            self._last_submit_s = self._clock()  # any hypothesis is shown, and so counts as a partial
        urgent = urgent or each.closed or not each.submitted
        each.submitted = True
        options = self._final_options if kind in ("final", "early") else self._greedy_options
        if language := each.language_for(kind):
            options = msgspec.structs.replace(options, language=language)
        request = HypothesisInput(
            span,
            options,
            self._pace.priority(self._position.received_samples),
            each.draft,
            URGENT_MS if urgent else DEADLINE_MS[kind],
            each.decided_samples if kind == "final" else None,
        )
        answer, cancel, expedite = each.encoder.submit(request)
        each.job = PendingHypothesis(kind, span, answer, cancel, tries, urgent, expedite)
        if before is not None:
            before.cancel()
        answer.add_done_callback(lambda _: self._wake())
