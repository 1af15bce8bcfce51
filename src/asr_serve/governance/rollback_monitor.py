"""Watch over a candidate: what became of its requests, beside those of the stable model, and which rule they break.

Pure: times are arguments, and nothing is waited for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from asr_serve.governance.policy import MAX_OUTCOMES, RollbackRules

RequestKind = Literal["upload", "live"]
"""Kind of a request. Latencies of the two are not compared: one is that of a recording, the other of a sentence."""
KINDS: tuple[RequestKind, ...] = ("upload", "live")


class Regression(NamedTuple):
    """A rule that a candidate breaks."""

    rule: str
    """Key of the rule in the policy."""
    reason: str
    figures: dict[str, float]


class ModelOutcomes:
    """Outcomes of one model's requests within a window, and at least the last `minimum` of them; of more than
    MAX_OUTCOMES the newest."""

    def __init__(self, window_s: float, minimum: int) -> None:
        self._window_s, self._minimum = window_s, minimum
        self._requests: deque[tuple[float, bool]] = deque(maxlen=MAX_OUTCOMES)
        self._latencies: dict[RequestKind, deque[tuple[float, float]]] = {
            kind: deque(maxlen=MAX_OUTCOMES) for kind in KINDS
        }
        self.finished = 0
        """Requests that were finished, failed ones included, in all."""

    def add_request(self, now_s: float, *, failed: bool) -> None:
        self._requests.append((now_s, failed))
        self.finished += 1

    def add_latency(self, now_s: float, kind: RequestKind, latency_s: float) -> None:
        self._latencies[kind].append((now_s, latency_s))

    def requests(self, now_s: float) -> tuple[int, int]:
        """Number of requests in the window, and of those that failed."""
        self._forget(self._requests, now_s)
        return len(self._requests), sum(failed for _, failed in self._requests)

    def latencies(self, now_s: float, kind: RequestKind) -> list[float]:
        found = self._latencies[kind]
        self._forget(found, now_s)
        return [latency_s for _, latency_s in found]

    def _forget(self, found: deque[tuple[float, bool]] | deque[tuple[float, float]], now_s: float) -> None:
        while len(found) > self._minimum and found[0][0] < now_s - self._window_s:
            found.popleft()


def percentile_95(values: Sequence[float]) -> float:
    """The smallest value that at least 95 % of them do not exceed.

    >>> percentile_95([float(n) for n in range(1, 101)]), percentile_95([7.0])
    (95.0, 7.0)
    """
    return sorted(values)[max(0, math.ceil(0.95 * len(values)) - 1)]


class RollbackMonitor:
    """Outcomes of the two models of a route since a stage began."""

    def __init__(self, rules: RollbackRules, baselines_s: Mapping[RequestKind, float] | None = None) -> None:
        """`baselines_s`: 95th percentiles of the stable model's latency from before, for a stage in which it serves
        nobody."""
        self._rules = rules
        self._baselines_s = dict(baselines_s or {})
        self.stable, self.candidate = (ModelOutcomes(rules.window_s, rules.minimum_requests) for _ in range(2))
        self.restarts = 0
        self.shadow_words = self.shadow_differences = self.shadow_clips = 0

    def add_shadow(self, words: int, differences: int) -> None:
        """Adds a recording that both models transcribed: words of the stable model, and those that differ."""
        self.shadow_words += words
        self.shadow_differences += differences
        self.shadow_clips += 1

    def baselines_s(self, now_s: float) -> dict[RequestKind, float]:
        """95th percentiles of the stable model's latency: of the window where it has enough, else those from before."""
        found = dict(self._baselines_s)
        for kind in KINDS:
            latencies = self.stable.latencies(now_s, kind)
            if len(latencies) >= self._rules.minimum_requests:
                found[kind] = percentile_95(latencies)
        return found

    def figures(self, now_s: float) -> dict[str, float]:
        """Figures measured so far, for the audit log and for operators."""
        figures: dict[str, float] = {"restarts": self.restarts}
        for name, outcomes in (("stable", self.stable), ("candidate", self.candidate)):
            requests, failed = outcomes.requests(now_s)
            figures |= {f"{name}_finished": outcomes.finished, f"{name}_requests": requests, f"{name}_failed": failed}
            for kind in KINDS:
                if latencies := outcomes.latencies(now_s, kind):
                    figures[f"{name}_{kind}_latency_p95_s"] = round(percentile_95(latencies), 4)
        for kind, baseline_s in self.baselines_s(now_s).items():
            figures[f"baseline_{kind}_latency_p95_s"] = round(baseline_s, 4)
        if self.shadow_clips:
            figures |= {
                "shadow_clips": self.shadow_clips,
                "shadow_words": self.shadow_words,
                "shadow_differences": self.shadow_differences,
            }
        return figures

    def regression(self, now_s: float, least: int | None = None) -> Regression | None:
        """The first rule that is broken; None: none is. `least`: requests from which rates and latencies count, in
        place of the rules' own number."""
        rules = self._rules
        least = rules.minimum_requests if least is None else max(1, least)
        if rules.restarts_above is not None and self.restarts > rules.restarts_above:
            return self._broken(now_s, "restarts_above", f"its engine died {self.restarts} times", rules.restarts_above)
        requests, failed = self.candidate.requests(now_s)
        if (
            rules.error_percent_above is not None
            and requests >= least
            and 100 * failed / requests > rules.error_percent_above
        ):
            what = f"{failed} of its last {requests} requests failed"
            return self._broken(now_s, "error_percent_above", what, rules.error_percent_above)
        if rules.latency_p95_ratio_above is not None:
            for kind, baseline_s in self.baselines_s(now_s).items():
                latencies = self.candidate.latencies(now_s, kind)
                if len(latencies) < least:
                    continue
                p95_s = percentile_95(latencies)
                if p95_s > rules.latency_p95_ratio_above * baseline_s:
                    what = (
                        f"95 % of its {kind} latencies are up to {p95_s:.3f} s, and the stable model's {baseline_s:.3f}"
                    )
                    return self._broken(now_s, "latency_p95_ratio_above", what, rules.latency_p95_ratio_above)
        if rules.disagreement_percent_above is not None and self.shadow_clips >= least:
            percent = 100 * self.shadow_differences / max(1, self.shadow_words)
            if percent > rules.disagreement_percent_above:
                what = (
                    f"{self.shadow_differences} of {self.shadow_words} words of {self.shadow_clips} recordings differ"
                )
                return self._broken(now_s, "disagreement_percent_above", what, rules.disagreement_percent_above)
        return None

    def _broken(self, now_s: float, rule: str, what: str, bound: float) -> Regression:
        return Regression(rule, f"{what} ({rule} = {bound:g})", self.figures(now_s))
