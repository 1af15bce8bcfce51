"""Confidence interval of a corpus' error rate, by the bootstrap over its clips.

Clips are drawn with replacement, and the rate is computed anew for each draw: the interval says how far the rate would
move with other clips of the same kind. It says nothing about speech of another kind.

Source  Bisani and Ney 2004, "Bootstrap estimates for confidence intervals in ASR performance evaluation"
"""

from __future__ import annotations

from collections.abc import Sequence

RESAMPLES = 1_000
SEED = 20_240_229
INTERVAL_PERCENT = 95.0
_BLOCK = 1 << 22
"""Drawn indices that are in memory at once."""


def error_interval(errors: Sequence[float], lengths: Sequence[float]) -> tuple[float, float] | None:
    """Bounds, in percent, that hold INTERVAL_PERCENT of the rates `sum(errors) / sum(lengths)` of RESAMPLES draws.

    The draws depend on the number of clips alone, so that equal counts give equal bounds in every process. With the
    difference of two systems' errors on each clip they are bounds of the difference of the two rates: it is told far
    more exactly than by two intervals, since both systems have the same easy and hard clips.

    Args:
        errors: errors of each clip, words, characters or seconds; or differences of errors.
        lengths: length of each clip's reference in the same unit.

    Returns:
        Lower and upper bound; None without a clip, or where no clip has a reference.
    """
    import numpy as np

    wrong, total = np.asarray(errors, np.float64), np.asarray(lengths, np.float64)
    if not len(wrong) or not total.sum() > 0:
        return None
    random, rates = np.random.default_rng(SEED), []
    rows = max(1, _BLOCK // len(wrong))
    for first in range(0, RESAMPLES, rows):
        drawn = random.integers(0, len(wrong), (min(rows, RESAMPLES - first), len(wrong)))
        lengths_drawn = total[drawn].sum(1)
        usable = lengths_drawn > 0  # a draw of clips without any reference has no rate
        rates.append(100 * wrong[drawn].sum(1)[usable] / lengths_drawn[usable])
    outside = (100 - INTERVAL_PERCENT) / 2
    low, high = np.percentile(np.concatenate(rates), [outside, 100 - outside])
    return float(low), float(high)
