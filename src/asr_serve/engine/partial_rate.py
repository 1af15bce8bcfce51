"""Rate of partials, and admission of live callers. Pure: no clock of its own.

A partial is requested at most every `partial_ms`, and at most once per MIN_INTERVAL_TURNAROUNDS turnarounds of
such a request: at any load, callers request less than the engine can compute, so the queue stays short and the end
of a sentence, which is urgent, is on time. When even the longest interval does not help, connected callers are
served and new ones are told to try again.

That measures load which is there already. `LiveAdmission` reserves capacity for callers who have just connected,
whose load is not measured yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from asr_serve.errors import AtCapacity

MIN_INTERVAL_TURNAROUNDS = 2.0
"""Minimum turnarounds between two partials of a caller."""
MAX_INTERVAL_FACTOR = 6.0
"""Longest interval between partials, as a multiple of the requested one."""
OVERLOADED_MS = 1_000.0
"""Mean turnaround of live requests above which no more callers are admitted."""
EMA_WEIGHT = 1 / 32
"""Weight of the newest turnaround in the mean: the mean covers about a second of requests of a busy engine."""
STALE_AFTER_MS = 5_000
"""Age at which a mean without new measurements is discarded."""
MIN_SAMPLES = 16
"""Measurements before any caller is refused: the first ones after a silence may be slow for other reasons."""
RETRY_MS = 5_000
PROOF_MS = 3_000
"""Time since connecting, and speech answered on time within it, after which a caller is proven."""
RETRY_STEP_MS = 300
"""Step by which the retry times of a refused burst differ."""
RESERVATION_MS = 10_000
"""Longest time that a caller counts as new, whatever it sends."""
PROVEN_FOR_MS = 30_000
"""Time after its last speech for which a caller still counts as proven: longer than most pauses of a dialogue."""


class PartialRateController:
    """Load measured as the mean turnaround of live requests."""

    def __init__(self) -> None:
        self.turnaround_ms = 0.0
        self._at_ms = 0.0
        self._answers = 0
        """Answers since the last long silence."""
        self._unanswered: dict[int, float] = {}
        """Submission times of live requests, in order of submission."""

    def record_request(self, request: int, now_ms: float) -> None:
        """Records the submission of a live request."""
        self._unanswered[request] = now_ms

    def record_end(self, request: int) -> None:
        """Records that a live request was answered, failed or was cancelled. Idempotent."""
        self._unanswered.pop(request, None)

    def record_turnaround(self, turnaround_ms: float, now_ms: float) -> None:
        """Adds the turnaround of one live request."""
        if self._stale(now_ms):
            self.turnaround_ms, self._answers = turnaround_ms, 0
        self._answers += 1
        self.turnaround_ms += EMA_WEIGHT * (turnaround_ms - self.turnaround_ms)
        self._at_ms = now_ms

    def interval_ms(self, partial_ms: float, now_ms: float) -> float:
        """Minimum time between two partials of a caller who requests one every `partial_ms`."""
        if self._stale(now_ms):
            return partial_ms
        return min(MAX_INTERVAL_FACTOR * partial_ms, max(partial_ms, MIN_INTERVAL_TURNAROUNDS * self.turnaround_ms))

    def wait_ms(self, now_ms: float) -> float:
        """Wait of live callers for results: the mean turnaround, or the time for which MIN_SAMPLES requests have
        been unanswered where that is longer. 0 while fewer are known."""
        enough = self._answers >= MIN_SAMPLES and not self._stale(now_ms)
        submitted_ms = next(islice(self._unanswered.values(), MIN_SAMPLES - 1, None), now_ms)
        return max(self.turnaround_ms if enough else 0.0, now_ms - submitted_ms)

    def check_overload(self, now_ms: float) -> None:
        """Raises AtCapacity when the engine is too loaded for another caller."""
        if (wait_ms := self.wait_ms(now_ms)) > OVERLOADED_MS:
            raise AtCapacity(
                f"those on line wait {wait_ms:.0f} ms for their words",
                f"callers are let in while that is less than {OVERLOADED_MS:.0f} ms",
                RETRY_MS,
            )

    def _stale(self, now_ms: float) -> bool:
        return now_ms - self._at_ms > STALE_AFTER_MS


@dataclass
class _LiveCaller:
    connected_ms: float
    speech_ms: float = 0.0
    """Speech answered on time since the last late answer."""
    answered_ms: float = 0.0
    """Time of the last speech that was answered on time."""

    def proven(self, now_ms: float) -> bool:
        return self.speech_ms >= PROOF_MS and now_ms - self.connected_ms >= PROOF_MS

    def reserves(self, now_ms: float) -> bool:
        return now_ms - self.connected_ms < RESERVATION_MS and not self.proven(now_ms)


class LiveAdmission:
    """Slow start of live callers: reservations from connecting until the load of a caller is measured.

    There are at most as many new callers as callers whose speech was answered on time lately, or
    `min_reservations` where that is more. A burst therefore at most doubles a load that was shown to work, and the
    next one waits until the callers of this one were answered on time, have left, or were connected for
    RESERVATION_MS: by then `PartialRateController` has measured what they cost.

    The measure is a count of callers: it needs no figure for the cost of one, which batching changes with their
    number. A caller is proven by PROOF_MS of speech answered within OVERLOADED_MS; silence proves nothing. Callers
    who are silent for RESERVATION_MS reserve nothing any more: if many of them begin to speak at once, only the
    overload check of `PartialRateController` refuses the next.
    """

    def __init__(self, min_reservations: int) -> None:
        """`min_reservations`: limit of new callers until more are proven."""
        self.min_reservations = min_reservations
        self._callers: dict[int, _LiveCaller] = {}

    def admit(self, caller: int, now_ms: float) -> None:
        """Reserves capacity for a caller who connects. Raises AtCapacity."""
        callers = self._callers.values()
        on_time = sum(each.proven(now_ms) and now_ms - each.answered_ms <= PROVEN_FOR_MS for each in callers)
        limit = max(self.min_reservations, on_time)
        if (reserved := sum(each.reserves(now_ms) for each in callers)) >= limit:
            # Spread, so that a burst does not come again as a burst.
            retry_ms = PROOF_MS + caller % 10 * RETRY_STEP_MS
            raise AtCapacity(f"{reserved} live callers have just connected", f"up to {limit} at a time", retry_ms)
        self._callers[caller] = _LiveCaller(now_ms)

    def record_answer(self, caller: int, speech_ms: float, wait_ms: float, now_ms: float) -> None:
        """Records that `speech_ms` of speech were answered while results take `wait_ms`. A late answer starts the
        caller's proof again. A caller who has left is ignored."""
        if (known := self._callers.get(caller)) is None:
            return
        if wait_ms > OVERLOADED_MS:
            known.speech_ms = 0.0
        elif speech_ms:
            known.speech_ms += speech_ms
            known.answered_ms = now_ms

    def release(self, caller: int) -> None:
        """Forgets a caller who has left. Idempotent."""
        self._callers.pop(caller, None)
