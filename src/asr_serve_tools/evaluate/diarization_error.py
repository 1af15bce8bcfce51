"""Diarization error: missed speech, false alarms and confused speakers, without a collar, overlaps included.

Source  NIST's md-eval, as pyannote.metrics' DiarizationErrorRate(collar=0.0, skip_overlap=False) computes it
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from asr_serve.errors import OptionError
from asr_serve.types import SpeakerTurn
from asr_serve.units import s_to_samples


class DiarizationError(NamedTuple):
    speaker_samples: int
    """Time of the reference's speakers: where two speak, it counts twice. The denominator of the rate."""
    error_samples: int
    """Missed, false and confused time."""


def diarization_error(
    reference: Iterable[SpeakerTurn], hypothesis: Iterable[SpeakerTurn], length_samples: int
) -> DiarizationError:
    """Error under the best mapping of the hypothesis' speakers to the reference's, within 0 to `length_samples`."""
    said, heard = (_clipped(turns, length_samples) for turns in (reference, hypothesis))
    bounds = sorted({place for turn in (*said, *heard) for place in (turn.start_samples, turn.end_samples)})
    speakers, others = ([*dict.fromkeys(turn.speaker for turn in turns)] for turns in (said, heard))
    together = [[0] * len(others) for _ in speakers]
    total = larger = 0
    for start, end in itertools.pairwise(bounds):
        active, found = (
            {t.speaker for t in turns if t.start_samples <= start < t.end_samples} for turns in (said, heard)
        )
        total += (end - start) * len(active)
        larger += (end - start) * max(len(active), len(found))
        for speaker in active:
            for other in found:
                together[speakers.index(speaker)][others.index(other)] += end - start
    return DiarizationError(total, larger - best_assignment(together))


def best_assignment(weights: Sequence[Sequence[int]]) -> int:
    """Largest sum of weights, at most one of each row and of each column (the Hungarian method)."""
    size = max(len(weights), max(map(len, weights), default=0))
    cost = [[0] * (size + 1)]
    cost += [
        [0, *(-weights[r][c] if r < len(weights) and c < len(weights[r]) else 0 for c in range(size))]
        for r in range(size)
    ]
    rows, columns, match = [0] * (size + 1), [0] * (size + 1), [0] * (size + 1)
    for row in range(1, size + 1):
        match[0], column = row, 0
        least, used, before = [float("inf")] * (size + 1), [False] * (size + 1), [0] * (size + 1)
        while match[column]:
            used[column] = True
            here, step, following = match[column], float("inf"), 0
            for other in range(1, size + 1):
                if used[other]:
                    continue
                reduced = cost[here][other] - rows[here] - columns[other]
                if reduced < least[other]:
                    least[other], before[other] = reduced, column
                if least[other] < step:
                    step, following = least[other], other
            for other in range(size + 1):
                if used[other]:
                    rows[match[other]] += int(step)
                    columns[other] -= int(step)
                else:
                    least[other] -= step
            column = following
        while column:
            match[column] = match[before[column]]
            column = before[column]
    return sum(-cost[match[column]][column] for column in range(1, size + 1))


def read_rttm(path: Path) -> dict[str, list[SpeakerTurn]]:
    """Turns of each recording of an RTTM file. Raises OptionError, with the line that is wrong."""
    found: dict[str, list[SpeakerTurn]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fields = line.split()
        if not fields or fields[0] != "SPEAKER":
            continue
        try:
            start_s, length_s, speaker = float(fields[3]), float(fields[4]), fields[7]
        except (IndexError, ValueError):
            raise OptionError(
                f"{path}, line {number}: {line[:80]!r}", "SPEAKER file channel start length <NA> <NA> speaker"
            ) from None
        turn = SpeakerTurn(speaker, s_to_samples(start_s), s_to_samples(start_s + length_s))
        found.setdefault(fields[1], []).append(turn)
    return found


def _clipped(turns: Iterable[SpeakerTurn], length_samples: int) -> list[SpeakerTurn]:
    found = (
        SpeakerTurn(turn.speaker, max(0, turn.start_samples), min(length_samples, turn.end_samples)) for turn in turns
    )
    return [turn for turn in found if turn.end_samples > turn.start_samples]
