"""Lists of hot words whose callers have left: what was not begun is not made, and keeps nobody waiting; a long one
keeps no short one waiting; and of all that are kept there are so many, and so much."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from asr_serve.engine.cache import biasing_lists
from asr_serve.engine.seq2seq import biasing
from asr_serve.engine.streaming import biasing as streams

WAIT_S = 20


class Maker:
    """The first list takes until `go` is set; what was made, in order."""

    def __init__(self) -> None:
        self.begun, self.go, self.made = threading.Event(), threading.Event(), list[str]()

    def __call__(self, bias: str, *_: Any) -> str:
        self.begun.set()
        assert self.go.wait(WAIT_S)
        self.made.append(bias)
        return bias


class OfStreams:
    def __init__(self, make: Maker, call: Callable[[Callable[[], None]], None]) -> None:
        self.spelling = streams.StreamBiasingCompiler(make, lambda number, error: None)  # type: ignore[arg-type]
        self.spelling.attach(SimpleNamespace(call=call))  # type: ignore[arg-type]

    def come(self, number: int, bias: str) -> None:
        self.spelling.compile(number, SimpleNamespace(bias=bias, hot=None))  # type: ignore[arg-type]

    @property
    def waiting(self) -> int:
        return len(self.spelling.waiting_streams)


class OfRequests:
    def __init__(self, make: Maker, call: Callable[[Callable[[], None]], None]) -> None:
        self.spelling = biasing.BiasingQueue(lambda text: [1], lambda tokens: "", call, lambda ids, error: None)

    def come(self, number: int, bias: str) -> None:
        asked = SimpleNamespace(id=number, options=SimpleNamespace(bias=bias, beam=1), hotwords=None)
        self.spelling.when_ready(asked, lambda: None)  # type: ignore[arg-type]

    @property
    def waiting(self) -> int:
        return self.spelling.waiting


@pytest.mark.parametrize("kind", [OfStreams, OfRequests])
def test_lists_that_nobody_waits_for_are_not_made(kind, monkeypatch: pytest.MonkeyPatch):
    make, jobs = Maker(), list[Callable[[], None]]()
    monkeypatch.setattr(biasing.RescoringList, "build", make)
    some = kind(make, jobs.append)
    some.come(0, "first")
    assert make.begun.wait(WAIT_S)
    threads = some.spelling._lists._threads
    for number in range(1, 100):
        some.come(number, f"left {number}")
        some.spelling.cancel(number)
    some.come(100, "shared")
    some.come(101, "shared")
    some.spelling.cancel(100)
    some.come(102, "again")
    some.spelling.cancel(102)
    some.come(103, "again")
    some.spelling.cancel(0)  # it is being made
    assert len(some.spelling._lists) <= 3
    assert some.waiting == 2
    make.go.set()
    threads[True].submit(int).result(WAIT_S)
    some.spelling.close()
    for job in jobs:
        job()
    assert make.made == ["first", "shared", "again"]
    assert some.waiting == 0


@pytest.mark.parametrize("kind", [OfStreams, OfRequests])
def test_a_long_list_keeps_no_short_one_waiting(kind, monkeypatch: pytest.MonkeyPatch):
    make, jobs, long = Maker(), list[Callable[[], None]](), "long" * biasing_lists.SHORT_LIST_CHARACTERS

    def made(bias: str, *_: Any) -> str:
        return make(bias) if bias == long else bias

    monkeypatch.setattr(biasing.RescoringList, "build", made)
    some = kind(made, jobs.append)
    some.come(0, long)
    assert make.begun.wait(WAIT_S)
    some.come(1, "short")
    some.spelling._lists.get_or_build("short", str).result(WAIT_S)
    assert not make.made
    make.go.set()
    some.spelling.close()
    for job in jobs:
        job()
    assert some.waiting == 0


def test_so_many_lists_are_kept_and_so_many_characters():
    some = biasing_lists.BiasingListCache[int]()
    for number in range(3 * biasing_lists.MAX_CACHED_LISTS):
        some.get_or_build(f"{number}", int)
    assert len(some) == biasing_lists.MAX_CACHED_LISTS
    large = biasing_lists.MAX_CACHED_CHARACTERS // 2
    first, _, last = (some.get_or_build(letter * large, int) for letter in "abc")
    assert len(some) == 2
    assert some.characters <= biasing_lists.MAX_CACHED_CHARACTERS
    assert some.get_or_build("c" * large, int) is last
    assert some.get_or_build("a" * large, int) is not first, "it was let go"
    alone = some.get_or_build("d" * (biasing_lists.MAX_CACHED_CHARACTERS + 1), int)
    assert some.get_or_build("d" * (biasing_lists.MAX_CACHED_CHARACTERS + 1), int) is alone, (
        "the one that is asked for is kept"
    )
    assert len(some) == 1
    some.close()
