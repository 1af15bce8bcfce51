"""Choice of a replica: who has the audio, else the shorter queue of two that are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from asr_serve import units

SESSION_SAMPLES = units.s_to_samples(1.0)
"""Weight of an open session in a queue, in samples: a live caller sends a second of audio in each second."""

R = TypeVar("R")


class ReplicaLoad(NamedTuple):
    """Load of a replica: what this server has there, and what the other servers have."""

    queued_samples: int
    """Samples of this server's requests that are not answered."""
    sessions: int
    """Open sessions and streams of this server."""
    others_samples: int = 0
    """Samples of the other servers that are not answered, as the replica reported them last."""
    others_sessions: int = 0
    """Open sessions and streams of the other servers, as it reported them last."""

    @property
    def all_samples(self) -> int:
        return self.queued_samples + self.others_samples

    @property
    def all_sessions(self) -> int:
        return self.sessions + self.others_sessions

    @property
    def for_request(self) -> tuple[int, int]:
        """Order of replicas for a request: the shorter queue of audio first, then the fewer sessions."""
        return self.all_samples + SESSION_SAMPLES * self.all_sessions, self.all_sessions

    @property
    def for_session(self) -> tuple[int, int]:
        """Order of replicas for a session, which stays: fewer sessions first, then the shorter queue of audio."""
        return self.all_sessions, self.all_samples


def choose(replicas: Sequence[R], order: Callable[[R], tuple[int, int]], draw: random.Random) -> R:
    """Returns the better one of two replicas that are drawn: of all, several servers would choose the same.

    Source  Mitzenmacher, The Power of Two Choices in Randomized Load Balancing (2001)
    """
    return min(draw.sample(replicas, min(2, len(replicas))), key=order)


def choose_for_audio(
    replicas: Sequence[R], holders: Sequence[R], samples: int, load: Callable[[R], ReplicaLoad], draw: random.Random
) -> R:
    """Returns the replica for a request of `samples`: of those that have its audio the least loaded one, unless its
    queue is longer than another's by more than the request itself, which is what computing it again costs."""

    def order(replica: R) -> tuple[int, int]:
        return load(replica).for_request

    other = choose(replicas, order, draw)
    if not holders:
        return other
    holder = min(holders, key=order)
    return holder if order(holder)[0] - order(other)[0] <= samples else other


class AudioIndex:
    """Index of the audio that replicas have cached, by digest, as they report it. An entry is valid while the
    connection to its replica is: changes come over that, in their order."""

    def __init__(self) -> None:
        self._holders: dict[bytes, set[str]] = {}
        self._held: dict[str, set[bytes]] = {}

    def __len__(self) -> int:
        """Number of digests."""
        return len(self._holders)

    def update(self, replica: str, inserted: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        held = self._held.setdefault(replica, set())
        for digest in inserted:
            held.add(digest)
            self._holders.setdefault(digest, set()).add(replica)
        for digest in evicted:
            if digest in held:
                held.remove(digest)
                self._remove(digest, replica)

    def drop(self, replica: str) -> None:
        """Removes a replica."""
        for digest in self._held.pop(replica, ()):
            self._remove(digest, replica)

    def holders(self, digest: bytes) -> frozenset[str]:
        """Replicas that have the audio."""
        return frozenset(self._holders.get(digest, ()))

    def _remove(self, digest: bytes, replica: str) -> None:
        holders = self._holders[digest]
        holders.remove(replica)
        if not holders:
            del self._holders[digest]
