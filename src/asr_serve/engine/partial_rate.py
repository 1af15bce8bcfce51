"""Rate of partials, and admission of live callers. Pure: no clock of its own.

A partial is requested at most every `partial_ms`, and at most once per MIN_INTERVAL_TURNAROUNDS turnarounds of
such a request: at any load, callers request less than the engine can compute, so the queue stays short and the end
of a sentence, which is urgent, is on time. When even the longest interval does not help, connected callers are
served and new ones are told to try again.

That measures load which is there already. `LiveAdmission` reserves capacity for callers who have just connected,
whose load is not measured yet.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from math import log2

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
ENCODER_SPEED_PER_CALLER = 12.0
"""Speed of the encoder, in seconds of audio per second, for each live caller who may be new. A caller's audio is
encoded three times in the mean, since hypotheses overlap, and decoding takes half as long again: about 4.5. The rest is
for sentences that grow longer, and for batches smaller than those of a proven load."""
MIN_NEW_CALLERS = 4
"""Live callers who may be new on the slowest machine."""
UNMEASURED_NEW_CALLERS = 32
"""Live callers who may be new where the encoder's speed is not measured: in the library, with models that encode audio
once, whose callers cost little, with language models, and with peers that encode."""
PROOF_MS = 3_000
"""Time since connecting, and speech answered on time within it, after which a caller is proven."""
ROUND_MS = 4_500
"""Typical time until a caller who speaks is proven: the pauses of speech count too."""
MIN_RETRY_MS, MAX_RETRY_MS = 200, 30_000
RESERVATION_MS = 10_000
"""Time without a proof after which a new caller is idle."""
PROVEN_FOR_MS = 30_000
"""Time after its last speech for which a caller stays proven: longer than most pauses of a dialogue."""


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


def callers_for_speed(encoder_speed: float) -> int:
    """Returns how many live callers may be new, with a model that encodes `encoder_speed` seconds of audio per second
    anew for each hypothesis."""
    return max(MIN_NEW_CALLERS, int(encoder_speed / ENCODER_SPEED_PER_CALLER))


class _CallerState(Enum):
    NEW = auto()
    PROVEN = auto()
    IDLE = auto()


@dataclass(slots=True)
class _LiveCaller:
    client: str | None
    since_ms: float
    """Time since which it is new, or was before it was proven or idle."""
    state: _CallerState = _CallerState.NEW
    speech_ms: float = 0.0
    """Speech answered on time since then and since the last late answer."""
    answered_ms: float = 0.0
    """Time of the last speech that was answered on time."""


class LiveAdmission:
    """Slow start of live callers: reservations from connecting until the load of a caller is measured.

    A caller is new until it is proven by PROOF_MS of speech answered within OVERLOADED_MS. It is idle after
    RESERVATION_MS without a proof, or PROVEN_FOR_MS without speech. A late answer makes a proven caller new again;
    so does the first speech of an idle one, whose load returns and is not measured.

    There are at most as many new callers as proven ones, so a burst at most doubles a load that was shown to work; and
    fewer the longer words take, none at OVERLOADED_MS: what a caller costs grows with its sentence, and shows after its
    proof. Until `min_reservations` callers are proven, at least as many may be new as lack of that.

    Idle callers may all begin to speak at once: each counts as a new one, but together they take at most half of the
    places, so that they never keep all others out. While several clients connect, the new callers of each may take
    three quarters of the places.

    The measure is a count of callers: but for the first number it needs no figure for the cost of one, which batching
    changes with their number. Every call takes O(1) time, amortized: the callers of a state are in the order in which
    they leave it.
    """

    def __init__(self, min_reservations: int) -> None:
        """`min_reservations`: limit of new callers until more are proven."""
        self.min_reservations = min_reservations
        self._callers: dict[int, _LiveCaller] = {}
        self._by_state: dict[_CallerState, OrderedDict[int, _LiveCaller]] = {
            state: OrderedDict() for state in _CallerState
        }
        """New callers by `since_ms`, proven ones by `answered_ms`."""
        self._new_by_client: Counter[str | None] = Counter()
        self._attempts_ms: OrderedDict[str | None, float] = OrderedDict()
        """Client -> time of its last attempt to connect, in this order."""
        self._refused = 0
        """Callers who were told a time to try again, and did not yet."""
        self._last_retry_ms = 0.0
        """Latest time that one of them was told."""

    def admit(self, number: int, now_ms: float, client: str | None = None, wait_ms: float = 0.0) -> None:
        """Reserves capacity for a caller who connects. `client`: whose caller it is, where that is known. `wait_ms`:
        what results take. Raises AtCapacity."""
        self._expire(now_ms)
        self._attempts_ms[client] = now_ms
        self._attempts_ms.move_to_end(client)
        new, proven, idle = (len(self._by_state[state]) for state in _CallerState)
        headroom = max(0.0, 1.0 - wait_ms / OVERLOADED_MS)
        limit = max(self.min_reservations - proven, int(proven * headroom))
        share = limit - limit // 4 if len(self._attempts_ms) > 1 else limit
        if (reserved := new + min(idle, limit // 2)) >= limit:
            raise AtCapacity(
                f"{reserved} live callers have just connected or say nothing, and words take {wait_ms:.0f} ms",
                f"up to {limit} at a time",
                self._retry_after_ms(limit, now_ms),
            )
        if (own := self._new_by_client[client]) >= share:
            raise AtCapacity(
                f"{own} live callers with this key have just connected",
                f"up to {share} at a time while others connect",
                self._retry_after_ms(limit, now_ms),
            )
        self._refused = max(0, self._refused - 1)
        self._callers[number] = self._by_state[_CallerState.NEW][number] = _LiveCaller(client, now_ms)
        self._new_by_client[client] += 1

    def record_answer(self, number: int, speech_ms: float, wait_ms: float, now_ms: float) -> None:
        """Records that `speech_ms` of speech were answered while results take `wait_ms`. A late answer starts the
        caller's proof again. A caller who has left is ignored."""
        self._expire(now_ms)
        if (caller := self._callers.get(number)) is None:
            return
        if wait_ms > OVERLOADED_MS:
            caller.speech_ms = 0.0
            if caller.state is _CallerState.PROVEN:
                self._move(number, caller, _CallerState.NEW, now_ms)
        elif speech_ms:
            if caller.state is _CallerState.IDLE:
                caller.speech_ms = 0.0
                self._move(number, caller, _CallerState.NEW, now_ms)
            caller.speech_ms += speech_ms
            caller.answered_ms = now_ms
            if caller.speech_ms >= PROOF_MS and now_ms - caller.since_ms >= PROOF_MS:
                self._move(number, caller, _CallerState.PROVEN, caller.since_ms)

    def release(self, number: int) -> None:
        """Forgets a caller who has left. Idempotent."""
        if (caller := self._callers.pop(number, None)) is not None:
            self._leave_state(number, caller)

    def _expire(self, now_ms: float) -> None:
        """Makes callers idle whose time is over, and forgets attempts to connect."""
        for state, limit_ms in ((_CallerState.NEW, RESERVATION_MS), (_CallerState.PROVEN, PROVEN_FOR_MS)):
            callers = self._by_state[state]
            while callers:
                number, caller = next(iter(callers.items()))
                entered_ms = caller.since_ms if state is _CallerState.NEW else caller.answered_ms
                if now_ms - entered_ms < limit_ms:
                    break
                self._move(number, caller, _CallerState.IDLE, caller.since_ms)
        while self._attempts_ms and now_ms - next(iter(self._attempts_ms.values())) >= PROVEN_FOR_MS:
            self._attempts_ms.popitem(last=False)

    def _move(self, number: int, caller: _LiveCaller, state: _CallerState, since_ms: float) -> None:
        """Puts a caller last among those of a state."""
        self._leave_state(number, caller)
        caller.state, caller.since_ms = state, since_ms
        self._by_state[state][number] = caller
        if state is _CallerState.NEW:
            self._new_by_client[caller.client] += 1

    def _leave_state(self, number: int, caller: _LiveCaller) -> None:
        del self._by_state[caller.state][number]
        if caller.state is _CallerState.NEW:
            self._new_by_client[caller.client] -= 1
            if not self._new_by_client[caller.client]:
                del self._new_by_client[caller.client]

    def _retry_after_ms(self, limit: int, now_ms: float) -> int:
        """Time after which a caller who is refused finds a place, if those before it speak and are served: `limit`
        of them in the first round, twice as many in each that follows. The times of a burst are spread by this."""
        if now_ms >= self._last_retry_ms:
            self._refused = 0
        self._refused += 1
        new = self._by_state[_CallerState.NEW]
        oldest_ms = next(iter(new.values())).since_ms if new else now_ms
        turn_ms = ROUND_MS if now_ms - oldest_ms < ROUND_MS else RESERVATION_MS
        wait_ms = oldest_ms + turn_ms - now_ms + ROUND_MS * log2(1 + self._refused / max(1, limit))
        retry_ms = round(min(MAX_RETRY_MS, max(MIN_RETRY_MS, wait_ms)))
        self._last_retry_ms = max(self._last_retry_ms, now_ms + retry_ms)
        return retry_ms
