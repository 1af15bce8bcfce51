"""Differences of error rates between systems over the same clips, with their intervals.

Two intervals that overlap do not say that two systems are alike: both have the same easy and hard clips, so their
difference is known more exactly than either rate. It is drawn clip by clip.

Source  Bisani and Ney 2004, "Bootstrap estimates for confidence intervals in ASR performance evaluation"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from asr_serve.evaluation.bootstrap import error_interval
from asr_serve.evaluation.store import EvaluationResult, EvaluationStore, EvaluationSummary


class RateDifference(msgspec.Struct, frozen=True):
    """Error rate of a run above that of another one, in percentage points."""

    system: str
    other: str
    dataset: str
    measure: str
    """WER, or CER where words are not counted."""
    clips: int
    """Number of clips that both have."""
    points: float
    low: float
    high: float
    """Bounds that hold 95 % of the resamples."""

    @property
    def is_certain(self) -> bool:
        """Returns whether the interval leaves out that there is no difference."""
        return not self.low <= 0 <= self.high


def differences_to_best(store: EvaluationStore, summaries: Sequence[EvaluationSummary]) -> list[RateDifference]:
    """Differences of runs to the one with the lowest rate, for each dataset with two runs or more."""
    found = []
    for key in dict.fromkeys(map(_dataset, summaries)):
        runs = [each for each in summaries if _dataset(each) == key and _rate(each) is not None]
        runs.sort(key=lambda each: _rate(each) or 0.0)
        if len(runs) < 2:
            continue
        best = store.results(runs[0].run_id)
        for other in runs[1:]:
            difference = rate_difference(other, store.results(other.run_id), runs[0], best)
            if difference is not None:
                found.append(difference)
    return found


def rate_difference(
    one: EvaluationSummary,
    results: Iterable[EvaluationResult],
    other: EvaluationSummary,
    others: Iterable[EvaluationResult],
) -> RateDifference | None:
    """Difference of two runs over the clips that both have; None: there is no such clip with a transcript."""
    counts = {row.path: pair for row in others if (pair := _counts(row)) is not None}
    pairs = [
        (pair[0] - counts[row.path][0], pair[1])
        for row in results
        if (pair := _counts(row)) is not None and row.path in counts
    ]
    errors, lengths = [errors for errors, _ in pairs], [length for _, length in pairs]
    bounds = error_interval(errors, lengths)
    if bounds is None:
        return None
    measure = "CER" if one.wer is None else "WER"
    points = 100 * sum(errors) / sum(lengths)
    return RateDifference(one.system, other.system, one.dataset, measure, len(pairs), points, *bounds)


def _dataset(summary: EvaluationSummary) -> tuple[str, str, str, bool]:
    return summary.dataset, summary.dataset_sha256, summary.language, summary.live


def _rate(summary: EvaluationSummary) -> float | None:
    return summary.cer if summary.wer is None else summary.wer


def _counts(row: EvaluationResult) -> tuple[int, int] | None:
    """Errors and length of the reference in words, or in characters where words are not counted."""
    if row.error is not None:
        return None
    if row.words is not None and row.word_errors is not None:
        return row.word_errors, row.words
    if row.characters is not None and row.character_errors is not None:
        return row.character_errors, row.characters
    return None
