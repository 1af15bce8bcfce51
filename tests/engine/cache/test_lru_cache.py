"""Names of audio that nobody else's has, and values that leave when there is no room."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.engine.cache.digest import DIGEST_BYTES, audio_digest
from asr_serve.engine.cache.lru_cache import LruCache


def some_audio(samples: int = 4_000) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(samples).astype(np.float32)


def others(pcm: np.ndarray) -> Iterator[tuple[np.ndarray, tuple[object, ...]]]:
    """That are not the same audio, asked for in the same way."""
    louder = pcm.copy()
    louder[-1] = np.nextafter(louder[-1], np.float32(np.inf))
    yield louder, ()
    yield pcm[:-1], ()
    yield np.append(pcm, np.float32(0)), ()
    yield np.append(np.float32(0), pcm), ()
    yield pcm[::-1], ()
    yield pcm.reshape(2, -1), ()
    yield pcm.view(np.int32), ()
    yield pcm.astype(np.float64), ()
    yield pcm[:0], ()
    for facts in ((True,), (False,), ("a", "b"), ("ab",), ("a", "b", None), (("a", "b"),), (b"ab",), (1,), (1.0,)):
        yield pcm, facts


def test_other_audio_or_other_facts_have_another_name():
    pcm = some_audio()
    names = [audio_digest(pcm), *(audio_digest(other, *facts) for other, facts in others(pcm))]
    assert len(set(names)) == len(names)
    assert {len(name) for name in names} == {DIGEST_BYTES}


def test_the_same_samples_have_the_same_name_wherever_they_lie():
    pcm = some_audio()
    locked, spread = pcm.copy(), np.zeros((len(pcm), 3), np.float32)
    locked.setflags(write=False)
    spread[:, 1] = pcm
    assert (
        audio_digest(pcm, True)
        == audio_digest(locked, True)
        == audio_digest(spread[:, 1], True)
        == audio_digest(pcm, True)
    )


def test_another_process_has_other_names():
    script = (
        "import numpy, asr_serve.engine.cache.digest as d; print(d.audio_digest(numpy.zeros(160, 'float32')).hex())"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    asked = subprocess.run([sys.executable, "-c", script], env=environ, check=True, capture_output=True, text=True)
    theirs = bytes.fromhex(asked.stdout)
    assert len(theirs) == DIGEST_BYTES
    assert theirs != audio_digest(np.zeros(160, np.float32))


def test_facts_are_plain_values():
    with pytest.raises(TypeError):
        audio_digest(some_audio(), object())


KEYS = st.sampled_from([b"a", b"b", b"c", b"d"])
ASKED = st.one_of(
    st.tuples(st.just("put"), KEYS, st.integers(1, 12)),
    st.tuples(st.just("get"), KEYS, st.just(0)),
    st.tuples(st.just("drop"), KEYS, st.just(0)),
)


@given(st.lists(ASKED, max_size=40), st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_a_memory_is_a_list_by_age(asked, most):
    memory: LruCache[int] = LruCache(most)
    by_age: list[tuple[bytes, int, int]] = []
    for serial, (what, key, nbytes) in enumerate(asked):
        found = next((each for each in by_age if each[0] == key), None)
        rest = [each for each in by_age if each[0] != key]
        if what == "get":
            assert memory.get(key) == (found[1] if found else None)
            by_age = [*rest, found] if found else rest
        elif what == "drop":
            memory.discard(key)
            by_age = rest
        else:
            memory.insert(key, serial, nbytes)
            by_age = [*rest, (key, serial, nbytes)] if nbytes <= most else rest
            while sum(each[2] for each in by_age) > most:
                by_age.pop(0)
        assert memory.nbytes == sum(each[2] for each in by_age) <= most
        assert len(memory) == len(by_age)
        assert [key for key in (b"a", b"b", b"c", b"d") if key in memory] == sorted(each[0] for each in by_age)
    memory.clear()
    assert (len(memory), memory.nbytes, memory.get(b"a")) == (0, 0, None)


def test_what_was_asked_for_stays_before_what_was_not():
    memory: LruCache[str] = LruCache(10)
    for key in (b"a", b"b"):
        memory.insert(key, "value", 5)
    assert memory.get(b"a") == "value"
    memory.insert(b"c", "value", 5)
    assert [key for key in (b"a", b"b", b"c") if key in memory] == [b"a", b"c"]
    assert b"a" in memory  # to look is not to ask
    memory.insert(b"d", "value", 5)
    assert [key for key in (b"a", b"c", b"d") if key in memory] == [b"c", b"d"]


def test_what_is_larger_than_all_there_may_be_takes_nothing_away_but_what_it_replaces():
    memory: LruCache[str] = LruCache(10)
    memory.insert(b"a", "first", 4)
    memory.insert(b"b", "second", 4)
    memory.insert(b"a", "larger", 11)
    assert (memory.get(b"a"), memory.get(b"b"), memory.nbytes) == (None, "second", 4)


def test_a_value_takes_something():
    with pytest.raises(AssertionError, match="no bound"):
        LruCache(10).insert(b"a", "", 0)
