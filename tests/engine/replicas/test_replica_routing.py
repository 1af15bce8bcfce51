"""Choice of replicas: pure, without processes."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr_serve.engine.replicas.routing import SESSION_SAMPLES, AudioIndex, ReplicaLoad, choose, choose_for_audio

LOADS = {"a": ReplicaLoad(0, 0), "b": ReplicaLoad(50_000, 0), "c": ReplicaLoad(100_000, 0), "d": ReplicaLoad(0, 9)}


def load(name: str) -> ReplicaLoad:
    return LOADS[name]


def test_the_longest_queue_is_never_chosen_and_the_shortest_most_often():
    draw = random.Random(1)
    found = Counter(choose("abcd", lambda name: load(name).for_request, draw) for _ in range(4_000))
    assert "d" not in found, "nine sessions weigh more than 100 000 samples"
    assert SESSION_SAMPLES * 9 > 100_000
    assert found["a"] > found["b"] > found["c"] > 0
    assert choose("c", lambda name: load(name).for_request, draw) == "c"
    sessions = Counter(choose("abcd", lambda name: load(name).for_session, draw) for _ in range(4_000))
    assert "d" not in sessions


@pytest.mark.parametrize(("samples", "chosen"), [(100_001, "c"), (100_000, "c"), (99_999, "a")])
def test_a_holder_is_preferred_unless_its_queue_is_longer_than_the_work(samples: int, chosen: str):
    assert choose_for_audio("ac", "c", samples, load, random.Random(1)) == chosen


def test_the_least_loaded_holder_is_chosen():
    assert choose_for_audio("abc", "bc", 1_000_000, load, random.Random(1)) == "b"


def test_work_of_other_servers_counts_as_own_does():
    own = {"a": ReplicaLoad(10, 1), "b": ReplicaLoad(0, 0, others_samples=11, others_sessions=1)}
    assert choose("ab", lambda name: own[name].for_request, random.Random(1)) == "a"
    assert choose("ab", lambda name: own[name].for_session, random.Random(1)) == "a"
    assert choose_for_audio("ab", "b", 0, own.__getitem__, random.Random(1)) == "a"
    assert choose_for_audio("ab", "b", 1, own.__getitem__, random.Random(1)) == "b"


Change = tuple[str, list[int], list[int]]


@given(
    st.lists(st.tuples(st.sampled_from("xyz"), st.lists(st.integers(0, 5)), st.lists(st.integers(0, 5)) | st.none()))
)
def test_the_index_is_what_was_reported(changes: list[tuple[str, list[int], list[int] | None]]):
    index, held = AudioIndex(), dict[str, set[bytes]]()
    for replica, inserted, evicted in changes:
        if evicted is None:
            index.drop(replica)
            held.pop(replica, None)
            continue
        added, removed = {bytes([each]) for each in inserted}, {bytes([each]) for each in evicted}
        index.update(replica, added, removed)
        held[replica] = (held.get(replica, set()) | added) - removed
    for number in range(6):
        digest = bytes([number])
        assert index.holders(digest) == {replica for replica, digests in held.items() if digest in digests}
    assert len(index) == len(set().union(*held.values()))
