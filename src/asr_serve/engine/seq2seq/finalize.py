"""Finalizer of rows that have ended: they leave with an answer, or are decoded or encoded again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from asr_serve.decoding.hypothesis import Recognition
from asr_serve.engine.executor import StepGuard
from asr_serve.engine.seq2seq.ctc_token_aligner import CtcTokenAligner
from asr_serve.engine.seq2seq.token_aligner import FinishedRow, TokenAligner
from asr_serve.errors import OptionError
from asr_serve.models.interfaces import SpeechLanguageModel

if TYPE_CHECKING:
    from asr_serve.decoding.hypothesis import Reused
    from asr_serve.engine.seq2seq.coalescing import RequestCoalescer
    from asr_serve.engine.seq2seq.decode_batch import DecodeRow
    from asr_serve.engine.seq2seq.decoder import DecodeRunner
    from asr_serve.engine.seq2seq.hotword_rescoring import HotwordRescorer
    from asr_serve.engine.seq2seq.request_table import RequestTable


GuardStep = Callable[[str, str, list[int]], StepGuard]
"""Returns a guard for a stage, a description of its work, and the ids of the requests that fail with it."""


MAX_RESCORE_TOKENS = 64
"""Tokens of answers rescored in a step, or one longer answer: few enough that no other request waits long."""


class Finalizer:
    """Finalizes rows that have ended; belongs to the loop's thread."""

    def __init__(
        self,
        runner: DecodeRunner,
        requests: RequestTable,
        coalescer: RequestCoalescer,
        rescorer: HotwordRescorer,
        guard: GuardStep,
    ) -> None:
        self._runner, self._requests, self._coalescer, self._guard = runner, requests, coalescer, guard
        self._rescorer = rescorer
        head = runner.model.ctc_head if isinstance(runner.model, SpeechLanguageModel) else None
        self._aligner = TokenAligner(runner) if head is None else CtcTokenAligner(head, requests.text)
        self._pending: list[FinishedRow] = []
        """Rows that wait for rescoring."""
        self._oldest_first = True

    def finalize(self, rows: Sequence[DecodeRow]) -> None:
        """Finishes requests of rows that have ended; those with hotwords wait for `rescore`."""
        ended = [
            FinishedRow(row, answer, self._requests.open[row.request_id].samples)
            for row in rows
            if (answer := self._finish_hypothesis(row)) is not None
        ]
        needs_rescoring = self._rescorer.applies
        self._complete([each for each in ended if not needs_rescoring(each)])
        to_rescore = [each for each in ended if needs_rescoring(each)]
        for each in to_rescore:
            self._runner.release_row_slot(each.row)
        self._pending += to_rescore

    def rescore(self) -> bool:
        """Rescores some of the rows that wait for it; returns whether there were any."""
        open_ = self._requests.open
        waiting = [each for each in self._pending if each.row.request_id in open_]
        self._oldest_first = not self._oldest_first
        if not self._oldest_first:  # urgent ones first, but only every other time, so that a file has its turn
            waiting.sort(key=lambda each: not open_[each.row.request_id].urgent)
        sizes = accumulate(len(each.recognition.tokens) for each in waiting)
        count = max(1, sum(size <= MAX_RESCORE_TOKENS for size in sizes))
        batch, self._pending = waiting[:count], waiting[count:]
        if not batch:
            return False
        started, rescored = time.perf_counter(), list[FinishedRow]()
        with self._guard("hotwords", "rescoring hotwords", [each.row.request_id for each in batch]):
            rescored = self._rescorer.rescore(batch)
        fill = min(1.0, sum(len(each.recognition.tokens) for each in batch) / MAX_RESCORE_TOKENS)
        self._requests.stats.record_step("hotwords", time.perf_counter() - started, len(batch), fill)
        self._complete(rescored)
        return True

    @property
    def has_pending(self) -> bool:
        """Returns whether any row waits for rescoring."""
        return bool(self._pending)

    def _complete(self, ended: Sequence[FinishedRow]) -> None:
        requests = self._requests
        timed = [each.row.request_id for each in ended if each.row.hypothesis.options.words]
        with self._guard("decode", "computing word times", timed):
            ended = self._aligner.add_times(ended)
        for row, answer, _ in ended:
            if (utterance := requests.open.get(row.request_id)) is not None:
                self._runner.remove_row(row)
                reused: Reused = "audio" if utterance.answer_digest and not utterance.encoded else ""
                requests.finish(utterance, answer, reused)
                self._coalescer.publish_answer(utterance, answer)

    def _finish_hypothesis(self, row: DecodeRow) -> Recognition | None:
        """Returns the answer; None if the row failed, was restarted, or will be encoded again."""
        assert row.finish is not None
        answer: Recognition | None = None
        with self._guard("decode", "finalizing an answer", [row.request_id]):
            answer = row.hypothesis.finalize(row.finish)
        if row.request_id not in self._requests.open:
            return None
        if len(row.hypothesis.rejected) == 1 and self._reencode_full_window(row):
            return None
        if answer is None:
            self._requests.stats.record_fallback()
            self._runner.restart_row(row)
        return answer

    def _reencode_full_window(self, row: DecodeRow) -> bool:
        """Schedules the request again, with all of its window; returns whether it did. Not where nothing was left out,
        where the whole window does not fit, and for hurried requests that have only one temperature."""
        utterance, options = self._requests.open[row.request_id], row.hypothesis.options
        if not self._requests.omits_window_silence(utterance) or (options.hurried and len(options.temperatures) == 1):
            return False
        utterance.full_window = True
        try:
            self._requests.validate_capacity(utterance)
        except OptionError:
            utterance.pcm = None
            return False
        self._requests.stats.record_fallback()
        self._runner.remove_row(row)
        self._coalescer.request_frames(utterance)
        return True
