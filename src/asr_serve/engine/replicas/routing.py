"""Choice of a replica: the shorter queue of two that are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from asr_serve import units

SESSION_SAMPLES = units.s_to_samples(1.0)
"""Weight of an open session in a queue, in samples: a live caller sends a second of audio in each second."""

R = TypeVar("R")


class ReplicaLoad(NamedTuple):
    """Load of a replica."""

    queued_samples: int
    """Samples of requests that are not answered."""
    sessions: int
    """Open sessions and streams."""

    @property
    def for_request(self) -> tuple[int, int]:
        """Order of replicas for a request: the shorter queue of audio first, then the fewer sessions."""
        return self.queued_samples + SESSION_SAMPLES * self.sessions, self.sessions

    @property
    def for_session(self) -> tuple[int, int]:
        """Order of replicas for a session, which stays: fewer sessions first, then the shorter queue of audio."""
        return self.sessions, self.queued_samples


def choose(replicas: Sequence[R], order: Callable[[R], tuple[int, int]], draw: random.Random) -> R:
    """Returns the better one of two replicas that are drawn: of all, several servers would choose the same.

    Source  Mitzenmacher, The Power of Two Choices in Randomized Load Balancing (2001)
    """
    return min(draw.sample(replicas, min(2, len(replicas))), key=order)
